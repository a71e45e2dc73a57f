"""plan/accounting and plan/past_runs.py: from a plan to its run, and from runs to the next plan."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from plan.accounting import review
from plan.accounting.prediction import keep_prediction
from plan.measured import Probe, Step, shape_of
from plan.planner import Plan, make_plan, with_past_runs
from plan.report import brief, report
from plan.run import run_of
from plan.speed import ASSUMED, MEASURED, MOST_SCALED, OTHERS, SCALED, speed_of
from record.run_paths import RunPaths
from tests.plan.conftest import NOW, Load, Planned
from tests.record.clock import Clock

Finish = Any
CPU = {"PRESET": "tiny", "CARDS": "cpu", "DTYPE": "float32", "MAX_STEPS": "100"}
GPU = {"PRESET": "d16-2xh100", "CARDS": "2xa100-80gb-sxm"}
TUNING = {"MODEL": "x/Qwen3-1.7B", "CARDS": "1xrtx4090", "DTYPE": "bfloat16"}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def finish(planned: Planned, runs: Path) -> Finish:
    """finish("a", CPU, tokens_per_s=4096): a run as training leaves it, with what it took."""

    def finished(
        name: str, *typed: dict[str, str], tokens_per_s: float = 4096.0, reason: str = "done"
    ) -> RunPaths:
        plan = planned(*typed, {"RUN_NAME": name})
        paths = RunPaths(runs / name)
        keep_prediction(plan, paths)
        run = Clock().start()
        run.write("end", 9, reason=reason, plan={"tokens_per_s": [None, tokens_per_s]})
        paths.metrics.write_text("".join(json.dumps(record) + "\n" for record in run.records))
        return paths

    return finished


def read(paths: RunPaths) -> dict[str, Any]:
    return json.loads(paths.plan.read_text())


# ---- plan.json


def test_the_file_has_the_plan(planned: Planned, runs: Path) -> None:
    plan = planned(GPU)
    keep_prediction(plan, RunPaths(runs / "x"))
    found = read(RunPaths(runs / "x"))
    assert (
        found["seconds"]
        == plan.time.total_seconds
        == pytest.approx(12_800 * found["step_s"], rel=0.02)
    )
    assert found["memory_gib"] * 2**30 == plan.layout.total_bytes
    assert found["energy_kwh"] == pytest.approx(2 * 0.4 * found["seconds"] / 3600)
    assert found["mfu_percent"] == plan.speed.mfu_percent and "a100" in found["speed"]
    assert (found["device"], found["processes"], found["dtype"]) == (
        "2 x a100-80gb-sxm",
        2,
        "bfloat16",
    )
    assert found["settings"]["n_layer"] == 16 and found["steps"] == 12_800
    assert {"time", "git", "git_dirty"} <= found.keys()


@pytest.mark.parametrize(
    ("changes", "is_replaced"),
    [
        ({"MFU": "60", "SEED": "7", "LOG_EVERY": "3"}, False),  # it only knows more
        ({"MICRO_BATCH_SIZE": "4"}, True),
        ({"MAX_STEPS": "50"}, True),
        ({"EVAL_EVERY": "7"}, True),
        ({"CARDS": "2xh100-sxm"}, True),
        ({"CARDS": "4xa100-80gb-sxm"}, True),
    ],
)
def test_a_resumed_run_keeps_its_prediction(
    planned: Planned, runs: Path, changes: dict[str, str], is_replaced: bool
) -> None:
    paths = RunPaths(runs / "x")
    keep_prediction(planned(GPU), paths)
    before = paths.plan.read_bytes()
    keep_prediction(planned(GPU, changes), paths)
    assert (paths.plan.read_bytes() != before) == is_replaced


def test_what_data_decides_later_is_no_change(load: Load, runs: Path) -> None:
    config, fleet = load(TUNING)
    paths = RunPaths(runs / "x")
    fitted = ("SEQ_LEN", "BATCH_TOKENS", "EPOCHS")
    keep_prediction(make_plan(config, fleet, NOW, places=(), fitted=fitted), paths)
    before = paths.plan.read_bytes()
    resumed = config.replace(seq_len=512, batch_tokens=4096)
    keep_prediction(make_plan(resumed, fleet, NOW, places=()), paths)
    assert paths.plan.read_bytes() == before and read(paths)["fine_tuning"]
    keep_prediction(make_plan(resumed.replace(lora_rank=4), fleet, NOW, places=()), paths)
    assert paths.plan.read_bytes() != before


def test_a_run_with_no_step_left_gets_no_prediction(planned: Planned, runs: Path) -> None:
    folder = runs / "tiny" / "checkpoints" / "step_0000100"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")
    paths = RunPaths(runs / "tiny")
    keep_prediction(planned(CPU), paths)
    assert not paths.plan.exists()
    keep_prediction(planned(CPU, {"MAX_STEPS": "150"}), paths)
    assert (read(paths)["from_step"], read(paths)["steps"]) == (100, 150)


@pytest.mark.parametrize(("text", "word"), [("{", "JSON"), ("{}", "missing")])
def test_a_damaged_file_stays(planned: Planned, runs: Path, text: str, word: str) -> None:
    paths = RunPaths(runs / "x")
    paths.folder.mkdir(parents=True)
    paths.plan.write_text(text)
    with pytest.raises(ValueError, match=word):
        keep_prediction(planned(CPU), paths)
    assert paths.plan.read_text() == text


# ---- The next plan


def test_a_plan_is_as_fast_as_the_run_before_it(planned: Planned, finish: Finish) -> None:
    finish("first", CPU, tokens_per_s=2048.0)
    plan = planned(CPU)
    assert (plan.speed.source, plan.speed.tokens_per_s) == (MEASURED, pytest.approx(2048))
    assert plan.time.training_seconds == pytest.approx(100 * 4096 / 2048)
    words = "as in run first on this machine"
    assert words in report(plan) and words in brief(plan, plan.run.config)


def test_of_runs_of_one_step_the_median_counts(planned: Planned, finish: Finish) -> None:
    """One was disturbed."""
    for name, tokens_per_s in (("a", 2000.0), ("b", 2100.0), ("c", 70.0)):
        finish(name, CPU, tokens_per_s=tokens_per_s)
    assert planned(CPU).speed.why == "as in run a on this machine"


def test_another_step_is_scaled_by_flops_from_the_most_similar(
    planned: Planned, finish: Finish
) -> None:
    finish("small", CPU, {"N_LAYER": "2"}, tokens_per_s=5000.0)
    near = finish("near", CPU, tokens_per_s=2048.0)
    plan = planned(CPU, {"N_LAYER": "6"})
    expected = 2048 * read(near)["flops_per_token"] / plan.flops_per_token
    assert (plan.speed.source, plan.speed.tokens_per_s) == (SCALED, pytest.approx(expected))
    assert "scaled by FLOPs from run near" in report(plan)


@pytest.mark.parametrize(
    "other",
    [
        {"DTYPE": "bfloat16"},
        {"NPROC": "2"},
        {"COMPILE": "1"},
        {"BATCH_TOKENS": str(4096 * 16), "MAX_STEPS": "9"},  # more than MOST_SCALED
        {"NODES": "2", "BATCH_TOKENS": "8192"},
    ],
    ids=str,
)
def test_other_runs_tell_nothing(load: Load, finish: Finish, other: dict[str, str]) -> None:
    finish("other", CPU, other)
    run = with_past_runs(run_of(*load(CPU)))
    assert MOST_SCALED == 10 and speed_of(run, None).tokens_per_s is None


@pytest.mark.parametrize("reason", ["stopped", "crashed"])
def test_only_a_finished_run_tells(planned: Planned, finish: Finish, reason: str) -> None:
    finish("x", GPU, reason=reason)
    assert planned(GPU).speed.source == OTHERS


def test_what_is_measured_of_this_step_comes_before_what_is_scaled(
    load: Load, finish: Finish
) -> None:
    run = run_of(*load(CPU))
    step = Step(shape_of(run.config), 1, 1234.0, 1.0)
    probe = Probe("cpu", 0.0, "", {"float32": 1.0}, steps=(step,))
    assert speed_of(run, Probe("cpu", 0.0, "", {"float32": 1.0})).source == ASSUMED
    finish("other", CPU, {"N_LAYER": "6"})
    assert speed_of(with_past_runs(run), probe).tokens_per_s == 1234
    finish("same", CPU, tokens_per_s=2000.0)
    assert speed_of(with_past_runs(run), probe).tokens_per_s == pytest.approx(2000)
    set_by_user = with_past_runs(run_of(*load(CPU, {"MFU": "50"})))
    assert speed_of(set_by_user, probe).mfu_percent == 50


def test_a_run_tells_nothing_of_another_number_of_gpus(load: Load, finish: Finish) -> None:
    finish("two", GPU)
    run = with_past_runs(run_of(*load(GPU)))
    assert speed_of(run, None).source == MEASURED
    four = dataclasses.replace(run, fleet=load(GPU, {"CARDS": "4xa100-80gb-sxm"})[1])
    assert speed_of(four, None).source == OTHERS


# ---- REVIEW=1


def train(paths: RunPaths, plan: Plan, step_s: float, mem_gib: float, steps: int = 100) -> None:
    """Plan a run, and write its record, in which each step takes so long."""
    keep_prediction(plan, paths)
    run = Clock()
    run.wall = read(paths)["time"] + 1
    run.start().steps(1, steps, seconds=step_s)
    for record in run.records:
        record |= {"mem_gib": mem_gib, "tokens": record["step"] * plan.batch_tokens}
    paths.metrics.write_text("".join(json.dumps(record) + "\n" for record in run.records))


def test_the_review_has_all_runs(planned: Planned, runs: Path) -> None:
    """The second was killed at step 40, and the plan of the third is damaged."""
    plan = planned(GPU, {"MAX_STEPS": "100"})
    for name, slower, steps in (("a", 1.5, 100), ("b", 1.1, 40), ("c", 1.0, 100)):
        step_s = slower * plan.speed.step_seconds
        train(RunPaths(runs / name), plan, step_s, plan.layout.total_bytes / 2**30, steps)
    (runs / "c" / "plan.json").write_text("{")
    (runs / "without").mkdir()
    found = review.review(runs)
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    a, b = (run["figures"] for run in found["runs"])
    assert a["seconds"] == [plan.time.total_seconds, pytest.approx(150 * plan.speed.step_seconds)]
    assert "seconds" not in b and b["step_s"][1] / b["step_s"][0] == pytest.approx(1.1)
    (error,) = found["errors"]
    assert (error["device"], error["dtype"], error["runs"]) == ("2 x a100-80gb-sxm", "bfloat16", 2)
    of_a = a["seconds"][1] / a["seconds"][0] - 1
    assert error["time"] == pytest.approx((abs(of_a) + 0.1) / 2)
    assert error["memory"] == pytest.approx(0, abs=1e-9) and error["energy"] is None
    lines = review.report(found, runs).splitlines()
    assert "c/plan.json" in lines[0] and "JSON" in lines[0]
    assert [line.split()[0] for line in lines[1:4]] == ["planned", "a", "b"]
    assert f", {1 + of_a:.2f} " in lines[2] and ", 1.10 " in lines[3]
    assert lines[-1].startswith("2 x a100-80gb-sxm  bfloat16     2  ")
    json.dumps(found, allow_nan=False)


def test_a_review_of_nothing_is_a_sentence(runs: Path) -> None:
    assert review.report(review.review(runs), runs).startswith("No run in ")
