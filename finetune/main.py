"""Fine-tuning, started by train/launcher.py: train/main.py with another model and other data.

    settings -> processes -> DATA by the model's template -> steps of EPOCHS
    -> model, adapters, split -> rehearsal -> checkpoint -> loop -> evaluation, one exchange

Exit codes are those of train/main.py.
"""

import dataclasses
import hashlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from export.weight_files import fingerprint
from finetune import hf_model, lite, model_folder, tuning_settings
from finetune.adapter import GROUPS, Adapters, is_adapter
from finetune.final_exchange import FinalExchange
from finetune.hf_model import Tuned
from finetune.loader import Loader
from finetune.perplexity import Evaluator
from finetune.prepare_data import Data, prepared
from settings import ExpectedError, SettingsError
from settings.checks import check_schedule, explain
from settings.config import Config
from settings.resolve import find_explicit, find_fitted
from settings.tuning_rules import FITTED
from train.assemble import Attempt, create_job, dry_run_and_resume, record_attempt
from train.checkpoint.find import committed
from train.data.manifest import DataError
from train.distributed import parallel
from train.distributed.world import (
    World,
    all_gather_object,
    broadcast_object,
    raise_on_all_ranks,
)
from train.faults.memory_advice import loading_advice, refuse_out_of_memory
from train.hooks.evaluation import Evaluation
from train.hooks.save_reports import SaveReports
from train.hooks.stragglers import Stragglers
from train.hooks.trackers import Trackers
from train.job import Job
from train.main import Training, main
from train.model.hf_import import weight_files

HUB_FORM = {
    "MODEL": "OWNER/NAME@COMMIT",
    "DATA": "OWNER/NAME:CONFIG:SPLIT@COMMIT",
    "EVAL_DATA": "OWNER/NAME:CONFIG:SPLIT@COMMIT",
}

log = logging.getLogger(__name__)


class Finetuning(Training):
    """A model of others, or of ours, on conversations."""

    target = "finetune"
    folder: Path
    data: Data
    fingerprints: "Fingerprints"

    def load_settings(self) -> Config:
        return tuning_settings.load_settings()

    def resolve_from_data(self, config: Config, world: World) -> Config:
        """Open DATA, whose size decides how many steps there are. All processes must have the same."""
        config, fitted = agree(config, find_fitted(), world)
        with raise_on_all_ranks(ExpectedError):
            self.folder = model_folder.find(config)
            self.data = prepared(config, self.folder, fitted, world.size)
            self.fingerprints = Fingerprints.of(self.data, self.folder)
        refuse_differences(self.fingerprints.list_hashes(self.data), world)
        return resolve_schedule(self.data, self.folder)

    def build_job(self, attempt: Attempt) -> Job:
        return build_job(attempt, self.data, self.folder, self.fingerprints)


# ---- What must be the same on all processes


def agree(config: Config, fitted: set[str], world: World) -> tuple[Config, set[str]]:
    """Return the settings with the first process's values of what follows from MODEL and DATA.

    A node that does not see the run's folder does not know what an earlier attempt chose.

    Args:
        fitted: names that are not given on this process.

    Returns:
        The settings, and the names that are still to be chosen.

    Raises:
        SettingsError: a value is given that the first process does not have.
    """
    values = config.values()
    first_fitted, first = broadcast_object((fitted, {name: values[name] for name in FITTED}))
    with raise_on_all_ranks(ExpectedError):
        for name in set(FITTED) - fitted:
            if name in first_fitted or values[name] != first[name]:
                raise SettingsError(
                    [
                        f"{name}={values[name]}: It is not set like this on {world.hosts[0]}. Set the "
                        "same on all nodes."
                    ]
                )
    return config.replace(**{name.lower(): first[name] for name in FITTED}), first_fitted


@dataclasses.dataclass(frozen=True)
class Hash:
    """Of what a process has read.

    Attributes:
        setting, value: that name it.
        content: in words.
    """

    setting: str
    value: str
    content: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Fingerprints:
    """Of a model, and of the conversations, their order and that model."""

    model: str
    data: str

    @classmethod
    def of(cls, data: Data, folder: Path) -> "Fingerprints":
        """Read them, before any weight is read. Raises ForeignError."""
        model = fingerprint(folder)
        key = data.examples.key
        whole = hash_of(key, model, data.train.tobytes())
        return cls(model, f"{key[:12]}-{whole[:12]}")

    def list_hashes(self, data: Data) -> list[Hash]:
        config = data.config
        held_out = hash_of(data.evaluation.key, data.train.tobytes(), data.held_out.tobytes())
        template = data.template.fingerprint
        return [
            Hash("MODEL", config.model, "weights or another config.json", self.model),
            Hash("MODEL", config.model, "tokenizer or chat template", template),
            Hash("DATA", config.data, "rows", data.examples.key),
            Hash("EVAL_DATA", config.eval_data, "rows", held_out),
        ]


