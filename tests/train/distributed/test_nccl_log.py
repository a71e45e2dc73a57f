"""train/distributed/nccl_log.py on what NCCL prints: formats of 2.10 to 2.31, with hosts and numbers of our own."""

from pathlib import Path

import pytest

from train.distributed import nccl_log
from train.distributed.nccl_log import Node, parse


def socket_node(
    rank: int, gpu: int, *, host: str = "pt-0", via: str = "P2P/CUMEM", comm: str = "0x9f31ab"
) -> str:
    """What a process says: one of 4 ranks on 2 nodes of 2 GPUs, with TCP between them (2.27)."""
    start = f"{host}:{70 + gpu}:{200 + gpu} [{gpu}] NCCL INFO "
    node, other = rank // 2 * 2, (rank // 2 * 2 + 2) % 4
    peer = node + 1 - gpu
    lines = [
        "Bootstrap: Using eth0:10.42.0.17<0>",
        "cudaDriverVersion 12080",
        "NCCL version 2.27.5+cuda12.8",
        "NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.",
        "NET/IB : No device found.",
        "NET/IB : Using [RO]; OOB eth0:10.42.0.17<0>",
        "Failed to initialize NET plugin IB",
        "NET/Socket : Using [0]eth0:10.42.0.17<0>",
        "Initialized NET plugin Socket",
        "Assigned NET plugin Socket to comm",
        "Using network Socket",
        f"ncclCommInitRankConfig comm 0x5{rank}e0 rank {rank} nranks 4 cudaDev {gpu} nvmlDev {gpu} busId 4a000 "
        f"commId {comm} - Init START",
        "=== System : maxBw 1.2 totalBw 24.0 ===",
        "                 + NET[1.2] - NET/0-0 (0/0/0/1.250000)",
        f"comm 0x5{rank}e0 rank {rank} nRanks 4 nNodes 2 localRanks 2 localRank {gpu} MNNVL 0",
        "Channel 00/02 : 0 1 2 3",
        "Trees [0] 1/-1/-1->0->2 [1] 1/-1/-1->0->-1",
        f"ncclCommInitRankConfig comm 0x5{rank}e0 rank {rank} nranks 4 cudaDev {gpu} nvmlDev {gpu} busId 4a000 "
        f"commId {comm} - Init COMPLETE",
        f"Channel 00/0 : {rank}[{gpu}] -> {peer}[{1 - gpu}] via {via}",
        f"Channel 01/0 : {rank}[{gpu}] -> {peer}[{1 - gpu}] via {via}",
        f"Channel 00/0 : {rank}[{gpu}] -> {other + 1 - gpu}[{1 - gpu}] [send] via NET/Socket/0",
        f"Channel 00/0 : {other + 1 - gpu}[{1 - gpu}] -> {rank}[{gpu}] [receive] via NET/Socket/0",
        "Connected all rings, use ring PXN 0 GDR 0",
    ]
    return "".join(f"{start}{line}\n" for line in lines)


def node(*texts: str, processes: int = 2, nodes: int = 2) -> Node:
    return Node([parse(text) for text in texts], processes, nodes)


def test_two_gpus_by_p2p_and_nodes_by_tcp() -> None:
    found = node(socket_node(0, 0), socket_node(1, 1))
    assert found.line() == (
        "NCCL 2.27.5: within the node P2P/CUMEM; between nodes NET/Socket on eth0 (10 Gbit/s); "
        "network Socket"
    )
    assert found.warnings(peer_access=True) == []


def test_infiniband_between_nodes_with_gpudirect() -> None:
    texts = [
        f"""gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO NCCL version 2.21.5+cuda12.4
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.9.0.4<0>
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO NET/IB: [0] mlx5_0:uverbs0:1/IB provider=Mlx5 speed=200000 context=0xb ar=0
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO Using network IB
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO comm 0x55aa0{i} rank {i} nranks 4 cudaDev {i} nvmlDev {i} busId 7000 \
commId 0x77cd - Init START
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO Channel 00/0 : {i}[{i}] -> {1 - i}[{1 - i}] via P2P/IPC/read
gpu-a:{300 + i}:{400 + i} [{i}] NCCL INFO Channel 03/0 : {i}[{i}] -> {2 + i}[{i}] [send] via NET/IB/0/GDRDMA
"""
        for i in (0, 1)
    ]
    found = node(*texts)
    assert found.line() == (
        "NCCL 2.21.5: within the node P2P/IPC; between nodes NET/IB with GPUDirect RDMA on mlx5_0 "
        "(200 Gbit/s), mlx5_1 (speed n/a); network IB"
    )
    assert found.warnings(peer_access=True) == []


