"""record/goodput.py, Timeline: when each second of the books was, by hand and on records at random."""

import itertools
import random

import pytest

from record import reader
from record.goodput import Stretch, Timeline, account
from tests.record.test_goodput import Clock


def closed(run: Clock) -> Timeline:
    found = Timeline()
    for entry in run.records:
        found.enter(entry)
    assert found.close(None) == account(run.records)
    return found


def test_a_record_claims_the_time_just_before_it() -> None:
    run = Clock().start(model=4.0).steps(1, 2, wait=0.5)  # 5004, 5006, 5008
    run.write("eval", 2, 3.0, eval_s=2.0)  # 5011
    run.write("step", 3, 5.0, step_ms=2000.0, data_wait_s=0.5, checkpoint_stall_s=1.0)  # 5016
    run.resume(2, down=7.0, model=1.0).steps(3, 3)  # 70000, 70001, 70003
    assert closed(run).stretches() == [
        Stretch((0, 5000.0), (0, 5004.0), "start_up", 4.0),
        Stretch((0, 5004.0), (0, 5004.5), "data_wait", 0.5),
        Stretch((0, 5004.5), (0, 5006.0), "training", 1.5),
        Stretch((0, 5006.0), (0, 5006.5), "data_wait", 0.5),
        Stretch((0, 5006.5), (0, 5008.0), "training", 1.5),
        Stretch((0, 5008.0), (0, 5009.0), "other", 1.0),
        Stretch((0, 5009.0), (0, 5011.0), "evaluation", 2.0),
        Stretch((0, 5011.0), (0, 5013.0), "other", 2.0),
        Stretch((0, 5013.0), (0, 5014.0), "checkpoint", 1.0),
        Stretch((0, 5014.0), (0, 5014.5), "lost_work", 0.5),
        Stretch((0, 5014.5), (0, 5016.0), "lost_work", 1.5),
        Stretch((0, 5016.0), (1, 70000.0), "down", 7.0),
        Stretch((1, 70000.0), (1, 70001.0), "start_up", 1.0),
        Stretch((1, 70001.0), (1, 70003.0), "training", 2.0),
    ]


def test_steps_are_those_that_the_run_has() -> None:
    run = Clock().start().steps(1, 6).resume(4, down=1.0).steps(5, 5)
    found = closed(run)
    assert found.step_of.tolist() == [0] * 4 + [1]
    assert found.step_ends.tolist() == [5002.0, 5004.0, 5006.0, 5008.0, 70002.0]
    assert found.step_s.tolist() == [2.0] * 5


def test_at_random_the_stretches_are_the_books_in_order_and_without_gaps() -> None:
    for seed in range(60):
        dice, run, step = random.Random(seed), Clock(), 0
        for attempt in range(dice.randint(1, 4)):
            startup_s = {"data": dice.uniform(0, 9)} if dice.random() < 0.8 else {}
            step = dice.randint(0, step)
            run = (
                run.resume(step, dice.uniform(0, 99), **startup_s)
                if attempt
                else run.start(**startup_s)
            )
            for _ in range(dice.randint(0, 30)):
                event = dice.choice(("step", "step", "eval", "skip", "rollback", "signal"))
                after, part = dice.uniform(0, 9), dice.uniform(0, 1.5)
                step = (
                    step + 1
                    if event == "step"
                    else dice.randint(0, step)
                    if event == "rollback"
                    else step
                )
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
        found, by_category = closed(run), dict[str, float]()
        stretches = found.stretches()
        for before, after_it in itertools.pairwise(stretches):
            assert (
                before.end == pytest.approx(after_it.begin, abs=1e-6)
                and before.end[0] == after_it.begin[0]
            ), seed
        for stretch in stretches:
            by_category[stretch.category] = by_category.get(stretch.category, 0.0) + stretch.seconds
        booked = {
            category: seconds
            for category, seconds in account(run.records).seconds.items()
            if seconds > 1e-6
        }
        assert {c: s for c, s in by_category.items() if s > 1e-6} == pytest.approx(
            booked, abs=1e-5
        ), seed
        kept = reader.last_of_each_step(run.records)
        assert found.steps.tolist() == [entry["step"] for entry in kept], seed
        assert len(kept) == len(found.step_ends) == len(found.step_s) == len(found.step_of), seed
