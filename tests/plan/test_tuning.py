"""The plan of a fine-tuning: what it says, what it refuses, and that it needs no model and no transformers."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plan.finetuning import tuned_report, tuning
from plan.finetuning.tuned_memory import memory
from plan.fleet import fleet_of
from plan.published import PUBLISHED
from settings import ROOT, SettingsError, load_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}

AIR = {"PRESET": "glm-4.5-air-16xh200"}
OF_HUB = {
    "PRESET": "finetune",
    "MODEL": "owner/GLM-4.5-Air",
    "CARDS": "16xh200",
    "DTYPE": "bfloat16",
    "NODES": "2",
}


def planned(**settings: str) -> tuning.Tuning:
    c = tuning.in_nodes(
        load_config(
            {"ENV_FILE": "", **settings}, ROOT, {"MASTER_ADDR": "planned"}, without=tuning.NOT_ASKED
        )
    )
    return tuning.plan(c, fleet_of(c))


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder with nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


@pytest.fixture(scope="module")
def glm() -> tuning.Tuning:
    return planned(PRESET="glm-4.5-air-16xh200")


def test_the_preset_of_two_nodes_is_planned_without_its_model(glm: tuning.Tuning) -> None:
    """By hand: 106.9B in bfloat16 over 8; adapters in float32 with two moments; a block, the next and the tables."""
    parts = glm.chosen.need.parts
    assert (glm.fleet.nodes, glm.fleet.processes) == (2, 16)
    assert parts["frozen"] == 2 * 106_852_245_504 / 8
    assert parts["trained"] == 4 * 44_264_448 / 8 and parts["optimizer"] == 2 * parts["trained"]
    adapters = 16 * ((4096 + 12_288) * 2 + (4096 + 1024) * 2 + 3 * (4096 + 1408))
    block = 4096 * 128 * 208 + 128 * 112 + 129 * 3 * 4096 * 1408 + 128 * 4096 + 2 * 4096 + adapters
    assert parts["gathered"] == 2 * (2 * block + 2 * 151_552 * 4096 + 4096)
    assert glm.chosen.fits and not glm.findings
    by_way = {(held.t.c.parallel, held.t.c.activation_checkpointing): held for held in glm.memory}
    assert len(by_way) == 9 and not by_way["ddp", "full"].fits and by_way["fsdp", "full"].fits
    said = tuned_report.told(glm)
    for words in (
        "106,852,245,504 parameters",
        "44,264,448 in adapters",
        "128 experts a block, 8 for each token",
        "1 more block for predicting more tokens is skipped",
        "16 x 4 x 1 x 4,096",
        "hsdp *",
    ):
        assert words in " ".join(said.split())


def test_what_nodes_send_each_other(glm: tuning.Tuning) -> None:
    """hsdp: the adapters' gradients; fsdp: half of the weights in each of 8 passes, which LAN_GBIT takes long."""
    by_name = {sync.name: sync for sync in glm.syncs}
    hsdp, fsdp = by_name["HSDP, 8 a copy"], by_name["FSDP2 over all"]
    assert hsdp.chosen and hsdp.bytes_per_step == pytest.approx(4 * 44_264_448)
    assert fsdp.bytes_per_step == pytest.approx(8 * 2 * 106.85e9 / 2, rel=0.01)
    assert fsdp.between_nodes_s == pytest.approx(fsdp.bytes_per_step * 8 / 63e9, rel=0.01)
    header = (ROOT / "presets" / "glm-4.5-air-16xh200.env").read_text()
    assert f"are {fsdp.between_nodes_s:.0f} seconds" in " ".join(header.replace("#", "").split())


def test_checkpoints_by_mode(glm: tuning.Tuning) -> None:
    assert glm.checkpoint_bytes == pytest.approx(4 * 44_264_448, rel=0.01)
    full = dataclasses.replace(
        glm, t=dataclasses.replace(glm.t, c=dataclasses.replace(glm.c, checkpoint_mode="full"))
    )
    assert full.checkpoint_bytes == pytest.approx(12 * 44_264_448, rel=0.01)
    assert glm.disk_bytes["checkpoints"] == 6 * glm.checkpoint_bytes


