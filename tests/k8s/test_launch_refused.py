"""What stands in the way of a launch: each is one sentence with the next command to type, and nothing was changed."""

from pathlib import Path
from typing import Any

import pytest

from k8s import launch
from k8s.cluster import nodes, preflight
from k8s.cluster.kubectl import Done, kubectl
from tests.cluster_sim.cluster import Cluster
from tests.k8s.user import A100, User, a_user

user = a_user
CHANGES = ("POST", "PUT", "PATCH", "DELETE")


def changed(cluster: Cluster) -> list[str]:
    """What was asked for that changes something; reviews of rights do not."""
    return [
        f"{r.method} {r.path}"
        for r in cluster.requests
        if r.method in CHANGES and "selfsubject" not in r.path and "dryRun" not in r.query
    ]


def refused(
    user: User, cluster: Cluster, code: int, *parts: str, command: str = "train", **settings: str
) -> str:
    """The complaint, one line for each thing that is wrong; the warnings in front of it are left out."""
    done = user.launch(command, **settings)
    assert done.code == code, done.out + done.err
    for part in parts:
        assert part in done.err, done.err
    assert changed(cluster) == []
    assert "Traceback" not in done.err
    lines = [line for line in done.err.splitlines() if not line.startswith("From the environment")]
    assert all(sum(part in line for line in lines) == 1 for part in parts)  # each in one line
    return "\n".join(lines)


def test_a_namespace_that_is_missing(user: User, cluster: Cluster) -> None:
    said = refused(
        user,
        cluster,
        78,
        "NAMESPACE=gone: there is no such namespace in this cluster",
        "kubectl create namespace gone",
        NAMESPACE="gone",
    )
    assert len(said.splitlines()) == 1


def test_rights_that_are_missing_are_named_together(user: User, cluster: Cluster) -> None:
    cluster.forbid("create", "jobs")
    cluster.forbid("patch", "jobs")
    cluster.forbid("create", "networkpolicies")
    said = refused(
        user,
        cluster,
        78,
        "you may not create or patch jobs, or create networkpolicies in namespace lab; "
        "ask its administrator",
    )
    assert len(said.splitlines()) == 1


def test_a_right_that_is_only_handy_is_remarked_on(user: User, cluster: Cluster) -> None:
    cluster.forbid("create", "pods/exec")
    for verb, resource in (("create", "pods"), ("delete", "pods"), ("get", "configmaps")):
        cluster.forbid(verb, resource)
    done = user.launch()
    assert done.code == 0
    for right in ("create pods", "delete pods", "get configmaps"):
        assert f"you may not {right} in namespace lab: " in done.err
    assert "you may not create pods/exec in namespace lab: make fetch-run cannot work" in done.err


def test_secrets_that_cannot_be_made_matter_where_there_is_one_to_send(
    user: User, cluster: Cluster
) -> None:
    for verb in ("get", "create", "patch"):
        cluster.forbid(verb, "secrets")
    refused(
        user, cluster, 78, "you may not create or patch secrets in namespace lab", HF_TOKEN="hf-one"
    )
    assert user.launch().code == 0


def test_who_may_see_neither_namespaces_nor_classes_nor_nodes_may_launch(
    user: User, cluster: Cluster
) -> None:
    for resource in ("namespaces", "storageclasses", "nodes", "priorityclasses"):
        cluster.forbid("*", resource)
    done = user.launch(STORAGE_CLASS="standard", PRIORITY_CLASS="high")
    assert done.code == 0, done.err
    assert "STORAGE_CLASS=standard is unchecked" in done.err
    assert "GPU_PRODUCTS and SITE are unchecked: you may not list nodes" in done.err
    assert "PRIORITY_CLASS=high is unchecked" in done.err


def test_a_storage_class_that_is_unknown(user: User, cluster: Cluster) -> None:
    refused(
        user,
        cluster,
        64,
        "STORAGE_CLASS=rook-cefs: there is no such class in this cluster; there are standard",
        STORAGE_CLASS="rook-cefs",
    )


