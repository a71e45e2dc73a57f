"""finetune/packing.py: each example once an epoch, in windows that a slow best fit gives as well."""

import math

import numpy as np
import pytest

from finetune.packing import Packing, best_fit

RNG = np.random.default_rng(3)
LENGTHS = {
    "many sizes": RNG.integers(1, 101, 400),
    "long tail": np.minimum(100, RNG.geometric(0.05, 400)),
    "two sizes": RNG.choice([34, 67], 399),
    "full": np.full(7, 100),
    "one": np.array([1]),
    "ones": np.ones(250, dtype=np.int64),
}


def naive(sizes: list[int], capacity: int) -> list[list[int]]:
    """Windows as lists of sizes: into the one that is fullest, of those with room."""
    windows: list[list[int]] = []
    for size in sizes:
        fits = [window for window in windows if sum(window) + size <= capacity]
        if not fits:
            windows.append(fits := [])
        (max(fits, key=sum) if fits and isinstance(fits[0], list) else fits).append(size)
    return windows


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_windows_are_as_full_as_those_of_a_slow_best_fit(lengths: np.ndarray) -> None:
    packing, found = Packing(lengths, 100, 7), naive(sorted(lengths.tolist(), reverse=True), 100)
    windows = packing.epoch(0)
    made = [int(lengths[windows.examples(w)].sum()) for w in range(packing.windows)]
    assert sorted(made) == sorted(map(sum, found))  # windows of equal room may stand for each other
    assert max(made) <= 100


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("shuffled", [True, False])
def test_each_example_is_in_one_window_of_each_epoch(lengths: np.ndarray, shuffled: bool) -> None:
    packing = Packing(lengths, 100, 7, shuffled)
    for epoch in range(3):
        windows = packing.epoch(epoch)
        every = np.concatenate([windows.examples(w) for w in range(packing.windows)])
        assert (
            sorted(every.tolist()) == list(range(len(lengths)))
            and len(windows.ends) == packing.windows
        )


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    lengths = LENGTHS["long tail"]
    orders = {
        (seed, epoch): Packing(lengths, 100, seed).epoch(epoch).order.tobytes()
        for seed in (1, 2)
        for epoch in (0, 1, 2)
    }
    assert len(set(orders.values())) == 6
    later = Packing(lengths, 100, 2)
    for epoch in (2, 0, 1):  # entered anywhere, in any order
        assert later.epoch(epoch).order.tobytes() == orders[2, epoch]
    fixed = Packing(lengths, 100, 2, shuffled=False)
    assert fixed.epoch(0).order.tobytes() == fixed.epoch(1).order.tobytes()


def test_long_examples_do_not_come_first() -> None:
    lengths = np.array([90] * 200 + [10] * 100 + [30] * 300)
    packing = Packing(lengths, 100, 5)
    longest = [int(lengths[packing.epoch(0).examples(w)].max()) for w in range(packing.windows)]
    with_90 = np.flatnonzero(np.array(longest) == 90)
    assert (
        len(with_90) == 200
        and abs(with_90.mean() - (packing.windows - 1) / 2) < packing.windows / 10
    )


def test_nothing_is_lost_of_what_may_be_full() -> None:
    """Of sizes up to a tenth of a window none but the last is left with room for another."""
    lengths = np.random.default_rng(1).integers(1, 11, 5000)
    assert Packing(lengths, 100, 1).windows == math.ceil(lengths.sum() / 100)


def test_by_hand() -> None:
    assert best_fit(np.array([7, 6, 4, 3, 3, 1]), 10).tolist() == [0, 1, 1, 0, 2, 2]
    assert best_fit(np.array([6, 6, 4, 4]), 10).tolist() == [
        0,
        1,
        1,
        0,
    ]  # of equals the last filled
    assert Packing(np.empty(0, dtype=np.int64), 10, 1).windows == 0


@pytest.mark.parametrize("lengths", [[0, 5], [5, 11]])
def test_what_cannot_be_in_a_window_is_refused(lengths: list[int]) -> None:
    with pytest.raises(
        ValueError, match=rf"examples take {lengths[0]} to {lengths[1]} positions, windows have 10"
    ):
        Packing(np.array(lengths), 10, 1)
