"""What changes the cluster: server-side apply, and deleting what was applied. The volume is only ever made.

The lighthouse of several sites is owned by their Job: the cluster takes it away when that goes, whoever deletes it, and
not before its pods have saved.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from k8s.cluster.job_spec import LIGHTHOUSE
from k8s.cluster.kubectl import (
    BAD_ENVIRONMENT,
    BAD_SETTING,
    UNAVAILABLE,
    Done,
    Refused,
    kubectl,
    refusal,
    short,
    start,
    succeed,
)
from k8s.cluster.render import objects
from k8s.cluster.secret import MANAGER
from k8s.cluster.standing import (
    INSTANCE_LABEL,
    NAME_LABEL,
    OURS,
    config_map_of,
    get,
    is_beside,
    of_kind,
    rendered,
)
from settings.config import Config


def labels(c: Config) -> dict[str, str]:
    """What every object of a job carries."""
    return {NAME_LABEL: OURS, INSTANCE_LABEL: c.job_name}


def selector(c: Config) -> str:
    return ",".join(f"{name}={value}" for name, value in labels(c).items())


def server_side(text: str, namespace: str) -> Done:
    return kubectl(
        "apply",
        "--server-side",
        f"--field-manager={MANAGER}",
        "-n",
        namespace,
        "-f",
        "-",
        stdin=text,
    )


def apply(text: str, namespace: str, again: str) -> str:
    """Apply YAML; returns what was applied, in words. Refused says what the cluster would not have, and what to do."""
    own = [thing for thing in objects(text) if not is_beside(thing)]
    names = applied(own, namespace, again)
    return f"applied: {', '.join(names + apply_beside(text, namespace, again))}"


def apply_beside(text: str, namespace: str, again: str) -> list[str]:
    """Apply what of this YAML stands beside the Job, which is there, and is to go with it. Returns the names."""
    things = [thing for thing in objects(text) if is_beside(thing)]
    job = (
        get("job", of_kind("Job", objects(text))["metadata"]["name"], namespace) if things else None
    )
    if job is None:  # somebody has deleted it just now
        return []
    for thing in things:  # blockOwnerDeletion: false, since the sites need it until they have left
        thing["metadata"]["ownerReferences"] = [
            {
                "apiVersion": job["apiVersion"],
                "kind": job["kind"],
                "name": job["metadata"]["name"],
                "uid": job["metadata"]["uid"],
                "blockOwnerDeletion": False,
            }
        ]
    return applied(things, namespace, again) if things else []


def missing_beside(text: str, namespace: str) -> list[dict[str, Any]]:
    """What of this YAML should stand beside the Job, and is not there."""
    return [
        thing
        for thing in objects(text)
        if is_beside(thing)
        and get(thing["kind"].lower(), thing["metadata"]["name"], namespace) is None
    ]


def applied(things: Sequence[dict[str, Any]], namespace: str, again: str) -> list[str]:
    """Apply objects; returns their names. Raises Refused."""
    done = server_side("".join(f"---\n{json.dumps(thing)}\n" for thing in things), namespace)
    if done.code == 0:
        return re.findall(r"^(\S+) serverside-applied", done.out, re.MULTILINE)
    said = done.complaint
    if re.search(r"field is immutable", said):
        found = re.search(r'"([^"]+)" is invalid', said)
        raise Refused(
            BAD_SETTING,
            f"Job {found[1] if found else ''} is there already and differs, and a Job cannot be "
            f"changed: {again} saves, stops and replaces it; volume and checkpoints stay",
        )
    if re.search(r"Apply failed with \d+ conflict", said):
        raise Refused(
            BAD_ENVIRONMENT,
            f"somebody has changed by hand what was applied here before ({short(said)}); "
            f"delete the object that this names (kubectl delete KIND NAME -n {namespace}), then try again",
        )
    raise refusal(done, ("apply", "manifests"))


def apply_claim(text: str, namespace: str) -> None:
    """Make the volume; one that somebody has made meanwhile stays as it is."""
    done = server_side(text, namespace)
    if done.code and not re.search(
        r"is immutable|can not be less than|Apply failed with", done.complaint
    ):
        raise refusal(done, ("apply", "volume"))


def is_there(text: str, namespace: str) -> bool:
    """Whether the Job of this YAML, and not another of its name, is in the cluster."""
    ours = of_kind("Job", objects(text))
    theirs = get("job", ours["metadata"]["name"], namespace)
    return theirs is not None and rendered(theirs) == rendered(ours)


def delete_lighthouse(job: str, namespace: str, patience_s: float) -> None:
    """Delete that of a Job which has gone, and wait until it has, too: the cluster does so only in its own time."""
    delete_job(job + LIGHTHOUSE, namespace, patience_s)


def delete_job(name: str, namespace: str, patience_s: float) -> None:
    """Delete a Job and wait until its pods are gone too."""
    done = kubectl(
        "delete",
        "job",
        name,
        "-n",
        namespace,
        "--ignore-not-found",
        "--cascade=foreground",
        "--wait=true",
        f"--timeout={patience_s:.0f}s",
        timeout=patience_s + 30,
    )
    if done.code:
        raise not_gone(done, name, namespace, patience_s)


def wait_until_gone(name: str, namespace: str, patience_s: float) -> None:
    """Wait for a Job that somebody has deleted."""
    done = kubectl(
        "wait",
        "--for=delete",
        f"job/{name}",
        "-n",
        namespace,
        f"--timeout={patience_s:.0f}s",
        timeout=patience_s + 30,
    )
    if done.code and "(NotFound)" not in done.err:
        raise not_gone(done, name, namespace, patience_s)


def not_gone(done: Done, name: str, namespace: str, patience_s: float) -> Refused:
    if "timed out" in done.complaint:
        return Refused(
            UNAVAILABLE,
            f"Job {name} is not gone after {patience_s:.0f} s; kubectl get pods -n "
            f"{namespace} -l job-name={name} shows which pods do not end; then try again",
        )
    return refusal(done, ("delete", "job"))


def sweep(c: Config, namespace: str) -> None:
    """Remove the ConfigMaps of earlier launches that no Job uses any more; who may not, leaves them."""
    jobs = kubectl("get", "jobs", "-n", namespace, "-l", selector(c), "-o", "json")
    maps = kubectl("get", "configmaps", "-n", namespace, "-l", selector(c), "-o", "name")
    if jobs.code or maps.code:
        return
    used = {config_map_of(job) for job in json.loads(jobs.out)["items"]}
    if old := [name for name in maps.out.split() if name.removeprefix("configmap/") not in used]:
        kubectl("delete", *old, "-n", namespace, "--ignore-not-found")


def take_back(c: Config, text: str, namespace: str) -> None:
    """Delete what a launch that is given up has applied, but for what another Job uses, of the same name or beside it.

    In a session of its own: Ctrl-C asks all processes of the terminal to end, and this must not.
    """
    things = [(thing["kind"], thing["metadata"]["name"]) for thing in objects(text)]
    job = of_kind("Job", objects(text))["metadata"]["name"]
    try:
        ours = is_there(text, namespace)
    except Refused:  # Ctrl-C again, or no answer: it was ours when it was last seen
        ours = True
    if ours:
        for kind, name in things:
            if kind == "Job":
                quietly("delete", "job", name, namespace)
    left = [
        name
        for name in succeed("get", "jobs", "-n", namespace, "-l", selector(c), "-o", "name").split()
        if not name.endswith(f"/{job}{LIGHTHOUSE}")
    ]  # which is on its way out
    for kind, name in things:
        if kind in ("Service", "NetworkPolicy") and not left:
            quietly("delete", kind.lower(), name, namespace)
    sweep(c, namespace)


def quietly(verb: str, kind: str, name: str, namespace: str) -> None:
    """Run it to its end, whoever presses Ctrl-C."""
    start(
        verb,
        kind,
        name,
        "-n",
        namespace,
        "--ignore-not-found",
        "--wait=false",
        start_new_session=True,
    ).communicate()
