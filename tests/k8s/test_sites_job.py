"""A job of several sites (SYNC=diloco) in the in-memory cluster: what is sent, who owns the lighthouse, what looks
after it, and that nothing of it stays. test_sites_end_to_end.py trains one."""

import json
from pathlib import Path

import pytest

from k8s.cluster.job_spec import cluster_config
from k8s.cluster.render import objects, render
from tests.cluster_sim.cluster import Cluster
from tests.k8s.running_job import (
    JOB,
    RUN,
    put_data_job,
    put_job,
    put_pod,
    sender,
    stamp,
    write_checkpoint,
    write_run,
)
from tests.k8s.test_render import HELD, NO_GPUS, PRODUCTS, TIGHTLY, TOGETHER, field_ref
from tests.k8s.user import A100, User, a_user

user = a_user
NAME, SITES = f"{JOB}-lighthouse", {"SYNC": "diloco"}
LABELS = {
    "app.kubernetes.io/name": "pure-transformer",
    "app.kubernetes.io/instance": JOB,
    "app.kubernetes.io/component": "lighthouse",
}


@pytest.fixture
def looks(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Somebody at a terminal who sent the run `a-run`; called with a command, returns how it ended."""
    return sender(cluster, tmp_path, monkeypatch, capsys)


def names(cluster: Cluster, *kinds: str) -> set[str]:
    return {
        f"{kind}/{thing['metadata']['name']}"
        for kind in kinds or ("Job", "Service", "Pod")
        for thing in cluster.objects(kind)
    }


# ---- What is sent


def test_the_lighthouse_is_a_small_job_with_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.env").write_text("")
    c, _ = cluster_config(
        {
            "ENV_FILE": str(tmp_path / "own.env"),
            "TOLERATIONS": "a",
            "PRIORITY_CLASS": "low",
            **SITES,
        }
    )
    things = objects(render(c, "a:b"))
    service, job = things[-2:]
    settings = next(thing["metadata"]["name"] for thing in things if thing["kind"] == "ConfigMap")
    small = {"cpu": "1", "memory": "2Gi", "ephemeral-storage": "1Gi"}
    note = {"pure-transformer/run-name": "xlarge-8xa100"}
    assert service == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "labels": LABELS},
        "spec": {
            "publishNotReadyAddresses": True,
            "selector": LABELS,
            "ports": [{"name": "lighthouse", "port": 29510}, {"name": "store", "port": 29511}],
        },
    }
    assert job == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": NAME, "labels": LABELS, "annotations": note},
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 100000,
            "ttlSecondsAfterFinished": 300,
            "template": {
                "metadata": {"labels": LABELS, "annotations": note},
                "spec": {
                    "restartPolicy": "OnFailure",
                    "terminationGracePeriodSeconds": 5,
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": HELD,
                    "tolerations": [{"key": "a", "operator": "Exists"}],
                    "priorityClassName": "low",
                    "containers": [
                        {
                            "name": "lighthouse",
                            "image": "a:b",
                            "workingDir": "/app",
                            "command": [
                                "tini",
                                "--",
                                "/opt/venv/bin/python",
                                "-m",
                                "train.diloco.lighthouse",
                            ],
                            "securityContext": TIGHTLY,
                            "envFrom": [{"configMapRef": {"name": settings}}],
                            "env": [
                                {"name": "WANDB_MODE", "value": "disabled"},
                                field_ref("K8S_NODE", "spec.nodeName"),
                                {
                                    "name": "RUN_SECRET",
                                    "valueFrom": {
                                        "secretKeyRef": {
                                            "name": "pure-transformer-secrets",
                                            "key": "RUN_SECRET",
                                            "optional": True,
                                        }
                                    },
                                },
                                NO_GPUS,
                            ],
                            "ports": [
                                {"name": "lighthouse", "containerPort": 29510},
                                {"name": "store", "containerPort": 29511},
                            ],
                            "resources": {"requests": small, "limits": small},
                            "terminationMessagePolicy": "FallbackToLogsOnError",
                            "volumeMounts": [
                                {"name": "volume", "mountPath": "/volume", "readOnly": True},
                                {"name": "tmp", "mountPath": "/tmp"},
                            ],
                        }
                    ],
                    "volumes": [
                        {
                            "name": "volume",
                            "persistentVolumeClaim": {"claimName": "pure-transformer"},
                        },
                        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
                    ],
                },
            },
        },
    }


def test_each_pod_is_a_site_with_a_name_wherever_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "own.env").write_text("")
    c, _ = cluster_config({"ENV_FILE": str(tmp_path / "own.env"), **SITES})
    things = objects(render(c, "a:b"))
    job = next(thing for thing in things if thing["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["affinity"] == {"nodeAffinity": PRODUCTS, "podAffinity": TOGETHER}
    assert pod["containers"][0]["env"][0] == field_ref(
        "NODE_RANK", "metadata.labels['batch.kubernetes.io/job-completion-index']"
    )
    assert (
        pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
        and pod["subdomain"] == JOB
    )
    for meta in (job["metadata"], job["spec"]["template"]["metadata"]):
        assert meta["annotations"]["pure-transformer/sync"] == "diloco"
    assert not [
        thing
        for thing in objects(render(c, "a:b", data_job=True))
        if "lighthouse" in json.dumps(thing["metadata"])
    ], "data is made without"


# ---- Sent, sent again, taken back


def test_the_lighthouse_is_owned_by_the_job_and_goes_with_it(user: User, cluster: Cluster) -> None:
    done = user.launch(**SITES)
    assert done.code == 0, done.err
    assert (
        f"job.batch/{NAME}" in done.out
        and f"service/{NAME}" in done.out
        and "SYNC=diloco" in done.out
    )
    owner = cluster.get("Job", JOB)["metadata"]["uid"]
    for kind in ("Job", "Service"):
        (reference,) = cluster.get(kind, NAME)["metadata"]["ownerReferences"]
        assert (reference["uid"], reference["blockOwnerDeletion"]) == (owner, False)
    cluster.store.delete(
        cluster.key("Job", JOB), propagation="Foreground"
    )  # by hand, as by the clock
    assert names(cluster) == {f"Service/{JOB}"}


def test_the_same_again_changes_nothing_but_a_lighthouse_that_is_gone(
    user: User, cluster: Cluster
) -> None:
    assert user.launch(**SITES).code == 0
    before, job = names(cluster), cluster.get("Job", JOB)
    again = user.launch(**SITES)
    assert (
        again.code == 0
        and "nothing was applied" in again.out
        and "lighthouse was gone" not in again.out
    )
    cluster.store.delete(cluster.key("Job", NAME))
    again = user.launch(**SITES)
    assert again.code == 0 and "its lighthouse was gone, and is applied again: " in again.out
    assert names(cluster) == before and cluster.get("Job", JOB) == job


def test_restart_replaces_both_and_other_settings_are_told(user: User, cluster: Cluster) -> None:
    assert user.launch(**SITES).code == 0
    old = {name: cluster.get("Job", name)["metadata"]["uid"] for name in (JOB, NAME)}
    other = user.launch(SYNC_EVERY="100", **SITES)
    assert other.code == 64 and "SYNC_EVERY=(default) there, 100 now" in other.err
    assert user.launch("restart", SYNC_EVERY="100", **SITES).code == 0
    now = {name: cluster.get("Job", name)["metadata"] for name in (JOB, NAME)}
    assert now[JOB]["uid"] != old[JOB] and now[NAME]["uid"] != old[NAME]
    assert now[NAME]["ownerReferences"][0]["uid"] == now[JOB]["uid"]
    assert user.launch("restart").code == 0, "and at one site again"
    assert names(cluster, "Job", "Service") == {f"Job/{JOB}", f"Service/{JOB}"}


def test_who_gives_up_waiting_leaves_nothing_of_it(user: User, cluster: Cluster) -> None:
    def cannot_fetch(pod: str) -> None:
        cluster.set_pod(pod, waiting_reason="ErrImagePull", message="not found")

    with user.scheduler(lambda index: "gpu-0", cannot_fetch):
        done = user.launch(WAIT="1", **SITES)
    assert done.code == 78 and "giving up: what was sent is taken back" in done.out
    assert names(cluster, "Job", "Service") == set()


def test_pods_at_several_sites_are_what_it_is_for(user: User, cluster: Cluster) -> None:
    cluster.nodes(
        *[{"name": f"n{i}", "zone": f"z{i}", "product": A100, "gpus": 2} for i in range(4)]
    )
    with user.scheduler(lambda index: f"n{index}" if index < 3 else None):
        done = user.launch(**SITES)
    assert done.code == 0, done.err
    assert "the pods are at 3 sites (z0, z1, z2), which SYNC=diloco is made for" in done.out
    assert "SYNC_EVERY=30" in done.out and "Expected efficiency" not in done.out
    assert (
        "1 of 4 pods have no node" in done.out
        and "Pods that have one train without them" in done.out
    )


# ---- Looked after


def put_sites(cluster: Cluster, tmp_path: Path) -> Path:
    """A Job of three sites that run, of which the third is silent, and its lighthouse. Returns the run's folder."""
    cluster.nodes({"name": "a", "zone": "ucsd"}, {"name": "b", "zone": "ksu"})
    job = put_job(cluster, pods=3)
    job["metadata"]["annotations"]["pure-transformer/sync"] = "diloco"
    cluster.put(job)
    for index in range(3):
        put_pod(cluster, index, phase="Running", node="a" if index else "b")
    put_lighthouse(cluster)
    run = write_run(tmp_path / "volume")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(
            "\n"
            + json.dumps(
                {
                    "schema": 1,
                    "event": "sync",
                    "time": 1,
                    "step": 2100,
                    "sites": 2,
                    "committed": True,
                }
            )
            + "\n"
        )
    state = json.loads((run / "STATUS.json").read_text())
    (run / "site_1").mkdir()
    (run / "site_1" / "STATUS.json").write_text(
        json.dumps(state | {"step": 2099, "host": f"{JOB}-1"}, indent=1)
    )
    (run / "site_2").mkdir()
    (run / "site_2" / "STATUS.json").write_text(json.dumps(state | {"step": 40, "heartbeat": 1.0}))
    (run / "site_1" / "train.log").write_text("2026-11-22 00:41:31,000 I am site 1\n")
    return run


def put_lighthouse(cluster: Cluster) -> None:
    """The Job of the lighthouse, and its pod, which runs."""
    pod = cluster.get("Pod", put_data_job(cluster, phase="Running", node="b"))
    job = cluster.get("Job", f"{JOB}-data")
    cluster.store.delete(cluster.key("Job", f"{JOB}-data"))
    job["metadata"] |= {"name": NAME, "labels": LABELS}
    job["spec"]["template"]["metadata"]["labels"] = LABELS
    uid = cluster.put(job)["metadata"]["uid"]
    pod["metadata"] |= {
        "name": f"{NAME}-bbbbb",
        "labels": LABELS | {"batch.kubernetes.io/job-name": NAME},
    }
    pod["metadata"]["ownerReferences"][0] |= {"name": NAME, "uid": uid}
    cluster.put(pod)


def test_status_tells_the_sites_and_counts_the_lighthouse_as_none(
    looks, cluster: Cluster, tmp_path: Path
) -> None:
    put_sites(cluster, tmp_path)
    code, out, _ = looks("status")
    lines = out.splitlines()
    assert code == 0 and lines[0] == f"Job {JOB} in namespace lab: running: all 3 pods run"
    assert lines[1] == f"Job {NAME} (its sites find each other by it): running: its pod runs"
    assert [line.split()[0] for line in lines[3:6]] == ["0", "1", "2"] and NAME not in "".join(
        lines[2:6]
    )
    told = {line[:6]: line for line in lines if line.startswith("site ")}
    assert (
        "training       step 2099/190735  loss 3.2500" in told["site 1"]
        and f"on {JOB}-1" in told["site 1"]
    )
    assert "training, and silent step 40/190735" in told["site 2"]
    assert any(line.startswith("last sync: step 2100, of 2 sites, ") for line in lines)
    assert "every step waits" not in out and "last checkpoint: step 2000" in out


def test_status_says_what_to_do_about_a_lighthouse_that_is_gone_or_left(
    looks, cluster: Cluster, tmp_path: Path
) -> None:
    put_sites(cluster, tmp_path)
    job = cluster.get("Job", JOB)
    job["status"] = {
        "conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": stamp()}]
    }
    cluster.put(job)
    assert "running: its pod runs; make stop takes it away too" in looks("status")[1]
    job["status"] = {}
    cluster.put(job)
    cluster.store.delete(cluster.key("Job", NAME))
    code, out, _ = looks("status")
    assert code == 0 and f"Job {NAME}, by which the sites find each other, is not there" in out
    assert "make train-8xa100 with the same settings creates it again" in out


