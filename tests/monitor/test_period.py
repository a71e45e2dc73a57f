"""monitor/gpu_sampler/period.py: how often a counter has a new value, from when it was seen to change."""

import bisect
import math
import random
from collections.abc import Callable

import pytest

from monitor.gpu_sampler.period import Period


def watched(
    value: Callable[[float], object], slots: int, late: float = 0.0, missed: float = 0.0
) -> Period:
    """A period from samples of a function of time in slots, each up to `late` slots late, a share of them missed."""
    rng, period = random.Random(5), Period()
    last: object = None
    sampled = -2
    for slot in range(slots):
        if rng.random() < missed:
            continue
        now = value(slot + rng.uniform(0, late))
        if now != last:
            period.change(slot, sharp=sampled == slot - 1)
        last, sampled = now, slot
    return period


def every(slots: float) -> Callable[[float], int]:
    """A counter with another value at each update."""
    return lambda t: math.floor(t / slots)


@pytest.mark.parametrize("slots", [2.5, 3, 4, 7.3, 10, 16.7, 50, 100])
@pytest.mark.parametrize("late", [0.0, 0.9])
def test_a_counter_that_changes_at_each_update_shows_its_period(slots: float, late: float) -> None:
    assert watched(every(slots), 4000, late).slots() == pytest.approx(slots, rel=0.01)


def test_missed_slots_blur_nothing() -> None:
    assert watched(every(10), 4000, late=0.5, missed=0.2).slots() == pytest.approx(10, rel=0.01)


def test_values_that_repeat_make_gaps_of_several_periods() -> None:
    """A tenth and more of the updates bring the same value again, as of a load that is steady for a while."""
    rng = random.Random(3)
    levels = [rng.choice((1, 2, 3)) for _ in range(1000)]  # a third repeats
    assert watched(lambda t: levels[int(t / 10)], 9000, late=0.9).slots() == pytest.approx(
        10, rel=0.01
    )


def test_two_gaps_tell_a_period_that_neither_of_them_is() -> None:
    """High for 11 updates and low for 2, of ten slots each: gaps of 110 and 20."""
    assert watched(lambda t: int(t / 10) % 13 < 11, 4000, late=0.9).slots() == pytest.approx(
        10, rel=0.01
    )


@pytest.mark.parametrize(
    ("slots", "late"), [(0.1, 0.0), (1, 0.0), (1, 0.9), (1.5, 0.0), (1.9, 0.0)]
)
def test_what_changes_as_fast_as_it_is_looked_at_has_a_bound_only(
    slots: float, late: float
) -> None:
    found = watched(every(slots), 2000, late).found(10)
    assert found["period_ms"] is None and found["at_most_ms"] == 20


def test_few_changes_and_irregular_ones_tell_nothing() -> None:
    assert watched(every(100), 1000).found(10) == {"period_ms": None, "changes": 10}  # nine gaps
    assert watched(every(100), 1200).found(10) == {"period_ms": 1000, "changes": 12}
    rng, moments, t = random.Random(1), [0.0], 0.0
    for _ in range(300):
        t += rng.expovariate(1 / 200)
        moments.append(t)
    assert watched(lambda now: bisect.bisect(moments, now), int(t)).slots() is None
    assert Period().found(10) == {"period_ms": None, "changes": 0}
