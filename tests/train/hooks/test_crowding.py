"""train/hooks/crowding.py: cores that other processes use are reported once."""

import pytest

from train.hooks.crowding import CHECK_STEPS, Crowding


class Clock:
    """A clock that goes on by a step's seconds at each reading but the first."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.readings = -1

    def __call__(self) -> float:
        self.readings += 1
        return 1000 + self.readings * self.seconds * CHECK_STEPS


@pytest.mark.parametrize(("used_s", "share"), [(0.19, None), (0.13, None), (0.11, 55), (0.02, 10)])
def test_a_run_that_gets_too_little_of_its_cores_says_so_once(
    used_s: float, share: int | None
) -> None:
    crowding = Crowding(2, Clock(0.1), Clock(used_s))
    said = [crowding.count_step() for _ in range(3 * CHECK_STEPS)]
    expected = [""] * 3 * CHECK_STEPS
    if share:
        expected[CHECK_STEPS - 1] = (
            f"This run got {share}% of its 2 cores in the last {CHECK_STEPS} steps: other processes "
            "use them. Training goes on, more slowly."
        )
    assert said == expected
