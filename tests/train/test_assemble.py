"""train/assemble.py and run_folder.py: what is said and refused before a run trains."""

import dataclasses
import logging
from pathlib import Path
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
    check_shared_folder,
    warn_short_grace_period,
)
from train.data import prepare
from train.data.manifest import DataError
from train.distributed import world as distributed
from train.distributed.world import World


def world(size, local=1):
    hosts = tuple(f"host{rank // local}" for rank in range(size))
    return World(0, 0, 0, size, torch.device("cpu"), "CPU", "host0", local, hosts)


def state(tmp_path: Path, **facts: float) -> Status:
    return Status(tmp_path / "STATUS.json", True, **facts)


@pytest.mark.fault(5)
def test_a_stop_that_takes_longer_than_there_is_time_is_said_before_it_comes(
    tmp_path, monkeypatch, caplog
):
    c = Config()
    monkeypatch.setattr(assemble, "shutdown_timeout_s", lambda _: 120.0)
    warn_short_grace_period(c, world(2), state(tmp_path, step_s=10.0, save_s=100.0))
    warn_short_grace_period(c, world(1), state(tmp_path, step_s=10.0, save_s=160.0))
    warn_short_grace_period(c, world(2), state(tmp_path))  # nothing is known yet
    assert caplog.text == ""
    warn_short_grace_period(c, world(2), state(tmp_path, step_s=10.0, save_s=115.0))
    assert "took 125 s the last time, and GRACE_PERIOD_S=180 leaves 120 s" in caplog.text
    assert "Set GRACE_PERIOD_S=248" in caplog.text
    warn_short_grace_period(c, world(1), state(tmp_path, step_s=10.0, save_s=175.0))
    assert "GRACE_PERIOD_S=180 leaves 180 s" in caplog.text


def test_nodes_without_a_common_disk_are_told_what_follows(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    paths, c = RunPaths(tmp_path), Config()
    for parallel in ("ddp", "hsdp"):
        check_shared_folder(
            dataclasses.replace(c, parallel=parallel), paths, world(8, 2), is_shared=False
        )
        assert (
            "the first keeps the checkpoints, and sends them to the others at a resume"
            in caplog.text
        )
        caplog.clear()
    check_shared_folder(c, paths, world(8, 2), is_shared=True)
    assert caplog.text == ""
    check_shared_folder(
        dataclasses.replace(c, parallel="fsdp"), paths, world(2, 2), is_shared=False
    )  # one node
    with pytest.raises(
        SettingsError, match=r"PARALLEL=fsdp: a copy .* lies on several nodes.*SHARD_RANKS=2"
    ):
        check_shared_folder(
            dataclasses.replace(c, parallel="fsdp"), paths, world(8, 2), is_shared=False
        )
    apart = dataclasses.replace(
        c, parallel="fsdp", sync="diloco", sites=2, nodes=8
    )  # which has no hsdp
    with pytest.raises(SettingsError, match=r"put RUNS_DIR on a disk that they share$"):
        check_shared_folder(apart, paths, world(8, 2), is_shared=False)


def test_whether_all_nodes_see_the_folder_is_tried(tmp_path, monkeypatch):
    for seen, expected in (([], True), ([False], False)):
        monkeypatch.setattr(distributed, "from_all", lambda mine, seen=seen: [mine, *seen])
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


def shards(key: str, *seals: tuple[str, ...]) -> Any:
    """As much of a ShardSet as is asked for what it holds."""
    return SimpleNamespace(
        key=key,
        seals=[
            SimpleNamespace(infos=lambda seal=seal: [SimpleNamespace(xxh3=xxh3) for xxh3 in seal])
            for seal in seals
        ],
    )


def test_nodes_of_a_run_that_streams_may_see_more_or_less_and_not_something_else():
    made, more, other = (
        shards("k", *seals) for seals in ([("1", "2")], [("1", "2"), ("3",)], [("1", "9")])
    )
    assert open_data.hash_contents({"a": made}, whole=False) == open_data.hash_contents(
        {"a": more}, whole=False
    )
    assert open_data.hash_contents({"a": made}, whole=True) != open_data.hash_contents(
        {"a": more}, whole=True
    )
    for whole in (False, True):
        assert open_data.hash_contents({"a": made}, whole) != open_data.hash_contents(
            {"a": other}, whole
        )
        assert open_data.hash_contents({"a": made}, whole) != open_data.hash_contents(
            {"b": made}, whole
        )


def test_the_fingerprint_of_a_run_is_of_the_order_the_tokenizer_and_where_text_comes_from():
    """And not of how much of it there is: a run may go from streamed shards to finished ones."""

    def fingerprint(
        order: str = "order", tokenizer: str = "0123456789abcdef", **sources: Any
    ) -> str:
        loader: Any = SimpleNamespace(mixture=SimpleNamespace(fingerprint=order))
        vocabulary: Any = SimpleNamespace(sha256=tokenizer)
        return open_data.fingerprint_of(loader, vocabulary, sources or {"a": shards("k", ("1",))})

    assert fingerprint() == fingerprint(a=shards("k", ("1",), ("2",)))
    assert fingerprint().startswith("order-0123456789ab-")
    # make eval finds the shards of a run by it.
    assert fingerprint().endswith("-" + prepare.hash_origin({"a": shards("k", ("1",))})[:12])
    others = {
        fingerprint(order="other"),
        fingerprint(tokenizer="f" * 16),
        fingerprint(a=shards("l", ("1",))),
        fingerprint(b=shards("k", ("1",))),
        fingerprint(),
    }
    assert len(others) == 5


def test_every_second_since_the_start_of_the_process_is_in_a_phase(monkeypatch):
    clock = iter([100.0, 103.0, 110.0, 110.5])
    monkeypatch.setattr("train.assemble.time", SimpleNamespace(monotonic=lambda: next(clock)))
    watch = Stopwatch()
    for phase in ("data", "model", "data"):
        watch.lap(phase)
    assert watch.seconds.pop("import") > 0.1  # this process is older than that
    assert watch.seconds == {"data": 3.5, "model": 7.0}
