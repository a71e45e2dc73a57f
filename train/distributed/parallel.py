"""How the model is spread over processes, by PARALLEL; the model's code does not know.

    ddp    each process holds all weights and moments             (DistributedDataParallel)
    fsdp   each holds a part of every weight, and its moments     (FSDP2, fully_shard)
    hsdp   groups of SHARD_RANKS hold a copy each, split as above (FSDP2 in replicas)

`grad_sync` is the one place where gradients are synchronized; train_step opens it for the last micro-batch of a step.
With one process there is nothing to spread, and nothing of this is used.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from settings.checks import count_shard_ranks
from settings.config import Config
from train.distributed.fsdp_waits import Waits
from train.distributed.world import World

# Buffers are not sent at each step: the only one is the table of rotary angles. torch 2.13 renamed the flag.
SYNC_BUFFERS = "forward_sync_buffers" if torch.__version__ >= "2.13" else "broadcast_buffers"
NO_BUFFERS: dict[str, Any] = {SYNC_BUFFERS: False}


def is_split(c: Config, world: World) -> bool:
    """Return whether a process holds only a part of each weight."""
    return c.parallel != "ddp" and world.size > 1


def shard_ranks(c: Config, world: World) -> int:
    """Return how many processes share one copy of the weights. Raises SettingsError where they cannot."""
    if not is_split(c, world):
        return 1
    if c.parallel == "fsdp":
        return world.size
    return count_shard_ranks(c, world.size, world.local_size)


class Sharding:
    """Splits a model over processes with FSDP2, by PARALLEL."""

    def __init__(self, c: Config, world: World):
        self.c = c
        self.world = world
        self.ranks = shard_ranks(c, world)

    def split(self, model: Any) -> None:
        """Split each block's weights, and then the others. The model may still be on the meta device."""
        from torch.distributed.device_mesh import init_device_mesh  # these take a second to import
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        sizes: dict[str, int] = {"shard": self.ranks}
        if self.c.parallel == "hsdp":
            sizes = {"replica": self.world.size // self.ranks, "shard": self.ranks}
        mesh = init_device_mesh(
            self.world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
        # weights travel in the type in which they are used, gradients in float32
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, self.c.dtype), reduce_dtype=torch.float32
        )
        waits = Waits(self.world.device, self.ranks)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
            waits.watch(module)
        model.waits = waits
        model.sync_each_micro_batch = self.c.grad_sync == "micro-batch"
        model.gathers_once = self.c.gathers_once


def part_of(values: Tensor, weight: Any) -> Tensor:
    """Return this process's part of the values of a whole weight, without communication."""
    if mesh_of(weight) is None:
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, weight.device_mesh, weight.placements, src_data_rank=None)


def parallelize(model: nn.Module, c: Config, world: World) -> nn.Module:
    """Return the model as this process trains it; one that was split stays as it is."""
    if world.size == 1 or is_split(c, world):
        return model
    # static_graph stays off: with accumulation under no_sync it can stop reducing, silently (pytorch#143580)
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **NO_BUFFERS,
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without its wrapper, with the names that checkpoints use."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_fsdp(model: nn.Module) -> bool:
    """Return whether the processes run each forward pass together, since each holds a part of the weights."""
    return hasattr(model, "reshard")


def weights_of(model: Any) -> dict[str, nn.Parameter]:
    """Return name -> trained weight, or this process's part of it, as the optimizer knows it.

    A tied head counts once.
    """
    if is_fsdp(model):  # FSDP2 leaves the outermost weights whole behind an evaluation
        model.reshard()
    return {
        name: weight for name, weight in unwrap(model).named_parameters() if weight.requires_grad
    }


def local(tensor: Tensor) -> Tensor:
    """Return the part of it that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def mesh_of(tensor: Tensor) -> Any:
    """Return the mesh of processes over which FSDP2 has split it, or None; importing DTensor takes a second."""
    return getattr(tensor, "device_mesh", None)


def copies(model: nn.Module, world: World) -> int:
    """Return how many processes hold each number of a gradient."""
    mesh = mesh_of(next(model.parameters()))
    return world.size if mesh is None else world.size // mesh.size(mesh.ndim - 1)


def groups_of(model: nn.Module) -> list[Any]:
    """Return the process groups of the engine's own, beside that of all processes."""
    mesh = mesh_of(next(model.parameters()))
    return [] if mesh is None else mesh.get_all_groups()


def writers(c: Config, world: World) -> list[int]:
    """Return the ranks that write a checkpoint: those of one whole copy of the weights, or of the first node."""
    return list(range(shard_ranks(c, world) if is_split(c, world) else world.local_size))


def replicate(tensors: Sequence[Tensor]) -> None:
    """Send what the first copy holds to all others, in place, tensor by tensor."""
    for tensor in tensors:
        mesh = mesh_of(tensor)
        group = dist.group.WORLD if mesh is None else mesh.get_group("replica")
        dist.broadcast(local(tensor), group_src=0, group=group)


@contextlib.contextmanager
def grad_sync(model: Any, enabled: bool) -> Iterator[None]:
    """Have backward passes inside average gradients over ranks if enabled, and only accumulate them if not.

    The engine averages; train_step undoes that, so that the gradient is that of the summed loss.

    With GRAD_SYNC=micro-batch FSDP2 reduces always, over the ranks of a copy, so that no process holds a whole gradient.
    """
    if is_fsdp(model):
        at_each = enabled or model.sync_each_micro_batch
        model.set_requires_gradient_sync(at_each)
        model.set_requires_all_reduce(enabled)
        model.set_is_last_backward(enabled)
        model.set_reshard_after_backward(enabled or not model.gathers_once)
        if model.gathers_once and not enabled:
            set_reshard_after_forward(model, False)
    accumulates = isinstance(model, DistributedDataParallel) and not enabled
    with model.no_sync() if accumulates else contextlib.nullcontext():
        yield
    if enabled and is_fsdp(model):  # an evaluation may follow
        set_reshard_after_forward(model, True)


def set_reshard_after_forward(model: Any, reshard: bool) -> None:
    """Say whether FSDP2 forgets a block's gathered weights behind its forward pass."""
    for block in model.layers:
        block.set_reshard_after_forward(reshard)


def clear_gradients(model: nn.Module) -> None:
    """Forget the gradients of a step.

    Under DistributedDataParallel they are zeroed in place and stay views of its buckets. Were they None, the passes
    inside no_sync would accumulate in memory of their own beside the buckets: 4 bytes a weight, and a copy a step.
    """
    model.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))


def warm_up_ddp(model: nn.Module, micro_batch: Sequence[Tensor]) -> None:
    """Have what is decided at the first use decided before the first step: buckets, and compiled code.

    DistributedDataParallel orders its buckets anew after its first reduction, and with three ranks or more the order
    of summation follows. Without this, the first step after a resume would round differently from the same step in a
    run that was never stopped.
    """
    with grad_sync(model, enabled=True):
        loss, _ = model(*micro_batch)
        (loss * 0.0).backward()
