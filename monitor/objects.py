"""What `kubectl get jobs,pods,events -o json` prints -> the facts of a Job and its pods. Pure functions."""

import dataclasses
from collections.abc import Mapping, Sequence

from k8s.cluster import words
from k8s.cluster.target import (
    ZONE,
    Thing,
    container_of,
    index_of,
    label,
    name_of,
    newest,
    runs,
    when,
)
from monitor.facts import Asks, Cluster, Pod

EVENT_MINUTES = 20.0  # how old an event may be that is shown; what explains a pod may be older
BARELY_S = 5.0  # between the times that two parts of Kubernetes write down for the same moment
ABSENT = "is not there: stopped, never sent, or over for a week"


def cluster_of(
    where: str,
    name: str,
    job: Thing | None,
    pods: Sequence[Thing],
    events: Sequence[Thing],
    zones: Mapping[str, str],
    run: str,
    now: float,
) -> Cluster:
    """The facts. pods: all of the Job, as k8s/target.of_job sorts them; events: whichever; zones: of nodes by name."""
    if job is None:
        return Cluster(where, name, ABSENT, wanted_pods=0, asked=now)
    pods = [*pods]
    over = words.ended(job)
    mine = sorted(
        (event for event in events if any(is_about(event, thing) for thing in (job, *pods))),
        key=when,
    )
    shown = [
        event
        for event in mine
        if any(
            is_about(event, thing)
            for thing in (job, *(pod for pod in newest(pods) if not runs(pod)))
        )
    ]
    return Cluster(
        where,
        name,
        words.state(job, pods),
        over,
        int(job["spec"].get("completions") or 1),
        tuple(with_before(pods, pod, mine, zones) for pod in newest(pods)),
        () if over else tuple(words.event_lines(shown, EVENT_MINUTES)),
        "" if over else not_made(job, pods, mine),
        exit_code=words.exit_code(job, pods) if over == "Failed" else None,
        run=run,
        asked=now,
        tunes=tunes(job),
    )


def tunes(job: Thing) -> bool:
    """Whether a Job's pods fine-tune: by their command, as k8s/manifests/finetune writes it."""
    containers = ((job["spec"].get("template") or {}).get("spec") or {}).get("containers") or [{}]
    words = containers[0].get("command") or []
    return "finetune" in words or "scripts/finetune.sh" in words  # the script of older versions


def is_about(event: Thing, thing: Thing) -> bool:
    """Whether an event is of this very object: a Job that was made anew has the name of the one before."""
    about, meta = event.get("involvedObject") or {}, thing["metadata"]
    return (
        about.get("name") == meta["name"]
        and about.get("kind", thing.get("kind")) == thing.get("kind")
        and about.get("uid", meta.get("uid")) == meta.get("uid")
    )


def all_run(job: Thing, pods: Sequence[Thing]) -> bool:
    """Whether every pod of a Job runs or has ended well, so that there is nothing to explain."""
    fine = [
        pod
        for pod in newest([*pods])
        if runs(pod) or (pod.get("status") or {}).get("phase") == "Succeeded"
    ]
    return len(fine) >= int(job["spec"].get("completions") or 1)


def not_made(job: Thing, pods: Sequence[Thing], events: Sequence[Thing]) -> str:
    """Why Kubernetes lets a pod not be made; "" where none is missing, or one has been made since it said so."""
    said = [
        event for event in events if event.get("reason") == "FailedCreate" and is_about(event, job)
    ]
    if not said or len(newest([*pods])) >= int(job["spec"].get("completions") or 1):
        return ""
    last = max(
        (words.seconds_of(pod["metadata"].get("creationTimestamp")) for pod in pods), default=0.0
    )
    current = words.seconds_of(when(said[-1])) >= last - BARELY_S
    return words.one_line(str(said[-1].get("message", ""))) if current else ""


# ---------------------------------------------------------------------------------------------------
# A pod
# ---------------------------------------------------------------------------------------------------


