"""Weights of others: read to the last digit, or refused with what does not fit."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from settings import SettingsError
from settings.config import SETTINGS
from tests.finetune.models import as_rank
from tests.processes import run_ranks
from tests.train.model.test_model import hugging_face, recipe
from train.model import hf_import
from train.model.generate import Choice, generate
from train.model.hf_import import ForeignError
from train.model.model import build

CPU = torch.device("cpu")
LLAMA = {"n_kv_head": 2}
QWEN = {
    "qk_norm": True,
    "n_kv_head": 2,
    "tie_embeddings": False,
    "rope_theta": 500_000.0,
}
THEIR_EPS = 1e-6  # of RMSNorm


def published(folder, c, dtype=torch.float32, **how):
    """A model of Hugging Face with random weights, and its files as save_pretrained writes them."""
    model = build(dataclasses.replace(c, seed=4), CPU, norm_eps=THEIR_EPS)
    with torch.no_grad():
        for weight in model.parameters():  # norms of 1 would hide one that is left as it was
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
    other = hugging_face(model, c).to(dtype)
    other.save_pretrained(folder, **how)
    return other


def logits(model, c):
    tokens = torch.randint(c.vocab_size, (2, c.seq_len), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits.float()


@pytest.fixture
def llama(tiny, tmp_path):
    """Settings of a small Llama, and a folder with one that fits them."""
    c = recipe(tiny, **LLAMA)
    published(tmp_path / "llama", c)
    return c, tmp_path / "llama"


def change(folder, **values):
    """Change keys of config.json; None takes one away."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )


def change_weights(folder, changes):
    """Change tensors of model.safetensors; None takes one away."""
    weights = load_file(folder / "model.safetensors") | changes
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, folder / "model.safetensors")


def problems(folder, c):
    with pytest.raises(SettingsError) as raised:
        hf_import.check(folder, c)
    return raised.value.problems


# ---- What is read


@pytest.mark.parametrize(
    "changes",
    [
        LLAMA,
        {"tie_embeddings": False},
        QWEN,
        {**QWEN, "tie_embeddings": True},
        {"vocab_size": 501},
        {**QWEN, "vocab_size": 501},
    ],
    ids=str,
)
@pytest.mark.parametrize("how", [{}, {"max_shard_size": "100KB"}], ids=["one file", "shards"])
def test_logits_equal_those_of_the_model_that_was_saved(tiny, tmp_path, changes, how):
    c = recipe(tiny, **changes)
    theirs = published(tmp_path, c, **how)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == bool(how)
    hf_import.check(tmp_path, c)
    model = build(c, CPU, norm_eps=hf_import.read_norm_eps(tmp_path))
    padding = model.lm_head.weight[c.vocab_size :].clone()
    hf_import.load(tmp_path, model)
    torch.testing.assert_close(logits(model, c), logits(theirs, c), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.lm_head.weight[c.vocab_size :], padding)
    assert (model.lm_head.weight is model.embed_tokens.weight) == c.tie_embeddings
    assert all(
        weight.requires_grad and weight.dtype == torch.float32 for weight in model.parameters()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_become_float32(tiny, tmp_path, dtype):
    c = recipe(tiny, **QWEN)
    theirs = published(tmp_path, c, dtype)
    hf_import.check(tmp_path, c)
    model = build(c, CPU)
    hf_import.load(tmp_path, model)
    wanted = {
        name.removeprefix("model."): weight.float() for name, weight in theirs.state_dict().items()
    }
    assert all(torch.equal(weight, wanted[name]) for name, weight in model.named_parameters())


def test_links_are_followed(llama, tmp_path):
    """The hub's cache is a folder of links."""
    c, folder = llama
    (tmp_path / "links").mkdir()
    for path in folder.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    one, other = build(c, CPU), build(dataclasses.replace(c, seed=9), CPU)
    hf_import.load(folder, one)
    hf_import.check(tmp_path / "links", c)
    hf_import.load(tmp_path / "links", other)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_keys_of_older_and_of_sparing_config_files_are_understood(
    llama,
):
    c, folder = llama
    absent = dict.fromkeys(("rope_parameters", "rope_scaling", "head_dim", "mlp_bias"))
    change(folder, **absent, rope_theta=10000)
    hf_import.check(folder, c)
    change(folder, rope_theta=None)  # 10000
    hf_import.check(folder, c)
    assert "has ROPE_THETA=10000. Leave" in problems(folder, c.replace(rope_theta=5e5))[0]
    change(folder, rope_theta=1e6, rope_scaling={"type": "default"}, rms_norm_eps=None)
    hf_import.check(folder, c.replace(rope_theta=1e6))
    assert hf_import.read_norm_eps(folder) == 1e-6


def test_what_old_files_hold_besides_is_passed_over(llama):
    """Angles, which follow from the settings, and the tied table a second time, as transformers does."""
    c, folder = llama
    change_weights(
        folder,
        {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            "lm_head.weight": torch.zeros(c.vocab_size, c.n_embd),
        },
    )
    hf_import.check(folder, c)
    model = build(c, CPU)
    hf_import.load(folder, model)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model.embed_tokens.weight.any()  # not the zeros of lm_head


def test_hashes_are_those_of_the_files(llama):
    _, folder = llama
    assert hf_import.hashes(folder) == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors")
    }


