"""What a preset says of itself at its top is what the code builds from it."""

import re

import pytest
import torch

from hardware.flops import flops_per_token
from plan.fleet import fleet_of
from plan.memory import memory
from settings import ROOT
from settings.config import Config
from train.model.model import Transformer, matmul_weights

PRESETS = sorted(
    path
    for path in (ROOT / "presets").glob("*.env")
    if not path.read_text().startswith("# Fine-tuning")
)


def header(path):
    """Name -> number, of the lines '#   name   number   remark' at the top."""
    found = re.findall(r"^#   (\S+)\s+([0-9][0-9,.e+]*)", path.read_text(), re.MULTILINE)
    return {name: number.replace(",", "") for name, number in found}


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_the_arithmetic_at_the_top_of_a_preset_is_right(path, tmp_path):
    (tmp_path / "empty.env").touch()
    c = Config.load({"PRESET": path.stem, "ENV_FILE": str(tmp_path / "empty.env")})
    with torch.device("meta"):
        model = Transformer(c)
    said, flops = (
        header(path),
        flops_per_token(matmul_weights(model), c.n_layer, c.n_embd, c.seq_len),
    )
    assert int(said["parameters"]) == sum(w.numel() for w in model.parameters())
    assert int(said["tokens"]) == c.train_tokens
    assert int(said["steps"]) == c.last_step
    assert int(said["FLOPs/token"]) == flops
    assert float(said["FLOPs"]) == pytest.approx(flops * c.train_tokens, rel=0.005)
    rate = re.search(
        r"hours +([0-9.]+) +at ([0-9.]+)% MFU of .*\(([0-9.]+) TFLOP/s\)", path.read_text()
    )
    assert rate, "a preset says its hours at a stated MFU"
    hours = flops * c.train_tokens / (float(rate[2]) / 100 * float(rate[3]) * 1e12) / 3600
    assert float(rate[1]) == pytest.approx(hours, rel=0.02)
    if c.cards:
        fleet = fleet_of(c)
        need = memory(c, fleet.processes, fleet.processes_of_a_node, on_cpu=False).total
        assert float(said["memory"]) == pytest.approx(need / 2**30, abs=0.6)


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_evaluations_take_less_than_two_per_cent_of_the_time(path, tmp_path):
    c, _ = load(
        path.stem, tmp_path
    )  # a token scored is a third of one trained on: forward without backward
    assert 0 < c.eval_tokens / (3 * c.eval_every * c.batch_tokens) < 0.015


@pytest.mark.parametrize(
    ("name", "cards", "tflops"),
    [  # the peak of one, of its data sheet
        ("gpt2-124m", "1xrtx4090", 165.2),
        ("d16-2xh100", "2xh100-sxm", 989),
        ("d20-2xh100", "2xh100-sxm", 989),
        ("d24-2xh100", "2xh100-sxm", 989),
        ("d32-8xh100", "8xh100-sxm", 989),
        ("xlarge-8xa100", "8xa100-80gb-sxm", 312),
    ],
)
def test_a_preset_is_planned_on_the_cards_of_its_header(name, cards, tflops, tmp_path):
    c, _ = load(name, tmp_path)
    fleet = fleet_of(c)
    assert (c.cards, f"{fleet.processes}x{fleet.slowest(c.dtype).key}") == (cards, cards)
    said = re.search(
        r"hours .* MFU of .*\(([0-9.]+) TFLOP/s\)", (ROOT / "presets" / f"{name}.env").read_text()
    )
    assert said and float(said[1]) == pytest.approx(fleet.processes * tflops)
    assert fleet.slowest(c.dtype).peak(c.dtype) == tflops


def test_only_the_preset_for_a_cpu_names_no_cards(tmp_path):
    assert [path.stem for path in PRESETS if not load(path.stem, tmp_path)[0].cards] == ["tiny"]


