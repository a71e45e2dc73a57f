"""How fast training logs are read (analysis/logs/read.py), and in how much memory.

    python -m bench.log_reading ROUNDS

Writes a JSON line for each kind of log: megabytes a second of one core, in every round. The logs are made here, BYTES
long, in the form that the trainer's source prints, with numbers drawn anew in each line; every 600 lines stand some
which are no steps, as a compiler or W&B writes them.
"""

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from analysis.logs.dialect import read_dialects
from analysis.logs.read import Reader
from doctor.gpu_probe.foreign_load import Foreign, worst
from doctor.gpu_probe.messages import say

BYTES = 100_000_000
TARGET = 10  # MB/s
HEADER_ROWS = (
    "| logs | rows | MB/s of one core | target | peak MiB | foreign load, % |",
    "|---|---|---|---|---|---|",
)

NOISE = "".join(
    f"  triton_mm_{i} {0.01 * i:.4f} ms {100 - i:.1f}% BLOCK_K=64, BLOCK_M=128, num_warps=4\n"
    for i in range(19)
)
KINDS: dict[str, Callable[[int, np.ndarray], str]] = {
    "nanochat": lambda step, r: (
        f"step {step:05d}/9000000 ({step / 90000:.2f}%) | loss: {2 + r[0]:.6f} | lrm: {r[1]:.2f} | "
        f"dt: {1000 + 300 * r[2]:.2f}ms | tok/sec: {int(400000 + 90000 * r[3]):,} | mfu: {40 + r[4]:.2f} | "
        f"epoch: 1 | total time: {step / 50:.2f}m"
    ),
    "llm.c main.log": lambda step, r: (
        f"s:{step} trl:{2 + r[0]:.4f} lr:{r[1] / 1000:.6f} norm:{r[2]:.2f}"
    ),
    "torchtitan in a pod": lambda step, r: (
        f"[pod/run-0-abcde/trainer] 2026-01-02T03:04:{step % 60:02d}.123456789Z [rank0]:[titan] 2026-01-02 03:04:"
        f"{step % 60:02d},123 - root - INFO - step: {step:2}  loss: {2 + r[0]:7.4f}  grad_norm: {r[1]:7.4f}  "
        f"memory: 52.53GiB(66.33%)  tps: {round(9000 + 900 * r[2]):,}  tflops: {200 + 9 * r[3]:,.2f}  "
        f"mfu: {20 + r[4]:.2f}%"
    ),
}


def make(path: Path, kind: str, size: int) -> int:
    """Write a log of so many bytes; returns its steps."""
    rng, step, written = np.random.default_rng(7), 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            block = "".join(
                KINDS[kind](step + i, r) + "\n" for i, r in enumerate(rng.random((600, 5)))
            )
            written += file.write(block + NOISE)
            step += 600
    return step


def measure(rounds: int, size: int = BYTES) -> Iterator[dict[str, Any]]:
    """A row for each kind of log."""
    dialects = read_dialects()
    with tempfile.TemporaryDirectory() as scratch:
        for kind in KINDS:
            path = Path(scratch) / "made.log"
            steps, taken = make(path, kind, size), []
            for _ in range(rounds):
                foreign, began = Foreign([], time.monotonic()), time.process_time()
                reader = Reader(dialects).read(path)
                took = time.process_time() - began
                read = sum(stream.rows for stream in reader.streams.values())
                if read != steps:
                    raise RuntimeError(f"{read} of the {steps} steps of a log of {kind} were read")
                taken.append(
                    {
                        "mb_s": path.stat().st_size / 1e6 / took,
                        "foreign_percent": foreign.percent(time.monotonic()),
                    }
                )
            yield {
                "kind": kind,
                "bytes": path.stat().st_size,
                "rows": steps,
                "rounds": taken,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }


def row(found: dict[str, Any], spread: Callable[[list[float], int], str]) -> str:
    """A line of the table: medians over rounds, with the least and the most."""
    return (
        f"| {found['kind']}, {found['bytes'] / 1e6:.0f} MB | {found['rows']:,} | "
        f"{spread([taken['mb_s'] for taken in found['rounds']], 0)} | {TARGET} | {found['peak_mib']:.0f} | "
        f"{worst(found['rounds'])} |"
    )


def main(rounds: str) -> None:
    for found in measure(int(rounds)):
        say(**found)


if __name__ == "__main__":
    main(sys.argv[1])
