"""A whole run beside its bare step: what launcher, data, optimizer, log and record leave of a step's speed.

    python -m bench.whole_run SHAPE ROUNDS     writes a JSON line
    python -m bench.whole_run SHAPE bare       the bare step and the machine's ceiling, in a process of its own

    round: bare steps and the ceiling in turn -> scripts/launch.sh trains the same shape on shards that are made here,
           with PROFILE=1 -> its record, and the trace of its profiled steps

A step has as many micro-batches as the shape says. Speed is that between the lines of the record, behind the profiled
steps, so that all that is done between steps is in it; MFU is what the record says. No evaluation or checkpoint falls
into these steps: waste.py has those. Ids are random, of a tokenizer of 512 entries: products have the same size.
"""

import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import ceiling, ours, waste
from doctor.gpu_probe import messages, worker
from doctor.gpu_probe.foreign_load import Foreign, worst
from doctor.gpu_probe.shapes import SHAPES, Shape
from record import metrics
from record.run_paths import RunPaths
from settings import ROOT
from settings.config import Config
from settings.declare import format_value
from settings.resolve import NO_TARGET
from train.data import prepare, tokenizer
from train.data.data_paths import SHARD_TOKENS
from train.data.manifest import Manifest, Seal
from train.data.shards import write_shard
from train.data.sources.pin import pin
from train.hooks.profiler import PROFILE_STEPS, SETTLE

PREFIX = "run-"  # in BENCH_SHAPES, before a shape
SOURCE, ENTRIES = "python-stdlib", 512
MEASURED_S = 20.0  # so long the steps behind those take
LEAST, MOST = 8, 100  # of them
TURN_S = 2.0  # for bare steps, and as much for the ceiling
TOLD = (
    "vocab_size",
    "n_layer",
    "n_head",
    "n_embd",
    "seq_len",
    "batch_tokens",
    "micro_batch_size",
    "dtype",
    "tie_embeddings",
    "grad_clip",
    "optimizer",
)  # settings in which a run of the shape may differ from a preset

Event = dict[str, Any]
MARK = "user_annotation"  # category of marks on the host
# Names of operators and of kernels: cuBLAS, CUTLASS, flash-attn, cuDNN, Triton. A batched product is one of attention:
# this trainer's model has no other.
ATTENTION = re.compile(
    r"^aten::(bmm|baddbmm|_?softmax(_backward_data)?)$|scaled_dot_product|fused\w*softmax"
    r"|flash|fmha|sdpa|attention"
)
MATMUL = re.compile(
    r"^aten::(mm|addmm_?|linear|_scaled_mm)$|gemm|gemv|nvjet|cublas|cutlass|xmma|split[kK]"
    r"|triton_tem\w*_(add)?mm"
)

HEADER_ROWS = (
    "| whole run | tokens/s | MFU by its record | of the matmul ceiling, % | of its bare step's tokens/s, "
    "% | waits for data, % of a step | time of a profiled step, % | foreign load, % |",
    "|---" * 8 + "|",
)


# ---------------------------------------------------------------------------------------------------
# The bare step
# ---------------------------------------------------------------------------------------------------


def bare_step(shape: Shape) -> dict[str, float]:
    """Seconds of a step with nothing round it, and FLOP/s of the ceiling: medians of turns."""
    trainer = waste.Trainer(shape, "adamw", shape.micro_batches)
    product = ceiling.set_up(shape, trainer.c.dtype, compiled=False)
    for work in (trainer.step, trainer.step, product):
        waste.seconds(work)
    steps, products, began = list[float](), list[float](), time.perf_counter()
    while len(steps) < 3 or time.perf_counter() - began < 2 * TURN_S:
        steps.append(waste.seconds(trainer.step))
        turn = time.perf_counter()
        while time.perf_counter() - turn < steps[-1]:
            products.append(waste.seconds(product))
    return {
        "step_s": statistics.median(steps),
        "ceiling_flops_s": ceiling.flops(worker.device().type) / statistics.median(products),
    }


# ---------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------


