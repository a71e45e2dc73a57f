"""train/schedule.py against its formula written out another way, and against stated points of the curve."""

import cmath
import dataclasses

import pytest

from settings.config import Config
from train.schedule import lr_at

# 100 steps of 100 tokens, the first 10 of them warm-up; for wsd the last 25 down
BASE = {
    "batch_tokens": 100,
    "train_tokens": 10_000,
    "warmup_tokens": 1000,
    "learning_rate": 0.01,
    "min_learning_rate": 0.001,
}
WSD = {"lr_schedule": "wsd", "decay_tokens": 2500}
WARM_UP = {step: 0.001 * step for step in range(1, 11)}
# the height of a point that goes half round a circle, from a complex power
COSINE = {
    step: 0.0055 + 0.0045 * cmath.exp(1j * cmath.pi * (step - 10) / 90).real
    for step in range(10, 101)
}
DOWN = {75 + k: 0.01 - 0.009 * k / 25 for k in range(26)}
AFTER = {100: 0.001, 101: 0.001, 10**9: 0.001}
WHOLE = WARM_UP | COSINE | {55: 0.0055} | AFTER


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, WHOLE),
        ({"max_steps": 20}, WHOLE),  # where a run stops does not bend it
        ({"batch_tokens": 50}, {2 * step: rate for step, rate in WHOLE.items()}),
        (WSD, WARM_UP | {40: 0.01} | DOWN | AFTER),
        (WSD | {"train_tokens": 20_000}, WARM_UP | {75: 0.01, 175: 0.01, 200: 0.001}),
    ],
    ids=["cosine", "stopped", "half the batch", "wsd", "longer wsd"],
)
def test_rates_are_those_of_the_formula(changes, rates):
    c = dataclasses.replace(Config(), **BASE | changes).derived()
    assert {step: lr_at(step, c) for step in rates} == pytest.approx(rates, rel=1e-12)


def test_wsd_decays_over_a_fifth_by_default():
    c = dataclasses.replace(Config(), lr_schedule="wsd", train_tokens=1000).derived()
    assert c.decay_tokens == 200
    assert Config().derived().decay_tokens is None
