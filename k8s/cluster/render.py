"""The manifests of a run: k8s/manifests/base with an overlay, filled in by kustomize from the checked settings.

kustomize reads no file outside the folder that it is given, so that is a temporary copy with a top of our making. Its
values are in a ConfigMap which is not in the output; k8s/manifests/fields/ says where each of them lands.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from k8s.cluster.job_spec import (
    LIGHTHOUSE,
    overlay_of,
    pod_cpus,
    pod_disk_gb,
    pod_environment,
    pod_memory_gb,
    shm_gb,
)
from k8s.cluster.kubectl import BAD_ENVIRONMENT, BAD_SETTING, Refused, kubectl
from k8s.cluster.nodes import GPU
from k8s.cluster.pod_patch import patch_job, read_patch
from settings import ROOT
from settings.config import Config

MANIFESTS = ROOT / "k8s" / "manifests"
FIELDS = {
    "nrp": ("pods", "peers", "together"),
    "pinned-site": ("pods", "peers"),
    "diloco": ("pods", "peers", "together"),
    "single-node": ("pods",),
    "cpu-smoke": ("pods", "peers"),
    "data": ("pods",),
    "claim": ("claim",),
    "reader": ("reader",),
    "lighthouse": ("lighthouse",),
}
WITHOUT_GPUS = ("cpu-smoke", "data")
LABELS = "app.kubernetes.io"
SETTINGS_FILE = "settings.env"
UNSET = "pure-transformer/rendered: unset"  # as base/job.yaml has it

DATA_CPUS, DATA_MEMORY_GB = 8, 32  # of the pod that prepares data, at most: more would lie idle


def render(
    c: Config, image: str, *, data_job: bool = False, gpu: str = GPU, by_product: bool = True
) -> str:
    """All that a run needs but its volume and its Secret, as YAML; with data_job that of make data. gpu: the name by
    which pods ask for GPUs. by_product: whether nodes carry the label that GPU_PRODUCTS is matched with."""
    overlay = "data" if data_job else overlay_of(c)
    text = build(
        overlay,
        values_of(c, image, data_job),
        patches_of(c, "" if overlay in WITHOUT_GPUS else gpu, by_product),
        pod_environment(c),
        c,
    )
    if c.sync == "diloco" and not data_job:
        text += "---\n" + lighthouse(c, image, text)
    if not data_job and (pod_patch := read_patch(c.pod_patch)):
        things = objects(text)
        for thing in things:
            if thing["kind"] == "Job" and thing["metadata"]["name"] == c.job_name:
                patch_job(thing, pod_patch)
        text = yaml.safe_dump_all(things, sort_keys=False, allow_unicode=True)
    text = avoid(text, [name for name in c.exclude_nodes.split(",") if name])
    return text.replace(UNSET, f'pure-transformer/rendered: "{digest(objects(text))}"')


def avoid(text: str, nodes: Sequence[str]) -> str:
    """Return this YAML with Jobs whose pods go to none of these nodes."""
    if not nodes:
        return text
    things = objects(text)
    for thing in things:
        if thing["kind"] == "Job":
            affinity = thing["spec"]["template"]["spec"].setdefault("affinity", {})
            required = affinity.setdefault("nodeAffinity", {}).setdefault(
                "requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": [{}]}
            )
            for term in required["nodeSelectorTerms"]:
                # The API takes one name for each of these, and all of them must hold.
                term.setdefault("matchFields", []).extend(
                    {"key": "metadata.name", "operator": "NotIn", "values": [name]}
                    for name in nodes
                )
    return yaml.safe_dump_all(things, sort_keys=False, allow_unicode=True)


def lighthouse(c: Config, image: str, text: str) -> str:
    """What the sites of a run find each other by, as YAML. text: that of the run itself."""
    settings = next(thing for thing in objects(text) if thing["kind"] == "ConfigMap")
    values = {
        "NAME": c.job_name + LIGHTHOUSE,
        "JOB_NAME": c.job_name,
        "RUN_NAME": c.run_name,
        "IMAGE": image,
        "ENVIRONMENT": settings["metadata"]["name"],
        "VOLUME": c.volume,
    }
    return build("lighthouse", values, patch("Job", pod_patches(c)), {}, c)


def digest(things: list[dict[str, Any]]) -> str:
    """A hash of what is sent, alike for all who send the same: whichever version of kubectl writes the YAML, and
    whether the namespace is a setting of theirs or of their kubectl's context."""
    things = [
        thing
        | {
            "metadata": {
                name: value for name, value in thing["metadata"].items() if name != "namespace"
            }
        }
        for thing in things
    ]
    things.sort(key=lambda thing: (thing["kind"], thing["metadata"]["name"]))
    return hashlib.sha256(json.dumps(things, sort_keys=True).encode()).hexdigest()


