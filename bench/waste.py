"""What is no training: evaluation, checkpoints and log at the default intervals; and what Muon costs beside AdamW.

    python -m bench.waste PART ROUNDS

`intervals`: each part is measured alone, by the functions that training calls, and its share computed:
forward passes of EVAL_TOKENS behind EVAL_EVERY steps, a copy for a checkpoint behind SAVE_MINUTES, record and status
at every step. `muon`: whole steps of both optimizers in turn. Writes a JSON line.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import ours
from doctor.gpu_probe import messages, worker
from doctor.gpu_probe.foreign_load import Foreign, worst
from doctor.gpu_probe.shapes import SHAPES, Shape
from record.recorder import Recorder
from record.run_paths import RunPaths
from record.status import Status
from settings.config import Config
from train.checkpoint import checkpoint
from train.checkpoint.saver import Saver

PARTS = ("intervals", "muon")
LOGGED = 100  # steps, of which the log is timed
WANTED = 2.0  # per cent, of all three together at most
HEADER_ROWS = (
    "| of the time, at default intervals | % | of it | wanted | foreign load, % |",
    "|---|---|---|---|---|",
)


class Trainer(ours.Trainer):
    """One with the settings of a run, compiled where there is a GPU."""

    def __init__(self, shape: Shape, optimizer: str, micro_batches: int = 1, **settings: Any):
        on_gpu = worker.device().type == "cuda"
        c = ours.config(shape, "bfloat16" if on_gpu else "float32", compiled=on_gpu)
        super().__init__(
            c.replace(
                optimizer=optimizer,
                batch_tokens=micro_batches * c.batch_tokens,
                **settings,
            ).derived(),
            shape,
            micro_batches,
        )

    @torch.no_grad()
    def evaluate(self) -> None:
        """As many tokens as an evaluation while training has."""
        for _ in range(-(-self.c.eval_tokens // self.part[0].numel())):
            self.model(*self.part)


def seconds(work: Callable[[], object]) -> float:
    worker.synchronize()
    began = time.perf_counter()
    work()
    worker.synchronize()
    return time.perf_counter() - began


def intervals(shape: Shape, rounds: int, scratch: Path, **settings: Any) -> dict[str, Any]:
    """Shares in per cent of each part, in every round."""
    trainer = Trainer(shape, "adamw", **settings)
    c, paths = trainer.c, RunPaths(scratch)
    recorder, status = Recorder(paths, True, 0, 10**6, c.log_every), Status(paths.status, True)
    saver = Saver(paths.checkpoints, c, trainer.world, checkpoint.needed_bytes(trainer.model))
    trainer.step()
    saver.warm_up(trainer.model, trainer.optimizer)
    saver.wait()
    trainer.evaluate()
    taken = []
    for number in range(1, rounds + 1):
        foreign = Foreign([], time.monotonic())
        step_s = statistics.median(seconds(trainer.step) for _ in range(3))

        def log() -> None:
            for step in range(1, LOGGED + 1):
                recorder.step(
                    step,
                    step * c.batch_tokens,
                    loss=3.0,
                    lr=1e-3,
                    grad_norm=0.5,
                    step_ms=1.0,
                    tokens_per_s=1.0,
                    mfu=None,
                    mfu_causal=None,
                    mem_gib=1.0,
                    data_wait_s=0.0,
                )
                status.beat(step=step, last_step=10**6, loss=3.0, step_s=1.0)

        log_s = seconds(log) / LOGGED
        eval_s = seconds(trainer.evaluate)
        save_s = seconds(
            lambda step=number: saver.start(  # type: ignore[misc]
                step, trainer.model, trainer.optimizer, {"data": {}}
            )
        )
        saver.wait()
        saver.poll()
        taken.append(
            {
                "step_s": step_s,
                **shares(c, step_s, eval_s, save_s, log_s),
                "foreign_percent": foreign.percent(time.monotonic()),
            }
        )
    recorder.close()
    return {"part": "intervals", "shape": shape.name, "rounds": taken}


def shares(
    c: Config, step_s: float, eval_s: float, save_s: float, log_s: float
) -> dict[str, float]:
    """Per cent of the time that each part takes, from what it took once; all together: of steps with all of them."""
    a_step = {"evaluation": eval_s / c.eval_every, "log": log_s}
    # a checkpoint comes by the clock: in SAVE_MINUTES there is one
    save = save_s / (60 * c.save_minutes + save_s)
    whole = (step_s + sum(a_step.values())) / (1 - save)
    return {name: 100 * took / whole for name, took in a_step.items()} | {"checkpoint": 100 * save}


def muon(shape: Shape, rounds: int) -> dict[str, Any]:
    """Seconds of a step with each optimizer, in turn."""
    trainers = {name: Trainer(shape, name) for name in ("adamw", "muon")}
    for trainer in trainers.values():
        trainer.step()
    taken = list[dict[str, float | None]]()
    for _ in range(rounds):
        foreign = Foreign([], time.monotonic())
        took = {
            name: statistics.median(seconds(trainer.step) for _ in range(3))
            for name, trainer in trainers.items()
        }
        taken.append({**took, "foreign_percent": foreign.percent(time.monotonic())})
    return {"part": "muon", "shape": shape.name, "rounds": taken}


def measure(part: str, rounds: int, shape: Shape, **settings: Any) -> dict[str, Any]:
    if part == "muon":
        return muon(shape, rounds)
    with tempfile.TemporaryDirectory() as scratch:
        return intervals(shape, rounds, Path(scratch), **settings)


def row(found: dict[str, Any], spread: Callable[..., str]) -> str:
    """A line of the table: medians over rounds, with the least and the most."""
    rounds = found["rounds"]
    if found["part"] == "muon":
        return (
            f"| a step of {found['shape']} with Muon, of one with AdamW | "
            f"{spread([100 * r['muon'] / r['adamw'] for r in rounds], 1)} | "
            f"{spread([1000 * r['muon'] for r in rounds], 1)} ms and "
            f"{spread([1000 * r['adamw'] for r in rounds], 1)} ms | | {worst(rounds)} |"
        )
    names = ("evaluation", "checkpoint", "log")
    parts = ", ".join(f"{name} {spread([r[name] for r in rounds], 3)}" for name in names)
    return (
        f"| {found['shape']}: evaluation, checkpoints and log | "
        f"{spread([sum(r[name] for name in names) for r in rounds], 2)} | {parts} | under {WANTED:g} | "
        f"{worst(rounds)} |"
    )


if __name__ == "__main__":
    messages.say(
        **measure(
            sys.argv[1], int(sys.argv[2]), SHAPES["gpt2" if torch.cuda.is_available() else "s4k"]
        )
    )
