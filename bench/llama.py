"""The same work by transformers' LlamaForCausalLM, where that package is installed: a process for run.py.

What its own Trainer does in a step, at its best: torch's attention, autocast for bfloat16, the fused AdamW, the whole
model compiled. Targets are handed over as they are, so that all tokens are scored, as ours are.
"""

from typing import Any

import torch

from bench import ours
from doctor.gpu_probe import worker
from doctor.gpu_probe.shapes import Shape


def set_up(shape: Shape, dtype: str, compiled: bool) -> worker.Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.n_embd,
        "intermediate_size": ours.config(shape).mlp_dim,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_head,
        "max_position_embeddings": shape.seq_len,
        "tie_word_embeddings": True,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(1337)
    model: Any = LlamaForCausalLM(LlamaConfig(**options))
    model.to(worker.device()).train()
    forward: Any = torch.compile(model) if compiled else model
    x, y = worker.pairs(shape)

    def loss() -> torch.Tensor:
        with worker.half(dtype):
            return forward(input_ids=x, labels=y, shift_labels=y).loss

    return worker.training(model, worker.adamw(model), loss)


if __name__ == "__main__":
    worker.serve(set_up)
