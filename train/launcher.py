"""Start the trainer on this machine, and start it again when it fails.

    scripts/launch.sh [MODULE]      MODULE runs instead of the trainer, train.main

One process runs directly, several under torchrun, which nothing else in this repository starts. On
several nodes the launchers first meet (distributed/rendezvous.py). The exit code is
the trainer's own, which torchrun would turn into 1, or one of the launcher's (record/exit_codes.py).
"""

import dataclasses
import enum
import os
import signal
import sys
import tempfile
from pathlib import Path

from record import locks
from record.exit_codes import (
    BAD_DATA,
    DONE,
    INTERRUPTED,
    NO_PROGRESS,
    OTHER,
    STOPPED,
    describe,
)
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.checks import PRETRAINING
from settings.config import Config
from settings.resolve import resolve
from train.children import Children, complain, say
from train.distributed import rendezvous
from train.distributed.pod import in_pod
from train.distributed.signals import BY_USER, IN_DOUBT
from train.tune import CHOICES, count_gpus, record_nccl, set_default, tune

PYTHON = sys.executable  # what children run with
TRAINERS = ("train.main", "finetune.main")
FIRST_PAUSE_S = 1
LONGEST_PAUSE_S = 30
SIGNALED = 128  # and the signal's number: a shell's exit code


class Ending(enum.Enum):
    """How an attempt ended: what the launcher does next."""

    FINAL = enum.auto()  # starting again cannot help, or nobody wants it
    FAILED = enum.auto()  # starting again may help
    PEER_STOPPED = enum.auto()  # another node was asked to stop, and will come back


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of the trainer, which is over.

    Attributes:
        reason: what the trainer reported.
        joined: whether this node met the others, which then wait for it.
    """

    code: int
    ending: Ending = Ending.FINAL
    reason: str = ""
    joined: bool = False


class Launcher:
    """What all attempts share. `environment` is that of the processes it starts."""

    def __init__(self, config: Config, children: Children, module: str, folder: Path):
        """folder: for what the trainer tells this process."""
        self.config = config
        self.paths = RunPaths.of_node(config, ROOT)
        self.children = children
        self.module = module
        self.report_file = folder / "exit-code"
        self.progress_file = folder / "progress"
        self.environment = environment = dict(os.environ)
        gpus = 0
        if config.device != "cpu":
            gpus = count_gpus(environment)
        self.processes = config.nproc or max(1, gpus)
        environment[CHOICES] = tune(environment, self.processes, gpus)
        set_default(environment, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(config.shutdown_timeout_s))
        if gpus:
            record_nccl(environment, self.paths)
        environment["PROGRESS_FILE"] = str(self.progress_file)
        environment["LAUNCHER_PID"] = str(os.getpid())  # the trainer ends with its parent
        environment.pop("EXIT_CODE_FILE", None)
        if config.site_nodes > 1 or self.processes > 1:  # else the trainer's own exit code is seen
            environment["EXIT_CODE_FILE"] = str(self.report_file)

    def run(self) -> int:
        """Start the trainer until it succeeds, or until another attempt cannot help.

        Returns:
            The exit code.
        """
        attempt = self.supervise()
        stopped = attempt.code in (STOPPED, INTERRUPTED)
        if attempt.joined and attempt.code != DONE and not (stopped and in_pod()):
            rendezvous.over(self.config, attempt.code, attempt.reason)
        # Torchrun prints a lot after the trainer's last words, and `kubectl describe` shows the end.
        if attempt.reason and attempt.code != DONE and not stopped:
            complain(f"launch: exit code {attempt.code}: {attempt.reason}")
        return attempt.code

    def supervise(self) -> Attempt:
        """Start the trainer, and again after each failure.

        Give up after MAX_RESTARTS restarts without a new checkpoint. The pauses before them grow.
        """
        restarts = self.config.max_restarts
        if self.module not in TRAINERS:
            restarts = 0  # an evaluation starts again only when the user asks
        failures = 0  # since the last new checkpoint
        saved = 0
        attempts = 0
        while True:
            attempt = self.attempt()
            attempts += 1
            if attempt.ending is Ending.FINAL:
                return attempt
            step = self.read_progress()
            if step > saved:
                saved = step
                failures = 0
            outcome = f"launch: attempt {attempts} ended with {name_ending(attempt.code)}; "
            outcome += f"last checkpoint: step {saved}" if saved else "no new checkpoint yet"
            pause_s = FIRST_PAUSE_S
            if attempt.ending is Ending.PEER_STOPPED:
                say(f"{outcome}. Another node was asked to stop; waiting for it to come back")
            elif restarts == 0:
                return attempt
            elif failures == restarts:
                return self.give_up(attempt, outcome)
            else:
                pause_s = min(FIRST_PAUSE_S * 2**failures, LONGEST_PAUSE_S)
                failures += 1
                say(
                    f"{outcome}; starting again in {pause_s} s "
                    f"(restart {failures} of {restarts} without a new checkpoint)"
                )
            self.children.pause(pause_s)
            if self.children.stop_requested:
                return dataclasses.replace(attempt, code=INTERRUPTED)
            # Workers whose torchrun was killed end a moment later.
            locks.wait_until_free(self.paths)

    def attempt(self) -> Attempt:
        """Start the trainer once, on all nodes together."""
        several_nodes = self.config.site_nodes > 1
        if several_nodes:
            verdict = rendezvous.meet(
                self.config, self.processes, lambda: self.children.stop_requested
            )
            if self.children.stop_requested:
                return Attempt(INTERRUPTED, joined=verdict.code == DONE)
            if verdict.code == rendezvous.RUN_IS_DONE:
                return Attempt(DONE)
            if verdict.code != DONE:  # all nodes get the same answer
                return Attempt(verdict.code)
        self.report_file.unlink(missing_ok=True)
        code = self.children.run(self.trainer(), self.environment)
        reported, reason = read_report(self.report_file)
        code = self.interpret(code, reported)
        ending = Ending.FAILED
        if self.children.stop_requested:
            ending = Ending.FINAL
            if not is_final(code):
                code = INTERRUPTED
        elif code == STOPPED and several_nodes and in_pod():
            ending = Ending.PEER_STOPPED
        elif is_final(code):
            ending = Ending.FINAL
        return Attempt(code, ending, reason, joined=several_nodes)

    def interpret(self, code: int, reported: str) -> int:
        """Choose between the exit code that was seen and the one that the trainer reported.

        Note a user's SIGINT, which `make stop` sends to the trainer alone.
        """
        if reported == f"{STOPPED}{IN_DOUBT}":  # torchrun too sends SIGTERM: when a process died
            return STOPPED if self.children.stop_requested else OTHER.code
        if reported == f"{STOPPED}{BY_USER}":
            self.children.stop_requested = True
            return STOPPED
        if reported.isdecimal() and (code <= SIGNALED or is_final(int(reported))):
            code = int(reported)
        if code == SIGNALED + signal.SIGINT:
            self.children.stop_requested = True
        return code

    def trainer(self) -> list[str]:
        """Build the command that starts this node's processes."""
        nodes = self.config.site_nodes
        command = [PYTHON, "-m"]
        if nodes > 1:
            command += [
                "torch.distributed.run",
                f"--nnodes={nodes}",
                f"--node-rank={self.config.rank_in_site}",
                f"--master-addr={self.config.master_host}",
                f"--master-port={self.config.master_port}",
                f"--rdzv-conf=timeout={self.config.start_timeout_s}",
            ]
        elif self.processes > 1:
            command += ["torch.distributed.run", "--standalone"]
        else:
            return [*command, self.module]
        options = ["--max-restarts=0", f"--nproc-per-node={self.processes}"]
        return [*command, *options, "-m", self.module]

    def read_progress(self) -> int:
        """Read the step of the last checkpoint, which the trainer writes. 0 if there is none."""
        try:
            return int(self.progress_file.read_text().split()[-1])
        except (OSError, ValueError, IndexError):
            return 0

    def give_up(self, attempt: Attempt, outcome: str) -> Attempt:
        restarts = self.config.max_restarts
        complain(
            f"{outcome}. That makes {restarts + 1} attempts in a row without a new one, and "
            f"MAX_RESTARTS={restarts}: starting again does not help. "
            f"Read the trainer's last words in {self.paths.folder}/logs/"
        )
        reason = attempt.reason and f"the trainer said last: {attempt.reason}"
        return dataclasses.replace(attempt, code=NO_PROGRESS, reason=reason)


