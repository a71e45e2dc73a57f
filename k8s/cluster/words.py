"""What Kubernetes says of a Job and its pods, in plain words. Pure functions of what `kubectl get -o json` prints."""

import datetime
import re
import time
from collections.abc import Sequence

from k8s.cluster.log_lines import own
from k8s.cluster.target import Thing, container_of, index_of, name_of, newest, runs, when
from record.exit_codes import DONE, OTHER, ROWS
from record.metrics import duration

LAUNCHER = re.compile("^launch: exit code [0-9]+: ")  # the last word of train/launcher.py
# Exit code -> its meaning within a sentence.
MEANING = {row.code: row.meaning[0].lower() + row.meaning[1:].rstrip(".") for row in (*ROWS, OTHER)}
MEANING[137] = "killed: out of memory, or by its node"
FULL = re.compile(
    "No space left on device|Disk quota exceeded"
)  # the latter is what CephFS says of a full claim
OVERDUE_S = 60.0  # beyond its grace period, for a pod to leave
# These end the Job: another try cannot help.
FINAL = tuple(row.code for row in ROWS if row.ends_job and row.code != DONE)

HINT = {
    64: "mend the setting that the pod's log names, then make restart",
    70: "make logs ONLY=errors shows what failed again and again; then make restart",
    78: "mend the data or the volume that the pod's log names, then make restart",
}


def age(stamp: str | None) -> str:
    """How long ago a time stamp of the API was."""
    return short_time(time.time() - seconds_of(stamp)) if stamp else "-"


def short_time(seconds: float) -> str:
    """45s, 12m, 3h, 2d."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def seconds_of(stamp: str | None) -> float:
    """Unix seconds of a time stamp of the API."""
    if not stamp:
        return 0.0
    return datetime.datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


# ---------------------------------------------------------------------------------------------------
# The Job
# ---------------------------------------------------------------------------------------------------


def ended(job: Thing) -> str:
    """ "Complete" or "Failed" where the Job is over, else ""."""
    status = job.get("status") or {}
    found = {c["type"] for c in status.get("conditions") or [] if c.get("status") == "True"}
    if found & {"Failed", "FailureTarget"}:
        return "Failed"
    if found & {"Complete", "SuccessCriteriaMet"}:
        return "Complete"
    return ""


def failure(job: Thing) -> Thing:
    """The condition that says why a Job failed."""
    conditions = {
        c["type"]: c
        for c in (job.get("status") or {}).get("conditions") or []
        if c["status"] == "True"
    }
    return dict(conditions.get("Failed") or conditions.get("FailureTarget") or {})


def exit_code(job: Thing, pods: list[Thing]) -> int:
    """Of a failed Job: the code that failed it, 1 where none did by itself."""
    said = re.search(r"exit code (\d+)", str(failure(job).get("message", "")))
    if said and failure(job).get("reason") == "PodFailurePolicy":
        return int(said[1])
    codes = [code for pod in pods if (code := code_of(pod)) in FINAL]
    return codes[0] if codes else 1


def state(job: Thing, pods: list[Thing]) -> str:
    """The Job's state in a sentence."""
    wanted = int(job["spec"].get("completions") or 1)
    status = job.get("status") or {}
    if ended(job) == "Complete":
        began, over = seconds_of(status.get("startTime")), seconds_of(status.get("completionTime"))
        took = f", after {duration(over - began)}" if began and over else ""
        return f"complete: {'its pod has' if wanted == 1 else f'all {wanted} pods have'} ended well{took}"
    if ended(job) == "Failed":
        return f"failed: {why_failed(job, pods)}"
    if job["metadata"].get("deletionTimestamp"):
        left = [name_of(pod) for pod in pods]
        return (
            f"being stopped: {len(left)} of {wanted} pods are still saving and leaving"
            if left
            else "being stopped"
        )
    if job["spec"].get("suspend"):
        return "suspended: somebody set spec.suspend, and no pod is made until it is taken away"
    now = newest(pods)
    done = sum((pod.get("status") or {}).get("phase") == "Succeeded" for pod in now)
    running = sum(runs(pod) for pod in now)
    if running + done == wanted and done:
        return f"ending: {done} of {wanted} pods are done"
    if running == wanted:
        return "running: its pod runs" if wanted == 1 else f"running: all {wanted} pods run"
    return f"waiting for pods: {running + done} of {wanted} run"


