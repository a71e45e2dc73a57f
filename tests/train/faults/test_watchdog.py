"""train/faults/watchdog.py: a process that hangs leaves its stacks, says where it stands, and ends."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from settings import ROOT
from tests.running import wait_until
from train.faults import watchdog
from train.faults.watchdog import Watchdog

# a process that watches itself; the arguments: folder, rank, what it does then
HANGS = """
import ctypes, logging, os, sys, time
from pathlib import Path
from train.faults import watchdog
logging.basicConfig(format="%(message)s")
folder, rank, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
watchdog.BEHIND_S, watchdog.SIGN_S = 1.0 if what == "with Python" else 30.0, 0.1
watchdog.GATHER_S = 2.0 if what == "a while" else 0.1
w = watchdog.Watchdog(folder, rank, ["here"] * 4, at_end=lambda: print("at the end", flush=True))

def stuck():
    if what == "asleep":
        time.sleep(60)
    if what == "with Python":
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    if what == "a while":
        time.sleep(1.5)
        w.expect("step 8", 60.0)
        time.sleep(4)
        print("through")

w.expect("step 7", 0.5)
stuck()
"""


def hang(folder, rank, what):
    done = subprocess.run(
        [sys.executable, "-c", HANGS, folder, str(rank), what],
        cwd=ROOT,
        text=True,
        timeout=120,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.fault(19)
def test_a_process_that_sleeps_says_where_and_ends_with_the_code_of_a_failure(tmp_path):
    code, out = hang(tmp_path / "hang", 0, "asleep")
    assert code == watchdog.HUNG == 1 and "at the end" in out
    assert re.search(r"rank=0 host=here: no progress in step 7 for .*:\d+ in stuck\n", out)
    assert "HANGS: rank 0 on here" in out
    stacks = (tmp_path / "hang" / "rank_0.txt").read_text()
    assert "Current thread" in stacks and "in stuck" in stacks


@pytest.mark.fault(19)
def test_a_process_in_which_python_itself_is_stuck_leaves_its_stacks_too(tmp_path):
    assert hang(tmp_path / "hang", 3, "with Python")[0] == -signal.SIGKILL
    (line,) = watchdog.quarantine_stacks(tmp_path / "hang")
    (aside,) = (tmp_path / "hang").iterdir()
    path = re.escape(str(aside / "rank_3.txt"))
    assert re.fullmatch(rf"HANGS: rank 3: Python itself is stuck.*:\d+ in stuck \({path}\)", line)


def test_a_hang_that_ends_while_it_is_reported_is_none(tmp_path):
    code, out = hang(tmp_path / "hang", 0, "a while")
    assert code == 0 and "through" in out
    assert "no progress in step 7" in out and "it continues" in out


class Looks:
    """The times between the watchdog's looks, by a clock of its own."""

    def __init__(self, *waits, before=lambda: None):
        self.now, self.waits, self.before = 0.0, list(waits), before

    def wait(self, seconds):
        if not self.waits:
            return True
        self.before()
        self.now += self.waits.pop(0)
        return False

    def monotonic(self):
        return self.now


@pytest.fixture
def dog(tmp_path, monkeypatch):
    """One that remembers what it would report, and looks when it is told to."""
    reports: list[str] = []
    monkeypatch.setattr(Watchdog, "report_hang", lambda dog, why: reports.append(why))
    dog = Watchdog(tmp_path / "hang", 0, ["here"])
    dog.release()
    dog.reports = reports
    return dog


def look(dog, monkeypatch, looks, limit_s):
    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "time", looks)
        patch.setattr(dog, "over", looks)
        dog.expect("step 7", limit_s)
        dog.watch()


@pytest.mark.fault(44)
@pytest.mark.parametrize(
    ("late_s", "stopped_s", "more", "hangs"),
    [
        (70.0, 70.0, 2, False),
        (100_000.0, 100_000.0, 2, False),
        (70.0, 0.0, 2, True),  # it ran, and a call in C kept the lock
        (1.5, 0.0, 2, True),
        (70.0, 70.0, 12, True),  # a hang after a stop
    ],
)
def test_time_in_which_the_process_was_stopped_does_not_count(
    dog, monkeypatch, late_s, stopped_s, more, hangs
):
    """SIGSTOP for longer than a step may take, as the process beside says."""
    monkeypatch.setattr(dog, "ask_stopped", lambda: stopped_s)
    look_s = watchdog.LOOK_S
    look(dog, monkeypatch, Looks(look_s, look_s, late_s + look_s, *[look_s] * more), limit_s=2.0)
    assert bool(dog.reports) is hangs


def test_the_process_beside_says_for_how_long_it_was_stopped(dog, monkeypatch):
    read_end, write_end = os.pipe()
    monkeypatch.setattr(watchdog, "KEEPER_S", 0.0)
    with open(read_end, "rb", buffering=0) as stops, open(write_end, "wb", buffering=0) as keeper:
        monkeypatch.setattr(dog, "stops", stops)
        assert dog.ask_stopped() == 0.0
        keeper.write(b"70.5\n2.0\n")
        assert dog.ask_stopped() == 72.5


def test_progress_keeps_it_quiet_and_nothing_is_left_behind(dog, tmp_path, monkeypatch):
    monkeypatch.setattr(dog, "ask_stopped", lambda: 0.0)
    looks = Looks(50, 50, 50, 50, before=lambda: dog.expect("step 7", 60))
    look(dog, monkeypatch, looks, limit_s=60)
    assert dog.reports == [] and not (tmp_path / "hang").exists()


