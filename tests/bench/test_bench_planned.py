"""The benchmark of what is planned: its rows, and one that is really run."""

import re

import pytest

from bench import planned, run
from hardware.model_size import parameters
from settings.config import Config


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_every_row_is_a_step_of_two_micro_batches_that_its_processes_share(gpus: int) -> None:
    rows = planned.rows(gpus)
    assert len({row.text for row in rows}) == len(rows)
    for row in rows:
        c = row.config
        assert c.batch_windows == 2 * row.processes * c.micro_batch(row.processes)
        assert c.save_every == 0 and c.compile in "01"
        assert row.processes == 1 or (c.parallel in ("ddp", "fsdp") and row.processes in (2, gpus))
    kinds = {(row.config.dtype, row.config.compile) for row in rows}
    assert kinds >= {("bfloat16", "0"), ("bfloat16", "1"), ("float32", "0")}
    assert any(row.processes > 1 for row in rows) == (gpus != 1)


def test_a_line_has_predicted_over_measured_and_n_a_for_what_is_not_known() -> None:
    found = {
        "row": "tiny",
        "parameters": 1000,
        "peak_mib": 200.0,
        "step_s": 0.5,
        "spread_s": [0.45, 0.625],
        "predicted": {"parameters": 1000, "mib": 190.0, "step_s": 0.4},
    }
    assert (
        planned.line(found)
        == "| tiny | 1,000 = 1,000 | 190, 200, 0.95 | 0.400, 0.500 (0.450-0.625), 0.80 |"
    )
    found["predicted"] = {"parameters": 1001, "mib": 190.0, "step_s": None}
    assert (
        planned.line(found)
        == "| tiny | 1,001 is not 1,000 | 190, 200, 0.95 | n/a, 0.500 (0.450-0.625) |"
    )


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_row_is_measured(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    row = planned.row_of(
        "tiny", "float32", "eager", processes, **({"parallel": "fsdp"} if processes > 1 else {})
    )
    found = planned.measured(row)
    count = parameters(row.config).total
    assert found["parameters"] == found["predicted"]["parameters"] == count
    assert found["predicted"]["mib"] == pytest.approx(
        found["peak_mib"], rel=0.15
    )  # Python and torch
    assert (
        0 < found["step_s"] < 20
        and 0.001 < found["products_tflops"] < 100
        and found["predicted"]["step_s"] > 0
    )
    assert re.match(r"\| tiny, float32, eager.* \| ([\d,]+) = \1 \| ", planned.line(found))


def test_bench_shapes_may_name_the_plan() -> None:
    assert list(run.cells(Config(bench_shapes="plan"), on_gpu=False)) == []
