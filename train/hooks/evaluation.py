"""EVAL_EVERY, CORE_EVERY and KEEP_BEST: when a run is evaluated between steps, for how long, and what is recorded."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from train.checkpoint.find import best
from train.distributed.world import broadcast_object
from train.evaluate.core.score import Core
from train.evaluate.scoring import ScoringFailed
from train.evaluate.validation import FULL_SET
from train.hooks.hook import SAVE, STOP, Hook, Requests

if TYPE_CHECKING:
    from train.job import Job


class Interrupted(Exception):
    """Told to stop in the midst of an evaluation, which the run that resumes makes again."""


@dataclasses.dataclass
class Score:
    """One kind of evaluation: its name in the log, and the last step that was scored."""

    name: str
    last_at: int = 0

    def is_due(self, step: int, every: int) -> bool:
        """Say whether this step is to be scored, and was not yet. every: so many steps; 0 is never."""
        return bool(every) and step > 0 and step % every == 0 and step != self.last_at

    def run(
        self, job: "Job", score: Callable[..., Any], parts: int = 1
    ) -> tuple[Any, dict[str, Any]]:
        """Score within EVAL_MINUTES, or so many times that. A failure costs the number, not the run.

        Returns:
            (result, or None where it failed; what to record of it). Raises Interrupted, on all ranks,
            if told to stop meanwhile.
        """
        limit_s = 60 * job.config.eval_minutes * parts
        most_s = limit_s + job.config.train_timeout_s
        # The first batch may be compiled.
        batch_s = max(job.deadlines.step_limit_s, job.config.start_timeout_s)

        def progress(what: str) -> None:
            job.deadlines.progress(batch_s if what == "batch" else most_s)

        began = time.perf_counter()
        result = None
        with job.activity("an evaluation", most_s, "EVAL_MINUTES", phase="evaluating"):
            try:
                result = score(
                    job.model,
                    interrupted=lambda: job.interrupt.asked is not None,
                    limit_s=limit_s,
                    progress=progress,
                )
                if result is None:
                    raise Interrupted
                values: dict[str, Any] = result.record()
            except ScoringFailed as error:
                values = {"error": str(error)}
                job.recorder.say(
                    f"{self.name} at step {job.step} failed, and training continues: {error}"
                )
        self.last_at = job.step
        return result, values | {"eval_s": time.perf_counter() - began}


class Evaluation(Hook):
    """Scores held-out text, and CORE's tasks, between steps and at the end.

    Args:
        evaluator: scores a model on held-out text, as train/evaluate/validation.py does.
        core: scores it on CORE's tasks; None without CORE_EVERY.
        compressed: bits per byte that general compressors need for the same text, by name.

    Attributes:
        validation_loss: of the last validation, nats/token; None where it failed.
    """

    def __init__(
        self,
        evaluator: Any,
        core: Core | None = None,
        compressed: Mapping[str, float] | None = None,
    ):
        self.evaluator = evaluator
        self.core = core
        self.compressed = compressed if compressed and evaluator.full_is_all else {}
        self.validation = Score("the evaluation")
        self.validation_loss: float | None = None
        self.core_score = Score("CORE")

    def at_start(self, job: "Job") -> Requests | None:
        # An evaluation is due that the attempt before did not come to.
        requests = self.between_steps(job, frozenset())
        return requests if requests == STOP else None

    def between_steps(self, job: "Job", requests: Requests) -> Requests | None:
        if "stop" in requests:  # the run that resumes evaluates first
            return None
        try:
            self.score(job)
        except Interrupted:
            return STOP
        return SAVE if self.is_best(job) else None

    def score(self, job: "Job") -> None:
        """Make the evaluations that are due. Raises Interrupted."""
        config = job.config
        validate_every = config.eval_every if config.eval_tokens else 0
        core_every = config.core_every if self.core else 0
        if job.step >= config.last_step:  # at_end scores more text; KEEP_BEST compares the same
            validate_every = int(config.keep_best and job.step == config.last_step)
            core_every = 0
        if self.validation.is_due(job.step, validate_every):
            self.validate(job)
        if self.core_score.is_due(job.step, core_every):
            self.score_core(job)

    def validate(self, job: "Job", full: bool = False) -> Any:
        """Score held-out text. Returns the result, None where it failed. Raises Interrupted."""
        score = functools.partial(self.evaluator, full=full)
        result, values = self.validation.run(job, score, FULL_SET if full else 1)
        if result:
            job.status.beat(val_loss=result.loss)
        else:
            values |= {"val_loss": None, "val_bpb": None, "scored_tokens": 0}
        if not full:
            self.validation_loss = values["val_loss"]
        elif result and self.compressed:
            values["compressed_bpb"] = self.compressed
        job.recorder.evaluation(job.step, job.tokens, **values, full=full)
        return result

    def score_core(self, job: "Job") -> None:
        """Score CORE's tasks. Raises Interrupted."""
        assert self.core
        result, values = self.core_score.run(job, self.core)
        if result:
            job.recorder.say(f"step {job.step}: {result.describe()}")
        else:
            values |= {"core": None, "core_error": values.pop("error")}
        job.recorder.event("eval", job.step, job.tokens, **values, core_s=values["eval_s"])

    def is_best(self, job: "Job") -> bool:
        """Whether KEEP_BEST asks for a checkpoint here: no other has a lower loss.

        Those that are there are asked: one that failed, or was put aside when the run went back, is none.
        """
        loss = self.loss_at(job.step)
        if not job.config.keep_best or loss is None or math.isnan(loss):
            return False
        with job.activity("a checkpoint", job.saver.limit_s):
            job.saver.wait()
            lowest = broadcast_object(best(job.paths.checkpoints) if job.world.is_first else None)
        return lowest is None or loss < lowest[0]

    def loss_at(self, step: int) -> float | None:
        """The validation loss of this step, if it has one."""
        return self.validation_loss if self.validation.last_at == step else None

    def before_save(self, job: "Job", manifest: dict[str, Any]) -> None:
        manifest |= {
            "evaluated_at": self.validation.last_at,
            "val_loss": self.loss_at(job.step),
            "core_at": self.core_score.last_at,
        }

    def after_load(
        self, job: "Job", manifest: Mapping[str, Any], tensors: dict[str, Tensor]
    ) -> None:
        self.validation.last_at = manifest.get("evaluated_at", 0)
        self.validation_loss = manifest.get("val_loss")
        self.core_score.last_at = manifest.get("core_at", 0)

    def after_jump(self, job: "Job") -> None:
        if job.step != self.validation.last_at:
            self.validation_loss = None
        for score in (self.validation, self.core_score):
            score.last_at = min(score.last_at, job.step)

    def at_end(self, job: "Job") -> Requests | None:
        try:
            self.score_at_end(job)
        except Interrupted:
            return STOP
        return None

    def score_at_end(self, job: "Job") -> None:
        """Score all held-out text, and CORE. Raises Interrupted."""
        result = None
        if job.config.eval_tokens:
            job.recorder.say("Final evaluation on held-out text. EVAL_TOKENS=0 skips it.")
            result = self.validate(job, full=True)
        else:
            job.recorder.say("EVAL_TOKENS=0: no evaluation. `make eval` measures the model.")
        if self.core and self.core_score.is_due(job.step, 1):
            self.score_core(job)
        if result:
            self.report(job, result)

    def report(self, job: "Job", result: Any) -> None:
        """Say the bits per byte at the end, and what compressors need where they had the same text."""
        figures = ", ".join(f"{name}: {value:.3f}" for name, value in self.compressed.items())
        beside = f" ({figures})" if figures else ""
        job.recorder.say(
            f"validation: {result.bpb:.3f} bits per byte on {result.text_bytes} held-out bytes{beside}",
            f"\nThe model needs {result.bpb:.3f} bits per byte of held-out text{beside}.",
        )
        if len(result.by_source) > 1:
            parts = (f"{name} {of.bpb:.3f}" for name, of in result.by_source.items())
            job.recorder.say(f"bits per byte of each source: {', '.join(parts)}")
