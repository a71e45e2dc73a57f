"""hardware/nvml.py: which GPUs of the stand-in for NVML a run uses."""

import subprocess
import sys

import pytest

from tests.monitor.conftest import Environment, nvml
from tests.running import ROOT

__all__ = ["nvml"]  # a fixture


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, None, [0, 1, 2]),
        (None, 2, [0, 1]),
        ("2,0", None, [0, 2]),
        ("2,0", 1, [2]),
        ("GPU-0001", 1, [1]),
        ("2, 0", None, [0, 2]),
        ("1,7,0", None, [1]),  # up to the first that names no GPU
        ("GPU-000", None, []),  # several begin like that
        ("MIG-1", 2, [0, 1]),
        ("", None, []),
    ],
)
def test_the_gpus_of_a_run_are_the_first_visible_ones(
    nvml: Environment, visible: str | None, count: int | None, expected: list[int]
) -> None:
    env = nvml(GPUS=3)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    code = f"from hardware.nvml import visible_indices; print(visible_indices({count}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, check=True, text=True, capture_output=True
    )
    assert done.stdout == f"{expected}\n"
