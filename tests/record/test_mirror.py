"""record/trackers/mirror.py and wandb_env.py: which trackers are on, and the trainer's side of their processes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from record import status
from record.run_paths import RunPaths
from record.trackers import mirror, wandb_env
from record.trackers.mirror import Mirror
from settings import SettingsError
from settings.config import Config

KEY = ("0123456789abcdef" * 3)[:40]  # composed here, so that no search for secrets stops at it


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
        ("online", "", False, None),
        ("offline", "", False, "offline"),
        ("offline", KEY, True, "offline"),
        ("disabled", KEY, True, "disabled"),
    ],
)
def test_the_mode_follows_from_setting_and_key(
    home: Path, mode: str, key: str, netrc: bool, expected: str | None
) -> None:
    if netrc:
        (home / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    c = Config(wandb_mode=mode, wandb_api_key=key, trackers="trackio")
    if expected is None:
        with pytest.raises(SettingsError, match="WANDB_MODE=online: there is no key"):
            mirror.check_trackers(dataclasses.replace(c, trackers=""))
    else:
        mirror.check_trackers(dataclasses.replace(c, trackers=""))
        assert wandb_env.find_mode(c) == expected
        assert mirror.list_trackers(c) == ["trackio", *["wandb"] * (expected != "disabled")]


def test_a_key_in_netrc_counts_for_its_own_server_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "mine").write_text(f"machine wandb.lab:8080 login user password {KEY}\n")
    monkeypatch.setenv("NETRC", str(home / "mine"))
    assert wandb_env.find_key(Config()) == ""
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.lab:8080")
    assert wandb_env.find_key(Config()) == KEY
    (home / "mine").write_bytes(b"machine\n")  # damaged
    assert wandb_env.find_key(Config()) == ""
    (home / "mine").write_bytes(b"\xff\n")
    assert wandb_env.find_key(Config()) == ""


def test_of_the_variables_of_wandb_only_those_that_cannot_break_a_run_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def start(code: str, lines: list[str]) -> Mirror:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    return Mirror("W&B", process, lines.append)


def test_mirrors_that_end_by_themselves_are_waited_for_and_heard_to_the_end() -> None:
    lines: list[str] = []
    code = "import sys; print('a'); sys.stdin.read(); print('b')"
    mirrors = [start(code, lines), start(code, lines)]
    mirror.close_mirrors(mirrors, 60)
    assert sorted(lines) == ["a", "a", "b", "b"]
    assert [one.process.wait() for one in mirrors] == [0, 0]


def test_a_mirror_that_does_not_end_is_left_behind() -> None:
    lines: list[str] = []
    slow = start("import time; time.sleep(600)", lines)
    mirror.close_mirrors([slow], 0.1)
    (line,) = lines
    assert slow.process.poll() is None
    assert f"W&B: not finished. Process {slow.process.pid} continues" in line
    assert "`make mirror`" in line
    slow.process.kill()
    mirror.close_mirrors([slow], 60)  # which that one does not hold up
    assert slow.process.wait() == -9 and len(lines) == 1


def test_a_mirror_that_cannot_be_started_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    lines: list[str] = []
    c = Config(wandb_mode="offline")
    assert mirror.start_mirrors(c, RunPaths(tmp_path), lines.append) == []
    assert len(lines) == 1 and "W&B: cannot be started" in lines[0]


# ---- make status


@pytest.mark.parametrize(
    ("state", "files", "words"),
    [
        ({"mode": "online", "url": "https://x/runs/1"}, False, "W&B: https://x/runs/1"),
        ({"mode": "offline", "url": None}, True, "bin/wandb sync {folder}/wandb/offline-run-*"),
        ({"mode": "offline", "url": None}, False, ""),  # the package is missing
        ({"mode": "online", "url": None}, False, ""),
        (None, False, ""),
    ],
)
def test_status_says_where_the_run_is_at_wandb(
    tmp_path: Path, state: dict | None, files: bool, words: str
) -> None:
    paths = RunPaths(tmp_path)
    if files:
        (paths.wandb / "offline-run-20261122_101112-abcd").mkdir(parents=True)
    if state:
        paths.wandb_state.write_text(json.dumps(state))
    line = status.describe_wandb(paths)
    assert words.format(folder=tmp_path) in line and bool(line) == bool(words)
