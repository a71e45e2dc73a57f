"""One job in one namespace of one cluster: what the API says of it, asked for by the real kubectl."""

import dataclasses
import json
import re
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

from k8s.cluster import nodes
from k8s.cluster.kubectl import (
    PATIENCE_S,
    Done,
    Refused,
    context,
    kubectl,
    no_namespace,
    refusal,
    start,
)
from k8s.cluster.where import Place

Thing = dict[str, Any]  # an object of Kubernetes

INSTANCE, OF_JOB, INDEX = (
    "app.kubernetes.io/instance",
    "batch.kubernetes.io/job-name",
    "batch.kubernetes.io/job-completion-index",
)
DATA = "-data"  # behind JOB_NAME: the Job of make data
RUN, SYNC, ZONE = (
    "pure-transformer/run-name",
    "pure-transformer/sync",
    "topology.kubernetes.io/zone",
)


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a job is, and its name there."""

    context: str
    namespace: str
    job_name: str

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            ("--context", self.context, "-n", self.namespace)
            if self.context
            else ("-n", self.namespace)
        )

    @property
    def words(self) -> str:
        return f"namespace {self.namespace}" + (f" of {self.context}" if self.context else "")

    def call(self, *args: str, stdin: str | None = None, timeout: float = PATIENCE_S) -> Done:
        """`kubectl args...` there."""
        return kubectl(*args, *self.flags, stdin=stdin, timeout=timeout)

    def ask(self, *args: str, stdin: str | None = None, timeout: float = PATIENCE_S) -> str:
        """What it prints. Raises Refused, in words, where it fails."""
        done = self.call(*args, stdin=stdin, timeout=timeout)
        if done.code:
            raise refusal(done, args)
        return done.out

    def get(self, kind: str, name: str) -> Thing | None:
        """An object, None where there is none of that name. Raises Refused."""
        done = self.call("get", kind, name, "-o", "json")
        if done.code == 0:
            return dict(json.loads(done.out))
        if re.search(r"\(NotFound\)", done.err) and not re.search(r"namespaces? \"", done.err):
            return None
        raise refusal(done, ("get", kind, name))

    def all_of(self, kind: str, *selector: str) -> list[Thing]:
        """All objects of a kind; with a selector those that it takes. Raises Refused."""
        chosen = ("-l", ",".join(selector)) if selector else ()
        return list(json.loads(self.ask("get", kind, "-o", "json", *chosen))["items"])

    def job(self, part: str = "") -> Thing | None:
        return self.get("job", self.job_name + part)

    def pods(self, part: str = "") -> list[Thing]:
        """The pods of the Job, by index, those of an index by age."""
        return of_job(self.all_of("pods", f"{INSTANCE}={self.job_name}"), self.job_name + part)

    def events(self, names: list[str] | None = None) -> list[Thing]:
        """What happened to the job's own objects, or to those of these names, newest last. [] where that may not be
        read: they only explain."""
        done = self.call("get", "events", "-o", "json")
        found = json.loads(done.out)["items"] if done.code == 0 else []
        own = re.compile(rf"{re.escape(self.job_name)}(-.*)?$")
        mine = [
            event
            for event in found
            if (about := str((event.get("involvedObject") or {}).get("name", "")))
            and (about in names if names is not None else own.match(about))
        ]
        return sorted(mine, key=when)

    def sites(self, pods: list[Thing]) -> dict[str, str]:
        """Pod -> its node's zone. "" where that is not known."""
        known = {name_of(pod): label(pod, ZONE) for pod in pods}
        if any(not known[name_of(pod)] and pod["spec"].get("nodeName") for pod in pods):
            done = self.call("get", "nodes", "-L", ",".join(nodes.LABELS))
            zones = (
                {node.name: node.zone for node in nodes.parsed(done.out)} if done.code == 0 else {}
            )
            known = {
                name_of(pod): known[name_of(pod)] or zones.get(pod["spec"].get("nodeName", ""), "")
                for pod in pods
            }
        return known

    def start(self, *args: str, **options: Any) -> subprocess.Popen:
        """Start `kubectl args...` there, for what streams."""
        return start(*args[:1], *self.flags, *args[1:], **options)

    def execute(self, pod: str, container: str, *argv: str, timeout: float = PATIENCE_S) -> Done:
        """Run a command in a pod, and wait for it."""
        return kubectl("exec", pod, "-c", container, *self.flags, "--", *argv, timeout=timeout)


