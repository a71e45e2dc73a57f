"""Tiny random models of transformers' real classes, written to sharded safetensors with tokenizer and template."""

import copy
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.adapter import Adapters
from finetune.hf_model import Tuned, build
from settings import load_preset
from settings.config import Config
from tests.finetune.making import CHATML, their_tokenizer
from train.distributed import parallel
from train.distributed import world as distributed
from train.distributed.world import World

SMALL = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@functools.cache
def classes() -> dict[str, tuple[Any, Any]]:
    """Kind -> (class, configuration). The mixture has a dense block, then one of eight experts and a shared one."""
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    return {
        "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=False)),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)),
        "gemma2": (
            Gemma2ForCausalLM,
            Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=1.0),
        ),
        "glm4_moe": (
            Glm4MoeForCausalLM,
            Glm4MoeConfig(
                **SMALL,
                head_dim=8,
                moe_intermediate_size=16,
                n_routed_experts=8,
                num_experts_per_tok=2,
                n_shared_experts=1,
                first_k_dense_replace=1,
                use_qk_norm=True,
                tie_word_embeddings=False,
            ),
        ),
    }


def write_model(kind: str, folder: Path, with_mtp: bool = False, **changes: Any) -> Path:
    """A folder as its publisher would have it. with_mtp: and the layer behind the last one that predicts more tokens,
    in the last file; changes: of the configuration."""
    torch.manual_seed(3)
    make, config = classes()[kind]
    config = copy.deepcopy(config)
    config.update(changes)
    model = make(config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
        for weight in model.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.1)
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    their_tokenizer(CHATML).save_pretrained(str(folder))
    if with_mtp:
        index = folder / "model.safetensors.index.json"
        facts = json.loads(index.read_text())
        last = sorted(set(facts["weight_map"].values()))[-1]
        held = load_file(folder / last)
        more = {
            f"model.layers.2.{name}": torch.ones(4) for name in ("eh_proj.weight", "enorm.weight")
        }
        save_file(held | more, folder / last, metadata={"format": "pt"})
        facts["weight_map"] |= dict.fromkeys(more, last)
        index.write_text(json.dumps(facts))
    return folder


def theirs(folder: Path) -> Any:
    """The model as transformers loads it by itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(folder), attn_implementation="eager", dtype=torch.float32
    ).eval()


def opened(folder: Path, world: World, **settings: object) -> tuple[Config, Tuned]:
    """The model as this process trains it, but for DDP's wrapper."""
    chosen = {"DTYPE": "float32", "OPTIMIZER": "adamw"} | {
        name: str(value) for name, value in settings.items()
    }
    c = load_preset(DEVICE="cpu", MODEL=str(folder), **chosen)
    sharding = parallel.Sharding(c, world) if parallel.is_split(c, world) else None
    return c, build(folder, c, world.device, sharding, Adapters.of(c))


def whole(model: Tuned) -> dict[str, torch.Tensor]:
    """Name without the shell's part -> the whole weight, on every process."""
    if hasattr(model, "reshard"):
        model.reshard()
    parts = (
        (name.removeprefix("lm."), weight.detach()) for name, weight in model.named_parameters()
    )
    return {
        name: part.full_tensor() if hasattr(part, "full_tensor") else part.clone()
        for name, part in parts
    }


def as_rank(rank: int, size: int) -> World:
    """Join as one of several processes of a test."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=os.environ["TEST_PORT"],
    )
    return distributed.join(load_preset(DEVICE="cpu"), trains=False)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> folder. Do not write to them."""
    place = tmp_path_factory.mktemp("models")
    return {
        kind: write_model(kind, place / kind, with_mtp=kind == "glm4_moe") for kind in classes()
    }