def claim(c: Config, one_node_disk: bool = False) -> str:
    """The volume's claim, as YAML. one_node_disk: only one node at a time can mount volumes of its class."""
    patches: list[dict[str, Any]] = (
        [{"op": "add", "path": "/spec/storageClassName", "value": c.storage_class}]
        if c.storage_class
        else []
    )
    if one_node_disk and c.nodes == 1:
        mode = ["ReadWriteOnce"]
        patches.append({"op": "replace", "path": "/spec/accessModes", "value": mode})
    values = {"VOLUME": c.volume, "VOLUME_SIZE": f"{c.volume_gb}Gi"}
    return build("claim", values, patch("PersistentVolumeClaim", patches), {}, c)


def reader_pod(c: Config, image: str, name: str) -> dict[str, Any]:
    """A pod that reads the volume when no other is there."""
    secrets = pull_secret(c)
    patches = [{"op": "add", "path": "/spec/imagePullSecrets", "value": secrets}] if secrets else []
    values = {"NAME": name, "JOB_NAME": c.job_name, "IMAGE": image, "VOLUME": c.volume}
    return objects(build("reader", values, patch("Pod", patches), {}, c))[0]


class Loader(yaml.SafeLoader):
    """Reads `=` and `<<` as text, which kustomize leaves without quotes and PyYAML refuses."""


def read_as_text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


Loader.add_constructor("tag:yaml.org,2002:value", read_as_text)
Loader.add_constructor("tag:yaml.org,2002:merge", read_as_text)


