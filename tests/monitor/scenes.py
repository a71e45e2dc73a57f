"""Made runs for tests of what the monitor shows: numbers that are easy to reckon with."""

import dataclasses
import datetime

from monitor.facts import Cluster, Expected, Fault, Gpu, Link, Node, Pod, Progress, Seen

GB = 1e9
NOW = datetime.datetime(
    2026, 11, 22, 14, 0, 0
).timestamp()  # a Sunday, of whatever zone the test is in
HOUR = 3600.0

# 300 of 1,200 steps of 2 s, 100 s of evaluation and checkpoints beside 500 s of training: 2.4 s a step from here on,
# so 900 steps are 2,160 s or 36:00, to 14:36. 10% was step 120.
PROGRESS = Progress(
    step=300,
    tokens=300 * 65536,
    last_step=1200,
    started=NOW - 1000,
    attempt_started=NOW - 1000,
    step_time=NOW - 1,
    loss=3.58,
    median_loss=3.6,
    step_s=2.0,
    tokens_per_s=32768.0,
    mfu_percent=43.8,
    data_wait_fraction=0.005,
    mem_gib=61.25,
    val_loss=3.9222,
    val_step=250,
    eval_s=8.0,
    checkpoint_step=200,
    checkpoint_time=NOW - 301,
    checkpoint_bytes=4 * GB,
    goodput={
        "training": 500.0,
        "data_wait": 0.0,
        "evaluation": 60.0,
        "checkpoint": 40.0,
        "start_up": 200.0,
        "other": 0.0,
        "down": 200.0,
        "lost_work": 0.0,
    },
)

EXPECTED = Expected(
    tokens_per_s=40960.0,
    mfu_percent=50.0,
    why="known of h100-sxm",
    step_s=1.6,
    needs_gib=9.0,
    memory_gib=60.0,
    checkpoint_bytes=4 * GB,
    save_every_s=900.0,
    eval_s=7.0,
    end=NOW + 960,
    phases=(("compiling", 300.0),),
)

STATUS = {
    "schema": 1,
    "phase": "training",
    "since": NOW - 750,
    "heartbeat": NOW - 1,
    "step": 300,
    "last_step": 1200,
}


def gpu(index: int, **facts: object) -> Gpu:
    values = {
        "name": "NVIDIA H100 80GB HBM3",
        "utilisation_percent": 98.0,
        "memory_gib": 64.0 + index / 2,
        "memory_total_gib": 80.0,
        "power_w": 670.0 + index,
        "power_limit_w": 700.0,
        "temp_c": 60.0 + index,
    }
    return Gpu(index, **values | facts)  # type: ignore[arg-type]


def node(number: int = 0, gpus: int = 2, **facts: object) -> Node:
    values = {
        "host": f"host-{number}",
        "time": NOW - 1,
        "gpus": tuple(map(gpu, range(gpus))),
        "gpus_time": NOW - 1,
        "links": (Link("eth0", 1.2 * GB, 1.1 * GB, 3.125 * GB), Link("eth1", 0.0, 0.0, 1.25 * GB)),
        "disk_free_bytes": 212 * GB,
        "memory_bytes": 48 * 2.0**30,
        "memory_limit_bytes": 96 * 2.0**30,
    }
    if number == 0:
        values |= {"status": STATUS, "progress": PROGRESS, "at_work": True}
    return Node(number, **values | facts)  # type: ignore[arg-type]


def here(**facts: object) -> Seen:
    """A run of this machine on two GPUs."""
    values = {
        "now": NOW,
        "run": "d16",
        "preset": "d16-2xh100",
        "nodes": (node(),),
        "expected": EXPECTED,
        "since": NOW - 60,
    }
    return Seen(**values | facts)  # type: ignore[arg-type]


def on_cpu() -> Seen:
    """On this machine's processors; nothing is known of what they could do."""
    progress = dataclasses.replace(PROGRESS, mfu_percent=None, mem_gib=0.55)
    facts = node(gpus=0, progress=progress, gpus_why="no GPU: there is no NVIDIA driver", links=())
    return here(
        run="tiny", preset="tiny", nodes=(facts,), expected=Expected(why="nothing is measured")
    )


def in_cluster(nodes: int = 4, gpus: int = 4) -> Seen:
    """A Job whose pods all run but the last, which is late."""
    lines = "step=300/1200 loss=3.5800 lr=6.000e-04 grad_norm=0.410 step_ms=2000.0 tokens_per_s=32768 mfu=43.8"
    pods = [
        Pod(
            n,
            f"pure-transformer-8xa100-{n}-x7k2p",
            "Running",
            f"gpu-{n}.site{n}.example.org",
            f"site{n}",
            restarts=n % 2,
            created=NOW - 1500,
            last_line=lines,
            last_line_time=NOW - 3,
        )
        for n in range(nodes)
    ]
    pods[-1] = Pod(nodes - 1, pods[-1].name, "Pending", created=NOW - 200, pulling_since=NOW - 130)
    told = tuple(node(n, gpus) for n in range(nodes - 1))
    there = Cluster(
        "namespace lab of nrp",
        "pure-transformer-8xa100",
        f"waiting for pods: {nodes - 1} of {nodes} run",
        wanted_pods=nodes,
        pods=tuple(pods),
        events=("20s ago  x  Pulling: image",),
    )
    plan = dataclasses.replace(EXPECTED, bytes_per_step=8 * GB, link_bytes_per_s=3.125 * GB)
    return here(run="xlarge", preset="xlarge-8xa100", nodes=told, cluster=there, expected=plan)


HANG = Fault(
    "hang",
    "no step for 5:10, 155 times the median of 2.0 s, while all GPUs show 100% utilisation at 120 W: "
    "they wait for each other in NCCL",
    "make logs ONLY=errors, and make restart goes on from the last checkpoint",
    failing=True,
)
DISK = Fault(
    "disk",
    "3.1 GB are left where the run is written, and the next checkpoint needs 4.0 GB",
    "make room, or KEEP_LAST=2 make restart",
    "node 0",
)
