"""The plan's arithmetic, against the model itself, the presets' own and hand-made numbers."""

import dataclasses
import json
from pathlib import Path

import pytest

from hardware.gpu_specs import find_gpu, load_gpu_specs
from k8s import launch_plan
from k8s.cluster import nodes as sites
from k8s.cluster import placement
from k8s.cluster.job_spec import cluster_config
from k8s.cluster.kubectl import Done
from k8s.cluster.nodes import Node
from plan import storage
from plan.planner import Plan
from settings import ROOT
from settings.config import Config
from tests.k8s.user import A100

PRESETS = sorted(
    path.stem
    for path in (ROOT / "presets").glob("*.env")
    if not path.read_text().startswith("# Fine-tuning")
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return configured(tmp_path)


def configured(folder: Path, **settings: str) -> Config:
    (folder / "empty.env").touch()
    return cluster_config({"ENV_FILE": str(folder / "empty.env"), "IMAGE": "x:1", **settings})[0]


def plan_of(config: Config) -> Plan:
    found = launch_plan.plan(config)
    assert found
    return found


def test_the_lab_s_run_costs_what_its_preset_says(tmp_path: Path) -> None:
    """On one node; evaluations are beside that, 190 of 4.2M tokens and at most 20 more, at a third of a step's work."""
    p = plan_of(configured(tmp_path, NODES="1", GPUS_PER_NODE="8"))
    assert p.time
    training_hours = p.time.training_seconds / 3600
    assert training_hours == pytest.approx(205.3, abs=0.05)  # of presets/xlarge-8xa100.env
    assert p.time.waiting_seconds == 0
    evaluating = (190 + 20) * 4_194_304 / 3 / 135_287
    assert p.time.evaluating_seconds == pytest.approx(evaluating, rel=1e-3)
    assert p.pace.step_s == pytest.approx(9_224_847_360 * 524_288 / (0.5 * 8 * 312e12))


def test_twice_the_gpus_take_half_the_time_of_computing(tmp_path: Path) -> None:
    one, two = (plan_of(configured(tmp_path, NODES=nodes)).time for nodes in ("2", "4"))
    assert one and two and one.training_seconds == pytest.approx(2 * two.training_seconds)


def test_pods_wait_for_gradients_at_one_site_and_more_at_several(
    config: Config, tmp_path: Path
) -> None:
    """A ring of 4 nodes sends 1.5 times 5.345 GB: 2.57 s at 25 Gbit/s, 64.1 s and six half round trips at 1."""
    p = plan_of(config)
    assert p.time and p.run.fleet.text == "8 x a100-80gb-sxm"
    gradients, time = 4 * 1_336_248_320, p.time
    assert time.waiting_seconds == pytest.approx(190_735 * 1.5 * gradients * 8 / 25e9)
    computing = time.training_seconds + time.evaluating_seconds
    rows = [text for name, text in launch_plan.planned(config, p) if name == "at 4 sites"]
    for text, speed in zip(rows, (10, 1), strict=True):
        wait_s = 1.5 * gradients * 8 / (speed * 1e9) + 6 * 0.015
        hours = (computing + 190_735 * wait_s) / 3600
        share = time.training_seconds / 3600 / hours
        assert text == (
            f"{hours:,.0f} h, {8 * hours:,.0f} GPU-hours with {speed} Gbit/s between them: "
            f"{100 * share:.0f}% of it computing"
        )
    for typed in ({"SITE": "ucsd"}, {"NODES": "1", "GPUS_PER_NODE": "8"}):
        kept = configured(tmp_path, **typed)
        assert " sites  " not in launch_plan.told(kept, launch_plan.plan(kept))


def test_the_traffic_of_the_data_is_told(config: Config, tmp_path: Path) -> None:
    said = launch_plan.told(config, launch_plan.plan(config))
    assert "200 GB of shards, which each pod reads from the volume: 800 GB" in said
    assert "600 GB of it cross the WAN" in said
    assert (
        "WAN"
        not in launch_plan.told(config, launch_plan.plan(configured(tmp_path, SITE="ucsd"))).split(
            "data"
        )[0]
    )
    pinned = configured(tmp_path, SITE="ucsd")
    assert "WAN" not in launch_plan.told(pinned, launch_plan.plan(pinned))


def test_the_disk_is_told_by_part(config: Config) -> None:
    p = launch_plan.plan(config)
    # 4 checkpoints of 12 bytes a parameter; DATA_CACHE_GB; downloads of three sources, one of which is small
    assert (
        "up to 124 GB on VOLUME=pure-transformer: 60 GB of shards and downloads, 64.1 GB of checkpoints, 16 GB "
        "each\n" in launch_plan.told(config, p)
    )
    every = dataclasses.replace(config, data_stream="0", save_every=0)
    assert (
        "up to 208 GB on VOLUME=pure-transformer: 208 GB of shards and downloads, no checkpoints\n"
        in launch_plan.told(every, launch_plan.plan(every))
    )


def test_a_source_of_unknown_size_is_said_to_be(config: Config, tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "papers.toml").write_text(
        'files = ["papers/*.txt"]\nvalidation_fraction = 0.1\n'
    )
    c = dataclasses.replace(config, data_dir=str(tmp_path), data_mix="papers:1")
    assert launch_plan.shards_told(c) == "shards of papers, as large as that is"


# ---- What is known of GPUs


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA-A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA-A100-80GB-PCIe", "NVIDIA A100 80GB PCIe"),
        ("NVIDIA-H100-80GB-HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA-GeForce-RTX-3090", "NVIDIA GeForce RTX 3090"),
        ("Tesla-V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", ""),
        ("Tesla-V100", ""),
    ],
)
def test_a_label_is_read_as_the_gpu_s_name(product: str, name: str) -> None:
    assert launch_plan.card_of_product(product) == find_gpu(name)


