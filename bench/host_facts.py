"""What a figure depends on besides the code."""

import contextlib
import os
import platform
import time
from pathlib import Path
from typing import Any

from record.provenance import commit


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    code = commit()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "commit": code["git"],
        "commit_dirty": code["git_dirty"],
    }
