"""Which GPUs CUDA_VISIBLE_DEVICES leaves to this process, and what nvidia-smi says. Standard library only."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# One of these is there wherever an NVIDIA driver is: on Linux, or in its Windows subsystem.
GPU_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def is_gpu_visible() -> bool:
    """Tell whether there is an NVIDIA driver here, and CUDA_VISIBLE_DEVICES hides not all GPUs."""
    return visible_gpus() != [] and any(node.exists() for node in GPU_NODES)


def visible_devices(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return CUDA_VISIBLE_DEVICES as it is set."""
    return environment.get("CUDA_VISIBLE_DEVICES")


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the indices and UUIDs in CUDA_VISIBLE_DEVICES; None if it is unset: all are visible."""
    text = visible_devices(environment)
    if text is None:
        return None
    names = []
    for entry in text.split(","):
        name = entry.strip()
        if name.startswith("-"):  # CUDA ignores everything from here on
            break
        if name not in ("", "NoDevFiles"):  # which Slurm writes if it allocated none
            names.append(name)
    return names


def ask_nvidia_smi(*options: str, limit_s: float) -> str:
    """Return what nvidia-smi prints with these options.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it has not ended within limit_s. It is killed, but nobody waits for
            it: in a driver that hangs it cannot be killed.
    """
    return ask_driver(["nvidia-smi", *options], limit_s)


def ask_driver(command: Sequence[str], limit_s: float) -> str:
    """Return what a command prints that calls the GPU driver. Raises as ask_nvidia_smi does."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return printed