def with_before(
    pods: Sequence[Thing], pod: Thing, events: Sequence[Thing], zones: Mapping[str, str]
) -> Pod:
    """The newest pod of an index, and what the others of it tell."""
    same = [other for other in pods if index_of(other) == index_of(pod)]
    found, earlier = pod_of(pod, events, zones), same[:-1]
    return dataclasses.replace(
        found,
        restarts=found.restarts + len(earlier),
        made=tuple(words.seconds_of(other["metadata"].get("creationTimestamp")) for other in same),
        before=pod_of(earlier[-1], events, zones) if earlier else None,
    )


def pod_of(pod: Thing, events: Sequence[Thing], zones: Mapping[str, str]) -> Pod:
    """What a pod's object and its events say. zones: of nodes by name, where the pod has no label of its own."""
    status, state, node = (
        pod.get("status") or {},
        container_of(pod),
        str(pod["spec"].get("nodeName") or ""),
    )
    waiting, over = state.get("waiting") or {}, state.get("terminated") or {}
    scheduled, lost = words.condition(pod, "PodScheduled"), words.condition(pod, "DisruptionTarget")
    mine = [event for event in events if is_about(event, pod)]
    return Pod(
        index_of(pod),
        name_of(pod),
        words.phase(pod),
        node,
        label(pod, ZONE) or zones.get(node, ""),
        sum(
            int(container.get("restartCount", 0))
            for container in status.get("containerStatuses") or []
        ),
        created=time_of(pod["metadata"].get("creationTimestamp")),
        scheduled=time_of(scheduled.get("lastTransitionTime"))
        if scheduled.get("status") == "True"
        else None,
        pulling_since=last_time(mine, "Pulling"),
        pulled=last_time(mine, "Pulled"),
        waiting=str(waiting.get("reason") or ""),
        unschedulable=str(scheduled.get("message") or "")
        if scheduled.get("status") == "False"
        else "",
        trouble=words.trouble(pod),
        exit_code=words.code_of(pod),
        oom_killed=over.get("reason") == "OOMKilled",
        image=str(next(iter(pod["spec"].get("containers") or [{}])).get("image", "")),
        disrupted=str(lost.get("reason") or "")
        if lost.get("status") == "True"
        else str(status.get("reason") or "")
        if status.get("reason") in ("Evicted", "Preempting", "Preempted", "NodeLost")
        else "",
        asks=asks_of(pod["spec"]),
        message=str(waiting.get("message") or status.get("message") or ""),
        said=tuple(f"{event.get('reason', '')}: {event.get('message', '')}" for event in mine),
        ended=time_of(over.get("finishedAt")),
    )


def asks_of(spec: Thing) -> Asks:
    """What a pod's spec asks for, as k8s/manifests/base writes it."""
    limits = (next(iter(spec.get("containers") or [{}])).get("resources") or {}).get("limits") or {}
    resource = next((name for name in limits if "/" in name), "")
    terms = (
        ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
            "requiredDuringSchedulingIgnoredDuringExecution"
        )
        or {}
    ).get("nodeSelectorTerms") or []
    products = {
        value
        for term in terms
        for wish in term.get("matchExpressions") or []
        if str(wish.get("key", "")).endswith("gpu.product")
        for value in wish.get("values") or []
    }
    claims = [
        found["claimName"]
        for volume in spec.get("volumes") or []
        if (found := volume.get("persistentVolumeClaim"))
    ]
    secrets = [found["name"] for found in spec.get("imagePullSecrets") or []]
    return Asks(
        int(limits[resource]) if resource else None,
        resource,
        tuple(sorted(products)),
        str(limits.get("memory", "")),
        str(limits.get("ephemeral-storage", "")),
        *(claims or [""])[:1],
        *(secrets or [""])[:1],
    )


def last_time(events: Sequence[Thing], reason: str) -> float | None:
    """When the last event of a reason was."""
    return next(
        (time_of(when(event)) for event in reversed(events) if event.get("reason") == reason), None
    )


def time_of(stamp: str | None) -> float | None:
    """Unix seconds of a time stamp; None where there is none."""
    return words.seconds_of(stamp) if stamp else None
