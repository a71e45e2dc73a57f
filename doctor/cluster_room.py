"""Which GPUs of GPU_PRODUCTS there are, how many are free and at which site, and whether the run's pods find room.

Nodes are listed in full where that is allowed (what they offer, their taints), else as the table that make sites reads.
What is taken on a node is what the pods on it ask for, which takes the right to list everybody's pods. Of a pod that is
the sum of its containers, or the largest of those that run before them. What containers share with the node itself
(daemons outside Kubernetes) is left out of what a node offers by the cluster.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from doctor.cluster_quota import pod_asks
from k8s.cluster import nodes as sites
from k8s.cluster.job_spec import pod_memory_gb
from k8s.cluster.kubectl import BAD_SETTING, Refused, kubectl, refusal
from k8s.cluster.nodes import quantity
from k8s.cluster.render import toleration
from k8s.launch import WAIT_MINUTES
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding, from_sentence

PRODUCTS, FREE = "gpu-products", "free-gpus"
PASSING = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
)  # taints that come and go with a node's state
RESOURCES = ("cpu", "memory")  # beside GPUs, what a pod may find too little of on a node


@dataclasses.dataclass(frozen=True)
class Seen:
    """A node, and what it offers to pods: None where only the table may be seen. taints: those that keep our pods
    away for good; perhaps: one for all pods without GPUs does, since some clusters let those with GPUs tolerate it."""

    node: sites.Node
    offers: dict[str, float] | None = None
    taints: tuple[str, ...] = ()
    perhaps: bool = False

    def gpus(self, gpu: str) -> int:
        return int(self.offers.get(gpu, 0.0)) if self.offers is not None else self.node.gpus

    def holds(
        self, asks: Mapping[str, float], gpu: str, taken: Mapping[str, float] | None = None
    ) -> int:
        """How many pods find room beside what is taken."""
        offers = self.offers if self.offers is not None else {gpu: float(self.gpus(gpu))}
        return max(
            0,
            min(
                int((offers.get(what, 0.0) - (taken or {}).get(what, 0.0)) // ask)
                for what, ask in asks.items()
                if self.offers is not None or what == gpu
            ),
        )


@dataclasses.dataclass(frozen=True)
class Taken:
    """What the pods on the nodes hold: all but ours, and a Job of ours that is there already."""

    others: dict[str, dict[str, float]]  # node -> resource -> amount
    ours: dict[str, dict[str, float]]


def findings(c: Config, namespace: str, gpu: str) -> list[Finding]:
    """What there is, and what is free of it. gpu: the name by which pods ask for GPUs."""
    try:
        listed = nodes(c, gpu)
    except Refused as refused:
        if refused.kind != "rights":
            raise
        return [
            Finding(PRODUCTS, WARN, "GPU_PRODUCTS and SITE are unchecked: you may not list nodes")
        ]
    if not listed:
        return [
            Finding(
                PRODUCTS,
                WARN,
                "the cluster has no nodes now",
                "one that makes them when pods ask needs no "
                "more; of any other ask its administrators",
            )
        ]
    if unknown := sites.without_products([one.node for one in listed], c):
        return [Finding(PRODUCTS, WARN, unknown)]
    found = products(c, listed, gpu)
    if c.device == "cpu" or any(finding.level == FAIL for finding in found):
        return found
    return [*found, free(c, listed, taken(c, namespace, gpu), gpu)]


# ---------------------------------------------------------------------------------------------------
# What kubectl lists
# ---------------------------------------------------------------------------------------------------


def nodes(c: Config, gpu: str) -> list[Seen]:
    """All nodes, in full where that may be seen. Raises Refused."""
    done = kubectl("get", "nodes", "-o", "json")
    if done.code == 0:
        return [seen(c, node, gpu) for node in json.loads(done.out)["items"]]
    if "(Forbidden)" not in done.err:
        raise refusal(done, ("get", "nodes"))
    return [Seen(node) for node in sites.nodes()]


def seen(c: Config, node: Mapping[str, Any], gpu: str) -> Seen:
    """A node by its object."""
    labels, spec, status = (
        node["metadata"].get("labels") or {},
        node.get("spec") or {},
        node.get("status") or {},
    )
    zone, region, product, count = (labels.get(name, "") for name in sites.LABELS)
    ready = any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in status.get("conditions") or []
    )
    strange = [taint for taint in spec.get("taints") or [] if not tolerated(c, taint)]
    away = any(taint["key"].startswith(PASSING) for taint in strange)
    strange = [taint for taint in strange if not taint["key"].startswith(PASSING)]
    offers = {
        what: quantity(str(text)) or 0.0 for what, text in (status.get("allocatable") or {}).items()
    }
    return Seen(
        sites.Node(
            node["metadata"]["name"],
            ready,
            bool(spec.get("unschedulable")) or away,
            zone,
            region,
            product,
            int(count) if count.isdigit() else 0,
        ),
        offers,
        tuple(written(taint) for taint in strange if taint["key"] != gpu),
        any(taint["key"] == gpu for taint in strange),
    )


def tolerated(c: Config, taint: Mapping[str, Any]) -> bool:
    """Whether the run's pods may go where this taint is."""
    if taint.get("effect") == "PreferNoSchedule":
        return True
    ours = [toleration(text) for text in c.tolerations.split(",") if text]
    return any(
        one["key"] == taint["key"] and one.get("value") in (None, taint.get("value", ""))
        for one in ours
    )


