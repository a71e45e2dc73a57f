"""What a preset says of itself at its top is what the code builds from it."""

import functools
import re

import pytest
import torch

from hardware.flops import flops_per_token
from plan.fleet import fleet_of
from plan.run import pretraining_memory
from plan.speed import slowest_card
from settings import ROOT, load_config, load_preset
from train.model.model import Transformer, matmul_weights

# Preset -> its cards, and the peak of one of them by its data sheet, in bfloat16.
PRESETS = {
    "tiny": None,
    "gpt2-124m": ("1xrtx4090", 165.2),
    "d16-2xh100": ("2xh100-sxm", 989),
    "d20-2xh100": ("2xh100-sxm", 989),
    "d24-2xh100": ("2xh100-sxm", 989),
    "d32-8xh100": ("8xh100-sxm", 989),
    "xlarge-8xa100": ("8xa100-80gb-sxm", 312),
}


def read_preset(name):
    return (ROOT / "presets" / f"{name}.env").read_text()


def test_tiny_is_the_recipe_whose_figures_readme_and_decision_give():
    c = load_preset(DEVICE="cpu")
    recipe = (c.optimizer, c.qk_norm, c.learning_rate, c.min_learning_rate, c.seed)
    assert recipe == ("muon", True, 1e-2, 0, 1337)
    assert (c.train_tokens, c.batch_tokens, c.save_minutes) == (4_000_000, 4096, 1)
    assert "\nDTYPE=auto\n" in read_preset("tiny") and c.compile == "auto"
    decision = " ".join((ROOT / "docs/decisions/0031-first-run.md").read_text().split())
    assert (
        "The preset takes 4M tokens in batches of 4,096, with Muon, QK norm and a learning rate of "
        "1e-2 that ends at 0." in decision
    )
    readme = (ROOT / "README.md").read_text()
    assert "a first model of Python code, 4M tokens" in readme
    assert "3.3 million parameters" in readme
    measured = re.search(r"seeds 1337, 2 and 3 reached ([\d.]+)", decision)
    said = re.search(r"needs ([\d.]+) bits per byte \(seed 1337\)", readme)
    assert measured and said and f"{float(measured[1]):.2f}" == said[1]


@pytest.fixture
def load(tmp_path):
    (tmp_path / "empty.env").touch()

    def loaded(name, **settings):
        return load_config({"PRESET": name, "ENV_FILE": str(tmp_path / "empty.env")} | settings)

    return loaded


def count_parameters(c):
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(c).parameters())


def test_each_preset_of_pretraining_is_tested_here():
    texts = {path.stem: path.read_text() for path in (ROOT / "presets").glob("*.env")}
    names = {name for name, text in texts.items() if not text.startswith("# Fine-tuning")}
    assert names == PRESETS.keys()
    assert not [name for name in names if "TARGET_" in texts[name]]


@pytest.mark.parametrize("name", PRESETS)
def test_the_arithmetic_at_the_top_of_a_preset_is_right(load, name):
    c, text = load(name), read_preset(name)
    with torch.device("meta"):
        flops = flops_per_token(matmul_weights(Transformer(c)), c.n_layer, c.n_embd, c.seq_len)
    # Lines of the form '#   name   number   remark'.
    rows = re.findall(r"^#   (\S+)\s+([0-9][0-9,.e+]*)", text, re.MULTILINE)
    stated = {key: float(number.replace(",", "")) for key, number in rows}
    assert stated["parameters"] == count_parameters(c)
    assert stated["tokens"] == c.train_tokens
    assert stated["steps"] == c.last_step
    assert stated["FLOPs/token"] == flops
    assert stated["FLOPs"] == pytest.approx(flops * c.train_tokens, rel=0.005)
    percent, tflops = re.search(r"at ([0-9.]+)% MFU of .*\(([0-9.]+) TFLOP/s\)", text).groups()
    seconds = stated["FLOPs"] / (float(percent) / 100 * float(tflops) * 1e12)
    assert stated["hours"] == pytest.approx(seconds / 3600, rel=0.025)
    # A token that is scored takes a third of the time of one that is trained on.
    assert 0 < c.eval_tokens / (3 * c.eval_every * c.batch_tokens) < 0.015
    if not PRESETS[name]:
        assert not c.cards
        return
    cards, peak = PRESETS[name]
    fleet = fleet_of(c)
    card = slowest_card(c, fleet)
    assert (c.cards, f"{fleet.processes}x{card.key}") == (cards, cards)
    assert card.peak(c.dtype) == peak
    assert float(tflops) == pytest.approx(fleet.processes * peak)
    need = pretraining_memory(c, fleet.processes, fleet.processes_of_a_node, on_cpu=False).total
    assert stated["memory"] == pytest.approx(need / 2**30, abs=0.6)
    load(name, NPROC=str(fleet.processes))  # which divides the batch


