"""train/data/mixture.py against the same order worked out sample by sample, in plain Python integers."""

import collections
import hashlib
import itertools
import math

import numpy as np
import pytest

from train.data.mixture import (
    Gap,
    Mixture,
    NotSealed,
    SourceOrder,
    group_ends,
    sample_range,
    with_gap,
)

M64 = 2**64 - 1
Sample = tuple[int, int, int, int]  # source, epoch, shard, window


# ---- The order, once more


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def hash_of(*parts):
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permuted(i, n, key):
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


def groups_of(shards, group_shards):
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
        sources,
        weights,
        seed,
        group_shards,
    ):
        divisor = math.gcd(*weights.values())
        self.names = list(sources)
        self.sources = sources
        self.seed = seed
        self.group_shards = group_shards
        self.weights = [weights[name] // divisor for name in self.names]
        self.slots = [s for s, weight in enumerate(self.weights) for _ in range(weight)]

    def __getitem__(self, i):
        block, slot = divmod(i, len(self.slots))
        key = mix(hash_of(self.seed, "block") ^ mix(block))
        order = [self.slots[permuted(j, len(self.slots), key)] for j in range(slot + 1)]
        source = order[-1]
        before = block * self.weights[source] + order.count(source) - 1
        return (source, *self.place(source, before))

    def place(self, source, count):
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


def mixture(seed=7, group_shards=2):
    return Mixture(WINDOWS, WEIGHTS, seed, group_shards)


def located(m, samples):
    at = m.locate(np.asarray(samples, dtype=np.int64))
    columns = (at.source, at.epoch, at.shard, at.window)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# ---- The order


def test_the_order_equals_the_one_worked_out_sample_by_sample():
    for seed, group_shards in ((7, 2), (1337, 1), (0, 8)):
        reference = Reference(WINDOWS, WEIGHTS, seed, group_shards)
        samples = [*range(300), *range(10**6, 10**6 + 50), 10**12 + 3]
        assert located(mixture(seed, group_shards), samples) == [reference[i] for i in samples]


def test_the_order_is_frozen():
    """Written down when groups became 1, 1, 2, 4: no version of numpy, Python or of this may change it."""
    large = Mixture({"large": [10**8] * 50, "small": [10**7]}, {"large": 3, "small": 1}, 7, 8)
    digests = []
    for m in (mixture(), large):
        samples = [*range(100), *range(10**9, 10**9 + 100), *range(10**12, 10**12 + 100)]
        digests.append(hashlib.sha256(repr(located(m, samples)).encode()).hexdigest()[:16])
    assert digests == ["bd1db0989a7794c2", "340619b99a287301"]
    assert mixture().fingerprint == "2f05ca8b44e32c3a"


@pytest.mark.parametrize("split", [{"ranks": 5}, {"replicas": 5}, {"replicas": 16, "ranks": 6}])
def test_ranks_that_do_not_divide_the_batch_are_refused(split):
    with pytest.raises(ValueError, match="48 windows a step do not divide over"):
        sample_range(0, 48, **split)


def test_gaps_pass_over_windows_from_their_step_on():
    gaps = (Gap(step=2, windows=48), Gap(step=2, windows=1), Gap(step=4, windows=10))
    starts = [sample_range(step, 48, gaps=gaps).start for step in range(6)]
    assert starts == [0, 48, 96 + 49, 144 + 49, 192 + 59, 240 + 59]
    begin = 144 + 49
    for replicas, ranks in ((1, 2), (2, 1), (4, 3)):
        parts = [
            sample_range(3, 48, replica=k, replicas=replicas, rank=rank, ranks=ranks, gaps=gaps)
            for k in range(replicas)
            for rank in range(ranks)
        ]
        assert [i for part in parts for i in part] == list(range(begin, begin + 48))
        assert {len(part) for part in parts} == {48 // replicas // ranks}


def test_a_run_that_goes_back_passes_over_all_from_there_on():
    gaps = with_gap(with_gap((), 5, 30), 9, 4)
    assert gaps == (Gap(5, 30), Gap(9, 4))
    # The gap at step 9 is within what it passes over.
    assert with_gap(gaps, 12, 10, since=7) == (Gap(5, 30), Gap(7, 14))


def test_counts_are_those_of_the_samples_one_by_one():
    m, reference = mixture(), Reference(WINDOWS, WEIGHTS, 7, 2)
    seen = collections.Counter[int]()
    for i in range(303):
        assert m.counts(i) == [seen[s] for s in range(3)]
        seen[reference[i][0]] += 1
    assert m.counts(10**10) == [10**8 * weight for weight in WEIGHTS.values()]


# ---- What cannot be a mixture, and what tells two apart


@pytest.mark.parametrize("shards", [[], [0], [0, 0]])
def test_a_source_without_a_window_is_refused_by_name(shards):
    with pytest.raises(ValueError, match="source papers has no window"):
        Mixture({"web": [3], "papers": shards}, {"web": 1, "papers": 1}, 7, 2)


def test_the_fingerprint_tells_apart_all_that_changes_the_order_and_shards_do_not():
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


def test_groups_have_one_one_two_four_and_then_as_many_shards_as_asked_for():
    assert group_ends(41, 8, ended=True) == [1, 2, 4, 8, 16, 24, 32, 40, 41]
    assert group_ends(9, 3, ended=True) == [1, 2, 4, 7, 9]
    for group_shards, shards in itertools.product((1, 2, 3, 5, 8), range(60)):
        groups = groups_of(shards, group_shards)
        assert group_ends(shards, group_shards, ended=True) == [group.stop for group in groups]
        later = groups_of(shards + 100, group_shards)
        whole = [group.stop for group in groups if group in later]
        assert group_ends(shards, group_shards, ended=False) == whole


@pytest.mark.parametrize("group_shards", [1, 2, 4, 8])
def test_the_order_of_a_source_that_grows_is_at_every_moment_that_of_the_finished_one(
    group_shards,
):
    sizes = [7, 0, 5, 9, 3, 0, 8, 6, 4, 11, 2, 5]

    def build(made, *growing):
        return Mixture({"a": sizes[:made], "b": [40]}, {"a": 2, "b": 1}, 7, group_shards, growing)

    finished = build(len(sizes))
    assert finished.missing(10**9) == ""
    for made in range(len(sizes) + 1):
        growing = build(made, "a")
        later = groups_of(len(sizes) + 100, group_shards)
        windows = sum(sum(sizes[k] for k in group) for group in later if group.stop <= made)
        there = 0
        while not growing.missing(there + 1):
            there += 1
        assert growing.counts(there)[0] == windows < growing.counts(there + 1)[0]
        assert located(growing, range(there)) == located(finished, range(there))
        for samples in (range(there, there + 1), range(10**6, 10**6 + 100)):
            with pytest.raises(NotSealed, match=r"^a$"):
                located(growing, samples)


SHARDS = [3, 2, 4, 1, 5, 2]  # in groups of 3, 2, 5 and 7 windows


def test_a_turn_is_a_group_in_an_epoch():
    order = SourceOrder("s", SHARDS, 2, 0)
    turns = [turn for turn, size in enumerate([3, 2, 5, 7, 3]) for _ in range(size)]
    assert [order.turn_of(count) for count in range(20)] == turns
    assert [order.first_sample(turn) for turn in range(6)] == [0, 3, 5, 10, 17, 20]


@pytest.mark.parametrize(
    ("windows", "ended", "begin", "end", "needed", "passed"),
    [
        (SHARDS, True, 0, 0, [0, 1], []),
        (SHARDS, True, 0, 3, [0, 1], []),
        (SHARDS, True, 2, 4, [0, 1, 2, 3], []),
        (SHARDS, True, 5, 6, [2, 3, 4, 5], [1, 0]),
        # Into the next epoch; what is used again last comes first.
        (SHARDS, True, 10, 11, [4, 5, 0], [2, 3, 1]),
        (SHARDS, True, 17, 18, [0, 1], [4, 5, 2, 3]),
        # No group twice.
        (SHARDS, True, 0, 100, [0, 1, 2, 3, 4, 5], []),
        (SHARDS, True, 9, 18, [2, 3, 4, 5, 0, 1], []),
        # The last group lacks a shard.
        (SHARDS[:5], False, 0, 1, [0, 1], []),
        (SHARDS[:5], False, 5, 6, [2, 3], [1, 0]),
        (SHARDS[:5], False, 10, 11, [], [2, 3, 1, 0]),
        (SHARDS[:5], False, 3, 40, [1, 2, 3], [0]),
        ([], False, 0, 5, [], []),
        # A group without a window.
        ([3, 0, 2], True, 3, 4, [2, 0], [1]),
    ],
)
def test_needed_are_the_groups_of_the_samples_and_the_next_and_others_before_have_passed(
    windows, ended, begin, end, needed, passed
):
    order = SourceOrder("s", windows, 2, 0, ended)
    assert (order.needed(begin, end), order.passed(begin, end)) == (needed, passed)
