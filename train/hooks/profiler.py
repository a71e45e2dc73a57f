"""PROFILE=1: torch's profiler over some steps (train/profile/)."""

from typing import TYPE_CHECKING, Any

from train.hooks.hook import Hook
from train.profile.profiling import Profile
from train.step import StepNumbers

if TYPE_CHECKING:
    from train.job import Job


class Profiler(Hook):
    """Records steps. It comes last, so that no other hook is in them."""

    profile: Profile

    def at_start(self, job: "Job") -> None:
        self.profile = Profile(job)

    def before_step(self, job: "Job") -> float:
        self.profile.end()  # a step that was skipped
        self.profile.begin()
        return 0.0

    def after_step(self, job: "Job", numbers: StepNumbers) -> dict[str, Any]:
        self.profile.end()
        return {}

    def between_steps(self, job: "Job", agreed: set[str]) -> None:
        self.profile.between()

    def close(self, job: "Job", code: int, is_hurried: bool) -> None:
        if hasattr(self, "profile"):
            self.profile.leave()
