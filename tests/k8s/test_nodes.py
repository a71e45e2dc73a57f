"""make sites: what list-only rights on nodes show, read from the real kubectl's table."""

import subprocess
import sys
from typing import Any

import pytest

from k8s.cluster import nodes
from k8s.cluster.job_spec import cluster_config
from k8s.cluster.kubectl import kubectl
from settings import ROOT
from settings.config import Config
from tests.cluster_sim.cluster import Cluster
from tests.k8s.user import A100, User, a_user

user = a_user
PCIE = "NVIDIA-A100-80GB-PCIe"


@pytest.fixture
def federation(cluster: Cluster) -> None:
    """Nodes of several sites, one of them cordoned and one not ready."""
    cluster.nodes(
        {"name": "a", "zone": "ucsd", "region": "us-west", "product": A100, "gpus": 8},
        {
            "name": "b.long.example.org",
            "zone": "ucsd",
            "region": "us-west",
            "product": A100,
            "gpus": 3,
        },
        {"name": "c", "zone": "ksu", "product": PCIE, "gpus": 2},
        {"name": "d", "zone": "ksu", "region": "us-central", "product": "NVIDIA-L40", "gpus": 8},
        {
            "name": "e",
            "zone": "ksu",
            "region": "us-central",
            "product": PCIE,
            "gpus": 4,
            "ready": False,
        },
        {"name": "no-gpus", "zone": "ksu"},
        {"name": "nowhere", "product": A100, "gpus": 4},
    )
    assert kubectl("config", "current-context").out == "test\n"
    cordoned = {
        "kind": "Node",
        "apiVersion": "v1",
        "spec": {"unschedulable": True},
        "metadata": {
            "name": "f",
            "labels": {
                "topology.kubernetes.io/zone": "ucsd",
                "topology.kubernetes.io/region": "us-west",
                "nvidia.com/gpu.product": A100,
                "nvidia.com/gpu.count": "8",
            },
        },
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    cluster.put(cordoned)


@pytest.fixture
def config(user: User) -> Config:
    return cluster_config(user.settings)[0]


def test_gpus_are_listed_by_site_and_product(
    user: User, cluster: Cluster, federation: None
) -> None:
    for name in ("gpu-0", "gpu-1"):  # those of the usual user
        cluster.store.delete(cluster.key("Node", name))
    done = user.sites()
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()[1:6]]
    assert rows[:-1] == [
        ["-", "-", A100, "*", "4", "1", "0", "2"],
        ["ksu", "-", PCIE, "*", "2", "1", "0", "1"],
        ["ksu", "us-central", "NVIDIA-L40", "8", "1", "0", "-"],
        ["ucsd", "us-west", A100, "*", "11", "2", "1", "5"],
    ]  # a node of three GPUs holds one pod of two
    assert rows[-1][:3] == ["*", "of", "GPU_PRODUCTS."]
    assert "1 node is not ready and left out" in done.out
    assert "Which of them are free cannot be seen" in done.out


def test_only_a_list_of_nodes_is_asked_for(user: User, cluster: Cluster, federation: None) -> None:
    assert user.sites().code == 0
    asked = {request.path for request in cluster.requests if "nodes" in request.path}
    assert asked == {"/api/v1/nodes"}


def test_the_columns_are_read_by_where_they_begin() -> None:
    table = (
        "NAME     STATUS                        ROLES    AGE   VERSION   ZONE   REGION    GPU.PRODUCT  GPU.COUNT\n"
        "node-1   Ready                         <none>   9d    v1.32.4          us-west   NVIDIA-A40   4\n"
        "node-2   NotReady,SchedulingDisabled   <none>   9d    v1.32.4   ksu                            \n"
        "node-3   Ready,SchedulingDisabled      <none>   9d    v1.32.4   ksu              NVIDIA-A40\n"
    )
    assert nodes.parsed(table) == [
        nodes.Node("node-1", True, False, "", "us-west", "NVIDIA-A40", 4),
        nodes.Node("node-2", False, True, "ksu", "", "", 0),
        nodes.Node("node-3", True, True, "ksu", "", "NVIDIA-A40", 0),
    ]
    assert nodes.parsed("") == nodes.parsed("NAME   STATUS\n") == []


