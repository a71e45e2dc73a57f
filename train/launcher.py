"""Start the trainer on this machine, and start it again when it fails.

    scripts/launch.sh [MODULE]      MODULE runs instead of the trainer, train.main

One process runs directly, several under torchrun, which nothing else starts for a run. On one
machine nothing listens beyond loopback (torchrun.py). On several nodes the launchers first meet
(distributed/rendezvous.py). The exit code is the trainer's own, which
torchrun would turn into 1, or one of the launcher's (record/exit_codes.py).

Who wants the run to stop sends SIGTERM to the launcher, as Ctrl-C, `make stop` and a cluster do. A
trainer that ends by a signal although its launcher was not asked has failed: torchrun too sends
SIGTERM, when another process has died.
"""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from record import bad_nodes, locks, status
from record.default_run import choose_run, require_run
from record.exit_codes import (
    DONE,
    INTERRUPTED,
    MACHINE_FAULT,
    NO_PROGRESS,
    NODES_MISSING,
    OTHER,
    STOPPED,
    describe,
)
from record.locks import RunFolderError
from record.metrics import duration
from record.run_paths import RunPaths, list_checkpoints
from settings import ROOT, SettingsError, explain_error
from settings.checks import PRETRAINING
from settings.config import Config
from settings.resolve import name_run, resolve
from settings.visible_gpus import ask_driver
from train.children import Children, complain, say
from train.console import QUIET_S
from train.distributed import rendezvous
from train.distributed.pod import exit_code_of_fault, in_pod, node_name
from train.tune import count_gpus, forget_ranks, record_nccl, set_default, tune

PYTHON = sys.executable  # what children run with
TRAINERS = ("train.main", "finetune.main")
FIRST_PAUSE_S = 1
LONGEST_PAUSE_S = 30
WELL = "well"  # what hardware/gpu_health.py prints
HEALTH_S = 120  # for a driver to answer: without persistence mode it takes seconds for each GPU
SIGNALED = 128  # and the signal's number: a shell's exit code
NOTHING_TRAINED = "Stopping. Nothing was trained yet."


@dataclasses.dataclass(frozen=True)
class AttemptEnd:
    """One start of the trainer, which is over.

    Attributes:
        reason: what the trainer reported.
        has_met: whether the trainer was to start: all nodes were there, and wait for this one.
    """

    code: int
    reason: str = ""
    has_met: bool = True


