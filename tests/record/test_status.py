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
from typing import Any

import pytest

from record import status
from record.metrics import Recorder
from record.run_paths import RunPaths
from record.status import Status
from settings import ROOT
from settings.config import Config

# A stand-in for a trainer: holds the lock as train/main.py does, and obeys or ignores a signal.
HOLDER = """
import fcntl, os, signal, sys
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(f"pid {os.getpid()} on {sys.argv[3]}{sys.argv[5]}")
lock.flush()
signal.signal(int(sys.argv[4]), signal.SIG_IGN if sys.argv[2] == "deaf" else signal.SIG_DFL)
print("held", flush=True)
signal.pause()
"""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "a-run").mkdir()
    return RunPaths(tmp_path / "a-run")


def write_status(paths: RunPaths, **facts: object) -> None:
    paths.folder.mkdir(exist_ok=True)
    facts = {
        "schema": 1,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "phase": "training",
        "since": 1.0,
        "heartbeat": time.time(),
        "step": 7,
        "last_step": 20,
        "loss": 2.5,
    } | facts
    paths.status.write_text(json.dumps(facts))


def hold(
    paths: RunPaths,
    processes: list[subprocess.Popen],
    manner: str = "good",
    host: str | None = None,
    lock: Path | None = None,
    number: int = signal.SIGINT,
    says: str = "",
) -> subprocess.Popen:
    """A process that holds the run."""
    command = [
        sys.executable,
        "-c",
        HOLDER,
        str(lock or paths.lock),
        manner,
        host or socket.gethostname(),
        str(int(number)),
        says,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_what_cannot_be_looked_into_is_held_by_nobody() -> None:
    code = "import os, sys; from record import status; os.setuid(65534); print(*map(status.is_locked, sys.argv[1:]))"
    with tempfile.TemporaryDirectory() as closed:  # to other users
        paths = [f"{closed}/run.lock", f"{__file__}/run.lock", "/none/run.lock"]
        done = subprocess.run(
            [sys.executable, "-c", code, *paths], capture_output=True, text=True, cwd=ROOT
        )
    assert done.stdout == "False False False\n", done.stderr


# ---- Writing


def test_a_status_says_phase_since_when_and_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(
        status, "time", types.SimpleNamespace(time=lambda: 1e9 + now[0], monotonic=lambda: now[0])
    )
    state = Status(tmp_path / "STATUS.json", active=True, run="r", last_step=20)
    state.phase("training", step=3)
    now[0] += 5
    state.beat(step=4, loss=2.0)
    assert status.read(tmp_path / "STATUS.json") == {
        "schema": 1,
        "pid": os.getpid(),
        "run": "r",
        "last_step": 20,
        "phase": "training",
        "since": 1e9 + 100,
        "step": 4,
        "loss": 2.0,
        "heartbeat": 1e9 + 105,
    }


def test_a_phase_that_is_entered_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(
        status, "time", types.SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    )
    state = Status(tmp_path / "STATUS.json", active=True)
    seen = []
    for name in (
        "waiting for peers 1/12",
        "waiting for peers 2/12",
        "waiting for peers 11/12",
        "data",
        "data",
        "training",
        "data",
    ):
        now[0] += 10
        state.phase(name)
        seen.append(status.read(state.path)["since"])
    assert seen == [110, 110, 110, 140, 140, 160, 170]


def test_beats_within_a_second_are_not_written_but_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Status(tmp_path / "other", active=False).phase("training")  # of another rank: writes nothing
    assert list(tmp_path.iterdir()) == []
    now = [100.0]
    monkeypatch.setattr(
        status, "time", types.SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    )
    state = Status(tmp_path / "STATUS.json", active=True)
    state.phase("training")
    seen = []
    for step in range(1, 31):
        now[0] += 0.1
        state.beat(step=step)
        seen.append(status.read(state.path).get("step"))
    assert len(set(seen) - {None}) in (2, 3)  # three seconds
    state.phase("done")
    assert status.read(state.path)["step"] == 30


def test_a_status_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "STATUS.json"
    state = Status(path, active=True)
    state.phase("data")
    before = path.read_bytes()
    replaced: list[bytes] = []
    replace = os.replace

    def look(source: Path, target: Path) -> None:
        assert path.read_bytes() == before
        replaced.append(Path(source).read_bytes())
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    state.phase("training")
    assert replaced == [path.read_bytes()] and json.loads(replaced[0])["phase"] == "training"
    assert [p.name for p in tmp_path.iterdir()] == ["STATUS.json"]


def test_a_disk_that_takes_no_status_is_said_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = Status(tmp_path / "STATUS.json", active=True)
    state.phase("data")

    def no_space(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[:5])  # as much as there was room for
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", no_space)
        state.phase("training", step=1)
        state.phase("saving", step=2)
    assert [p.name for p in tmp_path.iterdir()] == ["STATUS.json"]
    assert status.read(state.path)["phase"] == "data"
    assert caplog.text.count("STATUS.json: cannot be written (No space left on device)") == 1
    state.phase("training")
    assert status.read(state.path)["step"] == 2


def strange(path: Path, kind: str) -> None:
    """Put something at a path that no run of ours writes."""
    texts = {
        "empty": b"",
        "zeros": bytes(40),
        "torn": b'{"phase": "tra',
        "list": b"[1, 2]",
        "nested": b"[" * 10_000 + b"]" * 10_000,
        "not text": b"\xff",
    }
    if kind in texts:
        path.write_bytes(texts[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("empty", "STATUS.json is empty"),
        ("zeros", "STATUS.json is empty"),
        ("torn", "STATUS.json is damaged: it is not JSON"),
        ("list", "STATUS.json is damaged: it is not a JSON object"),
        ("nested", "STATUS.json is damaged: it is not JSON"),
        ("not text", "STATUS.json is damaged: it is not JSON"),
        ("folder", "STATUS.json is not a file"),
        ("pipe", "STATUS.json is not a file"),
        ("loop", "STATUS.json cannot be read (Too many levels of symbolic links)"),
    ],
)
def test_a_run_with_a_strange_status_is_shown_from_its_record(
    paths: RunPaths, kind: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    strange(paths.status, kind)
    assert status.read(paths.status) == {}
    assert status.describe(paths).split(maxsplit=1) == ["a-run", f"not started  ({words})"]
    recorder = Recorder(paths, True, 0, 20, 5)
    recorder.event("step", 7, 0, loss=2.5)
    monkeypatch.setenv("RUNS_DIR", str(paths.folder.parent))
    for event, phase in (("checkpoint", "killed while training"), ("end", "stopped")):
        recorder.event(event, 7, 0, reason="stopped")
        assert status.main(["runs"]) == 0
        assert re.fullmatch(
            rf"a-run +{phase} +step 7  loss 2\.5000.*\({re.escape(words)}; this is from metrics.jsonl\)\n",
            capsys.readouterr().out,
        )


def test_nothing_that_others_wrote_reaches_the_terminal_raw(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_status(paths, phase="\x1b]0;title\x07", host="\x1b[2J", step="\x1b[H", last_step=[1])
    write_status(RunPaths(paths.folder.parent / os.fsdecode(b"b\xff\x1b[1m")), heartbeat="soon")
    (paths.folder.parent / "c").mkdir()
    (paths.folder.parent / "c" / "STATUS.json").symlink_to("STATUS.json")
    monkeypatch.setenv("RUNS_DIR", str(paths.folder.parent))
    assert status.main(["runs"]) == 0
    output = capsys.readouterr().out
    assert output.isascii() and all(line.isprintable() for line in output.splitlines())
    assert [line.split()[0] for line in output.splitlines()] == ["a-run", r"b\udcff\x1b[1m", "c"]
    paths.job.write_bytes(b"pid 1 on h: \x1b[2J\xff")
    with open(paths.job) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status.describe(paths).isprintable()
        paths.status.unlink()
        assert status.describe(paths).isprintable()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_that_others_may_not_read_hides_no_other_run() -> None:
    code = (
        "import os, sys; from record import status; os.setgid(65534); os.setuid(65534); "
        "sys.exit(max(status.main([name]) for name in sys.argv[1:]))"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        for name, mode in (("closed", 0o700), ("open", 0o755)):
            paths = RunPaths(Path(folder) / name)
            paths.folder.mkdir(mode=mode)
            write_status(paths, phase="done")
        hidden = RunPaths(Path(folder) / "hidden")
        hidden.folder.mkdir()
        write_status(hidden)
        os.chmod(hidden.status, 0o600)
        environment = {**os.environ, "RUNS_DIR": folder, "RUN_NAME": "closed"}
        done = subprocess.run(
            [sys.executable, "-c", code, "runs", "status"],
            env=environment,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
    closed, in_hidden, is_open, asked = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        closed.split(maxsplit=1)
        == ["closed", "cannot be read (Permission denied)"]
        == (asked.split(maxsplit=1))
    )
    assert "STATUS.json cannot be read (Permission denied)" in in_hidden
    assert is_open.split()[:2] == ["open", "done"]


# ---- Describing


def test_a_run_is_held_while_a_process_has_its_lock(paths: RunPaths) -> None:
    assert not status.is_held(paths)
    with open(paths.lock, "w") as lock:
        assert not status.is_held(paths)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status.is_held(paths)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert not status.is_held(paths)


HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("facts", "is_held", "line"),
    [
        ({}, True, rf"training +step 7/20  loss 2\.5000  [34] s ago on {re.escape(HOST)}"),
        ({"phase": "evaluating"}, False, r"killed while evaluating step 7/20 .* s ago on .*"),
        ({"phase": "done"}, False, r"done +step 7/20  loss 2\.5000"),
        ({"phase": "stopped"}, False, r"stopped +step 7/20  loss 2\.5000"),
        ({"phase": "crashed"}, False, r"crashed +step 7/20  loss 2\.5000"),
        # nothing is known of a process on another machine
        ({"host": "elsewhere"}, False, r"training +step 7/20 .* s ago on elsewhere"),
        (None, False, "not started"),
    ],
)
def test_a_run_is_described_in_one_line(
    paths: RunPaths, facts: dict | None, is_held: bool, line: str
) -> None:
    if facts is not None:
        write_status(paths, **{"heartbeat": time.time() - 3} | facts)
    with open(paths.lock, "w") as lock:
        if is_held:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert re.fullmatch(rf"a-run +{line}", status.describe(paths))


# ---- Stopping and following


def test_stop_asks_the_process_and_waits_until_it_is_gone(paths: RunPaths, processes: list) -> None:
    process = hold(paths, processes)
    write_status(paths, pid=process.pid)
    text = status.stop(paths, patience_s=20)
    assert process.wait(120) == -signal.SIGINT
    assert text.startswith("a-run")


def test_stop_says_so_when_nothing_runs(paths: RunPaths) -> None:
    write_status(paths, pid=os.getpid())  # which would end this test
    assert status.stop(paths) == "run a-run is not running here"


def test_stop_tells_of_a_process_that_does_not_stop(paths: RunPaths, processes: list) -> None:
    process = hold(paths, processes, "deaf")
    write_status(paths, pid=process.pid)
    with pytest.raises(
        status.StopError, match=f"has not stopped.*pid {process.pid}.*{paths.train_log}"
    ):
        status.stop(paths, patience_s=0.2)
    assert process.poll() is None


def test_stop_signals_nobody_for_a_run_on_another_machine(paths: RunPaths, processes: list) -> None:
    """The lock is seen over a shared disk; its pid is somebody else's here."""
    process = hold(paths, processes, host="elsewhere")
    with pytest.raises(
        status.StopError, match=f"trained on elsewhere .pid {process.pid}.*make stop RUN_NAME=a-run"
    ):
        status.stop(paths, patience_s=1)
    assert process.poll() is None


def test_stop_says_that_a_run_belongs_to_another_user(
    paths: RunPaths, processes: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    hold(paths, processes)
    write_status(paths)

    def not_ours(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", not_ours)
    monkeypatch.setenv("RUNS_DIR", str(paths.folder.parent))
    monkeypatch.setenv("RUN_NAME", "a-run")
    assert status.main(["stop"]) == 1
    monkeypatch.undo()
    assert "run a-run belongs to another user" in capsys.readouterr().err


def test_stop_asks_a_trainer_that_was_started_again_meanwhile(
    paths: RunPaths, processes: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, started = hold(paths, processes), []
    write_status(paths)
    end = os.kill

    def crash(pid: int, number: int) -> None:  # it fails just then, and the launcher starts another
        end(pid, signal.SIGKILL if pid == first.pid else number)
        if pid == first.pid:
            first.wait(120)
            paths.lock.write_text("")
            started.append(hold(paths, processes))

    monkeypatch.setattr(os, "kill", crash)
    status.stop(paths, patience_s=20)
    assert started[0].wait(120) == -signal.SIGINT


def test_a_node_that_is_not_the_first_asks_its_own_job(paths: RunPaths, processes: list) -> None:
    """On a shared disk it sees the lock of the first, whose process is on another machine."""
    own = RunPaths(paths.folder, 1)
    hold(paths, processes, host="elsewhere")
    job = hold(
        paths, processes, lock=own.job, number=signal.SIGTERM, says=": training as node 1 of 2"
    )
    assert own.job != paths.job and own.console_log != paths.console_log
    write_status(paths, host="elsewhere")
    assert "training as node 1 of 2 step 7/20" in status.describe(own)
    status.stop(own, patience_s=20)
    assert job.wait(120) == -signal.SIGTERM and status.is_held(paths)


def test_a_run_may_be_let_go_a_moment_later(paths: RunPaths, processes: list) -> None:
    process = hold(paths, processes)
    began = time.monotonic()
    status.settle(paths, patience_s=0.3)
    assert time.monotonic() - began >= 0.3 and status.is_held(paths)
    process.kill()
    status.settle(paths, patience_s=20)
    assert not status.is_held(paths)


def test_stop_never_asks_a_process_of_an_earlier_attempt(paths: RunPaths, processes: list) -> None:
    """A trainer holds the lock before its first status; until then the pid in STATUS.json may be anyone's by now."""
    bystander = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    processes.append(bystander)
    process = hold(paths, processes)
    write_status(paths, pid=bystander.pid, phase="crashed")
    status.stop(paths, patience_s=20)
    assert bystander.poll() is None
    assert process.wait(120) == -signal.SIGINT


@pytest.fixture
def job(paths: RunPaths, processes: list) -> subprocess.Popen:
    """A stand-in for train/start_node.py, that prepares data."""
    return hold(paths, processes, lock=paths.job, number=signal.SIGTERM, says=": preparing data")


def test_a_job_that_prepares_data_says_so_whatever_the_last_attempt_said(
    paths: RunPaths, job
) -> None:
    assert status.describe(paths).split() == ["a-run", "preparing", "data"]
    write_status(paths, phase="stopped")
    assert re.fullmatch(r"a-run +preparing data +step 7/20  loss 2\.5000", status.describe(paths))
    with open(paths.lock, "w") as lock:  # its trainer speaks for itself
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_status(paths, phase="training")
        assert "training" in status.describe(paths)


def test_a_job_without_a_trainer_is_stopped(paths: RunPaths, job) -> None:
    assert status.stop(paths, patience_s=20).split() == ["a-run", "not", "started"]
    assert job.wait(120) == -signal.SIGTERM


def test_attach_shows_what_a_job_says_before_there_is_a_trainer(
    paths: RunPaths, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths.console_log.write_text("tokenizing\n")
    works = iter([True, True, False])
    monkeypatch.setattr(status, "has_job", lambda _: next(works))
    monkeypatch.setattr(time, "sleep", lambda _: paths.train_log.write_text("first step\n"))
    status.attach(paths)
    assert capsys.readouterr().out == "tokenizing\nfirst step\n"


def test_attach_shows_the_whole_log_of_a_run_that_is_over(
    paths: RunPaths, capsys: pytest.CaptureFixture
) -> None:
    paths.train_log.write_text("first\nlast\n")
    status.attach(paths)
    assert capsys.readouterr().out == "first\nlast\n"


# ---- The targets


def test_runs_lists_each_run_and_its_state(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_status(paths, phase="done")
    (paths.folder.parent / "no-run").mkdir()
    monkeypatch.setenv("RUNS_DIR", str(paths.folder.parent))
    assert status.main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].split()[:2] == ["a-run", "done"]


def test_a_target_on_a_run_that_does_not_exist_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("RUN_NAME", "absent")
    for command in ("status", "stop", "attach"):
        assert status.main([command]) == 78
        assert (
            f"there is no run absent in {tmp_path}; make runs lists them" in capsys.readouterr().err
        )


def test_a_target_with_a_bad_setting_ends_with_64(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RUN_NAME", "a b")
    assert status.main(["status"]) == 64
    assert "RUN_NAME=a b" in capsys.readouterr().err


def test_what_the_last_attempt_knew_is_kept_by_whoever_opens_the_status_next(
    tmp_path: Path,
) -> None:
    c, paths = Config(), RunPaths(tmp_path)
    known = {"step": 7, "loss": 2.5, "step_s": 1.5, "save_s": 20.0}
    Status(paths.status, True, **known).phase("crashed", exit_code=1)
    status.of_run(c, paths, active=True).phase("waiting for peers 1/2")  # as the roll call does
    status.of_run(c, paths, active=True).phase("data")
    found = status.read(paths.status)
    assert {key: found[key] for key in known} == known and "exit_code" not in found


def test_a_run_folder_that_cannot_be_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(status.RunFolderError, match=r"file.*cannot be written.*RUNS_DIR"):
        status.hold_run(RunPaths(tmp_path / "file" / "run"))
    with (
        status.hold_run(RunPaths(tmp_path / "run")),
        pytest.raises(
            status.RunFolderError, match=rf"another process trains this run \(pid {os.getpid()} on"
        ),
    ):
        status.hold_run(RunPaths(tmp_path / "run"), patience_s=0.1)


def test_an_attempt_that_ends_badly_says_why_on_one_line(paths: RunPaths) -> None:
    told = Status(paths.status, True)
    told.end(78, "the disk has 2 GiB free;\n  make room " + "x" * 400)
    found = status.read(paths.status)
    assert (found["phase"], found["exit_code"]) == ("crashed", 78)
    assert (
        found["why"].startswith("the disk has 2 GiB free; make room xxx")
        and len(found["why"]) == 300
    )
    Status(paths.status, True).end(75)
    assert "why" not in status.read(paths.status)
