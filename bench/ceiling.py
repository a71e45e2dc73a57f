"""What the machine's matrix products reach alone: a process for run.py, whose step is one such product.

Square, of a size that is good for every machine at hand; forward only, nothing else. The rate of a training step
is told as a share of this.
"""

import torch

from doctor.gpu_probe import worker
from doctor.gpu_probe.shapes import Shape

SIZE = {"cpu": 2048, "cuda": 8192}


def flops(device_type: str) -> float:
    """FLOPs of a step."""
    return 2.0 * SIZE[device_type] ** 3


def set_up(shape: Shape, dtype: str, compiled: bool) -> worker.Step:
    device = worker.device()
    size, kind = SIZE[device.type], getattr(torch, dtype)
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    product = torch.empty_like(a)

    def step() -> float:
        torch.mm(a, b, out=product)
        return 0.0

    return worker.Step(step, 0)


if __name__ == "__main__":
    worker.serve(set_up)
