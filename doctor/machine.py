"""What the system grants to processes: memory, shared memory, open files, a port, a compiler, a clock.

Each is gathered by one function and judged by another, on facts alone.
"""

import ctypes
import dataclasses
import errno
import math
import os
import resource
import shutil
import socket
import struct
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from hardware.host_memory import Memory
from hardware.ports import free_ports
from plan import storage
from plan.run import pretraining_memory
from settings.addresses import join_address
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding
from train.data import data_paths

GIB = 2.0**30
LOADED_ON_GPU_BYTES = (
    1e9  # of a process with torch's CUDA libraries, in the machine's memory: a low estimate
)
SHM_OF_CONTAINERS = 64 * 2**20  # what docker and Kubernetes give, if they are not told otherwise
SHM_OF_NCCL = 2**30  # what NCCL's user guide has containers started with ("Runtime and MPI issues")
FILES = 128  # of a trainer on CPU: 14 were counted in one, and a save opens more
FILES_OF_NCCL = 1024  # more, between several: up to 64 sockets a connection (NCCL_NSOCKS_PERTHREAD)
UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)


# ---------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------


def needed_bytes(c: Config, processes: int, on_gpus: bool) -> float:
    """What the processes of this machine take of its own memory, computed: on CPU all of a step, which has the copy for
    a save in it. From GPUs weights and moments are copied there for a save, by the processes that hold one whole copy
    (parallel.writers)."""
    world = processes * c.nodes
    if not on_gpus:
        return processes * pretraining_memory(c, world, processes, on_cpu=True).total
    writers = {"ddp": processes, "fsdp": world, "hsdp": c.shard_ranks or processes}[c.parallel]
    here = min(1.0, processes / writers) if c.node_rank * processes < writers else 0.0
    saved = here * storage.checkpoint_bytes(c) if c.save_every != 0 else 0.0
    return processes * LOADED_ON_GPU_BYTES + saved


def memory(c: Config, m: Memory, processes: int, on_gpus: bool) -> Finding:
    """The machine's own, beside that of its GPUs."""
    need = needed_bytes(c, processes, on_gpus)
    where = (
        ""
        if m.limit_free >= m.available
        else (f" of the {m.limit / GIB:.1f} GiB that this container may take")
    )
    said = f"{m.free / GIB:.1f} GiB free{where}, {need / GIB:.1f} GiB needed (computed)"
    if need <= m.free:
        return Finding("host-memory", PASS, said)
    fix = "use fewer processes (NPROC), a smaller model or more memory"
    if on_gpus:
        said += ": a save copies weights and optimizer state there"
    else:
        said += ": a step, and the copy that a save makes"
        fix = f"lower MICRO_BATCH_SIZE, {fix}"
    if need <= m.most:
        return Finding("host-memory", WARN, said, "end other programs, or wait for them to end")
    return Finding("host-memory", FAIL, said, fix)


# ---------------------------------------------------------------------------------------------------
# /dev/shm, open files
# ---------------------------------------------------------------------------------------------------


