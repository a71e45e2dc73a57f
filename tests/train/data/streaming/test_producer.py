"""train/data/streaming/producer.py: what the producer makes next, against every sample counted one by one."""

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from settings.config import Config
from train.data.manifest import Seal, ShardInfo
from train.data.mixture import SourceOrder, group_ends
from train.data.shard_writer import Maker
from train.data.streaming import producer as stream
from train.data.streaming.producer import Producer, Stream

SEQ_LEN = 4


def seal(k: int, windows: int | None) -> Seal:
    """The k-th seal, with a training shard of so many windows, or with none."""
    info = (
        None
        if windows is None
        else ShardInfo(f"train_{k:05d}.bin", 100, windows * SEQ_LEN + 1, 1, 1, 1, "")
    )
    return Seal((k, 0), 1, {}, info, None)


def a_stream(
    folder: Path,
    windows: list[int | None],
    group_shards: int,
    end: str | None,
    at: int = 0,
    until: int = 0,
    name: str = "s",
    weight: int = 1,
    there: set[int] | None = None,
    held_out: int = 0,
) -> Stream:
    """A source of which shards have so many windows; there: seals whose file exists, all if that is not said."""
    seals = [seal(k, n) for k, n in enumerate(windows)]
    folder.mkdir(exist_ok=True)
    for k, one in enumerate(seals):
        if one.train and (there is None or k in there):
            (folder / one.train.file).write_bytes(bytes(100))
    maker = SimpleNamespace(
        seals=seals, end=end, folder=folder, remade=[], pending={"train": SimpleNamespace(tokens=0)}
    )
    maker.tokens = lambda: sum(one.train.tokens for one in maker.seals if one.train)
    maker.remake = lambda k: (
        maker.remade.append(k),
        (folder / maker.seals[k].train.file).write_bytes(bytes(100)),
    )

    def making() -> Iterator[Seal]:
        while maker.end is None:
            maker.seals.append(seal(len(maker.seals), 10))
            (folder / maker.seals[-1].train.file).write_bytes(bytes(100))
            yield maker.seals[-1]

    return Stream(
        name, weight, cast(Maker, maker), making(), SEQ_LEN, group_shards, held_out, at, until
    )


def layouts(count: int) -> Iterator[tuple[random.Random, list[int], int, bool, int, int]]:
    """(rng, windows of each shard, group size, ended, at, until): many random ones, over several epochs."""
    rng = random.Random(5)
    for _ in range(count):
        windows = [
            rng.randint(0 if rng.random() < 0.2 else 1, 6) for _ in range(rng.randint(1, 14))
        ]
        ended = rng.random() < 0.7 or not sum(windows)
        windows[0] = max(1, windows[0])
        at = rng.randint(0, (3 if ended else 1) * sum(windows))
        yield (
            rng,
            windows,
            rng.randint(1, 4),
            ended,
            at,
            at + rng.choice([0, 1, 3, rng.randint(1, 60)]),
        )


def group_of_sample(windows: list[int], ends: list[int], count: int) -> int:
    """The group that a source's count-th sample lies in, by walking there."""
    left = count % sum(windows[: ends[-1]])
    for group, end in enumerate(ends):
        size = sum(windows[ends[group - 1] if group else 0 : end])
        if left < size:
            return group
        left -= size
    raise AssertionError


def test_the_groups_ahead_are_those_of_the_samples_and_the_next_one_in_the_order_of_use() -> None:
    for _, windows, size, ended, at, until in layouts(2000):
        order = SourceOrder("s", windows, size, 0, ended)
        ends = group_ends(len(windows), size, ended)
        sealed = sum(windows[: ends[-1]])
        samples = [count for count in range(at, max(at + 1, until)) if ended or count < sealed]
        used = list(dict.fromkeys(group_of_sample(windows, ends, count) for count in samples))
        found = order.groups_ahead(at, until)
        assert len(found) == len(set(found)) and set(used) <= set(found)
        # between two groups that are used there may be one without a window
        empty = {g for g in range(len(ends)) if not sum(windows[ends[g - 1] if g else 0 : ends[g]])}
        assert [g for g in found if g in used] == used
        more = [g for g in found if g not in used and g not in empty]
        following = max(found, key=found.index) if found else None
        if used and len(used) < len(ends) - len(empty) and following not in empty:
            assert more in ([], [following])
            assert more or (not ended and used[-1] == len(ends) - 1)
        assert bool(found) == bool(samples)


