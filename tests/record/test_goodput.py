"""record/goodput.py: records by hand, and the seconds that they must come to, worked out beside them."""

import itertools
import random
from typing import Any

import pytest

from record.goodput import CATEGORIES, Interval, Timeline, account
from record.metrics import keep_final_steps

START = 1763719200.0


class Clock:
    """Writes records as an attempt does: `after` seconds past the one before."""

    def __init__(self) -> None:
        self.wall, self.mono, self.attempt = START, 5000.0, 0
        self.records: list[dict[str, Any]] = []

    def write(self, event: str, step: int, after: float = 0.0, **values: Any) -> "Clock":
        self.wall += after
        self.mono += after
        self.records.append(
            {
                "schema": 1,
                "event": event,
                "time": self.wall,
                "mono_s": self.mono,
                "host": "h",
                "attempt": self.attempt,
                "step": step,
                "tokens": 100 * step,
                **values,
            }
        )
        return self

    def start(self, step: int = 0, event: str = "start", **startup_s: float) -> "Clock":
        """An attempt whose process starts now; the record follows its start-up."""
        return self.write(
            event, step, sum(startup_s.values()), **({"startup_s": startup_s} if startup_s else {})
        )

    def resume(self, step: int, down: float, **startup_s: float) -> "Clock":
        """The next attempt, on another machine: its process starts `down` seconds from the last record."""
        self.wall, self.mono, self.attempt = self.wall + down, 70_000.0, self.attempt + 1
        return self.start(step, "resume", **startup_s)

    def steps(self, first: int, last: int, seconds: float = 2.0, wait: float = 0.0) -> "Clock":
        for step in range(first, last + 1):
            self.write("step", step, seconds, loss=3.0, step_ms=1000 * seconds, data_wait_s=wait)
        return self

    def booked(self, **of: Any) -> dict[str, float]:
        """What is booked, without the zeros; the sum of all is looked at here."""
        result = account(iter(self.records), **of)
        assert set(result.seconds) == set(CATEGORIES)
        assert result.wall_s == pytest.approx(sum(result.seconds.values()), abs=1e-9)
        return {
            category: round(seconds, 6)
            for category, seconds in result.seconds.items()
            if round(seconds, 6)
        }


def test_a_plain_run_is_start_up_steps_evaluation_and_saving() -> None:
    run = Clock().start(**{"import": 3.0, "data": 1.0, "compile": 6.0}).steps(1, 10, wait=0.25)
    run.write("eval", 10, 5.0, eval_s=4.5, val_loss=3.0)
    run.write("checkpoint", 10, 1.0, seconds=0.75, bytes=1)  # costs nothing by itself
    run.write("step", 11, 2.5, step_ms=2000.0, data_wait_s=0.25, checkpoint_stall_s=1.5)
    run.write("end", 11, 4.0, reason="done", stall_s=3.0)
    assert run.booked() == {
        "start_up": 10.0,
        "training": 11 * 1.75,
        "data_wait": 2.75,
        "evaluation": 4.5,
        "checkpoint": 1.5 + 3,
        "other": 0.5 + (3.5 - 3.5) + 1,
    }  # 5 - 4.5; 1 + 2.5 - 1.5 - 2; 4 - 3
    result = account(run.records)
    assert result.start_up == {"import": 3.0, "data": 1.0, "compile": 6.0}
    assert (result.attempts, result.lost_steps, result.skipped_steps) == (1, 0, 0)
    assert result.wall_s == pytest.approx(run.wall - START) == 10 + 20 + 5 + 1 + 2.5 + 4
    assert result.goodput == pytest.approx(19.25 / 42.5)


def test_exchanges_between_sites_have_a_category_of_their_own() -> None:
    """Of one that takes 6 s training waited for 4; one that fails is waited for too; who was away comes back later."""
    run = Clock().start().steps(1, 2).write("sync", 2, 4.0, seconds=6.0, stall_s=4.0).steps(3, 4)
    run.write("rollback", 2, 5.0, stall_s=4.5, seconds=0.25, **{"from": 4}).steps(3, 3)
    run.write("gap", 10, 0.0, reason="away", to=10, **{"from": 3}).write(
        "sync", 10, 3.0, seconds=3.0, stall_s=3.0
    )
    run.steps(11, 11)
    assert run.booked() == {
        "training": 4 * 2.0,
        "exchange": 4 + 4.5 + 3,
        "lost_work": 4.0,
        "checkpoint": 0.25,
        "other": 0.25,
    }
    assert "synchronization 0:1" in account(run.records).summary()


