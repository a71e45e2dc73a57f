"""What a sampler writes, against what the stand-in for NVML is known to do, in a time that only passes in sleeps."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from tests.monitor.conftest import BUSY, HIGH, LOW, PERIOD, Sampled, energy, held, power

InTime = Callable[..., Sampled]


def test_the_columns_that_users_know_come_first(in_time: InTime) -> None:
    columns = list(in_time(1, fake={"GPUS": 3}).rows[0])
    assert columns == [
        "timestamp",
        "elapsed_sec",
        "gpu0_power_w",
        "gpu0_temp_c",
        "gpu1_power_w",
        "gpu1_temp_c",
        "gpu2_power_w",
        "gpu2_temp_c",
        "gpu0_power_inst_w",
        "gpu0_energy_j",
        "gpu1_power_inst_w",
        "gpu1_energy_j",
        "gpu2_power_inst_w",
        "gpu2_energy_j",
    ]


@pytest.mark.parametrize("count", [1, 8, 16])
def test_every_value_is_that_of_its_moment(in_time: InTime, count: int) -> None:
    found = in_time(5, fake={"GPUS": count}, late_ms=8)
    assert len(found.rows) == 500 == found.about["samples"]
    for row in found.rows:
        moments = held(found.mono(row))
        for gpu in range(count):
            assert any(
                row[f"gpu{gpu}_power_inst_w"] == pytest.approx(power(gpu, t), abs=1e-3)
                for t in moments
            )
            assert any(
                row[f"gpu{gpu}_energy_j"] == pytest.approx(energy(gpu, t), abs=2e-3)
                for t in moments
            )
            mean = [energy(gpu, t) - energy(gpu, t - 1) for t in moments]  # W: joules of one second
            assert any(row[f"gpu{gpu}_power_w"] == pytest.approx(m, abs=2e-3) for m in mean)
            assert row[f"gpu{gpu}_temp_c"] == 60 + gpu
    assert max(abs(row["elapsed_sec"] - k / 100) for k, row in enumerate(found.rows)) <= 0.0085


def test_energy_and_both_powers_agree_over_whole_periods(in_time: InTime) -> None:
    """26 s are 20 periods; their mean power is known. The mean of a second lags, by what whole periods cancel."""
    found = in_time(27.5)
    rows = found.rows[110 : 110 + 2600]
    mean = (BUSY * HIGH + (PERIOD - BUSY) * LOW) / PERIOD - 10  # of GPU 1
    counted = found.rows[110 + 2600]["gpu1_energy_j"] - rows[0]["gpu1_energy_j"]
    assert counted == pytest.approx(26 * mean, abs=0.01)
    for column in ("gpu1_power_inst_w", "gpu1_power_w"):
        assert sum(row[column] for row in rows) * 0.01 == pytest.approx(26 * mean, rel=0.002)


@pytest.mark.parametrize(("update_ms", "late_ms"), [(20, 0), (20, 2), (100, 0), (100, 9), (250, 9)])
def test_how_often_readings_are_new_is_found(in_time: InTime, update_ms: int, late_ms: int) -> None:
    found = in_time(25, fake={"UPDATE_MS": update_ms}, late_ms=late_ms)
    for gpu in found.about["gpus"]:
        assert gpu["readings"]["energy_j"]["period_ms"] == pytest.approx(update_ms, rel=0.02)
        assert gpu["readings"]["power_w"]["period_ms"] == pytest.approx(update_ms, rel=0.02)
        assert gpu["readings"]["temp_c"] == {"period_ms": None, "changes": 1}
    assert f"energy_j every {update_ms} ms; rows in between repeat them" in found.said


def test_readings_as_fast_as_the_slots_are_told_by_the_first_look(in_time: InTime) -> None:
    found = in_time(12, fake={"UPDATE_MS": 10})
    energy_j = found.about["gpus"][0]["readings"]["energy_j"]
    assert energy_j["period_ms"] is None and energy_j["at_most_ms"] == 20
    assert found.about["first_look"]["readings"]["energy_j"]["period_ms"] == pytest.approx(
        10, rel=0.02
    )
    assert "energy_j every 10 ms" in found.said


def test_slots_that_were_missed_are_counted_and_the_others_stay_where_they_are(
    in_time: InTime,
) -> None:
    found = in_time(8, late_ms=5, stalls=[[100, 0.25], [300, 1.0]])
    about = found.about
    assert about["samples"] + about["missed"] == about["slots"] == 800
    assert about["missed"] in (25 + 100, 25 + 99, 24 + 100, 24 + 99) and about["samples"] == len(
        found.rows
    )
    assert about["hz"] == pytest.approx(100 * about["samples"] / 800, abs=0.01)
    assert f"{about['missed']} slots missed" in found.said
    slots = [int(row["elapsed_sec"] * 100 + 1e-6) for row in found.rows]
    assert slots == sorted(set(slots)) and slots[-1] == 799
    assert about["gpus"][1]["readings"]["energy_j"]["period_ms"] == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize(("interval_ms", "rows"), [(1, 3000), (2.5, 1200), (1000, 3)])
def test_other_intervals(in_time: InTime, interval_ms: float, rows: int) -> None:
    found = in_time(3, interval_ms=interval_ms)
    assert (len(found.rows), found.about["missed"]) == (rows, 0)
    assert [row["elapsed_sec"] for row in found.rows[:3]] == [
        round(k * interval_ms / 1000, 4) for k in range(3)
    ]
    assert len(found.slow) == 3


def test_slow_rows_come_once_a_second(in_time: InTime) -> None:
    found = in_time(4, fake={"GPUS": 16}, late_ms=2)
    assert [row["elapsed_sec"] for row in found.slow] == pytest.approx([0, 1, 2, 3], abs=0.0025)
    for row in found.slow:
        for gpu in range(16):
            assert [
                row[f"gpu{gpu}_{name}"]
                for name in (
                    "mem_used_gib",
                    "util_percent",
                    "mem_util_percent",
                    "sm_mhz",
                    "mem_mhz",
                    "throttle",
                )
            ] == [20, 90 + gpu, 40, 1755, 2619, "power_cap+sw_thermal" if gpu else "power_cap"]
    first = [name for name in found.slow[0] if not name.startswith("net_")]
    assert (
        first[:3] == ["timestamp", "elapsed_sec", "gpu0_mem_used_gib"] and len(first) == 2 + 16 * 6
    )


def test_timestamps_are_utc_and_every_jump_of_the_clock_has_an_anchor(in_time: InTime) -> None:
    found = in_time(30, clock_set=[1000, -3600.0])
    about, anchors = found.about, found.about["anchors"]
    assert about["elapsed_0"] == anchors[0] and len(anchors) == 2
    assert anchors[0]["elapsed_sec"] == 0
    offsets = [a["time"] - a["mono_s"] for a in anchors]
    assert offsets == pytest.approx([1.7e9, 1.7e9 - 3600], abs=1e-3)
    for row, offset in ((found.rows[500], offsets[0]), (found.rows[2500], offsets[1])):
        moment = datetime.fromtimestamp(found.mono(row) + offset, UTC)
        said = datetime.fromisoformat(row["timestamp"])
        assert abs((said - moment).total_seconds()) < 0.0015
    elapsed = [row["elapsed_sec"] for row in found.rows]
    assert elapsed == sorted(elapsed)


# ---- What fails


def test_a_gpu_that_is_lost_is_empty_cells_and_one_line_and_the_others_go_on(
    in_time: InTime,
) -> None:
    found = in_time(10, fake={"GPUS": 3, "LOST": "1:3000:3020"})
    rows = found.rows
    empty = [k for k, row in enumerate(rows) if row["gpu1_energy_j"] is None]
    assert (
        empty == list(range(empty[0], empty[-1] + 1))
        and len(empty) > 10
        and empty[-1] < len(rows) - 100
    )
    lost = rows[empty[10]]
    assert all(
        lost[f"gpu1_{name}"] is None for name in ("power_w", "temp_c", "power_inst_w", "energy_j")
    )
    assert all(
        value is not None
        for row in rows
        for name, value in row.items()
        if not name.startswith("gpu1_")
    )
    assert (
        found.said.count("gpu1: GPU is lost") == 1 and found.said.count("gpu1 answers again") == 1
    )
    faults = found.about["gpus"][1]["faults"]
    assert sum(count for name in faults for count in faults[name].values()) == 20
    assert rows[-1]["gpu1_energy_j"] == pytest.approx(
        energy(1, held(found.mono(rows[-1]))[0]), abs=2e-3
    )
    assert found.about["samples"] == 1000 and found.about["gpus"][0]["faults"] == {}


def test_a_gpu_that_never_answers_has_its_columns_all_the_same(in_time: InTime) -> None:
    found = in_time(2, fake={"LOST": "0:0:1000000"})
    assert all(row["gpu0_power_w"] is None and row["gpu1_power_w"] for row in found.rows)
    assert found.said.count("gpu0") == 1 and "gpu0: GPU is lost" in found.said


@pytest.mark.parametrize(
    "lacks", ["power", "temperature", "power_inst", "energy", "memory", "throttle"]
)
def test_what_is_not_supported_is_an_empty_cell_and_one_line_never_a_zero(
    in_time: InTime, lacks: str
) -> None:
    column = {
        "power": "power_w",
        "temperature": "temp_c",
        "energy": "energy_j",
        "memory": "mem_used_gib",
        "power_inst": "power_inst_w",
        "throttle": "throttle",
    }[lacks]
    found = in_time(2, fake={"LACKS": lacks})
    for row in [a | b for a, b in zip(found.rows, found.slow, strict=False)]:
        for gpu in (0, 1):
            cells = {
                name.removeprefix(f"gpu{gpu}_"): value
                for name, value in row.items()
                if name.startswith(f"gpu{gpu}_")
            }
            assert [name for name, value in cells.items() if value is None] == [column]
    assert [line for line in found.said.splitlines() if "Not Supported" in line] == [
        f"gpu0_{column}: Not Supported; the cells of such GPUs stay empty"
    ]


def test_a_field_that_fails_later_shows_no_stale_value(in_time: InTime) -> None:
    """Its own code says so, while the call itself succeeds."""
    column = [
        row["gpu1_power_inst_w"]
        for row in in_time(5, fake={"LACKS": "power_inst", "LACKS_FROM": 1000}).rows
    ]
    there = sum(value is not None for value in column)
    assert 100 < there < 400 and None not in column[:there] and set(column[there:]) == {None}


def test_an_older_driver_is_asked_in_the_older_way(in_time: InTime) -> None:
    found = in_time(2, old=True)
    for row in found.rows:
        assert (row["gpu1_temp_c"], row["gpu1_power_inst_w"]) == (61, None)
        assert row["gpu1_power_w"] and row["gpu1_energy_j"]
    assert [found.slow[1][f"gpu1_{name}"] for name in ("mem_used_gib", "throttle")] == [
        21,
        "power_cap+sw_thermal",
    ]
    assert found.said.count("gpu") == 1 and "gpu0_power_inst_w: Function Not Found" in found.said


# ---- Files


def test_a_file_that_is_large_is_followed_by_another(in_time: InTime) -> None:
    found = in_time(60, rotate_bytes=150_000)
    assert len(found.fast_files) == len(found.slow_files) > 2
    assert all(path.stat().st_size < 150_000 + 100 * 150 for path in found.fast_files)
    assert len(found.rows) == 6000 == sum(about["rows"] for about in found.sidecars)
    assert len(found.slow) == 60 == sum(about["slow_rows"] for about in found.sidecars)
    elapsed = [row["elapsed_sec"] for row in found.rows]
    assert elapsed == pytest.approx([k / 100 for k in range(6000)], abs=1e-4)
    for path, slow, about in zip(found.fast_files, found.slow_files, found.sidecars, strict=True):
        assert (
            about["files"] == [path.name, slow.name]
            and about["elapsed_0"] == found.about["elapsed_0"]
        )
    assert [about["ended"] for about in found.sidecars] == [None] * (len(found.sidecars) - 1) + [
        "the end"
    ]


def test_the_size_that_is_announced_is_that_of_the_file(in_time: InTime) -> None:
    found = in_time(20, fake={"GPUS": 8})
    announced = float(found.said.split("bytes an hour: ")[1].split()[0])
    assert found.fast_files[0].stat().st_size / 20 * 3600 == pytest.approx(announced, rel=0.03)
