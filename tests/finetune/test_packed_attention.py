"""Packed examples: losses and gradients are those of transformers' own, each example alone and unpadded."""

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import packed_attention
from finetune.hf_model import Tuned, refuse_attention, refuse_mixing
from finetune.packed_attention import attend, by_example
from settings import SettingsError
from settings.config import Config
from tests.finetune.models import SMALL, models, opened
from tests.finetune.test_hf_model import packed
from tests.train.checkpoint.test_checkpoint import ALONE
from train.model.attention import document_mask
from train.model.loss import IGNORED

__all__ = ["models"]  # a fixture

WINDOW = 6  # shorter than each of the examples
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS = {
    "llama": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": WINDOW, "pad_token_id": 0},
    "olmo2": {},
    "mistral": {"sliding_window": WINDOW},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "gemma2": {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 0.5},
    "gpt_oss": {"head_dim": 8, "sliding_window": WINDOW, **MIXTURE},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
}
BY_MASK = {"falcon"}


def make(kind: str, **changes):
    """A tiny model with transformers' plain attention, and weights that make it attend."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SMALL | KINDS.get(kind, {}) | changes)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for weight in lm.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.2)
    return lm


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters()}


def examples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets of each of the packed examples."""
    tokens, targets, _, bounds = packed()
    edges = bounds.tolist()
    parts = [slice(a, b) for a, b in itertools.pairwise(edges) if a < b]
    return [(tokens.flatten()[part], targets.flatten()[part]) for part in parts]


def alone(lm) -> float:
    """The sum of the losses, and gradients, of one example after the other."""
    total = 0.0
    for tokens, targets in examples():
        logits = lm(tokens[None], use_cache=False).logits[0]
        nats = torch.nn.functional.cross_entropy(
            logits, targets, ignore_index=IGNORED, reduction="sum"
        )
        nats.backward()
        total += nats.item()
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_packed_examples_are_learned_from_as_if_each_were_alone(kind: str) -> None:
    lm = make(kind)
    reference = copy.deepcopy(lm)
    wanted = alone(reference)
    model = Tuned(lm, torch.float32)
    assert model.packs == (kind not in BY_MASK)
    nats, scored = model(*packed())
    nats.backward()
    assert scored == sum((targets != IGNORED).sum() for _, targets in examples())
    assert nats.item() == pytest.approx(wanted, rel=2e-6)
    own = gradients(lm)
    for name, gradient in gradients(reference).items():
        assert (own[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-5, name


@pytest.mark.parametrize("kind", ["gemma3_text", "phi3", "mistral", "gemma2", "gpt_oss"])
def test_a_sliding_window_matters_to_these_losses(kind: str) -> None:
    narrow, wide = (
        Tuned(make(kind, sliding_window=width), torch.float32)(*packed())[0].item()
        for width in (WINDOW, 64)
    )
    assert narrow != pytest.approx(wide, rel=1e-3)


def test_no_score_of_two_examples_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def spy(query, key, value, **options):
        shapes.append((query.shape[2], key.shape[2]))
        return torch.zeros_like(query)

    monkeypatch.setattr(packed_attention.F, "scaled_dot_product_attention", spy)
    Tuned(make("llama"), torch.float32)(*packed())
    assert shapes == 2 * [(9, 9), (15, 15), (24, 24)]


def test_a_kernel_for_sequences_of_varying_length_gets_bounds_and_window() -> None:
    """What a GPU's kernel is called with gives what the loop over examples gives."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, heads, 24, 8, generator=generator) for heads in (4, 2, 2))
    *_, bounds = packed()

    def kernel(q, k, v, *bounds_and_lengths, scale, window):
        mask = document_mask(bounds, 2, 24)
        positions = torch.arange(24)
        mask = mask & (positions[:, None] - positions < window)
        heads = [x.view(2, 24, -1, 8).transpose(1, 2) for x in (q, k, v)]
        y = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=mask, scale=scale, enable_gqa=True
        )
        assert all(x is bounds for x in bounds_and_lengths[:2])
        assert bounds_and_lengths[2:] == (24, 24)
        return y.transpose(1, 2).flatten(0, 1)

    class OnGpu(torch.Tensor):
        is_cuda = True

    half = [x.bfloat16().as_subclass(OnGpu) for x in (query, key, value)]
    y, _ = attend(
        kernel, torch.nn.Module(), *half, None, bounds=bounds, scaling=0.3, sliding_window=WINDOW
    )
    options = {"scaling": 0.3, "dropout": 0.0, "window": WINDOW}
    wanted = by_example(query, key, value, bounds, options)
    torch.testing.assert_close(y.as_subclass(torch.Tensor).float(), wanted, atol=0.03, rtol=0.03)


def test_what_would_mix_examples_is_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    def refused(kind: str, **changes) -> str:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | changes))
        with pytest.raises(SettingsError) as error:
            refuse_attention(lm, Config())
        return str(error.value)

    assert "MambaForCausalLM has blocks that carry state" in refused("mamba")
    layers = ["conv", "full_attention"]
    assert "Lfm2ForCausalLM has blocks that carry state" in refused("lfm2", layer_types=layers)
    assert "BertLMHeadModel has attention to later tokens" in refused("bert")


def refuse(lm: Any) -> None:
    refuse_mixing(Tuned(lm, torch.float32), "their/model", torch.device("cpu"))


@pytest.mark.parametrize("kind", ["mvp", "trocr"])
def test_a_class_that_ignores_positions_is_refused(kind: str) -> None:
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
    lm = make(kind, encoder_layers=2, decoder_ffn_dim=48, **sizes)
    refuse_attention(lm, Config())
    with pytest.raises(SettingsError, match=r"MODEL=their/model: .*ForCausalLM cannot keep the"):
        refuse(lm)


def test_attention_that_looks_at_the_example_before_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse(make("llama"))

    def as_one_example(query: Any, key: Any, value: Any, bounds: Any, options: Any) -> Any:
        return by_example(query, key, value, bounds[[0, -1]], options)

    monkeypatch.setattr(packed_attention, "by_example", as_one_example)
    with pytest.raises(SettingsError, match="cannot keep the examples"):
        refuse(make("llama"))


def test_a_window_or_mask_that_does_not_reach_attention_is_refused() -> None:
    module = torch.nn.Module()
    module.config = type("WithWindow", (), {"sliding_window": 3})
    heads = [torch.zeros(1, 2, 4, 8)] * 3
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    call = partial(attend, None, module, *heads, bounds=bounds)
    with pytest.raises(SettingsError, match=r"SEQ_LEN=4: .* Set SEQ_LEN=3 or less"):
        call(None)
    with pytest.raises(SettingsError, match="an attention mask of its own"):
        call(torch.zeros(1, 1, 4, 4), sliding_window=None)


def test_windows_in_which_nothing_is_scored_have_gradients_of_zero(
    models: dict[str, Path],
) -> None:
    _, model = opened(models["qwen3"], ALONE)
    tokens, targets, positions, bounds = packed()
    nats, scored = model(tokens, torch.full_like(targets, IGNORED), positions, bounds)
    nats.backward()
    assert (nats.item(), scored.item()) == (0, 0)
    assert all(not gradient.any() for gradient in gradients(model).values())
