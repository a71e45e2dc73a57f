"""What a run has trained, opened for use: by make eval, make sample and make export.

    runs/RUN_NAME/config.json  -> shape, and all that the weights were trained with
                 /checkpoints  -> weights, of the newest that verifies or of STEP; no moment is read
                 /tokenizer.json -> tokenizer, identified by its hash; of older runs in DATA_DIR/tokenizers
    INIT_FROM                  -> all three, where there is no such run: a folder of Hugging Face's

The run's settings rule. What a command may choose is where and how it computes (FREE settings, and MAY_DIFFER); one
that was given another shape than the run's is refused. Nothing is written, so a run may train on meanwhile.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from record.locks import RunFolderError
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
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
from settings.config import SETTINGS, Config
from settings.declare import FREE, format_value
from settings.resolve import find_explicit, resolve, show_path
from train.checkpoint import checkpoint
from train.checkpoint.find import committed, find_latest, folder_of
from train.checkpoint.manifest import CheckpointError, verify
from train.data import prepare
from train.data.data_paths import data_dir
from train.data.manifest import DataError
from train.data.sources.source import CorpusError
from train.data.tokenizer import TokenizerError, Vocabulary, load
from train.distributed import parallel
from train.distributed.world import World, choose_device, from_first, together
from train.model import attention, hf_import
from train.model.hf_import import ForeignError
from train.model.model import Transformer, unfilled
from train.run_folder import stored_config, stored_norm_eps

PROBLEMS = (SettingsError, CheckpointError, ForeignError, TokenizerError, DataError, RunFolderError)

# What the weights compute with, and mean; given otherwise than the run has it, a setting is refused.
SAME = {
    "VOCAB_SIZE",
    "N_LAYER",
    "N_HEAD",
    "N_KV_HEAD",
    "N_EMBD",
    "MLP_DIM",
    "QK_NORM",
    "TIE_EMBEDDINGS",
    "ROPE_THETA",
    "SEQ_LEN",
    "DOC_MASK",
    "DATA_MIX",
}
# The run's, or the command's where it was given.
MAY_DIFFER = {
    "DTYPE",
    "MICRO_BATCH_SIZE",
    "PARALLEL",
    "SHARD_RANKS",
    "EVAL_TOKENS",
    "SEED",
    "TOKENIZER",
}
OF_THE_MACHINE = {"DEVICE", "NPROC", "NODES", "ATTENTION", "COMPILE"}
OF_THE_RUN = {"PRESET", "MAX_STEPS"}  # though they are FREE

# Rules about steps, which a command that takes none need not keep.
OF_TRAINING = CHECKS.keys() - {check_attention, check_mixture, check_nodes}

TUNED = "finetuned.json"  # in the export of a run that has fine-tuned: of what, and which step
LONGEST = 4096  # tokens of SEQ_LEN for a folder that allows more, unless it is given: masks and windows grow with it


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model ready to compute, and what is known of it.

    config: the run's settings, with what the command may choose. model: in eval(), its weights loaded and frozen, not
    compiled, on the world's device. step, tokens: trained so far; 0 for INIT_FROM. source: the folder of the weights,
    for messages. facts: for a model card "settings" and "attempts" of config.json, and "checkpoint", the manifest's
    small states; {} for INIT_FROM.
    """

    config: Config
    model: Transformer
    vocabulary: Vocabulary
    step: int
    tokens: int
    source: str
    facts: dict[str, Any]


def settings_of_command(environ: Mapping[str, str] | None = None) -> tuple[Config, list[str]]:
    """The settings of a command about what is trained, and what to say of them. Raises SettingsError.

    Its world is `distributed.join(c, trains=False)`.
    """
    resolved = resolve(environ, without=OF_TRAINING).check()
    return resolved.config, resolved.warnings


def open_trained(
    c: Config, world: World, split: bool = False, given: Collection[str] | None = None
) -> Trained:
    """The weights of RUN_NAME, or of INIT_FROM where there is no such run; on all processes together.

    split: whether several processes hold a part each, by PARALLEL as in training; else each holds all. given: names of
    the settings that this command was given; by default those of its environment and ENV_FILE. Raises one of
    PROBLEMS, on all processes.
    """
    names = find_explicit() if given is None else given
    found = None
    with together(*PROBLEMS):
        if world.is_first:
            found = find(c, names)
    found = from_first(found)
    assert found
    with together(*PROBLEMS):
        vocabulary = vocabulary_of(found)
    config = found.config
    with together(*PROBLEMS):
        choose_device(config, world.local_rank)  # which says where there is no such DTYPE
        kernel = attention.choose(config, world.device)
    sharding = (
        parallel.Sharding(config, world) if split and parallel.is_split(config, world) else None
    )
    torch.set_float32_matmul_precision("highest")
    model = unfilled(config, world.device, kernel, sharding, found.norm_eps)
    if found.manifest:
        try:
            checkpoint.load_into(found.folder, model)
        except CheckpointError:  # on all processes
            if found.folder.is_dir():
                raise
            raise CheckpointError(
                f"{found.folder}: was deleted while it was read, as a run that trains does with old "
                "ones (KEEP_LAST); call again for its newest"
            ) from None
    else:
        with torch.no_grad():  # rows that pad the vocabulary are in no file
            for weight in (model.embed_tokens.weight, model.lm_head.weight):
                weight.zero_()
        hf_import.load(found.folder, model)
    step = int(found.manifest["step"]) if found.manifest else 0
    return Trained(
        config,
        model.eval().requires_grad_(False),
        vocabulary,
        step,
        step * config.batch_tokens,
        show_path(found.folder),
        found.facts,
    )


