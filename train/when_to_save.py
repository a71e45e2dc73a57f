"""When a checkpoint is due, how one is begun, and what is said of it."""

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from record import number_formats
from record.run_paths import name_checkpoint
from train.checkpoint.manifest import CheckpointError
from train.checkpoint.resume import manifest_of
from train.checkpoint.saver import Saved
from train.distributed.world import all_gather_object, broadcast_object

if TYPE_CHECKING:
    from train.hooks.hook import Requests
    from train.job import Job


def is_save_due(job: "Job", requests: "Requests") -> bool:
    """Return whether this step has a checkpoint that `train` does not write at its end.

    CHECKPOINT_MODE=lite saves all that training needs at each KEEP_EVERY.
    """
    config = job.config
    if "stop" in requests or job.step >= config.last_step:
        return False
    every = [config.save_every]
    if config.checkpoint_mode == "lite":
        every.append(config.keep_every)
    return "save" in requests or any(steps and job.step % steps == 0 for steps in every)


def save(job: "Job", wait: bool = False) -> None:
    """Begin a checkpoint. Training goes on once weights and moments are copied; wait: once it is whole.

    A failure is said and training goes on. Raises CheckpointError, on all ranks, where nothing could be
    saved later: with `wait`, and after too many failures in a row.
    """
    if job.config.save_every == 0 or job.step == 0:
        return
    began = time.perf_counter()
    with job.activity("a checkpoint", job.saver.limit_s, phase="saving"):
        job.requests.discard("save")
        job.recorder.sync()
        job.saver.wait()
        report(job, job.saver.poll(), is_last=wait)
        tensors: dict[str, Tensor] = {}
        manifest: dict[str, Any] = {}
        for hook in job.hooks:
            tensors |= hook.before_save(job, manifest) or {}
        manifest |= manifest_of(job)  # last, since a hook may still change the step
        job.saver.start(job.step, job.model, job.optimizer, manifest, tensors or None)
        if wait:
            job.saver.wait()
            ended = job.saver.poll()
            if problem := broadcast_object(ended and ended.problem):
                raise CheckpointError(f"{problem}. {job.saver.describe_loss(job.step)}")
            report(job, ended)
        # One rank may have had to write without a copy: the others' next step would wait for it in vain.
        all_gather_object(None)
    job.saver.stall_s += time.perf_counter() - began


def report(job: "Job", ended: Saved | None, is_last: bool = False) -> None:
    """Say and record how a save has ended, on the first rank. A first failure is tried again at once.

    is_last: training is over, and one more checkpoint is written now.
    """
    if ended is None or not job.world.is_first:
        return
    if ended.problem and is_last:
        job.recorder.say(f"checkpoint failed: {ended.problem}. Saving is tried again now")
    elif ended.problem:
        report_failure(job, ended.problem)
    elif ended.size:
        tokens = ended.step * job.config.batch_tokens
        job.recorder.event(
            "checkpoint", ended.step, tokens, seconds=ended.seconds, bytes=ended.size
        )
        job.recorder.say(
            f"checkpoint {name_checkpoint(ended.step)}: {number_formats.size(ended.size)} in {ended.seconds:.2f} s",
            terminal="",
        )
        job.status.beat(save_s=ended.seconds)


def report_failure(job: "Job", problem: str) -> None:
    rest = "Training continues, the last good one is untouched"
    if not job.saver.verified:
        rest = "Training continues. No checkpoint of this run exists yet"
    then = f"{job.saver.failures} in a row have failed"
    if job.saver.failures == 1:
        then = "saving is tried again now"
        job.requests.add("save")
    job.recorder.say(f"checkpoint failed: {problem}. {rest}; {then}")
