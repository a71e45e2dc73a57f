"""How long a process waits for others in the collectives of FSDP2, so that a slow one can be named.

All processes of a copy meet in each collective, so all take the same time for a forward pass, however slow one of them
is. But the slow one comes last, and a collective takes it only the time of the transfer: the others wait as well.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Waits:
    """Times this process's collectives.

    Args:
        ranks: how many processes meet in a collective.
    """

    def __init__(self, device: torch.device, ranks: int = 1):
        self.is_gpu = device.type == "cuda"
        self.ranks = ranks
        self.seconds = 0.0
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Forget what was timed."""
        self.seconds = 0.0
        self.spans = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Time a collective: on a GPU on the stream that it is queued on."""
        if not self.is_gpu:
            began = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - began
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.spans.append((begin, end))

    def watch(self, module: Any) -> None:
        """Have a module that was split with fully_shard use collectives that are timed."""
        module.set_custom_all_gather(AllGather(self))
        module.set_custom_reduce_scatter(ReduceScatter(self))


def seconds_of(spans: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    """Return seconds in spans that the GPU has come to the end of."""
    return sum(begin.elapsed_time(end) for begin, end in spans) / 1000


def without_waits(
    seconds: Sequence[float], waited_s: Sequence[float], ranks: int
) -> tuple[float, ...]:
    """Return how long each rank worked.

    Args:
        seconds: of each rank, collectives included.
        waited_s: of each rank, in collectives. Those `ranks` that meet there transfer the same, so the
            shortest of their times is that of the transfer, and what another took longer it waited.
    """
    worked = []
    for first in range(0, len(seconds), ranks):
        group = slice(first, first + ranks)
        transfer_s = min(waited_s[group])
        for total, in_collectives in zip(seconds[group], waited_s[group], strict=True):
            worked.append(total - (in_collectives - transfer_s))
    return tuple(worked)


class Collective:
    """What FSDP2 asks of a collective that takes the place of its own."""

    def __init__(self, waits: Waits):
        self.waits = waits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Collective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self.waits.timed():
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class ReduceScatter(Collective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self.waits.timed():
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
