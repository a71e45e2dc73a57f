"""The tests' kubelet: what a container is given, how it is ended, and what is reported of it."""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_sim import scheduling
from tests.cluster_sim.cluster import Cluster
from tests.cluster_sim.containers import ROOT, Image, Paths, members
from tests.cluster_sim.kubelet import Kubelet
from tests.k8s.conftest import Kubectl
from tests.k8s.test_cluster import CLAIM, POD, changed
from tests.k8s.test_controller import until

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="pods need /proc")
SPEC = "spec.containers.0"


@pytest.fixture
def kubelet(cluster: Cluster) -> Kubelet:
    made: Kubelet = cluster.start_kubelet(images=["example.org/image:1"])
    return made


def pod_of(script: str, **fields: Any) -> dict[str, Any]:
    """A pod that runs a script of the shell; fields: of its container."""
    pod = changed(POD, f"{SPEC}.command", ["sh", "-c", script])
    for name, value in fields.items():
        pod = changed(pod, f"{SPEC}.{name}", value)
    return pod


def ended(cluster: Cluster) -> dict[str, Any]:
    """Wait until the pod is over; how it ended."""
    until(lambda: cluster.get("Pod", "pod")["status"]["phase"] in ("Succeeded", "Failed"))
    status: dict[str, Any] = cluster.get("Pod", "pod")["status"]["containerStatuses"][0]["state"][
        "terminated"
    ]
    return status


def test_a_container_has_the_environment_that_the_manifest_gives_it(
    cluster: Cluster, kubelet: Kubelet, kubectl: Kubectl
) -> None:
    cluster.put(
        {
            "kind": "ConfigMap",
            "apiVersion": "v1",
            "metadata": {"name": "settings"},
            "data": {"A": "of the map", "B": "of the map", "PLACE": "/volume/runs:/tmp/x"},
        }
    )
    cluster.put(
        {
            "kind": "Secret",
            "apiVersion": "v1",
            "metadata": {"name": "keys"},
            "stringData": {"KEY": "a secret"},
        }
    )
    cluster.put(CLAIM)

    def field(path: str) -> dict[str, Any]:
        return {"valueFrom": {"fieldRef": {"fieldPath": path}}}

    pod = pod_of(
        'echo "$A|$B|$C|$KEY|$NAME|$LABEL|$NONE|$NODE|$PLACE|$TMPDIR|$PWD"; echo kept >/volume/kept',
        envFrom=[
            {"configMapRef": {"name": "settings"}},
            {"secretRef": {"name": "keys"}},
            {"secretRef": {"name": "absent", "optional": True}},
        ],
        env=[
            {"name": "B", "value": "its own"},
            {"name": "C", "value": "$(A), $(NOTHING)"},
            {"name": "NAME", **field("metadata.name")},
            {"name": "LABEL", **field("metadata.labels['app']")},
            {"name": "NONE", **field("metadata.labels['absent']")},
            {"name": "NODE", **field("spec.nodeName")},
        ],
        volumeMounts=[{"name": "v", "mountPath": "/volume"}, {"name": "t", "mountPath": "/tmp"}],
    )
    cluster.put(
        changed(
            pod,
            "spec.volumes",
            [
                {"name": "v", "persistentVolumeClaim": {"claimName": "claim"}},
                {"name": "t", "emptyDir": {}},
            ],
        )
    )
    assert ended(cluster)["exitCode"] == 0
    said = kubectl("logs", "pod").rstrip().split("|")
    assert said[:8] == [
        "of the map",
        "its own",
        "of the map, $(NOTHING)",
        "a secret",
        "pod",
        "a",
        "",
        "node-of-test",
    ]
    volume, own = (
        kubelet.claim("claim"),
        kubelet.folder / "pods" / cluster.get("Pod", "pod")["metadata"]["uid"] / "t",
    )
    assert said[8:] == [f"{volume}/runs:{own}/x", str(own), str(kubelet.folder / "app")]
    assert (volume / "kept").read_text() == "kept\n"