def test_the_groups_of_a_stretch_are_those_of_its_samples_one_by_one() -> None:
    order = SourceOrder("s", [3, 2, 4, 1, 5, 2, 2], 2, 0)  # groups of 3, 2, 5, 7 and 2 windows
    for begin in range(2 * order.sealed):
        for end in range(begin + 1, begin + order.sealed + 3):
            found = order.groups(begin, end)
            assert len(found) == len(set(found)), (begin, end)
            assert set(found) == {order.group_of(count) for count in range(begin, end)}, (
                begin,
                end,
            )


def test_what_is_missing_is_what_was_deleted_of_those_groups(tmp_path: Path) -> None:
    for i, (rng, windows, size, ended, at, until) in enumerate(layouts(120)):
        seals: list[int | None] = list(windows)
        for _ in range(rng.randint(0, 3)):  # some have validation documents only
            seals.insert(rng.randint(0, len(seals)), None)
        there = {k for k in range(len(seals)) if rng.random() < 0.6}
        one = a_stream(
            tmp_path / str(i), seals, size, "all" if ended else None, at, until, there=there
        )
        order, ends = one.order(), [0, *group_ends(len(windows), size, ended)]
        assert order is not None
        wanted = [
            shard
            for group in order.groups_ahead(at, until)
            for shard in range(ends[group], ends[group + 1])
        ]
        trained = [k for k, n in enumerate(seals) if n is not None]
        assert [trained[shard] for shard in one.missing()] == [
            trained[shard] for shard in wanted if trained[shard] not in there
        ]
        assert [one.seals()[shard] for shard in one.missing()] == [
            trained[shard] for shard in one.missing()
        ]


def test_the_lead_is_how_many_samples_there_are_before_one_that_is_not(tmp_path: Path) -> None:
    for i, (rng, windows, size, ended, at, _) in enumerate(layouts(150)):
        windows = [max(1, n) for n in windows]
        ends = group_ends(len(windows), size, ended)
        at = at if ended else min(at, sum(windows[: ends[-1]]) - 1)
        there = {k for k in range(len(windows)) if rng.random() < 0.9}
        one = a_stream(
            tmp_path / str(i),
            list(windows),
            size,
            "all" if ended else None,
            at,
            at + 1,
            weight=3,
            there=there,
        )
        needed, count, begins = (
            cast(SourceOrder, one.order()).groups_ahead(at, at + 1),
            0,
            [0, *ends],
        )
        sealed = sum(windows[: ends[-1]])
        while count < 3 * sealed:
            if not ended and at + count >= sealed:
                break
            group = group_of_sample(windows, ends, at + count)
            if group in needed and not there.issuperset(range(begins[group], begins[group + 1])):
                break
            count += 1
        assert one.lead() == (math.inf if count == 3 * sealed else count * SEQ_LEN / 3)


def test_more_is_made_whatever_the_room_until_the_group_behind_the_next_step_is_whole(
    tmp_path: Path,
) -> None:
    one = a_stream(tmp_path, [10] * 4, 4, None)  # groups of 1, 1 and 2 shards
    for until, expected in (
        (0, False),
        (9, False),
        (10, False),
        (20, False),
        (21, True),
        (41, True),
        (400, True),
    ):
        one.until = until
        assert one.must_go_on() is expected, until
    one.maker.end = "all"
    assert not one.must_go_on()
    assert a_stream(tmp_path / "new", [], 4, None).must_go_on()
    assert not a_stream(tmp_path / "none", [0], 4, "all").must_go_on()  # a source without a window


def test_before_training_can_begin_what_it_begins_with_is_made_first_whatever_the_room(
    tmp_path: Path,
) -> None:
    a, b = (a_stream(tmp_path / name, [10] * 3, 1, None, name=name, held_out=2) for name in "ab")
    one = dataclasses.replace(
        seal(3, 10), validation=ShardInfo("validation_00000.bin", 100, 9, 1, 1, 1, "")
    )
    a.maker.seals += [one, one]
    b.maker.seals += [seal(k, 10) for k in range(3, 9)] + [
        one
    ]  # more to train on than of the other
    assert (a.must_begin(), b.must_begin(), a.must_go_on(), b.must_go_on()) == (
        False,
        True,
        False,
        True,
    )
    assert b.lead() < a.lead()
    b.maker.end = "all"
    assert not b.must_begin()


class Quiet(Producer):
    """A producer of these streams that says nothing."""

    def __init__(self, streams: list[Stream], cap: int):
        self.streams, self.cap, self.shard_bytes = streams, cap, 100
        self.made, self.excess, self.over, self.said = 0, 0, False, math.inf
        self.trainer = cast(Any, SimpleNamespace(heard={}))

    def tell(self, stream: Stream, tokens: int, now: bool = False) -> None:
        pass

    def hear(self, **at: tuple[int, int]) -> None:
        self.trainer.heard = {
            "at": {name: a for name, (a, _) in at.items()},
            "until": {name: u for name, (_, u) in at.items()},
        }


