"""train/faults/watchdog.py: a process that hangs leaves its stacks, says where it stands, and ends."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

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
w = watchdog.Watchdog(folder, rank, "here", at_end=lambda: print("at the end", flush=True))

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
    assert code == watchdog.HUNG == 1
    assert (
        "rank=0 host=here: no progress in step 7 for" in out
        and "in stuck" in out
        and "at the end" in out
    )
    assert "HANGS: rank 0 on here" in out
    stacks = (tmp_path / "hang" / "rank_0.txt").read_text()
    assert "Current thread" in stacks and "in stuck" in stacks


@pytest.mark.fault(19)
def test_a_process_in_which_python_itself_is_stuck_leaves_its_stacks_too(tmp_path):
    assert hang(tmp_path / "hang", 3, "with Python")[0] == -signal.SIGKILL
    (line,) = watchdog.put_away(tmp_path / "hang")
    assert (
        line.startswith("HANGS: rank 3: stuck, and with it Python itself; it is at")
        and "in stuck" in line
    )
    (kept,) = (tmp_path / "hang").iterdir()
    assert str(kept / "rank_3.txt") in line and (kept / "rank_3.txt").exists()


def test_a_hang_that_ends_while_it_is_reported_is_none(tmp_path):
    code, out = hang(tmp_path / "hang", 0, "a while")
    assert code == 0 and "through" in out
    assert "no progress in step 7" in out and "it goes on" in out


class Looks:
    """The times between the watchdog's looks, by a clock of its own; `before` is called ahead of each."""

    def __init__(self, *waits: float, before=lambda look: None):
        self.now, self.waits, self.before, self.look = 0.0, list(waits), before, 0

    def wait(self, seconds):
        if not self.waits:
            return True
        self.before(self.look)
        self.look += 1
        self.now += self.waits.pop(0)
        return False

    def monotonic(self):
        return self.now


def barks(tmp_path, monkeypatch, looks, limit_s):
    """How often it barks at these looks."""
    barked: list[str] = []
    monkeypatch.setattr(Watchdog, "bark", lambda dog, why: barked.append(why))
    dog = Watchdog(tmp_path / "hang", 0, "here")
    dog.release()
    monkeypatch.setattr(watchdog, "time", looks)
    monkeypatch.setattr(dog, "over", looks)
    dog.expect("step 7", limit_s)
    dog.watch()
    monkeypatch.undo()
    return len(barked)


@pytest.mark.fault(44)
@pytest.mark.parametrize(
    ("late_s", "stopped_s", "hangs"),
    [
        (70.0, 70.0, False),
        (100_000.0, 100_000.0, False),
        (70.0, 0.0, True),  # it ran, and a call in C kept the lock
        (1.5, 0.0, True),
    ],
)
def test_time_in_which_the_process_was_stopped_does_not_count(
    tmp_path, monkeypatch, late_s, stopped_s, hangs
):
    """SIGSTOP for longer than a step may take, as the process beside says."""
    monkeypatch.setattr(Watchdog, "ask_stopped", lambda dog: stopped_s)
    look = watchdog.LOOK_S
    looks = Looks(look, look, late_s + look, look, look)
    assert bool(barks(tmp_path, monkeypatch, looks, limit_s=2.0)) is hangs


def test_a_hang_behind_a_stop_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(Watchdog, "ask_stopped", lambda dog: 70.0)
    look = watchdog.LOOK_S
    assert barks(tmp_path, monkeypatch, Looks(look, 70.0, *[look] * 12), limit_s=2.0) > 0


