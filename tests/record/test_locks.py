"""record/locks.py: who works on a run."""

import fcntl
import os
import subprocess
import sys
import time

import pytest

from record import locks
from record.run_paths import RunPaths
from settings import ROOT

# A job on a run, as train/start_node.py is one, or its trainer.
HOLDER = """
import signal, sys
from record import locks
lock = open(sys.argv[1], "a+")
assert locks.take_lock(lock)
locks.write_holder(lock, sys.argv[2])
signal.signal(int(sys.argv[3]), signal.SIG_IGN if sys.argv[4] == "ignore" else signal.SIG_DFL)
print("held", flush=True)
signal.pause()
"""


def start_holder(processes, lock, number, stage="", answer="end"):
    """Start a process that holds a lock. A signal ends it, or is ignored."""
    command = [sys.executable, "-c", HOLDER, str(lock), stage, str(int(number)), answer]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_run_is_held_as_long_as_its_trainer_lives(tmp_path, processes):
    paths = RunPaths(tmp_path)
    paths.lock.touch()
    assert not locks.is_held(paths)
    process = start_holder(processes, paths.lock, 15)
    assert locks.is_held(paths) and not locks.is_held(RunPaths(tmp_path, node=1))
    began = time.monotonic()
    locks.wait_until_free(paths, patience_s=0.3)
    assert time.monotonic() - began >= 0.3 and locks.is_held(paths)
    process.kill()
    locks.wait_until_free(paths, patience_s=20)
    assert not locks.is_held(paths)


def test_whoever_looks_at_a_lock_for_an_instant_keeps_nobody_from_it(tmp_path, monkeypatch):
    with open(tmp_path / "lock", "w") as looks, open(tmp_path / "lock") as lock:
        fcntl.flock(looks, fcntl.LOCK_SH)
        assert not locks.take_lock(lock, patience_s=0.2)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looks, fcntl.LOCK_UN))
        assert locks.take_lock(lock) and locks.is_locked(tmp_path / "lock")


def test_two_that_look_at_a_lock_at_once_do_not_take_each_other_for_its_holder(tmp_path):
    with open(tmp_path / "lock", "w") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        assert not locks.is_locked(tmp_path / "lock")
        fcntl.flock(looks, fcntl.LOCK_EX)
        assert locks.is_locked(tmp_path / "lock")


def test_a_lock_that_is_a_pipe_is_named(tmp_path):
    paths = RunPaths(tmp_path)
    for path, hold in ((paths.lock, locks.hold_run), (paths.job, lambda p: locks.hold(p.job, "x"))):
        os.mkfifo(path)
        message = f"{path}: cannot be written .is not a regular file.. Choose"
        with pytest.raises(locks.RunFolderError, match=message):
            hold(paths)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_what_cannot_be_looked_into_is_held_by_nobody(tmp_path):
    code = (
        "import os, sys; from record import locks; os.setuid(65534); "
        "print(*map(locks.is_locked, sys.argv[1:]))"
    )
    tmp_path.chmod(0o700)
    paths = [str(tmp_path / "run.lock"), f"{__file__}/run.lock", "/none/run.lock"]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "False False False\n", done.stderr


def test_a_run_folder_that_cannot_be_is_named_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(locks.RunFolderError, match=r"file.*cannot be written.*RUNS_DIR"):
        locks.hold_run(RunPaths(tmp_path / "file" / "run"))
    paths = RunPaths(tmp_path / "run")
    (paths.folder).mkdir()
    paths.lock.write_text("pid 1 on the-host-of-an-attempt-before")
    me = rf"another process trains this run \(pid {os.getpid()} on [^ -]+\)\."
    with locks.hold_run(paths), pytest.raises(locks.RunIsHeld, match=me):
        locks.hold_run(paths, patience_s=0.1)


def test_a_job_tells_its_stage_until_its_trainer_speaks_for_itself(tmp_path, processes):
    paths = RunPaths(tmp_path)
    paths.job.write_text("pid 1 on an-old-host: drawing plots")
    assert locks.read_stage(paths) == ""
    with open(paths.job, "a+") as job:
        assert locks.take_lock(job)
        for stage, shown in (("preparing data", "preparing data"), ("", "starting")):
            locks.write_holder(job, stage)
            assert locks.read_stage(paths) == shown
        locks.hold_run(paths).close()
        with locks.hold_run(paths):
            assert locks.read_stage(paths) == ""
    paths.job.write_bytes(b"pid 1 on h: \x1b[2J\xff")
    assert locks.read_holder(paths.job).isprintable()
