"""Two nodes of one run, or three, on loopback: each has its launcher, its torchrun and its process, and any may be
lost."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from record import metrics as record_reader
from record.run_paths import RunPaths
from tests.constants import constants
from tests.faults.inject import Fault, faulty
from tests.faults.streams import declare_in
from tests.running import (
    ROOT,
    WITH_CONSTANTS,
    environment,
    losses,
    train,
    wait_for,
    wait_until,
)
from tests.train.test_ranks import relative, with_fault

pytestmark = pytest.mark.slow


class Job:
    """A launcher for each of NODES, which share RUNS_DIR, and whatever they have started."""

    def __init__(self, folder, env, **of_the_second):
        self.run, self.env = RunPaths(folder / "run"), env
        self.logs = [folder / f"console_{rank}" for rank in range(int(env["NODES"]))]
        self.nodes: list[subprocess.Popen[bytes]] = []
        for rank in range(len(self.logs)):
            self.nodes.append(self.start(rank, **(of_the_second if rank == 1 else {})))

    def start(self, rank, **changes):
        with open(self.logs[rank], "a") as out:
            return subprocess.Popen(
                [ROOT / "scripts" / "launch.sh"],
                env=self.env | {"NODE_RANK": str(rank)} | changes,
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ends(self, *codes):
        """What each said, once it has ended with its code."""
        deadline = time.monotonic() + 400
        got = tuple(node.wait(max(1.0, deadline - time.monotonic())) for node in self.nodes)
        said = [log.read_text() for log in self.logs]
        assert got == codes, "\n".join(said)
        return said

    def kill(self, rank):
        """kill -9 of a node's torchrun, with which its processes end; its launcher stays."""
        pid = self.nodes[rank].pid
        (torchrun,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(torchrun), signal.SIGKILL)

    def lose(self, rank):
        """Kill all processes of a node, as when its machine is lost."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.nodes[rank].pid, signal.SIGKILL)
        self.nodes[rank].wait()


@pytest.fixture
def env(tmp_path, data, free_port):
    return environment(
        tmp_path,
        data,
        NODES=2,
        NPROC=1,
        MASTER_ADDR=f"127.0.0.1:{free_port}",
        MAX_RESTARTS=3,
        START_TIMEOUT_S=120,
        MAX_STEPS=40,
        SAVE_EVERY=5,
    )


@pytest.fixture
def jobs():
    """Nothing of a job outlives its test."""
    started: list[Job] = []
    yield started
    for job in started:
        for rank in range(len(job.nodes)):
            job.lose(rank)


def test_two_nodes_without_a_common_disk_of_which_one_is_killed_follow_one_process(
    tmp_path, data, env, jobs
):
    (tmp_path / "one").mkdir()
    train(
        environment(tmp_path / "one", data, MAX_STEPS=40),
        command=[str(ROOT / "scripts" / "launch.sh")],
    )
    job = Job(
        tmp_path,
        faulty(
            env,
            tmp_path,
            Fault("step", "wait for the save", step=7),
            Fault("step", "sleep", step=8, rank=1, value=50),  # once
        ),
        RUNS_DIR=str(tmp_path / "other"),
    )
    jobs.append(job)
    wait_until((tmp_path / ".fault_1_rank_1").exists)
    job.kill(1)
    first, second = job.ends(0, 0)
    for said in (first, second):
        assert (
            "launch: attempt 1 ended with" in said
            and said.count("rendezvous: all nodes have joined") == 2
        )
    assert "the nodes do not share" in first and "resumed from step_0000005" in first
    assert not list((tmp_path / "other" / "run").glob("checkpoints/*"))
    assert "waiting for peers" not in job.run.status.read_text()
    records = list(record_reader.read_records(job.run.metrics))
    assert [r["event"] for r in records].count("resume") == 1
    assert relative(losses(job.run.folder), losses(tmp_path / "one" / "run")) < 1e-5


def test_a_node_with_a_data_dir_of_its_own_gets_from_the_first_what_it_lacks(
    tmp_path, data, env, jobs
):
    """Prepared, and streamed: only the first node reads the sources; the other has the same files in the end."""
    sources = tmp_path / "data" / "sources"
    sources.mkdir(parents=True)
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(400)]
    for name, count in (("large", 300), ("small", 30)):
        rows = [
            json.dumps({"id": i, "text": " ".join(rng.choices(words, k=60))}) + "\n"
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        (sources / f"{name}.toml").write_text(
            f'files = ["{tmp_path}/{name}.jsonl"]\nvalidation_fraction = 0.1\n'
        )
    mixture = {
        "DATA_MIX": "large:9,small:1",
        "DATA_DIR": str(tmp_path / "data"),
        "MAX_STEPS": "40",
    }
    small = constants(SHARD_TOKENS=2000, GROUP_SHARDS=2, MAX_EPOCHS=100)
    mixture |= small | {"PYTHONPATH": WITH_CONSTANTS}
    (tmp_path / "one").mkdir()
    alone = environment(tmp_path / "one", data) | mixture
    train(alone, command=[sys.executable, "-m", "train.data.prepare"])
    train(alone)
    made = {
        path.relative_to(tmp_path / "data"): path.read_bytes()
        for path in (tmp_path / "data").rglob("*.bin")
    }
    for number, stream in enumerate(("0", "1")):
        if stream == "1":
            shutil.rmtree(tmp_path / "data" / "large")
            train(
                alone | {"DATA_STREAM": "1"}, command=[sys.executable, "-m", "train.data.prepare"]
            )
        other = tmp_path / f"other_{stream}"
        declare_in(other, sources)
        jobs.append(
            Job(
                tmp_path,
                env | mixture | {"DATA_STREAM": stream, "RUN_NAME": f"run_{stream}"},
                DATA_DIR=str(other),
            )
        )
        first, _ = jobs[number].ends(0, 0)
        assert "has a DATA_DIR of its own" in first, first
        assert relative(losses(tmp_path / f"run_{stream}"), losses(tmp_path / "one" / "run")) < 1e-5
        got = {path.relative_to(other): path.read_bytes() for path in other.rglob("*.bin")}
        assert got and got.items() <= made.items() and len(got) > len(made) // 2


# ---- As in pods

# Steps that take long enough to be stopped between them.
SLOWLY = (
    "from train import loop",
    "step = loop.train_step",
    "loop.train_step = lambda *args, **named: (time.sleep(0.3), step(*args, **named))[1]",
)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_node_that_was_told_to_stop_comes_back_and_the_other_has_waited(
    tmp_path, data, env, jobs, stopped
):
    """A pod that is preempted saves and leaves with 75; the others' steps go on once it has been started elsewhere."""
    (tmp_path / "one").mkdir()
    train(environment(tmp_path / "one", data, MAX_STEPS=40))
    env = with_fault(env, tmp_path, *SLOWLY)
    job = Job(tmp_path, env | {"K8S_NODE": "machine", "MAX_RESTARTS": "0", "SAVE_EVERY": "1000"})
    jobs.append(job)
    wait_for(job.run.metrics, '"step": 5,')
    job.nodes[stopped].send_signal(signal.SIGTERM)
    assert job.nodes[stopped].wait(120) == 75
    (saved,) = job.run.checkpoints.iterdir()
    wait_for(
        job.logs[1 - stopped],
        "Another node has left; waiting for it to come back",
    )
    assert job.nodes[1 - stopped].poll() is None
    job.nodes[stopped] = job.start(stopped)
    job.ends(0, 0)
    events = [r["event"] for r in record_reader.read_records(job.run.metrics)]
    assert events.count("resume") == 1 and events.count("start") == 1
    assert f"resumed from {saved.name}" in job.run.train_log.read_text()
    assert relative(losses(job.run.folder), losses(tmp_path / "one" / "run")) < 1e-5


def test_three_nodes_of_which_the_first_is_gone_and_replaced(tmp_path, data, env, jobs):
    env = with_fault(env, tmp_path, *SLOWLY)
    job = Job(tmp_path, env | {"NODES": "3", "BATCH_TOKENS": "768", "K8S_NODE": "machine"})
    jobs.append(job)
    wait_for(job.run.metrics, '"event": "checkpoint"')
    job.lose(0)
    job.nodes[0] = job.start(0)  # another takes its place
    said = job.ends(0, 0, 0)
    for rank in (1, 2):
        assert "launch: attempt 1 ended with" in said[rank] and "restart 1 of 3" in said[rank]
    events = [r["event"] for r in record_reader.read_records(job.run.metrics)]
    assert events.count("resume") == 1 and max(losses(job.run.folder)) == 40
