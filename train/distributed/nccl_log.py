"""What NCCL says of itself, in a line: which transport carries traffic within a node and between nodes, and where a
faster one was to be expected. Standard library only.

    logs/nccl_node_N.HOST.PID   NCCL's own words, INIT, ENV, NET and GRAPH, a file a process (train/tune.py)

Its lines look so, in the versions 2.10 to 2.31; what is not understood is passed over, and what is not said is n/a:

    pod-1:57:130 [0] NCCL INFO NET/Socket : Using [0]eth0:10.1.2.3<0>
    pod-1:57:130 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[1] via P2P/CUMEM             the sender says it
    pod-1:57:130 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [receive] via NET/Socket/0

Ranks are those of a communicator. One whose rank another log of this node has is on this node, all others are not.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

FOLDER = Path("/sys/class/infiniband")
NO_NETWORK = re.compile(
    r"lo|docker\d*|br-.*|virbr.*|cni\d*|podman\d*"
)  # interfaces that lead to no other machine
INTERNAL = ("IB", "Socket")

COMM = re.compile(r"comm (0x[0-9a-f]+) .*?\brank (\d+) n[rR]anks \d+(?:.*?commId (0x[0-9a-f]+))?")
CHANNEL = re.compile(
    r"Channel (\d+)(?:/\d+)? : (\d+)(?:\[\w+\])? -> (\d+)(?:\[\w+\])? (?:\[(?:send|receive)\] )?"
    r"via (.+?)(?: comm 0x.*)?$"
)
USING = re.compile(r"NET/(\w+) ?: Using (.*)")
DEVICE = re.compile(r"\[\d+\]([^\s;<]+)")
SPEED = re.compile(r"NET/IB ?: \[\d+\] ?([^\s:]+):.*\bspeed=(\d+)")
GRAPH_SPEED = re.compile(
    r"- NET/(?:\w+-)*([0-9a-fA-F]+) \([^)]*/(\d+\.\d+)\)"
)  # the device's number, and GB/s
NO_PLUGIN = re.compile(r"No such file|No plugin found|Could not find")
UNOPENED = re.compile(
    r"NET/IB ?: Unable to open device ([\w.-]+)|Call to ibv_(?:open|alloc|reg|create)\w* failed"
)


@dataclasses.dataclass(frozen=True)
class Channel:
    """A connection between two ranks of the communicator `comm`, as the process of one of them has it."""

    comm: str
    sender: int
    receiver: int
    via: str

    @property
    def transport(self) -> str:
        """Without the number of the device and the like: P2P/CUMEM, SHM, NET/Socket, NET/IB with GPUDirect RDMA."""
        parts = self.via.split("/")
        if "shared memory" in self.via:  # before 2.12
            return "SHM"
        if parts[0] == "NET":
            return "/".join(parts[:2]) + (" with GPUDirect RDMA" if "GDRDMA" in self.via else "")
        return "/".join(parts[:2]) if parts[0] == "P2P" else parts[0]


@dataclasses.dataclass
class Log:
    """What one process has said."""

    version: str = ""
    network: str = ""  # what it uses: Socket, IB, a plugin's name
    sockets: list[str] = dataclasses.field(default_factory=list)  # interfaces
    ib_devices: list[str] = dataclasses.field(default_factory=list)
    speeds: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # interface or device -> Gbit/s
    settings: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # of the environment, NCCL_... -> value
    plugin_problems: list[str] = dataclasses.field(default_factory=list)
    no_verbs: bool = False  # libibverbs, without which there is no IB
    unopened: bool = False  # a device is there, and not for this process
    ranks: dict[str, int] = dataclasses.field(
        default_factory=dict
    )  # communicator -> its rank there
    channels: list[Channel] = dataclasses.field(default_factory=list)

    @property
    def interfaces(self) -> list[str]:
        """Those that it sends by: IB, or IBext of NVIDIA's plugin, or else TCP."""
        return self.ib_devices if self.network.startswith("IB") else self.sockets


def parse(text: str) -> Log:
    """The log of one process. Whatever is in it, nothing is raised."""
    log, unknown, graph = Log(), set[str](), dict[int, float]()
    comm, known = (
        "",
        dict[str, str](),
    )  # the communicator that is being set up, and addresses of them
    for line in text.splitlines():
        _, _, said = line.partition("NCCL INFO ")
        if found := re.search(r"NCCL version (\d[\w.]*)", line):
            log.version = found[1]
        log.unopened |= UNOPENED.search(line) is not None  # a warning, or not, as versions have it
        if not said:
            continue
        if found := COMM.search(said):
            comm = known[found[1]] = found[3] or known.get(found[1], found[1])
            log.ranks[comm] = int(found[2])
        elif found := CHANNEL.match(said):
            log.channels.append(Channel(comm, int(found[2]), int(found[3]), found[4].strip()))
        elif found := re.search(r"\b(NCCL_\w+) set by environment to (.*?)\.?$", said):
            log.settings[found[1]] = found[2]
        elif found := re.match(r"Using network (.+)", said):
            log.network = found[1].strip()
        elif (found := USING.match(said)) and found[1] in INTERNAL:
            names = [name.split(":")[0] for name in DEVICE.findall(found[2].partition("; OOB")[0])]
            if found[1] == "Socket":
                log.sockets = names
            else:
                log.ib_devices = names
        elif found := SPEED.match(said):
            log.speeds[found[1]] = int(found[2]) / 1000
        elif found := GRAPH_SPEED.search(said):
            graph[int(found[1], 16)] = 8 * float(found[2])
        elif found := re.search(r"Could not get speed from /sys/class/net/([^/]+)/", said):
            unknown.add(found[1])
        elif said.startswith("Could not open libibverbs"):
            log.no_verbs = True
        elif problem := plugin_problem(said, log.settings):
            log.plugin_problems.append(problem)
    used = log.interfaces
    log.speeds = {
        name: graph[i] for i, name in enumerate(used) if i in graph and name not in unknown
    } | log.speeds
    # before 2.18 a communicator is named when all is connected
    log.channels = [
        dataclasses.replace(c, comm=c.comm or next(iter(log.ranks), "")) for c in log.channels
    ]
    return log


