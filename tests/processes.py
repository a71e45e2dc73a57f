"""Functions of a test in several processes, as ranks of a job."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

# What takes seconds to import, which a server does once for all the processes that are forked from it.
IMPORTED = ("tests.conftest", "train.main", "torch.distributed.checkpoint", "torch.distributed.fsdp", "finetune.main",
            "peft", "transformers.models.glm4_moe.modeling_glm4_moe")


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], size: int) -> None:
    """function(rank, *arguments) in so many processes, with the environment of now; raises what one of them raises."""
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    mp.start_processes(in_environment, (dict(os.environ), function, *arguments), size, start_method="forkserver")


def in_environment(rank: int, environment: dict[str, str], function: Callable[..., None], *arguments: Any) -> None:
    """The server's own environment is that of the first test which needed it."""
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *arguments)
