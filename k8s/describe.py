"""make describe: what a job is made of. What `kubectl describe job` is used for, without what nobody looks at."""

import sys
import time
from collections.abc import Mapping
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
from record.run_paths import RunPaths, list_checkpoints
from settings import ROOT
from settings.config import SETTINGS, Config
from settings.declare import format_value
from settings.resolve import show_path
from settings.resume import RunConfigError, read_run_config
from settings.sources import read_file

ITS_OWN = {"PRESET", "RUN_NAME", "RUNS_DIR", "DATA_DIR"}  # said elsewhere, or the same in all pods
CONDITIONS = (
    "PodScheduled",
    "PodReadyToStartContainers",
    "Initialized",
    "ContainersReady",
    "Ready",
    "DisruptionTarget",
)


def of_cluster(place: Place, target: Target) -> int:
    """Print it. Raises Refused where there is no Job."""
    part, job = "", target.job()
    if job is None:  # that of make data then
        part, job = DATA, target.job(DATA)
    if job is None:
        raise no_job(target)
    pods = target.pods(part)
    made = words.age(job["metadata"].get("creationTimestamp"))
    lines = [
        f"Job {name_of(job)} in {target.words}, made {made} ago: {words.state(job, pods)}",
        *shape(job, place),
        *settings(target, job),
        *volume(place, target),
    ]
    for pod in newest(pods):
        lines.append(
            f"pod {name_of(pod)}: {words.phase(pod)} on {pod['spec'].get('nodeName') or 'no node yet'}"
            + (f"; {wrong}" if (wrong := words.trouble(pod)) else "")
        )
        lines += [f"  {line}" for line in conditions(pod)]
    events = words.event_lines(target.events(), most=20)
    lines += (
        ["events, newest last:", *(f"  {line}" for line in events)]
        if events
        else ["no events are left"]
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def shape(job: Thing, place: Place) -> list[str]:
    """What the Job asks for."""
    spec = job["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    limits = (container.get("resources") or {}).get("limits") or {}
    gpus, resource = gpus_of(container.get("resources") or {})
    asked = ", ".join(
        f"{limits[key]} {name}"
        for key, name in (("cpu", "CPU"), ("memory", "memory"), ("ephemeral-storage", "disk"))
        if key in limits
    )
    terms = (
        ((pod.get("affinity") or {}).get("nodeAffinity") or {}).get(
            "requiredDuringSchedulingIgnoredDuringExecution"
        )
        or {}
    ).get("nodeSelectorTerms") or []
    products = [
        value
        for term in terms
        for rule in term.get("matchExpressions") or []
        if rule.get("key") == "nvidia.com/gpu.product"
        for value in rule.get("values") or []
    ]
    pinned = (pod.get("nodeSelector") or {}).get("topology.kubernetes.io/zone")
    pods = int(spec.get("completions") or 1)
    kind = (
        "no GPU"
        if gpus == "0"
        else f"{gpus} GPUs each" + (f", as {resource}" if resource != "nvidia.com/gpu" else "")
    )
    sites = (
        ["sites: each pod is one, and goes on when others are away (SYNC=diloco)"]
        if is_of_sites(job)
        else []
    )
    return [
        f"run: {annotation(job, RUN) or place.paths.name}",
        *sites,
        f"shape: {pods} {'pod' if pods == 1 else 'pods'}, {kind}; {asked}; "
        f"{pod.get('terminationGracePeriodSeconds')} s to save when told to stop",
        f"nodes: {'with ' + ' or '.join(products) if products else 'any'}"
        + (f", at {pinned} only" if pinned else ""),
        f"image: {container.get('image')}",
        f"pods that failed: {(job.get('status') or {}).get('failed', 0)} of {spec.get('backoffLimit')} that may",
    ]


def gpus_of(resources: Thing) -> tuple[str, str]:
    """How many GPUs a container asks for, and by which name: clusters have names of their own for some products, as
    nvidia.com/a100. ("0", "") where it asks for none."""
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    named = sorted(
        (key for key in asked if "/" in key and not key.startswith(("rdma/", "hugepages"))),
        key=lambda key: not key.startswith("nvidia.com/"),
    )
    return next(((str(asked[key]), key) for key in named), ("0", ""))


def settings(target: Target, job: Thing) -> list[str]:
    """The settings that pods get and that are not the preset's."""
    sources = job["spec"]["template"]["spec"]["containers"][0].get("envFrom") or []
    names = [source["configMapRef"]["name"] for source in sources if "configMapRef" in source]
    found = target.get("configmap", names[0]) if names else None
    if found is None:
        return ["settings: their ConfigMap is gone; make restart makes it anew"] if names else []
    data: dict[str, str] = found.get("data") or {}
    return [settings_line(data)]


def settings_line(values: Mapping[str, Any]) -> str:
    """The preset and what differs from it, of settings as text or typed."""
    preset, fields = str(values.get("PRESET", "tiny")), SETTINGS
    said = read_file(ROOT / "presets" / f"{preset}.env", preset, ()).values

    def typed(name: str, value: Any) -> Any:
        try:
            return fields[name].parse(value) if isinstance(value, str) else value
        except ValueError:  # of another version
            return value

    of_preset = Config(
        **{name.lower(): typed(name, text) for name, text in said.items() if name in fields}
    )
    own = []
    for name, value in sorted(values.items()):
        if name in ITS_OWN or value in (None, ""):
            continue
        if name not in fields:
            own.append(f"{name}={value}")  # of the network, or the launcher
        elif typed(name, value) not in (
            getattr(of_preset, name.lower()),
            getattr(of_preset.derived(), name.lower()),
        ):
            own.append(f"{name}={format_value(value)}")
    return f"settings: PRESET={preset}" + (" and " + " ".join(own) if own else ", nothing else")


def volume(place: Place, target: Target) -> list[str]:
    name = place.value("volume")
    claim = target.get("pvc", name)
    if claim is None:
        return [f"volume: VOLUME={name} is not there; make train-8xa100 makes it"]
    status, spec = claim.get("status") or {}, claim["spec"]
    size = (status.get("capacity") or {}).get("storage") or spec["resources"]["requests"]["storage"]
    return [
        f"volume: {name}, {size}, {status.get('phase', 'Pending')}, {'/'.join(spec.get('accessModes') or [])}, "
        f"storage class {spec.get('storageClassName') or 'of the cluster'}"
    ]


def conditions(pod: Thing) -> list[str]:
    """The conditions of a pod that do not hold, or that say why it is taken away."""
    found = []
    for kind in CONDITIONS:
        one = words.condition(pod, kind)
        if one.get("reason") == "PodCompleted":
            continue
        if one and (one.get("status") != "True") != (kind == "DisruptionTarget"):
            said = words.one_line(str(one.get("message", "")), 200)
            found.append(
                f"{kind}={one['status']} {one.get('reason', '')}{': ' + said if said else ''}".rstrip()
            )
    return found


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
        text = (
            f"{paths.config}: is missing, so nothing is known of the run's settings and attempts."
        )
        if list_checkpoints(paths.checkpoints):
            text += " Restore it from a copy."
        return BAD_DATA, f"{text} make status shows how far the run is."
    attempts = stored.get("attempts", [])
    count = "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts"
    lines = [
        f"run {paths.name} in {show_path(paths.folder)}: {count}",
        settings_line(
            {key: value for key, value in stored["settings"].items() if key != "ENV_FILE"}
        ),
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
