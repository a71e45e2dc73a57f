"""monitor/local_gpus.py, as a look at this machine has it: the stand-in for NVML, and the sampler's own files."""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from monitor import local
from monitor.facts import Gpu, Node, of_line
from monitor.local_gpus import Driver, Sampled
from record.run_paths import RunPaths
from settings import ROOT
from settings.config import Config
from tests.monitor.conftest import Environment

HOST = gethostname()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return RunPaths(tmp_path / "run")


# ---- Of the driver

ASK = """import sys; from monitor import local as here; from monitor.facts import to_line; from settings.config import Config
from record.run_paths import RunPaths; from pathlib import Path; import time
paths = RunPaths(Path(sys.argv[1])); between = here.Between(paths)
for _ in range(int(sys.argv[2])): print(to_line(here.look(Config(), paths, None, between)))"""


def asked(env: dict[str, str], paths: RunPaths, times: int = 1) -> list[Node]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(paths.folder), str(times)],
        env=env,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        check=True,
    )
    return [node for line in done.stdout.splitlines() if (node := of_line(line))]


def test_gpus_are_asked_of_the_driver_where_none_samples(
    nvml: Environment, env: dict[str, str], paths: RunPaths
) -> None:
    (node,) = asked(env | nvml(GPUS=16), paths)
    assert (
        len(node.gpus) == 16 and node.gpus_why == "" and abs(node.time - (node.gpus_time or 0)) < 5
    )
    for i, gpu in enumerate(node.gpus):
        assert (
            gpu.power_w and 0 < gpu.power_w <= 650
        )  # the mean of a second, between 250 and 650, and 10 less by GPU
        assert dataclasses.replace(gpu, power_w=None) == Gpu(
            i,
            "Fake H100 80GB HBM3",
            90 + i,
            20.0,
            80.0,
            None,
            700.0,
            60 + i,
            1755.0,
            ("power_cap", "sw_thermal") if i else ("power_cap",),
            clock_max_mhz=1980.0,
        )


def test_a_gpu_that_is_lost_is_named_and_the_others_go_on(
    nvml: Environment, env: dict[str, str], paths: RunPaths
) -> None:
    first, later = asked(env | nvml(GPUS=2, LOST="1:14:999"), paths, 2)
    assert [gpu.lost for gpu in first.gpus] == [False, False]
    assert [(gpu.lost, gpu.utilisation_percent) for gpu in later.gpus] == [
        (False, 90),
        (True, None),
    ]
    assert later.gpus[1].name and later.gpus[1].memory_total_gib == 80
    (node,) = asked(env | nvml(GPUS=1, LACKS="temperature,utilization"), paths)
    assert (
        node.gpus[0].lost,
        node.gpus[0].temp_c,
        node.gpus[0].utilisation_percent,
        node.gpus[0].clock_mhz,
    ) == (False, None, None, 1755)


def test_why_there_are_none(nvml: Environment, env: dict[str, str], paths: RunPaths) -> None:
    for environment, words in (
        (env, "no NVIDIA driver here"),
        (env | nvml(GPUS=0), "knows of no GPU here"),
        (env | nvml(INIT=9), "does not answer"),
        (env | nvml(GPUS=2, CALL_US=100_000), "has not answered for 2 s"),
    ):
        (node,) = asked(environment, paths)
        assert node.gpus == () and node.gpus_time is None and words in node.gpus_why


def test_a_driver_that_is_not_there_is_not_looked_for_at_each_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    driver.found, driver.not_before = ((), None, "none"), time.monotonic() + 60
    monkeypatch.setattr(driver, "ask", lambda: pytest.fail("asked again"))
    assert driver.look() == ((), None, "none") and driver.thread is None


# ---- Of the sampler


@pytest.fixture
def sampler(paths: RunPaths) -> Callable[..., None]:
    """Write what a sampler leaves behind: two GPUs, the second with these cells."""

    def write(
        stamp: str,
        node: int = 0,
        age_s: float = 1.0,
        cells: str = "41.5,91,3,1700,2619,none",
        fast: str = "290.5,61",
        host: str = HOST,
        ended: str | None = None,
    ) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() - age_s))
        slow = ",".join(
            f"gpu{i}_{name}"
            for i in (0, 1)
            for name in (
                "mem_used_gib",
                "util_percent",
                "mem_util_percent",
                "sm_mhz",
                "mem_mhz",
                "throttle",
            )
        )
        paths.gpu_slow(stamp).write_text(
            f"timestamp,elapsed_sec,{slow},net_eth0_in_bytes_per_s\n{at},1,old,row\n"
            f"{at},1.0,40.25,90,2,1755,2619,idle+power_cap,{cells},9\n{at},2.0,4"
        )
        paths.gpu_metrics(stamp).write_text(
            "timestamp,elapsed_sec,gpu0_power_w,gpu0_temp_c,gpu1_power_w,gpu1_temp_c\n"
            f"{at},1.0,300.125,60,{fast}\n"
        )
        gpus: list[dict[str, Any]] = [
            {"index": i, "name": "H100", "power_limit_w": 700.0, "memory_total_gib": 79.6}
            for i in (0, 1)
        ]
        gpus[1]["clock_max_mhz"] = 1980.0  # the first is of a sampler that did not ask for it
        paths.gpu_sidecar(stamp).write_text(
            json.dumps({"node": node, "host": host, "ended": ended, "gpus": gpus})
        )

    return write