# ---------------------------------------------------------------------------------------------------
# Finding
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    """Weights to be read: the settings to read them with, and their folder. manifest: of a checkpoint, else {}.
    tokenizer: the run's own, unless the command was given another one. norm_eps: of RMSNorm, if it is not ours."""

    config: Config
    folder: Path
    manifest: dict[str, Any]
    facts: dict[str, Any]
    norm_eps: float | None
    tokenizer: Path | None = None


def find(c: Config, given: Collection[str]) -> Found:
    """Where the weights are, and what to read them with. Reads a checkpoint whole, to verify it; for one process."""
    paths = RunPaths.of(c.runs_dir, c.run_name, ROOT)  # of a run at several sites, the first's
    before = stored_config(paths)
    if not before:
        if c.init_from:
            return of_folder(c, given)
        there = sorted(path.parent.name for path in (ROOT / c.runs_dir).glob("*/config.json"))
        raise RunFolderError(
            f"RUN_NAME={c.run_name}: there is no such run in {c.runs_dir}. Its runs: "
            f"{hf_import.some(there) or 'none'}. Choose one of them, train one with make train, fetch "
            "one from the cluster with make fetch-run, or set INIT_FROM to a folder of weights."
        )
    stored = settings_of_run(paths, before)
    if (
        "INIT_FROM" in given
        and c.init_from
        and c.init_from != stored.init_from
        and "RUN_NAME" not in given
    ):
        return of_folder(c, given)
    if stored.model:
        return of_export(c, paths, stored, given)
    wrong = [
        name
        for name in sorted({*SAME, "INIT_FROM"}.intersection(given))
        if getattr(c, name.lower()) != getattr(stored, name.lower())
    ]
    if wrong:
        raise SettingsError(
            [
                f"{name}={format_value(getattr(c, name.lower()))}: the run {c.run_name} has {name}="
                f"{format_value(getattr(stored, name.lower()))}; leave {name} out, or choose another "
                "RUN_NAME"
                for name in wrong
            ]
        )
    folder, manifest = checkpoint_of(c, paths)
    facts = {
        "settings": before["settings"],
        "attempts": before.get("attempts", []),
        "checkpoint": {key: value for key, value in manifest.items() if key != "files"},
    }
    tokenizer = None if "TOKENIZER" in given else paths.tokenizer
    used = settings_for_use(c, stored, given)
    return Found(used, folder, manifest, facts, stored_norm_eps(before), tokenizer)


def of_export(c: Config, paths: RunPaths, stored: Config, given: Collection[str]) -> Found:
    """The weights of a run that has fine-tuned: by its export, which has them merged. Raises RunFolderError where there
    is none, or only one of another step."""
    export, there = paths.folder / "export", committed(paths.checkpoints)
    wanted = c.step or max(there, default=0)
    merged = f"make export RUN_NAME={c.run_name}" + f" STEP={c.step}" * bool(c.step)
    if not (export / TUNED).is_file():
        raise RunFolderError(
            f"RUN_NAME={c.run_name}: has fine-tuned MODEL={stored.model}, and is read by its export, "
            f"which is not there; {merged} makes it"
        )
    if (step := hf_import.read_json(export / TUNED).get("step")) != wanted:
        raise RunFolderError(
            f"RUN_NAME={c.run_name}: its export is of step {step}, not {wanted}; {merged} renews it"
        )
    one = c.replace(init_from=str(export), step=None)
    return of_folder(one, set(given) - {"TOKENIZER", "STEP"})


def settings_of_run(paths: RunPaths, before: dict[str, Any]) -> Config:
    """The settings in a run's config.json; one that it does not know yet has its default. Raises RunFolderError."""
    stored = before["settings"]
    values = {}
    wrong = ""
    for name in sorted(stored.keys() & SETTINGS.keys()):
        value = stored[name]
        try:
            if value not in (None, ""):
                value = SETTINGS[name].parse(format_value(value))
        except ValueError:
            wrong = name
        values[name.lower()] = value
    if not wrong:
        return Config(**values).derived()
    raise RunFolderError(
        f"{paths.config}: {wrong} has a value that this version does not accept. Correct it there, "
        "restore the file from a copy, or choose another RUN_NAME."
    )