def test_stop_takes_the_lighthouse_away_behind_the_sites(
    looks, cluster: Cluster, tmp_path: Path
) -> None:
    put_sites(cluster, tmp_path)
    code, out, err = looks("stop")
    assert code == 0, err
    assert names(cluster) == set()
    deleted = [
        request.path.rpartition("/")[2]
        for request in cluster.requests
        if request.method == "DELETE" and "/jobs/" in request.path
    ]
    assert deleted == [JOB, NAME]
    assert (
        f"stopping Job {JOB}: its pods save and leave" in out and f"stopping Job {NAME}" not in out
    )
    assert f"Job {NAME}, by which its sites find each other, is gone" in out
    put_lighthouse(cluster)  # one that was left
    code, out, _ = looks("stop")
    assert (
        code == 0
        and f"Job {NAME}, by which its sites find each other, is gone" in out
        and names(cluster) == set()
    )


def test_logs_describe_checkpoints_and_results_are_those_of_the_sites(
    looks, cluster: Cluster, tmp_path: Path
) -> None:
    run = put_sites(cluster, tmp_path)
    write_checkpoint(run / "site_1", 5)
    cluster.logs[f"{JOB}-1-aaaaa"], cluster.logs[f"{NAME}-bbbbb"] = (
        "of pod 1\n",
        "of the lighthouse\n",
    )
    assert looks("logs", NODE_RANK="1")[1] == "of pod 1\n"
    assert "of the lighthouse" not in looks("logs", ONLY="errors")[1]
    assert "sites: each pod is one" in looks("describe")[1]
    assert "step_0000005" not in looks("checkpoints")[1]
    code, _, err = looks("fetch-run")
    assert code == 0, err
    here = tmp_path / "runs-here" / RUN
    assert (here / "site_1" / "STATUS.json").read_bytes() == (
        run / "site_1" / "STATUS.json"
    ).read_bytes()
    assert (
        not (here / "site_1" / "checkpoints").exists()
        and (here / "checkpoints" / "step_0002000").is_dir()
    )
    for index in range(3):
        cluster.store.delete(cluster.key("Pod", f"{JOB}-{index}-aaaaa"), grace=0)
    put_pod(cluster, 0, "again", phase="Running", node="b")
    assert looks("logs", NODE_RANK="1")[1] == "2026-11-22 00:41:31,000 I am site 1\n", (
        "of the volume"
    )
