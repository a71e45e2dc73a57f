"""The same work by nanoGPT's model and optimizer: a process for run.py. The last argument is its checkout's path.

What its own train.py does in a step, at its best: autocast for bfloat16 (train.py has none on a CPU) and the fused
AdamW, which its configure_optimizers takes only when told of a GPU.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench import worker
from bench.shapes import Shape


def set_up(shape: Shape, dtype: str, compiled: bool, checkout: str) -> Callable[[], float]:
    device = worker.device()
    sys.path.insert(0, checkout)
    with contextlib.redirect_stdout(sys.stderr):  # it prints; our standard output is for answers
        from model import GPT, GPTConfig
        torch.manual_seed(1337)
        model = GPT(GPTConfig(block_size=shape.seq_len, vocab_size=shape.vocab_size, n_layer=shape.n_layer,
                              n_head=shape.n_head, n_embd=shape.n_embd, dropout=0.0, bias=False)).to(device)
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cuda")
    forward: Any = torch.compile(model) if compiled else model
    half = torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()
    tokens = worker.windows(shape)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> float:
        with half:
            _, loss = forward(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step


if __name__ == "__main__":
    worker.serve(set_up)
