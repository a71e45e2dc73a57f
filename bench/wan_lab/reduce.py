"""One site's part in all-reduces of a tensor: `python -m bench.wan_lab.reduce KIND TYPE ELEMENTS RANK SITES STREAMS WAIT_S`.

KIND is gloo, one group as torch makes it, or striped, the engine's own over several connections. For each line of its
input it waits as long as a step would compute, does one all-reduce, and says the seconds of both together.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.wan_lab.network import address_of
from doctor.gpu_probe.messages import say

PORT = 29600


def group(
    kind: str, dtype: str, rank: int, sites: int, streams: int
) -> Callable[[torch.Tensor], Any]:
    """A function that sums a tensor over all sites, in place."""
    store = dist.TCPStore(address_of(0), PORT, sites, is_master=rank == 0)
    if kind == "gloo":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=sites)
        return dist.all_reduce
    from train.diloco.allreduce import StripedGloo

    engine = StripedGloo(address_of(rank), streams, getattr(torch, dtype))
    engine.configure(f"{address_of(0)}:{PORT}/lab", f"site_{rank}", rank, sites)
    options = dist.AllreduceOptions()

    def reduce(values: torch.Tensor) -> None:
        engine.allreduce([values], options).wait()

    reduce.store = store  # type: ignore[attr-defined]  # it must live as long as the group
    return reduce


def main(
    kind: str, dtype: str, elements: int, rank: int, sites: int, streams: int, wait_s: float
) -> None:
    reduce = group(kind, dtype, rank, sites, streams)
    # the engine takes float32, and TYPE is that on the wire; gloo sends what it is given
    values = torch.ones(
        elements, dtype=torch.float32 if kind == "striped" else getattr(torch, dtype)
    )
    reduce(torch.ones(sites * 64, dtype=values.dtype))  # connections are made
    say(ready=True)
    for _ in sys.stdin:
        values.fill_(rank + 1)
        began = time.perf_counter()
        time.sleep(wait_s)
        reduce(values)
        seconds = time.perf_counter() - began
        expected = sites * (sites + 1) / 2
        wrong = int((values.float() != expected).sum())
        if wrong:
            raise SystemExit(
                f"{wrong} of {elements} sums are wrong, for example {values[values != expected][0]} "
                f"instead of {expected}"
            )
        say(seconds=seconds)


if __name__ == "__main__":
    (
        _,
        given_kind,
        given_type,
        given_elements,
        given_rank,
        given_sites,
        given_streams,
        given_wait_s,
    ) = sys.argv
    main(
        given_kind,
        given_type,
        int(given_elements),
        int(given_rank),
        int(given_sites),
        int(given_streams),
        float(given_wait_s),
    )
