"""make describe: what a job is made of. What `kubectl describe job` is used for, without what nobody looks at."""

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from k8s.cluster import words
from k8s.cluster.target import (
    DATA,
    RUN,
    Target,
    Thing,
    annotation,
    is_of_sites,
    name_of,
    newest,
    no_job,
)
from k8s.cluster.where import Place
from record.durable import make_printable
from record.exit_codes import BAD_DATA, DONE
from record.metrics import duration, is_number
from record.run_paths import RunPaths
from settings import SettingsError, load_preset
from settings.config import SETTINGS, Config
from settings.declare import format_value
from settings.resolve import show_path
from settings.resume import RunConfigError, read_run_config

# The first two have places of their own, and the others are the same in all pods.
TOLD_ELSEWHERE = {"PRESET", "RUN_NAME", "RUNS_DIR", "DATA_DIR", "ENV_FILE"}
RESOURCES = {"cpu": "CPU", "memory": "memory", "ephemeral-storage": "disk"}


def of_cluster(place: Place, target: Target) -> int:
    """Print it. Raises Refused where there is no Job."""
    part = ""
    job = target.job()
    if job is None:  # that of make data then
        part = DATA
        job = target.job(DATA)
    if job is None:
        raise no_job(target)
    pods = target.pods(part)
    made = words.age(job["metadata"].get("creationTimestamp"))
    lines = [f"Job {name_of(job)} in {target.words}, made {made} ago: {words.state(job, pods)}"]
    lines += describe_shape(job, place)
    lines.append(describe_settings(target, job))
    lines.append(describe_volume(place, target))
    for pod in newest(pods):
        lines += describe_pod(pod)
    events = words.event_lines(target.events(), most=20)
    if events:
        lines.append("events, newest last:")
        lines += [f"  {line}" for line in events]
    else:
        lines.append("no events are left")
    sys.stdout.write("\n".join(lines) + "\n")
    return DONE