def test_there_are_the_presets_that_the_readme_names():
    assert {path.stem for path in PRESETS} == {
        "tiny",
        "gpt2-124m",
        "xlarge-8xa100",
        "d16-2xh100",
        "d20-2xh100",
        "d24-2xh100",
        "d32-8xh100",
    }


def load(name, tmp_path):
    (tmp_path / "empty.env").touch()
    c = Config.load({"PRESET": name, "ENV_FILE": str(tmp_path / "empty.env")})
    with torch.device("meta"):
        return c, Transformer(c)


def test_xlarge_is_the_labs_recipe(tmp_path):
    c, model = load("xlarge-8xa100", tmp_path)
    assert sum(w.numel() for w in model.parameters()) == pytest.approx(1.336e9, rel=5e-4)
    assert sum(w.numel() for w in model.parameters()) + 50_304 * 2048 == pytest.approx(
        1.44e9, rel=5e-3
    )  # untied
    assert (c.n_layer, c.n_embd, c.n_head, c.vocab_size, c.seq_len) == (24, 2048, 16, 50_304, 2048)
    assert (c.train_tokens, c.last_step, c.batch_tokens, c.micro_batch_size) == (
        100 * 10**9,
        190_735,
        524_288,
        8,
    )
    assert (c.optimizer, c.learning_rate, c.min_learning_rate, c.lr_schedule) == (
        "adamw",
        3e-4,
        3e-5,
        "cosine",
    )
    assert (c.warmup_tokens, c.weight_decay, c.grad_clip, c.dtype) == (
        100_000_000,
        0.1,
        1.0,
        "bfloat16",
    )
    assert (c.save_every, c.log_every) == (1000, 10)
    assert c.mixture == {"fineweb-edu": 65, "finepdfs": 34, "usmle": 1}


@pytest.mark.parametrize(
    ("name", "depth", "parameters", "steps"),
    [
        ("d16-2xh100", 16, 338e6, 12_800),
        ("d20-2xh100", 20, None, None),
        ("d24-2xh100", 24, 880_803_840, 33_600),
        ("d32-8xh100", 32, None, None),
    ],
)
def test_a_depth_fixes_the_rest(tmp_path, name, depth, parameters, steps):
    c, model = load(name, tmp_path)
    counted = sum(w.numel() for w in model.parameters())
    assert (c.n_layer, c.n_embd, c.head_dim, c.vocab_size, c.tie_embeddings) == (
        depth,
        64 * depth,
        128,
        65_536,
        False,
    )
    mlp = sum(w.numel() for n, w in model.named_parameters() if ".mlp." in n) / depth
    assert mlp == pytest.approx(8 * c.n_embd**2, rel=0.02)
    assert c.train_tokens == pytest.approx(20 * counted, rel=0.005)
    assert (c.batch_tokens, c.seq_len, c.micro_batch_size, c.save_every) == (524_288, 2048, 8, 3000)
    assert c.optimizer == "muon" and c.mixture == {"fineweb-edu": 1}
    assert parameters is None or counted == pytest.approx(parameters, rel=0.02)
    assert steps is None or c.last_step == pytest.approx(steps, rel=0.02)


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_no_preset_sets_a_target_time(path):
    assert "TARGET_" not in path.read_text()


def test_the_processes_that_a_presets_name_promises_divide_its_batch():
    for path in PRESETS:
        if found := re.search(r"-([0-9]+)x", path.stem):
            c = Config.load({"PRESET": path.stem, "NPROC": found[1]})
            assert c.batch_windows % (int(found[1]) * c.micro_batch_size) == 0


def test_a_preset_as_it_stands_takes_nothing_from_a_user(tmp_path, monkeypatch):
    monkeypatch.setattr("settings.ROOT", tmp_path)
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "tiny.env").write_text("SEED=2\n")
    (tmp_path / ".env").write_text("SEED=3\nN_LAYER=7\n")
    monkeypatch.setenv("SEED", "4")
    c = Config.of_preset(PRESET="tiny", N_HEAD="2")
    assert (c.seed, c.n_layer, c.n_head) == (2, 4, 2)
