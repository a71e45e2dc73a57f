"""`make bench`: throughput of a training step, beside the machine's own ceiling and beside peers, as table and JSON.

    for each shape x type x mode:   start all, one after the other -> first step -> rounds in which all take turns

Turns make the ratios of one run comparable on a machine whose speed drifts: each round has its own ceiling, its own
peers, and its own share of processor time that went to others (foreign load). Rounds with more than FOREIGN of that
are left out where enough others remain; quote ratios, with their spread.
"""

import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from bench import core, data, logs, pages, planned, sampler, saving, text, waste
from bench.lines import said
from bench.load import Foreign, worst
from bench.shapes import SHAPES, Shape
from train.config import Config
from train.provenance import commit
from train.settings import ROOT, SettingsError

FOREIGN = 5.0   # per cent of the machine
ENOUGH = 3      # rounds that must remain
TURN_S = 2.0    # a turn has as many steps as take about this long
NANOGPT = "nanoGPT"
SAVING = "checkpoint"  # in BENCH_SHAPES: what a checkpoint costs (saving.py)
DATA = "data"          # in BENCH_SHAPES: what data cost (data.py)
SAMPLER = "sampler"    # in BENCH_SHAPES: what the GPU sampler costs (sampler.py)
PLAN = "plan"          # in BENCH_SHAPES: what make plan predicts, beside what is (planned.py)
LOGS = "logs"          # in BENCH_SHAPES: how fast logs are read (logs.py), pages made (pages.py)
TEXT = "text"          # in BENCH_SHAPES: how fast text is written (text.py)
CORE = "core"          # in BENCH_SHAPES: how fast the tasks of CORE are scored (core.py)
WASTE = "waste"        # in BENCH_SHAPES: what is no training, and Muon's part (waste.py)
Row = Callable[[dict[str, Any]], str]  # what was found, as a line of a table
OTHERS = (SAVING, DATA, SAMPLER, PLAN, LOGS, TEXT, CORE, WASTE)


