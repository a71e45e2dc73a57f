"""What the loop calls around a step. A feature keeps its state in one file and plugs in as a hook.

assemble.py lists the hooks of a run in their order, which is the same on all ranks. A hook that wants the run to
stop or to save returns that, and the loop does it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from train.job import Job
    from train.step import StepNumbers


# What a hook wants of the loop: "stop" (save and leave), "save", "data" (wait for data before the next step).
Requests = frozenset[str]
STOP: Requests = frozenset({"stop"})
SAVE: Requests = frozenset({"save"})


class Hook:
    """Does nothing. A hook overrides what it needs; all ranks call each method together.

    A hook returns "stop" on all ranks or on none.
    """

    def join(self, job: "Job") -> None:
        """Find others that take part. The attempt is not recorded yet, and may still be refused."""

    def at_start(self, job: "Job") -> Requests | None:
        """Before the first step of an attempt, which stands where its checkpoint does. May return "stop"."""
        return None

    def before_step(self, job: "Job") -> Requests | None:
        """Outside of what is timed. May wait for others; what counts as the step's own time goes to job.waited_s.

        Returns:
            What this rank wants after the step; one rank is enough for all to do it, of "save" the first.
        """
        return None

    def after_step(self, job: "Job", numbers: "StepNumbers") -> Mapping[str, Any]:
        """After a step that was taken, before it is recorded. Must not wait for others.

        Returns:
            What the step's record has of it (record/metrics.py).
        """
        return {}

    def between_steps(self, job: "Job", requests: Requests) -> Requests | None:
        """After a step that was taken and recorded. May wait for others.

        requests: what is to be done after this step.

        Returns:
            What is to be done too, the same on all ranks.
        """
        return None

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

    def at_end(self, job: "Job") -> Requests | None:
        """All steps are made and saved. May return "stop"."""
        return None

    def close(self, job: "Job", code: int, is_hurried: bool) -> bool | None:
        """The attempt ends with this exit code. Called on whatever ranks still can. is_hurried: do not wait.

        Returns:
            Whether a thread or process of it would still keep this process from ending.
        """
        return None
