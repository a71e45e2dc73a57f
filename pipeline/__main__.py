"""make pipeline: check what every stage needs, then run a stage after the other; the same command goes on.

    settings, inputs -> all that is wrong at once | stage -> stage -> ... -> summary

A stage is done once all its commands were; one that was killed or failed is begun again, and resumes by itself.

Exit codes: 0 done; 64, 78 what was found before the first stage, or the code of the stage that failed; 75 stopped on
request, the same command goes on; 1 anything else.
"""

import contextlib
import dataclasses
import functools
import io
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO

from pipeline import inputs, summary
from pipeline.inputs import Problems, fingerprint_of
from pipeline.stages import PROMPT, PYTHON, Stage, own_settings, stages_of
from pipeline.state import State
from record import locks
from record.durable import write_whole
from record.locks import RunFolderError
from record.run_paths import RunPaths
from record.status import Status
from settings import ROOT, SettingsError, explain_error
from settings.config import SETTINGS, Config
from settings.declare import format_value
from settings.resolve import Resolved, build_environment, show_path
from train.children import end_with_parent
from train.data.data_paths import NO_BUNDLE
from train.distributed.signals import Stopped

BAD_SETTING, STOPPED, BAD_DATA = 64, 75, 78
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DRAIN_S = 2.0  # for what a command said last; what it left behind may hold the pipe
SPARE_S = 30.0  # beyond the time for a last checkpoint, for a stage of a pipeline that was killed to have saved
log = logging.getLogger(__name__)


class Asked:
    """What was asked of this process by a signal: handed on to the command that runs; before the first stage there is
    nothing to save, and Stopped is raised."""

    def __init__(self) -> None:
        self.name, self.at_work = "", False
        self.child: subprocess.Popen[bytes] | None = None
        for number in SIGNALS:
            if (
                signal.getsignal(number) is not signal.SIG_IGN
            ):  # a detached one is to outlive its terminal
                signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        first, self.name = not self.name, signal.Signals(number).name
        if first and not self.at_work:
            raise Stopped(self.name)
        if self.child and self.child.poll() is None:
            self.child.terminate()


@dataclasses.dataclass
class Run:
    """A pipeline at work. command: what goes on with it, as it is typed; job: its lock, held."""

    c: Config
    stages: list[Stage]
    state: State
    paths: RunPaths
    status: Status
    asked: Asked
    job: TextIO
    command: str

    def stage(self, words: str) -> None:
        """What make status says of a pipeline at work."""
        locks.write_holder(self.job, words)

    def log_of(self, stage: Stage) -> Path:
        return self.paths.folder / "logs" / f"{stage.key}.log"


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    asked = Asked()
    try:
        return check_and_run(asked)
    except SettingsError as error:
        log.error("%s", explain_error(error))
        return error.exit_code
    except RunFolderError as error:
        log.error("%s", error)
        return BAD_DATA
    except OSError as error:
        log.error(
            "%s: cannot be read or written (%s); make room, mend its permissions, or choose another DATA_DIR or "
            "RUNS_DIR",
            error.filename or "a disk of DATA_DIR or RUNS_DIR",
            error.strerror or error,
        )
        return BAD_DATA
    except Stopped as stop:
        log.info("stopped by %s before the first stage; the same command begins again", stop)
        return STOPPED


def check_and_run(asked: Asked) -> int:
    """Returns the exit code. Raises SettingsError, RunFolderError, Stopped."""
    problems, (c, resolved) = Problems(), own_settings()
    paths = RunPaths.of(c.runs_dir, f"{c.run_name}-pipeline", ROOT)
    logs = paths.folder / "logs"
    job = locks.hold(paths.job, "runs this pipeline", "checking inputs", folders=[logs])
    state = State(paths.folder)
    core = resolved.origins["CORE_BUNDLE"] != "default" and c.core_bundle != NO_BUNDLE
    stages = stages_of(c, (), core)
    configs = inputs.configs_of(stages, problems)
    for line in [*resolved.warnings, *inputs.look_round(c, stages, configs, state, core, problems)]:
        log.info("%s", line)
    ready = (
        None if problems else inputs.verify(c, stages, configs, state, paths.folder, core, problems)
    )
    if problems or not ready:
        log.error("%s", problems.text())
        return problems.code
    stages = stages_of(c, ready.prompts, core)
    if c.detach:
        return detached(job, paths)
    run = Run(
        c,
        stages,
        state,
        paths,
        Status(
            paths.status, True, run=paths.name, host=socket.gethostname(), last_step=len(stages)
        ),
        asked,
        job,
        typed(resolved),
    )
    try:
        asked.at_work = True
        return run_all(run, ready)
    except RunFolderError as error:
        run.status.end(BAD_DATA, str(error))
        raise


def detached(job: TextIO, paths: RunPaths) -> int:
    """The same again, apart from the terminal."""
    job.close()
    with locks.open_console(paths.console_log) as console:
        subprocess.Popen(
            [sys.executable, "-m", "pipeline"],
            cwd=ROOT,
            env=build_environment({"DETACH": "0"}),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )
    log.info("in the background: make status, make attach, make stop (RUN_NAME=%s)", paths.name)
    return 0


