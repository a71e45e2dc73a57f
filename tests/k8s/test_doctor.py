"""make doctor's look at a cluster, by the real kubectl: each finding once, for users of different rights."""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from doctor import cluster_checks as doctor
from doctor.cluster_image import Answer
from k8s.cluster import kubectl as k
from k8s.cluster.job_spec import cluster_config
from settings.finding import Finding, format_findings
from tests.cluster_sim.cluster import Cluster
from tests.k8s.running_job import JOB, put_event, put_job, put_pod
from tests.k8s.user import A100, User, a_user

user = a_user  # two nodes of 8 A100 at ucsd; 4 pods of 2 are wished for
Look = Callable[..., list[Finding]]


def empty_registry(address: str, headers: Mapping[str, str]) -> Answer:
    return Answer(200, {})


@pytest.fixture
def look(user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Look:
    """The findings with these settings."""

    def findings(**settings: str) -> list[Finding]:
        with monkeypatch.context() as patch:
            for name, value in {**user.settings, **settings}.items():
                patch.setenv(name, value)
            return doctor.findings(cluster_config()[0], empty_registry)

    return findings


@pytest.fixture
def there(user: User) -> Callable[..., doctor.There]:
    """What single checks are given, with these settings."""
    return lambda **settings: doctor.look(
        cluster_config({**user.settings, **settings})[0], "lab", "test"
    )


There = Callable[..., doctor.There]


def written(found: list[Finding]) -> list[str]:
    """As make doctor prints them, with what is different each time left out."""
    return [
        re.sub(
            r"127\.0\.0\.1:\d+", "SERVER", re.sub(r"in \d+ ms", "in N ms", " ".join(line.split()))
        )
        for line in format_findings(found)
    ]


def of(found: list[Finding], name: str) -> list[str]:
    return [line for line in written(found) if line.split()[1] == name]


def put(cluster: Cluster, thing: dict[str, Any]) -> None:
    """There with its status, which what makes a thing may not say yet."""
    cluster.put(thing)
    cluster.put(thing)


def quota(hard: dict[str, str], used: dict[str, str]) -> dict[str, Any]:
    return {
        "kind": "ResourceQuota",
        "apiVersion": "v1",
        "metadata": {"name": "lab"},
        "spec": {"hard": hard},
        "status": {"hard": hard, "used": used},
    }


def claim(**status: Any) -> dict[str, Any]:
    return {
        "kind": "PersistentVolumeClaim",
        "apiVersion": "v1",
        "metadata": {"name": "pure-transformer"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "standard",
            "resources": {"requests": {"storage": "500Gi"}},
        },
        "status": {"phase": "Bound", **status},
    }


def pod_of_somebody(
    node: str, gpus: int, cpu: str = "4", namespace: str = "theirs"
) -> dict[str, Any]:
    amounts = {"nvidia.com/gpu": str(gpus), "cpu": cpu, "memory": "8Gi"}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": f"{node}-{gpus}", "namespace": namespace},
        "spec": {
            "nodeName": node,
            "containers": [
                {
                    "name": "main",
                    "image": "x:1",
                    "resources": {"limits": amounts, "requests": amounts},
                }
            ],
        },
    }


