"""Taking a run up again: from its newest checkpoint at the start, and from an earlier one when its steps go wrong.

    step refused by the guard -> its samples are passed over -> the next ones
    MAX_SKIPS in a row        -> back to the last good checkpoint, passing over what led there -> on

What is passed over is a gap in the order of samples (mixture.Gap). It is in the record and in each checkpoint. A run
that is killed meanwhile decides the same again; it comes to the same weights where it finds the same checkpoints.
"""

import dataclasses
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from record.locks import RunFolderError
from train.checkpoint import checkpoint
from train.data.manifest import DataError
from train.data.mixture import Gap, with_gap
from train.distributed.world import from_first
from train.faults.guard import LOOK_BACK, MAX_ROLLBACKS, GuardError
from train.step import StepNumbers

if TYPE_CHECKING:
    from train.job import Job

log = logging.getLogger(__name__)


def resume(job: "Job", changes: dict[str, list]) -> None:
    """Take up the newest checkpoint that verifies, if there is one.

    Raises CheckpointError, DataError, RunFolderError.
    """
    found = checkpoint.latest_for_all(job.paths.checkpoints, job.world)
    if found is None:
        return start_anew(job)
    folder, manifest = found
    fingerprint = manifest["data"]["fingerprint"]
    if fingerprint != job.data_fingerprint:
        raise other_data(folder, f"fingerprint {fingerprint}, now {job.data_fingerprint}")
    load(job, folder, manifest)
    # The record is on disk before a checkpoint is, so somebody has changed a shorter one since.
    if job.recorder.active and job.step > job.recorder.recorded_step:
        job.recorder.note_gap(job.step, job.tokens)
    job.guard.load(manifest.get("guard", {}))
    job.gaps = tuple(Gap(*gap) for gap in manifest["data"]["gaps"])
    job.opened = manifest["data"]["opened"]
    if job.feed is None:
        check_data(job)
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


def check_data(job: "Job") -> None:
    """Raises DataError unless the shards that the run has opened are those that there are, in the same groups."""
    if job.opened and (name := job.loader.differs(job.opened)):
        folder = job.loader.sources[job.loader.mixture.names.index(name)].folder
        raise other_data(job.paths.checkpoints, f"the shards of {name} in {folder}")
    job.opened = None


def other_data(where: Path, what: str) -> DataError:
    return DataError(
        f"{where}: was trained on other data ({what}): the tokenizer, the shards in DATA_DIR, or what "
        "MODEL, DATA and EVAL_DATA name have changed. Bring those back, or choose another RUN_NAME"
    )


def load(job: "Job", folder: Path, manifest: dict[str, Any]) -> None:
    outer: dict[str, Any] | None = {} if job.config.replicas > 1 else None
    if manifest.get("mode") == "lite":
        assert job.saver.lite
        job.saver.lite.load(folder, job.model, job.optimizer, job.shared)
        log.info(
            "%s holds adapters alone (CHECKPOINT_MODE=lite): the optimizer starts anew", folder.name
        )
    else:
        checkpoint.load_into(folder, job.model, job.optimizer, job.shared, outer)
    job.kept_outer = (outer, manifest.get("sites", {})) if outer else None
    job.away = tuple(tuple(span) for span in manifest["data"].get("away", ()))
    job.step, job.evaluated_at = manifest["data"]["step"], manifest["evaluated_at"]
    job.validated = None if manifest.get("val_loss") is None else (job.step, manifest["val_loss"])
    job.core_at = manifest.get("core_at", 0)
    job.saver.sound = {step for step in job.saver.sound if step < job.step} | {job.step}


def stand(job: "Job") -> None:
    """Have the site stand where the checkpoint does that was taken up, or at the run's start."""
    assert job.site
    turn = job.site.turn
    tensors, kept = job.kept_outer or ({}, {})
    if kept.get("turn") == turn:
        exchanges, base = kept["exchanges"], kept["base"]
    else:  # none was kept, or exchanges come in another rhythm now
        exchanges, base = job.step // turn, 0
    job.site.adopt(tensors, job.step, exchanges, base)
    job.site.finished = kept.get("finished", -1)
    job.kept_outer = None


def back_to_common(job: "Job", why: str, began: float, stall_s: float = 0.0) -> None:
    """This site has dropped what it trained since the last exchange. stall_s: for which it waited before. Raises
    CheckpointError, on all ranks."""
    assert job.site
    # that may be due at a later step, where it ended early
    back_to(job, min(job.step, job.site.common_step), why, began, stall_s)


