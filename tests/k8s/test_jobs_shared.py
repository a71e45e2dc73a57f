"""A namespace that others use too, nodes that die, and the Job of make data: what the targets do then."""

import re
from pathlib import Path

import pytest

from k8s.cluster import words
from k8s.cluster.kubectl import Done
from k8s.cluster.target import Target
from tests.cluster_sim.cluster import Cluster
from tests.k8s.running_job import (
    JOB,
    RUN,
    ReaderRuns,
    put_data_job,
    put_job,
    put_pod,
    put_volume,
    sender,
    stamp,
    write_run,
)

DATA = f"{JOB}-data"


@pytest.fixture
def user(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Somebody at a terminal who sent the run `a-run` to the cluster; called with a command, returns how it ended."""
    return sender(cluster, tmp_path, monkeypatch, capsys)


def names(cluster: Cluster, kind: str) -> set[str]:
    return {thing["metadata"]["name"] for thing in cluster.objects(kind)}


# ---- The Job of somebody else


def test_stop_and_restart_leave_the_job_of_another_run_alone(user, cluster: Cluster) -> None:
    put_job(cluster, pods=1, run="theirs")
    pod = put_pod(cluster, 0, phase="Running", node="a")
    code, out, err = user("stop")
    assert code == 64 and out == "" and err.count("\n") == 1
    assert f"Job {JOB} in namespace lab is that of run theirs, and this asks for {RUN}" in err
    assert "make stop RUN_NAME=theirs" in err and "JOB_NAME" in err
    code, _, err = user("restart", PRESET="tiny", DEVICE="cpu", NODES="1", GPUS_PER_NODE="1")
    assert code == 64 and "at work on run theirs" in err and "make stop RUN_NAME=theirs" in err
    assert names(cluster, "Job") == {JOB} and names(cluster, "Pod") == {pod}
    assert not [request for request in cluster.requests if request.method == "DELETE"]
    code, _, _ = user("stop", RUN_NAME="theirs", WHERE="cluster")
    assert code == 0 and names(cluster, "Job") == set()


def test_logs_are_those_of_the_run_that_was_asked_for(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_job(cluster, pods=1, run="theirs")
    cluster.logs[put_pod(cluster, 0, phase="Running", node="a")] = "of theirs\n"
    own = write_run(tmp_path / "volume") / "logs" / "node_0.log"
    code, out, err = user("logs")
    assert code == 0 and out == own.read_text()
    assert f"that Job trains run theirs, and this asks for {RUN}: add RUN_NAME=theirs" in err
    assert user("logs", RUN_NAME="theirs", WHERE="cluster")[1] == "of theirs\n"


# ---- A node that is dead


@pytest.mark.parametrize(
    ("until_s", "reason", "said"),
    [
        (-3 * 86400, "", "its node does not answer (it should have left 3d ago)"),
        (-120, "DeletionByTaintManager", "its node does not answer (it should have left 2m ago)"),
        (
            600,
            "DeletionByTaintManager",
            "its node was tainted, or does not answer; it has 10m left to save",
        ),
        (20, "", ""),
        (-20, "", ""),
    ],
)  # it is about to leave, as after make stop
def test_a_pod_whose_node_does_not_answer_is_to_be_removed_by_hand(
    until_s: float, reason: str, said: str
) -> None:
    conditions = (
        [{"type": "DisruptionTarget", "status": "True", "reason": reason}] if reason else []
    )
    pod = {
        "metadata": {"name": "p-2", "namespace": "lab", "deletionTimestamp": stamp(-until_s)},
        "spec": {},
        "status": {
            "phase": "Running",
            "conditions": conditions,
            "containerStatuses": [{"state": {"running": {}}}],
        },
    }
    found = words.trouble(pod)
    assert said in found and bool(said) == bool(found)
    if said:
        assert found.endswith(
            "the Job makes no other before it is gone: kubectl delete pod p-2 --grace-period=0 "
            "--force -n lab"
        )
    if reason:  # once it is over, the Job makes another by itself
        over = {**pod, "status": {**pod["status"], "phase": "Failed"}}
        assert "the Job makes another" in words.trouble(over)


def test_status_says_what_to_type_for_it(user, cluster: Cluster, tmp_path: Path) -> None:
    put_job(cluster, pods=1)
    pod = cluster.get("Pod", put_pod(cluster, 0, phase="Running", node="a"))
    pod["metadata"] |= {"deletionTimestamp": stamp(7200), "deletionGracePeriodSeconds": 30}
    cluster.put(pod)
    write_run(tmp_path / "volume")
    with ReaderRuns(cluster):
        _, out, _ = user("status")
    assert (
        "Leaving" in out
        and f"kubectl delete pod {JOB}-0-aaaaa --grace-period=0 --force -n lab" in out
    )


# ---- Complaints of all pods


def test_complaints_are_looked_for_in_the_newest_pod_of_each_index(user, cluster: Cluster) -> None:
    put_job(cluster, pods=4)
    first = put_pod(cluster, 0, phase="Running", node="a")
    old, new = put_pod(cluster, 2, "old", exit_code=1), put_pod(cluster, 2, "zew", exit_code=78)
    put_pod(cluster, 3, message="0/3 nodes are available")
    quiet = put_pod(cluster, 1, exit_code=143)
    cluster.logs |= {
        first: "step=1/9 loss=6 lr=1\nlost node 2\n",
        old: "ValueError: of before\n",
        new: "fine\nOSError: no tokenizer\n",
        quiet: "step=1/9 loss=6 lr=1\n",
    }
    code, out, _ = user("attach", ONLY="errors")
    assert code == 0
    assert out == f"==> {first} <==\nlost node 2\n==> {new} <==\nOSError: no tokenizer\n"
    assert not [request for request in cluster.requests if request.query.get("follow")]
    assert user("logs", ONLY="errors", NODE_RANK="2")[1] == "OSError: no tokenizer\n"


def test_a_pod_whose_log_cannot_be_read_hides_no_other(
    user, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_job(cluster, pods=2)
    lost, other = (put_pod(cluster, index, phase="Running", node="a") for index in range(2))
    cluster.logs |= {lost: "never read", other: "ValueError: odd\n"}
    ask, dead = Target.call, {lost}
    monkeypatch.setattr(
        Target,
        "call",
        lambda self, *args, **how: (
            Done(1, "", "dial tcp: i/o timeout")
            if args[0] == "logs" and args[1] in dead
            else ask(self, *args, **how)
        ),
    )
    code, out, err = user("logs", ONLY="errors")
    assert code == 0 and out == f"==> {other} <==\nValueError: odd\n"
    assert f"the log of pod {lost} cannot be read (dial tcp: i/o timeout)" in err
    dead.add(other)
    code, out, err = user("logs", ONLY="errors")
    assert code == 69 and out == "" and f"the log of pod {lost} cannot be read" in err


# ---- The Job of make data


def test_the_job_of_make_data_is_shown_where_there_is_no_other(user, cluster: Cluster) -> None:
    put_volume(cluster)
    pod = put_data_job(cluster, phase="Running", node="a")
    cluster.logs[pod] = "fineweb-edu: shard 7 is sealed\n"
    code, out, _ = user("status")
    assert code == 0 and f"Job {DATA} (make data): running: its pod runs" in out and pod in out
    assert f"next: make logs RUN_NAME={RUN}; make stop RUN_NAME={RUN} stops it" in out
    code, out, err = user("logs")
    assert (
        code == 0
        and out == "fineweb-edu: shard 7 is sealed\n"
        and f"this is what {DATA} says" in err
    )
    code, out, _ = user("describe")
    assert (
        code == 0 and f"Job {DATA} in namespace lab" in out and "shape: 1 pod, no GPU; 8 CPU" in out
    )
    assert f"pod {pod}: Running on a" in out


def test_a_job_of_make_data_that_failed_gives_its_code(user, cluster: Cluster) -> None:
    put_volume(cluster)
    pod = put_data_job(cluster, exit_code=78, message="source fineweb-edu: refused")
    data = cluster.get("Job", DATA)
    data["status"] = {
        "conditions": [
            {
                "type": "Failed",
                "status": "True",
                "reason": "PodFailurePolicy",
                "lastTransitionTime": stamp(),
                "message": f"Container trainer for pod lab/{pod} failed with exit code 78 matching FailJob rule at index 0",
            }
        ]
    }
    cluster.put(data)
    with ReaderRuns(cluster):
        code, out, _ = user("status")
    assert code == 78 and f"Job {DATA} (make data): failed: {pod} ended with exit code 78" in out
    assert (
        "source fineweb-edu: refused" in out
        and f"next: make logs RUN_NAME={RUN}, where the reason" in out
    )


def test_stop_takes_the_job_of_make_data_too(user, cluster: Cluster) -> None:
    put_job(cluster, pods=1)
    put_pod(cluster, 0, phase="Running", node="a")
    put_data_job(cluster, phase="Running", node="a")
    code, out, _ = user("stop")
    assert code == 0 and names(cluster, "Job") == names(cluster, "Pod") == set()
    assert (
        f"Job {DATA} is stopped; the shards that are whole stay" in out
        and f"Job {JOB} is stopped" in out
    )
    put_data_job(cluster, phase="Running", node="a")
    code, out, _ = user("stop")
    assert code == 0 and names(cluster, "Job") == set()
    assert (
        "make data WHERE=cluster goes on behind them" in out and f"Job {JOB} is stopped" not in out
    )


def test_the_job_of_make_data_of_another_run_goes_on(user, cluster: Cluster) -> None:
    put_job(cluster, pods=1)
    put_pod(cluster, 0, phase="Running", node="a")
    put_data_job(cluster, run="theirs", phase="Running", node="a")
    code, out, _ = user("stop")
    assert code == 0 and names(cluster, "Job") == {DATA}
    assert f"Job {DATA} goes on: it was sent with RUN_NAME=theirs" in out
    code, _, err = user("stop")
    assert code == 64 and f"Job {DATA} in namespace lab is that of run theirs" in err
    assert names(cluster, "Job") == {DATA}


# ---- GPUs by another name


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/a100"])
def test_describe_counts_gpus_by_whatever_name(user, cluster: Cluster, resource: str) -> None:
    job = put_job(cluster, pods=2)
    resources = {
        "cpu": "16",
        "memory": "96Gi",
        "ephemeral-storage": "9Gi",
        "rdma/hca": "1",
        resource: "2",
    }
    job["spec"]["template"]["spec"]["containers"][0]["resources"] = {
        "limits": resources,
        "requests": resources,
    }
    cluster.put(job)
    _, out, _ = user("describe")
    assert re.search(
        rf"shape: 2 pods, 2 GPUs each{', as ' + resource if 'a100' in resource else ''}; 16 CPU",
        out,
    )
