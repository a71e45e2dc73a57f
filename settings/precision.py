"""What DTYPE=auto stands for: the precision that this machine computes fastest in."""

import functools
import re
import subprocess
from pathlib import Path

from settings.visible_gpus import ask_nvidia_smi, is_gpu_visible, visible_gpus

BFLOAT16_UNITS = frozenset({"amx_bf16", "avx512_bf16"})
BFLOAT16_FROM = (8, 0)  # Ampere, by compute capability; before it torch only emulates bfloat16
# A driver that hangs is given up. Without persistence mode eight GPUs take some seconds.
SMI_S = 20.0


def choose_dtype(device: str) -> str:
    """Return bfloat16 where all GPUs, or else the processor, have units for it; else float32.

    Without them torch emulates bfloat16, which is slower than float32.
    """
    if device != "cpu" and is_gpu_visible():
        names = ",".join(visible_gpus() or [])
        is_old = any(capability < BFLOAT16_FROM for capability in read_capabilities(names))
        return "float32" if is_old else "bfloat16"
    if BFLOAT16_UNITS & (read_cpu_flags() or frozenset()):
        return "bfloat16"
    return "float32"


@functools.cache
def read_capabilities(names: str) -> tuple[tuple[int, int], ...]:
    """Ask nvidia-smi for the compute capabilities of these GPUs; without names, of all.

    Where it does not answer, as with a driver before 510, there are none.
    """
    options = ["--query-gpu=compute_cap", "--format=csv,noheader"]
    if names and "MIG-" not in names:
        options.append(f"--id={names}")
    try:
        printed = ask_nvidia_smi(*options, limit_s=SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    pairs = re.findall(r"^(\d+)\.(\d+)$", printed, re.MULTILINE)
    return tuple((int(major), int(minor)) for major, minor in pairs)


def read_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str] | None:
    """Return the flags that Linux lists for the processor; None on macOS and ARM, which have no such list."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else None
