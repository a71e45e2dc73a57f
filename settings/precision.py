"""What DTYPE=auto stands for: the precision that this machine computes fastest in."""

import os
import re
from pathlib import Path

BFLOAT16_UNITS = frozenset({"amx_bf16", "avx512_bf16"})
# One of these is there wherever an NVIDIA driver is: on Linux, or in its Windows subsystem.
GPU_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
GPU_FILES = Path("/proc/driver/nvidia/gpus")  # */information names the card
BEFORE_AMPERE = re.compile(
    r"Model:.*\b([KMPT]\d+|MX\d+|V100|GTX|GT \d+|RTX 20[678]0|TITAN|Quadro)\b"
)


def choose_dtype(device: str) -> str:
    """Return bfloat16 where a GPU, or else the processor, has units for it; else float32.

    Without them torch emulates bfloat16, which is slower than float32.
    """
    if device != "cpu" and is_gpu_visible():
        return "float32" if is_gpu_old() else "bfloat16"
    if BFLOAT16_UNITS & (read_cpu_flags() or frozenset()):
        return "bfloat16"
    return "float32"


def is_gpu_visible() -> bool:
    """Tell whether there is an NVIDIA driver here, and CUDA_VISIBLE_DEVICES hides not all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    is_hidden = not visible or visible.startswith("-")
    return not is_hidden and any(node.exists() for node in GPU_NODES)


def is_gpu_old() -> bool:
    """Tell whether a GPU here is from before Ampere, by its name."""
    texts = [file.read_text(errors="replace") for file in GPU_FILES.glob("*/information")]
    return any(BEFORE_AMPERE.search(text) for text in texts)


def read_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str] | None:
    """Return the flags that Linux lists for the processor; None on macOS and ARM, which have no such list."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else None
