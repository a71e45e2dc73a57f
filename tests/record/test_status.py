"""record/status.py: what a run says of itself, and the targets that look after runs."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

from record import locks, status
from record.recorder import Recorder
from record.run_paths import RunPaths
from record.status import Status
from settings import ROOT
from settings.config import Config
from tests.record.test_locks import start_holder

HOST = socket.gethostname()


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """The folder of a run, which the settings name."""
    (tmp_path / "a-run").mkdir()
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("RUN_NAME", "a-run")
    return RunPaths(tmp_path / "a-run")


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until `now` is set."""
    clock = types.SimpleNamespace(now=100.0)
    clock.time = clock.monotonic = lambda: clock.now
    monkeypatch.setattr(status, "time", clock)
    return clock


def write_status(paths, **facts):
    known = {
        "host": HOST,
        "phase": "training",
        "heartbeat": time.time(),
        "step": 7,
        "last_step": 20,
        "loss": 2.5,
    }
    text = json.dumps(known | facts)
    paths.status.write_text(text)


def describe(paths):
    """Return the line of a run without its name."""
    name, line = status.describe(paths).split(maxsplit=1)
    assert name == paths.name
    return line


# ---- Writing


def test_a_status_says_phase_since_when_and_that_it_lives(paths, clock):
    state = Status(paths.status, active=True, run="r", last_step=20)
    state.phase("training", step=3)
    clock.now += 5
    state.beat(step=4, loss=2.0)
    assert status.read(paths.status) == {
        "schema": 1,
        "pid": os.getpid(),
        "run": "r",
        "last_step": 20,
        "phase": "training",
        "since": 100,
        "step": 4,
        "loss": 2.0,
        "heartbeat": 105,
    }


def test_the_text_of_the_last_skipped_step_is_shown(paths):
    write_status(paths)
    recorder = Recorder(paths, True, 0, 20, 5)
    assert status.describe_skips(paths) == ""
    text = {"source": "web", "shard": "train_00000.bin", "text": "\x1b[2J\u202ehello"}
    for step, texts in (
        (3, [text]),
        (5, [text, text | {"shard": "a\x07.bin"}, *[text] * 8]),
    ):
        recorder.event("skip", step, 0, reason="loss", texts=texts)
    _, title, *lines = status.describe_skips(paths).splitlines()
    assert "step 5 was skipped (loss)" in title
    assert all(line.startswith("  ") and line.isprintable() for line in lines)
    assert [line.strip() for line in lines[:4]] == [
        r"web train_00000.bin: \x1b[2J\u202ehello",
        r"web a\x07.bin: \x1b[2J\u202ehello",
        r"web train_00000.bin: \x1b[2J\u202ehello",
        r"web train_00000.bin: \x1b[2J\u202ehello",
    ]
    assert len(lines) == 9 and "and 2 more in" in lines[8]
    recorder.event("skip", 6, 0, reason="loss", texts=[])
    assert status.describe_skips(paths) == ""
    recorder.event("rollback", 4, 0, texts=[text], **{"from": 6})
    _, title, line = status.describe_skips(paths).splitlines()
    assert "the run went back from step 6 to 4." in title
    assert line.strip() == r"web train_00000.bin: \x1b[2J\u202ehello"


def test_a_phase_that_is_entered_again_goes_on(paths, clock):
    state = Status(paths.status, active=True)
    since = []
    for name in ("waiting 1/12", "waiting 2/12", "waiting 11/12", "data", "training", "data"):
        clock.now += 10
        state.phase(name)
        since.append(status.read(paths.status)["since"])
    assert since == [110, 110, 110, 140, 150, 160]


def test_beats_within_a_second_are_not_written_but_not_lost(paths, clock):
    Status(paths.status, active=False).phase("training")  # of another rank
    assert not paths.status.exists()
    state = Status(paths.status, active=True)
    state.phase("training")
    for step, now, shown in ((1, 100.9, None), (2, 101.0, 2), (3, 101.9, 2)):
        clock.now = now
        state.beat(step=step)
        assert status.read(paths.status).get("step") == shown
    state.phase("done")
    assert status.read(paths.status)["step"] == 3


