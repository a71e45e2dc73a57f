"""analysis/energy/intervals.py against the totals of the same records; test_energy.py has an example by hand."""

import pytest

from analysis.energy.intervals import place_claims
from record.goodput import CATEGORIES, Timeline
from tests.record.clock import run_at_random


def test_every_second_is_in_one_interval_whatever_happens():
    for seed in range(200):
        timeline = Timeline()
        for record in run_at_random(seed)[0].records:
            timeline.add(record)
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        for _, begin, end, category in place_claims(timeline):
            assert end > begin - 1e-9, seed
            seconds[category] += end - begin
        assert seconds == pytest.approx(timeline.seconds(), abs=1e-5), seed
