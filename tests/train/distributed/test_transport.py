"""train/distributed/transport.py: the line and the two warnings that a start logs."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch

from record.run_paths import RunPaths
from tests.train.distributed.test_nccl_log import socket_node
from train.distributed import nccl_log, transport
from train.distributed.world import World


@pytest.fixture
def start(tmp_path, monkeypatch, caplog):
    """Log the transport of a process with what NCCL said, and return messages and levels."""
    monkeypatch.setattr(transport, "INFINIBAND", tmp_path / "infiniband")
    monkeypatch.delenv("POD_NETWORK", raising=False)
    (tmp_path / "logs").mkdir()
    caplog.set_level(logging.INFO)

    def log_transport(text, kind="cuda", size=4, rank=0, local_rank=0, peers=True):
        (tmp_path / "logs" / f"nccl_node_0.pt-0.{os.getpid()}").write_text(text)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: peers)
        world = World(rank, local_rank, 0, size, torch.device(kind, 0), "a GPU", "pt-0", 2)
        caplog.clear()
        transport.say(SimpleNamespace(paths=RunPaths(tmp_path), world=world))
        return [(record.levelname, record.message) for record in caplog.records]

    return log_transport


LINE = "NCCL 2.27.5: within the node SHM; between nodes NET/Socket on eth0"


def test_it_is_said_once_a_node_and_not_of_gloo(start):
    text = socket_node(0, 0)
    assert [level for level, _ in start(text)] == ["INFO"]
    assert [level for level, _ in start(text, rank=2)] == ["WARNING"]  # for its node's log
    assert start(text, local_rank=1) == start(text, size=1) == start(text, kind="cpu") == []


def test_shared_memory_though_the_gpus_reach_each_other(start):
    text = socket_node(0, 0, via="SHM/direct/direct")
    line, (level, warning) = start(text)
    assert line == ("INFO", LINE) and level == "WARNING"
    assert "shared memory of the host" in warning and "NCCL_P2P_DISABLE" in warning
    assert start(text, peers=False) == [("INFO", LINE)]
    assert len(start(socket_node(0, 0))) == 1


def test_sockets_though_infiniband_is_there(start, tmp_path, monkeypatch):
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        port = tmp_path / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    _, (level, warning) = start(socket_node(0, 0))
    assert level == "WARNING" and "NCCL_IB_DISABLE" in warning
    assert "TCP sockets, though this machine has mlx5_0, mlx5_2 (InfiniBand or RoCE)" in warning
    assert len(start(socket_node(0, 0).replace("NET/Socket/0", "NET/IB/0"))) == 1
    monkeypatch.setenv("POD_NETWORK", "wan")  # nodes at several sites have nothing better
    assert len(start(socket_node(0, 0))) == 1


def test_the_run_does_not_need_it(start, monkeypatch):
    assert start("") == [("INFO", "NCCL n/a: transport n/a")]

    def broken(*_):
        raise OSError("Stale file handle")

    monkeypatch.setattr(nccl_log, "read", broken)
    assert start("") == [("INFO", "NCCL's transport: n/a (Stale file handle)")]
