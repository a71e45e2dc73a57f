"""Which name or number lets a pod find a node."""

from typing import Any

import pytest

from k8s.cluster.unscheduled import advise
from settings.config import Config

A100 = "NVIDIA-A100-SXM4-80GB"


def node(**allocatable: str) -> dict[str, Any]:
    names = {"a100": "nvidia.com/a100", "l40": "nvidia.com/l40", "gpu": "nvidia.com/gpu"}
    product = "NVIDIA-L40" if "l40" in allocatable else A100
    room = {names.get(name, name): amount for name, amount in allocatable.items()}
    return {
        "metadata": {"labels": {"nvidia.com/gpu.product": product}},
        "status": {"allocatable": {"cpu": "64", "memory": "512Gi"} | room},
    }


def pod(**asks: str) -> dict[str, Any]:
    requests = {"cpu": "16", "memory": "96Gi", "nvidia.com/gpu": "2"} | asks
    return {"spec": {"containers": [{"resources": {"requests": requests}}]}}


@pytest.mark.parametrize(
    ("asks", "nodes", "sentence"),
    [
        (
            {},
            [node(l40="8"), node(l40="8"), node(a100="8")],
            "no node offers nvidia.com/gpu; this cluster has nvidia.com/a100, nvidia.com/l40: "
            "GPU_RESOURCE=nvidia.com/a100",
        ),
        ({}, [node()], "no node offers nvidia.com/gpu, and none offers another GPU"),
        ({}, [node(gpu="1")], "no node has more than 1 of nvidia.com/gpu: GPUS_PER_NODE=1"),
        ({"cpu": "65"}, [node(gpu="8")], "has more than 64 CPUs: POD_CPUS=60"),
        ({"memory": "600Gi"}, [node(gpu="8")], "has more than 512 GiB: POD_MEMORY_GB=486"),
    ],
)
def test_the_setting_to_use_is_named(
    asks: dict[str, str], nodes: list[dict[str, Any]], sentence: str
) -> None:
    assert sentence in advise(pod(**asks), nodes, Config(gpu_products=A100))


def test_a_full_cluster_and_one_without_nodes_need_no_setting() -> None:
    assert advise(pod(), [node(gpu="8")], Config(gpu_products=A100)) == ""
    assert advise(pod(), [], Config()) == ""
