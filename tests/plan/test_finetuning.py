"""The plan of a fine-tuning: its numbers by hand, what it refuses, and that it needs no model and no transformers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plan.published import PUBLISHED
from settings import ROOT, SettingsError
from tests.plan.conftest import Given, Planned

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
GLM = {"PRESET": "glm-4.5-air-16xh200"}
ONE_H100 = {"CARDS": "1xh100-sxm", "DTYPE": "bfloat16"}
ADAPTERS = 44_264_448


@pytest.fixture
def llama(tmp_path: Path) -> Given:
    """A folder with nothing but a config.json."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return {"MODEL": str(folder)}


def test_glm_is_planned_without_its_files(planned: Planned) -> None:
    """106.9B in bfloat16 over 8; adapters in float32 with two moments; three blocks' matrices and the tables gathered."""
    plan = planned(GLM)
    layout = plan.layout
    assert (plan.devices["nodes"], plan.devices["processes"]) == (2, 16)
    assert layout.bytes["frozen"] == 2 * 106_852_245_504 / 8
    assert layout.bytes["trained"] == 4 * ADAPTERS / 8
    assert layout.bytes["optimizer"] == 2 * layout.bytes["trained"]
    adapters = 16 * ((4096 + 12_288) * 2 + (4096 + 1024) * 2 + 3 * (4096 + 1408))
    block = 4096 * 128 * 208 + 129 * 3 * 4096 * 1408 + 128 * 4096 + adapters
    assert layout.moment == "forward"
    assert layout.bytes["gathered"] == 2 * (3 * block + 2 * 151_552 * 4096)
    assert layout.fits and not plan.findings
    fits = {(way.parallel, way.activation_checkpointing): way.fits for way in plan.memory.ways}
    assert len(fits) == 9 and not fits["ddp", "full"] and fits["fsdp", "full"]
    shape = plan.run.model.shape
    assert (shape.experts, shape.passed, shape.more) == (128, 8, 1)


def test_what_nodes_send_each_other(planned: Planned) -> None:
    """hsdp: the adapters' gradients; fsdp: half of the weights in each of 8 passes."""
    ways = {way.name: way for way in planned(GLM).network}
    hsdp, fsdp = ways["HSDP, 8 a copy"], ways["FSDP2 over all"]
    assert hsdp.chosen and hsdp.bytes == pytest.approx(4 * ADAPTERS)
    assert fsdp.bytes == pytest.approx(8 * 2 * 106.85e9 / 2, rel=0.01)
    wait_s = fsdp.bytes * 8 / 63e9
    header = (ROOT / "presets" / "glm-4.5-air-16xh200.env").read_text()
    assert f"are {wait_s:.0f} seconds" in " ".join(header.replace("#", "").split())


def test_checkpoints_by_mode(planned: Planned) -> None:
    lite = planned(GLM)
    assert lite.disk.checkpoint_bytes == pytest.approx(4 * ADAPTERS, rel=0.01)
    assert lite.disk.bytes["checkpoints"] == 6 * lite.disk.checkpoint_bytes
    full = planned(GLM, {"CHECKPOINT_MODE": "full"})
    assert full.disk.checkpoint_bytes == pytest.approx(12 * ADAPTERS, rel=0.01)
    assert (full.disk.lite_bytes, full.disk.full_bytes) == (
        lite.disk.checkpoint_bytes,
        full.disk.checkpoint_bytes,
    )


def test_work_of_a_frozen_weight_is_two_thirds(planned: Planned, llama: Given) -> None:
    sizes = {"SEQ_LEN": "128", "BATCH_TOKENS": "4096"}
    lora = planned(llama, ONE_H100, sizes, {"LORA_RANK": "8"})
    whole = planned(llama, ONE_H100, sizes)
    assert lora.flops_per_token / whole.flops_per_token == pytest.approx(2 / 3, rel=0.03)


