"""The stand-in for NVML (fake_nvml.c), and the process that samples it in a time of its own (in_time.py)."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from settings import ROOT

SOURCE = Path(__file__).parent / "fake_nvml.c"
PERIOD, BUSY, HIGH, LOW, AHEAD, UPDATE = (
    1.3,
    1.1,
    650.0,
    250.0,
    0.033,
    0.1,
)  # seconds and watts, as there

Environment = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """fake(old=False, GPUS=2, ...): an environment in which nvidia-ml-py finds the stand-in."""
    gcc = shutil.which("gcc")
    if not gcc or sys.platform != "linux":
        pytest.skip("no gcc here to compile the stand-in for NVML with")
    folders = {}
    for old in (False, True):
        folders[old] = tmp_path_factory.mktemp("old" if old else "new")
        subprocess.run(
            [
                gcc,
                "-O1",
                "-shared",
                "-fPIC",
                *["-DOLD"] * old,
                "-o",
                folders[old] / "libnvidia-ml.so.1",
                SOURCE,
                "-lm",
            ],
            check=True,
        )

    def fake(old: bool = False, **values: object) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(folders[old])} | {
            f"FAKE_NVML_{name}": str(v) for name, v in values.items()
        }

    return fake


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with no settings but a run in tmp_path, and no driver."""
    (tmp_path / "empty.env").touch()
    (tmp_path / "none").mkdir()
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "RUNS_DIR": str(tmp_path),
        "RUN_NAME": "run",
        "ENV_FILE": str(tmp_path / "empty.env"),
        "LD_LIBRARY_PATH": str(tmp_path / "none"),
        "TZ": "UTC",
    }


class Sampled:
    """What a sampler left behind: rows by column, floats where they are, None for empty cells."""

    def __init__(self, folder: Path, said: str = ""):
        self.said = said
        self.fast_files, self.slow_files = (
            sorted(folder.glob("gpu_metrics_*.csv")),
            sorted(folder.glob("gpu_slow_*")),
        )
        self.sidecars = [
            json.loads(path.with_suffix(".json").read_text()) for path in self.fast_files
        ]
        self.about = self.sidecars[-1]
        self.rows, self.slow = rows_of(self.fast_files), rows_of(self.slow_files)

    def mono(self, row: dict[str, Any]) -> float:
        return self.about["elapsed_0"]["mono_s"] + row["elapsed_sec"]


def rows_of(paths: list[Path]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in paths:
        with open(path, newline="") as file:
            for row in csv.DictReader(file, strict=True):
                assert None not in row and None not in row.values(), "cells and columns are as many"
                rows.append({name: number(text) for name, text in row.items()})
    return rows


def number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text or None


@pytest.fixture
def in_time(nvml: Environment, env: dict[str, str], tmp_path: Path) -> Callable[..., Sampled]:
    """Sample the stand-in for so many seconds of its own time; GPUS and the like are the stand-in's."""

    def sample(
        seconds: float, old: bool = False, fake: dict[str, Any] | None = None, **how: Any
    ) -> Sampled:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.monitor.in_time",
                str(folder),
                json.dumps({"seconds": seconds, **how}),
            ],
            cwd=ROOT,
            env=env | nvml(old, **(fake or {})),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Sampled(folder, done.stdout)

    return sample


# ---- The truth, derived a second time


def power(gpu: int, t: float) -> float:
    """Watts at a moment."""
    return (HIGH if (t + AHEAD) % PERIOD < BUSY else LOW) - 10 * gpu


def energy(gpu: int, t: float) -> float:
    """Joules since a moment: whole periods, and what there is of the last."""
    whole, rest = divmod(t + AHEAD, PERIOD)
    last = rest * HIGH if rest < BUSY else BUSY * HIGH + (rest - BUSY) * LOW
    return whole * (BUSY * HIGH + (PERIOD - BUSY) * LOW) + last - 10 * gpu * t


def held(t: float) -> tuple[float, float]:
    """The moments of which a sensor's value may be that is read at t, by a clock that was written with 0.1 ms."""
    early, late = (math.floor((t + d) / UPDATE + 1e-6) * UPDATE for d in (-2e-4, 2e-4))
    return early, late
