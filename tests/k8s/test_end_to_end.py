"""Runs in a cluster, from make train-8xa100 to the end, by the real kubectl; pods are processes on this machine."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k8s.cluster.log_lines import POD_LINE
from monitor.facts import Node, of_line
from record import metrics as record_reader
from record.run_paths import RunPaths
from tests.cluster_sim.cluster import Cluster
from tests.conftest import TINY
from tests.constants import constants
from tests.running import ROOT, environment, losses, train
from tests.train.test_ranks import relative

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(540),  # the first waits for a whole run on the cluster
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="pods need /proc"),
]

IMAGE = "registry.example.org/lab/pure-transformer@sha256:" + 64 * "a"
VOLUME, PODS = "the-volume", 3
# A batch that three pods of one process share evenly.
OF_PODS = {
    "OMP_NUM_THREADS": "1",
    **constants(MAX_EPOCHS=10**6, SITE_WAIT_S=20, SYNC_TIMEOUT_S=100),
}
RECIPE = TINY | {
    "BATCH_TOKENS": "384",
    "SAVE_EVERY": "20",
    "WANDB_MODE": "disabled",
}


class Lab:
    """A cluster with a volume that holds data, and somebody at a shell."""

    def __init__(self, folder: Path, data: Path):
        self.cluster, self.folder = Cluster(folder), folder
        self.kubelet = self.cluster.start_kubelet(images=[IMAGE], extra=OF_PODS)
        shutil.copytree(data, self.kubelet.claim(VOLUME) / "data")
        (folder / "empty.env").touch()
        base = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        self.env = (
            base
            | self.cluster.env
            | RECIPE
            | {
                "VENV": sys.prefix,
                "ENV_FILE": str(folder / "empty.env"),
                "RUNS_DIR": str(folder / "runs"),
                "IMAGE": IMAGE,
                "PRESET": "tiny",
                "DEVICE": "cpu",
                "NODES": str(PODS),
                "GPUS_PER_NODE": "1",
                "VOLUME": VOLUME,
                "VOLUME_GB": "10",
                "TOKENIZER": "/volume/data/tokenizer.json",
                "START_TIMEOUT_S": "400",
            }
        )

    def make(self, target: str, run: str, code: int = 0, **settings: str) -> str:
        """What make says about a run whose Job has its name."""
        done = subprocess.run(
            ["make", "-o", "setup", target],
            cwd=ROOT,
            text=True,
            check=False,
            timeout=270,
            env=self.env | {"RUN_NAME": run, "JOB_NAME": f"job-{run}"} | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert (done.returncode == 0) == (code == 0), (
            f"make {target}: {done.returncode}\n{done.stdout}"
        )
        return done.stdout

    def pods(self, run: str) -> dict[int, dict[str, Any]]:
        """The pods of a Job that have not failed, by index."""
        return {
            int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]): pod
            for pod in self.cluster.objects("Pod")
            if pod["metadata"]["labels"]["job-name"] == f"job-{run}"
            and pod["status"]["phase"] != "Failed"
            and "deletionTimestamp" not in pod["metadata"]
        }

    def uids(self, run: str) -> dict[int, str]:
        return {index: pod["metadata"]["uid"] for index, pod in self.pods(run).items()}

    def made(self, run: str) -> int:
        """How many pods a Job has ever had."""
        return sum(
            change.type == "ADDED"
            and change.key[0].kind == "Pod"
            and change.key[2].startswith(f"job-{run}-")
            for change in self.cluster.store.history
        )

    def job(self, run: str) -> dict[str, Any]:
        status: dict[str, Any] = self.cluster.get("Job", f"job-{run}")["status"]
        return status

    def conditions(self, run: str) -> dict[str, dict[str, Any]]:
        return {condition["type"]: condition for condition in self.job(run).get("conditions", [])}

    def paths(self, run: str) -> RunPaths:
        """A run's folder on the volume."""
        return RunPaths(self.kubelet.claim(VOLUME) / "runs" / run)

    def events(self, run: str, event: str) -> list[dict[str, Any]]:
        """The records of a kind that a run has written so far."""
        return [r for r in self.happened(run) if r["event"] == event]

    def happened(self, run: str) -> list[dict[str, Any]]:
        """All records of a run so far, in the order in which they were written."""
        path = self.paths(run).metrics
        return list(record_reader.read_records(path)) if path.exists() else []

    def goes_on(self, run: str, resumes: int, blow: str) -> None:
        """Wait until a run that had been resumed so often is resumed again and trains: before its first step a process
        that is told to stop has nothing to save."""

        def trains() -> bool:
            events = [r["event"] for r in self.happened(run)]
            last = len(events) - events[::-1].index("resume") if "resume" in events else 0
            return events.count("resume") > resumes and "step" in events[last:]

        self.until(trains, f"the run goes on after {blow}")

    def until(self, condition: Callable[[], object], what: str, seconds: float = 270) -> None:
        """Wait; what pods said is shown where it takes too long."""
        deadline = time.monotonic() + seconds
        while not condition():
            said = "\n".join(
                f"== {name}\n{path.read_text()[-2000:]}"
                for name, path in self.cluster.log_files.items()
                if time.monotonic() > deadline
            )
            assert not said, f"not in {seconds:.0f} s: {what}\n{said}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("lab"), Path(data["DATA_DIR"]))
    yield made
    made.cluster.close()


