"""The processes of a run: who am I, and the few things they do together.

torchrun says who is who through the environment; without it there is one process and no process group.
Every collective outside the model's own gradients is here by name.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import gc
import logging
import os
import platform
import socket
import struct
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from settings import SettingsError
from settings.checks import check_sharding, explain, find_batch_problem
from settings.config import Config
from train.console import LOG_ONLY
from train.distributed.signals import BY_USER
from train.distributed.wan import find_site_problem

ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, of Linux

log = logging.getLogger(__name__)


class PeersMissing(Exception):
    """Not all processes of the job came together; the message says what to look at."""


class PeersDiffer(Exception):
    """The processes of the job do not run the same software; the message names who runs what."""


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the others. size: processes of the job; local_size: those on this machine."""

    rank: int
    local_rank: int
    node_rank: int
    size: int
    device: torch.device
    device_name: str
    host: str
    local_size: int = 1
    hosts: tuple[str, ...] = ()  # of each rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


# ---------------------------------------------------------------------------------------------------
# Coming together
# ---------------------------------------------------------------------------------------------------


def join(c: Config, trains: bool = True) -> World:
    """Find the device, join the process group if there is one, and check that the batch divides over it.

    trains: False for a command that takes no step, of which there is nothing to divide. Raises SettingsError,
    PeersMissing.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, node_rank = (
        int(os.environ.get("LOCAL_RANK", 0)),
        int(os.environ.get("GROUP_RANK", 0)),
    )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if trains:
        problem = (
            find_batch_problem(c, size * c.replicas)
            or find_site_problem(c)
            or explain(c, check_sharding(c, size))
        )
        if problem:
            raise SettingsError([problem])
    device = choose_device(c, local_rank)
    name = "CPU"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    host = socket.gethostname()
    if size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=c.start_timeout_s))
        except dist.DistError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise PeersMissing(
                f"rank {rank} of {size} on {host} did not find the others at {where} in "
                f"START_TIMEOUT_S={c.start_timeout_s}: {str(error).splitlines()[0]}; look at the other "
                "nodes' logs, and at the firewall between them"
            ) from error
    return World(
        rank, local_rank, node_rank, size, device, name, host, local_size, tuple(from_all(host))
    )


def introduce(world: World, site: int | None = None) -> None:
    """Each node says what it is, the first process that all are there. site: which of several that train apart. Raises
    PeersDiffer."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if world.device.type == "cuda" else "none"
    software = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": nccl,
        "Python": platform.python_version(),
    }
    if world.local_rank == 0:
        log.log(
            logging.INFO
            if world.is_first
            else logging.WARNING,  # other ranks' words are for their node's log
            "node %d: host=%s ranks=%d-%d of %d device=%s torch=%s nccl=%s%s",
            world.node_rank,
            world.host,
            world.rank,
            world.rank + world.local_size - 1,
            world.size,
            world.device_name,
            software["torch"],
            nccl,
            "" if site is None else f" site={site}",
            extra=LOG_ONLY if world.size == 1 else None,
        )
    if world.size == 1:
        return
    members = from_all((world.host, world.device_name, software))
    for key in software:
        found = {
            facts[key]: f"rank {rank} on {host}" for rank, (host, _, facts) in enumerate(members)
        }
        if len(found) > 1:
            listed = ", ".join(f"{key} {version} ({who})" for version, who in found.items())
            raise PeersDiffer(
                f"the processes of this job do not run the same software: {listed}; install the same "
                "everywhere (make setup of the same commit)"
            )
    log.info(
        "%d of %d processes joined, on %s",
        len(members),
        world.size,
        ", ".join(dict.fromkeys(f"{host} ({device})" for host, device, _ in members)),
    )


def gloo_interface() -> tuple[str, str]:
    """The interface that gloo takes here and its address: GLOO_SOCKET_IFNAME, else that of the host's own name, else
    loopback. Raises OSError where it is not there."""
    names = {address_of(name): name for _, name in socket.if_nameindex()}
    if asked := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return asked, address_of(asked) or "no IPv4 address"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    return names.get(
        address, "lo" if address.startswith("127.") else "an interface that is not known"
    ), address


def address_of(interface: str) -> str:
    """Its IPv4 address, "" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(
                probe, ADDRESS_OF_INTERFACE, struct.pack("256s", interface[:15].encode())
            )
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def use_device(world: World) -> None:
    """Have this thread use the process's GPU: each thread begins with the first."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)


def set_timeout(seconds: float, groups: list[Any]) -> None:
    """How long a collective of the job, and of these groups of it, may take from now on."""
    if dist.is_initialized():
        for group in [dist.group.WORLD, *groups]:
            dist.distributed_c10d._set_pg_timeout(
                datetime.timedelta(seconds=seconds), group
            )  # there is no public one


