"""The Job that is there already: whether it is what would be sent now, and if not, in what it differs.

A Job's pods cannot be changed once it is there, so a changed setting needs a new one: make restart.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from k8s.cluster.kubectl import BAD_SETTING, Refused, kubectl, refusal, short

RENDERED, RUN = "pure-transformer/rendered", "pure-transformer/run-name"
NAME_LABEL, OURS = "app.kubernetes.io/name", "pure-transformer"
INSTANCE_LABEL, COMPONENT_LABEL = "app.kubernetes.io/instance", "app.kubernetes.io/component"
MANY = 8  # differences that are listed


@dataclasses.dataclass(frozen=True)
class Standing:
    """state: none, same, differs, leaving, complete or failed; sentence: what is to be said of it."""

    state: str
    sentence: str = ""
    run: str = ""  # which it trains


def get(kind: str, name: str, namespace: str) -> dict[str, Any] | None:
    """An object of the namespace, or None where there is none."""
    done = kubectl("get", kind, name, "-n", namespace, "-o", "json")
    if done.code == 0:
        found: dict[str, Any] = json.loads(done.out)
        return found
    if "(NotFound)" in done.err:
        return None
    raise refusal(done, ("get", kind))


def of_kind(kind: str, objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The one object of a kind that was rendered, but for the lighthouse's; {} where there is none."""
    return next((thing for thing in objects if thing["kind"] == kind and not is_beside(thing)), {})


def is_beside(thing: Mapping[str, Any]) -> bool:
    """Whether an object is of the lighthouse, which stands beside a Job of several sites and goes with it."""
    return (thing["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == "lighthouse"


def config_map_of(job: Mapping[str, Any]) -> str:
    """The name of the ConfigMap that a Job's container has its settings from."""
    sources = trainer_of(job).get("envFrom") or []
    return next(
        (source["configMapRef"]["name"] for source in sources if "configMapRef" in source), ""
    )


def trainer_of(job: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]["containers"][0]
    return found


def standing(wanted: list[dict[str, Any]], namespace: str, again: str) -> Standing:
    """How the Job of the rendered objects stands in the cluster. again: the command that replaces it."""
    ours = of_kind("Job", wanted)
    name = ours["metadata"]["name"]
    theirs = get("job", name, namespace)
    if theirs is None:
        return Standing("none")
    if settled := without_comparing(theirs, namespace, again):
        return settled
    run = run_of(theirs)
    if rendered(theirs) == rendered(ours) and rendered(ours):
        return Standing(
            "same",
            f"Job {name} is in namespace {namespace} already, with these settings and this image; "
            "nothing was applied",
            run,
        )
    changes = list(differences(ours, theirs, wanted, namespace))
    more = f"; and {len(changes) - MANY} more" if len(changes) > MANY else ""
    listed = (
        "; ".join(changes[:MANY]) + more
        if changes
        else "in what earlier manifests had beside these"
    )
    return Standing(
        "differs",
        f"Job {name} is in namespace {namespace} already and differs ({listed}), and a Job "
        f"cannot be changed: {again} saves, stops and replaces it; volume and checkpoints stay",
        run,
    )


def without_comparing(theirs: Mapping[str, Any], namespace: str, again: str) -> Standing | None:
    """How a Job stands that leaves or has ended; None for one that is at work. Raises Refused where it is not ours."""
    name, run = theirs["metadata"]["name"], run_of(theirs)
    if (theirs["metadata"].get("labels") or {}).get(NAME_LABEL) != OURS:
        raise Refused(
            BAD_SETTING,
            f"JOB_NAME={name}: namespace {namespace} has a Job of that name that is none of "
            "ours; choose another JOB_NAME",
        )
    if theirs["metadata"].get("deletionTimestamp"):
        return Standing("leaving", f"Job {name} is on its way out: its pods save and end", run)
    for condition in (theirs.get("status") or {}).get("conditions") or []:
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return dataclasses.replace(over(name, condition, again), run=run)
    return None


def run_of(job: Mapping[str, Any]) -> str:
    """Which run a Job trains."""
    return str((job["metadata"].get("annotations") or {}).get(RUN, ""))


def of_another_run(stands: Standing, job: str, namespace: str, run: str) -> str:
    """What is to be said where the Job that is there is another run's, which nothing may replace; one that leaves has
    been stopped by somebody already."""
    if stands.state == "leaving" or stands.run in ("", run):
        return ""
    trains = "trained" if stands.state in ("complete", "failed") else "trains"
    return (
        f"JOB_NAME={job}: the Job of that name in namespace {namespace} {trains} run {stands.run}, and this is run "
        f"{run}: choose another JOB_NAME, or stop it first with make stop RUN_NAME={stands.run} JOB_NAME={job} "
        "WHERE=cluster"
    )


def over(name: str, condition: Mapping[str, Any], again: str) -> Standing:
    """A Job that has ended and is still there."""
    at = condition.get("lastTransitionTime", "")
    if condition["type"] == "Complete":
        return Standing(
            "complete",
            f"Job {name} is done{f' since {at}' if at else ''} and still there: make fetch-run "
            f"brings its results; {again} takes its place, for which TRAIN_TOKENS or MAX_STEPS must be "
            "larger; another run wants another JOB_NAME, or make stop first",
        )
    why = short(
        ": ".join(filter(None, (condition.get("reason", ""), condition.get("message", ""))))
    )
    return Standing(
        "failed",
        f"Job {name} has failed{f' at {at}' if at else ''} ({why or 'no reason given'}) and is "
        f"still there: make logs ONLY=errors says more; once that is mended, {again} goes on from the "
        "last checkpoint",
    )


def rendered(job: Mapping[str, Any]) -> str:
    """The hash of the text that a Job was applied from."""
    found: str = (job["metadata"].get("annotations") or {}).get(RENDERED, "")
    return found


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], wanted: list[dict[str, Any]], namespace: str
) -> Iterator[str]:
    """In words: image, settings, and whatever else of the Job differs."""
    before, now = (trainer_of(job).get("image", "") for job in (theirs, ours))
    if before != now:
        yield f"image {before} there, {now} now"
    if (name := config_map_of(theirs)) != config_map_of(ours):
        try:
            there = get("configmap", name, namespace) if name else None
        except Refused as refused:
            if refused.kind != "rights":
                raise
            yield "its settings, which you may not see"
        else:
            yield from told_settings(there, name, wanted)
    for path, before, now in changed(ours["spec"], theirs["spec"], "spec"):
        if not path.endswith((".image", ".configMapRef.name")):
            yield f"{path} {before} there, {now} now"


def told_settings(
    there: Mapping[str, Any] | None, name: str, wanted: list[dict[str, Any]]
) -> Iterator[str]:
    """In words: how the settings of the ConfigMap that is there differ."""
    if there is None:
        yield f"its settings cannot be told, as ConfigMap {name or '(none)'} is gone"
    else:
        yield from changed_settings(
            there.get("data") or {}, of_kind("ConfigMap", wanted).get("data") or {}
        )


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{name}={before.get(name, '(default)')} there, {now.get(name, '(default)')} now"


def changed(ours: Any, theirs: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """(path, there, now) of what ours says and theirs says differently; what the cluster has filled in is left out."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from changed(value, theirs.get(key), f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (value, there) in enumerate(zip(ours, theirs, strict=True)):
            label = value.get("name", number) if isinstance(value, dict) else number
            yield from changed(value, there, f"{path}[{label}]")
    elif str(ours) != str(theirs) and not (theirs is None and ours in ({}, [], "", False)):
        yield path, short(json.dumps(theirs), 60), short(json.dumps(ours), 60)
