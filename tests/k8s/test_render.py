"""k8s/cluster/render.py: what is sent to the cluster, field by field, for the shapes that A100 come in."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.cluster import secret
from k8s.cluster.job_spec import cluster_config, pod_environment
from k8s.cluster.kubectl import Refused
from k8s.cluster.render import claim, digest, objects, reader_pod, render
from settings.config import Config
from tests.cluster_sim.cluster import Cluster
from tests.k8s.conftest import Kubectl
from tests.k8s.test_cluster import POD, changed
from tests.k8s.test_controller import until

IMAGE = "registry.example.org/lab/pure-transformer@sha256:" + 64 * "a"
JOB = "pure-transformer-8xa100"

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The settings of a job, with these instead of the defaults, apart from the machine's own env file."""
    (tmp_path / "own.env").write_text("")
    return lambda **environ: cluster_config({"ENV_FILE": str(tmp_path / "own.env"), **environ})[0]


def by_kind(text: str) -> dict[str, Any]:
    """Kind -> the object; there is one of each."""
    found = objects(text)
    kinds = {thing["kind"]: thing for thing in found}
    assert len(kinds) == len(found)
    return kinds


def labels(component: str = "") -> dict[str, str]:
    both = {"app.kubernetes.io/name": "pure-transformer", "app.kubernetes.io/instance": JOB}
    return both | ({"app.kubernetes.io/component": component} if component else {})


def field_ref(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


NO_GPUS = {
    "name": "NVIDIA_VISIBLE_DEVICES",
    "value": "void",
}  # else a node's runtime may show all that it has


def near(weight: int, key: str) -> dict[str, Any]:
    return {
        "weight": weight,
        "podAffinityTerm": {
            "topologyKey": f"topology.kubernetes.io/{key}",
            "labelSelector": {"matchLabels": labels("trainer")},
        },
    }


HELD = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
TIGHTLY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
PRODUCTS = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [
            {
                "matchExpressions": [
                    {
                        "key": "nvidia.com/gpu.product",
                        "operator": "In",
                        "values": ["NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"],
                    }
                ]
            }
        ]
    }
}
TOGETHER = {
    "preferredDuringSchedulingIgnoredDuringExecution": [near(100, "zone"), near(50, "region")]
}


def expected_pod(environment: str, gpus: int) -> dict[str, Any]:
    """The pod of a single node, by hand."""
    amounts = {
        "cpu": str(4 * gpus),
        "memory": f"{48 * gpus}Gi",
        "ephemeral-storage": "50Gi",
        "nvidia.com/gpu": str(gpus),
    }
    trainer = {
        "name": "trainer",
        "image": IMAGE,
        "workingDir": "/app",
        "command": ["tini", "--", "/opt/venv/bin/python", "-m", "scripts.train"],
        "envFrom": [
            {"configMapRef": {"name": environment}},
            {"secretRef": {"name": "pure-transformer-secrets", "optional": True}},
        ],
        "env": [
            field_ref("NODE_RANK", "metadata.labels['batch.kubernetes.io/job-completion-index']"),
            field_ref("POD_NAME", "metadata.name"),
            field_ref("K8S_NODE", "spec.nodeName"),
        ],
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": TIGHTLY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "volume", "mountPath": "/volume"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 180,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": HELD,
        "affinity": {"nodeAffinity": PRODUCTS},
        "containers": [trainer],
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": "pure-transformer"}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "50Gi"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{8 * gpus}Gi"}},
        ],
    }


def rule(action: str, *codes: int) -> dict[str, Any]:
    on = {"containerName": "trainer", "operator": "In", "values": [*codes]}
    return {"action": action, "onExitCodes": on}


def expected_job(nodes: int, pod: dict[str, Any]) -> dict[str, Any]:
    run = {"pure-transformer/run-name": "xlarge-8xa100"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": JOB, "labels": labels(), "annotations": run},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 25 * nodes,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": 7 * 24 * 3600,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    rule("FailJob", 64, 70, 78),
                    rule("Ignore", 69, 71),
                ]
            },
            "template": {
                "metadata": {"labels": labels("trainer"), "annotations": run},
                "spec": pod,
            },
        },
    }