def group_of(ranks: list[int], seconds: float) -> Any:
    """A gloo group of these ranks, for what goes on beside training; None where there is one process.

    All ranks must call it, those that are not in it too.
    """
    if not dist.is_initialized():
        return None
    return dist.new_group(ranks, backend="gloo", timeout=datetime.timedelta(seconds=seconds))


def choose_device(c: Config, local_rank: int) -> torch.device:
    """The device of a process. Raises SettingsError where DEVICE or DTYPE asks for what is not there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if c.device == "cuda" and gpus == 0:
        raise SettingsError(
            [
                f"DEVICE=cuda: torch {torch.__version__} sees no GPU here; check nvidia-smi and the torch "
                "build (make setup), or choose DEVICE=cpu"
            ]
        )
    if c.device == "cpu" or gpus == 0:
        return torch.device("cpu")
    if local_rank >= gpus:
        raise SettingsError([f"NPROC={c.nproc}: only {gpus} GPUs are visible; set NPROC={gpus}"])
    if c.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise SettingsError(
            [
                f"DTYPE=bfloat16: {torch.cuda.get_device_name(local_rank)} has no bfloat16 units; "
                "set DTYPE=float32"
            ]
        )
    return torch.device("cuda", local_rank)


# ---------------------------------------------------------------------------------------------------
# Leaving
# ---------------------------------------------------------------------------------------------------


def leave() -> None:
    """Leave the process group, if there is one. What uses it goes before it: the other way round a process may hang or
    abort at its exit."""
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def report_exit(code: int, mark: str = "", why: str = "") -> None:
    """Tell the launcher this process's exit code, which torchrun would turn into 1, and why it ends so.

    The first process to fail wins: the others fail because of it. Success is not reported: another may still fail.
    mark: of signals.py, for the launcher to judge by. BY_USER wins over the first.
    """
    if code and (path := os.environ.get("EXIT_CODE_FILE")):
        try:
            with open(Path(path), "w" if mark == BY_USER else "x") as file:
                file.write(f"{code}{mark}\n{why[:1500]}\n")
        except FileExistsError:
            pass


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def shutdown_timeout_s(c: Config) -> tuple[float, bool]:
    """What torchrun leaves a process between SIGTERM and SIGKILL, and whether it can be told so: torch 2.11 cannot."""
    from torch.distributed.launcher import api

    settable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in Path(api.__file__).read_text(encoding="utf-8")
    if not settable:
        return 30.0, False
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", c.shutdown_timeout_s)), True


def parent_is_gone() -> bool:
    """Whether what started this process has ended while it was being loaded. False where the system does not say."""
    if not under_torchrun():
        return os.environ.get("LAUNCHER_PID", str(os.getppid())) != str(os.getppid())
    try:
        return b"torch" not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return False


def report_progress(world: World, step: int) -> None:
    """Tell the launcher of a checkpoint: it gives up on a run that fails again and again without a new one."""
    if (path := os.environ.get("PROGRESS_FILE")) and world.local_rank == 0:
        with contextlib.suppress(OSError):
            Path(path).write_text(f"{step}\n")


# ---------------------------------------------------------------------------------------------------
# Together
# ---------------------------------------------------------------------------------------------------


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The values summed over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def sum_over(values: torch.Tensor, group: Any) -> torch.Tensor:
    """The values summed over a group of group_of, in place."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def who_sees(folder: Path, world: World) -> list[bool]:
    """By rank, whether it sees the first one's folder. Raises OSError, on all, where that cannot be written to."""
    name, problem = (
        f".probe-{uuid.uuid4().hex}",
        None,
    )  # nobody has asked a network disk for it: not known as absent
    if world.is_first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except OSError as error:
            problem = error
    name, problem = from_first((name, problem))
    if problem:
        raise problem
    seen = from_all((folder / name).exists())
    if world.is_first:
        (folder / name).unlink(missing_ok=True)
    return seen


def broadcast(values: torch.Tensor, group: Any) -> None:
    """Overwrite the values by those of the first process, in place, on all of a group."""
    dist.broadcast(values, src=0, group=group)


def from_first(value: Any, group: Any = None) -> Any:
    """What the first process passes, on all of them, or all of a group that it is in."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[0]


def to_first(value: Any, group: Any = None) -> list[Any]:
    """What each process passes, by rank, on the first of them, or of a group that it is in; [] on the others."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else []
    dist.gather_object(value, values or None, dst=0, group=group)
    return values


def from_all(value: Any, group: Any = None) -> list[Any]:
    """What each process passes, by rank, on all of them, or all of a group."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
