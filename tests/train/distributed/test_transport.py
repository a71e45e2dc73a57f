"""train/distributed/transport.py: what is said of the way that processes talk, and of what a step sends between nodes."""

import logging
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from record.run_paths import RunPaths
from settings.config import Config
from tests.train.distributed.test_nccl_log import socket_node
from train.distributed import nccl_log, transport
from train.distributed import world as distributed
from train.distributed.transport import Traffic, traffic
from train.distributed.world import World

GB = 1e9


def world(kind: str = "cuda", size: int = 4, local_size: int = 2, local_rank: int = 0) -> World:
    return World(
        local_rank,
        local_rank,
        0,
        size,
        torch.device(kind, 0),
        "a GPU",
        "pt-0",
        local_size,
        ("pt-0",) * size,
    )


def model(frozen: int, trained: int, outside: int = 0) -> Any:
    """One block of so many weights, and what is round it."""

    def weights(number: int, trained: bool = False) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(number, device="meta"), requires_grad=trained)

    block = torch.nn.Module()
    block.frozen, block.trained = weights(frozen), weights(trained, True)
    whole = torch.nn.Module()
    whole.layers, whole.head = torch.nn.ModuleList([block]), weights(outside)
    return whole


def job(folder: Path, here: World, c: Config | None = None) -> Any:
    return SimpleNamespace(
        config=c or Config(),
        paths=RunPaths(folder),
        world=here,
        model=model(0, 10**9),
        loader=SimpleNamespace(micro_batch=1),
    )


@pytest.fixture(autouse=True)
def no_infiniband(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl_log, "FOLDER", tmp_path / "absent")
    caplog.set_level(logging.INFO)


# ---- What a step sends

AIR, ADAPTERS = 106_852_245_504, 44_264_448  # as presets/glm-4.5-air-16xh200.env has them


def test_glm_on_two_nodes_sends_what_its_preset_says() -> None:
    c = Config.of_preset(PRESET="glm-4.5-air-16xh200", MODEL="m", DATA="d")
    tuned = model(AIR, ADAPTERS)
    sent = traffic(c, world(size=16, local_size=8), tuned, c.micro_batch(16))
    assert sent == Traffic(0.0, pytest.approx(0.18 * GB, abs=0.005 * GB))
    split = Config.of_preset(PRESET="glm-4.5-air-16xh200", MODEL="m", DATA="d", PARALLEL="fsdp")
    sent = traffic(split, world(size=16, local_size=8), tuned, c.micro_batch(16))
    assert sent.gathered == pytest.approx(8 * 107 * GB, rel=0.01)
    assert sent.seconds(63) == pytest.approx(109, abs=1)


def test_by_hand_on_four_nodes() -> None:
    """8 processes, of which each makes 3 passes; 100 weights of a block, 40 round it, all in bfloat16."""
    part = model(60, 40, outside=40)
    settings = {
        "DTYPE": "bfloat16",
        "SEQ_LEN": "64",
        "BATCH_TOKENS": str(64 * 24),
        "MICRO_BATCH_SIZE": "1",
    }

    def of(**more: str) -> Traffic:
        c = Config.of_preset(PRESET="finetune", MODEL="m", DATA="d", **settings, **more)
        return traffic(c, world(size=8), part, 1)

    assert of(PARALLEL="ddp") == Traffic(0.0, 2 * 3 / 4 * 160)
    assert of(PARALLEL="hsdp") == Traffic(0.0, 2 * 3 / 4 * 160)  # a copy in each node
    assert of(PARALLEL="fsdp") == Traffic(3 * (2 * 100 + 40) * 2 * 3 / 4, 160 * 3 / 4)
    assert of(PARALLEL="fsdp", GRAD_SYNC="micro-batch").gradients == 3 * 160 * 3 / 4
    # a copy on two nodes: they gather halves from each other, and each of the two holds half of the gradients
    assert of(PARALLEL="hsdp", SHARD_RANKS="4") == Traffic(
        3 * (2 * 100 + 40) * 2 / 2, 160 / 2 + 2 / 2 * 160 / 2
    )


# ---- What is said


def test_it_is_said_once_a_node_with_seconds_of_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"nccl_node_0.pt-0.{os.getpid()}").write_text(
        socket_node(0, 0, via="SHM/direct/direct")
    )
    transport.say(job(tmp_path, world(local_rank=1)))
    transport.say(job(tmp_path, world(size=1, local_size=1)))
    assert not caplog.records
    transport.say(job(tmp_path, world()))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert "NCCL 2.27.5: within the node SHM; between nodes NET/Socket on eth0" in caplog.text
    assert (
        caplog.messages[-1]
        == "between nodes: each sends 4.0 GB of gradients a step; 3.2 s at 10 Gbit/s (computed)"
    )


def test_weights_that_are_gathered_from_other_nodes_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    c = Config.of_preset(PRESET="glm-4.5-air-16xh200", MODEL="m", DATA="d", PARALLEL="fsdp")
    transport.expect(c, world(size=16, local_size=8), Traffic(856e9, 1e8), 63)
    assert caplog.messages[0] == (
        "between nodes: each sends 100.0 MB of gradients (adapters) and gathers 856.0 GB of "
        "weights a step; 109 s at 63 Gbit/s (computed)"
    )
    assert (
        caplog.records[1].levelname == "WARNING"
        and "PARALLEL=hsdp keeps a copy in each node" in caplog.messages[1]
    )
    caplog.clear()
    transport.expect(c, world(size=16, local_size=8), Traffic(856e6, 1e8), None)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert (
        "the link's speed is n/a; 0.76 s at 10 Gbit/s, 0.076 s at 100 Gbit/s (computed)"
        in caplog.text
    )


def test_the_trainer_goes_on_without_logs_and_whatever_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport.say(job(tmp_path, world()))
    assert "NCCL's transport: n/a, it has written nothing to" in caplog.text
    assert "each sends 4.0 GB of gradients a step; the link's speed is n/a" in caplog.text

    def broken(*_: object) -> list[nccl_log.Log]:
        raise RuntimeError("of another kind")

    monkeypatch.setattr(nccl_log, "read", broken)
    transport.say(job(tmp_path, world()))
    assert "NCCL's transport: n/a (RuntimeError: of another kind)" in caplog.text


def test_gloo_says_its_interface_between_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport.say(job(tmp_path, world("cpu", size=2)))
    assert not caplog.records  # one node
    (tmp_path / "net" / "lo").mkdir(parents=True)
    (tmp_path / "net" / "lo" / "speed").write_text("2500\n")
    monkeypatch.setattr(transport, "NET", tmp_path / "net")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    transport.say(job(tmp_path, world("cpu")))
    assert (
        caplog.messages[0]
        == "gloo: TCP on lo (127.0.0.1, 2.5 Gbit/s); GLOO_SOCKET_IFNAME names another"
    )
    assert caplog.messages[1].endswith("13 s at 2.5 Gbit/s (computed)")
    (tmp_path / "net" / "lo" / "speed").write_text("-1\n")
    assert transport.speed_of("lo") is None and transport.speed_of("absent") is None


def test_the_interface_of_gloo_is_that_of_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for address, name in (
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("203.0.113.9", "an interface that is not known"),
    ):
        monkeypatch.setattr(socket, "gethostbyname", lambda _, address=address: address)
        assert distributed.gloo_interface() == (name, address)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0,eth1")
    assert distributed.gloo_interface() == ("absent0", "no IPv4 address")
