"""What kubectl get shows: the API makes the table, kubectl adds columns of labels to it."""

import datetime
from collections.abc import Callable
from typing import Any

from tests.cluster_sim.kinds import Kind

Thing = dict[str, Any]
MODES = {
    "ReadWriteOnce": "RWO",
    "ReadOnlyMany": "ROX",
    "ReadWriteMany": "RWX",
    "ReadWriteOncePod": "RWOP",
}
Column = tuple[str, Callable[[Thing], object]]


def ago(text: str | None, end: str | None = None) -> str:
    """'34s', '5m', '2h', '3d' since a time stamp, or between two."""
    if not text:
        return "<none>"
    until = datetime.datetime.fromisoformat(end) if end else datetime.datetime.now(datetime.UTC)
    seconds = max(0, int((until - datetime.datetime.fromisoformat(text)).total_seconds()))
    for unit, size in (("d", 172800), ("h", 10800), ("m", 120)):
        if seconds >= size:
            return f"{seconds // {'d': 86400, 'h': 3600, 'm': 60}[unit]}{unit}"
    return f"{seconds}s"


def pod_status(pod: Thing) -> str:
    """As in the STATUS column: the phase, or why it waits or ended."""
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    status = pod.get("status", {})
    for container in status.get("containerStatuses", []):
        state = container.get("state", {})
        for part in ("waiting", "terminated"):
            if state.get(part, {}).get("reason"):
                return str(state[part]["reason"])
    return str(status.get("reason") or status.get("phase", "Pending"))


def ready(pod: Thing) -> str:
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return (
        f"{sum(bool(status.get('ready')) for status in statuses)}/{len(pod['spec']['containers'])}"
    )


def node_ready(node: Thing) -> str:
    conditions = {c["type"]: c["status"] for c in node.get("status", {}).get("conditions", [])}
    words = "Ready" if conditions.get("Ready", "True") == "True" else "NotReady"
    return words + (",SchedulingDisabled" if node.get("spec", {}).get("unschedulable") else "")


def job_status(job: Thing) -> str:
    conditions = [
        c["type"] for c in job.get("status", {}).get("conditions", []) if c["status"] == "True"
    ]
    words = ("Complete", "Failed", "Suspended", "FailureTarget")
    return next((name for name in words if name in conditions), "Running")


def job_duration(job: Thing) -> str:
    status = job.get("status", {})
    return ago(status["startTime"], status.get("completionTime")) if "startTime" in status else ""


COLUMNS: dict[str, list[Column]] = {
    "Pod": [("Ready", ready), ("Status", pod_status), ("Restarts", lambda _: 0)],
    "Node": [
        ("Status", node_ready),
        ("Roles", lambda _: "<none>"),
        (
            "Version",
            lambda node: node.get("status", {}).get("nodeInfo", {}).get("kubeletVersion", ""),
        ),
    ],
    "Job": [
        ("Status", job_status),
        (
            "Completions",
            lambda job: (
                f"{job.get('status', {}).get('succeeded', 0)}/{job['spec'].get('completions', 1)}"
            ),
        ),
        ("Duration", job_duration),
    ],
    "PersistentVolumeClaim": [
        ("Status", lambda claim: claim.get("status", {}).get("phase", "")),
        ("Volume", lambda claim: claim["spec"].get("volumeName", "")),
        ("Capacity", lambda claim: claim.get("status", {}).get("capacity", {}).get("storage", "")),
        (
            "Access Modes",
            lambda claim: ",".join(MODES[mode] for mode in claim["spec"]["accessModes"]),
        ),
        ("StorageClass", lambda claim: claim["spec"].get("storageClassName", "")),
    ],
    "StorageClass": [("Provisioner", lambda thing: thing["provisioner"])],
    "ConfigMap": [("Data", lambda thing: len(thing.get("data", {})))],
    "Secret": [
        ("Type", lambda thing: thing.get("type", "")),
        ("Data", lambda thing: len(thing.get("data", {}))),
    ],
    "Namespace": [("Status", lambda thing: thing["status"]["phase"])],
    "Event": [
        ("Type", lambda event: event.get("type", "")),
        ("Reason", lambda event: event.get("reason", "")),
        (
            "Object",
            lambda event: "{kind}/{name}".format(
                **{"kind": "", "name": ""} | event["involvedObject"]
            ),
        ),
        ("Message", lambda event: event.get("message", "")),
    ],
}
WIDE: dict[str, list[Column]] = {
    "Pod": [
        ("IP", lambda pod: pod.get("status", {}).get("podIP", "<none>")),
        ("Node", lambda pod: pod["spec"].get("nodeName", "<none>")),
    ],
    "Node": [
        (
            "Internal-IP",
            lambda node: next(
                (
                    a["address"]
                    for a in node.get("status", {}).get("addresses", [])
                    if a["type"] == "InternalIP"
                ),
                "<none>",
            ),
        )
    ],
}


def table(
    kind: Kind, things: list[Thing], version: int, *, headings: bool = True, whole: bool = False
) -> Thing:
    """A Table of objects; with what is wanted of each beside its row."""
    age: Column = ("Age", lambda thing: ago(thing["metadata"].get("creationTimestamp")))
    columns: list[Column] = [
        ("Name", lambda thing: thing["metadata"]["name"]),
        *COLUMNS.get(kind.kind, []),
        age,
    ]
    wide = WIDE.get(kind.kind, [])
    made: Thing = {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": str(version)},
    }
    made["columnDefinitions"] = (
        [
            {
                "name": name,
                "type": "string",
                "format": "name" if name == "Name" else "",
                "description": name,
                "priority": int((name, _) in wide),
            }
            for name, _ in columns + wide
        ]
        if headings
        else None
    )
    made["rows"] = [
        {
            "cells": [str(value(thing)) for _, value in columns + wide],
            "object": thing
            if whole
            else {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": thing["metadata"],
            },
        }
        for thing in things
    ]
    return made
