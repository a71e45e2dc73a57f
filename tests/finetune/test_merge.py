"""`make export` of a fine-tuned run: it computes what was trained, and stops where a reply ends."""

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
from finetune.adapter import Adapters, in_file, is_adapter
from finetune.chat_template import ChatTemplate
from finetune.merge import open_trained, write_stop
from settings import load_preset
from tests.finetune.making import (
    BRACKETS,
    CHATML,
    ENDLESS,
    ENDS_TWICE,
    THINKS,
    row,
    their_tokenizer,
    write_rows,
)
from tests.finetune.models import classes, models, opened, theirs
from tests.finetune.test_hf_model import alone, packed
from tests.finetune.test_training import LORA, chats, env_of, finetune, saved
from tests.running import train
from tests.train.checkpoint.test_checkpoint import ALONE
from train.model.hf_import import weight_files

__all__ = ["chats", "models"]  # fixtures
SLOW = pytest.mark.slow


def export(env: dict[str, str], code: int = 0) -> str:
    return train(env, command=[sys.executable, "-m", "export"], code=code)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        found |= load_file(path)
    return found


# ---- Weights


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("glm4_moe", {**LORA, "CHECKPOINT_MODE": "lite"}),
        pytest.param("glm4_moe", LORA, marks=SLOW),
        pytest.param("qwen3", {"LORA_RANK": "4"}, marks=SLOW),
        pytest.param("glm4_moe", {}, marks=SLOW),
        pytest.param("qwen3", {}, marks=SLOW),
    ],
    ids=["mixture-lite", "mixture", "lora", "full-mixture", "full"],
)
def test_an_export_computes_what_was_trained(
    models: dict[str, Path], chats: Path, tmp_path: Path, kind: str, settings: dict[str, str]
) -> None:
    env = env_of(tmp_path, models[kind], chats, MAX_STEPS="4", **settings)
    finetune(env)
    assert "with step 4 of run" in export(env)
    made = tmp_path / "run" / "export"
    base = all_tensors(models[kind])
    new = all_tensors(made)
    assert [path.name for path in weight_files(models[kind])] == [
        path.name for path in weight_files(made)
    ]
    assert {name: (it.shape, it.dtype) for name, it in base.items()} == {
        name: (it.shape, it.dtype) for name, it in new.items()
    }
    changed = {name for name, values in new.items() if not torch.equal(values, base[name])}
    expected = {
        name for name in base if "layers.2." not in name and (not settings or "_proj" in name)
    }
    assert changed <= expected and len(changed) > 0.9 * len(expected)

    checkpoint = tmp_path / "run" / "checkpoints" / "step_0000004"
    batch = packed()
    if "CHECKPOINT_MODE" in settings:
        from peft import PeftModel

        merged = PeftModel.from_pretrained(theirs(models[kind]), str(checkpoint)).merge_and_unload()
        torch.testing.assert_close(
            theirs(made)(batch[0]).logits, merged(batch[0]).logits, rtol=1e-5, atol=1e-5
        )
        by_peft = dict(merged.named_parameters())
        for name, values in theirs(made).named_parameters():
            torch.testing.assert_close(values, by_peft[name], rtol=1e-6, atol=1e-6)
    else:
        _, model = opened(models[kind], ALONE, **settings)
        trained = saved(tmp_path, 4)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if f"model.{name}" in trained:
                    weight.copy_(trained[f"model.{name}"])
        wanted = model(*batch)[0].item()
        assert alone(theirs(made), batch[0], batch[1]) == pytest.approx(wanted, rel=1e-5)

    facts = json.loads((made / "export.json").read_text())
    assert (facts["run"], facts["step"], facts["stop_token"]) == ("run", 4, "<|im_end|>")
    assert facts["model"] == kind  # and no path
    assert str(tmp_path) not in (made / "README.md").read_text()
    done = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=made, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss"])  # experts as (out, in), and as (in, out)
def test_what_is_added_computes_what_the_adapters_do(tmp_path: Path, kind: str) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(2)
    make, model_config = classes().get(kind, (None, None))
    if kind == "gpt_oss":
        make = GptOssForCausalLM
        model_config = GptOssConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            eos_token_id=1,
            pad_token_id=0,
        )
    model_config.save_pretrained(str(tmp_path))
    config = load_preset(
        PRESET="finetune", DEVICE="cpu", LORA_RANK="4", LORA_TARGETS="attention,experts"
    )
    adapted = make(model_config)
    plain = make(model_config)
    plain.load_state_dict(adapted.state_dict())
    adapters = Adapters.of(config)
    assert adapters
    adapters.join(adapted)
    stored = {}
    for name, weight in list(adapted.named_parameters()):
        if is_adapter(name):
            owner, _, leaf = name.rpartition(".")
            value = torch.randn(weight.shape) * 0.1
            setattr(adapted.get_submodule(owner), leaf, torch.nn.Parameter(value))
            stored[in_file(name)] = value
    save_file(stored, tmp_path / lite.FILE)

    names, added = open_trained(config, tmp_path, tmp_path, {"mode": "lite"})
    weights = dict(plain.named_parameters())
    assert len(names) == len(stored) // 2
    with torch.no_grad():
        before = plain(packed()[0] % 64).logits
        for name in names:
            weights[name] += added(name)
        after = plain(packed()[0] % 64).logits
        wanted = adapted(packed()[0] % 64).logits
    torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after, before, atol=1e-2)


