"""PROFILE=1: torch's profiler records some steps of an attempt. A trace and a summary go to the run's folder.

    start -> SETTLE steps as usual -> PROFILE_STEPS recorded steps -> trace and summary are written -> training goes on

All ranks record, so that none waits for another that recording slows down. The first rank of each site writes: the
others do the same work, and the log names a slow one. If the files cannot be written, the log says so and training
continues.
"""

from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, record_function

from record.durable import write_whole
from train.distributed.world import from_all
from train.hooks.hook import Hook, Requests
from train.profile import time_shares
from train.profile.time_shares import DATA, STEP
from train.step import StepNumbers

if TYPE_CHECKING:
    from train.job import Job

PROFILE_STEPS = 3  # steps that are recorded
# steps before them: the first sets up much, the others show how long a step usually takes
SETTLE = 4


class Profiler(Hook):
    """The profiler of an attempt. It comes last, so that no other hook is in what it records."""

    def __init__(self) -> None:
        self.steps = range(0)  # still to be recorded
        self.recorded = 0
        self.usual_s = 0.0
        self.on_gpu = False
        self.profiler: Any = None  # while it records
        self.mark: Any = None  # of the step that goes on

    def at_start(self, job: "Job") -> None:
        last_step = job.config.last_step
        first = job.step + SETTLE + 1
        self.on_gpu = job.world.device.type == "cuda"
        self.steps = range(first, min(first + PROFILE_STEPS, last_step + 1))
        if not self.steps:
            job.recorder.say(
                f"PROFILE=1: No step is profiled. It takes at least {SETTLE + 1} steps, and only "
                f"{last_step - job.step} are left. Set a larger MAX_STEPS or TRAIN_TOKENS."
            )

    def before_step(self, job: "Job") -> None:
        """Mark that a step begins, with the wait for its batch."""
        self.end_step()  # one that was skipped
        if self.profiler:
            self.mark = record_function(STEP)
            self.mark.__enter__()

    def after_step(self, job: "Job", numbers: StepNumbers) -> dict[str, Any]:
        self.end_step()
        return {}

    def end_step(self) -> None:
        """Mark that a step has ended: on a GPU, once the GPU has done what it was given."""
        if self.mark:
            if self.on_gpu:
                torch.cuda.synchronize()
            self.mark.__exit__(None, None, None)
            self.mark = None
            self.recorded += 1

    def between_steps(self, job: "Job", requests: Requests) -> None:
        """Start or finish recording if it is time. All ranks do so after the same step, and wait for each other."""
        if self.profiler:
            is_due = self.recorded >= len(self.steps)
        else:
            is_due = job.step >= self.steps.start - 1
        if not self.steps or not is_due:
            return
        with job.activity("the profiler", job.config.start_timeout_s, "START_TIMEOUT_S"):
            if self.profiler:
                self.finish(job)
            else:
                self.start(job)
            from_all(None)

    def close(self, job: "Job", code: int, is_hurried: bool) -> None:
        """Stop when training has ended in any way: a profiler that still records crashes the process at its exit."""
        if self.profiler:
            self.stop(job)
        if self.steps:
            job.recorder.say(
                "PROFILE=1: The run ended before its steps were recorded. Nothing is written."
            )

    def build(self) -> Any:
        """Return a profiler of this rank's CPU, and of its GPU if it has one."""
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)
        return torch.profiler.profile(activities=activities)

    def start(self, job: "Job") -> None:
        """Record from here on.

        The profiler sets up what it needs, which takes seconds on a GPU, by recording nothing first. torch's own way,
        a step between prepare_trace and start_trace, crashes (a null pointer in Kineto's transferCpuTrace, torch 2.13)
        on ranks other than the first whose gloo works in that step.
        """
        times = list(job.deadlines.times)
        self.usual_s = median(times[1:] or times)
        with self.build():
            pass
        loader: Any = job.loader
        loader.batch = record_function(DATA)(loader.batch)
        self.profiler = self.build()
        self.profiler.start()

    def stop(self, job: "Job") -> Any:
        """Record no more, and return the profiler, which holds the trace."""
        profiler, self.profiler = self.profiler, None
        del vars(job.loader)["batch"]
        profiler.stop()
        return profiler

    def finish(self, job: "Job") -> None:
        """Stop, and write trace and summary on the first rank."""
        profiler = self.stop(job)
        steps = self.steps
        self.steps = range(0)
        if not job.world.is_first:
            return
        trace = job.paths.profile(steps.start)
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            summary = self.summarize(job, profiler, steps.start)
            # written last: where there is a summary, the trace is complete
            write_whole(trace.with_suffix("").with_suffix(".txt"), f"{summary}\n".encode())
            summary += f"\ntrace: {trace}"
        except (OSError, ValueError) as error:
            summary = (
                f"PROFILE=1: The profile of steps {steps.start} to {steps[-1]} failed, and training "
                f"continues: {error}"
            )
        job.recorder.say(summary)

    def summarize(self, job: "Job", profiler: Any, first: int) -> str:
        """Return one screen: what was profiled, the shares of a step, and what profiling cost."""
        world = job.world
        shares = time_shares.shares(profiler.events(), self.on_gpu)
        unit = "kernels of the GPU" if self.on_gpu else "operators of the CPU, by self time"
        ratio = shares.step_ms / 1000 / self.usual_s
        return "\n".join(
            [
                f"profile of {shares.steps} steps from {first} on: rank 0 of {world.size}, "
                f"{world.device_name}, {job.config.dtype}, {unit}",
                *shares.table(),
                f"A step took {ratio:.2f} times as long as the {1000 * self.usual_s:.2f} ms (median) "
                "of those before. That is the cost of profiling, and chance.",
            ]
        )
