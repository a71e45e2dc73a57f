"""Whether a namespace's quotas and limits let the Job of a run in: what its pods ask for against what there is.

    ResourceQuota    sums over the namespace: hard, and used by everybody in it
    LimitRange       one container, pod or claim: smallest, largest, and what is filled in where nothing is asked for

Pods ask for as much as they may take (requests are limits), so both kinds of sum are the same. Secrets are not counted:
that of a run is there before, or is one of many.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from k8s.cluster.job_spec import overlay_of, pod_cpus, pod_disk_gb, pod_memory_gb
from k8s.cluster.kubectl import BAD_SETTING, kubectl, refusal
from k8s.cluster.nodes import quantity
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding

Thing = Mapping[str, Any]
ENDED = ("Succeeded", "Failed")
IN_BYTES = ("memory", "storage", "ephemeral-storage")
SETTING = {"cpu": "POD_CPUS", "memory": "POD_MEMORY_GB", "storage": "VOLUME_GB"}
# What no setting says by itself: what to do where a pod asks for too much or too little of it.
REMEDIES = {
    "ephemeral-storage": "ask the namespace's administrator for another limit, or take another NAMESPACE",
}
LIGHTHOUSE = {
    "cpu": 1.0,
    "memory": 2 * 2.0**30,
    "ephemeral-storage": 2.0**30,
}  # as k8s/manifests/lighthouse/job.yaml has it
MANY = 4  # amounts that a line lists


def findings(
    c: Config, namespace: str, own: Iterable[Thing], *, has_job: bool, has_claim: bool, gpu: str
) -> list[Finding]:
    """Both kinds, asked for by one call. own: the pods of a Job of ours that is there, which a new one replaces. gpu:
    the name by which pods ask for GPUs."""
    done = kubectl("get", "resourcequotas,limitranges", "-n", namespace, "-o", "json")
    hidden = [
        kind
        for kind in ("resourcequotas", "limitranges")
        if f'cannot list resource "{kind}"' in done.err
    ]
    if done.code and not hidden:
        raise refusal(done, ("get", "resourcequotas"))
    listed = json.loads(done.out or "{}").get("items") or []
    asks, found = pod_asks(c, gpu), list[Finding]()
    for name, kind, plural, check in (
        ("quota", "ResourceQuota", "resourcequotas", quota),
        ("limits", "LimitRange", "limitranges", limits),
    ):
        things = [thing for thing in listed if thing["kind"] == kind]
        if plural in hidden:
            found.append(
                Finding(
                    name,
                    WARN,
                    f"unchecked: you may not list {plural} in namespace {namespace}",
                    "ask its administrator what the namespace may hold",
                )
            )
        elif not things:
            found.append(Finding(name, PASS, f"no {kind} in namespace {namespace}"))
        elif check is quota:
            wants = asked(c, asks, has_job=has_job, has_claim=has_claim)
            found += quota(c, things, asks, wants, held(own))
        else:
            found += limits(c, things, asks, has_claim=has_claim)
    return found


def pod_asks(c: Config, gpu: str) -> dict[str, float]:
    """Resource -> amount that one pod of the run asks for and may take; bytes where it is counted in them."""
    asks = {
        "cpu": float(pod_cpus(c)),
        "memory": pod_memory_gb(c) * 2.0**30,
        "ephemeral-storage": pod_disk_gb(c) * 2.0**30,
    }
    if c.device != "cpu":
        asks[gpu] = float(c.gpus_per_node or 1)
    return asks


# ---------------------------------------------------------------------------------------------------
# Quota
# ---------------------------------------------------------------------------------------------------


def asked(
    c: Config, asks: Mapping[str, float], *, has_job: bool, has_claim: bool
) -> dict[str, float]:
    """Name in a quota -> what the run wants of it: pods, the Job and what comes with it, and the claim."""
    wants = {name: c.nodes * amount for what, amount in asks.items() for name in names_of(what)}
    beside = c.sync == "diloco"  # the lighthouse, a Job and a Service of its own
    wants |= dict.fromkeys(("pods", "count/pods"), float(c.nodes + beside))
    if beside:
        wants |= {
            name: wants[name] + amount
            for what, amount in LIGHTHOUSE.items()
            for name in names_of(what)
        }
    if not has_job:  # else they are there as well
        wants |= dict.fromkeys(
            ("configmaps", "count/configmaps", "count/networkpolicies.networking.k8s.io"), 1.0
        )
        wants["count/jobs.batch"] = 1.0 + beside
        if overlay_of(c) != "single-node":
            wants |= dict.fromkeys(("services", "count/services"), 1.0 + beside)
    if not has_claim:
        of_class = f"{c.storage_class}.storageclass.storage.k8s.io/"
        for prefix in ("", of_class) if c.storage_class else ("",):
            wants |= {
                f"{prefix}requests.storage": c.volume_gb * 2.0**30,
                f"{prefix}persistentvolumeclaims": 1.0,
            }
        wants["count/persistentvolumeclaims"] = 1.0
    return wants


def names_of(resource: str) -> tuple[str, ...]:
    """By which a quota can count a resource; those with a slash, such as GPUs, by requests only."""
    both = (f"requests.{resource}", f"limits.{resource}")
    return both if "/" in resource else (resource, *both)


def held(pods: Iterable[Thing]) -> dict[str, float]:
    """The same of pods that are there and have not ended, which count as used until they are replaced."""
    sums: dict[str, float] = {}
    for pod in pods:
        if (pod.get("status") or {}).get("phase") in ENDED:
            continue
        amounts = dict.fromkeys(("pods", "count/pods"), 1.0)
        for container in pod["spec"]["containers"]:
            for part in ("requests", "limits"):
                for what, text in ((container.get("resources") or {}).get(part) or {}).items():
                    for name in (f"{part}.{what}", *((what,) if part == "requests" else ())):
                        amounts[name] = amounts.get(name, 0.0) + (quantity(str(text)) or 0.0)
        for name, amount in amounts.items():
            sums[name] = sums.get(name, 0.0) + amount
    return sums


def quota(
    c: Config,
    quotas: Iterable[Thing],
    asks: Mapping[str, float],
    wants: Mapping[str, float],
    own: Mapping[str, float],
) -> list[Finding]:
    """Each amount that does not fit, or that all do."""
    found, fits = [], []
    for thing in quotas:
        status, name = thing.get("status") or {}, thing["metadata"]["name"]
        hard = status.get("hard") or (thing.get("spec") or {}).get("hard") or {}
        for what, text in hard.items():
            limit, want = quantity(str(text)), wants.get(what, 0.0)
            if not want or limit is None or not applies(c, thing):
                continue
            mine = own.get(what, 0.0)
            used = max(
                0.0, (quantity(str((status.get("used") or {}).get(what, "0"))) or 0.0) - mine
            )
            line = f"quota {name}: {what}={amount(what, limit)}, and the run asks for {amount(what, want)}"
            more = f"{amount(what, used)} used{' by others' if mine else ''}"
            if want > limit:
                found.append(Finding("quota", FAIL, line, remedy(asks, what, limit), BAD_SETTING))
            elif used + want > limit:
                found.append(
                    Finding(
                        "quota",
                        FAIL,
                        f"{line} with {more}, so {amount(what, limit - used)} left",
                        f"wait until others of the namespace end, or {remedy(asks, what, limit - used)}",
                    )
                )
            else:
                fits.append(
                    (
                        (used + want) / limit,
                        f"{what} {amount(what, want)} asked for, {more}, of {amount(what, limit)}",
                    )
                )
    if found:
        return found
    tightest = [text for _, text in sorted(fits, reverse=True)]
    rest = f"; and {len(fits) - MANY} more" if len(fits) > MANY else ""
    return [
        Finding(
            "quota",
            PASS,
            "; ".join(tightest[:MANY]) + rest if fits else "none counts what the run asks for",
        )
    ]


def applies(c: Config, thing: Thing) -> bool:
    """Whether a quota counts our pods: they have no deadline, ask for what they may take, and have PRIORITY_CLASS."""
    spec = thing.get("spec") or {}
    scopes = set(spec.get("scopes") or [])
    if "PriorityClass" in scopes and not c.priority_class:
        return False
    if {"Terminating", "BestEffort", "CrossNamespacePodAffinity"} & scopes:
        return False
    for term in (spec.get("scopeSelector") or {}).get("matchExpressions") or []:
        scope, operator, values = (
            term.get("scopeName"),
            term.get("operator"),
            term.get("values") or [],
        )
        if scope in ("Terminating", "BestEffort", "CrossNamespacePodAffinity"):
            return False
        if scope == "PriorityClass" and not {
            "In": c.priority_class in values,
            "NotIn": c.priority_class not in values,
            "Exists": bool(c.priority_class),
            "DoesNotExist": not c.priority_class,
        }.get(operator, True):
            return False
    return True


def remedy(asks: Mapping[str, float], what: str, left: float) -> str:
    """What would fit into what is left, if anything of a run does."""
    of_pod = {name: each for resource, each in asks.items() for name in names_of(resource)}
    of_pod |= dict.fromkeys(("pods", "count/pods"), 1.0)
    if what.endswith("requests.storage"):
        return (
            f"set VOLUME_GB={left // 2**30:.0f} or less, or " if left >= 2**30 else ""
        ) + "use a claim that is there, with VOLUME, or ask for more quota"
    if what not in of_pod:
        return "remove what is not needed any more, or ask for more quota"
    pods = int(left // of_pod[what])
    return (
        f"ask for less (NODES={pods} of these pods would fit) or for more quota"
        if pods
        else "ask for more quota, or make the pods smaller: not one of these fits"
    )


def amount(what: str, value: float) -> str:
    return f"{value / 2**30:.4g}Gi" if what.endswith(IN_BYTES) else f"{value:.6g}"


# ---------------------------------------------------------------------------------------------------
# Limits of one pod
# ---------------------------------------------------------------------------------------------------


def limits(
    c: Config, ranges: Sequence[Thing], asks: Mapping[str, float], *, has_claim: bool
) -> list[Finding]:
    """Each limit that would refuse a pod or the claim, or change a pod."""
    found = []
    for thing in ranges:
        name = thing["metadata"]["name"]
        for item in (thing.get("spec") or {}).get("limits") or []:
            kind = item.get("type", "")
            if kind in ("Container", "Pod"):
                found += of_pod(name, item, asks)
            elif kind == "PersistentVolumeClaim" and not has_claim:
                found += outside(name, item, {"storage": c.volume_gb * 2.0**30})
    names = " and ".join(thing["metadata"]["name"] for thing in ranges)
    return found or [Finding("limits", PASS, f"a pod and its volume keep to LimitRange {names}")]


def of_pod(name: str, item: Thing, asks: Mapping[str, float]) -> list[Finding]:
    found = outside(name, item, asks)
    added = {what: value for what, value in (item.get("default") or {}).items() if what not in asks}
    if added:
        said = ", ".join(f"{what}={value}" for what, value in sorted(added.items()))
        found.append(
            Finding(
                "limits",
                WARN,
                f"LimitRange {name} gives each container what it does not ask for: {said}",
                "ask the namespace's administrator to leave that out, if pods then find no node",
            )
        )
    return found


def outside(name: str, item: Thing, asks: Mapping[str, float]) -> list[Finding]:
    """What is more than the largest or less than the smallest amount, or is not asked for and must be."""
    found, kind = [], item["type"].lower()
    filled_in = {
        "max": item.get("default") or {},
        "min": item.get("defaultRequest") or item.get("default") or {},
    }
    for side, words in (("max", "may have at most"), ("min", "must have at least")):
        for what, text in (item.get(side) or {}).items():
            bound, have = quantity(str(text)), asks.get(what)
            if bound is None or (have is None and what in filled_in[side]):
                continue
            if have is None:
                found.append(
                    Finding(
                        "limits",
                        FAIL,
                        f"LimitRange {name}: a {kind} must ask for {what}, as it "
                        f"{words} {amount(what, bound)}, and those of the run do not",
                        "ask the namespace's administrator to leave it out, or take another NAMESPACE",
                    )
                )
            elif (side == "max" and have > bound) or (side == "min" and have < bound):
                rule = f"LimitRange {name}: a {kind} {words} {what}={amount(what, bound)}"
                if what in REMEDIES:
                    text = f"{rule}, and a pod asks for {amount(what, have)}"
                    found.append(Finding("limits", FAIL, text, REMEDIES[what], BAD_SETTING))
                    continue
                setting = SETTING.get(what, "GPUS_PER_NODE")
                unit = 2**30 if what in IN_BYTES else 1
                exact = math.floor(bound / unit) if side == "max" else math.ceil(bound / unit)
                found.append(
                    Finding(
                        "limits",
                        FAIL,
                        f"{rule}, and {setting} makes it {amount(what, have)}",
                        f"set {setting}={exact}" if exact else "take another NAMESPACE",
                        BAD_SETTING,
                    )
                )
    return found
