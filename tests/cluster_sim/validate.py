"""What the API refuses: fields and types by Kubernetes' own schemas, strictly, and the rules that those cannot express.

The messages are the API server's. Not checked: quantities against quotas, and what admission plug-ins other than Pod
Security would say.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate.utils
import referencing

SCHEMAS = "1.32.0"
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")
SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_NAMED = {
    "Namespace",
    "Pod",
}  # Pods may have dots, which their host names may not: we want none


class Fault(NamedTuple):
    """One thing wrong with an object, as the API lists it."""

    reason: str  # FieldValueInvalid ...
    field: str
    message: str


def invalid(field: str, value: object, why: str) -> Fault:
    shown = (
        f'"{value}"'
        if isinstance(value, str)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
    return Fault("FieldValueInvalid", field, f"Invalid value: {shown}: {why}")


def required(field: str, why: str) -> Fault:
    return Fault("FieldValueRequired", field, f"Required value: {why}" if why else "Required value")


def unsupported(field: str, value: object, *choices: str) -> Fault:
    listed = ", ".join(f'"{choice}"' for choice in sorted(choices))
    return Fault(
        "FieldValueNotSupported", field, f'Unsupported value: "{value}": supported values: {listed}'
    )


@functools.cache
def schema_of(kind: str, api_version: str) -> jsonschema.Draft202012Validator | None:
    """The strict schema of a kind, read once: it takes longer than all the rest."""
    folder = f"kubernetes-json-schema/v{SCHEMAS}-local-strict"
    stem = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    try:
        schema = kubernetes_validate.utils.schema_contents(
            f"{folder}/{kind.lower()}-{stem}.json", SCHEMAS
        )
    except FileNotFoundError:
        return None
    registry = referencing.Registry()
    for content in (
        schema,
        kubernetes_validate.utils.schema_contents(f"{folder}/_definitions.json", SCHEMAS),
    ):
        registry = referencing.Resource.from_contents(content) @ registry
    return jsonschema.Draft202012Validator(schema, registry=registry)


def schema_fault(thing: dict[str, Any]) -> str | None:
    """Why the API could not decode an object: an unknown field, or a value of a wrong type."""
    validator = schema_of(thing["kind"], thing["apiVersion"])
    if validator is None:
        return f'no matches for kind "{thing["kind"]}" in version "{thing["apiVersion"]}"'
    error = jsonschema.exceptions.best_match(validator.iter_errors(thing))
    if error is None:
        return None
    where = ""
    for part in error.absolute_path:
        where += f"[{part}]" if isinstance(part, int) else f".{part}"
    if error.validator == "additionalProperties":
        unknown = sorted(set(error.instance) - set(error.schema.get("properties", {})))
        return "strict decoding error: " + ", ".join(
            f'unknown field "{(where + "." + name)[1:]}"' for name in unknown
        )
    return (
        f'{thing["kind"]} in version "{thing["apiVersion"].rpartition("/")[2]}" cannot be handled as a '
        f"{thing['kind']}: {where[1:]}: {error.message}"
    )


def faults(thing: dict[str, Any]) -> list[Fault]:
    """What is wrong with an object whose fields and types are right."""
    return list(naming(thing)) + list(BY_KIND.get(thing["kind"], lambda _: iter(()))(thing))


def naming(thing: dict[str, Any]) -> Iterator[Fault]:
    meta = thing["metadata"]
    name, kind = meta.get("name", ""), thing["kind"]
    rule, words = (
        SUBDOMAIN,
        (
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' "
            "or '.'"
        ),
    )
    if kind in LABEL_NAMED:
        rule, words = (
            LABEL,
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'",
        )
    if kind == "Service":
        rule, words = (
            SERVICE,
            "a DNS-1035 label must consist of lower case alphanumeric characters or '-'",
        )
    if not name:
        yield required("metadata.name", "name or generateName is required")
    elif len(name) > 63 and rule is not SUBDOMAIN:
        yield invalid("metadata.name", name, "must be no more than 63 characters")
    elif not rule.fullmatch(name):
        yield invalid("metadata.name", name, words)
    for key, value in (meta.get("labels") or {}).items():
        if not LABEL_VALUE.fullmatch(value):
            yield invalid(
                "metadata.labels",
                value,
                f"a valid label must be an empty string or consist of alphanumeric "
                f"characters, '-', '_' or '.', at most 63 ({key})",
            )


def job(thing: dict[str, Any]) -> Iterator[Fault]:
    spec, name = thing["spec"], thing["metadata"]["name"]
    template = spec["template"]["spec"]
    policy, mode = spec.get("podFailurePolicy"), spec.get("completionMode", "NonIndexed")
    if mode not in ("NonIndexed", "Indexed"):
        yield unsupported("spec.completionMode", mode, "Indexed", "NonIndexed")
    if mode == "Indexed":
        if spec.get("completions") is None:
            yield required("spec.completions", "when completion mode is Indexed")
        # The host name of a pod, whose last index has the most digits.
        longest = f"{name}-{max(0, spec.get('completions', 1) - 1)}"
        if not LABEL.fullmatch(longest):
            yield invalid(
                "metadata.name",
                name,
                f"will not able to create pod with invalid DNS label: {longest}",
            )
    elif len(name) > 63:
        yield invalid("metadata.name", name, "must be no more than 63 characters")
    for count in (
        "completions",
        "parallelism",
        "backoffLimit",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
    ):
        if spec.get(count) is not None and spec[count] < 0:
            yield invalid(f"spec.{count}", spec[count], "must be greater than or equal to 0")
    if template.get("restartPolicy") not in ("Never", "OnFailure"):
        yield required("spec.template.spec.restartPolicy", 'valid values: "OnFailure", "Never"')
    replacement = spec.get("podReplacementPolicy")
    if replacement not in (None, "Failed", "TerminatingOrFailed"):
        yield unsupported("spec.podReplacementPolicy", replacement, "Failed", "TerminatingOrFailed")
    if policy:
        if template.get("restartPolicy") != "Never":
            yield invalid(
                "spec.template.spec.restartPolicy",
                template.get("restartPolicy"),
                'only "Never" is supported when podFailurePolicy is specified',
            )
        if replacement == "TerminatingOrFailed":
            yield unsupported("spec.podReplacementPolicy", replacement, "Failed")
        containers = {
            c["name"] for c in template["containers"] + template.get("initContainers", [])
        }
        for number, rule in enumerate(policy["rules"]):
            yield from failure_rule(
                rule, f"spec.podFailurePolicy.rules[{number}]", containers, spec
            )
    if spec.get("backoffLimitPerIndex") is not None and mode != "Indexed":
        yield invalid(
            "spec.backoffLimitPerIndex",
            spec["backoffLimitPerIndex"],
            "requires indexed completion mode",
        )
    yield from pod_spec(template, "spec.template.spec")


def failure_rule(
    rule: dict[str, Any], at: str, containers: set[str], spec: dict[str, Any]
) -> Iterator[Fault]:
    if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
        yield unsupported(f"{at}.action", rule["action"], "Count", "FailIndex", "FailJob", "Ignore")
    if rule["action"] == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
        yield invalid(f"{at}.action", "FailIndex", "requires the backoffLimitPerIndex to be set")
    codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
    if bool(codes) == bool(conditions):
        yield invalid(at, "", "specifying one of OnExitCodes and OnPodConditions is required")
    if codes:
        values = codes.get("values", [])
        if codes["operator"] not in ("In", "NotIn"):
            yield unsupported(f"{at}.onExitCodes.operator", codes["operator"], "In", "NotIn")
        if not values or len(values) > 255:
            yield invalid(
                f"{at}.onExitCodes.values", values, "at least one value is required, at most 255"
            )
        if values != sorted(set(values)):
            yield invalid(f"{at}.onExitCodes.values", values, "must be ordered, without duplicates")
        if 0 in values and codes["operator"] == "In":
            yield invalid(
                f"{at}.onExitCodes.values[{values.index(0)}]",
                0,
                "must not be 0 for the In operator",
            )
        if codes.get("containerName") and codes["containerName"] not in containers:
            yield invalid(
                f"{at}.onExitCodes.containerName",
                codes["containerName"],
                "must be one of the container or initContainer names in the pod template",
            )
    for number, condition in enumerate(conditions or []):
        if condition.get("status", "True") not in ("True", "False", "Unknown"):
            yield unsupported(
                f"{at}.onPodConditions[{number}].status",
                condition["status"],
                "False",
                "True",
                "Unknown",
            )


def pod(thing: dict[str, Any]) -> Iterator[Fault]:
    yield from pod_spec(thing["spec"], "spec")


def pod_spec(spec: dict[str, Any], at: str) -> Iterator[Fault]:
    for field, choices in {
        "restartPolicy": ("Always", "Never", "OnFailure"),
        "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    }.items():
        if spec.get(field) is not None and spec[field] not in choices:
            yield unsupported(f"{at}.{field}", spec[field], *choices)
    for field in ("subdomain", "hostname"):
        if spec.get(field) and not LABEL.fullmatch(spec[field]):
            yield invalid(f"{at}.{field}", spec[field], "a lowercase RFC 1123 label is required")
    if (spec.get("terminationGracePeriodSeconds") or 0) < 0:
        yield invalid(
            f"{at}.terminationGracePeriodSeconds",
            spec["terminationGracePeriodSeconds"],
            "must be greater than or equal to 0",
        )
    volumes: set[str] = set()
    for number, volume in enumerate(spec.get("volumes", [])):
        where = f"{at}.volumes[{number}]"
        if volume["name"] in volumes:
            yield Fault(
                "FieldValueDuplicate", f"{where}.name", f'Duplicate value: "{volume["name"]}"'
            )
        volumes.add(volume["name"])
        if not LABEL.fullmatch(volume["name"]):
            yield invalid(f"{where}.name", volume["name"], "a lowercase RFC 1123 label is required")
        if len(volume) != 2:
            yield (
                required(where, "must specify a volume type")
                if len(volume) < 2
                else Fault(
                    "FieldValueForbidden",
                    where,
                    "Forbidden: may not specify more than 1 volume type",
                )
            )
    names: set[str] = set()
    for group in ("initContainers", "containers"):
        for number, container in enumerate(spec.get(group, [])):
            where = f"{at}.{group}[{number}]"
            if container["name"] in names:
                yield Fault(
                    "FieldValueDuplicate",
                    f"{where}.name",
                    f'Duplicate value: "{container["name"]}"',
                )
            names.add(container["name"])
            yield from container_faults(container, where, volumes)
    if not spec.get("containers"):
        yield required(f"{at}.containers", "")


def container_faults(container: dict[str, Any], at: str, volumes: set[str]) -> Iterator[Fault]:
    if not LABEL.fullmatch(container["name"]):
        yield invalid(f"{at}.name", container["name"], "a lowercase RFC 1123 label is required")
    if not container.get("image"):
        yield required(f"{at}.image", "")
    if container.get("imagePullPolicy") not in (None, "Always", "IfNotPresent", "Never"):
        yield unsupported(
            f"{at}.imagePullPolicy", container["imagePullPolicy"], "Always", "IfNotPresent", "Never"
        )
    if container.get("terminationMessagePolicy") not in (None, "File", "FallbackToLogsOnError"):
        yield unsupported(
            f"{at}.terminationMessagePolicy",
            container["terminationMessagePolicy"],
            "File",
            "FallbackToLogsOnError",
        )
    mounted: set[str] = set()
    for number, mount in enumerate(container.get("volumeMounts", [])):
        if mount["name"] not in volumes:
            yield Fault(
                "FieldValueNotFound",
                f"{at}.volumeMounts[{number}].name",
                f'Not found: "{mount["name"]}"',
            )
        if mount["mountPath"] in mounted:
            yield invalid(
                f"{at}.volumeMounts[{number}].mountPath", mount["mountPath"], "must be unique"
            )
        mounted.add(mount["mountPath"])
    for number, variable in enumerate(container.get("env", [])):
        if variable.get("value") and variable.get("valueFrom"):
            yield invalid(
                f"{at}.env[{number}].valueFrom",
                "",
                "may not be specified when `value` is not empty",
            )
        if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", variable["name"]):
            yield invalid(
                f"{at}.env[{number}].name",
                variable["name"],
                "a valid environment variable name is required",
            )
    ports: set[str] = set()
    for number, port in enumerate(container.get("ports", [])):
        if not 1 <= port["containerPort"] <= 65535:
            yield invalid(
                f"{at}.ports[{number}].containerPort",
                port["containerPort"],
                "must be between 1 and 65535, inclusive",
            )
        if port.get("name"):
            name = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
            if not name.fullmatch(port["name"]) or port["name"] in ports:
                yield invalid(
                    f"{at}.ports[{number}].name",
                    port["name"],
                    "must be a port name, at most 15 characters",
                )
            ports.add(port["name"])
    limits, requests = (
        (container.get("resources") or {}).get(part) or {} for part in ("limits", "requests")
    )
    for name in sorted(limits.keys() | requests.keys()):
        extended = "/" in name and not name.startswith("kubernetes.io/")
        if extended and name not in limits:
            yield required(
                f"{at}.resources.limits", "Limit must be set for non overcommitable resources"
            )
        elif name in limits and name in requests:
            ask, most = quantity(requests[name]), quantity(limits[name])
            if ask > most or (extended and ask != most):
                yield invalid(
                    f"{at}.resources.requests",
                    str(requests[name]),
                    f"must be "
                    f"{'equal to' if extended else 'less than or equal to'} {name} limit of {limits[name]}",
                )


def quantity(value: object) -> float:
    """A quantity as a number: '500m', '96Gi', 2."""
    found = re.fullmatch(r"([0-9.]+)(m|[kMGTPE]i?|)", str(value))
    if not found:
        raise ValueError(f"{value} is no quantity")
    scale = {"": 1.0, "m": 1e-3} | {
        unit + i: (1024.0 if i else 1000.0) ** power
        for power, unit in enumerate("kMGTPE", 1)
        for i in ("", "i")
    }
    return float(found[1]) * scale[found[2]]


def insecure(spec: dict[str, Any]) -> list[str]:
    """What Pod Security "restricted" has against a pod, in its words."""
    found = []
    for container in spec.get("initContainers", []) + spec["containers"]:
        context, name = container.get("securityContext", {}), container["name"]
        effective = {**spec.get("securityContext", {}), **context}
        if context.get("allowPrivilegeEscalation") is not False:
            found.append(
                f'allowPrivilegeEscalation != false (container "{name}" must set '
                "securityContext.allowPrivilegeEscalation=false)"
            )
        if "ALL" not in context.get("capabilities", {}).get("drop", []):
            found.append(
                f'unrestricted capabilities (container "{name}" must set '
                'securityContext.capabilities.drop=["ALL"])'
            )
        if effective.get("runAsNonRoot") is not True:
            found.append(
                f'runAsNonRoot != true (pod or container "{name}" must set securityContext.runAsNonRoot=true)'
            )
        if effective.get("runAsUser") == 0:
            found.append("runAsUser=0")
        if effective.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append(
                f'seccompProfile (pod or container "{name}" must set securityContext.seccompProfile.type to '
                '"RuntimeDefault" or "Localhost")'
            )
        if context.get("privileged"):
            found.append(
                f'privileged (container "{name}" must not set securityContext.privileged=true)'
            )
    if any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        found.append("host namespaces")
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found += [
        f'restricted volume types (volume "{volume["name"]}")'
        for volume in spec.get("volumes", [])
        if not allowed & volume.keys()
    ]
    return found


def service(thing: dict[str, Any]) -> Iterator[Fault]:
    ports = thing["spec"].get("ports", [])
    if not ports and thing["spec"].get("clusterIP") != "None":
        yield required("spec.ports", "")
    if len(ports) > 1 and not all(port.get("name") for port in ports):
        yield required("spec.ports[0].name", "")


def claim(thing: dict[str, Any]) -> Iterator[Fault]:
    spec = thing["spec"]
    modes = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
    if not spec.get("accessModes"):
        yield required("spec.accessModes", "at least 1 access mode is required")
    for mode in spec.get("accessModes", []):
        if mode not in modes:
            yield unsupported("spec.accessModes", mode, *modes)
    if "storage" not in spec.get("resources", {}).get("requests", {}):
        yield required("spec.resources[storage]", "")


BY_KIND = {"Job": job, "Pod": pod, "Service": service, "PersistentVolumeClaim": claim}
