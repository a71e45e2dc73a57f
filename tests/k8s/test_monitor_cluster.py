"""monitor/cluster.py, by the real kubectl against an API in memory: what a look costs, may ask, and sees."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k8s.cluster import kubectl
from k8s.cluster.where import decide
from monitor import cluster as monitor_cluster
from monitor.cluster import Watch
from monitor.facts import Gpu, Node, Progress, Seen, to_line
from monitor.rules.pod_rules import pod_faults
from tests.cluster_sim.cluster import Cluster
from tests.k8s.running_job import JOB, RUN, put_data_job, put_event, put_job, put_pod, sender

FULL = "0/12 nodes are available: 12 Insufficient nvidia.com/gpu."
STEP = (
    "step=1200/18865 loss=3.4127 lr=6.000e-04 grad_norm=0.400 step_ms=3900.0 tokens_per_s=134432 mfu=49.7 "
    "mem_gib=n/a"
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The calls of kubectl that ask the cluster, as they are made."""
    made: list[tuple[str, ...]] = []
    real = kubectl.kubectl

    def noted(*args: str, **options: object) -> kubectl.Done:
        made.append(args)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("k8s.cluster.target.kubectl", noted)
    return made


@pytest.fixture
def watch(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[], Watch]:
    """Somebody who sent the run `a-run` to the cluster, and now watches it."""
    sender(cluster, tmp_path, monkeypatch, capsys)
    return lambda: Watch(decide())


def told(
    index: int, step: int, ago_s: float = 5, gpus: tuple[Gpu, ...] = (Gpu(0, power_w=399.0),)
) -> str:
    """A line of a pod's teller."""
    return (
        to_line(
            Node(
                index,
                f"{JOB}-{index}",
                time.time() - ago_s,
                {"phase": "training"},
                at_work=True,
                gpus=gpus,
                progress=Progress(step, loss=3.25, tokens_per_s=134432.0),
            )
        )
        + "\n"
    )


def verbs(cluster: Cluster) -> set[str]:
    """What was asked of the API, besides which kinds it knows: list pods, get pods/log."""
    found = set()
    for method, path, query, _ in cluster.requests:
        parts = path.strip("/").split("/")
        if parts[-1] == "log":
            found.add("get pods/log")
        elif "namespaces" in parts or parts[-1] == "nodes":
            watched = query.get("watch") in ("1", "true")
            named = len(parts) > parts.index("namespaces") + 3 if "namespaces" in parts else False
            found.add(
                f"{'watch' if watched else 'get' if named else 'list' if method == 'GET' else method} "
                + (parts[-2] if named else parts[-1])
            )
    return found


def test_a_run_at_work_is_seen_whole_with_two_calls_and_the_right_to_list(
    watch: Callable[[], Watch], cluster: Cluster, calls: list[tuple[str, ...]]
) -> None:
    cluster.nodes({"name": "a", "zone": "ucsd"}, {"name": "b", "zone": "ksu"})
    put_job(cluster)
    for index in range(4):
        name = put_pod(cluster, index, phase="Running", node="a" if index < 3 else "b")
        cluster.logs[name] = (
            told(index, 1100, 15)
            + f"run={RUN} device=cuda\n"
            + told(index, 1200)
            + f"{STEP}\nlast words of {index}"
        )  # whose end of line is still to come
    looking = watch()
    seen, nodes = looking.look(time.time())
    assert [args[:2] for args in calls] == [
        ("get", "jobs,pods,events"),
        ("logs", "-l"),
        ("get", "nodes"),
    ]
    assert (seen.job, seen.ended, seen.wanted_pods, seen.run, seen.problem, seen.unread) == (
        "running: all 4 pods run",
        "",
        4,
        RUN,
        "",
        "",
    )
    assert [(pod.index, pod.phase, pod.site, pod.last_line) for pod in seen.pods] == [
        (0, "Running", "ucsd", "last words of 0"),
        (1, "Running", "ucsd", "last words of 1"),
        (2, "Running", "ucsd", "last words of 2"),
        (3, "Running", "ksu", "last words of 3"),
    ]
    assert seen.pods[0].lines == (f"run={RUN} device=cuda", STEP, "last words of 0")
    assert seen.pods[0].last_line_time == pytest.approx(time.time(), abs=20)
    assert [
        (node.node, node.progress.step if node.progress else 0, node.gpus[0].power_w)
        for node in nodes
    ] == [(index, 1200, 399.0) for index in range(4)]
    first = Seen(time.time(), RUN, "", nodes, seen)
    assert first.phase == "training" and pod_faults(first) == []
    del calls[:]
    cluster.logs[f"{JOB}-3-aaaaa"] += "\n" + told(3, 1300)
    _, nodes = looking.look(time.time())
    assert [args[:2] for args in calls] == [("get", "jobs,pods"), ("logs", "-l")]
    assert nodes[3].progress == Progress(1300, loss=3.25, tokens_per_s=134432.0)
    assert verbs(cluster) == {"list jobs", "list pods", "list events", "list nodes", "get pods/log"}