def test_killed_and_resumed_loses_the_steps_past_the_checkpoint_and_the_time_between() -> None:
    run = (
        Clock()
        .start(model=4.0)
        .steps(1, 10, wait=0.5)
        .write("checkpoint", 6, 0.0, seconds=1.0)
        .steps(11, 12)
    )
    run.resume(6, down=30.0, model=5.0).steps(7, 8)
    assert run.booked() == {
        "start_up": 9.0,
        "down": 30.0,
        "training": 6 * 1.5 + 2 * 2.0,
        "data_wait": 6 * 0.5,
        "lost_work": 4 * 2.0 + 2 * 2.0,
    }  # 7 to 10, and 11 and 12
    result = account(run.records)
    assert (result.lost_steps, result.attempts, result.start_up) == (6, 2, {"model": 9.0})
    kept = keep_final_steps(run.records)
    assert result.seconds["training"] == sum(r["step_ms"] / 1000 - r["data_wait_s"] for r in kept)


def test_a_new_start_loses_all() -> None:
    run = Clock().start().steps(1, 3)
    run.attempt = 1
    run.write("start", 0, 10.0).steps(1, 1)
    assert run.booked() == {"training": 2.0, "lost_work": 6.0, "down": 10.0}


def test_a_step_that_is_skipped_is_lost_work_and_what_precedes_it_is_not_booked_twice() -> None:
    run = Clock().start().steps(1, 2)
    run.write("nonfinite", 3, 2.0, loss=None, samples=[1, 2])
    run.write("skip", 3, 0.0, reason="nonfinite", loss=None, grad_norm=None, step_ms=2000.0)
    run.write(
        "skip", 3, 3.0, reason="loss", loss=9.0, step_ms=2500.0, checkpoint_stall_s=0.5
    ).steps(3, 3)
    assert run.booked() == {"training": 6.0, "lost_work": 4.5, "checkpoint": 0.5}
    assert (account(run.records).skipped_steps, account(run.records).lost_steps) == (2, 0)


def test_a_rollback_loses_the_steps_behind_it_and_its_own_time_is_the_checkpoints() -> None:
    run = Clock().start().steps(1, 9)
    run.write("rollback", 5, 7.0, **{"from": 9, "passed_over": 3, "seconds": 6.0}).steps(6, 7)
    assert run.booked() == {
        "training": 7 * 2.0,
        "lost_work": 4 * 2.0,
        "checkpoint": 6.0,
        "other": 1.0,
    }
    run.resume(3, down=1.0).steps(4, 4)  # and behind that a damaged checkpoint
    assert run.booked() == {
        "training": 4 * 2.0,
        "lost_work": (4 + 4) * 2.0,
        "checkpoint": 6.0,
        "other": 1.0,
        "down": 1.0,
    }
    assert account(run.records).lost_steps == 8


def test_a_crash_without_an_end_leaves_down_time_until_the_next_start() -> None:
    run = Clock().start().steps(1, 4).resume(4, down=100.0, data=2.0).steps(5, 5)
    run.write("end", 5, 0.0, reason="crashed").resume(5, down=50.0).steps(6, 6)
    assert run.booked() == {"training": 12.0, "down": 150.0, "start_up": 2.0}


@pytest.mark.fault(20)
@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_is_set_inside_an_attempt_changes_nothing(jump: float) -> None:
    run = Clock().start().steps(1, 4)
    run.wall += jump
    run.steps(5, 8).write("eval", 8, 3.0, eval_s=3.0)
    assert run.booked() == {"training": 16.0, "evaluation": 3.0}


def test_a_monotonic_clock_that_goes_back_passes_no_time_twice() -> None:
    run = Clock().start().steps(1, 2)
    run.mono -= 100
    run.steps(3, 3)
    run.mono += 100
    assert run.steps(4, 4).booked() == {"training": 6.0, "other": 2.0}


@pytest.mark.fault(20)
def test_a_clock_that_is_set_between_attempts_is_down_time_and_never_negative() -> None:
    behind = Clock().start().steps(1, 4).resume(4, down=20.0 - 3600.0, data=7.0).steps(5, 5)
    assert behind.booked() == {"training": 10.0, "start_up": 7.0}
    ahead = Clock().start().steps(1, 4).resume(4, down=20.0 + 3600.0, data=7.0).steps(5, 5)
    assert ahead.booked() == {"training": 10.0, "start_up": 7.0, "down": 3620.0}
    later = behind.resume(5, down=100.0).steps(6, 6)
    assert later.booked() == {"training": 12.0, "start_up": 7.0, "down": 100.0}


