"""A decoder-only transformer, and the loss inside its forward pass.

    tokens (B, T) -> embedding -> n_layer x [ + attention(norm) , + swiglu(norm) ] -> norm -> head

RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, no dropout. With the same weights
it computes what the Llama classes of Hugging Face compute, and with QK_NORM the Qwen3 classes, so that
a checkpoint exports to them exactly; the names of the weights are theirs without the leading `model.`.

Weights are float32. With DTYPE=bfloat16 the activations and each matrix product are bfloat16; norms, rotary
angles, softmax and loss are computed in float32.

Initialisation, all normal with mean 0; o and down further divided by sqrt(2 n_layer), the number of branches
that are summed, so that the stream keeps its size:
                        head tied     head untied
    embedding           0.02          1                   the stream that branches of size 1 are added to
    head                (the same)    0.02                logits near 0
    all others          0.02          1 / sqrt(width in)  keeps the size of activations
    norms               1             1

Embedding and head have rows up to a multiple of 128, so that any VOCAB_SIZE is fast. The padding computes nothing:
its logits are cut off, and in the loss it gets no gradient.
"""

import hashlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from settings.config import Config
from train.model.attention import SDPA, Kernel, sdpa
from train.model.loss import SoftmaxPart, scored_answers, softmax_part, summed_loss
from train.model.prefix_scoring import Branches
from train.model.recompute import recomputed

NORM_EPS = 1e-5  # added to the mean square in RMSNorm; INIT_FROM brings its own


class Linear(nn.Linear):
    """A bias-free product in the type of its input; the float32 weight is cast on use."""

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
    """x / root mean square of x, times a weight; the mean in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            if not torch.is_grad_enabled():
                return normalised(x, self.eps)[0] * self.weight.to(x.dtype)
            return _RMSNormOnCPU.apply(x, self.weight, self.eps)
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight.to(x.dtype) * F.rms_norm(
            x.float(), self.weight.shape, None, self.eps
        ).to(x.dtype)


def normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x over its root mean square, what it was multiplied by) in few passes over memory."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
    scale = square.div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, scale, out=torch.empty_like(x)), scale


class _RMSNormOnCPU(torch.autograd.Function):
    """The same with a gradient: torch has no kernel of its own for it on CPU. Two to three times faster."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normal, scale = normalised(x, eps)
        ctx.save_for_backward(normal, scale, weight)
        return normal * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (dy,), (normal, scale, weight) = grad_outputs, ctx.saved_tensors
        d_weight = (dy * normal).flatten(0, -2).sum(0, dtype=torch.float32)
        dx = dy * weight.to(dy.dtype)
        # dx = scale (dy w - normal mean(dy w normal))
        dx.addcmul_(normal, (dx * normal).sum(-1, keepdim=True), value=-1 / dx.shape[-1])
        return torch.mul(dx, scale, out=dx), d_weight, None


