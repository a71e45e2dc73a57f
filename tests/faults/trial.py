"""A run of a test, whose processes may have faults."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.certify.strike import find_processes, kill_processes
from record.metrics import keep_final_steps, read_records
from tests import running
from tests.faults.inject import Fault, faulty
from tests.running import ROOT, environment, wait_until

LAUNCH = [str(ROOT / "scripts" / "launch.sh")]
TRAINER = [sys.executable, "-m", "train.main"]
LAUNCHED = {"NPROC", "MAX_RESTARTS"}  # settings of the launcher
STEPS = {"MAX_STEPS": 24, "SAVE_EVERY": 8, "EVAL_TOKENS": 256, "SAMPLE_TOKENS": 0}


class Trial:
    """A run in a folder of its own.

    Args:
        folder: where it is made.
        where: settings that find its data.
        settings: those of each start.
    """

    def __init__(self, folder: Path, where: dict[str, str], **settings: object):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.where, self.settings = folder, where, settings
        self.run = folder / "run"
        self.checkpoints = self.run / "checkpoints"

    def env(self, *faults: Fault, **settings: object) -> dict[str, str]:
        env = environment(self.folder, self.where, **self.settings | settings)
        return faulty(env, self.folder, *faults) if faults else env

    def command(self, settings: dict[str, object]) -> list[str]:
        return LAUNCH if LAUNCHED & (self.settings | settings).keys() else TRAINER

    def train(self, *faults: Fault, code: int = 0, **settings: object) -> str:
        """Train to the end, which must have this exit code. Returns what was printed."""
        env = self.env(*faults, **settings)
        return running.train(env, command=self.command(settings), code=code)

    def start(self, *faults: Fault, **settings: object) -> subprocess.Popen[str]:
        """Begin to train. `end` waits for the end, and `close` kills what is left."""
        return subprocess.Popen(
            self.command(settings),
            env=self.env(*faults, **settings),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def end(self, process: subprocess.Popen[str], code: int) -> str:
        out, _ = process.communicate(timeout=150)
        assert process.returncode == code, out
        return out

    def prepare(self, *what: str) -> str:
        """Run make data, or with no further word what make train does before it trains."""
        command = [sys.executable, "-m", "train.data.prepare", *what]
        return running.train(self.env(), command=command)

    def wait_until_gone(self, seconds: float = 30) -> None:
        wait_until(lambda: not find_processes(self.folder), seconds, "processes are left")

    def events(self, name: str) -> list[dict[str, Any]]:
        return running.events(self.run, name)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The records of steps, as the run finally has them; [] before there is a record."""
        record = self.run / "metrics.jsonl"
        return keep_final_steps(read_records(record)) if record.exists() else []

    @property
    def losses(self) -> dict[int, tuple[float, float]]:
        return {step["step"]: (step["loss"], step["grad_norm"]) for step in self.steps}

    @property
    def saved(self) -> list[int]:
        """The steps that have checkpoints, half ones included."""
        return running.saved_steps(self.run)

    @property
    def log(self) -> str:
        path = self.run / "train.log"
        return path.read_text() if path.exists() else ""

    def has_tensors_of(self, other: "Trial", step: int) -> bool:
        """Whether all weights and moments of a step are equal to the bit."""
        return running.same(*(running.tensors(trial.run, step) for trial in (self, other)))

    def close(self) -> None:
        """Kill what is left of it."""
        kill_processes(self.folder)
