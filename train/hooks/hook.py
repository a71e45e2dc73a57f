"""What the loop calls around a step. A feature keeps its state in one file and plugs in as a hook.

assemble.py lists the hooks of a run in their order, which is the same on all ranks.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from train.job import Job
    from train.step import StepNumbers


class StopTraining(Exception):
    """All ranks leave the loop after this step, and save. A hook raises it on all ranks or on none."""


class Hook:
    """Does nothing. A hook overrides what it needs; all ranks call each method together."""

    def join(self, job: "Job") -> None:
        """Find others that take part. The attempt is not recorded yet, and may still be refused."""

    def at_start(self, job: "Job") -> None:
        """Before the first step of an attempt, which stands where its checkpoint does."""

    def before_step(self, job: "Job") -> float:
        """Outside of what is timed. May wait for others, and may add to job.requests.

        Returns:
            Seconds of waiting that count as the step's own.
        """
        return 0.0

    def after_step(self, job: "Job", numbers: "StepNumbers") -> Mapping[str, Any]:
        """After a step that was taken, before it is recorded. Must not wait for others.

        Returns:
            What the step's record has of it (record/metrics.py).
        """
        return {}

    def between_steps(self, job: "Job", agreed: set[str]) -> None:
        """After a step that was taken and recorded. May wait for others.

        agreed: what the ranks asked for in the step. A hook may add what all ranks ask for alike.
        """

    def before_save(self, job: "Job", manifest: dict[str, Any]) -> "dict[str, Tensor] | None":
        """Add to what the manifest of a checkpoint keeps.

        Returns:
            Tensors that go into the checkpoint beside weights and moments.
        """
        return None

    def after_load(
        self, job: "Job", manifest: Mapping[str, Any], tensors: "dict[str, Tensor]"
    ) -> None:
        """A checkpoint was taken up. tensors: what before_save returned when it was written."""

    def roll_back(self, job: "Job", reason: str) -> bool:
        """Take the run back to a good state. Returns False to have the last good checkpoint taken up."""
        return False

    def after_jump(self, job: "Job") -> None:
        """Samples or steps are passed over, or the run went back: the next batch is another than was expected."""

    def at_end(self, job: "Job") -> None:
        """All steps are made and saved."""

    def close(self, job: "Job", code: int, is_hurried: bool) -> bool | None:
        """The attempt ends with this exit code. Called on whatever ranks still can. is_hurried: do not wait.

        Returns:
            Whether a thread or process of it would still keep this process from ending.
        """
        return None
