"""A small run of the trainer, started as a user's run is, which may be struck, and what it left behind."""

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.certify.strike import find_processes, strike
from record import status
from record.metrics import RecordReader, keep_final_steps, read_records
from record.run_paths import RunPaths, list_checkpoints, name_checkpoint
from settings import ROOT
from settings.config import SETTINGS
from settings.resolve import build_environment
from train.checkpoint.metadata import read_tensors

LOOK_S = 0.002
EVERY = 8  # steps between checkpoints
SHAPE = {
    "PRESET": "tiny",
    "DATA": "train",  # the Python files of that folder
    "DATA_STREAM": "0",
    "VOCAB_SIZE": "512",
    "N_LAYER": "2",
    "N_HEAD": "4",
    "N_EMBD": "64",
    "SEQ_LEN": "64",
    "MICRO_BATCH_SIZE": "4",
    "WARMUP_TOKENS": "8192",
    "MIN_LEARNING_RATE": "0",
    "SAVE_EVERY": str(EVERY),
    "SAVE_MINUTES": "10000",
    "EVAL_EVERY": "12",
    "EVAL_TOKENS": "4096",
    "SAMPLE_TOKENS": "0",
    "KEEP_LAST": "1000",
    "MAX_RESTARTS": "0",
    "WANDB_MODE": "disabled",
}
Results = dict[str, str]


class Failed(Exception):
    """A proof failed. The message says what happened."""


class SmallRun:
    """A run in the folder `work`, in which one run is running at a time.

    Args:
        settings: besides those of SHAPE.
    """

    def __init__(self, work: Path, name: str, settings: Mapping[str, str]):
        self.work = work
        self.paths = RunPaths(work / name)
        work.mkdir(parents=True, exist_ok=True)
        nothing = work / "nothing.env"
        nothing.touch()
        places = {"RUNS_DIR": work, "DATA_DIR": work / "data", "ENV_FILE": nothing}
        texts = {place: str(path) for place, path in places.items()}
        self.settings = {**SHAPE, **texts, "RUN_NAME": name, **settings}

    def start(self, module: str) -> "subprocess.Popen[bytes]":
        """Start a module with the run's settings. What it prints goes to work/NAME.log."""
        environment = build_environment(self.settings, without=SETTINGS)
        command = [sys.executable, "-m", module]
        with open(self.paths.folder.with_suffix(".log"), "a") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def end(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait for the end of a process and of all that it started. Returns its exit code."""
        code = process.wait()
        while find_processes(self.work):
            time.sleep(LOOK_S)
        return code

    def train(self) -> Results:
        """Prepare data and train to the end. Returns the results. Raises Failed."""
        for module in ("train.data.prepare", "train.launcher"):
            if code := self.end(self.start(module)):
                raise Failed(f"{module} ended with exit code {code}: {self.paths.folder}.log")
        return self.results()

    def train_until_struck(self, blow: str, moment: str, step: int, rng: random.Random) -> None:
        """Train past a step until the next "step", "save" or "evaluation", and strike. Raises Failed."""
        reader = RecordReader(self.paths.metrics)
        reader.read_new()  # of earlier attempts
        left = self.list_saves()  # by those that were killed
        process = self.start("train.launcher")
        reached = 0
        while reached < step or not self.is_at(moment, left):
            for record in reader.read_new():
                reached = record["step"]
            if process.poll() is not None:
                raise Failed(
                    f"ended before the {moment} after step {step}: {self.paths.folder}.log"
                )
            time.sleep(LOOK_S)
        strike(blow, self.work, process, rng)
        if self.end(process) == 0:
            raise Failed(f"ended before {blow} was struck: {self.paths.folder}.log")

    def list_saves(self) -> set[Path]:
        """Return the checkpoints that are being written, and those that a kill has left so."""
        return set(self.paths.checkpoints.glob("step_*.tmp-*"))

    def is_at(self, moment: str, left: set[Path]) -> bool:
        """Tell whether the run saves or evaluates, as asked. left: saves of earlier attempts."""
        if moment == "save":
            return bool(self.list_saves() - left)
        return moment == "step" or status.read(self.paths.status).get("phase") == "evaluating"

    def checkpoint(self, step: int) -> Path:
        return self.paths.checkpoints / name_checkpoint(step)

    def results(self) -> Results:
        """Return loss and gradient norm of each step in hex, and a sha256 of each checkpoint's tensors."""
        results = {}
        for record in keep_final_steps(read_records(self.paths.metrics)):
            results[f"step {record['step']}"] = (
                f"{record['loss'].hex()} {record['grad_norm'].hex()}"
            )
        for step in list_checkpoints(self.paths.checkpoints):
            results[f"checkpoint {step}"] = hash_tensors(self.checkpoint(step))
        return results


def hash_tensors(folder: Path) -> str:
    """Return the sha256 of a checkpoint's tensors, weights and optimizer state, with their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(read_tensors(folder).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
