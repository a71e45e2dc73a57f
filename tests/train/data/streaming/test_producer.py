"""train/data/streaming/producer.py: what the producer makes next, against every sample counted one by one."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from train.data import data_paths
from train.data.manifest import Manifest, Seal, ShardInfo
from train.data.streaming import producer as stream
from train.data.streaming.producer import Producer, Stream

SEQ_LEN = 4
VALIDATION = ShardInfo("validation_00000.bin", 100, 9, 1, 1, 1, "")


@pytest.fixture(autouse=True)
def group_shards(monkeypatch):
    monkeypatch.setattr(data_paths, "GROUP_SHARDS", 1)


def seal(k, windows, validation=None):
    """The k-th seal, with a training shard of so many windows, or with none."""
    info = None
    if windows is not None:
        info = ShardInfo(f"train_{k:05d}.bin", 100, windows * SEQ_LEN + 1, 1, 1, 1, "")
    return Seal((k, 0), 1, {}, info, validation)


class FakeMaker:
    """Makes shards of ten windows that nothing is in."""

    def __init__(self, folder, windows, end):
        seals = [seal(k, n) for k, n in enumerate(windows)]
        self.folder = folder
        self.manifest = Manifest("", "", "", "", 0, end, seals=seals)
        self.pending = {"train": SimpleNamespace(tokens=0)}
        self.remade: list[int] = []
        self.tokens = self.manifest.tokens
        folder.mkdir()
        for k in range(len(seals)):
            self.write(k)

    def write(self, k):
        info = self.manifest.seals[k].train
        if info:
            (self.folder / info.file).write_bytes(bytes(info.bytes))

    def remake(self, seal):
        self.remade.append(self.manifest.seals.index(seal))
        self.write(self.remade[-1])

    def make(self):
        seals = self.manifest.seals
        while self.manifest.end is None:
            seals.append(seal(len(seals), 10))
            self.write(len(seals) - 1)
            yield seals[-1]


def a_stream(
    folder,
    windows=(),
    end=None,
    gone=(),
    **more,
):
    """A source of which shards have so many windows; gone: seals whose file was deleted."""
    writer = FakeMaker(folder, windows, end)
    for k in gone:
        (folder / f"train_{k:05d}.bin").unlink()
    return Stream(
        folder.name, making=writer.make(), writer=cast(Any, writer), seq_len=SEQ_LEN, **more
    )


def seals(one):
    return len(one.writer.manifest.seals)


def remade(one):
    return cast(FakeMaker, one.writer).remade


TENS = [10] * 4


@pytest.mark.parametrize(
    ("windows", "end", "gone", "at", "until", "deleted", "ahead"),
    [
        (TENS, "all", [], 5, 6, None, math.inf),
        (TENS, None, [], 5, 6, None, 35),
        (TENS, None, [2], 5, 6, None, 35),  # not needed yet
        (TENS, None, [1, 2], 5, 6, (1, "train_00001.bin"), 5),
        (TENS, None, [0], 5, 6, (0, "train_00000.bin"), 0),
        (TENS, "all", [0], 35, 36, (4, "train_00000.bin"), 5),  # in the next epoch
        (TENS, None, [0], 0, 0, None, 40),  # before training has said where it is
        # Seals that have validation documents only are not numbered.
        ([None, 5, None, 6, 7], "all", [3], 0, 1, (1, "train_00003.bin"), 5),
        ([0], "all", [], 0, 1, None, math.inf),
    ],
)
def test_the_lead_is_how_many_samples_there_are_before_one_that_was_deleted(
    tmp_path,
    windows,
    end,
    gone,
    at,
    until,
    deleted,
    ahead,
):
    """deleted: the turn and the shard."""
    where = {"at": at, "until": until, "weight": 3, "held_out": 0}
    one = a_stream(tmp_path / "s", windows, end, gone, **where)
    found = one.find_deleted()
    assert (found and (found[0], found[1].file)) == deleted
    assert one.lead() == ahead * SEQ_LEN / 3


def test_more_is_made_whatever_the_room_until_the_group_after_the_next_step_is_whole(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(data_paths, "GROUP_SHARDS", 4)
    # Groups of 1, 1 and 2 shards.
    one = a_stream(tmp_path / "s", [10] * 4, weight=1, held_out=0)
    for until, expected in ((0, False), (10, False), (20, False), (21, True), (41, True)):
        one.until = until
        assert one.must_continue() is expected, until
    one.writer.manifest.end = "all"
    assert not one.must_continue()
    assert a_stream(tmp_path / "new", weight=1).must_continue()


def test_before_training_can_begin_what_it_begins_with_is_made_first_whatever_the_room(
    tmp_path,
):
    a, b = (a_stream(tmp_path / name, [10] * 3, weight=1, held_out=2) for name in "ab")
    a.writer.manifest.seals += [seal(3, 10, VALIDATION)] * 2
    # More to train on than of a.
    b.writer.manifest.seals += [*(seal(k, 10) for k in range(3, 9)), seal(9, 10, VALIDATION)]
    for one, begins in ((a, False), (b, True)):
        assert one.must_begin() is begins and one.must_continue() is begins
    assert b.lead() < a.lead()
    b.writer.manifest.end = "all"
    assert not b.must_begin()


class Quiet(Producer):
    """A producer of these streams that reports nothing."""

    def __init__(self, *streams, cap=math.inf):
        self.streams, self.cap, self.shard_bytes = list(streams), cast(int, cap), 100
        self.made, self.over_budget_bytes = 0, 0
        self.trainer = cast(Any, SimpleNamespace(position={}))

    def report(self, stream, now=False):
        pass

    def go_to(self, **at):
        self.trainer.position = {
            "at": {name: a for name, (a, _) in at.items()},
            "until": {name: u for name, (_, u) in at.items()},
        }


def test_the_source_of_which_training_has_the_least_ahead_comes_first(tmp_path):
    a, b = (
        a_stream(tmp_path / name, weight=weight, held_out=0)
        for name, weight in (("a", 3), ("b", 1))
    )
    producer = Quiet(a, b)
    for _ in range(40):
        assert producer.make_one()
    assert (seals(a), seals(b)) == (30, 10)
    producer.go_to(a=(0, 1), b=(95, 96))
    for _ in range(3):
        producer.make_one()
    assert seals(b) == 13


def test_where_the_disk_s_share_is_used_up_only_what_is_needed_is_made(tmp_path):
    one = a_stream(tmp_path / "s", weight=1, held_out=0)
    producer = Quiet(one, cap=450)
    while producer.make_one():
        pass
    assert seals(one) == 4 and producer.over_budget_bytes == 50
    producer.go_to(s=(25, 30))  # the next step's group and the one after are there
    assert not producer.make_one()
    producer.go_to(s=(25, 31))
    assert producer.make_one() and not producer.make_one()
    assert seals(one) == 5 and producer.over_budget_bytes == 150
    for k in (0, 1):  # the trainer has deleted
        (one.writer.folder / f"train_{k:05d}.bin").unlink()
    assert producer.make_one() and producer.over_budget_bytes == 50
    one.writer.manifest.end = "all"
    assert not producer.make_one() and producer.over_budget_bytes == 0
    producer.go_to(s=(50, 51))  # at its end, it begins again
    assert producer.make_one() and remade(one) == [0]


def test_the_trainers_position_is_its_last_whole_line(monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(stream.os, "_exit", codes.append)
    trainer = object.__new__(stream.Trainer)
    trainer.lines = cast(Any, [b'{"at": 1}\n', b'{"at": {"s"{"at": 2}\n', b'{"at": 3}\n', b'{"a'])
    trainer.listen()
    assert trainer.position == {"at": 3} and codes == [0]