def rendered_job(kinds: dict[str, Any]) -> dict[str, Any]:
    """The Job without its own hash, which must look like one."""
    assert re.fullmatch(
        r"[0-9a-f]{64}", kinds["Job"]["metadata"]["annotations"].pop("pure-transformer/rendered")
    )
    return kinds["Job"]


# ---- The three shapes


@pytest.mark.parametrize(("nodes", "gpus"), [(4, 2), (2, 4)])
def test_nodes_of_a_job_find_each_other_and_ask_for_one_site(
    load: Load, nodes: int, gpus: int
) -> None:
    kinds = by_kind(render(load(NODES=str(nodes), GPUS_PER_NODE=str(gpus)), IMAGE))
    pod = expected_pod(kinds["ConfigMap"]["metadata"]["name"], gpus)
    pod |= {"subdomain": JOB, "affinity": {"nodeAffinity": PRODUCTS, "podAffinity": TOGETHER}}
    pod["containers"][0]["ports"] = [{"name": "rdzv", "containerPort": 29500}]
    assert rendered_job(kinds) == expected_job(nodes, pod)
    assert kinds["Service"] == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": JOB, "labels": labels()},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels("trainer"),
            "ports": [{"name": "rdzv", "port": 29500}],
        },
    }
    assert sorted(kinds) == ["ConfigMap", "Job", "NetworkPolicy", "Service"]
    data = kinds["ConfigMap"]["data"]
    assert (data["NODES"], data["NPROC"], data["MASTER_ADDR"]) == (
        str(nodes),
        str(gpus),
        f"{JOB}-0.{JOB}",
    )


def test_one_node_with_all_gpus_looks_for_nobody(load: Load) -> None:
    kinds = by_kind(render(load(NODES="1", GPUS_PER_NODE="8"), IMAGE))
    assert rendered_job(kinds) == expected_job(
        1, expected_pod(kinds["ConfigMap"]["metadata"]["name"], 8)
    )
    assert sorted(kinds) == ["ConfigMap", "Job", "NetworkPolicy"]
    data = kinds["ConfigMap"]["data"]
    assert data["NPROC"] == "8" and not {"NODES", "MASTER_ADDR"} & data.keys()


def test_only_pods_of_the_same_job_may_speak_to_it_and_it_to_anyone(load: Load) -> None:
    assert by_kind(render(load(), IMAGE))["NetworkPolicy"] == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": JOB, "labels": labels()},
        "spec": {
            "podSelector": {"matchLabels": labels()},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": labels()}}]}],
        },
    }


def test_the_configmap_is_the_environment_to_the_letter(load: Load) -> None:
    c = load(
        TOKENIZER="/volume/my tok=1.json",
        LEARNING_RATE="1e-4",
        WANDB_PROJECT="off",
        RUN_NAME="0x1e3",
    )
    made = by_kind(render(c, IMAGE))["ConfigMap"]
    assert made["data"] == pod_environment(c)
    assert (made["data"]["TOKENIZER"], made["data"]["WANDB_PROJECT"], made["data"]["RUN_NAME"]) == (
        "/volume/my tok=1.json",
        "off",
        "0x1e3",
    )
    assert made["metadata"]["labels"] == labels()
    assert re.fullmatch(rf"{JOB}-env-[a-z0-9]{{10}}", made["metadata"]["name"])


AWKWARD = [
    '"in quotes"',
    "'in single ones'",
    '"',
    """it's "both", `these` and \\"those\\" """,
    "  blanks around  ",
    "#hash",
    "a #hash behind a blank",
    "$HOME $(RUN_NAME) ${RUN_NAME} $$RUN_NAME",
    "a=b==c=",
    "=",
    "<<",
    "back\\slash\\n",
    "null",
    "- {a: [b]} | > & * ! %",
    "é ü 語 \u2028 \U0001f600",
]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="pods need /proc")
def test_values_arrive_in_a_pod_byte_for_byte(
    load: Load, cluster: Cluster, kubectl: Kubectl
) -> None:
    cluster.start_kubelet(images=["example.org/image:1"])
    told, sources, made = dict[str, str](), [], []
    for number, value in enumerate(AWKWARD):
        c = load(TOKENIZER=value, NODES="1")
        text = render(c, IMAGE)
        kinds = by_kind(text)
        assert kinds["ConfigMap"]["data"] == pod_environment(c)
        assert kinds["ConfigMap"]["data"]["TOKENIZER"] == value
        made += [part for part in text.split("---\n") if "kind: ConfigMap\n" in part]
        (source, _) = kinds["Job"]["spec"]["template"]["spec"]["containers"][0]["envFrom"]
        sources.append({"prefix": f"JOB_{number}_", **source})  # one pod with those of all jobs
        told |= {f"JOB_{number}_{name}": text for name, text in pod_environment(c).items()}
    kubectl("apply", "-n", "lab", "-f", "-", stdin="---\n".join(made))
    pod = changed(POD, "spec.containers.0.command", ["sh", "-c", "env -0 | base64 -w0"])
    cluster.put(changed(pod, "spec.containers.0.envFrom", sources))
    until(lambda: cluster.get("Pod", "pod")["status"]["phase"] == "Succeeded")
    arrived = base64.b64decode(kubectl("logs", "pod")).split(b"\0")
    assert {f"{name}={text}".encode() for name, text in told.items()} <= set(arrived)


