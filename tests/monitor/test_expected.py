"""monitor/expected.py: what the plan says of a run that is there, beside the same worked out by hand."""

import dataclasses
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hardware.gpu_specs import load_gpu_specs
from hardware.model_size import flops_of, parameters
from k8s.cluster.where import decide
from monitor import expected
from plan import planner
from plan.fleet import Fleet
from record.run_paths import RunPaths
from settings import ROOT, load_preset
from settings.config import Config

D16 = load_preset(PRESET="d16-2xh100")
XLARGE = load_preset(PRESET="xlarge-8xa100")
STARTED = 1_800_000_000.0


def fleet(key: str, count: int, nodes: int = 1, sites: int = 1) -> Fleet:
    card = load_gpu_specs().get(key)
    assert card
    return Fleet(((count, card),), count, nodes, sites)


def test_two_h100_as_the_preset_states_it() -> None:
    found = expected.expected(D16, fleet("h100-sxm", 2), STARTED)
    # 43.8% of 2 x 989.4 TFLOP/s over the FLOPs of a token
    tokens_per_s = 0.438 * 2 * 989.4e12 / flops_of(D16)
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=1e-3) and found.mfu_percent == 43.8
    assert found.step_s == pytest.approx(D16.batch_tokens / tokens_per_s, rel=1e-3)
    # DDP: weights, gradients and moments whole on each process; this preset takes AdamW or Muon
    muon = parameters(D16).hidden if D16.optimizer == "muon" else 0
    assert found.needs_gib == pytest.approx((16 * parameters(D16).total - 4 * muon) / 2**30)
    assert found.memory_gib is not None and found.needs_gib and found.memory_gib > found.needs_gib
    assert found.bytes_per_step is None and found.link_bytes_per_s is None  # of one node
    assert found.save_every_s == 60 * D16.save_minutes
    plan = planner.make_plan(D16, fleet("h100-sxm", 2), datetime.datetime.now(), places=())
    assert plan.time and found.end == pytest.approx(STARTED + plan.time.total_seconds)
    assert found.end - STARTED > D16.last_step * found.step_s


def test_four_nodes_send_their_gradients_through_a_link() -> None:
    c = dataclasses.replace(XLARGE, nodes=4, parallel="ddp", lan_gbit=25.0, wan_gbit=1.0)
    found = expected.expected(c, fleet("a100-80gb-sxm", 8, 4), STARTED)
    gradients = 4 * parameters(c).total
    assert found.bytes_per_step == pytest.approx(2 * 3 / 4 * gradients)  # of a ring of four
    assert found.link_bytes_per_s == 25e9 / 8
    apart = expected.expected(
        dataclasses.replace(c, sites=4), fleet("a100-80gb-sxm", 8, 4, 4), STARTED
    )
    assert (
        apart.link_bytes_per_s == 1e9 / 8
        and apart.step_s
        and found.step_s
        and apart.step_s > found.step_s
    )
    assert apart.mfu_percent and found.mfu_percent and apart.mfu_percent < found.mfu_percent


def test_split_weights_are_a_share_of_what_a_process_must_hold() -> None:
    c = dataclasses.replace(
        XLARGE, nodes=1, parallel="fsdp", optimizer="adamw", grad_sync="micro-batch"
    )
    needs_gib = expected.expected(c, fleet("a100-80gb-sxm", 8)).needs_gib
    assert needs_gib == pytest.approx(16 * parameters(c).total / 8 / 2**30)


def test_save_every_is_whatever_comes_first() -> None:
    assert (
        expected.save_every_s(dataclasses.replace(D16, save_minutes=15, save_every=100), 2.0) == 200
    )
    assert (
        expected.save_every_s(dataclasses.replace(D16, save_minutes=1, save_every=100), 2.0) == 60
    )
    assert (
        expected.save_every_s(dataclasses.replace(D16, save_minutes=1, save_every=100), None) == 60
    )
    assert expected.save_every_s(dataclasses.replace(D16, save_every=0), 2.0) is None


