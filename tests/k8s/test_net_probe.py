"""make net-probe WHERE=cluster: between pods that are processes of this machine, by the real kubectl and its exec."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doctor.net_probe import __main__ as command
from doctor.net_probe import pods as net_probe
from k8s.cluster.kubectl import Done
from k8s.cluster.target import Target
from tests.cluster_sim.cluster import Cluster
from tests.cluster_sim.kubelet import Kubelet
from tests.k8s.running_job import INDEX, JOB, LABELS, OF_JOB, RUN, RUN_OF, put_job, put_pod, sender
from tests.k8s.test_controller import until

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="pods need /proc")

IMAGE = "example.org/image:1"
Probe = Callable[..., tuple[int, str, str]]


@pytest.fixture
def probe(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    free_port: int,
) -> Probe:
    """Somebody at a terminal who sent the run to the cluster and types make net-probe: (code, output, errors)."""
    sender(cluster, tmp_path, monkeypatch, capsys)
    monkeypatch.setattr(net_probe, "PORT", free_port)
    monkeypatch.setattr(net_probe, "TOTAL_S", 4.0)

    def call() -> tuple[int, str, str]:
        code = command.main()
        return (code, *capsys.readouterr())

    return call


def run_pods(cluster: Cluster, *zones: str) -> Any:
    """A pod of the Job in each zone, its files those of the image, at work on something else."""
    cluster.nodes(*({"name": f"n{i}", "zone": zone, "gpus": 2} for i, zone in enumerate(zones)))
    put_job(cluster, pods=len(zones))
    kubelet = cluster.kubelet = Kubelet(
        cluster, images=[IMAGE]
    )  # without the controller: these pods are its pods
    for index in range(len(zones)):
        cluster.put(
            {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {
                    "name": f"{JOB}-{index}-aaaaa",
                    "labels": LABELS | {OF_JOB: JOB, INDEX: str(index)},
                    "annotations": {INDEX: str(index), RUN_OF: RUN},
                },
                "spec": {
                    "restartPolicy": "Never",
                    "nodeName": f"n{index}",
                    "terminationGracePeriodSeconds": 1,
                    "containers": [
                        {
                            "name": "trainer",
                            "image": IMAGE,
                            "command": ["sleep", "100"],
                            "workingDir": "/app",
                            "terminationMessagePolicy": "File",
                        }
                    ],
                },
            }
        )
    until(lambda: all(pod["status"].get("phase") == "Running" for pod in cluster.objects("Pod")))
    return kubelet


def test_between_the_pods_of_a_job(cluster: Cluster, probe: Probe, tmp_path: Path) -> None:
    run_pods(cluster, "ucsd", "unl")
    code, out, err = probe()
    assert code == 0, err
    lines = out.splitlines()
    assert (
        lines[1].startswith("node 0 (")
        and ") at ucsd  node 1 (" in lines[1]
        and ") at unl" in lines[1]
    )
    assert lines[-1].startswith("NODES=2 SITES=2 WAN_GBIT=") and " WAN_RTT_MS=" in lines[-1]
    assert "which goes on meanwhile" in err
    kept = json.loads((tmp_path / "runs-here" / "net_probe.json").read_text())
    assert kept["sites"] == ["ucsd", "unl"] and len(kept["pairs"]) == 2 and kept["streams"] == 16
    assert all(pair["rtt_ms"] and pair["many_gbit"] for pair in kept["pairs"])


def test_a_pod_that_dies_meanwhile(
    cluster: Cluster, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 does not come: its command is killed with its pod."""
    kubelet = run_pods(cluster, "ucsd", "unl")
    plain = cluster.exec

    def dying(name: str, container: str, argv: list[str], **more: bytes) -> tuple[Any, ...]:
        if name.startswith(f"{JOB}-1"):
            kubelet.kill(name)
            return 137, b"", b"command terminated with exit code 137\n"
        return plain(name, container, argv, **more)

    cluster.exec = dying
    monkeypatch.setattr(net_probe, "JOIN_S", 10)
    code, out, err = probe()
    assert code == 69 and out == ""
    assert "node 1 did not come in 10 s" in err


def test_what_keeps_it_from_measuring(cluster: Cluster, probe: Probe) -> None:
    code, _, err = probe()
    assert code == 78 and f"there is no Job {JOB}" in err
    put_job(cluster, pods=2)
    put_pod(cluster, 0, phase="Running", node="n0")
    put_pod(cluster, 1, waiting_reason="ImagePullBackOff")
    code, _, err = probe()
    assert code == 69 and f"of 2 pods of Job {JOB} 1 can be measured from" in err
    cluster.set_pod(f"{JOB}-1-aaaaa", phase="Running", node="n1")
    code, _, err = probe()
    assert code == 69 and "has no address yet" in err
    for index in (0, 1):
        pod = cluster.get("Pod", f"{JOB}-{index}-aaaaa")
        pod["status"]["podIP"] = "127.0.0.1"
        cluster.put(pod)
    cluster.forbid("create", "pods/exec")
    code, _, err = probe()
    assert code == 78 and "ask its administrator for the right to create pods/exec" in err


def test_an_image_of_an_earlier_version_is_named() -> None:
    pods = [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]
    target = Target("", "lab", JOB)
    said = net_probe.why(
        pods,
        [Done(0, "", ""), Done(1, "", "python: No module named doctor.net_probe.net\n")],
        target,
    )
    assert said.code == 78 and "the image of pod b has no net-probe" in said.sentence
    said = net_probe.why(
        pods, [Done(69, "", "x\nnet-probe: node 1 is gone\n"), Done(0, "", "")], target
    )
    assert (said.code, said.sentence) == (69, "node 1 is gone")
    said = net_probe.why(pods, [Done(1, "", "Traceback: boom\n"), Done(0, "", "")], target)
    assert said.code == 69 and "pod a: Traceback: boom" in said.sentence
