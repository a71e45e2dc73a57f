"""Looks at the cluster that kubectl knows, with the rights that a user has: what stands in the way of a launch.

    python: findings(cluster_config()[0])       k8s/cluster/job_spec.py makes these settings

The checks of make train-8xa100 (k8s/cluster/preflight.py) one by one, and what it does not look at: quota, limits, which GPUs are
free, whether the registry has the image. Nothing is changed, and each check is one call of kubectl, or two where a
right is lacking for the first.
"""

import contextvars
import dataclasses
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from doctor import cluster_image, cluster_quota, cluster_room
from doctor.cluster_image import Ask, ask
from k8s.cluster import placement, preflight, secret, standing
from k8s.cluster.image_ref import image_of
from k8s.cluster.kubectl import (
    ANSWER_S,
    BAD_SETTING,
    Context,
    Refused,
    context,
    keeping_to,
    kubectl,
    refusal,
)
from k8s.cluster.nodes import GPU, fit_pod, read_offer
from k8s.cluster.preflight import Found
from k8s.cluster.target import Target, name_of
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding, from_sentence

SKEW = 1  # minor versions that kubectl may be behind the server: kubernetes.io/releases/version-skew-policy
AT_ONCE = 4  # calls of kubectl, most of whose time is spent waiting for the server


@dataclasses.dataclass(frozen=True)
class There:
    """What several checks ask of: the settings, and what the namespace has of this run. None: not there, or the right
    to see it is lacking."""

    c: Config
    namespace: str
    context: str
    claim: dict[str, Any] | None
    job: dict[str, Any] | None
    pods: list[dict[str, Any]]  # of that Job, as far as they may be listed
    gpu: str = GPU  # the name by which pods ask for GPUs

    @property
    def target(self) -> Target:
        return Target(self.context, self.namespace, self.c.job_name)

    @property
    def on_gpus(self) -> bool:
        return self.c.device != "cpu"


def has_context() -> bool:
    """Whether there is a kubectl that knows a context, whether or not its server answers. Says nothing."""
    try:
        done = kubectl("config", "current-context", timeout=ANSWER_S)
    except (Refused, OSError):
        return False
    return done.code == 0 and bool(done.out.strip())


def findings(c: Config, asking: Ask = ask) -> list[Finding]:
    """All findings of the context in use. A cluster that cannot be reached is one FAIL, and one WARN where WHERE=auto:
    who trains here may have an old context. asking: how a registry is asked."""
    try:
        here = context()
        with keeping_to(here):
            found = reached(here)
            return found + looked(c, here, asking)
    except Refused as refused:
        level, aside = (
            (WARN, "; WHERE=local leaves the cluster out") if c.where == "auto" else (FAIL, "")
        )
        return [from_sentence("context", level, refused.sentence + aside, refused.code)]


