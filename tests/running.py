"""Starting the trainer as a user's shell does, or as quickly as can be, and reading what it left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from record import metrics as record_reader
from record.metrics import keep_final_steps
from settings.config import SETTINGS
from tests.conftest import TINY
from tests.constants import MODULES, SITE, constants
from tests.faults import inject
from tests.processes import run_trainer
from train.checkpoint.metadata import read_tensors

ROOT = Path(__file__).resolve().parent.parent

WITH_CONSTANTS = os.pathsep.join((str(SITE), str(ROOT)))  # PYTHONPATH

# What Python and libraries ask for while they are imported, and what a copy of a process has of it.
OF_IMPORTING = ("PYTHON", "OMP_", "TORCH", "HF_", "CUDA", "LD_PRELOAD")
NOT_COPIED = (
    "train.hooks.trackers",
    "train.data.prepare",
)  # they start processes of their own, by what they were started with
AS_IT_IS = {"OMP_NUM_THREADS": ("1",), "PYTHONPATH": (str(ROOT), WITH_CONSTANTS, inject.PATH)}


def environment(folder: Path, data: dict[str, str], **settings: object) -> dict[str, str]:
    """The environment of a user whose settings are TINY's, with runs in `folder`. Names that tests/constants.py knows
    are constants of the product."""
    replaced = {
        name: int(str(settings.pop(name)))
        for name in MODULES
        if name in settings and name not in SETTINGS
    }
    empty = folder / "empty.env"
    empty.touch()
    base = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
        if name in os.environ
    }
    return base | {
        "OMP_NUM_THREADS": "1",
        **constants(
            **{"MAX_EPOCHS": 10**6} | replaced
        ),  # there is little text, and some runs are long
        "PYTHONPATH": WITH_CONSTANTS,
        "ENV_FILE": str(empty),
        "RUNS_DIR": str(folder),
        "RUN_NAME": "run",
        "VENV": str(Path(sys.executable).parent.parent),
        "DEVICE": "cpu",
        "WANDB_MODE": "disabled",  # a developer may be logged in
        "MAX_RESTARTS": "0",  # the trainer's own code is seen, and at once
        **TINY,
        **data,
        **{name: str(value) for name, value in settings.items()},
    }


def train(
    env: dict[str, str], *, command: list[str] | None = None, code: int = 0, **popen: Any
) -> str:
    """Run the trainer to its end, which must have this exit code; returns what it printed.

    command: another way to start it, or another program. Python with -m or -c is a copy of a process that has imported
    the trainer, since importing takes longer than a tiny run.
    """
    command = command or [sys.executable, "-m", "train.main"]
    if not popen and is_for_a_copy(command, env):
        found, said = run_trainer(command[1:], env)
        assert found == code, f"exit code {found}, not {code}:\n{said}"
        return said
    done = subprocess.run(
        command,
        env=env,
        cwd=ROOT,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=270,
        **popen,
    )
    assert done.returncode == code, f"exit code {done.returncode}, not {code}:\n{done.stdout}"
    return done.stdout


def is_for_a_copy(command: list[str], env: dict[str, str]) -> bool:
    """Not where the environment has what is asked for while importing, nor on a GPU, which forbids forks."""
    return (
        command[:2] in ([sys.executable, "-c"], [sys.executable, "-m"])
        and command[2] not in NOT_COPIED
        and env.get("DEVICE") == "cpu"
        and all(
            value in AS_IT_IS.get(name, ())
            for name, value in env.items()
            if name.startswith(OF_IMPORTING)
        )
    )


def wait_for(path: Path, text: str, seconds: float = 240) -> None:
    """Until a file holds a text."""
    wait_until(
        lambda: path.exists() and text in path.read_text(),
        seconds,
        f"{text!r} did not appear in {path}",
    )


def wait_until(what: Callable[[], object], seconds: float = 240, why: str = "") -> None:
    """Until it is true. why: what is said where it does not become so."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, why or what
        time.sleep(0.02)


def slow_steps(seconds: float) -> list[str]:
    """The command of a trainer that waits so long at each step."""
    code = (
        "import time; from train import loop, main; f = loop.lr_at\n"
        f"def slowly(*a):\n    time.sleep({seconds}); return f(*a)\n"
        "loop.lr_at = slowly; raise SystemExit(main.main())"
    )
    return [sys.executable, "-c", code]


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """A run's records of one event."""
    return [r for r in record_reader.read_records(run / "metrics.jsonl") if r["event"] == name]


def saved_steps(run: Path) -> list[int]:
    """The steps that a run has checkpoints of, half ones included."""
    return sorted(int(path.name[-7:]) for path in (run / "checkpoints").iterdir())


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm) as the run's record finally has them."""
    steps = keep_final_steps(record_reader.read_records(run / "metrics.jsonl"))
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in steps}


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, weights and moments, by name."""
    return read_tensors(run / "checkpoints" / f"step_{step:07d}")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
