"""Which GPUs CUDA_VISIBLE_DEVICES leaves to this process. Standard library only."""

import os
from collections.abc import Mapping
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