@pytest.mark.parametrize("value", ["x" * 70_000], ids=["long"])
def test_a_value_that_kustomize_would_change_is_refused(load: Load, value: str) -> None:
    c = load().replace(tokenizer=value)
    with pytest.raises(Refused, match=r"TOKENIZER\b.*: kubectl kustomize would not pass it on"):
        render(c, IMAGE)


# ---- Overlays


def test_a_pinned_site_is_a_selector_and_no_wish(load: Load) -> None:
    pod = by_kind(render(load(SITE="ucsd"), IMAGE))["Job"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"topology.kubernetes.io/zone": "ucsd"}
    assert pod["affinity"] == {"nodeAffinity": PRODUCTS} and pod["subdomain"] == JOB


def test_a_single_node_can_be_pinned_as_well(load: Load) -> None:
    kinds = by_kind(render(load(NODES="1", GPUS_PER_NODE="8", SITE="ucsd"), IMAGE))
    pod = kinds["Job"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"topology.kubernetes.io/zone": "ucsd"} and "subdomain" not in pod
    assert "Service" not in kinds


def test_a_smoke_test_holds_no_gpu_and_little_else(load: Load) -> None:
    kinds = by_kind(render(load(PRESET="tiny", DEVICE="cpu", NODES="2"), IMAGE))
    pod = kinds["Job"]["spec"]["template"]["spec"]
    small = {"cpu": "2", "memory": "6Gi", "ephemeral-storage": "10Gi"}
    assert pod["containers"][0]["resources"] == {"requests": small, "limits": small}
    trainer = pod["containers"][0]
    assert trainer["env"] == [*expected_pod("", 0)["containers"][0]["env"], NO_GPUS]
    trainer["env"].remove(NO_GPUS)
    assert "affinity" not in pod and "nvidia" not in str(kinds).lower()
    assert (
        pod["subdomain"] == JOB and "Service" in kinds and kinds["Job"]["spec"]["completions"] == 2
    )
    assert kinds["ConfigMap"]["data"]["DEVICE"] == "cpu"


# ---- Settings that land in one field, or are absent


def test_every_size_and_name_comes_from_its_setting(load: Load) -> None:
    c = load(
        JOB_NAME="mine",
        RUN_NAME="My.Run",
        GPUS_PER_NODE="4",
        POD_MEMORY_GB="70",
        GRACE_PERIOD_S="400",
        VOLUME="disk",
        NAMESPACE="lab",
        GPU_PRODUCTS="B,A",
        TOLERATIONS="x/y=z,key",
        PRIORITY_CLASS="low",
        IMAGE_PULL_SECRET="login",
    )
    kinds = by_kind(render(c, "example.org/a:b"))
    job, pod = kinds["Job"], kinds["Job"]["spec"]["template"]["spec"]
    trainer = pod["containers"][0]
    amounts = {"cpu": "16", "memory": "70Gi", "ephemeral-storage": "50Gi", "nvidia.com/gpu": "4"}
    assert trainer["resources"] == {"requests": amounts, "limits": amounts}
    assert trainer["image"] == "example.org/a:b" and trainer["ports"][0]["containerPort"] == 29500
    assert trainer["envFrom"][1]["secretRef"]["name"] == secret.NAME
    assert [volume.get("emptyDir") for volume in pod["volumes"]] == [
        None,
        {"sizeLimit": "50Gi"},
        {"medium": "Memory", "sizeLimit": "11Gi"},
    ]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "disk"
    assert pod["terminationGracePeriodSeconds"] == 400 and pod["subdomain"] == "mine"
    assert pod["tolerations"] == [
        {"key": "x/y", "operator": "Equal", "value": "z"},
        {"key": "key", "operator": "Exists"},
    ]
    assert pod["priorityClassName"] == "low" and pod["imagePullSecrets"] == [{"name": "login"}]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert terms[0]["matchExpressions"][0]["values"] == ["B", "A"]
    assert job["metadata"]["annotations"]["pure-transformer/run-name"] == "My.Run"
    assert {thing["metadata"]["namespace"] for thing in kinds.values()} == {"lab"}
    assert {
        thing["metadata"]["labels"]["app.kubernetes.io/instance"] for thing in kinds.values()
    } == {"mine"}
    assert [
        kinds[kind]["metadata"]["name"] for kind in ("Job", "Service", "NetworkPolicy")
    ] == 3 * ["mine"]
    assert kinds["Service"]["spec"]["ports"][0]["port"] == 29500


