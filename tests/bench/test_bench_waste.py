"""make bench's rows of what is no training, and of Muon."""

import dataclasses

import pytest

from bench import run, waste
from doctor.gpu_probe.shapes import SHAPES
from settings.config import Config


def test_shares_are_those_of_the_time_in_which_the_intervals_pass() -> None:
    """900 s of steps at 1 s each with log and evaluation, and one save: counted over 1,000 evaluations."""
    c = dataclasses.replace(Config(), eval_every=1000, save_minutes=15)
    found = waste.shares(c, step_s=1.0, eval_s=10.0, save_s=9.0, log_s=0.002)
    steps_s = 1e6 * (1.0 + 0.002) + 1000 * 10.0  # a million steps
    saves_s = 9.0 * steps_s / 900
    assert found == pytest.approx(
        {
            "evaluation": 100 * 1000 * 10.0 / (steps_s + saves_s),
            "log": 100 * 2000 / (steps_s + saves_s),
            "checkpoint": 100 * saves_s / (steps_s + saves_s),
        }
    )


def test_both_parts_are_measured_and_make_a_row() -> None:
    found = waste.measure("intervals", 1, SHAPES["tiny"], eval_tokens=512)
    (taken,) = found["rounds"]
    assert all(0 < taken[name] < 100 for name in ("evaluation", "checkpoint", "log"))
    assert waste.row(found, run.spread).count("|") == 6 and "| under 2 |" in waste.row(
        found, run.spread
    )
    found = {
        "part": "muon",
        "shape": "tiny",
        "rounds": [
            {"adamw": 0.1, "muon": muon, "foreign_percent": 3.0} for muon in (0.1, 0.15, 0.12)
        ],
    }
    assert waste.row(found, run.spread) == (
        "| a step of tiny with Muon, of one with AdamW | 120.0 (100.0-150.0) | "
        "120.0 (100.0-150.0) ms and 100.0 (100.0-100.0) ms | | 3 |"
    )
    (taken,) = waste.measure("muon", 1, SHAPES["tiny"])["rounds"]
    assert taken["muon"] > 0 and taken["adamw"] > 0
