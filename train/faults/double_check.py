"""Computes the losses of a refused step once more: a GPU that errs now and then comes to another result.

The data or the weights may be the reason for a loss that is not finite, or jumps. Then it is the same again, on the
same samples and weights. If it is not, the hardware is suspect (arXiv 2604.00726 finds silent errors so).
"""

import math
from typing import TYPE_CHECKING, Any

import torch

from train.data.batch import Batch
from train.distributed.world import from_all

if TYPE_CHECKING:
    from train.job import Job

TOLERANCE = 0.01  # relative: other kernels may serve a pass without gradients


def is_same(first: float, again: float) -> bool:
    """Return whether two losses are the same but for rounding."""
    if not (math.isfinite(first) and math.isfinite(again)):
        return math.isfinite(first) == math.isfinite(again)
    return math.isclose(first, again, rel_tol=TOLERANCE)


@torch.no_grad()
def find_suspects(job: "Job", batch: Batch, losses: tuple[float, ...]) -> list[dict[str, Any]]:
    """Compute a step's losses again, on all ranks together, with the weights that it had.

    losses: of this rank's micro-batches, summed, in nats, as the step computed them.

    Returns:
        The ranks that come to another result, as {rank, host, loss, again}.
    """
    again = [float(job.model(*micro_batch)[0]) for micro_batch in batch.micro_batches]
    differing = [pair for pair in zip(losses, again, strict=True) if not is_same(*pair)]
    suspects = []
    for rank, pairs in enumerate(from_all(differing)):
        if pairs:
            loss, recomputed = pairs[0]
            host = job.world.hosts[rank]
            suspects.append({"rank": rank, "host": host, "loss": loss, "again": recomputed})
    return suspects


def describe_suspects(suspects: list[dict[str, Any]], device_name: str) -> str:
    """Say which GPU or machine is suspect, and what to do."""
    parts = [
        f"rank {suspect['rank']} on {suspect['host']} computed {suspect['loss']:.6g} and then "
        f"{suspect['again']:.6g}"
        for suspect in suspects
    ]
    return (
        f"The same samples and weights gave two losses (summed, nats): {'; '.join(parts)}. That {device_name} or its "
        "machine may be faulty. Run make doctor PROBE=1 there."
    )
