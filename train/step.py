"""One optimizer step: the gradient of the global batch, clipping, the update."""

import contextlib
import dataclasses
import math
import resource
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train.data.batch import Batch
from train.distributed.fsdp_waits import Waits, seconds_of, without_waits
from train.distributed.parallel import (
    clear_gradients,
    copies,
    grad_sync,
    local,
    warm_up_ddp,
)
from train.distributed.world import World, all_gather_object, sum_over_ranks
from train.optim import Optimizer

# What a rank may ask of all in a step: to stop after it, to save (only the first), to wait for data.
REQUESTS = ("stop", "save", "data")


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """What the host reads in a step, the same on all ranks.

    loss in nats/token over the global batch; grad_norm before clipping; mem_gib: the largest rank's peak; requests:
    those of REQUESTS that any rank has; compute_s: seconds that each rank worked up to its last backward pass.
    skipped: why the weights were not updated, and samples: those that may be the cause.
    """

    loss: float
    grad_norm: float
    mem_gib: float
    requests: frozenset[str] = frozenset()
    compute_s: tuple[float, ...] = ()
    skipped: str | None = None
    samples: tuple[int, ...] = ()


def not_finite(loss: float, grad_norm: float) -> str | None:
    """The least that a step must fulfil: why it is refused, or None."""
    return None if math.isfinite(loss) and math.isfinite(grad_norm) else "nonfinite"


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    grad_clip: float,
    world: World,
    requests: Collection[str] = (),
    clock: "HostClock | None" = None,
    check_step: Callable[[float, float], str | None] = not_finite,
) -> StepNumbers:
    """Forward, loss, backward, synchronise, clip, update. The learning rate is already set.

    The gradient is that of the summed loss over the step's global number of scored tokens. check_step(loss, grad_norm)
    says why the update must not be made, or None; it must say the same on all ranks. requests: of REQUESTS, by this
    rank.
    """
    losses, clock = [], clock or HostClock()
    for i, micro_batch in enumerate(batch.micro_batches):
        last = i == len(batch.micro_batches) - 1
        with grad_sync(model, enabled=last):
            loss, _ = model(*micro_batch)  # summed, in nats
            if last:
                clock.mark_compute_end()
            # the engine divides by its ranks: undone here
            (loss * (world.size / batch.scored)).backward()
        losses.append(loss.detach())  # no .item(): it would stall a GPU
    gradients = [local(weight.grad) for weight in model.parameters() if weight.grad is not None]

    numbers = read_numbers(
        torch.stack(losses).sum() / batch.scored,
        nn.utils.get_total_norm(gradients),
        copies(model, world),
        requests,
        clock,
        world,
    )
    if reason := check_step(numbers.loss, numbers.grad_norm):
        samples = tuple(bad_samples(torch.stack(losses).tolist(), batch))
        numbers = dataclasses.replace(numbers, skipped=reason, samples=samples)
    else:
        clip(gradients, numbers.grad_norm, grad_clip)
        optimizer.step()
    clear_gradients(model)
    return numbers


def clip(gradients: list[Tensor], norm: float, largest: float) -> None:
    """Scale gradients whose norm, over all ranks, is longer than `largest` down to that; 0: never."""
    if 0 < largest < norm:
        torch._foreach_mul_(gradients, largest / (norm + 1e-6))