def plugin_problem(said: str, settings: dict[str, str]) -> str:
    """Why a network plugin that was meant to be there is not; empty where the line says no such thing."""
    if found := re.match(r"Failed to initialize NET plugin (.+)", said):
        return (
            ""
            if found[1].strip() in INTERNAL
            else f"the network plugin {found[1].strip()} found no device"
        )
    found = re.match(r"NET/Plugin ?: (.*)", said) or re.match(
        r"ncclOsDlopen\(\S*-net\S*\) failed: (.*)", said
    )
    if not found:
        return ""
    if NO_PLUGIN.search(found[1]):
        wanted = settings.get("NCCL_NET_PLUGIN", "none")
        return f"NCCL_NET_PLUGIN={wanted} was not found" if wanted != "none" else ""
    if why := re.search(
        r"(lib[\w.+-]*\.so[\w.]*)\)?:? (?:returned \d+ : )?(.*(?:not found|undefined symbol|cannot|"
        r"ELF|Failed to load).*)",
        found[1],
    ):
        return f"the network plugin {why[1]} could not be loaded ({why[2].strip()})"
    return ""


def read(folder: Path, node: int, pids: Iterable[int]) -> list[Log]:
    """The logs of these processes of a node; those that are not there are left out."""
    logs = []
    for pid in pids:
        for path in sorted(folder.glob(f"nccl_node_{node}.*.{pid}")):
            try:
                logs.append(parse(path.read_text(encoding="utf-8", errors="replace")))
            except OSError:  # then it is n/a
                continue
    return logs


def ib_devices(folder: Path = FOLDER) -> list[str]:
    """This machine's InfiniBand and RoCE devices with a port that is up."""
    try:
        ports = sorted(folder.glob("*/ports/*/state"))
        return list(dict.fromkeys(port.parts[-4] for port in ports if "ACTIVE" in port.read_text()))
    except OSError:
        return []


# ---------------------------------------------------------------------------------------------------
# All logs of a node together
# ---------------------------------------------------------------------------------------------------


