"""What was fine-tuned as a folder that transformers reads: it computes what was trained."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune import lite
from finetune.adapter import Adapters, adapters_of, in_file, is_adapter
from finetune.hf_model import Tuned
from finetune.merge import adapters_in
from finetune.weights import plain
from settings import load_preset
from tests.finetune.models import classes, models, opened, theirs
from tests.finetune.test_hf_model import alone, packed
from tests.finetune.test_training import LORA, chats, env_of, finetune, saved
from tests.running import train
from tests.train.checkpoint.test_checkpoint import ALONE
from train.model.hf_import import weight_files

__all__ = ["chats", "models"]  # fixtures
SLOW = pytest.mark.slow


def export(env: dict[str, str], code: int = 0) -> str:
    return train(env, command=[sys.executable, "-m", "finetune.merge"], code=code)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        found |= load_file(path)
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("glm4_moe", LORA, marks=SLOW),
        ("glm4_moe", {**LORA, "CHECKPOINT_MODE": "lite"}),
        pytest.param("qwen3", {"LORA_RANK": "4"}, marks=SLOW),
        pytest.param("qwen3", {}, marks=SLOW),
        pytest.param("glm4_moe", {}, marks=SLOW),
    ],
    ids=["mixture", "mixture-lite", "lora", "full", "full-mixture"],
)
def test_an_export_computes_what_was_trained(
    models: dict[str, Path], chats: Path, tmp_path: Path, kind: str, settings: dict[str, str]
) -> None:
    if settings:
        pytest.importorskip("peft", reason="make setup-dev installs it")
    env = env_of(tmp_path, models[kind], chats, MAX_STEPS="4", **settings)
    finetune(env)
    assert "with step 4 of run" in export(env)
    made = tmp_path / "run" / "export"
    base, new = all_tensors(models[kind]), all_tensors(made)
    assert base.keys() == new.keys()
    assert {path.name for path in weight_files(models[kind])} == {
        path.name for path in weight_files(made)
    }
    changed = {name for name, values in new.items() if not torch.equal(values, base[name])}
    expected = {
        name for name in base if "layers.2." not in name and (not settings or "_proj" in name)
    }
    assert changed <= expected and len(changed) > 0.9 * len(expected)
    if kind == "glm4_moe":
        assert {
            f"model.layers.1.mlp.experts.{part}_proj.weight" for part in ("3.up", "7.down")
        } <= changed

    _, model = opened(models[kind], ALONE, **settings)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_0000004"
    with torch.no_grad():
        if "CHECKPOINT_MODE" in settings:
            lite.read(checkpoint / lite.FILE, adapters_of(model))
        else:
            held = saved(tmp_path, 4)
            for name, weight in model.named_parameters():
                if f"model.{name}" in held:
                    weight.copy_(held[f"model.{name}"])
    batch = packed()
    wanted = model(*batch)[0].item()
    assert alone(theirs(made), batch[0], batch[1]) == pytest.approx(wanted, rel=1e-5)
    assert alone(theirs(models[kind]), batch[0], batch[1]) != pytest.approx(wanted, rel=1e-4)
    if "CHECKPOINT_MODE" in settings:
        from peft import PeftModel

        merged = PeftModel.from_pretrained(theirs(models[kind]), str(checkpoint)).merge_and_unload()
        wanted_logits = merged(batch[0]).logits
        assert torch.allclose(theirs(made)(batch[0]).logits, wanted_logits, atol=1e-5)
        assert not torch.allclose(theirs(models[kind])(batch[0]).logits, wanted_logits, atol=1e-3)
        by_peft = dict(merged.named_parameters())
        own = dict(theirs(made).named_parameters())
        assert own.keys() == by_peft.keys()
        assert all(torch.allclose(values, by_peft[name], atol=1e-6) for name, values in own.items())
    facts = json.loads((made / "export.json").read_text())
    assert (facts["step"], facts["settings"]["LORA_RANK"]) == (4, int(settings.get("LORA_RANK", 0)))
    done = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=made, check=False)
    assert done.returncode == 0
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(str(made)).chat_template


@SLOW
def test_what_cannot_be_exported_is_refused(
    models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(models["llama"], base)
    env = env_of(tmp_path, base, chats, MAX_STEPS="2")
    assert "There is no run none in" in export(env | {"RUN_NAME": "none"}, code=78)
    finetune(env)
    assert "has no checkpoint of that step. There are: 2" in export(env | {"STEP": "7"}, code=64)
    said = train(
        env | {"PROMPT": "a"}, command=[sys.executable, "-m", "train.generate.sample"], code=78
    )
    assert "has fine-tuned MODEL=" in said
    facts = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(facts | {"rms_norm_eps": 0.5}))
    assert "is not what was fine-tuned" in export(env, code=78)
    assert not (tmp_path / "run" / "export").exists()
    (base / "config.json").write_text(json.dumps(facts))
    assert "GGUF=1: MODEL was not trained here" in export(env | {"GGUF": "1"}, code=64)
    export(env)
    assert os.listdir(tmp_path / "run" / "export").count("config.json") == 1


@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss"])  # experts as (out, in), and as (in, out)
def test_what_is_added_is_what_peft_adds(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("peft", reason="make setup-dev installs it")
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(2)
    if kind == "gpt_oss":
        config: Any = GptOssConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
        lm: Any = GptOssForCausalLM(config)
    else:
        make, config = classes()[kind]
        lm = make(config)
    c = load_preset(
        PRESET="finetune", DEVICE="cpu", LORA_RANK="4", LORA_TARGETS="attention,experts"
    )
    adapters = Adapters.of(c)
    assert adapters
    adapters.join(lm)
    lm.to_empty(device="cpu")
    weights = {
        name: weight.data.normal_()
        for name, weight in Tuned(lm, torch.float32).named_parameters()
        if is_adapter(name)
    }
    save_file({in_file(name): weight for name, weight in weights.items()}, tmp_path / lite.FILE)
    added = adapters_in(tmp_path, {"mode": "lite"}, c, lm)
    assert len(added.names) == len(weights) // 2 > 4
    for name, module in lm.named_modules():
        if hasattr(module, "lora_A"):
            own = plain(f"{name}.").rstrip(".") + f".{getattr(module, 'parameter_name', 'weight')}"
            torch.testing.assert_close(added.value(own), module.get_delta_weight("default"))
