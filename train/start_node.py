"""What a node of a run does from its start to its end: hold the job's lock, prepare data, train, plot.

scripts/train.py calls it after its checks, in a terminal as in a pod. In a pod the GPU sampler and
the pod agent run next to it.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from record import bad_nodes, locks
from record.bad_nodes import BadNode
from record.durable import write_whole
from record.exit_codes import BAD_DATA, BAD_SETTING, DONE, INTERRUPTED, MACHINE_FAULT, NODES_MISSING
from record.locks import RunFolderError, RunIsHeld
from record.regular_file import only_regular
from record.run_paths import list_checkpoints
from record.wait import wait
from settings import ROOT
from settings.config import DEFAULTS, Config
from settings.declare import format_tokens
from settings.resolve import name_new_run, name_run, repeat_typed, show_path
from train import launcher
from train.children import Children, complain, say
from train.distributed import rendezvous
from train.distributed.pod import exit_code_of, in_pod, node_name
from train.launcher import Launcher

LOCK_TICK_S = 2.0
FIRST_REFUSAL_S = 10.0  # before a pod leaves a bad node; twice as long for each that did so before
LONGEST_REFUSAL_S = 300.0
MOST_DOUBLINGS = 5
SIDECARS_END_S = 3.0  # for the sampler and the agent to finish their files
FINAL_CODES = (DONE, BAD_SETTING, BAD_DATA)  # after which no other pod takes this one's place
CODE_MIXES = ("python:1", DEFAULTS["DATA_MIX"])  # Python code: tiny's and the default


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the run does: the module that prepares its data, and the one that trains."""

    name: str
    prepare: tuple[str, ...]
    train: str


PRETRAIN = Workload("train", ("train.data.prepare",), "train.main")
FINETUNE = Workload("finetune", ("finetune.prepare_data", "before-training"), "finetune.main")


