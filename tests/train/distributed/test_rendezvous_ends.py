"""train/distributed/rendezvous.py as a command: a node that is told to stop or ends for good tells those that wait for it."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from record import locks, status
from settings import ROOT
from tests.train.distributed.test_rendezvous import Nodes, nodes
from train.distributed import rendezvous

__all__ = ["nodes"]  # a fixture


def command(nodes: Nodes, rank: int, *arguments: str, **changes: str) -> subprocess.Popen[str]:
    c = nodes.config
    env = (
        {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        | {
            "PYTHONPATH": str(ROOT),
            "RUNS_DIR": str(nodes.folder),
            "RUN_NAME": "run",
            "NODES": str(c.nodes),
            "BATCH_TOKENS": "12288",
            "NODE_RANK": str(rank),
            "MASTER_ADDR": c.master_addr,
            "START_TIMEOUT_S": "20",
            "DEVICE": "cpu",
        }
        | changes
    )
    return subprocess.Popen(
        [sys.executable, "-m", "train.distributed.rendezvous", *arguments],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )


def said(process: subprocess.Popen[str], seconds: float = 30) -> tuple[int, str]:
    text = process.communicate(timeout=seconds)[0]
    return process.returncode, text


@pytest.mark.parametrize(
    ("stopped", "number"),
    [(0, signal.SIGTERM), pytest.param(2, signal.SIGINT, marks=pytest.mark.slow)],
)
def test_a_node_that_is_told_to_stop_while_it_waits_tells_the_others(
    nodes: Nodes, stopped: int, number: signal.Signals
) -> None:
    waiting = {rank: command(nodes, rank, "meet", "1") for rank in (0, 2)}
    nodes.wait_for("waiting for peers 2/3")
    assert locks.is_held(nodes.paths)  # so that make stop and make status know of it
    waiting[stopped].send_signal(number)
    host = socket.gethostname()
    for rank in (stopped, 2 - stopped):
        code, text = said(waiting[rank])
        assert code == 143 and f"roll call: node {stopped} ({host}) was told to stop" in text
    state = status.read(nodes.paths.status)
    assert (state["phase"], state["exit_code"]) == ("stopped", 143)
    assert not locks.is_held(nodes.paths)


@pytest.mark.parametrize(
    ("ending", "code", "why", "words"),
    [
        (0, 75, "", "was told to stop"),
        (2, 78, "", "ended with exit code 78; its log says why"),
        (2, 78, "DATA=x: no such\n  file", "ended with exit code 78: DATA=x: no such file\n"),
        (0, 64, "MODEL=x: " + 2000 * "y", "ended with exit code 64: MODEL=x: y"),
    ],
)
def test_a_node_that_ends_for_good_takes_the_others_along(
    nodes: Nodes, ending: int, code: int, why: str, words: str
) -> None:
    """Whichever comes first to the port: the one that waits for it, or the one that will not."""
    others = [rank for rank in range(3) if rank != ending]
    waiting = [command(nodes, rank, "meet", "1") for rank in others]
    last = command(nodes, ending, "over", str(code), *([why] if why else []))
    for process in waiting:
        got, text = said(process)
        assert got == code and words in text and f"node {ending}" in text
    assert said(last)[0] == 0


def test_nodes_that_all_end_keep_nobody_waiting(nodes: Nodes) -> None:
    began = time.monotonic()
    for process in [command(nodes, rank, "over", "75") for rank in range(3)]:
        assert said(process) == (0, "")
    assert time.monotonic() - began < 18


@pytest.mark.parametrize(
    ("phase", "code", "after"),
    [
        ("waiting for peers 3/3", 64, ("refused", 64)),
        ("waiting for peers 1/3", 75, ("stopped", 75)),
        ("crashed", 78, ("crashed", 1)),
        ("training", 1, ("training", 1)),
    ],
)
def test_a_trainer_that_ended_before_it_said_anything_waits_for_no_peers(
    nodes: Nodes, phase: str, code: int, after: tuple[str, int]
) -> None:
    nodes.paths.status.write_text(
        json.dumps({"schema": 1, "phase": phase, "exit_code": 1, "step": 7})
    )
    assert said(command(nodes, 0, "over", str(code)))[0] == 0
    state = status.read(nodes.paths.status)
    assert (state["phase"], state["exit_code"], state["step"]) == (*after, 7)


def test_a_run_that_another_process_trains_is_left_to_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "RELEASE_S", 0.3)
    with locks.hold_run(nodes.paths):
        code, why = rendezvous.meet(nodes.config, 1)
        monkeypatch.setenv("K8S_NODE", "machine")
        pod, of_pod = rendezvous.meet(dataclasses.replace(nodes.config, start_timeout_s=1), 1)
    assert (code, pod) == (78, 69) and why == of_pod  # that of a pod may be free at the next try
    assert f"another process trains this run (pid {os.getpid()} on" in why
    assert not nodes.paths.status.exists()
