"""How fast the matrix products of this machine's processors are, where a run is planned for them.

float32 is measured by numpy. bfloat16 needs torch, which a plan does not import: another Python measures it.
"""

import subprocess
import sys
import time

SIZE = 1024  # of the square matrices: 2.1 GFLOP per product
ROUNDS = 5
TORCH_LIMIT_S = 60
BFLOAT16 = f"""
import time, torch
a = torch.randn({SIZE}, {SIZE}).bfloat16()
b = torch.randn({SIZE}, {SIZE}).bfloat16()
seconds = []
for _ in range({ROUNDS} + 1):
    began = time.perf_counter()
    torch.mm(a, b)
    seconds.append(time.perf_counter() - began)
print(min(seconds))
"""


def measure_tflops(dtype: str) -> float | None:
    """Return what matrix products in a dtype reach now, the best of a few; None without torch for bfloat16."""
    if dtype == "float32":
        seconds = measure_float32()
    else:
        try:
            done = subprocess.run(
                [sys.executable, "-c", BFLOAT16],
                capture_output=True,
                text=True,
                timeout=TORCH_LIMIT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        seconds = float(done.stdout)
    return 2.0 * SIZE**3 / seconds / 1e12


def measure_float32() -> float:
    """Return the seconds of one product. numpy's OpenBLAS and torch's oneMKL differ by some ten percent."""
    import numpy as np  # 0.1 s, for this alone

    first = np.random.default_rng(0).standard_normal((SIZE, SIZE), dtype=np.float32)
    second = np.random.default_rng(1).standard_normal((SIZE, SIZE), dtype=np.float32)
    product = first @ second  # starts the threads
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        np.matmul(first, second, out=product)
        best = min(best, time.perf_counter() - began)
    return best
