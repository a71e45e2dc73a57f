"""Taking a run up again: from its newest checkpoint at the start, and from an earlier one when its steps go wrong.

    step refused by the guard -> its samples are passed over -> the next ones
    MAX_SKIPS in a row        -> back to the last good checkpoint, passing over what led there -> on

What is passed over is a gap in the order of samples (mixture.Gap). It is in the record and in each checkpoint. A run
that is killed meanwhile decides the same again; it comes to the same weights where it finds the same checkpoints.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from record.locks import RunFolderError
from train.checkpoint import checkpoint, find
from train.data.batch import Batch
from train.data.manifest import DataError
from train.data.mixture import Gap, sample_range, with_gap
from train.data.sample_text import list_documents
from train.distributed.world import from_first
from train.faults.double_check import describe_suspects, find_suspects
from train.faults.guard import LOOK_BACK, MAX_ROLLBACKS, GuardError
from train.step import StepNumbers

if TYPE_CHECKING:
    from train.job import Job

log = logging.getLogger(__name__)

DOCUMENTS = 32  # of a skipped step, or of what a rollback passes over, that the record lists


def resume(job: "Job", changes: dict[str, list], is_streamed: bool = False) -> None:
    """Take up the newest checkpoint that verifies, if there is one.

    changes: settings that are other than they were: name -> [old, new]. is_streamed: shards are still
    being made, so that the data cannot be compared yet. Raises CheckpointError, DataError, RunFolderError.
    """
    latest = find.latest_for_all(job.paths.checkpoints, job.world)
    if latest is None:
        return start_anew(job)
    folder, manifest = latest
    job.identity.check(folder, manifest)
    fingerprint = manifest["data"]["fingerprint"]
    if fingerprint != job.data_fingerprint:
        raise other_data(folder, f"fingerprint {fingerprint}, now {job.data_fingerprint}")
    load(job, folder, manifest)
    # The record is on disk before a checkpoint is, so somebody has changed a shorter one since.
    if job.recorder.active and job.step > job.recorder.recorded_step:
        job.recorder.note_gap(job.step, job.tokens)
    job.guard.load(manifest["guard"])
    job.gaps = tuple(Gap(*gap) for gap in manifest["data"]["gaps"])
    if not is_streamed:
        check_data(job, manifest["data"]["opened"])
    log.info("resumed from %s at step %d/%d", folder.name, job.step, job.config.last_step)
    for name, (old, new) in changes.items():
        log.info("changed since then: %s=%s, was %s", name, new, old)


def start_anew(job: "Job") -> None:
    """Start from step 0, and say so if an earlier attempt left steps in the record.

    Raises RunFolderError, on all ranks, if the run has saved a checkpoint, which is gone.
    """
    name, recorder = job.paths.name, job.recorder
    steps, saved = from_first((recorder.recorded_step, recorder.saved_step))
    if saved:
        raise RunFolderError(
            f"Run {name} has recorded {steps} steps but has no checkpoint. "
            f"Restore {job.paths.checkpoints}, or choose another RUN_NAME."
        )
    if steps:
        recorder.say(
            f"run {name} has recorded {steps} steps and kept no checkpoint: "
            "it starts again from step 0"
        )


def check_data(job: "Job", opened: dict[str, Any]) -> None:
    """Raises DataError unless the shards that a checkpoint has opened are those that there are, in the same groups."""
    if opened and (name := job.loader.differs(opened, job.step, job.gaps)):
        folder = job.loader.sources[job.loader.mixture.names.index(name)].folder
        raise other_data(job.paths.checkpoints, f"the shards of {name} in {folder}")


def other_data(where: Path, what: str) -> DataError:
    return DataError(
        f"{where}: was trained on other data ({what}). The tokenizer, the shards in DATA_DIR, or the "
        "files that DATA, EVAL_DATA or MODEL name have changed since. Restore them, or start a new run "
        "with another RUN_NAME"
    )


def load(job: "Job", folder: Path, manifest: dict[str, Any]) -> None:
    """Read a checkpoint into the model, the optimizer and the hooks."""
    # What several sites have in common; a run without sites does not read it.
    tensors: dict[str, Tensor] | None = {} if job.config.replicas > 1 else None
    if manifest.get("mode") == "lite":
        assert job.saver.lite
        job.saver.lite.load(folder, job.model, job.optimizer, job.saver.is_shared)
        log.info(
            "%s holds adapters alone (CHECKPOINT_MODE=lite): the optimizer starts anew", folder.name
        )
    else:
        checkpoint.load_into(
            folder,
            job.model,
            job.optimizer,
            job.saver.is_shared,
            tensors,
            may_be_unused=bool(job.config.model),
            has_moments=manifest.get("moments") != 0,
        )
    job.step = manifest["data"]["step"]
    job.saver.verified = {step for step in job.saver.verified if step < job.step} | {job.step}
    for hook in job.hooks:
        hook.after_load(job, manifest, tensors or {})


def states(job: "Job") -> dict[str, Any]:
    """What the manifest of a checkpoint keeps, beside what hooks add."""
    return {
        "tokens": job.tokens,
        "run": job.identity.of_checkpoint(),
        "data": {
            "step": job.step,
            "gaps": [dataclasses.astuple(gap) for gap in job.gaps],
            "fingerprint": job.data_fingerprint,
            "tokenizer_sha256": job.vocabulary.sha256,
            "opened": job.loader.opened(job.step, job.gaps),
            "shares": job.shares,
        },
        "guard": job.guard.state(),
    }


def skip_step(job: "Job", batch: Batch, numbers: StepNumbers, seconds: float) -> None:
    """A step's update was not made: pass over its samples, and go back if that has not helped several times.

    Its losses are computed once more, and hardware that comes to another result is named.

    Raises GuardError, on all ranks, where going back has not helped either.
    """
    for hook in job.hooks:
        hook.after_refusal(job, batch)
    config, step = job.config, job.step + 1
    names = job.loader.names(numbers.samples) if job.world.is_first else []
    first, last = min(numbers.samples), max(numbers.samples)
    facts = {}
    if not config.lora_dropout:  # else another mask gives another loss
        with job.activity("computing a refused step again", config.start_timeout_s):
            if suspects := find_suspects(job, batch, numbers.losses):
                facts["suspects"] = suspects
                job.recorder.say(describe_suspects(suspects, job.world.device_name))
    job.recorder.event(
        "skip",
        step,
        job.tokens,
        reason=numbers.refused,
        samples=[first, last],
        names=names if numbers.refused == "nonfinite" else names[:16],
        documents=documents_of(job, numbers.samples),
        step_ms=1000 * seconds,
        loss=numbers.loss,
        grad_norm=numbers.grad_norm,
        **facts,
    )
    job.recorder.say(
        f"step {step}: loss={numbers.loss:.4g} grad_norm={numbers.grad_norm:.4g}: "
        f"{job.guard.explain(numbers.refused)}. The weights were not touched, the step is skipped. "
        f"Samples {first} to {last}, the first: {', '.join(names[:4])}. Their losses one by one: "
        f"make replay RUN_NAME={config.run_name} STEP={step}"
    )
    job.gaps = with_gap(job.gaps, job.step, config.batch_windows)
    for hook in job.hooks:
        hook.after_jump(job)
    if job.guard.skipped():
        limit_s = config.start_timeout_s + job.saver.limit_s
        with job.activity("going back to a checkpoint", limit_s, "START_TIMEOUT_S"):
            go_back(job)


def documents_of(job: "Job", samples: Sequence[int]) -> list[dict[str, Any]]:
    """List the first documents of samples, for the record, which only the first rank writes.

    Fine-tuning has no shards and lists none.
    """
    if not (job.world.is_first and job.loader.sources):
        return []
    return list_documents(job.loader, job.vocabulary, samples, DOCUMENTS)


def go_back(job: "Job") -> None:
    """Take up the last good checkpoint, passing over the samples that led here, unless a hook knows a better state."""
    guard, root = job.guard, job.paths.checkpoints
    what = f"step {job.step}: {guard.skips} steps in a row were skipped"
    advice = "Lower LEARNING_RATE, or look at the samples that metrics.jsonl names"
    if guard.gives_up:
        raise GuardError(f"{what}, and going back {guard.rollbacks} times did not help. {advice}")
    if any(hook.roll_back(job, what) for hook in job.hooks):
        return
    began, here = time.perf_counter(), job.step
    job.saver.wait()
    # A checkpoint from which the run went astray once may be the cause itself.
    before = guard.went_to if guard.rollbacks else math.inf
    good = find.latest_for_all(root, job.world, before, "rolled-back")
    good = good or find.latest_for_all(root, job.world)
    if good is None:
        raise GuardError(f"{what}, and there is no checkpoint to go back to. {advice}")
    folder, manifest = good
    job.identity.check(folder, manifest)
    load(job, folder, manifest)
    guard.load(manifest["guard"], history=False)
    guard.went_back(here, job.step)
    since = max(job.step, here - LOOK_BACK)
    pass_over(job, here, since, began)
    job.recorder.say(
        f"{what}: went back to {folder.name} (rollback {guard.rollbacks} of {MAX_ROLLBACKS}); "
        f"{job.gaps[-1].windows} samples from step {since} on are passed over"
    )


def pass_over(job: "Job", here: int, since: int, began: float, **values: float) -> None:
    """The run has gone back from step `here` to job.step: pass over the samples from step `since` on.

    began: time.perf_counter() when it began to go back. values: for the record.
    """
    windows = (here - since) * job.config.batch_windows
    job.gaps = with_gap(job.gaps, here, windows, since)
    end = sample_range(since, job.config.batch_windows, gaps=job.gaps).start
    passed_over = range(end - job.gaps[-1].windows, end)
    job.requests.add("save")  # a kill would find the old gaps only
    for hook in job.hooks:
        hook.after_jump(job)
    job.recorder.event(
        "rollback",
        job.step,
        job.tokens,
        passed_over=len(passed_over),
        documents=documents_of(job, passed_over),
        seconds=time.perf_counter() - began,
        **values,
        **{"from": here},
    )


def put_aside_later_checkpoints(job: "Job") -> None:
    """Rename the checkpoints behind job.step, which know of steps that are lost. Raises CheckpointError, on all ranks."""
    job.saver.wait()
    find.set_aside_later(job.paths.checkpoints, job.world, job.step, "rolled-back")
    job.saver.verified = {step for step in job.saver.verified if step <= job.step}