def test_pods_that_run_and_pods_that_do_not_are_told_apart_with_two_calls(
    watch: Callable[[], Watch], cluster: Cluster, calls: list[tuple[str, ...]]
) -> None:
    put_job(cluster, pods=5)
    cluster.logs[put_pod(cluster, 0, phase="Running")] = told(0, 1200)
    gone = put_pod(
        cluster, 1, "first", exit_code=1, message="launch: exit code 1: the trainer failed"
    )
    cluster.logs[gone] = told(1, 900)  # of the pod before: no news of this one
    put_pod(cluster, 1, "second", message=FULL)
    fetching = put_pod(cluster, 2, phase="Pending", waiting_reason="ContainerCreating", node="a")
    refused = put_pod(
        cluster, 3, phase="Pending", waiting_reason="ErrImagePull", message="x: 401 Unauthorized"
    )
    put_event(cluster, fetching, "Pulling", 'Pulling image "x"', 300)
    begun = time.time() - 300
    put_event(cluster, "another-job-0-aaaaa", "FailedScheduling", "not ours")
    put_event(
        cluster,
        JOB,
        "FailedCreate",
        'Error creating: pods "x" is forbidden: exceeded quota: gpus, requested: '
        "requests.nvidia.com/gpu=2, used: requests.nvidia.com/gpu=8, limited: requests.nvidia.com/gpu=8",
        ago_s=0,
        kind="Job",
    )
    looking = watch()
    for _ in range(2):
        seen, nodes = looking.look(time.time())
    assert [args[:2] for args in calls if args[1] != "nodes"] == 2 * [
        ("get", "jobs,pods,events"),
        ("logs", "-l"),
    ]
    assert [(node.node, node.host) for node in nodes] == [(0, f"{JOB}-0")] and seen.unread == ""
    assert [(pod.index, pod.name, pod.phase, pod.restarts) for pod in seen.pods] == [
        (0, f"{JOB}-0-aaaaa", "Running", 0),
        (1, f"{JOB}-1-second", "Pending", 1),
        (2, fetching, "Pending", 0),
        (3, refused, "Pending", 0),
    ]
    assert (
        seen.pods[1].unschedulable == FULL
        and seen.pods[1].before
        and seen.pods[1].before.exit_code == 1
    )
    assert seen.pods[2].pulling_since == pytest.approx(begun, abs=2) and seen.pods[2].pulled is None
    assert "exceeded quota: gpus" in seen.quota and "not ours" not in "".join(seen.events)
    assert len(seen.events) == 2
    faults = pod_faults(Seen(time.time() + 700, RUN, "", nodes, seen))
    assert [(fault.name, fault.about) for fault in faults] == [
        ("quota", ""),
        ("no-free-gpu", ""),
        ("image-pull", ""),
    ]
    assert "1 of 5 pods may not be made" in faults[0].text


def test_where_others_have_much_logs_and_events_come_in_turn(
    watch: Callable[[], Watch],
    cluster: Cluster,
    calls: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor_cluster, "CROWD", 2)
    put_job(cluster, pods=2)
    cluster.logs[put_pod(cluster, 0, phase="Running")] = told(0, 1200)
    fetching = put_pod(cluster, 1, phase="Pending", waiting_reason="ContainerCreating")
    for other in "abc":
        put_event(cluster, f"another-{other}", "FailedScheduling", "not ours")
    looking = watch()
    looking.look(time.time())
    put_event(cluster, fetching, "Pulling", 'Pulling image "x"', 300)
    cluster.logs[f"{JOB}-0-aaaaa"] += told(0, 1300)
    del calls[:]
    steps, pulls = [], []
    for _ in range(3):
        seen, nodes = looking.look(time.time())
        steps.append(nodes[0].progress.step if nodes[0].progress else 0)
        pulls.append(seen.pods[1].pulling_since is not None)
    assert [args[:2] for args in calls] == [
        ("get", "jobs,pods"),
        ("logs", "-l"),
        ("get", "jobs,pods"),
        ("get", "events"),
        ("get", "jobs,pods"),
        ("logs", "-l"),
    ]
    assert (steps, pulls) == ([1300, 1300, 1300], [False, True, True])
    cluster.set_pod(fetching, phase="Running")
    seen, _ = looking.look(time.time())
    assert seen.pods[1].phase == "Running" and seen.pods[1].pulling_since and seen.events == ()


def test_an_image_without_a_teller_is_known_by_its_console(
    watch: Callable[[], Watch], cluster: Cluster
) -> None:
    put_job(cluster, pods=1)
    name = put_pod(cluster, 0, phase="Running")
    cluster.logs[name] = (
        f"{STEP.replace('1200', '1190').replace('3900.0', '4100.0')}\n{STEP}\n"
        "step=1200/18865 val_loss=3.5000 val_bpb=1.1000 eval_s=4.0\nNCCL WARN timeout: rank 3\n"
    )
    _, (node,) = watch().look(time.time())
    assert node.progress and node.progress.step_time
    assert dataclasses.replace(node.progress, step_time=None) == Progress(
        1200,
        last_step=18865,
        loss=3.4127,
        step_s=4.0,
        tokens_per_s=134432.0,
        mfu_percent=49.7,
        val_loss=3.5,
        val_step=1200,
    )
    assert (node.node, node.at_work, node.gpus, node.complaint) == (
        0,
        True,
        (),
        "NCCL WARN timeout: rank 3",
    )


