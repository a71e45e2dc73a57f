"""Samples of a step as tensors on the device.

    sample indices -> (source, shard, window) -> seq_len + 1 tokens each -> tokens (B, T), targets (B, T)

A window's targets are its tokens shifted by one, so that each token of a shard but the first is a target
once an epoch.
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

    micro_batches: (tokens, targets) pairs, int64 (B, T) on the device. scored: targets of the whole step,
    over all processes. samples: this process's indices in the order of the run.
    """

    micro_batches: list[tuple[Tensor, Tensor]]
    scored: int
    samples: range


class Loader:
    """Batches by global step; it has no state of its own, so any step can be asked for at any time."""

    def __init__(self, c: Config, sources: Mapping[str, ShardSet], world: World):
        self.c, self.world, self.sources = c, world, list(sources.values())
        windows = {name: shards.windows("train", c.seq_len) for name, shards in sources.items()}
        self.mixture = Mixture(windows, c.mixture, c.seed, c.group_shards)
        self.micro_batch = c.micro_batch(world.size)
        self._ahead: dict[int, tuple[Located, int]] = {}  # first sample of a step -> (located, offset in it)

    def batch(self, step: int, gaps: Sequence[Gap] = ()) -> Batch:
        """The batch of the step after `step` committed ones. Every position of pre-training text is scored."""
        samples = self.samples(step, gaps)
        located, offset = self.locate(step, samples, gaps)
        windows = torch.from_numpy(self.read(located, offset, len(samples)))
        device = self.world.device
        if device.type == "cuda":
            windows = windows.pin_memory().to(device, non_blocking=True)
        pairs = [(part[:, :-1], part[:, 1:]) for part in windows.split(self.micro_batch)]
        return Batch(pairs, self.c.batch_windows * self.c.seq_len, samples)

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
