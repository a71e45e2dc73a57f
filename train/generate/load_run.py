"""Open what a run has trained, for `make eval`, `make sample` and `make export`.

    runs/RUN_NAME/config.json     -> shape, and all settings that the weights were trained with
                 /checkpoints     -> weights, of the newest checkpoint that verifies or of STEP
                 /tokenizer.json  -> tokenizer; without it, the one of TOKENIZER
    INIT_FROM                     -> all three, if there is no such run: a folder in Hugging Face format

The settings of the run hold. A command may choose where and how it computes. A shape that differs
from the run's is refused. Nothing is written, so the run may train meanwhile.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from record.default_run import choose_run, require_run
from record.locks import RunFolderError, is_at_work
from record.regular_file import limit_silence
from record.run_paths import RunPaths
from settings import ROOT, ExpectedError, SettingsError
from settings.checks import (
    CHECKS,
    check_attention,
    check_heads,
    check_kv_heads,
    check_mixture,
    check_nodes,
    check_tokenizer,
    explain,
)
from settings.config import DEFAULTS, SETTINGS, Config, build_config
from settings.declare import FREE, format_value
from settings.init_from import SHAPE, explain_missing, parse_shape
from settings.resolve import find_explicit, name_run, resolve, show_path
from settings.sources import add_origin, parse
from train.checkpoint import checkpoint
from train.checkpoint.find import committed, find_latest, folder_of
from train.checkpoint.identity import check_identity
from train.checkpoint.manifest import CheckpointError, verify
from train.data import prepare
from train.data.data_paths import tokenizer_path
from train.data.sources.source import CorpusError
from train.data.tokenizer import TokenizerError, Vocabulary, load
from train.distributed import parallel
from train.distributed.world import World, broadcast_object, choose_device, raise_on_all_ranks
from train.model import attention, hf_import
from train.model.hf_import import some
from train.model.model import Transformer, build
from train.run_folder import stored_config, stored_norm_eps

# A command may be given these only as the run has them: they say what the weights compute and mean.
SAME = {*SHAPE, "INIT_FROM", "SEQ_LEN", "DOC_MASK", "DATA_MIX"}
# The command's if it is given them, else the run's.
MAY_DIFFER = {
    "DTYPE",
    "MICRO_BATCH_SIZE",
    "PARALLEL",
    "SHARD_RANKS",
    "EVAL_TOKENS",
    "SEED",
    "TOKENIZER",
}
# Always the command's: where and how it computes, and what is accepted on resume as well.
ALWAYS_THE_COMMANDS = {name for name, declared in SETTINGS.items() if declared.resume == FREE}
ALWAYS_THE_COMMANDS |= {"DEVICE", "NPROC", "NODES", "ATTENTION", "COMPILE"}
ALWAYS_THE_COMMANDS -= {"PRESET", "MAX_STEPS"}

# Rules about steps: a command that takes none need not keep them.
OF_TRAINING = CHECKS.keys() - {check_attention, check_mixture, check_nodes}

LONGEST = 4096  # default of SEQ_LEN for a folder that allows more: masks and windows grow with it


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """Weights, and what is known of them.

    Attributes:
        config: the run's settings, with what the command may choose.
        folder: of the weights.
        facts: the run's config.json, and "checkpoint" with the manifest. {} for INIT_FROM.
        norm_eps: epsilon of RMSNorm, if it is not ours.
        tokenizer: the run's own, if it has one and the command was given no other. Else TOKENIZER's.
    """

    config: Config
    folder: Path
    facts: dict[str, Any]
    norm_eps: float | None
    tokenizer: Path | None

    @property
    def manifest(self) -> dict[str, Any]:
        """Of the checkpoint; {} for INIT_FROM."""
        return self.facts.get("checkpoint", {})

    @property
    def step(self) -> int:
        """Of the checkpoint; 0 for INIT_FROM."""
        return int(self.manifest.get("step", 0))

    @property
    def tokens(self) -> int:
        """Trained until then."""
        return self.step * self.config.batch_tokens

    @property
    def source(self) -> str:
        """The folder, for messages."""
        return show_path(self.folder)


@dataclasses.dataclass(frozen=True)
class Trained(SavedRun):
    """A model ready to compute.

    Attributes:
        model: in eval(), frozen, not compiled, on the world's device.
    """

    model: Transformer
    vocabulary: Vocabulary


def settings_of_command(environ: Mapping[str, str] | None = None) -> tuple[Config, list[str]]:
    """Return the settings of a command about what is trained, and its warnings. Raises SettingsError.

    Its world is `distributed.join(config, trains=False)`.
    """
    resolved = resolve(environ, defaults=choose_run(environ), without=OF_TRAINING).check()
    return resolved.config, resolved.warnings


def open_trained(
    config: Config, world: World, split: bool = False, given: Collection[str] | None = None
) -> Trained:
    """Open the weights of RUN_NAME, or of INIT_FROM if there is no such run, on all processes together.

    Raises ExpectedError on all processes.

    Args:
        split: whether processes hold a part each, by PARALLEL as in training; else each holds all.
        given: names of settings that this command was given. Default: those of its environment and
            ENV_FILE.
    """
    names = find_explicit() if given is None else given
    saved = None
    with raise_on_all_ranks(ExpectedError):
        if world.is_first:
            saved = find(config, names)
    saved = broadcast_object(saved)
    assert saved
    config = saved.config
    with raise_on_all_ranks(ExpectedError):
        vocabulary = vocabulary_of(saved)
        choose_device(config, world.local_rank)  # refuses a DTYPE that the device does not have
        kernel = attention.choose(config, world.device)
    sharding = None
    if split and parallel.is_split(config, world):
        sharding = parallel.Sharding(config, world)
    model = build(config, world.device, kernel, sharding, saved.norm_eps, is_filled=False)
    with limit_silence(saved.folder, config.start_timeout_s):
        fill(model, saved)
    return Trained(**vars(saved), model=model.eval().requires_grad_(False), vocabulary=vocabulary)


def fill(model: Transformer, saved: SavedRun) -> None:
    """Read the weights into a model. Raises CheckpointError or ForeignError on all processes."""
    if not saved.manifest:
        with torch.no_grad():  # rows that pad the vocabulary are in no file
            model.embed_tokens.weight.zero_()
            model.lm_head.weight.zero_()
        hf_import.load(saved.folder, model)
        return
    try:
        checkpoint.load_into(saved.folder, model)
    except CheckpointError:
        if saved.folder.is_dir():
            raise
        raise CheckpointError(
            f"{saved.folder}: was deleted while it was read, because the run keeps only its newest "
            "checkpoints (KEEP_LAST). Repeat the command."
        ) from None


# ---------------------------------------------------------------------------------------------------
# Finding
# ---------------------------------------------------------------------------------------------------


def find(config: Config, given: Collection[str]) -> SavedRun:
    """Find the weights. Reads all of a checkpoint to verify it. Called by one process."""
    paths = RunPaths.of(config.runs_dir, config.run_name, ROOT)  # with several sites, the first's
    require_run(config)
    before = stored_config(paths)
    if not before:
        if config.init_from:
            return find_folder(config, given)
        raise no_checkpoint(paths)
    stored = settings_of_run(paths, before)
    if is_about_folder(config, stored.init_from, given):
        return find_folder(config, given)
    if stored.model:
        # finetune/evaluate.py has made its export.
        export = config.replace(init_from=str(paths.folder / "export"), step=None)
        return find_folder(export, set(given) - {"TOKENIZER"})
    problems = []
    ours = config.values()
    theirs = stored.values()
    for name in sorted(SAME.intersection(given)):
        now, then = format_value(ours[name]), format_value(theirs[name])
        if now != then:
            problems.append(
                f"{name}={now}: The run {config.run_name} has {name}={then}. Leave {name} out, or "
                "choose another RUN_NAME."
            )
    if problems:
        raise SettingsError(problems)
    with limit_silence(paths.checkpoints, config.start_timeout_s):
        folder, manifest = checkpoint_of(config, paths)
    check_identity(before, stored, folder, manifest)
    tokenizer = None
    if "TOKENIZER" not in given and paths.tokenizer.is_file():
        tokenizer = paths.tokenizer
    facts = {"attempts": [], **before, "checkpoint": manifest}
    used = settings_for_use(config, stored, given)
    return SavedRun(used, folder, facts, stored_norm_eps(before), tokenizer)


def is_about_folder(config: Config, stored_init_from: str, given: Collection[str]) -> bool:
    """Tell whether a command is about INIT_FROM, although there is a run of RUN_NAME.

    Args:
        stored_init_from: the run's own INIT_FROM.
        given: names of settings that the command was given.
    """
    is_other = config.init_from not in ("", stored_init_from)
    return is_other and "INIT_FROM" in given and "RUN_NAME" not in given


def settings_of_run(paths: RunPaths, before: dict[str, Any]) -> Config:
    """Return the settings in a run's config.json, with defaults for newer ones. Raises RunFolderError."""
    texts = {name: format_value(value) for name, value in before["settings"].items()}
    values, invalid = parse(add_origin(texts, ""))
    for name in invalid:
        raise RunFolderError(
            f"{paths.config}: {name} has a value that this version does not accept. Correct it there, "
            "restore the file from a copy, or choose another RUN_NAME."
        )
    return build_config(values)


