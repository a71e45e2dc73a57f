"""Which stages there are: the settings and the commands of each.

    base        -> RUN_NAME-base   from text, as make train; and its export
    evaluation                     bits per byte, and CORE where a bundle is given
    chat-base                      questions answered right
    mid         -> RUN_NAME-mid    MODEL=RUN_NAME-base DATA=MID_DATA; and its export
    chat-mid
    sft         -> RUN_NAME-sft    MODEL=RUN_NAME-mid DATA=SFT_DATA; and its export
    chat-sft
    sample                         answers, as `make chat` writes them

The settings of a stage stand over the user's own: DATA of SFT is SFT_DATA. All others are shared.
"""

import dataclasses
from collections.abc import Mapping

from finetune import exercises
from finetune.exercises import data_of
from plan.allow_fail import find_unknown_check
from settings import SettingsError, load_config, tuning_rules
from settings.checks import PRETRAINING
from settings.config import DEFAULTS, SETTINGS, Config
from settings.declare import FROZEN, TRACKED, format_value, round_as_typed
from settings.resolve import Resolved, build_environment, resolve
from train.data.data_paths import NO_BUNDLE

PYTHON, PROMPT = "PYTHON", "PROMPT="  # in a command: the interpreter; what a sample answers
TRAIN = (PYTHON, "-m", "scripts.train")
TUNE = (PYTHON, "-m", "scripts.train", "finetune")
EVAL = (PYTHON, "-m", "train.launcher", "finetune.evaluate")
CHAT_EVAL = ("bash", "scripts/launch.sh", "finetune.chat_eval")  # asks the base too
EXPORT, CHAT = (PYTHON, "-m", "export"), (PYTHON, "-m", "finetune.chat")
CHAT_STAGES = ("base", "mid", "sft")
LONGEST_NAME = 63 - len("-pipeline")

# A setting of a fine-tuning stage -> what the user calls it.
OF_MID = {"DATA": "MID_DATA"}
OF_SFT = {"DATA": "SFT_DATA"}

# Peak learning rates as fractions of the base's LEARNING_RATE; both go down to 0 along a cosine.
MID_RATE_DIVISOR = 10
SFT_RATE_DIVISOR = 30

STAGE_EPOCHS = 1  # passes over MID_DATA and SFT_DATA, in which SOURCE*2 counts twice

# What says where and how fast a stage computes, not what; it may differ where a stage is done.
OF_THE_MACHINE = {
    "DEVICE",
    "NPROC",
    "NODES",
    "DTYPE",
    "COMPILE",
    "ATTENTION",
    "ACTIVATION_CHECKPOINTING",
    "MICRO_BATCH_SIZE",
    "PARALLEL",
    "SHARD_RANKS",
    "GRAD_SYNC",
    "SPIKE_SIGMAS",
}
OF_A_RUN = {
    name for name, field in SETTINGS.items() if field.resume in (FROZEN, TRACKED)
} - OF_THE_MACHINE | {"MAX_STEPS"}
FROZEN_ONES = {name for name, field in SETTINGS.items() if field.resume == FROZEN}


@dataclasses.dataclass(frozen=True)
class Stage:
    """settings: put over the user's; names: of these, as the user calls them; watched: the settings that decide what
    comes out; run: the run that it is about; trains: whether it makes that run."""

    key: str
    title: str
    run: str
    settings: Mapping[str, str]
    commands: tuple[tuple[str, ...], ...]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    watched: frozenset[str] = frozenset()
    trains: bool = False

    @property
    def tunes(self) -> bool:
        return TUNE in self.commands

    def load(self) -> Config:
        """The settings as this stage's commands see them. Raises SettingsError."""
        environ = build_environment(self.settings)
        if not self.tunes:
            return load_config(environ)
        c = load_config(environ, without=PRETRAINING)
        tuning_rules.refuse_unsupported(c)
        return c


def stages_of(c: Config, prompts: tuple[str, ...], core: bool) -> list[Stage]:
    """All stages. prompts: of the sample; core: whether a bundle is given."""
    name = c.run_name
    shared = {"PRESET": c.preset, "DETACH": "0"}
    stages = [
        Stage(
            "base",
            "base",
            f"{name}-base",
            shared | {"RUN_NAME": f"{name}-base"},
            (TRAIN, EXPORT),
            watched=frozenset(OF_A_RUN - {"EVAL_DATA"}),
            trains=True,
        ),
        Stage(
            "evaluation",
            "evaluation",
            f"{name}-base",
            shared | {"RUN_NAME": f"{name}-base"} | ({} if core else {"CORE_BUNDLE": NO_BUNDLE}),
            (EVAL,),
            watched=frozenset({"EVAL_TOKENS", "CORE_BUNDLE", "EVAL_EXAMPLES"}),
        ),
        chat_stage(c, "base", shared),
        tuning(c, "mid", "mid-training", "base", shared, OF_MID, MID_RATE_DIVISOR),
        chat_stage(c, "mid", shared),
        tuning(c, "sft", "SFT", "mid", shared, OF_SFT, SFT_RATE_DIVISOR),
        chat_stage(c, "sft", shared),
    ]
    if c.sample_tokens:
        stages.append(
            Stage(
                "sample",
                "sample",
                f"{name}-sft",
                shared | {"RUN_NAME": f"{name}-sft", "SAMPLES": "1"},
                tuple(("env", f"{PROMPT}{prompt}", *CHAT) for prompt in prompts),
            )
        )
    return stages