def test_the_source_of_which_training_has_the_least_ahead_comes_first(tmp_path: Path) -> None:
    a, b = (
        a_stream(tmp_path / name, [], 1, None, name=name, weight=weight)
        for name, weight in (("a", 3), ("b", 1))
    )
    producer = Quiet([a, b], 10**9)
    for _ in range(40):
        assert producer.make_one()
    assert (len(a.maker.seals), len(b.maker.seals)) == (30, 10)
    producer.hear(a=(0, 1), b=(95, 96))
    for _ in range(3):
        producer.make_one()
    assert len(b.maker.seals) == 13


def test_a_source_that_is_needed_soon_comes_before_another_that_was_deleted_and_is_needed_later(
    tmp_path: Path,
) -> None:
    far = a_stream(tmp_path / "far", [10] * 3, 1, "all", name="far", there={0, 2})
    near = a_stream(tmp_path / "near", [10], 1, None, name="near")
    producer = Quiet([far, near], 10**9)
    producer.hear(far=(0, 1), near=(9, 12))  # far has ten windows ahead, near has one
    producer.make_one()
    assert len(near.maker.seals) == 2 and cast(Any, far.maker).remade == []
    producer.hear(far=(9, 10), near=(9, 12))
    producer.make_one()
    assert cast(Any, far.maker).remade == [1]


def test_where_the_disk_s_share_is_used_up_only_what_is_needed_is_made(tmp_path: Path) -> None:
    one = a_stream(tmp_path, [], 1, None)
    producer = Quiet([one], 450)
    while producer.make_one():
        pass
    assert len(one.maker.seals) == 4 and (producer.excess, producer.over) == (50, False)
    producer.hear(
        s=(25, 30)
    )  # in the group that the next step ends with, and the one behind it, all is there
    assert not producer.make_one()
    producer.hear(s=(25, 31))
    assert producer.make_one() and not producer.make_one()
    assert len(one.maker.seals) == 5 and (producer.excess, producer.over) == (150, True)
    for k in (0, 1):  # the trainer has deleted
        (one.maker.folder / f"train_{k:05d}.bin").unlink()
    assert producer.make_one() and (producer.excess, producer.over) == (50, False)
    one.maker.end = "all"
    assert not producer.make_one() and producer.excess == 0
    producer.hear(s=(50, 51))  # round its end, it begins again
    assert producer.make_one() and cast(Any, one.maker).remade == [0]


def test_before_it_has_heard_where_training_is_nothing_is_made_again(tmp_path: Path) -> None:
    one = a_stream(tmp_path, [10] * 6, 1, None, there={4, 5})
    producer = Quiet([one], 250)
    assert not producer.make_one()
    producer.hear(s=(40, 41))
    assert not producer.make_one()
    producer.hear(s=(0, 1))  # gone back to a checkpoint of long ago
    assert producer.make_one() and producer.make_one() and cast(Any, one.maker).remade == [0, 1]


def test_a_source_without_a_window_holds_nothing_up(tmp_path: Path) -> None:
    none = a_stream(tmp_path / "none", [0], 2, "all", name="none")
    some = a_stream(tmp_path / "a", [], 2, None, name="a")
    producer = Quiet([none, some], 10**9)
    producer.hear(none=(0, 0), a=(0, 1))
    assert (
        none.lead() == math.inf
        and none.missing() == []
        and producer.make_one()
        and len(some.maker.seals) == 1
    )


def test_what_the_trainer_says_is_taken_by_its_last_whole_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [{"at": {"s": n}, "until": {"s": n + 1}} for n in range(4)]
    settings = {name.lower(): value for name, value in Config().values().items()}
    begin = {"settings": settings, "held_out": {"s": 2}}
    lines = [json.dumps(begin).encode(), *(json.dumps(word).encode() for word in words[:3])]
    said = b"\n".join([*lines, b'{"at": {"s"', json.dumps(words[3]).encode()])
    parts = [said[:50], said[50:1000], said[1000:], b"", b"not asked for"]

    class Ended(Exception):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(stream.os, "read", lambda descriptor, most: parts.pop(0))
    monkeypatch.setattr(stream.os, "_exit", end)
    monkeypatch.setattr(stream.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    trainer = stream.Trainer()
    assert trainer.config == Config() and trainer.held_out == {"s": 2}
    with pytest.raises(Ended, match="0"):
        trainer.listen()
    assert trainer.heard == words[2] and parts == [b"not asked for"]
