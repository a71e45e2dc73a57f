"""One site of a run whose steps are waits: `python -m bench.wan_lab.waiting ELEMENTS WAIT_S SLOWER NAME=VALUE...`, for
ratio.py.

The settings are those of a site under SYNC=diloco. Its model has as many numbers as it is told, in blocks and a table
as the xlarge preset has them, and each step takes as long as it is told; the sync between is that of train/diloco.
Pieces are smaller by SLOWER, since the link holds fewer bytes. For each line with a number of steps it takes these, and
says what they took.
"""

import sys
import time
from typing import Any, cast

import torch
from torch import nn

from doctor.gpu_probe.messages import say
from settings import load_config
from train.diloco import allreduce
from train.diloco.site import Site
from train.diloco.site_registry import own_address
from train.distributed.world import World
from train.optim import Optimizer

TABLE = 0.077  # of xlarge's numbers: the embedding, which is the head too


class Blocks(nn.Module):
    """Weights without a use, in the order and with the names of a model's."""

    def __init__(self, elements: int, blocks: int):
        super().__init__()
        table = round(TABLE * elements)
        sizes = [(elements - table) // blocks] * blocks
        sizes[-1] += elements - table - sum(sizes)
        self.embedding = nn.Parameter(torch.ones(table))
        self.layers = nn.ModuleList([Block(size) for size in sizes])


class Block(nn.Module):
    def __init__(self, elements: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements))


def steps(site: Site, made: int, count: int, wait_s: float) -> dict[str, Any]:
    """Take steps, and say: seconds; those of them that computing takes; what syncs took, and training waited."""
    began, stall_s = time.perf_counter(), 0.0
    exchange_s, committed, sites = [], [], []
    for step in range(made, made + count):
        time.sleep(wait_s)
        if site.is_due(step + 1):
            counts = site.sync(step + 1)
            if counts is not None:  # it has ended
                stall_s += site.waited_s
                exchange_s.append(site.seconds)
                committed.append(counts)
                sites.append(site.present)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "compute_s": count * wait_s,
        "stall_s": stall_s,
        "exchange_s": exchange_s,
        "network_s": site.gloo.seconds,
        "committed": all(committed),
        "sites": sites,
    }


def main(elements: int, wait_s: float, slower: float, settings: dict[str, str]) -> None:
    allreduce.PIECES = round(allreduce.PIECES / slower)
    c = load_config(settings)
    torch.set_num_threads(1)
    world = World(0, 0, 0, 1, torch.device("cpu"), "CPU", own_address(c.lighthouse))
    # no site is away here, and so no moments of its optimizer travel
    site = Site(
        c, world, Blocks(elements, c.n_layer), cast(Optimizer, None), lambda: False, 0, {}, {}
    )
    for _ in range(c.sync_fragments):
        site.sync(0)  # connections are made, and buffers
        if site.in_flight:
            site.sync(0)
    site.finish(0)
    say(ready=True)
    made = 0
    for line in sys.stdin:
        say(**steps(site, made, int(line), wait_s))
        made += int(line)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        float(sys.argv[2]),
        float(sys.argv[3]),
        dict(word.split("=", 1) for word in sys.argv[4:]),
    )