def test_memory_grows_with_the_micro_batch_and_the_rank(planned: Planned, llama: Given) -> None:
    def total(**settings: str) -> float:
        return planned(llama, ONE_H100, {"LORA_RANK": "8"} | settings).layout.total_bytes

    sizes = [total(MICRO_BATCH_SIZE=size) for size in ("2", "4", "8")]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3
    assert total(LORA_RANK="64") > total()
    full, selective = (total(ACTIVATION_CHECKPOINTING=how) for how in ("full", "selective"))
    assert full < selective < total()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"PRESET": "finetune"}, "MODEL is not set"),
        ({"MODEL": "some/where"}, "its config.json is not on this machine"),
        (GLM | {"LORA_TARGETS": "w1"}, "the model has no w1; there are attention, mlp, experts"),
        (GLM | {"OPTIMIZER": "muon", "PARALLEL": "ddp"}, "OPTIMIZER=muon: not available"),
    ],
)
def test_settings_of_which_no_plan_can_be_made(planned: Planned, settings, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        planned(settings)


def test_a_damaged_config_is_refused(planned: Planned, llama: Given) -> None:
    (Path(llama["MODEL"]) / "config.json").write_text("<html>")
    with pytest.raises(SettingsError, match="cannot be read"):
        planned(llama)


def test_where_the_config_of_a_model_is_found(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    with pytest.raises(SettingsError, match="make export RUN_NAME=mine"):
        planned({"MODEL": "mine"})
    for folder in ("runs/mine/export", "data/models/me--small"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(LLAMA))
    sizes = {planned({"MODEL": name}).parameters["total"] for name in ("mine", "me/small")}
    assert len(sizes) == 1
    assert planned({"MODEL": "me/GLM-4.5-Air"}).parameters["total"] == 106_852_245_504


# ---- As commands


def run_module(module: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run it with torch and transformers out of reach."""
    code = (
        "import sys, runpy\n"
        "for name in ('torch', 'transformers', 'peft'): sys.modules[name] = None\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    kept = ("PATH", "HOME", "PYTHONPATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"ENV_FILE": ""} | settings,
    )


def test_make_plan_takes_the_preset_of_fine_tuning_without_torch(llama: Given) -> None:
    done = run_module("plan", **llama, CARDS="1xh100-sxm", LORA_RANK="8", JSON="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["fine_tuning"], found["preset"]) == (True, "finetune")
    assert 0 < found["parameters"]["trained"] < found["parameters"]["total"]
    done = run_module("plan", **llama, CARDS="1xt4", MICRO_BATCH_SIZE="32")
    assert done.returncode == 64
    assert "FAIL  Memory" in done.stdout and "LORA_RANK" in done.stdout


def test_before_make_finetune_what_cannot_fit_is_not_started(llama: Given, tmp_path: Path) -> None:
    settings = llama | {
        "PRESET": "finetune",
        "RUNS_DIR": str(tmp_path / "runs"),
        "DATA_DIR": str(tmp_path / "data"),
        "DEVICE": "cpu",
        "LORA_RANK": "8",
        "ALLOW_FAIL": "torch,python,driver,shm,disk",
    }
    small = {"MICRO_BATCH_SIZE": "1", "SEQ_LEN": "128"}
    done = run_module("doctor.before_run", "finetune", **settings, **small)
    assert done.returncode == 0, done.stdout + done.stderr
    line = r"^plan: [0-9.]+ of [0-9.]+ GiB of memory, [0-9.]+M of [0-9.]+M parameters are trained"
    assert re.search(line, done.stdout, re.MULTILINE)
    (Path(llama["MODEL"]) / "config.json").write_text(json.dumps(PUBLISHED["glm-4.5-air"]))
    done = run_module("doctor.before_run", "finetune", **settings)
    assert done.returncode == 64
    assert "FAIL  memory" in done.stderr
    assert "Nothing was started. To start anyway: ALLOW_FAIL=" in done.stderr
