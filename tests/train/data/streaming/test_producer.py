"""train/data/streaming/producer.py: what the producer makes next, against every sample counted one by one."""

import dataclasses
import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from settings.config import Config
from tests.train.data.test_mixture import layouts
from train.data import data_paths
from train.data.manifest import Seal, ShardInfo
from train.data.shard_writer import Maker
from train.data.streaming import producer as stream
from train.data.streaming.producer import Producer, Stream

SEQ_LEN = 4


@pytest.fixture(autouse=True)
def group_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_paths, "GROUP_SHARDS", 1)


def seal(k: int, windows: int | None) -> Seal:
    """The k-th seal, with a training shard of so many windows, or with none."""
    info = None
    if windows is not None:
        info = ShardInfo(f"train_{k:05d}.bin", 100, windows * SEQ_LEN + 1, 1, 1, 1, "")
    return Seal((k, 0), 1, {}, info, None)


def a_stream(
    folder: Path,
    windows: list[int | None],
    end: str | None,
    at: int = 0,
    until: int = 0,
    weight: int = 1,
    there: set[int] | None = None,
    held_out: int = 0,
) -> Stream:
    """A source of which shards have so many windows; there: seals whose file exists, all if that is not given."""
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

    of_source = cast(Maker, maker)
    return Stream(folder.name, weight, of_source, making(), SEQ_LEN, held_out, at, until)


def test_the_lead_is_how_many_samples_there_are_before_one_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    for i, layout in enumerate(layouts(150)):
        monkeypatch.setattr(data_paths, "GROUP_SHARDS", layout.size)
        seals: list[int | None] = list(layout.windows)
        there = {k for k in range(len(seals)) if rng.random() < 0.8}
        begin = layout.begin if layout.is_whole else min(layout.begin, layout.sealed - 1)
        end = "all" if layout.is_whole else None
        if not layout.end:
            continue
        one = a_stream(tmp_path / str(i), seals, end, begin, layout.end, 3, there)
        deleted = one.find_deleted()
        needed = layout.order.needed(begin, layout.end)
        assert [deleted[1]] if deleted else [k for k in needed if k not in there][:1] == []
        count = 0
        while count < 3 * layout.sealed:
            turn = layout.turn(begin + count)
            if deleted and turn >= deleted[0]:
                break
            if not layout.is_whole and begin + count >= layout.sealed:
                break
            count += 1
        assert one.lead() == (math.inf if count == 3 * layout.sealed else count * SEQ_LEN / 3)
        one.until = 0
        assert one.find_deleted() is None


def test_shards_are_numbered_without_the_seals_that_have_validation_documents_only(
    tmp_path: Path,
) -> None:
    one = a_stream(tmp_path, [None, 5, None, 6, 7], "all", until=1, there={1, 4})
    assert one.find_deleted() == (1, 3)


def test_more_is_made_whatever_the_room_until_the_group_after_the_next_step_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_paths, "GROUP_SHARDS", 4)
    one = a_stream(tmp_path, [10] * 4, None)  # groups of 1, 1 and 2 shards
    for until, expected in ((0, False), (10, False), (20, False), (21, True), (41, True)):
        one.until = until
        assert one.must_continue() is expected, until
    one.maker.end = "all"
    assert not one.must_continue()
    assert a_stream(tmp_path / "new", [], None).must_continue()
    assert not a_stream(tmp_path / "none", [0], "all").must_continue()


def test_before_training_can_begin_what_it_begins_with_is_made_first_whatever_the_room(
    tmp_path: Path,
) -> None:
    a, b = (a_stream(tmp_path / name, [10] * 3, None, held_out=2) for name in "ab")
    validation = ShardInfo("validation_00000.bin", 100, 9, 1, 1, 1, "")
    one = dataclasses.replace(seal(3, 10), validation=validation)
    a.maker.seals += [one, one]
    b.maker.seals += [*(seal(k, 10) for k in range(3, 9)), one]  # more to train on than of a
    assert [a.must_begin(), b.must_begin()] == [False, True]
    assert [a.must_continue(), b.must_continue()] == [False, True]
    assert b.lead() < a.lead()
    b.maker.end = "all"
    assert not b.must_begin()


