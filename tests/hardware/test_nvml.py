"""hardware/nvml.py: which GPUs of the stand-in for NVML a process may use."""

import subprocess
import sys

import pytest

from tests.monitor.conftest import nvml
from tests.running import ROOT

__all__ = ["nvml"]  # a fixture

CODE = """
from hardware import nvml
from settings.visible_gpus import visible_gpus
nvml.start()
try:
    print([device.index for device in nvml.list_devices(visible_gpus())])
except nvml.Unavailable:
    print([])
"""


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("2,0", [0, 2]),
        ("GPU-0001", [1]),
        ("2, 0", [0, 2]),
        ("1,7,0", [1]),  # up to the first that names no GPU
        ("GPU-000", []),  # several begin like that
        ("MIG-1", [0, 1, 2]),
        ("", []),
    ],
)
def test_the_gpus_are_those_that_cuda_would_take(nvml, visible, expected):
    env = nvml(GPUS=3)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=env, check=True, text=True, capture_output=True
    )
    assert done.stdout == f"{expected}\n"
