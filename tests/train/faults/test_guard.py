"""train/faults/guard.py: which steps are refused, when a run goes back, and what a resumed guard knows."""

import json
import math
import random
import statistics

import pytest

from train.faults.guard import ARMED_FROM, LOOK_BACK, MAX_SKIPS, NEW_LEVEL, WINDOW, Guard


def fed(losses, norms=None, sigmas=8):
    """A guard that has seen these steps taken."""
    guard = Guard(sigmas)
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), 1):
        guard.applied(step, loss, norm)
    return guard


def noisy(count, seed=1):
    chance = random.Random(seed)
    return [chance.gauss(3.0, 0.2) for _ in range(count)]


NOISE = noisy(300)
QUIET = ([2.0] * 60, [0.5] * 60)
MIDDLE = statistics.median(NOISE[-WINDOW:])
SPREAD = statistics.median([abs(loss - MIDDLE) for loss in NOISE[-WINDOW:]])
BOUND = MIDDLE + 8 * 1.4826 * SPREAD


@pytest.mark.parametrize(
    ("guard", "loss", "norm", "refused"),
    [
        *(
            (fed([], sigmas=sigmas), *numbers, "nonfinite")
            for sigmas in (0, 8)
            for value in (math.nan, math.inf, -math.inf)
            for numbers in ((value, 1.0), (1.0, value))
        ),
        # Too little is known of what is usual.
        (fed([2.0] * (ARMED_FROM - 1)), 1e9, 1e9, None),
        (fed([2.0] * ARMED_FROM), 100.0, 1.0, "loss"),
        # SPIKE_SIGMAS robust deviations above the window's median.
        (fed(NOISE), BOUND * 1.001, 1.0, "loss"),
        (fed(NOISE), BOUND * 0.999, 1.0, None),
        (fed(NOISE), -100.0, 0.0, None),
        (fed(NOISE, sigmas=0), 1e9, 1e9, None),
        # A quiet stretch makes it no more nervous: 16% of the median loss, three times the median norm.
        (fed(*QUIET), 2.31, 1.49, None),
        (fed(*QUIET), 2.33, 0.5, "loss"),
        (fed(*QUIET), 2.0, 1.51, "grad_norm"),
    ],
)
def test_a_step_is_refused_by_its_numbers(guard, loss, norm, refused):
    assert guard.check_step(loss, norm) == refused


def test_one_wild_value_in_the_window_does_not_move_the_bound():
    wild = fed([*NOISE[:250], 1e6, *NOISE[250:]])
    assert wild.bound("loss") == pytest.approx(fed(NOISE).bound("loss"), rel=0.02)


def reload(guard):
    """Return a guard that has loaded what this one saves."""
    again = Guard(8)
    again.load(json.loads(json.dumps(guard.state())))
    return again


@pytest.mark.parametrize(("every", "cooldown"), [(30, 5), (4, 2), (1, 0)])
def test_after_an_exchange_spikes_are_taken_and_not_remembered(every, cooldown):
    """For a few steps, and never so many that none is left before the next."""
    guard = fed(*QUIET)
    guard.synchronized(every)
    for step in range(cooldown):
        assert guard.check_step(9.0, 9.0) is None and guard.check_step(math.nan, 1.0) == "nonfinite"
        assert reload(guard).cooldown == cooldown - step
        guard.applied(61 + step, 9.0, 9.0)
    assert guard.check_step(9.0, 0.5) == "loss" and set(guard.loss) == {2.0}


def test_a_run_goes_back_after_so_many_skips_in_a_row_and_no_sooner():
    guard = fed([2.0] * 40)
    for taken, skips, expected in ((41, 2, False), (42, 3, True)):
        guard.applied(taken, 2.0, 1.0)
        for _ in range(skips):
            assert not guard.must_go_back
            guard.skipped("loss")
        assert guard.must_go_back is expected


