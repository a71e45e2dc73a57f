"""train/schedule.py against its formula written out another way, and against stated points of the curve."""

import cmath
import dataclasses

import pytest

from settings.config import Config
from train.schedule import lr_at


def recipe(**changes: object) -> Config:
    """100 steps of 100 tokens, the first 10 of them warm-up."""
    base = {
        "batch_tokens": 100,
        "train_tokens": 10_000,
        "warmup_tokens": 1000,
        "learning_rate": 0.01,
        "min_learning_rate": 0.001,
    }
    return dataclasses.replace(Config(), **base | changes).derived()


def test_the_warm_up_is_a_straight_line_that_starts_above_zero_and_ends_at_the_peak():
    assert [lr_at(step, recipe()) for step in range(1, 11)] == pytest.approx(
        [0.001 * step for step in range(1, 11)]
    )


def test_the_cosine_is_half_a_turn_of_a_circle():
    """Between the ends of the warm-up and the horizon: the height of a point that goes round, from a complex power."""
    for step in range(10, 101):
        height = cmath.exp(1j * cmath.pi * (step - 10) / 90).real
        assert lr_at(step, recipe()) == pytest.approx(0.0055 + 0.0045 * height, rel=1e-12)


def test_the_rate_is_at_its_mean_half_way_and_at_its_minimum_from_the_horizon_on():
    assert lr_at(55, recipe()) == pytest.approx(0.0055)
    assert [lr_at(step, recipe()) for step in (100, 101, 200, 10**9)] == [0.001] * 4


def test_where_a_run_stops_does_not_bend_the_schedule():
    assert [lr_at(step, recipe(max_steps=20)) for step in range(1, 40)] == [
        lr_at(s, recipe()) for s in range(1, 40)
    ]


def test_the_rate_follows_tokens_so_that_half_the_batch_takes_twice_the_steps():
    half = recipe(batch_tokens=50)
    assert [lr_at(2 * step, half) for step in range(1, 101)] == [
        lr_at(step, recipe()) for step in range(1, 101)
    ]


# ---- wsd


def wsd(**changes: object) -> Config:
    """The same 100 steps, the last 25 of them down."""
    return recipe(lr_schedule="wsd", decay_tokens=2500, **changes)


def test_wsd_is_constant_and_then_a_straight_line_to_the_minimum():
    assert [lr_at(step, wsd()) for step in (5, 10, 40, 75)] == pytest.approx(
        [0.005, 0.01, 0.01, 0.01]
    )
    down = [lr_at(step, wsd()) for step in range(75, 101)]
    assert down == pytest.approx([0.01 - 0.009 * k / 25 for k in range(26)])
    assert [lr_at(step, wsd()) for step in (101, 10**6)] == [0.001, 0.001]


def test_a_longer_run_has_the_same_rates_up_to_where_the_shorter_decays():
    longer = wsd(train_tokens=20_000)
    assert [lr_at(step, longer) for step in range(1, 76)] == [
        lr_at(step, wsd()) for step in range(1, 76)
    ]
    assert lr_at(175, longer) == 0.01 and lr_at(200, longer) == pytest.approx(0.001)


def test_wsd_decays_over_a_fifth_by_default():
    c = dataclasses.replace(Config(), lr_schedule="wsd", train_tokens=1000).derived()
    assert c.decay_tokens == 200
    assert Config().derived().decay_tokens is None