def test_a_disk_that_takes_no_status_is_said_once_and_ends_nothing(paths, monkeypatch, caplog):
    state = Status(paths.status, active=True)
    state.phase("data")

    def no_space(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_space)
        state.phase("training", step=1)
        state.phase("saving", step=2)
    assert list(paths.folder.iterdir()) == [paths.status]
    assert status.read(paths.status)["phase"] == "data"
    assert caplog.text.count("STATUS.json: cannot be written (No space left on device)") == 1
    state.phase("training")
    assert status.read(paths.status)["step"] == 2


def test_an_attempt_that_ends_badly_says_why_on_one_line(paths):
    Status(paths.status, True).end(78, "the disk has 2 GiB free;\n  make room " + "x" * 400)
    state = status.read(paths.status)
    assert state["phase"] == "refused"
    assert state["exit_code"] == 78
    assert state["why"].startswith("the disk has 2 GiB free; make room xxx")
    assert len(state["why"]) == 300
    Status(paths.status, True).end(75)
    assert "why" not in status.read(paths.status)


def test_what_the_last_attempt_knew_is_kept_by_whoever_opens_the_status_next(
    paths,
):
    known = {"step": 7, "loss": 2.5, "val_loss": 2.0, "step_s": 1.5, "save_s": 20.0}
    before = Status(paths.status, True, **known)
    before.phase("crashed", exit_code=1)
    for phase in ("waiting for peers 1/2", "data"):
        status.of_run(Config(), paths, active=True).phase(phase)
    state = status.read(paths.status)
    assert state.items() >= known.items()
    assert "exit_code" not in state


# ---- Describing


@pytest.mark.parametrize(
    ("facts", "is_held", "line"),
    [
        ({}, True, rf"training +step 7/20  loss 2\.5000  updated [34] s ago on {re.escape(HOST)}"),
        (
            {"phase": "compiling", "since": 1e9},
            True,
            r"compiling for [\d:]+, step 7/20  loss 2.5000",
        ),
        ({"phase": "evaluating"}, False, r"killed while evaluating step 7/20 .* s ago on .*"),
        ({"phase": "done"}, False, r"done +step 7/20  loss 2\.5000"),
        ({"phase": "stopped"}, False, r"stopped +step 7/20  loss 2\.5000"),
        ({"phase": "crashed"}, False, r"crashed +step 7/20  loss 2\.5000"),
        # nothing is known of a process on another machine
        ({"host": "elsewhere"}, False, r"training +step 7/20 .* s ago on elsewhere"),
        (None, False, "not started"),
    ],
)
def test_a_run_is_described_in_one_line(paths, facts, is_held, line):
    if facts is not None:
        write_status(paths, **{"heartbeat": time.time() - 3} | facts)
    with open(paths.lock, "w") as lock:
        if is_held:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert re.fullmatch(line, describe(paths))