@dataclasses.dataclass
class Seen:
    """What there was at one moment of a run's life."""

    pods: dict[int, str]  # uid, by index
    status: dict[str, Any]  # of the Job
    made: int  # pods that it ever had
    resumes: list[dict[str, Any]]

    @classmethod
    def of(cls, lab: Lab, run: str) -> "Seen":
        return cls(lab.uids(run), lab.job(run), lab.made(run), lab.events(run, "resume"))

    def replaced(self, before: "Seen") -> set[int]:
        """The indexes whose pods are others than before."""
        return {index for index in before.pods if self.pods.get(index) != before.pods[index]}


@dataclasses.dataclass
class Story:
    """A run to which much happens: it loses a pod, has one preempted, is stopped, and sent again."""

    begun: Seen
    killed: Seen  # when it trains again
    preempted: Seen  # likewise
    evicted: list[dict[str, Any]]  # what the run recorded between these two
    stopped: str  # what make stop said
    left: list[str]  # kinds of what there was after that
    ended: list[dict[str, Any]]  # what it had recorded by then, since it was seen last
    resumes: int  # how often it had been resumed
    saved: int  # the step of its last checkpoint then
    last: int  # its last step


@pytest.fixture(scope="module")
def story(lab: Lab) -> Story:
    run = "shaken"
    lab.make("train-8xa100", run, MAX_STEPS="100000")
    lab.until(lambda: lab.events(run, "checkpoint"), "a first checkpoint")
    begun = Seen.of(lab, run)
    lab.kubelet.kill(lab.pods(run)[2]["metadata"]["name"])
    lab.goes_on(run, len(begun.resumes), "the kill")
    killed, recorded = Seen.of(lab, run), len(lab.happened(run))
    lab.kubelet.evict(lab.pods(run)[1]["metadata"]["name"])
    lab.goes_on(run, len(killed.resumes), "the preemption")
    preempted, evicted = Seen.of(lab, run), lab.happened(run)[recorded:]
    stopped = lab.make("stop", run, MAX_STEPS="100000")
    left = [
        thing["kind"]
        for kind in ("Job", "Pod", "PersistentVolumeClaim")
        for thing in lab.cluster.objects(kind)
    ]
    ended = lab.happened(run)[recorded + len(evicted) :]
    resumes, saved = len(lab.events(run, "resume")), lab.events(run, "checkpoint")[-1]["step"]
    lab.make("train-8xa100", run, MAX_STEPS=str(saved + 5))
    lab.until(lambda: "Complete" in lab.conditions(run), "the run is done")
    return Story(begun, killed, preempted, evicted, stopped, left, ended, resumes, saved, saved + 5)


@pytest.fixture(scope="module")
def plain(lab: Lab, story: Story) -> str:
    """A run as long as that, to which nothing happens, and what make said when it was sent."""
    said = lab.make("train-8xa100", "plain", MAX_STEPS=str(story.last))
    lab.until(lambda: "Complete" in lab.conditions("plain"), "Job plain is Complete")
    return said


def test_from_render_to_done(lab: Lab, story: Story, plain: str, data: dict[str, str]) -> None:
    assert "Running" in plain and "make logs" in plain
    assert lab.job("plain")["completedIndexes"] == "0-2" and lab.made("plain") == PODS
    assert "done" in lab.make("status", "plain")
    claim = lab.cluster.get("PersistentVolumeClaim", VOLUME)
    assert claim["status"]["phase"] == "Bound" and "deletionTimestamp" not in claim["metadata"]
    # As one process on this machine trains, with the same batches.
    (lab.folder / "alone").mkdir()
    train(environment(lab.folder / "alone", data) | RECIPE | {"MAX_STEPS": str(story.last)})
    plainly, alone = losses(lab.paths("plain").folder), losses(lab.folder / "alone" / "run")
    assert plainly.keys() == alone.keys() and max(alone) == story.last
    begun = range(
        1, min(60, story.last) + 1
    )  # rounding adds up, and the stop came whenever it came
    assert relative(*({step: found[step] for step in begun} for found in (plainly, alone))) < 1e-5


def test_a_pod_that_was_killed_comes_back_to_the_others(story: Story) -> None:
    assert story.killed.replaced(story.begun) == {2}
    assert story.killed.status["failed"] == 1 and story.killed.made == PODS + 1
    assert not story.begun.resumes and story.killed.resumes[0]["step"] >= 20, (
        "a checkpoint was there"
    )


def test_a_preemption_is_not_counted(story: Story) -> None:
    assert story.preempted.replaced(story.killed) == {1}
    assert story.preempted.status["failed"] == 1 and story.preempted.made == PODS + 2
    assert "conditions" not in story.preempted.status