def describe_shape(job: Thing, place: Place) -> Iterator[str]:
    """Yield what the Job asks for."""
    spec = job["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    yield f"run: {annotation(job, RUN) or place.paths.name}"
    if is_of_sites(job):
        yield "sites: each pod is one, and goes on when others are away (SYNC=diloco)"
    pods = int(spec.get("completions") or 1)
    count = "1 pod" if pods == 1 else f"{pods} pods"
    resources = describe_resources(find(container, "resources"))
    grace_s = pod.get("terminationGracePeriodSeconds")
    yield f"shape: {count}, {resources}; {grace_s} s to save when told to stop"
    yield f"nodes: {describe_nodes(pod)}"
    yield f"image: {container.get('image')}"
    failed = find(job, "status").get("failed", 0)
    yield f"pods that failed: {failed} of {spec.get('backoffLimit')} that may"


def find(thing: Thing, *keys: str) -> Thing:
    """Return the object under these keys; {} if there is none."""
    for key in keys:
        thing = thing.get(key) or {}
    return thing


def describe_resources(resources: Thing) -> str:
    """Say what a pod gets: GPUs, and then CPUs, memory and disk."""
    gpus, resource = gpus_of(resources)
    text = "no GPU"
    if gpus != "0":
        text = f"{gpus} GPUs each"
    if resource not in ("", "nvidia.com/gpu"):
        text += f", as {resource}"
    limits = find(resources, "limits")
    parts = []
    for key, name in RESOURCES.items():
        if key in limits:
            parts.append(f"{limits[key]} {name}")
    return f"{text}; {', '.join(parts)}"


def describe_nodes(pod: Thing) -> str:
    """Say which nodes may run the pods."""
    required = find(
        pod, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"
    )
    products: list[str] = []
    for term in required.get("nodeSelectorTerms") or []:
        for rule in term.get("matchExpressions") or []:
            if rule.get("key") == "nvidia.com/gpu.product":
                products += rule.get("values") or []
    text = "any"
    if products:
        text = f"with {' or '.join(products)}"
    zone = find(pod, "nodeSelector").get("topology.kubernetes.io/zone")
    if zone:
        text += f", at {zone} only"
    return text


def describe_pod(pod: Thing) -> Iterator[str]:
    """Yield what a pod is doing, and the conditions that keep it from it."""
    node = pod["spec"].get("nodeName") or "no node yet"
    line = f"pod {name_of(pod)}: {words.phase(pod)} on {node}"
    trouble = words.trouble(pod)
    if trouble:
        line += f"; {trouble}"
    yield line
    for condition in find(pod, "status").get("conditions") or []:
        kind = condition["type"]
        state = condition["status"]
        reason = condition.get("reason", "")
        expected = "False" if kind == "DisruptionTarget" else "True"
        if state == expected or reason == "PodCompleted":
            continue
        line = f"  {kind}={state} {reason}"
        message = words.one_line(str(condition.get("message", "")), 200)
        if message:
            line += f": {message}"
        yield line.rstrip()


def gpus_of(resources: Thing) -> tuple[str, str]:
    """Return how many GPUs a container asks for, and by which name; ("0", "") if none.

    Some clusters have names of their own for some products, such as nvidia.com/a100.
    """
    asked = find(resources, "limits") | find(resources, "requests")
    names = [key for key in asked if "/" in key and not key.startswith(("rdma/", "hugepages"))]
    if not names:
        return "0", ""
    name = min(names, key=lambda name: not name.startswith("nvidia.com/"))
    return str(asked[name]), name


def describe_settings(target: Target, job: Thing) -> str:
    """Say which settings the pods get."""
    container = job["spec"]["template"]["spec"]["containers"][0]
    for source in container.get("envFrom") or []:
        if "configMapRef" in source:
            found = target.get("configmap", source["configMapRef"]["name"])
            if found:
                return settings_line(find(found, "data"))
    return "settings: their ConfigMap is gone; make restart creates it again"


def settings_line(values: Mapping[str, Any]) -> str:
    """Name the preset, and what differs from it. Values may be text, or typed."""
    preset = str(values.get("PRESET", "tiny"))
    try:
        usual = load_preset(PRESET=preset).values()
    except SettingsError:  # a preset of another version
        usual = Config().derived().values()
    own = []
    for name, value in sorted(values.items()):
        if name in TOLD_ELSEWHERE or value in (None, ""):
            continue
        text = value if isinstance(value, str) else format_value(value)
        try:
            is_usual = SETTINGS[name].parse(text) == usual[name]
        except (ValueError, KeyError):  # of another version, or of the launcher
            is_usual = False
        if not is_usual:
            own.append(f"{name}={text}")
    if not own:
        return f"settings: PRESET={preset}, nothing else"
    return f"settings: PRESET={preset} and {' '.join(own)}"


def describe_volume(place: Place, target: Target) -> str:
    name = place.value("volume")
    claim = target.get("pvc", name)
    if claim is None:
        return f"volume: VOLUME={name} is not there; make train-8xa100 makes it"
    status = find(claim, "status")
    spec = claim["spec"]
    size = find(status, "capacity").get("storage") or spec["resources"]["requests"]["storage"]
    modes = "/".join(spec.get("accessModes") or [])
    storage_class = spec.get("storageClassName") or "of the cluster"
    phase = status.get("phase", "Pending")
    return f"volume: {name}, {size}, {phase}, {modes}, storage class {storage_class}"


# ---------------------------------------------------------------------------------------------------
# A run on this machine
# ---------------------------------------------------------------------------------------------------


def of_here(paths: RunPaths) -> tuple[int, str]:
    """Return an exit code, and what config.json tells of a run and its attempts."""
    try:
        stored = read_run_config(paths.config)
    except RunConfigError as error:
        return error.exit_code, str(error)
    if not stored:
        return BAD_DATA, (
            f"{paths.config}: is missing, so nothing is known of the run's settings and attempts. "
            "If the run has trained, restore the file from a copy."
        )
    attempts = stored.get("attempts", [])
    count = "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts"
    lines = [
        f"run {paths.name} in {show_path(paths.folder)}: {count}",
        settings_line(stored["settings"]),
    ]
    for number, facts in enumerate(attempts, start=1):
        lines.append(f"attempt {number}: {describe_attempt(facts)}")
    return DONE, "\n".join(lines)


def describe_attempt(facts: dict[str, Any]) -> str:
    """Say where and with what an attempt ran."""
    age_s = 0.0
    if is_number(facts.get("time")):
        age_s = max(0.0, time.time() - facts["time"])
    processes = facts.get("world_size", 1)
    count = "1 process" if processes == 1 else f"{processes} processes"
    text = f"started {duration(age_s)} ago on {facts.get('host')}, "
    text += f"{count} on {facts.get('device')}, torch {facts.get('torch')}"
    commit = str(facts.get("git") or "")[:12]
    if commit:
        text += f", commit {commit}"
    if commit and facts.get("git_dirty"):
        text += " with changes"
    return make_printable(text)
