"""Which node a pod goes to: one that it asks for, tolerates, and that has its GPUs free.

Of several the one that has had the fewest pods with GPUs, and of those the first. Kubernetes chooses by scores, which leave a bad
node as likely as any other.
"""

from collections import Counter
from typing import Any

from tests.cluster_sim.validate import quantity

Thing = dict[str, Any]
ENDED = ("Succeeded", "Failed")
GPU = "nvidia.com/gpu"


def fits(term: Thing, labels: dict[str, str], name: str = "") -> bool:
    """Whether a node's name and labels satisfy all expressions of a term."""
    for field in term.get("matchFields", []):
        assert field["key"] == "metadata.name" and len(field["values"]) == 1, "as the API has it"
        if (name in field["values"]) != (field["operator"] == "In"):
            return False
    for expression in term.get("matchExpressions", []):
        value, operator, values = (
            labels.get(expression["key"]),
            expression["operator"],
            expression.get("values", []),
        )
        good = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[operator]
        if not good:
            return False
    return True


def tolerates(spec: Thing, taint: Thing) -> bool:
    return taint.get("effect") == "PreferNoSchedule" or any(
        toleration.get("key") in (None, taint["key"])
        and toleration.get("effect") in (None, "", taint["effect"])
        and (
            toleration.get("operator") == "Exists"
            or toleration.get("value", "") == taint.get("value", "")
        )
        for toleration in spec.get("tolerations", [])
    )


def gpus(spec: Thing) -> float:
    return sum(
        quantity(container.get("resources", {}).get("limits", {}).get(GPU, 0))
        for container in spec["containers"]
    )


def place(
    pod: Thing, nodes: list[Thing], pods: list[Thing], claims: dict[str, Thing]
) -> tuple[str, str]:
    """The node for a pod; or "" and why there is none, in the scheduler's words. No nodes at all: any will do."""
    spec, reasons = pod["spec"], Counter[str]()
    for volume in spec.get("volumes", []):
        name = volume.get("persistentVolumeClaim", {}).get("claimName")
        if name and name not in claims:
            return "", f'persistentvolumeclaim "{name}" not found'
        if name and claims[name]["status"].get("phase") != "Bound":
            return "", "pod has unbound immediate PersistentVolumeClaims"
    if spec.get("nodeName") or not nodes:
        return spec.get("nodeName") or "node-of-test", ""
    wanted = (
        spec.get("affinity", {})
        .get("nodeAffinity", {})
        .get("requiredDuringSchedulingIgnoredDuringExecution", {})
    )
    had = Counter(str(other["spec"].get("nodeName")) for other in pods if gpus(other["spec"]))
    for node in sorted(nodes, key=lambda node: had[node["metadata"]["name"]]):
        labels, name = node["metadata"].get("labels", {}), node["metadata"]["name"]
        strange = [t for t in node.get("spec", {}).get("taints", []) if not tolerates(spec, t)]
        taken = sum(
            gpus(other["spec"])
            for other in pods
            if other["spec"].get("nodeName") == name and other["status"].get("phase") not in ENDED
        )
        if not (
            spec.get("nodeSelector", {}).items() <= labels.items()
            and (
                not wanted or any(fits(term, labels, name) for term in wanted["nodeSelectorTerms"])
            )
        ):
            reasons["node(s) didn't match Pod's node affinity/selector"] += 1
        elif strange:
            reasons[
                f"node(s) had untolerated taint {{{strange[0]['key']}: {strange[0].get('value', '')}}}"
            ] += 1
        elif gpus(spec) > quantity(node["status"]["allocatable"].get(GPU, 0)) - taken:
            reasons[f"Insufficient {GPU}"] += 1
        else:
            return name, ""
    return "", f"0/{len(nodes)} nodes are available: " + ", ".join(
        f"{count} {reason}" for reason, count in sorted(reasons.items())
    ) + "."
