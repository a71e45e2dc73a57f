"""Samples of a step as tensors on the device.

    sample indices -> (source, shard, window) -> seq_len + 1 tokens each -> tokens (B, T), targets (B, T)

A window's targets are its tokens shifted by one, so that each token of a shard but the first is a target
once an epoch. With DOC_MASK the bounds of documents travel along, found here, where tokens are still on the host.
Shards are hashed by a thread before they are read, those of the next group while this one is trained on. While
sources are still being made a batch may not be there yet: `lacking` tells.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from settings.config import Config
from train.data import data_paths
from train.data.mixture import Gap, Located, Mixture, sample_range
from train.data.shards import ShardSet
from train.distributed.world import World

LOOK_AHEAD = 4096  # samples located at once: the cost of a numpy call is shared by them


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one process trains on in one step.

    micro_batches: what the model's forward takes: tokens and targets, int64 (B, T) on the device, and with
    DOC_MASK the bounds of documents. scored: targets of the whole step, over all processes of a site. samples: this
    process's indices in the order of the run. whole: whether there is something in each of the step's samples; the last
    of a fine-tuning's epochs may have little, whose loss and gradient are not as those of others.
    """

    micro_batches: Sequence[tuple[Tensor, ...]]
    scored: int
    samples: range
    whole: bool = True


