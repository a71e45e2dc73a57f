"""What the API adds to an object that it takes, and what of one may not change any more."""

import copy
import datetime
import json
import secrets
from collections.abc import Iterator
from typing import Any

from tests.cluster_sim.validate import Fault, invalid, quantity

JOB_LABELS = ("batch.kubernetes.io/job-name", "job-name")
UID_LABELS = ("batch.kubernetes.io/controller-uid", "controller-uid")
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
LETTERS = "bcdfghjklmnpqrstvwxz2456789"  # of generated names


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def age_s(time_stamp: str) -> float:
    """Seconds since a time stamp."""
    made = datetime.datetime.fromisoformat(time_stamp)
    return (datetime.datetime.now(datetime.UTC) - made).total_seconds()


def suffix(length: int = 5) -> str:
    return "".join(secrets.choice(LETTERS) for _ in range(length))


def fill_in(thing: dict[str, Any], default_class: str | None) -> None:
    """The API's defaults, of those fields that somebody reads."""
    spec = (
        thing.setdefault("spec", {})
        if thing["kind"] in ("Job", "Pod", "Service", "PersistentVolumeClaim")
        else {}
    )
    if thing["kind"] == "Job":
        name, uid = thing["metadata"]["name"], thing["metadata"]["uid"]
        for field, value in {
            "parallelism": 1,
            "completionMode": "NonIndexed",
            "backoffLimit": 6,
            "suspend": False,
            "manualSelector": False,
        }.items():
            spec.setdefault(field, value)
        if spec["completionMode"] == "NonIndexed":
            spec.setdefault("completions", 1)
        spec.setdefault(
            "podReplacementPolicy",
            "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed",
        )
        spec["selector"] = {"matchLabels": {UID_LABELS[0]: uid}}
        labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
        labels.update(dict.fromkeys(JOB_LABELS, name) | dict.fromkeys(UID_LABELS, uid))
        for rule in spec.get("podFailurePolicy", {}).get("rules", []):
            for condition in rule.get("onPodConditions", []):
                condition.setdefault("status", "True")
        pod_defaults(spec["template"]["spec"])
    elif thing["kind"] == "Pod":
        pod_defaults(spec, "Always")
        thing.setdefault("status", {"phase": "Pending"})
    elif thing["kind"] == "Service":
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("clusterIP", "10.0.0.1")
        for port in spec.get("ports", []):
            port.setdefault("protocol", "TCP")
            port.setdefault("targetPort", port["port"])
    elif thing["kind"] == "PersistentVolumeClaim":
        if default_class:
            spec.setdefault("storageClassName", default_class)
        spec.setdefault("volumeMode", "Filesystem")
        thing.setdefault("status", {"phase": "Pending"})
    elif thing["kind"] == "Namespace":
        thing.setdefault("status", {"phase": "Active"})
    elif thing["kind"] == "Secret":
        thing.setdefault("type", "Opaque")


def pod_defaults(spec: dict[str, Any], restart: str | None = None) -> None:
    if restart:
        spec.setdefault("restartPolicy", restart)
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    for container in spec.get("containers", []):
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        latest = "@" not in container.get("image", "") and not container.get(
            "image", ""
        ).rpartition("/")[2].count(":")
        container.setdefault(
            "imagePullPolicy",
            "Always"
            if latest or container.get("image", "").endswith(":latest")
            else "IfNotPresent",
        )
        resources = container.get("resources", {})
        if resources.get("limits"):
            resources["requests"] = {**resources["limits"], **resources.get("requests", {})}
        for port in container.get("ports", []):
            port.setdefault("protocol", "TCP")
        for variable in container.get("env", []):
            if "fieldRef" in variable.get("valueFrom", {}):
                variable["valueFrom"]["fieldRef"].setdefault("apiVersion", "v1")


def frozen(old: dict[str, Any], new: dict[str, Any], expandable: bool) -> Iterator[Fault]:
    """The changes that the API refuses."""
    before, after = old.get("spec", {}), new.get("spec", {})
    if old["kind"] == "Job":
        for field in (
            "completions",
            "selector",
            "template",
            "completionMode",
            "podFailurePolicy",
            "backoffLimitPerIndex",
            "manualSelector",
        ):
            if before.get(field) == after.get(field):
                continue
            if (
                field == "completions"
                and after.get("completionMode") == "Indexed"
                and (after.get("completions") == after.get("parallelism"))
            ):
                continue  # an Indexed Job may grow and shrink, both numbers together
            shown = json.dumps(after.get(field), separators=(",", ":"))
            yield Fault(
                "FieldValueInvalid", f"spec.{field}", f"Invalid value: {shown}: field is immutable"
            )
    elif old["kind"] == "PersistentVolumeClaim":
        old_rest, new_rest = copy.deepcopy(before), copy.deepcopy(after)
        sizes = [
            rest["resources"].get("requests", {}).pop("storage", "0")
            for rest in (old_rest, new_rest)
        ]
        if old_rest != new_rest:
            yield Fault(
                "FieldValueForbidden",
                "spec",
                "Forbidden: spec is immutable after creation except "
                "resources.requests and volumeAttributesClassName for bound claims",
            )
        elif quantity(sizes[1]) < quantity(sizes[0]):
            yield Fault(
                "FieldValueForbidden",
                "spec.resources.requests.storage",
                "Forbidden: field can not be less than status.capacity",
            )
        elif quantity(sizes[1]) > quantity(sizes[0]) and not expandable:
            yield Fault(
                "FieldValueForbidden",
                "spec.resources.requests.storage",
                "Forbidden: only dynamically "
                "provisioned pvc can be resized and the storageclass that provisions the pvc must support "
                "resize",
            )
    elif old["kind"] == "Pod":
        rests = [copy.deepcopy(spec) for spec in (before, after)]
        for rest in rests:
            for container in rest.get("containers", []):
                container.pop("image", None)
            for field in (
                "activeDeadlineSeconds",
                "tolerations",
                "terminationGracePeriodSeconds",
                "nodeName",
            ):
                rest.pop(field, None)
        if rests[0] != rests[1]:
            yield Fault(
                "FieldValueForbidden",
                "spec",
                "Forbidden: pod updates may not change fields other than "
                "`spec.containers[*].image`, `spec.activeDeadlineSeconds`, `spec.tolerations`",
            )
    elif old["kind"] == "Service" and before.get("clusterIP") != after.get("clusterIP"):
        yield invalid("spec.clusterIP", after.get("clusterIP"), "field is immutable")
    elif old["kind"] in ("ConfigMap", "Secret") and old.get("immutable"):
        for field in ("data", "binaryData"):
            if old.get(field) != new.get(field):
                yield Fault(
                    "FieldValueForbidden",
                    field,
                    "Forbidden: field is immutable when `immutable` is set",
                )
    if old["kind"] == "Secret" and old.get("type") != new.get("type"):
        yield invalid("type", new.get("type"), "field is immutable")
