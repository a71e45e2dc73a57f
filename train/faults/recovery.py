"""What a run does when its steps go wrong.

    step skipped by the guard -> its samples are skipped -> the next ones
    MAX_SKIPS in a row        -> back to the last good checkpoint, skipping what led there -> on

What is skipped is a gap in the order of samples (mixture.Gap). It is in the record and in each checkpoint. A run
that is killed meanwhile decides the same again; it comes to the same weights where it finds the same checkpoints.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from train.checkpoint import find
from train.checkpoint.resume import load_checkpoint
from train.data.mixture import Gap, sample_range, with_gap
from train.data.sample_text import list_texts
from train.faults.guard import LOOK_BACK, MAX_ROLLBACKS, Guard, GuardError
from train.step import StepNumbers

if TYPE_CHECKING:
    from train.job import Job

TEXTS = 32  # of a skipped step, or of what a rollback skips, that the record has


class Recovery:
    """Skips steps and goes back to checkpoints.

    Attributes:
        guard: decides which steps are skipped, and when going back does not help.
        gaps: samples that are skipped, in the order of the run.
    """

    def __init__(self, guard: Guard, gaps: tuple[Gap, ...] = ()):
        self.guard = guard
        self.gaps = gaps

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        gaps = [dataclasses.astuple(gap) for gap in self.gaps]
        return {"gaps": gaps, **self.guard.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gaps = tuple(Gap(*gap) for gap in state["gaps"])
        self.guard.load(state)

    def skip_step(self, job: "Job", numbers: StepNumbers, seconds: float) -> None:
        """A step's update was not made: skip its samples."""
        config, step = job.config, job.step + 1
        names = job.loader.names(numbers.samples) if job.world.is_first else []
        first, last = min(numbers.samples), max(numbers.samples)
        job.recorder.event(
            "skip",
            step,
            job.tokens,
            reason=numbers.skipped,
            samples=[first, last],
            names=names if numbers.skipped == "nonfinite" else names[:16],
            texts=texts_of(job, numbers.samples),
            step_ms=1000 * seconds,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
        )
        job.recorder.say(
            f"step {step}: loss={numbers.loss:.4g} grad_norm={numbers.grad_norm:.4g}: "
            f"{self.guard.explain(numbers.skipped)}. The weights were not touched, the step is skipped. "
            f"Samples {first} to {last}, the first: {', '.join(names[:4])}"
        )
        self.gaps = with_gap(self.gaps, job.step, config.batch_windows)
        for hook in job.hooks:
            hook.after_jump(job)
        self.guard.skipped(numbers.skipped)

    def roll_back(self, job: "Job") -> None:
        """Go back to the last good checkpoint, skipping the samples that led here, unless a hook knows a better state.

        Raises GuardError, on all ranks, where going back has not helped, or is impossible.
        """
        limit_s = job.config.start_timeout_s + job.saver.limit_s
        with job.activity("going back to a checkpoint", limit_s, "START_TIMEOUT_S"):
            guard = self.guard
            what = f"step {job.step}: {guard.skips} steps in a row were skipped"
            advice = "Lower LEARNING_RATE, or look at the samples that metrics.jsonl names"
            if guard.gives_up:
                raise GuardError(
                    f"{what}, and going back {guard.rollbacks} times did not help. {advice}"
                )
            if any(hook.roll_back(job, what) for hook in job.hooks):
                return
            self.load_good_checkpoint(job, what, advice)

    def load_good_checkpoint(self, job: "Job", what: str, advice: str) -> None:
        guard, root = self.guard, job.paths.checkpoints
        began, step_before = time.perf_counter(), job.step
        job.saver.wait()
        # A checkpoint from which the run went astray once may be the cause itself.
        before = guard.rollback_step if guard.rollbacks else math.inf
        good = find.latest_for_all(root, job.world, before, "rolled-back")
        good = good or find.latest_for_all(root, job.world)
        if good is None:
            raise GuardError(f"{what}, and there is no checkpoint to go back to. {advice}")
        folder, manifest = good
        job.identity.check(folder, manifest)
        load_checkpoint(job, folder, manifest)
        guard.load(manifest["guard"], history=False)
        guard.went_back(step_before, job.step)
        since = max(job.step, step_before - LOOK_BACK)
        self.skip_samples(job, step_before, since, began)
        job.recorder.say(
            f"{what}: went back to {folder.name} (rollback {guard.rollbacks} of {MAX_ROLLBACKS}); "
            f"{self.gaps[-1].windows} samples from step {since} on are passed over"
        )

    def skip_samples(
        self, job: "Job", step_before: int, since: int, began: float, **values: float
    ) -> None:
        """The run has gone back from step `step_before` to job.step: skip the samples from step `since` on.

        began: time.perf_counter() when it began to go back. values: for the record.
        """
        windows = (step_before - since) * job.config.batch_windows
        self.gaps = with_gap(self.gaps, step_before, windows, since)
        end = sample_range(since, job.config.batch_windows, gaps=self.gaps).start
        skipped = range(end - self.gaps[-1].windows, end)
        job.requests.add("save")  # a kill would find the old gaps only
        for hook in job.hooks:
            hook.after_jump(job)
        job.recorder.event(
            "rollback",
            job.step,
            job.tokens,
            passed_over=len(skipped),
            texts=texts_of(job, skipped),
            seconds=time.perf_counter() - began,
            **values,
            **{"from": step_before},
        )


def texts_of(job: "Job", samples: Sequence[int]) -> list[dict[str, Any]]:
    """List how samples begin, for the record, which only the first rank writes.

    Fine-tuning has no shards and lists none.
    """
    if not (job.world.is_first and job.loader.sources):
        return []
    return list_texts(job.loader, job.vocabulary, samples, TEXTS)
