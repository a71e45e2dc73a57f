"""A process that is benchmarked: it sets up, takes a first step, and then steps when it is told to.

    python -m bench.ours SHAPE DTYPE MODE STARTED      (nanogpt: and the path of its checkout)

SHAPE is a name in shapes.py, DTYPE float32 or bfloat16, MODE eager or compiled, STARTED the time.time() at which
the process was started. It writes a JSON line when the first step is done and one for each line N on standard
input: after N steps. So several can be started, and then take turns.
"""

import sys
import time
from collections.abc import Callable

import torch

from bench.lines import say
from bench.shapes import SHAPES, Shape
from train.step import peak_memory_gib


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def windows(shape: Shape) -> torch.Tensor:
    """(sequences, seq_len + 1) random tokens, the same for all."""
    return torch.randint(shape.vocab_size, (shape.sequences, shape.seq_len + 1),
                         generator=torch.Generator().manual_seed(1)).to(device())


def serve(set_up: Callable[..., Callable[[], float]]) -> None:
    """set_up(shape, dtype, compiled, *further arguments) gives a function that takes a step and returns the loss."""
    shape, dtype, mode, started, *more = sys.argv[1:]
    step = set_up(SHAPES[shape], dtype, mode == "compiled", *more)
    loss = step()
    synchronize()
    say(first_step_s=time.time() - float(started), loss=loss)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            began = time.perf_counter()
            loss = step()
            synchronize()
            seconds.append(time.perf_counter() - began)
        say(seconds=seconds, loss=loss, peak_mib=peak_memory_gib(device()) * 1024)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