def launch(config: Config, children: Children, module: str = "train.main") -> int:
    """Start this node's processes, again when they fail. Returns the exit code."""
    try:
        scratch = tempfile.TemporaryDirectory(prefix="launch.", ignore_cleanup_errors=True)
    except OSError as error:
        complain(f"launch: no temporary files ({error.strerror}). Set TMPDIR to a folder.")
        return BAD_DATA
    with scratch as folder:
        launcher = Launcher(config, children, module, Path(folder))
        try:
            with rendezvous.registry_of(config):
                return launcher.run()
        except rendezvous.CannotServe as error:
            complain(f"launch: {error}")
            return BAD_DATA


def is_final(code: int) -> bool:
    """Return whether another attempt cannot help, or is not wanted."""
    return not describe(code).counts


def read_report(path: Path) -> tuple[str, str]:
    """Read how a process said that it ends (report_exit in distributed/world.py).

    Returns:
        Its exit code, followed by a mark of signals.py, and the reason. Both are empty if it said nothing.
    """
    try:
        code, _, reason = path.read_text(errors="replace").partition("\n")
    except OSError:
        return "", ""
    return code.strip(), reason.strip()


def name_ending(code: int) -> str:
    if code <= SIGNALED:
        return f"code {code}"
    try:
        return f"signal {signal.Signals(code - SIGNALED).name.removeprefix('SIG')}"
    except ValueError:
        return f"signal {code - SIGNALED}"


def main(words: list[str]) -> int:
    children = Children()
    try:
        # The trainer checks what only pretraining requires; MODULE may be something else.
        resolved = resolve(without=PRETRAINING).check()
    except SettingsError as error:
        complain(str(error))
        return error.exit_code
    if not words:  # a MODULE prints them itself
        for warning in resolved.warnings:
            say(warning)
    return launch(resolved.config, children, *words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