def hash_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def refuse_differences(own: Sequence[Hash], world: World) -> None:
    """Raise DataError, on all processes, if one of them has read something else than the first."""
    first, *others = all_gather_object(own)
    for rank, hashes in enumerate(others, start=1):
        for expected, own_hash in zip(first, hashes, strict=True):
            if own_hash != expected:
                setting = expected.setting
                node = f"{world.hosts[rank]} (node {rank // world.local_size})"
                raise DataError(
                    f"{setting}={expected.value}: rank {rank} on {node} has other {expected.content} "
                    f"than rank 0 on {world.hosts[0]} (hashes {own_hash.digest[:12]} and "
                    f"{expected.digest[:12]}). Copy what {setting} names from one to the other, or "
                    "put it on a disk that they share. For the Hub, pin a commit: "
                    f"{setting}={HUB_FORM[setting]}"
                )


# ---- The schedule


def resolve_schedule(data: Data, folder: Path) -> Config:
    """Return the settings with what the data decide, and the model's shape for the record.

    The horizon is EPOCHS. Raises SettingsError.
    """
    config = data.config
    steps = data.batches(1, config.epochs).steps
    horizon = steps * config.batch_tokens
    decay = config.decay_tokens
    if config.lr_schedule == "wsd" and "DECAY_TOKENS" not in find_explicit():
        decay = max(1, horizon // 5)
    config = config.replace(
        train_tokens=horizon, decay_tokens=decay, tie_embeddings=False, **hf_model.shape(folder)
    )
    if problem := explain(config, check_schedule(config)):
        source = f"TRAIN_TOKENS follows from EPOCHS={config.epochs} of DATA."
        raise SettingsError([f"{problem} {source}"])
    if config.max_steps and config.max_steps > steps:
        log.info(
            "MAX_STEPS=%d: EPOCHS=%d of DATA are %d steps, and training ends there. "
            "With more EPOCHS it trains longer.",
            config.max_steps,
            config.epochs,
            steps,
        )
        config = config.replace(max_steps=None)
    if not len(data.held_out):
        config = config.replace(eval_every=0, keep_best=False)
    return config


# ---- The job


class TuningEvaluation(Evaluation):
    """Scores held-out conversations, before the first step too."""

    def score(self, job: Job) -> None:
        if not job.step and self.evaluator.steps and job.config.eval_tokens:
            self.validate(job)
        super().score(job)

    def score_at_end(self, job: Job) -> None:
        if self.evaluator.steps:
            super().score_at_end(job)

    def report(self, job: Job, result: Any) -> None:
        job.recorder.say(
            f"held-out conversations: perplexity {result.record()['val_ppl']:.4g} of "
            f"{result.tokens:,} scored tokens"
        )


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What a checkpoint records of the tokenizer."""

    sha256: str


@dataclasses.dataclass(frozen=True)
class JobData:
    """What train/assemble.py asks of data."""

    loader: Loader
    fingerprint: str
    vocabulary: Vocabulary


def build_job(attempt: Attempt, data: Data, folder: Path, fingerprints: Fingerprints) -> Job:
    """Build everything that fine-tuning needs, at the step of the newest checkpoint."""
    config = attempt.config
    world = attempt.world
    if not committed(attempt.paths.checkpoints):
        windows = data.batches(world.size).packing.windows
        tuning_settings.refuse_single_step(config, windows)
    loader = Loader(config, data, world)
    for line in (*data.lines, "", *data.preview(color=False).splitlines(), ""):
        log.info("%s", line)
    attempt.stopwatch.lap("data")

    attempt.status.phase("model")
    attempt.watch.expect("loading the model", 4 * config.start_timeout_s)
    torch.set_float32_matmul_precision("highest")
    adapters = Adapters.of(config)
    with raise_on_all_ranks(ExpectedError):
        model = build_model(folder, config, world, adapters)
    for line in describe_model(model, config, parallel.is_split(config, world)):
        log.info("%s", line)
    vocabulary = Vocabulary(data.template.fingerprint)
    job_data = JobData(loader, fingerprints.data, vocabulary)
    job = create_job(attempt, model, job_data, count_flops(model, config.seq_len))
    job.guard.repeats = True
    evaluator = Evaluator(config, data, world)
    job.hooks = [Trackers(), SaveReports(), TuningEvaluation(evaluator), FinalExchange(data)]
    if world.size > 1:
        job.hooks.append(Stragglers(world.hosts))
    if adapters:
        skeleton = hf_model.on_meta(hf_model.configuration(folder), torch.float32)
        job.saver.lite = lite.of(config, adapters, skeleton)
    attempt.stopwatch.lap("model")

    dry_run_and_resume(job, attempt)
    facts = {"skipped": model.skipped, "model_fingerprint": fingerprints.model}
    record_attempt(job, attempt, evaluator.shards, facts)
    return job


def build_model(folder: Path, config: Config, world: World, adapters: Adapters | None) -> Tuned:
    """Return the model with its weights. Raises ForeignError, and SettingsError if memory runs out."""
    size = sum(path.stat().st_size for path in weight_files(folder))
    with refuse_out_of_memory(lambda: loading_advice(config, world, size)):
        sharding = parallel.Sharding(config, world) if parallel.is_split(config, world) else None
        return hf_model.build(folder, config, world.device, sharding, adapters)


def describe_model(model: Tuned, config: Config, is_split: bool) -> list[str]:
    """Return what is trained, what is left out, and what is computed otherwise than one expects."""
    named = f"MODEL={config.model}:"
    weights = dict(model.named_parameters())
    trained = 0
    total = 0
    adapted = []
    for name, weight in weights.items():
        if weight.requires_grad:
            trained += weight.numel()
        if is_adapter(name):
            adapted.append(name)
        else:
            total += weight.numel()
    line = f"{named} {type(model.lm).__name__}, {total:,} parameters, and {trained:,} are trained"
    if config.lora_rank:
        line += f", in adapters of LORA_RANK={config.lora_rank} ({trained / total:.2%})"
    lines = [line]
    wants_mlp = config.lora_rank and "mlp" in config.lora_targets.split(",")
    if wants_mlp and not any(map(GROUPS["mlp"].search, adapted)):
        lines.append(
            f"LORA_TARGETS={config.lora_targets}: No block has an MLP next to its experts. "
            "LORA_TARGETS=attention,experts adapts these."
        )
    for part in model.skipped:
        lines.append(f"{named} its files hold {part}, which the model does not take: skipped")
    if not is_split and config.dtype != "float32" and has_float32_experts(model):
        lines.append(
            f"DTYPE={config.dtype}: The experts are computed in float32, which autocast leaves them "
            f"in. With several processes, PARALLEL=fsdp computes them in {config.dtype}."
        )
    if model.head is None:
        lines.append(
            f"{named} The logits of model_type={model.lm.config.model_type} are not a plain product of "
            "hidden states and head. They are computed whole, which takes memory."
        )
    return lines


def has_float32_experts(model: Tuned) -> bool:
    """Tell whether experts that are packed to three dimensions have float32 weights."""
    for module in model.modules():
        if hasattr(module, "is_transposed"):  # transformers' grouped products
            for weight in module.parameters(recurse=False):
                if weight.ndim == 3 and weight.dtype == torch.float32:
                    return True
    return False


def count_flops(model: Tuned, seq_len: int) -> tuple[float, float]:
    """Return the FLOPs of a token, with full and with causal attention.

    A weight takes 2 in the forward pass, 2 for the gradient of its inputs, and 2 for its own if it is
    trained. Of a mixture's experts those count that a token passes.
    """
    config = model.lm.config.get_text_config()
    table = model.lm.get_input_embeddings().weight
    is_tied = model.lm.get_output_embeddings().weight is table
    packed = [len(weight) for weight in model.parameters() if weight.ndim == 3]
    passed = getattr(config, "num_experts_per_tok", None) or 1
    share = passed / max(packed, default=passed)
    total = 0.0
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or name.endswith("bias") or (weight is table and not is_tied):
            continue
        each = 6.0 if weight.requires_grad else 4.0
        total += each * weight.numel() * (share if ".experts." in name else 1.0)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = config.num_hidden_layers * heads * head_dim * seq_len
    return total + 12.0 * attention, total + 6.0 * attention


if __name__ == "__main__":
    sys.exit(main(Finetuning()))
