"""analysis/energy/samples.py: files of samplers made by hand, and the joules in them by formulas of their own."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.energy.samples import Sampler, samplers

WALL, MONO = 1.7635e9, 5000.0  # Unix seconds and monotonic seconds at elapsed_sec 0
UPDATE = 0.1  # seconds that a reading is held
HIGH, LOW, PERIOD, BUSY = 650.0, 250.0, 1.0, 0.85


def power(t: np.ndarray) -> np.ndarray:
    """Watts of a load that repeats every second."""
    return np.where(t % PERIOD < BUSY, HIGH, LOW)


def truth(t: np.ndarray) -> np.ndarray:
    """Joules since 0: whole periods, and what there is of the last."""
    whole, rest = np.divmod(t, PERIOD)
    last = np.minimum(rest, BUSY) * HIGH + np.maximum(0, rest - BUSY) * LOW
    return whole * (BUSY * HIGH + (PERIOD - BUSY) * LOW) + last


def write(
    folder: Path,
    stamp: str,
    t: np.ndarray,
    columns: dict[str, Any],
    about: dict[str, Any] | None,
    tail: str = "",
    wall: float = WALL,
    clock_set: tuple[float, float] = (math.inf, 0.0),
) -> Path:
    """A file with these rows. tail: what a kill left; clock_set: (elapsed, by how much the clock on the wall jumps)."""
    lines = [",".join(["timestamp", "elapsed_sec", *columns])]
    for i, elapsed in enumerate(t.tolist()):
        now = wall + elapsed + clock_set[1] * (elapsed >= clock_set[0])
        stamp_text = np.datetime64(math.floor(now * 1000), "ms").astype(str) + "Z"
        cells = ("" if math.isnan(values[i]) else f"{values[i]:.3f}" for values in columns.values())
        lines.append(",".join([stamp_text, f"{elapsed:.4f}", *cells]))
    path = folder / f"gpu_metrics_{stamp}.csv"
    path.write_text("\n".join(lines) + "\n" + tail)
    if about is not None:
        path.with_suffix(".json").write_text(json.dumps(about))
    return path


def sidecar(
    host: str = "h",
    boot: str | None = "b",
    mono: float = MONO,
    wall: float = WALL,
    node: int = 0,
    **more: Any,
) -> dict[str, Any]:
    anchor = {"time": wall, "mono_s": mono, "elapsed_sec": 0.0}
    return {
        "host": host,
        "node": node,
        "boot_id": boot,
        "interval_ms": 10,
        "elapsed_0": anchor,
        "anchors": [anchor],
    } | more


def only(folder: Path) -> Sampler:
    found, _ = samplers(folder)
    assert len(found) == 1
    return found[0]


def taken(
    sampler: Sampler, *intervals: tuple[float, float], gpu: int = 0
) -> list[tuple[float, float]]:
    """(joules, covered seconds) of intervals by the counter, in elapsed seconds."""
    begins, ends = (np.array([pair[i] for pair in intervals]) + MONO for i in (0, 1))
    meter = next(
        m for m in sampler.measure(np.unique(np.concatenate((begins, ends)))) if m.index == gpu
    )
    return [
        (j, s)
        for j, s in zip(*(a.tolist() for a in meter.counter.between(begins, ends)), strict=True)
    ]


def flat(t: np.ndarray, watts: float = 300.0, at: float = 0.0) -> np.ndarray:
    """A counter of a GPU that takes so much, with a value for every row."""
    return at + watts * t


# ---- How well


@pytest.mark.parametrize(("window", "limit"), [(0.35, 2.0), (0.73, 1.0), (2.37, 0.5)])
def test_windows_between_change_points_against_the_truth(
    tmp_path: Path, window: float, limit: float
) -> None:
    """RMS error of windows at random moments, in per cent of their mean: change points, lines between polls, power."""
    t = np.arange(0, 60, 0.01)
    held = np.floor(t / UPDATE + 1e-6) * UPDATE
    counter, instant = truth(held + 7), power(held + 7)
    write(tmp_path, "1", t, {"gpu0_power_w": instant, "gpu0_energy_j": counter}, sidecar())
    begins = np.random.default_rng(3).uniform(1, 55, 400)
    exact = truth(begins + window + 7) - truth(begins + 7)
    moments = np.unique(np.concatenate((begins, begins + window)) + MONO)
    meter = only(tmp_path).measure(moments)[0]
    found = {}
    for name, curve in (("counter", meter.counter), ("power", meter.power)):
        at = np.interp(np.concatenate((begins, begins + window)) + MONO, moments, curve.joules)
        found[name] = at[400:] - at[:400]
    found["polls"] = np.interp(begins + window, t, counter) - np.interp(begins, t, counter)
    error = {
        name: 100 * float(np.sqrt(np.mean((joules - exact) ** 2)) / exact.mean())
        for name, joules in found.items()
    }
    assert error["counter"] < limit
    assert error["polls"] > 3 * error["counter"] and error["power"] > 1.5 * error["counter"]


def test_blocks_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = np.arange(0, 20, 0.01)
    held = np.floor(t / UPDATE + 1e-6) * UPDATE
    write(tmp_path, "1", t, {"gpu0_power_w": power(held), "gpu0_energy_j": truth(held)}, sidecar())
    whole = taken(only(tmp_path), (1.234, 7.5), (7.5, 19.0))
    monkeypatch.setattr("analysis.energy.samples.BLOCK_BYTES", 997)
    assert taken(only(tmp_path), (1.234, 7.5), (7.5, 19.0)) == [
        pytest.approx(pair) for pair in whole
    ]
    assert whole[0][0] == pytest.approx(
        float(truth(np.array(7.5)) - truth(np.array(1.234))), rel=2e-3
    )


# ---- What is not covered


def test_outside_of_the_samples_nothing_is_covered(tmp_path: Path) -> None:
    t = np.arange(10, 20, 0.01)
    write(tmp_path, "1", t, {"gpu0_energy_j": flat(t)}, sidecar())
    before, across, inside, after = taken(only(tmp_path), (0, 5), (5, 12), (12, 14), (19, 30))
    assert before == (0, 0)
    assert across == pytest.approx(
        (300 * 1.99, 1.99)
    )  # from the first change, a row behind the first reading
    assert inside == pytest.approx((600, 2))
    assert after == pytest.approx((300 * 0.99, 0.99))


def test_a_lost_gpu_is_a_hole_whose_whole_the_counter_knows(tmp_path: Path) -> None:
    t = np.arange(0, 30, 0.01)
    counter = np.where((t > 10) & (t < 16), np.nan, flat(t, 500.0))
    write(tmp_path, "1", t, {"gpu0_energy_j": counter, "gpu1_energy_j": flat(t, 400.0)}, sidecar())
    sampler = only(tmp_path)
    assert taken(sampler, (5, 20)) == [pytest.approx((7500, 15))]  # around the hole
    first, second = taken(sampler, (5, 13), (13, 20))  # across its inside: only what is seen
    assert first == pytest.approx((2500, 5), abs=6) and second == pytest.approx((2000, 4), abs=6)
    assert taken(sampler, (11, 15)) == [(0, 0)]
    assert taken(sampler, (11, 15), gpu=1) == [pytest.approx((1600, 4))]


@pytest.mark.parametrize("after", [0.0, 3.0e9])
def test_a_counter_that_falls_or_leaps_says_nothing_of_that_moment(
    tmp_path: Path, after: float
) -> None:
    """A driver that was loaded again, and a value that no GPU can have reached."""
    t = np.arange(0, 20, 0.01)
    counter = np.where(t < 10, flat(t, 300.0, at=1e6), flat(t - 10, 200.0, at=after))
    write(tmp_path, "1", t, {"gpu0_energy_j": counter}, sidecar())
    ((joules, seconds),) = taken(only(tmp_path), (2, 18))
    assert joules == pytest.approx(8 * 300 + 8 * 200, abs=6)
    assert seconds == pytest.approx(16 - 0.01)


def test_a_counter_that_stands_still_for_long_is_a_hole(tmp_path: Path) -> None:
    t = np.arange(0, 20, 0.01)
    write(
        tmp_path,
        "1",
        t,
        {"gpu0_energy_j": np.where((t > 5) & (t < 12), 1500.0, flat(t))},
        sidecar(),
    )
    assert taken(only(tmp_path), (6, 10), (10, 11)) == [(0, 0), (0, 0)]


# ---- Files


def test_rotated_files_are_one_and_a_torn_last_line_is_none(tmp_path: Path) -> None:
    t = np.arange(0, 30, 0.01)
    parts = [t[t < 10], t[(t >= 10) & (t < 20)], t[t >= 20]]
    for i, part in enumerate(parts):
        tail = "2025-11-21T10:00:30.000Z,30.0000,9" if i == 2 else ""  # of 9000.000
        write(tmp_path, f"20251121_10000{i}", part, {"gpu0_energy_j": flat(part)}, sidecar(), tail)
    assert taken(only(tmp_path), (1, 29)) == [pytest.approx((8400, 28))]


def test_a_sampler_that_was_started_again_leaves_a_hole_and_its_whole_is_known(
    tmp_path: Path,
) -> None:
    t = np.arange(0, 10, 0.01)
    write(tmp_path, "1", t, {"gpu0_energy_j": flat(t)}, sidecar())
    later = sidecar(mono=MONO + 3600, wall=WALL + 3600)
    write(tmp_path, "2", t, {"gpu0_energy_j": flat(t + 3600)}, later, wall=WALL + 3600)
    assert taken(only(tmp_path), (5, 3605)) == [pytest.approx((300 * 3600, 3600))]
    assert taken(only(tmp_path), (5, 100))[0] == pytest.approx((300 * 4.99, 4.99))


def test_another_boot_or_machine_is_another_sampler(tmp_path: Path) -> None:
    t = np.arange(0, 5, 0.01)
    abouts = [
        sidecar(),
        sidecar(boot="c", mono=20.0, wall=WALL + 500),
        sidecar(host="g", node=1),
        sidecar(host="old", boot=None),
        sidecar(host="old", boot=None, mono=MONO + 60, wall=WALL + 60),
        sidecar(host="old", boot=None, mono=30.0, wall=WALL + 900),
    ]
    for i, about in enumerate(abouts):
        write(
            tmp_path, str(i), t, {"gpu0_power_w": flat(t)}, about, wall=about["elapsed_0"]["time"]
        )
    found, said = samplers(tmp_path)
    assert sorted((s.host, s.boot_id, len(s.tables)) for s in found if s.boot_id) == [
        ("g", "b", 1),
        ("h", "b", 1),
        ("h", "c", 1),
    ]
    assert [len(s.tables) for s in found if s.host == "old"] == [2, 1] and said == []


def test_a_file_without_sidecar_is_joined_by_its_wall_clock_and_the_last_counts(
    tmp_path: Path,
) -> None:
    t = np.arange(0, 20, 0.01)
    write(tmp_path, "1", t, {"gpu0_energy_j": flat(t)}, None, clock_set=(8.0, 3600.0))
    found, said = samplers(tmp_path)
    assert not found[0].monotonic and found[0].span == pytest.approx(
        (WALL + 3600, WALL + 3600 + 19.99), abs=2e-3
    )
    assert "no .json beside it" in said[0] and "set by 3600.00 s" in said[1]
    (tmp_path / "gpu_metrics_1.json").write_text('{"anchors": [], ')
    found, said = samplers(tmp_path)
    assert not found[0].monotonic and said[0].startswith(
        "gpu_metrics_1.json cannot be used (JSONDecodeError"
    )


def test_a_rotated_file_whose_sidecar_was_never_written_goes_on_from_the_one_before(
    tmp_path: Path,
) -> None:
    t = np.arange(0, 20, 0.01)
    write(tmp_path, "1", t[:1000], {"gpu0_energy_j": flat(t[:1000])}, sidecar())
    write(tmp_path, "2", t[1000:], {"gpu0_energy_j": flat(t[1000:])}, None)
    _, said = samplers(tmp_path)
    assert said == [
        "gpu_metrics_2.csv has no .json beside it; by its clock it goes on from gpu_metrics_1.csv"
    ]
    assert taken(only(tmp_path), (5, 15)) == [pytest.approx((3000, 10))]


def test_damaged_rows_are_counted_and_files_of_others_named(tmp_path: Path) -> None:
    t = np.arange(0, 10, 0.01)
    path = write(tmp_path, "1", t, {"gpu0_energy_j": flat(t)}, sidecar())
    lines = path.read_text().splitlines()
    lines[300] = "\0" * 40
    lines[400] = lines[400][:-6] + "x" * 6
    lines[500] += ",1.0"
    path.write_text("\n".join(lines) + "\n")
    (tmp_path / "gpu_metrics_2.csv").write_text("time,power\n1,2\n")
    (tmp_path / "gpu_metrics_3.csv").write_text(
        "timestamp,elapsed_sec,gpu0_power_w\n2025-11-21 10:00:00,0.0,300\n"
    )
    (tmp_path / "gpu_metrics_4.csv").write_text(
        "timestamp,elapsed_sec,gpu0_power_w\n2025-11-21T10:0"
    )
    found, said = samplers(tmp_path)
    assert len(found) == 1 and [line.split(" is left out")[0] for line in said] == [
        "gpu_metrics_2.csv",
        "gpu_metrics_3.csv",
    ]
    assert "time zone" in said[1]
    assert taken(found[0], (1, 9)) == [pytest.approx((2400, 8))]
    assert found[0].remarks == ["gpu_metrics_1.csv: 3 damaged rows left out"]


@pytest.mark.parametrize(
    "row", [b"\377\376", b"\377\376,1,2", b"2025-11-21T10:00:05.000Z,\377,1500.000"]
)
def test_a_row_that_is_no_text_is_a_damaged_one(tmp_path: Path, row: bytes) -> None:
    t = np.arange(0, 10, 0.01)
    path = write(tmp_path, "1", t, {"gpu0_energy_j": flat(t)}, sidecar())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:500], row + b"\n", *lines[500:]]))
    sampler = only(tmp_path)
    assert taken(sampler, (1, 9)) == [pytest.approx((2400, 8))]
    with open(path, "ab") as file:
        file.write(row + b"\n")
    sampler = only(tmp_path)
    assert taken(sampler, (1, 9)) == [pytest.approx((2400, 8))]
    assert sampler.remarks == ["gpu_metrics_1.csv: 2 damaged rows left out"]


def test_power_is_the_instant_one_where_that_is_known_and_garbage_is_none(tmp_path: Path) -> None:
    t = np.arange(0, 10, 0.01)
    instant = np.where(t < 5, 500.0, np.nan)
    instant[200] = 4294967.295  # 2^32 - 1 mW
    write(
        tmp_path,
        "1",
        t,
        {"gpu0_power_w": np.full(len(t), 300.0), "gpu0_power_inst_w": instant},
        sidecar(),
    )
    begins, ends = np.array([1.0, 6.0]) + MONO, np.array([4.0, 9.0]) + MONO
    (meter,) = only(tmp_path).measure(np.concatenate((begins, ends))[[0, 2, 1, 3]])
    joules, seconds = meter.power.between(begins, ends)
    assert joules.tolist() == pytest.approx([1500, 900]) and seconds.tolist() == pytest.approx(
        [3, 3]
    )
    assert meter.counter.joules.tolist() == [0] * 4
