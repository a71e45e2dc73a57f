"""train/hooks/stragglers.py: who is slow is named, with how slow, and not at every step."""

import itertools

import pytest

from train.hooks.stragglers import AGAIN, STEPS, Stragglers


def found(times, steps=STEPS):
    stragglers = Stragglers([f"host{rank // 2}" for rank in range(len(times))])
    answers = [stragglers.find(step, times) for step in range(1, steps + 1)]
    return [answer for answer in answers if answer]


@pytest.mark.fault(18)
def test_a_slow_rank_is_named_with_its_host_and_how_slow_it_is_within_50_steps():
    (slow,) = found([0.1, 0.1, 0.1, 0.3], steps=50)
    assert slow == {"rank": 3, "host": "host1", "times": 3.0, "own_s": 0.3}
    (slow,) = found([0.05, 0.25], steps=50)
    assert (slow["rank"], slow["times"]) == (1, 5.0)


@pytest.mark.parametrize(
    "times",
    [[0.1], [0.1, 0.12, 0.14, 0.1], [0.001, 0.009]],
    ids=["alone", "a little slower", "too short to matter"],
)
def test_who_is_alone_or_hardly_slower_is_not_named(times):
    assert found(times, steps=100) == []


def test_one_slow_step_is_no_straggler_and_a_lasting_one_is_named_again_after_a_while():
    stragglers = Stragglers(["a", "b"])
    assert not any(stragglers.find(step, [0.1, 5.0 if step == 10 else 0.1]) for step in range(40))
    steps = [step for step in range(40, 40 + 3 * AGAIN) if stragglers.find(step, [0.1, 0.4])]
    assert 40 <= steps[0] < 40 + STEPS and [b - a for a, b in itertools.pairwise(steps)] == [
        AGAIN,
        AGAIN,
    ]
