"""make bench's rows of a whole run: what is read out of its record and trace, and one real run."""

import pytest

from bench import run, whole_run
from doctor.gpu_probe.shapes import SHAPES, Shape


def test_speed_is_that_between_the_lines_of_the_record() -> None:
    """Three steps of 100 tokens in 6 s, of which the steps themselves took 4."""
    steps = [
        {"mono_s": at, "mfu": mfu, "step_ms": ms, "data_wait_s": wait}
        for at, mfu, ms, wait in (
            (10.0, 90.0, 1.0, 9.0),
            (12.0, 40.0, 1000.0, 0.1),
            (13.0, 50.0, 1000.0, 0.3),
            (16.0, 45.0, 2000.0, 0.2),
        )
    ]
    assert whole_run.of_record(steps, 100) == {
        "steps": 3,
        "tokens_per_s": 50.0,
        "mfu": 45.0,
        "step_s": 1.0,
        "data_wait_s": 0.2,
    }
    assert whole_run.of_record([step | {"mfu": None} for step in steps], 100)["mfu"] is None


def taken(**changes: object) -> dict:
    """A round of a shape whose step of 2 x 8 tokens is 1,280 FLOPs of weights and 256 of attention a token."""
    return {
        "bare": {"step_s": 1.0, "ceiling_flops_s": 16 * 1536 / 0.75},
        "steps": 8,
        "tokens_per_s": 12.0,
        "mfu": None,
        "step_s": 1.25,
        "data_wait_s": 0.025,
        "profiled_step_s": 1.5,
        "foreign_percent": 3.0,
        "percent": {"matmul": 50.0, "attention": 20.0, "loss": 10.0, "host gaps": 20.0},
    } | changes


def test_the_time_of_a_profiled_step_is_divided_into_the_ceiling_s_part_and_what_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = Shape("small", 1, 4, 1, 5.333333333333333, 5.333333333333333, 1.5, 2)  # type: ignore[arg-type]
    assert shape.flops_per_token == pytest.approx(1280 + 256) and shape.tokens == 8
    parts = whole_run.divided(shape, taken())
    assert parts == pytest.approx(
        {  # at the ceiling 0.75 s of 1.5, a sixth of which is attention's
            "at the ceiling's speed": 50.0,
            "products beyond that": 50 - 50 * 5 / 6,
            "attention beyond that": 20 - 50 / 6,
            "loss": 10.0,
            "host gaps": 20.0,
        }
    )
    assert sum(parts.values()) == pytest.approx(100)
    monkeypatch.setitem(SHAPES, "small", shape)
    line = whole_run.row(
        {"shape": "small", "rounds": [taken(), taken(mfu=None, tokens_per_s=16.0)]}, run.spread
    )
    assert line == (
        "| small, 2 x 8.0 tokens a step | 14 (12-16) | n/a | 65.6 (56.2-75.0) | 87.5 (75.0-100.0) | "
        "2.00 (2.00-2.00) | at the ceiling's speed 50.0, products beyond that 8.3, attention beyond that "
        "11.7, loss 10.0, host gaps 20.0 | 3 |"
    )
    assert {text.count("|") for text in (*whole_run.HEADER_ROWS, line)} == {9}


def test_a_whole_run_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_run, "MOST", 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = whole_run.measure(SHAPES["tiny"], 1)
    (once,) = found["rounds"]
    assert once["steps"] == 8 and once["mfu"] is None  # a CPU's peak is not known
    assert 0 < once["data_wait_s"] < once["step_s"] < 256 * 8 / once["tokens_per_s"]
    assert (
        sum(once["percent"].values()) == pytest.approx(100, abs=0.5)
        and once["percent"]["matmul"] > 0
    )
    assert 0 < once["bare"]["step_s"] < 10 and once["bare"]["ceiling_flops_s"] > 1e8
    assert whole_run.row(found, run.spread).startswith("| tiny, 1 x 256 tokens a step | ")