def objects(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML text."""
    return [document for document in yaml.load_all(text, Loader) if document]


def values_of(c: Config, image: str, data_job: bool) -> dict[str, str]:
    """What k8s/manifests/fields/ can name, as text; kustomize turns it into a number where the field holds one."""
    cpus, memory = (
        (min(DATA_CPUS, pod_cpus(c)), min(DATA_MEMORY_GB, pod_memory_gb(c)))
        if data_job
        else (pod_cpus(c), pod_memory_gb(c))
    )
    nodes = 1 if data_job else c.nodes
    return {
        "NAME": f"{c.job_name}-data" if data_job else c.job_name,
        "JOB_NAME": c.job_name,
        "RUN_NAME": c.run_name,
        "ENVIRONMENT": f"{c.job_name}-env",
        "IMAGE": image,
        "NODES": str(nodes),
        "FAILURES": str(25 * nodes),
        "CPUS": str(cpus),
        "MEMORY": f"{memory}Gi",
        "DISK": f"{pod_disk_gb(c)}Gi",
        "SHM": f"{1 if data_job else shm_gb(c)}Gi",
        "GRACE_PERIOD_S": str(c.grace_period_s),
        "VOLUME": c.volume,
        "SITE": c.site,
    }


def patches_of(c: Config, gpu: str, by_product: bool) -> list[dict[str, Any]]:
    """Lists, what is there only where a setting asks for it, and GPUs, whose name (gpu) is the field's name."""
    pod, found = "/spec/template/spec", list[dict[str, Any]]()
    if gpu and by_product:
        found.append(
            {
                "op": "replace",
                "value": c.gpu_products.split(","),
                "path": f"{pod}/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution"
                "/nodeSelectorTerms/0/matchExpressions/0/values",
            }
        )
    elif gpu:
        found.append({"op": "remove", "path": f"{pod}/affinity/nodeAffinity"})
    if gpu:
        found += [
            {
                "op": "add",
                "value": str(c.gpus_per_node),  # "/" is ~1 in a path of JSON Patch
                "path": f"{pod}/containers/0/resources/{part}/{gpu.replace('/', '~1')}",
            }
            for part in ("requests", "limits")
        ]
    return patch("Job", found + pod_patches(c))


def pod_patches(c: Config) -> list[dict[str, Any]]:
    """What is in the pods of a Job only where a setting asks for it."""
    pod, found = "/spec/template/spec", list[dict[str, Any]]()
    if tolerated := [toleration(text) for text in c.tolerations.split(",") if text]:
        found.append({"op": "add", "path": f"{pod}/tolerations", "value": tolerated})
    if c.priority_class:
        found.append({"op": "add", "path": f"{pod}/priorityClassName", "value": c.priority_class})
    if secrets := pull_secret(c):
        found.append({"op": "add", "path": f"{pod}/imagePullSecrets", "value": secrets})
    return found


def toleration(text: str) -> dict[str, str]:
    """KEY or KEY=VALUE, whatever the effect of the taint."""
    key, _, value = text.partition("=")
    return (
        {"key": key, "operator": "Equal", "value": value}
        if value
        else {"key": key, "operator": "Exists"}
    )


def pull_secret(c: Config) -> list[dict[str, str]]:
    return [{"name": c.image_pull_secret}] if c.image_pull_secret else []


def patch(kind: str, operations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The patches of a kustomization, for all objects of a kind."""
    return [{"target": {"kind": kind}, "patch": json.dumps(operations)}] if operations else []


def build(
    folder: str,
    values: Mapping[str, str],
    patches: list[dict[str, Any]],
    environment: Mapping[str, str],
    c: Config,
) -> str:
    """What kustomize makes of a folder of k8s/manifests/ with these values."""
    fields = FIELDS[folder]
    top: dict[str, Any] = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    known = (MANIFESTS / "overlays" / folder).is_dir()
    overlay = f"k8s/manifests/overlays/{folder}" if known else f"k8s/manifests/{folder}"
    top["resources"], components = [overlay, "values.yaml"], list[str]()
    if "pods" in fields and values["SITE"]:
        fields = (*fields, "site")
        if folder != "pinned-site":
            components.append("k8s/manifests/site")
    if "peers" in fields and c.sync == "diloco" and folder != "diloco":
        components.append("k8s/manifests/diloco")
    if "pods" in fields and c.model and folder != "data":
        components.append("k8s/manifests/finetune")
    if components:
        top["components"] = components
    if environment:
        top["configMapGenerator"] = [
            {
                "name": values["ENVIRONMENT"],
                "envs": [SETTINGS_FILE],  # as `literals`, values would lose quotes around them
                "options": {
                    "labels": {
                        f"{LABELS}/name": "pure-transformer",
                        f"{LABELS}/instance": c.job_name,
                    }
                },
            }
        ]
    if c.namespace:
        top["namespace"] = c.namespace
    top["patches"] = patches
    top["replacements"] = [{"path": f"k8s/manifests/fields/{name}.yaml"} for name in fields]
    with tempfile.TemporaryDirectory(prefix="kustomize-") as scratch:
        work = Path(scratch)
        shutil.copytree(MANIFESTS, work / "k8s" / "manifests")
        (work / "values.yaml").write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "data": dict(values),
                    "metadata": {
                        "name": "values",
                        "annotations": {"config.kubernetes.io/local-config": "true"},
                    },
                }
            )
        )
        (work / SETTINGS_FILE).write_text(
            "".join(f"{name}={value}\n" for name, value in environment.items()), "utf-8"
        )
        (work / "kustomization.yaml").write_text(json.dumps(top))
        text = kustomize(work)
    refuse_changed(environment, text)
    return text


def refuse_changed(environment: Mapping[str, str], text: str) -> None:
    """Raise Refused where a setting is not in the output as it was given: kustomize drops all that follows a line of
    64 KiB, and writes U+0085 such that it is read as a blank."""
    made = dict[str, str]()
    for thing in objects(text) if environment else []:
        if thing["kind"] == "ConfigMap":
            made = thing["data"]
    changed = [name for name, value in environment.items() if made.get(name) != value]
    if changed:
        raise Refused(
            BAD_SETTING,
            f"{', '.join(changed)}: kubectl kustomize would not pass it on as it is. Values must be shorter than "
            "64 KiB and have no control characters.",
        )


def kustomize(folder: Path) -> str:
    """The output of kubectl kustomize, which without a kubeconfig asks no server for its version. Raises Refused."""
    done = kubectl("kustomize", str(folder), "--kubeconfig=/dev/null")
    if done.code:
        raise Refused(
            BAD_ENVIRONMENT,
            f"kubectl kustomize: {done.complaint}; an old kubectl cannot do it: `make "
            "setup-dev` puts one that can beside python, and another on PATH goes before it",
        )
    return done.out