def test_work_of_a_frozen_weight_is_two_thirds_and_computing_anew_half_of_that(llama: str) -> None:
    lora = planned(
        PRESET="finetune",
        MODEL=llama,
        CARDS="1xh100-sxm",
        DTYPE="bfloat16",
        LORA_RANK="8",
        SEQ_LEN="128",
        BATCH_TOKENS="4096",
    )
    whole = planned(
        PRESET="finetune",
        MODEL=llama,
        CARDS="1xh100-sxm",
        DTYPE="bfloat16",
        SEQ_LEN="128",
        BATCH_TOKENS="4096",
    )
    assert lora.t.flops() / whole.t.flops() == pytest.approx(2 / 3, rel=0.03)
    again = dataclasses.replace(
        whole.t, c=dataclasses.replace(whole.c, activation_checkpointing="full")
    )
    assert tuning.work_of(again).kept == pytest.approx(6 / 8, rel=0.01)
    again = dataclasses.replace(
        lora.t, c=dataclasses.replace(lora.c, activation_checkpointing="full")
    )
    assert tuning.work_of(again).kept == pytest.approx(4 / 6, rel=0.02)
    assert "assumed" in tuned_report.brief(lora)


# ---- What cannot be


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (AIR | {"MICRO_BATCH_SIZE": "4", "ACTIVATION_CHECKPOINTING": "none"}, ["MICRO_BATCH_SIZE"]),
        (AIR | {"PARALLEL": "ddp"}, ["PARALLEL"]),
        (
            AIR | {"DTYPE": "float32", "ACTIVATION_CHECKPOINTING": "none"},
            ["ACTIVATION_CHECKPOINTING", "DTYPE"],
        ),
        (OF_HUB | {"PARALLEL": "fsdp"}, ["LORA_RANK"]),
        (OF_HUB, ["LORA_RANK", "PARALLEL"]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_what_would(
    changes: dict[str, str], names: list[str]
) -> None:
    p = planned(**changes)
    (problem,) = p.findings
    assert (problem.name, problem.level, problem.code) == ("memory", "FAIL", 64)
    would = re.findall(r"((?:[A-Z_]+=\S+ )+)\(([0-9.]+) GiB\)", problem.fix)
    assert would and set(names) <= {
        part.split("=")[0] for typed, _ in would for part in typed.split()
    }
    for typed, told in would:
        typed_in = dict(part.split("=") for part in typed.split())
        again = planned(**changes | typed_in)
        assert not again.findings and float(told) == pytest.approx(
            again.chosen.need.total / 2**30, abs=0.06
        )


def test_what_nothing_here_holds_says_so(llama: str) -> None:
    """On a card of a hundredth of a GiB."""
    p = planned(PRESET="finetune", MODEL=llama, CARDS="1xh100-sxm", DTYPE="bfloat16", LORA_RANK="8")
    found = tuning.memory_problem(p.t, p.fleet, 1e7)
    assert found and "more cards, or a smaller MODEL" in found.fix


def test_a_disk_that_checkpoints_fill(llama: str) -> None:
    """Weights and two moments of 4 bytes each; adapters alone are less than a hundredth of that."""
    p = planned(
        PRESET="finetune",
        MODEL=llama,
        CARDS="1xh100-sxm",
        DTYPE="bfloat16",
        KEEP_LAST="3",
        RUNS_DIR="no-runs",
    )
    assert (
        p.disk_bytes["checkpoints"] == pytest.approx(4 * 12 * p.t.shape.total, rel=0.01)
        and p.free_bytes is None
    )
    one = p.checkpoint_bytes
    (found,) = tuning.disk_problem(dataclasses.replace(p, free_bytes=3.5 * one))
    assert found.code == 64 and "KEEP_LAST=2;" in found.fix and "CHECKPOINT_MODE" not in found.fix
    assert not list(tuning.disk_problem(dataclasses.replace(p, free_bytes=4.1 * one)))
    p = planned(
        PRESET="finetune", MODEL=llama, CARDS="1xh100-sxm", LORA_RANK="8", RUNS_DIR="no-runs"
    )
    (found,) = tuning.disk_problem(dataclasses.replace(p, free_bytes=1.5 * p.checkpoint_bytes))
    assert "CHECKPOINT_MODE=lite" in found.fix and "KEEP_LAST" not in found.fix


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"PRESET": "finetune"}, "MODEL is not set"),
        ({"PRESET": "finetune", "MODEL": "some/where"}, "no config.json of it here"),
        (
            {"PRESET": "glm-4.5-air-16xh200", "LORA_TARGETS": "w1"},
            "the model has no w1; there are attention, mlp, experts",
        ),
        (
            {"PRESET": "glm-4.5-air-16xh200", "OPTIMIZER": "muon", "PARALLEL": "ddp"},
            "OPTIMIZER=muon: not in fine-tuning",
        ),
    ],
)
def test_settings_of_which_no_plan_can_be_made(settings: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        planned(**settings)


def test_another_kind_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "gemma2"}))
    with pytest.raises(SettingsError, match="no memory model for model_type=gemma2"):
        planned(PRESET="finetune", MODEL=str(tmp_path))
    (tmp_path / "config.json").write_text("<html>")
    with pytest.raises(SettingsError, match="cannot be read"):
        planned(PRESET="finetune", MODEL=str(tmp_path))