def test_no_storage_class_and_no_default(user: User, cluster: Cluster) -> None:
    cluster.put(
        {
            "kind": "StorageClass",
            "apiVersion": "storage.k8s.io/v1",
            "provisioner": "test.example.org",
            "metadata": {"name": "standard"},
        }
    )
    refused(
        user,
        cluster,
        64,
        "STORAGE_CLASS is not set, and this cluster has no default class; there are standard",
    )


def test_a_gpu_product_that_is_unknown(user: User, cluster: Cluster) -> None:
    refused(
        user,
        cluster,
        64,
        f"GPU_PRODUCTS=NVIDIA-H200: no node has any of these; there are {A100} (make sites)",
        GPU_PRODUCTS="NVIDIA-H200",
    )


def test_a_site_that_is_unknown_or_has_other_gpus(user: User, cluster: Cluster) -> None:
    cluster.nodes({"name": "other", "zone": "ksu", "product": "NVIDIA-L40", "gpus": 8})
    refused(
        user,
        cluster,
        64,
        "SITE=uscd: no node is in such a zone; there are ksu, ucsd (make sites)",
        SITE="uscd",
    )
    refused(
        user,
        cluster,
        64,
        "no node at SITE=ksu has any of these; they are at ucsd (make sites)",
        SITE="ksu",
    )


def test_a_shape_that_cannot_fit(user: User, cluster: Cluster) -> None:
    cluster.nodes({"name": "far", "zone": "ksu", "product": A100, "gpus": 16})
    said = refused(
        user,
        cluster,
        64,
        "NODES=3 GPUS_PER_NODE=8: the nodes at SITE=ucsd that have",
        NODES="3",
        GPUS_PER_NODE="8",
        SITE="ucsd",
        BATCH_TOKENS="393216",
    )
    assert "could hold 2 such pods at most, and none has more than 8 GPUs" in said
    assert user.launch(NODES="3", GPUS_PER_NODE="8", BATCH_TOKENS="393216").code == 0


