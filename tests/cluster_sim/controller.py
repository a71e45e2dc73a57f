"""The Job controller: makes the pods of Jobs, replaces those that failed, and says how a Job ended.

As Kubernetes' own: one pod an index, failures judged by podFailurePolicy, a delay that doubles with every failure since
the last success, none of a pod's followers before it has ended where podReplacementPolicy says so. Left out: scaling
a Job down, FailIndex and successPolicy.
"""

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

from tests.cluster_sim import rules
from tests.cluster_sim.kinds import kind_of
from tests.cluster_sim.store import Refusal, Thing

if TYPE_CHECKING:
    from tests.cluster_sim.cluster import Cluster

INDEX = "batch.kubernetes.io/job-completion-index"
FIRST_DELAY_S, LONGEST_DELAY_S = 10.0, 600.0
ENDED = ("Succeeded", "Failed")


@dataclasses.dataclass
class Progress:
    """What the controller remembers of one Job."""

    counted: set[str] = dataclasses.field(
        default_factory=set
    )  # uids of pods whose end was taken note of
    completed: set[int] = dataclasses.field(default_factory=set)
    failed: int = 0  # those that count towards backoffLimit
    in_a_row: int = 0  # all, since the last success: the delay follows from them
    not_before: float = 0.0
    made: int = 0
    verdict: tuple[str, str] | None = None  # reason and message of its failure


def judge(policy: Thing, pod: Thing) -> tuple[str, str]:
    """What a Job's podFailurePolicy makes of a failed pod: the action, and the words for it."""
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    ended = {
        status["name"]: status["state"]["terminated"]["exitCode"]
        for status in pod["status"].get("containerStatuses", [])
        if "terminated" in status.get("state", {})
    }
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
    for number, rule in enumerate(policy.get("rules", [])):
        codes = rule.get("onExitCodes", {})
        for name, code in ended.items():
            in_values = code in codes.get("values", [])
            if (
                codes
                and code != 0
                and codes.get("containerName", name) == name
                and (in_values == (codes["operator"] == "In"))
            ):
                return rule["action"], (
                    f"Container {name} for pod {where} failed with exit code {code} matching "
                    f"{rule['action']} rule at index {number}"
                )
        for condition in rule.get("onPodConditions", []):
            if conditions.get(condition["type"]) == condition.get("status", "True"):
                return rule["action"], (
                    f"Pod {where} has condition {condition['type']} matching {rule['action']} rule "
                    f"at index {number}"
                )
    return "Count", ""


