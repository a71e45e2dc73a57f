"""Start the trainer on this machine, and start it again when it fails.

    scripts/launch.sh [MODULE]      MODULE runs instead of the trainer, train.main

One process runs directly, several under torchrun, which nothing else in this repository starts. On
several nodes the launchers first meet in a roll call (distributed/rendezvous.py). The exit code is
the trainer's own, which torchrun would turn into 1, or one of the launcher's (record/exit_codes.py).
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from record import status
from record.exit_codes import (
    BAD_DATA,
    BAD_SETTING,
    DONE,
    INTERRUPTED,
    NO_PROGRESS,
    STOPPED,
    describe,
)
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.checks import PRETRAINING
from settings.config import Config
from train.children import Children, complain, say
from train.distributed.pod import in_pod
from train.tune import count_gpus, record_nccl, set_default, tune

PYTHON = sys.executable  # what children run with
TRAINERS = ("train.main", "finetune.main")
ROLL_CALL = "train.distributed.rendezvous"
RUN_IS_DONE = 10  # exit code of the roll call
FIRST_PAUSE_S = 1
LONGEST_PAUSE_S = 30
SIGNALED = 128  # and the signal's number: a shell's exit code


@dataclasses.dataclass(frozen=True)
class Report:
    """How a process ended in its own words: its exit code, a mark (signals.py) and a reason."""

    code: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """How one start of the trainer ended.

    Attributes:
        is_final: starting it again cannot help.
        reason: what the trainer reported.
        joined: whether the roll call let this node start.
        peer_stopped: another node was asked to stop, and will come back.
    """

    code: int
    is_final: bool = True
    reason: str = ""
    joined: bool = False
    peer_stopped: bool = False


@dataclasses.dataclass
class Launcher:
    """What all attempts share. `environment` is that of the processes it starts."""

    config: Config
    paths: RunPaths
    children: Children
    module: str
    processes: int
    environment: dict[str, str]
    report_file: Path
    progress_file: Path

    def run(self) -> int:
        """Start the trainer until it succeeds, or until another attempt cannot help.

        Returns:
            The exit code.
        """
        attempt = self.supervise()
        if attempt.joined and attempt.code != DONE:
            waited_for = in_pod() and attempt.code in (STOPPED, INTERRUPTED)
            if not waited_for:
                self.tell_other_nodes(attempt.code)
        # Torchrun prints a lot after the trainer's last words, and `kubectl describe` shows the end.
        if attempt.reason and attempt.code not in (DONE, STOPPED, INTERRUPTED):
            complain(f"launch: exit code {attempt.code}: {attempt.reason}")
        return attempt.code

    def supervise(self) -> Attempt:
        """Restart after failures, at most MAX_RESTARTS times without a new checkpoint."""
        restarts = self.config.max_restarts
        if self.module not in TRAINERS:
            restarts = 0  # an evaluation starts again only when the user asks
        attempts = 0
        failures = 0
        saved = 0
        while True:
            attempt = self.attempt()
            if attempt.is_final:
                return attempt
            attempts += 1
            step = self.read_progress()
            if step > saved:
                saved = step
                failures = 0
            outcome = f"launch: attempt {attempts} ended with {name_ending(attempt.code)}; "
            outcome += f"last checkpoint: step {saved}" if saved else "no new checkpoint yet"
            pause_s = FIRST_PAUSE_S
            if attempt.peer_stopped:  # no failure of this run
                say(f"{outcome}. Another node was asked to stop; waiting for it to come back")
            elif restarts == 0:
                return attempt
            elif failures == restarts:
                return self.give_up(attempt, outcome, failures + 1)
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
            status.settle(self.paths)

    def attempt(self) -> Attempt:
        """Start the trainer once, on all nodes together."""
        several_nodes = self.config.site_nodes > 1
        if several_nodes:
            code = self.call_the_roll()
            joined = code == DONE
            if self.children.stop_requested:
                return Attempt(INTERRUPTED, joined=joined)
            if code == RUN_IS_DONE:
                return Attempt(DONE)
            if not joined:  # all nodes get the same answer
                return Attempt(code)
        self.report_file.unlink(missing_ok=True)
        code = self.children.run(self.trainer(), self.environment)
        report = read_report(self.report_file)
        code = self.interpret(code, report.code)
        stopped = self.children.stop_requested
        if code == STOPPED and several_nodes and in_pod() and not stopped:
            return Attempt(code, is_final=False, joined=True, peer_stopped=True)
        if code == SIGNALED + signal.SIGINT:  # only a user sends it
            self.children.stop_requested = stopped = True
        is_final = code == STOPPED or describe(code).ends_job
        if stopped and not is_final:
            code = INTERRUPTED
        return Attempt(code, is_final or stopped, report.reason, joined=several_nodes)

    def interpret(self, code: int, reported: str) -> int:
        """Choose between the exit code that was seen and the one that the trainer reported."""
        if reported == f"{STOPPED}?":  # SIGTERM, which torchrun too sends when another process died
            return STOPPED if self.children.stop_requested else 1
        if reported == f"{STOPPED}!":  # SIGINT: `make stop` sends it to the trainer alone
            self.children.stop_requested = True
            return STOPPED
        if not reported.isdecimal():
            return code
        own = int(reported)
        is_final = own == STOPPED or describe(own).ends_job
        if is_final or code <= SIGNALED:
            return own
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

    def call_the_roll(self) -> int:
        place = [os.environ.get("POD_SITE", ""), os.environ.get("K8S_NODE", "")]
        command = [PYTHON, "-m", ROLL_CALL, "meet", str(self.processes), *place]
        return self.children.run(command, self.environment)

    def tell_other_nodes(self, code: int) -> None:
        """End the other nodes, which may be on their way to the roll call."""
        tell_other_nodes(code, "", self.environment)

    def read_progress(self) -> int:
        """Read the step of the last checkpoint, which the trainer writes. 0 if there is none."""
        try:
            return int(self.progress_file.read_text().split()[-1])
        except (OSError, ValueError, IndexError):
            return 0

    def give_up(self, attempt: Attempt, outcome: str, failures: int) -> Attempt:
        complain(
            f"{outcome}. That makes {failures} attempts in a row without a new one, and "
            f"MAX_RESTARTS={self.config.max_restarts}: starting again does not help. "
            f"Read the trainer's last words in {self.paths.folder}/logs/"
        )
        reason = attempt.reason and f"the trainer said last: {attempt.reason}"
        return dataclasses.replace(attempt, code=NO_PROGRESS, reason=reason)


def launch(config: Config, children: Children, module: str = "train.main") -> int:
    """Start this node's processes, again when they fail. Returns the exit code."""
    paths = RunPaths.of_node(config, ROOT)
    environment = dict(os.environ)
    gpus = 0
    if config.device != "cpu":
        gpus = count_gpus(environment)
    processes = config.nproc or max(1, gpus)
    say(tune(environment, processes, gpus))
    set_default(environment, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(config.shutdown_timeout_s))
    if gpus:
        record_nccl(environment, paths)
    try:
        scratch = tempfile.TemporaryDirectory(prefix="launch.", ignore_cleanup_errors=True)
    except OSError as error:
        complain(f"launch: no temporary files ({error.strerror}). Set TMPDIR to a folder.")
        return BAD_DATA
    with scratch as folder:
        report_file = Path(folder, "exit-code")
        progress_file = Path(folder, "progress")
        environment["PROGRESS_FILE"] = str(progress_file)
        environment["LAUNCHER_PID"] = str(os.getpid())  # the trainer ends with its parent
        environment.pop("EXIT_CODE_FILE", None)
        if config.site_nodes > 1 or processes > 1:  # else the trainer's own exit code is seen
            environment["EXIT_CODE_FILE"] = str(report_file)
        launcher = Launcher(
            config, paths, children, module, processes, environment, report_file, progress_file
        )
        return launcher.run()


def tell_other_nodes(code: int, reason: str, environment: dict[str, str]) -> None:
    words = [str(code)]
    if reason:
        words.append(reason)
    subprocess.run(
        [PYTHON, "-m", ROLL_CALL, "over", *words], env=environment, cwd=ROOT, check=False
    )


def read_report(path: Path) -> Report:
    """Read what a process reported before it ended (report_exit in distributed/world.py)."""
    with contextlib.suppress(OSError):
        code, _, reason = path.read_text(errors="replace").partition("\n")
        return Report(code.strip(), reason.strip())
    return Report()


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
        config, _ = Config.load_with_warnings(without=PRETRAINING)
    except SettingsError as error:
        complain(str(error))
        return BAD_SETTING
    return launch(config, children, *words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
