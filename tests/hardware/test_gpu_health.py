"""hardware/gpu_health.py: what is wrong with the GPUs of the stand-in for NVML."""

import subprocess
import sys

import pytest

from tests.monitor.conftest import nvml
from tests.running import ROOT

__all__ = ["nvml"]  # a fixture


def ask(environment, count=2):
    command = [sys.executable, "-m", "hardware.gpu_health", str(count)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, text=True, capture_output=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        ({}, "well"),
        ({"LACKS": "ecc,remapped"}, "well"),  # as cards for desktops
        # A driver that was updated under a running machine.
        ({"INIT": 18}, "the NVIDIA driver does not answer (RM has detected an NVML/RM version"),
        ({"GPUS": 1}, "1 of 2 GPUs are there"),
        ({"GPUS": 0}, "the NVIDIA driver knows of no GPU here"),
        ({"LOST": "1:0:99"}, "GPU 1 (GPU-0001-fake) is lost or needs a reset (GPU is lost)"),
        ({"REMAPPED": "1:0"}, "GPU 0 (GPU-0000-fake) needs a reset, to replace rows of its memory"),
        ({"REMAPPED": "1:1"}, "GPU 0 (GPU-0000-fake) has failed to replace rows of its memory"),
    ],
)
def test_each_fault_is_named(nvml, fake, problem):
    assert ask(nvml(**fake)).startswith(problem)


def test_memory_errors_of_the_gpus_that_are_used_count(nvml, tmp_path):
    environment = nvml(ECC=tmp_path / "errors")
    assert ask(environment) == "well"
    (tmp_path / "errors").write_text("3")
    assert "GPU 0 (GPU-0000-fake) has 3 uncorrected memory errors" in ask(environment)
    assert ask(environment | {"CUDA_VISIBLE_DEVICES": "1"}, count=1) == "well"
    assert ask(environment | {"CUDA_VISIBLE_DEVICES": "1"}) == "1 of 2 GPUs are there"


def test_a_machine_without_a_driver(tmp_path):
    assert ask({"LD_LIBRARY_PATH": str(tmp_path)}).startswith("no NVIDIA driver here")
