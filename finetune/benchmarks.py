"""`make eval BENCHMARKS=arc_easy,mmlu`: tasks of EleutherAI's lm-evaluation-harness.

    export -> lm_eval, by the chat template -> table, runs/RUN_NAME/eval/benchmarks_step_N.json

lm-eval is installed into DATA_DIR the first time, and not into .venv, unless .venv has it.
"""

import functools
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from finetune import chat_eval
from finetune.model_folder import Weights
from settings import ROOT, SettingsError
from settings.config import Config
from settings.resolve import build_environment, find_explicit, show_path
from train.data.data_paths import data_dir
from train.data.prepare import one_at_a_time
from train.data.sources.source import CorpusError
from train.distributed.world import World
from train.end_with_parent import end_with_parent

# lm-eval, and what its imports need beyond .venv.
PINS = (
    "lm_eval==0.4.13",
    "sacrebleu==2.6.0",
    "portalocker==4.4.2",
    "tabulate==0.10.0",
    "colorama==0.4.6",
    "lxml==6.1.3",
    "pytablewriter==1.2.1",
    "dataproperty==1.1.1",
    "mbstrdecoder==1.1.5",
    "pathvalidate==3.3.1",
    "tabledata==1.3.5",
    "tcolorpy==0.1.7",
    "typepy==2.0.0",
    "chardet==5.2.0",
    "evaluate==0.4.6",
)
CODE_TASKS = ("humaneval", "mbpp")  # these run what the model writes
ALLOW_CODE = "HF_ALLOW_CODE_EVAL"  # the confirmation that they ask for

log = logging.getLogger(__name__)


def allows_code(config: Config) -> bool:
    """Tell whether tasks may run code of the model. Raises SettingsError if one does and must not."""
    if build_environment({}).get(ALLOW_CODE) == "1":
        return True
    if any(task in config.benchmarks for task in CODE_TASKS):
        problem = (
            f"BENCHMARKS={config.benchmarks}: Runs Python that the model writes. Do so only in a "
            "container or as a user without access to your files and network, and confirm it there: "
            f"{ALLOW_CODE}=1 make eval BENCHMARKS={config.benchmarks} (docs/evaluation.md)."
        )
        raise SettingsError([problem])
    return False


def measure(config: Config, world: World, weights: Weights) -> int:
    """Run lm-eval in one process, and write down what it finds. Returns the exit code."""
    if not world.is_first:
        return 0
    began = time.perf_counter()
    dtype = config.dtype if "DTYPE" in find_explicit() else "auto"
    model = f"pretrained={weights.folder},dtype={dtype}"
    options = ["--tasks", config.benchmarks, "--device", str(world.device)]
    options += ["--batch_size", str(config.micro_batch_size), "--seed", str(config.seed)]
    if config.eval_examples:
        options += ["--limit", str(config.eval_examples)]
    if weights.settings and not weights.is_tuned:
        model += ",add_bos_token=True"  # so does every document in pretraining begin
    else:
        options.append("--apply_chat_template")
    if allows_code(config):
        options.append("--confirm_run_unsafe_code")
    environment = build_environment({"PYTHONPATH": str(install(config))})
    if config.hf_token:
        environment["HF_TOKEN"] = config.hf_token
    with tempfile.TemporaryDirectory(prefix="lm-eval.") as output:
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", model]
        done = subprocess.run(
            [*command, *options, "--output_path", output],
            cwd=ROOT,
            check=False,
            env=environment,
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM, os.getpid()),
        )
        if done.returncode:
            raise CorpusError(f"BENCHMARKS={config.benchmarks}: lm-eval failed, see above.")
        (path,) = Path(output).rglob("results_*.json")
        report = json.loads(path.read_text(encoding="utf-8"))
    results = {name: report[name] for name in ("results", "versions", "n-shot", "n-samples")}
    results |= {"benchmarks": config.benchmarks, "seconds": time.perf_counter() - began}
    chat_eval.write(config, world, weights, "benchmarks", results)
    if config.eval_examples:
        log.info("EVAL_EXAMPLES=0 asks all questions.")
    return 0


def install(config: Config) -> Path:
    """Return the folder that holds lm-eval, after installing it there if needed. Raises CorpusError."""
    if spec := importlib.util.find_spec("lm_eval"):
        return Path(str(spec.origin)).parents[1]
    folder = data_dir(config) / PINS[0].replace("==", "-")
    with one_at_a_time(folder):
        if not (folder / "complete").exists():
            log.info("Installing %s in %s.", PINS[0], show_path(folder))
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            done = subprocess.run([*command, "--target", str(folder), *PINS], check=False)
            if done.returncode:
                raise CorpusError(f"{PINS[0]}: cannot be installed, see above. Check the network.")
            (folder / "complete").touch()
    return folder
