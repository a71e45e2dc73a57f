"""A run in the cluster for tests of the commands that look after one: its Job, pods and volume, as the API shows them
some time after make train-8xa100, and a stand-in for the shell in its pods."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from k8s import jobs
from k8s.cluster import volume
from tests import metadata_pickle
from tests.cluster_sim.cluster import Cluster

JOB, RUN, IMAGE, VOLUME = (
    "pure-transformer-8xa100",
    "a-run",
    "registry.example.org/lab/image:1",
    "pure-transformer",
)
LABELS = {"app.kubernetes.io/name": "pure-transformer", "app.kubernetes.io/instance": JOB}
OF_JOB, INDEX = "batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index"
RUN_OF = "pure-transformer/run-name"

Exec = Callable[..., tuple[int, bytes, bytes]]


def sender(
    cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    """Somebody at a terminal who sent the run `a-run` to the cluster; called with a command, returns how it ended."""
    runs = folder / "runs-here"
    (runs / RUN).mkdir(parents=True)
    (folder / "empty.env").touch()
    (runs / RUN / "cluster.json").write_text(
        json.dumps(
            {
                "job_name": JOB,
                "namespace": "lab",
                "context": "test",
                "image": IMAGE,
                "volume": VOLUME,
                "sent": 1,
            }
        )
    )
    settings = {
        "RUNS_DIR": str(runs),
        "RUN_NAME": RUN,
        "ENV_FILE": str(folder / "empty.env"),
        **cluster.env,
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(volume, "POLL_S", 0.05)
    cluster.exec = shell(folder / "volume")

    def call(command: str, **more: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            for name, value in more.items():
                patch.setenv(name, value)
            code = jobs.main([command])
        return (code, *capsys.readouterr())

    return call


def stamp(ago_s: float = 0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago_s))


def pod_spec(container: str = "trainer") -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 30,
        "containers": [
            {
                "name": container,
                "image": IMAGE,
                "envFrom": [{"configMapRef": {"name": f"{JOB}-env-abc"}}],
                "resources": {
                    "limits": {"cpu": "16", "memory": "96Gi", "nvidia.com/gpu": "2"},
                    "requests": {"cpu": "16", "memory": "96Gi", "nvidia.com/gpu": "2"},
                },
            }
        ],
    }


def put_job(cluster: Cluster, pods: int = 4, run: str = RUN, **status: Any) -> dict[str, Any]:
    """The Job, its ConfigMap and its volume's claim."""
    cluster.put(
        {
            "kind": "ConfigMap",
            "apiVersion": "v1",
            "metadata": {"name": f"{JOB}-env-abc"},
            "data": {
                "PRESET": "xlarge-8xa100",
                "RUNS_DIR": "/volume/runs",
                "DATA_DIR": "/volume/data",
                "NODES": str(pods),
                "LEARNING_RATE": "2e-4",
                "SAVE_EVERY": "1000",
            },
        }
    )
    put_volume(cluster)
    job = cluster.put(
        {
            "kind": "Job",
            "apiVersion": "batch/v1",
            "metadata": {
                "name": JOB,
                "labels": LABELS,
                "annotations": {"pure-transformer/run-name": run},
            },
            "spec": {
                "completionMode": "Indexed",
                "completions": pods,
                "parallelism": pods,
                "backoffLimit": 100,
                "template": {"metadata": {"labels": LABELS}, "spec": pod_spec()},
            },
        }
    )
    if status:
        job["status"] = status
        job = cluster.put(job)
    return job


def put_data_job(cluster: Cluster, run: str = RUN, **how: Any) -> str:
    """The Job of make data and its pod, which has no index; how: as Cluster.set_pod takes it. Returns its name."""
    name, pod = f"{JOB}-data", f"{JOB}-data-bbbbb"
    notes = {RUN_OF: run}
    spec = pod_spec()
    spec["containers"][0]["resources"] = {"limits": {"cpu": "8"}, "requests": {"cpu": "8"}}
    job = cluster.put(
        {
            "kind": "Job",
            "apiVersion": "batch/v1",
            "metadata": {"name": name, "labels": LABELS, "annotations": notes},
            "spec": {
                "completions": 1,
                "parallelism": 1,
                "backoffLimit": 25,
                "template": {"metadata": {"labels": LABELS, "annotations": notes}, "spec": spec},
            },
        }
    )
    cluster.put(
        {
            "kind": "Pod",
            "apiVersion": "v1",
            "spec": spec,
            "metadata": {
                "name": pod,
                "labels": LABELS | {OF_JOB: name},
                "annotations": notes,
                "ownerReferences": [
                    {
                        "apiVersion": "batch/v1",
                        "kind": "Job",
                        "name": name,
                        "uid": job["metadata"]["uid"],
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
        }
    )
    if how:
        cluster.set_pod(pod, **how)
    return pod


def put_volume(cluster: Cluster) -> None:
    cluster.put(
        {
            "kind": "PersistentVolumeClaim",
            "apiVersion": "v1",
            "metadata": {"name": VOLUME},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "500Gi"}},
            },
        }
    )