def test_the_speed_to_other_nodes_is_that_of_all_links() -> None:
    two = (
        socket_node(0, 0)
        .replace("[0]eth0:10.42.0.17<0>\n", "[0]eth0:10.42.0.17<0> [1]eth1:10.43.0.17<0>\n")
        .replace(
            "+ NET[1.2] - NET/0-0 (0/0/0/1.250000)",
            "+ NET[1.2] - NET/0-0 (0/0/0/1.250000)\n"
            "pt-0:70:200 [0] NCCL INFO + NET[3.1] - NET/0-1 (0/0/0/3.125000)",
        )
    )
    assert node(socket_node(0, 0)).gbit == 10 and node(two).gbit == 35
    assert (
        node(two)
        .line()
        .endswith("NET/Socket on eth0 (10 Gbit/s), eth1 (25 Gbit/s); network Socket")
    )
    assert node(two.replace("NET/0-1 (", "NET/0-7 (")).gbit is None and node().gbit is None


def test_the_plugin_of_nvidia_has_the_devices_of_infiniband() -> None:
    """2.22 with HPC-X, in which RoCE is behind the plugin's own name."""
    text = """gpu-a:5664:5733 [1] NCCL INFO NCCL version 2.22.3+cuda12.6
gpu-a:5664:5734 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.9.0.7<0>
gpu-a:5664:5734 [1] NCCL INFO NET/IB: [0] mlx5_0:uverbs0:1/RoCE provider=Mlx5 speed=200000 context=0x7 pciPath=x ar=0
gpu-a:5664:5734 [1] NCCL INFO NET/IB: [1] mlx5_1:uverbs1:1/RoCE provider=Mlx5 speed=200000 context=0x8 pciPath=x ar=0
gpu-a:5664:5734 [1] NCCL INFO Using network IBext_v8
gpu-a:5664:5734 [1] NCCL INFO comm 0x55 rank 0 nranks 2 cudaDev 1 nvmlDev 1 busId 7000 commId 0x77 - Init START
gpu-a:5664:5734 [1] NCCL INFO Channel 00/0 : 0[1] -> 1[1] [send] via NET/IBext_v8/0/GDRDMA
"""
    found = node(text, processes=1)
    assert found.line() == (
        "NCCL 2.22.3: one process a node; between nodes NET/IBext_v8 with GPUDirect RDMA on mlx5_0 "
        "(200 Gbit/s), mlx5_1 (200 Gbit/s); network IBext_v8"
    )
    assert found.gbit == 400 and found.warnings(devices=["mlx5_0"]) == []


def test_one_node_names_no_network_of_which_it_has_no_use() -> None:
    text = socket_node(0, 0).replace("nranks 4", "nranks 2")
    lines = [line for line in text.splitlines() if "via NET" not in line]
    found = node("\n".join(lines), nodes=1)
    assert found.line() == "NCCL 2.27.5: within the node P2P/CUMEM; one node; network Socket"


def test_a_plugin_with_a_name_of_two_words() -> None:
    text = (
        "ip-1:9:9 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v6)\n"
        "ip-1:9:9 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.\n"
        "ip-1:9:9 [0] NCCL INFO Using network AWS Libfabric\n"
        "ip-1:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/0/GDRDMA\n"
    )
    found = node(text, processes=1)
    assert found.line() == (
        "NCCL n/a: one process a node; between nodes NET/AWS Libfabric with GPUDirect RDMA; "
        "network AWS Libfabric"
    )
    assert found.warnings() == []


# ---- Where a faster one was to be expected


def test_gpus_of_one_node_by_shared_memory() -> None:
    texts = [socket_node(2, 0, via="SHM/direct/direct"), socket_node(3, 1, via="SHM/direct/direct")]
    assert "within the node SHM; between nodes NET/Socket" in node(*texts).line()
    for peer_access in (True, None):
        (said,) = node(*texts).warnings(peer_access)
        assert "ranks 2 and 3 of one node talk through shared memory of the host" in said
    assert node(*texts).warnings(peer_access=False) == []  # they cannot do better
    disabled = "pt-1:70:200 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1\n"
    (said,) = node(disabled + texts[0], texts[1]).warnings(peer_access=True)
    assert said.startswith(
        "NCCL_P2P_DISABLE is set: GPUs of one node talk through the host's memory"
    )
    assert node(disabled.replace("to 1", "to 0") + texts[0]).warnings(peer_access=False) == []


