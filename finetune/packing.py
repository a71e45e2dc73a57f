"""Examples of any length to windows of SEQ_LEN positions: best fit, the longest first.

    epoch -> the windows of that epoch, each a few whole examples; every example is in one of them

A pure function of the examples' lengths, seed and epoch, and so the same for any number of processes. Each example
goes, the longest first, into the fullest window that has room for it. How many windows that takes, and how long the
examples of each are, depends on the lengths alone, so it is found once; an epoch decides which examples of a length go
where, and in which order the windows come.
"""

import dataclasses
import functools

import numpy as np

from train.data.mixture import key_of, permute


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of an epoch. order (examples,) int64: examples, those of a window together; ends (windows,) int64:
    where in it those of each window end."""

    order: np.ndarray
    ends: np.ndarray

    def examples(self, window: int) -> np.ndarray:
        """The examples of a window, in their order there."""
        return self.order[int(self.ends[window - 1]) if window else 0 : int(self.ends[window])]


class Packing:
    """The windows of every epoch. positions (examples,) int64: that each example takes, at least 1 and at most
    seq_len. shuffled: False keeps one order, for evaluation."""

    def __init__(self, positions: np.ndarray, seq_len: int, seed: int, shuffled: bool = True):
        if len(positions) and not (positions.min() >= 1 and positions.max() <= seq_len):
            raise ValueError(
                f"examples take {positions.min()} to {positions.max()} positions, windows have {seq_len}"
            )
        self.positions, self.seed, self.shuffled = positions, seed, shuffled
        self.window_of = best_fit(
            np.sort(positions)[::-1], seq_len
        )  # of the longest example, the next, and so on
        self.windows = int(self.window_of.max()) + 1 if len(positions) else 0
        self.epoch = functools.lru_cache(maxsize=2)(self.made)  # a step may lie in two

    def made(self, epoch: int) -> Windows:
        """The windows of an epoch."""
        examples, places = np.arange(len(self.positions)), np.arange(self.windows)
        if self.shuffled and len(examples):
            examples = permute(
                examples, len(examples), np.asarray(key_of(self.seed, "examples", epoch))
            )
            places = permute(places, self.windows, np.asarray(key_of(self.seed, "windows", epoch)))
        by_length = examples[np.argsort(-self.positions[examples], kind="stable")]
        place = places[self.window_of]
        return Windows(
            by_length[np.argsort(place, kind="stable")],
            np.cumsum(np.bincount(place, minlength=self.windows)),
        )


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """(n,) int64: the window that each size goes into, in turn: the fullest with room, of equals the last filled."""
    window_of = np.empty(len(sizes), dtype=np.int64)
    open_with: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room that is left
    rooms, windows = 0, 0  # rooms: bit r is set where there is a window with room r
    for i, size in enumerate(sizes.tolist()):
        if fits := rooms >> size:
            room = size + (fits & -fits).bit_length() - 1
            window = open_with[room].pop()
            if not open_with[room]:
                rooms ^= 1 << room
        else:
            room, window, windows = capacity, windows, windows + 1
        if left := room - size:
            open_with[left].append(window)
            rooms |= 1 << left
        window_of[i] = window
    return window_of