def test_the_image_holds_what_dockerignore_lets_in_and_starts_as_the_dockerfile_says(
    tmp_path: Path,
) -> None:
    image = Image(tmp_path)
    held = {
        path.relative_to(image.app).as_posix() for path in image.app.rglob("*") if path.is_file()
    }
    assert {"train/main.py", "scripts/train.py", "presets/tiny.env", "REVISION"} <= held
    assert not [
        name
        for name in held
        if name.startswith(("tests/", "."))
        or (
            name.startswith("k8s/")
            and not re.fullmatch(r"k8s/(cluster/)?(__init__|log_\w+)\.py", name)
        )
        or not (name == "REVISION" or (ROOT / name).exists())
    ]
    assert image.entry == ["tini", "--", "/opt/venv/bin/python", "-m", "scripts.train"]
    assert image.environment["VENV"] == "/opt/venv" and image.environment["HOME"] == "/tmp"
    assert (
        "NVIDIA_VISIBLE_DEVICES" not in image.environment
    )  # which would show a pod GPUs that it did not ask for
    assert image.environment["PATH"].startswith("/opt/venv/bin:/usr/local/")


def test_paths_are_turned_where_they_stand_alone() -> None:
    here = Paths({"/tmp": Path("/x/tmp"), "/volume": Path("/y")}).here
    assert (
        here("/tmp") == "/x/tmp" and here("--to=/volume/runs:/tmp/a b") == "--to=/y/runs:/x/tmp/a b"
    )
    assert (
        here("/tmpfs /var/tmp /volumes http://h/volume")
        == "/tmpfs /var/tmp /volumes http://h/volume"
    )


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({f"{SPEC}.image": "example.org/image:2"}, "ErrImagePull", "image:2"),
        (
            {f"{SPEC}.envFrom": [{"configMapRef": {"name": "absent"}}]},
            "CreateContainerConfigError",
            'configmap "absent"',
        ),
        (
            {f"{SPEC}.envFrom": [{"secretRef": {"name": "absent"}}]},
            "CreateContainerConfigError",
            'secret "absent"',
        ),
        (
            {"spec.volumes": [{"name": "v", "configMap": {"name": "absent"}}]},
            "ContainerCreating",
            "MountVolume.SetUp",
        ),
    ],
)
def test_what_keeps_a_container_from_starting(
    cluster: Cluster, kubelet: Kubelet, change: dict[str, Any], reason: str, words: str
) -> None:
    ((path, value),) = change.items()
    cluster.put(changed(pod_of("true"), path, value))
    until(lambda: cluster.get("Pod", "pod")["status"].get("containerStatuses"))
    waiting = cluster.get("Pod", "pod")["status"]["containerStatuses"][0]["state"]["waiting"]
    assert waiting["reason"] == reason and words in waiting["message"]
    until(lambda: any(event["message"] == waiting["message"] for event in cluster.objects("Event")))


