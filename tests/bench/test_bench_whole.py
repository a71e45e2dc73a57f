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


def event(name: str, ts: float, dur: float, cat: str, tid: int = 1) -> dict:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


def test_the_time_of_a_profiled_step_is_read_from_its_trace() -> None:
    marks = [event(f"ProfilerStep#{n}", 100 + 100 * n, 100, "user_annotation") for n in (0, 1)]
    on_cpu = [
        event("aten::mm", 50, 10, "cpu_op"),  # before
        event("aten::linear", 100, 40, "cpu_op"),
        event("aten::mm", 110, 30, "cpu_op"),  # in linear
        event("aten::bmm", 150, 20, "cpu_op"),
        event("MulBackward0", 200, 30, "cpu_op"),
        event("aten::mul", 210, 10, "cpu_op"),
        event("aten::mm", 250, 50, "cpu_op", tid=2),  # another thread
    ]
    assert whole_run.of_trace(marks + on_cpu) == {
        "profiled_step_s": 1e-4,
        "percent": {"matmul": 20, "attention": 10, "other work": 15, "gaps": 55},
    }
    on_gpu = [
        event("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT", 100, 60, "kernel"),
        event("void cutlass::device_kernel<flash::FlashAttnFwdSm90<X>>", 160, 40, "kernel"),
        event("triton_poi_fused_mul_silu_3", 190, 60, "kernel"),  # on another stream for 10 us
    ]
    assert whole_run.of_trace(marks + on_cpu + on_gpu)["percent"] == {
        "matmul": 30,
        "attention": 20,
        "other work": 25,
        "gaps": 25,
    }


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
