"""`make eval`: scores a run's checkpoint. Prints tables, and writes runs/RUN_NAME/eval/step_N.json.

    weights -> validation loss and bits per byte of each source -> CORE, next to GPT-2's figures -> JSON

It only reads the run, which may train meanwhile. Exit codes: those of command.py; 78 also where
weights, data or bundle are missing or damaged. What could be measured is printed and written all the
same.
"""

import dataclasses
import itertools
import json
import logging
import shlex
import sys
import time
from collections.abc import Mapping
from typing import Any

from record.durable import write_whole
from record.metrics import replace_nonfinite
from record.provenance import provenance
from record.run_paths import RunPaths, name_checkpoint
from settings import ROOT, SettingsError
from settings.checks import LEAST_TOKENS
from settings.config import Config
from settings.resolve import show_path
from train.console import QUIET_S
from train.data import prepare
from train.data.data_paths import NO_BUNDLE, data_dir
from train.data.manifest import DataError
from train.data.shards import ShardSet
from train.data.sources.source import CorpusError
from train.distributed import parallel
from train.distributed.world import World, broadcast_object, raise_on_all_ranks, set_timeout
from train.evaluate.core.metric import Score, format_table
from train.evaluate.core.score import Core, open_core
from train.evaluate.core.tasks import CoreError
from train.evaluate.scoring import ScoringFailed
from train.evaluate.validation import FULL_SET, Evaluator, Validation
from train.generate.command import run_command
from train.generate.load_run import Trained, open_trained
from train.open_data import padded_lengths

log = logging.getLogger(__name__)


def evaluate(config: Config, world: World) -> int:
    """Measure what can be measured. Returns the exit code. Raises ExpectedError."""
    if config.eval_tokens < LEAST_TOKENS:
        raise SettingsError(
            [
                f"EVAL_TOKENS={config.eval_tokens}: Must be at least {LEAST_TOKENS} for make eval, which "
                "scores held-out text. Set for example EVAL_TOKENS=65536."
            ]
        )
    began = time.perf_counter()
    trained = open_trained(config, world, split=parallel.is_split(config, world))
    log.info(
        "weights of %s, step %d, %d tokens, on %d x %s",
        trained.source,
        trained.step,
        trained.tokens,
        world.size,
        world.device_name,
    )
    # Ranks meet at the end only, and one may be slower.
    set_timeout(60 * config.eval_minutes * FULL_SET, [])
    core = None
    problems: list[str] = []
    results: dict[str, Any] = {}
    try:  # a damaged bundle shows before hours of measuring
        if config.core_bundle != NO_BUNDLE:
            core = open_core(trained.config, trained.vocabulary, world)
    except CoreError as error:
        problems.append(f"no CORE: {error}")
    try:
        results |= describe_validation(validate(trained, world))
    except (DataError, CorpusError, ScoringFailed) as error:
        problem = f"no validation loss: {error}"
        if not trained.facts and not isinstance(error, ScoringFailed):
            tokenizer = shlex.quote(trained.config.tokenizer)
            problem += (
                f" TOKENIZER={tokenizer}. The held-out text of DATA_MIX must be prepared with the "
                f"tokenizer of {trained.source}"
            )
        problems.append(problem)
    try:
        if core:
            results["core"] = measure(core, trained)
    except ScoringFailed as error:
        problems.append(f"no CORE: {error}")
    if world.is_first:
        write(config, trained, world, results, problems, time.perf_counter() - began)
    for problem in problems:
        log.error("%s", problem)
    broadcast_object(None)  # leave together
    return 78 if problems else 0


# ---------------------------------------------------------------------------------------------------
# Validation
# ---------------------------------------------------------------------------------------------------


def validate(trained: Trained, world: World) -> Validation:
    """Score the held-out text that the end of the run scores.

    Raises DataError, CorpusError, ScoringFailed, on all ranks.
    """
    config, vocabulary = trained.config, trained.vocabulary
    held_out = trained.facts.get("validation_shards")
    with raise_on_all_ranks(DataError, CorpusError):
        folders = {}
        if origin := find_origin(trained):
            folders = prepare.find_folders(config, vocabulary, origin)
        sources = prepare.open_sources(config, vocabulary, True, folders)
        refuse_other_shards(trained, sources)
        lengths = padded_lengths(vocabulary, config)
        evaluator = Evaluator(config, sources, lengths, world, vocabulary.end_of_text, held_out)
    total = len(evaluator.list_batches(full=True))
    done = itertools.count(1)
    said_at = time.monotonic()

    def progress(what: str) -> None:
        nonlocal said_at
        if what != "batch":
            return
        number = next(done)
        if time.monotonic() - said_at >= QUIET_S:
            said_at = time.monotonic()
            log.info("evaluating: %d of %d batches", number, total)

    log.info("evaluating %d batches of held-out text", total)
    result = evaluator(trained.model, full=True, progress=progress)
    assert result  # only the end of the process interrupts it
    return result


def find_origin(trained: Trained) -> str:
    """Return the hash of where the text of the run comes from; "" for INIT_FROM."""
    fingerprint: str = trained.manifest.get("data", {}).get("fingerprint", "")
    return fingerprint.rpartition("-")[2]


