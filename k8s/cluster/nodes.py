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

from k8s.cluster.job_spec import cluster_config
from k8s.cluster.kubectl import (
    BAD_SETTING,
    Refused,
    keeping_to,
    kubectl,
    reach,
    refusal,
    succeed,
)
from settings import SettingsError
from settings.config import Config
from settings.finding import complain

LABELS = (
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "nvidia.com/gpu.product",
    "nvidia.com/gpu.count",
)
MANY = 10  # names that a sentence lists
GPU = "nvidia.com/gpu"  # the name by which pods ask for GPUs, unless nodes offer them by another
VENDOR = "nvidia.com/"


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


def gpu_resource(c: Config) -> str | None:
    """Return GPU_RESOURCE, or else the name by which the nodes of GPU_PRODUCTS offer their GPUs.

    Some clusters give large GPUs a name of their own, such as nvidia.com/a100. None where nodes may not be read:
    a table of them, which some clusters show to everybody, does not have it. Raises Refused.
    """
    if c.gpu_resource:
        return c.gpu_resource
    selector = f"nvidia.com/gpu.product in ({c.gpu_products})"
    if c.site:
        selector += f",topology.kubernetes.io/zone={c.site}"
    done = kubectl("get", "nodes", "-l", selector, "-o", "json")
    if "(Forbidden)" in done.err:
        return None
    if done.code:
        raise refusal(done, ("get", "nodes"))
    names = Counter[str]()
    for node in json.loads(done.out)["items"]:
        offers = (node.get("status") or {}).get("allocatable") or {}
        names.update(
            name for name, count in offers.items() if name.startswith(VENDOR) and count != "0"
        )
    if GPU in names or not names:
        return GPU
    return names.most_common(1)[0][0]


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
    if c.site and c.site not in zones:
        return [f"SITE={c.site}: no node is in such a zone; there are {some(zones)} (make sites)"]
    if c.device == "cpu":
        return []
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
    lines += [
        f"* of GPU_PRODUCTS. PODS of GPUS_PER_NODE={c.gpus_per_node} that would fit if nothing else ran; "
        f"NODES={c.nodes} are wished for. GPUS and NODES are without those that are cordoned"
        + (
            f"; {unready} {'node is' if unready == 1 else 'nodes are'} not ready and left out"
            if unready
            else ""
        )
        + ".",
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
        complain(error)
        return BAD_SETTING
    except Refused as refused:
        complain(refused.sentence)
        return refused.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