def test_room_counts_whole_pods_on_nodes_that_take_them(
    user: User, cluster: Cluster, federation: None, config: Config
) -> None:
    assert nodes.room(nodes.nodes(), config) == {"ucsd": 8 + 5, "ksu": 1, "": 2}


def test_no_gpus_at_all(user: User, cluster: Cluster) -> None:
    for name in ("gpu-0", "gpu-1"):
        cluster.store.delete(cluster.key("Node", name))
    done = user.sites()
    assert done.code == 0 and "no node that is ready says which GPUs it has" in done.out


def test_who_may_not_list_nodes_is_told(user: User, cluster: Cluster) -> None:
    cluster.forbid("list", "nodes")
    done = user.sites()
    assert done.code == 78 and "you may not list nodes; ask its administrator" in done.err


def test_a_bad_setting_is_told(user: User, cluster: Cluster) -> None:
    done = user.sites(SITE="a/b")
    assert done.code == 64 and "SITE=a/b (environment): Must be" in done.err


def test_as_the_makefile_calls_it(user: User, cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "k8s.cluster.nodes"],
        cwd=ROOT,
        env=user.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and A100 in done.stdout, done.stderr


def test_names_are_not_listed_by_the_hundred() -> None:
    assert nodes.some(["b", "a"]) == "a, b" and nodes.some([]) == "none"
    assert nodes.some(f"site-{i:02}" for i in range(12)).endswith("site-09 and 2 more")


def test_gpus_are_requested_by_the_name_under_which_nodes_of_the_products_offer_them(
    user: User, cluster: Cluster
) -> None:
    cluster.nodes_list_only = False
    for name in ("gpu-0", "gpu-1"):
        cluster.store.delete(cluster.key("Node", name))
    named = {"product": A100, "gpus": 8, "resource": "nvidia.com/a100"}
    cluster.nodes(
        {"name": "a", "zone": "ucsd", **named},
        {"name": "b", "zone": "ksu", "product": PCIE, "gpus": 2},
        {
            "name": "c",
            "zone": "msu",
            "product": "NVIDIA-L40",
            "gpus": 8,
            "resource": "nvidia.com/l40",
        },
        {"name": "d", "zone": "mghpcc", **named, "gpus": 0},
    )

    def found(**settings: str) -> str | None:
        return nodes.read_offer(cluster_config({**user.settings, **settings})[0]).gpu

    assert found() == "nvidia.com/gpu", "which some of them offer"
    assert found(SITE="ucsd") == found(GPU_PRODUCTS=A100) == "nvidia.com/a100"
    assert found(SITE="msu") == found(SITE="mghpcc") == "nvidia.com/gpu", "nothing else is known"
    cluster.nodes_list_only = True
    assert found(SITE="ucsd") is None


def test_pods_are_sent_with_that_name(user: User, cluster: Cluster) -> None:
    cluster.nodes_list_only = False
    for name in ("gpu-0", "gpu-1"):
        cluster.store.delete(cluster.key("Node", name))
    cluster.nodes(
        *(
            {
                "name": f"a{n}",
                "zone": "ucsd",
                "product": A100,
                "gpus": 2,
                "resource": "nvidia.com/a100",
            }
            for n in range(4)
        )
    )
    done = user.launch()
    assert done.code == 0, done.err
    pod = cluster.get("Job", "pure-transformer-8xa100")["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/a100"] == "2"
    assert "nvidia.com/gpu" not in pod["containers"][0]["resources"]["limits"]


