"""monitor/local.py: a machine and a run by hand, the stand-in for NVML, and the sampler's own files."""

import dataclasses
import fcntl
import json
import os
import socket
import time
from pathlib import Path

import pytest

from monitor import local
from monitor.facts import Node
from monitor.tail import Tail
from record.run_paths import RunPaths
from settings.config import Config

HOST, GIB = socket.gethostname(), 2**30
CPU = dataclasses.replace(Config(), device="cpu")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return RunPaths(tmp_path / "run")


def look(paths: RunPaths, tail: Tail | None = None) -> Node:
    return local.look(CPU, paths, tail)


# ---- The run


def test_where_nothing_has_begun(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "none" / "yet")
    node = look(paths, Tail(paths.metrics))
    assert (node.host, node.status, node.stage, node.at_work, node.progress, node.complaint) == (
        HOST,
        {},
        "",
        False,
        None,
        "",
    )
    assert node.gpus == () and node.gpus_why == "DEVICE=cpu: this run uses none"
    disk = os.statvfs(tmp_path)
    assert node.disk_free_bytes == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.05)
    assert abs(node.time - time.time()) < 60 and not paths.folder.exists()


def test_the_status_and_the_last_step_of_the_progress(paths: RunPaths) -> None:
    paths.status.write_text(
        f'{{"phase": "training", "host": "{HOST}", "step": 7, "last_step": 99, "loss": NaN}}'
    )
    paths.metrics.write_text(
        '{"schema": 1, "event": "step", "time": 5, "attempt": 0, "step": 7, "tokens": 70}\n'
    )
    node = look(paths, Tail(paths.metrics))
    assert node.status == {
        "phase": "training",
        "host": HOST,
        "step": 7,
        "last_step": 99,
        "loss": None,
    }
    assert node.progress and (node.progress.step, node.progress.last_step) == (7, 99)
    paths.status.write_text('{"phase": "tra')
    node = look(paths, Tail(paths.metrics))
    assert node.status == {} and node.progress and node.progress.last_step is None


