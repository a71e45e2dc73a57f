"""train/console.py: what a terminal shows of a run, and what goes to the log only."""

import os
import subprocess
import sys

import pytest

from tests.running import ROOT
from tests.terminal import show
from train import console

SPEAK = """
import logging
from train import console
console.start_logging()
log = logging.getLogger("any")
log.info("as it is")
log.info("for the log", extra=console.LOG_ONLY)
log.info("attention=sdpa 1 2 3", extra=console.for_terminals("short"))
log.warning("a warning of %s", "training")
log.info("Next:\\n    make sample RUN_NAME=%s", 80 * "x")
log.info("the optimizer's learning rate is one of a kind and/or %s", 80 * "y")
"""


def test_a_terminal_shows_less_than_a_pipe_gets():
    command = [sys.executable, "-c", SPEAK]
    for columns, broken in (
        (60, "and/or"),
        (40, "is one of\n  a kind and/or"),
        (200, "and/or " + 80 * "y"),
    ):
        code, screen = show(command, os.environ, columns)
        assert code == 0
        shown = screen.split("\nNext:\n")
        assert shown[0] == "as it is\nshort\na warning of training"
        indented, _, sentence = shown[1].partition("\n")
        assert indented == f"    make sample RUN_NAME={80 * 'x'}"
        assert broken in sentence and sentence.endswith(f"{80 * 'y'}\n")
        assert all(len(line) <= columns or line == f"  {80 * 'y'}" for line in sentence.split("\n"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "as it is",
        "for the log",
        "attention=sdpa 1 2 3",
        "a warning of training",
        "Next:",
        f"    make sample RUN_NAME={80 * 'x'}",
        f"the optimizer's learning rate is one of a kind and/or {80 * 'y'}",
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a line of twenty co.", ["a line of twenty co."]),
        ("two  blanks, 20 col.", ["two  blanks, 20 col."]),
        ("a line of twenty co. and more", ["a line of twenty co.", "  and more"]),
        ("a line of twenty-one.", ["a line of", "  twenty-one."]),
        ("日本語の文 は長い です", ["日本語の文 は長い", "  です"]),
        ("  one that is indented stays", ["  one that is indented stays"]),
    ],
)
def test_lines_end_at_blanks_within_the_columns(monkeypatch, text, lines):
    monkeypatch.setenv("COLUMNS", "20")
    assert console.wrap(text).split("\n") == lines


def test_control_characters_and_what_the_encoding_lacks_are_escaped():
    speak = SPEAK + 'log.info("file\\x1b[2J\\r.txt: %s\\nnext", "é")'
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", speak]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nfile\\x1b[2J\\r.txt: \\xe9\nnext\n")
    assert not done.stderr