def test_a_run_gives_up_only_if_it_does_not_get_beyond_the_place():
    guard = fed([2.0] * 40)
    guard.went_back(490, to=450)
    guard.went_back(500, to=450)
    assert not guard.gives_up
    guard.went_back(470, to=440)  # sooner than before: the place to get beyond stays
    assert guard.gives_up and guard.rollback_step == 440
    guard.applied(500 + LOOK_BACK, 2.0, 1.0)
    assert guard.gives_up
    guard.applied(500 + LOOK_BACK + 1, 2.0, 1.0)
    assert not guard.gives_up and guard.rollbacks == 0


def test_a_guard_from_a_checkpoint_decides_as_one_that_was_never_stopped():
    losses, norms = noisy(200), noisy(200, seed=9)
    whole = fed(losses, norms)
    first = fed(losses[:150], norms[:150])
    resumed = reload(first)
    for step in range(150, 200):
        resumed.applied(step + 1, losses[step], norms[step])
    for guard in (whole, resumed):
        guard.skipped("loss")
        guard.went_back(190, to=180)
    assert reload(resumed) == resumed == whole
    later = fed([2.0] * 40)
    later.went_back(40, to=30)
    later.load(first.state(), history=False)
    assert later.rollbacks == 1 and later.loss == first.loss


def test_norms_that_stay_large_while_the_loss_does_not_are_a_new_level():
    """As when a model memorizes: the run goes on, and the guard follows its norms."""
    guard = fed([2.0] * 40)
    refused = []
    for step in range(41, 91):
        reason = guard.check_step(1.9, 50.0)
        refused.append(reason)
        if reason:
            guard.skipped(reason)
        else:
            guard.applied(step, 1.9, 50.0)
    assert refused == ["grad_norm"] * NEW_LEVEL + [None] * 48
    assert guard.check_step(1.9, 500.0) == "grad_norm"  # and the guard still knows a spike


def test_a_loss_that_rises_with_its_norm_is_no_new_level():
    guard = fed([2.0] * 40)
    for _ in range(MAX_SKIPS):
        reason = guard.check_step(9.0, 50.0)
        assert reason == "loss"
        guard.skipped(reason)
    assert guard.must_go_back


def test_a_loss_near_zero_may_be_several_times_as_large_in_the_next_step():
    guard = fed([0.01, 0.002, 0.03] * 20)
    assert guard.check_step(0.3, 1.0) is None
    assert guard.check_step(0.6, 1.0) == "loss"


def memorizing(steps):
    """Numbers of a model that learns 40 samples by heart, one each step, those of 7 and 23 only at last."""
    chance = random.Random(5)
    numbers = []
    for step in range(steps):
        loss = 3 * math.exp(-step / 50) * chance.uniform(0.5, 1.5)
        norm = 2 * loss
        if step > 120 and step % 40 in (7, 23):
            loss = chance.uniform(0.8, 2.5)
            norm = 20 * loss
        numbers.append((loss, norm))
    return numbers


def count_refused(guard, numbers):
    refused = 0
    for step, (loss, norm) in enumerate(numbers, 1):
        reason = guard.check_step(loss, norm)
        if reason:
            refused += 1
            guard.skipped(reason)
        else:
            guard.applied(step, loss, norm)
    return refused


def test_a_sample_that_is_not_learned_yet_is_no_spike():
    """In fine-tuning. In pretraining, where none comes twice so soon, it is one."""
    assert count_refused(Guard(8), memorizing(400)) > 10
    guard = Guard(8, repeats=True)
    assert count_refused(guard, memorizing(400)) == 0
    first = fed([loss for loss, _ in memorizing(ARMED_FROM)]).bound("loss")
    again = Guard(8, repeats=True)
    again.load(json.loads(json.dumps(guard.state())))
    for one in (guard, again):
        assert one.check_step(first * 0.99, 1e6) is None
        assert one.check_step(first * 1.01, 1.0) == "loss"  # worse than before it learned anything
        assert one.check_step(1.0, math.inf) == "nonfinite"
