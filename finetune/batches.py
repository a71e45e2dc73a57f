"""What one process trains on in one step: packed windows as arrays.

    step, rank -> a range of windows of the endless sequence of epochs -> micro-batches (B, T)

A window is a few examples, one behind the other. The target of a position is the next token of its example where that
is scored, else IGNORED; the last token of an example is a target only. Positions begin anew with each example, and
`bounds` keeps them apart in attention, as train/model/attention.py takes it. What a window has left over at its end is a
document of its own that nothing is scored in.

The scored tokens of a whole step are counted from the index, so each process knows them before the first backward.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from finetune.packing import Packing
from finetune.store import Examples
from train.data.mixture import Gap, sample_range
from train.model.loss import IGNORED

FILL = 0  # the token where there is none


class MicroBatch(NamedTuple):
    """tokens, targets, positions (B, T) int64; bounds (K + 1,) int32: where each example of the B T positions, taken
    as one row, begins, and B T at the end, filled up with empty ones as train/data/batch.py does."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    bounds: np.ndarray


@dataclasses.dataclass(frozen=True)
class Step:
    """micro_batches: of this process; scored: targets of the whole step, over all processes; windows: the range of
    this process in the sequence of epochs; whole: whether no window of the whole step is blank."""

    micro_batches: Sequence[MicroBatch]
    scored: int
    windows: range
    whole: bool


class Batches:
    """Steps over the chosen examples; it has no state of its own, so any step can be asked for at any time.

    epochs: after which windows are blank, so that each example is trained on exactly so often; None: for ever.
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
        self.examples, self.chosen, self.seq_len, self.epochs = examples, chosen, seq_len, epochs
        self.batch_windows, self.micro_batch = batch_windows, micro_batch
        self.scored = examples.index["scored"][chosen].astype(np.int64)
        self.packing = Packing(examples.positions[chosen], seq_len, seed, shuffled)

    @property
    def steps(self) -> int:
        """Steps of all epochs; the last one's windows may be blank in part."""
        if self.epochs is None:
            raise ValueError("there is no last step without a number of epochs")
        return math.ceil(self.epochs * self.packing.windows / self.batch_windows)

    @property
    def filled(self) -> float:
        """Share of the positions of an epoch that examples take."""
        return float(self.packing.positions.sum()) / max(1, self.packing.windows * self.seq_len)

    def step(self, step: int, rank: int = 0, ranks: int = 1, gaps: Sequence[Gap] = ()) -> Step:
        """What a rank trains on in the step after `step` done ones."""
        mine = sample_range(step, self.batch_windows, rank=rank, ranks=ranks, gaps=gaps)
        whole = sample_range(step, self.batch_windows, gaps=gaps)
        contents = [self.window(number) for number in mine]
        parts = [
            contents[i : i + self.micro_batch] for i in range(0, len(contents), self.micro_batch)
        ]
        of_all = [self.window(number) for number in whole]
        scored = sum(int(self.scored[examples].sum()) for examples in of_all)
        return Step([self.arrays(part) for part in parts], scored, mine, all(map(len, of_all)))

    def window(self, number: int) -> np.ndarray:
        """The examples, as indices into `chosen`, of a window of the sequence of epochs; none where that has ended."""
        epoch, window = divmod(number, max(1, self.packing.windows))
        if not self.packing.windows or (self.epochs is not None and epoch >= self.epochs):
            return np.empty(0, dtype=np.int64)
        return self.packing.epoch(epoch).examples(window)

    def arrays(self, windows: Sequence[np.ndarray]) -> MicroBatch:
        """The windows with these examples, as many rows."""
        B, T = len(windows), self.seq_len
        tokens = np.full((B, T), FILL, dtype=np.int64)
        targets = np.full((B, T), IGNORED, dtype=np.int64)
        positions = np.zeros((B, T), dtype=np.int64)
        starts: list[int] = []
        for row, window in enumerate(windows):
            begin = 0
            for example in self.chosen[window].tolist():
                ids, scored = self.examples.of(example)
                part = slice(begin, begin := begin + len(ids) - 1)
                starts.append(row * T + part.start)
                tokens[row, part] = ids[:-1]
                targets[row, part] = np.where(scored[1:], ids[1:].astype(np.int64), IGNORED)
                positions[row, part] = np.arange(len(ids) - 1)
            if begin < T:
                starts.append(row * T + begin)
                positions[row, begin:] = np.arange(T - begin)
        return MicroBatch(tokens, targets, positions, bounds_of(starts, B * T))


def bounds_of(starts: Sequence[int], end: int) -> np.ndarray:
    """The starts and the end, filled up to a power of two, at least 64: compiled code is made anew for every shape."""
    size = 1 << max(6, (len(starts) - 1).bit_length())
    return np.array([*starts, *[end] * (size + 1 - len(starts))], dtype=np.int32)
