"""What one process trains on in one step: packed windows as arrays.

    step, rank -> a range of windows of the endless sequence of epochs -> micro-batches (B, T)

A window is a few examples, one after the other. The target of a position is the next token of its
example if that is scored, else IGNORED. Positions start again with each example, and `bounds` keeps
examples apart in attention, as train/model/attention.py takes it. The rest of a window is a document
of its own, in which nothing is scored.

The scored tokens of a whole step are counted from the index, so every process knows them before the
first backward pass.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from finetune.examples import Examples
from finetune.packing import Packing
from train.data.mixture import Gap, sample_range
from train.model.loss import IGNORED

FILL = 0  # the token where there is none


class MicroBatch(NamedTuple):
    """Windows as arrays.

    Attributes:
        tokens, targets, positions: (B, T) int64.
        bounds: (K + 1,) int32, of the B T positions as one row: where each example begins, and B T at
            the end, padded with empty examples as in train/data/batch.py.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    bounds: np.ndarray


@dataclasses.dataclass(frozen=True)
class Step:
    """What a process trains on.

    Attributes:
        micro_batches: of this process.
        scored: targets of the whole step, over all processes.
        windows: the range of this process in the sequence of epochs.
        whole: whether no window of the whole step is blank.
    """

    micro_batches: Sequence[MicroBatch]
    scored: int
    windows: range
    whole: bool


class Batches:
    """Steps over the chosen examples. Without state of its own, so any step can be asked for.

    epochs: after them windows are blank, so each example is trained on exactly that often. None: no end.
    """

    def __init__(
        self,
        examples: Examples,
        chosen: np.ndarray,
        seq_len: int,
        batch_windows: int,
        micro_batch: int,
        seed: int,
        epochs: int | None = None,
        shuffled: bool = True,
    ):
        self.examples = examples
        self.chosen = chosen
        self.seq_len = seq_len
        self.batch_windows = batch_windows
        self.micro_batch = micro_batch
        self.epochs = epochs
        self.scored = examples.index["scored"][chosen].astype(np.int64)
        self.packing = Packing(examples.positions[chosen], seq_len, seed, shuffled)

    @property
    def steps(self) -> int:
        """Steps of all epochs. Some windows of the last one may be blank."""
        if self.epochs is None:
            raise ValueError("there is no last step without a number of epochs")
        return math.ceil(self.epochs * self.packing.windows / self.batch_windows)

    @property
    def filled(self) -> float:
        """Share of the positions of an epoch that examples take."""
        return float(self.packing.positions.sum()) / max(1, self.packing.windows * self.seq_len)

    def step(self, step: int, rank: int = 0, ranks: int = 1, gaps: Sequence[Gap] = ()) -> Step:
        """Return what a rank trains on in the step after `step` done ones."""
        numbers = sample_range(step, self.batch_windows, rank=rank, ranks=ranks, gaps=gaps)
        of_all = [
            self.window(number) for number in sample_range(step, self.batch_windows, gaps=gaps)
        ]
        windows = [self.window(number) for number in numbers]
        micro_batches = [
            self.arrays(windows[begin : begin + self.micro_batch])
            for begin in range(0, len(windows), self.micro_batch)
        ]
        scored = sum(int(self.scored[window].sum()) for window in of_all)
        return Step(micro_batches, scored, numbers, all(len(window) for window in of_all))

    def window(self, number: int) -> np.ndarray:
        """Return the examples of a window of the sequence of epochs, as indices into `chosen`.

        There is none after the last epoch.
        """
        epoch, window = divmod(number, max(1, self.packing.windows))
        has_ended = self.epochs is not None and epoch >= self.epochs
        if has_ended or not self.packing.windows:
            return np.empty(0, dtype=np.int64)
        return self.packing.epoch(epoch).examples(window)

    def arrays(self, windows: Sequence[np.ndarray]) -> MicroBatch:
        """Return the windows that hold these examples."""
        B, T = len(windows), self.seq_len
        tokens = np.full((B, T), FILL, dtype=np.int64)
        targets = np.full((B, T), IGNORED, dtype=np.int64)
        positions = np.zeros((B, T), dtype=np.int64)
        starts: list[int] = []
        for row, window in enumerate(windows):
            begin = 0
            for number in self.chosen[window].tolist():
                ids, scored = self.examples.example(number)
                end = begin + len(ids) - 1
                starts.append(row * T + begin)
                tokens[row, begin:end] = ids[:-1]
                targets[row, begin:end] = np.where(scored[1:], ids[1:].astype(np.int64), IGNORED)
                positions[row, begin:end] = np.arange(end - begin)
                begin = end
            if begin < T:
                starts.append(row * T + begin)
                positions[row, begin:] = np.arange(T - begin)
        return MicroBatch(tokens, targets, positions, bounds_of(starts, B * T))


def bounds_of(starts: Sequence[int], end: int) -> np.ndarray:
    """Return the starts and the end, padded to a power of two of at least 64.

    Compiled code is compiled again for every shape.
    """
    size = 1 << max(6, (len(starts) - 1).bit_length())
    padding = [end] * (size + 1 - len(starts))
    return np.array([*starts, *padding], dtype=np.int32)