TEXTS = {
    "empty": b"",
    "zeros": bytes(40),
    "torn": b'{"phase": "tra',
    "bytes": b"\xff\xfe",
    "list": b"[1, 2]",
    "nested": b"[" * 10_000 + b"]" * 10_000,
}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("missing", "is missing"),
        ("empty", "is empty"),
        ("zeros", "is empty"),
        ("torn", "is damaged: it is not JSON"),
        ("bytes", "is damaged: it is not JSON"),
        ("list", "is damaged: it is not a JSON object"),
        ("nested", "is damaged: it is not JSON"),
        ("folder", "is not a file"),
        ("pipe", "is not a file"),
        ("loop", "cannot be read (Too many levels of symbolic links)"),
    ],
)
def test_without_its_status_a_run_is_described_by_its_record(paths, kind, fault):
    if kind in TEXTS:
        paths.status.write_bytes(TEXTS[kind])
    elif kind == "folder":
        paths.status.mkdir()
    elif kind == "pipe":
        os.mkfifo(paths.status)
    elif kind == "loop":
        paths.status.symlink_to(paths.status)
    assert status.read(paths.status) == {}
    source = rf".*  \(STATUS.json {re.escape(fault)}; this is from metrics.jsonl\)"
    os.mkfifo(paths.metrics)
    assert re.fullmatch(rf"unknown +step 0{source}", describe(paths))
    paths.metrics.unlink()
    recorder = Recorder(paths, True, 0, 20, 5)
    assert re.fullmatch(rf"unknown +step 0{source}", describe(paths))
    recorder.event("step", 7, 0, loss=2.5)
    assert re.fullmatch(rf"killed while training step 7  loss 2\.5000{source}", describe(paths))
    with open(paths.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert re.fullmatch(rf"training +step 7  loss 2\.5000{source}", describe(paths))
    recorder.event("end", 7, 0, reason="stopped")
    assert re.fullmatch(rf"stopped +step 7  loss 2\.5000{source}", describe(paths))


def test_the_record_is_read_behind_what_is_damaged_at_its_end(paths):
    """As after a power failure, which may leave a block of zeros."""
    recorder = Recorder(paths, True, 0, 20, 5)
    recorder.event("step", 7, 0, loss=2.5)
    with open(paths.metrics, "ab") as file:
        file.write(bytes(200_000) + b"\n")
    assert describe(paths).startswith("killed while training step 7")


def test_nothing_that_others_wrote_reaches_the_terminal_raw(paths, capsys):
    write_status(
        paths,
        phase="\x1b]0;title\x07",
        host="\x1b[2J",
        step="\x1b[H",
        last_step=[1],
    )
    other = RunPaths(paths.folder.parent / os.fsdecode(b"b\xff\x1b[1m"))
    other.folder.mkdir()
    write_status(other, heartbeat="soon")
    (paths.folder.parent / "no-run").mkdir()
    (paths.folder.parent / "loop").symlink_to("loop")
    assert status.main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isascii() and line.isprintable() for line in lines)
    assert [line.split()[0] for line in lines] == ["a-run", r"b\udcff\x1b[1m"]