def put_pod(cluster: Cluster, index: int, suffix: str = "aaaaa", **how: Any) -> str:
    """A pod of the Job; how: as Cluster.set_pod takes it. Returns its name."""
    name = f"{JOB}-{index}-{suffix}"
    meta = cluster.get("Job", JOB)["metadata"]
    owner, run_of = meta["uid"], meta["annotations"][RUN_OF]
    cluster.put(
        {
            "kind": "Pod",
            "apiVersion": "v1",
            "spec": pod_spec(),
            "metadata": {
                "name": name,
                "labels": LABELS | {OF_JOB: JOB, INDEX: str(index)},
                "annotations": {INDEX: str(index), RUN_OF: run_of},
                "ownerReferences": [
                    {
                        "apiVersion": "batch/v1",
                        "kind": "Job",
                        "name": JOB,
                        "uid": owner,
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
        }
    )
    if how:
        cluster.set_pod(name, **how)
    return name


def put_event(
    cluster: Cluster, about: str, reason: str, message: str, ago_s: float = 10, kind: str = "Pod"
) -> None:
    cluster.put(
        {
            "kind": "Event",
            "apiVersion": "v1",
            "type": "Warning",
            "reason": reason,
            "message": message,
            "metadata": {"name": f"{about}.{reason.lower()}.{int(ago_s)}", "namespace": "lab"},
            "count": 1,
            "involvedObject": {"kind": kind, "name": about, "namespace": "lab"},
            "firstTimestamp": stamp(ago_s),
            "lastTimestamp": stamp(ago_s),
        }
    )


def shell(volume: Path, calls: list[tuple[str, str]] | None = None) -> Exec:
    """What runs the commands of `kubectl exec` on this machine, /volume being a folder of the test."""

    def run(pod: str, container: str, argv: list[str], **_: bytes) -> tuple[int, bytes, bytes]:
        if calls is not None:
            calls.append((pod, container))
        done = subprocess.run(
            [word.replace("/volume", str(volume)) for word in argv],
            capture_output=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def write_checkpoint(run: Path, step: int, size: int = 3000) -> Path:
    """A checkpoint in the form of train/checkpoint/checkpoint.py, by an own hand."""
    folder = run / "checkpoints" / f"step_{step:07d}"
    folder.mkdir(parents=True)
    parts = {"model.a": ("__0_0.distcp", size // 4), "model.b": ("__1_0.distcp", size // 4)}
    files = {
        ".metadata": metadata_pickle.dumps(metadata_pickle.metadata(parts)),
        "__0_0.distcp": os.urandom(size),
        "__1_0.distcp": os.urandom(size + 1),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    manifest: dict[str, Any] = {
        "schema": 2,
        "step": step,
        "data": {"step": step, "gaps": [], "fingerprint": "0123-4567-89ab", "opened": {}},
        "files": {
            name: [len(content), xxhash.xxh3_64(content).hexdigest()]
            for name, content in files.items()
        },
        "hash": None,
    }
    canonical = json.dumps(manifest, sort_keys=True).encode()
    manifest["hash"] = xxhash.xxh3_64(canonical).hexdigest()
    (folder / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
    return folder


def write_run(volume: Path, steps: tuple[int, ...] = (1000, 2000), **state: Any) -> Path:
    """A run as it lies on the volume."""
    run = volume / "runs" / RUN
    (run / "logs").mkdir(parents=True)
    (run / "plots").mkdir()
    (run / "config.json").write_text('{"settings": {}, "attempts": []}')
    now = time.time()
    facts = {
        "schema": 1,
        "phase": "training",
        "host": f"{JOB}-0",
        "step": 2100,
        "last_step": 190735,
        "loss": 3.25,
        "heartbeat": now - 2,
    } | state
    (run / "STATUS.json").write_text(json.dumps(facts, indent=1) + "\n")
    records = [
        {
            "schema": 1,
            "event": "checkpoint",
            "time": now - 90,
            "step": 2000,
            "seconds": 1.0,
            "bytes": 1,
        },
        *(
            {"schema": 1, "event": "step", "time": now - 80, "step": step}
            for step in range(2001, 2100)
        ),
        {
            "schema": 1,
            "event": "step",
            "time": now - 2,
            "step": 2100,
            "loss": 3.25,
            "lr": 3e-4,
            "grad_norm": 0.4,
            "step_ms": 3900.0,
            "tokens_per_s": 134432.0,
            "mfu": 49.7,
            "mem_gib": 56.1,
            "tokens": 2100 * 524288,
        },
    ]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records) + '{"schema": 1, "ev'
    )
    (run / "train.log").write_text(
        "2026-11-22 00:41:31,442 step=2100/190735 loss=3.2500 lr=3.000e-04\n"
    )
    (run / "logs" / "node_0.log").write_text((run / "train.log").read_text())
    (run / "logs" / "node_2.log").write_text(
        "2026-11-22 00:41:31,000 rank=4 node 2: host=c ranks=4-5 of 8\n"
    )
    (run / "plots" / "loss_curves.png").write_bytes(bytes(range(256)) * 8)
    for step in steps:
        write_checkpoint(run, step)
    return run


class ReaderRuns:
    """Lets a reader pod run as soon as it is made, as a kubelet does. Use as `with ReaderRuns(cluster)`."""

    def __init__(self, cluster: Cluster, **how: Any):
        self.cluster, self.how, self.over = (
            cluster,
            how or {"phase": "Running", "node": "n1"},
            threading.Event(),
        )
        self.made: list[str] = []
        self.specs: list[dict[str, Any]] = []
        self.thread = threading.Thread(target=self.work, daemon=True)

    def __enter__(self) -> "ReaderRuns":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(10)

    def work(self) -> None:
        while not self.over.wait(0.02):
            for pod in self.cluster.objects("Pod"):
                uid = pod["metadata"]["uid"]
                is_new = uid not in self.made and not pod["status"].get("containerStatuses")
                if pod["metadata"]["name"] in (f"{JOB}-reader", f"{JOB}-writer") and is_new:
                    self.made.append(uid)
                    self.specs.append(pod)
                    self.cluster.set_pod(pod["metadata"]["name"], **self.how)