def written(taint: Mapping[str, Any]) -> str:
    """As TOLERATIONS has it."""
    return str(taint["key"]) + (f"={taint['value']}" if taint.get("value") else "")


def taken(c: Config, namespace: str, gpu: str) -> Taken | None:
    """What is taken on each node, by one call; None where everybody's pods may not be listed."""
    what = (gpu, *RESOURCES)
    columns = [
        "NODE:.spec.nodeName",
        "NAMESPACE:.metadata.namespace",
        r"JOB:.metadata.labels.batch\.kubernetes\.io/job-name",
    ]
    for kind in ("containers", "initContainers"):
        columns += [
            f"{kind}{number}:.spec.{kind}[*].resources.requests.{name.replace('.', chr(92) + '.')}"
            for number, name in enumerate(what)
        ]
    done = kubectl(
        "get",
        "pods",
        "-A",
        "--no-headers",
        "-o",
        "custom-columns=" + ",".join(columns),
        "--field-selector",
        "status.phase!=Succeeded,status.phase!=Failed,spec.nodeName!=",
    )
    if "(Forbidden)" in done.err:
        return None
    if done.code:
        raise refusal(done, ("get", "pods"))
    return sums((line.split() for line in done.out.splitlines()), what, (namespace, c.job_name))


def sums(rows: Iterable[Sequence[str]], what: Sequence[str], ours: tuple[str, str]) -> Taken:
    """Rows of node, namespace, Job, and two amounts for each resource: of the containers of a pod with commas between,
    and of those that run before them. ours: namespace and name of our Job."""
    found = Taken({}, {})
    for node, namespace, job, *amounts in rows:
        whose = (found.ours if (namespace, job) == ours else found.others).setdefault(
            node, dict.fromkeys(what, 0.0)
        )
        for number, name in enumerate(what):
            whose[name] += max(
                sum(numbers(amounts[number])),
                max(numbers(amounts[number + len(what)]), default=0.0),
            )
    return found


def numbers(text: str) -> list[float]:
    return [quantity(part) or 0.0 for part in text.split(",")] if text != "<none>" else []


# ---------------------------------------------------------------------------------------------------
# What there is
# ---------------------------------------------------------------------------------------------------


