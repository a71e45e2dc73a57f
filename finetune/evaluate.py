"""`make eval`: ask a fine-tuned model questions, or measure bits per byte and CORE of any other.

    BENCHMARKS   ARC, MMLU, GSM8K and others, by lm-eval (benchmarks.py)
    EVAL_DATA    its questions (chat_eval.py), of a fine-tuned run or of INIT_FROM: those given for this
                 command, or else those that the run was evaluated with
    otherwise    train/generate/eval_run.py

Exit codes are those of train/generate/command.py.
"""

import logging
import sys
from typing import Any

from finetune import benchmarks, chat_eval
from finetune.model_folder import Weights, open_together, stored_settings
from settings import SettingsError
from settings.config import Config
from settings.init_from import parse_shape, read_json
from settings.resolve import find_explicit, resolve
from settings.sources import COMMAND_LINE
from settings.tuning_rules import NO_BENCHMARKS
from train.distributed.world import World, set_timeout
from train.evaluate.validation import FULL_SET
from train.generate import eval_run
from train.generate.command import run_command
from train.model.hf_import import ForeignError

log = logging.getLogger(__name__)


def evaluate(config: Config, world: World) -> int:
    """Measure the model in the way that suits it, and return the exit code."""
    if config.benchmarks == NO_BENCHMARKS:
        config = config.replace(benchmarks="")
    benchmarks.allows_code(config)  # or raises before anything is exported
    settings = stored_settings(config)
    questions = find_questions(config, settings)
    if not (config.benchmarks or questions or settings.get("MODEL")):
        return eval_run.evaluate(config, world)
    # Processes meet at the end only, and one may be slower. The first may have to export the run.
    set_timeout(60 * config.eval_minutes * FULL_SET, [])
    weights = open_together(config, world)
    if config.benchmarks:
        return benchmarks.measure(config, world, weights)
    if questions:
        return chat_eval.measure(config.replace(eval_data=questions), world, weights)
    refuse_other_models(config, weights)
    return eval_run.evaluate(config, world)


def find_questions(config: Config, settings: dict[str, Any]) -> str:
    """Return the EVAL_DATA that the model is to be asked, or "" if it is not asked any.

    Args:
        settings: of the run; {} for INIT_FROM.

    Raises SettingsError if EVAL_DATA is typed for a run that was not fine-tuned.
    """
    questions = config.eval_data if "EVAL_DATA" in find_explicit() else ""
    if not settings:
        return questions
    if settings.get("MODEL"):
        return questions or settings.get("EVAL_DATA", "")
    if questions:
        problem = (
            f"EVAL_DATA={questions}: {config.run_name} was not fine-tuned, so it cannot be asked."
        )
        if resolve().origins["EVAL_DATA"] == COMMAND_LINE:
            problem += (
                f" Fine-tune it first: make finetune MODEL={config.run_name} DATA=chats.jsonl. Or leave "
                "EVAL_DATA out: bits per byte and CORE are measured."
            )
            raise SettingsError([problem])
        log.info("%s Bits per byte and CORE are measured.", problem)
    return ""


def refuse_other_models(config: Config, weights: Weights) -> None:
    """Raise ForeignError if bits per byte and CORE of a fine-tuned run cannot be measured."""
    _, problems = parse_shape(read_json(weights.folder / "config.json"))
    if problems:
        raise ForeignError(
            f"{config.run_name}: Bits per byte and CORE need a Llama or a Qwen3. {problems[0]} Ask this "
            "model questions instead: EVAL_DATA=held_out.jsonl, or BENCHMARKS=arc_easy."
        )


if __name__ == "__main__":
    sys.exit(run_command(evaluate, sys.stdout))
