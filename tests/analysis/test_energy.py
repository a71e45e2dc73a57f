"""analysis/energy/join.py: a record and samples by hand, and the joules of each cause worked out next to them.

The power of a GPU rises by 10 W per second, so that each second has joules of its own: those from a to b seconds after
the start are 100 (b - a) + 5 (b^2 - a^2).
"""

import json
from pathlib import Path

import numpy as np
import pytest

from analysis.energy.__main__ import main
from analysis.energy.join import add_energy
from analysis.runs import read_run
from tests.analysis.test_samples import write
from tests.record.clock import START, Clock

STEPS = [(10 + 2 * number, 12 + 2 * number) for number in range(10)]


def find_joules(*intervals):
    return sum(100 * (b - a) + 5 * (b * b - a * a) for a, b in intervals)


def put(folder, run, *boots, processes=1):
    """Write the record of a run, and the boots that its attempts were on."""
    facts = {"world_size": processes, "tokens_per_s": 50}
    lines = [json.dumps(facts | record) + "\n" for record in run.records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    attempts = [{"boot_id": boot} for boot in boots]
    (folder / "config.json").write_text(json.dumps({"settings": {}, "attempts": attempts}))


def sample(folder, first=-5, last=80, gpus=1, name="1", **about):
    """Write samples from `first` to `last` seconds after the start, when the clock of boot b is 5000."""
    times = np.arange(first, last, 0.01)
    columns = {f"gpu{gpu}_energy_j": 1e6 + 100 * times + 5 * times**2 for gpu in range(gpus)}
    columns["gpu0_power_w"] = np.full(len(times), 98.0)  # not what its counter counts
    columns["gpu0_power_inst_w"] = np.where(times % 1 < 0.5, 99, 4294967.295)
    write(folder, name, times + 100, columns, **{"zero": (4900, START - 100)} | about)


def find_energy(folder):
    energy = add_energy(read_run(folder)).energy
    assert energy
    return energy


def test_each_cause_has_the_joules_of_its_own_seconds(tmp_path):
    """Somebody sets the wall clock. The machine is started again while the run is down. Seconds are on the right."""
    run = Clock().start(model=10.0).steps(1, 10)  # 10, 30
    run.write("eval", 10, 5.0, eval_s=4.0, val_loss=3.0)  # 35
    run.wall += 3600
    run.write("step", 11, 4.0, step_ms=2000.0, data_wait_s=0.5, checkpoint_stall_s=2.0)  # 39
    run.resume(6, down=20.0, model=5.0).steps(7, 8)  # 59, 64, 68
    run.write("step", 9, 2.0, step_ms=None)  # 70
    put(tmp_path, run, "b", "c")
    sample(tmp_path, last=49)
    sample(tmp_path, first=51, name="2", boot_id="c", zero=(69841, START + 3500))
    energy = find_energy(tmp_path)
    expected = [
        find_joules((10, 22), (64, 68)),  # training
        find_joules((0, 10), (59, 64)),  # start-up
        find_joules((31, 35)),  # evaluation
        find_joules((35, 37)),  # checkpoint
        0,
        0,
        find_joules((22, 30), (37, 39)),  # lost work
        find_joules((39, 49), (51, 59)),  # down
        find_joules((30, 31), (68, 70)),  # other
    ]
    causes = [cause.joules for cause in energy.causes.values()]
    assert causes == pytest.approx(expected, rel=2e-3)
    assert np.isnan(energy.energy_j).tolist() == [False] * 8 + [True]
    assert energy.total.cost(0.5, 3.0) == pytest.approx(sum(expected) / 7.2e6 + 70 / 1200, rel=1e-3)


def test_another_node_is_joined_by_the_wall_clock_as_it_was_set_last(tmp_path):
    run = Clock().start(model=10.0).steps(1, 4)
    run.wall += 100
    put(tmp_path, run.steps(5, 10), "b", processes=4)
    sample(tmp_path, gpus=2, anchors=[{"time": START + 120, "mono_s": 5020}])
    late = {"time": START, "mono_s": 1000}
    right = {"time": START + 120, "mono_s": 1020}
    other = {"gpus": 2, "node": 1, "boot_id": "c", "zero": (900, 0)}
    sample(tmp_path, last=15, name="2", anchors=[late], **other)
    sample(tmp_path, first=15, name="3", anchors=[late, right], **other)
    slow_rows = (
        "elapsed_sec,net_a_in_bytes_per_s,net_b_in_bytes_per_s\n115,1000000,\n115,,4000000\n"
    )
    for name in ("1", "2"):
        (tmp_path / f"gpu_slow_{name}.csv").write_text(slow_rows)
    run = add_energy(read_run(tmp_path))
    assert run.energy and np.isnan(run.samples["out_mb_s"]).all()
    assert np.nanmean(run.samples["in_mb_s"]) == 5.0
    assert np.nanmean(run.samples["power_w"]) == pytest.approx(99)
    assert "node1.gpu1" in run.energy.steps
    expected = [4 * find_joules(step) for step in STEPS]
    assert run.energy.energy_j == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_a_step_has_energy_with_samples_of_all_gpus_of_the_run_and_no_others(tmp_path, gpus):
    put(tmp_path, Clock().start(model=10.0).steps(1, 10), "b", processes=2)
    sample(tmp_path, first=14.3, gpus=gpus)
    energy = find_energy(tmp_path)
    assert np.isfinite(energy.energy_j).tolist() == [False] * 3 + [gpus == 2] * 7
    assert energy.total.gpu_s == pytest.approx(30 * max(2, gpus))
    assert (f"GPUs {gpus}, processes 2" in "".join(energy.remarks)) == (gpus != 2)


@pytest.mark.parametrize(("reason", "down_s"), [("stopped", 0), ("done", 0), ("crashed", 20)])
def test_after_make_stop_and_the_end_the_gpus_are_given_back(tmp_path, reason, down_s):
    run = Clock().start(model=10.0).steps(1, 10).write("end", 10, reason=reason)
    run.wall += 20
    run.mono += 20
    run.attempt = 1
    put(tmp_path, run.start(10, "resume", model=5.0).steps(11, 15), "b", "b")
    sample(tmp_path)
    energy = find_energy(tmp_path)
    assert energy.total.gpu_s == 45 + down_s
    expected = find_joules((0, 30), (30, 30 + down_s), (50, 65))
    assert energy.total.joules == pytest.approx(expected, rel=1e-4)


def test_a_second_that_two_clocks_give_to_two_attempts_counts_once(tmp_path):
    run = Clock().start(model=10.0).steps(1, 10)
    run.wall -= 10
    run.attempt = 1
    put(tmp_path, run.start(10, "resume", model=5.0).steps(11, 15), "c", "d")
    sample(tmp_path)
    energy = find_energy(tmp_path)
    end = read_run(tmp_path).columns["time"][-1] - START
    assert energy.total.joules == pytest.approx(find_joules((0, end)), rel=1e-4)
    assert min(cause.joules for cause in energy.causes.values()) >= 0


def test_a_run_without_a_gpu_is_called_that(tmp_path, capsys, monkeypatch):
    put(tmp_path, Clock().start(model=10.0).steps(1, 10), "b")
    attempts = [{"device": "CPU"}, {"device": "CPU"}]
    (tmp_path / "config.json").write_text(json.dumps({"settings": {}, "attempts": attempts}))
    monkeypatch.setenv("RUN_NAME", tmp_path.name)
    monkeypatch.setenv("RUNS_DIR", str(tmp_path.parent))
    assert main() == 78
    assert capsys.readouterr().err == "This run used no GPU.\n"


def test_the_command_prints_a_table_and_writes_a_line_per_step(tmp_path, capsys, monkeypatch):
    put(tmp_path, Clock().start(model=10.0).steps(1, 10), "b")
    monkeypatch.setenv("RUN_NAME", tmp_path.name)
    monkeypatch.setenv("RUNS_DIR", str(tmp_path.parent))
    assert main() == 78
    sample(tmp_path, first=40)
    assert main() == 78 and not [*tmp_path.glob("energy_*")]
    sample(tmp_path)
    monkeypatch.setenv("PRICE_KWH", "1000")
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    kwh = find_joules((0, 30)) / 3.6e6
    total = ["total", "0:30", f"{kwh:.4g}", "100.0%", "250", "100.0%", f"{1000 * kwh:.2f}"]
    assert total in [line.split() for line in lines]
    start_up = f"{find_joules((0, 10)) / find_joules((0, 30)):.1%}"
    assert start_up in next(line for line in lines if line.startswith("start-up"))
    header, *rows = Path(lines[-1]).read_text().splitlines()
    assert header == "step,tokens,time,seconds,joules,watts,joules_per_token,gpu0_j"
    joules = find_joules(STEPS[-1])
    last = [float(cell) for cell in rows[-1].split(",")[3:]]
    assert last == pytest.approx([2, joules, joules / 2, joules / 100, joules], rel=1e-4)
    median = np.median([find_joules(step) / 100 for step in STEPS])
    assert f"{1000 * median:,.0f} mJ per token" in " ".join(lines)
    monkeypatch.setenv("PRICE_KWH", "-1")
    assert main() == 64