class Worker:
    """A benchmarked process (worker.py)."""

    def __init__(self, module: str, *arguments: str, cache: str):
        self.name = " ".join((module, *arguments))
        # a compiler's cache of its own, so that the first step is a cold one
        self.process = subprocess.Popen(
            ["env", f"TORCHINDUCTOR_CACHE_DIR={cache}", sys.executable, "-m", f"bench.{module}",
             *arguments[:3], str(time.time()), *arguments[3:]],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.first_step_s = self.answer()["first_step_s"]
        self.steps = 1
        while (took := sum(self.turn()["seconds"])) < TURN_S / 2:  # also warms up
            self.steps = max(self.steps + 1, round(self.steps * min(10.0, TURN_S / took)))

    def answer(self) -> dict[str, Any]:
        line = cast(TextIO, self.process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}, see above")
        return dict(json.loads(line))

    def turn(self) -> dict[str, Any]:
        """Take this worker's steps."""
        pipe = cast(TextIO, self.process.stdin)
        pipe.write(f"{self.steps}\n")
        pipe.flush()
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(shape: Shape, dtype: str, mode: str, peers: dict[str, Path], rounds: int, on_gpu: bool) -> dict[str, Any]:
    """One cell of the table: all rounds, and what follows from them."""
    from bench import ceiling
    with contextlib.ExitStack() as stack:
        def start(module: str, *more: str) -> Worker:
            cache = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            worker = Worker(module, shape.name, dtype, mode, *more, cache=cache)
            stack.callback(worker.close)
            return worker

        workers = {"ceiling": start("ceiling"), "ours": start("ours")}
        workers |= {name: start(name.lower(), str(path)) for name, path in peers.items()}
        pids = [worker.process.pid for worker in workers.values()]
        taken = []
        for _ in range(rounds):
            foreign = Foreign(pids, time.monotonic())
            answers = {name: worker.turn() for name, worker in workers.items()}
            load = foreign.percent(time.monotonic())
            speeds = {name: shape.tokens / statistics.median(answer["seconds"]) for name, answer in answers.items()}
            product_s = statistics.median(answers["ceiling"]["seconds"])
            speeds["ceiling"] = ceiling.flops("cuda" if on_gpu else "cpu") / product_s / shape.flops_per_token
            taken.append({"foreign_percent": load, "tokens_per_s": speeds})
        return {"shape": shape.name, "dtype": dtype, "mode": mode, "rounds": taken,
                "steps_a_turn": {name: worker.steps for name, worker in workers.items()},
                "peak_mib": {name: answer["peak_mib"] for name, answer in answers.items()},
                "loss": {name: answer["loss"] for name, answer in answers.items()},
                "first_step_s": {name: worker.first_step_s for name, worker in workers.items()}}


def chosen(cell: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """(the rounds that count, whether the others were disturbed and left out, or too few to be)."""
    quiet = [r for r in cell["rounds"] if r["foreign_percent"] is None or r["foreign_percent"] <= FOREIGN]
    return (quiet, True) if len(quiet) >= min(ENOUGH, len(cell["rounds"])) else (cell["rounds"], False)


def spread(values: list[float], digits: int = 0) -> str:
    """'median (least-most)'"""
    low, middle, high = (f"{v:.{digits}f}" for v in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}-{high})"


HEADER = ("| shape | type | mode | tokens/s | of the matmul ceiling, % | peak MiB | first step, s "
          "| foreign load, % | times as fast as |", "|---|---|---|---|---|---|---|---|---|")


def row(cell: dict[str, Any]) -> str:
    """A line of the table: medians over rounds, with the least and the most."""
    rounds, quiet = chosen(cell)
    speeds = [r["tokens_per_s"] for r in rounds]
    peers = [name for name in speeds[0] if name not in ("ours", "ceiling")]
    beside = [f"{name}: {spread([s['ours'] / s[name] for s in speeds], 2)}, which has "
              f"{spread([s[name] for s in speeds])} tokens/s, {cell['peak_mib'][name]:.0f} MiB, first step "
              f"{cell['first_step_s'][name]:.1f} s" for name in peers]
    load = worst(rounds) + ("" if quiet else " (disturbed)")
    return "| " + " | ".join([
        cell["shape"], cell["dtype"], cell["mode"], spread([s["ours"] for s in speeds]),
        spread([100 * s["ours"] / s["ceiling"] for s in speeds]), f"{cell['peak_mib']['ours']:.0f}",
        f"{cell['first_step_s']['ours']:.1f}", load, "; ".join(beside) or "no peer given"]) + " |"


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    import torch
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    code = commit()
    return {"date": time.strftime("%Y-%m-%d"), "cpu": cpu, "cores": os.cpu_count(), "gpu": gpu,
            "threads": torch.get_num_threads(), "python": platform.python_version(), "torch": torch.__version__,
            "system": platform.platform(), "commit": code["git"],
            "commit_dirty": code["git_dirty"]}


def peers_in(folder: str) -> dict[str, Path]:
    """Peer -> its checkout, below PEERS_DIR. Raises SettingsError where there is none."""
    if not folder:
        return {}
    path = (ROOT / folder).absolute()
    found = {NANOGPT: path / NANOGPT} if (path / NANOGPT / "model.py").is_file() else {}
    if not found:
        raise SettingsError([f"PEERS_DIR={folder}: holds no checkout of {NANOGPT} ({path / NANOGPT}/model.py is not "
                             f"there); for example git clone https://github.com/karpathy/{NANOGPT} in it"])
    return found


def cells(c: Config, on_gpu: bool) -> Iterator[tuple[Shape, str, str]]:
    """Shape, type and mode of each cell. Raises SettingsError for a shape that is none."""
    names = [name for name in c.bench_shapes.split(",") if name not in OTHERS]
    if unknown := [name for name in names if name not in SHAPES]:
        raise SettingsError([f"BENCH_SHAPES={c.bench_shapes}: {unknown[0]} is no shape; there are "
                             f"{', '.join([*SHAPES, *OTHERS])}"])
    types = ("bfloat16",) if on_gpu else ("float32", "bfloat16")
    for name, dtype, mode in itertools.product(names, types, ("eager", "compiled")):
        yield SHAPES[name], dtype, mode


def measure_saving(rounds: int, gpus: int) -> Iterator[dict[str, Any]]:
    """What saving.py finds alone, and with several processes in both ways of spreading a model over them."""
    many = gpus or 2
    for processes, how in [(1, "ddp"), *([(many, "ddp"), (many, "fsdp")] if many > 1 else [])]:
        several = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"] * (processes > 1)
        done = subprocess.run([sys.executable, "-m", *several, "bench.saving", how, str(rounds + 1)], cwd=ROOT,
                              text=True, stdout=subprocess.PIPE, check=True)
        yield json.loads(done.stdout.splitlines()[-1])  # torchrun may say something too


def tables(c: Config) -> Iterator[tuple[str, Sequence[str], Iterator[dict[str, Any]], Row]]:
    """The parts of BENCH_SHAPES that are no shapes: key of the results, header, what is found, and its line."""
    import torch
    asked, rounds, gpus = c.bench_shapes.split(","), c.bench_rounds, torch.cuda.device_count()
    tokenizer = c.tokenizer if c.tokenizer.endswith(".json") else "train"
    if SAVING in asked:
        yield "checkpoints", saving.HEADER, measure_saving(rounds, gpus), saving.row
    if DATA in asked:
        yield "data", data.HEADER_ROWS, each(data.PARTS, "bench.data", str(rounds), tokenizer), spreading(data.row)
    if SAMPLER in asked:
        yield "sampler", sampler.HEADER_ROWS, each(sampler.PARTS, "bench.sampler", str(rounds)), spreading(sampler.row)
    if PLAN in asked:
        yield "planned", planned.HEADER, planned.measure(gpus), planned.line
    if LOGS in asked:
        yield "logs", logs.HEADER_ROWS, said("bench.logs", str(rounds)), spreading(logs.row)
        yield "pages", pages.HEADER_ROWS, said("bench.pages", str(rounds)), spreading(pages.row)
    if TEXT in asked:
        yield "text", text.HEADER_ROWS, said("bench.text", str(rounds)), spreading(text.row)
    if CORE in asked:
        yield "core", core.HEADER_ROWS, each(core.PARTS, "bench.core", str(rounds)), spreading(core.row)
    if WASTE in asked:
        yield "waste", waste.HEADER_ROWS, each(waste.PARTS, "bench.waste", str(rounds)), spreading(waste.row)


def each(parts: Sequence[str], module: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """What a module finds, each part in a process of its own."""
    for part in parts:
        yield from said(module, part, *arguments)


def spreading(row: Callable[..., str]) -> Row:
    return lambda found: row(found, spread)


def main() -> int:
    try:
        c = Config.load()
        peers = peers_in(c.peers_dir)
        facts = machine()
        todo = list(cells(c, facts["gpu"] is not None))
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 64
    say = sys.stdout.write
    say("".join(f"{name}: {value}\n" for name, value in facts.items()))
    if todo:
        say("\n" + "\n".join(HEADER) + "\n")
    sys.stdout.flush()
    results = []
    for shape, dtype, mode in todo:
        results.append(measure(shape, dtype, mode, peers, c.bench_rounds, facts["gpu"] is not None))
        say(row(results[-1]) + "\n")
        sys.stdout.flush()
    parts: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("checkpoints", "data", "sampler", "planned", "logs", "pages", "text", "core", "waste")}
    for name, header, finds, line in tables(c):
        say("\n" + "\n".join(header) + "\n")
        for found in finds:
            parts[name].append(found)
            say(line(found) + "\n")
            sys.stdout.flush()
    path = ROOT / "bench" / "results" / time.strftime("bench_%Y%m%d_%H%M%S.json")
    path.parent.mkdir(exist_ok=True)
    content = {"schema": 1, "machine": facts, "cells": results, **parts}
    path.write_text(json.dumps(content, indent=1) + "\n")
    say(f"\n{path.relative_to(ROOT)} has all rounds\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
