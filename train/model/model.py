"""A decoder-only transformer, and the loss inside its forward pass.

    tokens (B, T) -> embedding -> n_layer x [ + attention(norm) , + swiglu(norm) ] -> norm -> head

RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, no dropout. With the same weights it computes
what the Llama classes of Hugging Face compute, and with QK_NORM the Qwen3 classes, so that a checkpoint exports to
them exactly; weights have their names without the leading `model.`.

Weights are float32. With DTYPE=bfloat16, activations and matrix products are bfloat16; norms, rotary angles, softmax
and loss are computed in float32.

Initial weights are normal with mean 0; o and down are further divided by sqrt(2 n_layer), the number of branches that
are summed, so that the residual stream keeps its size:
                        head tied     head untied
    embedding           0.02          1                   the stream to which branches of size 1 are added
    head                (the same)    0.02                logits near 0
    all others          0.02          1 / sqrt(width in)  keeps the size of activations
    norms               1             1

Embedding and head have rows up to a multiple of 128, so that any VOCAB_SIZE is fast. The padding computes nothing: its
logits are cut off, and in the loss it gets no gradient.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from settings.config import Config
from train.distributed.parallel import part_of
from train.model import cpu_kernels
from train.model.attention import SDPA, Kernel, document_mask, sdpa
from train.model.kv_cache import KVCache, LayerCache
from train.model.loss import SoftmaxPart, scored_answers, summed_loss
from train.model.prefix_scoring import Branches
from train.model.recompute import recomputed

NORM_EPS = 1e-5  # epsilon of RMSNorm; INIT_FROM brings its own


class Linear(nn.Linear):
    """A product without bias in the type of its input; the float32 weight is cast on use."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__(width_in, width_out, bias=False)

    def reset_parameters(self) -> None:
        """Left to `initialise`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class Embedding(nn.Embedding):
    """The table of token embeddings."""

    def reset_parameters(self) -> None:
        """Left to `initialise`."""


class RMSNorm(nn.Module):
    """Divide by the root mean square, taken in float32, and multiply by a weight (Zhang and Sennrich 2019)."""

    def __init__(self, width: int):
        super().__init__()
        self.eps = NORM_EPS
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return cpu_kernels.rms_norm(x, self.weight, self.eps)
        normal = F.rms_norm(x.float(), self.weight.shape, eps=self.eps)
        return self.weight.to(x.dtype) * normal.to(x.dtype)


def rotary_table(seq_len: int, head_dim: int, theta: float) -> Tensor:
    """Return (2, T, 1, D) float32: cosine and sine of position x theta^(-2i/D), each of the D/2 angles twice.

    The sine is negative in the first half, as `rotate` wants it.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    position = torch.arange(seq_len, dtype=torch.float32)
    angle = torch.outer(position, frequency)[:, None].repeat(1, 1, 2)  # (T, 1, D)
    table = torch.stack((angle.cos(), angle.sin()))
    table[1, ..., : head_dim // 2] *= -1
    return table


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of x (B, T, H, D) by its angle; the pairing is Llama's.

    In three operations, whose launches a GPU waits for without torch.compile. With it, the formula is
    one kernel, and less is kept for the backward pass.
    """
    if torch.compiler.is_compiling():
        a, b = x.chunk(2, dim=-1)
        cos, sin = rotary.chunk(2, dim=-1)[1]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    cos, sin = rotary
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    def __init__(self, c: Config, kernel: Kernel):
        super().__init__()
        self.head_dim = c.head_dim
        self.kernel = kernel
        kv_dim = (c.n_kv_head or c.n_head) * c.head_dim
        self.q_proj = Linear(c.n_embd, c.n_embd)
        self.k_proj = Linear(c.n_embd, kv_dim)
        self.v_proj = Linear(c.n_embd, kv_dim)
        self.o_proj = Linear(c.n_embd, c.n_embd)
        self.q_norm = RMSNorm(c.head_dim) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim) if c.qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        bounds: Tensor | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim)  # (B, T, H, D)
        k = self.k_proj(x).view(B, T, -1, self.head_dim)  # (B, T, H_kv, D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)
        q = rotate(self.q_norm(q), rotary)
        k = rotate(self.k_norm(k), rotary)
        if cache is not None:
            y = cache.attend(q, k, v, self.kernel.attend)
        elif mask is not None:
            y = sdpa(q, k, v, mask)
        else:
            y = self.kernel.attend(q, k, v, bounds)
        return self.o_proj(y.reshape(B, T, C))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, c: Config):
        super().__init__()
        assert c.mlp_dim is not None  # filled in by load_config
        self.gate_proj = Linear(c.n_embd, c.mlp_dim)
        self.up_proj = Linear(c.n_embd, c.mlp_dim)
        self.down_proj = Linear(c.mlp_dim, c.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Config, kernel: Kernel):
        super().__init__()
        self.input_layernorm = RMSNorm(c.n_embd)
        self.self_attn = Attention(c, kernel)
        self.post_attention_layernorm = RMSNorm(c.n_embd)
        self.mlp = MLP(c)
        self.recompute = c.activation_checkpointing

    def forward(self, *inputs: Any) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.body(*inputs)
        return recomputed(self.body, self.recompute, *inputs)

    def body(self, x: Tensor, *others: Any) -> Tensor:
        """others: what attention reads besides."""
        x = x + self.self_attn(self.input_layernorm(x), *others)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """forward(tokens) -> logits; forward(tokens, targets) -> (summed loss in nats, scored tokens).

    forward(tokens, cache=cache) -> logits after the last token of each text, for generation.
    """

    rotary: Tensor

    def __init__(self, c: Config, kernel: Kernel = SDPA):
        super().__init__()
        self.dtype = getattr(torch, c.dtype)
        self.kernel = kernel
        self.vocab_size = c.vocab_size
        self.n_kv_head = c.n_kv_head or c.n_head
        self.embed_tokens = Embedding(c.padded_vocab_size, c.n_embd)
        self.layers = nn.ModuleList(Block(c, kernel) for _ in range(c.n_layer))
        self.norm = RMSNorm(c.n_embd)
        self.lm_head = Linear(c.n_embd, c.padded_vocab_size)
        if c.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.softmax_part: SoftmaxPart | None = None  # compilation.py changes this and the next
        self.compiled = False
        self.register_buffer(
            "rotary", rotary_table(c.seq_len, c.head_dim, c.rope_theta), persistent=False
        )

    def new_cache(self, rows: int, length: int) -> KVCache:
        """Return an empty memory for so many texts, of at most `length` tokens each."""
        shape = (rows, self.n_kv_head, length, self.rotary.shape[-1])
        return KVCache(len(self.layers), shape, self.dtype, self.rotary.device)

    def hidden(
        self,
        tokens: Tensor,
        bounds: Tensor | None = None,
        branches: Branches | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return (B, T, C): what the head reads."""
        B, T = tokens.shape
        rotary = self.rotary[:, :T]
        mask = None
        caches: Sequence[LayerCache | None] = [None] * len(self.layers)
        if bounds is not None and not self.kernel.by_bounds:
            mask = document_mask(bounds, B, T)
            bounds = None
        elif branches is not None:
            rotary = self.rotary[:, branches.positions]
            mask = branches.mask()
        elif cache is not None:
            rotary = cache.next_rows(self.rotary, T)
            caches = cache.layers
        x = self.embed_tokens(tokens).to(self.dtype)
        rotary = rotary.to(self.dtype)
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            x = layer(x, rotary, bounds, mask, layer_cache)
        return self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        bounds: Tensor | None = None,
        branches: Branches | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits, or losses where it is known what they should predict.

        Args:
            tokens: (B, T) int64, T at most SEQ_LEN.
            targets: (B, T) int64, IGNORED where not scored.
            bounds: of documents that are kept apart, as attention.document_mask has them.
            branches: how tokens are trunks and branches; then there are neither targets nor bounds.
            cache: keys and values of the tokens before these, to which those of these are added;
                then there is nothing else.

        Returns:
            Logits (B, T, V) float32. With targets, what loss.summed_loss returns; with branches, what
            loss.scored_answers returns for each of their answers; with a cache, logits (B, V) after
            the last token of each text.
        """
        x = self.hidden(tokens, bounds, branches, cache)
        head = self.lm_head.weight
        if cache is not None:
            last = cache.advance(x)
            return self.lm_head(last)[..., : self.vocab_size].float()
        if branches:
            at = x.flatten(0, 1)[branches.at]
            return scored_answers(at, head, branches.answers, self.vocab_size)
        if targets is None:
            return self.lm_head(x)[..., : self.vocab_size].float()
        return summed_loss(
            x.flatten(0, 1), head, targets.flatten(), self.vocab_size, softmax=self.softmax_part
        )


def build(
    c: Config,
    device: torch.device,
    kernel: Kernel = SDPA,
    sharding: Any = None,
    norm_eps: float | None = None,
    is_filled: bool = True,
) -> Transformer:
    """Return the model on `device` with the initial weights of SEED, the same on every device and rank.

    Args:
        c: the settings.
        device: where it computes.
        kernel: of attention.
        sharding: how the weights are split over processes (parallel.Sharding), or None. They are split before they
            take any memory, so that no process ever holds the whole model.
        norm_eps: epsilon of RMSNorm. Default: NORM_EPS.
        is_filled: False leaves the weights with whatever values their memory held before.
    """
    with torch.device("meta") if sharding else device:
        model = Transformer(c, kernel)
    if sharding:
        sharding.split(model)
        model.to_empty(device=device)
        model.rotary.copy_(rotary_table(c.seq_len, c.head_dim, c.rope_theta))
    if norm_eps is not None:
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.eps = norm_eps
    if is_filled:
        for name, weight in model.named_parameters():
            initialise(weight, name, c)
    return model


def initialise(weight: Tensor, name: str, c: Config) -> None:
    """Fill a weight as the table at the top says.

    Its random stream depends on SEED and its name alone, so that adding a layer or splitting the model over ranks
    changes no other weight.
    """
    if weight.ndim == 1:
        weight.data.fill_(1.0)
        return
    std = 0.02
    if not c.tie_embeddings:
        if "embed_tokens" in name:
            std = 1.0
        elif "lm_head" not in name:
            std = 1 / math.sqrt(weight.shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * c.n_layer)
    digest = hashlib.sha256(f"{c.seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # drawn on the CPU, so that they are the same for any device
    values = torch.empty(weight.shape, device="cpu").normal_(0.0, std, generator=generator)
    weight.data.copy_(part_of(values, weight))


def matmul_weights(model: nn.Module) -> int:
    """Count the weights that take part in matrix products for each token: the N of 6 N + 12 L d T.

    These are all but norms, and the embedding table only as a head.
    """
    head = model.get_parameter("lm_head.weight").numel()
    blocks = model.get_submodule("layers").parameters()
    return head + sum(weight.numel() for weight in blocks if weight.ndim == 2)
