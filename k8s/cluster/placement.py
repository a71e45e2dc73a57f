"""Where the pods of a Job are, and what keeps those back that are nowhere, in words."""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from k8s.cluster import words
from k8s.cluster.kubectl import BAD_ENVIRONMENT, kubectl, refusal, short, succeed
from k8s.cluster.nodes import Node, room
from k8s.cluster.preflight import site_of
from k8s.cluster.target import when
from plan.network.traffic import TYPICAL_GBIT
from plan.planner import Plan
from record.number_formats import size
from settings.config import Config

LOOK_S = 2.0  # between two looks at the pods
SETTLE_S = 8.0  # after all have a node, for containers that cannot be started to say so

CANNOT_FETCH = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
)
CANNOT_START = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
    "StartError",
)


@dataclasses.dataclass(frozen=True)
class Pod:
    index: int
    name: str
    state: str  # phase, or why it waits
    node: str  # "" as long as it has none
    message: str = ""  # of the state, or why it has no node
    exit_code: int | None = None


@dataclasses.dataclass(frozen=True)
class Placed:
    """pods: by index, those that exist; problem: what no waiting mends, with the next command; code: for it."""

    pods: list[Pod]
    wanted: int
    problem: str = ""
    code: int = 0

    @property
    def all_have_nodes(self) -> bool:
        return len(self.pods) == self.wanted and all(pod.node for pod in self.pods)

    @property
    def all_run(self) -> bool:
        return len(self.pods) == self.wanted and all(
            pod.state in ("Running", "Succeeded") for pod in self.pods
        )


def read(pod: dict[str, Any]) -> Pod:
    """What a pod's object says."""
    meta, status = pod["metadata"], pod.get("status") or {}
    labels = meta.get("labels") or {}
    state, message, code = status.get("phase", "Pending"), status.get("message", ""), None
    for container in status.get("containerStatuses") or []:
        waiting, ended = (container.get("state", {}).get(key) for key in ("waiting", "terminated"))
        if waiting and waiting.get("reason"):
            state, message = waiting["reason"], waiting.get("message", "")
        if ended:
            code, message = ended.get("exitCode"), ended.get("message", "") or message
    node = pod["spec"].get("nodeName", "")
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False" and not node:
            message = condition.get("message", "")
    return Pod(
        int(labels.get("batch.kubernetes.io/job-completion-index", 0)),
        meta["name"],
        state,
        node,
        short(" ".join(message.split())),
        code,
    )


def look(job: str, namespace: str, wanted: int, image: str, again: str) -> Placed:
    """The newest pod of each index as it is now, and whether something is wrong that no waiting mends."""
    out = succeed(
        "get", "pods", "-n", namespace, "-l", f"batch.kubernetes.io/job-name={job}", "-o", "json"
    )
    newest: dict[int, Pod] = {}
    for item in sorted(
        json.loads(out)["items"], key=lambda one: one["metadata"].get("creationTimestamp") or ""
    ):
        if not item["metadata"].get("deletionTimestamp"):
            pod = read(item)
            newest[pod.index] = pod
    pods = [newest[index] for index in sorted(newest)]
    code, problem = failure(job, namespace, again)
    if not problem:
        problem = next(filter(None, (stuck(pod, namespace, image, again) for pod in pods)), "")
        code = BAD_ENVIRONMENT if problem else 0
    return Placed(pods, wanted, problem, code)


def failure(job: str, namespace: str, again: str) -> tuple[int, str]:
    """(exit code, sentence) where the Job has failed; (0, "") else."""
    done = kubectl("get", "job", job, "-n", namespace, "-o", "json")
    if "(NotFound)" in done.err:
        return (
            BAD_ENVIRONMENT,
            f"Job {job} has been deleted by somebody else; {again} sends it again",
        )
    if done.code:
        raise refusal(done, ("get", "job"))
    for condition in (json.loads(done.out).get("status") or {}).get("conditions") or []:
        if condition["type"] in ("Failed", "FailureTarget") and condition["status"] == "True":
            why = short(condition.get("message", "") or condition.get("reason", ""))
            found = re.search(r"exit code (\d+)", why)
            code = int(found[1]) if found else BAD_ENVIRONMENT
            what = words.MEANING[code] if code in words.FINAL else "its pods fail"
            return (
                code,
                f"Job {job} has failed: {what} ({why}); make logs ONLY=errors says which, then {again}",
            )
    return 0, ""


def stuck(pod: Pod, namespace: str, image: str, again: str) -> str:
    """Why a pod's container cannot be started, as a sentence; "" where nothing is wrong."""
    said = f" ({pod.message})" if pod.message else ""
    if pod.state in CANNOT_FETCH:
        return (
            f"pod {pod.name} cannot fetch IMAGE={image}{said}: make push puts it there, and a registry that asks "
            f"for a login wants IMAGE_PULL_SECRET; then {again}"
        )
    if pod.state in CANNOT_START:
        return (
            f"pod {pod.name} cannot be started, {pod.state}{said}: kubectl describe pod {pod.name} -n {namespace} "
            f"says more; once that is mended, {again}"
        )
    return ""