class Node:
    """What the processes of a node have said: one line, and what to warn of."""

    def __init__(self, logs: Sequence[Log], processes: int, nodes: int):
        """processes: of this node; nodes: of the run."""
        self.logs, self.processes, self.nodes = list(logs), processes, nodes
        here = {(comm, rank) for log in logs for comm, rank in log.ranks.items()}
        self.within: dict[str, list[Channel]] = {}
        self.between: dict[str, list[Channel]] = {}
        for channel in (channel for log in logs for channel in log.channels):
            is_here = {(channel.comm, channel.sender), (channel.comm, channel.receiver)} <= here
            kind = self.within if is_here or not channel.via.startswith("NET") else self.between
            kind.setdefault(channel.transport, []).append(channel)

    def first(self, attribute: str) -> str:
        return next((value for log in self.logs if (value := getattr(log, attribute))), "")

    @property
    def settings(self) -> dict[str, str]:
        return {name: value for log in reversed(self.logs) for name, value in log.settings.items()}

    def line(self) -> str:
        """'NCCL 2.27.5: P2P/CUMEM within the node; between nodes NET/Socket on eth0 (10 Gbit/s)'"""
        within = (
            "one process a node"
            if self.processes == 1
            else f"within the node {listed(self.within)}"
        )
        between = (
            "one node"
            if self.nodes == 1
            else f"between nodes {listed(self.between)}{self.interfaces()}"
        )
        network = self.first("network") or "n/a"
        return f"NCCL {self.first('version') or 'n/a'}: {within}; {between}; network {network}"

    def interfaces(self) -> str:
        """' on eth0 (10 Gbit/s)'"""
        return (
            " on "
            + ", ".join(
                f"{name} ({speed:g} Gbit/s)" if speed else f"{name} (speed n/a)"
                for name, speed in self.links
            )
            if self.links
            else ""
        )

    @property
    def links(self) -> list[tuple[str, float]]:
        """What leads to the other nodes, with its Gbit/s, 0 where NCCL does not say it. [] of a plugin that is not
        NVIDIA's own."""
        log = next((log for log in self.logs if log.network or log.sockets), None)
        if log is None or not (log.network in INTERNAL or log.network.startswith("IB")):
            return []
        return [(name, log.speeds.get(name, 0.0)) for name in log.interfaces]

    @property
    def gbit(self) -> float | None:
        """Gbit/s to the other nodes, of all links together; None where one of them is not known."""
        speeds = [speed for _, speed in self.links]
        return sum(speeds) if speeds and all(speeds) else None

    def warnings(
        self, peer_access: bool | None = None, devices: Sequence[str] = (), wan: bool = False
    ) -> list[str]:
        """Where a faster transport was to be expected.

        peer_access: whether the GPUs of this node can reach each other's memory, None where that is not known;
        devices: the InfiniBand and RoCE devices of this machine; wan: nodes are meant to talk over a WAN.
        """
        settings, said = self.settings, list[str]()
        if self.processes > 1 and settings.get("NCCL_P2P_DISABLE", "0") != "0":
            said.append(
                "NCCL_P2P_DISABLE is set: GPUs of one node talk through the host's memory instead of to each "
                "other, which costs bandwidth; unset it unless they hang without it"
            )
        elif peer_access is not False and (slow := self.within.get("SHM")):
            said.append(
                f"{pairs(slow)} of one node talk through shared memory of the host, not GPU to GPU (P2P)"
                + because(settings, "NCCL_P2P_LEVEL", "NCCL_IGNORE_DISABLED_P2P")
                + "; nvidia-smi topo -p2p r shows what they could"
            )
        for transport, slow in self.within.items():
            if transport.startswith("NET"):
                said.append(
                    f"{pairs(slow)} of one node talk over {transport}, as if they were on two"
                    + because(settings, "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_HOSTID")
                    + "; look at the size of /dev/shm, and whether one pod has all GPUs of the node"
                )
        if self.nodes > 1 and "NET/Socket" in self.between:
            known = list(
                dict.fromkeys([*(name for log in self.logs for name in log.ib_devices), *devices])
            )
            if known and not wan:
                why, fix = self.why_sockets()
                said.append(
                    f"nodes talk over TCP sockets, though there is {', '.join(known)} (InfiniBand or RoCE)"
                    f"{why}; right between sites, slow inside one: {fix}"
                )
            idle = sorted(
                {name for log in self.logs for name in log.sockets if NO_NETWORK.fullmatch(name)}
            )
            if idle:
                said.append(
                    f"nodes talk over {', '.join(idle)}, which leads to no other machine"
                    + because(settings, "NCCL_SOCKET_IFNAME")
                    + "; name another, for example NCCL_SOCKET_IFNAME=eth0 (ip -br addr lists them)"
                )
        if "NET/IB" in self.between and settings.get("NCCL_NET_GDR_LEVEL", "") in ("0", "LOC"):
            said.append(
                "nodes talk over InfiniBand without GPUDirect RDMA (NCCL_NET_GDR_LEVEL="
                f"{settings['NCCL_NET_GDR_LEVEL']} is set): each byte goes through the host; unset it"
            )
        if self.nodes > 1:
            said += [
                f"{problem}: NCCL took {self.first('network') or 'another network'} instead"
                for problem in dict.fromkeys(
                    problem for log in self.logs for problem in log.plugin_problems
                )
            ]
        return said

    def why_sockets(self) -> tuple[str, str]:
        """Why NCCL has probably passed over InfiniBand, and what to do about it."""
        if why := because(self.settings, "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA"):
            return why, "unset it; in the cluster SITE does"
        if any(log.no_verbs for log in self.logs):
            return (
                " (libibverbs is not installed here)",
                "apt-get install libibverbs1 ibverbs-providers on each node",
            )
        if any(log.unopened for log in self.logs):
            return (
                " (NCCL may not open it)",
                "a container must be given /dev/infiniband, and may have to lock memory "
                "(docker run --device=/dev/infiniband --ulimit memlock=-1; in the cluster the resource of its RDMA "
                "plugin)",
            )
        return (
            "",
            "ibv_devinfo shows whether a process here can use it, in a container only with /dev/infiniband",
        )


def listed(kinds: dict[str, list[Channel]]) -> str:
    """The transports, the most used first."""
    return " and ".join(sorted(kinds, key=lambda kind: (-len(kinds[kind]), kind))) or "n/a"


def pairs(channels: Sequence[Channel]) -> str:
    """'ranks 0 and 1', or how many pairs."""
    found = sorted({(min(c.sender, c.receiver), max(c.sender, c.receiver)) for c in channels})
    named = ", ".join(f"{a} and {b}" for a, b in found[:3])
    return f"ranks {named}" + (f" and {len(found) - 3} more pairs" if len(found) > 3 else "")


def because(settings: dict[str, str], *names: str) -> str:
    """' (NCCL_IB_DISABLE=1 is set)', of those that are."""
    found = [
        f"{name}={settings[name]}" for name in names if settings.get(name, "") not in ("", "0")
    ]
    return f" ({', '.join(found)} {'is' if len(found) == 1 else 'are'} set)" if found else ""
