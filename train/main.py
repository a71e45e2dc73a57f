"""Entry point of the trainer, started by train/launcher.py: put a run together, train it, say how it ended.

    settings -> processes -> run folder -> tokenizer and shards -> model -> checkpoint -> loop -> evaluation, sample

Exit codes: 0 done, 64 a setting is bad, 69 other processes are missing, 70 the guard gave up, 75 saved and stopped on
request, 78 data or environment are bad, 1 anything else. record/exit_codes.py says which of them are tried again.
"""

import contextlib
import itertools
import logging
import os
import re
import signal
import sys
import textwrap
import warnings
from collections.abc import Mapping
from typing import Any, Protocol, cast

from hardware.out_of_memory import is_out_of_memory
from record import goodput, metrics, status
from record.durable import make_printable, write_whole
from record.locks import RunFolderError
from record.run_paths import RunPaths
from record.status import Status
from record.trackers.processes import DONE_S, STOPPED_S, check_trackers, close_trackers
from settings import ROOT, SettingsError
from settings.config import Config
from train import console, loop
from train.assemble import Stopwatch, put_together
from train.checkpoint.checkpoint import CheckpointError
from train.data import prepare
from train.data.manifest import DataError
from train.data.sources.source import CorpusError
from train.data.tokenizer import TokenizerError
from train.diloco import hook
from train.diloco.result import RunIsOver
from train.distributed import parallel
from train.distributed.parallel import bare
from train.distributed.signals import BY_USER, Interrupt, Stopped, end_with_parent, mark_of
from train.distributed.world import (
    PeersDiffer,
    PeersMissing,
    World,
    from_first,
    introduce,
    join,
    leave,
    parent_is_gone,
    report_exit,
    under_torchrun,
)
from train.faults.guard import GuardError
from train.faults.memory_advice import memory_advice
from train.job import Job
from train.model.generate import continue_text
from train.model.hf_import import ForeignError
from train.model.model import Transformer
from train.profile.profiling import Profile
from train.run_folder import log_to_files, nothing_left, open_run_folder
from train.tune import log_choices

log = logging.getLogger(__name__)

PIECES = 3  # of text, at the end of a run
PIECE_TEMPERATURE = 0.6
PIECE_LINES = 8  # of each, on a terminal; sample.txt has all
PIECE_COLUMNS = 76  # of a line, beside its indentation
LEAVE_S = 60  # seconds for the processes to part


class Way(Protocol):
    """What a trainer trains: text from the start here, a model of others in finetune/main.py."""

    target: str  # of make, which goes on

    def settings(self) -> Config:
        """The settings of this process. Raises SettingsError."""

    def settled(self, c: Config, world: World) -> Config:
        """With what only its data decide. Raises what a trainer ends with by a sentence."""

    def put_together(
        self,
        c: Config,
        paths: RunPaths,
        world: World,
        interrupt: Interrupt,
        state: Status,
        shared: bool,
        started: Stopwatch,
    ) -> Job:
        """Everything the loop needs, at the step of the newest checkpoint."""

    def run(self, job: Job) -> int:
        """Train to the end. Returns the exit code."""


class Pretraining:
    """A model of ours, from text."""

    target = "train"

    def settings(self) -> Config:
        return Config.load()

    def settled(self, c: Config, world: World) -> Config:
        return c

    def put_together(self, *what: Any) -> Job:
        return put_together(*what)

    def run(self, job: Job) -> int:
        return run(job)


