"""monitor/growth.py: slopes of made values beside those they were made with, and noise that has none."""

import random
from itertools import combinations
from statistics import median

import pytest

from monitor.growth import EVERY_S, VALUES, Growth


def fed(values: list[float], **how: float) -> Growth:
    growth = Growth(**{"enough": 11} | how)  # type: ignore[arg-type]
    for n, value in enumerate(values):
        growth.add(EVERY_S * n, value)
    return growth


def test_a_straight_line_has_its_slope_and_what_falls_none() -> None:
    assert fed([5 + n / 60 for n in range(20)]).per_hour() == pytest.approx(2.0)
    assert fed([5 - n / 60 for n in range(20)]).per_hour() is None
    assert fed([5.0] * 20).per_hour() is None
    assert fed(15 * [1.0] + 5 * [2.0]).per_hour() is None, "most pairs are equal"
    assert fed([5 + n / 60 for n in range(10)]).per_hour() is None
    assert fed([5 + n / 60 for n in range(20)], least=2.1).per_hour() is None


def test_it_is_the_median_of_all_slopes_and_of_the_last_hour() -> None:
    chance = random.Random(1)
    values = [n / 40 + chance.gauss(0, 0.2) for n in range(60)]
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(values), 2)]
    assert fed(values).per_hour() == pytest.approx(120 * median(slopes))
    assert VALUES * EVERY_S == 3600
    assert fed(
        [100.0 - n for n in range(50)] + [n / 120 for n in range(120)]
    ).per_hour() == pytest.approx(1.0)


def test_values_that_follow_too_soon_are_passed_over_and_a_look_in_between_changes_nothing() -> (
    None
):
    growth = Growth(11)
    for n in range(300):
        growth.add(EVERY_S / 3 * n, float(n))
        growth.per_hour()
    assert [value for _, value in growth.values][:3] == [0, 3, 6]
    assert growth.per_hour() == pytest.approx(360)


@pytest.mark.parametrize(
    ("rises", "values", "expected"),
    [
        (1, 10 * [1.0] + 10 * [2.0], True),
        (2, 10 * [1.0] + 10 * [2.0], False),
        (2, 7 * [1.0] + 7 * [2.0] + 6 * [3.0], True),
    ],
)
def test_how_often_it_must_rise(rises: int, values: list[float], expected: bool) -> None:
    assert bool(fed(values, rises=rises).per_hour()) is expected


def test_noise_has_no_surplus_of_pairs_that_rise() -> None:
    """Of 400 hours of noise none grows, where the slope alone says it of half; with a rise as large as the noise in a
    quarter of an hour all do."""
    chance = random.Random(2)
    noise = [[chance.gauss(0, 1) for _ in range(41)] for _ in range(400)]
    assert 150 < sum(fed(values).per_hour() is not None for values in noise) < 250
    assert not any(fed(values, surplus=0.5).per_hour() for values in noise)
    rising = [[value + n / 7.5 for n, value in enumerate(values)] for values in noise]
    found = [fed(values, surplus=0.5).per_hour() for values in rising]
    assert all(found) and median(rate for rate in found if rate) == pytest.approx(16, rel=0.02)
