"""Putting a fine-tuning together: what train/assemble.py does, with another model and other data.

DATA, by the model's template -> steps of EPOCHS -> model, adapters, split -> rehearsal -> checkpoint -> record
"""

import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from finetune import hf_model, lite, tuning_settings
from finetune.adapter import GROUPS, Adapters, is_adapter
from finetune.hf_model import Tuned
from finetune.loader import Loader
from finetune.perplexity import Evaluator
from finetune.prepare_data import Data
from settings import ExpectedError, SettingsError
from settings.config import Config
from settings.resolve import find_explicit
from train.assemble import Attempt, create_job, dry_run_and_resume, record_attempt
from train.checkpoint.find import committed
from train.data.manifest import DataError
from train.distributed import parallel
from train.distributed.world import World, all_gather_object, raise_on_all_ranks
from train.faults.memory_advice import loading_advice, refuse_out_of_memory
from train.hooks.evaluation import Evaluation
from train.hooks.save_reports import SaveReports
from train.hooks.stragglers import Stragglers
from train.hooks.trackers import Trackers
from train.job import Job
from train.model.hf_import import weight_files

HUB_FORM = {
    "MODEL": "OWNER/NAME@COMMIT",
    "DATA": "OWNER/NAME:CONFIG:SPLIT@COMMIT",
    "EVAL_DATA": "OWNER/NAME:CONFIG:SPLIT@COMMIT",
}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Known:
    """What a checkpoint says of the tokenizer."""

    sha256: str


@dataclasses.dataclass(frozen=True)
class Read:
    """What train/assemble.py asks of data."""

    loader: Loader
    fingerprint: str
    vocabulary: Known