def read_numbers(
    loss_part: Tensor,
    norm_here: Tensor,
    held_by: int,
    requests: Collection[str],
    clock: "HostClock",
    world: World,
) -> StepNumbers:
    """The step's one all-reduce and its one read by the host, before the update.

    Each rank adds its part of the loss, the square of its gradients' norm, over the ranks that hold the same ones,
    and its requests. Memory and times have a place for each rank.
    """
    asked = slice(2, 2 + len(REQUESTS))
    memory = slice(asked.stop, asked.stop + world.size)
    own = slice(memory.stop, memory.stop + world.size)
    waited = slice(own.stop, own.stop + world.size)
    values = torch.zeros(waited.stop, dtype=torch.float64)
    for place, request in enumerate(REQUESTS, asked.start):
        values[place] = request in requests and (request != "save" or world.is_first)
    values[memory.start + world.rank] = peak_memory_gib(world.device)
    values[own.start + world.rank] = clock.compute_s
    values[waited.start + world.rank] = clock.waited_s
    values = values.to(world.device, non_blocking=True)
    values[0], values[1] = loss_part, norm_here.double().square() / held_by
    numbers = sum_over_ranks(values).tolist()
    loss, square = numbers[:2]
    return StepNumbers(
        loss,
        math.sqrt(square) if square >= 0 else math.nan,
        max(numbers[memory]),
        frozenset(name for name, count in zip(REQUESTS, numbers[asked], strict=True) if count),
        without_waits(numbers[own], numbers[waited], clock.waits.ranks),
    )


class HostClock:
    """How long a rank works in a step before it waits for others in backward: a slow one is found by it.

    Attributes:
        compute_s: seconds from the start of a step to the end of its last forward pass.
        waited_s: of these, in collectives of FSDP2.
    """

    def __init__(self, waits: Waits | None = None) -> None:
        self.waits = waits or Waits(torch.device("cpu"))
        self.compute_s = 0.0
        self.waited_s = 0.0
        self.began = time.perf_counter()

    def start(self) -> None:
        """A step begins, with the wait for its batch."""
        self.waits.start()
        self.began = time.perf_counter()

    def mark_compute_end(self) -> None:
        """The last forward pass has ended."""
        self.compute_s = time.perf_counter() - self.began
        self.waited_s = self.waits.seconds


class GpuClock(HostClock):
    """The same where the host is ahead of its GPU: it tells of the step before, once that has been read."""

    def __init__(self, waits: Waits) -> None:
        super().__init__(waits)
        self.host_s = 0.0
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        if self.host_s:
            self.compute_s = max(self.host_s, self.begin.elapsed_time(self.end) / 1000)
            self.waited_s = seconds_of(self.spans)
        self.begin.record()
        super().start()

    def mark_compute_end(self) -> None:
        self.host_s = time.perf_counter() - self.began
        self.spans = list(self.waits.spans)
        self.end.record()


def clock_of(model: Any, device: torch.device) -> HostClock:
    """Return the clock of a model's steps on this device."""
    waits = getattr(model, "waits", None) or Waits(device)
    if device.type == "cuda":
        return GpuClock(waits)
    return HostClock(waits)


def bad_samples(losses: Sequence[float], batch: Batch) -> list[int]:
    """Samples in the micro-batches whose loss is not finite, of all ranks; if none is, all of the step."""
    mine: list[int] = []
    first = batch.samples.start
    for loss, (tokens, *_) in zip(losses, batch.micro_batches, strict=True):
        if not math.isfinite(loss):
            mine += range(first, first + len(tokens))
        first += len(tokens)
    named = [sample for part in all_gather_object(mine) for sample in part]
    return named or [sample for part in all_gather_object(list(batch.samples)) for sample in part]


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held: allocated on a GPU, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux, whose ru_maxrss also counts what the process was before it became this program
    with contextlib.suppress(OSError, IndexError):
        _, _, peak = Path("/proc/self/status").read_text().partition("VmHWM:")
        return int(peak.split()[0]) / 2**20  # KiB
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def dry_run(model: nn.Module, optimizer: Optimizer, micro_batch: Sequence[Tensor]) -> None:
    """A step's forward, backward and room for moments at full shape, which changes nothing.

    What is decided at the first use is decided here (parallel.warm_up_ddp), and memory that does not suffice shows.
    """
    warm_up_ddp(model, micro_batch)
    room = [
        torch.empty_like(local(weight))
        for weight in model.parameters()
        for _ in range(2)
        if weight.requires_grad and not optimizer.moments(weight)
    ]
    del room
    clear_gradients(model)
