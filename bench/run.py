"""`make bench`: throughput of a training step, beside the machine's own ceiling and beside peers, as table and JSON.

    for each shape x type x mode:   start ceiling and ours -> first step
        for each peer:              start it, as it comes and with our allocator -> rounds in which all take turns

Turns make the ratios of one run comparable on a machine whose speed drifts: each round has its own ceiling, its own
peer, and its own share of processor time that went to others (foreign load). Rounds with more than FOREIGN of that
are left out where enough others remain; quote ratios, with their spread.
"""

import contextlib
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

from bench import (
    adapters,
    core_speed,
    data_pipeline,
    generation,
    log_reading,
    pages,
    peers,
    planned,
    sampler,
    saving,
    tuning_data,
    waste,
    whole_run,
)
from bench.host_facts import machine
from doctor.gpu_probe.foreign_load import Foreign, worst
from doctor.gpu_probe.messages import said
from doctor.gpu_probe.shapes import SHAPES, Shape
from hardware.flops import mfu, peak_tflops
from settings import ROOT, SettingsError, explain_error, load_config
from settings.config import Config

FOREIGN = 5.0  # per cent of the machine
ENOUGH = 3  # rounds that must remain
ROUNDS = 5  # of each cell, in which all take turns
TURN_S = 2.0  # a turn has as many steps as take about this long
SAVING = "checkpoint"  # in BENCH_SHAPES: what a checkpoint costs (saving.py)
DATA = "data"  # in BENCH_SHAPES: what data cost (data_pipeline.py)
SAMPLER = "sampler"  # in BENCH_SHAPES: what the GPU sampler costs (sampler.py)
PLAN = "plan"  # in BENCH_SHAPES: what make plan predicts, beside what is (planned.py)
LOGS = "logs"  # in BENCH_SHAPES: how fast logs are read (log_reading.py), pages made (pages.py)
TEXT = "text"  # in BENCH_SHAPES: how fast text is written (generation.py)
CORE = "core"  # in BENCH_SHAPES: how fast the tasks of CORE are scored (core_speed.py)
WASTE = "waste"  # in BENCH_SHAPES: what is no training, and Muon's part (waste.py)
Row = Callable[[dict[str, Any]], str]  # what was found, as a line of a table
TUNING = "finetune"  # in BENCH_SHAPES: how fast fine-tuning is next to TRL's (tuning.py)
OTHERS = (SAVING, DATA, SAMPLER, PLAN, LOGS, TEXT, CORE, WASTE, TUNING)


