"""A run's Job in Kubernetes as it is now: two calls of kubectl a look, and no right but to list and to read logs.

    kubectl get jobs,pods[,events]      the Job, its pods, and where one does not run what keeps it
    kubectl logs -l the Job's pods      what each tells of its node (pod_agent.py), and its last lines

Events have no labels to choose them by, so they are listed with everything else that is in the namespace, and only
while there is something to explain. Where others have very much there, the two calls are about the Job's own and,
in turn, logs and events. Once for each node that is new, its zone is asked for, where pods do not have it as a label.
"""

import dataclasses
import json
import re

from k8s.cluster import nodes as sites
from k8s.cluster import overview, words
from k8s.cluster.kubectl import UNAVAILABLE, Done, Refused, refusal, short
from k8s.cluster.target import (
    DATA,
    INSTANCE,
    OF_JOB,
    RUN,
    ZONE,
    Target,
    Thing,
    annotation,
    check_namespace,
    index_of,
    label,
    name_of,
    newest,
    of_job,
    runs,
    target_of,
)
from k8s.cluster.volume import say
from k8s.cluster.where import Place
from monitor.facts import Cluster, Node, Pod
from monitor.objects import all_run, cluster_of
from monitor.pod_log import Speech, parted, speech_of, with_speech

LISTED_S, LOGS_S = 20.0, 30.0  # that kubectl may take
CROWD = 2000  # objects of others in a namespace: too many to list all of them at each look
MINOR = re.compile(r'resource "events"|^[EWI]\d{4} |^[Ww]arning:')  # events may be done without
TAIL, LONGEST_TAIL = 64, 512  # lines of each log; more where a teller's was not among them


