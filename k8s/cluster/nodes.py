"""Which GPUs there are, by site and product: all that a user with list-only rights on nodes can see.

    python -m k8s.cluster.nodes     make sites

A site is a zone. Which GPUs are free is not among what can be seen: that takes the right to list everybody's pods.
"""

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from k8s.cluster.job_spec import cluster_config, pod_cpus, pod_memory_gb
from k8s.cluster.kubectl import (
    BAD_SETTING,
    Refused,
    keeping_to,
    kubectl,
    reach,
    refusal,
    succeed,
)
from settings import SettingsError, explain_error
from settings.config import Config
from settings.terminal import complain

ZONE = "topology.kubernetes.io/zone"
PRODUCT = (
    "nvidia.com/gpu.product"  # NVIDIA's feature discovery sets it, which not every cluster runs
)
LABELS = (
    ZONE,
    "topology.kubernetes.io/region",
    PRODUCT,
    "nvidia.com/gpu.count",
)
MANY = 10  # names that a sentence lists
GPU = "nvidia.com/gpu"  # the name by which pods ask for GPUs, unless nodes offer them by another
USABLE = 0.95  # of what a node has for pods: the rest is for those that run on every node
VENDOR = "nvidia.com/"
MIG = "nvidia.com/mig-"  # slices of a GPU


@dataclasses.dataclass(frozen=True)
class Node:
    """A line of `kubectl get nodes`."""

    name: str
    ready: bool
    cordoned: bool
    zone: str
    region: str
    product: str
    gpus: int

    @property
    def takes_pods(self) -> bool:
        return self.ready and not self.cordoned


def nodes() -> list[Node]:
    """All nodes. Listed as a table, since users of some clusters may neither get nor describe a node."""
    return parsed(succeed("get", "nodes", "-L", ",".join(LABELS)))


def parsed(table: str) -> list[Node]:
    """Nodes by the columns of kubectl's table. A cell begins where its heading does, and may be empty."""
    head, *lines = table.splitlines() or [""]
    names, begins = re.findall(r"\S+", head), [found.start() for found in re.finditer(r"\S+", head)]
    found = []
    for line in filter(str.strip, lines):
        cell = {
            name: line[begin:end].strip()
            for name, begin, end in zip(names, begins, [*begins[1:], None], strict=True)
        }
        status = cell.get("STATUS", "").split(",")
        count = cell.get("GPU.COUNT", "")
        found.append(
            Node(
                cell.get("NAME", ""),
                "Ready" in status,
                "SchedulingDisabled" in status,
                cell.get("ZONE", ""),
                cell.get("REGION", ""),
                cell.get("GPU.PRODUCT", ""),
                int(count) if count.isdigit() else 0,
            )
        )
    return found


@dataclasses.dataclass(frozen=True)
class Offer:
    """What the nodes of GPU_PRODUCTS have for a pod.

    Attributes:
        gpu: the name by which pods ask for GPUs; None if nodes may not be read and GPU_RESOURCE is not set.
        cpus: the share of a pod, where each node is full of them; None if that is not known.
        memory_gb: the same of memory, in GiB.
        has_products: whether any node says which GPUs it has; True if nodes may not be read.
    """

    gpu: str | None
    cpus: int | None = None
    memory_gb: int | None = None
    has_products: bool = True


def read_offer(c: Config) -> Offer:
    """Return what the nodes of GPU_PRODUCTS have for a pod of GPUS_PER_NODE. Raises Refused.

    A table of nodes, which some clusters show to everybody, does not have it.
    """
    done = kubectl("get", "nodes", "-o", "json")
    if "(Forbidden)" in done.err:
        return Offer(c.gpu_resource or None)
    if done.code:
        raise refusal(done, ("get", "nodes"))
    listed = json.loads(done.out)["items"]
    rooms = [offered(node) for node in wanted(listed, c)]
    gpu = c.gpu_resource or choose_resource(rooms)
    cpus = list[int]()
    memory = list[int]()
    for room_of_node in rooms:
        pods = int(quantity(room_of_node.get(gpu, "0")) or 0) // (c.gpus_per_node or 1)
        if pods:
            part = USABLE / pods
            cpus.append(int(part * (quantity(room_of_node.get("cpu", "0")) or 0)))
            memory.append(int(part * (quantity(room_of_node.get("memory", "0")) or 0) / 2**30))
    return Offer(gpu, min(cpus, default=None), min(memory, default=None), carry_products(listed))