def test_a_teller_behind_many_lines_is_looked_for_further_back(
    watch: Callable[[], Watch], cluster: Cluster
) -> None:
    put_job(cluster, pods=1)
    name = put_pod(cluster, 0, phase="Running")
    cluster.logs[name] = told(0, 1200) + f"{STEP}\n" * 100
    looking = watch()
    assert looking.look(time.time())[1][0].gpus == ()
    assert looking.look(time.time())[1][0].gpus == (Gpu(0, power_w=399.0),)
    cluster.logs[name] += f"{STEP}\n" * 500
    assert looking.look(time.time())[1][0].gpus == (
        Gpu(0, power_w=399.0),
    )  # as it was heard a moment ago
    cluster.set_pod(name, exit_code=1)
    assert looking.look(time.time())[1][0].at_work is False


# ---- What may not be, and what is not there


def test_logs_that_may_not_be_read_are_said_and_the_pods_are_seen(
    watch: Callable[[], Watch], cluster: Cluster
) -> None:
    put_job(cluster, pods=1)
    put_pod(cluster, 0, phase="Running")
    cluster.forbid("*", "pods/log")
    cluster.forbid("*", "events")
    cluster.forbid("*", "nodes")
    seen, nodes = watch().look(time.time())
    assert seen.problem == "" and seen.pods[0].phase == "Running" and nodes == ()
    (fault,) = pod_faults(Seen(time.time(), RUN, "", nodes, seen))
    assert fault.name == "logs-unread" and "you may not get pods/log in namespace lab" in fault.text
    assert "ask its administrator" in fault.next


def test_pods_that_may_not_be_listed_and_a_namespace_that_is_absent_are_problems(
    watch: Callable[[], Watch], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_job(cluster, pods=1)
    cluster.forbid("list", "pods")
    assert "you may not list pods in namespace lab" in watch().look(time.time())[0].problem
    cluster.forbidden.clear()
    cluster.login_expired = True
    assert "the cluster does not know you" in watch().look(time.time())[0].problem
    cluster.login_expired = False
    monkeypatch.setenv("NAMESPACE", "absent")
    seen, _ = watch().look(time.time())
    assert "NAMESPACE=absent: there is no such namespace" in seen.problem
    assert [fault.name for fault in pod_faults(Seen(time.time(), RUN, "", (), seen))] == ["cluster"]


def test_an_api_that_goes_down_leaves_what_was_known_and_its_age(
    watch: Callable[[], Watch], cluster: Cluster
) -> None:
    put_job(cluster, pods=1)
    cluster.logs[put_pod(cluster, 0, phase="Running")] = told(0, 1200)
    looking, began = watch(), time.time()
    looking.look(began)
    cluster.close()
    seen, nodes = looking.look(began + 180)
    assert seen.asked == began and seen.pods[0].phase == "Running" and nodes[0].gpus
    (fault,) = pod_faults(Seen(began + 180, RUN, "", nodes, seen))
    assert fault.name == "cluster" and "does not answer at http://127.0.0.1" in fault.text
    assert (
        "(what is known of the pods is 3m old)" in fault.text
        and "kubectl config use-context" in fault.next
    )


def test_a_call_that_hangs_is_given_up(
    watch: Callable[[], Watch], cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = watch()
    looking.look(time.time())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(monitor_cluster, "LISTED_S", 0.3)
    began = time.monotonic()
    seen, _ = looking.look(time.time())
    assert (
        time.monotonic() - began < 25
        and "has not answered `kubectl get jobs,pods` in 0 s" in seen.problem
    )


def test_another_runs_job_is_not_taken_for_ones_own(
    watch: Callable[[], Watch], cluster: Cluster, calls: list[tuple[str, ...]]
) -> None:
    put_job(cluster, pods=1, run="theirs")
    cluster.logs[put_pod(cluster, 0, phase="Running")] = told(0, 1200)
    seen, nodes = watch().look(time.time())
    assert (seen.run, seen.pods, nodes) == ("theirs", (), ()) and len(calls) == 1
    (fault,) = pod_faults(Seen(time.time(), RUN, "", nodes, seen))
    assert fault.name == "other-run"


def test_the_job_of_make_data_is_watched_where_it_is_alone(
    watch: Callable[[], Watch], cluster: Cluster
) -> None:
    name = put_data_job(cluster, phase="Running")
    cluster.logs[name] = "shard 7 of 100\n"
    seen, nodes = watch().look(time.time())
    assert (seen.job_name, seen.job, nodes) == (f"{JOB}-data", "running: its pod runs", ())
    assert seen.pods[0].last_line == "shard 7 of 100"
