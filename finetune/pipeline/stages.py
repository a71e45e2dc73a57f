"""The settings of each stage of `make pipeline`, and what the stages need, fetched before the first.

python -m finetune.pipeline.stages         check the settings of each stage, and print them for bash
python -m finetune.pipeline.stages inputs  with the settings of base: tokenizer, tasks of CORE, lm-eval

scripts/pipeline.sh runs both, and then the stages, which are targets of make.

Exit codes: 0; 64 a setting is invalid; 78 something is missing or damaged.
"""

import json
import logging
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from export import files
from finetune.conversations import source_of, sources_in
from finetune.pipeline import exercises
from record.durable import write_whole
from settings import ExpectedError, SettingsError, explain_error, load_config, sources
from settings.config import SETTINGS, Config
from settings.declare import format_value, read_section, round_as_typed
from settings.resolve import repeat_typed, resolve, set_target
from settings.sources import DEFAULT
from settings.terminal import complain
from settings.training import Architecture, DiLoCo, Wan
from settings.tuning_rules import NO_BENCHMARKS
from train.data import prepare
from train.data.data_paths import NO_BUNDLE, data_dir, fit_vocabulary, may_shrink, tokenizer_path
from train.data.sources.source import CorpusError
from train.evaluate.core.bundle import open_bundle
from train.generate import chat_format

# What is typed is for every stage that uses it, except these: they are for the base alone.
OF_BASE = {
    *read_section(Architecture),
    *read_section(Wan),
    *read_section(DiLoCo),
    *("PRESET", "DATA", "DATA_MIX", "TOKENIZER", "COMPILE", "ATTENTION", "PROFILE"),
    *("TRAIN_TOKENS", "SEQ_LEN", "BATCH_TOKENS", "ADAM_BETA1", "ADAM_BETA2", "WEIGHT_DECAY"),
    *("LEARNING_RATE", "MIN_LEARNING_RATE", "WARMUP_TOKENS", "LR_SCHEDULE", "DECAY_TOKENS"),
}
# Each stage is given its own.
OF_STAGE = {"RUN_NAME", "EVAL_DATA", "BENCHMARKS", "CORE_BUNDLE", "DRY_RUN", "DETACH"}
# Peak learning rates as fractions of the one of the base.
MID_RATE_DIVISOR = 5
SFT_RATE_DIVISOR = 15
# About 1,000 steps of exercises.py, for a model of a few million parameters.
OF_EXERCISES = {
    "SEQ_LEN": "128",
    "BATCH_TOKENS": "1024",
    "MICRO_BATCH_SIZE": "8",
    "EPOCHS": "1",
    "EVAL_EVERY": "500",
    "LOG_EVERY": "50",
}
# Whatever .env says for the base: a warm-up may be longer than all of a small data set.
OF_TUNING = {
    "PRESET": "finetune",
    "DETACH": "0",
    "MIN_LEARNING_RATE": "0",
    "WARMUP_TOKENS": "0",
    "WEIGHT_DECAY": "0",
    "LR_SCHEDULE": "cosine",
}
BENCHMARKS = "arc_easy,arc_challenge,mmlu,gsm8k"
TARGETS = {"base": "train", "mid": "finetune", "sft": "finetune", "sft_chat": "chat"}  # else eval
PROMPTS = ("Who are you?", "Why is the sky blue?", "What is 7 plus 5?")
EXERCISE_PROMPTS = ("My name is Tovelu.", "Say kimora.", "What follows key in file, key, tree?")

Words = dict[str, str]  # NAME -> value, as typed for a target


