"""k8s/jobs.py: the targets that look after a run in the cluster, by the real kubectl against an API in memory."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from k8s.cluster import volume
from record import bad_nodes
from record.bad_nodes import BadNode
from settings import ROOT
from tests.cluster_sim.cluster import Cluster
from tests.k8s.running_job import (
    JOB,
    RUN,
    ReaderRuns,
    put_event,
    put_job,
    put_pod,
    put_volume,
    sender,
    stamp,
    write_run,
)


@pytest.fixture
def user(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Somebody at a terminal who sent the run `a-run` to the cluster; called with a command, returns how it ended."""
    return sender(cluster, tmp_path, monkeypatch, capsys)


# ---- bad nodes


def test_bad_nodes_are_listed_and_cleared_through_a_pod(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_job(cluster, pods=1)
    put_pod(cluster, 0, phase="Running", node="a")
    assert user("bad-nodes")[:2] == (0, "No node is listed as bad.\n")
    folder = tmp_path / "volume" / "runs" / ".bad_nodes"
    bad_nodes.write(folder, BadNode("gpu-7", "GPU 3 is lost\033[2J", time.time() - 7200))
    code, out, _ = user("bad-nodes")
    assert code == 0
    assert out.splitlines()[1].split(maxsplit=3) == ["gpu-7", "2h", "ago", "GPU 3 is lost\\x1b[2J"]
    code, out, _ = user("clear-bad-nodes")
    assert code == 0 and out.startswith("The list of bad nodes is empty")
    assert not folder.exists()


def test_without_a_pod_the_list_is_cleared_through_one_that_may_write(
    user, cluster: Cluster
) -> None:
    put_job(cluster, pods=1)
    for command, writes in (("bad-nodes", False), ("clear-bad-nodes", True)):
        with ReaderRuns(cluster) as reader:
            assert user(command)[0] == 0
        (mount, _) = reader.specs[0]["spec"]["containers"][0]["volumeMounts"]
        assert mount["mountPath"] == "/volume" and bool(mount.get("readOnly")) != writes


def test_this_machine_lists_no_bad_nodes(user) -> None:
    code, _, err = user("bad-nodes", WHERE="local")
    assert code == 78 and "WHERE=cluster" in err


# ---- status


def test_a_run_at_work_is_told_with_its_pods_its_steps_and_its_sites(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.nodes({"name": "a", "zone": "ucsd"}, {"name": "b", "zone": "ksu"})
    put_job(cluster)
    for index in range(4):
        put_pod(cluster, index, phase="Running", node="a" if index < 3 else "b")
    write_run(tmp_path / "volume")
    code, out, err = user("status")
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert lines[0] == f"Job {JOB} in namespace lab: running: all 4 pods run"
    assert lines[1].split() == ["INDEX", "PHASE", "NODE", "SITE", "AGE", "RESTARTS", "POD"]
    assert [line.split()[:4] for line in lines[2:6]] == [
        ["0", "Running", "a", "ucsd"],
        ["1", "Running", "a", "ucsd"],
        ["2", "Running", "a", "ucsd"],
        ["3", "Running", "b", "ksu"],
    ]
    assert "at 2 sites: ksu (1), ucsd (3)" in out and "SITE=NAME" in out
    assert (
        f"{RUN}  training       step 2100/190735  loss 3.2500  " in out
        and f"s ago on {JOB}-0" in out
    )
    assert (
        "step=2100/190735 loss=3.2500 lr=3.000e-04 grad_norm=0.400 step_ms=3900.0 tokens_per_s=134432"
        in out
    )
    assert re.search(r"last checkpoint: step 2000, \d+m?\d*s? ago", out)
    assert lines[-1] == f"next: make logs RUN_NAME={RUN}; make stop RUN_NAME={RUN} saves and stops"
    assert not [pod for pod in cluster.objects("Pod") if "reader" in pod["metadata"]["name"]]


def test_what_keeps_pods_is_said_in_words_with_the_events(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_job(cluster)
    put_pod(cluster, 0, phase="Running", node="a")
    put_pod(cluster, 1, message="0/12 nodes are available: 12 Insufficient nvidia.com/gpu.")
    put_pod(cluster, 2, "first", exit_code=1, node="a")
    put_pod(
        cluster,
        2,
        "second",
        phase="Pending",
        waiting_reason="ImagePullBackOff",
        message="Back-off pulling image",
    )
    put_pod(
        cluster,
        3,
        phase="Pending",
        waiting_reason="CreateContainerConfigError",
        message='configmap "x" not found',
    )
    put_event(cluster, f"{JOB}-1-aaaaa", "FailedScheduling", "no preemption victims found")
    put_event(cluster, "another-job", "FailedScheduling", "not ours")
    write_run(tmp_path / "volume")
    code, out, _ = user("status")
    assert code == 0
    assert "waiting for pods: 1 of 4 run" in out
    assert "pod 1: finds no node: 0/12 nodes are available: 12 Insufficient nvidia.com/gpu." in out
    assert (
        "pod 2: its image cannot be fetched (ImagePullBackOff): registry.example.org/lab/image:1"
        in out
    )
    assert "make push" in out and "IMAGE_PULL_SECRET" in out
    assert 'pod 3: its container cannot be made: configmap "x" not found; make restart makes' in out
    restarts = {
        line.split()[0]: line.split()[-2] for line in out.splitlines() if line[:1].isdigit()
    }
    assert restarts == {"0": "0", "1": "0", "2": "1", "3": "0"}
    assert "FailedScheduling: no preemption victims found" in out and "not ours" not in out
    assert "next: make sites" in out


@pytest.mark.parametrize(
    ("exit_code", "meaning"),
    [
        (64, "a setting is invalid"),
        (70, "restarts or rollbacks made no progress"),
        (78, "the data or the environment is bad"),
    ],
)
def test_a_job_that_a_code_has_failed_is_explained_and_gives_that_code(
    user, cluster: Cluster, tmp_path: Path, exit_code: int, meaning: str
) -> None:
    message = (
        f"Container trainer for pod lab/{JOB}-2-aaaaa failed with exit code {exit_code} matching FailJob rule "
        "at index 0"
    )
    put_job(
        cluster,
        conditions=[
            {
                "type": "Failed",
                "status": "True",
                "reason": "PodFailurePolicy",
                "message": message,
                "lastTransitionTime": stamp(),
            }
        ],
    )
    put_pod(
        cluster,
        2,
        exit_code=exit_code,
        message="BATCH_TOKENS=5: must be\nBATCH_TOKENS=7: the last line",
    )
    write_run(tmp_path / "volume", phase="crashed")
    with ReaderRuns(cluster) as reader:
        code, out, err = user("status")
    assert code == exit_code
    assert f"failed: {JOB}-2-aaaaa ended with exit code {exit_code} ({meaning}" in out
    assert "BATCH_TOKENS=7: the last line" in out and "next: make logs" in out
    assert len(reader.made) == 1 and f"starting {JOB}-reader" in err
    assert f"{RUN}  crashed        step 2100/190735" in out
    assert [p["metadata"]["name"] for p in cluster.objects("Pod")] == [
        f"{JOB}-2-aaaaa"
    ]  # the reader is gone


def test_too_many_failures_are_told_with_code_1(user, cluster: Cluster, tmp_path: Path) -> None:
    put_job(
        cluster,
        conditions=[
            {
                "type": "Failed",
                "status": "True",
                "reason": "BackoffLimitExceeded",
                "message": "Job has reached the specified backoff limit",
            }
        ],
    )
    write_run(tmp_path / "volume")
    with ReaderRuns(cluster):
        code, out, _ = user("status")
    assert code == 1 and "failed: more pods failed than backoffLimit=100 allows" in out
    assert "killed while training" in out


def test_preemption_memory_and_a_full_volume_are_told_apart(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_job(cluster, pods=5)
    preempted, killed = put_pod(cluster, 0, exit_code=143), put_pod(cluster, 1, exit_code=137)
    put_pod(cluster, 2, exit_code=78, message="OSError: [Errno 28] No space left on device")
    put_pod(
        cluster,
        3,
        exit_code=78,
        message="OSError: [Errno 122] Disk quota exceeded: '/volume/runs/a'",
    )  # CephFS
    put_pod(cluster, 4, phase="Running", node="a")
    pod = cluster.get("Pod", preempted)
    pod["status"]["conditions"] = [
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": "default-scheduler: preempting to accommodate a higher priority pod",
        }
    ]
    cluster.put(pod)
    pod = cluster.get("Pod", killed)
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] = "OOMKilled"
    cluster.put(pod)
    write_run(tmp_path / "volume")
    _, out, _ = user("status")
    assert (
        "pod 0: preempted: a pod of higher priority took its place" in out
        and "not counted as a failure" in out
    )
    assert "pod 1: killed: it used more memory than POD_MEMORY_GB allows" in out
    for index in (2, 3):
        assert (
            f"pod {index}: the volume or the pod's own disk is full (exit code 78)" in out
            and "VOLUME_GB" in out
        )


def test_a_run_that_is_done_is_told_when_its_pods_are_gone(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_job(
        cluster,
        startTime=stamp(3725),
        completionTime=stamp(0),
        succeeded=4,
        conditions=[
            {"type": "Complete", "status": "True", "reason": "CompletionsReached", "message": ""}
        ],
    )
    write_run(tmp_path / "volume", phase="done", step=190735)
    with ReaderRuns(cluster) as reader:
        code, out, _ = user("status")
    assert code == 0 and "complete: all 4 pods have ended well, after 1:02:0" in out
    assert f"{RUN}  done           step 190735/190735" in out and "next: make fetch-run" in out
    spec = reader.specs[0]["spec"]
    assert (
        spec["activeDeadlineSeconds"] > 0
        and spec["containers"][0]["image"] == "registry.example.org/lab/image:1"
    )
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == "pure-transformer"


def test_a_run_whose_heart_stopped_is_named(user, cluster: Cluster, tmp_path: Path) -> None:
    put_job(cluster, pods=1)
    put_pod(cluster, 0, phase="Running", node="a")
    run = write_run(tmp_path / "volume")
    state = json.loads((run / "STATUS.json").read_text())
    (run / "STATUS.json").write_text(json.dumps(state | {"heartbeat": state["heartbeat"] - 900}))
    _, out, _ = user("status")
    assert re.search(r"no heartbeat for 15:\d\d", out) and "make logs ONLY=errors" in out


def test_a_job_of_another_run_is_said(user, cluster: Cluster, tmp_path: Path) -> None:
    put_job(cluster, pods=1)
    put_pod(cluster, 0, phase="Running", node="a")
    _, out, _ = user("status", RUN_NAME="another", WHERE="cluster")
    assert f"that Job trains run {RUN}, and this asks for another: add RUN_NAME={RUN}" in out
    assert f"next: make status RUN_NAME={RUN} for that Job" in out and "make stop" not in out


# ---- What is missing


def test_without_a_job_and_a_volume_a_sentence_says_what_to_type(user, cluster: Cluster) -> None:
    code, out, _ = user("status")
    assert code == 0 and f"Job {JOB} in namespace lab: is not there" in out
    assert (
        "VOLUME=pure-transformer: there is no such claim" in out
        and "next: make train-8xa100" in out
    )
    for command in ("describe", "logs"):
        code, out, err = user(command)
        assert (
            code == 78
            and f"there is no Job {JOB} in namespace lab" in err
            and "make train-8xa100" in err
        )
    for command in ("checkpoints", "fetch-run"):
        code, _, err = user(command)
        assert (
            code == 78
            and err.count("\n") == 1
            and "VOLUME=pure-transformer: there is no such claim" in err
        )


def test_a_namespace_that_is_not_there_is_named(user, cluster: Cluster) -> None:
    for command in ("status", "describe", "stop", "logs"):
        code, _, err = user(command, NAMESPACE="absent")
        assert code == 78 and "NAMESPACE=absent: there is no such namespace" in err, command


@pytest.mark.parametrize(
    ("command", "verb", "resource", "words"),
    [
        ("status", "get", "jobs", "you may not get jobs in namespace lab"),
        ("status", "list", "pods", "you may not list pods in namespace lab"),
        ("stop", "delete", "jobs", "for the right to delete jobs"),
        ("checkpoints", "create", "pods/exec", "for the right to create pods/exec"),
    ],
)
def test_a_right_that_is_missing_is_named(
    user, cluster: Cluster, tmp_path: Path, command: str, verb: str, resource: str, words: str
) -> None:
    put_job(cluster, pods=1)
    put_pod(cluster, 0, phase="Running", node="a")
    write_run(tmp_path / "volume")
    cluster.forbid(verb, resource)
    code, _, err = user(command)
    assert code == 78 and words in err


def test_events_and_nodes_that_may_not_be_read_are_done_without(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_job(cluster, pods=1)
    put_pod(cluster, 0, message="0/1 nodes are available")
    write_run(tmp_path / "volume")
    cluster.forbid("*", "events")
    cluster.forbid("*", "nodes")
    with ReaderRuns(cluster):
        code, out, _ = user("status")
    assert code == 0 and "pod 0: finds no node: 0/1 nodes are available" in out


def test_a_cluster_out_of_reach_is_said(
    user, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Path(cluster.env["KUBECONFIG"])
    config.write_text(config.read_text().replace(str(cluster.server.server_port), "1"))
    code, _, err = user("status")
    assert code == 69 and "does not answer" in err


# ---- The reader pod


def test_a_reader_that_cannot_start_says_why_and_is_removed(
    user, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_volume(cluster)
    monkeypatch.setattr(volume, "HOPELESS_S", 0.1)
    with ReaderRuns(cluster, phase="Pending", waiting_reason="ErrImagePull", message="not found"):
        code, _, err = user("checkpoints")
    assert (
        code == 69
        and "did not start" in err
        and "its image cannot be fetched (ErrImagePull)" in err
    )
    assert cluster.objects("Pod") == []


def test_a_reader_that_was_left_behind_is_used_or_replaced(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_volume(cluster)
    write_run(tmp_path / "volume")
    with ReaderRuns(cluster) as reader:
        user("checkpoints")
        kept = reader.specs[0]
    for phase, made in (("Running", 0), ("Failed", 1)):
        left = {
            "kind": "Pod",
            "apiVersion": "v1",
            "spec": kept["spec"],
            "metadata": {"name": f"{JOB}-reader", "labels": kept["metadata"]["labels"]},
        }
        cluster.put(left)
        cluster.set_pod(f"{JOB}-reader", phase=phase, node="a")
        with ReaderRuns(cluster) as reader:
            code, out, _ = user("checkpoints")
        assert code == 0 and "step_0002000" in out and len(reader.made) == made
        assert cluster.objects("Pod") == []


def test_a_reader_is_removed_after_ctrl_c_too(user, cluster: Cluster, tmp_path: Path) -> None:
    put_volume(cluster)
    write_run(tmp_path / "volume")

    over = threading.Event()

    def interrupted(*_: object, **__: bytes) -> tuple[int, bytes]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        over.wait(30)  # an answer could come before the signal
        return 1, b""

    cluster.exec = interrupted
    with ReaderRuns(cluster) as reader:
        code, _, _ = user("checkpoints")
        over.set()
    assert code == 130 and len(reader.made) == 1 and cluster.objects("Pod") == []


def test_a_reader_is_removed_when_the_command_is_ended(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_volume(cluster)
    reached, over = threading.Event(), threading.Event()

    def hangs(*_: object, **__: bytes) -> tuple[int, bytes]:
        reached.set()
        over.wait(30)
        return 0, b""

    cluster.exec = hangs
    with ReaderRuns(cluster) as reader:
        command = subprocess.Popen(
            [sys.executable, "-m", "k8s.jobs", "checkpoints"],
            cwd=ROOT,
            env=dict(os.environ),
            stderr=subprocess.DEVNULL,
        )
        assert reached.wait(30)
        command.terminate()
        assert command.wait(30) == 143
    over.set()
    assert len(reader.made) == 1 and cluster.objects("Pod") == []


# ---- stop, describe, checkpoints


def test_stop_takes_the_job_and_its_pods_away_and_nothing_else(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_job(cluster, pods=2)
    names = [put_pod(cluster, index, phase="Running", node="a") for index in range(2)]
    cluster.logs[names[0]] = (
        "step=5/10 loss=3\ncheckpoint step_0001200: 39 MiB in 0.12 s\n"
        'node-facts {"schema":1,"complaint":"checkpoint step_0009999: damaged"}\nstopped by SIGTERM\n'
    )
    cluster.put(
        {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "pure-transformer-secrets"}}
    )
    code, out, _ = user("stop")
    assert code == 0 and "last checkpoint: step 1200" in out and "stay; make train-8xa100" in out
    assert cluster.objects("Job") == [] and cluster.objects("Pod") == []
    assert len(cluster.objects("PersistentVolumeClaim")) == len(cluster.objects("Secret")) == 1
    deleted = [r for r in cluster.requests if r.method == "DELETE"]
    assert [r.path.rsplit("/", 2)[1:] for r in deleted] == [
        ["jobs", JOB]
    ] and b"Foreground" in deleted[0].body
    code, out, _ = user("stop")
    assert code == 0 and "was stopped already, or never sent" in out


def test_describe_tells_shape_settings_pods_events_and_volume(user, cluster: Cluster) -> None:
    put_job(cluster, pods=2)
    put_pod(cluster, 0, phase="Running", node="a")
    put_pod(cluster, 1, message="0/3 nodes are available")
    put_event(cluster, JOB, "SuccessfulCreate", "Created pod", ago_s=300, kind="Job")
    put_event(cluster, f"{JOB}-1-aaaaa", "FailedScheduling", "too few", ago_s=30)
    code, out, _ = user("describe")
    assert code == 0
    assert "shape: 2 pods, 2 GPUs each; 16 CPU, 96Gi memory; 30 s to save when told to stop" in out
    assert "image: registry.example.org/lab/image:1" in out
    assert (
        "settings: PRESET=xlarge-8xa100 and LEARNING_RATE=2e-4 NODES=2\n" in out
    )  # SAVE_EVERY is the preset's
    assert "volume: pure-transformer, 500Gi, Bound, ReadWriteMany, storage class standard" in out
    assert (
        f"pod {JOB}-1-aaaaa: Pending on no node yet; finds no node: 0/3 nodes are available" in out
    )
    assert "PodScheduled=False Unschedulable: 0/3 nodes are available" in out
    assert out.index("SuccessfulCreate") < out.index("FailedScheduling: too few")


def test_checkpoints_are_listed_with_what_is_wrong_with_them(
    user, cluster: Cluster, tmp_path: Path
) -> None:
    put_job(cluster, pods=1)
    put_pod(cluster, 0, phase="Running", node="a")
    run = write_run(tmp_path / "volume", (1000, 2000, 3000, 4000))
    (run / "checkpoints" / "step_0003000" / "__0_0.distcp").write_bytes(b"short")
    (run / "checkpoints" / "step_0004000" / "MANIFEST.json").unlink()
    (run / "checkpoints" / "step_0005000.tmp-1234").mkdir()
    (run / "checkpoints" / "step_0005000.tmp-1234" / "__0_0.distcp").write_bytes(b"x")
    code, out, _ = user("checkpoints")
    assert code == 0
    states = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert "whole" in states["step_0001000"] and "newest" not in states["step_0001000"]
    assert states["step_0002000"].endswith("whole (fetch-run compares hashes), the newest")
    assert states["step_0003000"].endswith("damaged: __0_0.distcp has 5 bytes, not 3000")
    assert states["step_0004000"].endswith("damaged: MANIFEST.json is missing or cannot be read")
    assert states["step_0005000.tmp-1234"].endswith("being written, or left by a killed save")
    assert states["step_0001000"].split()[1:4] == ["1000", "8.06", "kB"]


def test_status_names_the_resource_that_nodes_offer(user, cluster: Cluster, tmp_path: Path) -> None:
    put_job(cluster, pods=1)
    write_run(tmp_path / "volume")
    put_pod(cluster, 0, message="0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    cluster.nodes_list_only = False
    cluster.nodes({"name": "a", "gpus": 8, "resource": "nvidia.com/a100"})
    with ReaderRuns(cluster):
        code, out, _ = user("status")
    assert code == 0
    assert (
        "no node offers nvidia.com/gpu; this cluster has nvidia.com/a100: "
        "GPU_RESOURCE=nvidia.com/a100, then make restart" in out
    )
