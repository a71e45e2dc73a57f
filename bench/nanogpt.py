"""The same work by nanoGPT's model and optimizer: a process for run.py. The last argument is its checkout's path.

What its own train.py does in a step, at its best: autocast for bfloat16 (train.py has none on a CPU) and the fused
AdamW, which its configure_optimizers takes only when told of a GPU.
"""

import sys
from typing import Any

import torch

from doctor.gpu_probe import worker
from doctor.gpu_probe.shapes import Shape


def set_up(shape: Shape, dtype: str, compiled: bool, checkout: str) -> worker.Step:
    sys.path.insert(0, checkout)
    from model import GPT, GPTConfig

    torch.manual_seed(1337)
    model = GPT(
        GPTConfig(
            block_size=shape.seq_len,
            vocab_size=shape.vocab_size,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            n_embd=shape.n_embd,
            dropout=0.0,
            bias=False,
        )
    ).to(worker.device())
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cuda")
    forward: Any = torch.compile(model) if compiled else model
    x, y = worker.pairs(shape)

    def loss() -> torch.Tensor:
        with worker.half(dtype):
            return forward(x, y)[1]

    return worker.training(model, optimizer, loss)


if __name__ == "__main__":
    worker.serve(set_up)
