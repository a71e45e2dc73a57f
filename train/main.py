"""Entry point of the trainer, which train/launcher.py starts: build a run, train it, say how it ended.

    settings -> processes -> run folder -> tokenizer and shards -> model -> checkpoint -> loop -> evaluation, sample

record/exit_codes.py says what the exit codes mean, and which attempts are tried again.
"""

import contextlib
import itertools
import logging
import os
import sys
import warnings
from typing import TextIO

from hardware.out_of_memory import is_out_of_memory
from record import goodput, metrics, status
from record.account import describe, hold_to_plan
from record.exit_codes import (
    DONE,
    INTERRUPTED,
    OTHER,
    STOPPED,
)
from record.machine_faults import classify
from record.run_paths import RunPaths
from record.status import Status
from record.tracker_settings import check_trackers
from settings import ROOT, ExpectedError, explain_error, load_config
from settings.config import Config
from train import console, loop
from train.assemble import Attempt, Stopwatch, begin_attempt, build_job
from train.data.data_paths import fit_vocabulary
from train.diloco.result import RunIsOver
from train.distributed.pod import exit_code_of, list_node
from train.distributed.signals import Interrupt
from train.distributed.world import (
    World,
    broadcast_object,
    join,
    launcher_pid,
    leave,
    log_topology,
    report_exit,
    under_torchrun,
)
from train.end_with_parent import end_with_launcher
from train.faults.memory_advice import memory_advice
from train.job import Job
from train.run_folder import is_finished, log_to_files, open_run_folder

log = logging.getLogger(__name__)

LEAVE_S = 60  # seconds for the processes to part


class Training:
    """What is trained: a model of ours, from text. finetune/main.py trains another."""

    target = "train"  # of make, which goes on

    def load_settings(self) -> Config:
        """The settings of this process. Raises SettingsError."""
        return load_config()

    def resolve_from_data(self, config: Config, world: World) -> Config:
        """Add what only the data decide. Raises ExpectedError."""
        return fit_vocabulary(config)

    def build_job(self, attempt: Attempt) -> Job:
        """Build everything the loop needs, at the step of the newest checkpoint."""
        return build_job(attempt)


class Process:
    """What there is of this process, which however it ends has to say so.

    Attributes:
        lock: of the run's folder, held until this process is over.
    """

    def __init__(self) -> None:
        self.config: Config | None = None
        self.lock: TextIO | None = None
        self.status: Status | None = None
        self.job: Job | None = None
        self.interrupt = Interrupt(self.end_early)

    def end_early(self) -> None:
        """A signal ends this process before it trains."""
        asked = self.interrupt.asked
        log.info(
            "stopped by %s before training; there is nothing to save", asked, extra=console.LOG_ONLY
        )  # to a terminal the launcher says it
        if self.status:
            self.status.end(INTERRUPTED)
        report_exit(INTERRUPTED)


def main(training: Training = Training()) -> int:  # noqa: B008 (it has no state)
    """Run to an exit code. Whatever goes wrong is said in one sentence, and in full where it is a fault of ours."""
    process = Process()
    prepare_process()
    try:
        code, reason = run(process, training), ""
    except Exception as error:
        process.interrupt.training = True  # from here on a signal is not why it ends
        code, reason = explain(process, error)
    end_attempt(process, code, reason)
    return code


def prepare_process() -> None:
    """Set up logging, and end with the launcher."""
    console.start_logging()
    if os.getppid() == launcher_pid():
        end_with_launcher()
    logging.raiseExceptions = False  # a closed terminal must not end a run, nor fill its log
    # DCP, in one process
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def run(process: Process, training: Training) -> int:
    """Build the run, and train it. Returns the exit code."""
    stopwatch = Stopwatch()
    config = training.load_settings()
    process.config = config
    check_trackers(config)
    world = join(config)
    if not world.is_first:
        logging.getLogger().setLevel(logging.WARNING)
    paths = RunPaths.of_node(config, ROOT)
    process.lock, is_shared = open_run_folder(paths, world)
    log_to_files(paths, world)
    log_topology(world, config.site_rank if config.replicas > 1 else None)
    stopwatch.lap("join")
    config = training.resolve_from_data(config, world)
    if is_finished(config, paths, world, training.target):
        return DONE
    process.status = status.of_run(config, paths, world.is_first)
    if world.is_first:
        console.report_quiet(process.status.describe_phase)
    attempt = begin_attempt(
        config, paths, world, process.interrupt, process.status, stopwatch, is_shared
    )
    job = process.job = training.build_job(attempt)
    is_done = loop.train(job)
    limit_s = config.start_timeout_s + config.sample_tokens
    # The others wait here while the first one samples and sums up.
    with job.activity("the end of the run", limit_s, "START_TIMEOUT_S"):
        end_training(job, is_done)
        broadcast_object(None)  # leave together: torchrun ends the others as soon as one has left
    return DONE if is_done else STOPPED


