"""What this machine has, where a run is planned for its processors: memory, and how fast its products are."""

import os
import re
import time
from pathlib import Path

SIZE = 1024  # of the square matrices: 4 MiB each, 2.1 GFLOP a product
ROUNDS = 5


def memory_bytes() -> float:
    """What processes here may take together: the machine's memory, or less where a container's limit says so."""
    found = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if re.fullmatch("[0-9]+", text):
            found.append(float(text))
    return min(found)


def float32_tflops() -> float:
    """What products of float32 matrices reach now, by numpy on all processors: the best of a few, in about 0.1 s.

    torch brings a library of its own for them (oneMKL beside numpy's OpenBLAS): the same to some ten per cent. numpy
    cannot multiply bfloat16.
    """
    import numpy as np  # 0.1 s, for this alone

    a, b = (
        np.random.default_rng(seed).standard_normal((SIZE, SIZE), dtype=np.float32)
        for seed in (0, 1)
    )
    product, best = a @ b, float("inf")  # the first starts the threads
    for _ in range(ROUNDS):
        began = time.perf_counter()
        np.matmul(a, b, out=product)
        best = min(best, time.perf_counter() - began)
    return 2.0 * SIZE**3 / best / 1e12
