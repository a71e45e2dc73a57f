"""The processes of a run: who am I, and the few things they do together.

torchrun says who is who through the environment; without it there is one process and no process group.
Every collective outside the model's own gradients is here by name.
"""

import dataclasses
import datetime
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.config import Config
from train.rules import batch_problem
from train.settings import SettingsError

START_TIMEOUT = datetime.timedelta(minutes=10)  # for peers to join and the first collectives


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the others. size: processes of the job."""

    rank: int
    local_rank: int
    node_rank: int
    size: int
    device: torch.device
    device_name: str
    host: str

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join(c: Config) -> World:
    """Find the device, join the process group if there is one, and check that the batch divides over it."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, node_rank = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("GROUP_RANK", 0))
    if problem := batch_problem(c, size):
        raise SettingsError([problem])
    device = choose_device(c, local_rank)
    name = "CPU"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    if size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=START_TIMEOUT)
    return World(rank, local_rank, node_rank, size, device, name, socket.gethostname())


def choose_device(c: Config, local_rank: int) -> torch.device:
    """The device of a process. Raises SettingsError where DEVICE or DTYPE asks for what is not there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if c.device == "cuda" and gpus == 0:
        raise SettingsError([f"DEVICE=cuda: torch {torch.__version__} sees no GPU here; check nvidia-smi and the torch "
                             "build (make setup), or choose DEVICE=cpu"])
    if c.device == "cpu" or gpus == 0:
        return torch.device("cpu")
    if local_rank >= gpus:
        raise SettingsError([f"NPROC={c.nproc}: only {gpus} GPUs are visible; set NPROC={gpus}"])
    if c.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise SettingsError([f"DTYPE=bfloat16: {torch.cuda.get_device_name(local_rank)} has no bfloat16 units; "
                             "set DTYPE=float32"])
    return torch.device("cuda", local_rank)


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def report_exit(code: int, in_doubt: bool = False) -> None:
    """Tell the launcher this process's exit code, which torchrun would turn into 1.

    The first process to fail wins: the others fail because of it. Success is not reported: another may still fail.
    in_doubt: stopped by a SIGTERM that torchrun also sends when another process has died; the launcher knows.
    """
    if code and (path := os.environ.get("EXIT_CODE_FILE")):
        try:
            with open(Path(path), "x") as file:
                file.write(f"{code}{'?' if in_doubt else ''}\n")
        except FileExistsError:
            pass


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The values summed over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def from_first(value: Any) -> Any:
    """What the first process passes, on all of them."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def from_all(value: Any) -> list[Any]:
    """What each process passes, by rank, on all of them."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