def test_runs_are_listed_with_validation_loss_date_and_size(paths, capsys):
    write_status(paths, phase="done", heartbeat=1_000_036_000)
    (paths.folder / "checkpoints").mkdir()
    (paths.folder / "checkpoints" / "weights").write_bytes(bytes(2_500_000))
    assert status.main(["runs"]) == 0
    assert re.search(r"loss 2\.5000  2001-09-09  2\.5 MB$", capsys.readouterr().out)
    Status(paths.status, True, phase="done", heartbeat=0).beat(val_loss=3.0)
    assert status.main(["runs"]) == 0
    assert "  validation 3.0000  20" in capsys.readouterr().out
    paths.status.unlink()  # the end of the record has it too
    recorder = Recorder(paths, True, 0, 20, 5)
    recorder.evaluation(5, 0, val_loss=2.0, val_loss_by_source={"a": 9.0})
    recorder.evaluation(6, 0, val_loss=None, error="no time")
    recorder.close()
    with open(paths.metrics, "ab") as file:
        file.write(b'{"event": "eval", "val_loss": 1.0')  # a kill came
    assert status.main(["runs"]) == 0
    assert "  validation 2.0000  20" in capsys.readouterr().out


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_that_others_may_not_read_hides_no_other_run():
    code = (
        "import os, sys, settings.resolve; from record import status; os.setgid(65534); "
        "os.setuid(65534); "
        "sys.exit(max(status.main([name]) for name in ('runs', 'status')))"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        for name in ("closed", "hidden", "open"):
            paths = RunPaths(Path(folder) / name)
            paths.folder.mkdir()
            write_status(paths, phase="done")
            if name == "closed":
                paths.folder.chmod(0o700)
            elif name == "hidden":
                paths.status.chmod(0o600)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RUNS_DIR": folder, "RUN_NAME": "closed"},
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
    closed, hidden, visible, asked = done.stdout.splitlines()
    assert done.stderr == ""
    assert done.returncode == 0
    assert closed.split(maxsplit=1) == ["closed", "cannot be read (Permission denied)"]
    assert asked == closed
    assert "STATUS.json cannot be read (Permission denied)" in hidden
    assert visible.split()[:2] == ["open", "done"]


# ---- Stopping


@pytest.mark.parametrize("pid", [0, 1, 2**40])
def test_stop_asks_no_process_that_cannot_be_of_a_run(paths, monkeypatch, pid):
    """0 would be all processes of the one that asks."""
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a process was killed"))
    with pytest.raises(status.StopError, match=f"pid {pid}"):
        status.ask(paths, pid, socket.gethostname())


def test_a_trainer_whose_lock_was_removed_is_found_by_its_record(paths):
    write_status(paths, pid=os.getpid(), phase="training")
    assert status.find_trainer(paths) == 0
    with open(paths.metrics, "ab"):
        assert status.find_trainer(paths) == os.getpid()
        write_status(paths, pid=2**22 + 1, phase="training")
        assert status.find_trainer(paths) == 0
    write_status(paths, pid="1", phase="training")
    assert status.find_trainer(paths) == 0


def test_stop_asks_the_process_and_waits_until_it_is_gone(paths, processes):
    """A trainer holds the lock before its first status: the pid in STATUS.json may be anyone's by now."""
    write_status(paths, pid=os.getpid(), phase="crashed")
    assert status.stop(paths) == "run a-run is not running here"
    process = start_holder(processes, paths.lock, signal.SIGTERM)
    assert status.stop(paths, patience_s=20).startswith("a-run")
    assert process.wait(120) == -signal.SIGTERM


def test_stop_tells_of_a_process_that_does_not_stop(paths, processes):
    process = start_holder(processes, paths.lock, signal.SIGTERM, answer="ignore")
    words = f"has not stopped.*pid {process.pid}.*{paths.train_log}"
    with pytest.raises(status.StopError, match=words):
        status.stop(paths, patience_s=0.2)
    assert process.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who has a file open")
def test_stop_asks_no_process_that_does_not_work_on_the_run(paths, processes, monkeypatch):
    """As of a lock that a backup script holds, with the pid of an attempt that was killed."""
    other = subprocess.Popen(["sleep", "60"])
    processes.append(other)
    monkeypatch.setattr(status, "ANSWER_S", 0.0)
    with open(paths.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        locks.write_holder(lock, pid=other.pid)
        words = f"names pid {other.pid}, which does not work on it.* fuser {paths.lock}"
        with pytest.raises(status.StopError, match=words):
            status.stop(paths)
        assert other.poll() is None


def test_stop_asks_a_launcher_whose_trainer_holds_the_lock(paths, processes, monkeypatch):
    launcher = subprocess.Popen(["sleep", "60"])
    monkeypatch.setenv("LAUNCHER_PID", str(launcher.pid))
    trainer = start_holder(processes, paths.lock, signal.SIGTERM)
    processes.append(launcher)
    paths.lock.write_text(f"pid {launcher.pid} on {HOST}")
    with pytest.raises(
        status.StopError, match="has not stopped"
    ):  # this launcher passes nothing on
        status.stop(paths, patience_s=0.2)
    assert launcher.wait(120) == -signal.SIGTERM and trainer.poll() is None


@pytest.mark.parametrize(
    ("host", "words"),
    [
        # The lock is seen over a shared disk; its pid is somebody else's here.
        ("elsewhere", r"trained on elsewhere \(pid 7\).*make stop .*RUN_NAME=a-run"),
        (HOST, r"run a-run belongs to another user \(pid 7\)"),
    ],
)
def test_stop_says_why_it_cannot_ask_a_process(
    paths,
    monkeypatch,
    capsys,
    host,
    words,
):
    def refuse(pid, number):
        assert (pid, host) == (7, HOST)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(status, "works_on", lambda pid, paths: True)  # it cannot be looked into
    write_status(paths)
    with open(paths.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"pid 7 on {host}")
        lock.flush()
        assert status.main(["stop"]) == 1
    assert re.search(words, capsys.readouterr().err)


def test_stop_may_come_just_as_the_process_ends(paths, monkeypatch):
    def end(pid, number):
        paths.lock.unlink()
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", end)
    monkeypatch.setattr(status, "works_on", lambda pid, paths: True)
    with open(paths.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"pid 7 on {HOST}")
        lock.flush()
        assert status.stop(paths).startswith("a-run")


def test_a_node_that_is_not_the_first_asks_its_own_job(paths, processes):
    """On a shared disk it sees the lock of the first, whose process is on another machine."""
    own = RunPaths(paths.folder, 1)
    first = start_holder(processes, paths.lock, signal.SIGTERM)
    job = start_holder(processes, own.job, signal.SIGTERM, "training as node 1 of 2")
    write_status(paths, host="elsewhere")
    assert describe(own).startswith("training as node 1 of 2 step 7/20")
    status.stop(own, patience_s=20)
    assert job.wait(120) == -signal.SIGTERM
    assert first.poll() is None


# ---- The targets


@pytest.mark.parametrize("command", ["status", "stop"])
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("absent", 78, "There is no run absent in {folder}. `make runs` lists them."),
        ("a b", 64, "RUN_NAME=a b"),
    ],
)
def test_a_target_without_a_run_says_why(
    paths,
    monkeypatch,
    capsys,
    command,
    name,
    code,
    words,
):
    monkeypatch.setenv("RUN_NAME", name)
    assert status.main([command]) == code
    assert words.format(folder=paths.folder.parent) in capsys.readouterr().err