def write_config(paths: RunPaths, c: Config, device: str, processes: int) -> None:
    paths.folder.mkdir(parents=True)
    attempt = {"world_size": processes, "device": device}
    attempts = [{"world_size": 9, "device": "x"}, attempt]
    paths.config.write_text(json.dumps({"settings": c.stored(), "attempts": attempts}))


def test_a_run_is_planned_as_it_was_begun_and_not_as_settings_are_now(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    write_config(paths, D16, "NVIDIA H100 80GB HBM3", 2)
    run = expected.of_here(load_preset(PRESET="tiny"), paths)
    assert run.c.n_layer == 16 and run.fleet == fleet("h100-sxm", 2)


def test_a_site_that_trains_apart_is_planned_with_all_others(tmp_path: Path) -> None:
    paths = RunPaths(
        tmp_path / "run" / "site_1"
    )  # of three, with one process each, and of four, with two
    write_config(paths, dataclasses.replace(D16, sync="diloco", sites=3, nodes=3), "CPU", 1)
    run = expected.of_here(D16, paths)
    assert run.fleet == Fleet((), 3, 3, 3) and expected.expected(run.c, run.fleet).memory_gib
    paths = RunPaths(tmp_path / "other")
    write_config(
        paths, dataclasses.replace(D16, sync="diloco", sites=4, nodes=4), "NVIDIA H100 80GB HBM3", 2
    )
    assert expected.of_here(D16, paths).fleet == fleet("h100-sxm", 8, 4, 4)


def test_a_device_that_is_not_known_is_named(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    write_config(paths, D16, "NVIDIA Titan Y", 2)
    run = expected.of_here(D16, paths)
    found = expected.expected(run.c, run.fleet, STARTED, run.why)
    assert (
        found.tokens_per_s is None
        and found.why == "nothing is known of NVIDIA Titan Y"
        and found.end is None
    )


def test_a_cpu_is_not_measured_for_this(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    c = load_preset(PRESET="tiny", OPTIMIZER="adamw", RUNS_DIR=str(tmp_path))
    write_config(paths, c, "CPU", 2)
    run = expected.of_here(c, paths)
    assert run.fleet == Fleet((), 2)
    found = expected.expected(run.c, run.fleet, STARTED)
    assert (
        found.tokens_per_s is None
        and found.step_s is None
        and found.end is None
        and found.eval_s is None
    )
    assert "make doctor PROBE=1" in found.why and found.needs_gib and found.checkpoint_bytes
    assert found.needs_gib == pytest.approx(16 * parameters(c).total / 2**30)


GLM = load_preset(
    PRESET="glm-4.5-air-16xh200", MODEL="models/GLM-4.5-Air", NODES="2", MASTER_ADDR="a"
)


def test_a_fine_tuning_is_planned_by_its_model_and_adapters(tmp_path: Path) -> None:
    """44,264,448 numbers are trained, of rank 16 (its preset); the base is bfloat16, split over the 8 of a node."""
    paths = RunPaths(tmp_path / "run")
    write_config(paths, GLM, "NVIDIA H200", 16)
    run = expected.of_here(dataclasses.replace(D16, lan_gbit=63.0), paths)
    assert run.fleet == fleet("h200", 16, 2)
    found = expected.expected(run.c, run.fleet, STARTED)
    adapters, base = 44_264_448, 106_852_245_504
    assert found.checkpoint_bytes == pytest.approx(4 * adapters, rel=0.01)
    assert found.needs_gib == pytest.approx((2 * base + 16 * adapters) / 8 / 2**30, rel=0.01)
    assert found.memory_gib and found.needs_gib < found.memory_gib < 131
    assert (
        found.bytes_per_step == pytest.approx(4 * adapters, rel=0.1)
        and found.link_bytes_per_s == 63e9 / 8
    )
    assert (
        found.tokens_per_s is None
        and found.end is None
        and found.why
        and found.save_every_s == 60 * 1440
    )
    mixed = expected.expected(dataclasses.replace(run.c, keep_every=500), run.fleet)
    assert mixed.checkpoint_bytes == pytest.approx(12 * adapters, rel=0.02)  # with both moments


def test_a_fine_tuning_of_a_model_that_is_not_here_is_not_taken_for_one_of_ours(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path / "run")
    write_config(paths, dataclasses.replace(GLM, model="models/another"), "NVIDIA H200", 16)
    run = expected.of_here(GLM, paths)
    found = expected.expected(run.c, run.fleet, STARTED)
    assert found.checkpoint_bytes is None and found.needs_gib is None and found.memory_gib is None
    assert found.why.startswith("MODEL=models/another: its config.json is not on this machine")


def test_pods_that_fine_tune_are_not_planned_without_their_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "env").touch()
    for name, value in {
        "WHERE": "cluster",
        "ENV_FILE": str(tmp_path / "env"),
        "RUNS_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    place = decide()
    run = expected.of_cluster(place, 2, 1, tunes=True)
    assert run.fleet is None and "MODEL is not set here" in run.why
    assert expected.of_cluster(place, 2, 1).fleet is not None
    monkeypatch.setenv("MODEL", "/volume/GLM-4.5-Air")
    monkeypatch.setenv("PRESET", "glm-4.5-air-16xh200")
    monkeypatch.setenv("DATA", "/volume/chats.jsonl")
    run = expected.of_cluster(place, 2, 1, tunes=True)
    assert run.c.lora_rank == 16 and run.fleet and run.fleet.processes == 16


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"settings": {}}', '{"settings": {}, "attempts": []}']
)
def test_a_torn_config_is_no_config(tmp_path: Path, content: str) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.folder.mkdir()
    paths.config.write_text(content)
    c = load_preset(PRESET="tiny", DEVICE="cpu", NPROC="2")
    assert expected.of_here(c, paths).fleet == Fleet((), 2)


def test_of_the_cluster_as_many_pods_and_sites_as_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "env").touch()
    for name, value in {
        "WHERE": "cluster",
        "ENV_FILE": str(tmp_path / "env"),
        "RUNS_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    place = decide()
    run = expected.of_cluster(place)
    assert run.fleet and (run.fleet.processes, run.fleet.nodes, run.fleet.sites) == (8, 4, 1)
    run = expected.of_cluster(place, 2, 2)
    assert run.fleet and (run.fleet.processes, run.fleet.nodes, run.fleet.sites) == (4, 2, 2)
    monkeypatch.setenv("SYNC", "diloco")  # each pod is a site, wherever it is
    run = expected.of_cluster(place, 4, 1)
    assert run.fleet and (run.fleet.nodes, run.fleet.sites, run.c.replicas) == (4, 4, 4)
    monkeypatch.delenv("SYNC")
    monkeypatch.setenv("GPU_PRODUCTS", "NVIDIA-Titan-Y")
    run = expected.of_cluster(place)
    assert run.fleet is None and "GPU_PRODUCTS=NVIDIA-Titan-Y" in run.why


def test_how_long_phases_took_is_of_an_earlier_start(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    assert expected.took(paths) == {}
    paths.folder.mkdir()
    start = {
        "schema": 1,
        "event": "start",
        "time": 1.0,
        "step": 0,
        "startup_s": {"import": 3.0, "data": 0.5, "compile": 190.0},
    }
    paths.metrics.write_text("torn\n" + json.dumps(start) + "\n")
    assert expected.took(paths) == {"data": 0.5, "compiling": 190.0}


def test_it_is_reckoned_once_and_soon() -> None:
    began = time.process_time()
    first = expected.expected(XLARGE, fleet("a100-80gb-sxm", 8, 4), STARTED)
    assert time.process_time() - began < 5  # it takes a small part of that
    assert expected.expected(XLARGE, fleet("a100-80gb-sxm", 8, 4), STARTED) is first


def test_neither_torch_nor_numpy_is_loaded_for_it() -> None:
    code = "import sys, monitor.expected; sys.exit(str({'torch', 'numpy', 'wandb', 'datasets'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "set()"