class Loader:
    """Batches by global step; it has no state of its own, so any step can be asked for at any time."""

    def __init__(self, c: Config, sources: Mapping[str, ShardSet], world: World, end_of_text: int):
        self.c, self.world, self.sources, self.end_of_text = (
            c,
            world,
            list(sources.values()),
            end_of_text,
        )
        windows = {name: shards.windows("train", c.seq_len) for name, shards in sources.items()}
        growing = [name for name, shards in sources.items() if not shards.ended]
        self.mixture = Mixture(windows, c.mixture, c.seed, data_paths.GROUP_SHARDS, growing)
        self.micro_batch = c.micro_batch(world.size * c.replicas)
        self._ahead: dict[
            int, tuple[Located, int]
        ] = {}  # first sample of a step -> (located, offset in it)

    def batch(self, step: int, gaps: Sequence[Gap] = ()) -> Batch:
        """The batch of the step after `step` committed ones. Every position of pre-training text is scored."""
        samples = self.samples(step, gaps)
        located, offset = self.locate(step, samples, gaps)
        windows = self.read(located, offset, len(samples))
        parts = self.micro_batches(windows, self.micro_batch)
        return Batch(parts, self.c.batch_windows // self.c.replicas * self.c.seq_len, samples)

    def micro_batches(self, windows: np.ndarray, size: int) -> list[tuple[Tensor, ...]]:
        """Return windows (N, T + 1) in parts of `size` samples, as the model's forward takes them."""
        parts: list[tuple[Tensor, ...]] = []
        for i, part in enumerate(to_device(windows, self.world.device).split(size)):
            inputs: tuple[Tensor, ...] = (part[:, :-1], part[:, 1:])
            if self.c.doc_mask:
                tokens = windows[i * size : (i + 1) * size, :-1]
                bounds = document_bounds(tokens, self.end_of_text)
                inputs = (*inputs, to_device(bounds, self.world.device))
            parts.append(inputs)
        return parts

    def blank(self) -> tuple[Tensor, ...]:
        """A micro-batch of the shape that all have, of the first token only; reads no shard."""
        windows = np.zeros((self.micro_batch, self.c.seq_len + 1), dtype=np.int64)
        tensor = to_device(windows, self.world.device)
        bounds = [to_device(document_bounds(windows[:, :-1], self.end_of_text), self.world.device)]
        return (tensor[:, :-1], tensor[:, 1:], *(bounds if self.c.doc_mask else ()))

    def samples(self, step: int, gaps: Sequence[Gap]) -> range:
        return sample_range(
            step,
            self.c.batch_windows,
            replica=self.c.site_rank,
            replicas=self.c.replicas,
            rank=self.world.rank,
            ranks=self.world.size,
            gaps=gaps,
        )

    def locate(self, step: int, samples: range, gaps: Sequence[Gap]) -> tuple[Located, int]:
        """Where the samples lie: (arrays, offset of the first sample in them)."""
        if samples.start not in self._ahead:
            steps = max(1, LOOK_AHEAD // len(samples))
            while steps > 1 and self.mixture.lacking(self.end_of(step + steps - 1, gaps)):
                steps //= 2
            ranges = [self.samples(s, gaps) for s in range(step, step + steps)]
            located = self.mixture.locate(
                np.concatenate([np.arange(r.start, r.stop) for r in ranges])
            )
            self._ahead = {r.start: (located, i * len(samples)) for i, r in enumerate(ranges)}
            self.open_shards(located, ranges[-1].stop)
        return self._ahead[samples.start]

    def end_of(self, step: int, gaps: Sequence[Gap]) -> int:
        """The sample behind those of the step after `step` committed ones, over all processes."""
        return sample_range(step, self.c.batch_windows, gaps=gaps).stop

    def open_shards(self, located: Located, end: int) -> None:
        """Have the shards of these samples hashed, and behind them those of each source's open and next group."""
        for s, (shards, order, count) in enumerate(
            zip(self.sources, self.mixture.orders, self.mixture.counts(end), strict=True)
        ):
            now = np.unique(located.shard[located.source == s]).tolist()
            shards.keep_open(now)
            group = order.group_of(count)
            following = (*order.shards_of(group), *order.shards_of(group + 1))
            for k in (*now, *(k for k in following if k not in now and shards.is_there(k))):
                shards.check_soon("train", k)

    def lacking(self, step: int, gaps: Sequence[Gap]) -> str:
        """The source that the step after `step` committed ones has to wait for; "" where all is there."""
        end = self.end_of(step, gaps)
        if (lacking := self.mixture.lacking(end)) and self.grow():
            lacking = self.mixture.lacking(end)
        return lacking or self.absent(end - self.c.batch_windows, end)

    def absent(self, begin: int, end: int) -> str:
        """The source of which a shard was deleted that lies in a group of these samples."""
        for shards, order, first, last in zip(
            self.sources,
            self.mixture.orders,
            self.mixture.counts(begin),
            self.mixture.counts(end),
            strict=True,
        ):
            if shards.partial and last > first:
                for group in order.groups(first, last):
                    if not all(map(shards.is_there, order.shards_of(group))):
                        return order.name
        return ""

    def grow(self) -> bool:
        """Take in what was made since; whether that is anything."""
        grown = [
            (shards, order)
            for shards, order in zip(self.sources, self.mixture.orders, strict=True)
            if not order.ended and shards.refresh()
        ]
        for shards, order in grown:
            self.mixture.grow(order.name, shards.windows("train", self.c.seq_len), shards.ended)
        return bool(grown)

    def groups(self, taken: Mapping[str, int]) -> list[int]:
        """The group of each source that its next window lies in."""
        return [order.group_of(taken[order.name]) for order in self.mixture.orders]

    def trained(self, step: int, gaps: Sequence[Gap]) -> dict[str, int]:
        """Windows of each source that the model behind `step` steps has seen: the order without its gaps."""
        taken, passed = self.taken(step, gaps), 0
        for gap in sorted((gap for gap in gaps if gap.step <= step), key=lambda gap: gap.step):
            begin = gap.step * self.c.batch_windows + passed
            passed += gap.windows
            for name, before, behind in zip(
                self.mixture.names,
                self.mixture.counts(begin),
                self.mixture.counts(begin + gap.windows),
                strict=True,
            ):
                taken[name] -= behind - before
        return taken

    def shares(self, step: int, gaps: Sequence[Gap]) -> dict[str, dict[str, float]]:
        """source -> tokens that the model has seen of it, their share of all, and how often it has seen each."""
        windows = self.trained(step, gaps)
        total = max(1, sum(windows.values()))
        return {
            order.name: {
                "tokens": windows[order.name] * self.c.seq_len,
                "share": windows[order.name] / total,
                "epochs": windows[order.name] / order.sealed if order.ended else 0.0,
            }
            for order in self.mixture.orders
        }

    def opened(self, step: int, gaps: Sequence[Gap]) -> dict[str, dict[str, Any]]:
        """What of each source the order behind `step` steps depends on: the shards up to the open group's end.

        source -> shards: how many, digest: of their hashes, round: whether all are, as an epoch has ended
        """
        found = {}
        taken = self.taken(step, gaps)
        for shards, order in zip(self.sources, self.mixture.orders, strict=True):
            count = taken[order.name]
            gone_round = order.ended and count >= order.sealed
            number = 0
            if gone_round:
                number = len(order.shard_ends)
            elif count:
                number = order.shards_of(order.group_of(count - 1)).stop
            found[order.name] = {
                "shards": number,
                "digest": self.digest(shards, number),
                "round": gone_round,
            }
        return found

    @staticmethod
    def digest(shards: ShardSet, number: int) -> str:
        return hashlib.sha256(
            repr([info.xxh3 for info in shards.shards["train"][:number]]).encode()
        ).hexdigest()[:16]

    def differs(self, opened: Mapping[str, Mapping[str, Any]]) -> str:
        """The source of which what was opened is not what there is now; "" where all are the same."""
        for shards, order in zip(self.sources, self.mixture.orders, strict=True):
            if order.name not in opened:
                return order.name
            then = opened[order.name]
            number = then["shards"]
            ends = [0, *order.group_shard_ends]
            fits = (
                order.ended and number == len(order.shard_ends) if then["round"] else number in ends
            )
            if not fits or self.digest(shards, number) != then["digest"]:
                return order.name
        return ""

    def taken(self, step: int, gaps: Sequence[Gap]) -> dict[str, int]:
        """Windows of each source that the order of the run is past behind `step` steps, gaps included."""
        end = sample_range(step, self.c.batch_windows, gaps=gaps).start
        return dict(zip(self.mixture.names, self.mixture.counts(end), strict=True))

    def read(self, located: Located, offset: int, count: int) -> np.ndarray:
        """(count, T + 1) int64 tokens of located samples."""
        length = self.c.seq_len
        windows = np.empty((count, length + 1), dtype=np.int64)
        for i in range(count):
            at = offset + i
            begin = int(located.window[at]) * length
            shard = self.sources[int(located.source[at])].tokens("train", int(located.shard[at]))
            windows[i] = shard[begin : begin + length + 1]
        return windows

    def names(self, samples: Sequence[int]) -> list[str]:
        """What to call samples in a message: source:epoch:shard:window."""
        at = self.mixture.locate(np.asarray(samples, dtype=np.int64))
        return [
            f"{self.mixture.names[s]}:epoch {e}:{self.sources[s].shards['train'][k].file}:window {w}"
            for s, e, k, w in zip(at.source, at.epoch, at.shard, at.window, strict=True)
        ]


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
