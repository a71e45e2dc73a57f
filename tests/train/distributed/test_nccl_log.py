"""train/distributed/nccl_log.py on what NCCL prints: formats of 2.18 to 2.31, with hosts and numbers of our own."""

from train.distributed import nccl_log
from train.distributed.nccl_log import parse


def socket_node(rank, gpu, *, via="P2P/CUMEM"):
    """What a process says: one of 4 ranks on 2 nodes of 2 GPUs, with TCP between them (2.27)."""
    node, other = rank // 2 * 2, (rank // 2 * 2 + 2) % 4
    peer = node + 1 - gpu
    communicator = (
        f"ncclCommInitRankConfig comm 0x5{rank}e0 rank {rank} nranks 4 cudaDev {gpu} nvmlDev {gpu} busId 4a000 "
        "commId 0x9f31ab - Init "
    )
    lines = [
        "Bootstrap: Using eth0:10.42.0.17<0>",
        "cudaDriverVersion 12080",
        "NCCL version 2.27.5+cuda12.8",
        "NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.",
        "NET/IB : No device found.",
        "NET/IB : Using [RO]; OOB eth0:10.42.0.17<0>",
        "Failed to initialize NET plugin IB",
        "NET/Socket : Using [0]eth0:10.42.0.17<0>",
        "Using network Socket",
        f"{communicator}START",
        "                 + NET[1.2] - NET/0-0 (0/0/0/1.250000)",
        f"comm 0x5{rank}e0 rank {rank} nRanks 4 nNodes 2 localRanks 2 localRank {gpu} MNNVL 0",
        "Channel 00/02 : 0 1 2 3",
        "Trees [0] 1/-1/-1->0->2 [1] 1/-1/-1->0->-1",
        f"{communicator}COMPLETE",
        f"Channel 00/0 : {rank}[{gpu}] -> {peer}[{1 - gpu}] via {via}",
        f"Channel 01/0 : {rank}[{gpu}] -> {peer}[{1 - gpu}] via {via} comm 0x5{rank}e0 nRanks 04",
        f"Channel 00/0 : {rank}[{gpu}] -> {other + 1 - gpu}[{1 - gpu}] [send] via NET/Socket/0",
        f"Channel 00/0 : {other + 1 - gpu}[{1 - gpu}] -> {rank}[{gpu}] [receive] via NET/Socket/0",
        "Connected all rings, use ring PXN 0 GDR 0",
    ]
    return "".join(f"pt-0:{70 + gpu}:{200 + gpu} [{gpu}] NCCL INFO {line}\n" for line in lines)


def test_two_gpus_by_p2p_and_nodes_by_tcp():
    node = parse([socket_node(0, 0), socket_node(1, 1)])
    assert node.line() == "NCCL 2.27.5: within the node P2P/CUMEM; between nodes NET/Socket on eth0"
    assert node.within == {"P2P/CUMEM": 4} and node.between == {"NET/Socket": 4}
    shared = parse([socket_node(2, 0, via="SHM/direct/direct"), socket_node(3, 1)])
    assert "within the node SHM and P2P/CUMEM; between" in shared.line()


def test_infiniband_between_nodes_with_gpudirect():
    texts = [
        f"""gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO NCCL version 2.21.5+cuda12.4
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ib0:10.9.0.4<0>
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO NET/IB: [0] mlx5_0:uverbs0:1/IB provider=Mlx5 speed=200000 context=0xb ar=0
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO Using network IB
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO ncclCommInitRank comm 0x55aa0{i} rank {i} nranks 4 cudaDev {i} nvmlDev {i} \
busId 7000 commId 0x77cd - Init START
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO Channel 00/0 : {i}[{i}] -> {1 - i}[{1 - i}] via P2P/IPC/read
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO Channel 03/0 : {i}[{i}] -> {2 + i}[{i}] [send] via NET/IB/0/GDRDMA
"""
        for i in (0, 1)
    ]
    line = "between nodes NET/IB with GPUDirect RDMA on mlx5_0, mlx5_1"
    assert parse(texts).line() == f"NCCL 2.21.5: within the node P2P/IPC; {line}"
    # NVIDIA's plugin (2.22 with HPC-X) has the same devices under its own name
    plugin = parse([text.replace("via NET/IB/", "via NET/IBext_v8/") for text in texts])
    assert plugin.line().endswith(line.replace("IB with", "IBext_v8 with"))


def test_nothing_that_is_read_raises():
    whole = socket_node(0, 0) + socket_node(1, 1)
    for text in (
        "\0\xff",
        "NCCL INFO Channel 00/0 : 0[0] -> 1[0] via \n",
        "x NCCL INFO comm 0x1 rank\n",
        *(whole[:end] for end in range(0, len(whole), 37)),
    ):
        assert parse([text]).line().startswith("NCCL ")
    assert parse([]).line() == "NCCL n/a: transport n/a"


def test_files_are_found_by_node_and_process(tmp_path):
    for name in ("0.pt-0.70", "0.pt-0.71", "1.pt-1.70"):
        (tmp_path / f"nccl_node_{name}").write_text(name)
    assert nccl_log.read(tmp_path, 0, [71, 70, 99]) == ["0.pt-0.71", "0.pt-0.70"]
    assert nccl_log.read(tmp_path / "absent", 0, [70]) == []
