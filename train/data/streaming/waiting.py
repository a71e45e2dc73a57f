"""All ranks wait for data that a producer is still making: before the first step, and between steps."""

import time
from collections.abc import Callable

from train.data.manifest import DataError
from train.data.streaming.consumer import Feed
from train.distributed.world import from_all, from_first

LOOK_S = 0.2  # between two looks at whether data have come
FIRST_LINE_S = 2.0  # of waiting, after which it is said; then at growing distances up to:
LINE_S = 60.0


def wait_for_data(
    feed: Feed, find_lacking: Callable[[], str], say: Callable[[str], None], what: str = "data"
) -> float:
    """Wait, all ranks together, until none lacks data. Returns the seconds.

    Args:
        find_lacking: returns the source that this rank lacks, or ""; called on all ranks at each look.
        say: takes a line about the wait.
        what: what is waited for, in that line.

    Raises DataError, on all ranks, where waiting is of no use.
    """
    began = time.perf_counter()
    waited_s = 0.0
    next_line_s = FIRST_LINE_S
    while True:
        lacking, broken = zip(*from_all((find_lacking(), feed.broken)), strict=True)
        if not any(lacking):
            return waited_s
        if problem := max(broken) or from_first(feed.why_not(waited_s, lacking)):
            raise DataError(problem)
        time.sleep(LOOK_S)
        waited_s = time.perf_counter() - began
        if waited_s > next_line_s:
            names = ", ".join(sorted(set(lacking) - {""}))
            say(f"waiting for {what}: {names}, for {waited_s:.0f} s so far{feed.progress()}")
            next_line_s = waited_s + min(max(waited_s, 5.0), LINE_S)
