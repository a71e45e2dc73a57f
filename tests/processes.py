"""Functions of a test in several processes, as ranks of a job; and whole trainers, which start without importing."""

import multiprocessing
import os
import runpy
import select
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from hardware.ports import free_ports
from tests.faults import inject

# What takes seconds to import, which a server does once for all the processes that are forked from it.
IMPORTED = (
    "tests.conftest",
    "train.main",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "finetune.main",
    "peft",
    "transformers.models.glm4_moe.modeling_glm4_moe",
)


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], size: int) -> None:
    """function(rank, *arguments) in so many processes, with the environment of now; raises what one of them raises."""
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    mp.start_processes(
        in_environment, (dict(os.environ), function, *arguments), size, start_method="forkserver"
    )


def in_environment(
    rank: int, environment: dict[str, str], function: Callable[..., None], *arguments: Any
) -> None:
    """The server's own environment is that of the first test which needed it."""
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *arguments)


def run_trainer(
    command: Sequence[str],
    env: dict[str, str],
    size: int = 1,
    before: Callable[[], None] | None = None,
    seconds: float = 400,
) -> tuple[int, str]:
    """What Python does with this command, -m or -c with arguments, and this environment, or torchrun with so many
    processes: (exit code, what they and all that they started printed). The code is that of the
    first that failed, by rank. before: called in each."""
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    context = multiprocessing.get_context("forkserver")
    if size > 1:
        env = env | {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)),
        }
    deadline, text = time.monotonic() + seconds, b""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder) / "said"
        os.mkfifo(pipe)
        reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        writing = os.open(pipe, os.O_WRONLY)  # until each process has it
        ranks = [
            context.Process(
                target=trainer,
                args=(
                    list(command),
                    env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}),
                    str(pipe),
                    before,
                ),
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        while True:
            if select.select([reading], [], [], 0.05)[0]:
                if not (more := os.read(reading, 1 << 16)):
                    break  # nobody is left who could say anything
                text += more
            if writing >= 0 and not any(process.is_alive() for process in ranks):
                os.close(writing)
                writing = -1
            if time.monotonic() > deadline:
                for process in ranks:
                    process.kill()
                raise AssertionError(f"not done within {seconds} s:\n{text.decode()}")
        os.close(reading)
    return next((process.exitcode for process in ranks if process.exitcode), 0), text.decode()


def trainer(
    command: list[str], environment: dict[str, str], said: str, before: Callable[[], None] | None
) -> None:
    """In a process of its own: the command, as if Python had been started with this environment."""
    os.environ.clear()
    os.environ.update(environment)
    into = os.open(said, os.O_WRONLY)
    os.dup2(into, 1)
    os.dup2(into, 2)
    os.close(into)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", closefd=False),
        os.fdopen(2, "w", buffering=1, closefd=False),
    )
    tempfile.tempdir = None  # TMPDIR may be another
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if "FAULTS" in environment:
        inject.install()  # which Python does by itself where it starts with this environment
    if before:
        before()
    how, what, *arguments = command
    sys.argv = [how, *arguments]
    if how == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.modules.pop(what, None)  # it is to be __main__
        runpy.run_module(what, run_name="__main__", alter_sys=True)
