"""How long a page of curves takes to make, from a log of another trainer and from a record of our own.

    python -m bench.pages ROUNDS

Writes a JSON line for each: seconds from the start of the process to the page on disk, in every round, and the peak of
its memory. Logs and records are made here, STEPS long.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.log_reading import KINDS
from doctor.gpu_probe.foreign_load import Foreign, worst
from doctor.gpu_probe.messages import say
from record import metrics
from settings import ROOT

STEPS = 1_000_000
TARGET_S = 10
HEADER_ROWS = (
    "| page | file, MB | page, MB | s | target | peak MiB | foreign load, % |",
    "|---|---|---|---|---|---|---|",
)


def make_log(folder: Path, steps: int) -> list[str]:
    """A log as nanochat writes it; returns the arguments of Python that make its page."""
    numbers, line = np.random.default_rng(7).random((steps, 5)), KINDS["nanochat"]
    with open(folder / "made.log", "w", encoding="utf-8") as file:
        file.writelines(line(step, r) + "\n" for step, r in enumerate(numbers))
    return ["-m", "analysis.plots", str(folder / "made.log")]


def make_record(folder: Path, steps: int) -> list[str]:
    """A record as record/metrics.py writes it; returns the arguments of Python that make its page."""
    common = {"schema": metrics.SCHEMA, "host": "here", "attempt": 0}
    values = np.random.default_rng(7).random(steps).tolist()
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        start = {**common, "event": "start", "time": 1e9, "mono_s": 1.0, "step": 0, "tokens": 0}
        file.write(metrics.to_json(start) + "\n")
        file.writelines(
            metrics.to_json(
                {
                    **common,
                    "event": "step",
                    "time": 1e9 + step,
                    "mono_s": 1.0 + step,
                    "step": step,
                    "tokens": 1024 * step,
                    "loss": 2 + r,
                    "lr": 1e-3 * r,
                    "grad_norm": r,
                    "step_ms": 900 + 100 * r,
                    "tokens_per_s": 1e6 / (900 + r),
                    "mfu": 40 + r,
                    "mem_gib": 1.5,
                    "data_wait_s": 0.001 * r,
                }
            )
            + "\n"
            for step, r in enumerate(values, 1)
        )
    return ["-m", "analysis.plots", str(folder)]


MAKERS: dict[str, Callable[[Path, int], list[str]]] = {
    "of a log": make_log,
    "of a record": make_record,
}


def measure(rounds: int, steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """A row for a log, and for a record."""
    for kind, make in MAKERS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            arguments, taken, peak = make(folder, steps), [], 0
            source = sum(path.stat().st_size for path in folder.iterdir())
            for _ in range(rounds):
                foreign, began = Foreign([], time.monotonic()), time.monotonic()
                child = subprocess.Popen(
                    [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL
                )
                _, status, usage = os.wait4(child.pid, 0)
                child.returncode = os.waitstatus_to_exitcode(status)
                if child.returncode:
                    raise RuntimeError(f"{' '.join(arguments)} ended with code {child.returncode}")
                now, cpu_s = time.monotonic(), usage.ru_utime + usage.ru_stime
                busy = foreign.percent(now)  # the child, which is gone, among it
                share = 100 * cpu_s / ((now - began) * (os.cpu_count() or 1))
                taken.append(
                    {
                        "seconds": now - began,
                        "cpu_s": cpu_s,
                        "foreign_percent": None if busy is None else max(0.0, busy - share),
                    }
                )
                peak = max(peak, usage.ru_maxrss)
            (page,) = folder.rglob("loss_curves.html")
            yield {
                "kind": kind,
                "steps": steps,
                "bytes": source,
                "page_bytes": page.stat().st_size,
                "rounds": taken,
                "peak_mib": peak / 1024,
            }


def row(found: dict[str, Any], spread: Callable[[list[float], int], str]) -> str:
    """A line of the table: medians over rounds, with the least and the most."""
    return (
        f"| {found['kind']}, {found['steps']:,} steps | {found['bytes'] / 1e6:.0f} | "
        f"{found['page_bytes'] / 1e6:.1f} | {spread([taken['seconds'] for taken in found['rounds']], 1)} | "
        f"{TARGET_S} | "
        f"{found['peak_mib']:.0f} | {worst(found['rounds'])} |"
    )


def main(rounds: str) -> None:
    for found in measure(int(rounds)):
        say(**found)


if __name__ == "__main__":
    main(sys.argv[1])
