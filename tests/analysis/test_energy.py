"""analysis/energy/energy.py: a record and samples by hand, and the joules of each cause worked out beside them.

The GPUs' power rises by 10 W a second, so that every second has joules of its own: those from a to b seconds since the
first start are 100 (b - a) + 5 (b^2 - a^2).
"""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.curves import summary
from analysis.energy import energy
from analysis.energy.energy import UNSPLIT, join
from analysis.load import Energy, load
from analysis.prices import Prices
from analysis.tables import write_tables
from tests.analysis.test_samples import sidecar, write
from tests.record.clock import START, Clock

FREE = Prices(None, None)
NODES = {"event": "start", "world_size": 4}


def up_to(t: np.ndarray | float) -> Any:
    return 100 * t + 5 * np.square(t)


def joules(*intervals: tuple[float, float]) -> float:
    return float(sum(up_to(b) - up_to(a) for a, b in intervals))


def a_run(folder: Path) -> tuple[Path, Clock]:
    """Ten steps, an evaluation, a save, a kill; from step 6 on another boot. Seconds since the start are beside it."""
    run = Clock().start(model=10.0).steps(1, 10, wait=0.5)  # 10, 30
    run.write("eval", 10, 5.0, eval_s=4.0, val_loss=3.0)  # 35
    run.write("step", 11, 4.0, step_ms=2000.0, data_wait_s=0.5, checkpoint_stall_s=2.0)  # 39
    run.resume(6, down=20.0, model=5.0).steps(7, 8)  # 59, 64, 68
    return put(folder, run), run


