"""How many questions of EVAL_DATA a model answers right, as runs/RUN_NAME/eval/chat_step_N.json.

    questions -> shared out over processes -> letters by likelihood, answers as they are written -> one all-reduce

Of options the one is taken whose letter is the likeliest behind the prompt for a reply; of equal ones the first. Other
answers are written, always the likeliest token, and must be the right one to the letter, but for case, blanks and a
stop at the end. It takes RUN_NAME, by its export where it has fine-tuned, or INIT_FROM.

Exit codes: 0 all was measured, 64 a setting is bad, 78 weights or questions are not to be had.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from export.place import exported_step
from finetune.questions import (
    Asked,
    Sheet,
    choice_question,
    fitting,
    is_same,
    sheet_of,
    written_question,
)
from record.durable import write_whole
from record.metrics import replace_nonfinite
from record.provenance import provenance
from record.run_paths import RunPaths, name_checkpoint
from settings import ROOT, ExpectedError, SettingsError, explain_error
from settings.config import Config
from settings.resolve import show_path
from train.data.sources.source import CorpusError
from train.distributed.world import (
    World,
    broadcast_object,
    raise_on_all_ranks,
    set_timeout,
    sum_over_ranks,
)
from train.evaluate.core.metric import wilson
from train.evaluate.core.score import score_choices
from train.evaluate.validation import FULL_SET
from train.generate import chat_format
from train.generate.command import run_command
from train.generate.load_run import Trained, open_trained
from train.model.generate import Choice, generate
from train.model.hf_import import ForeignError

MORE = 8  # tokens that a written answer may have beyond the right one, before it counts as wrong
log = logging.getLogger(__name__)


def measure(c: Config, world: World) -> int:
    """Ask everything, say it and write it down; returns the exit code."""
    if not c.eval_data:
        raise SettingsError(
            [
                "EVAL_DATA is not set. Give questions with answers that the model was not trained on, "
                "for example EVAL_DATA=held_out.jsonl (docs/pipeline.md)."
            ]
        )
    began = time.perf_counter()
    trained = open_trained(c, world)
    trained.model.to(trained.model.dtype)  # once, and not for each token
    log.info("weights of %s, on %d x %s", trained.source, world.size, world.device_name)
    set_timeout(
        60 * c.eval_minutes * FULL_SET, []
    )  # processes meet at the end only, and one may be slower
    with raise_on_all_ranks(CorpusError):
        try:
            sheet = sheet_of(c)
            chat_format.format_of(trained.vocabulary)
            fitting(
                sheet, trained.vocabulary, trained.config.seq_len, lambda line: log.info("%s", line)
            )
        except Exception as error:  # of many types
            is_expected = isinstance(error, (OSError, ExpectedError))
            kind = "" if is_expected else f"{type(error).__name__}: "
            raise CorpusError(f"{kind}{explain_error(error)}") from error
    found = ask(trained, sheet, world)
    log.info("%s", "\n".join(lines(found)))
    if world.is_first:
        write(c, trained, world, sheet, found, time.perf_counter() - began)
    broadcast_object(None)  # leave together
    return 0


# ---- Asking


def ask(trained: Trained, sheet: Sheet, world: World) -> dict[str, Any]:
    """What became of the questions, the same on all processes. Raises ForeignError for losses that are no numbers."""
    mine = list(enumerate(sheet.asked))[world.rank :: world.size]
    with torch.no_grad():
        chosen = of_choices(trained, [(i, one) for i, one in mine if one.options], world)
        written = of_written(trained, [one for _, one in mine if not one.options])
    sums = sum_over_ranks(
        torch.tensor([*chosen, *written], dtype=torch.float64, device=world.device)
    ).tolist()
    if sums[4]:
        raise ForeignError(
            f"{trained.source}: the model's losses are no finite numbers; its weights are damaged or "
            "diverged; take an earlier checkpoint (STEP)"
        )
    return {
        "rows": sheet.rows,
        "choice": scored(sums[0], sums[1], sums[3], sums[2] / sums[1] if sums[1] else None),
        "written": scored(sums[5], sums[6], sums[7], 0.0 if sums[6] else None),
    }


def scored(right: float, asked: float, too_long: float, chance: float | None) -> dict[str, Any]:
    """Counts with accuracy and its 95 % interval; None where nothing was asked. chance: what guessing gives."""
    share, interval = (right / asked, wilson(int(right), int(asked))) if asked else (None, None)
    return {
        "right": int(right),
        "asked": int(asked),
        "too_long": int(too_long),
        "accuracy": share,
        "interval": interval,
        "chance": chance,
    }


def of_choices(
    trained: Trained, mine: Sequence[tuple[int, Asked]], world: World
) -> tuple[float, ...]:
    """(right, asked, sum of what guessing gives, too long, not finite) of this process's questions with options."""
    c, right, chance, broken = trained.config, 0, 0.0, 0
    made = [choice_question(i, one, trained.vocabulary, c.seq_len) for i, one in mine]
    for batch in batched(
        sorted((q for q in made if not q.too_long), key=len, reverse=True), c.micro_batch_size
    ):
        for question, scores in zip(
            batch, score_choices(trained.model, batch, world.device), strict=True
        ):
            nats = [of for of, _, _ in scores]
            broken += not all(map(math.isfinite, nats))
            right += nats.index(min(nats)) == question.gold
            chance += 1 / len(nats)
    asked = sum(not question.too_long for question in made)
    return right, asked, chance, len(made) - asked, broken