def main(way: Way | None = None) -> int:
    """Run to an exit code. Whatever goes wrong is said in one sentence, and in full where it is a fault of ours."""
    way = way or Pretraining()
    interrupt = prepare_process()
    if parent_is_gone():
        return 1
    started = Stopwatch()
    state: Status | None = None
    job: Job | None = None
    mark, why = "", ""
    try:
        c = way.settings()
        check_trackers(c)
        world = join(c)
        if not world.is_first:
            logging.getLogger().setLevel(logging.WARNING)
        paths = RunPaths.of_node(c, ROOT)
        _lock, shared = open_run_folder(paths, world)  # held until this process is over
        log_to_files(paths, world)
        log_choices()
        introduce(world, c.site_rank if c.replicas > 1 else None)
        started.lap("join")
        c = way.settled(c, world)
        if nothing_left(c, paths, world, way.target):
            code = 0
        else:
            state = status.of_run(c, paths, world.is_first)
            job = way.put_together(c, paths, world, interrupt, state, shared, started)
            code = way.run(job)
    except RunIsOver as over:
        log.info("%s", over)
        code = 0
        if state:
            state.phase("stopped", exit_code=0)
    except SettingsError as error:
        log.error("%s", error)
        code, why = error.exit_code, str(error)
    except PeersMissing as error:
        log.error("%s", error)
        code, why = 69, str(error)
    except GuardError as error:
        log.error("%s", error)
        code, why = 70, str(error)
    except (
        DataError,
        TokenizerError,
        CorpusError,
        CheckpointError,
        ForeignError,
        RunFolderError,
        PeersDiffer,
    ) as error:
        log.error("%s", error)
        code, why = 78, str(error)
    except Stopped as stop:
        log.info("stopped by %s before training; there is nothing to save", stop)
        code, mark = 75, mark_of(str(stop))
    except Exception as error:
        # What it waited for outside of Python may have left on request.
        if interrupt.asked and not interrupt.training:
            log.info(
                "stopped by %s before training; there is nothing to save (%s)",
                interrupt.asked,
                first_line(error),
            )
            code, mark = 75, mark_of(interrupt.asked)
        else:
            log.exception("the trainer failed")
            code, why = 1, f"{type(error).__name__}: {first_line(error)}"
            if job and is_out_of_memory(error):
                evaluating = job.status.facts.get("phase") == "evaluating"
                why = f"out of memory: {memory_advice(job.config, job.world, evaluating)}"
                log.error("%s", why)
    if job and code not in (0, 75):
        end_record(job, "crashed")
    if state and code and state.is_going_on:
        state.end(code, why)
    if code == 75 and interrupt.asked not in (None, "SIGTERM"):
        mark = BY_USER
    report_exit(code, mark, why)
    failed = code not in (0, 75)
    if job:
        close(job, code, hurried=failed or interrupt.asked is not None)
    interrupt.release()
    if job:
        # To the last: a process group may hang when it is left.
        job.watch.expect("leaving", LEAVE_S)
    is_stuck = job and (job.saver.busy or (job.site and job.site.is_stuck))
    if is_stuck or (failed and under_torchrun()):
        leave_at_once(code)  # the others may be gone, and what waits for them would wait for long
    job = None
    leave()
    try:
        sys.stdout.flush()
    except OSError:  # nobody reads any more; without this Python would exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def prepare_process() -> Interrupt:
    """Set up logging and signals. Returns what hears them."""
    console.start_logging()
    logging.raiseExceptions = False  # a closed terminal must not end a run, nor fill its log
    # DCP, in one process
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    interrupt = Interrupt()
    interrupt.at_force = report_exit
    # a launcher that was killed leaves nothing behind: torchrun's processes at once, a single one saves and stops
    end_with_parent(signal.SIGKILL if under_torchrun() else signal.SIGTERM)
    return interrupt


def close(job: Job, code: int, hurried: bool) -> None:
    """End what runs beside training: the producer of data, the other sites, the trackers."""
    if job.feed:
        job.feed.close()
    hook.leave(job, code)
    close_trackers(job.trackers, STOPPED_S if hurried else DONE_S)


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def leave_at_once(code: int) -> None:
    """End without waiting for any thread or process."""
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def run(job: Job) -> int:
    """Train, and when all steps are done evaluate and sample. Returns the exit code."""
    c = job.config
    profile = Profile.of(job)
    try:
        how = loop.train(job, profile)
    finally:
        if profile:
            profile.leave()
    if how == "stopped":
        return stopped(job)
    told, result = loop.evaluate(job, full=True)
    if told or (loop.core_due(job) and loop.evaluate_core(job)):
        return stopped(job)
    job.pace.allow("the end", c.start_timeout_s + c.sample_tokens, "START_TIMEOUT_S")
    if result:
        others = job.compressed_bpb if job.evaluator.full_is_all else {}
        beside = "".join(f"; {name} needs {value:.3f}" for name, value in others.items())
        job.recorder.say(
            f"validation: {result.bpb:.3f} bits per byte on {result.text_bytes} held-out bytes{beside}",
            f"\nThe model needs {result.bpb:.3f} bits per byte of held-out text{describe(others)}.",
        )
        if len(result.by_source) > 1:
            job.recorder.say(
                "bits per byte of each source: "
                + ", ".join(f"{name} {of.bpb:.3f}" for name, of in result.by_source.items())
            )
    if c.data_mix.count(","):
        seen = [
            f"{name} {100 * of['share']:.2f}% = {of['tokens'] / 1e6:.2f} M tokens"
            + (f", {of['epochs']:.2f} epochs" if of["epochs"] else "")
            for name, of in job.shares.items()
        ]
        job.recorder.say(f"trained on {'; '.join(seen)}")
    if c.sample_tokens and (job.world.is_first or parallel.waits_in_forward(job.model)):
        sample(job)
    end_record(job, "done")
    job.status.phase("done", step=job.step, last_step=c.last_step, exit_code=0)
    from_first(None)  # leave together
    return 0


