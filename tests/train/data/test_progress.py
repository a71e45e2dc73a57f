"""train/data/progress.py: what a line says, by a clock that is turned by hand."""

import logging
import math
from types import SimpleNamespace

import pytest

from train.data import progress
from train.data.progress import Progress
from train.data.sources.rows import Cursor


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> SimpleNamespace:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now.s))
    caplog.set_level(logging.INFO)
    return now


def test_a_line_comes_every_ten_seconds(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Progress("web", 40e6, [10**9], 0)
    for tenth in range(1, 351):  # 35 s, of 100,000 tokens each tenth
        clock.s = 1000 + tenth / 10
        shown.at(100_000 * tenth, Cursor(0, tenth))
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


def test_without_a_limit_the_bytes_of_the_files_count(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Progress("web", math.inf, [100, 300], 0)
    shown.at(0, Cursor(0, 0), 0)
    clock.s += 10
    shown.at(10**6, Cursor(1, 0), 100)  # 200 of 400 bytes
    clock.s += 10
    shown.at(2 * 10**6, Cursor(1, 1), 10**6)  # more text than the file has bytes
    assert caplog.messages == [
        "source web: 1.0M tokens, 0.10M tokens/s, 0:10 left",
        "source web: 2.0M tokens, 0.10M tokens/s, 0:00 left",
    ]