@pytest.mark.parametrize(
    "state",
    [
        {"spec": {"unschedulable": True}},
        {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
    ],
)
def test_nodes_that_come_back_are_waited_for(
    user: User, cluster: Cluster, state: dict[str, Any]
) -> None:
    cluster.put(cluster.get("Node", "gpu-1") | state)
    done = user.launch(NODES="2", GPUS_PER_NODE="8")
    assert done.code == 0, done.err
    assert (
        "1 node with GPUs of GPU_PRODUCTS is cordoned or not ready: without it there is room for 1 such pods, of "
        "NODES=2, and the others wait"
    ) in done.err


def test_a_job_name_that_is_no_dns_label(user: User, cluster: Cluster) -> None:
    said = refused(
        user,
        cluster,
        64,
        "JOB_NAME=My_Job (environment): Must be a DNS label of at most 50 characters",
        JOB_NAME="My_Job",
    )
    assert "for example JOB_NAME=pure-transformer-8xa100." in said
    assert cluster.requests == []


def test_all_settings_that_are_bad_are_named_at_once(user: User, cluster: Cluster) -> None:
    said = refused(
        user,
        cluster,
        64,
        "Invalid settings:",
        "JOB_NAME=-x",
        "VOLUME_GB=0",
        "SITE=a/b",
        "NODES=none",
        JOB_NAME="-x",
        VOLUME_GB="0",
        SITE="a/b",
        NODES="none",
    )
    assert len(said.splitlines()) == 5


def test_an_image_that_was_never_pushed_is_told_with_all_else(
    user: User, cluster: Cluster, tmp_path: Path
) -> None:
    refused(
        user,
        cluster,
        64,
        "make push",
        "GPU_PRODUCTS=NVIDIA-H200: no node",
        "STORAGE_CLASS=none-such",
        IMAGE="registry.example.org/lab/never-pushed",
        GPU_PRODUCTS="NVIDIA-H200",
        STORAGE_CLASS="none-such",
    )
    refused(
        user, cluster, 64, "make push", IMAGE="registry.example.org/lab/never-pushed", DRY_RUN="1"
    )


def test_what_logs_in_to_the_registry_is_missing(user: User, cluster: Cluster) -> None:
    refused(
        user,
        cluster,
        78,
        "IMAGE_PULL_SECRET=login: there is no such Secret in namespace lab; make it of",
        "docker --config FOLDER login HOST, then kubectl create secret generic login -n lab "
        "--type=kubernetes.io/dockerconfigjson --from-file=.dockerconfigjson=FOLDER/config.json",
        IMAGE_PULL_SECRET="login",
    )


def test_a_key_for_wandb_is_missing(user: User, cluster: Cluster, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"  # what a login on this machine leaves is of no use to pods
    netrc.write_text("machine api.wandb.ai login user password 0123456789\n")
    refused(
        user,
        cluster,
        78,
        "WANDB_MODE=online: pods would have no key, as there is none in Secret "
        "pure-transformer-secrets of namespace lab",
        WANDB_MODE="online",
        NETRC=str(netrc),
    )
    secret = {
        "kind": "Secret",
        "apiVersion": "v1",
        "metadata": {"name": "pure-transformer-secrets"},
        "data": {"WANDB_API_KEY": "a2V5"},
    }
    cluster.put(secret)
    cluster.requests.clear()
    assert user.launch(WANDB_MODE="online").code == 0  # the cluster has one


def test_a_priority_class_that_is_unknown(user: User, cluster: Cluster) -> None:
    refused(
        user,
        cluster,
        64,
        "PRIORITY_CLASS=urgent: there is no such class; there are none",
        PRIORITY_CLASS="urgent",
    )


@pytest.mark.parametrize(
    ("condition", "parts"),
    [
        (
            {
                "type": "Failed",
                "reason": "PodFailurePolicy",
                "message": "Container trainer for pod lab/x-0 failed with exit "
                "code 78 matching FailJob rule at index 0",
            },
            (
                "has failed",
                "failed with exit code 78",
                "make logs ONLY=errors says more; once that is mended, make restart",
            ),
        ),
        ({"type": "Complete"}, ("is done", "make fetch-run", "make restart")),
    ],
)
def test_a_stale_job(
    user: User, cluster: Cluster, condition: dict[str, Any], parts: tuple[str, ...]
) -> None:
    assert user.launch().code == 0
    job = cluster.get("Job", "pure-transformer-8xa100")
    job["status"] = {"conditions": [condition | {"status": "True"}]}
    cluster.put(job)
    cluster.requests.clear()
    refused(user, cluster, 78, "Job pure-transformer-8xa100 ", *parts)


def test_a_job_of_that_name_that_is_none_of_ours(user: User, cluster: Cluster) -> None:
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
    cluster.requests.clear()
    for command in ("train", "restart"):
        refused(
            user,
            cluster,
            64,
            "JOB_NAME=theirs: namespace lab has a Job of that name that is none of ours",
            command=command,
            JOB_NAME="theirs",
        )


def test_another_runs_job_is_not_replaced(user: User, cluster: Cluster) -> None:
    assert user.launch(RUN_NAME="theirs").code == 0
    before = cluster.get("Job", "pure-transformer-8xa100")
    cluster.requests.clear()
    for command in ("train", "restart"):
        said = refused(
            user,
            cluster,
            64,
            "JOB_NAME=pure-transformer-8xa100: the Job of that name in namespace lab "
            "trains run theirs, and this is run mine: choose another JOB_NAME, or stop it first with make "
            "stop RUN_NAME=theirs",
            command=command,
            RUN_NAME="mine",
        )
        assert len(said.splitlines()) == 1
    assert cluster.get("Job", "pure-transformer-8xa100") == before
    assert user.launch("restart", RUN_NAME="theirs", MICRO_BATCH_SIZE="4").code == 0


def test_settings_that_may_not_be_seen_do_not_make_a_job_none(user: User, cluster: Cluster) -> None:
    assert user.launch().code == 0
    cluster.requests.clear()
    cluster.forbid("get", "configmaps")
    refused(
        user,
        cluster,
        64,
        "already and differs (its settings, which you may not see)",
        MICRO_BATCH_SIZE="4",
    )


# ---- The volume


def claim(size: str = "500Gi", **changes: Any) -> dict[str, Any]:
    return {
        "kind": "PersistentVolumeClaim",
        "apiVersion": "v1",
        "metadata": {"name": "pure-transformer", "namespace": "lab"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "standard",
            "resources": {"requests": {"storage": size}},
        }
        | changes.pop("spec", {}),
        **changes,
    }


def put(cluster: Cluster, thing: dict[str, Any]) -> dict[str, Any]:
    """There with its status, which what makes a thing may not say yet."""
    cluster.put(thing)
    return cluster.put(thing)


@pytest.mark.parametrize(
    ("thing", "part"),
    [
        (
            claim(status={"phase": "Lost"}),
            "VOLUME=pure-transformer: the disk behind this claim is gone",
        ),
        (
            claim(status={"phase": "Pending"}),
            "this claim still waits for its disk (no reason given); see kubectl describe "
            "pvc pure-transformer -n lab",
        ),
        (
            claim(spec={"accessModes": ["ReadWriteOnce"]}),
            "this claim is ReadWriteOnce, and NODES=4 pods write to it",
        ),
    ],
)
def test_a_volume_that_pods_cannot_use(
    user: User, cluster: Cluster, thing: dict[str, Any], part: str
) -> None:
    put(cluster, thing)
    refused(user, cluster, 78, part)


def test_why_a_volume_waits_is_told_in_the_clusters_words(user: User, cluster: Cluster) -> None:
    put(cluster, claim(status={"phase": "Pending"}))
    thing = cluster.get("PersistentVolumeClaim", "pure-transformer")
    cluster.event(thing, "Warning", "ProvisioningFailed", "no room there")
    refused(user, cluster, 78, "this claim still waits for its disk (no room there)")


def test_of_what_a_volume_waits_for_the_newest_is_told(user: User, cluster: Cluster) -> None:
    put(cluster, claim(status={"phase": "Pending"}))
    thing = cluster.get("PersistentVolumeClaim", "pure-transformer")
    for name, time, message in (
        ("a", "2026-01-01T00:00:02Z", "the newest"),
        ("b", "2026-01-01T00:00:01Z", "older"),
    ):
        cluster.put(
            {
                "kind": "Event",
                "apiVersion": "v1",
                "type": "Warning",
                "reason": "ProvisioningFailed",
                "message": message,
                "metadata": {"name": name, "namespace": "lab"},
                "lastTimestamp": time,
                "involvedObject": {
                    "kind": thing["kind"],
                    "name": "pure-transformer",
                    "namespace": "lab",
                },
            }
        )
    refused(user, cluster, 78, "this claim still waits for its disk (the newest)")


def storage_class(name: str, provisioner: str, **annotations: str) -> dict[str, Any]:
    return {
        "kind": "StorageClass",
        "apiVersion": "storage.k8s.io/v1",
        "provisioner": provisioner,
        "metadata": {"name": name, "annotations": annotations},
    }


def test_a_class_of_disks_for_one_node_is_refused_for_many(user: User, cluster: Cluster) -> None:
    cluster.put(storage_class("rook-ceph-block", "rook-system.rbd.csi.ceph.com"))
    refused(
        user,
        cluster,
        64,
        "STORAGE_CLASS=rook-ceph-block: rook-system.rbd.csi.ceph.com makes disks that one node "
        "at a time can write to, and NODES=4 pods are to; of the others these may do: standard",
        STORAGE_CLASS="rook-ceph-block",
    )
    cluster.put(
        storage_class(
            "standard", "ebs.csi.aws.com", **{"storageclass.kubernetes.io/is-default-class": "true"}
        )
    )
    cluster.put(storage_class("rook-cephfs", "rook-system.cephfs.csi.ceph.com"))
    refused(
        user,
        cluster,
        64,
        "STORAGE_CLASS=, and standard is this cluster's default: ebs.csi.aws.com makes disks",
        "these may do: rook-cephfs (CephFS",
    )
    assert user.launch(STORAGE_CLASS="rook-cephfs").code == 0


@pytest.mark.parametrize(
    ("provisioner", "one"),
    [
        ("rook-system.rbd.csi.ceph.com", True),
        ("kubernetes.io/rbd", True),
        ("kubernetes.io/aws-ebs", True),
        ("pd.csi.storage.gke.io", True),
        ("kubernetes.io/gce-pd", True),
        ("disk.csi.azure.com", True),
        ("rook-system.cephfs.csi.ceph.com", False),
        ("openebs.io/nfsrwx", False),
        ("file.csi.azure.com", False),
        ("efs.csi.aws.com", False),
        ("filestore.csi.storage.gke.io", False),
    ],
)
def test_who_makes_disks_for_one_node(provisioner: str, one: bool) -> None:
    assert bool(preflight.OF_ONE_NODE.search(provisioner)) is one


def test_a_volume_that_waits_for_its_first_pod_is_fine(user: User, cluster: Cluster) -> None:
    cluster.put(
        {
            "kind": "StorageClass",
            "apiVersion": "storage.k8s.io/v1",
            "provisioner": "test.example.org",
            "metadata": {"name": "late"},
            "volumeBindingMode": "WaitForFirstConsumer",
        }
    )
    put(cluster, claim(status={"phase": "Pending"}, spec={"storageClassName": "late"}))
    assert user.launch().code == 0


def test_a_volume_that_is_there_is_left_as_it_is(user: User, cluster: Cluster) -> None:
    before = put(cluster, claim("100Gi", status={"phase": "Bound"}))
    cluster.put(
        {
            "kind": "StorageClass",
            "apiVersion": "storage.k8s.io/v1",
            "provisioner": "test.example.org",
            "metadata": {"name": "fast"},
        }
    )
    refused = user.launch(STORAGE_CLASS="fast")
    assert refused.code == 64
    assert (
        "the plan needs up to 124 GB and the volume has 107 GB; choose another VOLUME"
        in refused.err
    )
    done = user.launch(STORAGE_CLASS="fast", ALLOW_FAIL="disk")
    assert done.code == 0
    assert "is there with STORAGE_CLASS=standard, not fast, and is left as it is" in done.err
    assert "is there with 100 GiB, not VOLUME_GB=500" in done.err
    assert (
        "the plan needs up to 124 GB and the volume has 107 GB; choose another VOLUME" in done.err
    )
    assert cluster.get("PersistentVolumeClaim", "pure-transformer") == before


def test_a_volume_that_the_plan_would_fill_is_told(user: User, cluster: Cluster) -> None:
    refused = user.launch(VOLUME_GB="100")
    assert refused.code == 64 and "set VOLUME_GB=116, or set a smaller DATA_CACHE_GB" in refused.err
    assert "ALLOW_FAIL=disk sends it all the same" in refused.err and cluster.objects("Job") == []


def test_a_target_that_cannot_be_is_refused(user: User, cluster: Cluster) -> None:
    """524,288 tokens in 1.31 s a step, and the gradients alone take 2.57 s."""
    refused = user.launch(TARGET_TOKENS_PER_S="400000")
    assert refused.code == 64 and cluster.objects("Job") == []
    assert "TARGET_TOKENS_PER_S=400000: every step waits 2.6 s for other nodes" in refused.err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500Gi", 500 * 2**30),
        ("1.5T", 1.5e12),
        ("1e9", 1e9),
        ("250m", 0.25),
        ("100k", 1e5),
        ("2Ki", 2048),
        ("7", 7),
        ("5 Gi", None),
        ("1Zi", None),
    ],
)
def test_amounts_are_read_as_kubernetes_writes_them(text: str, size: float | None) -> None:
    assert nodes.quantity(text) == size