@pytest.mark.parametrize(
    "shape", [{}, {"SITE": "ucsd"}, {"NODES": "1", "GPUS_PER_NODE": "8"}], ids=str
)
def test_gpus_are_asked_for_by_the_name_that_the_cluster_gives_them(
    load: Load, shape: dict[str, str]
) -> None:
    usual, named = (
        by_kind(render(load(**shape), IMAGE, gpu=gpu))
        for gpu in ("nvidia.com/gpu", "nvidia.com/a100")
    )
    resources = named["Job"]["spec"]["template"]["spec"]["containers"][0]["resources"]
    amounts = {
        "cpu": "32" if "NODES" in shape else "8",
        "memory": "384Gi" if "NODES" in shape else "96Gi",
        "ephemeral-storage": "50Gi",
        "nvidia.com/a100": shape.get("GPUS_PER_NODE", "2"),
    }
    assert resources == {"requests": amounts, "limits": amounts}
    for part in resources.values():
        part["nvidia.com/gpu"] = part.pop("nvidia.com/a100")
    assert rendered_job(named) == rendered_job(usual) and named == usual  # and that is all
    assert "nvidia.com/a100" not in str(
        by_kind(render(load(), IMAGE, data_job=True, gpu="nvidia.com/a100"))
    )


def test_without_a_namespace_none_is_written(load: Load) -> None:
    assert "namespace" not in render(load(), IMAGE)


def test_the_volume_is_shared_apart_from_the_job_and_of_no_one_job(load: Load) -> None:
    made = objects(
        claim(load(VOLUME="disk", VOLUME_GB="7", STORAGE_CLASS="rook-cephfs", NAMESPACE="lab"))
    )
    assert made == [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": "disk",
                "namespace": "lab",
                "labels": {"app.kubernetes.io/name": "pure-transformer"},
            },
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "7Gi"}},
                "storageClassName": "rook-cephfs",
            },
        }
    ]
    assert "storageClassName" not in claim(load())


# ---- Other pods


def test_data_is_made_by_one_pod_without_gpus_on_the_same_volume(load: Load) -> None:
    c = load(TOLERATIONS="key")
    kinds = by_kind(render(c, IMAGE, data_job=True))
    pod = expected_pod(kinds["ConfigMap"]["metadata"]["name"], 0)
    del pod["affinity"]
    amounts = {"cpu": "8", "memory": "32Gi", "ephemeral-storage": "50Gi"}
    trainer = pod["containers"][0]
    trainer |= {
        "command": ["tini", "--", "/opt/venv/bin/python", "-m", "train.data.prepare", "data"],
        "resources": {"requests": amounts, "limits": amounts},
        "env": [*trainer["env"][1:], NO_GPUS],
    }
    pod["volumes"][2]["emptyDir"]["sizeLimit"] = "1Gi"
    job = expected_job(1, pod | {"tolerations": [{"key": "key", "operator": "Exists"}]})
    job["metadata"]["name"] = f"{JOB}-data"
    job["spec"]["template"]["metadata"]["labels"] = labels("data")
    del job["spec"]["completionMode"]
    assert rendered_job(kinds) == job
    assert sorted(kinds) == ["ConfigMap", "Job", "NetworkPolicy"]
    assert kinds["ConfigMap"] == by_kind(render(c, IMAGE))["ConfigMap"]


