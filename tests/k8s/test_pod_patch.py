"""POD_PATCH: what a site adds to the pods that train, and what it may not change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.cluster.job_spec import cluster_config
from k8s.cluster.kubectl import Refused
from k8s.cluster.pod_patch import merge
from k8s.cluster.render import objects, render
from tests.k8s.user import User, a_user

user = a_user
IMAGE = "registry.example.org/lab/pure-transformer@sha256:" + 64 * "a"
PATCH = """
metadata:
  labels: {kueue.x-k8s.io/queue-name: lab}
  annotations: {k8s.v1.cni.cncf.io/networks: rdma}
spec:
  securityContext: {runAsUser: 4711, fsGroup: null}
  tolerations: [{key: rdma, operator: Exists}]
  volumes: [{name: shm, emptyDir: {sizeLimit: 99Gi}}, {name: hca, hostPath: {path: /dev/infiniband}}]
  containers:
    - name: trainer
      securityContext: {capabilities: {add: [IPC_LOCK]}}
      env: [{name: NCCL_IB_HCA, value: mlx5}]
      resources: {limits: {rdma/hca: 1}, requests: {rdma/hca: 1}}
"""

Render = Callable[..., dict[str, Any]]


@pytest.fixture
def rendered(tmp_path: Path) -> Render:
    """Return the Jobs of a launch by name, with this patch."""
    (tmp_path / "own.env").touch()

    def call(patch: str, data_job: bool = False, **settings: str) -> dict[str, Any]:
        (tmp_path / "site.yaml").write_text(patch)
        given = {"POD_PATCH": str(tmp_path / "site.yaml")} if patch else {}
        c, _ = cluster_config({"ENV_FILE": str(tmp_path / "own.env"), **given, **settings})
        made = objects(render(c, IMAGE, data_job=data_job))
        return {thing["metadata"]["name"]: thing for thing in made if thing["kind"] == "Job"}

    return call


def test_a_patch_changes_only_what_it_says(rendered: Render) -> None:
    settings = {"SYNC": "diloco", "TOLERATIONS": "gpu"}
    before = rendered("", **settings)
    after = rendered(PATCH, **settings)
    name = "pure-transformer-8xa100"
    expected = before[name]
    template = expected["spec"]["template"]
    pod = template["spec"]
    trainer = pod["containers"][0]
    for metadata in (expected["metadata"], template["metadata"]):
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = "lab"
    template["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = "rdma"
    pod["securityContext"]["runAsUser"] = 4711
    del pod["securityContext"]["fsGroup"]
    pod["tolerations"].append({"key": "rdma", "operator": "Exists"})
    pod["volumes"][2]["emptyDir"]["sizeLimit"] = "99Gi"
    pod["volumes"].append({"name": "hca", "hostPath": {"path": "/dev/infiniband"}})
    trainer["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
    trainer["env"].append({"name": "NCCL_IB_HCA", "value": "mlx5"})
    for part in ("limits", "requests"):
        trainer["resources"][part]["rdma/hca"] = 1
    rendered_hash = "pure-transformer/rendered"
    hashes = [job[name]["metadata"]["annotations"].pop(rendered_hash) for job in (before, after)]
    assert hashes[0] != hashes[1]
    assert after[name] == expected
    lighthouse = f"{name}-lighthouse"
    assert after[lighthouse] == before[lighthouse]


def test_pods_that_do_not_train_are_left_alone(rendered: Render) -> None:
    assert rendered(PATCH, data_job=True) == rendered("", data_job=True)


def test_mounts_of_one_volume_are_told_apart_by_their_paths() -> None:
    old = [{"name": "tmp", "mountPath": "/tmp"}]
    new = [{"name": "tmp", "mountPath": "/home"}, {"name": "tmp", "mountPath": "/tmp", "a": 1}]
    assert merge(old, new) == [
        {"name": "tmp", "mountPath": "/tmp", "a": 1},
        {"name": "tmp", "mountPath": "/home"},
    ]


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        ("[1]", "Must be a map"),
        ("a: [", "Cannot be read"),
        ("kind: Pod", "kind: Is not a field of a pod"),
        ("metadata: {name: x}", "metadata.name: Cannot be set"),
        ("metadata: {labels: {a: 1}}", "metadata.labels: Must be a map of text"),
        ("metadata: {labels: {app.kubernetes.io/name: x}}", "finds its pods by this name"),
        ("spec: {toleration: []}", "spec.toleration: Is not a field"),
        ("spec: {tolerations: {key: a}}", "spec.tolerations: Must be a list"),
        ("spec: {restartPolicy: Always}", "spec.restartPolicy: Cannot be changed"),
        ("spec: {affinity: {nodeAffinity: {}}}", "spec.affinity.nodeAffinity: Cannot be changed"),
        ("spec: {volumes: [{name: volume}]}", "Set VOLUME"),
        ("spec: {containers: [{name: side}]}", "Must have name: trainer"),
        ("spec: {containers: [{name: trainer, command: [a]}]}", "trainer.command: Cannot"),
        ("spec: {containers: [{name: trainer, image: a}]}", "trainer.image: Cannot"),
        ("spec: {containers: [{name: trainer, imag: a}]}", "trainer.imag: Is not a field"),
        (
            "spec: {containers: [{name: trainer, resources: {limits: {cpu: 1}}}]}",
            "set POD_CPUS",
        ),
        ("spec: {containers: [{name: trainer, env: [{name: NODE_RANK}]}]}", "env.NODE_RANK"),
    ],
)
def test_what_would_break_a_launch_is_refused_by_name(
    rendered: Render, patch: str, sentence: str
) -> None:
    with pytest.raises(Refused, match="POD_PATCH=") as refused:
        rendered(patch)
    assert sentence in str(refused.value.sentences) and refused.value.code == 64


def test_a_refused_patch_sends_nothing_and_a_dry_run_shows_a_good_one(
    user: User, tmp_path: Path
) -> None:
    done = user.launch(POD_PATCH="no-such.yaml")
    assert done.code == 64 and "POD_PATCH=no-such.yaml: Cannot be read" in done.err
    assert not user.cluster.objects("Job")
    (tmp_path / "site.yaml").write_text(PATCH)
    done = user.launch(POD_PATCH=str(tmp_path / "site.yaml"), DRY_RUN="1")
    assert done.code == 0, done.err
    (job,) = (thing for thing in yaml.safe_load_all(done.out) if thing["kind"] == "Job")
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["rdma/hca"] == 1