def put(folder: Path, run: Clock, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        record | {"tokens_per_s": 50.0} | (more if record["event"] in ("start", "resume") else {})
        for record in run.records
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def sampled(
    folder: Path,
    name: str = "1",
    first: float = -5.0,
    last: float = 80.0,
    gpus: int = 1,
    wall: float = START,
    about: dict[str, Any] | None = None,
    hole: tuple[float, float] = (0.0, 0.0),
    **columns: Any,
) -> None:
    """Rows from first to last seconds since the start; GPU i takes what GPU 0 takes, and 50 i W more."""
    t = np.arange(first, last, 0.01)
    t = t[(t <= hole[0]) | (t >= hole[1])]
    counters = {f"gpu{i}_energy_j": 1e6 + up_to(t) + 50 * i * t for i in range(gpus)}
    write(
        folder,
        name,
        t - first,
        counters | {key: value(t) for key, value in columns.items()},
        about or sidecar(mono=5000 + first, wall=START + first),
        wall=wall + first,
    )


def found(folder: Path, prices: Prices = FREE) -> Energy:
    result = join(load(folder), prices)
    assert result
    assert sum(cause.joules for cause in result.causes.values()) == pytest.approx(
        result.total.joules
    )
    return result


def by_cause(result: Energy) -> dict[str, float]:
    return {name: cause.joules for name, cause in result.causes.items() if cause.joules}


def test_each_cause_has_the_joules_of_its_own_seconds_and_together_they_are_all(
    tmp_path: Path,
) -> None:
    """The second attempt is of another boot: it is joined by the clock on the wall, the first by the monotonic one."""
    folder, _ = a_run(tmp_path)
    sampled(folder)
    result = found(folder, Prices(kwh=0.5, gpu_hour=3.0))
    steps = [(10 + 2 * i, 12 + 2 * i) for i in range(10)]
    expected = {
        "start_up": joules((0, 10), (59, 64)),
        "evaluation": joules((31, 35)),
        "checkpoint": joules((35, 37)),
        "training": joules(*((a + 0.5, b) for a, b in steps[:6]), (64, 68)),
        "data_wait": joules(*((a, a + 0.5) for a, _ in steps[:6])),
        "lost_work": joules((22, 30), (37, 39)),
        "down": joules((39, 59)),
        "other": joules((30, 31)),
    }
    assert by_cause(result) == pytest.approx(expected, rel=1e-4)
    assert result.total.joules == pytest.approx(joules((0, 68)), rel=1e-6)
    assert (result.coverage, result.total.seconds) == (pytest.approx(1), pytest.approx(68))
    assert result.energy_j.tolist() == pytest.approx(
        [joules(s) for s in [*steps[:6], (64, 66), (66, 68)]], rel=1e-4
    )
    assert result.power_w.tolist() == pytest.approx((result.energy_j / 2).tolist())
    assert result.cost == pytest.approx(joules((0, 68)) / 3.6e6 * 0.5 + 68 / 3600 * 3, rel=1e-5)
    assert result.remarks == [
        "gpu0 of node 0 on h in 1 file, joined by the clock on the wall and the monotonic clock"
    ]


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_is_set_changes_nothing_on_one_machine(tmp_path: Path, jump: float) -> None:
    run = Clock().start(model=10.0).steps(1, 4)
    run.wall += jump
    folder = put(tmp_path, run.steps(5, 10))
    anchors = [
        {"time": START - 5, "mono_s": 4995.0, "elapsed_sec": 0.0},
        {"time": START + 20 + jump, "mono_s": 5020.0, "elapsed_sec": 25.0},
    ]
    sampled(folder, about=sidecar(mono=4995.0, wall=START - 5, anchors=anchors))
    result = found(folder)
    assert by_cause(result) == pytest.approx(
        {"start_up": joules((0, 10)), "training": joules((10, 30))}, rel=1e-6
    )


def test_another_node_is_joined_by_the_clock_on_the_wall_as_it_stood_last(tmp_path: Path) -> None:
    folder = put(tmp_path, Clock().start(model=10.0).steps(1, 10), world_size=4)
    sampled(folder, "1", gpus=2)
    anchors = [
        {"time": START - 105, "mono_s": 77.0, "elapsed_sec": 0.0},  # 100 s behind, and then set
        {"time": START + 15, "mono_s": 97.0, "elapsed_sec": 20.0},
    ]
    sampled(
        folder,
        "2",
        gpus=2,
        wall=START - 100,
        about=sidecar("g", "c", 77.0, START - 105, node=1, anchors=anchors),
    )
    result = found(folder)
    assert list(result.steps) == ["node0.gpu0", "node0.gpu1", "node1.gpu0", "node1.gpu1"]
    assert result.energy_j.tolist() == pytest.approx(
        [4 * joules((10 + 2 * i, 12 + 2 * i)) + 200 for i in range(10)]
    )
    assert result.total.joules == pytest.approx(4 * joules((0, 30)) + 100 * 30)
    assert result.remarks == [
        "node0.gpu0, node0.gpu1 of node 0 on h in 1 file, joined by the monotonic clock",
        "node1.gpu0, node1.gpu1 of node 1 on g in 1 file, joined by the clock on the wall",
    ]


def boots(folder: Path, *names: object) -> None:
    """A config.json as a run has it, of attempts on these boots."""
    (folder / "config.json").write_text(
        json.dumps(
            {
                "schema": 1,
                "settings": {},
                "attempts": [
                    {"host": "h"} if name is None else {"host": "h", "boot_id": name}
                    for name in names
                ],
            }
        )
    )


WALL, SAME = "the clock on the wall", "the monotonic clock"


@pytest.mark.parametrize(
    ("recorded", "of_sampler", "host", "how"),
    [
        (
            ["b", "c"],
            "b",
            "pod-7",
            f"{WALL} and {SAME}",
        ),  # the first is of that machine, which has another name
        (
            ["c", "b"],
            "b",
            "pod-7",
            WALL,
        ),  # of another boot; the second has a clock by which nothing was sampled
        (["b", "b"], "b", "pod-7", SAME),
        (["c", "c"], "b", "h", WALL),
        ([None, None], "b", "h", f"{WALL} and {SAME}"),
        (["b"], None, "h", f"{WALL} and {SAME}"),
        ([None, "b"], "b", "pod-7", WALL),
        ([7, []], "b", "h", f"{WALL} and {SAME}"),
    ],
)
def test_the_boot_that_an_attempt_names_tells_whose_clock_it_has(
    tmp_path: Path, recorded: list, of_sampler: str | None, host: str, how: str
) -> None:
    folder, _ = a_run(tmp_path)
    boots(folder, *recorded)
    sampled(folder, about=sidecar(host, of_sampler, 4995.0, START - 5))
    said = found(folder).remarks[0]
    assert said == f"gpu0 of node 0 on {host} in 1 file, joined by {how}"


def test_a_clock_on_the_wall_that_jumps_moves_no_joule_where_the_boot_is_known(
    tmp_path: Path,
) -> None:
    """The sampler began an hour before the clock was set, and says nothing of it: only the boot tells."""
    folder = put(tmp_path, Clock().start(model=10.0).steps(1, 10))
    boots(folder, "b")
    sampled(folder, wall=START - 3600, about=sidecar("pod-7", "b", 4995.0, START - 3605))
    told = {"start_up": joules((0, 10)), "training": joules((10, 30))}
    assert by_cause(found(folder)) == pytest.approx(told, rel=1e-6)
    (folder / "config.json").write_text('{"settings": {}, "attempts": 5}')
    assert found(folder).total.joules == 0


def test_where_a_node_was_not_sampled_steps_have_no_joules_and_half_is_not_covered(
    tmp_path: Path,
) -> None:
    folder = put(tmp_path, Clock().start(model=10.0).steps(1, 10), world_size=4)
    sampled(folder, gpus=2)
    result = found(folder, Prices(None, 1.0))
    assert np.isnan(result.energy_j).all() and result.steps["gpu0"].tolist()[0] == pytest.approx(
        joules((10, 12))
    )
    assert result.coverage == pytest.approx(0.5) and result.cost == pytest.approx(4 * 30 / 3600)
    assert result.remarks[-1].startswith("attempt 1 had 4 processes, and 2 GPUs were sampled")


def test_where_more_gpus_were_sampled_than_the_run_had_steps_have_no_joules(tmp_path: Path) -> None:
    """A process on a machine of 4 GPUs: what the others took is not the run's."""
    folder = put(tmp_path, Clock().start(model=10.0).steps(1, 10), world_size=1)
    sampled(folder, gpus=4)
    result = found(folder)
    assert np.isnan(result.energy_j).all() and np.isfinite(result.steps["gpu0"]).all()
    assert result.total.joules == pytest.approx(4 * joules((0, 30)) + (50 + 100 + 150) * 30)
    assert result.remarks[-1] == (
        "4 GPUs were sampled and attempt 1 had 1 process: the joules and the cost are of all "
        "4, and steps have none; CUDA_VISIBLE_DEVICES beside make gpu-sampler samples fewer"
    )
    said = energy.text("r", load(folder), result)
    assert "J at" not in said and "a token" not in said


@pytest.mark.parametrize(
    ("reason", "billed_s"),
    [("stopped", 0.0), ("done", 0.0), ("crashed", 172_800.0), (None, 172_800.0)],
)
def test_after_make_stop_gpus_are_given_back_and_after_a_crash_they_are_paid_for(
    tmp_path: Path, reason: str | None, billed_s: float
) -> None:
    """Two days between two attempts; 30 s of the first, 25 s of the second. After `done` they are no down time."""
    down_s = 0.0 if reason == "done" else 172_800.0
    run = Clock().start(model=10.0).steps(1, 10)
    if reason:
        run.write("end", 10, 0.0, reason=reason)
    folder = put(tmp_path, run.resume(10, down=172_800.0, model=5.0).steps(11, 20), world_size=1)
    sampled(folder, last=45.0)  # the sampler goes on for a while: by then the GPU may be another's
    result = found(folder, Prices(kwh=1.0, gpu_hour=2.0))
    assert (result.causes["down"].seconds, result.causes["down"].gpu_s) == pytest.approx(
        (down_s, billed_s)
    )
    taken = joules((0, 30)) if not billed_s else joules((0, 44.99))
    assert result.total.joules == pytest.approx(taken, rel=1e-5)
    assert result.cost == pytest.approx(2 * (55 + billed_s) / 3600 + taken / 3.6e6, rel=1e-5)
    covered = 30 if not billed_s else 44.99
    assert result.coverage == pytest.approx(covered / (55 + billed_s), rel=1e-4)


@pytest.mark.parametrize("reason", ["stopped", "done"])
def test_what_the_counter_tells_of_a_hole_over_a_time_at_rest_is_not_the_runs(
    tmp_path: Path, reason: str
) -> None:
    """The run rests from 30 to 50 s. The sampler is off from 28 to 52 s, and the machine does not reboot."""
    run = Clock().start(model=10.0).steps(1, 10)
    run.write("end", 10, 0.0, reason=reason)
    run.wall, run.mono, run.attempt = run.wall + 20, run.mono + 20, 1
    folder = put(tmp_path, run.start(10, "resume", model=5.0).steps(11, 15))
    sampled(folder, hole=(28.0, 52.0))
    result = found(folder)
    assert UNSPLIT not in result.causes
    assert result.total.joules == pytest.approx(joules((0, 28), (52, 65)), rel=1e-3)


def test_time_without_samples_has_no_joules_and_is_said(tmp_path: Path) -> None:
    folder, _ = a_run(tmp_path)
    sampled(folder, first=17.0, last=36.0)
    result = found(folder)
    assert np.isfinite(result.energy_j).tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert result.causes["checkpoint"].covered_s == pytest.approx(1, abs=0.03)
    assert result.causes["down"].covered_s == 0 and result.coverage == pytest.approx(
        19 / 68, abs=1e-3
    )
    assert "n/a" in energy.text("r", load(folder), result)


def test_what_the_counter_tells_of_a_hole_is_split_only_inside_one_cause(tmp_path: Path) -> None:
    folder = put(tmp_path, Clock().start(model=10.0).steps(1, 10, wait=0.5))
    sampled(folder, hole=(3.0, 7.0))
    assert by_cause(found(folder))["start_up"] == pytest.approx(joules((0, 10)))
    sampled(folder, hole=(8.0, 13.0))
    result = found(folder)
    assert result.causes[UNSPLIT].joules == pytest.approx(joules((8, 13.01)), rel=1e-3)
    assert result.total.joules == pytest.approx(
        joules((0, 30)), rel=1e-5
    ) and result.coverage == pytest.approx(1)
    assert np.isnan(result.energy_j).tolist() == [True, True] + [False] * 8
    sampled(
        folder, hole=(8.0, 13.0), gpu0_power_w=lambda t: 100 + 10 * t
    )  # neither read: power tells nothing more
    assert found(folder).causes[UNSPLIT].joules == pytest.approx(joules((8, 13.01)), rel=1e-3)


def test_without_a_counter_power_is_integrated_and_both_are_compared(tmp_path: Path) -> None:
    folder = put(tmp_path, Clock().start(model=10.0).steps(1, 10))
    sampled(
        folder,
        gpus=2,
        gpu0_power_w=lambda t: 1.02 * (100 + 10 * t),
        gpu1_power_w=lambda t: 0.99 * (150 + 10 * t),
    )
    result = found(folder)
    both = {name: power / counter for name, (counter, power) in result.disagreement.items()}
    assert both == pytest.approx({"gpu0": 1.02, "gpu1": 0.99}, rel=1e-4) and result.power_j == 0
    first, second = joules((0, 30)), joules((0, 30)) + 1500
    assert result.per_cent == pytest.approx(
        100 * (0.02 * first - 0.01 * second) / (first + second), abs=0.01
    )
    sampled(folder, gpus=0, gpu0_power_w=lambda t: 1.02 * (100 + 10 * t))
    result = found(folder)
    assert result.total.joules == pytest.approx(1.02 * first, rel=1e-5) == result.power_j
    assert (
        result.energy_j[0] == pytest.approx(1.02 * joules((10, 12)), rel=1e-4)
        and result.per_cent is None
    )


def test_a_driver_loaded_again_is_bridged_by_power(tmp_path: Path) -> None:
    folder = put(tmp_path, Clock().start(model=10.0).steps(1, 10))
    t = np.arange(0, 40, 0.01)
    counter = np.where(t < 15, 1e6 + up_to(t), up_to(t) - up_to(15.0))
    write(
        folder,
        "1",
        t,
        {"gpu0_power_w": 100 + 10 * t, "gpu0_energy_j": counter},
        sidecar(mono=5000.0, wall=START),
    )
    result = found(folder)
    assert result.energy_j.tolist() == pytest.approx(
        [joules((10 + 2 * i, 12 + 2 * i)) for i in range(10)], rel=1e-4
    )


def test_a_gpu_lost_for_good_leaves_later_steps_without_joules(tmp_path: Path) -> None:
    folder = put(tmp_path, Clock().start(model=10.0).steps(1, 10), world_size=2)
    t = np.arange(0, 40, 0.01)
    write(
        folder,
        "1",
        t,
        {
            "gpu0_energy_j": 1e6 + up_to(t),
            "gpu1_energy_j": np.where(t < 21, 1e6 + up_to(t), np.nan),
        },
        sidecar(mono=5000.0, wall=START),
    )
    result = found(folder)
    assert np.isfinite(result.energy_j).tolist() == [True] * 5 + [False] * 5
    assert np.isfinite(result.steps["gpu0"]).all()


def test_a_step_that_does_not_say_how_long_it_took_has_no_joules(tmp_path: Path) -> None:
    run = Clock().start(model=10.0).steps(1, 2).write("step", 3, 2.0, step_ms=None)
    folder = put(tmp_path, run)
    sampled(folder)
    assert np.isnan(found(folder).energy_j).tolist() == [False, False, True]


# ---- What is shown


def test_the_command_prints_a_table_and_writes_a_line_for_each_step(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = a_run(tmp_path / "r")
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("RUN_NAME", "r")
    assert energy.main([]) == 78
    assert "make gpu-sampler RUN_NAME=r" in capsys.readouterr().err
    sampled(folder, gpu0_power_w=lambda t: 1.01 * (100 + 10 * t))
    monkeypatch.setenv("PRICE_KWH", "1000")
    assert energy.main([]) == 0
    said = capsys.readouterr().out
    kwh = joules((0, 68)) / 3.6e6
    row = next(line.split() for line in said.splitlines() if line.startswith("total"))
    mean_w = f"{joules((0, 68)) / 68:.0f}"
    assert row == ["total", "1:08", f"{kwh:.4g}", "100.0%", mean_w, "100.0%", f"{1000 * kwh:.2f}"]
    assert "integrated power against the energy counter: +1.00% (gpu0 +1.00%)" in said
    assert said.splitlines()[-1] == str(folder / "energy_20251121_100010.csv")
    with open(folder / "energy_20251121_100010.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(i) for i in range(1, 9)]
    first = joules((10, 12))
    assert [
        float(rows[0][key]) for key in ("joules", "watts", "joules_per_token", "gpu0_j")
    ] == pytest.approx([first, first / 2, first / 100, first], rel=1e-4)


def test_large_figures_are_written_out(tmp_path: Path) -> None:
    """8 GPUs of 700 W: a step of 2 s takes 11,200 J; 50 tokens/s."""
    folder = put(tmp_path, Clock().start(model=10.0).steps(1, 10), world_size=8)
    t = np.arange(0, 40, 0.01)
    write(
        folder,
        "1",
        t,
        {f"gpu{i}_energy_j": 1e6 + 700 * t for i in range(8)},
        sidecar(mono=5000.0, wall=START),
    )
    assert "the median step took 11,200 J at 5,600 W, 112,000 mJ a token" in energy.text(
        "r", load(folder), found(folder)
    )
    assert [energy.figures(value) for value in (0.012344, 5.0, 999.94, 1000.0, 1234.4, 2.5e6)] == [
        "0.01234",
        "5",
        "999.9",
        "1,000",
        "1,234",
        "2,500,000",
    ]


def test_bad_arguments_and_settings_are_64(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert energy.main(["--runs"]) == 64
    monkeypatch.setenv("PRICE_KWH", "-1")
    assert energy.main([]) == 64 and "PRICE_KWH=-1" in capsys.readouterr().err


def test_plots_have_the_joules_too_and_without_samples_are_as_before(tmp_path: Path) -> None:
    folder, _ = a_run(tmp_path)
    bare = energy.with_energy(load(folder), FREE)
    assert bare.energy is None and "energy" not in summary(bare)
    table = write_tables(bare)[0]
    header = table.read_text().splitlines()[0]
    sampled(folder, last=54.4)
    run = energy.with_energy(load(folder), Prices(None, 2.0))
    write_tables(run)
    lines = table.read_text().splitlines()
    assert lines[0] == f"{header},energy_j,power_w"
    assert float(lines[1].split(",")[-2]) == pytest.approx(joules((10, 12)), rel=1e-4) and lines[
        8
    ].endswith(",,")
    words = summary(run)
    assert words["energy"] == f"{joules((0, 54.39)) / 3.6e6:.4g} kWh (80% of the time sampled)"
    assert words["cost"] == f"{2 * 68 / 3600:.2f}"
