"""train/distributed/transport.py on what NCCL prints (2.18 to 2.31, with hosts and numbers of our own)."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch

from record.run_paths import RunPaths
from train.distributed import transport
from train.distributed.world import World

SOCKETS = """\
Bootstrap: Using eth0:10.42.0.17<0>
NCCL version 2.27.5+cuda12.8
NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.
NET/IB : No device found.
NET/IB : Using [RO]; OOB eth0:10.42.0.17<0>
NET/Socket : Using [0]eth0:10.42.0.17<0>
Using network Socket
ncclCommInitRankConfig comm 0x50e0 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 4a000 - Init START
                 + NET[1.2] - NET/0-0 (0/0/0/1.250000)
comm 0x50e0 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0
Channel 00/02 : 0 1 2 3
Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM comm 0x50e0 nRanks 04
Channel 00/0 : 0[0] -> 3[1] [send] via NET/Socket/0
Channel 00/0 : 3[1] -> 0[0] [receive] via NET/Socket/0
"""
SHARED = SOCKETS.replace("P2P/CUMEM", "SHM/direct/direct")
INFINIBAND = """\
NCCL version 2.21.5+cuda12.4
NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ib0:10.9.0.4<0>
NET/IB: [0] mlx5_0:uverbs0:1/IB provider=Mlx5 speed=200000 context=0xb ar=0
Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read
Channel 03/0 : 0[0] -> 2[0] [send] via NET/IB/0/GDRDMA
"""
BETWEEN = "between nodes NET/Socket on eth0"


@pytest.fixture
def start(tmp_path, monkeypatch, caplog):
    """Log the transport of a process with what NCCL said, and return messages and levels."""
    monkeypatch.setattr(transport, "INFINIBAND", tmp_path / "infiniband")
    monkeypatch.delenv("POD_NETWORK", raising=False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "nccl_node_0.pt-0.1").write_text(SHARED)  # of an earlier attempt
    caplog.set_level(logging.INFO)

    def log_transport(text, kind="cuda", size=4, rank=0, local_rank=0, peers=False):
        said = "".join(f"pt-0:70:200 [0] NCCL INFO {line}\n" for line in text.splitlines())
        (tmp_path / "logs" / f"nccl_node_0.pt-0.{os.getpid()}").write_bytes(
            said.encode("latin-1") + b"\xff"
        )
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: peers)
        world = World(rank, local_rank, 0, size, torch.device(kind, 0), "a GPU", "pt-0", 2)
        caplog.clear()
        transport.log_transport(SimpleNamespace(paths=RunPaths(tmp_path), world=world))
        return [(record.levelname, record.message) for record in caplog.records]

    return log_transport


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SOCKETS, f"NCCL 2.27.5: within the node P2P/CUMEM; {BETWEEN}"),
        (SHARED, f"NCCL 2.27.5: within the node SHM; {BETWEEN}"),
        (SHARED + SOCKETS * 2, f"NCCL 2.27.5: within the node P2P/CUMEM and SHM; {BETWEEN}"),
        (
            INFINIBAND,
            "NCCL 2.21.5: within the node P2P/IPC; between nodes NET/IB with GPUDirect RDMA on "
            "mlx5_0, mlx5_1",
        ),
        # NVIDIA's plugin (2.22 with HPC-X) has the same devices under its own name.
        (
            INFINIBAND.replace("via NET/IB/", "via NET/IBext_v8/"),
            "NCCL 2.21.5: within the node P2P/IPC; between nodes NET/IBext_v8 with GPUDirect RDMA "
            "on mlx5_0, mlx5_1",
        ),
        ("", "NCCL n/a: transport n/a"),
        ("\0\nChannel 00/0 : 0[0] -> 1[0] via \ncomm 0x1 rank", "NCCL n/a: transport n/a"),
    ],
)
def test_the_line_says_what_nccl_took(start, text, line):
    assert start(text) == [("INFO", line)]
    for end in range(0, len(text), 37):
        assert len(start(text[:end])) == 1  # nothing that is read raises


def test_it_is_said_once_a_node_and_not_of_gloo(start):
    assert [level for level, _ in start(SOCKETS, rank=2)] == ["WARNING"]  # for its node's log
    assert start("", local_rank=1) == start("", size=1) == start("", kind="cpu") == []


def test_a_faster_transport_that_is_there_is_named(start, tmp_path, monkeypatch):
    _, (level, warning) = start(SHARED, peers=True)
    assert level == "WARNING"
    assert "shared memory of the host" in warning and "NCCL_P2P_DISABLE" in warning
    assert len(start(SOCKETS, peers=True)) == 1
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        port = tmp_path / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    _, (level, warning) = start(SOCKETS)
    assert level == "WARNING" and "NCCL_IB_DISABLE" in warning
    assert "TCP sockets, though this machine has mlx5_0, mlx5_2 (InfiniBand or RoCE)" in warning
    assert len(start(INFINIBAND)) == 1
    monkeypatch.setenv("POD_NETWORK", "wan")  # nodes at several sites have nothing better
    assert len(start(SOCKETS)) == 1


def test_the_run_does_not_need_it(start, tmp_path):
    log = tmp_path / "logs" / f"nccl_node_0.pt-1.{os.getpid()}"
    log.mkdir()
    ((level, line),) = start("")
    assert level == "INFO" and line.startswith("NCCL's transport: n/a ([Errno 21] Is a directory")
