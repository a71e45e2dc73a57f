"""The tests' Job controller: which pods a Job gets, which of them are replaced, and how it ends."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from settings import ROOT
from tests.cluster_sim.cluster import Cluster
from tests.cluster_sim.controller import judge, ranges
from tests.k8s.conftest import Kubectl
from tests.k8s.test_cluster import JOB, changed

FAIL = {
    "action": "FailJob",
    "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [64, 70, 78]},
}
IGNORE = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
POLICY = changed(JOB, "spec.podFailurePolicy.rules", [FAIL, IGNORE])
INDEX = "batch.kubernetes.io/job-completion-index"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


@pytest.fixture
def jobs(cluster: Cluster) -> Cluster:
    cluster.start_kubelet(processes=False)
    return cluster


def pods(cluster: Cluster, *phases: str) -> dict[int, str]:
    """The newest pod of each index, of these phases only."""
    return {
        int(pod["metadata"]["annotations"][INDEX]): pod["metadata"]["name"]
        for pod in sorted(
            cluster.objects("Pod"), key=lambda pod: int(pod["metadata"]["resourceVersion"])
        )
        if pod["status"]["phase"] in (phases or ("Pending", "Running"))
    }


def ends(cluster: Cluster, type_: str, job: str = "job") -> dict[str, Any]:
    """Wait for a condition of the Job; it is returned."""

    def found() -> list[dict[str, Any]]:
        return [
            c
            for c in cluster.get("Job", job).get("status", {}).get("conditions", [])
            if c["type"] == type_
        ]

    until(found)
    return found()[0]


def test_pods_have_an_index_a_host_name_and_an_owner(jobs: Cluster, kubectl: Kubectl) -> None:
    jobs.put(changed(JOB, "spec.template.spec.subdomain", "job"))
    until(lambda: len(pods(jobs)) == 2)
    for index, name in pods(jobs).items():
        pod = jobs.get("Pod", name)
        assert name.startswith(f"job-{index}-") and len(name) == len("job-0-") + 5
        assert pod["spec"]["hostname"] == f"job-{index}" and pod["spec"]["subdomain"] == "job"
        assert {
            "app": "a",
            "job-name": "job",
            "batch.kubernetes.io/job-name": "job",
            INDEX: str(index),
        }.items() <= pod["metadata"]["labels"].items()
        assert (
            pod["metadata"]["ownerReferences"][0]["uid"]
            == jobs.get("Job", "job")["metadata"]["uid"]
        )
        assert [v["name"] for v in pod["spec"]["containers"][0]["env"]] == ["JOB_COMPLETION_INDEX"]
    assert "Created pod: job-0-" in kubectl("describe", "job", "job")


def test_a_job_is_complete_when_each_index_has_succeeded(jobs: Cluster) -> None:
    jobs.put(JOB)
    until(lambda: len(pods(jobs)) == 2)
    for name in pods(jobs).values():
        jobs.set_pod(name, phase="Running")
    until(lambda: jobs.get("Job", "job")["status"].get("ready") == 2)
    first, second = pods(jobs)[0], pods(jobs)[1]
    jobs.set_pod(first, exit_code=0)
    until(lambda: jobs.get("Job", "job")["status"]["completedIndexes"] == "0")
    assert len(jobs.objects("Pod")) == 2, "an index that is done gets no other pod"
    jobs.set_pod(second, exit_code=0)
    assert ends(jobs, "Complete")["reason"] == "CompletionsReached"
    status = jobs.get("Job", "job")["status"]
    assert (status["succeeded"], status["failed"], status["active"]) == (
        2,
        0,
        0,
    ) and "completionTime" in status


def test_a_pod_that_failed_is_replaced_and_the_others_stay(jobs: Cluster) -> None:
    jobs.put(POLICY)
    until(lambda: len(pods(jobs)) == 2)
    first, second = pods(jobs)[0], pods(jobs)[1]
    jobs.set_pod(second, exit_code=137)
    until(lambda: pods(jobs).get(1) not in (None, second))
    assert pods(jobs)[0] == first and jobs.get("Job", "job")["status"]["failed"] == 1
    assert second in pods(jobs, "Failed").values(), "what failed can still be looked at"


def test_failures_follow_each_other_more_and_more_slowly(jobs: Cluster) -> None:
    """10, 20, 40 ... seconds in a cluster; here a hundredth."""
    jobs.put(changed(changed(JOB, "spec.completions", 1), "spec.parallelism", 1))
    waits = []
    for _ in range(4):
        until(lambda: pods(jobs))
        name = pods(jobs)[0]
        start = time.monotonic()  # the controller counts from when it sees the end, which is later
        jobs.set_pod(name, exit_code=1)
        until(lambda: pods(jobs))
        waits.append(time.monotonic() - start)
    assert all(wait >= 0.1 * 2**number for number, wait in enumerate(waits)), waits


@pytest.mark.parametrize("code", [64, 70, 78])
def test_an_exit_code_of_the_policy_fails_the_job_at_once(jobs: Cluster, code: int) -> None:
    jobs.put(POLICY)
    until(lambda: len(pods(jobs)) == 2)
    first, second = pods(jobs)[0], pods(jobs)[1]
    jobs.set_pod(second, phase="Running")
    jobs.set_pod(first, exit_code=code)
    failed = ends(jobs, "Failed")
    assert failed["reason"] == "PodFailurePolicy" and failed["message"] == (
        f"Container trainer for pod lab/{first} failed with exit code {code} matching FailJob rule at index 0"
    )
    assert [pod["metadata"]["name"] for pod in jobs.objects("Pod")] == [first], (
        "the other was taken away"
    )
    assert ends(jobs, "FailureTarget")["message"] == failed["message"]


def test_a_disruption_does_not_count(jobs: Cluster) -> None:
    jobs.put(changed(POLICY, "spec.backoffLimit", 0))
    until(lambda: len(pods(jobs)) == 2)
    for _ in range(2):
        name = pods(jobs)[1]
        jobs.set_pod(name, phase="Running")
        pod = jobs.get("Pod", name)
        pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
        jobs.put(pod)
        jobs.set_pod(name, exit_code=143)
        until(lambda gone=name: pods(jobs).get(1) not in (None, gone))  # type: ignore[misc]
    assert jobs.get("Job", "job")["status"]["failed"] == 0
    jobs.set_pod(pods(jobs)[1], exit_code=143)
    assert ends(jobs, "Failed")["reason"] == "BackoffLimitExceeded", "without the condition it does"


def test_a_pod_that_was_deleted_is_replaced(jobs: Cluster, kubectl: Kubectl) -> None:
    jobs.put(JOB)
    until(lambda: len(pods(jobs)) == 2)
    name = pods(jobs)[0]
    kubectl("delete", "pod", name)
    until(lambda: pods(jobs).get(0) not in (None, name))


def test_a_job_without_indexes_and_one_with_a_deadline(jobs: Cluster) -> None:
    job = changed(
        changed(changed(JOB, "spec.completionMode", None), "spec.completions", 1),
        "spec.parallelism",
        1,
    )
    jobs.put(job)
    until(lambda: jobs.objects("Pod"))
    pod = jobs.objects("Pod")[0]
    assert pod["metadata"]["name"].startswith("job-") and INDEX not in pod["metadata"]["labels"]
    jobs.set_pod(pod["metadata"]["name"], exit_code=0)
    ends(jobs, "Complete")
    jobs.put(changed(changed(job, "metadata.name", "late"), "spec.activeDeadlineSeconds", 1))
    assert ends(jobs, "Failed", "late")["reason"] == "DeadlineExceeded"


def test_pods_that_are_refused_are_told_of(jobs: Cluster, kubectl: Kubectl) -> None:
    jobs.store.restricted = True
    jobs.put(JOB)
    until(lambda: jobs.objects("Event"))
    assert "violates PodSecurity" in kubectl("get", "events") and not jobs.objects("Pod")


@pytest.mark.parametrize("code", [69, 71])
def test_a_bad_machine_costs_the_job_nothing(jobs: Cluster, code: int) -> None:
    job = yaml.safe_load((ROOT / "k8s/manifests/base/job.yaml").read_text())
    policy = job["spec"]["podFailurePolicy"]["rules"]
    limited = changed(JOB, "spec.podFailurePolicy.rules", policy)
    jobs.put(changed(limited, "spec.backoffLimit", 0))
    until(lambda: len(pods(jobs)) == 2)
    bad, healthy = pods(jobs)[0], pods(jobs)[1]
    for _ in range(2):
        jobs.set_pod(bad, exit_code=code)
        until(lambda: 0 in pods(jobs))
        bad = pods(jobs)[0]
    assert pods(jobs)[1] == healthy
    assert jobs.get("Job", "job")["status"]["failed"] == 0


def test_rules_are_looked_at_in_order() -> None:
    pod = {
        "metadata": {"namespace": "lab", "name": "p"},
        "status": {
            "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 70}}}],
            "conditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    }
    assert judge({"rules": [FAIL, IGNORE]}, pod)[0] == "FailJob"
    assert judge({"rules": [IGNORE, FAIL]}, pod)[0] == "Ignore"
    other = {
        "action": "Ignore",
        "onExitCodes": {"containerName": "other", "operator": "In", "values": [70]},
    }
    outside = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [1, 2]}}
    assert judge({"rules": [other]}, pod)[0] == "Count"
    assert judge({"rules": [other, outside]}, pod)[0] == "FailJob"


def test_indexes_are_written_as_ranges() -> None:
    assert ranges(set()) == "" and ranges({3}) == "3" and ranges({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"
