"""What `make certify` proves. Each proof returns what was found, or raises Failed."""

import random
import shutil
from pathlib import Path

import torch

from bench.certify.small_run import EVERY, Failed, Results, SmallRun
from settings import SettingsError
from settings.resolve import resolve
from settings.terminal import complain
from train.checkpoint.find import find_verified

CLOSE = 1e-5  # relative difference of float32 losses on another number of processes
SIZES = {"full": (160, 16), "short": (48, 3)}  # steps of a run, and how often one is struck
# Who is struck, and when. A short certification takes the first three.
BLOWS = (
    ("everything", "save"),
    ("stop", "evaluation"),
    ("a rank", "step"),
    ("stop", "step"),
    ("all ranks", "evaluation"),
    ("torchrun", "step"),
    ("stop", "save"),
    ("everything", "step"),
)
EQUAL = "equal bit for bit"  # losses, gradient norms and tensors of checkpoints


class NotPromised(Exception):
    """There is nothing to prove for these settings. The message says why."""


class Certification:
    """Runs in `work` that are compared with one that is left alone, the reference.

    Args:
        size: of SIZES.
        settings: that shape the arithmetic.
    """

    def __init__(self, work: Path, size: str, settings: dict[str, str]):
        self.work = work
        self.steps, self.blows = SIZES[size]
        self.processes = int(settings["NPROC"])
        self.rng = random.Random(int(settings["SEED"]))
        batch_tokens = 512 * max(2, self.processes)
        self.settings = settings | {
            "MAX_STEPS": str(self.steps),
            "BATCH_TOKENS": str(batch_tokens),
            "TRAIN_TOKENS": str(batch_tokens * self.steps),
        }

    def run(self, name: str, **changes: str) -> SmallRun:
        complain(f"certify: {name}")
        return SmallRun(self.work, name, self.settings | changes)

    def train_reference(self, **changes: str) -> Results:
        """Train the reference. Raises SettingsError for settings that do not fit each other."""
        run = self.run("reference", **changes)
        if problems := resolve(run.settings).problems:
            raise SettingsError(problems)
        return run.train()

    def copy_reference(self, name: str, last: int, **changes: str) -> SmallRun:
        """Return a copy of the reference whose last checkpoint is of this step."""
        run = self.run(name, **changes)
        shutil.copytree(self.work / "reference", run.paths.folder)
        run.paths.status.unlink()  # which says that it is done
        for step in range(last + EVERY, self.steps + 1, EVERY):
            shutil.rmtree(run.checkpoint(step))
        return run

    def prove_killed(self, expected: Results) -> str:
        """A run that is killed and stopped again and again equals the reference."""
        run = self.run("killed")
        run.end(run.start("train.data.prepare"))
        steps = self.rng.sample(range(EVERY, self.steps - 3 * EVERY), self.blows)
        for number, step in enumerate(sorted(steps)):
            blow, moment = BLOWS[number % len(BLOWS)]
            if blow == "torchrun" and self.processes == 1:
                blow = "everything"
            complain(f"certify: strike {blow} at the first {moment} after step {step}")
            run.train_until_struck(blow, moment, step, self.rng)
        compare(expected, run.train())
        return f"{self.blows} kills and stops, at saves and evaluations: {EQUAL}"

    def prove_damaged(self, expected: Results) -> str:
        """A checkpoint with a flipped bit is refused, and the one before is taken."""
        run = self.copy_reference("damaged", self.steps)
        before = self.steps - EVERY
        paths = sorted(run.checkpoint(self.steps).glob("*.distcp"))
        for _ in range(self.steps):
            path = self.rng.choice(paths)
            sound = path.read_bytes()
            damaged = bytearray(sound)
            damaged[self.rng.randrange(len(sound))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(damaged)
            if find_verified(run.paths.checkpoints, 1)[0] != [before]:
                raise Failed(f"a flipped bit was not noticed in {path}")
            path.write_bytes(sound)
        path.write_bytes(damaged)
        compare(expected, run.train())
        if not list(run.paths.checkpoints.glob(".damaged-*")):
            raise Failed(f"the damaged checkpoint was not set aside: {run.paths.folder}.log")
        return f"{self.steps} bit flips refused, previous one taken: {EQUAL}"

    def prove_processes(self, expected: Results) -> str:
        """After a resume on another number of processes losses agree to CLOSE."""
        other = 1 if self.processes > 1 else 2
        if self.settings["DTYPE"] != "float32":
            raise NotPromised("only float32 promises how close losses on other processes are")
        if 0 < torch.cuda.device_count() < other:
            raise NotPromised(f"there is no GPU for each of {other} processes")
        first = self.steps - EVERY
        run = self.copy_reference("processes", first, NPROC=str(other), SHARD_RANKS="")
        results = run.train()
        apart = 0.0
        for step in range(first + 1, self.steps + 1):
            one, two = (float.fromhex(of[f"step {step}"].split()[0]) for of in (expected, results))
            apart = max(apart, abs(two / one - 1))
        text = f"{self.processes} to {other}, from step {first} on: losses"
        if apart > CLOSE:
            raise Failed(f"{text} differ by {apart:.1e}, more than {CLOSE:.0e}")
        return f"{text} agree to {apart:.1e}"

    def prove_streamed(self, expected: Results) -> str:
        """A run whose shards are made while it trains equals the reference."""
        run = self.run("streamed", DATA_STREAM="1", DATA_DIR=str(self.work / "streamed-data"))
        compare(expected, run.train())
        return f"streamed and prepared data: {EQUAL}"


PROOFS = {
    "killed": Certification.prove_killed,
    "damaged": Certification.prove_damaged,
    "processes": Certification.prove_processes,
    "streamed": Certification.prove_streamed,
}


def compare(expected: Results, results: Results) -> None:
    """Raise Failed if results differ from those expected. More checkpoints are no difference."""
    for key, value in expected.items():
        if results.get(key) != value:
            raise Failed(f"{key}: {results.get(key)}, and {value} was expected")
