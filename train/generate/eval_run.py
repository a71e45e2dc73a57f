"""`make eval`: what a run's checkpoint is worth, as tables and as runs/RUN_NAME/eval/step_N.json.

    weights -> validation loss and bits per byte of each source -> the CORE metric beside GPT-2's -> JSON

It reads a run, and may do so while that trains. Exit codes: 0 all was measured, 64 a setting is bad, 78 weights, data
or bundle are not to be had (what could be measured is printed and written all the same).
"""

import dataclasses
import json
import logging
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from record.durable import write_whole
from record.metrics import replace_nonfinite
from record.provenance import provenance
from record.run_paths import RunPaths, name_checkpoint
from settings import ROOT, SettingsError
from settings.config import Config
from settings.resolve import show_path
from train.assemble import padded_lengths
from train.data import prepare
from train.data.data_paths import NO_BUNDLE, data_dir
from train.data.manifest import DataError
from train.data.sources.source import CorpusError
from train.distributed import parallel
from train.distributed.world import (
    PeersMissing,
    World,
    from_first,
    join,
    leave,
    report_exit,
    set_timeout,
    together,
)
from train.evaluate.core.metric import Counts, Result, format_table, references
from train.evaluate.core.score import Core, open_core
from train.evaluate.core.tasks import CoreError
from train.evaluate.scoring import ScoringFailed
from train.evaluate.validation import FULL_SET, Evaluator, Validation
from train.generate.load_run import PROBLEMS, Trained, open_trained, settings_of_command
from train.run_folder import stored_config

log = logging.getLogger(__name__)

STOPS = (signal.SIGINT, signal.SIGTERM)


