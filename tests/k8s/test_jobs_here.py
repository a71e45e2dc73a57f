"""The same commands for a run on this machine: as ever, and those that the cluster brought."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k8s import jobs
from k8s.describe import describe_pod
from record import locks, status
from tests.k8s.running_job import RUN, write_checkpoint, write_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that is over, and the settings that find it; no kubectl can be found."""
    (tmp_path / "empty.env").touch()
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("RUN_NAME", RUN)
    monkeypatch.setenv("ENV_FILE", str(tmp_path / "empty.env"))
    monkeypatch.setattr("k8s.cluster.kubectl.program", lambda: pytest.fail("kubectl was called"))
    return write_run(tmp_path, phase="done")


@pytest.mark.parametrize("command", ["status", "stop"])
@pytest.mark.parametrize("name", [RUN, "absent", "a b"])
def test_what_there_was_before_is_as_it_was(
    run: Path,
    command: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("RUN_NAME", name)
    codes, texts = [], []
    for main in (status.main, jobs.main):
        codes.append(main([command]))
        texts.append(capsys.readouterr())
    assert codes[0] == codes[1] and texts[0] == texts[1]


def test_logs_of_a_run_are_filtered(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert jobs.main(["logs"]) == 0
    assert capsys.readouterr().out == (run / "logs" / "node_0.log").read_text()
    (run / "logs" / "node_0.log").unlink()
    monkeypatch.setenv("ONLY", "metrics")
    assert jobs.main(["logs"]) == 0
    assert capsys.readouterr().out == (run / "train.log").read_text()
    monkeypatch.delenv("ONLY")
    monkeypatch.setenv("NODE_RANK", "2")
    assert jobs.main(["logs"]) == 0 and "node 2: host=c" in capsys.readouterr().out
    monkeypatch.setenv("NODE_RANK", "1")
    assert (
        jobs.main(["logs"]) == 78
        and "NODE_RANK=1: run a-run has no log of that node" in capsys.readouterr().err
    )
    monkeypatch.delenv("NODE_RANK")
    monkeypatch.setenv("ONLY", "errors")
    assert jobs.main(["logs"]) == 0
    assert capsys.readouterr() == ("", f"No errors in the logs in {run}.\n")
    (run / "logs" / "rank_1.log").write_text("2026-11-22 00:41:31,000 rank=1 ValueError: odd\n")
    assert jobs.main(["logs"]) == 0
    assert (
        capsys.readouterr().out
        == "==> logs/rank_1.log <==\n2026-11-22 00:41:31,000 rank=1 ValueError: odd\n"
    )


def test_a_log_of_here_is_followed_until_the_run_is_over(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown, write = threading.Event(), sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: (write(text), shown.set())[0])
    (run / "logs" / "node_0.log").write_text("step=1/2 loss=1\nstep=2")
    with open(run / ".job", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def go_on() -> None:
            shown.wait(20)
            with open(run / "logs" / "node_0.log", "a") as log:
                log.write("/2 loss=1\n")
            fcntl.flock(lock, fcntl.LOCK_UN)

        thread = threading.Thread(target=go_on)
        thread.start()
        assert jobs.main(["logs"]) == 0
        thread.join()
    assert capsys.readouterr().out == "step=1/2 loss=1\nstep=2/2 loss=1\n"


def test_attach_shows_the_console_until_there_is_a_trainer(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    node_log = run / "logs" / "node_0.log"
    node_log.unlink()
    (run / "train.log").unlink()
    (run / "console.log").write_text("tokenizing\n")
    works = iter([True, True, False])
    monkeypatch.setattr(locks, "has_job", lambda _: next(works))
    monkeypatch.setattr(time, "sleep", lambda _: node_log.write_text("first step\nlast"))
    assert jobs.main(["attach"]) == 0
    assert capsys.readouterr().out == "tokenizing\nfirst step\nlast\n"
    monkeypatch.setattr(locks, "has_job", lambda _: False)
    monkeypatch.setenv("ONLY", "metrics")
    assert jobs.main(["attach"]) == 0
    assert capsys.readouterr().out == ""


def test_checkpoints_of_here_are_verified_by_hash(run: Path, capsys: pytest.CaptureFixture) -> None:
    damaged = write_checkpoint(run, 3000) / "__1_0.distcp"
    damaged.write_bytes(
        damaged.read_bytes()[:-1] + b"x" if damaged.read_bytes()[-1:] != b"x" else b"y" * 3001
    )
    assert jobs.main(["checkpoints"]) == 0
    states = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert states["step_0001000"].endswith("whole, all hashes hold")
    assert states["step_0002000"].endswith("whole, all hashes hold, the newest")
    assert states["step_0003000"].endswith("damaged: __1_0.distcp is damaged (its hash differs)")


def test_a_checkpoint_of_another_run_is_not_called_whole(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    """Those of this run name it, or were adopted; here nothing was, and none is named."""
    identity = {"id": "mine", "attempts": ["a"], "adopted": []}
    (run / "config.json").write_text(
        json.dumps({"settings": {}, "attempts": [], "identity": identity})
    )
    assert jobs.main(["checkpoints"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["step_0001000", "step_0002000"]
    assert all(row.endswith("of another run") for row in rows)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ["logs", "attach"])
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_log_that_is_no_file_is_named(
    run: Path, capsys: pytest.CaptureFixture, command: str, put: Callable[[Path], None]
) -> None:
    log = run / "logs" / "node_0.log"
    log.unlink()
    put(log)
    assert jobs.main([command]) == 78
    assert f"{log}: cannot be read (is not a regular file)" in capsys.readouterr().err


@pytest.mark.parametrize("is_running", [False, True])
def test_a_long_log_is_shown_in_pieces(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    is_running: bool,
) -> None:
    monkeypatch.setattr("k8s.logs.MOST_BYTES", 10)
    text = "a short\nand a line that is longer than that\n\nlast"
    (run / "logs" / "node_0.log").write_text(text)
    assert jobs.main(["attach" if is_running else "logs"]) == 0
    assert capsys.readouterr().out.replace("\n", "") == text.replace("\n", "")


def test_describe_tells_settings_and_attempts(
    run: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "config.json").write_text(
        json.dumps(
            {
                "settings": {
                    "PRESET": "gpt2-124m",
                    "LEARNING_RATE": 0.5,
                    "N_LAYER": 12,
                    "MAX_STEPS": None,
                    "OF_LATER": 1,  # of another version
                },
                "attempts": [
                    {
                        "time": time.time() - 3725,
                        "host": "a",
                        "world_size": 2,
                        "device": "H100",
                        "torch": "2.13.0",
                        "git": "0123456789abcdef",
                        "git_dirty": True,
                    },
                    {"time": time.time(), "host": "b"},
                ],
            }
        )
    )
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now)
        assert jobs.main(["describe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "2 attempts" in lines[0]
        and lines[1] == "settings: PRESET=gpt2-124m and LEARNING_RATE=0.5 OF_LATER=1"
    )
    assert lines[2] == (
        "attempt 1: started 1:02:05 ago on a, 2 processes on H100, torch 2.13.0, "
        "commit 0123456789ab with changes"
    )
    (run / "config.json").unlink()
    assert jobs.main(["describe"]) == 78
    assert "is missing, so nothing is known of" in capsys.readouterr().err
    (run / "config.json").write_text('{"settings": {}, "attempts": [1]}')
    assert jobs.main(["describe"]) == 78
    assert "config.json: is " in capsys.readouterr().err


def test_describe_shows_the_conditions_of_a_pod_that_are_not_as_they_should_be() -> None:
    conditions = [
        {"type": "Ready", "status": "True"},
        {"type": "DisruptionTarget", "status": "True", "reason": "Preempted", "message": "by b"},
        {"type": "ContainersReady", "status": "False", "reason": "ContainersNotReady"},
    ]
    pod = {"metadata": {"name": "a-0"}, "spec": {}, "status": {"conditions": conditions}}
    assert list(describe_pod(pod))[1:] == [
        "  DisruptionTarget=True Preempted: by b",
        "  ContainersReady=False ContainersNotReady",
    ]


def test_a_run_of_here_is_not_fetched_and_one_that_is_not_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert jobs.main(["fetch-run"]) == 78 and "WHERE=cluster" in capsys.readouterr().err
    monkeypatch.setenv("RUN_NAME", "absent")
    for command in ("logs", "describe", "checkpoints"):
        assert jobs.main([command]) == 78 and "There is no run absent in" in capsys.readouterr().err
    assert jobs.main(["destroy"]) == 64 and "usage" in capsys.readouterr().err


def test_restart_stops_and_starts_the_script(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(status, "main", lambda argv: done.append(argv) or 0)

    def become(path: str, argv: list[str]) -> None:
        done.append(argv[1:])
        raise SystemExit(0)  # this program is no more

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(os, "chdir", lambda path: None)
    with pytest.raises(SystemExit):
        jobs.main(["restart"])
    assert done == [["stop"], ["-m", "scripts.train"]]
    config = run / "config.json"
    kept = config.read_text()
    config.write_text('{"settings": {"MODEL": "models/x"}}')
    with pytest.raises(SystemExit):
        jobs.main(["restart"])
    assert done.pop() == ["-m", "scripts.train", "finetune"] and done.pop() == ["stop"]
    config.write_text(kept)
    monkeypatch.setattr(status, "main", lambda argv: 1)  # it does not stop
    assert jobs.main(["restart"]) == 1 and len(done) == 2


def test_looking_after_runs_loads_no_torch() -> None:
    code = "import sys, k8s.jobs; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_on_a_machine_of_several_sites_its_own_log_is_shown(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    site = run / "site_2"
    (site / "logs").mkdir(parents=True)
    (site / "logs" / "node_0.log").write_text("of site 2\n")
    for name, value in {"SYNC": "diloco", "NODES": "4", "SITES": "4", "NODE_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    assert jobs.main(["logs"]) == 0 and capsys.readouterr().out == "of site 2\n"