class Worker:
    """A benchmarked process (worker.py). environment: words for env(1), in what it differs from ours."""

    def __init__(self, module: str, *arguments: str, cache: str, environment: Sequence[str] = ()):
        self.name = " ".join((module, *arguments))
        # a compiler's cache of its own, so that the first step is a cold one
        self.process = subprocess.Popen(
            [
                "env",
                *environment,
                f"TORCHINDUCTOR_CACHE_DIR={cache}",
                *peers.command(module, *arguments),
            ],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.first = self.answer()
        self.steps = 1
        while (took := sum(self.turn()["seconds"])) < TURN_S / 2:  # also warms up
            self.steps = max(self.steps + 1, round(self.steps * min(10.0, TURN_S / took)))

    def answer(self) -> dict[str, Any]:
        """What it says next. Raises RuntimeError where it ended instead."""
        line = cast(TextIO, self.process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}, see above")
        return dict(json.loads(line))

    def turn(self) -> dict[str, Any]:
        """Take this worker's steps."""
        pipe = cast(TextIO, self.process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it has ended: the answer says so
            pipe.write(f"{self.steps}\n")
            pipe.flush()
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


HOSTS = ("ceiling", "ours")  # in all rounds of a cell


def measure(
    shape: Shape,
    dtype: str,
    mode: str,
    beside: Mapping[peers.Peer, str],
    rounds: int,
    gpu: str | None,
) -> dict[str, Any]:
    """One cell of the table: all rounds, and what follows from them.

    beside: peers and their checkouts. One peer after the other comes for its rounds, with and without our allocator,
    and leaves: so memory need not hold all of them. One that fails is told of, and the others go on.
    """
    cell: dict[str, Any] = {
        "shape": shape.name,
        "dtype": dtype,
        "mode": mode,
        "gpu": gpu,
        "rounds": [],
        "failed": {},
        **{key: {} for key in ("steps_a_turn", "peak_mib", "loss", "first_step_s", "parameters")},
    }

    def start(
        guests: contextlib.ExitStack, module: str, *more: str, environment: Sequence[str] = ()
    ) -> Worker:
        cache = guests.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        worker = Worker(
            module, shape.name, dtype, mode, *more, cache=cache, environment=environment
        )
        guests.callback(worker.close)
        return worker

    with contextlib.ExitStack() as house:
        hosts = {name: start(house, name) for name in HOSTS}
        for sitting in [variants(peer, path, gpu) for peer, path in beside.items()] or [{}]:
            with contextlib.ExitStack() as visit:
                workers = dict(hosts)
                for name, (peer, path, allocator) in sitting.items():
                    with noting(cell, name):
                        workers[name] = start(
                            visit,
                            peer.module,
                            *([path] if path else []),
                            environment=peer.environment(dtype, allocator),
                        )
                for _ in range(rounds):
                    take_round(workers, cell, shape)
    return cell


def variants(
    peer: peers.Peer, path: str, gpu: str | None
) -> dict[str, tuple[peers.Peer, str, bool]]:
    """A peer as it comes and, where our training has an allocator of its own, with that: (peer, path, whether)."""
    if gpu is not None or sys.platform != "linux":
        return {peer.name: (peer, path, True)}
    return {peer.name: (peer, path, False), peer.name + peers.WITH_OURS: (peer, path, True)}


@contextlib.contextmanager
def noting(cell: dict[str, Any], name: str) -> Iterator[None]:
    """A peer that fails costs its own row only."""
    try:
        yield
    except RuntimeError as error:
        cell["failed"][name] = str(error)


def take_round(workers: dict[str, Worker], cell: dict[str, Any], shape: Shape) -> None:
    """All take a turn; a peer that ends in it is dropped from the workers."""
    from bench import ceiling

    foreign = Foreign([worker.process.pid for worker in workers.values()], time.monotonic())
    answers: dict[str, dict[str, Any]] = {}
    for name, worker in list(workers.items()):
        if name in HOSTS:
            answers[name] = worker.turn()
            continue
        with noting(cell, name):
            answers[name] = worker.turn()
        if name not in answers:
            del workers[name]
    load = foreign.percent(time.monotonic())
    speeds = {
        name: shape.tokens / statistics.median(answer["seconds"])
        for name, answer in answers.items()
    }
    product_s = statistics.median(answers["ceiling"]["seconds"])
    speeds["ceiling"] = (
        ceiling.flops("cuda" if cell["gpu"] else "cpu") / product_s / shape.flops_per_token
    )
    cell["rounds"].append({"foreign_percent": load, "tokens_per_s": speeds})
    for name, answer in answers.items():
        worker = workers[name]
        cell["steps_a_turn"][name] = worker.steps
        cell["first_step_s"][name], cell["parameters"][name] = (
            worker.first["first_step_s"],
            worker.first["parameters"],
        )
        cell["peak_mib"][name], cell["loss"][name] = answer["peak_mib"], answer["loss"]


def chosen(cell: dict[str, Any], name: str = "ours") -> tuple[list[dict[str, Any]], bool]:
    """(the rounds of one that count, whether the others were disturbed and left out, or too few to be)."""
    rounds = [r for r in cell["rounds"] if name in r["tokens_per_s"]]
    quiet = [r for r in rounds if r["foreign_percent"] is None or r["foreign_percent"] <= FOREIGN]
    return (quiet, True) if len(quiet) >= min(ENOUGH, len(rounds)) else (rounds, False)


def spread(values: list[float], digits: int = 0) -> str:
    """'median (least-most)'"""
    low, middle, high = (
        f"{v:.{digits}f}" for v in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low}-{high})"


HEADER = (
    "| shape | type | mode | whose step | parameters, M | tokens/s | MFU, % of the peak | of the matmul ceiling, "
    "% | peak memory, MiB | start to first step, s | ours is so many times as fast | foreign load, % |",
    "|---" * 12 + "|",
)


def rows(cell: dict[str, Any], absent: Mapping[str, str]) -> list[str]:
    """Lines of the table, one for each whose step was taken, with medians over rounds, the least and the most; and one
    for peers that are not there (name -> why)."""
    what = [cell["shape"], cell["dtype"], cell["mode"]]
    lines = [line(cell, what, name) for name in cell["peak_mib"] if name != "ceiling"]
    missing = "; ".join(f"{name}: {why}" for name, why in {**cell["failed"], **absent}.items())
    return lines + (
        [f"| {' | '.join([*what, f'not run: {missing}', *8 * ['']])} |"] if missing else []
    )


def line(cell: dict[str, Any], what: list[str], name: str) -> str:
    """One line: rates, and the ratio to ours, are of rounds that both were in."""
    rounds, quiet = chosen(cell, name)
    speeds = [taken["tokens_per_s"] for taken in rounds]
    flops = SHAPES[cell["shape"]].flops_per_token
    peak = peak_tflops(cell["gpu"] or "CPU", cell["dtype"])
    used = [share for s in speeds if (share := mfu(s[name], flops, 1, peak)) is not None]
    return (
        "| "
        + " | ".join(
            [
                *what,
                name,
                f"{cell['parameters'][name] / 1e6:.1f}",
                spread([s[name] for s in speeds]),
                spread(used, 1) if used else "n/a",
                spread([100 * s[name] / s["ceiling"] for s in speeds]),
                f"{cell['peak_mib'][name]:.0f}",
                f"{cell['first_step_s'][name]:.1f}",
                "" if name == "ours" else spread([s["ours"] / s[name] for s in speeds], 2),
                worst(rounds) + ("" if quiet else " (disturbed)"),
            ]
        )
        + " |"
    )


def cells(c: Config, on_gpu: bool) -> Iterator[tuple[Shape, str, str]]:
    """Shape, type and mode of each cell; of a shape with -TYPE, -MODE or -TYPE-MODE behind it those alone. Raises
    SettingsError for a shape that is none."""
    types = ("bfloat16",) if on_gpu else ("float32", "bfloat16")
    modes = (
        ("compiled",) if on_gpu else ("eager", "compiled")
    )  # on a GPU training compiles by itself
    found = []
    for name in c.bench_shapes.split(","):
        shape, *only = name.removeprefix(whole_run.PREFIX).split("-")
        if name in OTHERS:
            continue
        wanted = [
            (dtype, mode)
            for dtype, mode in itertools.product(types, modes)
            if {dtype, mode}.issuperset(only)
        ]
        if shape not in SHAPES or not wanted or (only and name.startswith(whole_run.PREFIX)):
            raise SettingsError(
                [
                    f"BENCH_SHAPES={c.bench_shapes}: {name} is no shape; there are "
                    f"{', '.join([*SHAPES, *OTHERS])}, -{', -'.join([*types, *modes])} behind a shape, "
                    f"and {whole_run.PREFIX} before one"
                ]
            )
        if not name.startswith(whole_run.PREFIX):
            found += [(SHAPES[shape], dtype, mode) for dtype, mode in wanted]
    yield from found


def measure_saving(rounds: int, gpus: int) -> Iterator[dict[str, Any]]:
    """What saving.py finds alone, and with several processes in both ways of spreading a model over them; and what
    adapters.py does."""
    many = gpus or 2
    for processes, how in [(1, "ddp"), *([(many, "ddp"), (many, "fsdp")] if many > 1 else [])]:
        several = [
            "train.torchrun",
            f"--nproc-per-node={processes}",
            "-m",
        ] * (processes > 1)
        done = subprocess.run(
            [sys.executable, "-m", *several, "bench.saving", how, str(rounds + 1)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            check=True,
        )
        yield json.loads(done.stdout.splitlines()[-1])  # torchrun may say something too
    if importlib.util.find_spec("peft"):
        yield from each(tuple(adapters.KINDS), "bench.adapters", str(rounds + 1))
    else:
        sys.stderr.write(
            "checkpoints of fine-tunings are left out: they need what scripts/setup.sh --finetune "
            "installs\n"
        )


def tables(
    c: Config, rounds: int
) -> Iterator[tuple[str, Sequence[str], Iterator[dict[str, Any]], Row]]:
    """The parts of BENCH_SHAPES that are no shapes: key of the results, header, what is found, and its line."""
    import torch

    asked, gpus = c.bench_shapes.split(","), torch.cuda.device_count()
    tokenizer = c.tokenizer if c.tokenizer.endswith(".json") else "train"
    if SAVING in asked:
        yield "checkpoints", saving.HEADER, measure_saving(rounds, gpus), saving.row
    if DATA in asked:
        yield (
            "data",
            data_pipeline.HEADER_ROWS,
            each(data_pipeline.PARTS, "bench.data_pipeline", str(rounds), tokenizer),
            spreading(data_pipeline.row),
        )
    if SAMPLER in asked:
        yield (
            "sampler",
            sampler.HEADER_ROWS,
            each(sampler.PARTS, "bench.sampler", str(rounds)),
            spreading(sampler.row),
        )
    if PLAN in asked:
        yield "planned", planned.HEADER, planned.measure(gpus), planned.line
    if LOGS in asked:
        yield (
            "logs",
            log_reading.HEADER_ROWS,
            said("bench.log_reading", str(rounds)),
            spreading(log_reading.row),
        )
        yield "pages", pages.HEADER_ROWS, said("bench.pages", str(rounds)), spreading(pages.row)
    if TEXT in asked:
        yield (
            "text",
            generation.HEADER_ROWS,
            said("bench.generation", str(rounds)),
            spreading(generation.row),
        )
    if CORE in asked:
        yield (
            "core",
            core_speed.HEADER_ROWS,
            each(core_speed.PARTS, "bench.core_speed", str(rounds)),
            spreading(core_speed.row),
        )
    if WASTE in asked:
        yield (
            "waste",
            waste.HEADER_ROWS,
            each(waste.PARTS, "bench.waste", str(rounds)),
            spreading(waste.row),
        )
    if TUNING in asked:
        yield (
            "tuning",
            tuning_data.HEADER_ROWS,
            said("bench.tuning", str(rounds)),
            spreading(tuning_data.row),
        )
    if runs := [
        name.removeprefix(whole_run.PREFIX) for name in asked if name.startswith(whole_run.PREFIX)
    ]:
        yield (
            "runs",
            whole_run.HEADER_ROWS,
            each(runs, "bench.whole_run", str(rounds)),
            spreading(whole_run.row),
        )


def each(parts: Sequence[str], module: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """What a module finds, each part in a process of its own."""
    for part in parts:
        yield from said(module, part, *arguments)


def spreading(row: Callable[..., str]) -> Row:
    return lambda found: row(found, spread)


def main(arguments: list[str]) -> int:
    """Measure everything, in ROUNDS or as many rounds as the argument says. Return the exit code."""
    rounds = int(arguments[0]) if arguments else ROUNDS
    try:
        c = load_config()
        checkouts, absent = peers.find_checkouts()
        facts = machine()
        todo = list(cells(c, facts["gpu"] is not None))
        beside, unfit = peers.fitting(checkouts if todo else {})
    except SettingsError as error:
        sys.stderr.write(f"{explain_error(error)}\n")
        return 64
    say = sys.stdout.write
    say("".join(f"{name}: {value}\n" for name, value in facts.items()))
    if todo:
        say("\n" + "\n".join(HEADER) + "\n")
    sys.stdout.flush()
    results = []
    for shape, dtype, mode in todo:
        results.append(measure(shape, dtype, mode, beside, rounds, facts["gpu"]))
        say("\n".join(rows(results[-1], absent | unfit)) + "\n")
        sys.stdout.flush()
    if todo:
        say("\n" + "\n".join(peers.notes(results)) + "\n")
    parts: dict[str, list[dict[str, Any]]] = {
        name: []
        for name in (
            "checkpoints",
            "data",
            "sampler",
            "planned",
            "logs",
            "pages",
            "text",
            "core",
            "waste",
            "runs",
        )
    }
    for name, header, finds, written in tables(c, rounds):
        say("\n" + "\n".join(header) + "\n")
        for found in finds:
            parts[name].append(found)
            say(written(found) + "\n")
            sys.stdout.flush()
    path = ROOT / "bench" / "results" / time.strftime("bench_%Y%m%d_%H%M%S.json")
    path.parent.mkdir(exist_ok=True)
    content = {
        "schema": 2,
        "machine": facts,
        "cells": results,
        "peers_absent": absent | unfit,
        **parts,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    say(f"\n{path.relative_to(ROOT)} has all rounds\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
