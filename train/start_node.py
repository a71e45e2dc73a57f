"""What a node of a run does from its start to its end: hold the job's lock, prepare data, train, plot.

scripts/train.py starts it after its checks, in a terminal as in a pod. In a pod the GPU sampler and
the pod agent run next to it.
"""

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

from record import locks
from record.exit_codes import BAD_DATA, BAD_SETTING, DONE, INTERRUPTED, NODES_MISSING, STOPPED
from record.locks import RunFolderError, RunIsHeld
from record.run_paths import RunPaths
from settings import ROOT
from settings.checks import PRETRAINING
from settings.config import DEFAULTS, Config
from settings.declare import format_tokens
from settings.resolve import show_path
from train import launcher
from train.children import Children, complain, say
from train.distributed import rendezvous
from train.distributed.pod import in_pod

LOCK_TICK_S = 2.0
SIDECARS_END_S = 3.0  # for the sampler and the agent to finish their files
LAST_WORDS = (DONE, BAD_SETTING, BAD_DATA)  # after which no other pod takes this one's place


@dataclasses.dataclass(frozen=True)
class Workload:
    """What the run does: the module that prepares its data, and the one that trains."""

    name: str
    prepare: tuple[str, ...]
    train: str


PRETRAIN = Workload("train", ("train.data.prepare",), "train.main")
FINETUNE = Workload("finetune", ("finetune.prepare_data", "before-training"), "finetune.main")