def describe(others: Mapping[str, float]) -> str:
    """Say what general compressors need: ` (gzip -9: 1.958, xz -9: 1.692)`."""
    figures = ", ".join(f"{name}: {value:.3f}" for name, value in others.items())
    return f" ({figures})" if figures else ""


def stopped(job: Job) -> int:
    kept = "and saved a checkpoint. Run the same command to resume."
    if not job.step:
        kept = "with nothing to save yet. Run the same command to start again."
    elif job.config.save_every == 0:
        kept = "without a checkpoint, because SAVE_EVERY=0."
    asked = job.interrupt.asked or "another rank"
    if asked == "SIGINT":
        asked = "Ctrl-C or make stop"
    job.recorder.say(
        f"stopped by {asked} after step {job.step}/{job.config.last_step} {kept}",
        f"\nStopped after step {job.step:,} {kept} (make reports this as Error 75.)",
    )
    end_record(job, "stopped")
    job.status.phase("stopped", step=job.step, exit_code=75)
    from_first(None)  # leave together: torchrun ends the others as soon as one has left
    return 75


def end_record(job: Job, reason: str) -> None:
    """The last record of an attempt, with what became of every second since the run's first start."""
    if job.recorder.active:
        job.recorder.sync()
        last = job.recorder.entry("end", job.step, job.tokens, stall_s=job.last_stall_s)
        try:
            account = goodput.account(
                itertools.chain(metrics.read_records(job.paths.metrics), [last])
            )
        except Exception as error:  # the run is whole without the sum
            account = None
            job.recorder.say(f"goodput cannot be told: {error}")
        job.recorder.event(
            "end",
            job.step,
            job.tokens,
            reason=reason,
            stall_s=job.last_stall_s,
            shares=job.shares,
            goodput=account and account.as_dict(),
        )
        if account:
            finished = f"\nFinished in {metrics.duration(sum(account.seconds.values()))}."
            job.recorder.say(account.summary(), finished if reason == "done" else "")
    job.recorder.close()


def sample(job: Job) -> None:
    """Have the model write a few short texts."""
    c = job.config
    job.status.phase("sampling")
    model, prompt = (
        cast(Transformer, bare(job.model)),
        prepare.source_of(c, job.loader.mixture.names[0]).prompt,
    )
    together = parallel.waits_in_forward(job.model)
    texts = []
    try:
        for number in range(PIECES):
            text = continue_text(
                model,
                job.vocabulary,
                prompt,
                max(1, c.sample_tokens // PIECES),
                c.seed + number,
                temperature=PIECE_TEMPERATURE,
                agree=from_first if together else None,
            )
            texts.append(text.rpartition("\n")[0].rstrip() or text)  # in whole lines, if it has any
    except Exception as error:  # the run is whole without it
        if together:
            raise
        return job.recorder.say(f"no sample: {type(error).__name__}: {error}")
    if not job.world.is_first:
        return
    text, where = "\n\n".join(texts), " (all of it is in sample.txt)"
    try:
        write_whole(job.paths.sample, (text + "\n").encode())
    except OSError as error:  # it is said below, and the run is whole without it
        where = ""
        job.recorder.say(f"{job.paths.sample}: cannot be written ({error.strerror})")
    texts = [make_lines_printable(text) for text in texts]
    whole, shown = "\n\n".join(texts), "\n\n".join(map(excerpt, texts))
    job.recorder.say(
        f"sample, step {job.step}:\n{textwrap.indent(whole, '    ')}",
        f"\nIt wrote{where}:\n{textwrap.indent(shown, '    ')}",
    )


def make_lines_printable(text: str) -> str:
    """Return a text with control characters as escapes: a model may write any, and a terminal would obey them."""
    return "\n".join(make_printable(line.expandtabs()) for line in text.split("\n"))


def excerpt(text: str) -> str:
    """Return the first lines of a text, each cut to what a terminal shows in a line, with no blank lines around it
    and at most one between two others."""
    lines = re.sub(r"\n\s*\n", "\n\n", f"\n{text}\n").strip("\n").split("\n")
    shown = []
    for line in lines[:PIECE_LINES]:
        cut = line if len(line) <= PIECE_COLUMNS else line[: PIECE_COLUMNS - 3] + "..."
        shown.append(cut)
    return "\n".join(shown)


if __name__ == "__main__":
    sys.exit(main())
