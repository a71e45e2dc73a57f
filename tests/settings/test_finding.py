"""settings/finding.py: findings as lines, which of them stop a run, and with what exit code. And how lines wrap."""

import os
import subprocess
import sys

import pytest

from settings.finding import (
    FAIL,
    PASS,
    WARN,
    Finding,
    code_of,
    format_findings,
    from_sentence,
    split,
)
from settings.terminal import wrap
from tests.running import ROOT
from tests.terminal import show

GPUS = Finding("gpus", FAIL, "no GPU is visible", "set DEVICE=cpu", 64)
DISK = Finding("disk", FAIL, "the disk is full", "remove old runs")
CLOCK = Finding("clock", WARN, "the clock is not synchronized")
HUB = Finding("hub", PASS, "the hub answers")


def test_a_sentence_is_split_at_its_first_semicolon():
    assert from_sentence("disk", FAIL, "it is full; remove a; remove b", 64) == Finding(
        "disk", FAIL, "it is full", "remove a; remove b", 64
    )
    assert from_sentence("disk", WARN, "it is full") == Finding("disk", WARN, "it is full")


def test_names_stand_in_one_column_and_a_fix_only_where_there_is_one():
    assert list(format_findings([DISK, CLOCK])) == [
        "FAIL  disk   the disk is full; remove old runs",
        "WARN  clock  the clock is not synchronized",
    ]
    assert list(format_findings([])) == []


def test_allow_fail_lets_failures_pass_by_their_whole_name():
    found = [GPUS, DISK, CLOCK, HUB]
    assert split("", found) == ([GPUS, DISK], [])
    assert split("disk,clock", found) == ([GPUS], [DISK])
    assert split("gpu,disks", found) == ([GPUS, DISK], [])


@pytest.mark.parametrize(
    ("stopping", "code"), [([], 0), ([GPUS], 64), ([DISK], 78), ([GPUS, DISK], 78)]
)
def test_settings_alone_are_64_and_anything_else_78(stopping, code):
    assert code_of(stopping) == code


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("two  blanks, 20 col.", ["two  blanks, 20 col."]),
        ("a line of twenty co. and/or more", ["a line of twenty co.", "  and/or more"]),
        ("a line of twenty-one.", ["a line of", "  twenty-one."]),
        (f"a {30 * 'b'}", ["a", f"  {30 * 'b'}"]),
        ("  an indented line wraps", ["  an indented line", "    wraps"]),
        (f"  {30 * 'b'}", [f"  {30 * 'b'}"]),
        ("  make sample PROMPT=Once", ["  make sample PROMPT=Once"]),
    ],
)
def test_lines_end_at_blanks_within_the_columns(monkeypatch, text, lines):
    monkeypatch.setenv("COLUMNS", "20")
    assert wrap(text).split("\n") == lines


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