def test_who_is_at_work_is_told_by_the_locks(paths: RunPaths) -> None:
    paths.status.write_text(json.dumps({"phase": "training", "host": HOST}))
    assert look(paths).at_work is False, "killed"
    with open(paths.job, "w") as job:
        job.write(f"pid 1 on {HOST}: preparing data\n")
        job.flush()
        fcntl.flock(job, fcntl.LOCK_EX)
        node = look(paths)
        assert (node.at_work, node.stage) == (True, "preparing data")
        with open(paths.lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            node = look(paths)
            assert (node.at_work, node.stage) == (True, ""), "the trainer speaks for itself"
    node = look(paths)
    assert (node.at_work, node.stage) == (False, "")


@pytest.mark.parametrize(
    ("phase", "host", "job", "expected"),
    [
        ("training", "elsewhere", None, None),
        ("done", "elsewhere", None, False),
        ("training", HOST, f"pid 1 on {HOST}", False),
        (None, None, "pid 1 on elsewhere: preparing data", None),
        ("crashed", "elsewhere", "pid 1 on elsewhere", False),
    ],
)
def test_the_locks_of_another_machine_may_not_be_seen(
    paths: RunPaths, phase: str | None, host: str | None, job: str | None, expected: bool | None
) -> None:
    if phase:
        paths.status.write_text(json.dumps({"phase": phase, "host": host}))
    if job:
        paths.job.write_text(job)
    assert look(paths).at_work is expected


def test_a_run_that_ends_while_it_is_looked_at_was_not_killed(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths.status.write_text(json.dumps({"phase": "training", "host": HOST}))

    def ends_meanwhile(path: Path) -> bool:
        paths.status.write_text(json.dumps({"phase": "done", "host": HOST}))
        return False

    monkeypatch.setattr(local.locks, "has_job", ends_meanwhile)
    node = look(paths)
    assert (node.status["phase"], node.at_work) == ("done", False)


def test_what_is_being_written_or_deleted_of_checkpoints_is_known(paths: RunPaths) -> None:
    assert look(paths).disk_passing_bytes is None
    for name in ("step_00000010", "step_00000020.tmp-0a1b2c3d", ".trash-5-0a1b2c3d"):
        (paths.checkpoints / name / "rank0").mkdir(parents=True)
        (paths.checkpoints / name / "rank0" / "weights").write_bytes(
            bytes(range(256)) * 4096
        )  # 1 MiB
    found = look(paths).disk_passing_bytes
    assert found is not None and 2 * 2**20 <= found <= 2.1 * 2**20


def test_the_node_behind_the_first_has_a_job_of_its_own(paths: RunPaths) -> None:
    second = RunPaths(paths.folder, 1)
    with open(second.job, "w") as job:
        job.write(f"pid 1 on {HOST}: training as node 1 of 2\n")
        job.flush()
        fcntl.flock(job, fcntl.LOCK_EX)
        node = look(second)
        assert (node.node, node.at_work, node.stage) == (1, True, "training as node 1 of 2")
        assert look(paths).at_work is False


# ---- Its log

BEGIN = "2026-11-22 08:14:02,741 node 0: host=vm ranks=0-0 of 1 device=CPU torch=2.13.0 nccl=none\n"
TRACE = (
    "2026-11-22 08:15:00,000 the trainer failed\nTraceback (most recent call last):\n"
    '  File "train/main.py", line 81, in main\n    code = run(job)\nRuntimeError: no such thing\n'
)


def test_the_last_complaint_of_an_attempt(paths: RunPaths) -> None:
    log, between = paths.node_log(0), local.Between(paths)

    def after(text: str) -> str:
        with open(log, "a") as file:
            file.write(text)
        return local.look(CPU, paths, None, between).complaint

    assert after(BEGIN + "2026-11-22 08:14:07,326 step=1/40 loss=8.3247 lr=5.000e-05\n") == ""
    assert (
        after("2026-11-22 08:14:08,000 checkpoint failed: disk full\n  it is tried again\n")
        == "checkpoint failed: disk full"
    )
    assert after("2026-11-22 08:14:09,000 went back to step 3") == "checkpoint failed: disk full", (
        "a torn line waits"
    )
    assert (
        after("0\n2026-11-22 08:14:09,100 goodput 80% of 1:00: lost work 0:03\n")
        == "went back to step 30"
    )
    assert after(TRACE) == "RuntimeError: no such thing"
    assert local.look(CPU, paths).complaint == "RuntimeError: no such thing", (
        "one that looks for the first time"
    )
    assert after(BEGIN) == "", "that was the attempt before"
    assert (
        after("2026-11-22 08:16:00,000 " + 1000 * "error " + "\n")
        == ("error " * 1000)[:300].strip()
    )
    log.write_text(BEGIN)
    assert after("") == "", "another file"


def test_of_a_node_behind_the_first_and_of_a_long_log(paths: RunPaths) -> None:
    second = RunPaths(paths.folder, 1)
    line = "2026-11-22 08:14:09,000 rank=1 node 1: host=b ranks=1-1 of 2\n"
    second.node_log(1).write_text(
        "2026-11-22 08:14:00,000 rank=1 lost\n"
        + line
        + 3000 * (50 * "a" + "\n")
        + "2026-11-22 08:15:00,000 rank=1 NCCL error: remote\n"
        + 2000 * "fine\n"
    )
    assert look(second).complaint == "NCCL error: remote"


HANGS = (
    "HANGS: rank 1 on b: no progress in step 7 for 61 s (see TRAIN_TIMEOUT_S); it is at loop.py:9"
)
WAITS = "waits for others: rank 0 on a: no progress in step 7 for 61 s (see TRAIN_TIMEOUT_S); it is at step.py:5"


def test_who_hangs_is_told_rather_than_who_waits_for_it_and_what_comes_of_it(
    paths: RunPaths,
) -> None:
    log, between = paths.node_log(0), local.Between(paths)

    def after(*words: str) -> str:
        with open(log, "a") as file:
            file.writelines(f"2026-11-22 08:16:00,000 {line}\n" for line in words)
        return local.look(CPU, paths, None, between).complaint

    assert (
        after("rank=0 host=a: no progress in step 7 for 61 s")
        == "rank=0 host=a: no progress in step 7 for 61 s"
    )
    assert after(HANGS, WAITS) == HANGS
    assert (
        after("the trainer failed with exit code 1", "RuntimeError: Connection closed by peer")
        == HANGS
    )
    again = f"the attempt before: {HANGS}"
    assert after(BEGIN[24:].strip(), again, f"the attempt before: {WAITS}") == again
    assert after("checkpoint failed: disk full") == "checkpoint failed: disk full", (
        "of this attempt"
    )
    assert after(WAITS) == WAITS and after(HANGS.replace("rank 1", "rank 2")).startswith(
        "HANGS: rank 2"
    )


# ---- The machine


def test_rates_of_links_and_their_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "proc/net/dev": "a\nb\n    lo: 9 0 0 0 0 0 0 0 9\n  eth0: 1000 0 0 0 0 0 0 0 500\n"
        "  dead: 0 0 0 0 0 0 0 0 0\n",
        "sys/class/net/eth0/speed": "25000\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": "100\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "50\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    clock = iter([100.0, 104.0, 105.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    links = local.Links(tmp_path)
    assert [(link.name, link.in_bytes_per_s, link.speed_bytes_per_s) for link in links.look()] == [
        ("eth0", None, 3.125e9),
        ("mlx5_0:1", None, 25e9),
    ]
    (tmp_path / "proc/net/dev").write_text(
        "a\nb\n  eth0: 5000 0 0 0 0 0 0 0 700\n  eth1: 5 0 0 0 0 0 0 0 5\n"
    )
    (tmp_path / "sys/class/net/eth0/speed").write_text("-1\n")
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data").write_text("1100\n")
    eth0, eth1, ib = links.look()
    assert (eth0.in_bytes_per_s, eth0.out_bytes_per_s, eth0.speed_bytes_per_s) == (1000, 50, None)
    assert (eth1.name, eth1.in_bytes_per_s, eth1.speed_bytes_per_s) == ("eth1", None, None)
    assert (ib.in_bytes_per_s, ib.out_bytes_per_s) == (1000, 0)
    (tmp_path / "proc/net/dev").write_text("a\nb\n  eth0: 10 0 0 0 0 0 0 0 701\n")
    assert (links.look()[0].in_bytes_per_s, links.before[0]) == (None, 105.0), (
        "a counter that began anew"
    )


def test_memory_is_of_the_container_where_that_has_a_limit(tmp_path: Path) -> None:
    def tree(**files: str) -> Path:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert local.memory(tree(proc__meminfo="MemAvailable: 1048576 kB\n")) == (total - GIB, total)
    tree(
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memory_DOT_max=str(8 * GIB),
        sys__fs__cgroup__memory_DOT_current=str(6 * GIB),
        sys__fs__cgroup__memory_DOT_stat=f"inactive_file {GIB}\n",
    )
    assert local.memory(tmp_path) == (5 * GIB, 8 * GIB)