# ---- What does not fit


def test_all_differences_are_said_at_once_with_the_value_to_set(tiny, tmp_path):
    published(tmp_path, recipe(tiny, **QWEN))
    ours = recipe(tiny, n_layer=3, n_head=2, n_embd=32, vocab_size=640, mlp_dim=100)
    found = " ".join(problems(tmp_path, ours))
    sets = dict(re.findall(r" has ([A-Z_]+)=(\S+)\. Leave", found))
    assert len(sets) == 8
    assert f"N_LAYER=3: INIT_FROM={tmp_path} has N_LAYER=2. Leave N_LAYER out, or choose" in found
    parsed = {name.lower(): SETTINGS[name].parse(v) for name, v in sets.items()}
    hf_import.check(tmp_path, dataclasses.replace(ours, **parsed))


ROPE = "rope_parameters"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, "model_type=mistral. It must be llama or qwen3"),
        ({"model_type": ["llama"]}, "llama or qwen3"),
        ({"attention_bias": True}, "attention_bias=true, .* no biases"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu, .* SwiGLU"),
        ({"head_dim": 32}, "head_dim=32, .* its heads are 16 wide"),
        ({"head_dim": {}}, "head_dim={}"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim=128"),
        ({ROPE: {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type=llama3"),
        ({ROPE: {"full_attention": {"rope_type": "default"}}}, "rope_type={"),
        ({ROPE: "linear"}, "rope_type=linear"),
        ({ROPE: None, "rope_scaling": {"type": "linear", "factor": 2}}, "type=linear"),
        ({ROPE: {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
        ({"use_sliding_window": True}, "use_sliding_window=true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*sliding"),
        ({"layer_types": 3}, "layer_types=3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"vocab_size": True}, r"VOCAB_SIZE=1 \(config.json\): Must be"),
        ({"num_hidden_layers": 10**9}, "N_LAYER=1000000000 .* from 1 to 1024"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps=NaN.* above 0 and at most 0\.1"),
    ],
    ids=str,
)
def test_what_this_model_does_not_compute_is_refused(llama, changes, words):
    c, folder = llama
    change(folder, **changes)
    found = [problem for problem in problems(folder, c) if "Leave QK_NORM" not in problem]
    assert all(problem.startswith(f"INIT_FROM={folder}: ") for problem in found)
    assert re.search(words, " ".join(found).replace('"', ""))


def test_names_shapes_and_types_must_be_those_of_the_model(llama):
    c, folder = llama
    change_weights(
        folder,
        {
            "model.norm.weight": None,
            "model.layers.1.mlp.up_proj.weight": torch.zeros(3, 4),
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
            "model.layers.0.mlp.up_proj.weight": torch.zeros(192, 64, dtype=torch.int64),
        },
    )
    assert problems(folder, c) == [
        f"INIT_FROM={folder}: {text}"
        for text in (
            "The files lack model.norm.weight.",
            "The files hold what no such model has: model.layers.0.self_attn.q_proj.bias.",
            "By its own config.json, this is wrong: "
            "model.layers.1.mlp.up_proj.weight is [3, 4] and not [192, 64].",
            "Of the types that are read (F64, F32, BF16, F16), these are not: "
            "model.layers.0.mlp.up_proj.weight in model.safetensors is I64.",
        )
    ]
    assert "has N_LAYER=2" in problems(folder, c.replace(n_layer=3))[0]  # together with these


def test_a_folder_that_changed_since_it_was_checked_is_noticed(llama):
    c, folder = llama
    with pytest.raises(ForeignError, match=r"no model.embed_tokens.weight of shape \[512, 32\]"):
        hf_import.load(folder, build(recipe(c, n_embd=32, **LLAMA), CPU))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(llama, value):
    c, folder = llama
    name = "model.layers.1.mlp.gate_proj.weight"
    change_weights(folder, {name: torch.full((192, 64), value)})
    hf_import.check(folder, c)
    with pytest.raises(ForeignError, match=rf"model\.safetensors: {name} holds"):
        hf_import.load(folder, build(c, CPU))


# ---- Split over processes


class Counted:
    """A file, or a tensor in it, of which the elements that are read are counted."""

    read = 0

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def get_slice(self, name):
        return Counted(self.inner.get_slice(name))

    def __getitem__(self, rows):
        values = self.inner[rows]
        Counted.read += values.numel()
        return values


def split(rank, size, folder, damaged, c):
    """Load into a model of FSDP2 and compare with a whole one; then a file that is bad in one rank's rows."""
    from torch.distributed.fsdp import fully_shard

    as_rank(rank, size)
    whole, model = build(c, CPU), build(c.replace(seed=9), CPU)
    hf_import.load(folder, whole)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(ForeignError, match="holds values that are infinite"):  # on both
        hf_import.load(damaged, model)
    open_file = hf_import.open_file
    hf_import.open_file = lambda path: Counted(open_file(path))
    hf_import.load(folder, model)
    for name, weight in model.named_parameters():
        rows = c.vocab_size if name in hf_import.OF_ENTRIES else None
        assert torch.equal(weight.full_tensor()[:rows], whole.get_parameter(name)[:rows]), name
    torch.testing.assert_close(logits(model, c), logits(whole, c), rtol=1e-5, atol=1e-5)
    elements = sum(weight.numel() for weight in whole.parameters())
    assert Counted.read < 0.6 * elements  # each its own rows
    # A split model samples with a cache as a whole one does, also where a text outgrows SEQ_LEN=32.
    words: Any = SimpleNamespace(size=c.vocab_size, end_of_text=-1)
    texts = [
        list(generate(one, [[1, 2, 3], [4]], 40, Choice(0), [1, 2], words))
        for one in (whole, model)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 40
    Path(folder, f"done-{rank}").touch()
    os._exit(0)  # the group would hang on to the model


def test_two_processes_of_fsdp_have_what_one_has(tiny, tmp_path, free_port, monkeypatch):
    monkeypatch.setenv("TEST_PORT", str(free_port))
    c = recipe(tiny, **QWEN, vocab_size=501, mlp_dim=101, device="cpu")  # odd: unequal parts
    published(tmp_path, c)
    bad = shutil.copytree(tmp_path, tmp_path / "bad")
    table = torch.ones(c.vocab_size, c.n_embd)
    table[-1, -1] = float("inf")
    change_weights(bad, {"model.embed_tokens.weight": table})
    run_ranks(split, (2, str(tmp_path), str(bad), c), 2)
    assert len(list(tmp_path.glob("done-*"))) == 2


def test_names_of_tensors_reach_no_terminal_raw():
    assert hf_import.some(["\x1b[2J", "a"]) == r"\x1b[2J, a"