def test_what_keeps_a_pod_from_a_node(cluster: Cluster, kubelet: Kubelet) -> None:
    cluster.put(
        changed(
            pod_of("true"),
            "spec.volumes",
            [{"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}],
        )
    )

    def words() -> str:
        return str(
            next(
                (
                    c["message"]
                    for c in cluster.get("Pod", "pod")["status"].get("conditions", [])
                    if c["status"] == "False"
                ),
                "",
            )
        )

    until(lambda: words() == 'persistentvolumeclaim "claim" not found')
    cluster.put(changed(CLAIM, "spec.storageClassName", "nowhere"))
    until(lambda: words() == "pod has unbound immediate PersistentVolumeClaims")
    cluster.store.delete(cluster.key("pvc", "claim"))
    cluster.put(CLAIM)
    assert ended(cluster)["exitCode"] == 0, "it starts as soon as it can"


def test_nodes_are_taken_as_the_pod_asks_for_them() -> None:
    def node(name: str, gpus: int, **labels: str) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "labels": labels},
            "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}},
        }

    spec = changed(POD, f"{SPEC}.resources", {"limits": {"nvidia.com/gpu": 2}})
    product = changed(
        spec,
        "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution",
        {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "product", "operator": "In", "values": ["A100"]}]}
            ]
        },
    )
    there = [changed(spec, "spec.nodeName", "large") | {"status": {"phase": "Running"}}]
    nodes = [
        node("small", 1, product="A100"),
        node("large", 4, product="A100"),
        node("other", 8, product="H100"),
    ]
    assert scheduling.place(product, nodes, there, {}) == ("large", "")
    assert scheduling.place(product, nodes, there * 2, {}) == (
        "",
        "0/3 nodes are available: 2 Insufficient nvidia.com/gpu, 1 node(s) didn't match Pod's node "
        "affinity/selector.",
    )
    nodes_of = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
    (term,) = product["spec"]["affinity"]["nodeAffinity"][nodes_of.rpartition(".")[2]][
        "nodeSelectorTerms"
    ]
    not_large = {"key": "metadata.name", "operator": "NotIn", "values": ["large"]}
    avoiding = changed(
        product, nodes_of, {"nodeSelectorTerms": [term | {"matchFields": [not_large]}]}
    )
    assert scheduling.place(avoiding, nodes, there, {})[0] == ""
    ended = [changed(spec, "spec.nodeName", "large") | {"status": {"phase": "Failed"}}]
    both = [node("large", 4, product="A100"), node("next", 4, product="A100")]
    assert scheduling.place(product, both, ended, {})[0] == "next"
    nodes[1]["spec"] = {
        "taints": [{"key": "nautilus.io/hardware", "value": "a100", "effect": "NoSchedule"}]
    }
    assert "untolerated taint" in scheduling.place(product, nodes, there, {})[1]
    tolerant = changed(
        product, "spec.tolerations", [{"key": "nautilus.io/hardware", "operator": "Exists"}]
    )
    assert scheduling.place(tolerant, nodes, there, {})[0] == "large"
    assert (
        scheduling.place(changed(spec, "spec.nodeSelector", {"product": "H100"}), nodes, [], {})[0]
        == "other"
    )


def test_how_a_container_ends_is_reported(cluster: Cluster, kubelet: Kubelet) -> None:
    cluster.put(
        pod_of(
            "seq 200; echo the reason >&2; exit 78",
            terminationMessagePolicy="FallbackToLogsOnError",
        )
    )
    end = ended(cluster)
    assert end["exitCode"] == 78 and end["reason"] == "Error"
    assert end["message"].splitlines() == [*map(str, range(122, 201)), "the reason"]
    assert cluster.get("Pod", "pod")["status"]["phase"] == "Failed"


def test_a_killed_pod_leaves_no_process_behind(cluster: Cluster, kubelet: Kubelet) -> None:
    cluster.put(pod_of("setsid sleep 100 & echo there; wait"))
    uid = cluster.get("Pod", "pod")["metadata"]["uid"]
    until(lambda: len(members(uid)) >= 2)
    kubelet.kill("pod")
    assert ended(cluster)["exitCode"] == 137 and not members(uid)


def test_what_the_first_process_leaves_behind_ends_with_it(
    cluster: Cluster, kubelet: Kubelet
) -> None:
    cluster.put(pod_of("setsid sleep 100 & exit 0"))
    assert ended(cluster)["reason"] == "Completed"
    assert not members(cluster.get("Pod", "pod")["metadata"]["uid"])


