"""train/diloco/lighthouse_pod.py, which ends the lighthouse when its run has, and what the tests' cluster does for it: a
container that is started again, owners that are not waited for, Jobs whose time is up."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from settings import ROOT
from tests.cluster_sim.cluster import Cluster
from tests.cluster_sim.kubelet import Ports
from tests.constants import constants
from tests.k8s.test_cluster import JOB, POD, changed
from tests.k8s.test_controller import until
from tests.k8s.test_kubelet import ended, pod_of

Start = Callable[[], subprocess.Popen[str]]

# What stands for the lighthouse, that ends as told, or by itself.
STUB = """
trap 'echo told; exit 0' TERM; echo up; [[ -z ${ENDS-} ]] || exit "$ENDS"; while :; do sleep 0.05; done
"""

# Constants cannot be replaced in a module that runs by -m.
MAIN = "import sys; from train.diloco import lighthouse_pod; sys.exit(lighthouse_pod.main())"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder of two sites; each has ended well before the lighthouse is there."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "runs" / "run" / "site_1").mkdir(parents=True)
    for folder in ("", "site_1"):
        over(tmp_path / "runs" / "run" / folder, 0, ago_s=60)
    return tmp_path / "runs" / "run"


def over(folder: Path, code: int, ago_s: float = 0) -> None:
    """What a site's pod leaves behind."""
    (folder / ".over").write_text(f"{code}\n")
    os.utime(folder / ".over", (time.time() - ago_s + 1, time.time() - ago_s + 1))


@pytest.fixture
def start(run: Path) -> Start:
    def started(**more: str) -> subprocess.Popen[str]:
        folder = run.parent.parent
        return subprocess.Popen(
            [sys.executable, "-c", MAIN],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {
                "TMPDIR": str(folder / "tmp"),
                "RUNS_DIR": str(run.parent),
                "RUN_NAME": "run",
                "SYNC": "diloco",
                "SITES": "2",
                "NODES": "2",
                **constants(LOOK_S=0.1, LIGHTHOUSE=["bash", "-c", STUB]),
                **more,
            },
        )

    return started


def is_up(process: subprocess.Popen[str]) -> None:
    assert process.stdout and process.stdout.readline() == "up\n"


def test_it_ends_when_all_sites_are_done_and_not_by_what_an_earlier_job_left(
    start: Start, run: Path
) -> None:
    process = start()
    is_up(process)
    over(run, 0)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    over(run / "site_1", 0)
    assert process.wait(120) == 0 and "the run is over" in process.communicate()[0]


@pytest.mark.parametrize(("code", "ends"), [(64, True), (78, True), (70, False), (143, False)])
def test_one_site_is_enough_where_its_code_ends_the_job(
    start: Start, run: Path, code: int, ends: bool
) -> None:
    process = start()
    is_up(process)
    over(run / "site_1", code)
    if ends:
        assert process.wait(120) == 0
        return
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143


def test_one_that_dies_is_not_taken_for_the_end_and_hears_of_it_once_it_is_back(
    start: Start, run: Path
) -> None:
    assert start(ENDS="137").wait(120) == 137
    over(run, 0)
    over(run / "site_1", 0)  # while it was away
    assert start().wait(120) == 0


# ---- The tests' cluster


def test_a_container_that_failed_is_started_again_in_its_pod(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start_kubelet(images=["example.org/image:1"])
    script = f"echo once more; test -e {tmp_path}/began || {{ touch {tmp_path}/began; exit 3; }}"
    uid = cluster.put(changed(pod_of(script), "spec.restartPolicy", "OnFailure"))["metadata"]["uid"]
    assert ended(cluster)["exitCode"] == 0
    assert cluster.get("Pod", "pod")["metadata"]["uid"] == uid
    assert (cluster.log_of("pod") or b"").count(b"once more") == 2


def test_a_job_goes_before_what_does_not_block_it(cluster: Cluster) -> None:
    owner = cluster.put(JOB)["metadata"]["uid"]
    for name, blocks in (("inside", True), ("beside", False)):
        pod = changed(POD, "metadata.name", name)
        pod["metadata"]["ownerReferences"] = [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "name": "job",
                "uid": owner,
                "blockOwnerDeletion": blocks,
            }
        ]
        cluster.put(pod)
    cluster.store.holds = lambda pod: pod["metadata"]["name"] == "inside"
    cluster.store.delete(cluster.key("Job", "job"), propagation="Foreground")
    assert "deletionTimestamp" in cluster.get("Pod", "inside")["metadata"]
    assert "deletionTimestamp" not in cluster.get("Pod", "beside")["metadata"]
    cluster.store.delete(cluster.key("Pod", "inside"), grace=0)
    assert cluster.objects("Job") == [] and cluster.objects("Pod") == []


def test_a_job_that_is_over_goes_when_its_time_is_up(cluster: Cluster) -> None:
    cluster.start_kubelet(processes=False)
    cluster.put(
        changed(changed(JOB, "spec.ttlSecondsAfterFinished", 100), "spec.completions", 1)
        | {"metadata": {"name": "job"}}
    )
    until(lambda: cluster.objects("Pod"))
    for pod in cluster.objects("Pod"):
        cluster.set_pod(pod["metadata"]["name"], phase="Succeeded")
    until(lambda: cluster.objects("Job") == [] and cluster.objects("Pod") == [])


def test_a_pair_of_ports_is_two_that_nobody_else_is_given() -> None:
    ports = Ports()
    first, pair = ports["a"], ports.pair("b")
    assert pair == ports.pair("b") and {pair, pair + 1}.isdisjoint(
        {first, ports["c"], ports.pair("d")}
    )