def of_written(trained: Trained, mine: Sequence[Asked]) -> tuple[float, ...]:
    """(right, asked, too long) of this process's questions whose answer is to be written."""
    c, v, right = trained.config, trained.vocabulary, 0
    made = [(one, question) for one in mine if (question := written_question(one, v, c.seq_len))]
    made.sort(key=lambda pair: len(pair[1][0]), reverse=True)
    for batch in batched(made, c.micro_batch_size):
        texts = [prompt for _, (prompt, _) in batch]
        most = max(answer for _, (_, answer) in batch) + MORE
        replies: list[list[int]] = [[] for _ in batch]
        for row in generate(
            trained.model,
            texts,
            most,
            Choice(temperature=0),
            [c.seed] * len(batch),
            v,
            [chat_format.end_of_message(v)],
        ):
            for reply, token in zip(replies, row, strict=True):
                reply += [] if token is None else [token]
        right += sum(
            is_same(v.decode(reply), one.answer)
            for reply, (one, _) in zip(replies, batch, strict=True)
        )
    return right, len(made), len(mine) - len(made)


def batched(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


# ---- Telling


def lines(found: dict[str, Any]) -> list[str]:
    """A line for each kind of question that was asked."""
    told = [
        f"{name}: {words(found[kind])}"
        for kind, name in (("choice", "multiple choice"), ("written", "written answers"))
        if found[kind]["asked"]
    ]
    return told or ["no question was asked"]


def words(of: dict[str, Any]) -> str:
    """31.0% [25.4, 37.2] of 230, guessing 25.0%"""
    low, high = of["interval"]
    return (
        f"{of['accuracy']:.1%} [{100 * low:.1f}, {100 * high:.1f}] of {of['asked']:,}"
        + (f", guessing {of['chance']:.1%}" if of["chance"] else "")
        + (f"; {of['too_long']:,} too long to be asked" if of["too_long"] else "")
    )


def name_of(trained: Trained) -> str:
    """Of the file: by the step that was measured, or by the folder of the weights."""
    folder = ROOT / trained.source
    if trained.facts:
        return f"chat_{name_checkpoint(trained.step)}"
    step = exported_step(folder)
    if step is not None:
        return f"chat_{name_checkpoint(step)}"
    return f"chat_init_{Path(trained.source).name}"


def write(
    c: Config, trained: Trained, world: World, sheet: Sheet, found: dict[str, Any], seconds: float
) -> None:
    """The JSON. Raises CorpusError where there is no room for it."""
    path = RunPaths.of(c.runs_dir, c.run_name, ROOT).evaluation(name_of(trained))
    facts = {
        "schema": 1,
        "weights": trained.source,
        "time": time.time(),
        "seconds": seconds,
        **found,
        "data": c.eval_data,
        "questions": c.eval_examples,
        "seed": c.seed,
        "report": sheet.report,
        "provenance": provenance(world.host, world.size, world.device_name, 0),
    }
    try:
        write_whole(
            path, (json.dumps(replace_nonfinite(facts), indent=1, allow_nan=False) + "\n").encode()
        )
    except OSError as error:
        raise CorpusError(
            f"{path}: cannot be written ({error.strerror}); make room, or choose another RUNS_DIR"
        ) from error
    log.info("written: %s", show_path(path))


if __name__ == "__main__":
    sys.exit(run_command(measure, sys.stdout))
