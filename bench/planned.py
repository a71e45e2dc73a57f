"""What `make plan` predicts beside what a process measures: parameters, memory, and the time of a step.

    python -m bench.planned PROCESSES SHAPE SETTINGS      (SETTINGS as JSON; under torchrun for several processes)

The process takes a few steps of two micro-batches with the functions that training has, and
writes a JSON line. Memory is the largest rank's: on CPU its resident peak, on a GPU what torch's allocator gave out at
the most, beside what it had reserved for that. On CPU step times are predicted from the matrix products that the same
processes reach right behind, since a machine's speed drifts.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from hardware.gpu_specs import find_gpu
from hardware.model_size import parameters
from plan.fleet import Fleet
from plan.measured import Probe
from plan.run import pretraining_memory, run_of
from plan.speed import speed_of
from settings import ROOT
from settings.config import Config

MIB = 2**20
STEPS = 3  # behind the first
PRODUCTS_S = 0.4  # for the machine's own products

Settings = dict[str, Any]


def shape(**settings: Any) -> Settings:
    return settings


SHAPES: dict[str, Settings] = {
    "tiny": shape(vocab_size=512, n_layer=2, n_embd=64, n_head=2, seq_len=64, micro_batch_size=4),
    "s4k": shape(vocab_size=4096, n_layer=6, n_embd=384, n_head=6, seq_len=256, micro_batch_size=8),
    "s50k": shape(
        vocab_size=50304, n_layer=6, n_embd=384, n_head=6, seq_len=256, micro_batch_size=4
    ),
    "wide": shape(
        vocab_size=8192,
        n_layer=4,
        n_embd=768,
        n_head=12,
        n_kv_head=4,
        qk_norm=True,
        tie_embeddings=False,
        seq_len=256,
        micro_batch_size=4,
    ),
    "gpt2": shape(
        vocab_size=50304, n_layer=12, n_embd=768, n_head=12, seq_len=1024, micro_batch_size=16
    ),
    "d16": shape(
        vocab_size=65536,
        n_layer=16,
        n_embd=1024,
        n_head=8,
        qk_norm=True,
        tie_embeddings=False,
        seq_len=2048,
        micro_batch_size=8,
        optimizer="muon",
    ),
}


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    processes: int
    settings: Settings

    @property
    def config(self) -> Config:
        c = Config().replace(save_every=0, **self.settings)
        return c.replace(batch_tokens=2 * c.micro_batch_size * c.seq_len * self.processes).derived()

    @property
    def text(self) -> str:
        more = [
            f"{name}={value}".lower()
            for name, value in self.settings.items()
            if name in ("activation_checkpointing", "parallel", "optimizer")
        ]
        return ", ".join(
            [
                self.name,
                self.settings["dtype"],
                "compiled" if self.settings["compile"] == "1" else "eager",
                *more,
                *([f"{self.processes} processes"] if self.processes > 1 else []),
            ]
        )


def row_of(shape: str, dtype: str, mode: str, processes: int = 1, **more: Any) -> Row:
    return Row(
        shape,
        processes,
        SHAPES[shape] | {"dtype": dtype, "compile": "1" if mode == "compiled" else "0"} | more,
    )


def rows(gpus: int) -> list[Row]:
    """What is run on a machine with so many GPUs."""
    if gpus:
        found = [
            row_of("gpt2", "bfloat16", "eager"),
            row_of("gpt2", "bfloat16", "compiled"),
            row_of("gpt2", "float32", "eager"),
            *(
                row_of("gpt2", "bfloat16", "compiled", activation_checkpointing=how)
                for how in ("selective", "full")
            ),
            row_of("d16", "bfloat16", "eager"),
            row_of("d16", "bfloat16", "compiled"),
        ]
        several = [
            row_of("gpt2", "bfloat16", "compiled", gpus, parallel=how) for how in ("ddp", "fsdp")
        ]
        return found + (several if gpus > 1 else [])
    return [
        row_of("tiny", "float32", "eager"),  # all but Python and torch in it is small
        *(
            row_of("s4k", dtype, mode)
            for dtype in ("float32", "bfloat16")
            for mode in ("eager", "compiled")
        ),
        row_of("s4k", "bfloat16", "eager", optimizer="muon"),
        row_of("s4k", "float32", "eager", activation_checkpointing="full"),
        *(row_of("s50k", dtype, "eager") for dtype in ("float32", "bfloat16")),
        row_of("wide", "bfloat16", "eager", activation_checkpointing="selective"),
        row_of("s4k", "bfloat16", "eager", 2, parallel="ddp", micro_batch_size=4),
        row_of("s4k", "float32", "eager", 2, parallel="fsdp", micro_batch_size=4),
    ]


# ---- The process


def main(row: Row) -> None:
    """Take the steps, and say what they took."""
    import torch

    from doctor.gpu_probe import messages, worker
    from train.data.batch import Batch
    from train.distributed import parallel
    from train.distributed import world as distributed
    from train.model import attention, compilation
    from train.model.model import build
    from train.optim import build_optimizer, set_rate
    from train.step import dry_run, peak_memory_gib, train_step

    c = row.config
    world = distributed.join(c)
    if world.size > 1 and world.device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.size))
    sharding = parallel.Sharding(c, world) if parallel.is_split(c, world) else None
    bare = build(c, world.device, attention.choose(c, world.device), sharding)
    if c.compile == "1":
        compilation.compile_model(bare)
    model = parallel.parallelize(bare, c, world)
    optimizer = build_optimizer(bare, c)
    set_rate(optimizer, 1e-4, c)
    tokens = torch.randint(
        c.vocab_size, (2 * c.micro_batch_size, c.seq_len + 1), device=world.device
    )
    parts = [(part[:, :-1], part[:, 1:]) for part in tokens.split(c.micro_batch_size)]
    batch, seconds = Batch(parts, c.batch_tokens, range(2 * c.micro_batch_size)), []
    dry_run(model, optimizer, parts[0])
    for _ in range(1 + STEPS):
        worker.synchronize()
        began = time.perf_counter()
        train_step(model, optimizer, batch, 1.0, world)
        worker.synchronize()
        seconds.append(time.perf_counter() - began)
    on_gpu = world.device.type == "cuda"
    peak = (
        peak_memory_gib(world.device) * 1024,
        torch.cuda.max_memory_reserved() / MIB if on_gpu else None,
    )
    count = sum(
        weight.numel() for weight in bare.parameters()
    )  # of a split model too, whose tensors know their whole
    found = distributed.all_gather_object((*peak, products_tflops(c.dtype, world.device)))
    if world.is_first:
        taken = seconds[1:]
        messages.say(
            parameters=count,
            step_s=statistics.median(taken),
            spread_s=[min(taken), max(taken)],
            peak_mib=max(mine[0] for mine in found),
            reserved_mib=max(mine[1] or 0.0 for mine in found) or None,
            device=world.device_name,
            products_tflops=sum(mine[2] for mine in found),
        )
    sys.stdout.flush()
    os._exit(0)


def products_tflops(dtype: str, device: Any) -> float:
    """What matrix products of that type reach here and now, with all processes at it."""
    from bench import ceiling
    from doctor.gpu_probe import worker

    step = ceiling.set_up(None, dtype, False)  # type: ignore[arg-type]  # the same for every shape
    step()
    worker.synchronize()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < PRODUCTS_S:
        step()
        worker.synchronize()
        count += 1
    return count * ceiling.flops(device.type) / (time.perf_counter() - began) / 1e12


# ---- The table


def measure(gpus: int) -> Iterator[dict[str, Any]]:
    """What each row's processes say, beside what was predicted."""
    yield from map(measured, rows(gpus))