def products(c: Config, listed: Sequence[Seen], gpu: str) -> list[Finding]:
    """Whether the shape fits an idle cluster: by what make train-8xa100 refuses, then by taints and sizes of nodes."""
    plain = [one.node for one in listed]
    if problems := sites.problems(plain, c):
        return [from_sentence(PRODUCTS, FAIL, problem, BAD_SETTING) for problem in problems]
    if c.device == "cpu":
        return [Finding(PRODUCTS, PASS, "pods ask for no GPU")]
    ours = wanted(c, listed)
    if problem := offered(ours, gpu) or too_small(c, ours, gpu) or kept_away(c, ours, gpu):
        return [problem]
    there = {one.node.name: one.gpus(gpu) for one in ours if one.node.takes_pods and not one.taints}
    count, where = sum(there.values()), by_site(there, ours)
    if waits := sites.waits_for(plain, c):
        return [Finding(PRODUCTS, WARN, waits)]
    held = idle(c, ours, gpu)
    alone = max(held.values(), default=0)
    text = f"{count} GPUs of GPU_PRODUCTS on nodes that take pods{f': {where}' if where else ''}"
    if any(one.offers is None for one in ours):
        text += " (taints, cores and memory of nodes may not be seen)"
    if c.nodes > 1 and not c.site and alone < c.nodes:
        return [
            Finding(
                PRODUCTS,
                WARN,
                f"{text}, and no one site could hold all of NODES={c.nodes} pods, {alone} at most",
                "make plan SITES=2 says what a step then waits for the WAN; a smaller shape, or more "
                "GPU_PRODUCTS, may fit one site (make sites)",
            )
        ]
    if (reserved := sum(one.perhaps for one in ours)) and sum(
        idle(c, [one for one in ours if not one.perhaps], gpu).values()
    ) < c.nodes:
        return [
            Finding(
                PRODUCTS,
                WARN,
                f"{text}, {reserved} of the nodes with the taint {gpu}",
                "many "
                "clusters let pods with GPUs tolerate it by themselves; if pods stay pending, set TOLERATIONS="
                f"{gpu}",
            )
        ]
    return [Finding(PRODUCTS, PASS, text)]


def wanted(c: Config, listed: Iterable[Seen]) -> list[Seen]:
    """Nodes of the wished products, at SITE where there is one."""
    return [
        one
        for one in listed
        if one.node.product in sites.products_of(c) and (not c.site or one.node.zone == c.site)
    ]


def offered(ours: Sequence[Seen], gpu: str) -> Finding | None:
    """Whether the nodes offer their GPUs to pods at all."""
    if any(one.offers is None or one.offers.get(gpu) for one in ours):
        return None
    return Finding(
        PRODUCTS,
        FAIL,
        f"no node of GPU_PRODUCTS offers {gpu}",
        "ask the administrators: the device plugin of these nodes does not run",
    )


def too_small(c: Config, ours: Sequence[Seen], gpu: str) -> Finding | None:
    """Whether nodes have the cores and the memory for as many pods as their GPUs do."""
    pod = pod_asks(c, gpu)
    asks = {what: pod[what] for what in (gpu, *RESOURCES)}
    by_gpu = [one for one in ours if one.offers is not None and one.holds({gpu: asks[gpu]}, gpu)]
    if not by_gpu or sum(one.holds(asks, gpu) for one in ours) >= c.nodes:
        return None
    shares = {
        what: min(
            (one.offers or {}).get(what, 0.0) / one.holds({gpu: asks[gpu]}, gpu) for one in by_gpu
        )
        for what in RESOURCES
    }
    most = {what: max((one.offers or {}).get(what, 0.0) for one in by_gpu) for what in RESOURCES}
    return Finding(
        PRODUCTS,
        FAIL,
        f"a pod asks for {pod['cpu']:.0f} cores and POD_MEMORY_GB={pod_memory_gb(c)}: the nodes of GPU_PRODUCTS "
        f"have {most['cpu']:.4g} cores and {most['memory'] / 2**30:.4g} GiB at most, so "
        f"{sum(one.holds(asks, gpu) for one in ours)} of NODES={c.nodes} pods fit an idle cluster",
        f"a pod's share of any of them is POD_CPUS={int(shares['cpu'])} and "
        f"POD_MEMORY_GB={int(shares['memory'] / 2**30)}; a smaller GPUS_PER_NODE asks for less of both",
        BAD_SETTING,
    )


def kept_away(c: Config, ours: Sequence[Seen], gpu: str) -> Finding | None:
    """Whether taints leave too few nodes."""
    asks = {gpu: float(c.gpus_per_node or 1)}
    here = [one for one in ours if not one.taints]
    if sum(one.holds(asks, gpu) for one in here) >= c.nodes:
        return None
    strange = Counter(taint for one in ours for taint in one.taints)
    if not strange:
        return None
    said = ", ".join(f"{taint} on {count}" for taint, count in strange.most_common(sites.MANY))
    text = (
        f"taints that pods do not tolerate keep them from {len(ours) - len(here)} of {len(ours)} nodes of "
        f"GPU_PRODUCTS ({said}): {sum(one.holds(asks, gpu) for one in here)} of NODES={c.nodes} pods fit the "
        "others, if idle"
    )
    return Finding(
        PRODUCTS,
        FAIL,
        text,
        "where you may use these nodes, set "
        f"TOLERATIONS={strange.most_common(1)[0][0]}; else other GPU_PRODUCTS, another SITE, or fewer "
        "NODES",
        BAD_SETTING,
    )


