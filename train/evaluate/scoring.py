"""Scores batches in shares: each rank adds up over its own, and one all-reduce ends it.

What goes wrong costs the number, never the run, and all ranks learn of it in that all-reduce. Where
ranks wait for each other in each forward pass (FSDP2), a rank that stopped alone would leave the
others waiting: there all ranks agree before each batch whether to go on.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hardware.out_of_memory import is_out_of_memory
from settings.config import Config
from train.distributed.parallel import is_fsdp
from train.distributed.world import World, all_gather_object, sum_over_ranks


class ScoringFailed(Exception):
    """There is no number. The message says why, and is the same on all ranks."""


class OutOfTime(BaseException):
    """The time is over. Not an Exception, so that nothing in between swallows it."""


@torch.no_grad()
def add_up(
    model: nn.Module,
    config: Config,
    world: World,
    batches: Iterator[Any],
    score: Callable[[Any, Tensor], str],
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
        score: adds what it finds in a batch to the sums (float64, on the device). Returns what is
            wrong with it, or "".
        width: how many sums there are.
        advice: what to do if it took longer than limit_s.
        empty: a batch that adds nothing. If ranks wait for each other in a forward pass, one that
            has scored all its batches scores this one for as long as others have more.
        interrupted: whether this rank was told to stop.
        limit_s: seconds for all of it.
        progress: called with "batch" at each batch, and with "others" before they are waited for.

    Returns:
        The sums over all ranks, or None if any rank was interrupted.

    Raises ScoringFailed, on all ranks, if one failed or needed longer than limit_s.
    """
    waits = is_fsdp(model)
    too_long = f"it took longer than EVAL_MINUTES={config.eval_minutes:g}; {advice}"
    micro_batch = config.micro_batch(world.size)
    sums = torch.zeros(width, dtype=torch.float64, device=world.device)
    deadline = time.monotonic() + limit_s
    problem = ""
    while True:
        batch = None
        try:
            with alarm(deadline):
                batch = next(batches, None)
        except (Exception, OutOfTime) as error:
            problem = problem or describe(error, too_long, micro_batch)
        is_interrupted = interrupted()
        if batch is not None and not problem and time.monotonic() > deadline:
            problem = too_long
        flags = [batch is not None, is_interrupted, bool(problem)]
        if waits:  # all ranks decide alike: none ends while another has a batch
            flags = sum_over_ranks(torch.tensor(flags, dtype=torch.float64)).tolist()
        has_batch, must_stop, has_failed = flags
        if must_stop or has_failed or not has_batch:
            break
        progress("batch")
        try:
            with alarm(math.inf if waits else deadline):
                problem = score(empty if batch is None else batch, sums)
        except (Exception, OutOfTime) as error:
            if waits:  # in a forward pass, in which the others wait: they cannot be told
                raise
            problem = describe(error, too_long, micro_batch)
    progress("others")
    ends = torch.tensor([is_interrupted, bool(problem)], dtype=torch.float64).to(sums.device)
    *values, interruptions, failures = sum_over_ranks(torch.cat([sums, ends])).tolist()
    if failures:
        texts = [
            f"rank {rank}: {text}" for rank, text in enumerate(all_gather_object(problem)) if text
        ]
        raise ScoringFailed(texts[0])
    return None if interruptions else values


def describe(error: BaseException, too_long: str, micro_batch: int) -> str:
    """Say what went wrong, and what to change."""
    if isinstance(error, OutOfTime):
        return too_long
    text = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error) and micro_batch > 1:
        text += f"; set MICRO_BATCH_SIZE={micro_batch // 2}"
    return text


@contextlib.contextmanager
def alarm(deadline: float) -> Iterator[None]:
    """Raise OutOfTime inside after a time of time.monotonic(), also while Python sleeps or reads.

    In the main thread only.
    """
    if math.isinf(deadline) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    try:
        left_s = deadline - time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-6))  # 0 would switch it off
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
