"""The tests' own cluster does what a real one does, as far as the real kubectl can tell: writing, reading, rights."""

import copy
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_sim.cluster import Cluster
from tests.k8s.conftest import KUBECTL, Kubectl

APPLY = ("apply", "--server-side", "-f", "-")
CONTAINER: dict[str, Any] = {"name": "trainer", "image": "example.org/image:1"}
JOB: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "job", "labels": {"app": "a", "part": "b"}},
    "spec": {
        "completions": 2,
        "parallelism": 2,
        "completionMode": "Indexed",
        "backoffLimit": 9,
        "template": {
            "metadata": {"labels": {"app": "a"}},
            "spec": {"restartPolicy": "Never", "containers": [CONTAINER]},
        },
    },
}
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "pod", "labels": {"app": "a"}},
    "spec": {"restartPolicy": "Never", "containers": [CONTAINER]},
}
CLAIM: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "claim"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "5Gi"}}},
}


def changed(thing: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a.b.0.c; None: without it."""
    made = copy.deepcopy(thing)
    *parents, last = path.split(".")
    place: Any = made
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    if value is None:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return made


# ---- Writing
def test_apply_on_the_server_makes_changes_and_leaves_alone(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    kubectl(*APPLY, stdin=JOB)
    first = cluster.get("Job", "job")
    assert first["spec"]["template"]["metadata"]["labels"]["batch.kubernetes.io/job-name"] == "job"
    kubectl(*APPLY, stdin=JOB)
    assert cluster.get("Job", "job") == first, "the same again is no new version"
    kubectl(
        *APPLY, stdin=changed(changed(JOB, "spec.backoffLimit", 3), "metadata.labels.part", None)
    )
    second = cluster.get("Job", "job")
    assert second["metadata"]["labels"] == {"app": "a"}, "what the applier leaves out goes"
    assert second["spec"]["backoffLimit"] == 3 and second["metadata"]["generation"] == 2
    assert second["metadata"]["uid"] == first["metadata"]["uid"]


def test_fields_have_owners(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl(*APPLY, stdin=JOB)
    kubectl("label", "job", "job", "mine=1")
    kubectl("patch", "job", "job", "--type=merge", "-p", '{"spec": {"backoffLimit": 5}}')
    said = kubectl(*APPLY, code=1, stdin=JOB)
    assert 'conflict with "kubectl-patch" using batch/v1: .spec.backoffLimit' in said
    kubectl(*APPLY[:2], "--force-conflicts", *APPLY[2:], stdin=JOB)
    job = cluster.get("Job", "job")
    assert job["spec"]["backoffLimit"] == 9 and job["metadata"]["labels"]["mine"] == "1"


def test_apply_as_it_once_was_says_what_it_did(cluster: Cluster, kubectl: Kubectl) -> None:
    assert "job.batch/job created" in kubectl("apply", "-f", "-", stdin=JOB)
    assert "job.batch/job unchanged" in kubectl("apply", "-f", "-", stdin=JOB)
    assert "job.batch/job configured" in kubectl(
        "apply", "-f", "-", stdin=changed(JOB, "spec.parallelism", 1)
    )
    assert cluster.get("Job", "job")["spec"]["parallelism"] == 1


def test_a_dry_run_on_the_server_stores_nothing_and_finds_all_the_same(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    assert "server dry run" in kubectl(*APPLY, "--dry-run=server", stdin=JOB)
    assert not cluster.objects("Job")
    assert 'unknown field "spec.backofLimit"' in kubectl(
        *APPLY, "--dry-run=server", code=1, stdin=changed(JOB, "spec.backofLimit", 3)
    )
    kubectl(*APPLY, stdin=JOB)
    kubectl("delete", "job", "job", "--dry-run=server")
    assert len(cluster.objects("Job")) == 1


RULES = "spec.podFailurePolicy.rules"
CODES = {"containerName": "trainer", "operator": "In", "values": [64, 70]}
AT = "spec.template.spec"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("metadata.name", "A_Job", "RFC 1123"),
        ("metadata.name", "a" * 62, "invalid DNS label"),
        ("metadata.labels.app", "a b", "a valid label"),
        ("spec.completions", "2", "cannot be handled as a Job: spec.completions"),
        ("spec.completions", None, "when completion mode is Indexed"),
        ("spec.completionMode", "Indexd", 'supported values: "Indexed", "NonIndexed"'),
        ("spec.backoffLimit", -1, "greater than or equal to 0"),
        ("spec.podReplacementPolicy", "Never", 'supported values: "Failed", "TerminatingOrFailed"'),
        (f"{AT}.restartPolicy", "Always", 'valid values: "OnFailure", "Never"'),
        (RULES, [{"action": "Ignor", "onExitCodes": CODES}], 'Unsupported value: "Ignor"'),
        (
            RULES,
            [{"action": "FailIndex", "onExitCodes": CODES}],
            "requires the backoffLimitPerIndex",
        ),
        (RULES, [{"action": "FailJob"}], "one of OnExitCodes and OnPodConditions is required"),
        (
            RULES,
            [{"action": "FailJob", "onExitCodes": CODES | {"values": [0, 1]}}],
            "must not be 0 for the In operator",
        ),
        (
            RULES,
            [{"action": "FailJob", "onExitCodes": CODES | {"values": [70, 64]}}],
            "must be ordered",
        ),
        (
            RULES,
            [{"action": "FailJob", "onExitCodes": CODES | {"containerName": "main"}}],
            "one of the container",
        ),
        (
            f"{AT}.containers.0.volumeMounts",
            [{"name": "v", "mountPath": "/v"}],
            'volumeMounts[0].name: Not found: "v"',
        ),
        (
            f"{AT}.volumes",
            [{"name": "v", "emptyDir": {}}, {"name": "v", "emptyDir": {}}],
            "Duplicate value",
        ),
        (f"{AT}.volumes", [{"name": "v"}], "must specify a volume type"),
        (f"{AT}.subdomain", "a.b", "RFC 1123 label"),
        (f"{AT}.containers.0.image", None, "image: Required value"),
        (
            f"{AT}.containers.0.ports",
            [{"containerPort": 29500, "name": "a-name-of-17-chars"}],
            "at most 15",
        ),
        (
            f"{AT}.containers.0.resources",
            {"requests": {"nvidia.com/gpu": "2"}},
            "Limit must be set",
        ),
        (
            f"{AT}.containers.0.resources",
            {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "2"}},
            "must be equal to nvidia.com/gpu limit",
        ),
        (
            f"{AT}.containers.0.resources",
            {"requests": {"memory": "2Gi"}, "limits": {"memory": "2G"}},
            "less than or equal",
        ),
    ],
)
def test_what_is_wrong_with_a_job_is_refused(
    cluster: Cluster, kubectl: Kubectl, path: str, value: Any, words: str
) -> None:
    assert words in kubectl(*APPLY, code=1, stdin=changed(JOB, path, value))
    assert not cluster.objects("Job")


def test_a_failure_policy_needs_pods_that_are_not_started_again(kubectl: Kubectl) -> None:
    job = changed(JOB, RULES, [{"action": "FailJob", "onExitCodes": CODES}])
    restarts = changed(job, f"{AT}.restartPolicy", "OnFailure")
    assert 'only "Never" is supported' in kubectl(*APPLY, code=1, stdin=restarts)
    assert "supported values" in kubectl(
        *APPLY, code=1, stdin=changed(job, "spec.podReplacementPolicy", "TerminatingOrFailed")
    )
    kubectl(*APPLY, stdin=job)
    assert kubectl("get", "job", "job", "-o", "jsonpath={.spec.podReplacementPolicy}") == "Failed"


def test_what_may_not_change_is_refused_in_the_apis_words(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    kubectl(*APPLY, stdin=JOB)
    said = kubectl(
        *APPLY, code=1, stdin=changed(JOB, f"{AT}.containers.0.image", "example.org/image:2")
    )
    assert 'The Job "job" is invalid: spec.template: Invalid value:' in said and said.endswith(
        "field is immutable\n"
    )
    assert "field is immutable" in kubectl(
        *APPLY, code=1, stdin=changed(JOB, "spec.completions", 3)
    )
    kubectl(*APPLY, stdin=changed(changed(JOB, "spec.completions", 3), "spec.parallelism", 3))
    assert cluster.get("Job", "job")["spec"]["completions"] == 3, "both together may"


def test_claims_are_bound_and_may_grow_where_their_class_allows_it(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    kubectl(*APPLY, stdin=CLAIM)
    assert "Bound" in kubectl("get", "pvc", "claim") and "RWX" in kubectl("get", "pvc", "claim")
    kubectl(*APPLY, stdin=CLAIM)
    larger, smaller = (
        changed(CLAIM, "spec.resources.requests.storage", size) for size in ("6Gi", "4Gi")
    )
    assert "must support resize" in kubectl(*APPLY, code=1, stdin=larger)
    assert "less than status.capacity" in kubectl(*APPLY, code=1, stdin=smaller)
    assert "immutable after creation" in kubectl(
        *APPLY, code=1, stdin=changed(CLAIM, "spec.accessModes", ["ReadWriteOnce"])
    )
    cluster.put(cluster.get("StorageClass", "standard") | {"allowVolumeExpansion": True})
    kubectl(*APPLY, stdin=larger)
    of_no_class = changed(
        changed(CLAIM, "metadata.name", "other"), "spec.storageClassName", "nowhere"
    )
    kubectl(*APPLY, stdin=of_no_class)
    assert "Pending" in kubectl("get", "pvc", "other")


def test_secrets_come_by_every_way_that_kubectl_has(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl(
        "create", "secret", "generic", "one", "--from-env-file=/dev/stdin", stdin="KEY=a value\n"
    )
    text = kubectl(
        "create",
        "secret",
        "generic",
        "two",
        "--from-env-file=/dev/stdin",
        "--dry-run=client",
        "-o",
        "yaml",
        stdin="KEY=a value\n",
    )
    kubectl(*APPLY, stdin=text)
    kubectl(
        *APPLY,
        stdin={
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "three"},
            "stringData": {"KEY": "a value"},
        },
    )
    for name in ("one", "two", "three"):
        assert (
            kubectl("get", "secret", name, "-o", "jsonpath={.data.KEY} {.type}")
            == "YSB2YWx1ZQ== Opaque"
        )


def test_patches_of_all_kinds(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl(*APPLY, stdin=JOB)
    kubectl(
        "patch",
        "job",
        "job",
        "--type=json",
        "-p",
        '[{"op": "replace", "path": "/spec/parallelism", "value": 1}]',
    )
    kubectl("annotate", "job", "job", "a/b=c")
    kubectl("patch", "job", "job", "-p", '{"metadata": {"labels": {"part": null}}}')
    job = cluster.get("Job", "job")
    assert job["spec"]["parallelism"] == 1 and job["metadata"]["labels"] == {"app": "a"}
    assert job["metadata"]["annotations"] == {"a/b": "c"}
    assert "does not exist" in kubectl(
        "patch",
        "job",
        "job",
        "--type=json",
        "-p",
        '[{"op": "remove", "path": "/spec/nothing"}]',
        code=1,
    )


def test_an_absent_namespace_and_an_absent_object(kubectl: Kubectl) -> None:
    assert 'namespaces "nowhere" not found' in kubectl("get", "namespace", "nowhere", code=1)
    assert 'namespaces "nowhere" not found' in kubectl("-n", "nowhere", *APPLY, code=1, stdin=JOB)
    assert 'jobs.batch "job" not found' in kubectl("get", "job", "job", code=1)
    assert kubectl("get", "job", "job", "--ignore-not-found") == ""
    kubectl("create", "configmap", "settings", "--from-literal=a=b", "--dry-run=client")
    assert (
        "AlreadyExists"
        in [kubectl(*APPLY, stdin=POD), kubectl("create", "-f", "-", code=1, stdin=POD)][1]
    )


def test_pod_security_is_enforced_where_it_is_switched_on(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    cluster.store.restricted = True
    assert "violates PodSecurity" in kubectl(*APPLY, code=1, stdin=POD)
    safe = CONTAINER | {
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    }
    pod = changed(
        changed(POD, "spec.containers.0", safe),
        "spec.securityContext",
        {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    )
    kubectl(*APPLY, stdin=pod)
    assert len(cluster.objects("Pod")) == 1


# ---- Reading
def test_selectors(cluster: Cluster, kubectl: Kubectl) -> None:
    for name, labels in {"one": {"app": "a"}, "two": {"app": "b", "new": ""}, "three": {}}.items():
        cluster.put(POD | {"metadata": {"name": name, "labels": labels}})
    cluster.set_pod("two", phase="Running", node="n")

    def names(*args: str) -> list[str]:
        return sorted(kubectl("get", "pods", "-o", "name", *args).replace("pod/", "").split())

    assert names("-l", "app=a") == ["one"] and names("-l", "app!=a") == ["three", "two"]
    assert names("-l", "app in (a, b),new") == ["two"] and names("-l", "!app") == ["three"]
    assert names("-l", "app notin (b)") == ["one", "three"]
    assert names("--field-selector", "status.phase=Running,spec.nodeName=n") == ["two"]
    assert names("--field-selector", "metadata.name!=one") == ["three", "two"]
    assert "field label not supported: spec.image" in kubectl(
        "get", "pods", "--field-selector", "spec.image=x", code=1
    )


def test_nodes_may_be_listed_and_no_more(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.nodes(
        {
            "name": "n1",
            "zone": "ucsd",
            "region": "us-west",
            "product": "NVIDIA-A100-SXM4-80GB",
            "gpus": 8,
        },
        {"name": "n2", "zone": "ksu", "ready": False},
    )
    columns = ("-L", "topology.kubernetes.io/zone,nvidia.com/gpu.product,nvidia.com/gpu.count")
    rows = [line.split() for line in kubectl("get", "nodes", "--no-headers", *columns).splitlines()]
    assert [[row[0], row[1], *row[4:]] for row in rows] == [
        ["n1", "Ready", "ucsd", "NVIDIA-A100-SXM4-80GB", "8"],
        ["n2", "NotReady", "ksu"],
    ]
    assert "n2" not in kubectl("get", "nodes", "-l", "nvidia.com/gpu.count")
    for command in (
        ("get", "node", "n1"),
        ("describe", "node", "n1"),
        ("get", "nodes", "-o", "yaml"),
    ):
        assert "Forbidden" in kubectl(*command, code=1)
    cluster.nodes_list_only = False
    assert (
        kubectl("get", "node", "n1", "-o", "jsonpath={.status.allocatable.nvidia\\.com/gpu}") == "8"
    )


def test_a_watch_tells_of_what_happens(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.put(POD)
    watch = subprocess.Popen(
        [KUBECTL, "get", "pods", "-w", "--no-headers"],
        env=os.environ | cluster.env,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert watch.stdout is not None
    assert watch.stdout.readline().split()[2] == "Pending"
    cluster.set_pod("pod", phase="Running")
    assert watch.stdout.readline().split()[1:3] == ["1/1", "Running"]
    cluster.set_pod("pod", exit_code=7)
    assert watch.stdout.readline().split()[1:3] == ["0/1", "Error"]
    watch.terminate()
    watch.communicate(timeout=120)


def test_kubectl_waits_for_conditions_and_for_the_end(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.put(POD)
    later = threading.Timer(0.5, lambda: cluster.set_pod("pod", phase="Running"))
    later.start()
    kubectl("wait", "pod/pod", "--for=jsonpath={.status.phase}=Running", "--timeout=20s")
    cluster.put(JOB)
    assert "timed out" in kubectl(
        "wait", "job/job", "--for=condition=complete", "--timeout=1s", code=1
    )
    cluster.put(
        cluster.get("Job", "job")
        | {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    )
    kubectl("wait", "job/job", "--for=condition=complete", "--timeout=20s")


def test_logs(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.put(POD)
    cluster.set_pod("pod", waiting_reason="ContainerCreating")
    assert "is waiting to start: ContainerCreating" in kubectl("logs", "pod", code=1)
    cluster.set_pod("pod", phase="Running")
    cluster.logs["pod"] = "one\ntwo\nthree\n"
    assert kubectl("logs", "pod", "-c", "trainer", "--tail=2") == "two\nthree\n"
    assert "[pod/pod/trainer] three" in kubectl("logs", "-l", "app=a", "--prefix", "--tail=1")
    assert "container main is not valid" in kubectl("logs", "pod", "-c", "main", code=1)
    assert "not in this API: sinceSeconds" in kubectl("logs", "pod", "--since=5s", code=1)
    follow = subprocess.Popen(
        [KUBECTL, "logs", "-f", "pod"],
        env=os.environ | cluster.env,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert follow.stdout is not None
    patience = threading.Timer(20, follow.kill)
    patience.start()
    assert [follow.stdout.readline() for _ in range(3)] == ["one\n", "two\n", "three\n"], (
        "it is at the end"
    )
    for line in ("four\n", "five\n"):
        cluster.logs["pod"] += line
        assert follow.stdout.readline() == line, "while the pod runs"
    cluster.set_pod("pod", exit_code=0)
    assert follow.communicate(timeout=120)[0] == "" and follow.returncode == 0
    patience.cancel()


def test_exec_carries_bytes_both_ways_and_the_exit_code(cluster: Cluster) -> None:
    cluster.put(POD)
    cluster.set_pod("pod", phase="Running")
    every_byte, asked = bytes(range(256)) * 300, []

    def run(
        pod: str, container: str, argv: list[str], stdin: bytes = b""
    ) -> tuple[int, bytes, bytes]:
        asked.append((pod, container, argv))
        return 7, stdin, b"a complaint\n"

    cluster.exec = run
    done = subprocess.run(
        [KUBECTL, "exec", "-i", "pod", "--", "cat", "a file"],
        env=os.environ | cluster.env,
        input=every_byte,
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (7, every_byte) and b"a complaint\n" in done.stderr
    assert asked == [("pod", "trainer", ["cat", "a file"])]


def test_exec_needs_a_pod_that_runs(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.put(POD)
    assert 'container not found ("trainer")' in kubectl("exec", "pod", "--", "true", code=1)
    cluster.set_pod("pod", exit_code=0)
    assert "cannot exec" in kubectl("exec", "pod", "--", "true", code=1)


# ---- Deleting
@pytest.mark.parametrize(("how", "left"), [("background", 0), ("foreground", 0), ("orphan", 2)])
def test_the_pods_of_a_job_go_with_it(
    cluster: Cluster, kubectl: Kubectl, how: str, left: int
) -> None:
    cluster.start_kubelet(processes=False)
    kubectl(*APPLY, stdin=JOB)
    for _ in range(100):
        if len(cluster.objects("Pod")) == 2:
            break
        time.sleep(0.05)
    kubectl("delete", "job", "job", f"--cascade={how}")
    assert not cluster.objects("Job") and len(cluster.objects("Pod")) == left
    assert 'jobs.batch "job" not found' in kubectl("delete", "job", "job", code=1)


def test_many_are_deleted_by_label_and_a_job_can_be_made_anew(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    for name in ("one", "two"):
        cluster.put(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name, "labels": {"of": name}},
            }
        )
    kubectl("delete", "configmap", "-l", "of=one")
    assert [thing["metadata"]["name"] for thing in cluster.objects("cm")] == ["two"]
    kubectl(*APPLY, stdin=JOB)
    first = cluster.get("Job", "job")["metadata"]["uid"]
    kubectl("replace", "--force", "-f", "-", stdin=JOB)
    assert cluster.get("Job", "job")["metadata"]["uid"] != first


# ---- Rights
def test_rights(cluster: Cluster, kubectl: Kubectl) -> None:
    cluster.put(POD)
    cluster.set_pod("pod", phase="Running")
    assert kubectl("auth", "can-i", "create", "jobs") == "yes\n"
    for verb, resource in (
        ("create", "jobs"),
        ("create", "pods/exec"),
        ("get", "pods/log"),
        ("*", "secrets"),
    ):
        cluster.forbid(verb, resource)
        name, _, part = resource.partition("/")
        flags = (f"--subresource={part}",) if part else ()
        assert kubectl("auth", "can-i", verb.replace("*", "list"), name, *flags, code=1) == "no\n"
    assert kubectl("auth", "can-i", "patch", "jobs") == "yes\n"
    assert (
        'User "lab-user" cannot create resource "jobs" in API group "batch" in the namespace "lab"'
        in kubectl(*APPLY, code=1, stdin=JOB)
    ), "an apply of what is not there is a creation"
    assert 'cannot create resource "pods/exec"' in kubectl("exec", "pod", "--", "true", code=1)
    assert "Forbidden" in kubectl("logs", "pod", code=1) and "Forbidden" in kubectl(
        "get", "secrets", code=1
    )
    assert "jobs.batch" in kubectl("auth", "can-i", "--list")


def test_what_was_asked_is_kept_for_the_test(
    cluster: Cluster, kubectl: Kubectl, tmp_path: Path
) -> None:
    kubectl("-n", "lab", *APPLY, "--field-manager=somebody", stdin=JOB)
    asked = cluster.requests[-1]
    assert (asked.method, asked.path) == ("PATCH", "/apis/batch/v1/namespaces/lab/jobs/job")
    assert (
        asked.query["fieldManager"] == "somebody"
        and json.loads(asked.body)["metadata"]["name"] == "job"
    )
