"""DiLoCo beside DDP at equal tokens: the tiny preset to its end, four sites, three seeds; takes long.

Nothing of this depends on a network, so that the sites are processes of this machine on its loopback interface, and DDP
is the preset as it comes, in one process: more processes train alike. Losses are those of the final evaluation, of the
same text for all. A pair has one seed: the same weights at first, and the same text in the same order.
"""

import contextlib
import itertools
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.run import spread
from bench.wan_lab.crew import QUIET, prepare_data, until_it_listens
from bench.wan_lab.sites import TRAINER
from hardware.ports import free_ports
from record import metrics
from settings import ROOT
from settings.resolve import NO_TARGET

SEEDS = (1, 2, 3)
SITES = 4
EVERY = (30, 100)
LONGEST_S = 3600.0


def found(folder: Path) -> Iterator[dict[str, Any]]:
    """DDP for each seed, then DiLoCo for each, at one H after another."""
    prepare_data(TRAINER)
    alone = {}
    for seed in SEEDS:
        name = f"ddp-seed-{seed}"
        settings = {
            "SEED": str(seed),
            "RUNS_DIR": str(folder),
            "RUN_NAME": name,
            "OMP_NUM_THREADS": "2",
        }
        alone[seed] = losses_of(run(folder, [(name, settings)]), folder / name)
        yield {"name": "DDP", "seed": seed, **alone[seed]}
    for every, seed in itertools.product(EVERY, SEEDS):
        taken = diloco(folder, seed, every)
        yield {
            "name": f"DiLoCo, H={every}",
            "seed": seed,
            **taken,
            "worse_percent": 100 * (taken["val_loss"] / alone[seed]["val_loss"] - 1),
        }


def diloco(folder: Path, seed: int, every: int) -> dict[str, Any]:
    """One run at SITES sites, each a process of this machine."""
    name = f"diloco-{every}-seed-{seed}"
    with lighthouse_here(folder / f"{name}.lighthouse.log") as where:
        settings = {
            "SEED": str(seed),
            "RUNS_DIR": str(folder),
            "RUN_NAME": name,
            "SYNC": "diloco",
            "SITES": str(SITES),
            "NODES": str(SITES),
            "SYNC_EVERY": str(every),
            "LIGHTHOUSE": where,
            "MIN_SITES": str(SITES),
        }
        codes = run(
            folder,
            [(f"{name}.site_{site}", settings | {"NODE_RANK": str(site)}) for site in range(SITES)],
        )
    return losses_of(codes, folder / name)


def run(folder: Path, processes: list[tuple[str, dict[str, str]]]) -> list[int]:
    """Trainers, each by its log and settings, to their end. Returns their exit codes."""
    with contextlib.ExitStack() as stack:
        started = []
        for name, settings in processes:
            log = stack.enter_context(open(folder / f"{name}.log", "w"))
            given = (f"{key}={value}" for key, value in (TRAINER | settings).items())
            started.append(
                subprocess.Popen(
                    ["env", *NO_TARGET, QUIET, *given, "bash", "scripts/launch.sh"],
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                )
            )
            stack.callback(started[-1].terminate)
        return [process.wait(LONGEST_S) for process in started]


def losses_of(codes: list[int], run_folder: Path) -> dict[str, Any]:
    """The final evaluation. Raises RuntimeError where a trainer failed."""
    if any(codes):
        raise RuntimeError(
            f"trainers of {run_folder.name} ended with exit codes {codes}; see its logs beside it"
        )
    final = [r for r in metrics.read_records(run_folder / "metrics.jsonl") if r["event"] == "eval"][
        -1
    ]
    return {"val_loss": final["val_loss"], "val_bpb": final["val_bpb"], "tokens": final["tokens"]}


@contextlib.contextmanager
def lighthouse_here(log: Path) -> Iterator[str]:
    """`make lighthouse` on this machine until the block ends: where it listens."""
    where = f"127.0.0.1:{free_ports(2)}"
    with open(log, "a") as file:
        process = subprocess.Popen(
            [
                "env",
                *NO_TARGET,
                QUIET,
                f"LIGHTHOUSE={where}",
                "PRESET=tiny",
                "DEVICE=cpu",
                sys.executable,
                "-m",
                "train.diloco.lighthouse",
            ],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        until_it_listens(process, log)
        yield where
    finally:
        process.terminate()
        process.wait()


HEADER = (
    "| sites stay together by | seed | loss at equal tokens | bits per byte | more than DDP with this seed, % |",
    "|---|---|---|---|---|",
)


def row(taken: dict[str, Any]) -> str:
    worse = f"{taken['worse_percent']:+.2f}" if "worse_percent" in taken else ""
    return (
        "| "
        + " | ".join(
            [
                taken["name"],
                str(taken["seed"]),
                f"{taken['val_loss']:.4f} at {taken['tokens']:,}",
                f"{taken['val_bpb']:.4f}",
                worse,
            ]
        )
        + " |"
    )


def summary(taken: list[dict[str, Any]]) -> str:
    """For each way to stay together the median over seeds, least and most: loss, and what it is more than DDP's."""
    lines = []
    for name in dict.fromkeys(one["name"] for one in taken):
        these = [one for one in taken if one["name"] == name]
        said = f"{name}: loss {spread([one['val_loss'] for one in these], 3)}"
        if "worse_percent" in these[0]:
            said += f", {spread([one['worse_percent'] for one in these], 2)} % more than DDP"
        if len(these) > 1:
            said += f"; standard deviation over seeds {statistics.stdev(one['val_loss'] for one in these):.4f}"
        lines.append(said)
    return "\n".join(lines)