def settings_for_use(c: Config, stored: Config, given: Collection[str]) -> Config:
    """The run's settings with what the command may choose."""
    fields = SETTINGS
    chosen = {name for name, field in fields.items() if field.resume == FREE} - OF_THE_RUN
    chosen |= OF_THE_MACHINE | MAY_DIFFER.intersection(given)
    return dataclasses.replace(
        stored, **{name.lower(): getattr(c, name.lower()) for name in chosen}
    )


def checkpoint_of(c: Config, paths: RunPaths) -> tuple[Path, dict[str, Any]]:
    """The checkpoint of STEP, or the newest that verifies, and its manifest. Raises CheckpointError."""
    there = committed(paths.checkpoints)
    if not there:
        raise CheckpointError(
            f"{paths.checkpoints}: run {c.run_name} has no checkpoint yet. Wait for its first one "
            f"(SAVE_MINUTES), or run make stop RUN_NAME={c.run_name}, which saves one. "
            "This stops training; make train resumes it."
        )
    if c.step is None:
        found = find_latest(paths.checkpoints)
        assert found  # or it has said why not
        return found
    if c.step not in there:
        steps = hf_import.some([str(step) for step in reversed(there)])
        raise SettingsError(
            [f"STEP={c.step}: run {c.run_name} has no checkpoint of that step; there are: {steps}"]
        )
    folder = folder_of(paths.checkpoints, c.step)
    return folder, verify(folder)


def of_folder(c: Config, given: Collection[str]) -> Found:
    """The weights of INIT_FROM. Raises SettingsError, ForeignError."""
    place = ROOT / c.init_from
    if not place.is_dir():
        hf_import.check(c.init_from, c)  # says so
    config = hf_import.read_json(place / "config.json")
    values, _ = hf_import.settings_in(config)  # hf_import.check reports what it complains of
    problems = []
    if c.step is not None:
        problems.append(
            f"STEP={c.step}: the weights of INIT_FROM={c.init_from} have no steps; leave it out"
        )
    length = config.get("max_position_embeddings")
    length = length if isinstance(length, int) and length > 1 else None
    if "SEQ_LEN" in given and length and c.seq_len > length:
        problems.append(
            f"SEQ_LEN={c.seq_len}: INIT_FROM={c.init_from} has max_position_embeddings={length}; set "
            f"SEQ_LEN={length} or less"
        )
    theirs = {name.lower(): value for name, (_, value) in values.items() if name not in given}
    theirs["doc_mask"] = False
    if "TOKENIZER" not in given:
        theirs["tokenizer"] = f"{c.init_from.rstrip('/')}/tokenizer.json"
    if "SEQ_LEN" not in given:
        theirs["seq_len"] = min(length or LONGEST, LONGEST)
    made = dataclasses.replace(c, **theirs)
    try:
        hf_import.check(c.init_from, made)
    except SettingsError as error:
        problems += error.problems
    if problems:
        raise SettingsError(problems)
    conflict = check_heads(made) or check_kv_heads(made) or check_tokenizer(made)
    if problem := explain(made, conflict):
        raise SettingsError([problem])
    return Found(made, place, {}, {}, hf_import.norm_eps_of(config))


# ---------------------------------------------------------------------------------------------------
# The tokenizer
# ---------------------------------------------------------------------------------------------------


def vocabulary_of(found: Found) -> Vocabulary:
    """The tokenizer that the weights were trained with: the run's own, or of an older run, which has none, wherever in
    DATA_DIR it is. Raises TokenizerError, DataError."""
    c, wanted = found.config, found.manifest.get("data", {}).get("tokenizer_sha256")
    if found.tokenizer:
        with contextlib.suppress(TokenizerError):
            own = load(found.tokenizer)
            if wanted in (None, own.sha256):
                prepare.check_tokenizer(c, own)
                return own
    vocabulary: Vocabulary | None = None
    try:
        vocabulary = prepare.vocabulary(c)
        problem = (
            f"TOKENIZER={c.tokenizer}: {show_path(found.folder)} was trained with another "
            f"tokenizer, of sha256 {str(wanted)[:12]}, and not {vocabulary.sha256[:12]}. Restore that "
            "one, or give its path as TOKENIZER."
        )
    except (TokenizerError, CorpusError) as error:
        problem = f"the tokenizer of {show_path(found.folder)} is missing: {error}"
    if wanted and (vocabulary is None or vocabulary.sha256 != wanted):
        vocabulary = kept_tokenizer(c, wanted)
    if vocabulary is None:
        raise TokenizerError(problem)
    prepare.check_tokenizer(c, vocabulary)
    return vocabulary


def kept_tokenizer(c: Config, sha256: str) -> Vocabulary | None:
    """A tokenizer in DATA_DIR that has this hash."""
    for path in sorted((data_dir(c) / "tokenizers").glob("*/tokenizer.json")):
        with contextlib.suppress(TokenizerError):
            if (vocabulary := load(path)).sha256 == sha256:
                return vocabulary
    return None