def typed(resolved: Resolved) -> str:
    """The command that goes on: what was given beside .env, without secrets."""
    fields = SETTINGS
    words = [
        f"{name}={format_value(getattr(resolved.config, name.lower()))}"
        for name, where in resolved.origins.items()
        if where in ("command line", "environment") and not fields[name].secret
    ]
    return shlex.join(["make", "pipeline", *words])


# ---- Stages


def run_all(run: Run, ready: inputs.Ready) -> int:
    """Every stage that is not done. Returns the exit code."""
    left = [stage for stage in run.stages if not run.state.is_done(stage)]
    done = [stage.title for stage in run.stages if stage not in left]
    if done and left:
        log.info("done before: %s", ", ".join(done))
    for stage in left:
        number = run.stages.index(stage) + 1
        log.info("\n==== stage %d of %d: %s", number, len(run.stages), stage.title)
        run.stage(stage.title)
        run.status.phase(stage.title, step=number - 1)
        run.state.begin(stage, ready.configs[stage.key], ready.inputs[stage.key])
        began = time.monotonic()
        code = run_stage(run, stage)
        export = RunPaths.of(run.c.runs_dir, stage.run, ROOT).folder / "export"
        made = {show_path(export): fingerprint_of(export)} if stage.trains and not code else {}
        run.state.end(stage, time.monotonic() - began, code, made)
        if run.asked.name:
            log.info(
                "stopped by %s in the stage %s; the same command goes on there: %s",
                run.asked.name,
                stage.title,
                run.command,
            )
            run.status.end(STOPPED)
            return STOPPED
        if code:
            return failed(run, stage, code)
    log.info("%s", "\n".join(summary.summary(run.c, run.stages, run.state)))
    run.status.phase("done", step=len(run.stages), exit_code=0)
    return 0


def failed(run: Run, stage: Stage, code: int) -> int:
    """Say it in one sentence, and return the exit code of the pipeline."""
    end = "was stopped" if code == STOPPED else "failed"
    why = (
        f"the stage {stage.title} {end} with exit code {code}, and no later one was begun; what it said is in "
        f"{show_path(run.log_of(stage))}, and this goes on there: {run.command}"
    )
    log.error("\n%s", why)
    run.status.end(code, why)
    return code if 0 < code < 128 else 1


def run_stage(run: Run, stage: Stage) -> int:
    """Its commands, one after the other; the exit code of the first that fails, or 0."""
    paths = RunPaths.of(run.c.runs_dir, stage.run, ROOT)
    wait_until_free(run, paths)
    kept = io.BytesIO()
    with open(run.log_of(stage), "ab") as file:
        for command in stage.commands:
            if run.asked.name:
                return STOPPED
            if prompt := next(
                (word.removeprefix(PROMPT) for word in command if word.startswith(PROMPT)), ""
            ):
                write(f"> {prompt}\n".encode(), [sys.stdout.buffer, file, kept])
            if code := run_command(
                run, stage, command, [file, kept], file if prompt else subprocess.STDOUT
            ):
                return code
    if stage.key == "sample":
        try:
            write_whole(paths.sample, kept.getvalue())
        except OSError as error:
            raise RunFolderError(
                f"{paths.sample}: cannot be written ({error.strerror}); make room"
            ) from error
    return 0


def wait_until_free(run: Run, paths: RunPaths) -> None:
    """A pipeline that was killed leaves a trainer behind that saves and stops: wait for it."""
    deadline, said = time.monotonic() + run.c.shutdown_timeout_s + SPARE_S, False
    while locks.is_at_work(paths) and time.monotonic() < deadline and not run.asked.name:
        if not said:
            log.info(
                "%s is at work still; waiting for it to save and stop", show_path(paths.folder)
            )
            said = True
        time.sleep(0.2)


def run_command(
    run: Run, stage: Stage, command: Sequence[str], files: list[IO[bytes]], errors: Any
) -> int:
    """Its exit code; what it says goes to standard output and into the files. errors: where standard error goes."""
    words = [sys.executable if word == PYTHON else word for word in command]
    child = subprocess.Popen(
        words,
        cwd=ROOT,
        env=build_environment(stage.settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),
    )
    run.asked.child = child
    if run.asked.name:  # it came before there was a child to tell
        child.terminate()
    assert child.stdout
    told = threading.Thread(
        target=copy, args=(child.stdout, [sys.stdout.buffer, *files]), daemon=True
    )
    told.start()
    code = child.wait()
    run.asked.child = None
    told.join(DRAIN_S)
    return code if code >= 0 else 128 - code


def copy(pipe: IO[bytes], to: Sequence[IO[bytes]]) -> None:
    """All of a pipe as it comes."""
    while part := os.read(pipe.fileno(), 2**16):
        write(part, to)


def write(part: bytes, to: Sequence[IO[bytes]]) -> None:
    """A terminal that is closed, or a log that has no room, ends no stage."""
    for one in to:
        with contextlib.suppress(OSError, ValueError):
            one.write(part)
            one.flush()


if __name__ == "__main__":
    sys.exit(main())
