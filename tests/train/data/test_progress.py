"""train/data/progress.py: what a line says, by a clock that is turned by hand."""

import itertools
import logging
import math
from types import SimpleNamespace

import pytest

from train.data import progress
from train.data.progress import Progress
from train.data.sources.rows import Cursor


@pytest.mark.parametrize(
    ("limit", "files", "places", "line"),
    [
        (40e6, [10**9], [(0, 0, 9), (10**7, 0, 9)], "10M of 40M tokens, 1M tokens/s, 0:30"),
        # What was made before counts for the share and not for the speed.
        (40e6, [10**9], [(3e7, 0, 9), (3.5e7, 0, 9)], "35M of 40M tokens, 500,000 tokens/s, 0:10"),
        # Without a limit the bytes of the files count: 200 of 400.
        (math.inf, [100, 300], [(0, 0, 0), (10**6, 1, 100)], "1M tokens, 100,000 tokens/s, 0:10"),
        # More text than the file has bytes.
        (math.inf, [100, 300], [(0, 0, 0), (10**6, 1, 999)], "1M tokens, 100,000 tokens/s, 0:00"),
    ],
)
def test_a_line_every_ten_seconds_says_how_far_it_is_how_fast_and_what_is_left(
    monkeypatch,
    caplog,
    limit,
    files,
    places,
    line,
):
    caplog.set_level(logging.INFO)
    times_s = itertools.chain([1000.0, 1000.0, 1010.0], itertools.repeat(1019.9))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times_s)))
    shown = Progress("web", limit, files, int(places[0][0]))
    for tokens, file, text_bytes in [*places, places[-1]]:
        shown.at(int(tokens), Cursor(file, 0), text_bytes)
    assert caplog.messages == [f"source web: {line} left"]
