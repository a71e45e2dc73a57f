"""The processes of a run: who this one is, and what they do together.

torchrun describes the processes in the environment. Without it there is one process and no process group. Every
collective outside of the model's own gradients is here, by name.
"""

import contextlib
import dataclasses
import datetime
import gc
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from record.exit_codes import NODES_MISSING
from record.machine_faults import classify
from settings import ExpectedError, SettingsError
from settings.checks import check_sharding, explain, find_batch_problem, find_site_problem
from settings.config import Config
from train.console import LOG_ONLY
from train.distributed.pod import in_pod

log = logging.getLogger(__name__)


class PeersMissing(ExpectedError):
    """Not all processes of the run came together. The message says what to look at."""

    exit_code = NODES_MISSING


class GpusMissing(SettingsError):
    """Torch sees fewer GPUs than the settings ask for."""

    machine_fault = "gpus"


class PeersDiffer(ExpectedError):
    """The sites of the run have other software or data. The message says which site has what."""


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the others. size: processes of the run. local_size: those on this machine."""

    rank: int
    local_rank: int
    node_rank: int
    size: int
    device: torch.device
    device_name: str
    host: str
    local_size: int = 1
    hosts: tuple[str, ...] = ()  # by rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


# ---------------------------------------------------------------------------------------------------
# Joining
# ---------------------------------------------------------------------------------------------------


def join(c: Config, trains: bool = True) -> World:
    """Choose the device, join the process group if there is one, and check that the batch divides over it.

    Args:
        c: the settings.
        trains: False for a command that takes no step, and so has no batch to divide.

    Raises:
        SettingsError: a setting does not fit the processes or the device.
        PeersMissing: the others did not come within START_TIMEOUT_S.
    """
    rank = read_number("RANK", 0)
    size = read_number("WORLD_SIZE", 1)
    local_rank = read_number("LOCAL_RANK", 0)
    if trains:
        problem = (
            find_batch_problem(c, size * c.replicas)
            or find_site_problem(c)
            or explain(c, check_sharding(c, size))
        )
        if problem:
            raise SettingsError([problem])
    device = choose_device(c, local_rank)
    device_name, backend = "CPU", "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        device_name, backend = torch.cuda.get_device_name(device), "cpu:gloo,cuda:nccl"
    host = socket.gethostname()
    if size > 1:
        meet_ranks(backend, rank, size, c.start_timeout_s)
    return World(
        rank=rank,
        local_rank=local_rank,
        node_rank=read_number("GROUP_RANK", 0),
        size=size,
        device=device,
        device_name=device_name,
        host=host,
        local_size=read_number("LOCAL_WORLD_SIZE", size),
        hosts=tuple(all_gather_object(host)),
    )


def meet_ranks(backend: str, rank: int, size: int, timeout_s: float) -> None:
    """Form the process group: by a file on one machine (train/torchrun.py), else at node 0's store.

    Raises PeersMissing.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    path = os.environ.get("RANKS_FILE")
    try:
        if path:
            store = dist.FileStore(path, size)
            dist.init_process_group(
                backend, timeout=timeout, store=store, rank=rank, world_size=size
            )
        else:
            dist.init_process_group(backend, timeout=timeout)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        # A FileStore raises no error of its own kind: "Wait timeout".
        if not isinstance(error, dist.DistError) and "timeout" not in reason:
            raise
        where = "on this machine"
        advice = "Look at what they print."
        if not path:
            where = f"at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            advice = "Look at the logs of the other nodes, and at the firewall between them."
        raise PeersMissing(
            f"rank {rank} of {size} on {socket.gethostname()} did not find the others {where} in "
            f"START_TIMEOUT_S={timeout_s}: {reason}. {advice}"
        ) from error


def read_number(name: str, default: int) -> int:
    """Return a variable that torchrun sets for each process."""
    return int(os.environ.get(name, default))


def log_topology(world: World, site: int | None = None) -> None:
    """Log what each node is and what its launcher chose, and that all processes are there.

    site: number of this site, if several train the run.
    """
    nccl = "none"
    if world.device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    more = "" if site is None else f" site={site}"
    if choices := os.environ.get("LAUNCH_CHOICES"):
        more += f" {choices}"
    if world.local_rank == 0:
        # ranks other than the first log only warnings: this goes into the log of their node
        log.log(
            logging.INFO if world.is_first else logging.WARNING,
            "node %d: host=%s ranks=%d-%d of %d device=%s torch=%s nccl=%s%s",
            world.node_rank,
            world.host,
            world.rank,
            world.rank + world.local_size - 1,
            world.size,
            world.device_name,
            torch.__version__,
            nccl,
            more,
            extra=LOG_ONLY if world.size == 1 else None,
        )
    if world.size > 1:
        hosts = ", ".join(dict.fromkeys(world.hosts))
        log.info("%d processes joined, on %s", world.size, hosts)


