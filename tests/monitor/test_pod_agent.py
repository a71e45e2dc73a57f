"""monitor/pod_agent.py: its line, when it comes, and that it ends; next to training as a pod starts it."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monitor import local
from monitor.facts import Gpu, Link, Node, Progress, of_line
from monitor.pod_agent import QUIET_S, TELL_S, Teller, Told, line_of, pause_s, told_to_end
from record.goodput import CATEGORIES
from record.run_paths import RunPaths
from settings import ROOT
from settings.config import Config
from tests.constants import constants

TRAIN = [sys.executable, "-m", "scripts.train"]

PROGRESS = Progress(
    123456,
    64728793088,
    190734,
    3,
    1763719200.123456,
    1763819200.123456,
    1763919200.123456,
    2.8123456789,
    2.8234567891,
    1,
    2,
    3,
    10.123456789,
    51789.123456,
    50.123456,
    0.0123456789,
    71.123456789,
    2.9123456,
    123000,
    61.123456,
    123000,
    1763919100.123456,
    16123456789.0,
    dict.fromkeys(CATEGORIES, 123456.789),
    damaged_lines=123456,
)
STATUS = {
    "schema": 1,
    "pid": 123456,
    "run": 63 * "r",
    "host": 63 * "h",
    "last_step": 190734,
    "phase": "waiting for peers",
    "since": 1763919200.1234567,
    "attempt": 3,
    "step": 123456,
    "loss": 2.8123456789,
    "step_s": 10.123456789,
    "save_s": 61.123456789,
    "heartbeat": 1763919300.1234567,
}


def node_of(gpus: int, links: int = 2, complaint: str = 300 * "c") -> Node:
    """A node of which everything is known, in long numbers and words."""
    return Node(
        0,
        63 * "h",
        1763919300.123456,
        STATUS,
        "training as node 15 of 16",
        True,
        PROGRESS,
        tuple(
            Gpu(
                i,
                "NVIDIA GH200 480GB, in a long name",
                100.0,
                131.123456789,
                139.719238,
                699.123,
                700.0,
                84.0,
                1980.0,
                ("power_cap", "sw_thermal"),
                clock_max_mhz=1980.0,
                training_w=671.123456789,
            )
            for i in range(gpus)
        ),
        1763919299.123456,
        "",
        tuple(Link(f"mlx5_{i}:1", 1234567890.123 + i, 2345678901.234, 50e9) for i in range(links)),
        1234567890123.0,
        123456789012.0,
        137438953472.0,
        complaint=complaint,
        energy_j=1234567890.123,
        energy_since=1763719200.123456,
    )


def test_a_line_has_all_of_an_ordinary_node() -> None:
    line = line_of(node_of(2, complaint="checkpoint failed: disk full"))
    told = of_line(line)
    assert told and len(line) < 3000 and told.left_out == ()
    assert (
        told.status["phase"] == "waiting for peers"
        and told.progress
        and told.progress.step == 123456
    )
    assert (told.progress.loss, told.progress.step_time, told.progress.checkpoint_bytes) == (
        2.8123,
        1763919200.1,
        16123456789,
    )
    assert told.gpus[1] == dataclasses.replace(
        node_of(2).gpus[1],
        memory_gib=131.12,
        memory_total_gib=139.72,
        power_w=699.12,
        training_w=671.12,
    )
    assert (told.energy_j, told.energy_since) == (1234567890.1, 1763719200.1)
    assert (told.disk_free_bytes, told.complaint) == (1234567890123, "checkpoint failed: disk full")


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("links", [0, 2, 40])
@pytest.mark.parametrize("complaint", ["", 300 * "\N{EURO SIGN}"])
def test_every_line_is_written_in_one_piece_and_says_what_it_lacks(
    gpus: int, links: int, complaint: str
) -> None:
    node = node_of(gpus, links, complaint)
    line = line_of(node)
    assert len(line.encode()) + 1 <= 4096 and "\n" not in line
    told = of_line(line)
    assert told and told.status["phase"] == node.status["phase"] and told.progress
    assert told.progress.tokens_per_s == 51789.1
    whole = (len(told.gpus), len(told.links), told.complaint, len(told.progress.goodput)) == (
        gpus,
        links,
        complaint,
        len(CATEGORIES),
    ) and all(gpu.name and gpu.clock_mhz for gpu in told.gpus)
    assert whole == (told.left_out == ())
    if gpus <= 16:
        assert [
            (gpu.utilisation_percent, gpu.power_w, gpu.throttle) for gpu in told.gpus
        ] == gpus * [(100, 699.12, ("power_cap", "sw_thermal"))]
        assert {gpu.training_w for gpu in told.gpus[: 1 if gpus > 8 else gpus]} <= {671.12}


def test_the_links_that_stay_are_those_through_which_most_goes() -> None:
    told = of_line(line_of(node_of(8, 40)))
    assert told and [link.name for link in told.links] == ["mlx5_39:1", "mlx5_38:1"]


def test_nodes_behind_the_first_leave_the_run_to_it() -> None:
    told = of_line(line_of(dataclasses.replace(node_of(1), node=3)))
    assert told and (told.node, told.status, told.progress, len(told.gpus)) == (3, {}, None, 1)


def test_what_is_not_finite_is_not_known() -> None:
    odd = dataclasses.replace(
        node_of(1), memory_bytes=float("nan"), status={"loss": float("inf"), "phase": "training"}
    )
    told = of_line(line_of(odd))
    assert told and told.memory_bytes is None and told.status == {"loss": None, "phase": "training"}


@pytest.mark.parametrize(
    ("since", "stage", "at_work", "pause"),
    [
        (1000.0, "", True, QUIET_S),
        (100.0, "", True, TELL_S),
        (1000.0, "preparing data", True, TELL_S),
        (1000.0, "", False, TELL_S),
        (None, "", True, TELL_S),
    ],
)
def test_it_tells_less_often_when_a_phase_has_lasted(
    since: float | None, stage: str, at_work: bool, pause: float
) -> None:
    status: dict[str, Any] = {"since": 5e9 - since} if since else {}
    assert (
        pause_s(
            dataclasses.replace(node_of(1), time=5e9, status=status, stage=stage, at_work=at_work)
        )
        == pause
    )


def test_a_look_that_fails_is_said_once_and_the_next_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    teller = Teller(Config(), RunPaths(tmp_path), writer)
    looks: list[Any] = [
        ZeroDivisionError("no\nsuch"),
        ZeroDivisionError("no\nsuch"),
        node_of(1),
        ZeroDivisionError("no\nsuch"),
        KeyError("a"),
        ZeroDivisionError(5000 * "x"),
    ]

    def look(*_: Any) -> Node:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(local, "look", look)
    assert [teller.tell() for _ in range(6)] == 6 * [TELL_S]
    os.close(writer)
    with os.fdopen(reader) as told:
        assert [of_line(line) is not None for line in told] == [True]
    said = capfd.readouterr().err.splitlines()
    assert [re.sub(r"[.]py:\d+", ".py:N", line.rpartition("fails: ")[2]) for line in said] == [
        *2 * ["ZeroDivisionError: no such (test_pod_agent.py:N)"],
        "KeyError: 'a' (test_pod_agent.py:N)",
        f"ZeroDivisionError: {281 * 'x'} (test_pod_agent.py:N)",
    ]
    assert all(line.startswith("teller: nothing is told of this node") for line in said)


def test_what_tells_it_to_end_is_no_look_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def look(*_: Any) -> Node:
        told_to_end(signal.SIGTERM, None)
        raise AssertionError

    monkeypatch.setattr(local, "look", look)
    with pytest.raises(Told):
        Teller(Config(), RunPaths(tmp_path), 1).tell()


# ---- As a process


@pytest.fixture
def run(env: dict[str, str], tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_it_ends_when_told_to_and_says_the_end_of_a_run_that_is_done(
    env: dict[str, str], run: Path
) -> None:
    for phase, lines in (("training", 1), ("done", 2)):
        (run / "STATUS.json").write_text(json.dumps({"phase": phase}))
        process = subprocess.Popen(
            [sys.executable, "-m", "monitor.pod_agent"],
            env=env,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
        )
        assert process.stdout
        first = of_line(process.stdout.readline())
        assert first and first.status == {"phase": phase}
        process.terminate()
        rest, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and rest.count("node-facts ") == lines - 1


def test_it_ends_with_who_started_it_and_with_who_reads(
    env: dict[str, str], run: Path, tmp_path: Path
) -> None:
    starter = f'"{sys.executable}" -m monitor.pod_agent >"{tmp_path / "said"}" & echo $!; sleep 100'
    shell = subprocess.Popen(
        ["bash", "-c", starter], env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    assert shell.stdout
    pid = int(shell.stdout.readline())
    until(lambda: (tmp_path / "said").exists() and (tmp_path / "said").read_text())
    shell.kill()
    shell.wait()
    until(lambda: not lives(pid))
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "monitor.pod_agent"],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_bad_setting_is_said(env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "monitor.pod_agent"],
        env=env | {"NODES": "none"},
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 64 and "NODES=none" in done.stderr and done.stdout == ""


def lives(pid: int) -> bool:
    """One that is dead and not yet reaped counts as gone."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def until(happens: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- Next to training