def rotary_table(seq_len: int, head_dim: int, theta: float) -> Tensor:
    """(2, T, 1, D) float32: cosine and signed sine of position * theta^(-2i/D), each of the D/2 angles twice over;
    the sine is negative in the first half, as `rotate` wants it."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequency)[
        :, None
    ]  # (T, 1, D/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """x (B, T, H, D) with each pair (i, i + D/2) turned by its angle, Llama's pairing."""
    cos, sin = rotary
    if (
        torch.compiler.is_compiling()
    ):  # which reads each half in one go, and what is rolled entry by entry
        (a, b), (cos_a, cos_b), (sin_a, sin_b) = (half.chunk(2, dim=-1) for half in (x, cos, sin))
        return torch.cat((a * cos_a + b * sin_a, b * cos_b + a * sin_b), dim=-1)
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    def __init__(self, c: Config, kernel: Kernel, norm_eps: float):
        super().__init__()
        self.head_dim, self.kernel = c.head_dim, kernel
        kv_dim = (c.n_kv_head or c.n_head) * c.head_dim
        self.q_proj = Linear(c.n_embd, c.n_embd)
        self.k_proj = Linear(c.n_embd, kv_dim)
        self.v_proj = Linear(c.n_embd, kv_dim)
        self.o_proj = Linear(c.n_embd, c.n_embd)
        self.q_norm = RMSNorm(c.head_dim, norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: Tensor, apart: Tensor | None) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            proj(x).view(B, T, -1, self.head_dim)  # (B, T, H or H_kv, D)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = (
            sdpa if apart is not None and apart.ndim == 4 else self.kernel.attend
        )  # which may not know masks
        y = attend(rotate(self.q_norm(q), rotary), rotate(self.k_norm(k), rotary), v, apart)
        return self.o_proj(y.reshape(B, T, C))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, c: Config):
        super().__init__()
        assert c.mlp_dim is not None  # filled in by Config.load
        self.gate_proj = Linear(c.n_embd, c.mlp_dim)
        self.up_proj = Linear(c.n_embd, c.mlp_dim)
        self.down_proj = Linear(c.mlp_dim, c.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Config, kernel: Kernel, norm_eps: float):
        super().__init__()
        self.input_layernorm = RMSNorm(c.n_embd, norm_eps)
        self.self_attn = Attention(c, kernel, norm_eps)
        self.post_attention_layernorm = RMSNorm(c.n_embd, norm_eps)
        self.mlp = MLP(c)
        self.recompute = c.activation_checkpointing

    def forward(self, x: Tensor, rotary: Tensor, apart: Tensor | None) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.body(x, rotary, apart)
        return recomputed(self.body, self.recompute, x, rotary, apart)

    def body(self, x: Tensor, rotary: Tensor, apart: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, apart)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """forward(tokens) -> logits; forward(tokens, targets) -> (summed loss in nats, scored tokens).

    norm_eps: of the norms; None: NORM_EPS.
    """

    rotary: Tensor

    def __init__(self, c: Config, kernel: Kernel = SDPA, norm_eps: float | None = None):
        super().__init__()
        norm_eps = NORM_EPS if norm_eps is None else norm_eps
        self.dtype, self.kernel, self.vocab_size = getattr(torch, c.dtype), kernel, c.vocab_size
        self.embed_tokens = Embedding(c.padded_vocab_size, c.n_embd)
        self.layers = nn.ModuleList(Block(c, kernel, norm_eps) for _ in range(c.n_layer))
        self.norm = RMSNorm(c.n_embd, norm_eps)
        self.lm_head = Linear(c.n_embd, c.padded_vocab_size)
        if c.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.softmax_part: SoftmaxPart = softmax_part  # compilation.py changes this and the next
        self.compiled = False
        self.register_buffer(
            "rotary", rotary_table(c.seq_len, c.head_dim, c.rope_theta), persistent=False
        )

    def hidden(
        self, tokens: Tensor, bounds: Tensor | None = None, branches: Branches | None = None
    ) -> Tensor:
        """(B, T, C): what the head reads."""
        rotary = (
            self.rotary[:, : tokens.shape[1]]
            if branches is None
            else self.rotary[:, branches.positions]
        )
        apart = None if bounds is None else self.kernel.apart(bounds, *tokens.shape)
        if branches:
            apart = branches.mask()
        return self.through(tokens, rotary, apart)

    def through(self, tokens: Tensor, rotary: Tensor, apart: Tensor | None = None) -> Tensor:
        """(B, T, C): the same of tokens that stand where their rotary angles (2, T, 1, D) or (2, B, T, 1, D) say."""
        x, rotary = self.embed_tokens(tokens).to(self.dtype), rotary.to(self.dtype)
        for layer in self.layers:
            x = layer(x, rotary, apart)
        return self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        bounds: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """tokens (B, T) int64, T at most SEQ_LEN; targets (B, T) int64, -1 where not scored; bounds of documents
        that are to be kept apart, as attention.document_mask has them, or None.

        Without targets: logits (B, T, V) float32. With: see loss.py. With branches, and nothing else: (nats, whether it
        is the likeliest entry), each (n,), of each of their answers.
        """
        x = self.hidden(tokens, bounds, branches)
        if branches:
            return scored_answers(
                x.flatten(0, 1)[branches.at], self.lm_head.weight, branches.answers, self.vocab_size
            )
        if targets is None:
            return self.lm_head(x)[..., : self.vocab_size].float()
        return summed_loss(
            x.flatten(0, 1), self.lm_head.weight, targets.flatten(), part=self.softmax_of_entries
        )

    def softmax_of_entries(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The softmax part of the loss over logits (n, padded V), in which the padding has no share."""
        logits[:, self.vocab_size :] = 0
        return self.softmax_part(logits[:, : self.vocab_size], targets)


def build(
    c: Config,
    device: torch.device,
    kernel: Kernel = SDPA,
    sharding: Any = None,
    norm_eps: float | None = None,
) -> Transformer:
    """The model on `device` with the initial weights that SEED gives, the same on every device and rank."""
    model = unfilled(c, device, kernel, sharding, norm_eps)
    for name, weight in model.named_parameters():
        initialise(weight, name, c, sharding)
    return model


def unfilled(
    c: Config,
    device: torch.device,
    kernel: Kernel = SDPA,
    sharding: Any = None,
    norm_eps: float | None = None,
) -> Transformer:
    """The model on `device`, of whatever its memory held before.

    sharding: how the weights are split over processes (parallel.Sharding), or None. They are before they take any
    memory, so that no process ever holds the whole model.
    """
    with torch.device("meta") if sharding else device:
        model = Transformer(c, kernel, norm_eps)
    if sharding:
        sharding.split(model)
        model.to_empty(device=device)
        model.rotary.copy_(rotary_table(c.seq_len, c.head_dim, c.rope_theta))
    return model


def initialise(weight: Tensor, name: str, c: Config, sharding: Any = None) -> None:
    """Fill a weight as the table at the top says. Its random stream depends on SEED and its name alone,
    so that adding a layer or splitting the model over ranks changes no other weight."""
    if weight.ndim == 1:
        weight.data.fill_(1.0)
        return
    std = 0.02
    if not c.tie_embeddings and "lm_head" not in name:
        std = 1.0 if "embed_tokens" in name else 1 / math.sqrt(weight.shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * c.n_layer)
    digest = hashlib.sha256(f"{c.seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(weight.shape, device="cpu").normal_(
        0.0, std, generator=generator
    )  # the same on any device
    weight.data.copy_(sharding.part(values, weight) if sharding else values)


def matmul_weights(model: nn.Module) -> int:
    """Weights that take part in matrix products for each token: all but norms, the embedding table only as
    a head. This is N of 6 N + 12 L d T."""
    head = model.get_parameter("lm_head.weight").numel()
    return head + sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
    )
