"""A run and its tracker at W&B, offline and against a server on the loopback interface that is good or is not."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import wandb_file
from tests.running import ROOT, environment, losses, train, wait_for, wait_until
from tests.trackers import find_process, start
from tests.wandb_server import MANNERS, server

KEYS = [("0123456789abcdef" * 3)[:40], "wandb_v1_" + "aB3_" * 19 + "xyz"]

# Takes 15 steps, and waits there until the file of its argument exists.
HELD = """
import pathlib, sys, time
from train import loop, main
step, go, calls = loop.train_step, pathlib.Path(sys.argv[1]), []
def held(*args, **kwargs):
    calls.append(1)
    while len(calls) > 15 and not go.exists():
        time.sleep(0.05)
    return step(*args, **kwargs)
loop.train_step = held
sys.exit(main.main())
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    """The losses of a run without W&B."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert "W&B" not in train(environment(folder, data))
    assert not list((folder / "run").rglob("*wandb*"))
    return losses(folder / "run")


def online(there, key=KEYS[0], mode="online"):
    """Return the settings with which a run goes to a server."""
    return {
        "WANDB_BASE_URL": there.url,
        "WANDB_API_KEY": key,
        "WANDB_MODE": mode,
    }


def find_text(text, folder):
    """Return the files that hold a text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def wait_until_gone(run):
    """Wait until no process sends the run to W&B."""
    wait_until(lambda: not find_process(run / ".wandb.lock"), 60)


def find_lines(out):
    """Return what was printed of W&B."""
    return [line for line in out.splitlines() if "W&B: " in line]


def write_record(run, first, last, *events):
    """Append steps to a record, and these events after them."""
    run.mkdir(exist_ok=True)
    with open(run / "metrics.jsonl", "a") as file:
        for step in range(first, last + 1):
            write_event(file, "step", step)
        for event in events:
            write_event(file, event, last)


def write_event(file, event, step):
    values = {"loss": 0.25} if event == "step" else {"val_loss": 0.5, "reason": "stopped"}
    record = {
        "schema": 1,
        "event": event,
        "time": 100.0 + step,
        "step": step,
    } | values
    file.write(json.dumps(record) + "\n")


def send(run, **env):
    """Send a record to its end."""
    process = start(sys.executable, "wandb", run, **env)
    process.communicate(timeout=120)
    assert process.returncode == 0


def read_steps(there):
    """Return the steps of the only run that a server has."""
    (run,) = there.lines
    return [row.get("step") for row in there.read_history(run)]


# ---- Offline


def test_a_run_offline_is_the_same_and_leaves_no_secret(tmp_path, data, undisturbed):
    run = tmp_path / "run"
    harmful = {f"WANDB_{name}": "must" for name in ("RUN_ID", "RESUME", "NAME", "DIR")}
    settings = {
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": KEYS[0],
        "DONE_S": 120,
    }
    out = train(environment(tmp_path, data, **settings) | harmful)
    assert losses(run) == undisturbed
    (line,) = find_lines(out)
    assert f"wandb sync {run}/wandb/offline-run-*" in line

    rows = wandb_file.read_rows(run)
    steps = {row["step"]: row["train/loss"] for row in rows[:-1]}
    assert steps == {step: undisturbed[step][0] for step in (1, *range(5, 41, 5))}
    assert "val/loss" in rows[-1]
    (path,) = wandb_file.list_files(run)
    messages = {m.WhichOneof("record_type"): m for m in wandb_file.read_messages(path)}
    about = messages["run"].run
    assert (about.project, about.entity, about.display_name) == ("pure-transformer", "", "run")
    assert about.run_id == json.loads((run / "wandb.json").read_text())["id"] != "must"
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    del config["_wandb"]
    assert config == json.loads((run / "config.json").read_text())["settings"]
    assert messages["metric"].metric.step_metric == "step"
    assert messages["exit"].exit.exit_code == 0
    assert "stats" not in messages  # of machines, where no GPU trains
    assert find_text(KEYS[0], run) == []


def holds(pid, path):
    """Return whether a process has opened a file."""
    opened = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            opened.append(link.readlink())
    return path in opened