def test_every_gpu_of_the_table_is_found_by_its_label() -> None:
    for spec in load_gpu_specs().values():
        for name in spec.names:
            assert launch_plan.card_of_product(f"NVIDIA-{name.replace(' ', '-')}") == spec


def test_the_slowest_gpu_sets_the_pace_and_an_unknown_one_is_no_guess(tmp_path: Path) -> None:
    mixed = configured(tmp_path, GPU_PRODUCTS=f"NVIDIA-H100-80GB-HBM3,{A100}")
    fleet = launch_plan.fleet_of(mixed)
    assert fleet and fleet.text == "8 x a100-80gb-sxm"
    unknown = configured(tmp_path, GPU_PRODUCTS=f"{A100},Tesla-V100")
    p = launch_plan.plan(unknown)
    assert p is None
    assert f"n/a: GPU_PRODUCTS={A100},Tesla-V100 has one that is not known" in launch_plan.told(
        unknown, p
    )


def test_of_a_gpu_without_bfloat16_that_is_said(tmp_path: Path) -> None:
    products = f"{A100},Tesla-V100-SXM2-32GB"
    c = configured(tmp_path, GPU_PRODUCTS=products)
    p = launch_plan.plan(c)
    assert p and (p.pace.step_s, p.time) == (None, None)
    assert "n/a: v100-32gb-sxm has no bfloat16 units; set DTYPE=float32" in launch_plan.told(c, p)
    assert "bf16" in [finding.name for finding in launch_plan.findings(c, p, None)]
    # 15.7 TFLOP/s in float32 against the A100's 19.5, at 40% as nothing is known of it
    single = plan_of(configured(tmp_path, GPU_PRODUCTS=products, DTYPE="float32"))
    assert single.speed.step_seconds_computing == pytest.approx(
        9_224_847_360 * 524_288 / (0.4 * 8 * 15.7e12)
    )


def test_a_run_on_cpus_has_no_hours(tmp_path: Path) -> None:
    c = configured(
        tmp_path, PRESET="tiny", DEVICE="cpu", NODES="2", GPUS_PER_NODE="1", BATCH_TOKENS="2048"
    )
    p = launch_plan.plan(c)
    said = launch_plan.told(c, p)
    assert "n/a: DEVICE=cpu" in said and "2 pods of 1 process on CPU" in said
    assert (
        "5.34 MB of shards and downloads, " in said
    )  # 95% of 2.81M tokens of the standard library
    assert launch_plan.findings(c, p, None) == []


# ---- What cannot be


def test_a_target_beyond_the_chips_is_refused_with_what_would_do(tmp_path: Path) -> None:
    """Two days for 100 billion tokens need 2.15 times the peak of eight A100: 205.9 hours x 50% / 48."""
    c = configured(tmp_path, NODES="1", GPUS_PER_NODE="8", TARGET_HOURS="48")
    (found,) = launch_plan.findings(c, launch_plan.plan(c), None)
    assert (found.name, found.level) == ("target-hours", "FAIL")
    assert "needs 215% MFU" in found.text and "TRAIN_TOKENS=" in found.fix


