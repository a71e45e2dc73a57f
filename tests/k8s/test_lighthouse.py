"""train/diloco/lighthouse.py in a pod, where it ends when its run has, and what the tests' cluster does for it: a
container that is started again, owners that are not waited for, Jobs whose time is up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from record.run_paths import RunPaths
from settings import ROOT
from tests.cluster_sim.cluster import Cluster
from tests.cluster_sim.kubelet import Ports
from tests.constants import constants
from tests.k8s.test_cluster import JOB, POD, changed
from tests.k8s.test_controller import until
from tests.k8s.test_kubelet import ended, pod_of
from train.diloco.lighthouse import is_over

SINCE_NS = 10**18


def end_site(run: RunPaths, site: int, code: int, ns: int) -> None:
    """Leave behind what a site's pod does."""
    word = run.of_site(site).last_word
    word.parent.mkdir(parents=True, exist_ok=True)
    word.write_text(f"{code}\n")
    os.utime(word, ns=(ns, ns))


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0, 1), (0, 1)], True),
        ([(0, 1)], False),
        ([(0, 1), (0, -1)], False),  # that of an earlier job
        ([(0, 1), (64, 1)], True),  # these codes end the Job
        ([(78, 1)], True),
        ([(78, -1)], False),
        ([(70, 1), (143, 1)], False),
    ],
)
def test_the_run_is_over_when_all_sites_are_done_or_one_ends_the_job(
    tmp_path: Path, ends: list[tuple[int, int]], expected: bool
) -> None:
    run = RunPaths(tmp_path)
    for site, (code, later_ns) in enumerate(ends):
        end_site(run, site, code, SINCE_NS + later_ns)
    assert is_over(run, 2, SINCE_NS) is expected


def test_it_comes_back_after_a_stop_and_ends_with_the_run(
    tmp_path: Path, free_port: int, processes: list[subprocess.Popen]
) -> None:
    pytest.importorskip("torchft")
    (tmp_path / "tmp").mkdir()

    def start() -> subprocess.Popen[str]:
        settings = {"RUN_NAME": "run", "SYNC": "diloco", "SITES": "2", "NODES": "2"}
        where = {"LIGHTHOUSE": f"127.0.0.1:{free_port}", "K8S_NODE": "a"}
        folders = {"TMPDIR": str(tmp_path / "tmp"), "RUNS_DIR": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, "-m", "train.diloco.lighthouse"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings | where | folders | constants(LOOK_S=0.1),
        )
        processes.append(process)
        return process

    process = start()
    assert process.stdout and f"lighthouse on 127.0.0.1:{free_port}" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143
    for site in (0, 1):
        end_site(RunPaths(tmp_path / "run"), site, 0, time.time_ns())  # while it was away
    process = start()
    assert process.wait(120) == 0
    assert "the run is over" in process.communicate()[0]


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
