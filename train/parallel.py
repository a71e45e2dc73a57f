"""How the model is spread over processes; the model's code does not know.

Inside a site: DistributedDataParallel, one replica a process. `grad_sync` is the one place where
gradients meet; train_step opens it on the last micro-batch of a step.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.distributed import World

# Buffers are not sent at each step: the only one is the table of rotary angles. The flag is called
# broadcast_buffers before torch 2.13, which warns of the old name.
NO_BUFFERS: dict[str, Any] = {
    next(name for name in ("forward_sync_buffers", "broadcast_buffers")
         if name in inspect.signature(DistributedDataParallel.__init__).parameters): False}


def parallelize(model: nn.Module, world: World) -> nn.Module:
    """The model as this process trains it. All ranks start from the first's weights."""
    if world.size == 1:
        return model
    # static_graph stays off: with accumulation under no_sync it can stop reducing, silently (pytorch#143580)
    return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None,
                                   gradient_as_bucket_view=True, **NO_BUFFERS)


def bare(model: nn.Module) -> nn.Module:
    """The model without its wrapper, with the names that checkpoints use."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def grad_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Backward passes inside average gradients over ranks if enabled, and only add them up here if not.

    The engine averages; train_step undoes that, so that the gradient is that of the summed loss.
    """
    if enabled or not isinstance(model, DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield


def settle(model: nn.Module, micro_batch: Sequence[torch.Tensor]) -> None:
    """Let what is decided at the first use be decided before the first step: buckets, and compiled code.

    DistributedDataParallel orders them anew after its first reduction, and with three ranks or more the
    order of summation follows. Without this, the first step after a resume would round differently from
    the same step in a run that was never stopped.
    """
    if isinstance(model, DistributedDataParallel) or bare(model).compiled:
        loss, _ = model(*micro_batch)
        (loss * 0.0).backward()
        model.zero_grad(set_to_none=True)