def test_a_deleted_pod_is_told_first_and_killed_when_its_time_is_up(
    cluster: Cluster, kubelet: Kubelet, kubectl: Kubectl
) -> None:
    deaf = changed(
        pod_of("trap 'echo no' TERM; echo there; while :; do sleep 0.05; done"),
        "spec.terminationGracePeriodSeconds",
        1,
    )
    for pod, code, least in (
        (pod_of("trap 'exit 75' TERM; echo there; while :; do sleep 0.05; done"), 75, 0.0),
        (deaf, 137, 1.0),
    ):
        cluster.put(pod)
        until(lambda: cluster.log_of("pod") == b"there\n")
        start = time.monotonic()
        kubectl("delete", "pod", "pod")
        assert time.monotonic() - start >= least
        last = [change.thing for change in cluster.store.history if change.key[2] == "pod"][-1]
        assert last["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == code
        assert not cluster.objects("Pod")
        del cluster.log_files["pod"]


def test_an_eviction_can_be_told_from_a_failure(cluster: Cluster, kubelet: Kubelet) -> None:
    cluster.put(pod_of("trap 'exit 143' TERM; echo there; while :; do sleep 0.05; done"))
    until(lambda: cluster.log_of("pod") == b"there\n")
    kubelet.evict("pod")
    until(lambda: not cluster.objects("Pod"))
    last = [change.thing for change in cluster.store.history if change.key[2] == "pod"][-1]
    assert last["status"]["phase"] == "Failed"
    true = {c["type"] for c in last["status"]["conditions"] if c["status"] == "True"}
    assert {"DisruptionTarget", "PodScheduled"} <= true


def test_a_pod_has_until_its_deadline(cluster: Cluster, kubelet: Kubelet) -> None:
    cluster.put(changed(pod_of("sleep 100"), "spec.activeDeadlineSeconds", 1))
    ended(cluster)
    status = cluster.get("Pod", "pod")["status"]
    assert (status["phase"], status["reason"]) == ("Failed", "DeadlineExceeded")


def test_exec_runs_beside_the_container_with_what_it_sees(
    cluster: Cluster, kubelet: Kubelet, kubectl: Kubectl
) -> None:
    cluster.put(CLAIM)
    pod = pod_of(
        "sleep 100",
        env=[{"name": "A", "value": "b"}],
        volumeMounts=[{"name": "v", "mountPath": "/volume"}],
    )
    cluster.put(
        changed(
            pod, "spec.volumes", [{"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}]
        )
    )
    until(lambda: cluster.get("Pod", "pod")["status"]["phase"] == "Running")
    (kubelet.claim("claim") / "file").write_text("on the volume\n")
    assert (
        kubectl("exec", "pod", "--", "sh", "-c", "cat /volume/file; echo $A")
        == "on the volume\nb\n"
    )
    assert kubectl("exec", "-i", "pod", "--", "wc", "-c", stdin="four").strip() == "4"
    assert "terminated with exit code 3" in kubectl(
        "exec", "pod", "--", "sh", "-c", "exit 3", code=3
    )
    assert "not found in $PATH" in kubectl("exec", "pod", "--", "no-such-program", code=127)


PEERS = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "job"},
    "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "a"}},
}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"spec.publishNotReadyAddresses": False}, False),
        ({"spec.selector": {"app": "b"}}, False),
        ({"spec.clusterIP": "10.0.0.7", "spec.ports": [{"port": 1}]}, False),
        ({"metadata.name": "other"}, False),
    ],
)
def test_the_first_pod_is_found_by_the_name_that_a_headless_service_gives(
    cluster: Cluster, kubelet: Kubelet, kubectl: Kubectl, change: dict[str, Any], found: bool
) -> None:
    service = PEERS
    for path, value in change.items():
        service = changed(service, path, value)
    cluster.put(service)
    pod = pod_of(
        'echo "$MASTER_ADDR"',
        ports=[{"containerPort": 29500}],
        env=[{"name": "MASTER_ADDR", "value": "job-0.job"}],
    )
    pod["metadata"]["labels"]["batch.kubernetes.io/job-name"] = "job"
    cluster.put(changed(pod, "spec.subdomain", "job"))
    ended(cluster)
    here = f"127.0.0.1:{kubelet.ports['job-0.job']}\n"
    assert kubectl("logs", "pod") == (here if found else "job-0.job\n")


def test_the_first_process_alone_is_told_and_what_it_starts_is_not(
    cluster: Cluster, kubelet: Kubelet, kubectl: Kubectl
) -> None:
    child = "trap 'echo child' TERM; echo there; while :; do sleep 0.05; done"
    script = f"({child}) & trap 'echo first; sleep 0.3; exit 3' TERM; wait"
    cluster.put(changed(POD, f"{SPEC}.command", ["tini", "--", "sh", "-c", script]))
    until(lambda: (cluster.log_of("pod") or b"") == b"there\n")
    kubectl("delete", "pod", "pod")
    assert (cluster.log_of("pod") or b"").splitlines() == [b"there", b"first"]


def test_nothing_outlives_the_cluster(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.start_kubelet()
    cluster.put(pod_of("sleep 1234.5"))
    until(lambda: cluster.get("Pod", "pod")["status"]["phase"] == "Running")
    cluster.close()
    listed = subprocess.run(
        ["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True
    ).stdout
    assert "sleep 1234.5" not in listed