def idle(c: Config, ours: Iterable[Seen], gpu: str) -> dict[str, int]:
    """Zone -> pods that its nodes could hold if nothing else ran."""
    return per_site(c, ours, gpu, lambda _: {})


# ---------------------------------------------------------------------------------------------------
# What is free
# ---------------------------------------------------------------------------------------------------


def free(c: Config, listed: Sequence[Seen], used: Taken | None, gpu: str) -> Finding:
    """How many GPUs nobody has asked for, where, and whether all pods fit there now."""
    wait = (
        "make train-8xa100 WAIT=1 sends the Job, takes it back where not all pods soon have a node, and tries "
        f"again every {WAIT_MINUTES:g} minutes"
    )
    if used is None:
        return Finding(
            FREE,
            WARN,
            "which GPUs are free cannot be seen: you may not list everybody's pods",
            wait,
        )
    ours = [one for one in wanted(c, listed) if one.node.takes_pods and not one.taints]
    left = {
        one.node.name: max(0, one.gpus(gpu) - int(used.others.get(one.node.name, {}).get(gpu, 0.0)))
        for one in ours
    }
    held = int(sum(of.get(gpu, 0.0) for name, of in used.ours.items() if name in left))
    total = sum(one.gpus(gpu) for one in ours)
    fit = per_site(c, ours, gpu, lambda name: used.others.get(name, {}))
    now, best = sum(fit.values()), max(fit, key=lambda zone: fit[zone], default="")
    where = by_site(left, ours)
    text = f"{sum(left.values())} of {total} GPUs of GPU_PRODUCTS are free{f': {where}' if where else ''}"
    if held:
        text += f" (with the {held} that Job {c.job_name} holds, which make restart gives back)"
    if now < c.nodes:
        return Finding(
            FREE, WARN, f"{text}; {now} of NODES={c.nodes} pods would find room now", wait
        )
    if c.nodes > 1 and not c.site and fit[best] < c.nodes:
        return Finding(
            FREE,
            WARN,
            f"{text}; all {c.nodes} pods would find room, at several sites: {fit[best]} of them "
            f"at {best or 'a site without a name'}",
            "make plan SITES=2 says what a step then waits for the "
            "WAN; SITE=NAME keeps them together, with WAIT=1 as long as it takes",
        )
    return Finding(
        FREE,
        PASS,
        f"{text}; all {c.nodes} pods would find room"
        + (f" at {best}" if best and c.nodes > 1 else ""),
    )


def per_site(
    c: Config, ours: Iterable[Seen], gpu: str, taken_on: Callable[[str], Mapping[str, float]]
) -> dict[str, int]:
    """Zone -> pods that find room beside what is taken. taken_on: node's name -> resource -> amount."""
    asks = {what: amount for what, amount in pod_asks(c, gpu).items() if what in (gpu, *RESOURCES)}
    found: dict[str, int] = {}
    for one in ours:
        if one.node.takes_pods and not one.taints:
            found[one.node.zone] = found.get(one.node.zone, 0) + one.holds(
                asks, gpu, taken_on(one.node.name)
            )
    return found


def by_site(amounts: Mapping[str, int], ours: Iterable[Seen]) -> str:
    """Node -> GPUs, in words by site: '4 at ksu, 6 at ucsd'."""
    zones: dict[str, int] = {}
    for one in ours:
        if amounts.get(one.node.name, 0) > 0:
            zones[one.node.zone] = zones.get(one.node.zone, 0) + amounts[one.node.name]
    return ", ".join(
        f"{number} at {zone or 'no named site'}"
        for zone, number in sorted(zones.items(), key=lambda one: (-one[1], one[0]))
    )
