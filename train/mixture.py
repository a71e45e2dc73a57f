"""Which window of which source is the i-th sample of a run: a pure function, so that position is one integer.

    global step, replica, rank -> a range of sample indices -> (source, epoch, shard, window) of each

The order is the same whatever the number of ranks, and may be entered anywhere. Sources are interleaved
in blocks as long as the sum of their integer weights; each block holds each source exactly as often as
its weight, in an order of its own. Within a source every window comes once an epoch. Windows are shuffled
inside groups of consecutive shards, and groups follow one another, so that only the open group is read.

Permutations are Feistel networks with cycle walking: a bijection on [0, n) in O(1) memory, defined here
to the bit. (A library's shuffle may change with its version, and with it the order of a resumed run.)
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

ROUNDS = 6
_U64 = np.uint64


def key_of(*parts: object) -> np.uint64:
    """64 bits that depend on all parts."""
    return _U64(int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little"))


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
    while len(outside):  # the network permutes [0, 2^bits), at most 2 n; walk on until inside [0, n)
        x, key = result[outside], keys[outside]
        left, right = x >> low, x & masks[1]
        for t in range(ROUNDS):  # the halves differ in width where bits is odd, and trade places each round
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


def sample_range(step: int, batch_windows: int, *, replica: int = 0, replicas: int = 1, rank: int = 0, ranks: int = 1,
                 gaps: Sequence[Gap] = ()) -> range:
    """Sample indices that one rank trains on in the step after `step` committed ones.

    A step takes batch_windows consecutive samples; replicas, and the ranks within each, take equal
    consecutive parts. Raises ValueError where they do not divide evenly.
    """
    parts = replicas * ranks
    if batch_windows % parts:
        raise ValueError(f"{batch_windows} windows a step do not divide over {replicas} replicas of {ranks} ranks")
    share = batch_windows // parts
    first = step * batch_windows + sum(gap.windows for gap in gaps if gap.step <= step)
    first += (replica * ranks + rank) * share
    return range(first, first + share)


@dataclasses.dataclass(frozen=True)
class Located:
    """Where samples lie, as int64 arrays of equal length: index into the sources, epoch, shard, window."""

    source: np.ndarray
    epoch: np.ndarray
    shard: np.ndarray
    window: np.ndarray


class SourceOrder:
    """The order of one source's windows: groups in sequence, shuffled within, anew each epoch."""

    def __init__(self, name: str, shard_windows: Sequence[int], group_shards: int, seed: int):
        self.key = key_of(seed, name)
        self.shard_ends = np.cumsum(np.asarray(shard_windows, dtype=np.int64))
        self.shard_begins = np.concatenate(([0], self.shard_ends[:-1]))
        self.n_windows = int(self.shard_ends[-1]) if len(shard_windows) else 0
        last = [min(i + group_shards, len(shard_windows)) - 1 for i in range(0, len(shard_windows), group_shards)]
        self.group_ends = self.shard_ends[last]
        if self.n_windows == 0:
            raise ValueError(f"source {name} has no window to train on: it is shorter than SEQ_LEN + 1 tokens")

    def locate(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(epoch, shard, window in the shard) of the source's counts-th samples ever. counts (k,) int64."""
        epoch, position = np.divmod(counts, self.n_windows)
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


class Mixture:
    """The order of all samples of a run.

    sources: name -> windows of each shard; weights: name -> positive integer; all of equal keys.
    """

    def __init__(self, sources: Mapping[str, Sequence[int]], weights: Mapping[str, int], seed: int, group_shards: int):
        self.names = list(sources)
        divisor = math.gcd(*weights.values())
        self.weights = [weights[name] // divisor for name in self.names]
        self.block, self.key = sum(self.weights), key_of(seed, "block")
        self.orders = [SourceOrder(name, sources[name], group_shards, seed) for name in self.names]
        self._slots = np.repeat(np.arange(len(self.names)), self.weights)
        text = repr((self.names, self.weights, seed, group_shards, [list(sources[n]) for n in self.names]))
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

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