def test_a_run_of_ours_is_planned_by_its_export_and_a_model_of_the_hub_by_what_is_kept(
    tmp_path: Path,
) -> None:
    where = {
        "PRESET": "finetune",
        "RUNS_DIR": str(tmp_path / "runs"),
        "DATA_DIR": str(tmp_path / "data"),
    }
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    with pytest.raises(SettingsError, match="make export RUN_NAME=mine"):
        planned(MODEL="mine", **where)
    for folder in (
        tmp_path / "runs" / "mine" / "export",
        tmp_path / "data" / "models" / "me--small",
    ):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA))
    assert planned(MODEL="mine", **where).t.shape == planned(MODEL="me/small", **where).t.shape
    assert planned(MODEL="me/GLM-4.5-Air", **where).t.shape.total == 106_852_245_504


# ---- By make plan, and before make finetune


def run(module: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """With transformers and torch out of reach."""
    code = (
        "import sys, runpy\nfor name in ('torch', 'transformers', 'peft'): sys.modules[name] = None\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    kept = {
        name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "PYTHONPATH")
    }
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=kept | {"ENV_FILE": ""} | settings,
    )


def test_make_plan_needs_neither_torch_nor_transformers_and_takes_the_preset_of_fine_tuning(
    llama: str,
) -> None:
    done = run("plan", MODEL=llama, CARDS="1xh100-sxm", LORA_RANK="8", JSON="1")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert (
        found["fine_tuning"]
        and found["preset"] == "finetune"
        and found["parameters"]["trained"] > 0
    )
    done = run("plan", MODEL=llama, CARDS="1xt4", MICRO_BATCH_SIZE="32")
    assert done.returncode == 64 and "FAIL  memory" in done.stdout and "LORA_RANK" in done.stdout


def test_before_make_finetune_the_memory_is_said_and_what_cannot_fit_is_not_started(
    llama: str, tmp_path: Path
) -> None:
    places = {
        "MODEL": llama,
        "PRESET": "finetune",
        "RUNS_DIR": str(tmp_path / "runs"),
        "DEVICE": "cpu",
        "DATA_DIR": str(tmp_path / "data"),
        "ALLOW_FAIL": "torch,python,driver,shm,disk",
    }
    done = run(
        "doctor.before_run",
        "finetune",
        LORA_RANK="8",
        MICRO_BATCH_SIZE="1",
        SEQ_LEN="128",
        **places,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^plan: [0-9.]+ of [0-9.]+ GiB of memory per process", done.stdout, re.MULTILINE
    )
    (Path(llama) / "config.json").write_text(json.dumps(PUBLISHED["glm-4.5-air"]))
    done = run("doctor.before_run", "finetune", LORA_RANK="8", **places)
    assert done.returncode == 64
    assert (
        "FAIL  memory" in done.stderr
        and "Nothing was started. To start anyway: ALLOW_FAIL=" in done.stderr
    )


def test_memory_grows_as_the_windows_and_the_rank_do(llama: str) -> None:
    p = planned(PRESET="finetune", MODEL=llama, CARDS="1xh100-sxm", DTYPE="bfloat16", LORA_RANK="8")

    def total(**changes: Any) -> float:
        return memory(
            dataclasses.replace(p.t, c=dataclasses.replace(p.c, **changes)), 1, 1, False
        ).total

    assert total(micro_batch_size=8) > total(micro_batch_size=4) > total(micro_batch_size=2)
    assert total(lora_rank=64) > total(lora_rank=8)
    assert total(activation_checkpointing="full") < total(activation_checkpointing="selective")
