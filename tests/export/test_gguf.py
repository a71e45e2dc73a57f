"""GGUF=1: the file holds the export's weights, shape and tokenizer, read back by other code than wrote it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from export import gguf_file
from settings import SettingsError
from settings.config import Config
from tests.export.exported import LLAMA, QWEN, Run, make_run
from tests.extra_packages import install_apart
from tests.train.model.test_hf_import import logits
from tests.train.model.test_model import recipe
from train.data import tokenizer
from train.model.model import NORM_EPS

Make = Callable[..., Run]


@pytest.fixture
def make(
    tiny: Config, tmp_path: Path, data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Make:
    """make(code=0, dtype="float32", **settings): a run and what make export GGUF=1 did with it."""

    def make(code: int = 0, dtype: str = "float32", **settings: Any) -> Run:
        recipe_of_run = recipe(tiny, tokenizer=data["TOKENIZER"], **settings)
        made = make_run(tmp_path, recipe_of_run)
        assert made.command(monkeypatch, GGUF="1", DTYPE=dtype) == code
        return made

    return make


@pytest.mark.parametrize("shape", [LLAMA, {**QWEN, "vocab_size": 600}], ids=["llama", "qwen3"])
def test_transformers_computes_the_same_logits_from_the_file(
    make: Make, shape: dict[str, Any]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    made = make(**shape)
    theirs = AutoModelForCausalLM.from_pretrained(
        made.export, gguf_file=gguf_file.NAME, config=AutoConfig.from_pretrained(made.export)
    ).eval()
    expected = logits(made.models[3], made.config)
    torch.testing.assert_close(logits(theirs, made.config), expected, rtol=1e-5, atol=1e-5)


def test_the_file_has_every_token_merge_and_key(make: Make) -> None:
    made = make(**QWEN, vocab_size=600, dtype="bfloat16")
    reader = GGUFReader(made.export / gguf_file.NAME)
    found = {name: field.contents() for name, field in reader.fields.items()}
    vocabulary = tokenizer.load(Path(made.config.tokenizer))
    entries = vocabulary.tokenizer.get_vocab(with_added_tokens=True)
    tokens = found["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in entries.values()] == list(entries)
    assert len(tokens) == 600 and set(tokens[len(entries) :]) == {
        f"[PAD{i}]" for i in range(len(entries), 600)
    }
    special = len(vocabulary.tokenizer.get_added_tokens_decoder())
    kinds = [3] * special
    kinds += [1] * (len(entries) - special)
    kinds += [5] * (600 - len(entries))
    assert found["tokenizer.ggml.token_type"] == kinds
    stored = json.loads(vocabulary.content)["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [f"{first} {second}" for first, second in stored]
    model = {name.removeprefix("qwen3."): value for name, value in found.items()}
    config = made.config
    expected = {
        "general.architecture": "qwen3",
        "general.name": "a-run",
        "general.file_type": 32,
        "vocab_size": 600,
        "context_length": config.seq_len,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": 2,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": pytest.approx(NORM_EPS),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": 500_000.0,
        "tokenizer.ggml.pre": "smaug-bpe",
        "tokenizer.ggml.bos_token_id": vocabulary.end_of_text,
        "tokenizer.ggml.eos_token_id": vocabulary.end_of_text,
        "tokenizer.ggml.eot_token_id": vocabulary.tokenizer.token_to_id("<|end|>"),
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {name: model.get(name) for name in expected} == expected


def test_matrices_keep_their_bits_and_norms_are_float32(make: Make) -> None:
    made = make(**QWEN, dtype="bfloat16")
    stored = load_file(made.export / "model.safetensors")
    tensors = {it.name: it for it in GGUFReader(made.export / gguf_file.NAME).tensors}
    assert len(tensors) == len(stored)
    expected = stored["model.layers.1.self_attn.k_proj.weight"].view(torch.uint8).numpy()
    assert (tensors["blk.1.attn_k.weight"].data == expected).all()
    norm = torch.from_numpy(tensors["blk.0.attn_norm.weight"].data.copy())
    assert torch.equal(norm, stored["model.layers.0.input_layernorm.weight"].float())


def test_a_text_begins_with_bos_whatever_the_tokenizer_says(make: Make) -> None:
    made = make(**LLAMA)
    path = made.export / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"add_bos_token": False}))
    gguf_file.write(made.export, "a-run")
    field = GGUFReader(made.export / gguf_file.NAME).fields["tokenizer.ggml.add_bos_token"]
    assert field.contents() is True


def test_a_tokenizer_is_known_by_how_it_splits_text(data: dict[str, str]) -> None:
    ours = json.loads(Path(data["TOKENIZER"]).read_bytes())
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    assert gguf_file.find_pre_tokenizer(ours) == "smaug-bpe"
    assert gguf_file.find_pre_tokenizer({"pre_tokenizer": gpt2}) == "gpt-2"
    for other in (
        None,
        gpt2 | {"add_prefix_space": True},
        gpt2 | {"use_regex": False},
        {"type": "Sequence", "pretokenizers": [{"pattern": {"Regex": "x"}}, gpt2]},
    ):
        with pytest.raises(SettingsError, match="GGUF=1: The tokenizer is neither GPT-2's nor"):
            gguf_file.find_pre_tokenizer({"pre_tokenizer": other})
    with pytest.raises(SettingsError, match="GGUF=1"):
        gguf_file.find_pre_tokenizer({"pre_tokenizer": gpt2, "normalizer": {"type": "NFC"}})


def test_an_export_with_another_tokenizer_is_refused_before_anything_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gguf_file, "SPLIT", "x")
    made = make(code=64, **LLAMA)
    assert "convert_hf_to_gguf.py" in capsys.readouterr().err and not made.export.exists()


@pytest.mark.parametrize(
    "change",
    [{}, {"model_type": "gpt2"}, {"attention_bias": True}, {"head_dim": None}],
    ids=str,
)
def test_only_models_that_were_trained_here_are_written(change: dict[str, Any]) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "max_position_embeddings": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "torch_dtype": "float32",
    }
    changed = {key: value for key, value in (config | change).items() if value is not None}
    if not change:
        return gguf_file.check_model(changed)
    with pytest.raises(SettingsError, match="MODEL was not trained here"):
        gguf_file.check_model(changed)


LLAMA_CPP = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 64
params.n_parallel = 1
server = xllamacpp.Server(params)
prompt, messages, greedy = map(json.loads, sys.argv[2:])
endless = greedy | {"ignore_eos": True}
results = [server.handle_completions(endless | {"prompt": prompt})]
for token in range(8):
    bias = {"logit_bias": [[token, 100.0]]}
    results.append(server.handle_completions(greedy | bias | {"prompt": prompt}))
bias = {"logit_bias": [[token, -1000.0] for token in range(8)]}  # it shows no special tokens
chat = server.handle_chat_completions(endless | bias | {"messages": messages})
print(json.dumps([*results, chat]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("shape", [LLAMA, QWEN], ids=["llama", "qwen3"])
def test_llama_cpp_writes_the_same_text_and_stops_at_the_same_tokens(
    make: Make, shape: dict[str, Any]
) -> None:
    """Of a text, and of a conversation by the chat template in the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = install_apart(
        "llama-cpp", ["xllamacpp==2026.10.11549"], lambda folder: ["--target", str(folder)]
    )
    made = make(**shape)
    model = AutoModelForCausalLM.from_pretrained(made.export).eval()
    tokenizer = AutoTokenizer.from_pretrained(made.export)

    def write(prompt: list[int], **how: Any) -> str:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=-1, **how
        )
        return tokenizer.decode(ids[0, len(prompt) :])

    prompt = [model.config.bos_token_id, 100, 101]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "abc def?"}]
    request = {"n_predict": 9, "temperature": 0, "top_k": 1}
    arguments = map(json.dumps, (prompt, messages, request))
    done = subprocess.run(
        [sys.executable, "-c", LLAMA_CPP, made.export / gguf_file.NAME, *arguments],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    greedy, *biased, chat = json.loads(done.stdout)
    assert greedy["choices"][0]["text"] == write(prompt)
    ends = [i for i, it in enumerate(biased) if it["choices"][0]["finish_reason"] == "stop"]
    assert ends == sorted(model.generation_config.eos_token_id)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat["usage"]["prompt_tokens"] == len(prompt)
    assert chat["choices"][0]["message"]["content"] == write(prompt, suppress_tokens=list(range(8)))
