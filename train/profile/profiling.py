"""PROFILE=1: torch's profiler over some steps of an attempt, and where their time went, in the run's folder.

    start -> SETTLE steps as ever -> PROFILE_STEPS that are recorded -> trace and summary are written -> on as ever

All ranks record, so that none waits for another only because that one is slowed down; the first, of each site, writes:
the others do the same work, and a slow one is named by the stragglers' line of the log. Steps between which nothing is
evaluated or saved are taken where there are any. What cannot be written is said, and the run goes on.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from record.durable import write_whole
from train.data.batch import Batch
from train.distributed.world import from_all
from train.profile import time_shares
from train.profile.time_shares import DATA, STEP, Shares, TraceError

if TYPE_CHECKING:
    from train.job import Job

PROFILE_STEPS = 3  # that are recorded
SETTLE = 4  # steps that are not recorded, of which the first sets much up and the others tell how long one takes


def window(step: int, last_step: int, count: int, busy: tuple[int, ...]) -> range:
    """The steps to record of an attempt that stands at `step`: as many as there are up to `count`, from the first place
    on in which no multiple of a number in `busy` lies between two of them or just before them. Empty: too few are left.
    """

    def is_quiet(first: int) -> bool:
        return not any(
            at % every == 0 for at in range(first - 1, first + count - 1) for every in busy
        )

    earliest = step + SETTLE + 1
    latest = last_step - count + 1
    quiet = (
        first
        for first in range(earliest, min(latest, earliest + max(busy, default=0)) + 1)
        if is_quiet(first)
    )
    first = next(quiet, earliest)
    return range(first, min(first + count, last_step + 1))


class Profile:
    """The profiler of an attempt. begin and end: a step; between: behind one, outside of what is timed."""

    def __init__(self, job: "Job"):
        c = job.config
        exchanges = c.sync_every if c.replicas > 1 else 0
        busy = (c.eval_every, c.save_every or 0, c.core_every, exchanges)
        self.steps = window(
            job.step, c.last_step, PROFILE_STEPS, tuple(every for every in busy if every)
        )
        self.job, self.recorded, self.usual_s = job, 0, 0.0
        self.profiler: Any = None
        self.mark: Any = None
        self.recording = False
        if not self.steps:
            job.recorder.say(
                f"PROFILE=1: nothing is profiled: it takes {SETTLE + 1} steps or more, and {c.last_step} "
                f"- {job.step} are left; set a larger MAX_STEPS or TRAIN_TOKENS"
            )

    def begin(self) -> None:
        """A step begins, with the wait for its batch."""
        if self.recording:
            self.mark = torch.profiler.record_function(STEP)
            self.mark.__enter__()

    def end(self) -> None:
        """It has ended: on a GPU, once that has done what was asked of it."""
        if self.mark:
            if self.job.world.device.type == "cuda":
                torch.cuda.synchronize(self.job.world.device)
            self.mark.__exit__(None, None, None)
            self.mark, self.recorded = None, self.recorded + 1

    def between(self) -> None:
        """Start or end what is due. All ranks do so behind the same step."""
        if self.recording and self.recorded >= len(self.steps):
            with self.patience():
                self.finish()
        elif self.steps and not self.recording and self.job.step >= self.steps.start - 1:
            with self.patience():
                self.prepare()
            self.record()

    def leave(self) -> None:
        """Training has ended, in whatever way. A profiler that still records then would crash the process at its end."""
        if self.recording:
            self.stop()
        if self.steps:
            self.job.recorder.say(
                "PROFILE=1: the run ended before its steps were recorded; nothing is written"
            )

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Something that takes its time outside of a step, and that all ranks do together."""
        limit_s = self.job.config.start_timeout_s
        with self.job.activity("the profiler", limit_s, "START_TIMEOUT_S"):
            yield
            from_all(None)

    def prepare(self) -> None:
        """Have the profiler set up once what it needs, which on a GPU takes seconds.

        By a recording of nothing. torch's own way, a step between prepare_trace and start_trace, crashes (a null
        pointer in Kineto's transferCpuTrace, torch 2.13) on ranks other than the first whose gloo works in that step.
        """
        times = list(self.job.deadlines.times)
        self.usual_s = median(times[1:] or times)
        with self.new():
            pass

    def new(self) -> Any:
        """A profiler of what this rank does."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.job.world.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(activities=kinds)

    def record(self) -> None:
        """From here on."""
        loader, read = self.job.loader, self.job.loader.batch

        def batch(*arguments: Any) -> Batch:
            with torch.profiler.record_function(DATA):
                return read(*arguments)

        vars(loader)["batch"] = batch
        self.recording, self.profiler = True, self.new()
        self.profiler.start()

    def finish(self) -> None:
        """Stop, and on the first rank write what was found. Where that fails it is said."""
        job, steps = self.job, self.steps
        self.steps = range(0)
        self.stop()
        if not job.world.is_first:
            return
        began, trace = time.perf_counter(), job.paths.profile(steps.start)
        try:
            self.export(trace)
            found = time_shares.shares(time_shares.read(trace), job.world.device.type == "cuda")
            took_s = time.perf_counter() - began
            lines = [
                *summary(found, steps, job, self.usual_s),
                f"Writing and reading the trace took {took_s:.1f} s between two steps, and no step of it.",
            ]
            text = trace.with_name(trace.name.removesuffix(".json.gz") + ".txt")
            write_whole(text, ("\n".join(lines) + "\n").encode())
            job.recorder.say("\n".join([*lines, f"trace: {trace}"]))
        except (OSError, TraceError) as error:
            job.recorder.say(
                f"PROFILE=1: no profile of the steps {steps.start} to {steps[-1]}, and training goes on: "
                f"{error}"
            )

    def stop(self) -> None:
        """Record no more."""
        self.recording = False
        vars(self.job.loader).pop("batch", None)
        self.profiler.stop()

    def export(self, path: Path) -> None:
        """The trace under its name only once it is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}")
        try:
            self.profiler.export_chrome_trace(str(unfinished))
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
            self.profiler = None


def summary(found: Shares, steps: range, job: "Job", usual_s: float) -> list[str]:
    """Of one screen: what was profiled, the shares of a step, and what profiling cost."""
    c, world = job.config, job.world
    way = (
        "kernels of the GPU"
        if found.on_gpu
        else "operators of the CPU, by the time that each takes itself"
    )
    ratio = found.step_ms / 1000 / usual_s
    wait = " and waiting for the GPU at its end" if found.on_gpu else ""
    between = found.between_ns / max(1, found.steps - 1) / 1e6
    return [
        f"profile of {found.steps} steps from {steps.start} on: rank 0 of {world.size}, {world.device_name}, "
        f"{c.dtype}, {way}",
        *found.table(),
        f"A step took {ratio:.2f} times as long as the {1000 * usual_s:.2f} ms (median) of those before: by "
        f"profiling{wait}, and by chance.",
        f"Between two steps {between:.2f} ms passed (log, evaluation, checkpoints), which are no part of these.",
    ]
