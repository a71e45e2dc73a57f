"""Scores batches in shares: each rank adds up over its own, and the sums of all are added at the end.

What goes wrong costs the number, never the run, and all ranks learn of it at the end. Where ranks
wait for each other in each forward pass (FSDP2), a rank that stopped alone would leave the others
waiting: there all ranks agree before each batch whether to go on. Time is looked at between batches.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hardware.out_of_memory import is_out_of_memory
from settings.config import Config
from train.distributed.parallel import is_fsdp
from train.distributed.world import World, all_gather_object, sum_over_ranks


class ScoringFailed(Exception):
    """There is no number. The message says why, and is the same on all ranks."""


@torch.no_grad()
def add_up(
    model: nn.Module,
    config: Config,
    world: World,
    batches: Iterator[Any],
    score: Callable[[Any, Tensor], None],
    width: int,
    *,
    advice: str,
    empty: Any = None,
    interrupted: Callable[[], bool] = lambda: False,
    limit_s: float = math.inf,
    progress: Callable[[str], None] = lambda what: None,
) -> list[float] | None:
    """Score this rank's batches, and add up over all ranks. All ranks call it.

    Args:
        batches: what this rank scores. Each is read when it is asked for, which may fail.
        score: adds what it finds in a batch to the sums (float64, on the device). Raises
            ScoringFailed, after the forward pass, if that cannot be used.
        width: how many sums there are.
        advice: what to do if it took longer than limit_s.
        empty: a batch that adds nothing. If ranks wait for each other in a forward pass, one that
            has scored all its batches scores this one for as long as others have more.
        interrupted: whether this rank was told to stop.
        limit_s: seconds for all of it. The batch in which they end is scored to its end.
        progress: called with "batch" at each batch, and with "others" before they are waited for.

    Returns:
        The sums over all ranks, or None if any rank was interrupted.

    Raises ScoringFailed, on all ranks, if one failed or needed longer than limit_s.
    """
    is_split = is_fsdp(model)
    sums = torch.zeros(width, dtype=torch.float64, device=world.device)
    deadline = time.monotonic() + limit_s
    problem = ""
    while True:
        batch = None
        try:
            batch = next(batches, None)
        except Exception as error:
            problem = problem or describe(error, config, world)
        if batch is not None and time.monotonic() > deadline:
            too_long = f"it took longer than EVAL_MINUTES={config.eval_minutes:g}; {advice}"
            problem = problem or too_long
        flags = [batch is not None, interrupted(), bool(problem)]
        if is_split:  # all ranks decide alike: none ends while another has a batch
            flags = sum_over_ranks(torch.tensor(flags, dtype=torch.float64)).tolist()
        has_batch, is_interrupted, has_failed = flags
        if is_interrupted or has_failed or not has_batch:
            break
        progress("batch")
        try:
            score(empty if batch is None else batch, sums)
        except ScoringFailed as error:
            problem = str(error)
        except Exception as error:
            if is_split:  # in a forward pass, in which the others wait: they cannot be told
                raise
            problem = describe(error, config, world)
    progress("others")
    ends = all_gather_object((problem, is_interrupted))
    for rank, (problem, _) in enumerate(ends):
        if problem:
            raise ScoringFailed(f"rank {rank}: {problem}")
    if any(is_interrupted for _, is_interrupted in ends):
        return None
    return sum_over_ranks(sums).tolist()


def describe(error: Exception, config: Config, world: World) -> str:
    """Say what went wrong, and what to change."""
    text = f"{type(error).__name__}: {error}"
    micro_batch = config.micro_batch(world.size)
    if is_out_of_memory(error) and micro_batch > 1:
        text += f"; set MICRO_BATCH_SIZE={micro_batch // 2}"
    return text
