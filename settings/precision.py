"""What DTYPE=auto stands for: the precision that this machine computes fastest in."""

import functools
import os
import re
import subprocess
from pathlib import Path

BFLOAT16_UNITS = frozenset({"amx_bf16", "avx512_bf16"})
BFLOAT16_FROM = (8, 0)  # Ampere, by compute capability; before it torch only emulates bfloat16
# One of these is there wherever an NVIDIA driver is: on Linux, or in its Windows subsystem.
GPU_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
SMI_S = (
    20.0  # a driver that hangs is given up; without persistence mode eight GPUs take some seconds
)


def choose_dtype(device: str) -> str:
    """Return bfloat16 where all GPUs, or else the processor, have units for it; else float32.

    Without them torch emulates bfloat16, which is slower than float32.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device != "cpu" and is_gpu_visible(visible):
        is_old = any(found < BFLOAT16_FROM for found in read_capabilities(visible))
        return "float32" if is_old else "bfloat16"
    if BFLOAT16_UNITS & (read_cpu_flags() or frozenset()):
        return "bfloat16"
    return "float32"


def is_gpu_visible(visible: str | None) -> bool:
    """Tell whether there is an NVIDIA driver here, and CUDA_VISIBLE_DEVICES hides not all GPUs."""
    is_hidden = visible is not None and (not visible.strip() or visible.strip().startswith("-"))
    return not is_hidden and any(node.exists() for node in GPU_NODES)


@functools.cache
def read_capabilities(visible: str | None) -> tuple[tuple[int, int], ...]:
    """Ask nvidia-smi for the compute capabilities of these GPUs: those of CUDA_VISIBLE_DEVICES; None for all.

    Where it does not answer, as with a driver before 510, there are none.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if visible and "MIG-" not in visible:
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.findall(r"^(\d+)\.(\d+)$", done.stdout, re.MULTILINE)
    return tuple((int(major), int(minor)) for major, minor in found)


def read_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str] | None:
    """Return the flags that Linux lists for the processor; None on macOS and ARM, which have no such list."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else None