def test_a_run_that_is_stopped_after_its_trainer_was_killed_is_stopped(paths):
    status.mark_stopped(paths)
    assert not paths.status.exists()
    write_status(paths, phase="training")
    assert describe(paths).startswith("killed while training")
    status.mark_stopped(paths)
    assert describe(paths).startswith("stopped        step 7/20")
    write_status(paths, phase="refused")
    status.mark_stopped(paths)
    assert describe(paths).startswith("refused")


def test_a_mistyped_name_is_answered_with_the_nearest_run(paths, monkeypatch, capsys):
    write_status(paths)
    monkeypatch.setenv("RUN_NAME", f"{paths.name}x")
    assert status.main(["status"]) == 78
    assert f". Did you mean {paths.name}? `make runs`" in capsys.readouterr().err


def test_a_run_in_the_background_that_was_refused_shows_its_last_words(paths, capsys):
    paths.console_log.write_text("one\ntwo\n\x1b[2Jthree\n\nDATA=x: no such file\n")
    assert status.main(["status"], paths) == 0
    first, *words = capsys.readouterr().out.splitlines()
    assert first.split() == [paths.name, "ended", "before", "training"]
    assert [word.strip() for word in words] == ["two", r"\x1b[2Jthree", "DATA=x: no such file"]
    with open(paths.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the trainer has just started
        assert describe(paths) == "not started" and status.describe_end(paths) == ""
    write_status(paths)
    assert status.describe_end(paths) == ""


def test_a_run_that_max_steps_ended_is_not_called_done(paths):
    for phase in ("done", "stopped"):  # or it was started again, and stopped at once
        write_status(paths, phase=phase, step=20, last_step=20, horizon=977)
        assert "stopped at MAX_STEPS=20 of 977, step 20/20" in describe(paths)
    write_status(paths, phase="done", step=20, last_step=20, horizon=20)
    assert describe(paths).startswith("done  ")


def test_what_goes_on_is_told_in_words(tmp_path, clock):
    state = Status(tmp_path / "STATUS.json", active=False)
    assert state.describe_phase() == ""
    state.phase("compiling")
    clock.now += 75
    assert state.describe_phase() == "compiling: 1:15 so far"
    state.phase("training", step=3, last_step=977, loss=8.25)
    assert state.describe_phase() == "training, step 3/977, loss 8.2500"
    state.phase("done")
    assert state.describe_phase() == ""