def why_failed(job: Thing, pods: list[Thing]) -> str:
    """A failed Job's reason, in words."""
    condition = failure(job)
    reason, message = condition.get("reason", ""), str(condition.get("message", ""))
    code = exit_code(job, pods)
    if reason == "PodFailurePolicy":
        pod = re.search(r"pod (?:[\w.-]+/)?([\w.-]+) failed", message)
        return (
            f"{pod[1] if pod else 'a pod'} ended with exit code {code} ({MEANING.get(code, 'unknown')}), which "
            "another try cannot help"
        )
    if reason == "BackoffLimitExceeded":
        return f"more pods failed than backoffLimit={job['spec'].get('backoffLimit', 6)} allows"
    if reason == "DeadlineExceeded":
        return (
            f"it ran longer than activeDeadlineSeconds={job['spec'].get('activeDeadlineSeconds')}"
        )
    return f"{reason or 'no reason given'}{': ' + message if message else ''}"


# ---------------------------------------------------------------------------------------------------
# A pod
# ---------------------------------------------------------------------------------------------------


def code_of(pod: Thing) -> int | None:
    """The exit code of a pod's container; None as long as it has none."""
    code = (container_of(pod).get("terminated") or {}).get("exitCode")
    return int(code) if code is not None else None


def condition(pod: Thing, kind: str) -> Thing:
    """A condition of a pod; {} if it has none of that kind."""
    found = (pod.get("status") or {}).get("conditions") or []
    return next((dict(c) for c in found if c.get("type") == kind), {})


def phase(pod: Thing) -> str:
    """What a pod does, in a word."""
    if pod["metadata"].get("deletionTimestamp"):
        return "Leaving"
    found = str((pod.get("status") or {}).get("phase") or "Pending")
    return (
        "Starting"
        if found == "Running" and not runs(pod) and "waiting" in container_of(pod)
        else found
    )


def trouble(pod: Thing) -> str:
    """What is wrong with a pod, in words; "" where nothing is."""
    status = pod.get("status") or {}
    container = container_of(pod)
    disrupted = condition(pod, "DisruptionTarget")
    if stays := lingers(
        pod, str(disrupted.get("reason")) if disrupted.get("status") == "True" else ""
    ):
        return stays
    if disrupted.get("status") == "True" or status.get("reason") in (
        "Evicted",
        "Preempting",
        "Preempted",
    ):
        return gone(status, disrupted)
    if (over := container.get("terminated")) and status.get("phase") != "Succeeded":
        return failed(over)
    if status.get("phase") == "Failed":
        return f"{status.get('reason', 'failed')}: {one_line(str(status.get('message', 'no reason given')))}"
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return f"finds no node: {one_line(str(scheduled.get('message') or scheduled.get('reason') or ''))}"
    return waits(container.get("waiting") or {}, pod)


def lingers(pod: Thing, disrupted: str) -> str:
    """What to do about a pod that was told to leave and whose node may never say that it has; "" of any other. As long
    as it is not over, the Job makes no other (podReplacementPolicy: Failed)."""
    until, meta = pod["metadata"].get("deletionTimestamp"), pod["metadata"]
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed") or not until:
        return ""
    late = time.time() - seconds_of(until)  # the time stamp has the grace period in it
    force = (
        f"the Job makes no other before it is gone: kubectl delete pod {name_of(pod)} --grace-period=0 --force"
        + (f" -n {meta['namespace']}" if meta.get("namespace") else "")
    )
    if late > OVERDUE_S:
        return f"its node does not answer (it should have left {short_time(late)} ago), and {force}"
    if disrupted == "DeletionByTaintManager":
        return (
            f"its node was tainted, or does not answer; it has {short_time(-late)} left to save, and should it "
            f"stay then, {force}"
        )
    return ""


