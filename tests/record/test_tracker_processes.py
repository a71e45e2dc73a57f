"""record/trackers/processes.py and wandb_env.py: which trackers are on, and the trainer's side of their processes."""

import json
import os
import subprocess
import sys

import pytest

from record import status
from record.run_paths import RunPaths
from record.trackers import processes, wandb_env
from record.trackers.processes import TrackerProcess
from settings import SettingsError
from settings.config import Config
from tests import wandb_file
from tests.running import ROOT, environment, wait_until
from tests.trackers import find_process

KEY = ("0123456789abcdef" * 3)[:40]  # composed here, so that no search for secrets stops at it


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home without any W&B."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


# ---- Which trackers are on


@pytest.mark.parametrize(
    ("mode", "key", "netrc", "expected"),
    [
        ("auto", "", False, "disabled"),
        ("auto", KEY, False, "online"),
        ("auto", "", True, "online"),
        ("online", KEY, False, "online"),
        ("online", "", True, "online"),
        ("offline", "", False, "offline"),
        ("disabled", KEY, True, "disabled"),
    ],
)
def test_the_mode_follows_from_setting_and_key(home, mode, key, netrc, expected):
    if netrc:
        (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    c = Config(wandb_mode=mode, wandb_api_key=key)
    processes.check_trackers(c)
    assert wandb_env.find_mode(c) == expected
    c = Config(wandb_mode=mode, wandb_api_key=key, trackers="trackio")
    assert processes.list_trackers(c) == ["trackio", *["wandb"] * (expected != "disabled")]


def test_an_identity_token_takes_the_place_of_a_key(monkeypatch):
    monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", "/token")
    assert wandb_env.find_mode(Config(wandb_mode="auto")) == "online"
    assert wandb_env.build_environment(Config())["WANDB_IDENTITY_TOKEN_FILE"] == "/token"


def test_online_without_a_key_is_refused():
    with pytest.raises(SettingsError, match="WANDB_MODE=online: there is no key"):
        processes.check_trackers(Config(wandb_mode="online"))


def test_a_key_in_netrc_counts_for_its_own_server_only(home, monkeypatch):
    netrc = home / "mine"
    netrc.write_text(f"machine wandb.lab:8080 login user password {KEY}\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert wandb_env.find_key(Config()) == ""
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.lab:8080")
    assert wandb_env.find_key(Config()) == KEY
    for damaged in (b"machine\n", b"\xff\n"):
        netrc.write_bytes(damaged)
        assert wandb_env.find_key(Config()) == ""


def test_of_the_variables_of_wandb_only_those_that_cannot_break_a_run_are_passed_on(
    monkeypatch,
):
    for name in ("RUN_ID", "RESUME", "DIR", "NAME", "MODE", "API_KEY", "BASE_URL", "PROJECT"):
        monkeypatch.setenv(f"WANDB_{name}", "x")
    monkeypatch.setenv("MY_WANDB", "x")
    given = wandb_env.build_environment(Config(wandb_mode="offline"))
    assert {name: value for name, value in given.items() if "WANDB" in name} == {
        "WANDB_BASE_URL": "x",
        "WANDB_PROJECT": "x",
        "MY_WANDB": "x",
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
    }
    given = wandb_env.build_environment(Config(wandb_mode="online", wandb_api_key=KEY))
    assert given["WANDB_API_KEY"] == KEY and given["HOME"] == os.environ["HOME"]


# ---- The trainer's side


def start(code, lines):
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    return TrackerProcess("wandb", "run", process, lines.append)


@pytest.mark.parametrize("code", [0, processes.REPORTED])
def test_trackers_that_end_by_themselves_are_waited_for_and_heard_to_the_end(code):
    lines: list[str] = []
    program = f"import sys; print('a'); sys.stdin.read(); print('b'); sys.exit({code})"
    trackers = [start(program, lines), start(program, lines)]
    processes.close_trackers(trackers, 60)
    assert sorted(lines) == ["W&B: a", "W&B: a", "W&B: b", "W&B: b"]


def test_a_tracker_that_does_not_end_is_left_behind_and_its_death_reported():
    lines: list[str] = []
    slow = start("import time; time.sleep(600)", lines)
    processes.close_trackers([slow], 0.1)
    slow.process.kill()
    processes.close_trackers([slow], 60)
    assert lines == [
        f"W&B: not finished. Process {slow.process.pid} continues in the background. "
        "To send the run later: make mirror RUN_NAME=run",
        "W&B: its process died with exit code -9. To send the run later: make mirror RUN_NAME=run",
    ]


def test_a_tracker_that_cannot_be_started_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    lines: list[str] = []
    c = Config(wandb_mode="offline")
    assert processes.start_trackers(c, RunPaths(tmp_path), lines.append) == []
    assert len(lines) == 1 and "W&B: cannot be started" in lines[0]


# Why there is a pipe: a trainer that is killed writes no end to its record, and leaves no other trace.
KILLED = """
import os, signal, sys
from record.run_paths import RunPaths
from record.trackers.processes import start_trackers
from settings import ROOT, load_config
c = load_config()
paths = RunPaths.of_node(c, ROOT)
start_trackers(c, paths, print)
sys.stdin.readline()
with open(paths.metrics, "a") as file:
    file.write('{"schema": 1, "event": "step", "time": 2.0, "step": 10, "loss": 0.5}\\n')
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_tracker_of_a_trainer_that_is_killed_sends_what_it_left_and_ends(
    tmp_path,
):
    run = tmp_path / "run"
    run.mkdir()
    with open(run / "metrics.jsonl", "w") as file:
        for event in ("end", "resume", "step"):  # an attempt that ended, and one that goes on
            record = {"schema": 1, "event": event, "time": 1.0, "step": 5, "loss": 0.25}
            file.write(json.dumps(record) + "\n")
    env = environment(tmp_path, {}, WANDB_MODE="offline")
    trainer = subprocess.Popen(
        [sys.executable, "-c", KILLED], env=env, cwd=ROOT, stdin=subprocess.PIPE
    )
    wait_until(lambda: wandb_file.read_rows(run), 60)
    trainer.communicate(b"\n")
    assert trainer.returncode == -9
    wait_until(lambda: not find_process(run / ".wandb.lock"), 60)
    assert [row["step"] for row in wandb_file.read_rows(run)] == [5, 10]
    (path,) = wandb_file.list_files(run)
    assert wandb_file.read_messages(path)[-1].exit.exit_code == 1


# ---- make status


def test_status_says_where_the_run_is_at_wandb(tmp_path):
    paths = RunPaths(tmp_path)
    assert status.describe_wandb(paths) == ""
    for where in (None, "https://x/runs/1"):
        paths.wandb_state.write_text(json.dumps({"where": where}))
        assert status.describe_wandb(paths).endswith(f" W&B: {where}" if where else "")
