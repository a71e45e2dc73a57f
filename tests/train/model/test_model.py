"""The model and its loss, against Hugging Face's classes and against plain formulas."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from train.model.loss import IGNORED, softmax_part
from train.model.model import RMSNorm, Transformer, build, matmul_weights

CPU = torch.device("cpu")
VARIANTS = [
    {},
    {"n_kv_head": 1},
    {"tie_embeddings": False, "rope_theta": 500_000.0},
    {"qk_norm": True, "n_kv_head": 2},
    {"qk_norm": True, "tie_embeddings": False},
    {"vocab_size": 501},
    {"vocab_size": 501, "tie_embeddings": False},
]


def recipe(tiny, **changes):
    base = {"n_head": 4, "n_embd": 64, "n_kv_head": None, "mlp_dim": None}
    return dataclasses.replace(tiny, **(base | changes)).derived()


def random_tokens(c, rows):
    shape = (rows, c.seq_len)
    return torch.randint(c.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def hugging_face(model, c):
    """A Llama, or with QK-norm a Qwen3, of Hugging Face with the same weights, and no padding of the vocabulary."""
    import transformers

    common = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.n_embd,
        "intermediate_size": c.mlp_dim,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_kv_head,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": c.tie_embeddings,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.seq_len,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
    }
    if c.qk_norm:
        other = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    else:
        other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, mlp_bias=False))
    ours = {}
    for name, weight in model.state_dict().items():
        if name in ("lm_head.weight", "embed_tokens.weight"):
            weight = weight[: c.vocab_size]
        ours[name if name.startswith("lm_head") else f"model.{name}"] = weight
    other.load_state_dict(ours, strict=True)
    return other.eval()


@pytest.mark.parametrize(
    ("changes", "norm_eps"), [*((variant, None) for variant in VARIANTS), ({}, 1e-6)], ids=str
)
def test_logits_equal_those_of_hugging_face(tiny, changes, norm_eps):
    c = recipe(tiny, **changes)
    model = build(c, CPU, norm_eps=norm_eps)
    assert model.norm.eps == (norm_eps or 1e-5)
    tokens = random_tokens(c, 3)
    with torch.no_grad():
        for weight in model.parameters():  # norms of 1 would hide a norm that is left out
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
        ours, theirs = model(tokens), hugging_face(model, c)(tokens).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_norm_of_a_cpu_and_its_gradients_are_those_of_the_plain_one(dtype, tolerance):
    norm, found = RMSNorm(16), []
    norm.eps = 0.5
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = (3 * torch.randn(48, 16)).to(dtype).requires_grad_()
    for function in (norm, torch.compile(norm, backend="eager")):  # the plain one is compiled
        x.grad = norm.weight.grad = None
        y = function(x)
        (y * torch.linspace(-1, 2, 16)).sum().backward()
        found.append([y, x.grad, norm.weight.grad])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= tolerance * other.norm()


def test_forward_with_targets_is_the_loss_of_its_logits(tiny):
    model = build(tiny, CPU)
    tokens = random_tokens(tiny, 2)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORED
    loss, scored = model(tokens, targets)
    plain = F.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    torch.testing.assert_close(loss, plain)
    assert scored.item() == 2 * (tiny.seq_len - 1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("part", [None, softmax_part], ids=["cpu", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_pad_the_vocabulary_compute_nothing(tiny, tied, part, dtype):
    c = recipe(tiny, vocab_size=501, tie_embeddings=tied, dtype=dtype)
    model = build(c, CPU)
    model.softmax_part = part
    assert model.embed_tokens.weight.shape == model.lm_head.weight.shape == (512, c.n_embd)
    tokens, found = random_tokens(c, 2), []
    for row in (1.0, 100.0):  # whatever they hold
        with torch.no_grad():
            model.lm_head.weight[501:], model.embed_tokens.weight[501:] = row, row
        loss, _ = model(tokens, tokens.roll(-1, 1))
        model.zero_grad()
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters())])
        for weight in (model.lm_head.weight, model.embed_tokens.weight):
            assert not weight.grad[501:].any()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    logits = model(tokens)
    plain = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum")
    assert logits.shape == (2, c.seq_len, 501)
    torch.testing.assert_close(loss, plain, rtol=1e-5 if dtype == "float32" else 2e-3, atol=0)


def test_bfloat16_stays_close_to_float32_and_its_gradients_are_float32(tiny):
    c = recipe(tiny)
    model, half = build(c, CPU), build(dataclasses.replace(c, dtype="bfloat16"), CPU)
    tokens = random_tokens(c, 4)
    assert half.hidden(tokens).dtype == torch.bfloat16
    losses = []
    for m in (model, half):
        loss, _ = m(tokens, tokens)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    for name, weight in half.named_parameters():
        reference = model.get_parameter(name).grad
        assert weight.dtype == weight.grad.dtype == torch.float32
        assert (weight.grad - reference).norm() < 0.05 * reference.norm(), name


def test_first_loss_is_near_that_of_a_uniform_guess(tiny):
    tokens = random_tokens(tiny, 8)
    loss, scored = build(recipe(tiny), CPU)(tokens, tokens.roll(-1, 1))
    assert (loss / scored).item() == pytest.approx(math.log(tiny.vocab_size), abs=0.15)


@pytest.mark.parametrize("tied", [True, False])
def test_what_writes_into_the_residual_starts_smaller_by_the_depth(tiny, tied):
    c = recipe(tiny, tie_embeddings=tied, n_layer=8)
    model = build(c, CPU)
    for name, weight in model.named_parameters():
        if "layers.0." in name and weight.ndim == 2:
            expected = 0.02 if tied else weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                expected /= 4  # sqrt(2 x 8)
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name


def test_initial_weights_follow_the_seed_and_not_the_depth(tiny):
    shallow, deep = build(tiny, CPU), build(dataclasses.replace(tiny, n_layer=3), CPU)
    other = build(dataclasses.replace(tiny, seed=tiny.seed + 1), CPU)
    name = "layers.1.mlp.gate_proj.weight"
    assert torch.equal(shallow.get_parameter(name), deep.get_parameter(name))
    assert not torch.equal(shallow.get_parameter(name), other.get_parameter(name))


@pytest.mark.parametrize("tied", [True, False])
def test_matmul_weights_count_the_head_once_and_the_table_never(tiny, tied):
    c = dataclasses.replace(tiny, tie_embeddings=tied)
    with torch.device("meta"):
        model = Transformer(c)
    layer = 4 * c.n_embd**2 + 3 * c.n_embd * c.mlp_dim
    assert matmul_weights(model) == c.n_layer * layer + c.vocab_size * c.n_embd
