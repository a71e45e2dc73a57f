"""The plan's arithmetic, against the model itself, the presets' own and hand-made numbers."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from k8s import placement, plan, sites
from k8s.shape import cluster_config
from k8s.kubectl import Done
from k8s.sites import Node
from tests.kube.user import A100
from train import shards, wan
from train.config import Config
from train.flops import BF16_PEAK_TFLOPS, peak_tflops
from train.model import Transformer, matmul_weights
from train.optim import build_optimizer
from train.settings import ROOT

PRESETS = sorted(path.stem for path in (ROOT / "presets").glob("*.env"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured(tmp_path)


def configured(folder: Path, **settings: str) -> Config:
    (folder / "empty.env").touch()
    return cluster_config({"ENV_FILE": str(folder / "empty.env"), "IMAGE": "x:1", **settings})[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_counted_as_the_model_has_them(preset: str) -> None:
    c = Config.load({"PRESET": preset, "ENV_FILE": ""})
    with torch.device("meta"):
        model = Transformer(c)
    assert wan.weights(c) == (sum(w.numel() for w in model.parameters()), matmul_weights(model))


def test_the_lab_s_run_costs_what_its_preset_says(config: Config) -> None:
    p = plan.plan(config)
    assert p.hours == pytest.approx(205.3, abs=0.05)  # of presets/xlarge-8xa100.env
    assert p.mfu_percent == 50 and p.gpus == 8
    assert p.step_s == pytest.approx(9_224_847_360 * 524_288 / (0.5 * 8 * 312e12))
    assert p.shard_bytes == pytest.approx(200e9, rel=1e-4)
    assert plan.disk_of_checkpoints(config) == 4 * 12 * 1_336_248_320
    assert plan.disk_of_shards(config) == 50e9 + 3 * 5e9  # DATA_CACHE_GB, and what is being downloaded of three sources


def test_twice_the_gpus_take_half_the_time(tmp_path: Path) -> None:
    one, two = (plan.plan(configured(tmp_path, NODES=nodes)) for nodes in ("2", "4"))
    assert one.hours == pytest.approx(2 * (two.hours or 0)) and two.gpus == 2 * one.gpus


def test_sites_of_their_own_wait_for_gradients(config: Config, tmp_path: Path) -> None:
    p = plan.plan(config)
    assert p.step_s
    for speed, share in p.at_sites.items():
        wait_s = 2 * 3 / 4 * 4 * p.parameters * 8 / (speed * 1e9) + 6 * 0.015
        assert share == pytest.approx(p.step_s / (p.step_s + wait_s))
    assert sorted(p.at_sites) == [1.0, 10.0]
    assert plan.plan(configured(tmp_path, SITE="ucsd")).at_sites == {}
    assert plan.plan(configured(tmp_path, NODES="1", GPUS_PER_NODE="8")).at_sites == {}


def test_the_traffic_of_the_data_is_told(config: Config, tmp_path: Path) -> None:
    said = plan.told(config, plan.plan(config))
    assert "200 GB of shards, which each pod reads from the volume: 800 GB" in said
    assert "600 GB of it cross the WAN, 6.49 Mbit/s on average" in said  # 600e9 * 8 / (205.3 * 3600) bit/s
    assert "WAN" not in plan.told(config, plan.plan(configured(tmp_path, SITE="ucsd"))).split("data")[0]
    pinned = configured(tmp_path, SITE="ucsd")
    assert "WAN" not in plan.told(pinned, plan.plan(pinned))


def test_shards_that_are_all_made_before_take_their_whole_size(config: Config) -> None:
    assert plan.disk_of_shards(dataclasses.replace(config, data_stream="0")) == 200e9 + 15e9
    small = dataclasses.replace(config, train_tokens=10**9)
    assert plan.disk_of_shards(small) == 2e9 + 15e9  # never more than there is


@pytest.mark.parametrize("vocab_size", [300, 2**16, 2**16 + 1])
def test_a_token_takes_the_bytes_that_shards_give_it(config: Config, vocab_size: int) -> None:
    assert plan.token_bytes(dataclasses.replace(config, vocab_size=vocab_size)) == shards.token_bytes(vocab_size)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_takes_weights_and_moments(tiny: Config, optimizer: str) -> None:
    c = dataclasses.replace(tiny, optimizer=optimizer).derived()
    model = Transformer(c)
    stepped = build_optimizer(model, c)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    stepped.step()
    held = [state for part in getattr(stepped, "parts", [stepped]) for one in part.state.values()
            for state in one.values() if torch.is_tensor(state) and state.ndim]
    tensors = [*model.parameters(), *held]
    parameters = sum(w.numel() for w in model.parameters())
    assert plan.checkpoint_bytes(c, parameters) == sum(t.numel() * t.element_size() for t in tensors)


def test_kept_checkpoints_are_counted(config: Config) -> None:
    every = dataclasses.replace(config, keep_every=10_000)
    one = 12 * 1_336_248_320
    assert plan.disk_of_checkpoints(every) - plan.disk_of_checkpoints(config) == 19 * one  # of 190,735 steps
    assert plan.disk_of_checkpoints(dataclasses.replace(config, checkpoints="off")) == 0


# ---- What is known of GPUs

@pytest.mark.parametrize(("product", "name"), [
    ("NVIDIA-A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"), ("NVIDIA-A100-80GB-PCIe", "NVIDIA A100 80GB PCIe"),
    ("NVIDIA-H100-80GB-HBM3", "NVIDIA H100 80GB HBM3"), ("NVIDIA-GeForce-RTX-3090", "NVIDIA GeForce RTX 3090"),
    ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", ""), ("Tesla-V100", "")])
def test_a_label_is_read_as_the_gpu_s_name(product: str, name: str) -> None:
    assert plan.device_of(product) == name
    assert bool(name) == bool(peak_tflops(name, "bfloat16"))


def test_every_gpu_of_the_table_is_found_by_its_label() -> None:
    plain = [names for _, names, _ in BF16_PEAK_TFLOPS if not set(names) & set("[(|")]
    assert len(plain) > 10
    for name in plain:
        assert plan.device_of(f"NVIDIA-{name.replace(' ', '-')}").removeprefix("NVIDIA ") == name


def test_the_slowest_gpu_sets_the_pace_and_an_unknown_one_is_no_guess(tmp_path: Path) -> None:
    mixed = configured(tmp_path, GPU_PRODUCTS=f"NVIDIA-H100-80GB-HBM3,{A100}")
    assert plan.slowest_device(mixed) == "NVIDIA A100-SXM4-80GB"
    unknown = configured(tmp_path, GPU_PRODUCTS=f"{A100},Tesla-V100")
    p = plan.plan(unknown)
    assert (p.step_s, p.hours, p.at_sites) == (None, None, {})
    assert "n/a: no peak is known for GPU_PRODUCTS=" in plan.told(unknown, p)


def test_a_run_on_cpus_has_no_hours(tmp_path: Path) -> None:
    c = configured(tmp_path, PRESET="tiny", DEVICE="cpu", NODES="2", GPUS_PER_NODE="1", BATCH_TOKENS="2048")
    said = plan.told(c, plan.plan(c))
    assert "n/a: no peak is known for DEVICE=cpu" in said and "2 pods of 1 process on CPU" in said
    assert "shards as large as their sources, " in said


def test_a_preset_that_states_no_mfu_is_no_guess(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "stated_mfu", lambda preset: None)
    assert "n/a: PRESET=xlarge-8xa100 states no MFU" in plan.told(config, plan.plan(config))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_states_its_mfu(preset: str) -> None:
    assert (plan.stated_mfu(preset) or 0) > 10


# ---- Sites that differ

def placed(*nodes: str) -> placement.Placed:
    return placement.Placed([placement.Pod(i, f"p{i}", "Running", node) for i, node in enumerate(nodes)], len(nodes))


def node(name: str, zone: str, gpus: int = 8) -> Node:
    return Node(name, True, False, zone, "", A100, gpus)


def test_the_site_where_most_pods_are_is_proposed(config: Config) -> None:
    nodes = [node("a", "ksu"), node("b", "ucsd"), node("c", "ucsd")]
    said = placement.across_sites(placed("a", "b", "c", "b"), nodes, config, 3.5)
    assert "`make restart SITE=ucsd`" in said and "2 sites (ksu, ucsd)" in said
    assert "5.3 GB of gradients out of each site" in said  # 2 (S - 1) / S of 5.345 GB, S = 2


def test_where_no_site_has_room_another_shape_is_proposed(config: Config) -> None:
    nodes = [node(name, zone, gpus=4) for name, zone in (("a", "ksu"), ("b", "ucsd"))]
    said = placement.across_sites(placed("a", "a", "b", "b"), nodes, config, None)
    assert "No site has room for 4 such pods" in said and "GPUS_PER_NODE=..." in said
    assert "neither is how much of the time that leaves" in said


def test_one_site_or_unknown_ones_are_not_remarked_on(config: Config) -> None:
    assert placement.across_sites(placed("a", "b"), [node("a", "ksu"), node("b", "ksu")], config, 3.5) == ""
    assert placement.across_sites(placed("a", "b"), None, config, 3.5) == ""


def test_a_site_is_refused_where_it_cannot_hold_the_shape(tmp_path: Path) -> None:
    c = configured(tmp_path, SITE="ksu")
    nodes = [node("a", "ksu", gpus=4), node("b", "ucsd", gpus=8)]
    problem, = sites.problems(nodes, c)
    assert "could hold 2 such pods at most" in problem and "another site (SITE=ucsd)" in problem
    assert sites.problems([*nodes, node("c", "ksu", gpus=4)], c) == []


def test_the_newest_warning_is_told_wherever_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{"metadata": {}, "involvedObject": {"name": "job"}, "message": message, "lastTimestamp": stamp}
              for message, stamp in (("older", "2026-01-01T00:00:01Z"), ("the newest", "2026-01-01T00:00:09Z"),
                                     ("oldest", "2026-01-01T00:00:00Z"))]
    monkeypatch.setattr(placement, "kubectl", lambda *_: Done(0, json.dumps({"items": events}), ""))
    assert placement.warnings(placement.Placed([], 1), "job", "lab") == "the newest"
