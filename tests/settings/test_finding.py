"""settings/finding.py: findings as lines, which of them stop a run, and with what exit code."""

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
