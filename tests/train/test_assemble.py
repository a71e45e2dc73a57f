"""train/assemble.py and run_folder.py: what is said and refused before a run trains."""

import dataclasses
import functools
import logging
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from record.run_paths import RunPaths
from record.status import Status
from settings import SettingsError
from settings.config import Config
from train import assemble, open_data, run_folder
from train.assemble import (
    Stopwatch,
)
from train.data import prepare
from train.data.manifest import DataError
from train.distributed import world as distributed
from train.distributed.world import World


def world(size, local=1):
    hosts = tuple(f"host{rank // local}" for rank in range(size))
    return World(0, 0, 0, size, torch.device("cpu"), "CPU", "host0", local, hosts)


@pytest.mark.fault(5)
@pytest.mark.parametrize(
    ("size", "facts", "sentence"),
    [
        (2, {"step_s": 10.0, "save_s": 100.0}, ""),
        (1, {"step_s": 10.0, "save_s": 160.0}, ""),
        (2, {}, ""),  # nothing is known yet
        (2, {"step_s": 10.0, "save_s": 115.0}, "took 125 s .* GRACE_PERIOD_S=180 leaves 120 s"),
        (2, {"step_s": 10.0, "save_s": 115.0}, "Set GRACE_PERIOD_S=248"),
        (1, {"step_s": 10.0, "save_s": 175.0}, "GRACE_PERIOD_S=180 leaves 180 s"),
    ],
)
def test_a_stop_that_takes_longer_than_there_is_time_is_said_before_it_comes(
    tmp_path, monkeypatch, caplog, size, facts, sentence
):
    monkeypatch.setattr(assemble, "shutdown_timeout_s", lambda _: 120.0)
    status = Status(tmp_path / "STATUS.json", True, **facts)
    assemble.warn_short_grace_period(Config(), world(size), status)
    assert re.search(sentence or "^$", caplog.text)


SENT = "the first keeps the checkpoints, and sends them to the others at a resume"


@pytest.mark.parametrize(
    ("changes", "local", "is_shared", "sentence"),
    [
        ({"parallel": "ddp"}, 2, False, SENT),
        ({"parallel": "hsdp"}, 2, False, SENT),
        ({"parallel": "ddp"}, 2, True, ""),
        ({"parallel": "fsdp"}, 8, False, ""),  # one node
    ],
)
def test_nodes_without_a_common_disk_are_told_what_follows(
    tmp_path, caplog, changes, local, is_shared, sentence
):
    caplog.set_level(logging.INFO)
    c = dataclasses.replace(Config(), **changes)
    assemble.check_shared_folder(c, RunPaths(tmp_path), world(8, local), is_shared)
    assert sentence in caplog.text and bool(sentence) == bool(caplog.text)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "a copy .* lies on several nodes.*put RUNS_DIR on a disk .*SHARD_RANKS=2"),
        ({"sync": "diloco", "sites": 2, "nodes": 8}, "put RUNS_DIR on a disk that they share$"),
    ],
)
def test_a_copy_that_no_node_has_whole_is_refused_without_a_common_disk(tmp_path, changes, advice):
    c = dataclasses.replace(Config(), parallel="fsdp", **changes)
    with pytest.raises(SettingsError, match=f"PARALLEL=fsdp: .*{advice}"):
        assemble.check_shared_folder(c, RunPaths(tmp_path), world(8, 2), is_shared=False)


def test_whether_all_nodes_see_the_folder_is_tried(tmp_path, monkeypatch):
    for seen, expected in (([], True), ([False], False)):
        monkeypatch.setattr(distributed, "all_gather_object", lambda mine, seen=seen: [mine, *seen])
        lock, shared = run_folder.open_run_folder(RunPaths(tmp_path / "run"), world(2))
        assert shared is expected and not list((tmp_path / "run").glob(".probe*"))
        lock.close()


def test_nodes_with_other_data_are_refused_by_name():
    """Another order, or other bytes in the same."""
    open_data.refuse_other_data(["a-b-c-0123"] * 4, world(4, 2))
    for other in ("a-b-d-0123", "a-b-c-4567"):
        with pytest.raises(
            DataError,
            match=rf"rank 2 on host1 has other data than rank 0 on host0 \(fingerprints "
            rf"{other} and a-b-c-0123\): copy DATA_DIR .*make data",
        ):
            open_data.refuse_other_data(["a-b-c-0123"] * 2 + [other] * 2, world(4, 2))


def shards(key, *seals):
    """As much of a ShardSet as is asked for what it holds. seals: of shards with a hash of one letter each."""

    def infos(seal):
        return [SimpleNamespace(xxh3=xxh3) for xxh3 in seal]

    made = [SimpleNamespace(infos=functools.partial(infos, seal)) for seal in seals]
    return SimpleNamespace(key=key, manifest=SimpleNamespace(seals=made))


def test_nodes_of_a_run_that_streams_may_see_more_or_less_and_not_something_else():
    def contents(whole, *seals, name="a"):
        return open_data.hash_contents({name: shards("k", *seals)}, whole)

    for whole in (False, True):
        made = contents(whole, "12")
        assert (contents(whole, "12", "3") == made) == (not whole)
        assert made not in (contents(whole, "19"), contents(whole, "12", name="b"))


def test_the_fingerprint_of_a_run_is_of_the_order_the_tokenizer_and_where_text_comes_from():
    """And not of how much of it there is: a run may go from streamed shards to finished ones."""

    def fingerprint(order="order", tokenizer="0123456789abcdef", **sources):
        loader: Any = SimpleNamespace(mixture=SimpleNamespace(fingerprint=order))
        vocabulary: Any = SimpleNamespace(sha256=tokenizer)
        return open_data.fingerprint_of(loader, vocabulary, sources or {"a": shards("k", "1")})

    assert fingerprint() == fingerprint(a=shards("k", "1", "2"))
    assert fingerprint().startswith("order-0123456789ab-")
    # make eval finds the shards of a run by it.
    assert fingerprint().endswith("-" + prepare.hash_origin({"a": shards("k", "1")})[:12])
    changes: list[dict[str, Any]] = [
        {},
        {"order": "other"},
        {"tokenizer": "f" * 16},
        {"a": shards("l", "1")},
        {"b": shards("k", "1")},
    ]
    assert len({fingerprint(**change) for change in changes}) == len(changes)


def test_every_second_since_the_launch_is_in_a_phase(monkeypatch):
    monkeypatch.setenv("LAUNCHED_AT", str(time.monotonic() - 5))
    clock = iter([100.0, 103.0, 110.0, 110.5])
    monkeypatch.setattr("train.assemble.time", SimpleNamespace(monotonic=lambda: next(clock)))
    watch = Stopwatch()
    for phase in ("data", "model", "data"):
        watch.lap(phase)
    assert watch.seconds.pop("import") == pytest.approx(5, abs=1)
    assert watch.seconds == {"data": 3.5, "model": 7.0}