def test_an_old_record_without_start_up_begins_at_its_first_record() -> None:
    run = Clock().start().steps(1, 2).resume(2, down=9.0).steps(3, 3)
    for entry in run.records:
        del entry["mono_s"], entry["attempt"]
    assert run.booked() == {"training": 6.0, "down": 9.0}
    assert account(run.records).attempts == 2


def test_time_up_to_now_is_down_once_an_attempt_has_ended_and_else_not_known() -> None:
    run = Clock().start().steps(1, 2)
    assert run.booked(now=START + 4 + 60) == {"training": 4.0, "other": 60.0}
    assert run.booked(now=START) == {"training": 4.0}
    run.write("end", 2, 1.0, reason="stopped", stall_s=1.0)
    assert run.booked(now=START + 5 + 60) == {"training": 4.0, "checkpoint": 1.0, "down": 60.0}


def test_an_attempt_that_speaks_before_it_is_ready_is_one_attempt() -> None:
    run = Clock().start().steps(1, 2)
    run.attempt, run.mono = 1, 100.0
    run.write("signal", 2, 10.0).write("resume", 2, 4.0, startup_s={"data": 3.0}).steps(3, 3)
    assert run.booked() == {"training": 6.0, "down": 10.0, "start_up": 3.0, "other": 1.0}
    assert account(run.records).attempts == 2


def test_a_failed_evaluation_and_unknown_values_cost_what_they_say_and_break_nothing() -> None:
    run = Clock().start().write("step", 1, 2.0, step_ms=None, data_wait_s=None)
    run.write("eval", 1, 3.0, val_loss=None, val_bpb=None, error="timed out", eval_s=2.0)
    run.write("eval", 1, 1.0, val_loss=None, eval_s=None).write(
        "of_the_future", 1, 1.0, seconds=[1]
    )
    assert run.booked() == {"evaluation": 2.0, "other": 2 + 1 + 1 + 1}


def test_nothing_is_booked_beyond_the_time_that_passed() -> None:
    run = Clock().start().write("step", 1, 2.0, step_ms=9000.0, data_wait_s=1.0)
    assert run.booked() == {"training": 1.0, "data_wait": 1.0}
    run.write("signal", 1, 5.0).resume(1, down=0.0).write("step", 2, 2.0, step_ms=9000.0)
    assert run.booked() == {
        "training": 3.0,
        "data_wait": 1.0,
        "other": 5.0,
    }  # not the attempt's before


def test_a_step_that_comes_again_was_lost_although_no_record_says_why() -> None:
    run = Clock().start().steps(1, 4).steps(3, 5)
    assert run.booked() == {"training": 10.0, "lost_work": 4.0}
    assert account(run.records).lost_steps == 2


def test_no_record_is_no_time() -> None:
    result = account([])
    assert (result.wall_s, result.goodput, result.attempts) == (0.0, 0.0, 0)
    assert result.summary() == "goodput 0.0% of 0:00"


def test_the_summary_says_what_is_not_zero_and_the_end_event_takes_seconds() -> None:
    run = Clock().start(**{"import": 12.0, "data": 3.0, "model": 0.25}).steps(1, 1700)
    run.write("eval", 1700, 62.0, eval_s=62.0).write("skip", 1701, 2.0, step_ms=2000.0)
    run.resume(1690, down=90.0, **{"import": 12.0}).steps(1691, 1691)
    run.write("end", 1691, 1.0, stall_s=0.75, reason="done")
    result = account(run.records)
    # 15.25 + 3400 + 62 + 2 + 90 + 12 + 2 + 1 = 3584.25 s, of which 1691 steps of 2 s are 3382 s
    assert result.summary() == (
        "goodput 94.4% of 59:44: training 56:22, start-up 0:27 (import 0:24, data 0:03), evaluation 1:02, "
        "checkpoint 0:01, lost work 0:22 (10 steps lost, 1 step skipped), down 1:30 (2 attempts)"
    )
    assert result.as_dict() == {
        "training": 3382.0,
        "start_up": 27.25,
        "evaluation": 62.0,
        "checkpoint": 0.75,
        "data_wait": 0.0,
        "exchange": 0.0,
        "lost_work": 22.0,
        "down": 90.0,
        "other": 0.25,
    }
    hours = Clock().start().steps(1, 3723, seconds=1.0)
    assert account(hours.records).summary() == "goodput 100.0% of 1:02:03: training 1:02:03"


def timeline_of(run: Clock) -> Timeline:
    timeline = Timeline()
    for entry in run.records:
        timeline.add(entry)
    assert timeline.totals() == account(run.records)
    return timeline


