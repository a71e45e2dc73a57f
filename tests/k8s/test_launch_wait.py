"""What becomes of the pods of a launch: those that find no room, WAIT=1, those that cannot start; interrupting."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import yaml

from k8s import launch
from k8s.cluster.kubectl import Done
from settings import ROOT
from tests.cluster_sim.cluster import Cluster
from tests.k8s.user import User, a_user

pytestmark = pytest.mark.slow  # what is waited for, with twenty calls of kubectl before
user = a_user
JOB = "pure-transformer-8xa100"
OF_A_LAUNCH = ("Job", "Service", "NetworkPolicy", "ConfigMap", "Pod")


def left(cluster: Cluster) -> list[str]:
    """What a launch has made that is still there, volume and Secret aside."""
    return [
        f"{kind}/{thing['metadata']['name']}"
        for kind in OF_A_LAUNCH
        for thing in cluster.objects(kind, "lab")
    ]


def made(cluster: Cluster) -> int:
    """How often a Job was applied."""
    return sum(r.method == "PATCH" and r.path.endswith(f"/jobs/{JOB}") for r in cluster.requests)


# ---- WAIT=1


def test_wait_takes_a_job_back_of_which_only_some_fit_and_tries_until_all_do(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "FIT_S", 3.0)
    monkeypatch.setattr(launch, "WAIT_MINUTES", 7.5)
    there: list[
        tuple[int, list[str]]
    ] = []  # at the beginning of each pause: tries, and what is left

    def pause(seconds: float) -> None:
        if seconds == 7.5 * 60:
            there.append(
                (made(cluster), [name for name in left(cluster) if name.startswith(("Job", "Pod"))])
            )
        else:
            time.sleep(min(seconds, 0.1))

    class Time:  # of launch alone; what it calls goes on to sleep as it likes
        sleep, time = staticmethod(pause), staticmethod(time.time)

    monkeypatch.setattr(launch, "time", Time)
    with user.scheduler(lambda index: "gpu-0" if index < 3 or len(there) >= 2 else None):
        done = user.launch(WAIT="1", RUN_NAME="patient")
    assert done.code == 0, done.err
    assert there[:2] == [(1, []), (2, [])]  # GPUs that some pods had are given back while it waits
    assert made(cluster) == len(there) + 1
    assert (
        done.out.count(
            "1 of 4 pods have no node (0/2 nodes are available: 2 Insufficient nvidia.com/gpu.); taken "
            "back, the next try is in 7.5 minutes"
        )
        >= 2
    )
    assert len(cluster.objects("Pod")) == 4 and (user.runs / "patient" / "cluster.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_waiting_leaves_nothing_behind(
    user: User, cluster: Cluster, number: int
) -> None:
    with user.scheduler(lambda index: "gpu-0" if index == 0 else None):
        process = subprocess.Popen(
            [sys.executable, "-m", "k8s.launch"],
            cwd=ROOT,
            start_new_session=True,
            env=user.environment(WAIT="1", RUN_NAME="hasty"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        until(lambda: len(cluster.objects("Pod")) == 4)
        os.killpg(process.pid, number)  # all of the terminal's processes, as Ctrl-C does
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 143, out
    assert "giving up: what was sent is taken back; volume and Secret stay" in out
    assert left(cluster) == []
    assert len(cluster.objects("PersistentVolumeClaim")) == 1
    assert not (user.runs / "hasty" / "cluster.json").exists()


def until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_waiting_does_not_mend_an_image_that_cannot_be_fetched(
    user: User, cluster: Cluster
) -> None:
    with user.scheduler(
        lambda index: "gpu-0",
        lambda pod: cluster.set_pod(pod, waiting_reason="ErrImagePull", message="not found"),
    ):
        done = user.launch(WAIT="1")
    assert done.code == 78 and "cannot fetch IMAGE=" in done.err
    assert left(cluster) == []


def test_a_cluster_that_does_not_answer_for_once_is_tried_again(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, calls = launch.apply.apply, list[str]()

    def flaky(text: str, namespace: str, again: str) -> str:
        calls.append(namespace)
        if len(calls) == 1:
            raise launch.Refused(69, "the cluster does not answer")
        return apply(text, namespace, again)

    monkeypatch.setattr(launch.apply, "apply", flaky)
    monkeypatch.setattr(launch, "WAIT_MINUTES", 0.001)
    with user.scheduler(lambda index: "gpu-1"):
        done = user.launch(WAIT="1")
    assert done.code == 0 and len(calls) == 2
    assert "the cluster does not answer; the next try is in 0.001 minutes" in done.out


def test_a_job_that_leaves_slowly_does_not_end_the_waiting(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "FIT_S", 1.0)
    real, asked = launch.apply.delete_job, list[int]()

    def slow(name: str, namespace: str, patience_s: float) -> None:
        asked.append(made(cluster))
        if len(asked) == 1:
            raise launch.apply.not_gone(
                Done(1, "", "error: timed out waiting for the condition"), name, namespace, 9
            )
        real(name, namespace, patience_s)

    monkeypatch.setattr(launch.apply, "delete_job", slow)
    monkeypatch.setattr(launch, "WAIT_MINUTES", 0.001)
    with user.scheduler(lambda index: "gpu-0" if index < 3 or len(asked) >= 2 else None):
        done = user.launch(WAIT="1")
    assert done.code == 0, done.err
    assert (
        f"Job {JOB} is not gone after 9 s" in done.out
        and "the next try is in 0.001 minutes" in done.out
    )
    assert asked[:2] == [1, 1]  # the next try begins with what is left of the one before
    assert len(cluster.objects("Pod")) == 4


def test_who_changes_the_context_meanwhile_changes_nothing_here(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "FIT_S", 1.0)
    there, path = list[int](), cluster.folder / "kubeconfig"

    def pause(seconds: float) -> None:
        there.append(made(cluster))
        config = yaml.safe_load(path.read_text())
        config["clusters"].append({"name": "other", "cluster": {"server": "http://127.0.0.1:9"}})
        config["contexts"].append(
            {"name": "other", "context": {"cluster": "other", "user": "lab-user"}}
        )
        path.write_text(yaml.safe_dump(config | {"current-context": "other"}))
        if len(there) > 1:
            raise launch.Told("it has gone elsewhere")

    class Time:
        sleep, time = staticmethod(pause), staticmethod(time.time)

    monkeypatch.setattr(launch, "time", Time)
    with user.scheduler(lambda index: "gpu-0" if index < 3 or there else None):
        done = user.launch(WAIT="1", RUN_NAME="steady")
    assert done.code == 0, done.out + done.err
    assert there == [1] and made(cluster) == 2
    assert '"context": "test"' in (user.runs / "steady" / "cluster.json").read_text()


def test_who_gives_up_leaves_the_job_of_somebody_else(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "FIT_S", 0.0)

    def pause(_: float) -> None:
        theirs = {
            "kind": "Job",
            "apiVersion": "batch/v1",
            "metadata": {"name": JOB, "labels": {"app.kubernetes.io/name": "pure-transformer"}},
            "spec": {
                "template": {
                    "spec": {
                        "restartPolicy": "Never",
                        "containers": [{"name": "trainer", "image": "x"}],
                    }
                }
            },
        }
        cluster.put(theirs)
        raise launch.Told("Ctrl-C")

    class Time:
        sleep, time = staticmethod(pause), staticmethod(time.time)

    monkeypatch.setattr(launch, "time", Time)
    assert user.launch(WAIT="1").code == 143
    assert [job["metadata"]["name"] for job in cluster.objects("Job")] == [JOB]


# ---- Without it


def test_who_interrupts_a_launch_leaves_the_job_and_is_told_so(
    user: User, cluster: Cluster
) -> None:
    with user.scheduler(lambda index: None):
        process = subprocess.Popen(
            [sys.executable, "-m", "k8s.launch"],
            cwd=ROOT,
            start_new_session=True,
            env=user.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        until(lambda: len(cluster.objects("Pod")) == 4)
        until((user.runs / "xlarge-8xa100" / "cluster.json").exists)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 143, out
    assert f"Job {JOB} stays in the cluster; next: make status" in out
    assert len(cluster.objects("Job")) == 1


@pytest.mark.parametrize(
    ("reason", "message", "parts"),
    [
        (
            "ErrImagePull",
            "manifest unknown",
            (
                "cannot fetch IMAGE=registry.example.org/lab/pure-transformer@sha256:",
                "(manifest unknown): make push puts it there",
                "IMAGE_PULL_SECRET; then make restart",
            ),
        ),
        ("ImagePullBackOff", "", ("cannot fetch IMAGE=", "make push")),
        (
            "CreateContainerConfigError",
            'configmap "x" not found',
            (
                "cannot be started, CreateContainerConfigError (configmap",
                "kubectl describe pod",
                "make restart",
            ),
        ),
    ],
)
def test_pods_that_cannot_start_are_told_with_the_next_command(
    user: User,
    cluster: Cluster,
    reason: str,
    message: str,
    parts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "PLACE_S", 30.0)
    with user.scheduler(
        lambda index: "gpu-0",
        lambda pod: cluster.set_pod(pod, waiting_reason=reason, message=message),
    ):
        done = user.launch()
    assert done.code == 78
    last = done.err.splitlines()[-1]
    assert all(part in last for part in parts), last
    assert len(cluster.objects("Job")) == 1  # it stays, to be looked at


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (64, "a setting is invalid"),
        (78, "the data or the environment is bad, the same on every node"),
    ],
)
def test_a_job_that_fails_at_once_is_told_with_its_code(
    user: User, cluster: Cluster, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PLACE_S", 30.0)
    monkeypatch.setattr(launch.placement, "SETTLE_S", 20.0)
    with user.scheduler(lambda index: "gpu-0", lambda pod: cluster.set_pod(pod, exit_code=code)):
        done = user.launch()
    assert done.code == code
    assert f"Job {JOB} has failed: {words} (Container trainer for pod lab/" in done.err
    assert "make logs ONLY=errors says which, then make restart" in done.err


def test_a_job_that_somebody_deletes_meanwhile_is_told(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PLACE_S", 30.0)

    def delete() -> None:
        until(lambda: len(cluster.objects("Pod")) == 4)
        cluster.store.delete(cluster.key("Job", JOB))

    thread = threading.Thread(target=delete)
    with user.scheduler(lambda index: None):
        thread.start()
        done = user.launch()
        thread.join()
    assert (
        done.code == 78
        and f"Job {JOB} has been deleted by somebody else; make restart sends it again" in done.err
    )


def test_pods_that_a_quota_forbids_are_told_in_the_clusters_words(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PLACE_S", 3.0)

    def complain() -> None:
        until(lambda: len(cluster.objects("Job")) == 1)
        cluster.event(
            cluster.get("Job", JOB),
            "Warning",
            "FailedCreate",
            "pods are forbidden: exceeded quota: gpus",
        )

    thread = threading.Thread(target=complain)
    thread.start()
    done = user.launch()
    thread.join()
    assert done.code == 0
    assert "4 of 4 pods have no node (pods are forbidden: exceeded quota: gpus)" in done.out


def test_who_interrupts_a_restart_is_told_that_nothing_runs(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert user.launch().code == 0

    def interrupted(name: str, namespace: str, patience_s: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(launch.apply, "delete_job", interrupted)
    done = user.launch("restart")
    assert done.code == 143
    assert (
        f"Job {JOB} is on its way out, and no other was sent: make train-8xa100 sends it"
        in done.out
    )
