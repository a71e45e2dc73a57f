"""monitor/gpu_sampler/__main__.py as a process: how it begins and ends, on the stand-in for NVML."""

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monitor.gpu_sampler.__main__ import Follow
from settings import ROOT
from tests.monitor.conftest import Environment, Sampled

COMMAND = [sys.executable, "-m", "monitor.gpu_sampler"]


@pytest.fixture
def start(env: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a sampler; none outlives the test."""
    processes = []

    def starts(*arguments: str, **values: str) -> subprocess.Popen:
        processes.append(
            subprocess.Popen(
                [*COMMAND, *arguments],
                env=env | values,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return processes[-1]

    yield starts
    for process in processes:
        process.kill()
        process.communicate()


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=env,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def until(happens: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def rows(folder: Path) -> int:
    """Rows in the files so far."""
    return sum(path.read_text().count("\n") - 1 for path in folder.glob("gpu_metrics_*.csv"))


# ---- Nothing to sample, or no place for it


def test_without_a_driver_it_says_so_in_a_line_and_leaves_nothing(
    env: dict[str, str], tmp_path: Path
) -> None:
    for arguments in ([], ["--follow"]):
        done = run(env, *arguments)
        assert done.returncode == 78 and done.stdout == ""
        assert re.fullmatch(r"gpu-sampler: no NVIDIA driver here .*\n", done.stderr)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"GPUS": 0}, "knows of no GPU here"),
        ({"INIT": 9}, "does not answer (Driver Not Loaded); nvidia-smi"),
    ],
)
def test_a_driver_without_gpus_or_that_fails_is_told(
    env: dict[str, str], nvml: Environment, values: dict, words: str
) -> None:
    done = run(env | nvml(**values))
    assert done.returncode == 78 and words in done.stderr and done.stderr.count("\n") == 1


def test_hidden_gpus_are_not_sampled(env: dict[str, str], nvml: Environment) -> None:
    done = run(env | nvml(), "--follow=0")
    assert done.returncode == 0
    done = run(env | nvml() | {"CUDA_VISIBLE_DEVICES": "-1"})
    assert (
        done.returncode == 78
        and "CUDA_VISIBLE_DEVICES shows none of the 2 GPUs here" in done.stderr
    )


@pytest.mark.parametrize("interval", ["0", "0.5", "1001", "ten"])
def test_a_bad_interval_is_refused(env: dict[str, str], interval: str) -> None:
    for done in (run(env, interval), run(env | {"INTERVAL_MS": interval})):
        assert done.returncode == 64
        assert (
            f"INTERVAL_MS={interval} (" in done.stderr
            and "Must be a number from 1 to 1000 (milliseconds)." in done.stderr
        )


def test_a_folder_that_cannot_be_made_is_told(
    env: dict[str, str], nvml: Environment, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = run(env | nvml() | {"RUNS_DIR": str(tmp_path / "file")})
    assert (
        done.returncode == 78
        and "cannot be written (Not a directory)" in done.stderr
        and "RUNS_DIR" in done.stderr
    )


# ---- Its life


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_told_to_stop_it_closes_its_files(
    start: Callable, nvml: Environment, tmp_path: Path, number: int
) -> None:
    process = start(**nvml())
    until(lambda: rows(tmp_path / "run") > 100)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == ""
    found = Sampled(tmp_path / "run")
    assert found.about["ended"] == f"told to stop by {signal.Signals(number).name}"
    assert len(found.rows) == found.about["rows"] == found.about["samples"]
    assert found.about["samples"] + found.about["missed"] == found.about["slots"]
    slots = [int(row["elapsed_sec"] * 100 + 1e-6) for row in found.rows]
    assert slots == sorted(set(slots)) and slots[-1] == found.about["slots"] - 1
    assert found.fast_files[0].read_text().endswith("\n")
    assert [about["name"] for about in found.about["gpus"]] == ["Fake H100 80GB HBM3"] * 2
    assert [about["uuid"] for about in found.about["gpus"]] == ["GPU-0000-fake", "GPU-0001-fake"]
    assert (found.about["driver"], found.about["gpus"][0]["power_limit_w"]) == ("999.99.fake", 700)
    assert [about["clock_max_mhz"] for about in found.about["gpus"]] == [1980, 1980]
    assert 0 < found.about["cpu_percent"] < 100 and found.about["hz"] <= 100
    assert "2 x Fake H100 80GB HBM3 (driver 999.99.fake), every 10 ms" in out
    assert re.search(
        r"gpu_metrics_\d{8}_\d{6}\.csv: about [0-9.]+ [MG]B per hour \(computed\)", out
    )


def test_samples_can_be_joined_to_the_record_of_a_run(
    start: Callable, nvml: Environment, tmp_path: Path
) -> None:
    """By the monotonic clock of this machine, which this process has too."""
    before = time.monotonic()
    process = start(**nvml())
    until(lambda: rows(tmp_path / "run") > 10)
    process.terminate()
    process.communicate(timeout=120)
    found = Sampled(tmp_path / "run")
    assert before < found.mono(found.rows[0]) < found.mono(found.rows[-1]) < time.monotonic()
    assert found.about["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_killed_it_loses_less_than_a_second(
    start: Callable, nvml: Environment, tmp_path: Path
) -> None:
    counter = tmp_path / "count"
    counter.write_bytes(bytes(8))

    def readings() -> int:
        return struct.unpack("Q", counter.read_bytes())[0]

    process = start(**nvml(COUNT=counter))
    until(lambda: rows(tmp_path / "run") >= 0 and list((tmp_path / "run").glob("*.json")))
    before = readings()  # those of the first look, and a few rows
    until(lambda: readings() - before > 250)  # at any moment between two hand-overs
    process.kill()
    process.wait()
    assert readings() - before - rows(tmp_path / "run") <= 100
    last = next((tmp_path / "run").glob("gpu_metrics_*.csv")).read_text()
    assert last.endswith("\n")
    assert json.loads(next((tmp_path / "run").glob("*.json")).read_text())["ended"] is None


def test_one_sampler_records_a_run(
    start: Callable, env: dict[str, str], nvml: Environment, tmp_path: Path
) -> None:
    first = start(**nvml())
    until(lambda: rows(tmp_path / "run") > 0)
    second = run(env | nvml())
    assert second.returncode == 78
    assert f"{tmp_path}/run: another process records its GPUs (pid {first.pid} on " in second.stderr
    other_node = start(
        **nvml(), NODES="2", NODE_RANK="1", MASTER_ADDR="a"
    )  # which may see the same folder
    until(lambda: len(list((tmp_path / "run").glob("gpu_metrics_*.csv"))) == 2)
    for process in (first, other_node):
        process.terminate()
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert {s["node"] for s in Sampled(tmp_path / "run").sidecars} == {0, 1}
    third = start(**nvml())  # a lock is held by who lives
    until(lambda: len(list((tmp_path / "run").glob("gpu_metrics_*.csv"))) == 3)
    third.terminate()


def test_calls_that_take_longer_than_a_slot_are_announced_and_counted(
    start: Callable, nvml: Environment, tmp_path: Path
) -> None:
    process = start(**nvml(CALL_US=3000))
    until(lambda: rows(tmp_path / "run") > 20)
    process.terminate()
    out, _ = process.communicate(timeout=120)
    announced = re.search(
        r"a sample of all takes about ([0-9.]+) ms, so that slots of 10 ms will be missed; for "
        r"example INTERVAL_MS=(\d+)$",
        out,
        re.MULTILINE,
    )
    assert announced and float(announced[1]) >= 2 * 4 * 3 and int(announced[2]) > 2 * 4 * 3
    about = Sampled(tmp_path / "run").about
    assert (
        about["missed"] > about["samples"] and about["samples"] + about["missed"] == about["slots"]
    )
    assert about["sample_ms"]["mean"] >= 24


def test_chosen_gpus(start: Callable, nvml: Environment, tmp_path: Path) -> None:
    process = start("20", **nvml(GPUS=4), CUDA_VISIBLE_DEVICES="GPU-0003,1")
    until(lambda: rows(tmp_path / "run") > 0)
    process.terminate()
    process.communicate(timeout=120)
    found = Sampled(tmp_path / "run")
    assert list(found.rows[0]) == [
        "timestamp",
        "elapsed_sec",
        "gpu1_power_w",
        "gpu1_temp_c",
        "gpu3_power_w",
        "gpu3_temp_c",
        "gpu1_power_inst_w",
        "gpu1_energy_j",
        "gpu3_power_inst_w",
        "gpu3_energy_j",
    ]
    assert found.about["interval_ms"] == 20 and found.rows[0]["gpu3_temp_c"] == 63


def test_it_starts_without_what_is_slow_to_import() -> None:
    code = "import sys, monitor.gpu_sampler.__main__; sys.stdout.write(' '.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, check=True, capture_output=True
    ).stdout
    slow = {"torch", "numpy", "rich", "pyarrow", "datasets", "wandb", "matplotlib", "tokenizers"}
    assert set(loaded.split()) & slow == set() and "pynvml" in loaded


# ---- Beside training


class Training:
    """Is at work or not, in a time of its own."""

    def __init__(self) -> None:
        self.now, self.at_work = 0.0, False

    def follow(self, patience_s: float) -> Follow:
        return Follow(lambda: self.at_work, patience_s, lambda: self.now)


def test_it_stays_through_restarts_and_ends_a_while_after_the_last() -> None:
    training = Training()
    follow = training.follow(60)
    for at, at_work, over in [
        (0, False, False),
        (59, False, False),
        (60, True, False),
        (1000, True, False),
        (1059, False, False),
        (1060, True, False),
        (5000, True, False),
        (5001, False, False),
        (5060, False, False),
        (5061, False, True),
    ]:
        training.now, training.at_work = at, at_work
        assert follow.is_over() is over, at
        assert follow.began is (at >= 60)


def test_a_run_that_never_begins_is_over_too() -> None:
    training = Training()
    follow = training.follow(60)
    training.now = 61
    assert follow.is_over() and not follow.began


def test_where_no_training_begins_nothing_is_left(
    env: dict[str, str], nvml: Environment, tmp_path: Path
) -> None:
    done = run(env | nvml(), "--follow=0.3")
    assert done.returncode == 0 and "no training of run began: nothing was sampled" in done.stdout
    assert not (tmp_path / "run").exists()


def test_it_follows_a_job_to_its_end(start: Callable, nvml: Environment, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".job", "w") as job:  # as train/start_node.py holds it
        fcntl.flock(job, fcntl.LOCK_EX)
        first = start("--follow=0.5", **nvml())
        until(lambda: rows(tmp_path / "run") > 10)
        second = start("--follow=30", **nvml())  # a second make train-2xh100
        assert (
            second.wait(timeout=120) == 0
            and "another process records its GPUs" in second.communicate()[1]
        )
        assert first.poll() is None
    out, _ = first.communicate(timeout=120)
    assert first.returncode == 0 and "training ended 0.5 s ago" in out
    assert Sampled(tmp_path / "run").about["ended"] == "training ended 0.5 s ago"


def test_a_terminal_that_is_gone_does_not_end_what_was_detached(
    env: dict[str, str], nvml: Environment, tmp_path: Path
) -> None:
    """SIGHUP is ignored where whoever started it had it so, as nohup does."""
    process = subprocess.Popen(
        ["nohup", *COMMAND],
        env=env | nvml(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: rows(tmp_path / "run") > 0)
        process.send_signal(signal.SIGHUP)
        before = rows(tmp_path / "run")
        until(lambda: rows(tmp_path / "run") > before + 60)
        assert process.poll() is None
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(timeout=120)