def use_device(world: World) -> None:
    """Make this thread use the process's GPU: each thread starts with GPU 0."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)


def set_timeout(seconds: float, groups: list[Any]) -> None:
    """Set how long a collective may take from now on, of all processes and of these groups."""
    if dist.is_initialized():
        for group in [dist.group.WORLD, *groups]:
            # there is no public function for this
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def group_of(ranks: list[int], seconds: float) -> Any:
    """Return a gloo group of these ranks, for what happens next to training; None if there is one process.

    All ranks must call it, also those that are not in it. seconds: how long a collective may take.
    """
    if not dist.is_initialized():
        return None
    return dist.new_group(ranks, backend="gloo", timeout=datetime.timedelta(seconds=seconds))


def choose_device(c: Config, local_rank: int) -> torch.device:
    """Return the device of a process.

    Raises GpusMissing if torch sees fewer GPUs than DEVICE and NPROC need, SettingsError if they lack DTYPE.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if c.device == "cuda" and gpus == 0:
        raise GpusMissing(
            [
                f"DEVICE=cuda: torch {torch.__version__} sees no GPU here; check nvidia-smi and the torch "
                "build (make setup), or choose DEVICE=cpu"
            ]
        )
    if c.device == "cpu" or gpus == 0:
        return torch.device("cpu")
    if local_rank >= gpus:
        raise GpusMissing(
            [f"NPROC={local_rank + 1} or more: only {gpus} GPUs are visible; set NPROC={gpus}"]
        )
    if c.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise SettingsError(
            [
                f"DTYPE=bfloat16: {torch.cuda.get_device_name(local_rank)} has no bfloat16 units; "
                "set DTYPE=float32"
            ]
        )
    return torch.device("cuda", local_rank)


# ---------------------------------------------------------------------------------------------------
# Leaving, and what the launcher is told
# ---------------------------------------------------------------------------------------------------


def leave() -> None:
    """Leave the process group, if there is one.

    What uses it is freed before: the other way round a process may hang or abort at its exit.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def report_exit(code: int, why: str = "") -> None:
    """Tell the launcher this process's exit code, which torchrun would turn into 1, and the reason.

    The first process to fail wins: the others fail because of it. Success is not reported, since another may still fail.
    """
    if code and (path := os.environ.get("EXIT_CODE_FILE")):
        with contextlib.suppress(FileExistsError), open(path, "x") as file:
            file.write(f"{code}\n{why[:1500]}\n")


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def shutdown_timeout_s(c: Config) -> float:
    """Return the seconds from SIGTERM to SIGKILL under torchrun, which torch 2.11 lets nobody set."""
    if torch.__version__ < "2.12":
        return 30.0
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", c.shutdown_timeout_s))


def seconds_since_launch() -> float:
    """Return how long ago this process, or its torchrun, was started; 0 if not by a launcher."""
    now = time.monotonic()
    return now - float(os.environ.get("LAUNCHED_AT", now))


def launcher_pid() -> int:
    """Return the process that is to be told to stop: the launcher, or this one where there is none."""
    return read_number("LAUNCHER_PID", os.getpid())


def report_progress(world: World, step: int) -> None:
    """Tell the node's launcher of a checkpoint: it gives up after several failures without a new one."""
    if (path := os.environ.get("PROGRESS_FILE")) and world.local_rank == 0:
        with contextlib.suppress(OSError):
            Path(path).write_text(f"{step}\n")


# ---------------------------------------------------------------------------------------------------
# Together
# ---------------------------------------------------------------------------------------------------


def raise_together(error: Exception | None, group: Any = None) -> None:
    """Raise the error of the first rank that has one, on all ranks; return on all ranks if none has.

    All ranks call it, or all of a group. The raised error has the type and the attributes of that rank's, and its
    message names the rank unless that is the first. A process without others raises its own error as it is.

    In a pod, what is a fault of one node's machine is none of the others': they only start again.
    """
    if not dist.is_initialized():
        if error:
            raise error
        return
    mine = None
    if error:
        mine = (type(error), str(error), vars(error) | {"machine_fault": classify(error)})
    local_size = read_number("LOCAL_WORLD_SIZE", dist.get_world_size())
    own_node = dist.get_rank() // local_size
    ranks = dist.get_process_group_ranks(group)
    for rank, problem in zip(ranks, all_gather_object(mine, group), strict=True):
        if problem:
            kind, message, attributes = problem
            # not by kind(message): some errors take something else, and some cannot be pickled
            shared = kind.__new__(kind)
            shared.args = (f"rank {rank}: {message}" if rank else message,)
            vars(shared).update(attributes)
            if in_pod() and shared.machine_fault and rank // local_size != own_node:
                shared.machine_fault = ""
                shared.exit_code = NODES_MISSING
            raise shared from error


@contextlib.contextmanager
def raise_on_all_ranks(*kinds: type[Exception], group: Any = None) -> Iterator[None]:
    """Raise on all ranks what one of them raises inside, if it is of these kinds. All ranks enter."""
    error: Exception | None = None
    try:
        yield
    except kinds as own_error:
        error = own_error
    raise_together(error, group)


def who_sees(folder: Path, world: World) -> list[bool]:
    """Return by rank whether it sees the first rank's folder. Raises OSError, on all, if that cannot be written to."""
    # A new name: a network disk may remember for a while that a file was absent.
    probe = folder / broadcast_object(f".probe-{uuid.uuid4().hex}")
    with raise_on_all_ranks(OSError):
        if world.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    visible = all_gather_object(probe.exists())
    if world.is_first:
        probe.unlink(missing_ok=True)
    return visible


def sum_over_ranks(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Sum the values over all processes, or a group, in place."""
    if dist.is_initialized():
        dist.all_reduce(values, group=group)
    return values


def broadcast(values: torch.Tensor, group: Any) -> None:
    """Overwrite the values with those of the first process, in place, on all of a group."""
    dist.broadcast(values, src=0, group=group)


def broadcast_object(value: Any, group: Any = None) -> Any:
    """Return the first process's value on all processes, or on all of a group that it is in."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[0]


def to_first(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all processes, by rank, on the first, or the first of a group; [] on the others."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else []
    dist.gather_object(value, values or None, dst=0, group=group)
    return values


def all_gather_object(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all processes, by rank, on all processes, or on all of a group."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