class Quiet(Producer):
    """A producer of these streams that reports nothing."""

    def __init__(self, streams: list[Stream], cap: int):
        self.streams, self.cap, self.shard_bytes = streams, cap, 100
        self.made, self.excess = 0, 0
        self.trainer = cast(Any, SimpleNamespace(position={}))

    def report(self, stream: Stream, now: bool = False) -> None:
        pass

    def go_to(self, **at: tuple[int, int]) -> None:
        self.trainer.position = {
            "at": {name: a for name, (a, _) in at.items()},
            "until": {name: u for name, (_, u) in at.items()},
        }


def test_the_source_of_which_training_has_the_least_ahead_comes_first(tmp_path: Path) -> None:
    a = a_stream(tmp_path / "a", [], None, weight=3)
    b = a_stream(tmp_path / "b", [], None, weight=1)
    producer = Quiet([a, b], 10**9)
    for _ in range(40):
        assert producer.make_one()
    assert (len(a.maker.seals), len(b.maker.seals)) == (30, 10)
    producer.go_to(a=(0, 1), b=(95, 96))
    for _ in range(3):
        producer.make_one()
    assert len(b.maker.seals) == 13


def test_a_source_that_is_needed_soon_comes_before_another_that_was_deleted_and_is_needed_later(
    tmp_path: Path,
) -> None:
    far = a_stream(tmp_path / "far", [10] * 3, "all", there={0, 2})
    near = a_stream(tmp_path / "near", [10], None)
    producer = Quiet([far, near], 10**9)
    producer.go_to(far=(0, 1), near=(9, 12))  # far has ten windows ahead, near has one
    producer.make_one()
    assert len(near.maker.seals) == 2 and cast(Any, far.maker).remade == []
    producer.go_to(far=(9, 10), near=(9, 12))
    producer.make_one()
    assert cast(Any, far.maker).remade == [1]


def test_where_the_disk_s_share_is_used_up_only_what_is_needed_is_made(tmp_path: Path) -> None:
    one = a_stream(tmp_path / "s", [], None)
    producer = Quiet([one], 450)
    while producer.make_one():
        pass
    assert len(one.maker.seals) == 4 and producer.excess == 50
    producer.go_to(s=(25, 30))  # the next step's group and the one after are there
    assert not producer.make_one()
    producer.go_to(s=(25, 31))
    assert producer.make_one() and not producer.make_one()
    assert len(one.maker.seals) == 5 and producer.excess == 150
    for k in (0, 1):  # the trainer has deleted
        (one.maker.folder / f"train_{k:05d}.bin").unlink()
    assert producer.make_one() and producer.excess == 50
    one.maker.end = "all"
    assert not producer.make_one() and producer.excess == 0
    producer.go_to(s=(50, 51))  # at its end, it begins again
    assert producer.make_one() and cast(Any, one.maker).remade == [0]


def test_nothing_is_made_again_before_training_has_said_where_it_is(tmp_path: Path) -> None:
    one = a_stream(tmp_path / "s", [10] * 6, None, there={4, 5})
    producer = Quiet([one], 250)
    assert not producer.make_one()
    producer.go_to(s=(40, 41))
    assert not producer.make_one()
    producer.go_to(s=(0, 1))  # gone back to a checkpoint of long ago
    assert producer.make_one() and producer.make_one() and cast(Any, one.maker).remade == [0, 1]


def test_a_source_without_a_window_holds_nothing_up(tmp_path: Path) -> None:
    none = a_stream(tmp_path / "none", [0], "all")
    some = a_stream(tmp_path / "a", [], None)
    producer = Quiet([none, some], 10**9)
    producer.go_to(none=(0, 0), a=(0, 1))
    assert none.lead() == math.inf and none.find_deleted() is None
    assert list(none.order().turns(0, 1)) == []
    assert producer.make_one() and len(some.maker.seals) == 1


def test_the_trainers_position_is_its_last_whole_line(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = [{"at": {"s": n}, "until": {"s": n + 1}} for n in range(4)]
    settings = {name.lower(): value for name, value in Config().values().items()}
    begin = {"settings": settings, "held_out": {"s": 2}}
    lines = [json.dumps(line).encode() for line in (begin, *positions[:3])]
    text = b"\n".join([*lines, b'{"at": {"s"', json.dumps(positions[3]).encode()])
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)

    codes: list[int] = []
    monkeypatch.setattr(stream, "STDIN", reader)
    monkeypatch.setattr(stream.os, "_exit", codes.append)
    monkeypatch.setattr(stream.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    trainer = stream.Trainer()
    assert trainer.config == Config() and trainer.held_out == {"s": 2}
    trainer.listen()
    assert trainer.position == positions[3] and codes == [0]
