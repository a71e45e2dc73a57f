"""A process that is benchmarked: it sets up, takes a first step, and then steps when it is told to.

    python -m bench.ours SHAPE DTYPE MODE STARTED      (peers.py: and the path of the peer's checkout)

SHAPE is a name in shapes.py, DTYPE float32 or bfloat16, MODE eager or compiled, STARTED the time.time() at which
the process was started. It writes a JSON line when the first step is done and one for each line N on standard
input: after N steps. So several can be started, and then take turns.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from doctor.gpu_probe.messages import say
from doctor.gpu_probe.shapes import SHAPES, Shape
from train.step import peak_memory_gib

CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that can be taken: called, it returns the loss. parameters: of the model, a shared one once; 0: none."""

    take: Callable[[], float]
    parameters: int

    def __call__(self) -> float:
        return self.take()


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def windows(shape: Shape) -> torch.Tensor:
    """(sequences, seq_len + 1) random tokens, the same for all."""
    return torch.randint(
        shape.vocab_size,
        (shape.sequences, shape.seq_len + 1),
        generator=torch.Generator().manual_seed(1),
    ).to(device())


def pairs(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and those that follow, each (sequences, seq_len)."""
    tokens = windows(shape)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def half(dtype: str) -> Any:
    """Autocast to bfloat16, or nothing."""
    return (
        torch.autocast(device().type, torch.bfloat16)
        if dtype == "bfloat16"
        else contextlib.nullcontext()
    )


def training(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]
) -> Step:
    """A peer's step; loss_of: its forward, the mean over tokens (nats)."""
    parameters = list(model.parameters())

    def take() -> float:
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return Step(take, sum(p.numel() for p in parameters))


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Fused, decaying what is a matrix, as trainers do."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        fused=True,
    )


def serve(set_up: Callable[..., Step]) -> None:
    """set_up(shape, dtype, compiled, *further arguments) prepares what is measured."""
    shape, dtype, mode, started, *more = sys.argv[1:]
    with aside():
        step = set_up(SHAPES[shape], dtype, mode == "compiled", *more)
        loss = step()
    synchronize()
    first_step_s = time.time() - float(started)
    make_way()
    say(first_step_s=first_step_s, loss=loss, parameters=step.parameters)
    for line in sys.stdin:
        seconds = []
        with aside():
            if torch.cuda.is_available():  # takes the memory anew
                step()
                synchronize()
            for _ in range(int(line)):
                began = time.perf_counter()
                loss = step()
                synchronize()
                seconds.append(time.perf_counter() - began)
        make_way()
        say(seconds=seconds, loss=loss, peak_mib=peak_memory_gib(device()) * 1024)


def make_way() -> None:
    """Leave the GPU's memory to whose turn is next, but for weights and moments: not all that take turns fit at once."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def aside() -> contextlib.redirect_stdout[Any]:
    """Peers print; our standard output is for answers."""
    return contextlib.redirect_stdout(sys.stderr)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
