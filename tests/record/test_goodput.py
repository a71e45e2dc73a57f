"""record/goodput.py: records by hand, and the seconds that they must come to, worked out beside them."""

import pytest

from record.goodput import CATEGORIES, Timeline
from record.metrics import keep_final_steps
from tests.record.clock import START, Clock, run_at_random


def seconds_of(run):
    """Return category -> seconds, without the zeros."""
    seconds = Timeline(run.records).seconds()
    assert seconds.keys() == CATEGORIES.keys()
    rounded = {category: round(value, 6) for category, value in seconds.items()}
    return {category: value for category, value in rounded.items() if value}


def test_a_plain_run_is_start_up_steps_evaluation_and_saving():
    run = Clock()
    run.start(**{"import": 3.0, "data": 1.0, "compile": 6.0})
    run.steps(1, 10, wait=0.25)
    run.write("eval", 10, 5.0, eval_s=4.5, val_loss=3.0)
    run.write("checkpoint", 10, 1.0, seconds=0.75, bytes=1)  # costs nothing by itself
    run.write("step", 11, 2.5, step_ms=2000.0, data_wait_s=0.25, checkpoint_stall_s=1.5)
    run.write("end", 11, 4.0, reason="done", stall_s=3.0)
    assert seconds_of(run) == {
        "start_up": 10.0,
        "training": 11 * 1.75,
        "data_wait": 2.75,
        "evaluation": 4.5,
        "checkpoint": 1.5 + 3,
        "other": 0.5 + (3.5 - 3.5) + 1,  # 5 - 4.5; 1 + 2.5 - 1.5 - 2; 4 - 3
    }
    result = Timeline(run.records)
    assert result.start_up == {"import": 3.0, "data": 1.0, "compile": 6.0}
    assert (len(result.attempts), result.lost_steps, result.skipped_steps) == (1, 0, 0)
    wall_s = sum(result.seconds().values())
    assert wall_s == pytest.approx(run.wall - START) == 10 + 20 + 5 + 1 + 2.5 + 4
    assert result.summary().startswith("goodput 45.3% of 0:42: ")  # 19.25 / 42.5


def test_synchronizations_have_a_category_and_a_rollback_loses_the_steps_past_it():
    """Training waits for a part of each, and for one that fails; a site that was away comes back later."""
    run = Clock()
    run.start()
    run.steps(1, 2)
    run.write("sync", 2, 4.0, seconds=6.0, stall_s=4.0)
    run.steps(3, 4)
    run.write("rollback", 2, 5.0, stall_s=4.5, seconds=0.25)
    run.steps(3, 3)
    run.write("gap", 10, reason="away")
    run.write("sync", 10, 3.0, stall_s=3.0)
    run.steps(11, 11)
    assert seconds_of(run) == {
        "training": 4 * 2.0,
        "exchange": 4 + 4.5 + 3,
        "lost_work": 4.0,
        "checkpoint": 0.25,
        "other": 0.25,
    }
    assert Timeline(run.records).lost_steps == 2


def test_a_killed_run_loses_the_steps_past_its_checkpoint_and_the_time_between():
    run = Clock()
    run.start(model=4.0)
    run.steps(1, 10, wait=0.5)
    run.write("checkpoint", 6, seconds=1.0)
    run.steps(11, 12)
    run.resume(6, down=30.0, model=5.0)
    run.steps(7, 8)
    assert seconds_of(run) == {
        "start_up": 9.0,
        "down": 30.0,
        "training": 6 * 1.5 + 2 * 2.0,
        "data_wait": 6 * 0.5,
        "lost_work": 4 * 2.0 + 2 * 2.0,  # 7 to 10, and 11 and 12
    }
    result = Timeline(run.records)
    assert (result.lost_steps, len(result.attempts), result.start_up) == (6, 2, {"model": 9.0})


def test_a_skipped_step_is_lost_work_and_what_precedes_it_is_not_counted_twice():
    run = Clock()
    run.start()
    run.steps(1, 2)
    run.write("nonfinite", 3, 2.0, loss=None)
    run.write("skip", 3, reason="nonfinite", step_ms=2000.0)
    run.write("skip", 3, 3.0, reason="loss", step_ms=2500.0, checkpoint_stall_s=0.5)
    run.steps(3, 3)
    assert seconds_of(run) == {"training": 6.0, "lost_work": 4.5, "checkpoint": 0.5}
    assert (Timeline(run.records).skipped_steps, Timeline(run.records).lost_steps) == (2, 0)


def test_a_monotonic_clock_that_goes_back_passes_no_time_twice():
    run = Clock()
    run.start()
    run.steps(1, 1)
    run.wall += 0.005  # no clock ticks like another
    run.steps(2, 2)
    run.mono -= 100
    run.steps(3, 3)
    run.mono += 100
    run.steps(4, 4)
    assert seconds_of(run) == {"training": 6.0, "other": 2.0}
    timeline = Timeline()
    for entry in run.records:
        timeline.add(entry)
    assert [claim.end for claim in timeline.claims] == [5002.0, 5004.0, 5004.0, 5008.0]
    offsets = [START - 5000, START - 4900 + 0.005, START - 5000 + 0.005]
    assert timeline.attempts[0].offsets == pytest.approx(offsets, rel=0, abs=1e-3)


@pytest.mark.fault(20)
def test_a_clock_that_is_set_between_attempts_is_down_time_and_never_negative():
    behind = Clock()
    behind.start()
    behind.steps(1, 4)
    behind.resume(4, down=20.0 - 3600.0, data=7.0)
    behind.steps(5, 5)
    assert seconds_of(behind) == {"training": 10.0, "start_up": 7.0}
    ahead = Clock()
    ahead.start()
    ahead.steps(1, 4)
    ahead.resume(4, down=20.0 + 3600.0, data=7.0)
    ahead.steps(5, 5)
    assert seconds_of(ahead) == {"training": 10.0, "start_up": 7.0, "down": 3620.0}


