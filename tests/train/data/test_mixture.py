"""train/data/mixture.py against the same order worked out sample by sample, in plain Python integers."""

import collections
import hashlib
import itertools
import math
import random
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from train.data.mixture import (
    Gap,
    Mixture,
    NotSealed,
    SourceOrder,
    group_ends,
    key_of,
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
        self.names, self.sources, self.seed, self.group_shards = (
            list(sources),
            sources,
            seed,
            group_shards,
        )
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


def located(m: Mixture, samples: Sequence[int] | range) -> list[Sample]:
    at = m.locate(np.asarray(samples, dtype=np.int64))
    return list(
        zip(
            at.source.tolist(),
            at.epoch.tolist(),
            at.shard.tolist(),
            at.window.tolist(),
            strict=True,
        )
    )


# ---- The permutation


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 31, 32, 33, 100, 1000, 4097])
def test_a_permutation_reaches_every_place_once(n: int) -> None:
    assert sorted(permute(np.arange(n), n, key_of("k"))) == list(range(n))


def test_the_vectorised_permutation_equals_the_one_in_plain_integers() -> None:
    for n in (1, 2, 3, 7, 64, 100, 1025, 2**20 + 1, 2**40 + 12345):
        positions = [i * (n - 1) // 40 for i in range(41)]
        keys = [hash_of("key", i % 3) for i in range(41)]
        got = permute(np.array(positions), n, np.array(keys, dtype=np.uint64))
        assert got.tolist() == [permuted(i, n, key) for i, key in zip(positions, keys, strict=True)]


# ---- The order


def test_the_order_equals_the_one_worked_out_sample_by_sample() -> None:
    for seed, group_shards in ((7, 2), (1337, 1), (0, 8)):
        reference = Reference(WINDOWS, WEIGHTS, seed, group_shards)
        samples = [*range(300), *range(10**6, 10**6 + 50), 10**12 + 3]
        assert located(mixture(seed, group_shards), samples) == [reference[i] for i in samples]


def test_the_order_is_frozen() -> None:
    """Numbers written down when groups became 1, 1, 2, 4: no version of numpy, Python or of this may change them."""
    assert located(mixture(), range(6)) == [
        (0, 0, 0, 21),
        (1, 0, 0, 82),
        (0, 0, 0, 323),
        (0, 0, 0, 203),
        (1, 0, 0, 114),
        (0, 0, 0, 274),
    ]
    assert located(mixture(), range(10**9, 10**9 + 6)) == [
        (0, 556506, 2, 140),
        (1, 678642, 2, 81),
        (0, 556506, 2, 194),
        (0, 556506, 2, 184),
        (0, 556506, 2, 153),
        (0, 556506, 2, 246),
    ]
    assert permute(np.arange(10), 10, key_of("frozen", 1)).tolist() == [
        5,
        1,
        8,
        4,
        3,
        0,
        9,
        7,
        2,
        6,
    ]
    assert mixture().fingerprint == "2f05ca8b44e32c3a"


@pytest.mark.parametrize("split", [{"ranks": 5}, {"replicas": 5}, {"replicas": 16, "ranks": 6}])
def test_ranks_that_do_not_divide_the_batch_are_refused(split: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="48 windows a step do not divide over"):
        sample_range(0, 48, **split)


def test_weights_count_by_their_ratio() -> None:
    double = Mixture(WINDOWS, {name: 2 * weight for name, weight in WEIGHTS.items()}, 7, 2)
    assert located(double, range(500)) == located(mixture(), range(500))
    assert double.fingerprint == mixture().fingerprint


def test_gaps_pass_over_windows_from_their_step_on() -> None:
    gaps = (Gap(step=2, windows=48), Gap(step=2, windows=1), Gap(step=4, windows=10))
    starts = [sample_range(step, 48, gaps=gaps).start for step in range(6)]
    assert starts == [0, 48, 96 + 49, 144 + 49, 192 + 59, 240 + 59]
    assert [sample_range(3, 48, rank=1, ranks=2, gaps=gaps)] == [
        range(144 + 49 + 24, 144 + 49 + 48)
    ]


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
    assert {epoch for source, epoch, *_ in samples if source == 1} == {
        25_000
    }  # 10^12 / 4 windows of 10^7 an epoch


# ---- What cannot be a mixture, and what tells two apart


def test_a_source_without_a_window_is_refused_by_name() -> None:
    for shards in ([], [0], [0, 0]):
        with pytest.raises(ValueError, match="source papers has no window"):
            Mixture({"web": [3], "papers": shards}, {"web": 1, "papers": 1}, 7, 2)


def test_the_fingerprint_tells_apart_all_that_changes_the_order_and_shards_do_not() -> None:
    """They may be still to come."""
    made = [
        Mixture(WINDOWS, WEIGHTS, 7, 2),
        Mixture(WINDOWS, WEIGHTS, 8, 2),
        Mixture(WINDOWS, WEIGHTS, 7, 3),
        Mixture(WINDOWS, WEIGHTS | {"exams": 2}, 7, 2),
        Mixture(dict(reversed(WINDOWS.items())), WEIGHTS, 7, 2),
        Mixture(
            {f"{name}s": n for name, n in WINDOWS.items()},
            {f"{n}s": w for n, w in WEIGHTS.items()},
            7,
            2,
        ),
    ]
    assert len({m.fingerprint for m in made}) == len(made)
    for other in (
        Mixture(WINDOWS | {"exams": [5, 7]}, WEIGHTS, 7, 2),
        Mixture(WINDOWS, WEIGHTS, 7, 2, ["web"]),
    ):
        assert other.fingerprint == made[0].fingerprint


# ---- Exact shares, far out and whatever the ranks


def test_counts_are_those_of_the_samples_one_by_one() -> None:
    m, reference = mixture(), Reference(WINDOWS, WEIGHTS, 7, 2)
    seen = collections.Counter[int]()
    for i in range(1203):
        if i % 7 == 0 or i % 100 in (0, 1, 99):
            assert m.counts(i) == [seen[s] for s in range(3)]
        seen[reference[i][0]] += 1
    far = 10**10
    assert m.counts(far) == [far // 100 * weight for weight in (65, 34, 1)]
    assert m.counts(far + 57) == [
        n + [reference[far + i][0] for i in range(57)].count(s) for s, n in enumerate(m.counts(far))
    ]


# ---- Groups, and sources that are still being made


def test_groups_have_one_one_two_four_and_then_as_many_shards_as_asked_for() -> None:
    assert group_ends(40, 8, ended=True) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert group_ends(41, 8, ended=True) == [1, 2, 4, 8, 16, 24, 32, 40, 41]
    assert group_ends(7, 1, ended=True) == [1, 2, 3, 4, 5, 6, 7]
    assert group_ends(9, 3, ended=True) == [1, 2, 4, 7, 9]
    assert group_ends(0, 8, ended=True) == group_ends(0, 8, ended=False) == []
    for group_shards, shards in itertools.product((1, 2, 3, 5, 8), range(60)):
        groups = groups_of(shards, group_shards)
        assert group_ends(shards, group_shards, ended=True) == [group.stop for group in groups]
        whole = [
            group.stop
            for group, more in zip(groups, groups_of(shards + 100, group_shards), strict=False)
            if group == more
        ]
        assert group_ends(shards, group_shards, ended=False) == whole


SIZES = [7, 0, 5, 9, 3, 0, 8, 6, 4, 11, 2, 5]  # windows of the shards of a source


@pytest.mark.parametrize("group_shards", [1, 2, 4, 8])
def test_the_order_of_a_source_that_grows_is_at_every_moment_that_of_the_finished_one(
    group_shards: int,
) -> None:
    finished = Mixture({"a": SIZES, "b": [40]}, {"a": 2, "b": 1}, 7, group_shards)
    growing = Mixture({"a": [], "b": [40]}, {"a": 2, "b": 1}, 7, group_shards, growing=["a"])
    handed_out = []
    for made in range(len(SIZES) + 1):
        growing.grow("a", SIZES[:made], ended=False)
        whole = [group for group in groups_of(len(SIZES) + 100, group_shards) if group.stop <= made]
        windows = sum(SIZES[: whole[-1].stop]) if whole else 0
        there = next(
            i for i in itertools.count() if finished.counts(i + 1)[0] > windows
        )  # samples before one too far
        assert located(growing, range(there)) == located(finished, range(there))
        assert growing.lacking(there) == "" and growing.lacking(there + 1) == "a"
        for samples in (range(there + 1), range(there, there + 1), range(10**6, 10**6 + 100)):
            with pytest.raises(NotSealed, match=r"^a$"):
                located(growing, samples)
        handed_out.append(there)
    assert handed_out == sorted(handed_out) and len(set(handed_out)) > 3
    growing.grow("a", SIZES, ended=True)
    assert located(growing, range(1000)) == located(finished, range(1000))
    assert growing.lacking(10**9) == ""


def test_a_source_of_which_nothing_is_made_yet_is_lacking_from_its_first_sample() -> None:
    m = Mixture({"a": [9], "b": []}, {"a": 3, "b": 1}, 7, 8, growing=["b"])
    first = next(i for i in range(4) if m.counts(i + 1)[1])
    assert m.lacking(first) == "" and m.lacking(first + 1) == "b"
    assert m.orders[1].turn_of(0) == 0 and m.orders[1].needed(0, 5) == []
    with pytest.raises(ValueError, match="source b has no window"):
        m.grow("b", [0], ended=True)


class Layout(NamedTuple):
    """A source of random size, and a stretch of its samples over several epochs."""

    windows: list[int]
    size: int  # of a group
    ends: list[int]
    is_whole: bool
    order: SourceOrder
    begin: int
    end: int

    @property
    def sealed(self) -> int:
        return sum(self.windows[: self.ends[-1]])

    def shards(self, group: int) -> range:
        return range(self.ends[group - 1] if group else 0, self.ends[group])

    def turn(self, count: int) -> int:
        """The turn that the source's count-th sample lies in, by walking there."""
        epoch, left = divmod(count, self.sealed)
        for group in range(len(self.ends)):
            left -= sum(self.windows[shard] for shard in self.shards(group))
            if left < 0:
                return epoch * len(self.ends) + group
        raise AssertionError

    def groups(self, samples: Iterable[int]) -> list[int]:
        """The groups of these samples, one by one, in the order of use."""
        whole = (count for count in samples if self.is_whole or count < self.sealed)
        return list(dict.fromkeys(self.turn(count) % len(self.ends) for count in whole))


def layouts(count: int) -> Iterator[Layout]:
    rng = random.Random(5)
    for _ in range(count):
        least = 0 if rng.random() < 0.2 else 1
        windows = [1, *(rng.randint(least, 6) for _ in range(rng.randint(0, 13)))]
        is_whole = rng.random() < 0.7
        size = rng.randint(1, 4)
        begin = rng.randint(0, (3 if is_whole else 1) * sum(windows))
        end = begin + rng.choice([0, 1, 3, rng.randint(1, 60)])
        order = SourceOrder("s", windows, size, 0, is_whole)
        ends = group_ends(len(windows), size, is_whole)
        yield Layout(windows, size, ends, is_whole, order, begin, end)


def test_what_is_needed_are_the_groups_of_the_samples_and_the_next_one_in_the_order_of_use() -> (
    None
):
    for layout in layouts(2000):
        order, ends = layout.order, layout.ends
        used = layout.groups(range(layout.begin, max(layout.begin + 1, layout.end)))
        turns = order.turns(layout.begin, layout.end)
        groups = [turn % len(ends) for turn in turns]
        shards = [shard for group in groups for shard in layout.shards(group)]
        assert order.needed(layout.begin, layout.end) == shards and len(set(shards)) == len(shards)
        filled = [g for g in groups if sum(layout.windows[k] for k in layout.shards(g))]
        extra = [g for g in filled if g not in used]
        assert filled == used + extra and len(extra) <= 1
        # There is a next group, unless all are used or none is made yet; one without windows may stand for it.
        if not extra and len(groups) < len(ends):
            assert len(filled) < len(groups) or (turns.stop == len(ends) and not layout.is_whole)
        own = order.turns(layout.begin, layout.end, more=0)
        assert set(used) == {turn % len(ends) for turn in own} & set(used + filled)
        assert set(own) <= set(turns) and turns.stop <= own.stop + 1


def test_a_turn_begins_with_its_first_sample() -> None:
    for layout in layouts(200):
        of_sample = [layout.turn(count) for count in range(layout.sealed * (2 + layout.is_whole))]
        if not layout.is_whole:
            of_sample = of_sample[: layout.sealed] + [len(layout.ends)] * 3
        assert [layout.order.turn_of(count) for count in range(len(of_sample))] == of_sample
        for turn in set(of_sample):
            assert layout.order.first_sample(turn) == of_sample.index(turn)


def test_what_has_passed_was_trained_on_and_is_not_needed() -> None:
    for layout in layouts(2000):
        order, groups = layout.order, len(layout.ends)
        found = [shard for shard in order.passed(layout.begin, layout.end) if layout.windows[shard]]
        of_shard = {shard: g for g in range(groups) for shard in layout.shards(g)}
        past = list(dict.fromkeys(of_shard[shard] for shard in found))
        trained = layout.groups(range(layout.begin))
        assert not set(found) & set(order.needed(layout.begin, layout.end))
        assert set(past) <= set(trained)
        needed = {of_shard[shard] for shard in order.needed(layout.begin, layout.end)}
        assert set(trained) <= {*past, *needed}
        if layout.is_whole:  # what is used again last comes first
            later = layout.groups(range(layout.begin, layout.begin + layout.sealed))
            assert past == sorted(past, key=later.index, reverse=True)


# ---- Gaps


def test_a_run_that_goes_back_passes_over_all_from_there_on() -> None:
    gaps: tuple[Gap, ...] = ()
    gaps = with_gap(gaps, 5, 30)
    assert sample_range(5, 10, gaps=gaps) == range(80, 90)
    gaps = with_gap(gaps, 9, 4)
    assert sample_range(9, 10, gaps=gaps) == range(124, 134)
    gaps = with_gap(gaps, 12, 10, since=7)  # the gap at step 9 is within what it passes over
    assert gaps == (Gap(5, 30), Gap(7, 14))