def settings_of(shape: Shape, folder: Path, steps: int) -> dict[str, str]:
    """What a run of the shape is told. Its data are made in `folder`, as many as it needs."""
    c = ours.config(shape, "bfloat16" if torch.cuda.is_available() else "float32").replace(
        batch_tokens=shape.micro_batches * shape.tokens,
    )
    (folder / "empty.env").touch()
    return (
        make_data(folder, (steps + 1) * c.batch_tokens, 2 * shape.tokens)
        | {name.upper(): format_value(getattr(c, name)) for name in TOLD}
        | {
            "PRESET": "tiny",
            "ENV_FILE": str(folder / "empty.env"),
            "RUNS_DIR": str(folder),
            "RUN_NAME": "run",
            "NPROC": "1",
            "NODES": "1",
            "MAX_RESTARTS": "0",
            "DATA_MIX": f"{SOURCE}:1",
            "WARMUP_TOKENS": "0",
            "LEARNING_RATE": "1e-5",  # what is random is not to be learnt, and must not look like a spike
            "TRAIN_TOKENS": str(steps * c.batch_tokens),
            "MAX_STEPS": str(steps),
            "SAVE_EVERY": "0",
            "EVAL_EVERY": "0",
            "EVAL_TOKENS": str(shape.tokens),
            "SAMPLE_TOKENS": "0",
            "WANDB_MODE": "disabled",
            "COMPILE": "auto",
            "PROFILE": "1",
        }
    )


def make_data(folder: Path, tokens: int, held_out: int) -> dict[str, str]:
    """A DATA_DIR with shards of random ids, so many to train on and to validate with; the settings that find it."""
    rng, path = np.random.default_rng(7), folder / "tokenizer.json"
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(400)]
    vocabulary = tokenizer.train(
        (" ".join(rng.choice(words, 200)) for _ in range(50)), ENTRIES, path
    )
    c = Config().replace(data_dir=str(folder), tokenizer=str(path), vocab_size=ENTRIES)
    pinned = pin(prepare.source_of(c, SOURCE), folder / SOURCE)
    shards = prepare.source_folder(c, SOURCE, vocabulary)
    shards.mkdir(parents=True)
    lengths = vocabulary.byte_lengths()

    def made(name: str, size: int) -> Any:
        ids = rng.integers(7, vocabulary.size, size + 1)
        return write_shard(
            shards / f"{name}.bin",
            ids,
            1,
            int(lengths[ids].sum()),
            vocabulary.sha256,
            SOURCE,
            ENTRIES,
        )

    seal = Seal((0, 0), 2, {}, made("train_00000", tokens), made("validation_00000", held_out))
    (shards / "manifest.json").write_bytes(
        Manifest(
            source=SOURCE,
            revision=pinned.revision,
            key=pinned.key,
            tokenizer_sha256=vocabulary.sha256,
            shard_tokens=SHARD_TOKENS,
            end="all",
            seals=[seal],
        ).text()
    )
    return {"DATA_DIR": str(folder), "TOKENIZER": str(path)}


