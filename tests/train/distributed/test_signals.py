"""train/distributed/signals.py: a process that outlives nobody, and one that is asked twice."""

import signal
import subprocess
import sys
import time

import pytest

from settings import ROOT

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, signal, sys, time
from train.end_with_parent import end_with_parent
if sys.argv[1] == "15":
    # Not print: the signal may come in the midst of the one below.
    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"told"), os._exit(0)))
end_with_parent(int(sys.argv[1]), int(sys.argv[2]))
print("ready", flush=True)
time.sleep(60)
''', sys.argv[1], str(os.getpid())])
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


TWICE = """
import signal, types
from train.distributed import signals
interrupt = signals.Interrupt(lambda: None)
interrupt.training = True
waits = []
def wait(limit_s):  # the event's lock is held when a second signal comes
    waits.append(limit_s)
    if len(waits) < 3:
        signal.raise_signal(signal.SIGTERM)
interrupt.is_heard = types.SimpleNamespace(wait=wait, set=lambda: None)
signal.raise_signal(signal.SIGTERM)
print(len(waits))
"""


def test_a_second_signal_at_once_does_not_wait_for_the_lock_of_the_first():
    done = subprocess.run(
        [sys.executable, "-c", TWICE], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert done.stdout == "1\n"


DEAF = """
import datetime, sys, threading
from torch.distributed import TCPStore
from train.distributed import signals as interrupt
interrupt.PATIENCE_S = 0.2
this = interrupt.Interrupt(lambda: print("end", flush=True))
this.training = sys.argv[1] == "training"
store = TCPStore("127.0.0.1", 0, is_master=True)
threading.Timer(0.5, print, ["waiting"], {"flush": True}).start()  # by when it does

def tell():
    this.is_heard.wait()
    print(this.asked, flush=True)

threading.Thread(target=tell, daemon=True).start()
store.wait(["what never comes"], datetime.timedelta(seconds=60))
"""


@pytest.mark.fault(3)
@pytest.mark.parametrize(
    ("when", "numbers", "said", "code"),
    [
        ("before", "TERM", "end", 143),
        ("before", "INT", "end", 143),
        ("training", "TERM INT TERM", "", 143),
    ],
)
def test_a_process_that_waits_for_ranks_that_are_gone_is_ended_too(when, numbers, said, code):
    """While it trains a first signal is heeded later, one Ctrl-C arrives several times, and a later one ends it."""
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF, when], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == "waiting\n"
    *at_once, last = numbers.split()
    for name in at_once:
        process.send_signal(signal.Signals[f"SIG{name}"])
    if at_once:
        # Of signals that are pending together the system delivers the lowest number first.
        assert process.stdout.readline() in ("SIGTERM\n", "SIGINT\n")
        time.sleep(0.5)  # longer than PATIENCE_S
        assert process.poll() is None
    process.send_signal(signal.Signals[f"SIG{last}"])
    assert process.wait(20) == code and process.stdout.read().strip() == said
