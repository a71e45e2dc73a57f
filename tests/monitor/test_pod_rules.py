"""monitor/objects.py, pod_waits.py and pod_rules.py: objects as kubectl prints them -> what is wrong, in sentences.

Messages are as the scheduler, the job controller, the kubelet and containerd write them.
"""

import dataclasses
import time
from typing import Any

import pytest

from monitor.facts import Cluster, Fault, Seen
from monitor.objects import cluster_of
from monitor.rules.pod_rules import pod_faults
from monitor.rules.pod_waits import doing
from settings.config import Config

NOW = float(int(time.time()))  # k8s/words.trouble has its own clock
JOB, IMAGE = "a-job", "registry.example.org/lab/image:1"
CONFIG = Config()  # of somebody who gives RUN_NAME alone: what was asked for stands in the pod
FULL = (
    "0/12 nodes are available: 3 Insufficient nvidia.com/gpu, 4 node(s) didn't match Pod's node affinity/selector, "
    "5 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }. preemption: 0/12 nodes are "
    "available: 3 No preemption victims found for incoming pod."
)
NONE_SUCH = (
    "0/12 nodes are available: 10 node(s) didn't match Pod's node affinity/selector, 2 node(s) had "
    "untolerated taint {nautilus.io/hardware: large-gpu}. preemption: 0/12 nodes are available: 12 Preemption "
    "is not helpful for scheduling."
)
TAINTED = "0/2 nodes are available: 2 node(s) had untolerated taint {nvidia.com/gpu: true}."
UNBOUND = "0/12 nodes are available: pod has unbound immediate PersistentVolumeClaims."
NO_CLAIM = '0/12 nodes are available: persistentvolumeclaim "pure-transformer" not found.'
QUOTA = (
    'Error creating: pods "a-job-2-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=2, '
    "used: requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=4"
)
PULL = f'Failed to pull image "{IMAGE}": '
RESOLVE = f'failed to pull and unpack image "{IMAGE}": failed to resolve reference "{IMAGE}": '
MULTI = 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) a-job-0-aaaaa'


def stamp(ago_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - ago_s))


def a_job(pods: int = 4, **status: Any) -> dict[str, Any]:
    return {
        "kind": "Job",
        "metadata": {"name": JOB, "uid": "j", "creationTimestamp": stamp(9000)},
        "spec": {"completions": pods, "backoffLimit": 25},
        "status": status,
    }


