"""Resuming a run from a checkpoint: its newest one at the start, an earlier one when its steps go wrong."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from record.locks import RunFolderError
from train.checkpoint import checkpoint, find
from train.data.manifest import DataError
from train.distributed.world import broadcast_object

if TYPE_CHECKING:
    from train.job import Job

log = logging.getLogger(__name__)


def resume(job: "Job", changes: dict[str, list], is_streamed: bool = False) -> None:
    """Resume from the newest checkpoint that verifies, if there is one.

    changes: settings that are other than they were: name -> [old, new]. is_streamed: shards are still
    being made, so that the data cannot be compared yet. Raises CheckpointError, DataError, RunFolderError.
    """
    latest = find.latest_for_all(job.paths.checkpoints, job.world)
    if latest is None:
        return start_over(job)
    folder, manifest = latest
    job.identity.check(folder, manifest)
    fingerprint = manifest["data"]["fingerprint"]
    if fingerprint != job.data_fingerprint:
        raise other_data(folder, f"fingerprint {fingerprint}, now {job.data_fingerprint}")
    load_checkpoint(job, folder, manifest)
    # The record is on disk before a checkpoint is, so somebody has changed a shorter one since.
    if job.recorder.active and job.step > job.recorder.recorded_step:
        job.recorder.note_gap(job.step, job.tokens)
    job.recovery.load_state_dict({**manifest["guard"], "gaps": manifest["data"]["gaps"]})
    if not is_streamed:
        check_data(job, manifest["data"]["opened"])
    log.info("resumed from %s at step %d/%d", folder.name, job.step, job.config.last_step)
    for name, (old, new) in changes.items():
        log.info("changed since then: %s=%s, was %s", name, new, old)


def start_over(job: "Job") -> None:
    """Start from step 0, and say so if an earlier attempt left steps in the record.

    Raises RunFolderError, on all ranks, if the run has saved a checkpoint, which is gone.
    """
    name, recorder = job.paths.name, job.recorder
    steps, saved = broadcast_object((recorder.recorded_step, recorder.saved_step))
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


def load_checkpoint(job: "Job", folder: Path, manifest: dict[str, Any]) -> None:
    """Read a checkpoint into the model, the optimizer and the hooks."""
    # What several sites have in common; a run without sites does not read it.
    tensors: dict[str, Tensor] | None = {} if job.config.replicas > 1 else None
    if manifest.get("mode") == "lite":
        assert job.saver.lite
        job.saver.lite.load(folder, job.model, job.optimizer, job.saver.is_shared)
        log.info(
            "%s holds adapters alone (CHECKPOINT_MODE=lite): the optimizer starts again",
            folder.name,
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


def manifest_of(job: "Job") -> dict[str, Any]:
    """What the manifest of a checkpoint keeps, in addition to what hooks add."""
    recovery = job.recovery.state_dict()
    return {
        "tokens": job.tokens,
        "run": job.identity.of_checkpoint(),
        "data": {
            "step": job.step,
            "gaps": recovery.pop("gaps"),
            "fingerprint": job.data_fingerprint,
            "tokenizer_sha256": job.vocabulary.sha256,
            "opened": job.loader.opened(job.step, job.gaps),
            "shares": job.shares,
        },
        "guard": recovery,
    }


def quarantine_later_checkpoints(job: "Job") -> None:
    """Rename the checkpoints after job.step, which know of steps that are lost. Raises CheckpointError, on all ranks."""
    job.saver.wait()
    find.quarantine_later(job.paths.checkpoints, job.world, job.step, "rolled-back")
    job.saver.verified = {step for step in job.saver.verified if step <= job.step}
