"""Which window of which source is the i-th sample of a run: a pure function, so that position is one integer.

    global step, replica, rank -> a range of sample indices -> (source, epoch, shard, window) of each

The order is the same whatever the number of ranks, and may be entered anywhere. Sources are interleaved
in blocks as long as the sum of their integer weights; each block holds each source exactly as often as
its weight, in an order of its own. Within a source every window comes once an epoch. Windows are shuffled
inside groups of consecutive shards, and groups follow one another, so that only the open group is read. The
first groups are small, of 1, 1, 2, 4 shards, so that a source that is still being made may begin; its order is
the one that it has when it is finished.

Permutations are Feistel networks with cycle walking: a bijection on [0, n) in O(1) memory, defined here
to the bit. (A library's shuffle may change with its version, and with it the order of a resumed run.)
"""

import dataclasses
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

ROUNDS = 6
_U64 = np.uint64


def key_of(*parts: object) -> np.uint64:
    """64 bits that depend on all parts."""
    return _U64(
        int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
    )


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014) on uint64, wrapping."""
    x = x + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def permute(positions: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Where a keyed permutation of [0, n) sends each position.

    positions (k,) int64 in [0, n); keys uint64, (k,) or one for all: each key is another permutation.
    Returns (k,) int64.
    """
    bits = max(2, (n - 1).bit_length())
    low = _U64(bits // 2)
    masks = (_U64((1 << (bits - bits // 2)) - 1), _U64((1 << (bits // 2)) - 1))
    keys = np.broadcast_to(keys, positions.shape)
    result = positions.astype(_U64)
    outside = np.arange(len(result))
    while len(
        outside
    ):  # the network permutes [0, 2^bits), at most 2 n; walk on until inside [0, n)
        x, key = result[outside], keys[outside]
        left, right = x >> low, x & masks[1]
        for t in range(
            ROUNDS
        ):  # the halves differ in width where bits is odd, and trade places each round
            left, right = right, left ^ (mix64(right ^ key ^ _ROUND_KEYS[t]) & masks[t % 2])
        result[outside] = x = (left << low) | right
        outside = outside[x >= _U64(n)]
    return result.astype(np.int64)


_ROUND_KEYS = mix64(np.arange(ROUNDS, dtype=_U64))


@dataclasses.dataclass(frozen=True)
class Gap:
    """From `step` on, `windows` further samples of the order are passed over."""

    step: int
    windows: int


def with_gap(
    gaps: Sequence[Gap], step: int, windows: int, since: int | None = None
) -> tuple[Gap, ...]:
    """The gaps of a run that, having done `step` steps, passes over the next `windows` samples.

    since: it goes back, and passes over all samples from that step on, those of earlier gaps included.
    """
    begin = step if since is None else since
    kept = [gap for gap in gaps if gap.step < begin]
    inside = sum(gap.windows for gap in gaps if gap.step >= begin)
    return (*kept, Gap(begin, inside + windows))


def sample_range(
    step: int,
    batch_windows: int,
    *,
    replica: int = 0,
    replicas: int = 1,
    rank: int = 0,
    ranks: int = 1,
    gaps: Sequence[Gap] = (),
) -> range:
    """Sample indices that one rank trains on in the step after `step` committed ones.

    A step takes batch_windows consecutive samples; replicas, and the ranks within each, take equal
    consecutive parts. Raises ValueError where they do not divide evenly.
    """
    parts = replicas * ranks
    if batch_windows % parts:
        raise ValueError(
            f"{batch_windows} windows a step do not divide over {replicas} replicas of {ranks} ranks"
        )
    share = batch_windows // parts
    first = step * batch_windows + sum(gap.windows for gap in gaps if gap.step <= step)
    first += (replica * ranks + rank) * share
    return range(first, first + share)


def group_ends(shards: int, group_shards: int, ended: bool) -> list[int]:
    """Behind which shards the groups end: of 1, 1, 2, 4, ... and then group_shards shards each.

    The last group may be smaller, once the source has ended; until then it is not there.
    """
    ends: list[int] = []
    size = 1
    while not ends or ends[-1] < shards:
        ends.append((ends[-1] if ends else 0) + min(size, group_shards))
        size *= 2 if len(ends) > 1 else 1
    whole = [end for end in ends if end <= shards]
    return [*whole, shards] if ended and shards and (not whole or whole[-1] < shards) else whole


@dataclasses.dataclass(frozen=True)
class Located:
    """Where samples lie, as int64 arrays of equal length: index into the sources, epoch, shard, window."""

    source: np.ndarray
    epoch: np.ndarray
    shard: np.ndarray
    window: np.ndarray


class NotSealed(Exception):
    """Samples are asked for that lie in a group which is not whole yet."""


class SourceOrder:
    """The order of one source's windows: groups in sequence, shuffled within, anew each epoch.

    shard_windows: windows of each shard that there is; ended: there will be no more.
    """

    def __init__(
        self,
        name: str,
        shard_windows: Sequence[int],
        group_shards: int,
        seed: int,
        ended: bool = True,
    ):
        self.name, self.key, self.ended = name, key_of(seed, name), ended
        self.shard_ends = np.cumsum(np.asarray(shard_windows, dtype=np.int64))
        self.shard_begins = np.concatenate(([0], self.shard_ends[:-1]))
        self.group_shard_ends = group_ends(len(shard_windows), group_shards, ended)
        self.group_ends = self.shard_ends[[end - 1 for end in self.group_shard_ends]]
        self.sealed = (
            int(self.group_ends[-1]) if len(self.group_ends) else 0
        )  # windows in whole groups
        if self.sealed == 0 and ended:
            raise ValueError(
                f"source {name} has no window to train on: it is shorter than SEQ_LEN + 1 tokens"
            )

    def locate(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(epoch, shard, window in the shard) of the source's counts-th samples ever. counts (k,) int64.

        Raises NotSealed.
        """
        if not self.ended and len(counts) and int(counts.max()) >= self.sealed:
            raise NotSealed(self.name)
        epoch, position = np.divmod(counts, max(1, self.sealed))
        group = np.searchsorted(self.group_ends, position, side="right")
        keys = mix64(self.key ^ mix64((epoch * len(self.group_ends) + group).astype(_U64)))
        place = np.empty_like(position)
        for g in np.unique(group):
            chosen = group == g
            begin = int(self.group_ends[g - 1]) if g else 0
            size = int(self.group_ends[g]) - begin
            place[chosen] = begin + permute(position[chosen] - begin, size, keys[chosen])
        shard = np.searchsorted(self.shard_ends, place, side="right")
        return epoch, shard, place - self.shard_begins[shard]

    def group_of(self, count: int) -> int:
        """The group that the source's count-th sample lies in; the next to be made if that is not whole."""
        if not self.ended and count >= self.sealed:
            return len(self.group_ends)
        return int(np.searchsorted(self.group_ends, count % self.sealed, side="right"))

    def groups(self, begin: int, end: int) -> list[int]:
        """The groups that the source's samples from `begin` up to `end` lie in, each once; end > begin, all sealed."""
        if end - begin >= self.sealed:
            return list(range(len(self.group_ends)))
        first, last = self.group_of(begin), self.group_of(end - 1)
        if first == last and (end - 1) // self.sealed > begin // self.sealed:  # all the way round
            return list(range(len(self.group_ends)))
        return [
            (first + i) % len(self.group_ends)
            for i in range((last - first) % len(self.group_ends) + 1)
        ]

    def groups_ahead(self, begin: int, end: int) -> list[int]:
        """List the whole groups of the samples from `begin` up to `end`, and the one after, in the order of use."""
        if not self.ended:
            if begin >= self.sealed:
                return []
            end = min(end, self.sealed)
        count = len(self.group_ends)
        first = self.group_of(begin)
        groups = self.groups(begin, max(begin + 1, end))
        groups.sort(key=lambda group: (group - first) % count)
        after = groups[-1] + 1
        if self.ended:
            after %= count
        if after < count and after not in groups:
            groups.append(after)
        return groups

    def groups_passed(self, at: int, until: int, kept_from: int) -> list[int]:
        """List the groups that training has been in and does not need now; the one that is used again last is first.

        at, until: samples taken before and after the next steps. kept_from: the first that the run
        may go back to.
        """
        count = len(self.group_ends)
        went_round = self.ended and kept_from >= self.sealed
        past = range(count if went_round else self.group_of(kept_from))
        needed = {*self.groups_ahead(kept_from, until), *self.groups_ahead(at, until)}
        here = self.group_of(at)
        return sorted(set(past) - needed, key=lambda group: (here - group) % count)

    def needed(self, begin: int, end: int) -> list[int]:
        """List the shards of `groups_ahead`: what the samples from `begin` up to `end` need, and what comes next."""
        return [shard for group in self.groups_ahead(begin, end) for shard in self.shards_of(group)]

    def passed(self, at: int, until: int, kept_from: int) -> list[int]:
        """List the shards of `groups_passed`, which may be deleted."""
        groups = self.groups_passed(at, until, kept_from)
        return [shard for group in groups for shard in self.shards_of(group)]

    def shards_of(self, group: int) -> range:
        """The shards of a group that is whole; of none where it is not."""
        if group >= len(self.group_shard_ends):
            return range(0)
        return range(self.group_shard_ends[group - 1] if group else 0, self.group_shard_ends[group])


class Mixture:
    """The order of all samples of a run.

    sources: name -> windows of each shard; weights: name -> positive integer; all of equal keys. growing: sources of
    which more shards will come.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[int]],
        weights: Mapping[str, int],
        seed: int,
        group_shards: int,
        growing: Collection[str] = (),
    ):
        self.names, self.seed, self.group_shards = list(sources), seed, group_shards
        divisor = math.gcd(*weights.values())
        self.weights = [weights[name] // divisor for name in self.names]
        self.block, self.key = sum(self.weights), key_of(seed, "block")
        self.orders = [
            SourceOrder(name, sources[name], group_shards, seed, name not in growing)
            for name in self.names
        ]
        self._slots = np.repeat(np.arange(len(self.names)), self.weights)
        text = repr(("groups of 1, 1, 2, 4", self.names, self.weights, seed, group_shards))
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[
            :16
        ]  # of the order, whatever the shards

    def grow(self, name: str, shard_windows: Sequence[int], ended: bool) -> None:
        """A source has more shards; the order of those that it had stays."""
        self.orders[self.names.index(name)] = SourceOrder(
            name, shard_windows, self.group_shards, self.seed, ended
        )

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` of the run are of each source."""
        blocks = samples // self.block
        rest, _ = self.interleave(np.arange(blocks * self.block, samples, dtype=np.int64))
        part = np.bincount(rest, minlength=len(self.names))
        return [
            blocks * weight + int(more) for weight, more in zip(self.weights, part, strict=True)
        ]

    def lacking(self, samples: int) -> str:
        """The first source of which the first `samples` of the run need a group that is not whole; "" if none does."""
        needed = zip(self.orders, self.counts(samples), strict=True)
        return next(
            (order.name for order, count in needed if not order.ended and count > order.sealed), ""
        )

    def locate(self, samples: np.ndarray) -> Located:
        """Where each sample of the run lies. samples (k,) int64."""
        source, count = self.interleave(samples)
        found = Located(source, np.empty_like(source), np.empty_like(source), np.empty_like(source))
        for s, order in enumerate(self.orders):
            mine = source == s
            if mine.any():
                found.epoch[mine], found.shard[mine], found.window[mine] = order.locate(count[mine])
        return found

    def interleave(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, how many samples of that source came before, ever) of each sample."""
        block, slot = np.divmod(samples, self.block)
        blocks, row = np.unique(block, return_inverse=True)
        slots = np.tile(np.arange(self.block), len(blocks))
        keys = np.repeat(mix64(self.key ^ mix64(blocks.astype(_U64))), self.block)
        orders = self._slots[permute(slots, self.block, keys)].reshape(len(blocks), self.block)
        source = orders[row, slot]
        count = block * np.asarray(self.weights)[source]
        for s in range(len(self.names)):
            mine = source == s
            count[mine] += np.cumsum(orders == s, axis=1)[row[mine], slot[mine]] - 1
        return source, count