def end_training(job: Job, is_done: bool) -> None:
    """Say how training ended: in the log, the record and STATUS.json."""
    phase, code = "done", DONE
    if not is_done:
        phase, code = "stopped", STOPPED
        say_stopped(job)
    end_record(job, phase)
    job.status.phase(phase, step=job.step, last_step=job.config.last_step, exit_code=code)


def explain(process: Process, error: Exception) -> tuple[int, str]:
    """Say why the attempt failed. Returns the exit code and the reason."""
    if isinstance(error, ExpectedError):
        reason = explain_error(error)
        log.error("%s", reason)
        if process.config:
            list_node(ROOT / process.config.runs_dir, classify(error), reason)
        return exit_code_of(error, error.exit_code), reason
    if isinstance(error, RunIsOver):
        log.info("%s", error)
        if process.status:
            process.status.phase("stopped", exit_code=DONE)
        return DONE, ""
    log.error("the trainer failed", exc_info=error)
    job = process.job
    if job is None or not is_out_of_memory(error):
        first_line = str(error).partition("\n")[0]
        return exit_code_of(error, OTHER.code), f"{type(error).__name__}: {first_line}"
    reason = f"out of memory: {memory_advice(job.config, job.world)}"
    log.error("%s", reason)
    return OTHER.code, reason


def end_attempt(process: Process, code: int, reason: str) -> None:
    """Say how the attempt ended: in the record, in STATUS.json, to the launcher. Then leave the other processes."""
    job, interrupt = process.job, process.interrupt
    has_failed = code not in (DONE, STOPPED)
    if job and has_failed:
        end_record(job, "crashed")
    if process.status and code and process.status.is_going_on:
        process.status.end(code, reason)
    report_exit(code, reason)
    is_stuck = False
    if job:
        is_hurried = has_failed or interrupt.asked is not None
        stuck = [hook.close(job, code, is_hurried) for hook in job.hooks]
        is_stuck = job.saver.busy or any(stuck)
    interrupt.release()
    if job:
        # To the last: a process group may hang when it is left.
        job.deadlines.watch.expect("leaving", LEAVE_S)
    if is_stuck or (has_failed and under_torchrun()):
        leave_at_once(code)  # the others may be gone, and what waits for them would wait for long
    process.job = job = None
    leave()
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads any more; without this Python would exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave_at_once(code: int) -> None:
    """End without waiting for any thread or process."""
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def say_stopped(job: Job) -> None:
    outcome = "and saved a checkpoint. Run the same command to resume."
    if not job.step:
        outcome = "with nothing to save yet. Run the same command to start."
    elif job.config.save_every == 0:
        outcome = "without a checkpoint, because SAVE_EVERY=0."
    asked = job.interrupt.asked or "another rank"
    job.recorder.say(
        f"stopped by {asked} after step {job.step}/{job.config.last_step} {outcome}",
        f"\nStopped after step {job.step:,} {outcome} (make reports this as Error 75.)",
    )


def end_record(job: Job, reason: str) -> None:
    """The last record of an attempt, with what became of every second since the run's first start."""
    if job.recorder.active:
        values = {"stall_s": job.saver.stall_s}
        job.recorder.sync()
        last = job.recorder.entry("end", job.step, job.tokens, **values)
        try:
            account = goodput.Timeline(
                itertools.chain(metrics.read_records(job.paths.metrics), [last])
            )
        except Exception as error:  # the run is whole without the sum
            account = None
            job.recorder.say(f"goodput cannot be told: {error}")
        figures = {}
        try:
            figures = hold_to_plan(job.paths, [last])
        except (OSError, ValueError) as error:
            job.recorder.say(f"not compared with its plan: {job.paths.plan} {error}")
        job.recorder.event(
            "end",
            job.step,
            job.tokens,
            reason=reason,
            shares=job.shares,
            goodput=account and account.as_dict(),
            plan=figures,
            **values,
        )
        if account:
            finished = ""
            if reason == "done":
                seconds = account.seconds()
                took = metrics.duration(sum(seconds.values()) - seconds["down"])
                finished = f"\nFinished in {took}."
                if early := job.config.early_end:
                    stopped = f"Stopped at {early}. Run the same command without it to resume."
                    finished = f"\n{stopped} It took {took}."
                    job.recorder.say(stopped, terminal="")
            job.recorder.say(account.summary(), finished)
        if figures:
            job.recorder.say(describe(figures))
    job.recorder.close()


if __name__ == "__main__":
    sys.exit(main())