def test_a_process_beside_that_was_stopped_keeps_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "KEEPER_S", 0.2)
    dog = Watchdog(tmp_path / "hang", 0, ["here"])
    dog.keeper.send_signal(signal.SIGSTOP)
    dog.release()
    assert dog.keeper.returncode == -signal.SIGKILL


@pytest.mark.fault(44)
def test_a_process_that_is_stopped_is_not_ended_from_outside(tmp_path):
    """Longer than its Python may be stuck."""
    command = [sys.executable, "-c", HANGS, tmp_path / "hang", "0", "with Python"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        stacks = tmp_path / "hang" / "rank_0.txt"
        wait_until(stacks.exists)
        process.send_signal(signal.SIGSTOP)
        time.sleep(5)  # of a limit of 0.5 s and 1 s
        assert process.poll() is None and not stacks.read_text()
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == -signal.SIGKILL and "in stuck" in stacks.read_text()
    finally:
        process.kill()


def test_without_a_place_for_stacks_all_else_works(tmp_path):
    (tmp_path / "hang").write_text("in the way")
    dog = Watchdog(tmp_path / "hang", 0, ["here"])
    dog.expect("step", 60)
    dog.release()


STACKS = """rank {rank} on host{rank}: no progress in step 7 for 60 s
Current thread 0x1 (most recent call first):
  File "/x/train/faults/watchdog.py", line 9 in report_hang

Thread 0x2 (most recent call first):
  File "{file}", line 5 in {function}
  File "/x/train/step.py", line 60 in train_step
"""


def test_the_rank_that_does_not_merely_wait_is_named_first_and_stacks_are_kept(tmp_path):
    """The second of three reads a shard, the others wait for it; a fourth left nothing."""
    waits = ("/venv/site-packages/torch/distributed/c10d.py", "all_reduce")
    for rank, (file, function) in enumerate((waits, ("/x/train/data/batch.py", "read"), waits)):
        stacks = STACKS.format(rank=rank, file=file, function=function)
        (tmp_path / f"rank_{rank}.txt").write_text(stacks)
    (tmp_path / "rank_3.txt").touch()
    assert [line.partition(" on ")[0] for line in watchdog.report(tmp_path, ["a"] * 4)] == [
        "HANGS: rank 1",
        "HANGS: rank 3",
        "waits for others: rank 0",
        "waits for others: rank 2",
    ]
    lines = watchdog.quarantine_stacks(tmp_path)
    assert "it is at /x/train/data/batch.py:5 in read" in lines[0]
    assert "it is at /x/train/step.py:60 in train_step" in lines[1]
    (aside,) = tmp_path.iterdir()
    names = sorted(path.name for path in aside.iterdir())
    assert names == [f"rank_{rank}.txt" for rank in range(3)]
    assert (
        watchdog.quarantine_stacks(tmp_path)
        == watchdog.quarantine_stacks(tmp_path / "absent")
        == []
    )


def test_other_files_next_to_the_stacks_are_left_alone(tmp_path):
    """And stacks whose place is taken are not written."""
    (tmp_path / "rank_1.txt").write_text(STACKS.format(rank=1, file="/x/train/a.py", function="f"))
    (tmp_path / "rank_foo.txt").write_text("text")
    (tmp_path / "rank_0 copy.txt").write_text("text")
    (tmp_path / "rank_0.txt").mkdir()
    (tmp_path / "rank_2.txt").symlink_to("absent")
    os.mkfifo(tmp_path / "rank_3.txt")
    others = {path.name for path in tmp_path.iterdir()} - {"rank_1.txt"}
    (line,) = watchdog.quarantine_stacks(tmp_path)
    assert line.startswith("HANGS: rank 1 on host1")
    assert {path.name for path in tmp_path.glob("rank_*")} == others
    for rank in (0, 3):
        Watchdog(tmp_path, rank, ["here"] * 4).release()
    assert {path.name for path in tmp_path.glob("rank_*")} == others


def test_a_changed_limit_is_told_at_once_and_the_same_one_with_the_next_sign(dog, monkeypatch):
    signs = []
    monkeypatch.setattr(dog, "sign", lambda: signs.append(dog.limit_s))
    for limit_s in (60, 60, 5, 5, 60):
        dog.expect("step 7", limit_s)
    assert signs == [60, 5, 60]


@pytest.mark.parametrize(
    ("ranks_here", "named"),
    [
        (2, "HANGS: rank 1 on b left no stack trace"),
        (1, "HANGS: a rank on b, since all ranks here wait"),
    ],
    ids=["the same folder", "a folder on each node"],
)
def test_a_rank_that_cannot_leave_its_stacks_is_named_with_its_host(tmp_path, ranks_here, named):
    """It was stopped, or its machine is gone: the others wait, and leave theirs."""
    for rank in range(ranks_here):
        (tmp_path / f"rank_{rank}.txt").touch()
    waits = ("/venv/site-packages/torch/distributed/c10d.py", "all_reduce")
    stacks = STACKS.format(rank=0, file=waits[0], function=waits[1])
    (tmp_path / "rank_0.txt").write_text(stacks)
    first, second = watchdog.report(tmp_path, ["a", "b"])
    assert first.startswith(named)
    assert second.startswith("waits for others: rank 0")
