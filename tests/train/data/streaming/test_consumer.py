"""train/data/streaming/consumer.py: what may be deleted, and what becomes of a producer that dies or comes no further."""

import dataclasses
import json
import logging
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from record.run_paths import RunPaths
from settings.config import Config
from tests.shard_folder import write_source
from train import timeouts
from train.data.mixture import SourceOrder
from train.data.shards import ShardSet
from train.data.streaming import consumer
from train.data.streaming.consumer import StreamingClient

WORDS = {"source": "s", "tokens": 100, "made": 0, "pending": 0, "over_budget_bytes": 0}


def quiet(tmp_path, **settings):
    """A feed whose producer is not started."""
    made = StreamingClient(
        dataclasses.replace(Config(), **settings), RunPaths(tmp_path), first=False, held_out={}
    )
    made.first = True
    return made


def test_shards_are_deleted_only_as_far_as_there_is_too_much(tmp_path):
    write_source(tmp_path / "s", [(np.arange(100), 1, 1)] * 6, [], "00" * 32)
    shards = ShardSet(tmp_path / "s", partial=True)
    order, this = SourceOrder("s", [10] * 6, 1, 0, False), quiet(tmp_path)
    size = shards.shards["train"][0].bytes

    def left(excess):
        this.over_budget_bytes = int(excess * size)
        this.make_room([shards], [order], {"s": 35}, {"s": 46})
        return [k for k in range(6) if shards.is_there(k)]

    assert left(0) == list(range(6))
    assert left(1.5) == [0, 3, 4, 5] and this.over_budget_bytes == -size // 2
    assert (
        left(10) == [3, 4, 5] and this.over_budget_bytes == 9 * size
    )  # the checkpoint needs the fourth


def test_progress_is_a_shard_more_or_more_of_the_next_than_ever_before(tmp_path):
    this = quiet(tmp_path)

    def moves(**words):
        this.moved_s = 0.0
        this.take(WORDS | words)
        return this.moved_s > 0

    assert moves(pending=10) and moves(pending=20) and not moves(pending=20)
    assert moves(made=1) and moves(made=1, pending=5)
    this.made_before, this.made = 1, 0  # it has died, and another begins behind what is sealed
    assert not moves(pending=5) and moves(pending=6)  # it is where the other was
    assert this.progress().startswith("; made so far: s ")


def test_what_is_no_word_of_the_producer_is_passed_over(tmp_path):
    this = quiet(tmp_path)
    this.ready = False
    this.listen(
        cast(Any, [b"Downloading: 3%\n", b"[1]\n", b"17\n", b'{"source": "s"}\n', b"\xff\n"])
    )
    assert not this.ready and this.moved_s > 0
    this.listen(cast(Any, [json.dumps(WORDS).encode()]))
    assert this.ready


@pytest.fixture
def producer(monkeypatch):
    """Have producers be processes that run this code."""
    real = subprocess.Popen

    def use(code):
        monkeypatch.setattr(
            consumer.subprocess,
            "Popen",
            lambda _, **more: real([sys.executable, "-c", code], **more),
        )

    monkeypatch.setattr(consumer, "RESTART_S", 0.05)
    return use


def until(what, seconds=20):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_producer_that_is_refused_ends_a_wait_at_once_and_says_why(
    tmp_path,
    producer,
    caplog,
    monkeypatch,
):
    producer(
        "import json, sys; sys.stdout.write(json.dumps({'error': 'the hub refuses it (403)', 'again': False}))\n"
        "sys.exit(78)"
    )
    this = StreamingClient(Config(), RunPaths(tmp_path), first=True, held_out={"a": 2})
    until(lambda: this.process and this.process.poll() is not None)
    for _ in range(3):
        this.tell({}, {})
    assert [r.levelno for r in caplog.records] == [
        logging.WARNING
    ] and "the hub refuses it (403)" in caplog.text
    refused = this.why_not(0.0, ["s"])
    assert str(refused) == "the producer of data was refused: the hub refuses it (403)"
    assert not refused.machine_fault
    monkeypatch.setattr(consumer, "REFUSED_S", 0.1)
    first = this.process
    until(
        lambda: this.why_not(0.0, ["s"]) and this.process is not first
    )  # and yet it is tried again
    assert len(caplog.records) == 1
    this.close()


def test_the_producer_has_the_settings_of_the_trainer_and_then_where_it_is(
    tmp_path, producer, monkeypatch
):
    said = tmp_path / "said"
    producer(
        f"import sys; f = open({str(said)!r}, 'w', buffering=1)\nfor line in sys.stdin: f.write(line)\n"
        "f.write('end')"
    )
    c = dataclasses.replace(Config(), data_mix="a:1", hf_token="hf_secret")
    this = StreamingClient(c, RunPaths(tmp_path), first=True, held_out={"a": 2})
    monkeypatch.setenv(
        "DATA_MIX", "other:1"
    )  # an environment or a file that has changed is not read again
    this.tell({"a": 3}, {"a": 5})
    this.close()
    settings, where, end = said.read_text().splitlines()
    begin = json.loads(settings)
    assert Config(**begin["settings"]) == c and begin["held_out"] == {"a": 2} and end == "end"
    assert json.loads(where) == {"at": {"a": 3}, "until": {"a": 5}}


def test_a_producer_that_reads_nothing_does_not_hold_training_up(tmp_path, producer):
    producer("import time; time.sleep(60)")
    this = StreamingClient(Config(), RunPaths(tmp_path), first=True, held_out={"a": 2})
    began = time.monotonic()
    for _ in range(3000):
        this.tell({"a" * 100: 3}, {})
    assert time.monotonic() - began < 30
    this.close()  # it does not end by itself
    assert this.process and this.process.returncode == -9


def test_a_rank_that_never_sees_the_shards_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(timeouts, "DATA_TIMEOUT_S", 5)
    this = quiet(tmp_path)
    assert this.why_not(7.0, ["", "", "s"]) is None  # more is still made
    this.moved_s = time.monotonic() - 6
    assert this.why_not(4.0, ["", "", "s"]) is None
    this.relay = cast(Any, SimpleNamespace(moved_s=time.monotonic()))
    assert this.why_not(7.0, ["", "", "s"]) is None  # or sent
    this.relay = None
    assert "rank 2 has not seen the shards of s" in str(this.why_not(7.0, ["", "", "s"]))
    assert "on a disk that all nodes share" in str(this.why_not(7.0, ["", "", "s"]))
    assert (
        StreamingClient(Config(), RunPaths(tmp_path), first=False, held_out={}).why_not(
            10**6, ["s", "s"]
        )
        is None
    )
    assert this.why_not(7.0, ["s", "", ""]).machine_fault == "hub"
