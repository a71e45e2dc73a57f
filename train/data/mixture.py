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
    # The network permutes [0, 2^bits), which is at most 2 n. Walk on until inside [0, n).
    while len(outside):
        x = result[outside]
        key = keys[outside]
        left = x >> low
        right = x & masks[1]
        # The halves differ in width if bits is odd, and trade places each round.
        for t in range(ROUNDS):
            mixed = mix64(right ^ key ^ _ROUND_KEYS[t]) & masks[t % 2]
            left, right = right, left ^ mixed
        x = (left << low) | right
        result[outside] = x
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
    earlier = [gap for gap in gaps if gap.step < begin]
    inside = sum(gap.windows for gap in gaps if gap.step >= begin)
    return (*earlier, Gap(begin, inside + windows))


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
    """Return after which shards the groups end: of 1, 1, 2, 4, ... and then group_shards shards each.

    The last group may be smaller, once the source has ended; until then it is not there.
    """
    ends: list[int] = []
    end = 0
    size = 1
    while end < shards:
        end += min(size, group_shards)
        ends.append(end)
        if len(ends) > 1:
            size *= 2
    if end > shards:
        ends.pop()
        if ended:
            ends.append(shards)
    return ends


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

    shard_windows: windows of each shard that there is; ended: there will be no more. Of two orders of a
    source that grows, the later one begins as the earlier one did.
    """

    def __init__(
        self,
        name: str,
        shard_windows: Sequence[int],
        group_shards: int,
        seed: int,
        ended: bool = True,
    ):
        self.name = name
        self.key = key_of(seed, name)
        self.ended = ended
        self.shard_ends = np.cumsum(np.asarray(shard_windows, dtype=np.int64))
        self.shard_begins = np.concatenate(([0], self.shard_ends[:-1]))
        self.group_shard_ends = group_ends(len(shard_windows), group_shards, ended)
        self.group_ends = self.shard_ends[[end - 1 for end in self.group_shard_ends]]
        self.sealed = int(self.group_ends[-1]) if len(self.group_ends) else 0  # in whole groups

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

    # A turn is a group in an epoch: turn 0 is the first group in the first epoch, and so on.

    def turn_of(self, count: int) -> int:
        """Return the turn of the source's count-th sample; the next to be made if that is not whole."""
        if not self.ended and count >= self.sealed:
            return len(self.group_ends)
        epoch, position = divmod(count, self.sealed)
        group = int(np.searchsorted(self.group_ends, position, side="right"))
        return epoch * len(self.group_ends) + group

    def first_sample(self, turn: int) -> int:
        """Return how many samples of the source come before a turn."""
        epoch, group = divmod(turn, len(self.group_ends))
        before = int(self.group_ends[group - 1]) if group else 0
        return epoch * self.sealed + before

    def shards_of(self, turn: int) -> range:
        """Return the shards of a turn."""
        group = turn % len(self.group_shard_ends)
        begin = self.group_shard_ends[group - 1] if group else 0
        return range(begin, self.group_shard_ends[group])

    def turns(self, begin: int, end: int, more: int = 1) -> range:
        """Return the turns that the source's samples from `begin` up to `end` need, the one of `begin` at least.

        They are whole, and no group is in them twice. more: how many turns after those.
        """
        if not self.sealed:
            return range(0)
        count = len(self.group_ends)
        first = self.turn_of(begin)
        stop = min(self.turn_of(max(begin, end - 1)) + 1 + more, first + count)
        if not self.ended:
            stop = min(stop, count)
        return range(first, stop)

    def needed(self, begin: int, end: int, more: int = 1) -> list[int]:
        """List the shards of `turns`, in the order of use."""
        return [shard for turn in self.turns(begin, end, more) for shard in self.shards_of(turn)]

    def passed(self, begin: int, end: int) -> list[int]:
        """List the shards that samples before `begin` were in and `needed` does not have.

        They may be deleted. Those that are used again last come first.
        """
        turns = self.turns(begin, end)
        oldest = max(0, turns.stop - len(self.group_ends))
        past = reversed(range(oldest, turns.start))
        return [shard for turn in past for shard in self.shards_of(turn)]


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
        self.names = list(sources)
        divisor = math.gcd(*weights.values())
        self.weights = [weights[name] // divisor for name in self.names]
        self.block = sum(self.weights)
        self.key = key_of(seed, "block")
        self.orders = [
            SourceOrder(name, windows, group_shards, seed, name not in growing)
            for name, windows in sources.items()
        ]
        for order in self.orders:
            if order.ended and not order.sealed:
                raise ValueError(
                    f"source {order.name} has no window to train on: it is shorter than SEQ_LEN + 1 tokens"
                )
        self._slots = np.repeat(np.arange(len(self.names)), self.weights)
        # Of the order, whatever the shards.
        text = repr(("groups of 1, 1, 2, 4", self.names, self.weights, seed, group_shards))
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` of the run are of each source."""
        blocks = samples // self.block
        rest, _ = self.interleave(np.arange(blocks * self.block, samples, dtype=np.int64))
        part = np.bincount(rest, minlength=len(self.names))
        return (blocks * np.asarray(self.weights) + part).tolist()

    def missing(self, samples: int) -> str:
        """The first source of which the first `samples` of the run need a group that is not whole; "" if none does."""
        for order, count in zip(self.orders, self.counts(samples), strict=True):
            if not order.ended and count > order.sealed:
                return order.name
        return ""

    def locate(self, samples: np.ndarray) -> Located:
        """Where each sample of the run lies. samples (k,) int64."""
        source, count = self.interleave(samples)
        located = Located(
            source, np.empty_like(source), np.empty_like(source), np.empty_like(source)
        )
        for s, order in enumerate(self.orders):
            mine = source == s
            if mine.any():
                located.epoch[mine], located.shard[mine], located.window[mine] = order.locate(
                    count[mine]
                )
        return located

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