class Watch:
    """Looks at the Job of a run again and again, and keeps what it knew where Kubernetes does not answer."""

    def __init__(self, place: Place):
        self.place = place
        self.target: Target | None = None
        self.last = Cluster("", place.value("job_name"), "not known", wanted_pods=0)
        self.nodes: tuple[Node, ...] = ()
        self.unsettled, self.crowded, self.turn, self.checked = True, False, False, False
        self.tail = TAIL
        self.events: list[Thing] = []
        self.zones: dict[str, str] = {}
        self.speech: dict[str, Speech] = {}  # by name of the pod
        self.pulls: dict[str, tuple[float | None, float | None]] = {}
        self.unread = ""

    def look(self, now: float) -> tuple[Cluster, tuple[Node, ...]]:
        """What there is at this moment, Unix seconds; with a problem, what there was when it was last known."""
        try:
            if self.target is None:
                self.target = target_of(self.place, say)
                self.last = dataclasses.replace(self.last, words=self.target.words)
            self.last, self.nodes = self.asked(self.target, now)
        except Refused as refused:
            self.last = dataclasses.replace(self.last, problem=refused.sentence)
        return self.last, self.nodes

    def asked(self, target: Target, now: float) -> tuple[Cluster, tuple[Node, ...]]:
        """What Kubernetes says. Raises Refused where it says nothing, or it may not be asked."""
        wide = self.unsettled and not self.crowded
        try:
            things = listed(target, wide)
        except Refused as refused:  # if all of it is too much, the Job's own may not be
            self.crowded = wide and refused.code == UNAVAILABLE
            raise
        job, pods, name = chosen(target, things)
        if wide:
            own = len(pods) + 1
            self.events = [thing for thing in things if thing["kind"] == "Event"]
            self.crowded = len(things) - own > CROWD
        if job is None:
            self.check(target)
        elif other := overview.another_run(job, self.place):
            self.unsettled = False
            return Cluster(
                target.words, name, words.state(job, pods), words.ended(job), run=other, asked=now
            ), ()
        self.unsettled = job is not None and not words.ended(job) and not all_run(job, pods)
        self.second(target, name, pods, wide)
        if not self.unsettled:
            self.events = []
        self.find_zones(target, newest(pods))
        run = annotation(job, RUN) if job else ""
        cluster = cluster_of(target.words, name, job, pods, self.events, self.zones, run, now)
        shown = tuple(
            with_speech(self.with_pull(pod), self.speech.get(pod.name, Speech()))
            for pod in cluster.pods
        )
        nodes = tuple(
            node
            for pod in shown
            if pod.index >= 0 and (node := self.speech.get(pod.name, Speech()).node)
        )
        return dataclasses.replace(cluster, pods=shown, unread=self.unread), nodes

    def check(self, target: Target) -> None:
        """Once, where nothing is there: whether the namespace is. Raises Refused."""
        if not self.checked:
            check_namespace(target)
            self.checked = True

    def second(self, target: Target, name: str, pods: list[Thing], wide: bool) -> None:
        """The second call: logs where a pod has begun, else events where they are wanted; where both are, and one
        listing of everything is too much, in turn."""
        begun = [
            pod
            for pod in newest(pods)
            if (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")
        ]
        self.turn = self.crowded and self.unsettled and bool(begun) and not self.turn
        if not self.turn:
            self.unread = self.read_logs(target, name, newest(pods)) if begun else ""
        if (self.turn or not begun) and self.unsettled and not wide:
            done = target.call("get", "events", "-o", "json", timeout=LISTED_S)
            self.events = list(json.loads(done.out)["items"]) if done.code == 0 else []

    def read_logs(self, target: Target, name: str, pods: list[Thing]) -> str:
        """Hear what the pods say. Returns why some could not be heard, "" where all were."""
        try:
            done = target.call(
                "logs",
                "-l",
                f"{OF_JOB}={name}",
                "-c",
                "trainer",
                "--prefix",
                "--timestamps",
                f"--tail={self.tail}",
                "--ignore-errors",
                timeout=LOGS_S,
            )
            if done.code:
                raise refusal(done, ("logs", "-l"))
        except Refused as refused:
            return refused.sentence
        found, complaints = parted(done.out, {name_of(pod) for pod in pods})
        before, self.speech = self.speech, {}
        for pod in pods:
            about = Pod(index_of(pod), name_of(pod), "")
            self.speech[about.name] = speech_of(
                about, found.get(about.name, []), before.get(about.name, Speech()), runs(pod)
            )
        if any(said.heard >= self.tail and not said.told for said in self.speech.values()):
            self.tail = LONGEST_TAIL
        return unread(complaints)

    def with_pull(self, pod: Pod) -> Pod:
        """The pod with what was heard of its image before its events were over."""
        since, pulled = self.pulls.get(pod.name, (None, None))
        known = (pod.pulling_since or since, pod.pulled or pulled)
        self.pulls[pod.name] = known
        return dataclasses.replace(pod, pulling_since=known[0], pulled=known[1])

    def find_zones(self, target: Target, pods: list[Thing]) -> None:
        """Ask for the zones of nodes that are new, once, if they may be listed."""
        new = {
            node
            for pod in pods
            if (node := str(pod["spec"].get("nodeName") or "")) and not label(pod, ZONE)
        } - self.zones.keys()
        if not new:
            return
        self.zones |= dict.fromkeys(new, "")
        try:
            done = target.call("get", "nodes", "-L", ",".join(sites.LABELS), timeout=LISTED_S)
        except Refused:  # it takes too long: sites only help to understand
            return
        self.zones |= {node.name: node.zone for node in sites.parsed(done.out) if node.name in new}


def listed(target: Target, wide: bool) -> list[Thing]:
    """The Job's own objects; wide: all of the namespace, with events if they may be listed. Raises Refused."""
    args = (
        ("get", "jobs,pods,events", "-o", "json")
        if wide
        else ("get", "jobs,pods", "-o", "json", "-l", f"{INSTANCE}={target.job_name}")
    )
    done = target.call(*args, timeout=LISTED_S)
    grave = [line for line in done.err.splitlines() if line.strip() and not MINOR.search(line)]
    if done.code and (grave or not done.out):
        raise refusal(
            Done(done.code, "", grave[0] if grave else done.err), args
        )  # the same for each kind
    return list(json.loads(done.out)["items"])


def chosen(target: Target, things: list[Thing]) -> tuple[Thing | None, list[Thing], str]:
    """The run's Job, its pods and its name; those of make data where only that Job is there."""
    jobs = {name_of(thing): thing for thing in things if thing["kind"] == "Job"}
    pods = [thing for thing in things if thing["kind"] == "Pod"]
    for name in (target.job_name, target.job_name + DATA):
        if name in jobs:
            return jobs[name], of_job(pods, name), name
    return None, [], target.job_name


def unread(complaints: list[str]) -> str:
    """What kept logs from being read, in a sentence."""
    if not complaints:
        return ""
    if "forbidden" in complaints[0]:
        return refusal(Done(1, "", complaints[0]), ("logs", "-l")).sentence
    return f"the log of a pod cannot be read ({short(complaints[0])}); make status says how it is"