def looked(c: Config, here: Context, asking: Ask) -> list[Finding]:
    """The findings of a cluster that has answered."""
    namespace = c.namespace or here.namespace
    found, is_there = of_namespace(namespace)
    if is_there:
        there = look(c, namespace, here.name)
    else:
        there = There(c, namespace, here.name, None, None, [])
    if there.on_gpus:
        offer = read_offer(c)
        there = dataclasses.replace(there, c=fit_pod(c, offer), gpu=offer.gpu or GPU)
    asked = (
        [
            ("rights", rights),
            ("quota", cluster_limits),
            ("secret", keys),
            ("pull-secret", pull_secret),
            ("job", job),
        ]
        if is_there
        else []
    )
    of_cluster = [("gpu-products", room), ("storage", storage), ("priority", priority)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [
            pool.submit(contextvars.copy_context().run, guarded, name, check, there)
            for name, check in asked + of_cluster
        ]
        running.append(pool.submit(image, there, asking))
        return found + [finding for future in running for finding in future.result()]


def guarded(name: str, check: Callable[[There], list[Finding]], there: There) -> list[Finding]:
    """What a check finds; its complaint where the cluster refuses it."""
    try:
        return check(there)
    except Refused as refused:
        return [
            from_sentence(
                name, WARN if refused.kind == "rights" else FAIL, refused.sentence, refused.code
            )
        ]


def of(name: str, found: Found, fine: str = "") -> list[Finding]:
    """What a check of k8s/cluster/preflight.py has collected; if nothing, that it is fine."""
    failed = [from_sentence(name, FAIL, sentence, code) for code, sentence in found.problems]
    remarks = [from_sentence(name, WARN, sentence) for sentence in found.remarks]
    return failed + remarks or ([Finding(name, PASS, fine)] if fine else [])


# ---------------------------------------------------------------------------------------------------
# kubectl, context, namespace
# ---------------------------------------------------------------------------------------------------


def reached(here: Context) -> list[Finding]:
    """kubectl and the server, both by one call. Raises Refused where the server does not answer."""
    began = time.perf_counter()
    done = kubectl("version", "-o", "json", f"--request-timeout={ANSWER_S}s")
    took_ms = 1000 * (time.perf_counter() - began)
    if done.code and "(Forbidden)" not in done.err:  # who may not see its version still reached it
        raise refusal(done, ("version",))
    versions = json.loads(done.out)
    client, server = (versions.get(side) or {} for side in ("clientVersion", "serverVersion"))
    return [
        of_versions(client, server),
        Finding(
            "context",
            PASS,
            f"{here.name} at {here.server} answers, in {took_ms:.0f} ms with kubectl's own start",
        ),
    ]


def of_versions(client: dict[str, Any], server: dict[str, Any]) -> Finding:
    """Whether kubectl is recent enough for the server. Each: major, minor and gitVersion."""
    told_here, told_there = (
        str(side.get("gitVersion", "of unknown version")) for side in (client, server)
    )
    ours, theirs = minor_of(client), minor_of(server)
    if ours is None or theirs is None:
        return Finding(
            "kubectl",
            WARN,
            f"kubectl {told_here}, server {told_there}: whether they go together is not known",
            "kubectl version says more",
        )
    if theirs - ours > SKEW:
        return Finding(
            "kubectl",
            WARN,
            f"kubectl {told_here} is {theirs - ours} minor versions older than the server "
            f"({told_there}), and {SKEW} is supported",
            "make setup-dev puts a newer one beside python, and one on PATH goes before it",
        )
    return Finding("kubectl", PASS, f"kubectl {told_here}, server {told_there}")


def minor_of(side: dict[str, Any]) -> int | None:
    """The minor version, without the + that providers put behind it."""
    text = str(side.get("minor", "")).rstrip("+")
    return int(text) if side.get("major") == "1" and text.isdigit() else None


def of_namespace(namespace: str) -> tuple[list[Finding], bool]:
    """Also whether it is there."""
    found = Found(namespace)
    is_there = preflight.check_namespace(found)
    return of("namespace", found, namespace), is_there


def look(c: Config, namespace: str, context_name: str) -> There:
    """What the namespace has of this run."""
    found, target = Found(namespace), Target(context_name, namespace, c.job_name)
    claim = preflight.get_or_none(found, "pvc", c.volume)
    job = preflight.get_or_none(found, "job", c.job_name)
    try:
        pods = target.pods() if job else []
    except Refused as refused:
        if refused.kind != "rights":
            raise
        pods = []
    return There(c, namespace, context_name, claim, job, pods)


# ---------------------------------------------------------------------------------------------------
# What make train-8xa100 checks as well
# ---------------------------------------------------------------------------------------------------


def rights(there: There) -> list[Finding]:
    found = Found(there.namespace, claim=there.claim)
    preflight.check_rights(found, there.c)
    return of("rights", found, "you may do all that a launch and the commands after it do")


def storage(there: There) -> list[Finding]:
    """The claim, or the class by which it will be made."""
    c, claim, found = there.c, there.claim, Found(there.namespace, claim=there.claim)
    classes = preflight.storage_classes()
    preflight.check_storage(found, c, classes)
    if claim:
        preflight.check_claim(found, c)
        size = preflight.claim_bytes(claim)
        return of(
            "storage",
            found,
            f"VOLUME={c.volume} is there: "
            f"{f'{size / 2**30:.0f} GiB' if size is not None else 'size unknown'}, "
            f"{' and '.join(claim['spec'].get('accessModes') or ['for whom unknown'])}",
        )
    its_class = c.storage_class or preflight.default_of(classes or [])
    chosen = next((one for one in classes or [] if one.name == its_class), None)
    if chosen is None:
        if not found.problems and not found.remarks:
            found.remarks.append(
                "storage classes may not be listed, so whether there is a default one is unchecked; "
                "set STORAGE_CLASS to one that the cluster's documentation names"
            )
        return of("storage", found)
    if (
        c.nodes > 1
        and not found.problems
        and not preflight.OF_MANY_NODES.search(chosen.provisioner)
    ):
        found.remarks.append(
            f"STORAGE_CLASS={its_class}: whether {c.nodes} pods may write to what "
            f"{chosen.provisioner} makes is not known here; CephFS and NFS let them"
        )
    default = "" if c.storage_class else " (the cluster's default)"
    return of(
        "storage",
        found,
        f"VOLUME={c.volume} will be made: {c.volume_gb} GiB of class {its_class}{default}, by "
        f"{chosen.provisioner}",
    )


def keys(there: There) -> list[Finding]:
    """Names of keys only; no value is asked for."""
    c, found = there.c, Found(there.namespace)
    known = preflight.check_keys(found, c)
    here, inside = sorted(secret.to_send(c)), sorted(known or ())
    said = [f"{' and '.join(here)} from here"] if here else []
    said += [f"{' and '.join(inside)} in Secret {secret.NAME}"] if inside else []
    said += (
        [] if "HF_TOKEN" in (*here, *inside) else ["no HF_TOKEN, which only gated data sets need"]
    )
    return of("secret", found, ", ".join(said))


def pull_secret(there: There) -> list[Finding]:
    found = Found(there.namespace)
    preflight.check_pull_secret(found, there.c)
    name = there.c.image_pull_secret
    return of("pull-secret", found, f"IMAGE_PULL_SECRET={name} is there" if name else "")


def priority(there: There) -> list[Finding]:
    found, name = Found(there.namespace), there.c.priority_class
    preflight.check_priority(found, there.c)
    return of("priority", found, f"PRIORITY_CLASS={name} is there" if name else "")


def job(there: There) -> list[Finding]:
    """The Job that is there already, and what the cluster complains of about it."""
    c, theirs = there.c, there.job
    if theirs is None:
        return []
    stands = standing.without_comparing(
        theirs, there.namespace, "make restart"
    ) or standing.Standing("at work", run=standing.run_of(theirs))
    if whose := standing.of_another_run(stands, c.job_name, there.namespace, c.run_name):
        return [from_sentence("job", FAIL, whose, BAD_SETTING)]
    if stands.sentence:
        return [from_sentence("job", WARN, stands.sentence)]
    read = [placement.read(pod) for pod in there.pods]
    run = sum(pod.state == "Running" for pod in read)
    text = f"Job {c.job_name} is there and trains run {stands.run}: {run} of {c.nodes} pods run"
    if run >= c.nodes:
        return [Finding("job", PASS, text)]
    events = there.target.events([c.job_name, *(name_of(pod) for pod in there.pods)])
    warned = [str(event.get("message", "")) for event in events if event.get("type") == "Warning"]
    waits = next((pod.message for pod in read if pod.message), "") or (warned[-1] if warned else "")
    return [
        Finding(
            "job",
            WARN,
            text + (f" ({waits})" if waits else ""),
            f"make status RUN_NAME={c.run_name} WHERE=cluster says more",
        )
    ]


# ---------------------------------------------------------------------------------------------------
# What only the doctor looks at
# ---------------------------------------------------------------------------------------------------


def cluster_limits(there: There) -> list[Finding]:
    """Quotas and limits of the namespace."""
    return cluster_quota.findings(
        there.c,
        there.namespace,
        there.pods,
        has_job=there.job is not None,
        has_claim=there.claim is not None,
        gpu=there.gpu,
    )


def room(there: There) -> list[Finding]:
    return cluster_room.findings(there.c, there.namespace, there.gpu)


def image(there: There, asking: Ask) -> list[Finding]:
    try:
        return [cluster_image.finding(image_of(there.c), there.c.image_pull_secret, asking)]
    except Refused as refused:
        return [from_sentence("image", FAIL, refused.sentence, refused.code)]