def list_stages(config: Config, has_core: bool) -> dict[str, Words]:
    """Return the settings of each stage. An evaluation that is not wanted is missing.

    Args:
        has_core: whether CORE_BUNDLE was set. Its default would be downloaded.
    """
    data = {"mid": config.mid_data, "sft": config.sft_data}
    eval_data = config.eval_data
    tasks = config.benchmarks or BENCHMARKS
    tuning = dict(OF_TUNING)
    if exercises.NAME in data.values():
        paths = exercises.make_files(config)
        for stage, given in data.items():
            if given == exercises.NAME:
                data[stage] = paths[stage]
        eval_data = eval_data or ",".join(paths[kind] for kind in exercises.KINDS)
        tasks = config.benchmarks or NO_BENCHMARKS
        tuning |= OF_EXERCISES
    tuning |= repeat(config, "finetune", OF_BASE)
    if eval_data:
        tuning["EVAL_DATA"] = eval_data
    asking = repeat(config, "eval", OF_BASE)
    scoring = repeat(config, "eval", {"DATA"}) | {"CORE_BUNDLE": NO_BUNDLE}
    if config.benchmarks:  # perhaps in .env, where every evaluation finds it
        asking["BENCHMARKS"] = scoring["BENCHMARKS"] = NO_BENCHMARKS
    stages = {
        "base": repeat(config, "train") | {"PRESET": config.preset, "DETACH": "0"},
        "base_eval": scoring,
        "mid": tuning | tune(config, "base", data["mid"], MID_RATE_DIVISOR),
        "sft": tuning | tune(config, "mid", data["sft"], SFT_RATE_DIVISOR),
        "sft_chat": repeat(config, "chat", OF_BASE) | {"SAMPLE_TEMPERATURE": "0"},
    }
    if has_core:
        stages["base_eval"]["CORE_BUNDLE"] = config.core_bundle
    if eval_data:
        stages["mid_eval"] = asking | {"EVAL_DATA": eval_data}
        stages["sft_eval"] = asking | {"EVAL_DATA": eval_data}
    if tasks != NO_BENCHMARKS:
        stages["sft_benchmarks"] = asking | {"BENCHMARKS": tasks}
    for stage, words in stages.items():
        words["RUN_NAME"] = f"{config.run_name}-{stage.partition('_')[0]}"
    return stages


def repeat(config: Config, target: str, without: Collection[str] = ()) -> Words:
    """Return what was typed for `make pipeline` and has an effect on a target as well."""
    values = config.values()
    words = {}
    for word in shlex.split(repeat_typed(target, without={*OF_STAGE, *without})):
        name, _, value = word.partition("=")
        if name not in SETTINGS or SETTINGS[name].has_effect(values, target):
            words[name] = value
    return words


def tune(config: Config, model: str, data: str, rate_divisor: int) -> Words:
    """Return what a fine-tuning is given. model: the stage whose run it begins from."""
    rate = round_as_typed(config.learning_rate / rate_divisor)
    return {
        "MODEL": f"{config.runs_dir}/{config.run_name}-{model}",
        "DATA": data,
        "LEARNING_RATE": format_value(rate),
    }


def find_problems(config: Config) -> list[str]:
    """Return what the settings of the pipeline lack. Those of the stages are checked one by one."""
    problems = []
    if config.nodes > 1:
        problems.append(
            f"NODES={config.nodes}: A pipeline runs on one machine. Leave NODES out, or start its "
            "stages by hand: make train-node, make finetune-node."
        )
    if config.save_every == 0:
        problems.append("SAVE_EVERY=0: Each stage begins from a checkpoint. Leave it out.")
    if config.eval_tokens == 0:
        problems.append("EVAL_TOKENS=0: The base is evaluated. Leave it out.")
    return problems


def check_stages(stages: Mapping[str, Words]) -> int:
    """Say what make would refuse of each stage. Returns the exit code of the first, 0 if there is none."""
    code = 0
    typed = {"DRY_RUN", *sources.read_command_line(os.environ)}
    others = {name: value for name, value in os.environ.items() if name not in typed}
    for name, words in stages.items():
        target = TARGETS.get(name, "eval")
        given = {"MAKE_TARGET": target, "MAKE_GOALS": target, "MAKE_SETTINGS": " ".join(words)}
        try:
            resolve(others | words | given).check()
        except SettingsError as error:
            title = f"make {target} RUN_NAME={words['RUN_NAME']} would be refused:"
            complain("\n    ".join([title, *error.problems]))
            code = code or error.exit_code
    return code