def warnings(placed: Placed, job: str, namespace: str) -> str:
    """What the cluster last complained of about the Job, or a pod that does not run; "" where it did not."""
    names = {job, *(pod.name for pod in placed.pods if pod.state not in ("Running", "Succeeded"))}
    done = kubectl(
        "get", "events", "-n", namespace, "--field-selector", "type=Warning", "-o", "json"
    )
    events = json.loads(done.out)["items"] if done.code == 0 else []
    said = [event for event in events if event.get("involvedObject", {}).get("name") in names]
    return (
        short(" ".join(str(sorted(said, key=when)[-1].get("message", "")).split())) if said else ""
    )


def why_not(placed: Placed, job: str, namespace: str) -> str:
    """Why not all pods have a node, in the scheduler's words."""
    without = [pod for pod in placed.pods if not pod.node]
    missing = placed.wanted - len(placed.pods) + len(without)
    reason = next((pod.message for pod in without if pod.message), "") or warnings(
        placed, job, namespace
    )
    return f"{missing} of {placed.wanted} pods have no node ({reason or 'the scheduler has given no reason yet'})"


def wait(look_again: Callable[[], Placed], seconds: float, say: Callable[[str], None]) -> Placed:
    """Look until all pods have a node, and a little longer for what goes wrong then; or the time is up."""
    deadline, settled, last = time.monotonic() + seconds, None, ""
    while True:
        placed, now = look_again(), time.monotonic()
        if placed.problem or placed.all_run:
            return placed
        if placed.all_have_nodes and settled is None:
            settled = now
        if settled is not None and now - settled >= min(SETTLE_S, seconds):
            return placed
        if settled is None and now >= deadline:
            return placed
        states = ", ".join(sorted({pod.state for pod in placed.pods})) or "none yet"
        count = sum(bool(pod.node) for pod in placed.pods)
        if (
            said := f"waiting for nodes: {count} of {placed.wanted} pods have one ({states})"
        ) != last:
            say(said)
            last = said
        time.sleep(
            min(LOOK_S, max(0.05, deadline - now)) if settled is None else min(LOOK_S, SETTLE_S / 4)
        )


def table(placed: Placed, nodes: Sequence[Node] | None) -> str:
    """index, pod, node and site of each pod."""
    rows: list[tuple[str, ...]] = [("INDEX", "POD", "STATE", "NODE", "SITE")]
    rows += [
        (str(pod.index), pod.name, pod.state, pod.node or "-", site_of(nodes, pod.node) or "-")
        for pod in placed.pods
    ]
    return "\n".join(words.table(rows)) + "\n"


def across_sites(placed: Placed, nodes: Sequence[Node] | None, c: Config, plan: Plan | None) -> str:
    """What plain DDP is in for where the pods' sites differ; "" where they do not, or are not known. SYNC=diloco is
    made for it, and is only told how many there are. plan: None where the GPUs or the model are not known."""
    where = [site_of(nodes, pod.node) for pod in placed.pods if pod.node]
    found = sorted(set(filter(None, where)))
    if len(found) < 2:
        return ""
    if c.sync == "diloco":
        return (
            f"the pods are at {len(found)} sites ({', '.join(found)}), which SYNC=diloco is made for: they "
            f"exchange what they have learned once in SYNC_EVERY={c.sync_every} steps, and not in every one"
        )
    said = (
        f"the pods are at {len(found)} sites ({', '.join(found)}), and with SYNC=ddp every step waits for the "
        "network between them. "
    )
    step_s = plan.pace.speed.step_s if plan else None
    if plan is None or step_s is None:
        said += "How long a step computes is not known here, so neither is how much of the time that leaves. "
    else:
        ways = [(gbit, plan.between(len(found), gbit)) for gbit in TYPICAL_GBIT]
        shares = [
            f"{100 * step_s / (step_s + way.wait_s):.0f}% at {gbit:g} Gbit/s" for gbit, way in ways
        ]
        said += (
            f"{size(ways[0][1].bytes_per_step)} leave each site. Expected efficiency, computed: "
            f"{' and '.join(shares)} between sites; the rest of the time is waiting, while the GPUs show 100% "
            "utilisation. "
        )
    held = room(nodes or [], c)
    fits = [
        site
        for site, pods in sorted(held.items(), key=lambda one: (-one[1], one[0]))
        if site and pods >= c.nodes
    ]
    if fits:
        fits.sort(key=lambda site: -where.count(site))  # the fewest pods have to move
        said += (
            f"`make restart SITE={fits[0]}` puts all pods at one site, which has room for {held[fits[0]]} such "
            "pods if nothing else runs. "
        )
    else:
        said += (
            f"No site has room for {c.nodes} such pods: another shape may fit one (make sites), with `make "
            "restart SITE=NAME NODES=... GPUS_PER_NODE=...`. "
        )
    return said + (
        "Made for several sites is SYNC=diloco, which synchronizes every SYNC_EVERY steps only, at some "
        "cost in loss: `make restart SYNC=diloco`. Nothing is switched by itself."
    )
