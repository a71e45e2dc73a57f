"""How fast the products of this machine's processors are, where a run is planned for them."""

import time

SIZE = 1024  # of the square matrices: 4 MiB each, 2.1 GFLOP a product
ROUNDS = 5


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
