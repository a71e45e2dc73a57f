"""One optimizer step, as the paper has it."""

import dataclasses
import math
import resource
import sys

import torch
from torch import Tensor, nn

from train.batch import Batch
from train.distributed import World, from_all, sum_over_ranks
from train.optim import Optimizer
from train.parallel import grad_sync


class NonFiniteStep(Exception):
    """The loss or the gradient is NaN or infinite; the weights were not touched."""

    def __init__(self, loss: float, grad_norm: float, samples: list[int]):
        super().__init__(f"loss={loss} grad_norm={grad_norm}")
        self.loss, self.grad_norm, self.samples = loss, grad_norm, samples


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """What the host reads in a step, the same on all ranks.

    loss in nats/token over the global batch; grad_norm before clipping; stop and save: whether any rank
    was told to stop, or the first wants a checkpoint; mem_gib: the largest rank's peak.
    """

    loss: float
    grad_norm: float
    stop: bool
    save: bool
    mem_gib: float


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch, grad_clip: float, world: World,
               stop: bool = False, save: bool = False) -> StepNumbers:
    """Forward, loss, backward, synchronise, clip, update. The learning rate is already set.

    The gradient is that of the summed loss over the step's global number of scored tokens.
    Raises NonFiniteStep, on all ranks alike and before the update.
    """
    losses = []
    for i, micro_batch in enumerate(batch.micro_batches):
        with grad_sync(model, enabled=i == len(batch.micro_batches) - 1):
            loss, _ = model(*micro_batch)                  # summed, in nats
            (loss * (world.size / batch.scored)).backward()  # the engine divides by its ranks: undone here
        losses.append(loss.detach())                       # no .item(): it would stall a GPU
    grad_norm = clip(model, grad_clip)

    numbers = read_numbers(torch.stack(losses).sum() / batch.scored, grad_norm, stop, save, world)
    if not (math.isfinite(numbers.loss) and math.isfinite(numbers.grad_norm)):
        raise NonFiniteStep(numbers.loss, numbers.grad_norm, culprits(losses, batch))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return numbers


def clip(model: nn.Module, largest: float) -> Tensor:
    """Scale the gradient to norm `largest` if it is longer; 0: never. Returns the norm it had, on the device."""
    return nn.utils.clip_grad_norm_(model.parameters(), largest if largest > 0 else math.inf)


def read_numbers(loss_part: Tensor, grad_norm: Tensor, stop: bool, save: bool, world: World) -> StepNumbers:
    """The step's one all-reduce and its one read by the host, before the update.

    Each rank adds its part of the loss and its wish to stop; the first its wish to save; memory has a
    place for each rank, so that the sum holds the maximum.
    """
    values = torch.zeros(4 + world.size, dtype=torch.float64)
    values[2], values[3] = float(stop), float(save and world.is_first)
    values[4 + world.rank] = peak_memory_gib(world.device)
    values = values.to(world.device, non_blocking=True)
    values[0], values[1] = loss_part, grad_norm / world.size
    loss, norm, stops, saves, *memory = sum_over_ranks(values).tolist()
    return StepNumbers(loss, norm, stops > 0, saves > 0, max(memory))


def culprits(losses: list[Tensor], batch: Batch) -> list[int]:
    """Samples in the micro-batches whose loss is not finite, of all ranks; if none is, all of the step."""
    mine: list[int] = []
    first = batch.samples.start
    for loss, (tokens, *_) in zip(losses, batch.micro_batches, strict=True):
        if not math.isfinite(loss.item()):
            mine += range(first, first + len(tokens))
        first += len(tokens)
    named = [sample for part in from_all(mine) for sample in part]
    return named or [sample for part in from_all(list(batch.samples)) for sample in part]


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held: allocated on a GPU, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
