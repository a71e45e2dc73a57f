"""settings/terminal.py: lines for people, wrapped on a terminal alone."""

import os
import subprocess
import sys

import pytest

from settings import terminal
from tests.running import ROOT
from tests.terminal import show


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("two  blanks, 20 col.", ["two  blanks, 20 col."]),
        ("a line of twenty co. and/or more", ["a line of twenty co.", "  and/or more"]),
        ("a line of twenty-one.", ["a line of", "  twenty-one."]),
        (f"a {30 * 'b'}", ["a", f"  {30 * 'b'}"]),
        ("  an indented line wraps", ["  an indented line", "    wraps"]),
        ("  make sample PROMPT=Once", ["  make sample PROMPT=Once"]),
    ],
)
def test_lines_end_at_blanks_within_the_columns(monkeypatch, text, lines):
    monkeypatch.setenv("COLUMNS", "20")
    assert terminal.wrap(text).split("\n") == lines


@pytest.mark.parametrize(
    ("command", "settings", "code"),
    [
        (["settings", "check"], {"NODES": "3", "SITES": "2", "BATCH_TOKENS": "many"}, 64),
        (["record.status", "status"], {"RUN_NAME": "a-run-that-nobody-has-ever-trained"}, 78),
        (["k8s.jobs", "stop"], {"RUN_NAME": "a-run-that-nobody-has-ever-trained"}, 78),
        (["train.launcher"], {"NODES": "3", "SITES": "2", "BATCH_TOKENS": "many"}, 64),
        (["train.generate.sample"], {"RUN_NAME": "none", "SAMPLE_TOKENS": "0"}, 64),
    ],
)
def test_messages_break_between_words_on_a_terminal_alone(command, settings, code):
    words = [sys.executable, "-m", *command]
    environment = os.environ | settings
    ended, screen = show(words, environment, 50)
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert ended == done.returncode == code, text
    assert max(map(len, text.splitlines())) > 50
    assert screen.split() == text.split()
    assert all(len(line) <= 50 or " " not in line.strip() for line in screen.splitlines()), screen
