"""Moments of a run, made by hand: 2 nodes of 4 A100 in training, and what is changed of that by a test."""

import dataclasses
from typing import Any

from monitor.facts import Cluster, Expected, Fault, Gpu, Link, Node, Pod, Progress, Seen
from settings.config import Config

NOW = 1_800_000_000.0
GIB = 2**30
SETTINGS = dataclasses.replace(Config(), preset="xlarge-8xa100", run_name="big", nproc=4, nodes=2)

GPU = Gpu(
    0,
    "NVIDIA A100-SXM4-80GB",
    utilisation_percent=99,
    memory_gib=49.0,
    memory_total_gib=80.0,
    power_w=380,
    power_limit_w=400,
    temp_c=64,
    clock_mhz=1350,
    clock_max_mhz=1410,
    throttle=("power_cap",),
)
TRAINING = Progress(
    step=12_345,
    tokens=12_345 * 524_288,
    last_step=190_735,
    started=NOW - 36_000,
    attempt_started=NOW - 36_000,
    step_time=NOW - 2,
    loss=2.61,
    median_loss=2.60,
    step_s=2.9,
    tokens_per_s=130_000,
    mfu_percent=48.1,
    data_wait_fraction=0.001,
    mem_gib=48.0,
    checkpoint_step=12_000,
    checkpoint_time=NOW - 600,
    checkpoint_bytes=15.0 * GIB,
    goodput={
        "training": 34_000.0,
        "start_up": 200.0,
        "evaluation": 700.0,
        "checkpoint": 100.0,
        "data_wait": 20.0,
        "other": 10.0,
    },
)
PLAN = Expected(
    tokens_per_s=135_000,
    mfu_percent=50,
    step_s=3.9,
    needs_gib=19.9,
    memory_gib=49,
    bytes_per_step=5.3e9,
    link_bytes_per_s=3.125e9,
    checkpoint_bytes=15.0 * GIB,
    save_every_s=900,
)
LINK = Link("eth0", in_bytes_per_s=1.3e9, out_bytes_per_s=1.3e9, speed_bytes_per_s=3.125e9)


def status(phase: str, ago: float = 1000.0, **facts: Any) -> dict[str, Any]:
    """STATUS.json of a phase that began so many seconds ago."""
    return {
        "schema": 1,
        "phase": phase,
        "since": NOW - ago,
        "heartbeat": NOW - 1,
        "step_s": 2.9,
        **facts,
    }


def gpus(number: int = 4, **changes: Any) -> tuple[Gpu, ...]:
    return tuple(dataclasses.replace(GPU, index=index, **changes) for index in range(number))


def node(number: int = 0, **changes: Any) -> Node:
    facts: dict[str, Any] = {
        "status": status("training") if number == 0 else {},
        "progress": TRAINING if number == 0 else None,
        "at_work": True,
        "gpus": gpus(),
        "gpus_time": NOW,
        "links": (LINK,),
        "disk_free_bytes": 200.0 * GIB,
        "memory_bytes": 40.0 * GIB,
        "memory_limit_bytes": 96.0 * GIB,
    }
    return Node(number, f"gpu-{'ab'[number]}", NOW, **facts | changes)


def seen(*nodes: Node, **changes: Any) -> Seen:
    facts: dict[str, Any] = {"expected": PLAN, "since": NOW - 60}
    return Seen(NOW, "big", "xlarge-8xa100", nodes or (node(0), node(1)), **facts | changes)


def at_phase(phase: str, ago: float, progress: Progress | None = TRAINING, **changes: Any) -> Seen:
    """The run here, in a phase for so many seconds."""
    return seen(node(0, status=status(phase, ago), progress=progress, **changes), node(1))


def progress(**changes: Any) -> Seen:
    """The run in training, with something else in its record."""
    return seen(node(0, progress=dataclasses.replace(TRAINING, **changes)), node(1))


def pod(index: int, **changes: Any) -> Pod:
    facts: dict[str, Any] = {
        "phase": "Running",
        "node": f"machine-{index}",
        "site": "ucsd" if index == 0 else "sdsc",
    }
    return Pod(index, f"pure-transformer-8xa100-{index}-abcde", **facts | changes)


def cluster(*pods: Pod, **changes: Any) -> Cluster:
    facts: dict[str, Any] = {
        "words": "namespace lab",
        "job_name": "pure-transformer-8xa100",
        "wanted_pods": 2,
        "job": "running: all 2 pods run",
    }
    return Cluster(pods=pods or (pod(0), pod(1)), **facts | changes)


def only(faults: list[Fault]) -> Fault:
    (fault,) = faults
    return fault