class Launcher:
    """Starts a module on this node, together with the other nodes.

    Args:
        module: the trainer, or an evaluation.
    """

    def __init__(self, config: Config, children: Children, module: str = "train.main"):
        self.config = config
        self.children = children
        self.module = module
        self.paths = RunPaths.of_node(config, ROOT)
        self.bad_nodes = ROOT / config.runs_dir / bad_nodes.FOLDER
        self.processes = config.nproc or 1  # until GPUs are counted
        self.has_peers = config.site_nodes > 1
        self.started_at = math.inf  # Unix time at which the trainer that runs was started
        self.is_finished = False  # the trainer has made all steps
        if module in TRAINERS:
            children.describe_stop = self.describe_stop

    def launch(self) -> int:
        """Start the module until it succeeds, or until another attempt cannot help.

        Returns:
            The exit code.
        """
        try:
            scratch = tempfile.TemporaryDirectory(prefix="launch.", ignore_cleanup_errors=True)
        except OSError as error:
            complain(f"launch: no temporary files ({error.strerror}). Set TMPDIR to a folder.")
            return exit_code_of_fault("scratch")
        with scratch as folder:
            try:
                with rendezvous.registry_of(self.config):
                    attempt = self.supervise(Path(folder))
                    is_stopped = attempt.code in (STOPPED, INTERRUPTED)
                    comes_back = in_pod() and (is_stopped or attempt.code == MACHINE_FAULT)
                    if (
                        self.has_peers
                        and attempt.has_met
                        and attempt.code != DONE
                        and not comes_back
                    ):
                        rendezvous.announce_end(self.config, attempt.code, attempt.reason)
            except rendezvous.CannotServe as error:
                complain(f"launch: {error}")
                return exit_code_of_fault("port")
        if attempt.code == INTERRUPTED and self.module in TRAINERS and not self.config.rank_in_site:
            status.mark_stopped(self.paths)
        # Torchrun prints a lot after the trainer's last words, and `kubectl describe` shows the end.
        if attempt.reason and attempt.code != DONE and not is_stopped:
            complain(f"launch: exit code {attempt.code}: {attempt.reason}")
        return attempt.code

    def supervise(self, folder: Path) -> AttemptEnd:
        """Start the module, and again after each failure.

        Give up after MAX_RESTARTS restarts without a new checkpoint. The pauses before them grow. A pod
        whose GPUs are not well leaves them, before it meets the other nodes and after each failure.

        Args:
            folder: for what the trainer tells this process.
        """
        environment = self.prepare_environment(folder)
        restarts = self.config.max_restarts
        if self.module not in TRAINERS:
            restarts = 0  # an evaluation starts again only when the user asks
        failures = 0  # since the last new checkpoint
        saved = 0
        attempts = 0
        if fault := self.check_gpus():
            return AttemptEnd(MACHINE_FAULT, fault)
        while True:
            attempt = self.attempt(environment, folder)
            attempts += 1
            is_wanted = attempt.has_met and not self.children.stop_requested
            if attempt.code == MACHINE_FAULT and in_pod():
                return attempt  # the cluster makes another pod
            # In a pod it comes back. By hand this node ends, too.
            is_peer_gone = attempt.code in (STOPPED, NODES_MISSING) and self.has_peers and in_pod()
            if not is_wanted or (is_final(attempt.code) and not is_peer_gone):
                return attempt
            if fault := self.check_gpus():
                return AttemptEnd(MACHINE_FAULT, fault)
            step = read_progress(folder)
            if step > saved:
                saved = step
                failures = 0
            outcome = f"launch: attempt {attempts} ended with {name_ending(attempt.code)}; "
            outcome += f"last checkpoint: step {saved}" if saved else "no new checkpoint yet"
            pause_s = FIRST_PAUSE_S
            if is_peer_gone:
                say(f"{outcome}. Another node has left; waiting for it to come back")
            elif restarts == 0:
                return attempt
            elif failures == restarts:
                complain(
                    f"{outcome}. That makes {restarts + 1} attempts in a row without a new one, and "
                    f"MAX_RESTARTS={restarts}: starting again does not help. "
                    f"Read the trainer's last words in {self.paths.folder}/logs/"
                )
                reason = attempt.reason and f"the trainer said last: {attempt.reason}"
                return AttemptEnd(NO_PROGRESS, reason)
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

    @property
    def has_pod_gpus(self) -> bool:
        """Whether this is a pod with a GPU for each process: with any DEVICE except cpu."""
        return in_pod() and self.config.device != "cpu"

    def check_gpus(self) -> str:
        """Check the GPUs of this pod, and list its node if one is bad. Returns what is wrong, or ""."""
        if not self.has_pod_gpus:
            return ""
        command = [PYTHON, "-m", "hardware.gpu_health", str(self.processes)]
        try:
            answer = ask_driver(command, HEALTH_S).strip()
        except subprocess.TimeoutExpired:
            answer = f"the NVIDIA driver has not answered in {HEALTH_S} s"
        if answer == WELL:
            return ""
        fault = answer or "the check of the GPUs crashed in their driver"
        bad_nodes.add(self.bad_nodes, node_name(), fault)
        return fault

    def attempt(self, environment: Mapping[str, str], folder: Path) -> AttemptEnd:
        """Start the module once, on all nodes together."""
        if self.has_peers:
            end = rendezvous.meet(self.config, self.processes, lambda: self.children.stop_requested)
            if end:  # all nodes get the same answer
                return AttemptEnd(end.code, has_met=False)
        if self.children.stop_requested:
            return AttemptEnd(INTERRUPTED)
        command = self.build_command()
        environment = {**environment, "LAUNCHED_AT": str(time.monotonic())}
        self.started_at = time.time()
        if self.module in TRAINERS and not self.config.rank_in_site:
            threading.Thread(target=self.report_start, daemon=True).start()
        try:
            if self.has_peers or self.processes > 1:
                code, reported, reason = self.run_reporting(command, environment, folder)
                return AttemptEnd(self.choose_code(code, reported), reason)
            return AttemptEnd(self.choose_code(self.children.run(command, environment)))
        finally:
            self.started_at = math.inf

    def report_start(self) -> None:
        """Say that the trainer is starting for as long as it does not speak for itself."""
        started_at = self.started_at
        while True:
            time.sleep(QUIET_S)
            if self.started_at != started_at or self.read_status():
                return
            say(f"starting the trainer: {duration(time.time() - started_at)} so far")

    def run_reporting(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> tuple[int, int | None, str]:
        """Run a command that may report how it ends (report_exit in distributed/world.py).

        Returns:
            Its exit code, the one that it reported or None, and the reason.
        """
        report = folder / "exit-code"
        report.unlink(missing_ok=True)
        code = self.children.run(command, {**environment, "EXIT_CODE_FILE": str(report)})
        try:
            reported, _, reason = report.read_text(errors="replace").partition("\n")
            return code, int(reported), reason.strip()
        except (OSError, ValueError):
            return code, None, ""

    def choose_code(self, code: int, reported: int | None = None) -> int:
        """Choose between the exit code that was seen and the one that the trainer reported."""
        if code == SIGNALED + signal.SIGINT:  # which only a user sends
            self.children.stop_requested = True
        if reported == INTERRUPTED:  # by a signal, before there was anything to save
            return INTERRUPTED if self.children.stop_requested else OTHER.code
        if reported and (code <= SIGNALED or is_final(reported)):
            code = reported
        if self.children.stop_requested and not is_final(code):
            # One that was killed by a second Ctrl-C may have saved before.
            has_saved = self.read_status().get("exit_code") == STOPPED
            return STOPPED if has_saved else INTERRUPTED
        return code

    def read_status(self) -> dict[str, Any]:
        """Return what the trainer of this attempt says it is doing; {} if it says nothing yet."""
        state = status.read(self.paths.status)
        return state if state.get("heartbeat", 0.0) >= self.started_at else {}

    def describe_stop(self) -> str:
        """Say what a request to stop does now."""
        state = self.read_status()
        if self.is_finished or state.get("phase") == "done":
            plots = f"; its plots were not drawn: make plots {name_run(self.paths.folder)}"
            return f"Stopping. The run is finished{'' if self.config.rank_in_site else plots}."
        if state.get("can_save"):
            return "Stopping: saving a checkpoint. Press Ctrl-C again to quit without saving."
        if "can_save" in state:
            return "Stopping without a checkpoint, because SAVE_EVERY=0."
        if self.config.rank_in_site and self.started_at < math.inf:
            return "Stopping. Press Ctrl-C again to quit at once."
        saved = max(list_checkpoints(self.paths.checkpoints), default=0)
        step = status.read(self.paths.status).get("step", 0)  # also that of an attempt that failed
        if step > saved > 0:
            return f"Stopping. The steps after the last checkpoint, of step {saved}, are lost."
        if step > saved:
            return f"Stopping. The run had made {step} steps and no checkpoint yet. They are lost."
        if saved:
            return "Stopping. Nothing was trained since the last checkpoint."
        return NOTHING_TRAINED

    def prepare_environment(self, folder: Path) -> dict[str, str]:
        """Choose how many processes there are, and return their environment."""
        config = self.config
        environment = dict(os.environ)
        forget_ranks(environment)
        gpus = 0
        if config.device != "cpu":
            gpus = count_gpus(environment)
        self.processes = config.nproc or max(1, gpus)
        environment["LAUNCH_CHOICES"] = tune(environment, self.processes, gpus)
        set_default(environment, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(config.shutdown_timeout_s))
        if gpus:
            record_nccl(environment, self.paths)
        environment["PROGRESS_FILE"] = str(folder / "progress")
        environment["LAUNCHER_PID"] = str(os.getpid())  # the trainer ends with its parent
        # Torchrun would end at a second SIGHUP or SIGINT.
        environment["PET_SIGNALS_TO_HANDLE"] = "SIGTERM"
        return environment

    def build_command(self) -> list[str]:
        """Build the command that starts this node's processes."""
        command = [PYTHON, "-m"]
        if self.has_peers:
            command += [
                "train.torchrun",
                f"--nnodes={self.config.site_nodes}",
                f"--node-rank={self.config.rank_in_site}",
                f"--master-addr={self.config.master_host}",
                f"--master-port={self.config.master_port}",
                f"--rdzv-conf=timeout={self.config.start_timeout_s}",
            ]
        elif self.processes > 1:
            command += ["train.torchrun"]
        else:
            return [*command, self.module]
        options = ["--max-restarts=0", f"--nproc-per-node={self.processes}"]
        return [*command, *options, "-m", self.module]


def is_final(code: int) -> bool:
    """Return whether another attempt cannot help, or is not wanted."""
    return not describe(code).counts


def read_progress(folder: Path) -> int:
    """Read the step of the last checkpoint, which the trainer writes. 0 if there is none."""
    try:
        return int((folder / "progress").read_text())
    except (OSError, ValueError):
        return 0


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
        if words:
            os.environ |= choose_run()
        resolved = resolve(without=PRETRAINING).check()
        if words:
            require_run(resolved.config)  # before torch is loaded
    except (SettingsError, RunFolderError) as error:
        complain(explain_error(error))
        return error.exit_code
    if not words:  # a MODULE prints them itself
        for warning in resolved.warnings:
            say(warning)
    return Launcher(resolved.config, children, *words).launch()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