def refuse_other_shards(trained: Trained, sources: Mapping[str, ShardSet]) -> None:
    """Raise DataError unless these shards are those that the run was trained with.

    What other shards hold out may be text that the run was trained on.
    """
    if not prepare.hash_origin(sources).startswith(find_origin(trained)):
        raise DataError(explain_absence(trained.config, trained.facts["settings"]))


def explain_absence(config: Config, stored: Mapping[str, Any]) -> str:
    """Say that the shards of a run with these stored settings are not there, and how to make them."""
    run = RunPaths.of(config.runs_dir, config.run_name, ROOT)
    text = f"DATA_MIX={config.data_mix}"
    if config.pretrains_on_data:
        text = f"DATA={shlex.quote(config.data)}"
    folder = show_path(data_dir(config))
    return (
        f"the text that {config.run_name} held out is not in DATA_DIR={folder}. What there is of {text} is "
        "another revision, and the run may have been trained on what that holds out. Set DATA_DIR to a "
        f"copy of the folder that the run was trained with, which was DATA_DIR={stored.get('DATA_DIR', '')}. Or bring "
        f"the text back as it was then and run: make data TOKENIZER={show_path(run.tokenizer)} "
        f"VOCAB_SIZE={config.vocab_size} {text} DATA_DIR={folder}"
    )


def describe_validation(validation: Validation) -> dict[str, Any]:
    """Print the numbers as a table, and return them for the JSON."""
    rows = [*validation.by_source.items(), ("all", validation)]
    width = max(10, *(len(name) for name, _ in rows))
    log.info("\n%s  nats/token  bits/byte      tokens       bytes", "validation".ljust(width))
    facts = []
    for name, part in rows:
        values = part.loss, part.bpb, part.tokens, part.text_bytes
        log.info("%s  %10.4f %10.4f %11d %11d", name.ljust(width), *values)
        keys = ("val_loss", "val_bpb", "scored_tokens", "scored_bytes")
        facts.append(dict(zip(keys, values, strict=True)))
    *parts, whole = facts
    return {**whole, "sources": dict(zip(validation.by_source, parts, strict=True))}


# ---------------------------------------------------------------------------------------------------
# CORE
# ---------------------------------------------------------------------------------------------------


def measure(core: Core, trained: Trained) -> dict[str, Any]:
    """Measure CORE and print it as a table. Raises ScoringFailed."""
    began = time.perf_counter()
    bundle = core.bundle
    most = trained.config.eval_examples
    questions = f"at most {most} questions" if most else "all questions"
    log.info("\nCORE: %s of each of %d tasks", questions, len(bundle.tasks))

    def progress(what: str) -> None:
        if what not in ("batch", "others"):
            log.info("%s, %.0f s so far", what, time.perf_counter() - began)

    result = core(trained.model, progress=progress)
    assert result  # only the end of the process interrupts it
    log.info("")
    for line in format_table(result, bundle.tables):
        log.info("%s", line)
    log.info("%s", result.describe())
    if most:
        log.info("EVAL_EXAMPLES=0 asks all questions.")
    return result.record() | {
        "bundle": {
            "path": show_path(bundle.path),
            "sha256": bundle.sha256,
            "missing": bundle.missing,
        },
        "seconds": time.perf_counter() - began,
        "examples": most,
        "lacking": result.unscored,
        "tasks": {label: facts_of(score) for label, score in result.scores.items()},
        "gpt2": {"source": "the bundle's tables", "centred": bundle.tables},
    }


def facts_of(score: Score) -> dict[str, Any]:
    """Return a task's result for the JSON."""
    facts = dataclasses.asdict(score)
    task = facts.pop("task")
    facts |= {name: task[name] for name in ("shots", "kind", "baseline")}
    return facts | {name: getattr(score, name) for name in ("accuracy", "centred", "interval")}


def write(
    config: Config,
    trained: Trained,
    world: World,
    results: dict[str, Any],
    problems: list[str],
    seconds: float,
) -> None:
    """Write the JSON of an evaluation into the run's folder. A problem with that is added to `problems`."""
    name = name_checkpoint(trained.step)
    if not trained.facts:
        name = f"init_{trained.source.rstrip('/').rpartition('/')[2]}"
    path = RunPaths.of(config.runs_dir, config.run_name, ROOT).evaluation(name)
    facts = {
        "schema": 1,
        "step": trained.step,
        "tokens": trained.tokens,
        "weights": trained.source,
        "time": time.time(),
        "seconds": seconds,
        "problems": problems,
        **results,
        "settings": trained.config.stored(),
        "provenance": provenance(world.host, world.size, world.device_name, 0),
    }
    text = json.dumps(replace_nonfinite(facts), indent=1, allow_nan=False) + "\n"
    try:
        if path.exists():  # it may have taken hours, and have what this one lacks
            path.replace(path.with_name(f"{path.stem}_until_{time.strftime('%Y%m%d_%H%M%S')}.json"))
        write_whole(path, text.encode())
    except OSError as error:
        problems.append(
            f"{path}: cannot be written ({error.strerror}); make room, or choose another RUNS_DIR"
        )
        return
    log.info("written: %s", show_path(path))


if __name__ == "__main__":
    sys.exit(run_command(evaluate, sys.stdout))