# Stands in for the Python of children: the trainer is a sleep that ends with CODE when told to; the sampler is as slow to end
# as SLOW says.
STUB = """#!/usr/bin/env bash
case "$2" in
  train.main) trap 'exit ${CODE:-0}' TERM; echo trains; [[ -z ${ENDS-} ]] || exit "$ENDS"
    for _ in $(seq 300); do sleep 0.1; done ;;
  monitor.*) trap 'sleep "${SLOW:-0}"; echo "$2 ended" >>"$TOLD"; exit' TERM; echo "$2 $$ ${*:3}" >>"$TOLD"
    [[ -z $(find /proc/$$/fd -lname '*/.job') ]] || echo "$2 holds the lock" >>"$TOLD"
    while sleep 0.1; do :; done ;;
esac
"""


@pytest.fixture
def pod(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    (tmp_path / "stub").write_text(STUB)
    (tmp_path / "stub").chmod(0o755)
    return env | {
        **constants(PYTHON=str(tmp_path / "stub")),
        "TOLD": str(tmp_path / "told"),
        "K8S_NODE": "machine",
        "DEVICE": "cpu",
        "MAX_RESTARTS": "0",
    }


def started(pod: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        TRAIN,
        cwd=ROOT,
        env=pod,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def told(pod: dict[str, str]) -> list[str]:
    path = Path(pod["TOLD"])
    return path.read_text().splitlines() if path.exists() else []


def test_a_pod_has_both_beside_training_until_its_end(pod: dict[str, str], tmp_path: Path) -> None:
    for code in ("0", "1", "78"):
        Path(pod["TOLD"]).unlink(missing_ok=True)
        done = subprocess.run(
            TRAIN,
            cwd=ROOT,
            env=pod | {"ENDS": code, "NODE_RANK": "0"},
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == int(code), done.stderr
        said = sorted(told(pod))
        assert [re.sub(r" \d+", "", line).rstrip() for line in said] == [
            "monitor.gpu_sampler --follow",
            "monitor.gpu_sampler ended",
            "monitor.pod_agent",
            "monitor.pod_agent ended",
        ]
    assert f"logs to {tmp_path}/run/logs/gpu_sampler.log" in done.stdout


def test_no_pod_has_none_of_them(pod: dict[str, str]) -> None:
    done = subprocess.run(
        TRAIN,
        cwd=ROOT,
        env=pod | {"ENDS": "0", "K8S_NODE": ""},
        text=True,
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert told(pod) == [] and "GPU sampler" not in done.stdout


def test_a_pod_that_is_told_to_stop_waits_for_neither(pod: dict[str, str]) -> None:
    process = started(pod | {"CODE": "75", "SLOW": "60"})
    assert process.stdout
    until(lambda: len(told(pod)) == 2)
    while "trains" not in process.stdout.readline():
        pass
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 75
    assert time.monotonic() - began < 15
    for line in told(pod):
        os.kill(int(line.split()[1]), signal.SIGKILL)
    process.stdout.close()