def main(measure: Callable[[Config, World], int] | None = None) -> int:
    """measure: what else than `evaluate` is done with the settings; it returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled"
    )  # DCP, in one process
    for number in STOPS:
        signal.signal(number, stop)
    try:
        c, remarks = settings_of_command()
        world = join(c, trains=False)
        if not world.is_first:
            logging.getLogger().setLevel(logging.WARNING)
        for remark in remarks:
            log.info("%s", remark)
        code = (measure or evaluate)(c, world)
    except SettingsError as error:
        log.error("%s", error)
        code = error.exit_code
    except PeersMissing as error:
        log.error("%s", error)
        code = 69
    except (CorpusError, *PROBLEMS) as error:
        log.error("%s", error)
        code = 78
    except KeyboardInterrupt:
        log.info("interrupted: nothing was written; the same command begins again")
        sys.stdout.flush()
        os._exit(130)  # other processes may be gone, and what waits for them would wait for long
    report_exit(code)
    leave()
    return code


def stop(number: int, frame: FrameType | None) -> None:
    """The first signal interrupts; one Ctrl-C arrives several times, from the terminal and from the launcher."""
    for other in STOPS:
        signal.signal(other, lambda *_: None)
    raise KeyboardInterrupt


def evaluate(c: Config, world: World) -> int:
    """Measure what can be measured; returns the exit code."""
    began = time.perf_counter()
    trained = open_trained(c, world, split=parallel.is_split(c, world))
    log.info(
        "weights of %s, step %d, %d tokens, on %d x %s",
        trained.source,
        trained.step,
        trained.tokens,
        world.size,
        world.device_name,
    )
    set_timeout(
        60 * c.eval_minutes * FULL_SET, []
    )  # ranks meet at the end only, and one may be slower
    core, problems = None, list[str]()
    try:  # what is damaged shows before hours of measuring
        if c.core_bundle != NO_BUNDLE:
            core = open_core(trained.config, trained.vocabulary, world)
    except CoreError as error:
        problems.append(f"no CORE: {error}")
    found: dict[str, Any] = {}
    try:
        validation = validate(trained, world)
        found |= of_validation(validation)
        say_validation(validation)
    except (DataError, CorpusError, ScoringFailed) as error:
        problems.append(f"no validation loss: {error}")
    if core:
        try:
            found |= {"core": measure(core, trained)}
        except ScoringFailed as error:
            problems.append(f"no CORE: {error}")
    if world.is_first:
        write(c, trained, world, found, problems, time.perf_counter() - began)
    for problem in problems:
        log.error("%s", problem)
    from_first(None)  # leave together
    return 78 if problems else 0


# ---------------------------------------------------------------------------------------------------
# Validation
# ---------------------------------------------------------------------------------------------------


def validate(trained: Trained, world: World) -> Validation:
    """All the held-out text that the end of the run scores. Raises DataError, CorpusError, ScoringFailed, on all ranks."""
    c, v = trained.config, trained.vocabulary
    held_out = None
    with together(DataError, CorpusError):
        if trained.facts:
            stored = stored_config(RunPaths.of(c.runs_dir, c.run_name, ROOT))
            held_out = stored.get("validation_shards")
        sources = prepare.open_sources(c, v, partial=True, folders=find_held_out(trained))
        evaluator = Evaluator(c, sources, padded_lengths(v, c), world, v.end_of_text, held_out)
    found = evaluator(trained.model, full=True)
    assert found  # nothing interrupts it but the end of the process
    return found


def find_held_out(trained: Trained) -> dict[str, Path] | None:
    """Find the shards with the text that the run held out; None where any text will do. Raises DataError.

    Held-out text of other shards may be text that the run was trained on.
    """
    c = trained.config
    fingerprint = trained.facts.get("checkpoint", {}).get("data", {}).get("fingerprint")
    if not fingerprint:
        return None
    folders = prepare.find_folders(c, trained.vocabulary, fingerprint)
    if folders is None:
        raise DataError(explain_absence(c))
    return folders


def explain_absence(c: Config) -> str:
    """Say that the shards of a run are not there, and how to make them."""
    paths = RunPaths.of(c.runs_dir, c.run_name, ROOT)
    trained_with = stored_config(paths)["settings"].get("DATA_DIR", "")
    text = f"DATA={shlex.quote(c.data)}" if c.pretrains_on_data else f"DATA_MIX={c.data_mix}"
    folder = show_path(data_dir(c))
    return (
        f"the text that {c.run_name} held out is not in DATA_DIR={folder}. What there is of {text} is "
        "another revision, and the run may have been trained on what that holds out. Set DATA_DIR to a "
        f"copy of the folder that the run was trained with, which was DATA_DIR={trained_with}. Or bring "
        f"the text back as it was then and run: make data TOKENIZER={show_path(paths.tokenizer)} "
        f"VOCAB_SIZE={c.vocab_size} {text} DATA_DIR={folder}"
    )


def of_validation(found: Validation) -> dict[str, Any]:
    """As a record of an evaluation has it."""
    return {
        "val_loss": found.loss,
        "val_bpb": found.bpb,
        "scored_tokens": found.tokens,
        "scored_bytes": found.text_bytes,
        "sources": {
            name: {
                "val_loss": of.loss,
                "val_bpb": of.bpb,
                "scored_tokens": of.tokens,
                "scored_bytes": of.text_bytes,
            }
            for name, of in found.by_source.items()
        },
    }


def say_validation(found: Validation) -> None:
    names = [*found.by_source, "all"]
    width = max(map(len, names))
    log.info("\n%s  nats/token  bits/byte      tokens       bytes", "validation".ljust(width))
    for name, of in [*found.by_source.items(), ("all", found)]:
        log.info(
            "%s  %10.4f %10.4f %11d %11d",
            name.ljust(max(width, 10)),
            of.loss,
            of.bpb,
            of.tokens,
            of.text_bytes,
        )


# ---------------------------------------------------------------------------------------------------
# CORE
# ---------------------------------------------------------------------------------------------------


def measure(core: Core, trained: Trained) -> dict[str, Any]:
    """The metric, said as a table. Raises ScoringFailed."""
    began, bundle = time.perf_counter(), core.bundle
    asked = f"at most {core.examples} questions" if core.examples else "all questions"
    log.info("\nCORE: %s of each of %d tasks", asked, len(bundle.tasks))
    names = {task.label: number for number, task in enumerate(bundle.tasks, 1)}

    def progress(what: str) -> None:
        if what in names:
            log.info(
                "%d/%d %s, %.0f s so far",
                names[what],
                len(names),
                what,
                time.perf_counter() - began,
            )

    counts: Mapping[str, Counts] = core(trained.model, progress=progress) or {}
    result, others = Result.of(bundle.tasks, counts, bundle.missing), references(bundle.tables)
    log.info("")
    for line in format_table(result, others):
        log.info("%s", line)
    log.info("%s", result.describe())
    if core.examples:
        log.info(
            "of each task %d questions at most, always the same; EVAL_EXAMPLES=0 takes all, as GPT-2's figures do",
            core.examples,
        )
    source = (
        "the bundle's tables"
        if bundle.tables
        else "karpathy/nanochat, dev/estimate_gpt3_core.ipynb"
    )
    log.info("GPT-2: centered accuracies from %s", source)
    return result.record() | {
        "bundle": {
            "path": show_path(bundle.path),
            "sha256": bundle.sha256,
            "missing": bundle.missing,
        },
        "seconds": time.perf_counter() - began,
        "examples": core.examples,
        "lacking": result.lacking,
        "tasks": {
            label: dataclasses.asdict(score.counts)
            | {
                "shots": score.task.shots,
                "kind": score.task.kind,
                "baseline": score.task.baseline,
                "accuracy": score.accuracy,
                "centred": score.centred,
                "interval": score.interval,
            }
            for label, score in result.scores.items()
        },
        "gpt2": {"source": source, "centred": others},
    }


def write(
    c: Config,
    trained: Trained,
    world: World,
    found: dict[str, Any],
    problems: list[str],
    seconds: float,
) -> None:
    """The JSON of an evaluation, in the run's folder; said where."""
    name = (
        name_checkpoint(trained.step)
        if trained.facts
        else f"init_{trained.source.rstrip('/').rpartition('/')[2]}"
    )
    path = RunPaths.of(c.runs_dir, c.run_name, ROOT).evaluation(name)
    facts = {
        "schema": 1,
        "step": trained.step,
        "tokens": trained.tokens,
        "weights": trained.source,
        "time": time.time(),
        "seconds": seconds,
        "problems": problems,
        **found,
        "settings": trained.config.stored(),
        "provenance": provenance(world.host, world.size, world.device_name, 0),
    }
    try:
        if path.exists():  # it may have taken hours, and have what this one lacks
            path.replace(path.with_name(f"{path.stem}_until_{time.strftime('%Y%m%d_%H%M%S')}.json"))
        write_whole(
            path, (json.dumps(replace_nonfinite(facts), indent=1, allow_nan=False) + "\n").encode()
        )
    except OSError as error:
        problems.append(
            f"{path}: cannot be written ({error.strerror}); make room, or choose another RUNS_DIR"
        )
        return
    log.info("written: %s", show_path(path))


if __name__ == "__main__":
    sys.exit(main())
