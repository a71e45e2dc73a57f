"""`make eval`: ask a fine-tuned model questions, or measure bits per byte and CORE of any other.

A fine-tuned run answers the questions of EVAL_DATA (chat_eval.py): those given for this command, or
else those that it was evaluated with. Weights of INIT_FROM do so where EVAL_DATA is given. All other
models, and runs fine-tuned without EVAL_DATA, are measured by train/generate/eval_run.py.

Exit codes are those of train/generate/command.py.
"""

import logging
import sys

from finetune import chat_eval
from record.run_paths import RunPaths
from settings import ROOT
from settings.config import Config
from settings.resolve import find_explicit
from train.distributed.world import World
from train.generate import eval_run
from train.generate.command import run_command
from train.run_folder import stored_config

log = logging.getLogger(__name__)


def evaluate(c: Config, world: World) -> int:
    """Measure the model in the way that suits it, and return the exit code."""
    questions = find_questions(c)
    if questions:
        return chat_eval.measure(c.replace(eval_data=questions), world)
    return eval_run.evaluate(c, world)


def find_questions(c: Config) -> str:
    """Return the EVAL_DATA that the model is to be asked, or "" if it is not asked any."""
    names = find_explicit()
    questions = c.eval_data if "EVAL_DATA" in names else ""
    run = stored_config(RunPaths.of(c.runs_dir, c.run_name, ROOT)).get("settings", {})
    if not run or (c.init_from and "INIT_FROM" in names and "RUN_NAME" not in names):
        return questions
    if run.get("MODEL"):
        return questions or run.get("EVAL_DATA", "")
    if questions:
        log.info(
            "EVAL_DATA=%s is not used: %s is not a fine-tuned run, so bits per byte and CORE are "
            "measured",
            questions,
            c.run_name,
        )
    return ""


if __name__ == "__main__":
    sys.exit(run_command(evaluate, sys.stdout))
