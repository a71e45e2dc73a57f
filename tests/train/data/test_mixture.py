"""train/data/mixture.py against the same order worked out sample by sample, in plain Python integers."""

import collections
import hashlib
import itertools
import math
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from train.data.mixture import (
    Gap,
    Mixture,
    NotSealed,
    SourceOrder,
    group_ends,
    permute,
    sample_range,
    with_gap,
)

M64 = 2**64 - 1
Sample = tuple[int, int, int, int]  # source, epoch, shard, window


# ---- The order, once more


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def hash_of(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permuted(i: int, n: int, key: int) -> int:
    """A Feistel network of six rounds on just enough bits; the left half has one more where they are odd."""
    bits = max(2, (n - 1).bit_length())
    right_bits = bits // 2
    left_bits = bits - right_bits
    while True:
        left, right = divmod(i, 2**right_bits)
        for t in range(6):
            width = left_bits if t % 2 == 0 else right_bits  # of the half that is replaced
            left, right = right, left ^ (mix(right ^ key ^ mix(t)) % 2**width)
        i = left * 2**right_bits + right
        if i < n:
            return i


def groups_of(shards: int, group_shards: int) -> list[range]:
    """Shards in groups of 1, 1, 2, 4, ..., at most group_shards; the last may be smaller."""
    sizes = itertools.chain([1], (min(2**i, group_shards) for i in itertools.count()))
    ends = itertools.accumulate(sizes)
    found, begin = [], 0
    while begin < shards:
        found.append(range(begin, min(end := next(ends), shards)))
        begin = end
    return found


class Reference:
    """The documented order: blocks with exact shares, epochs of each source, groups of shards in sequence."""

    def __init__(
        self,
        sources: dict[str, Sequence[int]],
        weights: dict[str, int],
        seed: int,
        group_shards: int,
    ):
        divisor = math.gcd(*weights.values())
        self.names = list(sources)
        self.sources = sources
        self.seed = seed
        self.group_shards = group_shards
        self.weights = [weights[name] // divisor for name in self.names]
        self.slots = [s for s, weight in enumerate(self.weights) for _ in range(weight)]

    def __getitem__(self, i: int) -> Sample:
        block, slot = divmod(i, len(self.slots))
        key = mix(hash_of(self.seed, "block") ^ mix(block))
        order = [self.slots[permuted(j, len(self.slots), key)] for j in range(slot + 1)]
        source = order[-1]
        before = block * self.weights[source] + order.count(source) - 1
        return (source, *self.place(source, before))

    def place(self, source: int, count: int) -> tuple[int, int, int]:
        shards = self.sources[self.names[source]]
        epoch, position = divmod(count, sum(shards))
        groups = groups_of(len(shards), self.group_shards)
        for g, group in enumerate(groups):
            windows = [(shard, window) for shard in group for window in range(shards[shard])]
            if position < len(windows):
                key = mix(hash_of(self.seed, self.names[source]) ^ mix(epoch * len(groups) + g))
                return (epoch, *windows[permuted(position, len(windows), key)])
            position -= len(windows)
        raise AssertionError("a position beyond the epoch")


WINDOWS = {"web": [400, 350, 411, 7], "papers": [300, 0, 201], "exams": [5, 6]}
WEIGHTS = {"web": 65, "papers": 34, "exams": 1}


def mixture(seed: int = 7, group_shards: int = 2) -> Mixture:
    return Mixture(WINDOWS, WEIGHTS, seed, group_shards)


def located(m: Mixture, samples: Sequence[int]) -> list[Sample]:
    at = m.locate(np.asarray(samples, dtype=np.int64))
    columns = (at.source, at.epoch, at.shard, at.window)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# ---- The order


def test_the_vectorised_permutation_equals_the_one_in_plain_integers() -> None:
    for n in (1, 2, 3, 7, 33, 64, 100, 1025, 2**20 + 1, 2**40 + 12345):
        positions = [i * (n - 1) // 40 for i in range(41)]
        keys = [hash_of("key", i % 3) for i in range(41)]
        got = permute(np.array(positions), n, np.array(keys, dtype=np.uint64))
        assert got.tolist() == [permuted(i, n, key) for i, key in zip(positions, keys, strict=True)]


def test_the_order_equals_the_one_worked_out_sample_by_sample() -> None:
    for seed, group_shards in ((7, 2), (1337, 1), (0, 8)):
        reference = Reference(WINDOWS, WEIGHTS, seed, group_shards)
        samples = [*range(300), *range(10**6, 10**6 + 50), 10**12 + 3]
        assert located(mixture(seed, group_shards), samples) == [reference[i] for i in samples]


def test_the_order_is_frozen() -> None:
    """Written down when groups became 1, 1, 2, 4: no version of numpy, Python or of this may change it."""
    samples = [*range(100), *range(10**9, 10**9 + 100)]
    digest = hashlib.sha256(repr(located(mixture(), samples)).encode()).hexdigest()
    assert digest[:16] == "f98949d2aa02b4fe"
    assert mixture().fingerprint == "2f05ca8b44e32c3a"


@pytest.mark.parametrize("split", [{"ranks": 5}, {"replicas": 5}, {"replicas": 16, "ranks": 6}])
def test_ranks_that_do_not_divide_the_batch_are_refused(split: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="48 windows a step do not divide over"):
        sample_range(0, 48, **split)


def test_gaps_pass_over_windows_from_their_step_on() -> None:
    gaps = (Gap(step=2, windows=48), Gap(step=2, windows=1), Gap(step=4, windows=10))
    starts = [sample_range(step, 48, gaps=gaps).start for step in range(6)]
    assert starts == [0, 48, 96 + 49, 144 + 49, 192 + 59, 240 + 59]
    assert sample_range(3, 48, rank=1, ranks=2, gaps=gaps) == range(144 + 49 + 24, 144 + 49 + 48)


def test_a_run_that_goes_back_passes_over_all_from_there_on() -> None:
    gaps = with_gap(with_gap((), 5, 30), 9, 4)
    assert gaps == (Gap(5, 30), Gap(9, 4))
    # The gap at step 9 is within what it passes over.
    assert with_gap(gaps, 12, 10, since=7) == (Gap(5, 30), Gap(7, 14))


def test_position_is_one_integer_however_large() -> None:
    """An order that had to be walked or stored would not end here."""
    m = Mixture({"large": [10**8] * 50, "small": [10**7]}, {"large": 3, "small": 1}, 7, 8)
    tracemalloc.start()
    samples = located(m, range(10**12, 10**12 + 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6  # bytes
    assert len(set(samples)) == 1000
    assert collections.Counter(source for source, *_ in samples) == {0: 750, 1: 250}


def test_counts_are_those_of_the_samples_one_by_one() -> None:
    m, reference = mixture(), Reference(WINDOWS, WEIGHTS, 7, 2)
    seen = collections.Counter[int]()
    for i in range(303):
        assert m.counts(i) == [seen[s] for s in range(3)]
        seen[reference[i][0]] += 1
    assert m.counts(10**10) == [10**8 * weight for weight in WEIGHTS.values()]


# ---- What cannot be a mixture, and what tells two apart


@pytest.mark.parametrize("shards", [[], [0], [0, 0]])
def test_a_source_without_a_window_is_refused_by_name(shards: list[int]) -> None:
    with pytest.raises(ValueError, match="source papers has no window"):
        Mixture({"web": [3], "papers": shards}, {"web": 1, "papers": 1}, 7, 2)


def test_the_fingerprint_tells_apart_all_that_changes_the_order_and_shards_do_not() -> None:
    """They may be still to come."""
    renamed = {f"{name}s": n for name, n in WINDOWS.items()}
    others = [
        Mixture(WINDOWS, WEIGHTS, 8, 2),
        Mixture(WINDOWS, WEIGHTS, 7, 3),
        Mixture(WINDOWS, WEIGHTS | {"exams": 2}, 7, 2),
        Mixture(dict(reversed(WINDOWS.items())), WEIGHTS, 7, 2),
        Mixture(renamed, {f"{name}s": weight for name, weight in WEIGHTS.items()}, 7, 2),
    ]
    assert len({m.fingerprint for m in (mixture(), *others)}) == 6
    for same in (
        Mixture(WINDOWS | {"exams": [5, 7]}, WEIGHTS, 7, 2),
        Mixture(WINDOWS, WEIGHTS, 7, 2, ["web"]),
        Mixture(WINDOWS, {name: 2 * weight for name, weight in WEIGHTS.items()}, 7, 2),
    ):
        assert same.fingerprint == mixture().fingerprint


# ---- Groups, and sources that are still being made


def test_groups_have_one_one_two_four_and_then_as_many_shards_as_asked_for() -> None:
    assert group_ends(41, 8, ended=True) == [1, 2, 4, 8, 16, 24, 32, 40, 41]
    assert group_ends(9, 3, ended=True) == [1, 2, 4, 7, 9]
    for group_shards, shards in itertools.product((1, 2, 3, 5, 8), range(60)):
        groups = groups_of(shards, group_shards)
        assert group_ends(shards, group_shards, ended=True) == [group.stop for group in groups]
        later = groups_of(shards + 100, group_shards)
        whole = [group.stop for group in groups if group in later]
        assert group_ends(shards, group_shards, ended=False) == whole


SIZES = [7, 0, 5, 9, 3, 0, 8, 6, 4, 11, 2, 5]  # windows of the shards of a source


@pytest.mark.parametrize("group_shards", [1, 2, 4, 8])
def test_the_order_of_a_source_that_grows_is_at_every_moment_that_of_the_finished_one(
    group_shards: int,
) -> None:
    def build(shards: list[int], *growing: str) -> Mixture:
        return Mixture({"a": shards, "b": [40]}, {"a": 2, "b": 1}, 7, group_shards, growing)

    finished = build(SIZES)
    for made in range(len(SIZES) + 1):
        growing = build(SIZES[:made], "a")
        whole = [group for group in groups_of(len(SIZES) + 100, group_shards) if group.stop <= made]
        windows = sum(SIZES[: whole[-1].stop]) if whole else 0
        # Samples before one too far.
        there = next(i for i in itertools.count() if finished.counts(i + 1)[0] > windows)
        assert located(growing, range(there)) == located(finished, range(there))
        assert growing.lacking(there) == "" and growing.lacking(there + 1) == "a"
        for samples in (range(there, there + 1), range(10**6, 10**6 + 100)):
            with pytest.raises(NotSealed, match=r"^a$"):
                located(growing, samples)
    assert finished.lacking(10**9) == ""


class Layout(NamedTuple):
    """A source of random size, and a stretch of its samples over several epochs.

    turns: of each sample, by walking there; those of a group that is not whole are the next.
    """

    windows: list[int]
    size: int  # of a group
    groups: list[range]
    is_whole: bool
    order: SourceOrder
    turns: list[int]
    begin: int
    end: int


def layouts(count: int) -> Iterator[Layout]:
    rng = random.Random(5)
    for _ in range(count):
        least = 0 if rng.random() < 0.2 else 1
        windows = [1, *(rng.randint(least, 6) for _ in range(rng.randint(0, 13)))]
        is_whole = rng.random() < 0.7
        size = rng.randint(1, 4)
        begin = rng.randint(0, (3 if is_whole else 1) * sum(windows))
        end = begin + rng.choice([0, 1, 3, rng.randint(1, 60)])
        ends = group_ends(len(windows), size, is_whole)
        groups = [range(first, stop) for first, stop in itertools.pairwise([0, *ends])]
        epoch = [g for g, group in enumerate(groups) for k in group for _ in range(windows[k])]
        turns = [e * len(groups) + g for e in range(100) for g in epoch]
        if not is_whole:
            turns[len(epoch) :] = [len(groups)] * 200
        order = SourceOrder("s", windows, size, 0, is_whole)
        yield Layout(windows, size, groups, is_whole, order, turns, begin, end)


def test_needed_are_the_groups_of_the_samples_and_the_next_and_the_others_before_have_passed() -> (
    None
):
    for layout in layouts(1000):
        order, turns, count = layout.order, layout.turns, len(layout.groups)
        begin, end = layout.begin, max(layout.begin + 1, layout.end)
        assert [order.turn_of(n) for n in range(begin, end)] == turns[begin:end]
        assert order.first_sample(turns[begin]) == turns.index(turns[begin])
        limit = math.inf if layout.is_whole else count
        for more in (0, 1):
            stop = min(turns[end - 1] + 1 + more, turns[begin] + count, limit)
            needed = [turn for turn in range(turns[begin], turns[begin] + count) if turn < stop]
            shards = [shard for turn in needed for shard in layout.groups[turn % count]]
            assert order.needed(begin, layout.end, more) == shards
        # In the order of use, backwards: what is used again last comes first.
        past = [turn for turn in range(turns[begin] - 1, -1, -1) if turn >= stop - count]
        passed = [shard for turn in past for shard in layout.groups[turn % count]]
        assert order.passed(begin, layout.end) == passed
        assert not set(passed) & set(shards)
