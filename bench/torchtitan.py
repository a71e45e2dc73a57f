"""The same work by torchtitan's llama3: a process for run.py. The last argument is its checkout's path.

Its model and loss without its trainer, which wants launchers, files of settings and data: fused AdamW, each block and
the loss compiled, as it does them. bfloat16 is autocast, its own way on one device until April 2026; since then it is
fully_shard. It changes often; peers.py names the commit that this was tried with, the newest month that has torch's
own attention for language models and needs no packages for GPUs.
"""

import sys
from typing import Any

import torch

from bench import ours
from doctor.gpu_probe import worker
from doctor.gpu_probe.shapes import Shape

THETA = 10_000.0


def set_up(shape: Shape, dtype: str, compiled: bool, checkout: str) -> worker.Step:
    sys.path.insert(0, checkout)
    from torchtitan.components.loss import cross_entropy_loss

    torch.manual_seed(1337)
    with torch.device("meta"):
        model = configured(shape).build()
    model.to_empty(device=worker.device())
    with torch.no_grad():
        model.init_states(buffer_device=worker.device())
    loss_of: Any = cross_entropy_loss
    if compiled:
        loss_of = torch.compile(cross_entropy_loss)
        for block in model.layers.children():
            block.compile(fullgraph=True)
    x, y = worker.pairs(shape)

    def loss() -> torch.Tensor:
        with worker.half(dtype):
            return loss_of(model(x), y) / shape.tokens

    return worker.training(model, worker.adamw(model), loss)


def configured(shape: Shape) -> Any:
    """Its settings of such a model, put together as its own registry does it, with a tied head."""
    from torchtitan.models import llama3

    dim, vocabulary = shape.n_embd, shape.vocab_size
    return llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocabulary,
        enable_weight_tying=True,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init=llama3._EMBEDDING_SKIP_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=dim, out_features=vocabulary, param_init=llama3._output_linear_init(dim)
        ),
        rope=llama3.RoPE.Config(
            dim=dim // shape.n_head, max_seq_len=shape.seq_len, theta=THETA, backend="complex"
        ),
        layers=llama3._build_llama3_layers(
            n_layers=shape.n_layer,
            dim=dim,
            n_heads=shape.n_head,
            hidden_dim=ours.config(shape).mlp_dim,
            fuse_qkv=True,
            attn_backend="sdpa",
        ),
    )


if __name__ == "__main__":
    worker.serve(set_up)
