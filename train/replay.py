"""`make replay STEP=n`: the loss of each sample of a step that was refused, the highest first.

    metrics.jsonl -> the samples of the step's `skip` events -> the newest checkpoint before it, if it is left
    -> their losses one by one -> a table; `make status` and the events have the documents

The weights of the step itself are gone: those of the checkpoint are some steps older. A sample that
stands out with these too is damaged, or unlike the others. If none does, it is not the data.
Exit codes: 0, 64 a setting is bad, 78 record, weights or data are bad.
"""

import logging
import math
import sys
from typing import Any

import numpy as np
import torch

from record.locks import RunFolderError
from record.metrics import read_records
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config
from train.checkpoint.find import committed
from train.data import prepare
from train.data.batch import Loader
from train.distributed.world import World
from train.generate.command import run_command
from train.generate.eval_run import find_shards
from train.generate.load_run import Trained, open_trained
from train.model.hf_import import some

log = logging.getLogger(__name__)

SHOWN = 10  # samples


def replay(config: Config, world: World) -> int:
    """Print the losses of the samples of STEP. Returns the exit code. Raises SettingsError, RunFolderError."""
    paths = RunPaths.of(config.runs_dir, config.run_name, ROOT)
    refused = find_refused(config, paths)
    trained = open_trained(config.replace(step=choose_checkpoint(refused[0]["step"], paths)), world)
    log.info("weights of %s", trained.source)
    loader = open_loader(trained, world)
    for event in refused:
        first, last = event["samples"]
        log.info(
            "\nstep %d was refused (%s): loss %s, gradient norm %s",
            event["step"],
            event["reason"],
            describe(event["loss"]),
            describe(event["grad_norm"]),
        )
        show(compute_losses(trained, loader, range(first, last + 1)))
    log.info(
        "\nmake status RUN_NAME=%s shows the text of the last refused step, and %s the documents of "
        "all, under skip",
        config.run_name,
        paths.metrics,
    )
    return 0


def find_refused(config: Config, paths: RunPaths) -> list[dict[str, Any]]:
    """Return the `skip` events of STEP; of one step there may be several, with other samples each."""
    if not paths.metrics.exists():
        raise RunFolderError(f"RUN_NAME={config.run_name}: there is no record at {paths.metrics}")
    skips = [event for event in read_records(paths.metrics) if event["event"] == "skip"]
    refused = [event for event in skips if event["step"] == config.step]
    if not refused:
        steps = some([str(step) for step in sorted({event["step"] for event in skips})])
        named = "STEP is not set" if config.step is None else f"STEP={config.step} was not refused"
        raise SettingsError([f"{named}. Refused steps of {config.run_name}: {steps or 'none'}."])
    return refused


def choose_checkpoint(step: int, paths: RunPaths) -> int | None:
    """Return the newest checkpoint before a step, or the oldest of all; None if there is none."""
    steps = committed(paths.checkpoints)
    earlier = [saved for saved in steps if saved < step]
    return max(earlier) if earlier else min(steps, default=None)


def open_loader(trained: Trained, world: World) -> Loader:
    """Open the shards that the run was trained with. Raises DataError."""
    config, vocabulary = trained.config, trained.vocabulary
    folders = find_shards(trained)
    sources = prepare.open_sources(config, vocabulary, partial=True, folders=folders)
    return Loader(config, sources, world, vocabulary.end_of_text)


@torch.no_grad()
def compute_losses(
    trained: Trained, loader: Loader, samples: range
) -> list[tuple[float, int, str]]:
    """Return (loss in nats per token, sample, where it lies) for each sample, the highest first.

    Raises DataError.
    """
    located = loader.mixture.locate(np.arange(samples.start, samples.stop))
    windows = loader.read(located, 0, len(samples))
    losses = [
        float(trained.model(*sample)[0]) / trained.config.seq_len
        for sample in loader.micro_batches(windows, 1)
    ]
    rows = list(zip(losses, samples, loader.names(samples), strict=True))
    return sorted(rows, key=lambda row: math.inf if math.isnan(row[0]) else row[0], reverse=True)


def show(rows: list[tuple[float, int, str]]) -> None:
    """Print the highest losses of a step next to their median."""
    middle = np.median([loss for loss, _, _ in rows])
    log.info("%d samples, median loss %.4f nats per token; the highest:", len(rows), middle)
    log.info("    loss      sample  source:epoch:shard:window")
    for loss, sample, name in rows[:SHOWN]:
        log.info("%8.4f  %10d  %s", loss, sample, name)


def describe(number: float | None) -> str:
    """Return a number of the record, which has null for what is not finite."""
    return "not finite" if number is None else f"{number:.4g}"


if __name__ == "__main__":
    sys.exit(run_command(replay, sys.stdout))
