"""Starting the trainer as a user's shell does, and reading what it left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.conftest import TINY
from train import record

ROOT = Path(__file__).resolve().parent.parent

# Runs the trainer and kills it, as kill -9 does, at a chosen point: argument 1, see POINTS. With arguments 3 and 4 it
# dies there once a file has a text.
KILLER = """
import os, pathlib, signal, sys, time
import torch.distributed.checkpoint as dcp
from train import checkpoint, evaluate, loop, main

def die(*_, **__):
    while sys.argv[3:] and sys.argv[4] not in pathlib.Path(sys.argv[3]).read_text():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

def at(call, n, function):
    def wrapped(*args, **kwargs):
        at.calls = getattr(at, "calls", 0) + 1
        if at.calls == n and call == "before":
            die()
        result = function(*args, **kwargs)
        if at.calls == n and call == "after":
            die()
        return result
    return wrapped

point, n = sys.argv[1], int(sys.argv[2])
if point == "in a step":
    loop.train_step = at("after", n, loop.train_step)
elif point == "before files":
    dcp.save = at("before", n, dcp.save)
elif point == "before the manifest":
    checkpoint.commit = at("before", n, checkpoint.commit)
elif point == "before the rename":
    checkpoint.flush_folder = at("after", 2 * n - 1, checkpoint.flush_folder)
elif point == "before pruning":
    checkpoint.prune = at("before", n, checkpoint.prune)
elif point == "in an evaluation":
    evaluate.Evaluator.padded = at("after", n, evaluate.Evaluator.padded)
sys.exit(main.main())
"""
POINTS = ("in a step", "before files", "before the manifest", "before the rename", "before pruning", "in an evaluation")


def environment(folder: Path, data: dict[str, str], **settings: object) -> dict[str, str]:
    """The environment of a user whose settings are TINY's, with runs in `folder`."""
    empty = folder / "empty.env"
    empty.touch()
    base = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return base | {"OMP_NUM_THREADS": "1", "ENV_FILE": str(empty), "RUNS_DIR": str(folder), "RUN_NAME": "run",
                   "VENV": str(Path(sys.executable).parent.parent), "PYTHONPATH": str(ROOT), "DEVICE": "cpu",
                   "WANDB_MODE": "disabled",  # a developer may be logged in
                   "ALLOW_REPEAT": "python-stdlib",  # there is little of it, and some runs are long
                   "MAX_RESTARTS": "0",  # the trainer's own code is seen, and at once
                   **TINY, **data, **{name: str(value) for name, value in settings.items()}}


def train(env: dict[str, str], *, command: list[str] | None = None, code: int = 0, **popen: Any) -> str:
    """Run the trainer to its end, which must have this exit code; returns what it printed."""
    done = subprocess.run(command or [sys.executable, "-m", "train.main"], env=env, cwd=ROOT, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=180, **popen)
    assert done.returncode == code, f"exit code {done.returncode}, not {code}:\n{done.stdout}"
    return done.stdout


def train_and_kill(env: dict[str, str], point: str, n: int, once: tuple[Path, str] | None = None) -> None:
    """Run the trainer until it kills itself at the n-th time that it comes to a point, and once a file has a text."""
    assert point in POINTS
    train(env, command=[sys.executable, "-c", KILLER, point, str(n), *map(str, once or ())], code=-signal.SIGKILL)


def wait_for(path: Path, text: str, seconds: float = 120) -> None:
    """Until a file holds a text."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{text!r} did not appear in {path}"
        time.sleep(0.05)


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm) as the run's record finally has them."""
    steps = record.last_of_each_step(record.read(run / "metrics.jsonl"))
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in steps}


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, weights and moments, by name."""
    folder = run / "checkpoints" / f"step_{step:07d}"
    reader = dcp.FileSystemReader(folder)
    into = {name: torch.empty(meta.size, dtype=meta.properties.dtype)
            for name, meta in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(into, storage_reader=reader, no_dist=True)
    return into


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
