"""PROFILE=1: torch's profiler records a few steps of an attempt, and writes a trace and a table of operators.

    start -> SETTLE steps as usual -> PROFILE_STEPS recorded steps -> RUN/profile/ is written -> training goes on

All ranks record, so that none waits for another that recording slows down. The first rank of each site writes: the
others do the same work.
"""

import contextlib
import os
import uuid
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from record.durable import write_whole
from train.distributed.world import all_gather_object
from train.hooks.hook import Hook, Requests

if TYPE_CHECKING:
    from train.job import Job

PROFILE_STEPS = 3  # steps that are recorded
SETTLE = 4  # steps before them: the first sets up much
ROWS = 40  # operators in the table


class Profiler(Hook):
    """The profiler of an attempt. It comes last, so that no other hook is in a step that it records."""

    def __init__(self) -> None:
        self.profiler: Any = None  # until the attempt has recorded its steps
        self.first_step = 0

    def at_start(self, job: "Job") -> None:
        self.first_step = job.step + SETTLE + 1
        with warnings.catch_warnings():
            # Without torch's warm-up step, in which it crashes on ranks other than the first whose gloo works (a null
            # pointer in Kineto's transferCpuTrace, torch 2.13).
            warnings.simplefilter("ignore")
            schedule = torch.profiler.schedule(
                wait=SETTLE, warmup=0, active=PROFILE_STEPS, repeat=1
            )
        with self.wait_for_all(job), torch.profiler.profile():
            pass  # sets up what it needs, which takes seconds on a GPU
        self.profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda profiler: self.write(job, profiler)
        )
        self.profiler.start()

    def between_steps(self, job: "Job", requests: Requests) -> None:
        if self.profiler:
            with self.wait_for_all(job):
                self.profiler.step()

    def close(self, job: "Job", code: int, is_hurried: bool) -> None:
        """Stop when training has ended in any way: a profiler that still records crashes the process at its exit."""
        if self.profiler:
            self.profiler.on_trace_ready = None
            self.profiler.stop()
            job.recorder.say(
                f"PROFILE=1: The run ended before step {self.first_step + PROFILE_STEPS - 1}. No profile is written."
            )

    @contextlib.contextmanager
    def wait_for_all(self, job: "Job") -> Iterator[None]:
        """Let the ranks wait for the first one, which may set up or write for long."""
        with job.activity("the profiler", job.config.start_timeout_s, "START_TIMEOUT_S"):
            yield
            all_gather_object(None)

    def write(self, job: "Job", profiler: Any) -> None:
        """Write what was recorded, on the first rank."""
        self.profiler = None
        if not job.world.is_first:
            return
        sort_by = "self_cpu_time_total"
        if job.world.device.type == "cuda":
            sort_by = "self_device_time_total"
        trace = job.paths.profile(self.first_step)
        table = trace.with_suffix("").with_suffix(".txt")
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            # With the suffix by which it is compressed, and a name that nobody has given to a link.
            new = trace.with_name(f"{uuid.uuid4().hex[:8]}-{trace.name}")
            profiler.export_chrome_trace(str(new))
            os.replace(new, trace)
            text = profiler.key_averages().table(sort_by=sort_by, row_limit=ROWS)
            write_whole(table, text.encode())
            job.recorder.say(f"PROFILE=1: {table} has the time of each operator, {trace} the trace")
        except OSError as error:
            job.recorder.say(
                f"PROFILE=1: The profile is not written, and training continues: {error}"
            )