def shm_free(path: str = "/dev/shm") -> tuple[float, float] | None:
    """(size, free) in bytes; None where there is no such folder, as on macOS."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return float(usage.total), float(usage.free)


def shm(found: tuple[float, float] | None, processes: int, on_gpus: bool) -> Finding | None:
    """Shared memory is what NCCL talks through between processes of a machine; nothing else here uses it."""
    if found is None:
        return None
    size, free = found
    said = f"/dev/shm has {size_of(free)} free of {size_of(size)}"
    if not on_gpus or processes == 1:
        return Finding("shm", PASS, f"{said}; only several GPUs need any")
    fix = (
        "start the container with --shm-size=1g or more (in a pod: a larger POD_MEMORY_GB); what killed programs left there may be "
        "deleted: /dev/shm/nccl-*"
    )
    if free >= SHM_OF_NCCL:
        return Finding("shm", PASS, said)
    level = FAIL if free <= SHM_OF_CONTAINERS else WARN
    return Finding("shm", level, f"{said}: NCCL needs 1 GiB between {processes} GPUs", fix)


def size_of(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def files_limit() -> tuple[int, int]:
    """(soft, hard) limit of open files of a process; a very large number where there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (2**31 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    return soft, hard


def files_needed(c: Config, processes: int, on_gpus: bool) -> int:
    """Open files of a trainer, at most. A shard that is mapped counts as one: the training shards of two groups of each
    source (batch.py lets go of others), and all validation shards, of which there is one for each SHARD_TOKENS."""
    shards = 0
    for weight in c.mixture.values():
        tokens = c.train_tokens * weight / sum(c.mixture.values())
        shards += 2 * data_paths.GROUP_SHARDS + math.ceil(tokens / data_paths.SHARD_TOKENS)
    return FILES + shards + (FILES_OF_NCCL if on_gpus and processes * c.nodes > 1 else 0)


def open_files(limits: tuple[int, int], need: int) -> Finding:
    soft, hard = limits
    said = f"a process may open {soft:,} files" + (
        f" (up to {hard:,} if it asks)" if hard > soft else ""
    )
    if soft >= need:
        return Finding("open-files", PASS, said)
    wanted = max(4096, need)
    fix = f"ulimit -n {min(hard, wanted)}"
    if hard < need:
        fix = (
            f"have an administrator raise nofile to {wanted} (/etc/security/limits.conf; docker run "
            f"--ulimit nofile={wanted})"
        )
    return Finding(
        "open-files", WARN, f"{said}, and the run may need {need:,}: shards, connections, GPUs", fix
    )


# ---------------------------------------------------------------------------------------------------
# Loopback, port
# ---------------------------------------------------------------------------------------------------


def loopback_fault() -> str:
    """Return why nothing of this machine can be reached at 127.0.0.1, "" if it can. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 1))
        except OSError as error:
            return str(error.strerror)
    return ""


def loopback(fault: str, processes: int) -> Finding | None:
    """Judge the interface by which the processes of one machine reach each other (train/torchrun.py)."""
    if not fault:
        return None
    return Finding(
        "loopback",
        FAIL,
        f"127.0.0.1 cannot be reached ({fault}), and {processes} processes talk through it",
        "turn the loopback interface on (ip link set lo up), or set NPROC=1",
    )


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Of several nodes. addresses: those of MASTER_ADDR, none where it has none; taken: why its port cannot be
    listened on here, "" where it can or need not be."""

    addresses: tuple[str, ...]
    taken: str = ""


def meeting(c: Config) -> Meeting:
    try:
        found = socket.getaddrinfo(c.master_host, c.master_port, type=socket.SOCK_STREAM)
        addresses = tuple(sorted({str(address[0]) for *_, address in found}))
    except OSError:
        addresses = ()
    if c.rank_in_site:
        return Meeting(addresses)
    try:
        socket.create_server(("", c.master_port)).close()
    except OSError as error:
        return Meeting(
            addresses,
            "another program listens there"
            if error.errno == errno.EADDRINUSE
            else str(error.strerror),
        )
    return Meeting(addresses)


def ports(c: Config, m: Meeting) -> Finding:
    """Where several nodes meet. Whether a firewall lets the others through shows only when they call."""
    if m.taken:
        other = join_address(c.master_host, free_ports(1))
        return Finding(
            "ports",
            FAIL,
            f"MASTER_ADDR={c.master_addr}: port {c.master_port} cannot be listened on ({m.taken})",
            f"end that, or choose another on all nodes, for example MASTER_ADDR={other}",
            64,
        )
    if not m.addresses:
        return Finding(
            "ports",
            FAIL,
            f"MASTER_ADDR={c.master_addr}: no address is found for this name",
            "name the "
            "first node as this machine knows it, for example by its number: MASTER_ADDR=10.0.0.5",
            64,
        )
    where = f"MASTER_ADDR={c.master_addr} is {', '.join(m.addresses)}"
    if not c.rank_in_site:
        where = f"port {c.master_port} is free here, and {where}"
    return Finding("ports", PASS, f"{where}; a firewall in between shows only when nodes connect")


# ---------------------------------------------------------------------------------------------------
# Compiler, processor
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Compiler:
    """What torch.compile calls: the names of a C and a C++ compiler, "" where there is none; headers: of Python, which
    all that it compiles includes."""

    c: str
    cxx: str
    headers: bool


def compiler_here() -> Compiler:
    """By the names that Triton looks for; torch takes g++, clang++ on macOS, or what CXX names, which may be any."""
    return Compiler(
        first(("gcc", "clang", "cc")),
        first(("g++", "clang++", "c++")),
        os.path.isfile(Path(sysconfig.get_paths()["include"]) / "Python.h"),
    )


def first(names: Sequence[str]) -> str:
    return next((name for name in names if shutil.which(name)), "")


def compiler(c: Config, found: Compiler, on_gpus: bool, worth: bool | None) -> Finding | None:
    """Whether COMPILE can do what it says. worth: whether auto would compile on the CPU, None where that is not known
    and nothing is to be said."""
    wanted = c.compile == "1" or (c.compile == "auto" and (on_gpus or worth))
    if not wanted:
        said = "COMPILE=0" if c.compile == "0" else "a run so short is not compiled on a CPU"
        return None if worth is None else Finding("compiler", PASS, f"none is needed: {said}")
    language, name, package = ("C", found.c, "gcc") if on_gpus else ("C++", found.cxx, "g++")
    level = FAIL if c.compile == "1" else WARN  # auto goes on without
    if not name:
        return Finding(
            "compiler",
            level,
            f"COMPILE={c.compile}: there is no {language} compiler; the run is slower without",
            f"apt-get install {package}, or set COMPILE=0",
            64,
        )
    if not found.headers:
        return Finding(
            "compiler",
            level,
            f"COMPILE={c.compile}: Python's own headers (Python.h) are not there, and "
            "what torch compiles includes them",
            "apt-get install python3-dev, or set COMPILE=0",
            64,
        )
    return Finding("compiler", PASS, f"{name} compiles for torch.compile")


# ---------------------------------------------------------------------------------------------------
# Clock
# ---------------------------------------------------------------------------------------------------


def is_kept() -> bool | None:
    """Whether the kernel's clock is kept by NTP or the like; None where it does not say."""
    if sys.platform != "linux" or struct.calcsize("P") != 8:
        return None
    state = ctypes.create_string_buffer(512)  # struct timex, its modes 0: nothing is set
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(state) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return (
        not struct.unpack_from("i", state, 40)[0] & UNSYNCHRONISED
    )  # status lies behind five longs
