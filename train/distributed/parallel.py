"""How the model is spread over processes, by PARALLEL; the model's code does not know.

    ddp    each process holds all weights and moments             (DistributedDataParallel)
    fsdp   each holds a part of every weight, and its moments     (FSDP2, fully_shard)
    hsdp   groups of SHARD_RANKS hold a copy each, split as above (FSDP2 in replicas)

`grad_sync` is the one place where gradients meet; train_step opens it on the last micro-batch of a step.
With one process there is nothing to spread, and nothing of this is used.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from settings.checks import count_shard_ranks
from settings.config import Config
from train.distributed.world import World

# Buffers are not sent at each step: the only one is the table of rotary angles. The flag is called
# broadcast_buffers before torch 2.13, which warns of the old name.
NO_BUFFERS: dict[str, Any] = {
    next(
        name
        for name in ("forward_sync_buffers", "broadcast_buffers")
        if name in inspect.signature(DistributedDataParallel.__init__).parameters
    ): False
}


def is_split(c: Config, world: World) -> bool:
    """Whether a process holds only a part of each weight."""
    return c.parallel != "ddp" and world.size > 1


def shard_ranks(c: Config, world: World) -> int:
    """Processes that share one copy of the weights. Raises SettingsError where they cannot."""
    if not is_split(c, world):
        return 1
    if c.parallel == "fsdp":
        return world.size
    return count_shard_ranks(c, world.size, world.local_size)


class Sharding:
    """Splits a model over processes with FSDP2, by PARALLEL."""

    def __init__(self, c: Config, world: World):
        self.c, self.world, self.ranks = c, world, shard_ranks(c, world)

    def split(self, model: nn.Module) -> None:
        """Split each block's weights, and then the others. The model may still be on the meta device."""
        from torch.distributed.device_mesh import init_device_mesh  # these take a second to import
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        c, kind = self.c, self.world.device.type
        if c.parallel == "hsdp":
            copies = self.world.size // self.ranks
            mesh = init_device_mesh(kind, (copies, self.ranks), mesh_dim_names=("replica", "shard"))
        else:
            mesh = init_device_mesh(kind, (self.ranks,), mesh_dim_names=("shard",))
        # the weights travel in the type in which they are used, gradients in float32
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, c.dtype), reduce_dtype=torch.float32
        )
        engine: Any = model
        for layer in engine.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        engine.sync_each_micro_batch = c.grad_sync == "micro-batch"

    def part(self, values: Tensor, weight: Tensor) -> Tensor:
        """This process's part of the values of a whole weight, without a word to the others."""
        return part_of(values, weight)


def part_of(values: Tensor, weight: Tensor) -> Tensor:
    """This process's part of the values of a whole weight, without a word to the others; all of them where it holds
    all of the weight."""
    split: Any = weight
    if not hasattr(split, "placements"):  # a DTensor, known without a second's import
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, split.device_mesh, split.placements, src_data_rank=None)


def parallelize(model: nn.Module, c: Config, world: World) -> nn.Module:
    """The model as this process trains it; one that was split stays as it is."""
    if world.size == 1 or is_split(c, world):
        return model
    # static_graph stays off: with accumulation under no_sync it can stop reducing, silently (pytorch#143580)
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **NO_BUFFERS,
    )


def bare(model: nn.Module) -> nn.Module:
    """The model without its wrapper, with the names that checkpoints use."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def waits_in_forward(model: nn.Module) -> bool:
    """Whether a forward pass is one of all processes, each of which brings a part of the weights."""
    return hasattr(model, "reshard")


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> weight that is trained, or this process's part of it, as the optimizer knows it. A tied head counts
    once."""
    if waits_in_forward(model):  # FSDP2 leaves the outermost weights whole behind an evaluation
        model.reshard()  # type: ignore[operator]
    return {name: weight for name, weight in bare(model).named_parameters() if weight.requires_grad}


def local(tensor: Tensor) -> Tensor:
    """The part of it that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def copies(model: nn.Module, world: World) -> int:
    """How many processes hold each number of a gradient."""
    mesh = getattr(next(iter(model.parameters())), "device_mesh", None)
    return world.size if mesh is None else world.size // mesh.size(mesh.ndim - 1)


def groups_of(model: nn.Module) -> list[Any]:
    """The process groups of the engine's own, beside that of all processes."""
    mesh = getattr(next(iter(model.parameters())), "device_mesh", None)
    return [] if mesh is None else mesh.get_all_groups()


def writers(c: Config, world: World) -> list[int]:
    """The ranks that write a checkpoint: those of one whole copy of the weights, or of the first node."""
    if not is_split(c, world):
        return list(range(world.local_size))
    return list(range(shard_ranks(c, world)))


def replicate(tensors: Sequence[Tensor]) -> None:
    """Send what the first copy holds to all others, in place, tensor by tensor."""
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None)
        part = local(tensor)
        group = dist.group.WORLD if mesh is None else mesh.get_group("replica")
        dist.broadcast(part, group_src=0, group=group)


@contextlib.contextmanager
def grad_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Backward passes inside average gradients over ranks if enabled, and only add them up here if not.

    The engine averages; train_step undoes that, so that the gradient is that of the summed loss. FSDP2 also
    adds up where GRAD_SYNC=micro-batch, over the ranks of a copy, so that no rank ever holds a whole gradient.
    """
    if waits_in_forward(model):
        engine: Any = model
        engine.set_requires_gradient_sync(enabled or engine.sync_each_micro_batch)
        engine.set_requires_all_reduce(enabled)
        engine.set_is_last_backward(enabled)
        yield
    elif enabled or not isinstance(model, DistributedDataParallel):
        yield
    else:
        with model.no_sync():
            yield


def settle(model: nn.Module, micro_batch: Sequence[torch.Tensor]) -> None:
    """Let what is decided at the first use be decided before the first step: buckets, and compiled code.

    DistributedDataParallel orders them anew after its first reduction, and with three ranks or more the
    order of summation follows. Without this, the first step after a resume would round differently from
    the same step in a run that was never stopped.
    """
    with grad_sync(model, enabled=True):
        loss, _ = model(*micro_batch)
        (loss * 0.0).backward()