def find_missing(config: Config) -> list[str]:
    """Return what is wrong with the names of files and data sets."""
    problems = []
    for setting in ("MID_DATA", "SFT_DATA", "EVAL_DATA"):
        data = getattr(config, setting.lower())
        if data in ("", exercises.NAME):
            continue
        try:
            for source, _ in sources_in(data, setting):
                source_of(source, setting)
        except CorpusError as error:
            problems.append(str(error))
    return problems


def print_stages() -> None:
    """Print variables for bash. Raises SettingsError, OSError."""
    resolved = resolve()
    config = resolved.config
    resolved.problems.extend(find_problems(config))
    resolved.check()
    typed = repeat_typed("pipeline")
    names = [word.partition("=")[0] for word in shlex.split(typed)]
    sys.stdout.write(f"unset {' '.join(names)}\n")  # each stage is given what is for it
    stages = list_stages(config, resolved.origins["CORE_BUNDLE"] != DEFAULT)
    inputs = stages["base_eval"] | stages.get("sft_benchmarks", {}) | stages["base"]
    for name, words in {**stages, "inputs": inputs}.items():
        print_array(name, [f"{setting}={value}" for setting, value in words.items()])
    print_array("prompts", EXERCISE_PROMPTS if config.sft_data == exercises.NAME else PROMPTS)
    code = check_stages(stages)
    missing = find_missing(config)
    if missing:
        complain("\n".join(missing))
        code = code or ExpectedError.exit_code
    values = {
        "run": f"{config.runs_dir}/{config.run_name}",
        "untrained": str(untrained_folder(config, stages["base"]["RUN_NAME"])),
        "command": f"make pipeline{typed}",
        "dry_run": "yes" if config.dry_run else "",
        "failed": str(code),
    }
    for name, value in values.items():
        sys.stdout.write(f"{name}={shlex.quote(value)}\n")


def print_array(name: str, words: Sequence[str]) -> None:
    sys.stdout.write(f"{name}=({shlex.join(words)})\n")


# ---- Inputs


def untrained_folder(config: Config, run_name: str) -> Path:
    return data_dir(config) / "untrained" / run_name


def prepare_base(config: Config) -> None:
    """Prepare the data of the base, and what its export has but weights: it prepares conversations.

    Raises CorpusError, and TokenizerError if the tokenizer has no tokens for conversations.
    """
    from train.model.model import NORM_EPS  # with torch, which the settings do not need

    prepare.prepare(config, may_shrink=may_shrink(config))
    config = fit_vocabulary(config)
    vocabulary = prepare.vocabulary(config)
    chat_format.format_of(vocabulary)
    folder = untrained_folder(config, config.run_name)
    contents = files.json_files(config, vocabulary, config.dtype, NORM_EPS)
    for name, content in contents.items():
        write_whole(folder / name, json.dumps(content).encode())
    tokenizer = files.tokenizer_json(tokenizer_path(config).read_bytes())
    write_whole(folder / "tokenizer.json", tokenizer)


def fetch_core(config: Config) -> None:
    if config.core_bundle != NO_BUNDLE:
        open_bundle(config.core_bundle, data_dir(config))


def fetch_benchmarks(config: Config) -> None:
    if config.benchmarks not in ("", NO_BENCHMARKS):
        from finetune import benchmarks

        benchmarks.allows_code(config)
        benchmarks.install(config)


def fetch_inputs() -> int:
    """Do all of it, and say everything that is wrong. Returns the exit code."""
    config = load_config()
    code = 0
    for fetch in (prepare_base, fetch_core, fetch_benchmarks):
        try:
            fetch(config)
        except ExpectedError as error:
            complain(explain_error(error))
            code = max(code, error.exit_code)
    return code


def main(words: Sequence[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        if "inputs" in words:
            return fetch_inputs()
        set_target("pipeline")
        print_stages()
    except SettingsError as error:
        complain(explain_error(error))
        return error.exit_code
    except OSError as error:
        complain(
            f"{error.filename}: Cannot be written ({error.strerror}). Choose another DATA_DIR."
        )
        return ExpectedError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
