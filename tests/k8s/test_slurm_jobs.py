"""Runs under a real Slurm: signaled before the time limit, stopped, and with a node that dies."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.k8s.slurm_cluster import LACKS, NODES, Slurm
from tests.running import ROOT, environment, events, losses, saved_steps, train, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(270),
    pytest.mark.skipif(bool(LACKS), reason=f"Slurm is not installed here: {', '.join(LACKS)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a Slurm of this machine needs root"),
]
STEPS = 400


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


def settings_of(folder: Path, data: dict[str, str], **settings: object) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    common = {"PRESET": "tiny", "TRAIN_TOKENS": 512 * STEPS, "SAVE_EVERY": 100, "LOG_EVERY": 1}
    return environment(folder, data, **(common | settings))


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]
) -> dict[int, tuple[float, float]]:
    """Losses of two processes that no Slurm starts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(settings_of(folder, data, NPROC=2), command=[str(ROOT / "scripts" / "launch.sh")])
    return losses(folder / "run")


class Job:
    """A run of two nodes."""

    def __init__(self, slurm: Slurm, folder: Path, data: dict[str, str], **settings: object):
        self.slurm = slurm
        self.folder = folder / "run"
        self.env = settings_of(
            folder,
            data,
            ENGINE="slurm",
            NODES=2,
            GPUS_PER_NODE=1,
            GRACE_PERIOD_S=61,
            MAX_RESTARTS=3,
            OMP_NUM_THREADS=1,
            **settings,
        ) | {"SLURM_CONF": str(slurm.conf)}
        self.out = self.make("k8s.launch")
        self.id = (self.folder / "slurm.job").read_text()

    def make(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            env=self.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def log(self) -> str:
        path = self.folder / "logs" / f"slurm_{self.id}.log"
        return path.read_text() if path.exists() else ""

    def is_past(self, step: int) -> bool:
        record = self.folder / "metrics.jsonl"
        return record.exists() and max(losses(self.folder), default=0) >= step

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.is_past(step) or not self.is_queued, 120)
        assert self.is_past(step), self.log

    def wait_for_end(self) -> None:
        self.wait_until(lambda: not self.is_queued, 200)

    def wait_for_requeue(self) -> None:
        self.wait_until(lambda: self.slurm.restarts(self.id) == 1 or not self.is_queued, 150)
        assert self.is_queued, self.log

    def wait_until(self, what: Callable[[], object], seconds: float) -> None:
        try:
            wait_until(what, seconds)
        except AssertionError:
            raise AssertionError(f"not in {seconds} s:\n{self.log}") from None

    @property
    def is_queued(self) -> bool:
        return bool(self.slurm.ask("squeue", "-h", "-j", self.id))


def test_a_run_that_is_signaled_before_its_time_limit_is_requeued_and_loses_no_step(
    slurm: Slurm, tmp_path: Path, data: dict[str, str], undisturbed: dict[int, tuple[float, float]]
) -> None:
    job = Job(slurm, tmp_path, data)
    assert f"Slurm job {job.id} is submitted" in job.out
    job.wait_for_step(130)
    assert f"Slurm job {job.id}: RUNNING 127.0.0." in job.make("k8s.jobs", "status")
    # As Slurm does for --signal=B:TERM@61: this shell of the script alone.
    slurm.ask("scancel", "--signal=TERM", "--batch", job.id)
    job.wait_for_requeue()
    stopped_at = saved_steps(job.folder)[-1]
    assert stopped_at % 100  # none of SAVE_EVERY
    job.wait_for_end()
    assert losses(job.folder) == undisturbed
    assert "the nodes ended with code 75" in job.log
    assert f"resumed from step_{stopped_at:07d}" in job.log
    assert len(events(job.folder, "step")) == STEPS  # none was made twice
    assert "not in the queue" in job.make("k8s.jobs", "status")


def test_make_stop_saves_and_the_same_command_goes_on(
    slurm: Slurm, tmp_path: Path, data: dict[str, str], undisturbed: dict[int, tuple[float, float]]
) -> None:
    job = Job(slurm, tmp_path, data)
    job.wait_for_step(130)
    said = job.make("k8s.jobs", "stop")
    step = saved_steps(job.folder)[-1]
    assert f"Slurm job {job.id} has ended; last checkpoint: step {step}" in said
    assert not slurm.ask("squeue", "-h") and step % 100
    again = Job(slurm, tmp_path, data)
    again.wait_for_end()
    assert again.id != job.id
    assert losses(job.folder) == undisturbed


def test_a_run_whose_processes_are_killed_on_one_node_is_requeued(
    slurm: Slurm, tmp_path: Path, data: dict[str, str], undisturbed: dict[int, tuple[float, float]]
) -> None:
    job = Job(slurm, tmp_path, data)
    job.wait_for_step(130)
    slurm.kill_tasks(slurm.nodes_of(job.id)[1], job.id)
    job.wait_for_requeue()
    job.wait_for_end()
    assert "the nodes ended with code 137" in job.log
    assert losses(job.folder) == undisturbed


@pytest.mark.parametrize("which", [0, 1], ids=["of the script", "other"])
def test_a_run_whose_node_dies_goes_on_on_others(
    slurm: Slurm,
    tmp_path: Path,
    data: dict[str, str],
    undisturbed: dict[int, tuple[float, float]],
    which: int,
) -> None:
    job = Job(slurm, tmp_path, data)
    job.wait_for_step(130)
    lost = slurm.nodes_of(job.id)[which]
    assert lost in NODES
    slurm.lose(lost, job.id)
    try:
        job.wait_for_requeue()
        job.wait_until(lambda: len(slurm.nodes_of(job.id)) == 2, 60)
        assert lost not in slurm.nodes_of(job.id)
        job.wait_for_end()
    finally:
        slurm.start_node(lost)
    assert losses(job.folder) == undisturbed