def test_a_tracker_waits_for_an_earlier_one_of_the_run(tmp_path):
    run = tmp_path / "run"
    write_record(run, 1, 40, "end")
    with open(run / ".wandb.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(sys.executable, "wandb", run)
        wait_until(lambda: holds(process.pid, run / ".wandb.lock"))
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        assert wandb_file.list_files(run) == []
    process.communicate(timeout=60)
    assert [row["step"] for row in wandb_file.read_rows(run)] == list(range(5, 41, 5))


# ---- Online


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_two_attempts_are_one_run_without_doubled_steps(tmp_path, mode):
    run = tmp_path / "run"
    write_record(run, 1, 31)
    with server("good") as there:
        settings = online(there, KEYS[1])
        send(run, **settings | {"WANDB_MODE": mode})
        write_record(run, 17, 40, "eval", "end")
        send(run, **settings | {"WANDB_MODE": mode})
        kinds = [
            m.WhichOneof("record_type")
            for m in wandb_file.read_messages(wandb_file.list_files(run)[-1])
        ]
        assert "preempting" in kinds
        if mode == "offline":  # the command that is printed makes one run of the two files
            subprocess.run(
                [
                    Path(sys.executable).with_name("wandb"),
                    "sync",
                    *run.glob("wandb/offline-run-*"),
                ],
                env=environment(tmp_path, {}, **settings),
                check=True,
                timeout=120,
                cwd=tmp_path,  # where it leaves its own logs
            )
        assert read_steps(there) == [5, 10, 15, 20, 25, 30, 35, 40, 40]
        (one,) = there.lines
        assert there.ended == [(one, 1), (one, 75)]
        url = json.loads((run / "wandb.json").read_text())["where"]
        assert url.startswith("offline") or url in (
            f"{there.url}/a-team/pure-transformer/runs/{one}"
        )
        assert url.startswith("offline") == (mode == "offline")
    assert find_text(KEYS[1], run) == []


def test_a_server_that_answers_again_gets_the_run(tmp_path):
    run = tmp_path / "run"
    write_record(run, 1, 40, "end")
    with server("401") as there:
        process = start(
            sys.executable,
            "wandb",
            run,
            **online(there),
        )
        assert process.stdout and "not sent yet" in process.stdout.readline()
        there.manner = "good"
        process.communicate(timeout=120)
        assert read_steps(there) == list(range(5, 41, 5))


@pytest.mark.slow
@pytest.mark.fault(21)
def test_servers_that_misbehave_change_nothing_of_a_run(tmp_path, data, undisturbed):
    def check(manner):
        folder = tmp_path / manner
        folder.mkdir()
        with server(manner) as there:
            out = train(
                environment(
                    folder,
                    data,
                    UPLOAD_S=1,
                    **online(there),
                )
            )
            lines = find_lines(out)
            assert losses(folder / "run") == undisturbed, manner
            assert "make mirror" in lines[-1] and len(lines) <= 3, out
            assert len(set(lines)) == len(lines) and "Traceback" not in out, out
            wait_until_gone(folder / "run")
        assert json.loads((folder / "run" / "wandb.json").read_text())["where"] is None, manner

    with ThreadPoolExecutor(4) as pool:  # at once, since most of it is waiting
        list(pool.map(check, MANNERS[1:]))
    assert find_text(KEYS[0], tmp_path) == []


@pytest.mark.slow
@pytest.mark.fault(21)
@pytest.mark.parametrize("manner", ["hangs", "500", "killed"])
def test_what_fails_during_training_is_reported_in_one_line_and_changes_nothing(
    tmp_path, data, undisturbed, manner
):
    run = tmp_path / "run"
    go = tmp_path / "go"
    with server("good") as there:
        env = environment(
            tmp_path,
            data,
            UPLOAD_S=5,
            **online(there, mode="auto"),
        )
        command = [
            sys.executable,
            "-c",
            HELD,
            str(go),
        ]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command,
            env=env,
            cwd=ROOT,
            text=True,
            stdout=pipe,
        ) as process:
            wait_for(run / "train.log", "/runs/")
            wait_for(run / "metrics.jsonl", '"step": 15,')
            if manner == "killed":
                os.kill(find_process(run / ".wandb.lock"), signal.SIGKILL)
                wait_for(run / "train.log", "exit code -9")
            there.manner = manner
            go.touch()
            out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        (line,) = [line for line in find_lines(out) if "/runs/" not in line]
        assert "make mirror" in line
        wait_until_gone(run)
    assert losses(run) == undisturbed


def test_what_could_not_be_uploaded_is_uploaded_later(tmp_path, data):
    train(environment(tmp_path, data))
    with server("good") as there:
        env = environment(
            tmp_path,
            data,
            **online(there, mode="auto"),
        )
        assert there.url in train(env, command=[sys.executable, "-m", "record.trackers.processes"])
        assert read_steps(there) == [1, *range(5, 41, 5), 40]
        assert [code for _, code in there.ended] == [0]


@pytest.mark.fault(21)
def test_without_the_package_the_run_says_so_once_and_goes_on(tmp_path, data, undisturbed):
    (tmp_path / "wandb.py").write_text(
        "print('noise', flush=True)\nraise ImportError('not here')\n"
    )
    env = environment(tmp_path, data, WANDB_MODE="offline")
    out = train(env | {"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    (line,) = find_lines(out)
    assert "noise" not in out
    assert "ImportError not here" in line and "make mirror RUN_NAME=run" in line
    assert losses(tmp_path / "run") == undisturbed
