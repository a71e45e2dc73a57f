"""hardware/model_size.py against the model itself, built without memory."""

import dataclasses

import pytest
import torch

from hardware.flops import flops_per_token
from hardware.model_size import flops_of, parameters
from settings import ROOT, load_config
from settings.config import Config
from train.model.model import Transformer, matmul_weights

PRESETS = sorted(
    path.stem
    for path in (ROOT / "presets").glob("*.env")
    if not path.read_text().startswith("# Fine-tuning")
)
OTHERS = [
    {},
    {"qk_norm": True},
    {"tie_embeddings": False},
    {"n_kv_head": 2},
    {"mlp_dim": 640, "vocab_size": 1000},
]


@pytest.mark.parametrize(
    "c",
    [load_config({"PRESET": name, "ENV_FILE": ""}) for name in PRESETS]
    + [dataclasses.replace(Config(), **changes).derived() for changes in OTHERS],
    ids=PRESETS + [str(changes) for changes in OTHERS],
)
def test_each_part_has_as_many_as_the_model(c: Config) -> None:
    with torch.device("meta"):
        model = Transformer(c)
    counted = {
        part: sum(w.numel() for name, w in model.named_parameters() if belongs(name))
        for part, belongs in {
            "embedding": lambda n: "embed_tokens" in n,
            "head": lambda n: "lm_head" in n,
            "attention": lambda n: "_proj" in n and "self_attn" in n,
            "mlp": lambda n: ".mlp." in n,
            "norms": lambda n: "norm" in n,
        }.items()
    }
    assert dataclasses.asdict(parameters(c)) == counted
    assert parameters(c).total == sum(w.numel() for w in model.parameters())
    assert parameters(c).matmul == matmul_weights(model)
    assert flops_of(c) == flops_per_token(matmul_weights(model), c.n_layer, c.n_embd, c.seq_len)
