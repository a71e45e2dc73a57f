"""record/account.py: records by hand, and what they must come to next to a plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from record.account import describe, find_known, hold_to_plan
from record.run_paths import RunPaths
from tests.record.clock import START, Clock

PLAN: dict[str, Any] = {
    "time": START - 1,
    "steps": 10,
    "seconds": 20.0,
    "tokens_per_s": 50.0,
    "memory_gib": 0.5,
    "energy_kwh": None,
    "processes": 2,
}
MEMORY = {"mem_gib": 0.25}


@pytest.fixture
def hold(tmp_path: Path):
    """hold(run, steps=20): what the records of a Clock come to, next to PLAN with these changes."""
    paths = RunPaths(tmp_path)

    def held(run: Clock, **changes: Any):
        paths.plan.write_text(json.dumps(PLAN | changes))
        lines = [json.dumps(record) + "\n" for record in run.records]
        paths.metrics.write_text("".join(lines))
        return hold_to_plan(paths)

    return held


def whole_run() -> Clock:
    """Ten steps of 100 tokens in 2 s each, then 5 s of evaluation."""
    run = Clock()
    run.start(**{"import": 3.0, "compile": 6.0}).steps(1, 10, wait=0.5)
    run.write("eval", 10, 5.0, eval_s=4.5, val_loss=3.0)
    return run


def test_a_run_to_its_end(hold) -> None:
    """Start-up does not count; all that follows does."""
    run = whole_run()
    run.records[-2] |= MEMORY
    assert hold(run) == {
        "seconds": [20.0, 10 * 2 + 5],
        "step_s": [2.0, 2.0],
        "tokens_per_s": [50.0, 50.0],
        "memory_gib": [0.5, 0.25],
    }


def test_pauses_do_not_count_and_lost_work_does(hold) -> None:
    """Killed after step 6, it resumes at step 4 an hour later, and step 9 takes a minute."""
    run = Clock()
    run.start(load=1.0).steps(1, 6)
    run.resume(4, down=3600, load=7.0).steps(5, 8).steps(9, 9, seconds=60.0).steps(10, 10)
    figures = hold(run)
    assert figures["seconds"][1] == pytest.approx(6 * 2 + 4 * 2 + 60 + 2)
    assert figures["step_s"][1] == pytest.approx((9 * 2 + 60) / 10)


@pytest.mark.parametrize(
    ("changes", "seconds", "known"),
    [
        ({}, 25.0, {"time": "seconds", "memory": "memory_gib"}),
        ({"steps": 20}, None, {"time": "step_s", "memory": "memory_gib"}),  # stopped
        ({"steps": None, "seconds": None}, None, {"time": "step_s", "memory": "memory_gib"}),
        ({"seconds": None, "tokens_per_s": None}, 25.0, {"memory": "memory_gib"}),
    ],
)
def test_only_what_is_known_of_both_is_compared(hold, changes, seconds, known) -> None:
    run = whole_run()
    run.records[-2] |= MEMORY
    figures = hold(run, **changes)
    assert figures.get("seconds", [None, None])[1] == seconds
    assert {item: name for item, (name, _, _) in find_known(figures).items()} == known


def test_a_run_is_held_to_a_plan_from_its_date_on(hold) -> None:
    run = Clock().start()
    run.steps(1, 4)
    later = run.wall + 10
    run.resume(4, down=100, load=5.0).steps(5, 10, seconds=3.0)
    figures = hold(run, time=later)
    assert figures["seconds"][1] == pytest.approx(18) and figures["step_s"][1] == pytest.approx(3)


def test_a_step_of_fewer_tokens_is_compared_with_as_many(hold) -> None:
    assert hold(whole_run(), tokens_per_s=200.0)["step_s"] == [0.5, 2.0]


def test_without_a_plan_or_a_step_there_is_nothing(hold, tmp_path: Path) -> None:
    assert hold(Clock().start()) == {}
    (tmp_path / "plan.json").unlink()
    assert hold_to_plan(RunPaths(tmp_path)) == {}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("{", "JSON"),
        ("[]", "object"),
        ("{}", "missing"),
        (json.dumps(PLAN | {"time": "noon"}), "missing"),
        (json.dumps(PLAN | {"memory_gib": "much"}), "memory_gib"),
    ],
)
def test_a_damaged_plan_is_named(hold, tmp_path: Path, text: str, word: str) -> None:
    hold(whole_run())
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=word):
        hold_to_plan(RunPaths(tmp_path))


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (
            {"seconds": [250.0, 272.0], "step_s": [1.0, 2.0], "memory_gib": [0.31, 0.308]},
            "plan: predicted 4:10 and 0.31 GiB; took 4:32 (9% more) and 0.31 GiB (1% less)",
        ),
        (
            {"step_s": [0.5, 0.5], "memory_gib": [None, 1.0], "energy_kwh": [2.0, 1.5]},
            "plan: predicted 0.5 s per step and 2 kWh; took 0.5 s per step (as planned) and 1.5 kWh (25% less)",
        ),
    ],
)
def test_the_line_at_the_end(figures, line: str) -> None:
    assert describe(figures) == line


def sample(folder: Path, first_s: float, last_s: float, joules: float, gpus: int = 2) -> None:
    """Write what the sampler writes: rows of GPUs whose counters rise evenly by so much in all."""
    columns = [f"gpu{gpu}_energy_j" for gpu in range(gpus)]
    lines = [",".join(["timestamp", "elapsed_sec", "gpu0_power_w", *columns])]
    for tenth in range(11):
        elapsed_s = first_s + (last_s - first_s) * tenth / 10
        counters = [f"{5000 + joules / gpus * tenth / 10:.3f}"] * gpus
        lines.append(",".join(["", f"{elapsed_s:.4f}", "700.0", *counters]))
    text = "\n".join(lines) + "\n2026,99"  # half a row
    (folder / "gpu_metrics_20261122_090000.csv").write_text(text)


@pytest.mark.parametrize(
    ("last_s", "gpus", "kwh"),
    [
        (34.0, 2, 0.01),  # 9 + 25 s
        (36.0, 2, 0.01),
        (30.0, 2, None),  # the sampler ended earlier
        (60.0, 2, None),  # or went on afterwards
        (34.0, 1, None),
    ],
)
def test_energy_counts_if_all_gpus_were_sampled_all_the_time(
    hold, tmp_path: Path, last_s: float, gpus: int, kwh: float | None
) -> None:
    sample(tmp_path, 0.0, last_s, 36_000.0, gpus)
    found = hold(whole_run(), energy_kwh=0.02).get("energy_kwh")
    assert found == (kwh and [0.02, pytest.approx(kwh)])


def test_damaged_samples_are_no_energy(hold, tmp_path: Path) -> None:
    (tmp_path / "gpu_metrics_1.csv").write_text("elapsed_sec,gpu0_energy_j\n")
    assert "energy_kwh" not in hold(whole_run(), energy_kwh=0.02)
