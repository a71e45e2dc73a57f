"""What a site adds to the pods that train: POD_PATCH, a file of YAML that is merged into them.

    metadata: {labels: {kueue.x-k8s.io/queue-name: lab}}
    spec:
      securityContext: {runAsUser: null, fsGroup: 2000}
      containers: [{name: trainer, resources: {limits: {rdma/hca: 1}, requests: {rdma/hca: 1}}}]

Maps are merged at any depth, and null takes a field away. Items of a list that have a name are merged by it; others
are added.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from k8s.cluster.kubectl import BAD_SETTING, Refused
from settings import ROOT

CONTAINER = "trainer"
# A pod's fields (Kubernetes API, PodSpec), without those that a launch sets and needs as they are.
POD_FIELDS = frozenset(
    [
        "affinity",
        "automountServiceAccountToken",
        "containers",
        "dnsConfig",
        "dnsPolicy",
        "hostAliases",
        "hostIPC",
        "hostNetwork",
        "hostUsers",
        "imagePullSecrets",
        "initContainers",
        "nodeSelector",
        "overhead",
        "preemptionPolicy",
        "priorityClassName",
        "resourceClaims",
        "runtimeClassName",
        "schedulerName",
        "schedulingGates",
        "securityContext",
        "serviceAccountName",
        "tolerations",
        "topologySpreadConstraints",
        "volumes",
    ]
)
# The same of its container.
CONTAINER_FIELDS = frozenset(
    [
        "name",
        "env",
        "imagePullPolicy",
        "lifecycle",
        "ports",
        "resources",
        "securityContext",
        "volumeDevices",
        "volumeMounts",
    ]
)
# A launch sets these, and the run needs them as they are.
BREAKS = {
    "spec.activeDeadlineSeconds": "it would end a run before its time",
    "spec.restartPolicy": "the Job decides by exit codes whether a pod is started again",
    "spec.hostname": "pods find each other by the names that the Job gives",
    "spec.subdomain": "pods find each other by the names that the Job gives",
    "spec.terminationGracePeriodSeconds": "set GRACE_PERIOD_S",
    "spec.nodeName": "set SITE or spec.nodeSelector",
    "spec.affinity.nodeAffinity": "it holds GPU_PRODUCTS and EXCLUDE_NODES; set spec.nodeSelector",
    "trainer.image": "set IMAGE",
    "trainer.command": "it starts the run",
    "trainer.args": "the command starts the run",
    "trainer.workingDir": "the command starts there",
    "trainer.envFrom": "settings reach the pod by it",
}
BY_SETTING = {"cpu": "POD_CPUS", "memory": "POD_MEMORY_GB", "nvidia.com/gpu": "GPUS_PER_NODE"}
OURS = "app.kubernetes.io/"
OUR_ENVIRONMENT = ("NODE_RANK", "POD_NAME", "K8S_NODE")
VOLUME = "volume"


def read_patch(path: str) -> dict[str, Any]:
    """Return the patch of POD_PATCH; {} for "". Raises Refused with all that is wrong with it."""
    if not path:
        return {}
    try:
        patch = yaml.safe_load((ROOT / Path(path).expanduser()).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise Refused(BAD_SETTING, f"POD_PATCH={path}: Cannot be read ({reason}).") from None
    problems = [f"POD_PATCH={path}: {problem}" for problem in find_problems(patch)]
    if problems:
        raise Refused(BAD_SETTING, *problems)
    return dict(patch)


def find_problems(patch: Any) -> Iterator[str]:
    """Find what is no field of a pod, and what would break the launch."""
    if not isinstance(patch, dict):
        yield "Must be a map with metadata, spec or both, for example spec: {tolerations: [...]}."
        return
    for name in patch.keys() - {"metadata", "spec"}:
        yield f"{name}: Is not a field of a pod here. Use metadata or spec."
    metadata = patch.get("metadata", {})
    spec = patch.get("spec", {})
    if not isinstance(metadata, dict) or not isinstance(spec, dict):
        yield "metadata and spec: Must be maps."
        return
    for name, texts in metadata.items():
        if name not in ("labels", "annotations"):
            yield f"metadata.{name}: Cannot be set. Use labels or annotations."
        elif not isinstance(texts, dict) or not all(isinstance(v, str) for v in texts.values()):
            yield f"metadata.{name}: Must be a map of text. Put numbers and true in quotes."
        else:
            for key in texts:
                if key.startswith((OURS, "pure-transformer/")):
                    yield f"metadata.{name}.{key}: The launch finds its pods by this name."
    yield from check_fields(spec, POD_FIELDS, "spec")
    affinity = spec.get("affinity")
    if isinstance(affinity, dict) and "nodeAffinity" in affinity:
        yield refuse("spec.affinity.nodeAffinity")
    for name in ("containers", "initContainers", "volumes", "tolerations", "imagePullSecrets"):
        if not is_list_of_maps(spec.get(name, [])):
            yield f"spec.{name}: Must be a list of maps."
            return
    if any(volume.get("name") == VOLUME for volume in spec.get("volumes", [])):
        yield "spec.volumes.volume: Runs and data are on it. Set VOLUME."
    for container in spec.get("containers", []):
        yield from check_container(container)


def check_fields(thing: dict[str, Any], known: frozenset[str], where: str) -> Iterator[str]:
    """Find fields that do not exist there, or that the launch needs as they are."""
    for name in thing:
        if f"{where}.{name}" in BREAKS:
            yield refuse(f"{where}.{name}")
        elif name not in known:
            yield f"{where}.{name}: Is not a field that can be patched. Use one of {', '.join(sorted(known))}."


def refuse(field: str) -> str:
    return f"{field}: Cannot be changed: {BREAKS[field]}."


def check_container(container: dict[str, Any]) -> Iterator[str]:
    """Find what is wrong with an item of containers."""
    if container.get("name") != CONTAINER:
        yield (
            f"spec.containers: Must have name: {CONTAINER}, the only one; a second one would keep a pod from ending."
        )
        return
    yield from check_fields(container, CONTAINER_FIELDS, CONTAINER)
    resources = container.get("resources", {})
    if not isinstance(resources, dict):
        yield f"{CONTAINER}.resources: Must be a map."
        return
    for part, amounts in resources.items():
        if part not in ("limits", "requests") or not isinstance(amounts, dict):
            yield f"{CONTAINER}.resources.{part}: Must be a map called limits or requests."
            continue
        for name in amounts.keys() & BY_SETTING.keys():
            yield f"{CONTAINER}.resources.{part}.{name}: Cannot be changed: set {BY_SETTING[name]}."
    for name in ("env", "volumeMounts", "ports"):
        if not is_list_of_maps(container.get(name, [])):
            yield f"{CONTAINER}.{name}: Must be a list of maps."
            return
    for variable in container.get("env", []):
        if variable.get("name") in OUR_ENVIRONMENT:
            yield f"{CONTAINER}.env.{variable['name']}: Cannot be changed: the Job sets it."
    if any(mount.get("name") == VOLUME for mount in container.get("volumeMounts", [])):
        yield f"{CONTAINER}.volumeMounts.volume: Cannot be changed: runs and data are there."


def is_list_of_maps(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def patch_job(job: dict[str, Any], patch: dict[str, Any]) -> None:
    """Merge a patch into the pods of a Job. Its labels are the Job's as well: Kueue reads its queue's name there."""
    template = job["spec"]["template"]
    template |= merge(template, patch)
    labels = (patch.get("metadata") or {}).get("labels", {})
    job["metadata"] = merge(job["metadata"], {"labels": labels})


def merge(old: Any, new: Any) -> Any:
    """Return old with what new says."""
    if isinstance(old, dict) and isinstance(new, dict):
        merged = dict(old)
        for name, value in new.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = merge(old.get(name), value)
        return merged
    if isinstance(old, list) and isinstance(new, list):
        return merge_lists(old, new)
    return new


def merge_lists(old: list[Any], new: list[Any]) -> list[Any]:
    """Return old with the items of new. Those with the name (and mount path) of an old one are merged into it."""
    merged = list(old)
    for item in new:
        at = next(
            (i for i, other in enumerate(merged) if key(item) and key(other) == key(item)), None
        )
        if at is None:
            merged.append(item)
        else:
            merged[at] = merge(merged[at], item)
    return merged


def key(item: Any) -> tuple[Any, ...]:
    """Return what an item of a list is known by; () if it has no name."""
    if not isinstance(item, dict) or "name" not in item:
        return ()
    return item["name"], item.get("mountPath")