class Node(Launcher):
    """A node at work: what it does before and after its launcher.

    Attributes:
        sidecars: the processes that run next to training.
    """

    def __init__(self, config: Config, children: Children, workload: Workload = PRETRAIN):
        super().__init__(config, children, workload.train)
        self.workload = workload
        self.sidecars: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """Do everything, in a process in the background if DETACH=1. Returns the exit code."""
        try:
            job = self.hold_job()
        except RunFolderError as error:
            complain(str(error))
            return exit_code_of(error, BAD_DATA)
        if job is None:
            if self.children.stop_requested:
                return INTERRUPTED
            complain(self.describe_holder())
            return NODES_MISSING if waits_for_lock() else BAD_DATA
        with job:
            try:
                if self.config.detach and not self.detach():
                    return DONE
            except RunFolderError as error:
                complain(str(error))
                return BAD_DATA
            if in_pod():
                self.start_sampler()
                # It reports on this machine in the pod's log.
                self.start_sidecar("monitor.pod_agent")
            code = self.work(job)
            if code != DONE:
                self.remove_empty_folder()
            return code

    def work(self, job: TextIO) -> int:
        """Prepare data, train, and on the first node draw the plots."""
        show_stage(job, "preparing data")
        code = self.prepare_data()
        if code != DONE:
            return code
        stage = ""  # the trainer tells
        if self.has_peers:
            stage = f"training as node {self.config.rank_in_site} of {self.config.site_nodes}"
        show_stage(job, stage)
        code = self.launch()
        if code == INTERRUPTED:
            self.say_stopped()
        if code != DONE or self.config.rank_in_site:
            return code
        self.is_finished = True
        show_stage(job, "drawing plots")
        say("\nDrawing the loss curves.")
        command = [launcher.PYTHON, "-m", "analysis.plots", str(self.paths.folder)]
        code = self.children.run(command, os.environ, quiet=sys.stdout.isatty())
        if code != DONE and in_pod():  # no reason for another pod
            complain(
                f"The run is done. Its plots failed with code {code}. Run `make plots {name_run(self.paths.folder)}`."
            )
            return DONE
        if code == DONE and not in_pod():
            say(self.describe_next_steps())
        return code

    def prepare_data(self) -> int:
        """Prepare what is missing. If that fails, tell the other nodes, which would wait."""
        command = [launcher.PYTHON, "-m", *self.workload.prepare]
        with tempfile.TemporaryDirectory(prefix="prepare.", ignore_cleanup_errors=True) as folder:
            code, _, reason = self.run_reporting(command, os.environ, Path(folder))
        if code == DONE:
            return DONE
        if self.children.stop_requested:
            self.say_stopped()
            return INTERRUPTED
        if self.has_peers and not in_pod():  # pods end with their Job
            rendezvous.announce_end(self.config, code, reason)
        return code

    def say_stopped(self) -> None:
        """Say how to go on after a stop of which the trainer said nothing."""
        if self.config.rank_in_site or list_checkpoints(self.paths.checkpoints):
            say("Stopped. Run the same command to resume.")
        else:
            say("Stopped before the first checkpoint. Run the same command to start.")

    def describe_next_steps(self) -> str:
        """Say what to do with a run that is done."""
        config = self.config
        lines = [
            "\nNext:",
            f"    {find_opener()}{show_path(self.paths.plots / 'loss_curves.html')}",
        ]
        if self.workload is not PRETRAIN:
            return "\n".join([*lines, f"    make chat {name_run(self.paths.folder)}"])
        is_python = config.data_mix in CODE_MIXES
        prompt = "def main(" if is_python else "Once"
        lines.append(f'    make sample {name_run(self.paths.folder)} PROMPT="{prompt}"')
        if is_python and config.run_name == "tiny" and not config.early_end:  # the first run
            longer = name_new_run(self.paths.folder.with_name("longer"))
            tokens = format_tokens(2 * config.train_tokens)
            rest = repeat_typed(
                "train", without=("RUNS_DIR", "RUN_NAME", "TRAIN_TOKENS", "MAX_STEPS")
            )
            lines.append(f"    make train {longer} TRAIN_TOKENS={tokens}{rest}")
        return "\n".join(lines)

    def remove_empty_folder(self) -> None:
        """Leave nothing of a run that was refused or stopped at once: its folder holds its plan and this lock alone."""
        alone = {self.paths.plan, self.paths.job}
        with contextlib.suppress(OSError):
            if alone.issuperset(self.paths.folder.iterdir()):
                self.paths.plan.unlink(missing_ok=True)
                self.paths.job.unlink()
                self.paths.folder.rmdir()

    # ---- The job's lock

    def refuse_second_job(self) -> int:
        """Refuse at once, before any check, if this node works on the run already. A pod waits instead."""
        if waits_for_lock() or not locks.has_job(self.paths):
            return DONE
        complain(self.describe_holder())
        return BAD_DATA

    def check_machine(self) -> int:
        """Refuse a machine that is bad before anything is done on it. Returns the exit code."""
        node = None
        if self.has_pod_gpus:
            node = bad_nodes.find(self.bad_nodes, node_name())
        if node and not self.wait_until_cleared(node):
            return INTERRUPTED if self.children.stop_requested else MACHINE_FAULT
        fault = self.check_gpus()
        if not fault:
            return DONE
        complain(f"exit code {MACHINE_FAULT}: {fault}")
        return MACHINE_FAULT

    def wait_until_cleared(self, node: BadNode) -> bool:
        """Wait for a bad node to be taken off the list, longer each time, so that its pods do not come and go.

        Returns:
            Whether it was. If not, the Job makes another pod, which may find another node.
        """
        doublings = min(node.refusals, MOST_DOUBLINGS)
        delay_s = min(FIRST_REFUSAL_S * 2**doublings, LONGEST_REFUSAL_S)
        bad_nodes.write(self.bad_nodes, dataclasses.replace(node, refusals=node.refusals + 1))
        complain(
            f"node {node.name} is bad: {node.reason}. Leaving it in {delay_s:.0f} s. `make bad-nodes` lists "
            "such nodes, and `make clear-bad-nodes` allows them again."
        )
        return wait(
            lambda: bad_nodes.find(self.bad_nodes, node.name) is None,
            delay_s,
            LOCK_TICK_S,
            lambda: self.children.stop_requested,
        )

    def describe_holder(self) -> str:
        """Say that another process works on the run, and what to do about it."""
        holder = locks.read_holder(self.paths.job) or "it has just started"
        named = name_run(self.paths.folder)
        return (
            f"run {self.paths.name} is running already ({holder}). Use make status {named}, "
            f"make attach {named} or make stop {named}, or choose another RUN_NAME."
        )

    def hold_job(self) -> TextIO | None:
        """Take the job's lock, which shows this node to `make status` and `make stop`.

        What this process starts does not hold the lock, and may outlive it. A pod waits for it, and a
        requeued job of Slurm: a machine that is gone may keep its locks on a shared disk for minutes.

        Returns:
            None if this node works on the run already.

        Raises:
            RunFolderError: the folder cannot be written.
        """

        def look() -> TextIO | None:
            try:
                return locks.hold(self.paths.job, "works on this run")
            except RunIsHeld:
                return None

        patience_s = self.config.start_timeout_s if waits_for_lock() else 0
        return wait(
            look,
            patience_s,
            LOCK_TICK_S,
            lambda: self.children.stop_requested,
            lambda: say(
                f"{self.describe_holder()} Waiting up to {patience_s} s: a lost machine keeps its lock."
            ),
        )

    def detach(self) -> bool:
        """Go on in a process of a session of its own, which keeps the lock.

        Returns:
            Whether this is that process.

        Raises:
            RunFolderError: the console log cannot be written.
        """
        assert threading.active_count() == 1  # a fork takes no other along
        ignore_hangup()  # before the terminal can be gone
        sys.stdout.flush()
        with (
            locks.open_console(self.paths.console_log) as console,
            open(os.devnull, "rb") as nothing,
        ):
            if os.fork():
                named = name_run(self.paths.folder)
                say(f"training in the background: make status, make attach, make stop ({named})")
                return False
            os.setsid()
            os.environ["DETACH"] = "0"
            for number, file in enumerate((nothing, console, console)):
                os.dup2(file.fileno(), number)
        return True

    # ---- What runs next to training

    def start_sampler(self) -> None:
        """Start the GPU sampler, apart from the terminal: it stays when the trainer restarts."""
        log = self.paths.gpu_log
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "ab", opener=only_regular) as file:
                sampler = self.start_sidecar(
                    "monitor.gpu_sampler",
                    "--follow",
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=ignore_hangup,
                )
        except OSError:  # training complains about such a folder
            return
        say(
            f"GPU sampler: process {sampler.pid}, writes {self.paths.folder}/gpu_metrics_*.csv "
            f"and logs to {log}"
        )

    def start_sidecar(self, *words: str, **popen: Any) -> "subprocess.Popen[bytes]":
        command = [launcher.PYTHON, "-m", *words]
        self.sidecars.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, **popen))
        return self.sidecars[-1]

    def leave(self, code: int) -> None:
        """In a pod, end the sidecars, and write how a site ended for the lighthouse's pod."""
        if not in_pod():
            return
        deadline = time.monotonic() + SIDECARS_END_S
        for process in self.sidecars:
            process.terminate()
        for process in self.sidecars:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        if self.config.sync == "diloco" and code in FINAL_CODES:
            with contextlib.suppress(OSError):
                write_whole(self.paths.last_word, f"{code}\n".encode())


def find_opener() -> str:
    """Return the command of this system that opens a page, with a blank; "" if it has none."""
    command = "open" if sys.platform == "darwin" else "xdg-open"
    return f"{command} " if shutil.which(command) else ""


def show_stage(job: TextIO, stage: str) -> None:
    """Tell `make status` what happens while no trainer speaks for itself."""
    with contextlib.suppress(OSError):  # what needs the space reports a full disk better
        locks.write_holder(job, stage)


def waits_for_lock() -> bool:
    """Return whether this node takes the place of one that was lost, and may still hold its lock."""
    return in_pod() or "SLURM_RESTART_COUNT" in os.environ


def ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