def test_the_pause_after_a_run_that_was_done_is_not_its_time():
    for reason, down in (("done", {}), ("stopped", {"down": 500.0})):
        run = Clock()
        run.start()
        run.steps(1, 2)
        run.write("end", 2, reason=reason)
        run.resume(2, down=500.0)
        run.steps(3, 3)
        assert seconds_of(run) == {"training": 6.0} | down


def test_an_attempt_that_speaks_before_it_is_ready_is_one_attempt():
    run = Clock()
    run.start()
    run.steps(1, 2)
    run.attempt = 1
    run.mono = 100.0
    run.write("signal", 2, 10.0)
    run.write("resume", 2, 4.0, startup_s={"data": 3.0, "model": 2.0})
    run.steps(3, 3)
    assert seconds_of(run) == {"training": 6.0, "down": 10.0, "start_up": 4.0}
    result = Timeline(run.records)
    assert (len(result.attempts), result.start_up) == (2, {"data": 3.0, "model": 1.0})


def test_a_gap_before_the_start_of_an_attempt_takes_nothing_from_its_start_up():
    """A record that was removed since the last attempt begins with a gap."""
    run = Clock()
    run.write("gap", 4, reason="record removed")
    run.write("resume", 4, 1.0, startup_s={"a": 9.0})
    run.steps(5, 6)
    assert seconds_of(run) == {"start_up": 9.0, "training": 4.0}


def test_values_that_are_unknown_leave_their_time_in_other():
    run = Clock()
    run.write("start", 0, startup_s=None)
    run.write("step", 1, 2.0, step_ms=None, data_wait_s=-1.0)
    run.write("eval", 1, 3.0, val_loss=None, error="timed out", eval_s=2.0)
    run.write("eval", 1, 1.0, eval_s=None)
    run.write("of_the_future", 1, 1.0, seconds=[1])
    run.write("step", 2, 1.0, step_ms=1000.0, mono_s=None)  # passes no time itself
    assert seconds_of(run) == {"evaluation": 2.0, "training": 1.0, "other": 2 + 1 + 1}


def test_no_record_claims_more_than_the_time_that_passed():
    run = Clock()
    run.start()
    run.write("step", 1, 2.0, step_ms=9000.0, data_wait_s=1.0)
    run.write("signal", 1, 5.0)
    run.resume(1, down=0.0)
    run.write("step", 2, 2.0, step_ms=9000.0)
    # not the time of the attempt before
    assert seconds_of(run) == {"training": 3.0, "data_wait": 1.0, "other": 5.0}


def test_a_step_that_comes_again_was_lost_although_no_record_says_why():
    run = Clock()
    run.start()
    run.steps(1, 4)
    run.steps(3, 5)
    assert seconds_of(run) == {"training": 10.0, "lost_work": 4.0}
    assert Timeline(run.records).lost_steps == 2


def test_no_record_is_no_time():
    result = Timeline([])
    assert set(result.seconds().values()) == {0.0} and result.attempts == []
    assert result.summary() == "goodput 0.0% of 0:00: nothing"


def test_the_summary_says_what_is_not_zero_and_the_end_record_takes_seconds():
    run = Clock()
    run.start(**{"import": 12.0, "data": 3.0, "model": 0.25})
    run.steps(1, 1700)
    run.write("eval", 1700, 62.0, eval_s=62.0)
    run.write("skip", 1701, 2.0, step_ms=2000.0)
    run.resume(1690, down=90.0, **{"import": 12.0})
    run.steps(1691, 1691)
    run.write("sync", 1691, 3.0, stall_s=3.0)
    run.write("end", 1691, 1.0, stall_s=0.75)
    result = Timeline(run.records)
    # 15.25 + 3400 + 62 + 2 + 90 + 12 + 2 + 3 + 1 = 3587.25 s, of which 1691 steps of 2 s are 3382 s
    assert result.summary() == (
        "goodput 94.3% of 59:47: training 56:22, start-up 0:27 (import 0:24, data 0:03), evaluation 1:02, "
        "checkpoint 0:01, synchronization 0:03, lost work 0:22 (10 steps lost, 1 skipped), "
        "down 1:30 (2 attempts)"
    )
    assert result.as_dict() == {
        "training": 3382.0,
        "start_up": 27.25,
        "evaluation": 62.0,
        "checkpoint": 0.75,
        "data_wait": 0.0,
        "exchange": 3.0,
        "lost_work": 22.0,
        "down": 90.0,
        "other": 0.25,
    }


def test_every_second_is_counted_once_whatever_happens():
    """300 runs at random; their time is added up beside the records."""
    for seed in range(300):
        run, inside, between = run_at_random(seed)
        result = Timeline(run.records)
        seconds = result.seconds()
        assert sum(seconds.values()) == pytest.approx(inside + between, abs=1e-6), seed
        assert seconds["down"] == pytest.approx(between, abs=1e-6), seed
        assert min(seconds.values()) >= 0.0
        steps = sum(record["event"] == "step" for record in run.records)
        assert steps - result.lost_steps == len(keep_final_steps(run.records)), seed


def test_a_pause_before_a_run_that_was_done_is_extended_is_not_its_time():
    run = Clock()
    run.start().steps(1, 2).write("end", 2, reason="done")
    run.resume(2, down=470.0).steps(3, 3).write("end", 3, reason="stopped")
    run.resume(3, down=9.0).steps(4, 4)
    assert seconds_of(run) == {"training": 8.0, "down": 9.0}
