"""Whose job a command is about: one on this machine, or one that was sent to a cluster.

WHERE=local and WHERE=cluster say it. WHERE=auto asks the run's folder: cluster.json is there where the run was sent to
a cluster from here, other files where it was trained here. Nothing here talks to a cluster; `Place.target` reads the
kubeconfig.

A command that only looks must not be refused for what matters to training alone (NODES that do not divide a batch),
so settings are checked here one by one, and not against each other.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k8s.cluster.job_spec import DEFAULTS
from k8s.cluster.kubectl import Context, context, kubectl
from record import locks
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.checks import CHECKS
from settings.config import Config
from settings.json_file import read_small
from settings.resolve import resolve

SENT = "cluster.json"  # in a run's folder here: where the run was sent


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run is, and the settings that say which."""

    cluster: bool
    config: Config
    paths: RunPaths
    given: frozenset[str]  # settings that the user gave, in whatever way
    sent: dict[str, Any]  # what cluster.json says

    def value(self, name: str) -> str:
        """A setting that the user gave, else what cluster.json says, else the default."""
        own = getattr(self.config, name)
        return str(own if name.upper() in self.given else self.sent.get(name) or own)

    def target(self) -> tuple[str, str, list[str]]:
        """(context, namespace, what to say about them). The user's word counts first, then cluster.json's.

        Raises Refused where the kubeconfig names no cluster.
        """
        return choose(self, context())


def choose(place: Place, here: Context) -> tuple[str, str, list[str]]:
    """Which context and namespace, with a sentence where it is not that which kubectl would take."""
    said, name = [], here.name
    sent_context, sent_namespace = (
        str(place.sent.get(key) or "") for key in ("context", "namespace")
    )
    run = place.paths.name
    if sent_context and sent_context != here.name:
        known = kubectl("config", "get-contexts", "-o", "name").out.split()
        if sent_context in known:
            name = sent_context
            said.append(
                f"run {run} was sent to context {sent_context}, and kubectl uses {here.name}: this is about "
                f"{sent_context}; to use it for all: kubectl config use-context {sent_context}"
            )
        else:
            said.append(
                f"run {run} was sent to context {sent_context}, which your kubeconfig does not have: this is "
                f"about {here.name}; for the other set KUBECONFIG to the file that has it"
            )
    theirs = here.namespace if name == here.name else ""
    if "NAMESPACE" in place.given:
        namespace = place.config.namespace
        if sent_namespace and namespace != sent_namespace:
            said.append(
                f"run {run} was sent to namespace {sent_namespace}, and NAMESPACE={namespace}: this is about "
                f"{namespace}; for the other leave NAMESPACE out, or set NAMESPACE={sent_namespace}"
            )
    else:
        namespace = sent_namespace or theirs or "default"
        if sent_namespace and theirs and theirs != sent_namespace:
            said.append(
                f"run {run} was sent to namespace {sent_namespace}, and kubectl uses {theirs}: this is about "
                f"{sent_namespace}; to say so for all: NAMESPACE={sent_namespace} in .env"
            )
    return name, namespace, said


def decide(
    environ: Mapping[str, str] | None = None,
    root: Path = ROOT,
    chosen: Mapping[str, str] | None = None,
) -> Place:
    """The place that a command is about. Raises SettingsError where a setting is bad by itself.

    chosen: the default of RUN_NAME (record/default_run.py).
    """
    here = look(environ, root, chosen or {})
    where = here.config.where
    if where == "local" or (where == "auto" and not here.sent and is_run(here.paths)):
        return here
    there = here if here.sent else look(environ, root, DEFAULTS)
    if there.sent or where == "cluster":
        whole = RunPaths.of(there.config.runs_dir, there.config.run_name, root)
        return dataclasses.replace(there, cluster=True, paths=whole)
    return here


def refuse_dry_run(config: Config, target: str) -> None:
    """Raise SettingsError for DRY_RUN=1 on this machine, where the target would do the thing."""
    if config.dry_run:
        raise SettingsError(
            [f"DRY_RUN=1: make {target} has a dry run on the cluster only. Leave it out."]
        )


def look(environ: Mapping[str, str] | None, root: Path, defaults: Mapping[str, str]) -> Place:
    """The run that the settings name, with these defaults, and whether it was sent to a cluster."""
    resolved = resolve(environ, root, defaults, without=CHECKS).check()
    config = resolved.config
    whole = RunPaths.of(config.runs_dir, config.run_name, root)
    paths = whole
    if config.node_rank < config.nodes:  # else it is of a run whose NODES are not known here
        paths = RunPaths.of_node(config, root)
    given = frozenset(name for name, origin in resolved.origins.items() if origin != "default")
    return Place(False, config, paths, given, read_sent(whole))


def read_sent(paths: RunPaths) -> dict[str, Any]:
    """What cluster.json says; {} if there is none that can be read."""
    try:
        sent = json.loads(read_small(paths.folder / SENT))
    except (OSError, ValueError):
        return {}
    return sent if isinstance(sent, dict) else {}


def is_run(paths: RunPaths) -> bool:
    """Whether a run of this machine is in the folder, or a job of it at work."""
    # os.path.exists: a folder that cannot be looked into has none of them, where Path.exists raises
    return any(map(os.path.exists, (paths.status, paths.config, paths.metrics))) or locks.has_job(
        paths
    )