def gone(status: Thing, disrupted: Thing) -> str:
    """Why a pod was taken away."""
    how = {
        "PreemptionByScheduler": "preempted: a pod of higher priority took its place",
        "DeletionByTaintManager": "its node was tainted, or does not answer",
        "EvictionByEvictionAPI": "evicted: its node is being drained",
        "DeletionByPodGC": "its node is gone",
        "TerminationByKubelet": "ended by its node",
    }.get(str(disrupted.get("reason")), "evicted")
    said = one_line(str(status.get("message") or disrupted.get("message") or ""))
    return f"{how}{f' ({said})' if said else ''}; the Job makes another, and this is not counted as a failure"


def failed(over: Thing) -> str:
    """What a container ended with."""
    code, text = int(over.get("exitCode", 1)), message_of(over)
    said = last_words(text)
    if FULL.search(text):
        return (
            f"the volume or the pod's own disk is full (exit code {code}): {said}; make room, with make "
            "checkpoints to see what is there, or a larger VOLUME_GB"
        )
    if over.get("reason") == "OOMKilled":
        return f"killed: it used more memory than POD_MEMORY_GB allows (exit code {code})"
    return f"exit code {code} ({MEANING.get(code, 'unknown')})" + (f": {said}" if said else "")


def waits(waiting: Thing, pod: Thing) -> str:
    """What a container waits for that will not come by itself; "" where it only takes its time."""
    reason, message = str(waiting.get("reason", "")), one_line(str(waiting.get("message", "")))
    image = str(next(iter(pod["spec"].get("containers") or [{}])).get("image", ""))
    if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
        return (
            f"its image cannot be fetched ({reason}): {image}{f': {message}' if message else ''}; is it pushed "
            "(make push), and does IMAGE_PULL_SECRET name a login for it?"
        )
    if reason == "CreateContainerConfigError":
        return f"its container cannot be made: {message}; make restart makes what this names anew"
    if reason in ("", "ContainerCreating", "PodInitializing"):
        return ""
    return f"{reason}{f': {message}' if message else ''}"


def message_of(over: Thing) -> str:
    """The end of what a container said, without what it told of its node, of which the first line may be a part."""
    lines = str(over.get("message") or "").splitlines()
    if len(lines) > 1 and lines[0].endswith("}") and '"' in lines[0]:
        del lines[0]
    return "\n".join(own(lines))


def last_words(text: str) -> str:
    """What the launcher says at its end, all of it; of a termination message without that the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    begins = next(
        (n for n in reversed(range(len(lines))) if LAUNCHER.match(lines[n])), len(lines) - 1
    )
    return one_line(LAUNCHER.sub("", " ".join(lines[begins:]))) if lines else ""


def one_line(text: str, most: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


# ---------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns under each other; the last one is as long as it likes."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def pod_table(pods: list[Thing], sites: dict[str, str]) -> list[str]:
    """A line for each index: its newest pod, and how many there were before."""
    rows = [("INDEX", "PHASE", "NODE", "SITE", "AGE", "RESTARTS", "POD")]
    below = []
    for pod in newest(pods):
        before = sum(index_of(other) == index_of(pod) for other in pods) - 1
        again = sum(
            int(c.get("restartCount", 0))
            for c in (pod.get("status") or {}).get("containerStatuses") or []
        )
        rows.append(
            (
                str(index_of(pod)),
                phase(pod),
                str(pod["spec"].get("nodeName") or "-"),
                sites.get(name_of(pod)) or "-",
                age(pod["metadata"].get("creationTimestamp")),
                str(before + again),
                name_of(pod),
            )
        )
        if wrong := trouble(pod):
            below.append(f"pod {index_of(pod)}: {wrong}")
    return table(rows) + below


def event_lines(events: list[Thing], minutes: float | None = None, most: int = 8) -> list[str]:
    """The newest events, last last, the same thing once."""
    since = time.time() - 60 * minutes if minutes else 0.0
    lines: dict[tuple[str, str, str], str] = {}
    for event in events:
        if seconds_of(when(event)) < since:
            continue
        about, reason = str(event["involvedObject"].get("name")), str(event.get("reason", ""))
        message = one_line(str(event.get("message", "")), 240)
        times = int(event.get("count") or 1)
        lines.pop((about, reason, message), None)  # the last one stands
        lines[about, reason, message] = f"{age(when(event))} ago  {about}  {reason}: {message}" + (
            f" ({times} times)" if times > 1 else ""
        )
    return [*lines.values()][-most:]