def back_to(job: "Job", step: int, why: str, began: float, stall_s: float = 0.0) -> None:
    """Stand at an earlier step with the weights that are there: the samples since then are passed over, and the
    checkpoints, which know of steps that are lost, put aside. began: time.perf_counter() when that began.

    Raises CheckpointError, on all ranks.
    """
    c, here, problem = job.config, job.step, None
    assert job.site
    job.step, job.starved = step, job.feed is not None
    passed = (here - job.step) * c.batch_windows
    job.gaps = with_gap(job.gaps, here, passed, job.step)
    job.saver.wait()
    if job.world.is_first:
        try:
            checkpoint.set_aside(job.paths.checkpoints, job.step, "rolled-back")
        except checkpoint.CheckpointError as error:
            problem = error
    if problem := from_first(problem):
        raise problem
    job.saver.sound = {step for step in job.saver.sound if step <= job.step}
    job.evaluated_at, job.validated, job.save_soon = min(job.evaluated_at, job.step), None, True
    job.core_at = min(job.core_at, job.step)
    job.guard.exchanged(job.site.turn)
    job.recorder.event(
        "rollback",
        job.step,
        job.tokens,
        passed_over=passed,
        seconds=time.perf_counter() - began,
        stall_s=stall_s,
        **{"from": here},
    )
    job.recorder.say(
        f"{why}: back to step {job.step}, what the sites have in common; {here - job.step} steps of this "
        "site are lost, and their samples are passed over"
    )


def states(job: "Job") -> dict[str, Any]:
    """What a checkpoint keeps beside weights and moments."""
    data = {
        "step": job.step,
        "gaps": [dataclasses.astuple(gap) for gap in job.gaps],
        "fingerprint": job.data_fingerprint,
        "tokenizer_sha256": job.vocabulary.sha256,
        "opened": job.loader.opened(job.step, job.gaps),
        "shares": job.shares,
    }
    loss = job.validated[1] if job.validated and job.validated[0] == job.step else None
    small = {
        "tokens": job.tokens,
        "evaluated_at": job.evaluated_at,
        "val_loss": loss,
        "core_at": job.core_at,
        "data": data,
        "guard": job.guard.state(),
    }
    if job.site:
        data["away"] = job.away
        small["sites"] = job.site.small()
    return small


def refuse(job: "Job", numbers: StepNumbers, seconds: float) -> None:
    """A step's update was not made: pass over its samples, and go back if that has not helped several times.

    Raises GuardError, on all ranks, where going back has not helped either.
    """
    c, step = job.config, job.step + 1
    names = job.loader.names(numbers.samples) if job.world.is_first else []
    facts = {"loss": numbers.loss, "grad_norm": numbers.grad_norm}
    span = [min(numbers.samples), max(numbers.samples)]
    if numbers.refused == "nonfinite":
        job.recorder.event(
            "nonfinite", step, job.tokens, samples=list(numbers.samples), names=names, **facts
        )
    job.recorder.event(
        "skip",
        step,
        job.tokens,
        reason=numbers.refused,
        samples=span,
        names=names[:16],
        step_ms=1000 * seconds,
        **facts,
    )
    why = {
        "nonfinite": "not finite",
        "loss": f"a loss above {job.guard.bound('loss'):.4g}",
        "grad_norm": f"a gradient norm above {job.guard.bound('grad_norm'):.4g}",
    }[numbers.refused or "nonfinite"]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    job.recorder.say(
        f"step {step}: loss={numbers.loss:.4g} grad_norm={numbers.grad_norm:.4g}: {why}. The weights were "
        f"not touched, the step is skipped. Samples {span[0]} to {span[1]}: {shown}"
    )
    job.gaps = with_gap(job.gaps, job.step, c.batch_windows)
    if job.guard.skipped():
        job.pace.allow(
            "going back to a checkpoint",
            c.start_timeout_s + job.saver.limit_s,
            "START_TIMEOUT_S",
        )
        go_back(job)
        job.pace.restore()


def go_back(job: "Job") -> None:
    """Take up the last good checkpoint, or what the sites have in common, passing over the samples that led here."""
    c, began, here, gaps = job.config, time.perf_counter(), job.step, job.gaps
    what = f"step {here}: {job.guard.skips} steps in a row were skipped"
    advice = "Lower LEARNING_RATE, or look at the samples that metrics.jsonl names"
    if job.guard.gives_up:
        raise GuardError(
            f"{what}, and going back {job.guard.rollbacks} times did not help. {advice}"
        )
    if job.site:
        job.site.step = here
        job.site.drop()
        job.guard.went_back(here, min(here, job.site.common_step))
        return back_to_common(
            job, f"{what} (rollback {job.guard.rollbacks} of {MAX_ROLLBACKS})", began
        )
    job.saver.wait()
    # a checkpoint from which the run went astray once may be the cause itself
    before = job.guard.went_to if job.guard.rollbacks else None
    found = checkpoint.latest_for_all(
        job.paths.checkpoints, job.world, before, what="rolled-back"
    ) or checkpoint.latest_for_all(job.paths.checkpoints, job.world)
    if found is None:
        raise GuardError(f"{what}, and there is no checkpoint to go back to. {advice}")
    load(job, *found)
    job.guard.load(found[1].get("guard", {}), history=False)
    job.guard.went_back(here, job.step)
    since = max(job.step, here - LOOK_BACK)
    job.gaps = with_gap(gaps, here, (here - since) * c.batch_windows, since)
    job.save_soon = True  # a kill would find the old gaps only
    passed = job.gaps[-1].windows
    job.recorder.event(
        "rollback",
        job.step,
        job.tokens,
        passed_over=passed,
        seconds=time.perf_counter() - began,
        **{"from": here},
    )
    job.recorder.say(
        f"{what}: went back to {found[0].name} (rollback {job.guard.rollbacks} of "
        f"{MAX_ROLLBACKS}); {passed} samples from step {since} on are passed over"
    )
