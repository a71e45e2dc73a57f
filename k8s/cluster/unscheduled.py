"""Which setting lets a pod find a node: what it asks for, beside what the nodes have."""

from collections.abc import Mapping, Sequence
from typing import Any

from k8s.cluster.nodes import USABLE, VENDOR, choose_resource, offered, quantity, wanted
from settings.config import Config

GIB = 2**30


def advise(pod: Mapping[str, Any], nodes: Sequence[dict[str, Any]], c: Config) -> str:
    """Return the name or the number to use, as a sentence; "" if no node could be the reason.

    Args:
        nodes: their objects, all of the cluster.
    """
    asks = pod["spec"]["containers"][0].get("resources", {}).get("requests", {})
    gpu = next((name for name in asks if name.startswith(VENDOR)), "")
    if not gpu or not nodes:
        return ""
    rooms = [room for node in nodes if gpu in (room := offered(node))]
    if not rooms:
        ours = [offered(node) for node in wanted(nodes, c)]
        names = {name for node in nodes for name in offered(node) if name.startswith(VENDOR)}
        if not names:
            return f"no node offers {gpu}, and none offers another GPU: a cluster scaled to zero may add one"
        best = choose_resource(ours)
        if best not in names:
            best = min(names)
        return f"no node offers {gpu}; this cluster has {', '.join(sorted(names))}: GPU_RESOURCE={best}"
    most = largest(rooms, gpu)
    if float(asks[gpu]) > most:
        return f"no node has more than {most:.0f} of {gpu}: GPUS_PER_NODE={most:.0f}"
    cpus = largest(rooms, "cpu")
    if (quantity(str(asks.get("cpu", "0"))) or 0.0) > cpus:
        return f"no node with {gpu} has more than {cpus:.4g} CPUs: POD_CPUS={int(USABLE * cpus)}"
    memory = largest(rooms, "memory")
    if (quantity(str(asks.get("memory", "0"))) or 0.0) > memory:
        return (
            f"no node with {gpu} has more than {memory / GIB:.4g} GiB: "
            f"POD_MEMORY_GB={int(USABLE * memory / GIB)}"
        )
    return ""


def largest(rooms: Sequence[Mapping[str, str]], resource: str) -> float:
    """Return the most of a resource that a node has."""
    return max(quantity(room.get(resource, "0")) or 0.0 for room in rooms)