def tuning(
    c: Config,
    key: str,
    title: str,
    model: str,
    shared: dict[str, str],
    names: dict[str, str],
    rate_divisor: int,
) -> Stage:
    """Return the stage that fine-tunes what the stage `model` made."""
    settings = shared | {
        "RUN_NAME": f"{c.run_name}-{key}",
        "MODEL": f"{c.runs_dir}/{c.run_name}-{model}",
        "DATA": data_of(c, names["DATA"]),
        "EVAL_DATA": data_of(c, "EVAL_DATA"),
        "EPOCHS": str(STAGE_EPOCHS),
        "LEARNING_RATE": format_value(round_as_typed(c.learning_rate / rate_divisor)),
        "MIN_LEARNING_RATE": "0",
        "WARMUP_TOKENS": "0",
        "WEIGHT_DECAY": "0",
        "LR_SCHEDULE": "cosine",
    }
    for name in tuning_rules.find_unsupported(c):
        settings[name] = format_value(DEFAULTS[name])
    return Stage(
        key,
        title,
        f"{c.run_name}-{key}",
        settings,
        (TUNE, EXPORT),
        names,
        frozenset(OF_A_RUN - {"MODEL"}),
        trains=True,
    )


def chat_stage(c: Config, key: str, shared: dict[str, str]) -> Stage:
    return Stage(
        f"chat-{key}",
        f"chat evaluation of {key}",
        f"{c.run_name}-{key}",
        shared | {"RUN_NAME": f"{c.run_name}-{key}", "EVAL_DATA": data_of(c, "EVAL_DATA")},
        (CHAT_EVAL,),
        watched=frozenset({"EVAL_DATA", "EVAL_EXAMPLES"}),
    )


def own_settings() -> tuple[Config, Resolved]:
    """The settings of the pipeline as a whole, and where they come from. Raises SettingsError with all that is wrong
    with them, and with what only a pipeline asks for."""
    resolved = resolve()
    problems = list(resolved.problems)
    c = resolved.config
    if not c.eval_data and exercises.are_in(c, "SFT_DATA"):
        c = c.replace(eval_data=exercises.NAME)
    given = {name for name, where in resolved.origins.items() if where != "default"}
    problems += [
        f"{name}={format_value(getattr(c, name.lower()))}: a pipeline says that to each of its stages; leave "
        f"it out, and give {instead}"
        for name, instead in (
            ("MODEL", "what the base is made of (PRESET)"),
            ("DATA", "MID_DATA and SFT_DATA"),
            ("STEP", "MAX_STEPS"),
        )
        if name in given and getattr(c, name.lower())
    ]
    problems += [
        f"{name} is not set; give {what}, for example {name}={example}, or {name}={exercises.NAME}, questions "
        "that are made up, to try it out"
        for name, what, example in (
            ("MID_DATA", "conversations and questions to train on behind the base", "chats.jsonl"),
            ("SFT_DATA", "conversations to train on last", "chats.jsonl"),
            ("EVAL_DATA", "questions with answers that are not trained on", "held_out.jsonl"),
        )
        if not getattr(c, name.lower()) and name not in resolved.invalid
    ]
    if len(c.run_name) > LONGEST_NAME:
        problems.append(
            f"RUN_NAME={c.run_name}: of a pipeline must be at most {LONGEST_NAME} long, since its runs are "
            f"called RUN_NAME-base and so on; for example RUN_NAME={c.run_name[:20]}"
        )
    if c.nodes > 1:
        problems.append(
            f"NODES={c.nodes}: a pipeline runs on one machine; leave it out, or start its stages one by "
            "one (make train-node, make finetune-node)"
        )
    unknown = find_unknown_check(c.allow_fail)
    if unknown is not None:
        problems.append(unknown)
    if c.save_every == 0:
        problems.append(
            "SAVE_EVERY=0: each stage starts from the checkpoint of the one before; leave it out"
        )
    if c.eval_tokens == 0:
        problems.append("EVAL_TOKENS=0: a pipeline evaluates its base; leave it out")
    if problems:
        raise SettingsError(problems, resolved.warnings)
    return c, resolved