def test_where_nodes_may_not_be_read_the_usual_name_is_taken_and_said(
    user: User, cluster: Cluster
) -> None:
    done = user.launch()
    assert done.code == 0
    assert "you may not read nodes, so pods request GPUs as nvidia.com/gpu" in done.err
    pod = cluster.get("Job", "pure-transformer-8xa100")["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def replace_nodes(cluster: Cluster, *made: dict[str, Any]) -> None:
    """Make these the only nodes of the cluster, which may be read in full."""
    cluster.nodes_list_only = False
    for node in cluster.objects("Node"):
        cluster.store.delete(cluster.key("Node", node["metadata"]["name"]))
    cluster.nodes(*made)


def job_pod(cluster: Cluster) -> dict[str, Any]:
    """Return the spec of the pods that were sent."""
    pod: dict[str, Any] = cluster.get("Job", "pure-transformer-8xa100")["spec"]["template"]["spec"]
    return pod


def test_slices_of_gpus_are_requested_only_by_name(user: User, cluster: Cluster) -> None:
    sliced = {"product": A100, "gpus": 7, "resource": "nvidia.com/mig-1g.10gb"}
    whole = {"product": A100, "gpus": 8, "resource": "nvidia.com/a100"}
    replace_nodes(cluster, {"name": "a", **sliced}, {"name": "b", **sliced}, {"name": "c", **whole})

    def resource(**settings: str) -> str | None:
        return nodes.read_offer(cluster_config({**user.settings, **settings})[0]).gpu

    assert resource() == "nvidia.com/a100"
    assert resource(GPU_RESOURCE="nvidia.com/mig-1g.10gb") == "nvidia.com/mig-1g.10gb"
    replace_nodes(cluster, {"name": "a", **sliced})
    assert resource() == "nvidia.com/gpu"
    shared = {"product": A100, "gpus": 32, "resource": "nvidia.com/gpu.shared"}
    replace_nodes(cluster, {"name": "a", **shared})
    assert resource() == "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ([], "there are no nodes"),
        ([{"name": "cpu", "zone": "ucsd"}], "no node carries the label nvidia.com/gpu.product"),
    ],
)
def test_a_cluster_scaled_to_zero_gpus_is_warned_about(
    user: User, cluster: Cluster, made: list[dict[str, Any]], why: str
) -> None:
    replace_nodes(cluster, *made)
    done = user.launch()
    assert done.code == 0, done.err
    assert f"{why}, so GPU_PRODUCTS=" in done.err
    assert "A cluster scaled to zero makes one for a pod that waits" in done.err
    assert job_pod(cluster)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_a_product_is_required_only_where_nodes_say_theirs(user: User, cluster: Cluster) -> None:
    unlabelled = {"zone": "ucsd", "gpus": 8, "resource": "nvidia.com/a100"}
    replace_nodes(cluster, {"name": "a", **unlabelled}, {"name": "b", **unlabelled})
    done = user.launch()
    assert done.code == 0, done.err
    pod = job_pod(cluster)
    assert "nodeAffinity" not in pod["affinity"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/a100"] == "2"

    cluster.nodes({"name": "c", "product": A100, "gpus": 8})
    done = user.launch(command="restart")
    assert done.code == 0, done.err
    required = job_pod(cluster)["affinity"]["nodeAffinity"]
    (term,) = required["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == [A100, PCIE]


def test_pods_of_all_gpus_of_a_node_leave_it_some_cores_and_memory(
    user: User, cluster: Cluster
) -> None:
    replace_nodes(
        cluster,
        *({"name": f"a{n}", "product": A100, "gpus": 8} for n in range(4)),
    )
    for node in cluster.objects("Node"):  # 15 GiB and 2 cores for each GPU
        small = {"cpu": "16", "memory": "125829120Ki", "nvidia.com/gpu": "8"}
        cluster.put({**node, "status": {**node["status"], "allocatable": small}})

    def limits(**settings: str) -> tuple[str, str, str]:
        done = user.launch("restart", **settings)
        assert done.code == 0, done.err
        pod = job_pod(cluster)
        found = pod["containers"][0]["resources"]["limits"]
        (shm,) = (volume for volume in pod["volumes"] if volume["name"] == "shm")
        return found["cpu"], found["memory"], shm["emptyDir"]["sizeLimit"]

    assert limits() == ("3", "28Gi", "4Gi")  # 95% of a quarter of 16 cores and 120 GiB
    assert limits(NODES="1", GPUS_PER_NODE="8") == ("15", "114Gi", "19Gi")
    by_hand = limits(NODES="1", GPUS_PER_NODE="8", POD_CPUS="16", POD_MEMORY_GB="60")
    assert by_hand == ("16", "60Gi", "10Gi")
