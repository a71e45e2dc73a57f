"""What a checkpoint costs training: a process of several, or alone, that trains, saves and goes on training.

    python -m bench.saving PARALLEL ROUNDS      (under torchrun for several processes)

Writes a JSON line: the seconds that each save kept training (stall_s), until it was durable (durable_s), and the
bytes. State: 26M float32 weights with AdamW's two moments, 300 MB.
"""

import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from doctor.gpu_probe import messages, worker
from settings import ROOT
from settings.config import Config
from train.checkpoint import checkpoint
from train.checkpoint.saver import Saver
from train.data.batch import Batch
from train.distributed import parallel
from train.distributed import world as distributed
from train.distributed.world import World
from train.model.model import build
from train.optim import Optimizer, build_optimizer, set_rate
from train.step import train_step


def main(how: str, rounds: int) -> None:
    """Steps, with a save behind every second."""
    c = (
        Config()
        .replace(
            vocab_size=8192,
            n_layer=8,
            n_head=8,
            n_embd=480,
            seq_len=64,
            batch_tokens=512,
            micro_batch_size=8,
            parallel=how,
            keep_last=2,
        )
        .derived()
    )
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled"
    )  # DCP, in one process
    world = distributed.join(c)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.size))
    folder = distributed.broadcast_object(
        tempfile.mkdtemp(dir=ROOT / "bench") if world.is_first else None
    )
    sharding = parallel.Sharding(c, world) if parallel.is_split(c, world) else None
    model = parallel.parallelize(build(c, world.device, sharding=sharding), c, world)
    optimizer = build_optimizer(parallel.unwrap(model), c)
    set_rate(optimizer, 1e-4, c)
    tokens = torch.randint(c.vocab_size, (8 // world.size, 65), device=world.device)
    batch = Batch([(tokens[:, :-1], tokens[:, 1:])], c.batch_tokens, range(len(tokens)))
    saver = Saver(Path(folder), c, world, checkpoint.needed_bytes(model))
    found = saves(rounds, model, optimizer, batch, saver, world)
    distributed.broadcast_object(None)
    if world.is_first:
        shutil.rmtree(folder)
        messages.say(processes=world.size, parallel=how, **found)
    sys.stdout.flush()
    os._exit(0)


def saves(
    rounds: int,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    saver: Saver,
    world: World,
) -> dict[str, Any]:
    """Bytes of a save, and the seconds of each."""
    stalls, durable, size = [], [], 0
    for step in range(1, 2 * rounds + 1):
        train_step(model, optimizer, batch, 1.0, world)
        if step % 2:
            continue
        if step == 2:
            saver.warm_up(model, optimizer)  # as training does behind its first step
            saver.wait()
        worker.synchronize()
        began = time.perf_counter()
        saver.start(step, model, optimizer, {"data": {"step": step}})
        stalls.append(time.perf_counter() - began)
        train_step(model, optimizer, batch, 1.0, world)  # beside it
        saver.wait()
        if ended := saver.poll():
            assert ended.problem is None, ended.problem
            durable.append(ended.seconds)
            size = ended.size
    return {"bytes": size, "stall_s": stalls, "durable_s": durable}


HEADER = ("| state MB | processes | training waits, s | durable after, s |", "|---|---|---|---|")


def row(found: dict) -> str:
    """A line of the table: the first save, which makes room for the copy, and the median (least-most) of the others."""

    def others(values: list[float]) -> str:
        rest = sorted(values[1:]) or values
        return f"{values[0]:.2f}, then {rest[len(rest) // 2]:.2f} ({rest[0]:.2f}-{rest[-1]:.2f})"

    return (
        f"| {found['bytes'] / 1e6:.0f} | {found['processes']} {found['parallel']} | {others(found['stall_s'])} | "
        f"{others(found['durable_s'])} |"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
