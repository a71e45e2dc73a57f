"""train/console.py: what a terminal shows of a run, and what goes to the log only."""

import io
import os
import subprocess
import sys

from tests.running import ROOT
from tests.terminal import show
from train import console

SPEAK = """
import logging
from train import console
console.start_logging()
log = logging.getLogger("any")
log.info("for the log", extra=console.LOG_ONLY)
log.info("attention=sdpa 1 2 3", extra=console.for_terminals("short"))
log.warning("a warning of %s", "training")
log.info("Next:\\n    make sample RUN_NAME=%s", 80 * "x")
log.info("file\\x1b[2J\\r.txt: %s\\nnext", "é")
"""
COMMAND = [sys.executable, "-c", SPEAK]
NEXT = ["Next:", f"    make sample RUN_NAME={80 * 'x'}"]


def test_a_terminal_shows_less_than_a_pipe_gets():
    code, screen = show(COMMAND, os.environ, 16)
    assert code == 0
    assert screen.splitlines()[:3] == ["short", "a warning of", "  training"]
    assert screen.splitlines()[3:5] == NEXT


def test_control_characters_and_what_the_encoding_lacks_are_escaped():
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(COMMAND, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    lines = ["for the log", "attention=sdpa 1 2 3", "a warning of training", *NEXT]
    assert done.stdout.splitlines() == [*lines, r"file\x1b[2J\r.txt: \xe9", "next"]
    assert not done.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_generated_text_breaks_between_words_on_a_terminal_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    parts = ["Once up", "on a ti", "me,\n", "there was 北京北京北京", f" and {14 * 'x'}.\n"]
    written = {}
    for stream in (Terminal(), io.StringIO()):
        output = console.WrappedText(stream)
        for part in parts:
            output.write(part)
        written[type(stream)] = stream.getvalue()
    assert written[io.StringIO] == "".join(parts)
    lines = written[Terminal].split("\n")
    assert [line.rstrip() for line in lines] == [
        *("Once upon a", "time,", "there was", "北京北京北京", "and"),
        *(12 * "x", "xx.", ""),
    ]


QUIET = """
import time
from train import console
console.QUIET_S = 0.1
console.start_logging()
texts = iter(["", "compiling", "training"])
console.report_quiet(lambda: next(texts, ""))
time.sleep(60)
"""


def test_what_goes_on_is_said_while_nothing_is_logged():
    command = [sys.executable, "-c", QUIET]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(2)]
        process.kill()
    assert lines == ["compiling\n", "training\n"]
