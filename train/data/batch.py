"""Samples of a step as tensors on the device.

    sample indices -> (source, shard, window) -> seq_len + 1 tokens each -> tokens (B, T), targets (B, T)

The targets of a window are its tokens shifted by one, so that each token of a shard but the first is a
target once per epoch. With DOC_MASK the bounds of documents are found here, where tokens are still on
the host. Shards are hashed by a thread before they are read, those of the next group while this one is
trained on. While sources are still being made a batch may not be there yet: `missing` tells.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from settings.config import Config
from train.data import data_paths
from train.data.manifest import UNPROTECTED, DataError
from train.data.mixture import Gap, Located, Mixture, SourceOrder, sample_range
from train.data.shards import ShardSet
from train.distributed.world import World

LOOK_AHEAD = 4096  # samples located at once: they share the cost of a numpy call


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one process trains on in one step.

    Attributes:
        micro_batches: what the model's forward takes: tokens and targets, int64 (B, T) on the device, and
            with DOC_MASK the bounds of documents.
        scored: targets of the whole step, over all processes of a site.
        samples: this process's indices in the order of the run.
        whole: whether each of the step's samples has something in it. The last batch of a fine-tuning's
            epochs may have little, whose loss and gradient are unlike those of others.
        problem: why this process must not train on its data. `scored` is NaN then, so that the loss is
            not finite, and all processes refuse the step together.
    """

    micro_batches: Sequence[tuple[Tensor, ...]]
    scored: float
    samples: range
    whole: bool = True
    problem: DataError | None = None