def choose_resource(rooms: Iterable[dict[str, str]]) -> str:
    """Return the name by which these nodes offer whole GPUs. Some clusters give large ones a name of their own, such
    as nvidia.com/a100."""
    names = Counter[str]()
    for room_of_node in rooms:
        names.update(name for name in room_of_node if is_whole_gpu(name))
    if GPU in names or not names:
        return GPU
    return names.most_common(1)[0][0]


def fit_pod(c: Config, offer: Offer) -> Config:
    """Return the settings with a pod that its nodes have the cores and the memory for, where nobody has set them."""
    if c.pod_cpus is None and offer.cpus and offer.cpus < pod_cpus(c):
        c = c.replace(pod_cpus=offer.cpus)
    if c.pod_memory_gb is None and offer.memory_gb and offer.memory_gb < pod_memory_gb(c):
        c = c.replace(pod_memory_gb=max(2, offer.memory_gb))
    return c


def wanted(things: Sequence[dict[str, Any]], c: Config) -> list[dict[str, Any]]:
    """Return the nodes of GPU_PRODUCTS at SITE; where no node carries its product, all at SITE."""
    carried = carry_products(things)
    return [
        node
        for node in things
        if (not carried or labels_of(node).get(PRODUCT) in products_of(c))
        and (not c.site or labels_of(node).get(ZONE) == c.site)
    ]


def labels_of(node: dict[str, Any]) -> dict[str, str]:
    return node["metadata"].get("labels") or {}


def offered(node: dict[str, Any]) -> dict[str, str]:
    """Return what a node has for pods: name of the resource -> amount, without those it has none of."""
    room = (node.get("status") or {}).get("allocatable") or {}
    return {name: str(amount) for name, amount in room.items() if str(amount) != "0"}


def is_whole_gpu(resource: str) -> bool:
    """Whether a resource is a GPU, and not a slice of one or a share of its time."""
    return resource.startswith(VENDOR) and not (
        resource.startswith(MIG) or resource.endswith(".shared")
    )


def carry_products(things: Iterable[dict[str, Any]]) -> bool:
    """Whether any node carries the product of its GPUs."""
    return any(labels_of(node).get(PRODUCT) for node in things)


