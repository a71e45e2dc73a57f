"""plan/finetuning/hf_shape.py and plan/finetuning/tuned.py against transformers' classes and peft's adapters, on the meta device."""

import functools
import re
from typing import Any

import pytest
import torch

from plan.finetuning.hf_shape import KINDS, MIXTURES, UnknownShape, shape_of
from plan.finetuning.tuned import tuned_of
from plan.published import PUBLISHED, of_preset, published
from settings import SettingsError, load_preset

SMALL = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
GLM: dict[str, Any] = {"n_routed_experts": 8, "head_dim": 8, "num_nextn_predict_layers": 1}
LISTED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"head_dim": 8}),
    ("smollm3", {"pad_token_id": 1}),
    ("qwen3_moe", EXPERTS | {"num_experts": 8, "decoder_sparse_step": 2}),
    ("qwen3_moe", EXPERTS | {"num_experts": 8, "mlp_only_layers": [1], "head_dim": 8}),
    ("qwen3_moe", EXPERTS | {"num_experts": 8}),
    ("mixtral", {"num_local_experts": 4, "head_dim": 8}),
    (
        "glm4_moe",
        EXPERTS | GLM | {"use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2},
    ),
    ("glm4_moe", EXPERTS | GLM),
    ("gemma3_text", {"head_dim": 8}),
    ("glm4", {"head_dim": 8, "pad_token_id": 1}),
    ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("olmo2", {}),
    ("phi3", {"pad_token_id": 1}),
]
TARGETS = ("attention,mlp", "mlp", "q_proj,down_proj", "attention,experts")


@functools.cache
def configuration(number: int) -> Any:
    from transformers import AutoConfig

    kind, more = LISTED[number]
    return AutoConfig.for_model(kind, **SMALL | more)


def made(number: int) -> Any:
    from finetune.hf_model import on_meta

    return on_meta(configuration(number), torch.bfloat16)


@pytest.mark.parametrize(
    "number", range(len(LISTED)), ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(LISTED)]
)
def test_parameters_adapters_and_work_are_those_of_transformers_and_peft(number: int) -> None:
    pytest.importorskip("peft", reason="make setup-dev installs it")
    from finetune.adapter import Adapters, is_adapter
    from finetune.head import find_head
    from finetune.hf_model import Tuned
    from finetune.main import count_flops

    shape = shape_of(configuration(number).to_dict())
    lm = made(number)
    assert find_head(lm)  # plan/memory.py has chunks of logits only
    assert shape.total == sum(weight.numel() for weight in lm.parameters())
    c = load_preset(PRESET="finetune")
    t = tuned_of(c, shape)
    assert (t.flops(), t.flops(causal=True)) == pytest.approx(
        count_flops(Tuned(lm, torch.float32), c.seq_len)
    )
    assert t.trained_tensors == len(list(lm.parameters()))
    for targets in TARGETS:
        c, lm = (
            load_preset(PRESET="finetune", LORA_RANK="4", LORA_TARGETS=targets),
            made(number),
        )
        adapters = Adapters.of(c)
        assert adapters
        alone = not any(matrix.group == "mlp" for _, matrix in shape.matrices())
        lacks = "q_proj" in targets and shape.kind == "phi3"
        if lacks or (targets == "mlp" and alone) or ("experts" in targets and not shape.experts):
            with pytest.raises(SettingsError) as theirs:
                adapters.join(lm)
            with pytest.raises(SettingsError, match=re.escape(str(theirs.value).split(";")[0])):
                tuned_of(c, shape)
            continue
        t = tuned_of(c, shape)
        adapters.join(lm)
        sizes = [weight.numel() for name, weight in lm.named_parameters() if is_adapter(name)]
        assert (t.adapters, t.trained_tensors) == (sum(sizes), len(sizes))
        assert (t.flops(), t.flops(causal=True)) == pytest.approx(
            count_flops(Tuned(lm, torch.float32), c.seq_len)
        )


def test_each_kind_has_a_case_and_another_is_a_guess() -> None:
    assert {kind for kind, _ in LISTED} == set(KINDS) >= set(MIXTURES)
    with pytest.raises(UnknownShape, match=r"config\.json says hidden_size=None"):
        shape_of({"model_type": "llama"})
    llama = configuration(1).to_dict()
    guess = shape_of(llama | {"model_type": "arcee"})
    assert guess.guessed and guess.total == shape_of(llama).total
    assert not shape_of(llama).guessed


def test_glm_4_5_air_as_it_was_published() -> None:
    """106B, of which 12B are active (its model card); the sum by hand."""
    shape = shape_of(PUBLISHED["glm-4.5-air"])
    attention = 4096 * 128 * (2 * 96 + 2 * 8) + 128 * (96 + 2 * 8)
    expert, norms, tables = 3 * 4096 * 1408, 2 * 4096, 2 * 151_552 * 4096 + 4096
    mixture = attention + 129 * expert + 128 * 4096 + norms
    assert (
        shape.total
        == tables + attention + 3 * 4096 * 10_944 + norms + 45 * mixture
        == 106_852_245_504
    )
    assert round(shape.active / 1e9) in (12, 13) and (shape.experts, shape.passed, shape.more) == (
        128,
        8,
        1,
    )
    assert (
        published("owner/GLM-4.5-Air@0123456")
        == published("models/glm-4.5-air/")
        == PUBLISHED["glm-4.5-air"]
    )
    assert published("models/another") is None
    assert (of_preset("glm-4.5-air-16xh200"), of_preset("finetune")) == ("glm-4.5-air", "")


def test_qwen3_1_7b_as_it_was_published() -> None:
    """1.7B, of which 1.4B are not the table (its model card); the sum by hand."""
    shape = shape_of(PUBLISHED["qwen3-1.7b"])
    block = 2048 * 128 * (2 * 16 + 2 * 8) + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128
    assert shape.total == 151_936 * 2048 + 28 * block + 2048 == 1_720_574_976
    assert round((shape.total - shape.table) / 1e9, 1) == 1.4
