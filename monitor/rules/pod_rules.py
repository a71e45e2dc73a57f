"""What is wrong with a run's Job and its pods, in sentences. Pure functions of what was seen.

What befalls all pods alike (their image, their volume, room for them) is one fault, which names them; what befalls one
is a fault of its own. A pod that only takes its time is none before a limit: pod_waits.doing() says what it is at.
Where Kubernetes does not answer, pods are judged as of its last answer.
"""

import re
from collections.abc import Iterator, Sequence

from k8s.cluster import words
from monitor.facts import Cluster, Fault, Pod, Seen
from monitor.rules.pod_waits import waiting

CRASH_MINUTES, CRASHES = 30.0, 3  # so many pods of an index that ended in this time are a loop
RECENT_MINUTES = 60.0  # how long it is told of a pod that was killed for memory and has a successor
NODE_LOST = ("DeletionByTaintManager", "DeletionByPodGC", "NodeLost")
PREEMPTED = ("PreemptionByScheduler", "Preempting", "Preempted")


def pod_faults(seen: Seen) -> list[Fault]:
    """All that is wrong with the Job, then with its pods; [] of a run that is in no cluster."""
    cluster = seen.cluster
    if cluster is None:
        return []
    found = [*of_kubernetes(seen, cluster), *of_job(seen, cluster)]
    if cluster.ended or is_of_another(seen, cluster):
        return found
    now = cluster.asked if cluster.problem and cluster.asked is not None else seen.now
    if not cluster.job.startswith(("being stopped", "suspended")):
        found += [*not_made(cluster), *waits(cluster, now), *ended_badly(cluster, now)]
    return [*found, *taken_away(cluster)]


# ---------------------------------------------------------------------------------------------------
# Kubernetes and the Job
# ---------------------------------------------------------------------------------------------------


def of_kubernetes(seen: Seen, cluster: Cluster) -> Iterator[Fault]:
    """What could not be asked, or read."""
    if cluster.problem:
        text, following = halves(
            cluster.problem, "kubectl get pods shows whether the cluster answers"
        )
        old = (
            f" (what is known of the pods is {words.short_time(seen.now - cluster.asked)} old)"
            if cluster.asked is not None
            else ""
        )
        yield Fault("cluster", text + old, following)
    if cluster.unread:
        text, following = halves(cluster.unread, "make status says how the pods are")
        yield Fault("logs-unread", f"what the pods say is not known: {text}", following)


def halves(sentence: str, otherwise: str) -> tuple[str, str]:
    """What is the matter, and what to do about it, of a sentence of k8s/."""
    text, _, following = sentence.partition("; ")
    return text, following or otherwise


def is_of_another(seen: Seen, cluster: Cluster) -> bool:
    return cluster.run not in ("", seen.run)


def of_job(seen: Seen, cluster: Cluster) -> Iterator[Fault]:
    """What is wrong with the Job itself."""
    if is_of_another(seen, cluster):
        yield Fault(
            "other-run",
            f"Job {cluster.job_name} in {cluster.words} is that of run {cluster.run}, and this "
            f"watches {seen.run}",
            f"make monitor RUN_NAME={cluster.run} for that one; another JOB_NAME sends "
            f"{seen.run} beside it",
        )
    elif cluster.wanted_pods == 0 and not cluster.problem:
        yield Fault(
            "no-job",
            f"Job {cluster.job_name} in {cluster.words} {cluster.job}",
            "make train-8xa100 sends it, and a run that is on the volume goes on; make status says how far "
            "it was",
        )
    elif cluster.ended == "Failed":
        code = cluster.exit_code
        pod = next((pod for pod in cluster.pods if pod.exit_code == code and pod.trouble), None)
        said = re.sub(r"^exit code \d+ \([^)]*\)(: |$)", "", pod.trouble) if pod else ""
        yield Fault(
            "job-failed",
            f"Job {cluster.job_name} has {cluster.job}" + (f": {said}" if said else ""),
            words.HINT.get(
                code or 1,
                "make logs ONLY=errors shows why; then make restart, which goes on from "
                "the last checkpoint",
            ),
            failing=True,
        )
    elif cluster.job.startswith("suspended"):
        yield Fault(
            "suspended",
            f"Job {cluster.job_name} is {cluster.job}",
            f'kubectl patch job {cluster.job_name} -p \'{{"spec":{{"suspend":false}}}}\' lets it go on',
        )


def not_made(cluster: Cluster) -> Iterator[Fault]:
    """Pods that Kubernetes lets not be made."""
    if not cluster.quota:
        return
    missing = (
        f"{cluster.wanted_pods - len(cluster.pods)} of {cluster.wanted_pods} pods may not be made"
    )
    if found := re.search(r"exceeded quota: .*", cluster.quota):
        yield Fault(
            "quota",
            f"{missing}: the namespace has {found[0]}",
            "kubectl describe quota shows it; ask for less (NODES, GPUS_PER_NODE, POD_MEMORY_GB) "
            "with make restart, for a larger quota, or wait until other jobs of the namespace end",
        )
    else:
        yield Fault(
            "not-made",
            f"{missing}: {cluster.quota}",
            f"kubectl describe job {cluster.job_name} says more; "
            "mend the setting that it names, then make restart",
            failing=True,
        )


