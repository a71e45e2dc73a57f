"""train/data/progress.py: what a line says, by a clock that is turned by hand; and the bar on a terminal."""

import logging
import math
import os
import pty
import re
import select
import subprocess
import sys
from types import SimpleNamespace

import pytest

from settings import ROOT
from train.data import progress
from train.data.progress import Progress
from train.data.sources.rows import Cursor


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_where_there_is_no_terminal_a_line_comes_now_and_then(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    with Progress("web", 40e6, [10**9], 0) as shown:
        for tenth in range(1, 351):  # 35 s, of 100,000 tokens each tenth
            clock.s = 1000 + tenth / 10
            shown.at(100_000 * tenth, Cursor(0, tenth))
    # 100,000 of 40,000,000 tokens were there when it first looked, after 0.1 s
    assert caplog.messages == [
        "source web: 10.0 of 40.0M tokens, 1.00M tokens/s, 0:30 left",
        "source web: 20.0 of 40.0M tokens, 1.00M tokens/s, 0:20 left",
        "source web: 30.0 of 40.0M tokens, 1.00M tokens/s, 0:10 left",
    ]


def test_what_was_made_before_counts_for_the_share_and_not_for_the_speed(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """30 of 40M tokens were there; 5 M in 10 s leave another 10 s for the other 5."""
    shown = Progress("web", 40e6, [10**9], 30_000_000)
    shown.at(30_000_000, Cursor(0, 5))
    clock.s += 10
    shown.at(35_000_000, Cursor(0, 9))
    assert caplog.messages == ["source web: 35.0 of 40.0M tokens, 0.50M tokens/s, 0:10 left"]


def test_within_a_plain_file_the_text_that_was_read_tells(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one file of 1000 bytes 250 in 10 s: 750 take 30 s."""
    shown = Progress("papers", math.inf, [1000], 0, plain=True)
    shown.at(0, Cursor(0, 0))
    clock.s += 10
    shown.at(1_000_000, Cursor(0, 1), 250)
    assert caplog.messages == ["source papers: 1.0M tokens, 0.10M tokens/s, 0:30 left"]


def test_how_much_text_a_packed_file_gives_is_learned_from_the_one_before(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """100 bytes gave 400 of text; 200 of text more are half of the second file: three quarters in 30 s."""
    shown = Progress("papers", math.inf, [100, 100], 0)
    shown.at(0, Cursor(0, 0), 150)
    shown.at(0, Cursor(0, 1), 250)
    clock.s += 30
    shown.at(3_000_000, Cursor(1, 0), 200)
    assert caplog.messages == ["source papers: 3.0M tokens, 0.10M tokens/s, 0:10 left"]


def test_without_a_limit_the_files_that_were_read_tell(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 1000 bytes 100 were read before, and 300 in 20 s: 600 take 40 s."""
    shown = Progress("papers", math.inf, [100, 300, 500, 100], 2_000_000)
    shown.at(2_000_000, Cursor(1, 0))
    clock.s += 20
    shown.at(8_000_000, Cursor(2, 0))
    assert caplog.messages == ["source papers: 8.0M tokens, 0.30M tokens/s, 0:40 left"]


def test_a_source_that_ends_before_its_limit_is_measured_by_its_files(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Progress("usmle", 1e9, [500, 500], 0)
    shown.at(1000, Cursor(0, 0))
    clock.s += 30
    shown.at(1_000_000, Cursor(1, 0))
    (said,) = caplog.messages
    assert said == "source usmle: 1.0 of 1,000.0M tokens, 0.03M tokens/s, 0:30 left"


def test_as_long_as_nothing_is_known_no_time_is_said(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Progress("papers", math.inf, [10**9], 0)
    shown.at(0, Cursor(0, 0))
    clock.s += 10
    shown.at(1_000_000, Cursor(0, 500))
    assert caplog.messages == ["source papers: 1.0M tokens, 0.10M tokens/s"]


ON_A_TERMINAL = """
import logging, sys, time
from train.data.sources.rows import Cursor
from train.data.progress import Progress
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
with Progress("web", 1_000_000, [10**9], 0) as shown:
    for k in range(1, 13):
        time.sleep(0.1)
        shown.at(k * 50_000, Cursor(0, k))
        if k == 8:
            logging.getLogger("train").info("something else is said")
logging.getLogger("train").info("the end")
"""


def test_on_a_terminal_there_is_a_bar_that_goes_away() -> None:
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], cwd=ROOT, env=env, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    try:
        while select.select([ours], [], [], 60)[0] and (part := os.read(ours, 2**16)):
            seen += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert running.wait(120) == 0, seen
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert re.search(r"web .*\d+% 0\.\d of 1\.0M tokens, 0\.\d\dM tokens/s, 0:0\d left", text), text
    assert re.search(r"(^|\n|\r)something else is said", text), text  # on a line of its own
    assert "source web:" not in text and text.rstrip().endswith("the end")
