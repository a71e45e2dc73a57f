"""Which pods find room on which nodes, and what quotas and limits let in: worked by hand, from objects as the API
lists them."""

import dataclasses
from typing import Any

import pytest

from doctor import cluster_quota as quota
from doctor import cluster_room as room
from doctor.cluster_room import Seen, Taken
from k8s.cluster.nodes import Node
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding

A100, L40 = "NVIDIA-A100-SXM4-80GB", "NVIDIA-L40"
GPU, GIB = "nvidia.com/gpu", 2.0**30


def config(**changed: Any) -> Config:
    return Config(
        **{
            "nodes": 4,
            "gpus_per_node": 2,
            "device": "cuda",
            "gpu_products": A100,
            "pod_cpus": 16,
            **changed,
        }
    )


def node(
    name: str,
    zone: str = "ucsd",
    gpus: int = 8,
    *,
    cpu: str = "64",
    memory: str = "512Gi",
    product: str = A100,
    resource: str = GPU,
    taints: tuple[dict[str, str], ...] = (),
    **spec: Any,
) -> dict[str, Any]:
    """A node's object."""
    return {
        "metadata": {
            "name": name,
            "labels": {
                "topology.kubernetes.io/zone": zone,
                "nvidia.com/gpu.product": product,
                "nvidia.com/gpu.count": str(gpus),
            },
        },
        "spec": {"taints": [{"effect": "NoSchedule", **taint} for taint in taints], **spec},
        "status": {
            "allocatable": {"cpu": cpu, "memory": memory, resource: str(gpus), "rdma/hca": "4"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def products(c: Config, *objects: dict[str, Any], gpu: str = GPU) -> Finding:
    [found] = room.products(c, [room.seen(c, thing, gpu) for thing in objects], gpu)
    return found


# ---- What there is


def test_a_node_is_read_from_its_object() -> None:
    c = config(tolerations="hardware=a100,any")
    thing = node(
        "a",
        taints=(
            {"key": "hardware", "value": "a100"},
            {"key": "any", "value": "x"},
            {"key": "soft", "effect": "PreferNoSchedule"},
            {"key": "hardware", "value": "h100"},
            {"key": "reservation", "effect": "NoExecute"},
        ),
    )
    seen = room.seen(c, thing, GPU)
    assert seen.node == Node("a", True, False, "ucsd", "", A100, 8)
    assert seen.offers == {"cpu": 64.0, "memory": 512 * GIB, GPU: 8.0, "rdma/hca": 4.0}
    assert seen.taints == ("hardware=h100", "reservation") and not seen.perhaps
    pressed = room.seen(c, node("b", taints=({"key": "node.kubernetes.io/memory-pressure"},)), GPU)
    assert not pressed.node.takes_pods and pressed.taints == ()
    assert room.seen(c, node("c", taints=({"key": GPU, "value": "present"},)), GPU).perhaps
    assert not room.seen(c, node("d", unschedulable=True), GPU).node.takes_pods
    assert not room.seen(c, {"metadata": {"name": "bare"}}, GPU).node.ready


def test_pods_are_counted_by_what_runs_out_first() -> None:
    asks = {"cpu": 16.0, "memory": 96 * GIB, GPU: 2.0}
    whole = Node("a", True, False, "ucsd", "", A100, 8)
    assert Seen(whole, {"cpu": 64.0, "memory": 512 * GIB, GPU: 8.0}).holds(asks, GPU) == 4
    assert Seen(whole, {"cpu": 63.0, "memory": 512 * GIB, GPU: 8.0}).holds(asks, GPU) == 3
    assert Seen(whole, {"cpu": 64.0, "memory": 200 * GIB, GPU: 8.0}).holds(asks, GPU) == 2
    assert (
        Seen(whole, {"cpu": 64.0, "memory": 512 * GIB, GPU: 8.0}).holds(asks, GPU, {GPU: 5.0}) == 1
    )
    assert (
        Seen(whole, {"cpu": 64.0, "memory": 512 * GIB, GPU: 8.0}).holds(asks, GPU, {"cpu": 70.0})
        == 0
    )
    assert (
        Seen(whole).holds(asks, GPU, {GPU: 1.0, "cpu": 64.0}) == 3
    )  # of cores and memory nothing is known


def test_gpus_by_another_name_are_asked_for_by_it() -> None:
    named = node("a", resource="nvidia.com/a100")
    assert products(config(), named, gpu="nvidia.com/a100").level == PASS
    broken = node("a")
    broken["status"]["allocatable"][GPU] = "0"
    found = products(config(), broken)
    assert (found.level, found.text) == (FAIL, f"no node of GPU_PRODUCTS offers {GPU}")
    assert "device plugin of these nodes does not run" in found.fix


def test_pods_that_are_too_large_for_the_nodes_are_told() -> None:
    found = products(
        config(gpus_per_node=4, pod_cpus=32, pod_memory_gb=96), node("a"), node("b", cpu="30")
    )
    assert (found.level, found.code) == (FAIL, 64)
    # of pods of 32 cores two fit a, which has 64, and none b
    assert found.text == (
        "a pod asks for 32 cores and POD_MEMORY_GB=96: the nodes of GPU_PRODUCTS have 64 cores and "
        "512 GiB at most, so 2 of NODES=4 pods fit an idle cluster"
    )
    assert found.fix == (
        "a pod's share of any of them is POD_CPUS=15 and POD_MEMORY_GB=256; a smaller GPUS_PER_NODE "
        "asks for less of both"
    )
    assert products(config(gpus_per_node=2), node("a")).level == PASS


def test_taints_that_keep_pods_away_are_told() -> None:
    reserved = {"key": "nautilus.io/reservation", "value": "lab-b"}
    found = products(
        config(), node("a", taints=(reserved,)), node("b", taints=(reserved,)), node("c", gpus=4)
    )
    assert (found.level, found.code) == (FAIL, 64)
    assert found.text == (
        "taints that pods do not tolerate keep them from 2 of 3 nodes of GPU_PRODUCTS "
        "(nautilus.io/reservation=lab-b on 2): 2 of NODES=4 pods fit the others, if idle"
    )
    assert "set TOLERATIONS=nautilus.io/reservation=lab-b; else other GPU_PRODUCTS" in found.fix
    allowed = config(tolerations="nautilus.io/reservation=lab-b")
    assert products(allowed, node("a", taints=(reserved,)), node("c", gpus=4)) == Finding(
        "gpu-products", PASS, "12 GPUs of GPU_PRODUCTS on nodes that take pods: 12 at ucsd"
    )


def test_the_taint_of_nodes_with_gpus_may_be_tolerated_by_itself() -> None:
    found = products(
        config(), node("a", taints=({"key": GPU, "value": "present"},)), node("b", gpus=2)
    )
    assert found.level == WARN and found.text.endswith(f"1 of the nodes with the taint {GPU}")
    assert found.fix.endswith(f"if pods stay pending, set TOLERATIONS={GPU}")
    assert (
        products(config(nodes=1), node("a", taints=({"key": GPU},)), node("b", gpus=2)).level
        == PASS
    )


def test_pods_that_no_one_site_could_hold_are_told() -> None:
    spread = (node("a", gpus=4), node("b", "ksu", gpus=6), node("c", "ksu", product=L40))
    found = products(config(), *spread)
    assert found.level == WARN
    assert found.text == (
        "10 GPUs of GPU_PRODUCTS on nodes that take pods: 6 at ksu, 4 at ucsd, and no one site could "
        "hold all of NODES=4 pods, 3 at most"
    )
    assert products(config(nodes=3), *spread).level == PASS
    assert products(config(nodes=2, site="ucsd"), *spread).text == (
        "4 GPUs of GPU_PRODUCTS on nodes that take pods: 4 at ucsd"
    )


def test_nodes_that_come_back_are_waited_for() -> None:
    found = products(config(), node("a", gpus=4), node("b", unschedulable=True))
    assert (
        found.level == WARN
        and "1 node with GPUs of GPU_PRODUCTS is cordoned or not ready" in found.text
    )


# ---- What is free


def test_what_pods_ask_for_is_summed_by_node() -> None:
    rows = [
        ["a", "theirs", "job", "2,1", "4,500m", "8Gi", "<none>", "<none>", "<none>"],
        ["a", "theirs", "<none>", "<none>", "250m", "<none>", "1", "100m", "1Gi,64Mi"],
        ["b", "lab", "mine", "2", "16", "96Gi", "<none>", "<none>", "<none>"],
        ["b", "theirs", "mine", "2", "1", "1Gi", "<none>", "<none>", "<none>"],
    ]
    found = room.sums(rows, (GPU, "cpu", "memory"), ("lab", "mine"))
    assert found.others == {
        "a": {GPU: 4.0, "cpu": 4.75, "memory": 9 * GIB},
        "b": {GPU: 2.0, "cpu": 1.0, "memory": 1 * GIB},
    }
    assert found.ours == {"b": {GPU: 2.0, "cpu": 16.0, "memory": 96 * GIB}}


def free(
    c: Config,
    taken: dict[str, dict[str, float]],
    *objects: dict[str, Any],
    ours: dict[str, dict[str, float]] | None = None,
) -> Finding:
    return room.free(
        c, [room.seen(c, thing, GPU) for thing in objects], Taken(taken, ours or {}), GPU
    )


def test_how_many_gpus_are_free_and_where() -> None:
    nodes = (
        node("a"),
        node("b", "ksu"),
        node("c", "ksu", product=L40),
        node("d", unschedulable=True),
        node("e", taints=({"key": "reserved"},)),
    )
    found = free(config(), {"a": {GPU: 3.0}, "b": {GPU: 7.0}}, *nodes)
    # 5 left on a hold 2 pods, 1 on b holds none
    assert found.text == (
        "6 of 16 GPUs of GPU_PRODUCTS are free: 5 at ucsd, 1 at ksu; 2 of NODES=4 pods would find "
        "room now"
    )
    assert found.level == WARN and found.fix.startswith(
        "make train-8xa100 WAIT=1 sends the Job, takes it back"
    )
    assert found.fix.endswith("every 3 minutes")
    found = free(config(), {"a": {GPU: 3.0}, "b": {GPU: 2.0}}, *nodes)
    assert found.level == WARN  # 2 pods at ucsd, 3 at ksu
    assert found.text == (
        "11 of 16 GPUs of GPU_PRODUCTS are free: 6 at ksu, 5 at ucsd; all 4 pods would find room, at "
        "several sites: 3 of them at ksu"
    )
    assert free(config(nodes=3), {"a": {GPU: 3.0}, "b": {GPU: 2.0}}, *nodes) == Finding(
        "free-gpus",
        PASS,
        "11 of 16 GPUs of GPU_PRODUCTS are free: 6 at ksu, 5 at ucsd; all 3 pods would find room at "
        "ksu",
    )
    assert free(config(), {"a": {GPU: 8.0}, "b": {GPU: 9.0}}, *nodes).text == (
        "0 of 16 GPUs of GPU_PRODUCTS are free; 0 of NODES=4 pods would find room now"
    )


def test_free_gpus_without_free_cores_are_no_room() -> None:
    found = free(config(nodes=1), {"a": {"cpu": 50.0}}, node("a"))
    assert found.level == WARN
    assert found.text == (
        "8 of 8 GPUs of GPU_PRODUCTS are free: 8 at ucsd; 0 of NODES=1 pods would find room now"
    )


def test_what_a_job_of_ours_holds_is_free_for_its_successor() -> None:
    found = free(config(), {"a": {GPU: 0.0}}, node("a"), ours={"a": {GPU: 8.0, "cpu": 64.0}})
    assert (found.level, "(with the 8 that Job pure-transformer-8xa100 holds" in found.text) == (
        PASS,
        True,
    )


# ---- Quota


def a_quota(
    hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    return {
        "kind": "ResourceQuota",
        "metadata": {"name": "lab"},
        "spec": {"hard": hard, **spec},
        "status": {"hard": hard, "used": used or {}},
    }


def asked(c: Config, **there: bool) -> dict[str, float]:
    return quota.asked(c, quota.pod_asks(c, GPU), **there)


def checked(
    c: Config, thing: dict[str, Any], own: tuple[dict[str, Any], ...] = (), **there: bool
) -> list[Finding]:
    asks = quota.pod_asks(c, GPU)
    return quota.quota(
        c,
        [thing],
        asks,
        quota.asked(c, asks, **{"has_job": False, "has_claim": False, **there}),
        quota.held(own),
    )


def test_what_a_run_asks_of_a_quota() -> None:
    c = config(pod_memory_gb=96, volume_gb=500, storage_class="cephfs")
    wants = asked(c, has_job=False, has_claim=False)
    assert {wants[name] for name in ("cpu", "requests.cpu", "limits.cpu")} == {64.0}
    assert wants["requests.memory"] == 384 * GIB and wants["limits.ephemeral-storage"] == 200 * GIB
    assert wants["requests.nvidia.com/gpu"] == 8.0 and "nvidia.com/gpu" not in wants
    assert wants["pods"] == 4.0 and wants["count/jobs.batch"] == wants["services"] == 1.0
    assert (
        wants["cephfs.storageclass.storage.k8s.io/requests.storage"]
        == wants["requests.storage"]
        == 500 * GIB
    )
    later = asked(c, has_job=True, has_claim=True)
    assert (
        not {"count/jobs.batch", "services", "requests.storage", "persistentvolumeclaims"}
        & later.keys()
    )
    assert "services" not in asked(config(nodes=1), has_job=False, has_claim=False)
    sites = asked(dataclasses.replace(c, sync="diloco", sites=4), has_job=False, has_claim=False)
    assert {
        name: sites[name] - wants[name] for name in wants if sites[name] != wants[name]
    } == {  # the lighthouse
        **dict.fromkeys(
            ("pods", "count/pods", "count/jobs.batch", "services", "count/services"), 1.0
        ),
        **dict.fromkeys(("cpu", "requests.cpu", "limits.cpu"), 1.0),
        **dict.fromkeys(("memory", "requests.memory", "limits.memory"), 2 * GIB),
        **dict.fromkeys(
            ("ephemeral-storage", "requests.ephemeral-storage", "limits.ephemeral-storage"), GIB
        ),
    }
    assert not [
        name for name in asked(config(device="cpu"), has_job=True, has_claim=True) if "gpu" in name
    ]


@pytest.mark.parametrize(
    ("hard", "used", "level", "text", "fix"),
    [
        (
            {"requests.nvidia.com/gpu": "7"},
            {},
            FAIL,
            "quota lab: requests.nvidia.com/gpu=7, and the run asks for 8",
            "ask for less (NODES=3 of these pods would fit) or for more quota",
        ),
        (
            {"requests.nvidia.com/gpu": "10"},
            {"requests.nvidia.com/gpu": "4"},
            FAIL,
            "quota lab: requests.nvidia.com/gpu=10, and the run asks for 8 with 4 used, so 6 left",
            "wait until others of the namespace end, or ask for less (NODES=3 of these pods would fit) or for more quota",
        ),
        (
            {"limits.memory": "64Gi"},
            {},
            FAIL,
            "quota lab: limits.memory=64Gi, and the run asks for 384Gi",
            "ask for more quota, or make the pods smaller: not one of these fits",
        ),
        (
            {"requests.storage": "1Ti"},
            {"requests.storage": "800Gi"},
            FAIL,
            "quota lab: requests.storage=1024Gi, and the run asks for 500Gi with 800Gi used, so 224Gi left",
            "wait until others of the namespace end, or set VOLUME_GB=224 or less, or use a claim that is there, with VOLUME, "
            "or ask for more quota",
        ),
        (
            {"count/jobs.batch": "3"},
            {"count/jobs.batch": "3"},
            FAIL,
            "quota lab: count/jobs.batch=3, and the run asks for 1 with 3 used, so 0 left",
            "wait until others of the "
            "namespace end, or remove what is not needed any more, or ask for more quota",
        ),
        (
            {"requests.cpu": "64", "pods": "50", "requests.example.org/fpga": "0"},
            {"pods": "1"},
            PASS,
            "requests.cpu 64 asked for, 0 used, of 64; pods 4 asked for, 1 used, of 50",
            "",
        ),
        ({"requests.example.org/fpga": "0"}, {}, PASS, "none counts what the run asks for", ""),
    ],
)
def test_quotas(
    hard: dict[str, str], used: dict[str, str], level: str, text: str, fix: str
) -> None:
    [found] = checked(config(), a_quota(hard, used))
    assert (found.level, found.text, found.fix) == (level, text, fix)


def test_pods_of_ours_that_are_there_are_not_counted_twice() -> None:
    amounts = {"nvidia.com/gpu": "2", "cpu": "1500m"}
    pod = {
        "spec": {"containers": [{"resources": {"requests": amounts, "limits": amounts}}]},
        "status": {},
    }
    ended = {**pod, "status": {"phase": "Failed"}}
    assert quota.held((pod, pod, ended)) == {
        "pods": 2.0,
        "count/pods": 2.0,
        "cpu": 3.0,
        "requests.cpu": 3.0,
        "limits.cpu": 3.0,
        "nvidia.com/gpu": 4.0,
        "requests.nvidia.com/gpu": 4.0,
        "limits.nvidia.com/gpu": 4.0,
    }
    thing = a_quota({"requests.nvidia.com/gpu": "10"}, {"requests.nvidia.com/gpu": "6"})
    assert [found.level for found in checked(config(), thing)] == [FAIL]  # 6 + 8 > 10
    [found] = checked(config(), thing, (pod, pod))  # 2 of others, and 8
    assert (found.level, found.text) == (
        PASS,
        "requests.nvidia.com/gpu 8 asked for, 2 used by others, of 10",
    )


@pytest.mark.parametrize(
    ("spec", "priority", "counts"),
    [
        ({"scopes": ["BestEffort"]}, "", False),
        ({"scopes": ["NotBestEffort", "NotTerminating"]}, "", True),
        ({"scopes": ["Terminating"]}, "", False),
        ({"scopes": ["PriorityClass"]}, "", False),
        ({"scopes": ["PriorityClass"]}, "low", True),
        *[
            (
                {
                    "scopeSelector": {
                        "matchExpressions": [
                            {"scopeName": "PriorityClass", "operator": operator, "values": values}
                        ]
                    }
                },
                "low",
                counts,
            )
            for operator, values, counts in (
                ("In", ["low"], True),
                ("In", ["high"], False),
                ("NotIn", ["low"], False),
                ("Exists", [], True),
                ("DoesNotExist", [], False),
            )
        ],
    ],
)
def test_a_quota_of_other_pods_does_not_count(
    spec: dict[str, Any], priority: str, counts: bool
) -> None:
    [found] = checked(config(priority_class=priority), a_quota({"pods": "1"}, **spec))
    assert (found.level == FAIL) is counts


# ---- Limits


def ranges(**item: Any) -> list[dict[str, Any]]:
    return [{"metadata": {"name": "sizes"}, "spec": {"limits": [{"type": "Container", **item}]}}]


@pytest.mark.parametrize(
    ("item", "level", "text", "fix"),
    [
        (
            {"max": {"memory": "64Gi"}},
            FAIL,
            "LimitRange sizes: a container may have at most memory=64Gi, and POD_MEMORY_GB "
            "makes it 96Gi",
            "set POD_MEMORY_GB=64",
        ),
        (
            {"type": "Pod", "max": {"nvidia.com/gpu": "1"}},
            FAIL,
            "LimitRange sizes: a pod may have at most "
            "nvidia.com/gpu=1, and GPUS_PER_NODE makes it 2",
            "set GPUS_PER_NODE=1",
        ),
        (
            {"min": {"memory": "99.5Gi"}},
            FAIL,
            "LimitRange sizes: a container must have at least memory=99.5Gi, and "
            "POD_MEMORY_GB makes it 96Gi",
            "set POD_MEMORY_GB=100",
        ),
        (
            {"max": {"cpu": "500m"}},
            FAIL,
            "LimitRange sizes: a container may have at most cpu=0.5, and POD_CPUS makes it 16",
            "take another NAMESPACE",
        ),
        (
            {"type": "Pod", "max": {"example.org/fpga": "1"}},
            FAIL,
            "LimitRange sizes: a pod must ask for example.org/fpga, "
            "as it may have at most 1, and those of the run do not",
            "ask the namespace's administrator to leave it out, or take another NAMESPACE",
        ),
        (
            {"max": {"example.org/fpga": "2"}, "default": {"example.org/fpga": "1", "cpu": "1"}},
            WARN,
            "LimitRange sizes gives each container what it does not ask for: example.org/fpga=1",
            "ask the namespace's administrator to leave that out, if pods then find no node",
        ),
        (
            {"type": "PersistentVolumeClaim", "max": {"storage": "100Gi"}},
            FAIL,
            "LimitRange sizes: a persistentvolumeclaim "
            "may have at most storage=100Gi, and VOLUME_GB makes it 500Gi",
            "set VOLUME_GB=100",
        ),
        (
            {
                "max": {"cpu": "16"},
                "min": {"cpu": "10m"},
                "default": {"cpu": "1"},
                "maxLimitRequestRatio": {"cpu": "2"},
            },
            PASS,
            "a pod and its volume keep to LimitRange sizes",
            "",
        ),
    ],
)
def test_limits(item: dict[str, Any], level: str, text: str, fix: str) -> None:
    [found] = quota.limits(config(), ranges(**item), quota.pod_asks(config(), GPU), has_claim=False)
    assert (found.level, found.text, found.fix) == (level, text, fix)


def test_a_claim_that_is_there_is_not_held_against_limits() -> None:
    [found] = quota.limits(
        config(),
        ranges(type="PersistentVolumeClaim", max={"storage": "1Gi"}),
        quota.pod_asks(config(), GPU),
        has_claim=True,
    )
    assert found.level == PASS
