"""train/children.py: exit codes, and signals: the first is answered at once, and reaches a child once."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.running import ROOT, wait_for, wait_until
from train.start_node import ignore_hangup

# Runs a child that reports each SIGTERM, and sends the launcher's process the signals of argv first.
PARENT = """
import os, sys
from train.children import Children
children = Children(lambda: "answered")
for number in sys.argv[2:]:
    os.kill(os.getpid(), int(number))
code = children.run(["bash", "-c", sys.argv[1]], os.environ)
if children.stop_requested:  # whatever is started then is stopped too
    code = children.run(["bash", "-c", sys.argv[1]], os.environ)
print("ended", code, children.stop_requested, flush=True)
"""
COUNTS = 'trap "echo stopped" TERM; echo ready; for i in $(seq 300); do sleep 0.1; done'


def start(out, script, *signals, **popen):
    command = [sys.executable, "-c", PARENT, script, *map(str, signals)]
    with open(out, "w") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, start_new_session=True, **popen)


@pytest.mark.parametrize(("script", "ended"), [("exit 64", 64), ("kill -9 $$", 137)])
def test_the_exit_code_is_a_shells(tmp_path, script, ended):
    start(tmp_path / "out", script).wait(60)
    assert (tmp_path / "out").read_text() == f"ended {ended} False\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_becomes_a_sigterm_of_the_child(tmp_path, number):
    process = start(
        tmp_path / "out",
        "trap 'echo interrupted' INT; trap 'exit 75' TERM; echo ready; sleep 60 & wait",
    )
    wait_for(tmp_path / "out", "ready", seconds=20)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    process.wait(60)
    out = (tmp_path / "out").read_text()
    assert "ended 75 True" in out or "ended 143 True" in out  # the second may have no trap yet
    assert "interrupted" not in out
    os.killpg(process.pid, signal.SIGKILL)  # the sleep


def test_a_request_before_there_is_a_child_reaches_it(tmp_path):
    start(tmp_path / "out", "sleep 60", signal.SIGTERM).wait(60)
    assert (tmp_path / "out").read_text() == "answered\nended 143 True\n"


def test_a_signal_that_was_ignored_before_stays_ignored(tmp_path):
    """As SIGHUP by a detached run, which must outlive its terminal."""
    process = start(tmp_path / "out", "exit 3", signal.SIGHUP, preexec_fn=ignore_hangup)
    process.wait(60)
    assert (tmp_path / "out").read_text() == "ended 3 False\n"


DEAF = f"trap 'echo interrupted' INT; {COUNTS}"


def test_one_press_of_ctrl_c_is_one_request_and_a_second_press_quits(tmp_path):
    """As a terminal sends it: to the whole group, once for each press, within the time in which SIGTERM echoes."""
    out = tmp_path / "out"
    process = start(out, DEAF)
    wait_for(out, "ready", seconds=20)
    os.killpg(process.pid, signal.SIGINT)
    wait_for(out, "answered\nstopped", seconds=20)
    process.send_signal(signal.SIGHUP)  # the terminal is closed meanwhile
    time.sleep(0.5)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    wait_for(out, "Quitting.", seconds=20)
    said = out.read_text().partition("Quitting")[0]
    # The first child is gone: the second is stopped before it traps anything, or is ready.
    wait_until(lambda: re.search("ended|ready", out.read_text().partition("Quitting")[2]), 20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert said.count("answered") == said.count("stopped") == 1 and "interrupted" not in said


def test_a_stop_that_comes_several_times_is_passed_on_once_and_a_later_one_again(tmp_path):
    """As to a whole process group. At the second SIGTERM torchrun leaves its workers behind."""
    out = tmp_path / "out"
    process = start(out, COUNTS)
    wait_for(out, "ready", seconds=20)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    wait_for(out, "stopped", seconds=20)
    time.sleep(0.5)
    assert out.read_text().count("stopped") == 1
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    wait_for(out, "stopped\nstopped", seconds=20)
    os.killpg(process.pid, signal.SIGKILL)