def quantity(text: str) -> float | None:
    """Kubernetes' way to write amounts: 500Gi, 1.5T, 1e9, 250m."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([KMGTPE]i?|k|m)?", text)
    if not found:
        return None
    if found[2] == "m":
        return float(found[1]) / 1000
    unit = (found[2] or "").upper()
    power = " KMGTPE".index(unit[0]) if unit else 0
    return float(found[1]) * (1024.0 if unit.endswith("I") else 1000.0) ** power


def products_of(c: Config) -> list[str]:
    return c.gpu_products.split(",")


def room(listed: Iterable[Node], c: Config, all_of_them: bool = False) -> dict[str, int]:
    """Zone -> how many pods of the wished shape its nodes could hold, if nothing else ran: those that take pods now,
    or all of them, since one that is cordoned or not ready comes back."""
    held: dict[str, int] = {}
    for node in listed:
        if (all_of_them or node.takes_pods) and node.product in products_of(c):
            held[node.zone] = held.get(node.zone, 0) + node.gpus // (c.gpus_per_node or 1)
    return held


def problems(listed: Sequence[Node], c: Config) -> list[str]:
    """Why the wished shape cannot fit even an idle cluster with all its nodes at work, as sentences."""
    wished, zones = products_of(c), {node.zone for node in listed if node.zone}
    if c.site and listed and c.site not in zones:
        return [f"SITE={c.site}: no node is in such a zone; there are {some(zones)} (make sites)"]
    if c.device == "cpu" or not any(node.product for node in listed):
        return []  # without_products says so
    here = [node for node in listed if not c.site or node.zone == c.site]
    where = f" at SITE={c.site}" if c.site else ""
    there = {node.product for node in here if node.product}
    if not there & set(wished):
        elsewhere = sorted({node.zone for node in listed if node.product in wished and node.zone})
        remedy = f"; they are at {some(elsewhere)}" if elsewhere else f"; there are {some(there)}"
        return [
            f"GPU_PRODUCTS={c.gpu_products}: no node{where} has any of these{remedy} (make sites)"
        ]
    if (total := sum(room(here, c, True).values())) >= c.nodes:
        return []
    best = max((node.gpus for node in here if node.product in wished), default=0)
    others = [
        zone
        for zone, pods in sorted(room(listed, c, True).items())
        if pods >= c.nodes and zone != c.site and zone
    ]
    return [
        f"NODES={c.nodes} GPUS_PER_NODE={c.gpus_per_node}: the nodes{where} that have "
        f"{' or '.join(wished)} could hold {total} such pods at most, and none has more than {best} GPUs; "
        + (f"choose another site (SITE={others[0]}), " if c.site and others else "choose ")
        + "another shape, or more GPU_PRODUCTS (make sites)"
    ]


def without_products(listed: Sequence[Node], c: Config) -> str:
    """Return what is to be said where no node says which GPUs it has; "" where one does.

    A cluster that makes nodes for pods that wait may have none now, so this is no reason to refuse.
    """
    if c.device == "cpu" or any(node.product for node in listed):
        return ""
    what = "no node carries the label nvidia.com/gpu.product" if listed else "there are no nodes"
    return (
        f"{what}, so GPU_PRODUCTS={c.gpu_products} cannot be asked for: pods take any node with GPUs, and wait "
        "where there is none. A cluster scaled to zero makes one for a pod that waits. Check the type of the GPU "
        "in the log of the first step"
    )


def waits_for(listed: Sequence[Node], c: Config) -> str:
    """What is to be said where the wished shape fits only once nodes are back; "" where it fits those that take pods,
    or not even all of them."""
    here = [node for node in listed if not c.site or node.zone == c.site]
    now, total = (sum(room(here, c, every).values()) for every in (False, True))
    if c.device == "cpu" or now >= c.nodes or total < c.nodes:
        return ""
    away = sum(node.product in products_of(c) and not node.takes_pods for node in here)
    return (
        f"{away} {'node' if away == 1 else 'nodes'}{f' at SITE={c.site}' if c.site else ''} with GPUs of "
        f"GPU_PRODUCTS {'is' if away == 1 else 'are'} cordoned or not ready: without "
        f"{'it' if away == 1 else 'them'} there is room for {now} such pods, of NODES={c.nodes}, and the others "
        "wait (make sites)"
    )


def some(names: Iterable[str]) -> str:
    """The names, but not hundreds of them."""
    listed = sorted(names)
    rest = f" and {len(listed) - MANY} more" if len(listed) > MANY else ""
    return (", ".join(listed[:MANY]) or "none") + rest


def table(listed: Sequence[Node], c: Config) -> str:
    """What make sites prints."""
    groups: dict[tuple[str, str, str], list[Node]] = {}
    for node in listed:
        if node.product and node.ready:
            groups.setdefault((node.zone, node.region, node.product), []).append(node)
    rows = [("SITE", "REGION", "PRODUCT", "GPUS", "NODES", "CORDONED", "PODS")]
    for (zone, region, product), group in sorted(groups.items()):
        taking, wanted = [node for node in group if node.takes_pods], product in products_of(c)
        rows.append(
            (
                zone or "-",
                region or "-",
                product + (" *" if wanted else ""),
                str(sum(node.gpus for node in taking)),
                str(len(taking)),
                str(len(group) - len(taking)),
                str(sum(room(group, c).values())) if wanted else "-",
            )
        )
    if len(rows) == 1:
        return "no node that is ready says which GPUs it has (label nvidia.com/gpu.product)\n"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    unready = sum(not node.ready for node in listed if node.product)
    left_out = ""
    if unready == 1:
        left_out = "; 1 node is not ready and left out"
    elif unready:
        left_out = f"; {unready} nodes are not ready and left out"
    lines += [
        f"* of GPU_PRODUCTS. PODS of GPUS_PER_NODE={c.gpus_per_node} that would fit if nothing else ran; "
        f"NODES={c.nodes} are wished for. GPUS and NODES are without those that are cordoned{left_out}.",
        "Which of them are free cannot be seen with a user's rights: make train-8xa100 WAIT=1 tries until "
        "all pods find room, and SITE=NAME keeps them together.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """`python -m k8s.cluster.nodes`"""
    try:
        c, _ = cluster_config()
        with keeping_to(reach()):
            sys.stdout.write(table(nodes(), c))
    except SettingsError as error:
        complain(explain_error(error))
        return BAD_SETTING
    except Refused as refused:
        complain(refused.sentence)
        return refused.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
