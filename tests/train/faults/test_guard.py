"""train/faults/guard.py: which steps are refused, when a run goes back, and what a resumed guard knows."""

import json
import math
import random
import statistics

import pytest

from train.data.mixture import Gap, sample_range, with_gap
from train.faults.guard import ARMED_FROM, LOOK_BACK, WINDOW, Guard


def fed(losses, norms=None, sigmas=8):
    """A guard that has seen these steps taken."""
    guard = Guard(sigmas)
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), 1):
        guard.taken(step, loss, norm)
    return guard


def noisy(count, seed=1):
    chance = random.Random(seed)
    return [chance.gauss(3.0, 0.2) for _ in range(count)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_from_the_first_step_on(value):
    for sigmas in (0, 8):
        guard = fed([], sigmas=sigmas)
        assert guard.judge(value, 1.0) == guard.judge(1.0, value) == "nonfinite"
        assert guard.judge(1e9, 1e9) is None  # too little is known of what is usual


def test_a_spike_lies_beyond_so_many_robust_deviations_of_the_window():
    losses = noisy(300)
    last = losses[-WINDOW:]
    middle = statistics.median(last)
    bound = middle + 8 * 1.4826 * statistics.median([abs(x - middle) for x in last])
    guard = fed(losses)
    assert guard.bound("loss") == pytest.approx(bound)
    assert guard.judge(bound * 1.001, 1.0) == "loss" and guard.judge(bound * 0.999, 1.0) is None
    assert guard.judge(-100.0, 0.0) is None  # only what is too large
    assert fed(losses, sigmas=0).judge(1e9, 1e9) is None


@pytest.mark.parametrize(("every", "unsettled"), [(30, 5), (4, 2), (1, 0)])
def test_behind_an_exchange_spikes_are_let_pass_and_not_remembered(every, unsettled):
    """For a few steps, and never so many that none is left before the next."""
    guard = fed([2.0] * 60, [0.5] * 60)
    guard.exchanged(every)
    for step in range(unsettled):
        assert guard.judge(9.0, 9.0) is None and guard.judge(math.nan, 1.0) == "nonfinite"
        again = Guard(8)
        again.load(json.loads(json.dumps(guard.state())))
        assert again.unsettled == unsettled - step
        guard.taken(61 + step, 9.0, 9.0)
    assert guard.judge(9.0, 0.5) == "loss" and set(guard.loss) == {2.0}


def test_a_quiet_stretch_makes_the_guard_no_more_nervous_than_so():
    guard = fed([2.0] * 60, [0.5] * 60)
    assert (guard.judge(2.31, 0.5), guard.judge(2.33, 0.5)) == (None, "loss")  # 16% of the median
    assert (guard.judge(2.0, 1.49), guard.judge(2.0, 1.51)) == (
        None,
        "grad_norm",
    )  # three times the median


def test_spikes_are_looked_for_once_enough_steps_are_known():
    assert fed([2.0] * (ARMED_FROM - 1)).judge(100.0, 1.0) is None
    assert fed([2.0] * ARMED_FROM).judge(100.0, 1.0) == "loss"


def test_one_wild_value_in_the_window_does_not_move_the_bound():
    losses = noisy(100)
    assert fed([*losses[:50], 1e6, *losses[50:]]).bound("loss") == pytest.approx(
        fed(losses).bound("loss"), rel=0.02
    )


def test_a_run_goes_back_after_so_many_skips_in_a_row_and_no_sooner():
    guard = fed([2.0] * 40)
    assert [guard.skipped() for _ in range(2)] == [False, False]
    guard.taken(41, 2.0, 1.0)
    assert [guard.skipped() for _ in range(3)] == [False, False, True]


def test_a_run_gives_up_only_if_it_does_not_get_beyond_the_place():
    guard = fed([2.0] * 40)
    guard.went_back(490, to=450)
    guard.went_back(500, to=450)
    assert not guard.gives_up
    guard.went_back(470, to=440)  # sooner than before: the place to get beyond stays
    assert guard.gives_up and guard.went_to == 440
    guard.taken(500 + LOOK_BACK, 2.0, 1.0)
    assert guard.gives_up
    guard.taken(500 + LOOK_BACK + 1, 2.0, 1.0)
    assert not guard.gives_up and guard.rollbacks == 0


def test_a_guard_from_a_checkpoint_decides_as_one_that_was_never_stopped():
    losses, norms = noisy(200), noisy(200, seed=9)
    whole = fed(losses, norms)
    whole.skipped()
    whole.went_back(190, to=180)
    first = fed(losses[:150], norms[:150])
    resumed = fed([])
    resumed.load(json.loads(json.dumps(first.state())))
    for step in range(150, 200):
        resumed.taken(step + 1, losses[step], norms[step])
    resumed.skipped()
    resumed.went_back(190, to=180)
    assert resumed.state() == whole.state()
    assert resumed.bound("loss") == whole.bound("loss") and resumed.bound(
        "grad_norm"
    ) == whole.bound("grad_norm")
    after = fed([2.0] * 40)
    after.went_back(40, to=30)
    after.load(first.state(), history=False)
    assert after.rollbacks == 1 and after.bound("loss") == first.bound("loss")


# ---- The samples that are passed over


def samples(gaps, steps, windows=10):
    return [i for step in steps for i in sample_range(step, windows, gaps=gaps)]


def test_a_skipped_step_gives_its_place_to_the_next_samples():
    gaps = with_gap(with_gap((), 4, 10), 4, 10)  # two in a row
    assert gaps == (Gap(4, 20),)
    assert samples(gaps, range(6)) == [*range(40), *range(60, 80)]


def test_going_back_passes_over_what_led_there_and_what_was_skipped_on_the_way():
    gaps = with_gap(with_gap((), 2, 10), 7, 30)  # samples 20..29, then three steps at 7: 80..109
    before = samples(gaps, range(7))
    gaps = with_gap(
        gaps, 7, 3 * 10, since=4
    )  # back to 4 or before: steps 5, 6 and 7 are passed over too
    assert samples(gaps, range(4)) == before[:40]  # what came before is as it was
    assert samples(gaps, range(4, 6)) == list(range(110, 130))
    assert gaps == (Gap(2, 10), Gap(4, 60))