def a_pod(
    index: int,
    ago_s: float = 900,
    suffix: str = "aaaaa",
    node: str = "gpu-1",
    phase: str = "Pending",
    state: dict[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A pod that was made so long ago; with a node it was put there 10 seconds later."""
    name = f"{JOB}-{index}-{suffix}"
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(ago_s - 10)}
    found = {"phase": phase, "conditions": [scheduled] if node else [], **status}
    if state:
        found["containerStatuses"] = [{"name": "trainer", "restartCount": 0, "state": state}]
    labels = {
        "batch.kubernetes.io/job-name": JOB,
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": stamp(ago_s),
            "labels": labels,
        },
        "spec": a_spec(node),
        "status": found,
    }


def a_spec(node: str = "", resource: str = "nvidia.com/gpu") -> dict[str, Any]:
    """As k8s/manifests/base has it, of the fields that somebody reads here."""
    limits = {"cpu": "16", "memory": "96Gi", "ephemeral-storage": "50Gi", resource: "2"}
    return {
        "nodeName": node,
        "containers": [{"name": "trainer", "image": IMAGE, "resources": {"limits": limits}}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {
                                    "key": "nvidia.com/gpu.product",
                                    "operator": "In",
                                    "values": ["NVIDIA-A100-SXM4-80GB"],
                                }
                            ]
                        }
                    ]
                }
            }
        },
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": "pure-transformer"}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def homeless(index: int, message: str, ago_s: float = 900) -> dict[str, Any]:
    """A pod that the scheduler finds no node for."""
    pod = a_pod(index, ago_s, node="")
    pod["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    ]
    return pod


def running(index: int, ago_s: float = 900, **how: Any) -> dict[str, Any]:
    return a_pod(
        index, ago_s, phase="Running", state={"running": {"startedAt": stamp(ago_s - 60)}}, **how
    )


def ended(
    index: int,
    code: int,
    ago_s: float = 100,
    reason: str = "Error",
    message: str = "",
    made_ago_s: float = 900,
    **how: Any,
) -> dict[str, Any]:
    return a_pod(
        index,
        made_ago_s,
        phase="Failed",
        state={
            "terminated": {
                "exitCode": code,
                "reason": reason,
                "message": message,
                "finishedAt": stamp(ago_s),
            }
        },
        **how,
    )


def making(
    index: int, reason: str = "ContainerCreating", message: str = "", **how: Any
) -> dict[str, Any]:
    return a_pod(index, state={"waiting": {"reason": reason, "message": message}}, **how)


def an_event(
    about: dict[str, Any], reason: str, message: str, ago_s: float = 30, uid: str = ""
) -> dict[str, Any]:
    meta = about["metadata"]
    return {
        "kind": "Event",
        "metadata": {"name": f"{meta['name']}.{reason}"},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "count": 1,
        "lastTimestamp": stamp(ago_s),
        "involvedObject": {"kind": about["kind"], "name": meta["name"], "uid": uid or meta["uid"]},
    }


def seen(
    job: dict[str, Any] | None,
    pods: list[dict[str, Any]],
    *events: dict[str, Any],
    run: str = "a-run",
) -> Cluster:
    return cluster_of("namespace lab", JOB, job, pods, events, {"gpu-1": "ucsd"}, run, NOW)


def faults(cluster: Cluster) -> list[Fault]:
    return pod_faults(Seen(NOW, "a-run", "xlarge", cluster=cluster))


@pytest.mark.parametrize("words", [[], ["finetune"]])
def test_what_pods_do_is_told_by_their_command(words: list[str]) -> None:
    job = a_job()
    assert not seen(job, []).tunes and not seen(None, []).tunes
    job["spec"]["template"] = {
        "spec": {
            "containers": [{"command": ["tini", "--", "python", "-m", "scripts.train", *words]}]
        }
    }
    assert seen(job, []).tunes == bool(words)


def one(cluster: Cluster) -> Fault:
    found = faults(cluster)
    assert len(found) == 1, found
    return found[0]


# ---- Nothing is wrong


def test_a_run_whose_pods_all_run_and_one_of_this_machine_have_no_fault() -> None:
    cluster = seen(a_job(2), [running(0), running(1)])
    assert faults(cluster) == []
    assert [(pod.index, pod.phase, pod.node, pod.site, pod.restarts) for pod in cluster.pods] == [
        (0, "Running", "gpu-1", "ucsd", 0),
        (1, "Running", "gpu-1", "ucsd", 0),
    ]
    assert cluster.pods[0].created == NOW - 900 and cluster.pods[0].scheduled == NOW - 890
    assert pod_faults(Seen(NOW, "a-run", "xlarge")) == []


def test_a_job_that_is_done_or_being_stopped_has_none_either() -> None:
    done = a_job(1, conditions=[{"type": "Complete", "status": "True"}])
    assert (
        faults(seen(done, [a_pod(0, phase="Succeeded", state={"terminated": {"exitCode": 0}})]))
        == []
    )
    leaving = a_job(1)
    leaving["metadata"]["deletionTimestamp"] = stamp(5)
    assert faults(seen(leaving, [ended(0, 75)])) == []


# ---- No node


@pytest.mark.parametrize(
    ("message", "name", "words", "following", "failing"),
    [
        (
            FULL,
            "no-free-gpu",
            "none of 3 nodes that would do has 2 nvidia.com/gpu free, for 15m",
            "make sites",
            False,
        ),
        (
            NONE_SUCH,
            "no-such-gpu",
            "is what is asked for, NVIDIA-A100-SXM4-80GB (0/12",
            "TOLERATIONS=nautilus.io/hardware=large-gpu",
            True,
        ),
        (
            TAINTED,
            "taints",
            "do not tolerate their taints",
            "TOLERATIONS=nvidia.com/gpu=true with make restart",
            True,
        ),
        (
            UNBOUND,
            "volume",
            "claim pure-transformer has no storage yet",
            "kubectl describe pvc pure-transformer",
            False,
        ),
        (
            NO_CLAIM,
            "volume",
            "claim pure-transformer is not there",
            "make restart VOLUME=pure-transformer makes it",
            True,
        ),
        (
            "0/2 nodes are available: 2 node(s) had volume node affinity conflict.",
            "volume",
            "cannot reach it",
            "SITE",
            True,
        ),
        (
            "0/9 nodes are available: 9 Insufficient memory.",
            "no-room",
            "lack memory",
            "POD_MEMORY_GB",
            False,
        ),
        ("", "pending", "no reason yet", "make sites", False),
    ],
)
def test_a_pod_without_a_node_says_why(
    message: str, name: str, words: str, following: str, failing: bool
) -> None:
    fault = one(seen(a_job(2), [running(0), homeless(1, message)]))
    assert (fault.name, fault.about, fault.failing) == (name, "", failing)
    assert fault.text.startswith("pod 1: ") and words in fault.text and following in fault.next


def test_waiting_for_free_gpus_is_a_fault_after_pending_minutes_only() -> None:
    pods = [homeless(0, FULL, 599), homeless(1, FULL, 601)]
    assert one(seen(a_job(2), pods)).text.startswith("pod 1: no room")
    assert doing(seen(a_job(2), pods).pods[0], NOW).endswith("nvidia.com/gpu free, for 10m")
    assert (
        faults(seen(a_job(1), [homeless(0, NONE_SUCH, 30)])) == []
    )  # nodes that are made on demand need a moment


def test_a_gpu_of_another_name_is_known_by_the_pod() -> None:
    message = (
        "0/3 nodes are available: 1 Insufficient nvidia.com/a100, 2 Insufficient nvidia.com/gpu."
    )
    pod = homeless(0, message) | {"spec": a_spec(resource="nvidia.com/a100")}
    assert (
        "the one node that would do has not 2 nvidia.com/a100 free"
        in one(seen(a_job(1), [pod])).text
    )


def test_pods_that_wait_for_the_same_are_one_fault() -> None:
    fault = one(
        seen(a_job(4), [running(0), homeless(1, FULL), homeless(2, FULL), homeless(3, FULL)])
    )
    assert fault.text.startswith("pods 1, 2 and 3: no room") and fault.key == ("no-free-gpu", "")


# ---- Not made


def test_a_quota_that_is_used_up_is_said_with_its_numbers() -> None:
    job = a_job(4)
    pods = [running(0), running(1)]
    fault = one(seen(job, pods, an_event(job, "FailedCreate", QUOTA)))
    assert fault.name == "quota" and "2 of 4 pods may not be made" in fault.text
    assert "kubectl describe quota" in fault.next
    assert "requested: requests.nvidia.com/gpu=2, used: requests.nvidia.com/gpu=4" in fault.text


def test_a_quota_of_the_past_or_of_an_earlier_job_is_not_said() -> None:
    job = a_job(2)
    assert (
        seen(job, [running(0), running(1)], an_event(job, "FailedCreate", QUOTA)).quota == ""
    )  # none is missing
    assert (
        seen(job, [running(0, 60)], an_event(job, "FailedCreate", QUOTA, 600)).quota == ""
    )  # one was made since
    assert (
        seen(job, [running(0)], an_event(job, "FailedCreate", QUOTA, uid="of-the-job-before")).quota
        == ""
    )


def test_pods_that_a_policy_forbids_are_told_apart_from_a_quota() -> None:
    job = a_job(1)
    message = (
        'Error creating: pods "a-job-0-x" is forbidden: violates PodSecurity "restricted:latest"'
    )
    fault = one(seen(job, [], an_event(job, "FailedCreate", message)))
    assert fault.name == "not-made" and fault.failing and "violates PodSecurity" in fault.text


# ---- Image


@pytest.mark.parametrize(
    ("said", "words", "following", "failing"),
    [
        (
            RESOLVE + "unexpected status from HEAD request: 401 Unauthorized",
            "without a login",
            "IMAGE_PULL_SECRET",
            True,
        ),
        (
            RESOLVE + "pull access denied, repository does not exist or may require authorization",
            "or has none of that name",
            "make push",
            True,
        ),
        (
            f"rpc error: code = NotFound desc = {RESOLVE}{IMAGE}: not found",
            "is not in the registry",
            f"make push IMAGE={IMAGE}",
            True,
        ),
        (
            RESOLVE
            + "429 Too Many Requests - toomanyrequests: You have reached your unauthenticated pull rate limit",
            "too many were fetched",
            "IMAGE_PULL_SECRET=NAME",
            False,
        ),
        (
            RESOLVE + "dial tcp: lookup registry.example.org: no such host",
            "node gpu-1 does not reach the registry",
            "make restart",
            False,
        ),
        (
            "no match for platform in manifest: not found",
            "not made for the node's processor",
            "make image",
            True,
        ),
        (
            "write /var/lib/x: no space left on device",
            "the disk of node gpu-1 is full",
            "make restart",
            False,
        ),
    ],
)
def test_why_an_image_cannot_be_fetched_is_told_apart(
    said: str, words: str, following: str, failing: bool
) -> None:
    at_once = making(0, "ErrImagePull", said)
    later = making(0, "ImagePullBackOff", f'Back-off pulling image "{IMAGE}"')
    for pod, events in (
        (at_once, []),
        (
            later,
            [
                an_event(later, "Failed", PULL + said, 60),
                an_event(later, "BackOff", "Back-off pulling image"),
            ],
        ),
    ):
        fault = one(seen(a_job(1), [pod], *events))
        assert (fault.name, fault.failing) == ("image-pull", failing)
        assert words in fault.text and following in fault.next


def test_a_large_image_is_no_fault_before_pull_minutes_and_then_is() -> None:
    pod = making(0)
    early, late = (
        seen(a_job(1), [pod], an_event(pod, "Pulling", f'Pulling image "{IMAGE}"', ago))
        for ago in (600, 1201)
    )
    assert faults(early) == []
    assert (
        doing(early.pods[0], NOW)
        == f"fetches its image {IMAGE}, for 10m (a large image takes minutes; it is not stuck)"
    )
    assert (
        one(late).name == "pulling"
        and one(late).text.endswith(", for 20m")
        and not one(late).failing
    )


# ---- Volume, container


@pytest.mark.parametrize(
    ("reason", "message", "name", "words", "following"),
    [
        ("FailedAttachVolume", MULTI, "volume", "held by another node", "ReadWriteMany"),
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "pvc-1" : rpc error: code = DeadlineExceeded',
            "volume",
            "cannot be mounted (MountVolume.SetUp failed",
            "kubectl describe pvc",
        ),
        (
            "FailedMount",
            'MountVolume.SetUp failed for volume "x" : configmap "a-job-env" not found',
            "not-started",
            "configmap a-job-env is not there",
            "make restart",
        ),
    ],
)
def test_a_volume_that_is_not_mounted_is_said(
    reason: str, message: str, name: str, words: str, following: str
) -> None:
    pod = making(0)
    fault = one(
        seen(
            a_job(1),
            [pod],
            an_event(pod, "Scheduled", "Successfully assigned", 800),
            an_event(pod, reason, message),
        )
    )
    assert fault.name == name and words in fault.text and following in fault.next
    young = a_pod(0, 50, state={"waiting": {"reason": "ContainerCreating"}})
    assert (
        faults(seen(a_job(1), [young], an_event(young, reason, message))) == []
    )  # it is often mounted soon after


def test_a_login_that_does_not_help_is_named() -> None:
    pod = making(0, "ErrImagePull", RESOLVE + "401 Unauthorized")
    pod["spec"]["imagePullSecrets"] = [{"name": "a-login"}]
    assert "with the login of Secret a-login" in one(seen(a_job(1), [pod])).text
    missing = an_event(
        pod,
        "FailedToRetrieveImagePullSecret",
        "Unable to retrieve some image pull secrets (a-login)",
    )
    assert "Secret a-login is not in the namespace" in one(seen(a_job(1), [pod], missing)).text


def test_a_container_that_cannot_be_made_is_said_at_once() -> None:
    fault = one(
        seen(a_job(1), [making(0, "CreateContainerConfigError", 'configmap "x" not found')])
    )
    assert (
        fault.name == "not-started"
        and 'configmap "x" not found' in fault.text
        and "make restart" in fault.next
    )


def test_without_events_a_pod_may_take_as_long_as_an_image_does() -> None:
    young, old = (seen(a_job(1), [making(0, ago_s=ago)]) for ago in (1100, 1300))
    assert faults(young) == [] and one(old).name == "pending"
    assert "its image is being fetched, or its volume mounted, for 18m" in doing(young.pods[0], NOW)


# ---- Pods that ended


def test_a_pod_that_was_killed_for_memory_is_told_while_its_successor_runs() -> None:
    pods = [ended(1, 137, 240, "OOMKilled"), running(1, 200, suffix="bbbbb")]
    fault = one(seen(a_job(1), pods))
    assert (
        fault.text
        == "pod 1 was killed 4m ago: it used more memory than POD_MEMORY_GB allows (96Gi)"
    )
    assert (
        fault.name == "out-of-memory" and fault.about == "pod 1" and "POD_MEMORY_GB" in fault.next
    )
    assert seen(a_job(1), pods).pods[0].restarts == 1
    assert (
        faults(seen(a_job(1), [ended(1, 137, 3700, "OOMKilled"), running(1, 200, suffix="bbbbb")]))
        == []
    )


def test_pods_of_an_index_that_end_again_and_again_are_a_loop() -> None:
    said = "launch: exit code 1: the trainer failed"
    gone = [
        ended(0, 1, 100, message=said, made_ago_s=1500 - 400 * n, suffix=f"aaaa{n}")
        for n in range(3)
    ]
    fault = one(seen(a_job(1), [*gone, running(0, 60, suffix="bbbbb")]))
    assert (
        fault.name == "crash-loop"
        and fault.failing
        and fault.next.startswith("make logs NODE_RANK=0 ONLY=errors")
    )
    assert "4 pods in 30 minutes; the last one: exit code 1 (the trainer failed)" in fault.text
    spread = [ended(0, 1, 100, made_ago_s=9000 - 2000 * n, suffix=f"aaaa{n}") for n in range(3)]
    assert faults(seen(a_job(1), [*spread, running(0, 60, suffix="bbbbb")])) == []


def test_a_pod_that_has_just_ended_is_told_with_its_last_words() -> None:
    fault = one(
        seen(
            a_job(2), [running(0), ended(1, 69, message="launch: exit code 69: node 0 is missing")]
        )
    )
    assert (fault.name, fault.about, fault.failing) == ("pod-failed", "pod 1", False)
    assert (
        "exit code 69 (other nodes of the run did not join in START_TIMEOUT_S): node 0 is missing; the Job makes another"
        in fault.text
    )


@pytest.mark.parametrize(
    ("code", "following"), [(64, "mend the setting"), (78, "mend the data or the volume")]
)
def test_a_job_that_a_code_has_ended_is_failing(code: int, following: str) -> None:
    job = a_job(
        1,
        conditions=[
            {
                "type": "Failed",
                "status": "True",
                "reason": "PodFailurePolicy",
                "message": f"Container trainer for pod lab/a-job-0-aaaaa failed with exit code {code} matching FailJob rule",
            }
        ],
    )
    fault = one(seen(job, [ended(0, code, message="BATCH_TOKENS=7: the last line")]))
    assert fault.name == "job-failed" and fault.failing and fault.next.startswith(following)
    assert f"exit code {code}" in fault.text and fault.text.endswith(
        ": BATCH_TOKENS=7: the last line"
    )


@pytest.mark.parametrize(
    ("reason", "message", "name", "following"),
    [
        (
            "PreemptionByScheduler",
            "preempting to accommodate a higher priority pod",
            "preempted",
            "PRIORITY_CLASS",
        ),
        ("EvictionByEvictionAPI", "Eviction API: evicting", "evicted", "nothing to do"),
        (
            "TerminationByKubelet",
            "The node was low on resource: ephemeral-storage.",
            "evicted",
            "a pod's disk has a fixed size (50Gi)",
        ),
        ("DeletionByPodGC", "PodGC: node no longer exists", "node-lost", "make status"),
    ],
)
def test_a_pod_that_was_taken_away_is_no_crash(
    reason: str, message: str, name: str, following: str
) -> None:
    pod = ended(1, 143)
    pod["status"]["conditions"].append(
        {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    )
    fault = one(seen(a_job(2), [running(0), pod]))
    assert (fault.name, fault.about) == (name, "pod 1") and following in fault.next


def test_a_pod_whose_node_does_not_answer_is_told_with_the_command_that_frees_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        time, "time", lambda: NOW
    )  # a minute after NOW was read it would be another age
    pod = running(1)
    pod["metadata"] |= {"deletionTimestamp": stamp(600), "namespace": "lab"}
    fault = one(seen(a_job(2), [running(0), pod]))
    assert (
        fault.name == "node-lost" and "does not answer (it should have left 10m ago)" in fault.text
    )
    assert fault.next == "kubectl delete pod a-job-1-aaaaa --grace-period=0 --force -n lab"


# ---- The Job, and Kubernetes


def test_a_job_of_another_run_is_the_only_fault() -> None:
    fault = one(seen(a_job(1), [homeless(0, NO_CLAIM)], run="another"))
    assert fault.name == "other-run" and "make monitor RUN_NAME=another" in fault.next


def test_a_job_that_is_not_there_and_one_that_is_suspended_are_said() -> None:
    assert one(seen(None, [])).name == "no-job" and "make train-8xa100" in one(seen(None, [])).next
    job = a_job(1)
    job["spec"]["suspend"] = True
    assert one(seen(job, [])).name == "suspended"


def test_a_cluster_that_does_not_answer_is_said_and_its_pods_are_as_old_as_its_last_answer() -> (
    None
):
    cluster = dataclasses.replace(
        seen(a_job(1), [homeless(0, FULL, 1000)]),
        asked=NOW - 600,
        problem="the cluster does not answer; mend the connection",
    )
    fault = one(cluster)  # 400 seconds old when it was last seen: PENDING_MINUTES are not over
    assert (fault.name, fault.next) == ("cluster", "mend the connection")
    assert fault.text == "the cluster does not answer (what is known of the pods is 10m old)"