def test_data_takes_no_more_than_a_pod_of_training_would(load: Load) -> None:
    job = by_kind(
        render(load(PRESET="tiny", DEVICE="cpu", POD_MEMORY_GB="20"), IMAGE, data_job=True)
    )["Job"]
    amounts = {"cpu": "2", "memory": "20Gi", "ephemeral-storage": "10Gi"}
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == amounts


def test_a_reader_sees_the_volume_for_a_quarter_of_an_hour_and_no_secret(load: Load) -> None:
    amounts = {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "1Gi"}
    assert reader_pod(load(IMAGE_PULL_SECRET="login"), IMAGE, "a-reader") == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a-reader", "labels": labels("reader")},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 900,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": HELD,
            "imagePullSecrets": [{"name": "login"}],
            "containers": [
                {
                    "name": "reader",
                    "image": IMAGE,
                    "workingDir": "/app",
                    "command": ["tini", "--", "sleep", "900"],
                    "env": [NO_GPUS],
                    "securityContext": TIGHTLY,
                    "resources": {"requests": amounts, "limits": amounts},
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": [
                        {"name": "volume", "mountPath": "/volume", "readOnly": True},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                {"name": "volume", "persistentVolumeClaim": {"claimName": "pure-transformer"}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
            ],
        },
    }
    assert "imagePullSecrets" not in reader_pod(load(), IMAGE, "a-reader")["spec"]


# ---- The same, or not


def test_the_same_settings_give_the_same_bytes_and_the_job_says_which(load: Load) -> None:
    text = render(load(), IMAGE)
    assert text == render(load(), IMAGE)
    things = sorted(objects(text), key=lambda thing: str(thing["kind"]))
    annotations = by_kind(text)["Job"]["metadata"]["annotations"]
    unset = json.dumps(things, sort_keys=True).replace(
        annotations["pure-transformer/rendered"], "unset"
    )
    assert annotations["pure-transformer/rendered"] == hashlib.sha256(unset.encode()).hexdigest()


def test_another_kubectl_and_another_way_to_name_the_namespace_send_the_same(load: Load) -> None:
    text, named = render(load(), IMAGE), render(load(NAMESPACE="lab"), IMAGE)
    said = by_kind(text)["Job"]["metadata"]["annotations"]["pure-transformer/rendered"]
    assert (
        by_kind(named)["Job"]["metadata"]["annotations"]["pure-transformer/rendered"]
        == said
        != digest([])
    )
    otherwise = yaml.safe_dump_all(
        reversed(objects(named)), default_flow_style=True, sort_keys=False
    )
    assert otherwise != text and digest(objects(otherwise)) == digest(objects(text))


@pytest.mark.parametrize(
    ("settings", "image", "environment_changes"),
    [
        ({"LEARNING_RATE": "1e-4"}, IMAGE, True),
        ({"KEEP_LAST": "4"}, IMAGE, True),
        ({}, IMAGE.replace("aa", "bb"), False),
        ({"POD_MEMORY_GB": "97"}, IMAGE, False),
        ({"TOLERATIONS": "a"}, IMAGE, False),
    ],
)
def test_a_changed_setting_shows_in_the_job(
    load: Load, settings: dict[str, str], image: str, environment_changes: bool
) -> None:
    before, after = by_kind(render(load(), IMAGE)), by_kind(render(load(**settings), image))
    assert (
        before["ConfigMap"]["metadata"]["name"] != after["ConfigMap"]["metadata"]["name"]
    ) == environment_changes
    assert before["Job"]["metadata"]["annotations"] != after["Job"]["metadata"]["annotations"]
    assert before["Job"]["spec"] != after["Job"]["spec"]


def test_a_kubectl_that_cannot_do_it_is_named(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubectl").write_text('#!/bin/sh\necho "error: unknown field" >&2\nexit 1\n')
    (tmp_path / "kubectl").chmod(0o755)
    c = load()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        Refused, match=r"kubectl kustomize: unknown field; .*`make setup-dev`"
    ) as refused:
        render(c, IMAGE)
    assert refused.value.code == 78


def test_nothing_is_left_behind(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    json.dumps(objects(render(load(), IMAGE)))  # plain values only, as the API takes them
    assert list(scratch.iterdir()) == []
