"""doctor/before_run.py: what make train says before it starts anything, and what stops it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from doctor import before_run
from record import bad_nodes
from settings import ROOT, load_preset
from settings.finding import FAIL, WARN, Finding


def run(tmp_path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """As scripts/train.py runs it, with torch out of reach and no GPU."""
    forbidden = tmp_path / "forbidden"
    (forbidden / "torch").mkdir(parents=True, exist_ok=True)
    (forbidden / "torch" / "__init__.py").write_text("raise AssertionError('torch was loaded')\n")
    env = {
        "PATH": os.environ["PATH"],
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(forbidden),
        "RUNS_DIR": str(tmp_path / "runs"),
        "DATA_DIR": str(tmp_path / "data"),
        **settings,
    }
    return subprocess.run(
        [sys.executable, "-m", "doctor.before_run"],
        cwd=ROOT,
        env=env,
        text=True,
        capture_output=True,
        check=False,
    )


def test_a_run_that_may_start_is_told_its_hours(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"plan: 977 steps of 4,096 .* of \S+ GiB of memory; time left is printed every 50 steps",
        last,
    )
    last = run(tmp_path, MFU="50", DTYPE="float32").stdout.splitlines()[-1]
    assert last.startswith("plan: 977 steps of 4,096 tokens, about ")
    assert re.search(r" of \S+ GiB of memory$", last)


def test_only_the_first_node_tells_and_keeps_the_plan(tmp_path: Path) -> None:
    several = {"NODES": "2", "MASTER_ADDR": "first", "BATCH_TOKENS": "8192"}
    kept = tmp_path / "runs" / "tiny" / "plan.json"
    assert "plan: " not in run(tmp_path, NODE_RANK="1", **several).stdout and not kept.exists()
    assert "plan: " in run(tmp_path, **several).stdout and kept.exists()
    kept.write_text("{")
    assert "runs/tiny/plan.json is damaged" in run(tmp_path, **several).stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"DEVICE": "cuda"}, "No GPU found (nvidia-smi lists none). DEVICE=cuda"),
        ({"TARGET_HOURS": "0.00001", "DTYPE": "float32"}, "TARGET_HOURS=1e-05"),
        ({"N_EMBD": "65536", "N_HEAD": "512", "N_LAYER": "64"}, "GiB"),
    ],
)
def test_what_cannot_be_stops_it_and_is_let_through_by_name(
    tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    stopped = run(tmp_path, **settings)
    assert (
        stopped.returncode in (64, 78)
        and said in stopped.stderr
        and stopped.stderr.startswith("FAIL  ")
    )
    last = stopped.stderr.splitlines()[-1]
    assert last.startswith("Nothing was started. To start anyway: ALLOW_FAIL=")
    assert not (tmp_path / "runs").exists()
    names = last.split("ALLOW_FAIL=")[1].split()[0]
    let_through = run(tmp_path, ALLOW_FAIL=names, **settings)
    assert let_through.returncode == 0, let_through.stderr
    assert said in let_through.stdout  # it is said all the same


def test_in_a_pod_what_the_machine_lacks_is_left_to_another_machine(tmp_path: Path) -> None:
    stopped = run(tmp_path, DEVICE="cuda", K8S_NODE="node-7", TARGET_HOURS="0.00001")
    assert stopped.returncode == 71 and "No GPU found" in stopped.stderr
    listed = bad_nodes.find(tmp_path / "runs" / bad_nodes.FOLDER, "node-7")
    assert listed and listed.reason.startswith("No GPU found")
    stopped = run(tmp_path, TARGET_HOURS="0.00001", DTYPE="float32", K8S_NODE="node-7")
    assert stopped.returncode == 64, "a setting is the same on every machine"


def test_bad_settings_are_said_as_everywhere(tmp_path: Path) -> None:
    done = run(tmp_path, N_HEAD="5")
    assert done.returncode == 64 and "Must be a multiple of 2 x N_HEAD = 10" in done.stderr
    done = run(tmp_path, ALLOW_FAIL="disk,memroy")
    assert done.returncode == 64 and "no check memroy; did you mean memory?" in done.stderr
    assert done.stdout == ""


def test_what_doctor_has_said_the_plan_does_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Finding("target-hours", WARN, "by the doctor")
    monkeypatch.setattr(before_run, "quick", lambda c: [said])
    found, planned, _ = before_run.look(
        load_preset(PRESET="tiny", DEVICE="cpu", TARGET_HOURS="0.00001")
    )
    assert found == [said] and planned.startswith("plan: ")


def test_memory_of_a_cpu_is_said_once(tmp_path: Path) -> None:
    """It is the machine's own: what the plan says of it, with what would fit. The disk is told apart from it."""
    stopped = run(tmp_path, N_EMBD="65536", N_HEAD="512", N_LAYER="64", SAVE_EVERY="0")
    names = [line.split()[1] for line in stopped.stderr.splitlines() if line.startswith("FAIL")]
    assert stopped.returncode == 64 and names == ["memory"] and "N_LAYER=" in stopped.stderr
    assert (
        stopped.stderr.splitlines()[-1] == "Nothing was started. To start anyway: ALLOW_FAIL=memory"
    )


def test_memory_of_a_gpu_and_of_its_machine_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [Finding("host-memory", FAIL, "the machine's"), Finding("memory", FAIL, "the card's")]
    monkeypatch.setattr(before_run, "quick", lambda c: said[:1])
    monkeypatch.setattr("plan.fleet.gpus_here", lambda: ("NVIDIA H100 80GB HBM3",))
    found, _, _ = before_run.look(load_preset(PRESET="d16-2xh100", MICRO_BATCH_SIZE="128"))
    assert [finding.name for finding in found] == ["host-memory", "memory"]


def test_an_unknown_card_trains_and_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_run, "quick", lambda c: [])
    monkeypatch.setattr("plan.fleet.gpus_here", lambda: ("NVIDIA GeForce RTX 3080",))
    found, planned, _ = before_run.look(load_preset(PRESET="tiny"))
    assert found == [] and planned.startswith("plan: n/a: ") and "GeForce RTX 3080" in planned
    monkeypatch.setattr(before_run, "quick", lambda c: [Finding("gpus", FAIL, "none")])
    assert before_run.look(load_preset(PRESET="tiny"))[1] == ""