def test_a_volume_that_would_fill_is_refused_with_the_size_that_would_do(config: Config) -> None:
    p = launch_plan.plan(dataclasses.replace(config, volume_gb=100))
    (found,) = launch_plan.findings(dataclasses.replace(config, volume_gb=100), p, None)
    assert found.name == "disk" and "needs up to 124 GB and the volume has 107 GB" in found.text
    needs = launch_plan.disk_bytes(config, p)
    assert f"set VOLUME_GB={-(-needs // 2**30):.0f}" in found.fix
    assert launch_plan.findings(config, p, None) == [] and launch_plan.findings(config, p, 1e9)[
        0
    ].fix.startswith("choose another")


# ---- Sites that differ


def placed(*nodes: str) -> placement.Placed:
    return placement.Placed(
        [placement.Pod(i, f"p{i}", "Running", node) for i, node in enumerate(nodes)], len(nodes)
    )


def node(name: str, zone: str, gpus: int = 8) -> Node:
    return Node(name, True, False, zone, "", A100, gpus)


def test_the_site_where_most_pods_are_is_proposed(config: Config) -> None:
    nodes = [node("a", "ksu"), node("b", "ucsd"), node("c", "ucsd")]
    said = placement.across_sites(placed("a", "b", "c", "b"), nodes, config, plan_of(config))
    assert "`make restart SITE=ucsd`" in said and "2 sites (ksu, ucsd)" in said
    assert "5.34 GB leave each site" in said  # 2 (S - 1) / S of 5.345 GB, S = 2
    step_s = 9_224_847_360 * 524_288 / (0.5 * 8 * 312e12)
    for gbit in (1, 10):
        # Two nodes of each site over LAN_GBIT=25, then two sites with two half round trips.
        wait_s = 4 * 1_336_248_320 * 8 * (1 / 25e9 + 1 / (gbit * 1e9)) + 2 * 0.015
        assert f"{100 * step_s / (step_s + wait_s):.0f}% at {gbit} Gbit/s" in said


def test_where_no_site_has_room_another_shape_is_proposed(config: Config) -> None:
    nodes = [node(name, zone, gpus=4) for name, zone in (("a", "ksu"), ("b", "ucsd"))]
    said = placement.across_sites(placed("a", "a", "b", "b"), nodes, config, None)
    assert "No site has room for 4 such pods" in said and "GPUS_PER_NODE=..." in said
    assert "neither is how much of the time that leaves" in said


def test_one_site_or_unknown_ones_are_not_remarked_on(config: Config) -> None:
    assert (
        placement.across_sites(placed("a", "b"), [node("a", "ksu"), node("b", "ksu")], config, None)
        == ""
    )
    assert placement.across_sites(placed("a", "b"), None, config, None) == ""


def test_a_site_is_refused_where_it_cannot_hold_the_shape(tmp_path: Path) -> None:
    c = configured(tmp_path, SITE="ksu")
    nodes = [node("a", "ksu", gpus=4), node("b", "ucsd", gpus=8)]
    (problem,) = sites.problems(nodes, c)
    assert "could hold 2 such pods at most" in problem and "another site (SITE=ucsd)" in problem
    assert sites.problems([*nodes, node("c", "ksu", gpus=4)], c) == []


def test_the_newest_warning_is_told_wherever_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {
            "metadata": {},
            "involvedObject": {"name": "job"},
            "message": message,
            "lastTimestamp": stamp,
        }
        for message, stamp in (
            ("older", "2026-01-01T00:00:01Z"),
            ("the newest", "2026-01-01T00:00:09Z"),
            ("oldest", "2026-01-01T00:00:00Z"),
        )
    ]
    monkeypatch.setattr(placement, "kubectl", lambda *_: Done(0, json.dumps({"items": events}), ""))
    assert placement.warnings(placement.Placed([], 1), "job", "lab") == "the newest"


def test_sites_are_planned_over_the_wan_and_each_keeps_its_checkpoints(tmp_path: Path) -> None:
    ddp, sites_ = (
        configured(tmp_path, **more) for more in ({"PARALLEL": "fsdp"}, {"SYNC": "diloco"})
    )
    several = launch_plan.plan(sites_)
    fleet = plan_of(sites_).run.fleet
    assert (fleet.processes, fleet.nodes, fleet.sites) == (8, 4, 4)
    assert plan_of(ddp).run.fleet.sites == 1
    whole = launch_plan.disk_bytes(sites_, several)
    kept = whole - storage.disk_of_shards(sites_) - storage.disk_of_downloads(sites_)
    assert kept == 4 * storage.disk_of_checkpoints(sites_) > 0
    said = launch_plan.told(sites_, several)
    assert "SYNC=diloco" in said and "of checkpoints of 4 sites, " in said
    assert "with WAN_GBIT=1 between sites" in said and "LAN_GBIT" not in said