def settings_for_use(config: Config, stored: Config, given: Collection[str]) -> Config:
    """Return the run's settings, with what the command may choose."""
    chosen = ALWAYS_THE_COMMANDS | MAY_DIFFER.intersection(given)
    used = stored.replace(**{name.lower(): getattr(config, name.lower()) for name in chosen})
    # A run that was not evaluated while it trained can be measured all the same.
    return used.replace(eval_tokens=used.eval_tokens or DEFAULTS["EVAL_TOKENS"])


def checkpoint_of(config: Config, paths: RunPaths) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint of STEP, or the newest that verifies, and its manifest.

    Raises CheckpointError, SettingsError.
    """
    steps = committed(paths.checkpoints)
    if not steps:
        raise no_checkpoint(paths)
    if config.step is None:
        latest = find_latest(paths.checkpoints)
        assert latest  # or it has raised
        return latest
    check_step(config.step, steps, config.run_name)
    folder = folder_of(paths.checkpoints, config.step)
    return folder, verify(folder)


def check_step(step: int, steps: Sequence[int], run_name: str) -> None:
    """Raise SettingsError if a run has no checkpoint of STEP.

    Args:
        steps: of its checkpoints, ascending.
    """
    if step in steps:
        return
    others = some([str(other) for other in reversed(steps)])
    problem = f"STEP={step}: Run {run_name} has no checkpoint of that step."
    raise SettingsError([f"{problem} There are: {others}."])


def no_checkpoint(paths: RunPaths) -> CheckpointError:
    """Return the error of a run that has saved nothing, with what to do about it."""
    error = f"{paths.checkpoints}: run {paths.name} has no checkpoint yet. "
    if is_at_work(paths):
        return CheckpointError(
            f"{error}It is running: wait for its first one (SAVE_MINUTES), or run make stop "
            f"{name_run(paths.folder)}, which saves one once it trains. Run the same command to resume."
        )
    return CheckpointError(f"{error}Train it again, with a smaller SAVE_EVERY if it fails early.")


def find_folder(config: Config, given: Collection[str]) -> SavedRun:
    """Find the weights of INIT_FROM. Raises SettingsError, ForeignError."""
    folder = config.init_from
    path = ROOT / folder
    if not path.is_dir():
        raise SettingsError([explain_missing(folder)])
    facts = hf_import.read_json(path / "config.json")
    shape, _ = parse_shape(facts)  # hf_import.check reports what it complains about
    longest = facts.get("max_position_embeddings") or LONGEST
    theirs = shape | {
        "TOKENIZER": f"{folder.rstrip('/')}/tokenizer.json",
        "SEQ_LEN": min(longest, LONGEST),
    }
    own = {name.lower(): value for name, value in theirs.items() if name not in given}
    made = config.replace(**own, doc_mask=False)

    problems = []
    if config.step is not None:
        problems.append(f"STEP={config.step}: INIT_FROM={folder} has no steps. Leave STEP out.")
    if made.seq_len > longest:
        problems.append(
            f"SEQ_LEN={made.seq_len}: INIT_FROM={folder} has max_position_embeddings={longest}. "
            f"Set SEQ_LEN={longest} or less."
        )
    try:
        hf_import.check(folder, made)
    except SettingsError as error:
        problems += error.problems
    else:
        for rule in (check_heads, check_kv_heads, check_tokenizer):
            if conflict := explain(made, rule(made)):
                problems.append(conflict)
    if problems:
        raise SettingsError(problems)
    return SavedRun(made, path, {}, hf_import.read_norm_eps(path), None)


# ---------------------------------------------------------------------------------------------------
# The tokenizer
# ---------------------------------------------------------------------------------------------------


def vocabulary_of(saved: SavedRun) -> Vocabulary:
    """Return the tokenizer that the weights were trained with, which is identified by its hash.

    Raises TokenizerError, DataError.
    """
    config = saved.config
    try:
        path = saved.tokenizer or tokenizer_path(config)
        vocabulary = load(path)
    except (CorpusError, TokenizerError) as error:
        raise TokenizerError(f"the tokenizer of {saved.source} is missing: {error}") from None
    wanted = saved.manifest.get("data", {}).get("tokenizer_sha256")
    if wanted not in (None, vocabulary.sha256):
        raise TokenizerError(
            f"TOKENIZER={config.tokenizer}: {saved.source} was trained with another tokenizer, of "
            f"sha256 {str(wanted)[:12]}, and not with {show_path(path)}, of {vocabulary.sha256[:12]}. "
            "Restore that one, or set TOKENIZER to its path."
        )
    prepare.check_tokenizer(config, vocabulary)
    return vocabulary
