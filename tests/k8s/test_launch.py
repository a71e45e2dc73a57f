"""make train-8xa100, restart and data: the real kubectl against the in-memory API, from checks to what to type next."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s import launch
from k8s.cluster import placement
from record import bad_nodes
from record.bad_nodes import BadNode
from settings import ROOT
from tests.cluster_sim.cluster import Cluster
from tests.k8s.running_job import put_volume, shell
from tests.k8s.test_controller import until
from tests.k8s.user import A100, DIGEST, User, a_user

ALL = ("Job", "Service", "ConfigMap", "NetworkPolicy", "PersistentVolumeClaim", "Secret", "Pod")
user = a_user


def test_a_launch_tells_its_plan_makes_all_that_a_run_needs_and_says_what_to_type_next(
    user: User, cluster: Cluster
) -> None:
    before, done = time.time(), user.launch(RUN_NAME="first")
    assert done.code == 0, done.err
    job = cluster.get("Job", "pure-transformer-8xa100")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == user.settings["IMAGE"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert [thing["metadata"]["name"] for thing in cluster.objects("Service")] == [
        "pure-transformer-8xa100"
    ]
    assert [thing["metadata"]["name"] for thing in cluster.objects("NetworkPolicy")] == [
        "pure-transformer-8xa100"
    ]
    (config_map,) = cluster.objects("ConfigMap", "lab")
    assert container["envFrom"][0]["configMapRef"]["name"] == config_map["metadata"]["name"]
    claim = cluster.get("PersistentVolumeClaim", "pure-transformer")
    assert claim["spec"]["resources"]["requests"]["storage"] == "500Gi"
    (secret,) = cluster.objects("Secret")
    assert secret["data"].keys() == {"RUN_SECRET"}  # the one that is made
    for command in (
        "make status RUN_NAME=first",
        "make logs RUN_NAME=first",
        "make stop RUN_NAME=first",
    ):
        assert command in done.out
    owners = {field["manager"] for field in job["metadata"].get("managedFields", [])}
    assert not owners or "pure-transformer" in owners
    applied = [request for request in cluster.requests if request.method == "PATCH"]
    managers = {request.query["fieldManager"] for request in applied}
    assert all(manager.startswith("pure-transformer") for manager in managers)

    plan, rest = done.out.split("applied:")
    assert plan.startswith("plan (computed, not measured)") and "INDEX" in rest
    assert "1,336,248,320 parameters" in plan and "190,735 steps of 524,288" in plan
    # 205.3 hours of computing, 0.6 of evaluation, 136 of waiting 2.57 s for gradients in each of 190,735 steps
    assert "342 h, 2,7" in plan and " GPU-hours with LAN_GBIT=25 between pods: 81," in plan
    assert "MFU         50% of 8 x a100-80gb-sxm: presets/xlarge-8xa100.env" in plan
    note = json.loads((user.runs / "first" / "cluster.json").read_text())
    assert before - 1 <= note.pop("sent") <= time.time()
    assert note == {
        "job_name": "pure-transformer-8xa100",
        "namespace": "lab",
        "context": "test",
        "image": user.settings["IMAGE"],
        "volume": "pure-transformer",
    }


def test_dry_run_prints_the_manifests_and_asks_no_cluster(user: User, cluster: Cluster) -> None:
    done = user.launch(DRY_RUN="1", HF_TOKEN="hf-not-to-be-seen", LEARNIN_RATE="1")
    kinds = [thing["kind"] for thing in yaml.safe_load_all(done.out)]
    assert done.code == 0
    assert kinds[0] == "PersistentVolumeClaim" and sorted(kinds[1:]) == [
        "ConfigMap",
        "Job",
        "NetworkPolicy",
        "Service",
    ]
    assert [
        request for request in cluster.requests if request.path != "/version"
    ] == []  # kubectl's own curiosity
    assert not user.runs.exists()
    assert "hf-not-to-be-seen" not in done.out + done.err
    remark = "Warning: LEARNIN_RATE (environment) is ignored. Did you mean LEARNING_RATE?"
    assert remark in done.err and remark not in done.out  # remarks are no part of the YAML


def test_dry_run_needs_no_kubeconfig(
    user: User, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert user.launch(DRY_RUN="1").code == 0


def test_as_the_makefile_calls_it(user: User, cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "k8s.launch"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=user.environment(DRY_RUN="1"),
    )
    assert done.returncode == 0, done.stderr
    assert len(list(yaml.safe_load_all(done.stdout))) == 5


def test_the_same_again_changes_nothing(user: User, cluster: Cluster) -> None:
    assert user.launch().code == 0
    before = {kind: cluster.objects(kind) for kind in ALL}
    cluster.requests.clear()
    again = user.launch(HF_TOKEN="hf-one")
    assert "HF_TOKEN: not sent again; where it has changed, make restart sends it" in again.out
    assert again.code == 0
    assert (
        "is in namespace lab already, with these settings and this image; nothing was applied"
        in again.out
    )
    assert {request.method for request in cluster.requests} <= {
        "GET",
        "POST",
    }  # POST: reviews of rights
    assert {kind: cluster.objects(kind) for kind in ALL} == before


def test_a_changed_job_is_explained_and_left(user: User, cluster: Cluster) -> None:
    assert user.launch().code == 0
    before = cluster.get("Job", "pure-transformer-8xa100")
    done = user.launch(MICRO_BATCH_SIZE="4", IMAGE=f"registry.example.org/lab/other@{DIGEST}")
    assert done.code == 64
    assert "MICRO_BATCH_SIZE=8 there, 4 now" in done.err
    assert (
        f"image {user.settings['IMAGE']} there, registry.example.org/lab/other@{DIGEST} now"
        in done.err
    )
    assert "make restart saves, stops and replaces it" in done.err
    assert cluster.get("Job", "pure-transformer-8xa100") == before


def test_a_changed_shape_is_explained_field_by_field(user: User, cluster: Cluster) -> None:
    assert user.launch().code == 0
    done = user.launch(POD_MEMORY_GB="48", GRACE_PERIOD_S="200")
    assert done.code == 64
    assert "terminationGracePeriodSeconds 180 there, 200 now" in done.err
    assert 'containers[trainer].resources.limits.memory "96Gi" there, "48Gi" now' in done.err


def test_restart_replaces_the_job_and_keeps_volume_and_secret(user: User, cluster: Cluster) -> None:
    assert user.launch(HF_TOKEN="hf-one").code == 0
    cluster.start_kubelet(processes=False)
    old = {
        kind: cluster.objects(kind)[0]["metadata"]["uid"]
        for kind in ("Job", "PersistentVolumeClaim", "Secret")
    }
    old_settings = cluster.objects("ConfigMap", "lab")[0]["metadata"]["name"]
    done = user.launch("restart", MICRO_BATCH_SIZE="4")
    assert done.code == 0, done.err
    now = {kind: cluster.objects(kind)[0]["metadata"]["uid"] for kind in old}
    assert now["Job"] != old["Job"]
    assert (now["PersistentVolumeClaim"], now["Secret"]) == (
        old["PersistentVolumeClaim"],
        old["Secret"],
    )
    (settings,) = cluster.objects("ConfigMap", "lab")  # that of the earlier launch is removed
    assert (
        settings["metadata"]["name"] != old_settings and settings["data"]["MICRO_BATCH_SIZE"] == "4"
    )


def test_nodes_that_pods_found_bad_are_left_out_and_change_no_hash(
    user: User, cluster: Cluster, tmp_path: Path
) -> None:
    assert user.launch().code == 0
    name = "pure-transformer-8xa100"
    before = cluster.get("Job", name)
    cluster.start_kubelet(processes=False)
    until(lambda: len(cluster.objects("Pod")) == 4)
    cluster.set_pod(cluster.objects("Pod")[0]["metadata"]["name"], phase="Running", node="gpu-0")
    cluster.exec = shell(tmp_path / "volume")
    folder = tmp_path / "volume" / "runs" / ".bad_nodes"
    bad_nodes.add(folder, "gpu-1", "GPU 3 is lost")
    bad_nodes.write(folder, BadNode("gpu-7", "no driver", time.time() - 25 * 3600))
    done = user.launch("restart", EXCLUDE_NODES="gpu-9.example.org")
    assert done.code == 0, done.err
    assert "no pod goes to gpu-1: make bad-nodes says why" in done.out
    job = cluster.get("Job", name)
    assert excluded(job) == ["gpu-9.example.org", "gpu-1"]
    again = user.launch(EXCLUDE_NODES="gpu-9.example.org")
    assert again.code == 0 and "nothing was applied" in again.out, "the list is no other Job"
    assert cluster.get("Job", name)["metadata"]["uid"] == job["metadata"]["uid"]
    assert user.launch().code == 64, "another EXCLUDE_NODES is one"
    assert excluded(before) == []


def test_a_list_of_bad_nodes_that_cannot_be_read_keeps_no_launch(
    user: User, cluster: Cluster
) -> None:
    put_volume(cluster)
    cluster.forbid("create", "pods")
    done = user.launch()
    assert done.code == 0 and "bad nodes are left to the pods, which refuse them: " in done.err


def excluded(job: dict[str, Any]) -> list[str]:
    """The nodes that pods of a Job may not run on."""
    affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    fields = term.get("matchFields", [])
    assert all((f["key"], f["operator"]) == ("metadata.name", "NotIn") for f in fields)
    return [name for field in fields for name in field["values"]]


def test_restart_of_a_bad_setting_stops_nothing(user: User, cluster: Cluster) -> None:
    assert user.launch().code == 0
    before = cluster.get("Job", "pure-transformer-8xa100")
    assert user.launch("restart", SITE="nowhere").code == 64
    assert cluster.get("Job", "pure-transformer-8xa100") == before


def test_restart_without_a_job_launches(user: User, cluster: Cluster) -> None:
    assert user.launch("restart").code == 0
    assert len(cluster.objects("Job")) == 1


def test_restart_goes_where_the_run_was_sent(user: User, cluster: Cluster) -> None:
    assert user.launch().code == 0
    cluster.put({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "other"}})
    done = user.launch("restart", NAMESPACE="other")
    assert (
        done.code == 64
        and "was sent to namespace lab, and this is about other: set NAMESPACE=lab" in done.err
    )
    assert [job["metadata"]["namespace"] for job in cluster.objects("Job")] == ["lab"]
    note = user.runs / "xlarge-8xa100" / "cluster.json"
    note.write_text(note.read_text().replace('"test"', '"elsewhere"'))
    done = user.launch("restart")
    assert done.code == 64 and "kubectl config use-context elsewhere" in done.err


def test_a_namespace_is_kept_to(user: User, cluster: Cluster) -> None:
    cluster.put({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "other"}})
    assert user.launch(NAMESPACE="other", HF_TOKEN="hf-one").code == 0
    for kind in ("Job", "Service", "NetworkPolicy", "PersistentVolumeClaim", "Secret"):
        assert [thing["metadata"]["namespace"] for thing in cluster.objects(kind)] == ["other"]


def test_a_job_on_its_way_out_is_waited_for(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert user.launch().code == 0
    leaving = cluster.get("Job", "pure-transformer-8xa100")
    asked: list[Any] = []

    def wait_until_gone(name: str, namespace: str, patience_s: float) -> None:
        asked.append((name, namespace, patience_s))
        cluster.store.delete(cluster.key("Job", name))

    monkeypatch.setattr(launch, "standing", lambda *_: launch.Standing("leaving", "it leaves"))
    monkeypatch.setattr(launch.apply, "wait_until_gone", wait_until_gone)
    assert user.launch().code == 0
    assert asked == [("pure-transformer-8xa100", "lab", 240)]
    assert (
        cluster.get("Job", "pure-transformer-8xa100")["metadata"]["uid"]
        != leaving["metadata"]["uid"]
    )


# ---- make data WHERE=cluster


def test_data_becomes_a_job_without_gpus(user: User, cluster: Cluster) -> None:
    done = user.launch("data", WHERE="cluster")
    assert done.code == 0, done.err
    (job,) = cluster.objects("Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert job["metadata"]["name"] == "pure-transformer-8xa100-data"
    assert (
        "nvidia.com/gpu" not in container["resources"]["limits"]
        and container["command"][-1] == "data"
    )
    assert "plan (computed, not measured): 208 GB of shards and downloads at most" in done.out
    assert "make logs WHERE=cluster RUN_NAME=xlarge-8xa100" in done.out
    assert not (user.runs / "xlarge-8xa100").exists()  # no run was sent


def test_data_needs_no_gpu_in_the_cluster(user: User, cluster: Cluster) -> None:
    done = user.launch("data", WHERE="cluster", GPU_PRODUCTS="NVIDIA-H200")
    assert done.code == 0, done.err


@pytest.mark.parametrize("ended", ["Complete", "Failed"])
def test_data_that_has_ended_is_sent_again(user: User, cluster: Cluster, ended: str) -> None:
    assert user.launch("data", WHERE="cluster").code == 0
    job = cluster.get("Job", "pure-transformer-8xa100-data")
    job["status"] = {"conditions": [{"type": ended, "status": "True"}]}
    uid = cluster.put(job)["metadata"]["uid"]
    assert user.launch("data", WHERE="cluster").code == 0
    assert cluster.get("Job", "pure-transformer-8xa100-data")["metadata"]["uid"] != uid


def test_data_that_is_at_work_with_other_settings_is_left(user: User, cluster: Cluster) -> None:
    assert user.launch("data", WHERE="cluster").code == 0
    done = user.launch("data", WHERE="cluster", TRAIN_TOKENS="1000000000")
    assert done.code == 64
    assert (
        "kubectl delete job pure-transformer-8xa100-data -n lab, then make data WHERE=cluster"
        in done.err
    )


def test_data_here_is_what_it_always_was(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def execute(path: str, argv: list[str]) -> None:
        started.append([path, *argv])
        raise SystemExit(0)  # it never returns

    monkeypatch.setattr(launch.os, "execv", execute)
    folder = user.runs / "xlarge-8xa100"
    folder.mkdir(parents=True)
    (folder / "cluster.json").write_text('{"job_name": "pure-transformer-8xa100"}')
    for settings in (
        {},
        {"WHERE": "local", "RUN_NAME": "xlarge-8xa100"},
    ):  # that another run was sent says nothing
        with pytest.raises(SystemExit):
            user.launch("data", **settings)
    assert started == 2 * [[sys.executable, sys.executable, "-m", "train.data.prepare", "data"]]
    assert cluster.requests == []
    assert user.launch("data", RUN_NAME="xlarge-8xa100").code == 0  # that one itself
    assert [job["metadata"]["name"] for job in cluster.objects("Job")] == [
        "pure-transformer-8xa100-data"
    ]


# ---- Where the pods are


def test_the_pods_are_listed_and_sites_that_differ_are_said_to_matter(
    user: User, cluster: Cluster
) -> None:
    cluster.nodes(
        *[
            {"name": f"n{i}", "zone": zone, "region": "us", "product": A100, "gpus": gpus}
            for i, (zone, gpus) in enumerate(
                (("ksu", 4), ("okstate", 4), ("sdsu", 8), ("mizzou", 4))
            )
        ]
    )
    with user.scheduler(lambda index: f"n{index}"):
        done = user.launch(RUN_NAME="wan")
    assert done.code == 0, done.err
    rows = [
        line.split() for line in done.out.splitlines() if line.startswith(("0 ", "1 ", "2 ", "3 "))
    ]
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("0", "n0", "ksu"),
        ("1", "n1", "okstate"),
        ("2", "n2", "sdsu"),
        ("3", "n3", "mizzou"),
    ]
    # 6 hops of a quarter of 5.345 GB at 1 and 10 Gbit/s, and 15 ms each, beside 3.875 s of computing
    seconds = {speed: 6 * (1_336_248_320 * 4 / 4 * 8 / (speed * 1e9) + 0.015) for speed in (1, 10)}
    percent = {speed: round(100 * 3.8752 / (3.8752 + wait)) for speed, wait in seconds.items()}
    assert f"{percent[1]}% at 1 Gbit/s and {percent[10]}% at 10 Gbit/s" in done.out
    assert "the pods are at 4 sites (ksu, mizzou, okstate, sdsu)" in done.out
    assert "`make restart SITE=sdsu` puts all pods at one site" in done.out
    assert "`make restart SYNC=diloco`" in done.out and "at some cost in loss" in done.out
    assert (
        cluster.get("ConfigMap", config_map_of(cluster))["data"].get("SYNC", "ddp") == "ddp"
    )  # nothing is switched


def config_map_of(cluster: Cluster) -> str:
    return str(cluster.objects("ConfigMap", "lab")[0]["metadata"]["name"])


def test_one_site_is_not_remarked_on(user: User, cluster: Cluster) -> None:
    with user.scheduler(lambda index: "gpu-0"):
        done = user.launch()
    assert done.code == 0 and "sites (" not in done.out


def test_pods_that_wait_are_told_with_the_schedulers_reason(
    user: User, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PLACE_S", 5.0)
    with user.scheduler(lambda index: "gpu-0" if index < 2 else None):
        done = user.launch()
    assert done.code == 0
    assert (
        "2 of 4 pods have no node (0/2 nodes are available: 2 Insufficient nvidia.com/gpu.)"
        in done.out
    )
    assert "make train-8xa100 WAIT=1 tries until all fit" in done.out
    assert "; where the others land: make status RUN_NAME=xlarge-8xa100\n" in done.out
    assert "waiting for nodes: 2 of 4 pods have one" in done.out


def test_only_the_newest_pod_of_an_index_counts() -> None:
    assert placement.read({"metadata": {"name": "a"}, "spec": {}}) == placement.Pod(
        0, "a", "Pending", ""
    )