def test_pods_that_are_told_to_stop_save_the_last_step_that_they_made(story: Story) -> None:
    """One that is preempted, with which the others stop, and all of them. What is saved now and then is older."""
    at = [r["event"] for r in story.evicted].index("resume")
    before, resume = story.evicted[:at], story.evicted[at]
    for records in (before, story.ended):
        assert [r["reason"] for r in records if r["event"] == "end"] == ["stopped"]
        made = [r["step"] for r in records if r["event"] == "step"]
        assert [r["step"] for r in records if r["event"] == "checkpoint"][-1:] == made[-1:] != []
    assert resume["step"] == before[-1]["step"] and story.saved == story.ended[-1]["step"]


def test_a_stopped_run_goes_on_where_it_was_saved(lab: Lab, story: Story) -> None:
    assert story.left == ["PersistentVolumeClaim"]
    assert f"last checkpoint: step {story.saved}" in story.stopped
    assert lab.events("shaken", "resume")[story.resumes]["step"] == story.saved


def test_nothing_of_that_is_seen_in_the_losses(lab: Lab, story: Story, plain: str) -> None:
    shaken = losses(lab.paths("shaken").folder)
    assert sorted(shaken) == list(range(1, story.last + 1))
    assert shaken == losses(lab.paths("plain").folder)


def test_each_pod_tells_of_its_node_and_nobody_is_shown_that(lab: Lab, plain: str) -> None:
    for index in range(PODS):
        said = lab.cluster.log_files[lab.pods("plain")[index]["metadata"]["name"]].read_text()
        told = told_by(lab, "plain", index)
        assert (
            told and len(told) == said.count(POD_LINE) and {node.node for node in told} == {index}
        )
        assert all(
            node.memory_limit_bytes and node.disk_free_bytes and node.gpus_why for node in told
        )
        assert (told[-1].status.get("phase"), told[-1].progress is not None) == (
            ("done", True) if index == 0 else (None, False)
        )
        assert POD_LINE not in lab.make("logs", "plain", NODE_RANK=str(index))
        log = "gpu_sampler.log" if index == 0 else f"gpu_sampler_node_{index}.log"
        assert "no NVIDIA driver here" in (lab.paths("plain").folder / "logs" / log).read_text()
    last = told_by(lab, "plain", 0)[-1].progress
    assert last and (last.step, last.end_reason) == (len(lab.events("plain", "step")), "done")


def told_by(lab: Lab, run: str, index: int) -> list[Node]:
    """What a pod told of its node."""
    said = lab.cluster.log_files[lab.pods(run)[index]["metadata"]["name"]].read_text()
    return [node for line in said.splitlines() if (node := of_line(line))]


def test_results_come_home_when_the_pods_are_gone(lab: Lab, plain: str) -> None:
    lab.make("fetch-run", "plain")
    there, here = lab.paths("plain").folder, lab.folder / "runs" / "plain"
    newest = max((there / "checkpoints").iterdir())
    for path in [there / "metrics.jsonl", there / "plots" / "loss_curves.png", *newest.iterdir()]:
        assert (here / path.relative_to(there)).read_bytes() == path.read_bytes()
    assert newest.name.removeprefix("step_").lstrip("0") in lab.make("checkpoints", "plain")
    said = lab.make("logs", "plain", ONLY="metrics").splitlines()
    assert any(line.startswith("step=") or " step=" in line for line in said)
    assert not [
        pod for pod in lab.cluster.objects("Pod") if pod["metadata"]["name"].endswith("-reader")
    ]


@pytest.mark.parametrize(
    ("run", "settings", "code", "words"),
    [
        ("plain", {"JOB_NAME": "job-wider", "N_EMBD": "64"}, 64, "N_EMBD"),
        (
            "unread",
            {"JOB_NAME": "job-unread", "TOKENIZER": "/volume/data/damaged.json"},
            78,
            "damaged.json",
        ),
    ],
)
def test_what_another_try_cannot_mend_fails_the_job_at_once(
    lab: Lab, story: Story, plain: str, run: str, settings: dict[str, str], code: int, words: str
) -> None:
    """Only a pod can find these: the volume holds the run's earlier settings, and the tokenizer."""
    (lab.kubelet.claim(VOLUME) / "data" / "damaged.json").write_text('{"version": "1.0", "model"')
    job = settings["JOB_NAME"].removeprefix("job-")
    lab.make("train-8xa100", run, MAX_STEPS=str(story.last + 20), **settings)
    lab.until(lambda: "Failed" in lab.conditions(job), f"Job {job} has failed")
    failed = lab.conditions(job)["Failed"]
    assert failed["reason"] == "PodFailurePolicy"
    assert f"failed with exit code {code} matching FailJob rule at index 1" in failed["message"]
    assert lab.made(job) == PODS, "no pod was tried again"
    assert not lab.job(job)["active"] and not lab.job(job)["succeeded"]
    first = next(
        pod
        for pod in lab.cluster.objects("Pod")
        if f"/{pod['metadata']['name']} failed" in failed["message"]
    )
    ended = first["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == code and words in ended["message"], (
        "the sentence is the pod's last word"
    )
    said = lab.make("status", run, code=code, JOB_NAME=settings["JOB_NAME"])
    assert f"Error {code}" in said, "as make passes on exit codes"
