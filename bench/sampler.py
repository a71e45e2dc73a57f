"""What the GPU sampler costs: the rate it keeps and its share of a core, and how much longer a training step takes.

    python -m bench.sampler cost|effect ROUNDS

Each writes JSON lines, one for each row: what was measured, its rounds, and the share of the machine that went to
others.

    cost     the whole process for TURN_S, on a library that stands in for NVML (tests/monitor/fake_nvml.c), with 1, 2
             and 8 GPUs; and on this machine's own where it has any, whose calls take what they take
    effect   turns of a training step with and without it, on this machine's GPUs, or on CPU beside the 8 of the library
"""

import contextlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml

from doctor.gpu_probe.foreign_load import Foreign, worst
from doctor.gpu_probe.messages import say
from doctor.gpu_probe.shapes import SHAPES
from hardware import nvml
from settings import ROOT

PARTS = ("cost", "effect")
FAKE = ROOT / "tests" / "monitor" / "fake_nvml.c"
TURN_S = 5.0  # of sampling
STEPS_S = 1.0  # of steps in a turn
PAIRS = 4  # of turns with and without it, in a round
LIMIT = 4  # per cent of one core, for any number of GPUs up to 8


def gpus_here() -> int:
    """How many GPUs this machine's own library knows."""
    with contextlib.suppress(nvml.Unavailable, pynvml.NVMLError):
        nvml.start()
        return int(pynvml.nvmlDeviceGetCount())
    return 0


def library(folder: Path) -> Path | None:
    """The library that stands in, compiled into a folder; None without a compiler."""
    if (gcc := shutil.which("gcc")) is None:
        return None
    subprocess.run(
        [gcc, "-O2", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", FAKE, "-lm"],
        check=True,
    )
    return folder


@contextlib.contextmanager
def sampling(folder: Path, stand_in: Path | None, gpus: int) -> Iterator[dict[str, Any]]:
    """A sampler at work into a new folder; behind the block the dictionary has its sidecar, and bytes of its rows."""
    runs = Path(tempfile.mkdtemp(dir=folder))
    instead = [
        "-u",
        "CUDA_VISIBLE_DEVICES",
        f"LD_LIBRARY_PATH={stand_in}",
        f"FAKE_NVML_GPUS={gpus}",
    ]
    process = subprocess.Popen(
        [
            "env",
            *(instead if stand_in else []),
            f"RUNS_DIR={runs}",
            "RUN_NAME=bench",
            sys.executable,
            "-m",
            "monitor.gpu_sampler",
            "10",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found: dict[str, Any] = {}
    try:
        while not list(runs.glob("bench/gpu_metrics_*.json")):
            if process.poll() is not None:
                raise RuntimeError(
                    f"the sampler ended with exit code {process.returncode}: {process.communicate()[0]}"
                )
            time.sleep(0.02)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    (path,) = runs.glob("bench/gpu_metrics_*.json")
    found |= json.loads(path.read_text()) | {"bytes": path.with_suffix(".csv").stat().st_size}


def cost(rounds: int, turn_s: float = TURN_S) -> Iterator[dict[str, Any]]:
    """A row for each number of GPUs; all take turns in a round."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        stand_in, here = library(folder), gpus_here()
        cells: list[tuple[Path | None, int]] = []
        if stand_in:
            cells += [(stand_in, gpus) for gpus in (1, 2, 8)]
        if here:
            cells.append((None, here))
        rows: list[dict[str, Any]] = [
            {
                "part": "cost",
                "library": "stand-in" if way else "this machine's",
                "gpus": gpus,
                "rounds": [],
            }
            for way, gpus in cells
        ]
        for _ in range(rounds):
            for (way, gpus), row in zip(cells, rows, strict=True):
                foreign = Foreign([], time.monotonic())
                with sampling(folder, way, gpus) as found:
                    time.sleep(turn_s)
                load = foreign.percent(time.monotonic())
                row["rounds"].append(
                    {
                        "foreign_percent": load,
                        "call_us": found["first_look"]["readings"],
                        **{
                            name: found[name]
                            for name in (
                                "hz",
                                "samples",
                                "missed",
                                "cpu_percent",
                                "bytes",
                                "sample_ms",
                            )
                        },
                    }
                )
        yield from rows


def effect(rounds: int, shape: str = "", steps_s: float = STEPS_S) -> Iterator[dict[str, Any]]:
    """One row: how many times as long a step takes beside a sampler. The order changes in each pair.

    Steps are not compiled: then the processor has more to do for each, and is missed more.
    """
    import torch

    from bench import ours
    from doctor.gpu_probe import worker

    here = gpus_here() if torch.cuda.is_available() else 0
    name, dtype = shape or ("gpt2" if here else "tiny"), "bfloat16" if here else "float32"
    step = ours.set_up(SHAPES[name], dtype, compiled=False)

    def seconds(count: int) -> float:
        """Of a step, the median."""
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            worker.synchronize()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    count = max(3, round(steps_s / max(seconds(3), seconds(3))))
    row: dict[str, Any] = {
        "part": "effect",
        "shape": name,
        "dtype": dtype,
        "gpus": here or 8,
        "steps": count,
        "library": "this machine's" if here else "stand-in",
        "rounds": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        stand_in = None if here else library(folder)
        if not here and not stand_in:
            return
        for number in range(PAIRS * rounds):
            took, foreign = dict[bool, float](), Foreign([], time.monotonic())
            for beside in (False, True) if number % 2 else (True, False):
                if beside:
                    with sampling(folder, stand_in, 8) as found:
                        took[beside] = seconds(count)
                else:
                    took[beside] = seconds(count)
            row["rounds"].append(
                {
                    "foreign_percent": foreign.percent(time.monotonic()),
                    "missed": found["missed"],
                    "step_ms": 1e3 * took[False],
                    "ratio": took[True] / took[False],
                }
            )
    yield row


# ---------------------------------------------------------------------------------------------------

HEADER_ROWS = (
    "| GPU sampler, every 10 ms | median (least-most) | target | foreign load, % |",
    "|---|---|---|---|",
)


def row(found: dict[str, Any], spread: Callable[[list[float], int], str]) -> str:
    """A line of the table: medians over rounds, with the least and the most."""

    def of(key: str, digits: int) -> str:
        return spread([taken[key] for taken in found["rounds"]], digits)

    gpus = "1 GPU" if found["gpus"] == 1 else f"{found['gpus']} GPUs"
    if found["part"] == "cost":
        what = f"{gpus} of the {found['library']} library"
        hourly = (
            statistics.median(taken["bytes"] / taken["samples"] for taken in found["rounds"])
            * 360_000
            / 1e6
        )
        value = (
            f"{of('hz', 1)} Hz, {of('missed', 0)} slots missed, {of('cpu_percent', 2)}% of one core, "
            f"{hourly:.0f} MB an hour"
        )
        target = f"100.0 Hz, under {LIMIT}%"
    else:
        what = f"a step of {found['shape']} in {found['dtype']} beside it, {gpus} of the {found['library']} library"
        value, target = f"{of('ratio', 3)} times as long; {of('step_ms', 1)} ms without", "1.00"
    return f"| {what} | {value} | {target} | {worst(found['rounds'])} |"


def main(part: str, rounds: str) -> None:
    for found in cost(int(rounds)) if part == "cost" else effect(int(rounds)):
        say(**found)


if __name__ == "__main__":
    main(*sys.argv[1:])