def test_the_newest_rows_of_this_nodes_sampler(
    paths: RunPaths, sampler: Callable[..., None]
) -> None:
    sampler("20260101_000000", cells="1,1,1,1,1,none")
    sampler("20260102_000000")
    sampler("20260103_000000", node=1)
    sampler("20260104_000000", host="elsewhere")
    sampler("20260105_000000", ended="told to stop")
    found = Sampled(paths).look()
    assert found and found[1] and 0 < time.time() - found[1] < 60
    assert found[0] == (
        Gpu(0, "H100", 90.0, 40.25, 79.6, 300.125, 700.0, 60.0, 1755.0, ("power_cap",)),
        Gpu(1, "H100", 91.0, 41.5, 79.6, 290.5, 700.0, 61.0, 1700.0, clock_max_mhz=1980.0),
    )


def test_cells_that_are_empty_are_none_and_a_gpu_without_any_is_lost(
    paths: RunPaths, sampler: Callable[..., None]
) -> None:
    sampler("20260101_000000", cells=",,,,,", fast=",")
    found = Sampled(paths).look()
    assert found and (found[0][0].lost, found[0][1]) == (
        False,
        Gpu(1, "H100", memory_total_gib=79.6, power_limit_w=700.0, clock_max_mhz=1980.0, lost=True),
    )
    sampler("20260101_000000", cells=",,,,,", fast="250.0,")
    found = Sampled(paths).look()
    assert (
        found
        and not found[0][1].lost
        and (found[0][1].power_w, found[0][1].temp_c) == (250.0, None)
    )


def test_old_rows_serve_no_more_and_another_file_takes_their_place(
    paths: RunPaths, sampler: Callable[..., None]
) -> None:
    sampled = Sampled(paths)
    assert sampled.look() is None
    sampler("20260101_000000", age_s=8)
    assert sampled.look() is None
    sampler("20260101_000000")
    assert sampled.look()
    sampler("20260101_000000", age_s=8)
    sampler("20260102_000000", fast="111.0,61")
    found = sampled.look()
    assert found and found[0][1].power_w == 111.0


COUNTERS = "timestamp,elapsed_sec,gpu0_energy_j,gpu1_energy_j"


def test_what_the_counters_rose_by_since_the_sampler_began(
    paths: RunPaths, sampler: Callable[..., None]
) -> None:
    began = time.time() - 3600

    def write(stamp: str, *rows: str, age_s: float = 0.0, **of: object) -> None:
        at = time.strftime(
            "%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() - age_s if age_s < 3600 else began)
        )
        sampler(stamp, ended=of.pop("ended", None))
        about = (
            json.loads(paths.gpu_sidecar(stamp).read_text())
            | {"pid": 7, "elapsed_0": {"mono_s": 5.0}}
            | of
        )
        paths.gpu_sidecar(stamp).write_text(json.dumps(about))
        paths.gpu_metrics(stamp).write_text(
            "\n".join([COUNTERS, *(f"{at},1.0,{row}" for row in rows), ""])
        )

    write("20260101_000000", "1,1", pid=6)  # another sampler's
    write(
        "20260101_010000", ",50000.5", "1000.25,50001", "1001,50002", age_s=3600
    )  # the first reading failed
    write("20260101_020000", "2000,60000", age_s=100)
    write("20260101_030000", "7000,69000", "7200.25,70000.5")
    sampled = Sampled(paths)
    whole = paths.gpu_metrics("20260101_010000").read_text()
    paths.gpu_metrics("20260101_010000").write_text(COUNTERS + "\n")
    assert sampled.look() and sampled.energy is None, "it has just begun"
    paths.gpu_metrics("20260101_010000").write_text(whole)
    assert sampled.look() and sampled.energy == (6200 + 20000, int(began))
    write("20260101_030000", "7300.25,71000.5")
    assert sampled.look() and sampled.energy == (6300 + 21000, int(began))
    write("20260101_030000", "7300.25,")
    assert sampled.look() and sampled.energy is None, "one is not known"
    write("20260101_030000", "7300.25,9")
    assert sampled.look() and sampled.energy is None, "it began anew"
    write("20260101_030000", "7300.25,71000.5")
    assert sampled.look() and sampled.energy
    write("20260101_030000", "7300.25,71000.5", ended="told to stop", age_s=60)
    assert sampled.look() is None and sampled.energy is None
    assert Sampled(paths).look() is None
    write("20260101_030000", "7300.25,71000.5", age_s=60)
    write("20260101_040000", "9000.5,80000.5", "9001,80001", pid=8)
    assert sampled.look() and sampled.energy and sampled.energy[0] == 1.0, (
        "of a sampler that began later"
    )


def test_a_real_sampler_and_a_look_agree(
    nvml: Environment, env: dict[str, str], paths: RunPaths
) -> None:
    fake = env | nvml(GPUS=2) | {"RUN_NAME": "run", "RUNS_DIR": str(paths.folder.parent)}
    process = subprocess.Popen(
        [sys.executable, "-m", "monitor.gpu_sampler"], env=fake, cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        deadline, sampled = time.monotonic() + 30, Sampled(paths)
        while not (found := sampled.look()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while not (node := local.look(Config(), paths)).energy_j:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        took = node.time - (node.energy_since or 0)
    finally:
        process.terminate()
        process.wait()
    # 250 to 650 W, and 10 less of the second, at readings a tenth of a second old, of rows half a second old
    assert 0.3 * 490 * took < node.energy_j < 2 * 650 * (took + 0.2) and took < 30
    (direct,) = asked(fake, paths)
    same = [
        [dataclasses.replace(gpu, power_w=None) for gpu in gpus] for gpus in (found[0], direct.gpus)
    ]
    assert same[0] == same[1] and all(gpu.power_w for gpu in found[0])