def label(thing: Thing, name: str) -> str:
    return str((thing["metadata"].get("labels") or {}).get(name, ""))


def annotation(thing: Thing, name: str) -> str:
    return str((thing["metadata"].get("annotations") or {}).get(name, ""))


def is_of_sites(thing: Thing | None) -> bool:
    """Whether each pod of a Job, or this pod, is a site of its own, which the others do not wait for."""
    return thing is not None and annotation(thing, SYNC) == "diloco"


def tunes(job: Thing | None) -> bool:
    """Whether a Job's pods fine-tune."""
    containers = job["spec"]["template"]["spec"]["containers"] if job else []
    words = {word for container in containers for word in container.get("command", [])}
    return not words.isdisjoint(("finetune", "scripts/finetune.sh"))  # the script of older versions


def sent_by(job: Thing | None) -> str:
    """The command that sends such a Job."""
    return "make finetune-k8s" if tunes(job) else "make train-8xa100"


def name_of(thing: Thing) -> str:
    return str(thing["metadata"]["name"])


def index_of(pod: Thing) -> int:
    """Which pod of the Job it is."""
    text = label(pod, INDEX) or annotation(pod, INDEX)
    return int(text) if text.isdigit() else -1


def of_job(pods: Iterable[Thing], job_name: str) -> list[Thing]:
    """Those of the pods that a Job made, by index, those of an index by age."""
    return sorted(
        (pod for pod in pods if label(pod, OF_JOB) == job_name),
        key=lambda pod: (index_of(pod), pod["metadata"].get("creationTimestamp") or ""),
    )


def when(event: Thing) -> str:
    """An event's time, as text that sorts."""
    return str(
        event.get("lastTimestamp")
        or event.get("eventTime")
        or event.get("firstTimestamp")
        or event["metadata"].get("creationTimestamp")
        or ""
    )


def container_of(pod: Thing) -> Thing:
    """The state of the pod's one container: {"waiting": ...}, {"running": ...}, {"terminated": ...} or {}."""
    found = (pod.get("status") or {}).get("containerStatuses") or [{}]
    return dict(found[0].get("state") or {})


def runs(pod: Thing) -> bool:
    """Whether commands can be run in it."""
    status = pod.get("status") or {}
    return (
        status.get("phase") == "Running"
        and "terminated" not in container_of(pod)
        and "waiting" not in container_of(pod)
        and not pod["metadata"].get("deletionTimestamp")
    )


def newest(pods: list[Thing]) -> list[Thing]:
    """Of each index the last pod, by index."""
    return [*{index_of(pod): pod for pod in pods}.values()]


def check_namespace(target: Target) -> None:
    """Raises Refused where the namespace is not there, which the API does not say when asked for what is in it."""
    done = target.call("get", "namespace", target.namespace)
    if done.code and "not found" in done.err:  # who may not look is not told
        raise Refused(78, no_namespace(target.namespace))


def no_job(target: Target) -> Refused:
    """The sentence where a command needs a Job that is not there. Raises that of a namespace which is not."""
    check_namespace(target)
    return Refused(
        78,
        f"there is no Job {target.job_name} in {target.words}: it was stopped, or never sent there, or "
        "was removed a week after its end; make train-8xa100 sends it, and a run that is on the volume goes "
        "on",
    )


def target_of(place: Place, say: Callable[[str], None]) -> Target:
    """Where the Job is; says so where it is not where kubectl would look."""
    name, namespace, said = place.target()
    for sentence in said:
        say(sentence)
    return Target(name if name != context().name else "", namespace, place.value("job_name"))