# ---------------------------------------------------------------------------------------------------
# Pods
# ---------------------------------------------------------------------------------------------------


def name_of(pods: Sequence[Pod]) -> str:
    """pod 1; pods 1, 2 and 3."""
    if len(pods) == 1:
        return f"pod {pods[0].index}" if pods[0].index >= 0 else f"pod {pods[0].name}"
    numbers = [str(pod.index) for pod in pods]
    return f"pods {', '.join(numbers[:-1])} and {numbers[-1]}"


def waits(cluster: Cluster, now: float) -> Iterator[Fault]:
    """Pods that wait for what does not come, those that wait for the same together."""
    found: dict[tuple[str, str], list[Pod]] = {}
    for pod in cluster.pods:
        if (wait := waiting(pod)) and wait.is_fault(now):
            found.setdefault((wait.name, wait.text), []).append(pod)
    for (name, text), pods in found.items():
        wait = waiting(pods[0])
        assert wait is not None
        about = "" if all(name != other for other, told in found if told != text) else name_of(pods)
        yield Fault(name, f"{name_of(pods)}: {text}{wait.age(now)}", wait.next, about, wait.failing)


def ended_badly(cluster: Cluster, now: float) -> Iterator[Fault]:
    """Pods that were killed for memory, that end again and again, and that have just ended."""
    for pod in cluster.pods:
        about, before = name_of([pod]), pod.before
        recent = sum(now - made <= 60 * CRASH_MINUTES for made in pod.made)
        killed = (
            pod
            if pod.oom_killed
            else before
            if before and before.oom_killed and now - (before.ended or 0.0) <= 60 * RECENT_MINUTES
            else None
        )
        if killed:
            again = (
                f", {recent} pods of it in {CRASH_MINUTES:.0f} minutes" if recent > CRASHES else ""
            )
            when = (
                f" {words.short_time(now - killed.ended)} ago" if killed.ended is not None else ""
            )
            most = f" ({killed.asks.memory})" if killed.asks.memory else ""
            yield Fault(
                "out-of-memory",
                f"{about} was killed{when}: it used more memory than POD_MEMORY_GB allows"
                f"{most}{again}",
                "a larger POD_MEMORY_GB with make restart",
                about,
                failing=recent > CRASHES,
            )
        elif (
            recent > CRASHES and before and not before.disrupted
        ) or pod.waiting == "CrashLoopBackOff":
            last = (
                before.trouble.partition("; ")[0]
                if before and before.trouble
                else pod.trouble or "not known"
            )
            yield Fault(
                "crash-loop",
                f"{about} ends again and again: "
                + (
                    f"{recent} pods in {CRASH_MINUTES:.0f} minutes"
                    if recent > CRASHES
                    else f"{pod.restarts} restarts"
                )
                + f"; the last one: {last}",
                logs_of(pod),
                about,
                failing=True,
            )
        elif pod.phase == "Failed" and not pod.disrupted and pod.trouble:
            code = pod.exit_code or 1
            final = words.HINT.get(code)
            yield Fault(
                "pod-failed",
                f"{about} has ended: {pod.trouble.partition('; ')[0]}"
                + (", and with it the Job" if final else "; the Job makes another"),
                final or logs_of(pod),
                about,
                failing=final is not None,
            )


def logs_of(pod: Pod) -> str:
    return f"make logs NODE_RANK={max(pod.index, 0)} ONLY=errors shows why"


def taken_away(cluster: Cluster) -> Iterator[Fault]:
    """Pods that their node, or the scheduler, took away."""
    for pod in cluster.pods:
        about = name_of([pod])
        force = re.search(r"kubectl delete pod .*", pod.trouble)
        why = pod.trouble.partition("; ")[0].partition(": kubectl")[0]
        if force or pod.disrupted in NODE_LOST or pod.phase == "Unknown":
            yield Fault(
                "node-lost",
                f"{about} on {pod.node or 'its node'}: {why or 'its node does not answer'}",
                force[0]
                if force
                else "nothing to do: the Job makes another elsewhere, which goes on from "
                "the last checkpoint; make status says when",
                about,
            )
        elif pod.disrupted in PREEMPTED:
            yield Fault(
                "preempted",
                f"{about}: {why}",
                "nothing to do: the Job makes another, which goes on from the "
                "last checkpoint when there is room; a PRIORITY_CLASS with make restart keeps its place",
                about,
            )
        elif pod.disrupted and pod.phase != "Succeeded":
            following = (
                "nothing to do: the Job makes another, which goes on from the last checkpoint"
            )
            if re.search("ephemeral|emptyDir|disk", pod.trouble):
                size = f" ({pod.asks.disk})" if pod.asks.disk else ""
                following = (
                    f"put less into /tmp: a pod's disk has a fixed size{size}; then make restart"
                )
            elif "memory" in pod.trouble:
                size = f" (it is {pod.asks.memory})" if pod.asks.memory else ""
                following = f"a larger POD_MEMORY_GB{size} with make restart"
            yield Fault("evicted", f"{about}: {why}", following, about)
