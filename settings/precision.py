"""What DTYPE=auto stands for: the precision that this machine computes fastest in."""

import re
from pathlib import Path

BFLOAT16_UNITS = frozenset({"amx_bf16", "avx512_bf16"})
# One of these is there wherever an NVIDIA driver is: on Linux, or in its Windows subsystem.
GPU_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def choose_dtype(device: str) -> str:
    """Return bfloat16 where a GPU, or else the processor, has units for it; else float32.

    Without them torch emulates bfloat16, which is slower than float32. A GPU from before Ampere
    has none either; training refuses bfloat16 on it by name.
    """
    if device != "cpu" and any(node.exists() for node in GPU_NODES):
        return "bfloat16"
    if BFLOAT16_UNITS & (read_cpu_flags() or frozenset()):
        return "bfloat16"
    return "float32"


def read_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str] | None:
    """Return the flags that Linux lists for the processor; None on macOS and ARM, which have no such list."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else None
