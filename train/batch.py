"""Samples of a step as tensors on the device.

    sample indices -> (source, shard, window) -> seq_len + 1 tokens each -> tokens (B, T), targets (B, T)

A window's targets are its tokens shifted by one, so that each token of a shard but the first is a target
once an epoch. With DOC_MASK the bounds of documents travel along, found here, where tokens are still on the host.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from train.config import Config
from train.distributed import World
from train.mixture import Gap, Located, Mixture, sample_range
from train.shards import ShardSet

LOOK_AHEAD = 4096  # samples located at once: the cost of a numpy call is shared by them


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one process trains on in one step.

    micro_batches: what the model's forward takes: tokens and targets, int64 (B, T) on the device, and with
    DOC_MASK the bounds of documents. scored: targets of the whole step, over all processes. samples: this
    process's indices in the order of the run.
    """

    micro_batches: Sequence[tuple[Tensor, ...]]
    scored: int
    samples: range


class Loader:
    """Batches by global step; it has no state of its own, so any step can be asked for at any time."""

    def __init__(self, c: Config, sources: Mapping[str, ShardSet], world: World, end_of_text: int = -1):
        self.c, self.world, self.sources, self.end_of_text = c, world, list(sources.values()), end_of_text
        windows = {name: shards.windows("train", c.seq_len) for name, shards in sources.items()}
        self.mixture = Mixture(windows, c.mixture, c.seed, c.group_shards)
        self.micro_batch = c.micro_batch(world.size)
        self._ahead: dict[int, tuple[Located, int]] = {}  # first sample of a step -> (located, offset in it)

    def batch(self, step: int, gaps: Sequence[Gap] = ()) -> Batch:
        """The batch of the step after `step` committed ones. Every position of pre-training text is scored."""
        samples = self.samples(step, gaps)
        located, offset = self.locate(step, samples, gaps)
        windows = self.read(located, offset, len(samples))
        parts: list[tuple[Tensor, ...]] = [
            (part[:, :-1], part[:, 1:]) for part in to_device(windows, self.world.device).split(self.micro_batch)]
        if self.c.doc_mask:
            for i, part in enumerate(parts):
                tokens = windows[i * self.micro_batch:(i + 1) * self.micro_batch, :-1]
                parts[i] = (*part, to_device(document_bounds(tokens, self.end_of_text), self.world.device))
        return Batch(parts, self.c.batch_windows * self.c.seq_len, samples)

    def samples(self, step: int, gaps: Sequence[Gap]) -> range:
        return sample_range(step, self.c.batch_windows, rank=self.world.rank, ranks=self.world.size, gaps=gaps)

    def locate(self, step: int, samples: range, gaps: Sequence[Gap]) -> tuple[Located, int]:
        """Where the samples lie: (arrays, offset of the first sample in them)."""
        if samples.start not in self._ahead:
            steps = range(step, step + max(1, LOOK_AHEAD // len(samples)))
            ranges = [self.samples(s, gaps) for s in steps]
            located = self.mixture.locate(np.concatenate([np.arange(r.start, r.stop) for r in ranges]))
            self._ahead = {r.start: (located, i * len(samples)) for i, r in enumerate(ranges)}
        return self._ahead[samples.start]

    def read(self, located: Located, offset: int, count: int) -> np.ndarray:
        """(count, T + 1) int64 tokens of located samples."""
        length = self.c.seq_len
        windows = np.empty((count, length + 1), dtype=np.int64)
        for i in range(count):
            at = offset + i
            begin = int(located.window[at]) * length
            shard = self.sources[int(located.source[at])].tokens("train", int(located.shard[at]))
            windows[i] = shard[begin:begin + length + 1]
        return windows

    def names(self, samples: Sequence[int]) -> list[str]:
        """What to call samples in a message: source:epoch:shard:window."""
        at = self.mixture.locate(np.asarray(samples, dtype=np.int64))
        return [f"{self.mixture.names[s]}:epoch {e}:{self.sources[s].shards['train'][k].file}:window {w}"
                for s, e, k, w in zip(at.source, at.epoch, at.shard, at.window, strict=True)]


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device; to a GPU without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def document_bounds(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    """(K + 1,) int32: where the documents in tokens (B, T) begin, taken as one row, and at the end B T.

    A document begins with end_of_text, and at the start of each window. K is filled up to a power of two,
    at least 64, with empty documents at the end: compiled code is made anew for every shape it meets.
    """
    begins = tokens == end_of_text
    begins[:, 0] = True
    starts = np.flatnonzero(begins)
    size = 1 << max(6, (len(starts) - 1).bit_length())
    return np.concatenate((starts, np.full(size + 1 - len(starts), tokens.size))).astype(np.int32)