class Loader:
    """Batches by global step; any step can be asked for at any time."""

    def __init__(
        self, config: Config, sources: Mapping[str, ShardSet], world: World, end_of_text: int
    ):
        self.config = config
        self.world = world
        self.by_name = sources
        self.sources = list(sources.values())
        self.end_of_text = end_of_text
        self.mixture = self.build_mixture()
        self.micro_batch = config.micro_batch(world.size * config.replicas)
        # First sample of a step -> where samples lie, and the offset of the step's first in that.
        self._ahead: dict[int, tuple[Located, int]] = {}

    # ---- Batches

    def batch(self, step: int, gaps: Sequence[Gap] = ()) -> Batch:
        """Return the batch of the step after `step` committed ones. Every position is scored."""
        config = self.config
        samples = self.samples(step, gaps)
        scored: float = config.batch_windows // config.replicas * config.seq_len
        problem = None
        try:
            located, offset = self.locate(step, samples, gaps)
            windows = self.read(located, offset, len(samples))
        except DataError as error:
            # Raised at once, it would leave the other processes waiting in their collectives.
            problem = error
            scored = math.nan
            windows = np.zeros((len(samples), config.seq_len + 1), dtype=np.int64)
        parts = self.micro_batches(windows, self.micro_batch)
        return Batch(parts, scored, samples, problem=problem)

    def micro_batches(self, windows: np.ndarray, size: int) -> list[tuple[Tensor, ...]]:
        """Return windows (N, T + 1) in parts of `size` samples, as the model's forward takes them."""
        device = self.world.device
        parts: list[tuple[Tensor, ...]] = []
        for number, part in enumerate(to_device(windows, device).split(size)):
            inputs: tuple[Tensor, ...] = (part[:, :-1], part[:, 1:])
            if self.config.doc_mask:
                begin = number * size
                bounds = document_bounds(windows[begin : begin + size, :-1], self.end_of_text)
                inputs = (*inputs, to_device(bounds, device))
            parts.append(inputs)
        return parts

    def blank(self) -> tuple[Tensor, ...]:
        """Return a micro-batch of the usual shape, of token 0 only; reads no shard."""
        windows = np.zeros((self.micro_batch, self.config.seq_len + 1), dtype=np.int64)
        return self.micro_batches(windows, self.micro_batch)[0]

    def read(self, located: Located, offset: int, count: int) -> np.ndarray:
        """Return (count, T + 1) int64 tokens of located samples. Raises DataError."""
        length = self.config.seq_len
        windows = np.empty((count, length + 1), dtype=np.int64)
        sources = located.source[offset : offset + count]
        shards = located.shard[offset : offset + count]
        begins = located.window[offset : offset + count] * length
        for source, shard in sorted(set(zip(sources.tolist(), shards.tolist(), strict=True))):
            rows = (sources == source) & (shards == shard)
            spans = [(begin, begin + length + 1) for begin in begins[rows].tolist()]
            windows[rows] = self.sources[source].read("train", shard, spans)
        return windows

    # ---- Samples

    def samples(self, step: int, gaps: Sequence[Gap]) -> range:
        """Return this process's samples of the step after `step` committed ones."""
        return sample_range(
            step,
            self.config.batch_windows,
            replica=self.config.site_rank,
            replicas=self.config.replicas,
            rank=self.world.rank,
            ranks=self.world.size,
            gaps=gaps,
        )

    def step_range(self, step: int, gaps: Sequence[Gap]) -> range:
        """Return the samples of the step after `step` committed ones, over all processes."""
        return sample_range(step, self.config.batch_windows, gaps=gaps)

    def locate(self, step: int, samples: range, gaps: Sequence[Gap]) -> tuple[Located, int]:
        """Return where samples lie: arrays, and the offset of the first sample in them."""
        if samples.start not in self._ahead:
            steps = max(1, LOOK_AHEAD // len(samples))
            while steps > 1 and self.mixture.missing(self.step_range(step + steps - 1, gaps).stop):
                steps //= 2
            ranges = [self.samples(later, gaps) for later in range(step, step + steps)]
            numbers = [np.arange(each.start, each.stop) for each in ranges]
            located = self.mixture.locate(np.concatenate(numbers))
            self._ahead = {
                each.start: (located, number * len(samples)) for number, each in enumerate(ranges)
            }
            self.open_shards(located, ranges[-1].stop)
        return self._ahead[samples.start]

    def open_shards(self, located: Located, end: int) -> None:
        """Have the shards of these samples hashed, and then those of each source's open and next group."""
        counts = self.mixture.counts(end)
        for number, (shards, order) in enumerate(self.pairs()):
            now = np.unique(located.shard[located.source == number]).tolist()
            shards.keep_open([*now, *order.needed(counts[number], counts[number])])

    def names(self, samples: Sequence[int]) -> list[str]:
        """Return what to call samples in a message: source:epoch:shard:window."""
        at = self.mixture.locate(np.asarray(samples, dtype=np.int64))
        names = []
        for source, epoch, shard, window in zip(
            at.source, at.epoch, at.shard, at.window, strict=True
        ):
            file = self.sources[source].shards["train"][shard].file
            names.append(f"{self.mixture.names[source]}:epoch {epoch}:{file}:window {window}")
        return names

    # ---- Which shards there are

    def pairs(self) -> list[tuple[ShardSet, SourceOrder]]:
        """Return the shards and the order of each source."""
        return list(zip(self.sources, self.mixture.orders, strict=True))

    def missing(self, step: int, gaps: Sequence[Gap]) -> str:
        """Return the source that the step after `step` committed ones has to wait for; "" if all is there."""
        samples = self.step_range(step, gaps)
        if self.mixture.missing(samples.stop):
            self.grow()
        return self.mixture.missing(samples.stop) or self.missing_on_disk(
            samples.start, samples.stop
        )

    def missing_on_disk(self, begin: int, end: int) -> str:
        """Return the source with a deleted shard in a group of these samples; "" if there is none."""
        firsts = self.mixture.counts(begin)
        lasts = self.mixture.counts(end)
        for (shards, order), first, last in zip(self.pairs(), firsts, lasts, strict=True):
            if not shards.partial or last == first:
                continue
            if not all(map(shards.is_there, order.needed(first, last, more=0))):
                return order.name
        return ""

    def build_mixture(self) -> Mixture:
        """Return the order of all samples, as far as the shards go that there are."""
        config = self.config
        windows = {
            name: shards.windows("train", config.seq_len) for name, shards in self.by_name.items()
        }
        growing = [name for name, shards in self.by_name.items() if not shards.ended]
        return Mixture(windows, config.mixture, config.seed, data_paths.GROUP_SHARDS, growing)

    def grow(self) -> None:
        """Take in the shards that were made since; the order of the others stays."""
        for shards in self.sources:
            if not shards.ended:
                shards.refresh()
        self.mixture = self.build_mixture()

    def open_groups(self, consumed: Mapping[str, int]) -> list[list[int]]:
        """Return the shards of the group of each source that its next window lies in."""
        orders = self.mixture.orders
        return [
            order.needed(consumed[order.name], consumed[order.name], more=0) for order in orders
        ]

    # ---- What the run has used of them

    def consumed(self, step: int, gaps: Sequence[Gap]) -> dict[str, int]:
        """Return the windows of each source that the order is past after `step` steps, gaps included."""
        counts = self.mixture.counts(self.step_range(step, gaps).start)
        return dict(zip(self.mixture.names, counts, strict=True))

    def trained(self, step: int, gaps: Sequence[Gap]) -> dict[str, int]:
        """Return the windows of each source that the model has seen after `step` steps: without gaps."""
        windows = self.consumed(step, gaps)
        passed = 0
        for gap in sorted((gap for gap in gaps if gap.step <= step), key=lambda gap: gap.step):
            begin = gap.step * self.config.batch_windows + passed
            passed += gap.windows
            before = self.mixture.counts(begin)
            after = self.mixture.counts(begin + gap.windows)
            for number, name in enumerate(self.mixture.names):
                windows[name] -= after[number] - before[number]
        return windows

    def shares(self, step: int, gaps: Sequence[Gap]) -> dict[str, dict[str, float]]:
        """Return of each source the tokens that the model has seen, their share of all, and the epochs."""
        windows = self.trained(step, gaps)
        total = max(1, sum(windows.values()))
        shares = {}
        for order in self.mixture.orders:
            trained = windows[order.name]
            shares[order.name] = {
                "tokens": trained * self.config.seq_len,
                "share": trained / total,
                "epochs": trained / order.sealed if order.ended else 0.0,
            }
        return shares

    def opened(self, step: int, gaps: Sequence[Gap]) -> dict[str, dict[str, Any]]:
        """Return what the order after `step` steps depends on: the shards up to the end of the open group.

        Returns:
            By source: `shards`, how many; `digest` of their hashes; `round`, whether these are all there
            are, since an epoch has ended; `hashed`, True if the manifest has a hash.
        """
        opened = {}
        consumed = self.consumed(step, gaps)
        for shards, order in self.pairs():
            count = consumed[order.name]
            has_gone_round = order.ended and count >= order.sealed
            number = 0
            if has_gone_round:
                number = len(order.shard_ends)
            elif count:
                number = order.shards_of(order.turn_of(count - 1)).stop
            digest = self.digest(shards, number)
            opened[order.name] = {"shards": number, "digest": digest, "round": has_gone_round}
            if shards.manifest.schema != UNPROTECTED:
                opened[order.name]["hashed"] = True
        return opened

    @staticmethod
    def digest(shards: ShardSet, number: int) -> str:
        """Return a hash of the first `number` training shards."""
        hashes = [info.xxh3 for info in shards.shards["train"][:number]]
        return hashlib.sha256(repr(hashes).encode()).hexdigest()[:16]

    def differs(
        self, opened: Mapping[str, Mapping[str, Any]], step: int, gaps: Sequence[Gap]
    ) -> str:
        """Compare what `opened` returned for a step with what it returns now.

        Returns the source of which the shards or the order are other ones, or whose manifest has lost
        its hash; "" if all are the same.
        """
        for name, now in self.opened(step, gaps).items():
            if name not in opened or not opened[name].items() <= now.items():
                return name
        return ""


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return the array on the device; to a GPU without waiting for it."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def document_bounds(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    """Find where documents begin in tokens (B, T), taken as one row.

    A document begins with end_of_text, and at the start of each window.

    Returns:
        (K + 1,) int32, with B T at the end. K is filled up to a power of two, at least 64, with empty
        documents at the end: torch.compile compiles again for every new shape.
    """
    begins = tokens == end_of_text
    begins[:, 0] = True
    starts = np.flatnonzero(begins)
    size = 1 << max(6, (len(starts) - 1).bit_length())
    ends = np.full(size + 1 - len(starts), tokens.size)
    return np.concatenate((starts, ends)).astype(np.int32)