def test_ranks_of_one_node_over_the_network() -> None:
    found = node(
        *(
            socket_node(rank, rank, via="NET/Socket/0").replace("] via", "] [send] via")
            for rank in (0, 1)
        )
    )
    assert "within the node NET/Socket; between" in found.line()
    (said,) = found.warnings(peer_access=True)
    assert (
        "ranks 0 and 1 of one node talk over NET/Socket, as if they were on two" in said
        and "/dev/shm" in said
    )


def test_ranks_of_groups_are_told_apart() -> None:
    """In PARALLEL=hsdp rank 1 of a group of replicas is on another node, and of a group of shards it is here."""
    groups = "".join(
        f"pt-0:{70 + gpu}:200 [{gpu}] NCCL INFO ncclCommInitRankConfig comm 0x7{gpu} rank 0 nranks 2 "
        f"cudaDev {gpu} nvmlDev {gpu} busId 4a000 commId 0xc{gpu} - Init COMPLETE\n"
        f"pt-0:{70 + gpu}:200 [{gpu}] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n|"
        for gpu in (0, 1)
    ).split("|")
    found = node(socket_node(0, 0) + groups[0], socket_node(1, 1) + groups[1])
    assert list(found.within) == ["P2P/CUMEM"] and len(found.between["NET/Socket"]) == 6
    assert found.warnings(peer_access=True) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "NCCL_IB_DISABLE set by environment to 1.",
            "though there is mlx5_0 (InfiniBand or RoCE) (NCCL_IB_DISABLE=1 is",
        ),
        (
            "NCCL_NET set by environment to Socket",
            "(NCCL_NET=Socket is set); right between sites, slow inside one: unset",
        ),
        (
            "Could not open libibverbs.so[.1]",
            "(libibverbs is not installed here); right between sites, slow inside one: "
            "apt-get install libibverbs1 ibverbs-providers",
        ),
        (
            "Call to ibv_open_device failed",
            "(NCCL may not open it); right between sites, slow inside one: a container must "
            "be given /dev/infiniband",
        ),
        (
            "x\nx [0] transport/net_ib.cc:148 NCCL WARN NET/IB : Unable to open device mlx5_0",
            "(NCCL may not open it); ",
        ),
        (
            "NCCL_IB_HCA set to nothing",
            "though there is mlx5_0 (InfiniBand or RoCE); right between sites, slow inside one: "
            "ibv_devinfo shows",
        ),
    ],
)
def test_tcp_where_there_is_infiniband(line: str, words: str) -> None:
    found = node(f"pt-0:70:200 [0] NCCL INFO {line}\n" + socket_node(0, 0), socket_node(1, 1))
    (said,) = found.warnings(peer_access=True, devices=["mlx5_0"])
    assert words in said
    assert found.warnings(peer_access=True, devices=["mlx5_0"], wan=True) == []
    assert found.warnings(peer_access=True, devices=[]) == []


def test_infiniband_that_nccl_itself_has_found() -> None:
    text = (
        "pt-0:70:200 [0] NCCL INFO NCCL_NET set by environment to Socket.\n" + socket_node(0, 0)
    ).replace("Using [RO]; OOB", "Using [0]mlx5_2:1/RoCE [RO]; OOB")
    (said,) = node(text, socket_node(1, 1)).warnings(peer_access=True)
    assert "though there is mlx5_2 (InfiniBand or RoCE) (NCCL_NET=Socket is set)" in said


@pytest.mark.parametrize("name", ["lo", "docker0", "br-4f2a", "virbr0"])
def test_an_interface_that_leads_nowhere(name: str) -> None:
    text = (
        "pt-0:70:200 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to "
        + name
        + "\n"
        + socket_node(0, 0)
    )
    (said,) = node(text.replace("[0]eth0:", f"[0]{name}:")).warnings(peer_access=True)
    assert (
        f"nodes talk over {name}, which leads to no other machine (NCCL_SOCKET_IFNAME={name} is set)"
        in said
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "NET/Plugin: libnccl-net.so: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found",
            "the network plugin libnccl-net.so could not be loaded (/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2",
        ),
        (
            "NET/Plugin : Plugin load (libnccl-net-ofi.so) returned 11 : libfabric.so.1: cannot open shared object file",
            "the network plugin libnccl-net-ofi.so could not be loaded (libfabric.so.1: cannot open shared object file)",
        ),
        ("Failed to initialize NET plugin SPCX", "the network plugin SPCX found no device"),
        (
            "NCCL_NET_PLUGIN set by environment to ofi\na:1:1 [0] NCCL INFO NET/Plugin: Could not find: ofi libnccl-net.so",
            "NCCL_NET_PLUGIN=ofi was not found",
        ),
    ],
)
def test_a_plugin_that_failed(line: str, words: str) -> None:
    found = node(f"pt-0:70:200 [0] NCCL INFO {line}\n" + socket_node(0, 0), socket_node(1, 1))
    (said,) = found.warnings(peer_access=True)
    assert words in said and said.endswith(": NCCL took Socket instead")