@pytest.mark.parametrize("stopped", ["the process", "both"])
def test_the_process_beside_says_for_how_long_one_was_stopped(stopped):
    process = subprocess.Popen(["sleep", "60"])
    beside = subprocess.Popen(
        [sys.executable, "-I", "-S", watchdog.stuck_python.__file__, str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    both = [process, beside] if stopped == "both" else [process]
    try:
        assert beside.stdin and beside.stdout
        time.sleep(0.5)
        for one in both:
            one.send_signal(signal.SIGSTOP)
        time.sleep(6)
        for one in both:
            one.send_signal(signal.SIGCONT)
        assert float(beside.stdout.readline()) > 3  # in ticks of a second
        beside.stdin.close()
        assert beside.wait(30) == 0
    finally:
        process.kill()
        beside.kill()


def test_a_process_beside_that_was_stopped_keeps_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "KEEPER_S", 0.2)
    dog = Watchdog(tmp_path / "hang", 0, "here")
    dog.keeper.send_signal(signal.SIGSTOP)
    dog.release()
    assert dog.keeper.returncode == -signal.SIGKILL


@pytest.mark.fault(44)
def test_a_process_that_is_stopped_is_not_ended_from_outside(tmp_path):
    """Longer than its Python may be stuck."""
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, tmp_path / "hang", "0", "with Python"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
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


def test_progress_keeps_it_quiet_and_nothing_is_left_behind(tmp_path, monkeypatch):
    """By a clock of our own, at which it looks often."""
    now, looks, barked = [0.0], list[float](), list[str]()
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    monkeypatch.setattr(
        Watchdog, "bark", lambda dog, why: barked.append(why)
    )  # it would end this process
    look = Watchdog.look

    def count(dog, now):
        look(dog, now)
        looks.append(now)

    monkeypatch.setattr(Watchdog, "look", count)
    dog = Watchdog(tmp_path / "hang", 0, "here")
    for _ in range(4):
        dog.expect("step", 60)
        now[0] += 50
        seen, deadline = len(looks), time.monotonic() + 60
        while len(looks) < seen + 2:  # a whole look since then
            assert time.monotonic() < deadline
            time.sleep(0.01)
    dog.release()
    now[0] += 100
    time.sleep(0.1)
    assert barked == [] and not (tmp_path / "hang").exists()


def test_without_a_place_for_stacks_all_else_works(tmp_path):
    (tmp_path / "hang").write_text("in the way")
    dog = Watchdog(tmp_path / "hang", 0, "here")
    dog.expect("step", 60)
    dog.release()


@pytest.fixture
def folder(tmp_path):
    """Stacks of three ranks: the second reads a shard, the others wait for it."""
    wait = (
        'Current thread 0x1 (most recent call first):\n  File "/x/train/faults/watchdog.py", line 9 in bark\n\n'
        'Thread 0x2 (most recent call first):\n  File "/venv/torch/distributed/c10d.py", line 5 in {}\n'
        '  File "/x/train/step.py", line 60 in train_step\n'
    )
    read = wait.replace("/venv/torch/distributed/c10d.py", "/x/train/data/batch.py").format("read")
    for rank, text in enumerate((wait.format("all_reduce"), read, wait.format("all_reduce"))):
        (tmp_path / f"rank_{rank}.txt").write_text(
            f"rank {rank} on host{rank}: no progress in step 7 for 60 s\n{text}"
        )
    (tmp_path / "rank_3.txt").touch()
    return tmp_path


def test_the_rank_that_does_not_merely_wait_is_named_first(folder):
    lines = watchdog.report(folder)
    assert [line.split(" on ")[0] for line in lines] == [
        "HANGS: rank 1",
        "waits for others: rank 0",
        "waits for others: rank 2",
    ]
    assert "it is at /x/train/data/batch.py:5 in read" in lines[0]
    assert "it is at /x/train/step.py:60 in train_step, inside all_reduce" in lines[1]


def test_the_stacks_of_an_attempt_are_kept_out_of_the_way_of_the_next(folder):
    assert len(watchdog.put_away(folder)) == 3
    (kept,) = folder.iterdir()
    assert sorted(path.name for path in kept.iterdir()) == [f"rank_{rank}.txt" for rank in range(3)]
    assert watchdog.put_away(folder) == [] and watchdog.put_away(folder / "absent") == []