def trained(shape: Shape, folder: Path, step_s: float) -> dict[str, Any]:
    """What the launcher's run of the shape has in its record. Raises RuntimeError, with what it said, if it fails."""
    warm = SETTLE + PROFILE_STEPS + 1  # and that in which the trace was written
    steps = warm + max(LEAST, min(MOST, round(MEASURED_S / step_s)))
    told = settings_of(shape, folder, steps)
    done = subprocess.run(
        [
            "env",
            *NO_TARGET,
            *(f"{name}={value}" for name, value in told.items()),
            "bash",
            "scripts/launch.sh",
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"a run of {shape.name} ended with exit code {done.returncode}:\n{done.stdout}"
        )
    paths = RunPaths(folder / "run")
    found = of_record(
        [
            r
            for r in metrics.read_records(paths.metrics)
            if r["event"] == "step" and r["step"] >= warm
        ],
        int(told["BATCH_TOKENS"]),
    )
    (trace,) = (paths.folder / "profile").glob("*.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return found | of_trace([event for event in events if event.get("ph") == "X"])


def of_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Seconds of a profiled step, and which percent of it each kind of work takes: of kernels on a GPU, else of operators.

    events: of a Chrome trace, with times in microseconds.
    """
    steps = [e for e in events if e["name"].startswith("ProfilerStep#") and e["cat"] == MARK]
    begin, step_us = steps[0]["ts"], sum(step["dur"] for step in steps)
    inside = [e for e in events if begin <= e["ts"] < begin + step_us]
    work = [e for e in inside if e["cat"] == "kernel"]
    if not work:
        main = steps[0]["tid"]
        work = [e for e in inside if e["cat"] == "cpu_op" and e["tid"] == main]
    attention = [e for e in work if ATTENTION.search(e["name"])]
    products = [e for e in work if MATMUL.search(e["name"]) and not ATTENTION.search(e["name"])]
    share = {
        "matmul": 100 * covered_us(products) / step_us,
        "attention": 100 * covered_us(attention) / step_us,
    }
    busy = 100 * covered_us(work) / step_us
    share |= {"other work": busy - sum(share.values()), "gaps": 100 - busy}
    return {"profiled_step_s": step_us / len(steps) / 1e6, "percent": share}


def covered_us(events: Sequence[Event]) -> float:
    """Time in which at least one of the events goes on, such as an operator and those that it calls."""
    covered = end = 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        begin = max(end, event["ts"])
        end = max(end, event["ts"] + event["dur"])
        covered += max(0.0, end - begin)
    return covered


def of_record(steps: list[Any], batch_tokens: int) -> dict[str, Any]:
    """Medians of the lines of steps that follow each other, and tokens a second from the first line to the last."""
    used = [step["mfu"] for step in steps[1:]]
    wall_s = steps[-1]["mono_s"] - steps[0]["mono_s"]
    return {
        "steps": len(steps) - 1,
        "tokens_per_s": (len(steps) - 1) * batch_tokens / wall_s,
        "mfu": None if None in used else statistics.median(used),
        "step_s": statistics.median(step["step_ms"] for step in steps[1:]) / 1000,
        "data_wait_s": statistics.median(step["data_wait_s"] for step in steps[1:]),
    }


# ---------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Both, in each round."""
    taken = []
    for _ in range(rounds):
        foreign = Foreign([], time.monotonic())
        with tempfile.TemporaryDirectory(dir=ROOT / "bench", ignore_cleanup_errors=True) as folder:
            alone = next(messages.said("bench.whole_run", shape.name, "bare"))
            taken.append(
                {"bare": alone}
                | trained(shape, Path(folder), alone["step_s"])
                | {"foreign_percent": foreign.percent(time.monotonic())}
            )
    return {"part": "run", "shape": shape.name, "rounds": taken}


def divided(shape: Shape, taken: dict[str, Any]) -> dict[str, float]:
    """Where the time of a profiled step went, in per cent: what its FLOPs would take at the ceiling's speed, what
    products and attention take beyond their part of that, and what else there is. They add up to 100, up to rounding."""
    tokens, unit = (
        shape.micro_batches * shape.tokens,
        100 / taken["bare"]["ceiling_flops_s"] / taken["profiled_step_s"],
    )
    attention = 12.0 * shape.n_layer * shape.n_embd * shape.seq_len * tokens * unit
    whole = shape.flops_per_token * tokens * unit
    rest = dict(taken["percent"])
    return {
        "at the ceiling's speed": whole,
        "products beyond that": rest.pop("matmul") - (whole - attention),
        "attention beyond that": rest.pop("attention") - attention,
    } | rest


def row(found: dict[str, Any], spread: Callable[..., str]) -> str:
    """A line of the table: medians over rounds, with the least and the most."""
    shape, rounds = SHAPES[found["shape"]], found["rounds"]
    tokens = shape.micro_batches * shape.tokens
    used = [taken["mfu"] for taken in rounds if taken["mfu"] is not None]
    parts = [divided(shape, taken) for taken in rounds]
    where = ", ".join(
        f"{name} {statistics.median(part[name] for part in parts):.1f}" for name in parts[0]
    )
    return (
        "| "
        + " | ".join(
            [
                f"{shape.name}, {shape.micro_batches} x {shape.tokens} tokens a step",
                spread([t["tokens_per_s"] for t in rounds]),
                spread(used, 1) if used else "n/a",
                spread(
                    [
                        100
                        * t["tokens_per_s"]
                        * shape.flops_per_token
                        / t["bare"]["ceiling_flops_s"]
                        for t in rounds
                    ],
                    1,
                ),
                spread([100 * t["tokens_per_s"] * t["bare"]["step_s"] / tokens for t in rounds], 1),
                spread([100 * t["data_wait_s"] / t["step_s"] for t in rounds], 2),
                where,
                worst(rounds),
            ]
        )
        + " |"
    )


if __name__ == "__main__":
    chosen = SHAPES[sys.argv[1]]
    messages.say(
        **bare_step(chosen) if sys.argv[2] == "bare" else measure(chosen, int(sys.argv[2]))
    )