@dataclasses.dataclass
class Node:
    """A node at work. `sidecars` are the processes that run next to training."""

    config: Config
    workload: Workload
    children: Children
    paths: RunPaths
    sidecars: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    def run(self, lock: int | None) -> int:
        """Do everything, or start a process that does it if DETACH=1. Returns the exit code.

        Args:
            lock: the descriptor of the job's lock, if the process that started this one holds it.
        """
        try:
            job = self.hold_job(lock)
        except RunIsHeld:
            if self.children.stop_requested:
                return INTERRUPTED
            complain(self.describe_holder())
            return NODES_MISSING if in_pod() else BAD_DATA
        except RunFolderError as error:
            complain(str(error))
            return BAD_DATA
        with job:
            if self.config.detach and lock is None:
                self.detach(job)
                return DONE
            if in_pod():
                self.start_sampler()
                self.start_agent()
            code = self.work(job)
            if code != DONE:
                self.remove_empty_folder()
            return code

    def work(self, job: TextIO) -> int:
        """Prepare data, train, and on the first node draw the plots."""
        self.show_stage(job, "preparing data")
        code = self.prepare_data()
        if code != DONE:
            return code
        stage = ""  # the trainer tells
        if self.config.site_nodes > 1:
            rank = self.config.rank_in_site
            stage = f"training as node {rank} of {self.config.site_nodes}"
        self.show_stage(job, stage)
        code = launcher.launch(self.config, self.children, self.workload.train)
        if code == INTERRUPTED:
            self.report_stop()
        if code != DONE or self.config.rank_in_site:
            return code
        self.show_stage(job, "drawing plots")
        command = [launcher.PYTHON, "-m", "analysis.plots", str(self.paths.folder)]
        code = self.children.run(command, os.environ, quiet=sys.stdout.isatty())
        if code != DONE and in_pod():  # no reason for another pod
            complain(f"The run is done. Its plots failed with code {code}: run `make plots`.")
            return DONE
        if code == DONE and not in_pod():
            say(self.describe_next_steps())
        return code

    def describe_next_steps(self) -> str:
        """Say what to do with a run that is done."""
        config = self.config
        name = config.run_name
        where = f"RUN_NAME={name}"
        if config.runs_dir != DEFAULTS["RUNS_DIR"]:
            where = f"RUNS_DIR={shlex.quote(config.runs_dir)} {where}"
        is_tiny = config.preset == "tiny" and not config.data  # trained on Python code
        prompt = "def main(" if is_tiny else "Once"
        lines = [
            "\nNext:",
            f"    open {show_path(self.paths.plots / 'loss_curves.html')}",
            f'    make sample {where} PROMPT="{prompt}"',
        ]
        if is_tiny and name == "tiny":  # the first run
            tokens = format_tokens(2 * config.train_tokens)
            lines.append(f"    make train RUN_NAME=longer TRAIN_TOKENS={tokens}")
        return "\n".join(lines)

    def report_stop(self) -> None:
        """Print the last words of a job that was stopped before anything could be saved."""
        say("\nStopped before a checkpoint was saved. Run the same command to continue.")

    def remove_empty_folder(self) -> None:
        """Leave nothing of a run that was refused or stopped at once: its folder holds this lock alone."""
        with contextlib.suppress(OSError):
            if os.listdir(self.paths.folder) == [self.paths.job.name]:
                self.paths.job.unlink()
                self.paths.folder.rmdir()

    # ---- The job's lock

    def refuse_second_job(self) -> int:
        """Refuse at once, before any check, if this node works on the run already. A pod waits instead."""
        if in_pod() or not locks.has_job(self.paths):
            return DONE
        complain(self.describe_holder())
        return BAD_DATA

    def describe_holder(self) -> str:
        """Say that another process works on the run, and what to do about it."""
        holder = locks.read_holder(self.paths.job) or "it has just started"
        named = f"RUN_NAME={self.paths.name}"
        return (
            f"run {self.paths.name} is running already ({holder}). Use make status {named}, "
            f"make attach {named} or make stop {named}, or choose another RUN_NAME."
        )

    def hold_job(self, descriptor: int | None) -> TextIO:
        """Take the job's lock, which shows this node to `make status` and `make stop`.

        What this process starts does not hold the lock, and may outlive it. A pod waits for it: a
        machine that is gone may keep its locks on a shared disk for minutes.

        Args:
            descriptor: of the lock, if the process that started this one holds it.

        Raises:
            RunFolderError: the folder cannot be written.
            RunIsHeld: this node works on the run already.
        """
        if descriptor is not None:
            return os.fdopen(descriptor, "r+")
        patience_s = self.config.start_timeout_s if in_pod() else 0
        deadline = time.monotonic() + patience_s
        is_waiting = False
        while True:
            try:
                return locks.hold(self.paths.job, "works on this run")
            except RunIsHeld:
                if time.monotonic() >= deadline or self.children.stop_requested:
                    raise
            if not is_waiting:
                holder = self.describe_holder()
                say(f"{holder} Waiting up to {patience_s} s: a lost machine keeps its lock.")
                is_waiting = True
            self.children.pause(LOCK_TICK_S)

    def show_stage(self, job: TextIO, stage: str) -> None:
        """Tell `make status` what happens while no trainer speaks for itself."""
        with contextlib.suppress(OSError):  # what needs the space reports a full disk better
            locks.write_holder(job, stage)

    def detach(self, job: TextIO) -> None:
        """Start this job again in a session of its own, which keeps the lock."""
        words = [str(job.fileno()), self.workload.name]
        with open(self.paths.console_log, "ab") as console:
            subprocess.Popen(
                [launcher.PYTHON, "-m", "train.start_node", *words],
                cwd=ROOT,
                env=os.environ | {"DETACH": "0"},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                pass_fds=[job.fileno()],
                start_new_session=True,
                preexec_fn=ignore_hangup,
            )
        name = self.config.run_name
        say(f"training in the background: make status, make attach, make stop (RUN_NAME={name})")

    # ---- Data

    def prepare_data(self) -> int:
        """Prepare what is missing. If that fails, tell the other nodes, which would wait."""
        with tempfile.TemporaryDirectory(prefix="prepare.", ignore_cleanup_errors=True) as folder:
            report_file = Path(folder, "exit-code")
            environment = os.environ | {"EXIT_CODE_FILE": str(report_file)}
            code = self.children.run([launcher.PYTHON, "-m", *self.workload.prepare], environment)
            _, reason = launcher.read_report(report_file)
        if code == DONE:
            return DONE
        if self.children.stop_requested:
            self.report_stop()
            return STOPPED
        if self.config.site_nodes > 1 and not in_pod():  # pods end with their Job
            rendezvous.over(self.config, code, reason)
        return code

    # ---- What runs next to training

    def start_sampler(self) -> None:
        """Start the GPU sampler, apart from the terminal: it stays when the trainer restarts."""
        log = self.paths.gpu_log
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            file = open(log, "ab")  # noqa: SIM115 (closed below)
        except OSError:  # training complains about such a folder
            return
        with file:
            sampler = subprocess.Popen(
                [launcher.PYTHON, "-m", "monitor.gpu_sampler", "--follow"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=ignore_hangup,
            )
        self.sidecars.append(sampler)
        say(
            f"GPU sampler: process {sampler.pid}, writes {self.paths.folder}/gpu_metrics_*.csv "
            f"and logs to {log}"
        )

    def start_agent(self) -> None:
        """Start what reports on this machine in the pod's log."""
        command = [launcher.PYTHON, "-m", "monitor.pod_agent"]
        self.sidecars.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL))

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
        if self.config.sync == "diloco" and code in LAST_WORDS:
            with contextlib.suppress(OSError):
                self.paths.last_word.write_text(f"{code}\n")


def ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def main(words: list[str]) -> int:
    """Continue with the job whose lock is open, detached from the terminal."""
    lock, name = words
    workload = FINETUNE if name == FINETUNE.name else PRETRAIN
    children = Children()
    # The process that started this one has checked the settings.
    config = Config.load(without=PRETRAINING)
    return Node(config, workload, children, RunPaths.of_node(config, ROOT)).run(int(lock))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