@pytest.mark.parametrize(
    "line",
    [
        "NET/Plugin : No plugin found (libnccl-net.so).",
        "NET/Plugin: Failed to find ncclCollNetPlugin_v9 symbol.",
        "NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or directory No plugin found "
        "(libnccl-net.so), using internal implementation",
        "Failed to initialize NET plugin IB",
        "ncclOsDlopen(libnccl-net.so) failed: libnccl-net.so: cannot open shared object file: No such file or directory",
        "TUNER/Plugin: Failed to find ncclTunerPlugin_v2 symbol, using internal tuner instead.",
    ],
)
def test_a_plugin_that_nobody_asked_for_is_not_missed(line: str) -> None:
    assert parse(f"pt-0:70:200 [0] NCCL INFO {line}\n").plugin_problems == []


# ---- Whatever is there


def test_old_formats() -> None:
    """2.10: no commId, and a communicator is named when all is connected."""
    text = (
        "NCCL version 2.10.3+cuda11.3\n"
        "n1:5:9 [0] NCCL INFO NET/Socket : Using [0]ens3:10.141.0.5<0>\n"
        "n1:5:9 [0] NCCL INFO Using network Socket\n"
        "n1:5:9 [0] NCCL INFO Channel 00 : 1[60] -> 0[60] [receive] via NET/Socket/0\n"
        "n1:5:9 [0] NCCL INFO Channel 00 : 0[60] -> 2[70] via direct shared memory\n"
        "n1:5:9 [0] NCCL INFO comm 0x7f10 rank 0 nranks 3 cudaDev 0 busId 60 - Init COMPLETE\n"
    )
    assert node(text).line() == (
        "NCCL 2.10.3: within the node SHM; between nodes NET/Socket on ens3 (speed n/a); "
        "network Socket"
    )


def test_a_speed_that_nccl_could_not_read_is_not_passed_on() -> None:
    text = socket_node(0, 0) + (
        "pt-0:70:200 [0] NCCL INFO Could not get speed from /sys/class/net/eth0/speed. "
        "Defaulting to 10 Gbps.\n"
    )
    assert "on eth0 (speed n/a)" in node(text).line()


def test_nothing_that_is_read_raises() -> None:
    whole = socket_node(0, 0) + socket_node(1, 1)
    for text in (
        "",
        "\0\xff",
        "NCCL INFO ",
        "NCCL INFO Channel 00/0 : ",
        "x NCCL INFO comm 0x1 rank\n",
        "NCCL INFO Channel 00/0 : 0[0] -> 1[0] via \n",
        "NCCL INFO + NET[1.2] - NET/0 (0/0/1.2.3)",
        *(whole[:end] for end in range(0, len(whole), 37)),
    ):
        found = node(text)
        assert found.line().startswith("NCCL ") and isinstance(found.warnings(), list)
    assert node().line() == "NCCL n/a: within the node n/a; between nodes n/a; network n/a"


def test_files_are_found_by_node_and_process(tmp_path: Path) -> None:
    for name, version in (("0.pt-0.70", "2.1"), ("0.pt-0.71", "2.2"), ("1.pt-1.70", "2.3")):
        (tmp_path / f"nccl_node_{name}").write_text(f"NCCL version {version}\n")
    assert [log.version for log in nccl_log.read(tmp_path, 0, [71, 70, 99])] == ["2.2", "2.1"]
    assert nccl_log.read(tmp_path / "absent", 0, [70]) == []


def test_infiniband_devices_are_those_with_a_port_that_is_up(tmp_path: Path) -> None:
    for device, port, state in (
        ("mlx5_0", 1, "4: ACTIVE\n"),
        ("mlx5_1", 1, "1: DOWN\n"),
        ("mlx5_2", 2, "4: ACTIVE\n"),
    ):
        (tmp_path / device / "ports" / str(port)).mkdir(parents=True)
        (tmp_path / device / "ports" / str(port) / "state").write_text(state)
    assert nccl_log.ib_devices(tmp_path) == ["mlx5_0", "mlx5_2"]
    assert nccl_log.ib_devices(tmp_path / "absent") == []
