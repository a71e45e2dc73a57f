"""train/distributed/signals.py: a process that outlives nobody, and one that is asked twice."""

import os
import signal
import subprocess
import sys
import time

import pytest

from settings import ROOT
from train.distributed import signals as interrupt
from train.distributed.signals import Interrupt

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import signal, sys, time
from train.distributed.signals import end_with_parent
if sys.argv[1] == "15":
    signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), sys.exit()))
end_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
''', sys.argv[1]])
print(child.pid, flush=True)
time.sleep(60)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.fault(3)
@pytest.mark.skipif(sys.platform != "linux", reason="a service of Linux")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ends_with_the_one_that_started_it_even_if_that_was_killed(number):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(int(number))],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )
    lines = {parent.stdout.readline().strip() for _ in range(2)}
    (pid,) = (int(line) for line in lines if line.isdigit())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
    assert ("told" in parent.stdout.read()) == (number == signal.SIGTERM)


@pytest.fixture
def handlers():
    """Give back what a test takes of this process's signals."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_asked_again_after_a_while_it_says_its_code_and_ends_at_once(handlers, monkeypatch):
    ends: list[int | str] = []
    this = Interrupt(lambda code, mark: ends.append(f"said {code}{mark}"))
    monkeypatch.setattr(os, "_exit", lambda code: ends.append(code))
    this.training = True
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # one Ctrl-C arrives several times
    assert until(lambda: this.asked == "SIGTERM") and this.asked_at > 0
    assert not until(lambda: bool(ends), 0.3)
    monkeypatch.setattr(interrupt, "PATIENCE_S", 0.0)
    os.kill(os.getpid(), signal.SIGINT)
    assert until(lambda: len(ends) == 2) and ends == ["said 130", 130]
    this.release()


DEAF = """
import datetime, sys, threading
from torch.distributed import TCPStore
from train.distributed import signals as interrupt
interrupt.PATIENCE_S = 0.2
this = interrupt.Interrupt(lambda code, mark: print(code, mark, flush=True))
this.training = sys.argv[1] == "training"
store = TCPStore("127.0.0.1", 0, is_master=True)
threading.Timer(0.5, print, ["waiting"], {"flush": True}).start()  # by when it does
store.wait(["what never comes"], datetime.timedelta(seconds=60))
"""


@pytest.mark.fault(3)
@pytest.mark.parametrize(
    ("when", "signals", "said", "code"),
    [
        ("before", [signal.SIGTERM], "75 ?", 75),
        ("before", [signal.SIGINT], "75 !", 75),
        ("training", [signal.SIGTERM, signal.SIGTERM], "143", 143),
    ],
)
def test_a_process_that_waits_for_ranks_that_are_gone_is_ended_too(when, signals, said, code):
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF, when], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signals[0])
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.3)  # longer than PATIENCE_S
        for number in signals[1:]:
            process.send_signal(number)
    assert process.wait(20) == code and process.stdout.read().split() == said.split()