def ranges(indexes: set[int]) -> str:
    """'0-2,5' of {0, 1, 2, 5}."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class JobController:
    """Runs in a thread of its own until close(), which raises what went wrong in it."""

    def __init__(self, cluster: "Cluster", scale: float = 0.01):
        self.cluster, self.store, self.scale = cluster, cluster.store, scale
        self.progress: dict[str, Progress] = {}
        self.error: BaseException | None = None
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.stopped.set()
        with self.store.changed:
            self.store.changed.notify_all()
        self.thread.join(10)
        if self.error is not None:
            raise self.error

    def work(self) -> None:
        seen = 0
        try:
            while not self.stopped.is_set():
                with self.store.changed:
                    if self.store.version == seen:
                        self.store.changed.wait(0.1)
                    changes, seen = list(self.store.since(seen)), self.store.version
                    for change in changes:
                        if change.key[0].kind == "Pod":
                            self.note(change.thing, gone=change.type == "DELETED")
                    for job in self.store.list(kind_of("Job")):
                        self.tend(job)
        except BaseException as error:
            self.error = error

    # ---- How pods end
    def note(self, pod: Thing, *, gone: bool) -> None:
        """Count a pod that has ended, once."""
        owner = next(
            (o for o in pod["metadata"].get("ownerReferences", []) if o["kind"] == "Job"), None
        )
        phase, uid = pod["status"].get("phase"), pod["metadata"]["uid"]
        if owner is None or not (gone or phase in ENDED):
            return
        progress = self.progress.setdefault(owner["uid"], Progress())
        if uid in progress.counted:
            return
        progress.counted.add(uid)
        if phase == "Succeeded":
            progress.completed.add(
                int(pod["metadata"].get("annotations", {}).get(INDEX, len(progress.completed)))
            )
            progress.in_a_row = 0
            return
        progress.in_a_row += 1
        progress.not_before = time.monotonic() + self.scale * min(
            LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (progress.in_a_row - 1)
        )
        try:
            job = self.store.find(kind_of("Job"), pod["metadata"]["namespace"], owner["name"])
        except Refusal:
            return  # it went first
        if job["metadata"]["uid"] != owner["uid"]:
            return  # this is another of that name
        action, words = judge(job["spec"].get("podFailurePolicy", {}), pod)
        if action == "FailJob" and progress.verdict is None:
            progress.verdict = ("PodFailurePolicy", words)
        progress.failed += action != "Ignore"

    # ---- What to do about it
    def tend(self, job: Thing) -> None:
        status = job.setdefault("status", {})
        held = {c["type"] for c in status.get("conditions", []) if c["status"] == "True"}
        if held & {"Complete", "Failed"} and "deletionTimestamp" not in job["metadata"]:
            self.tidy(job, status)
        if (
            held & {"Complete", "Failed"}
            or "deletionTimestamp" in job["metadata"]
            or job["spec"].get("suspend")
        ):
            return
        progress, spec = self.progress.setdefault(job["metadata"]["uid"], Progress()), job["spec"]
        status.setdefault("startTime", rules.now())
        pods = [
            pod
            for pod in self.store.list(kind_of("Pod"), job["metadata"]["namespace"])
            if any(
                o["uid"] == job["metadata"]["uid"]
                for o in pod["metadata"].get("ownerReferences", [])
            )
        ]
        running = [pod for pod in pods if pod["status"].get("phase") not in ENDED]
        wanted = spec.get("completions") or 1
        self.fail_on_limits(job, progress)
        if progress.verdict:
            reason, words = progress.verdict
            self.condition(status, "FailureTarget", reason, words)
            for pod in running:
                if "deletionTimestamp" not in pod["metadata"]:
                    self.store.delete(
                        (kind_of("Pod"), pod["metadata"]["namespace"], pod["metadata"]["name"])
                    )
                    self.cluster.event(
                        job, "Normal", "SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}"
                    )
            running = [
                pod
                for pod in running
                if (kind_of("Pod"), pod["metadata"]["namespace"], pod["metadata"]["name"])
                in self.store.things
            ]
            if not running:
                self.condition(status, "Failed", reason, words)
                self.cluster.event(job, "Warning", reason, words)
        elif len(progress.completed) >= wanted and not running:
            for type_ in ("SuccessCriteriaMet", "Complete"):
                self.condition(
                    status, type_, "CompletionsReached", "Reached expected number of succeeded pods"
                )
            status["completionTime"] = rules.now()
            self.cluster.event(job, "Normal", "Completed", "Job completed")
        else:
            running += self.make(job, progress, running, wanted)
        leaving = [pod for pod in running if "deletionTimestamp" in pod["metadata"]]
        ready = [
            pod for pod in running if pod["status"].get("phase") == "Running" and pod not in leaving
        ]
        status |= {
            "active": len(running) - len(leaving),
            "terminating": len(leaving),
            "ready": len(ready),
            "succeeded": len(progress.completed),
            "failed": progress.failed,
        }
        if spec.get("completionMode") == "Indexed":
            status["completedIndexes"] = ranges(progress.completed)
        self.store.update(
            (kind_of("Job"), job["metadata"]["namespace"], job["metadata"]["name"]),
            job,
            "controller",
            system=True,
        )

    def tidy(self, job: Thing, status: Thing) -> None:
        """Delete a Job that has been over for as long as it says."""
        over = max(condition["lastTransitionTime"] for condition in status["conditions"])
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        if ttl is not None and rules.age_s(over) > self.scale * ttl:
            self.store.delete(
                (kind_of("Job"), job["metadata"]["namespace"], job["metadata"]["name"]),
                propagation="Foreground",
            )

    def fail_on_limits(self, job: Thing, progress: Progress) -> None:
        """Too many failures, or too long a time."""
        spec, meta = job["spec"], job["metadata"]
        deadline = spec.get("activeDeadlineSeconds")
        if progress.verdict is None and progress.failed > spec["backoffLimit"]:
            progress.verdict = (
                "BackoffLimitExceeded",
                "Job has reached the specified backoff limit",
            )
        elif (
            progress.verdict is None
            and deadline
            and rules.age_s(meta["creationTimestamp"]) > deadline
        ):
            progress.verdict = ("DeadlineExceeded", "Job was active longer than specified deadline")

    def make(
        self, job: Thing, progress: Progress, running: list[Thing], wanted: int
    ) -> list[Thing]:
        """The pods that are missing, once the delay is over."""
        if time.monotonic() < progress.not_before:
            return []
        waits = job["spec"]["podReplacementPolicy"] == "Failed"
        there = [pod for pod in running if waits or "deletionTimestamp" not in pod["metadata"]]
        room = min(
            job["spec"]["parallelism"] - len(there), wanted - len(progress.completed) - len(there)
        )
        indexes: list[int | None] = [None] * max(0, room)
        if job["spec"]["completionMode"] == "Indexed":
            taken = progress.completed | {
                int(pod["metadata"]["annotations"][INDEX]) for pod in there
            }
            indexes = [index for index in range(wanted) if index not in taken][: max(0, room)]
        made = []
        for index in indexes:
            pod = pod_of(job, index)
            try:
                made.append(
                    self.store.create(
                        kind_of("Pod"), job["metadata"]["namespace"], pod, "controller"
                    )
                )
            except Refusal as refusal:
                self.cluster.event(job, "Warning", "FailedCreate", f"Error creating: {refusal}")
                progress.not_before = time.monotonic() + self.scale * LONGEST_DELAY_S
                break
            progress.made += 1
            self.cluster.event(
                job, "Normal", "SuccessfulCreate", f"Created pod: {made[-1]['metadata']['name']}"
            )
        return made

    @staticmethod
    def condition(status: Thing, type_: str, reason: str, message: str) -> None:
        """Set a condition, once."""
        conditions = status.setdefault("conditions", [])
        if not any(condition["type"] == type_ for condition in conditions):
            conditions.append(
                {
                    "type": type_,
                    "status": "True",
                    "reason": reason,
                    "message": message,
                    "lastTransitionTime": rules.now(),
                    "lastProbeTime": rules.now(),
                }
            )


def pod_of(job: Thing, index: int | None) -> Thing:
    """A pod for an index of a Job; for any, of a Job that has none."""
    template, name = job["spec"]["template"], job["metadata"]["name"]
    meta: dict[str, Any] = {
        "generateName": f"{name}-" if index is None else f"{name}-{index}-",
        "labels": dict(template["metadata"].get("labels", {})),
        "annotations": dict(template["metadata"].get("annotations", {})),
        "ownerReferences": [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "name": name,
                "uid": job["metadata"]["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    spec = dict(template["spec"])
    if index is not None:
        meta["labels"][INDEX] = meta["annotations"][INDEX] = str(index)
        spec.setdefault("hostname", f"{name}-{index}")
        told = {
            "name": "JOB_COMPLETION_INDEX",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}},
        }
        spec["containers"] = [
            container | {"env": [*container.get("env", []), told]}
            for container in spec["containers"]
        ]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