def test_a_record_claims_the_time_just_before_it() -> None:
    run = Clock().start(model=4.0).steps(1, 2, wait=0.5)  # 5004, 5006, 5008
    run.write("eval", 2, 3.0, eval_s=2.0)  # 5011
    run.write("step", 3, 5.0, step_ms=2000.0, data_wait_s=0.5, checkpoint_stall_s=1.0)  # 5016
    run.resume(2, down=7.0, model=1.0).steps(3, 3)  # 70000, 70001, 70003
    assert timeline_of(run).intervals() == [
        Interval(0, 5000.0, 5004.0, "start_up"),
        Interval(0, 5004.0, 5004.5, "data_wait", 1),
        Interval(0, 5004.5, 5006.0, "training", 1),
        Interval(0, 5006.0, 5006.5, "data_wait", 2),
        Interval(0, 5006.5, 5008.0, "training", 2),
        Interval(0, 5008.0, 5009.0, "other"),
        Interval(0, 5009.0, 5011.0, "evaluation"),
        Interval(0, 5011.0, 5013.0, "other"),
        Interval(0, 5013.0, 5014.0, "checkpoint"),
        Interval(0, 5014.0, 5016.0, "lost_work", 3),
        Interval(0, 5016.0, 5023.0, "down"),
        Interval(1, 70000.0, 70001.0, "start_up"),
        Interval(1, 70001.0, 70003.0, "training", 3),
    ]


def test_steps_are_those_that_the_run_has() -> None:
    run = Clock().start().steps(1, 6).resume(4, down=1.0).steps(5, 5)
    timeline = timeline_of(run)
    assert timeline.step_attempts.tolist() == [0] * 4 + [1]
    assert timeline.step_ends.tolist() == [5002.0, 5004.0, 5006.0, 5008.0, 70002.0]
    assert timeline.trained.tolist() == [2.0] * 5


EVENTS = ["step"] * 6 + ["eval", "checkpoint", "skip", "rollback", "signal", "nonfinite", "end"]


def run_at_random(dice: random.Random) -> tuple[Clock, float, float]:
    """Return a run with clocks set inside attempts, the seconds of its attempts, and those between them."""
    run, inside, between, step = Clock(), 0.0, 0.0, 0
    for attempt in range(dice.randint(1, 4)):
        names = dice.sample(["import", "data", "compile"], dice.randint(0, 3))
        startup_s = {name: dice.uniform(0, 9) for name in names}
        down = dice.uniform(0, 99) if attempt else 0.0
        step = dice.randint(0, step)
        run = run.resume(step, down, **startup_s) if attempt else run.start(**startup_s)
        inside += sum(startup_s.values())
        between += down
        for _ in range(dice.randint(0, 30)):
            event, after, part = dice.choice(EVENTS), dice.uniform(0, 9), dice.uniform(0, 1.5)
            step += event == "step"
            if event == "rollback":
                step = dice.randint(0, step)
            run.wall += dice.choice([0.0] * 9 + [-3600.0, 3600.0])
            run.write(
                event,
                step,
                after,
                step_ms=1000 * after * part,
                data_wait_s=dice.uniform(0, after),
                eval_s=after * part,
                seconds=after * part,
                checkpoint_stall_s=dice.choice([0.0, after]),
            )
            inside += after
    return run, inside, between


def test_every_second_is_in_one_interval_whatever_happens() -> None:
    """300 runs at random; their time is added up beside the timeline."""
    for seed in range(300):
        run, inside, between = run_at_random(random.Random(seed))
        timeline = timeline_of(run)
        result, intervals = timeline.totals(), timeline.intervals()
        assert result.wall_s == pytest.approx(inside + between, abs=1e-6), seed
        assert result.seconds["down"] == pytest.approx(between, abs=1e-6), seed
        assert min(result.seconds.values()) >= 0.0

        by_category = dict.fromkeys(CATEGORIES, 0.0)
        for interval in intervals:
            assert interval.end > interval.begin, seed
            by_category[interval.category] += interval.end - interval.begin
        assert by_category == pytest.approx(result.seconds, abs=1e-5), seed
        for before, after in itertools.pairwise(intervals):
            if before.category != "down":
                assert (before.attempt, before.end) == (after.attempt, after.begin), seed

        kept = keep_final_steps(run.records)
        assert timeline.steps.tolist() == [record["step"] for record in kept], seed
        assert len(kept) == len(timeline.step_ends) == len(timeline.step_attempts), seed
        steps = sum(record["event"] == "step" for record in run.records)
        assert steps - result.lost_steps == len(kept), seed
