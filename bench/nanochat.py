"""The same work by nanochat's model: a process for run.py. The last argument is its checkout's path.

What its own base_train.py does in a step but for the optimizer: it has Muon for matrices, which is more work than
AdamW, and clips no gradients. Its model takes the type of its products from NANOCHAT_DTYPE when it is imported, and
casts by itself. Windows are as long as the sequence (pattern L), as its own recipes have it where there is no
FlashAttention-3.
"""

import sys
from typing import Any

import torch

from doctor.gpu_probe import worker
from doctor.gpu_probe.shapes import Shape


def set_up(shape: Shape, dtype: str, compiled: bool, checkout: str) -> worker.Step:
    sys.path.insert(0, checkout)
    from nanochat.common import COMPUTE_DTYPE
    from nanochat.gpt import GPT, GPTConfig

    if getattr(torch, dtype) != COMPUTE_DTYPE:
        raise RuntimeError(
            f"nanochat computes in {COMPUTE_DTYPE}: NANOCHAT_DTYPE={dtype} had no effect"
        )
    torch.manual_seed(1337)
    with torch.device("meta"):  # as its constructor wants it
        model = GPT(
            GPTConfig(
                sequence_len=shape.seq_len,
                vocab_size=shape.vocab_size,
                n_layer=shape.n_layer,
                n_head=shape.n_head,
                n_kv_head=shape.n_head,
                n_embd=shape.n_embd,
                window_pattern="L",
            )
        )
    model.to_empty(device=worker.device())
    model.init_weights()
    forward: Any = torch.compile(model, dynamic=False) if compiled else model
    x, y = worker.pairs(shape)
    return worker.training(model, worker.adamw(model), lambda: forward(x, y))


if __name__ == "__main__":
    worker.serve(set_up)
