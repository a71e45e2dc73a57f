"""bench/sampler.py: one short round of each part, and the lines of its table."""

import re
import shutil

import pytest

from bench import run, sampler
from settings.config import Config

needs_gcc = pytest.mark.skipif(
    not shutil.which("gcc"), reason="no gcc here to compile the stand-in for NVML with"
)


@needs_gcc
def test_rate_and_cost_are_measured_for_each_number_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "gpus_here", lambda: 0)
    found = list(sampler.cost(1, turn_s=0.3))
    assert [row["gpus"] for row in found] == [1, 2, 8]
    for row in found:
        (taken,) = row["rounds"]
        slots = taken["samples"] + taken["missed"]
        assert (
            taken["hz"] == pytest.approx(100 * taken["samples"] / slots, abs=0.01) and slots >= 20
        )
        assert 0 < taken["cpu_percent"] < 100
        columns = 2 + row["gpus"] * 4
        assert taken["bytes"] / taken["samples"] > 2 * columns
        assert re.match(
            rf"\| {row['gpus']} GPUs? of the stand-in library \| [0-9.]+ \(",
            sampler.row(row, run.spread),
        )


@needs_gcc
def test_a_step_is_timed_with_and_without_it_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "gpus_here", lambda: 0)
    monkeypatch.setattr(sampler, "PAIRS", 2)
    (found,) = sampler.effect(1, steps_s=0.05)
    assert (found["shape"], found["gpus"], len(found["rounds"])) == ("tiny", 8, 2)
    assert all(taken["step_ms"] > 0 and 0.01 < taken["ratio"] < 100 for taken in found["rounds"])
    assert (
        "| a step of tiny in float32 beside it, 8 GPUs of the stand-in library | "
        in sampler.row(found, run.spread)
    )


def test_without_a_compiler_and_a_gpu_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "gpus_here", lambda: 0)
    monkeypatch.setattr(sampler.shutil, "which", lambda _: None)
    assert list(sampler.cost(1)) == []


def test_a_line_has_medians_and_the_worst_load() -> None:
    rounds = [
        {
            "hz": hz,
            "missed": m,
            "cpu_percent": c,
            "bytes": 100 * n,
            "samples": n,
            "foreign_percent": f,
        }
        for hz, m, c, n, f in (
            (100.0, 0, 1.0, 500, 2.0),
            (99.8, 1, 1.5, 499, 3.0),
            (90.0, 50, 2.5, 450, 30.0),
        )
    ]
    row = {"part": "cost", "library": "stand-in", "gpus": 1, "rounds": rounds}
    assert sampler.row(row, run.spread) == (
        "| 1 GPU of the stand-in library | 99.8 (90.0-100.0) Hz, 1 (0-50) slots missed, "
        "1.50 (1.00-2.50)% of one core, 36 MB an hour | 100.0 Hz, under 4% | 30 |"
    )


def test_make_bench_knows_it_by_name() -> None:
    assert list(run.cells(Config(bench_shapes="sampler"), on_gpu=False)) == []