def measured(row: Row) -> dict[str, Any]:
    several = [
        "train.torchrun",
        f"--nproc-per-node={row.processes}",
        "-m",
    ] * (row.processes > 1)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *several,
            "bench.planned",
            str(row.processes),
            row.name,
            json.dumps(row.settings),
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    c, on_cpu = row.config, found["device"] == "CPU"
    expected = pretraining_memory(c, row.processes, row.processes, on_cpu)
    return found | {
        "row": row.text,
        "predicted": {
            "parameters": parameters(c).total,
            "mib": expected.total / MIB,
            "step_s": predicted_step_s(row, found),
            "parts_mib": {name: size / MIB for name, size in expected.parts.items()},
            "moment": expected.moment,
        },
    }


def predicted_step_s(row: Row, found: dict[str, Any]) -> float | None:
    """By plan.speed, with the matrix products that were measured; None where it knows none."""
    card = find_gpu(found["device"])
    if found["device"] != "CPU" and card is None:
        return None
    fleet = Fleet(((row.processes, card),) if card else (), row.processes)
    probe = Probe(found["device"], time.time(), "", {row.config.dtype: found["products_tflops"]})
    return speed_of(run_of(row.config, fleet), probe).step_s


HEADER = (
    "| predicted, measured, ratio | parameters | memory, MiB | a step, s (least-most) |",
    "|---|---|---|---|",
)


def line(found: dict[str, Any]) -> str:
    """A line of the table; a ratio is predicted over measured."""
    predicted = found["predicted"]
    count, step_s = predicted["parameters"], predicted["step_s"]
    same = "=" if count == found["parameters"] else "is not"
    took = "{:.3f} ({:.3f}-{:.3f})".format(found["step_s"], *found["spread_s"])
    time_ = (
        f"n/a, {took}"
        if step_s is None
        else f"{step_s:.3f}, {took}, {step_s / found['step_s']:.2f}"
    )
    return (
        f"| {found['row']} | {count:,} {same} {found['parameters']:,} | {predicted['mib']:.0f}, "
        f"{found['peak_mib']:.0f}, {predicted['mib'] / found['peak_mib']:.2f} | {time_} |"
    )


if __name__ == "__main__":
    main(Row(sys.argv[2], int(sys.argv[1]), json.loads(sys.argv[3])))