# ---- What the checks missed: the API's own refusal


def test_a_job_that_came_meanwhile_is_explained_all_the_same(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert user.launch().code == 0
    monkeypatch.setattr(launch, "standing", lambda *_: launch.Standing("none"))
    done = user.launch(MICRO_BATCH_SIZE="4")
    assert done.code == 64
    assert (
        "Job pure-transformer-8xa100 is there already and differs, and a Job cannot be changed: make "
        in done.err
    )


def test_what_was_changed_by_hand_is_not_overwritten(user: User, cluster: Cluster) -> None:
    assert user.launch().code == 0
    cluster.store.delete(cluster.key("Job", "pure-transformer-8xa100"))
    kubectl(
        "patch",
        "service",
        "pure-transformer-8xa100",
        "--field-manager=somebody",
        "-p",
        '{"spec": {"publishNotReadyAddresses": false}}',
    )
    done = user.launch()
    assert done.code == 78
    assert "somebody has changed by hand what was applied here before" in done.err
    assert "kubectl delete KIND NAME -n lab" in done.err
    assert (
        cluster.get("Service", "pure-transformer-8xa100")["spec"]["publishNotReadyAddresses"]
        is False
    )


def test_a_claim_that_came_meanwhile_stays(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = put(cluster, claim("900Gi", status={"phase": "Bound"}))
    monkeypatch.setattr(preflight, "get_or_none", lambda *_: None)
    assert user.launch().code == 0
    assert cluster.get("PersistentVolumeClaim", "pure-transformer")["spec"] == before["spec"]


def test_a_quota_that_is_used_up(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        'Error from server (Forbidden): error when creating "STDIN": jobs.batch "x" is forbidden: exceeded quota: '
        "gpus, requested: count/jobs.batch=1, used: 2, limited: 2"
    )
    monkeypatch.setattr(launch.apply, "server_side", lambda *_: Done(1, "", said))
    done = user.launch()
    assert done.code == 78
    assert "the namespace's quota is used up (exceeded quota: gpus, requested" in done.err


def test_a_cluster_that_does_not_answer(user: User, cluster: Cluster) -> None:
    cluster.server.shutdown()
    cluster.server.server_close()
    try:
        done = user.launch()
    finally:
        cluster.server.shutdown = lambda: None  # type: ignore[method-assign]
    assert done.code == 69
    assert "the cluster of context test does not answer at http://127.0.0.1:" in done.err
    assert "kubectl config use-context NAME" in done.err


@pytest.mark.parametrize(
    ("provisioner", "nodes_wanted", "mode"),
    [
        ("rook-system.rbd.csi.ceph.com", "1", "ReadWriteOnce"),
        ("rook-system.cephfs.csi.ceph.com", "1", "ReadWriteMany"),
        ("rook-system.cephfs.csi.ceph.com", "2", "ReadWriteMany"),
    ],
)
def test_one_node_asks_a_block_class_for_a_disk_of_its_own(
    user: User, cluster: Cluster, provisioner: str, nodes_wanted: str, mode: str
) -> None:
    cluster.put(storage_class("chosen", provisioner))
    done = user.launch(STORAGE_CLASS="chosen", NODES=nodes_wanted)
    assert done.code == 0, done.err
    made = cluster.get("PersistentVolumeClaim", "pure-transformer")
    assert made["spec"]["accessModes"] == [mode]