@SLOW
def test_what_cannot_be_exported_is_refused(
    models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(models["llama"], base)
    env = env_of(tmp_path, base, chats, MAX_STEPS="2")
    finetune(env)
    assert "has no checkpoint of that step. There are: 2" in export(env | {"STEP": "7"}, code=64)
    facts = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(facts | {"rms_norm_eps": 0.5}))
    assert "is not the model that was fine-tuned" in export(env, code=78)
    assert not (tmp_path / "run" / "export").exists()
    (base / "config.json").write_text(json.dumps(facts))
    assert "GGUF=1: MODEL was not trained here" in export(env | {"GGUF": "1"}, code=64)
    export(env)
    assert os.listdir(tmp_path / "run" / "export").count("config.json") == 1


# ---- Where a reply ends

# name -> (template, STOP_TOKEN, eos_token of the base model, stop token)
STOPS = {
    "a base model with ChatML": (CHATML, "", "</s>", "<|im_end|>"),
    "an instruct model": (CHATML, "", "<|im_end|>", "<|im_end|>"),
    "the template writes eos_token": (BRACKETS, "", "</s>", "</s>"),
    "thoughts": (THINKS, "", "</s>", "<|im_end|>"),
    "a second token at the end": (ENDS_TWICE, "", "</s>", "<|im_end|>"),
    "STOP_TOKEN": (ENDLESS, "<|im_end|>", "</s>", "<|im_end|>"),
}


def write_folder(folder: Path, model: Path, template: str, eos_token: str) -> Any:
    """Write a base model, with special_tokens_map.json as older ones have it; return its tokenizer."""
    shutil.copytree(model, folder)
    tokenizer = their_tokenizer(template)
    tokenizer.eos_token = eos_token
    tokenizer.save_pretrained(str(folder))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": eos_token}))
    eos = tokenizer.convert_tokens_to_ids(eos_token)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": eos}))
    return tokenizer


@pytest.mark.parametrize("name", STOPS)
def test_generate_stops_where_a_reply_ends(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

    template, stop_token, eos_token, expected = STOPS[name]
    folder = tmp_path / "export"
    base = write_folder(folder, models["llama"], template, eos_token)
    write_stop(folder, ChatTemplate(folder, stop_token))

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop = tokenizer.convert_tokens_to_ids(expected)
    assert tokenizer.eos_token == expected
    assert tokenizer.bos_token == base.bos_token
    assert json.loads((folder / "special_tokens_map.json").read_text())["eos_token"] == expected
    assert model.config.eos_token_id == stop
    messages = [{"role": "user", "content": "a?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, return_dict=False
    )
    assert prompt == base.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    length = ids.input_ids.shape[1]

    for ending in {stop, base.convert_tokens_to_ids(eos_token)}:

        def reply(ids: Any, scores: Any, ending: int = ending) -> Any:
            """Five tokens, then the ending."""
            wanted = ending if ids.shape[1] == length + 5 else 100
            return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([wanted]), 0.0)

        written = model.generate(
            **ids, max_new_tokens=20, do_sample=False, logits_processor=LogitsProcessorList([reply])
        )
        assert written[0, length:].tolist() == [100] * 5 + [ending]


def test_a_token_inside_replies_stops_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    """As in gpt-oss, where <|end|> ends the thoughts of a reply."""
    folder = tmp_path / "export"
    thoughts = "{{ m.reasoning_content or '' }}<|user|>{{ m['content'] }}"
    template = THINKS.replace("<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}", "{% endif %}")
    template = template.replace("{% endif %}<|im_end|>", "{% endif %}" + thoughts + "<|im_end|>")
    tokenizer = write_folder(folder, models["llama"], template, "<|user|>")
    write_stop(folder, ChatTemplate(folder))
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


@SLOW
def test_a_model_that_learned_replies_ends_them(models: dict[str, Path], tmp_path: Path) -> None:
    """Trained for real: a base model whose eos_token is not the one that ends a reply."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    questions = {f"Say {word}": f"It is {word}." for word in ("abc", "def", "ghi", "hello", "why")}
    rows = [row(question, reply) for question, reply in questions.items()]
    data = write_rows(tmp_path / "chats.jsonl", rows * 40)
    held_out = write_rows(tmp_path / "held-out.jsonl", [row("Say so", "It is so.")])
    model = tmp_path / "base"
    write_folder(model, models["qwen3"], CHATML, "</s>")
    env = env_of(tmp_path, model, data, MAX_STEPS="150", EPOCHS="200", EVAL_DATA=str(held_out))
    finetune(env)
    export(env)
    folder = tmp_path / "run" / "export"
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for question, reply in questions.items():
        inputs: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        written = lm.generate(**inputs, max_new_tokens=40, do_sample=False)
        text = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :])
        assert text == f"{reply}<|im_end|>"
