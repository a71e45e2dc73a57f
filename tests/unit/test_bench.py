"""The benchmark: what it counts, what it leaves out, and one real cell of it."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import load, run
from bench.shapes import SHAPES
from train.config import Config
from train.settings import SettingsError


def cell(loads: list[float | None], ours: list[float], peer: list[float] | None = None) -> dict:
    """A measured cell with these rounds."""
    speeds = [{"ours": a, "ceiling": 2 * a} | ({"nanoGPT": b} if peer else {})
              for a, b in zip(ours, peer or ours, strict=True)]
    names = speeds[0].keys()
    return {"shape": "s4k", "dtype": "float32", "mode": "eager", "peak_mib": dict.fromkeys(names, 1000.0),
            "first_step_s": dict.fromkeys(names, 3.0),
            "rounds": [{"foreign_percent": f, "tokens_per_s": s} for f, s in zip(loads, speeds, strict=True)]}


def test_flops_of_the_shapes_are_those_of_their_products() -> None:
    """Blocks of 4 C^2 + 8 C^2 weights: 187 and 80 million FLOPs a token for the shapes that others were measured on."""
    assert SHAPES["s50k"].flops_per_token == pytest.approx(187e6, rel=0.01)
    assert SHAPES["s4k"].flops_per_token == pytest.approx(80e6, rel=0.01)
    assert SHAPES["s50k"].tokens == 4096


def test_a_row_has_medians_and_spreads_of_ratios_within_a_round() -> None:
    row = run.row(cell([0.0, 1.0, 2.0], [100.0, 200.0, 400.0], [100.0, 100.0, 100.0]))
    assert "| 200 (100-400) | 50 (50-50) | 1000 | 3.0 | 2 | nanoGPT: 2.00 (1.00-4.00), which has 100 (100-100)" in row
    assert run.row(cell([None] * 3, [1.0, 2.0, 3.0])).endswith("| n/a | no peer given |")


def test_disturbed_rounds_are_left_out_unless_too_few_remain() -> None:
    kept, quiet = run.chosen(cell([1.0, 50.0, 2.0, 5.0], [1.0, 2.0, 3.0, 4.0]))
    assert quiet and [r["tokens_per_s"]["ours"] for r in kept] == [1.0, 3.0, 4.0]
    disturbed = cell([1.0, 50.0, 2.0, 60.0], [1.0, 2.0, 3.0, 4.0])
    assert run.chosen(disturbed) == (disturbed["rounds"], False)
    assert "(disturbed)" in run.row(disturbed)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_foreign_load_is_what_others_take_and_not_what_the_benchmark_takes() -> None:
    burn = [sys.executable, "-c", "import time; end = time.time() + 1.5\nwhile time.time() < end: pass"]
    found = {}
    for ours in (True, False):
        process = subprocess.Popen(burn)
        foreign = load.Foreign([process.pid] if ours else [], time.monotonic())
        time.sleep(1.0)
        found[ours] = foreign.percent(time.monotonic())
        process.wait()
    one_core = 100 / (load.os.cpu_count() or 1)
    assert found[False] is not None and found[True] is not None
    assert found[False] - found[True] > 0.3 * one_core  # the rest of the machine may be busy in both


def test_a_shape_or_a_peer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"BENCH_SHAPES=s4k,huge: huge is no shape; there are tiny, s4k, s50k"):
        list(run.cells(Config(bench_shapes="s4k,huge"), on_gpu=False))
    with pytest.raises(SettingsError, match="holds no checkout of nanoGPT"):
        run.peers_in(str(tmp_path))
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT" / "model.py").touch()
    assert run.peers_in(str(tmp_path)) == {"nanoGPT": tmp_path / "nanoGPT"}
    assert run.peers_in("") == {}
    modes = [(s.name, dtype, mode) for s, dtype, mode in run.cells(Config(bench_shapes="s4k"), on_gpu=False)]
    assert modes == [("s4k", d, m) for d in ("float32", "bfloat16") for m in ("eager", "compiled")]
    assert [d for _, d, _ in run.cells(Config(bench_shapes="s4k"), on_gpu=True)] == ["bfloat16"] * 2


def test_a_cell_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TURN_S", 0.2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = run.measure(SHAPES["tiny"], "float32", "eager", {}, rounds=2, on_gpu=False)
    for taken in found["rounds"]:
        speeds = taken["tokens_per_s"]
        assert 0 < speeds["ours"] < speeds["ceiling"]
    assert 1 < found["first_step_s"]["ours"] < 60
    assert 0 < found["loss"]["ours"] < 6.2  # nats; 512 entries, and the same few windows at each step
    assert 100 < found["peak_mib"]["ours"] < 2000
    assert re.match(r"\| tiny \| float32 \| eager \| \d+ \(", run.row(found))


def test_a_worker_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="ours no-such-shape float32 eager ended with exit code 1"):
        run.Worker("ours", "no-such-shape", "float32", "eager", cache="/tmp")