def test_xlarge_is_the_labs_recipe(load):
    c = load("xlarge-8xa100")
    parameters = count_parameters(c)
    assert parameters == pytest.approx(1.336e9, rel=5e-4)
    assert parameters + 50_304 * 2048 == pytest.approx(1.44e9, rel=5e-3)  # untied
    recipe = {
        "n_layer": 24,
        "n_embd": 2048,
        "n_head": 16,
        "vocab_size": 50_304,
        "seq_len": 2048,
        "train_tokens": 100 * 10**9,
        "last_step": 190_735,
        "batch_tokens": 524_288,
        "micro_batch_size": 8,
        "optimizer": "adamw",
        "learning_rate": 3e-4,
        "min_learning_rate": 3e-5,
        "lr_schedule": "cosine",
        "warmup_tokens": 100_000_000,
        "weight_decay": 0.1,
        "grad_clip": 1.0,
        "dtype": "bfloat16",
        "save_every": 1000,
        "log_every": 10,
        "mixture": {"fineweb-edu": 65, "finepdfs": 34, "usmle": 1},
    }
    assert {name: getattr(c, name) for name in recipe} == recipe


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("d")])
def test_a_depth_fixes_the_rest(load, name):
    c, depth = load(name), int(name[1:3])
    counted = count_parameters(c)
    assert (c.n_layer, c.n_embd, c.head_dim) == (depth, 64 * depth, 128)
    assert (c.vocab_size, c.tie_embeddings) == (65_536, False)
    # Attention has 4 d^2 weights and SwiGLU 8 d^2; the embedding and the head have V d each.
    assert 3 * c.mlp_dim * c.n_embd == pytest.approx(8 * c.n_embd**2, rel=0.02)
    expected = 12 * depth * c.n_embd**2 + 2 * c.vocab_size * c.n_embd
    assert counted == pytest.approx(expected, rel=0.02)
    assert c.train_tokens == pytest.approx(20 * counted, rel=0.005)
    assert (c.batch_tokens, c.seq_len, c.micro_batch_size, c.save_every) == (524_288, 2048, 8, 3000)
    assert c.optimizer == "muon"
    assert c.mixture == {"fineweb-edu": 1}


def test_a_preset_as_it_stands_takes_nothing_from_a_user(tmp_path, monkeypatch):
    load_here = functools.partial(load_config, root=tmp_path)
    monkeypatch.setattr("settings.resolve.load_config", load_here)
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "tiny.env").write_text("SEED=2\n")
    (tmp_path / ".env").write_text("SEED=3\nN_LAYER=7\n")
    monkeypatch.setenv("SEED", "4")
    c = load_preset(PRESET="tiny", N_HEAD="2")
    assert (c.seed, c.n_layer, c.n_head) == (2, 4, 2)


def test_the_first_run_is_the_one_that_was_measured() -> None:
    """docs/decisions/0031-first-run.md and the README have its figures: change them together."""
    config = load_preset(PRESET="tiny").values()
    measured = {
        "OPTIMIZER": "muon",
        "LEARNING_RATE": 1e-2,
        "MIN_LEARNING_RATE": 0,
        "TRAIN_TOKENS": 4_000_000,
        "BATCH_TOKENS": 4096,
        "SEQ_LEN": 128,
        "QK_NORM": True,
        "DATA_MIX": "python:1",
        "SEED": 1337,
    }
    assert {name: config[name] for name in measured} == measured
