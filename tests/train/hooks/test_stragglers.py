"""train/hooks/stragglers.py: who is slow is named, with how slow, and not at every step."""

import pytest

from train.hooks.stragglers import AGAIN, STEPS, Stragglers


def named(compute_s, steps=50):
    """Return what is said in `steps` steps, in which rank i works for compute_s[i] seconds."""
    stragglers = Stragglers([f"host{rank // 2}" for rank in range(len(compute_s))])
    answers = [stragglers.find(step, compute_s) for step in range(1, steps + 1)]
    return [answer for answer in answers if answer]


@pytest.mark.fault(18)
@pytest.mark.parametrize(
    ("compute_s", "expected"),
    [
        ([0.1, 0.1, 0.1, 0.3], [{"rank": 3, "host": "host1", "times": 3.0, "compute_s": 0.3}]),
        ([0.05, 0.25], [{"rank": 1, "host": "host0", "times": 5.0, "compute_s": 0.25}]),
        ([0.1], []),  # alone
        ([0.1, 0.12, 0.14, 0.1], []),  # a little slower
        ([0.001, 0.009], []),  # too short to matter
    ],
)
def test_a_slow_rank_is_named_with_its_host_and_how_slow_it_is_within_50_steps(compute_s, expected):
    assert named(compute_s) == expected


def test_one_slow_step_is_no_straggler_and_a_lasting_one_is_named_again_after_a_while():
    stragglers = Stragglers(["a", "b"])
    assert not any(stragglers.find(step, [0.1, 5.0 if step == 10 else 0.1]) for step in range(40))
    first, *others = (s for s in range(40, 40 + 3 * AGAIN) if stragglers.find(s, [0.1, 0.4]))
    assert 40 <= first < 40 + STEPS and others == [first + AGAIN, first + 2 * AGAIN]