def settled(c: Config, read: Data, folder: Path, ranks: int) -> Config:
    """The settings with what data and model decide: the horizon, which is EPOCHS, and the model's shape for the record.
    Raises SettingsError."""
    steps = read.batches(ranks, c.epochs).steps
    horizon = steps * c.batch_tokens
    chosen = find_explicit()
    if c.warmup_tokens >= horizon:
        raise SettingsError(
            [
                f"WARMUP_TOKENS={c.warmup_tokens} must be less than EPOCHS={c.epochs} of DATA, which are "
                f"{horizon} tokens; for example WARMUP_TOKENS={horizon // 20}"
            ]
        )
    if (
        c.lr_schedule == "wsd"
        and "DECAY_TOKENS" in chosen
        and (c.decay_tokens or 0) + c.warmup_tokens > horizon
    ):
        raise SettingsError(
            [
                f"DECAY_TOKENS={c.decay_tokens} and WARMUP_TOKENS={c.warmup_tokens} must fit into EPOCHS="
                f"{c.epochs} of DATA, which are {horizon} tokens; for example DECAY_TOKENS="
                f"{max(1, (horizon - c.warmup_tokens) // 5)}"
            ]
        )
    more: dict[str, Any] = {
        "train_tokens": horizon,
        "tie_embeddings": False,
        **hf_model.shape(folder),
    }
    if c.lr_schedule == "wsd" and "DECAY_TOKENS" not in chosen:
        more["decay_tokens"] = max(1, horizon // 5)
    if c.max_steps and c.max_steps > steps:
        log.info(
            "MAX_STEPS=%d: EPOCHS=%d of DATA are %d steps, and training ends there; more EPOCHS train longer",
            c.max_steps,
            c.epochs,
            steps,
        )
        more["max_steps"] = None
    if not len(read.held_out):
        more |= {"eval_every": 0, "keep_best": False}
    return dataclasses.replace(c, **more)


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


def build_job(read: Data, folder: Path, known: "Fingerprints", attempt: Attempt) -> Job:
    """Build everything that fine-tuning needs, at the step of the newest checkpoint."""
    c, world = attempt.config, attempt.world
    if not committed(attempt.paths.checkpoints):
        tuning_settings.refuse_single_step(c, read.batches(world.size).packing.windows)
    loader = Loader(c, read, world)
    for line in (*read.lines, "", *read.preview(color=False).splitlines(), ""):
        log.info("%s", line)
    attempt.stopwatch.lap("data")

    attempt.status.phase("model")
    attempt.watch.expect("loading the model", 4 * c.start_timeout_s)
    torch.set_float32_matmul_precision("highest")
    adapters = Adapters.of(c)
    with raise_on_all_ranks(ExpectedError):
        tuned = built(folder, c, world, adapters)
    say_model(c, tuned, parallel.is_split(c, world))
    opened = Read(loader, known.data, Known(read.template.fingerprint))
    job = create_job(attempt, tuned, opened, flops(tuned, c))
    evaluator = Evaluator(c, read, world)
    job.hooks = [Trackers(), SaveReports(), TuningEvaluation(evaluator)]
    if world.size > 1:
        job.hooks.append(Stragglers(world.hosts))
    if adapters:
        job.saver.lite = lite.of(
            c, adapters, hf_model.on_meta(hf_model.configuration(folder), torch.float32)
        )
    attempt.stopwatch.lap("model")
    dry_run_and_resume(job, attempt)
    facts = {"skipped": tuned.skipped, "model_fingerprint": known.model}
    record_attempt(job, attempt, evaluator.shards, facts)
    return job


def built(folder: Path, c: Config, world: World, adapters: Adapters | None) -> Tuned:
    """The model with its weights. Raises ForeignError, and SettingsError where memory does not suffice."""
    size = sum(path.stat().st_size for path in weight_files(folder))
    with refuse_out_of_memory(lambda: loading_advice(c, world, size)):
        sharding = parallel.Sharding(c, world) if parallel.is_split(c, world) else None
        return hf_model.build(folder, c, world.device, sharding, adapters)


class Fingerprints(NamedTuple):
    """data: of the conversations, their order, and model; model: of that alone."""

    data: str
    model: str


def agreed_fingerprints(c: Config, read: Data, folder: Path, world: World) -> Fingerprints:
    """The same on all processes, before any weight is read. Raises DataError, ForeignError."""
    with raise_on_all_ranks(ExpectedError):
        own = hf_model.fingerprint(folder)
    held_out = hashed(read.evaluation.key, read.train.tobytes(), read.held_out.tobytes())
    refuse_others(
        [
            ("MODEL", c.model, "weights or another config.json", own),
            ("MODEL", c.model, "tokenizer or chat template", read.template.fingerprint),
            ("DATA", c.data, "rows", read.examples.key),
            ("EVAL_DATA", c.eval_data, "rows", held_out),
        ],
        world,
    )
    parts = hashed(read.examples.key, own, read.train.tobytes())
    return Fingerprints(f"{read.examples.key[:12]}-{parts[:12]}", own)


def refuse_others(mine: list[tuple[str, str, str, str]], world: World) -> None:
    """Raises DataError where a process has read something else than the first. mine: setting, its value, what that is
    of, and a hash of it."""
    first, *others = all_gather_object(mine)
    for rank, theirs in enumerate(others, 1):
        for (setting, value, what, digest), (*_, other) in zip(first, theirs, strict=True):
            if digest != other:
                where = f"{world.hosts[rank]} (node {rank // world.local_size})"
                raise DataError(
                    f"{setting}={value}: rank {rank} on {where} has other {what} than rank 0 on "
                    f"{world.hosts[0]} (hashes {other[:12]} and {digest[:12]}); copy what {setting} names "
                    "from one to the other, or put it on a disk that they share; of the hub pin a commit, "
                    f"{setting}={HUB_FORM[setting]}"
                )


def hashed(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def say_model(c: Config, tuned: Tuned, split: bool) -> None:
    """What of the model is trained, what of its files was left out, and what is not computed as DTYPE says."""
    weights = dict(tuned.named_parameters())
    trained = sum(weight.numel() for weight in weights.values() if weight.requires_grad)
    everything = sum(weight.numel() for name, weight in weights.items() if not is_adapter(name))
    log.info(
        "MODEL=%s: %s, %s parameters, of which %s are trained%s",
        c.model,
        type(tuned.lm).__name__,
        f"{everything:,}",
        f"{trained:,}",
        f" beside them ({trained / everything:.2%}), LORA_RANK={c.lora_rank}"
        if c.lora_rank
        else "",
    )
    if (
        c.lora_rank
        and "mlp" in c.lora_targets.split(",")
        and not any(is_adapter(name) and GROUPS["mlp"].search(name) for name in weights)
    ):
        log.info(
            "LORA_TARGETS=%s: no block has an MLP beside its experts, which LORA_TARGETS=attention,experts adapts",
            c.lora_targets,
        )
    for part in tuned.skipped:
        log.info(
            "MODEL=%s: its files hold %s, which the model does not take: skipped", c.model, part
        )
    packed = (
        weight
        for module in tuned.modules()
        if hasattr(module, "is_transposed")  # transformers' grouped products
        for weight in module.parameters(recurse=False)
        if weight.ndim == 3
    )
    if (
        not split
        and c.dtype != "float32"
        and any(weight.dtype == torch.float32 for weight in packed)
    ):
        log.info(
            "DTYPE=%s: the experts are computed in float32, since their grouped products know no autocast; of "
            "several processes PARALLEL=fsdp has them in %s",
            c.dtype,
            c.dtype,
        )
    if not tuned.plain_head:
        log.info(
            "MODEL=%s: model_type=%s is none that was tried here; its logits are computed whole, which takes "
            "memory",
            c.model,
            tuned.lm.config.model_type,
        )


def flops(tuned: Tuned, c: Config) -> tuple[float, float]:
    """FLOPs of a token, with full and with causal attention. A weight takes 2 forward, 2 for the gradient of what it
    reads, and 2 for its own where it is trained; of a mixture's experts those count that a token passes."""
    config = tuned.lm.config.get_text_config()
    taken = getattr(config, "num_experts_per_tok", None) or 1
    experts = max(
        (len(weight) for weight in tuned.parameters() if weight.ndim == 3), default=taken
    )  # packed
    total, tied = (
        0.0,
        tuned.lm.get_output_embeddings().weight is tuned.lm.get_input_embeddings().weight,
    )
    for name, weight in tuned.named_parameters():
        if weight.ndim < 2 or (weight is tuned.lm.get_input_embeddings().weight and not tied):
            continue
        share = taken / experts if ".experts." in name else 1.0
        total += (6.0 if weight.requires_grad else 4.0) * weight.numel() * share
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention = config.num_hidden_layers * width * c.seq_len
    return total + 12.0 * attention, total + 6.0 * attention
