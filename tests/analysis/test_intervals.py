"""analysis/energy/intervals.py: when a run did what, by hand and against its totals."""

import itertools

import pytest

from analysis.energy.intervals import Interval, place_claims
from record.goodput import CATEGORIES, Timeline
from tests.record.clock import Clock, run_at_random
from tests.running import keep_final_steps


def timeline_of(run: Clock) -> Timeline:
    timeline = Timeline()
    for entry in run.records:
        timeline.add(entry)
    return timeline


def test_a_record_claims_the_time_just_before_it() -> None:
    run = Clock()
    run.start(model=4.0)
    run.steps(1, 2, wait=0.5)  # 5004, 5006, 5008
    run.write("eval", 2, 3.0, eval_s=2.0)  # 5011
    run.write("step", 3, 5.0, step_ms=2000.0, data_wait_s=0.5, checkpoint_stall_s=1.0)  # 5016
    run.resume(2, down=7.0, model=1.0)
    run.steps(3, 3)  # 70000, 70001, 70003
    assert place_claims(timeline_of(run)) == [
        Interval(0, 5000.0, 5004.0, "start_up"),
        Interval(0, 5004.0, 5004.5, "data_wait", 1),
        Interval(0, 5004.5, 5006.0, "training", 1),
        Interval(0, 5006.0, 5006.5, "data_wait", 2),
        Interval(0, 5006.5, 5008.0, "training", 2),
        Interval(0, 5008.0, 5009.0, "other"),
        Interval(0, 5009.0, 5011.0, "evaluation"),
        Interval(0, 5011.0, 5013.0, "other"),
        Interval(0, 5013.0, 5014.0, "checkpoint"),
        Interval(0, 5014.0, 5014.5, "lost_work", 3),  # what was a wait for data
        Interval(0, 5014.5, 5016.0, "lost_work", 3),
        Interval(0, 5016.0, 5023.0, "down"),
        Interval(1, 70000.0, 70001.0, "start_up"),
        Interval(1, 70001.0, 70003.0, "training", 3),
    ]


def test_every_second_is_in_one_interval_whatever_happens() -> None:
    for seed in range(300):
        run, _, _ = run_at_random(seed)
        timeline = timeline_of(run)
        intervals = place_claims(timeline)
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        for interval in intervals:
            assert interval.end > interval.begin, seed
            seconds[interval.category] += interval.end - interval.begin
        assert seconds == pytest.approx(timeline.totals().seconds, abs=1e-5), seed
        for before, after in itertools.pairwise(intervals):
            if before.category != "down":
                assert (before.attempt, before.end) == (after.attempt, after.begin), seed
        kept = [(record["step"], record["attempt"]) for record in keep_final_steps(run.records)]
        assert [(step.step, step.attempt) for step in timeline.steps()] == kept, seed