def namespace(name: str) -> dict[str, Any]:
    return {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": name}}


def test_with_all_rights_and_nothing_wrong(
    look: Look, user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.nodes_list_only = False
    cluster.put(
        {
            "kind": "StorageClass",
            "apiVersion": "storage.k8s.io/v1",
            "metadata": {"name": "rook-cephfs"},
            "provisioner": "rook.cephfs.csi.ceph.com",
        }
    )
    cluster.put(
        {
            "kind": "PriorityClass",
            "apiVersion": "scheduling.k8s.io/v1",
            "metadata": {"name": "high"},
            "value": 1,
        }
    )
    cluster.put({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "login"}})
    cluster.put(
        {
            "kind": "Secret",
            "apiVersion": "v1",
            "metadata": {"name": "pure-transformer-secrets"},
            "data": {"WANDB_API_KEY": "bm90LXRvLWJlLXNlZW4="},
        }
    )
    cluster.put(namespace("theirs"))
    put(cluster, pod_of_somebody("gpu-0", 3))
    put(
        cluster,
        quota(
            {"requests.nvidia.com/gpu": "16", "count/pods": "20"},
            {"requests.nvidia.com/gpu": "6", "count/pods": "1"},
        ),
    )
    put(
        cluster,
        {
            "kind": "LimitRange",
            "apiVersion": "v1",
            "metadata": {"name": "sizes"},
            "spec": {
                "limits": [{"type": "Container", "max": {"cpu": "32"}, "default": {"cpu": "1"}}]
            },
        },
    )
    calls, run = [], k.subprocess.run
    monkeypatch.setattr(
        k.subprocess, "run", lambda argv, **how: (calls.append(argv), run(argv, **how))[1]
    )
    found = look(
        STORAGE_CLASS="rook-cephfs",
        PRIORITY_CLASS="high",
        IMAGE_PULL_SECRET="login",
        HF_TOKEN="hf-secret",
    )
    version = found[0].text.split()[1].rstrip(",")
    assert written(found) == [
        f"PASS kubectl kubectl {version}, server v1.32.4",
        "PASS context test at http://SERVER answers, in N ms with kubectl's own start",
        "PASS namespace lab",
        "PASS rights you may do all that a launch and the commands after it do",
        "PASS quota requests.nvidia.com/gpu 8 asked for, 6 used, of 16; count/pods 4 asked for, 1 used, of 20",
        "PASS limits a pod and its volume keep to LimitRange sizes",
        "PASS secret HF_TOKEN from here, WANDB_API_KEY in Secret pure-transformer-secrets",
        "PASS pull-secret IMAGE_PULL_SECRET=login is there",
        "PASS gpu-products 16 GPUs of GPU_PRODUCTS on nodes that take pods: 16 at ucsd",
        "PASS free-gpus 13 of 16 GPUs of GPU_PRODUCTS are free: 13 at ucsd; all 4 pods would find room at ucsd",
        "PASS storage VOLUME=pure-transformer will be made: 500 GiB of class rook-cephfs, by rook.cephfs.csi.ceph.com",
        "PASS priority PRIORITY_CLASS=high is there",
        f"PASS image {user.settings['IMAGE']} is there, for everybody",
    ]
    assert len([argv for argv in calls if argv[0].endswith("kubectl")]) == 14
    assert {
        request.method for request in cluster.requests if "selfsubject" not in request.path
    } == {"GET"}
    asked_for = [request.path for request in cluster.requests if request.path == "/api/v1/pods"]
    assert len(asked_for) == 1


def test_with_the_rights_of_a_shared_cluster(look: Look, cluster: Cluster) -> None:
    cluster.own_namespace_only = True
    for verb, resource in (
        ("list", "resourcequotas"),
        ("list", "limitranges"),
        ("*", "secrets"),
        ("*", "storageclasses"),
        ("*", "priorityclasses"),
        ("create", "pods/exec"),
    ):
        cluster.forbid(verb, resource)
    found = look(PRIORITY_CLASS="high", IMAGE_PULL_SECRET="login")
    assert written(found)[2:-1] == [
        "PASS namespace lab",
        "WARN rights you may not create pods/exec in namespace lab: make fetch-run cannot work",
        "WARN quota unchecked: you may not list resourcequotas in namespace lab; ask its administrator what the "
        "namespace may hold",
        "WARN limits unchecked: you may not list limitranges in namespace lab; ask its administrator what the "
        "namespace may hold",
        "WARN secret Secret pure-transformer-secrets: you may not see Secrets, so whether it has what is not set "
        "here is unchecked",
        "WARN pull-secret IMAGE_PULL_SECRET=login is unchecked: you may not see Secrets",
        "PASS gpu-products 16 GPUs of GPU_PRODUCTS on nodes that take pods: 16 at ucsd (taints, cores and memory of "
        "nodes may not be seen)",
        "WARN free-gpus which GPUs are free cannot be seen: you may not list everybody's pods; make train-8xa100 "
        "WAIT=1 sends the Job, takes it back where not all pods soon have a node, and tries again every "
        "3 minutes",
        "WARN storage storage classes may not be listed, so whether there is a default one is unchecked; set "
        "STORAGE_CLASS to one that the cluster's documentation names",
        "WARN priority PRIORITY_CLASS=high is unchecked: you may not list priority classes",
    ]


def test_who_may_not_list_nodes_is_told(there: There, cluster: Cluster) -> None:
    cluster.forbid("list", "nodes")
    assert written(doctor.room(there())) == [
        "WARN gpu-products GPU_PRODUCTS and SITE are unchecked: you may not list nodes"
    ]
    for node in cluster.objects("Node"):
        cluster.store.delete(cluster.key("Node", node["metadata"]["name"]))
    cluster.forbidden.clear()
    assert written(doctor.room(there())) == [
        "WARN gpu-products the cluster has no nodes now; one that makes them when "
        "pods ask needs no more; of any other ask its administrators"
    ]


def test_everything_that_is_wrong_is_told_at_once(look: Look, cluster: Cluster) -> None:
    cluster.forbid("create", "jobs")
    put(cluster, quota({"requests.nvidia.com/gpu": "6"}, {"requests.nvidia.com/gpu": "1"}))
    put(
        cluster,
        {
            "kind": "LimitRange",
            "apiVersion": "v1",
            "metadata": {"name": "sizes"},
            "spec": {"limits": [{"type": "Container", "max": {"cpu": "4", "memory": "128Gi"}}]},
        },
    )
    found = look(
        WANDB_MODE="online",
        IMAGE_PULL_SECRET="login",
        GPU_PRODUCTS="NVIDIA-H200",
        STORAGE_CLASS="none-such",
        PRIORITY_CLASS="urgent",
        IMAGE="registry.example.org/lab/never-pushed",
    )
    assert written(found[3:]) == [
        "FAIL rights you may not create jobs in namespace lab; ask its administrator for these rights, or choose "
        "another NAMESPACE or context (kubectl config get-contexts)",
        "FAIL quota quota lab: requests.nvidia.com/gpu=6, and the run asks for 8; ask for less (NODES=3 of these pods "
        "would fit) or for more quota",
        "FAIL limits LimitRange sizes: a container may have at most cpu=4, and POD_CPUS makes it 8; set "
        "POD_CPUS=4",
        "FAIL secret WANDB_MODE=online: pods would have no key, as there is none in Secret pure-transformer-secrets of "
        "namespace lab, and what wandb login left here stays here; set WANDB_API_KEY in the environment or ENV_FILE, "
        "or choose WANDB_MODE=offline",
        "FAIL pull-secret IMAGE_PULL_SECRET=login: there is no such Secret in namespace lab; make it of a login to "
        "that registry alone: docker --config FOLDER login HOST, then kubectl create secret generic login -n lab "
        "--type=kubernetes.io/dockerconfigjson --from-file=.dockerconfigjson=FOLDER/config.json",
        f"FAIL gpu-products GPU_PRODUCTS=NVIDIA-H200: no node has any of these; there are {A100} (make sites)",
        "FAIL storage STORAGE_CLASS=none-such: there is no such class in this cluster; there are standard",
        "FAIL priority PRIORITY_CLASS=urgent: there is no such class; there are none",
        "FAIL image IMAGE=registry.example.org/lab/never-pushed has no tag, and nothing was pushed to it from here "
        "(.image knows no digest of it); type `make push`, or write the tag or digest behind IMAGE",
    ]
    assert [finding.code for finding in found[3:]] == [78, 64, 64, 78, 78, 64, 64, 64, 64]


def test_a_namespace_that_is_missing_leaves_the_cluster_to_be_looked_at(
    look: Look, cluster: Cluster
) -> None:
    found = look(NAMESPACE="gone")
    assert [finding.name for finding in found] == [
        "kubectl",
        "context",
        "namespace",
        "gpu-products",
        "free-gpus",
        "storage",
        "image",
    ]
    assert of(found, "namespace")[0].startswith(
        "FAIL namespace NAMESPACE=gone: there is no such namespace in this "
        "cluster; choose one of yours with NAMESPACE"
    )


@pytest.mark.parametrize(
    ("where", "level", "aside"),
    [("cluster", "FAIL", ""), ("auto", "WARN", "; WHERE=local leaves the cluster out")],
)
def test_a_cluster_that_is_out_of_reach_is_one_line(
    look: Look, cluster: Cluster, where: str, level: str, aside: str, tmp_path: Path
) -> None:
    cluster.login_expired = True
    assert doctor.has_context()
    [said] = written(look(WHERE=where))
    assert said.startswith(
        f"{level} context the cluster does not know you (You must be logged in to the server ("
    )
    assert said.endswith(
        "fetch a new kubeconfig from it, or choose another context: kubectl config use-context NAME"
        + aside
    )
    config = tmp_path / "kubeconfig"
    config.write_text(config.read_text().replace("current-context: test", "current-context: gone"))
    [said] = written(look(WHERE=where))
    assert said.startswith(
        f"{level} context kubectl knows no cluster to talk to ("
    ) and said.endswith(f"choose a context: kubectl config use-context NAME{aside}")
    config.write_text(
        config.read_text()
        .replace("current-context: gone", "current-context: test")
        .replace(f":{cluster.server.server_port}", ":1")
    )
    [said] = written(look(WHERE=where))
    assert said.startswith(
        f"{level} context the cluster of context test does not answer at http://SERVER ("
    )
    assert said.endswith(f"(kubectl config get-contexts lists them){aside}")


def test_whether_kubectl_knows_a_context(
    user: User, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert doctor.has_context()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert not doctor.has_context()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert not doctor.has_context()
    assert user.capsys.readouterr() == ("", "")


def test_without_kubectl_there_is_one_line(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(k.shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert written(look(WHERE="cluster")) == [
        "FAIL context there is no kubectl on PATH; `make setup-dev` puts one beside python"
    ]


@pytest.mark.parametrize(
    ("client", "server", "said"),
    [
        (
            {"major": "1", "minor": "31", "gitVersion": "v1.31.2"},
            {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
            "PASS kubectl kubectl v1.31.2, server v1.32.0",
        ),
        (
            {"major": "1", "minor": "29", "gitVersion": "v1.29.1"},
            {"major": "1", "minor": "32+", "gitVersion": "v1.32-eks"},
            "WARN kubectl kubectl v1.29.1 is 3 minor versions older than the server (v1.32-eks), and 1 is supported; make "
            "setup-dev puts a newer one beside python, and one on PATH goes before it",
        ),
        (
            {"major": "1", "minor": "37", "gitVersion": "v1.37.1"},
            {},
            "WARN kubectl kubectl v1.37.1, server of unknown version: whether they go together is not known; kubectl version "
            "says more",
        ),
    ],
)
def test_versions_that_go_together(
    client: dict[str, str], server: dict[str, str], said: str
) -> None:
    assert written([doctor.of_versions(client, server)]) == [said]


def test_a_job_that_is_there_counts_as_ours(look: Look, there: There, cluster: Cluster) -> None:
    cluster.nodes_list_only = False
    put_job(cluster)
    put(cluster, claim(capacity={"storage": "600Gi"}))
    for index in range(3):
        put_pod(cluster, index, node="gpu-0", phase="Running")
    put_pod(cluster, 3, message="0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    cluster.put(namespace("theirs"))
    put(cluster, pod_of_somebody("gpu-1", 7))
    put(
        cluster,
        quota(
            {"requests.nvidia.com/gpu": "8", "count/jobs.batch": "1"},
            {"requests.nvidia.com/gpu": "8", "count/jobs.batch": "1"},
        ),
    )
    found = look(RUN_NAME="a-run")
    assert of(found, "job") == [
        f"WARN job Job {JOB} is there and trains run a-run: 3 of 4 pods run (0/2 nodes are available: 2 Insufficient "
        "nvidia.com/gpu.); make status RUN_NAME=a-run WHERE=cluster says more"
    ]
    assert of(found, "quota") == [
        "PASS quota requests.nvidia.com/gpu 8 asked for, 0 used by others, of 8"
    ]
    assert of(found, "free-gpus") == [
        f"PASS free-gpus 9 of 16 GPUs of GPU_PRODUCTS are free: 9 at ucsd (with the 6 that Job {JOB} holds, which make "
        "restart gives back); all 4 pods would find room at ucsd"
    ]
    assert of(found, "storage") == [
        "PASS storage VOLUME=pure-transformer is there: 600 GiB, ReadWriteMany"
    ]
    cluster.set_pod(f"{JOB}-3-aaaaa", node="gpu-1", phase="Running")
    assert written(doctor.job(there(RUN_NAME="a-run"))) == [
        f"PASS job Job {JOB} is there and trains run a-run: 4 of 4 pods run"
    ]
    assert written(doctor.job(there(RUN_NAME="mine")))[0].startswith(
        f"FAIL job JOB_NAME={JOB}: the Job of that name in namespace lab trains run a-run, and this is run mine: "
        "choose another JOB_NAME, or stop it first"
    )


def test_a_job_whose_pods_cannot_be_made_or_that_has_ended(there: There, cluster: Cluster) -> None:
    put_job(cluster)
    put_event(
        cluster,
        JOB,
        "FailedCreate",
        "exceeded quota: lab, requested: requests.nvidia.com/gpu=2",
        kind="Job",
    )
    [said] = written(doctor.job(there(RUN_NAME="a-run")))
    assert "0 of 4 pods run (exceeded quota: lab, requested: requests.nvidia.com/gpu=2)" in said
    put_job(
        cluster, conditions=[{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}]
    )
    assert written(doctor.job(there(RUN_NAME="a-run"))) == [
        f"WARN job Job {JOB} has failed (PodFailurePolicy) and is still there: make logs ONLY=errors says more; once "
        "that is mended, make restart goes on from the last checkpoint"
    ]


def test_a_job_that_is_none_of_ours_and_a_volume_that_is_lost(
    there: There, cluster: Cluster
) -> None:
    cluster.put(
        {
            "kind": "Job",
            "apiVersion": "batch/v1",
            "metadata": {"name": "theirs"},
            "spec": {
                "template": {
                    "spec": {
                        "restartPolicy": "Never",
                        "containers": [{"name": "main", "image": "x"}],
                    }
                }
            },
        }
    )
    put(cluster, claim(phase="Lost"))
    seen = there(JOB_NAME="theirs")
    found = doctor.guarded("job", doctor.job, seen)
    assert written(found) == [
        "FAIL job JOB_NAME=theirs: namespace lab has a Job of that name that is none of ours; "
        "choose another JOB_NAME"
    ]
    assert found[0].code == 64
    assert written(doctor.storage(seen))[0].startswith(
        "FAIL storage VOLUME=pure-transformer: the disk behind this claim is gone"
    )


@pytest.mark.parametrize(
    ("provisioner", "nodes", "said"),
    [
        (
            "test.example.org",
            "4",
            "WARN storage STORAGE_CLASS=standard: whether 4 pods may write to what test.example.org "
            "makes is not known here. CephFS and NFS let them",
        ),
        (
            "test.example.org",
            "1",
            "PASS storage VOLUME=pure-transformer will be made: 500 GiB of class standard (the "
            "cluster's default), by test.example.org",
        ),
        (
            "ebs.csi.aws.com",
            "4",
            "FAIL storage STORAGE_CLASS=, and standard is this cluster's default: ebs.csi.aws.com "
            "makes disks that one node at a time can write to, and NODES=4 pods are to; of the others these may do: none "
            "(CephFS and NFS do)",
        ),
    ],
)
def test_whether_many_nodes_may_write_to_a_volume_that_is_to_be_made(
    user: User, monkeypatch: pytest.MonkeyPatch, provisioner: str, nodes: str, said: str
) -> None:
    c = cluster_config({**user.settings, "NODES": nodes})[0]
    monkeypatch.setattr(
        doctor.preflight,
        "storage_classes",
        lambda: [doctor.preflight.StorageClass("standard", True, "Immediate", provisioner)],
    )
    assert written(doctor.storage(doctor.There(c, "lab", "test", None, None, []))) == [said]


def test_pods_without_gpus_are_not_in_need_of_any(look: Look) -> None:
    found = look(DEVICE="cpu", PRESET="tiny", NODES="2")
    assert of(found, "gpu-products") == ["PASS gpu-products pods ask for no GPU"]
    assert of(found, "free-gpus") == []


def test_a_check_that_the_cluster_refuses_is_a_line_of_its_own(there: There) -> None:
    def late(_: doctor.There) -> list[Finding]:
        raise k.Refused(69, "the cluster has not answered `kubectl get nodes` in 60 s; try again")

    [finding] = doctor.guarded("gpu-products", late, there())
    assert finding == Finding(
        "gpu-products",
        "FAIL",
        "the cluster has not answered `kubectl get nodes` in 60 s",
        "try again",
        69,
    )
