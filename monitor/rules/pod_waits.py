"""Why a pod does not run yet: no node, its image, its volume, its container; how long that may take, and what to try.

Messages are the scheduler's (its filters in their order: taints, then affinity, then room, so that a node which lacks
room is one of those that were wished for), the kubelet's, and the image store's.
"""

import dataclasses
import re

from k8s.cluster.placement import CANNOT_FETCH, CANNOT_START
from k8s.cluster.words import one_line, short_time
from monitor.facts import Pod

PENDING_MINUTES = 10.0  # a pod may wait so long for a node, or on it for its volume
PULL_MINUTES = 20.0  # its image may take so long to arrive
SETTLE_S = 60.0  # for a scheduler, or nodes that are made on demand, to think again
MOUNT_S = 120.0  # in which a volume is often mounted at a second attempt
FOR_SYSTEM = re.compile(
    r"node\.kubernetes\.io/|node-role\.kubernetes\.io/"
)  # taints that pods rightly do not tolerate
DENIED = r"unauthorized|authentication required|denied|forbidden|no basic auth|insufficient_scope|authorization failed"
ABSENT = r"not found|manifest unknown|name unknown|does not exist|code = NotFound"
BUSY = r"toomanyrequests|too many requests|rate limit|429"
CUT_OFF = r"no such host|i/o timeout|connection refused|TLS handshake|deadline exceeded|network is unreachable"
WAITING = ("Pending", "Starting")


@dataclasses.dataclass(frozen=True)
class Wait:
    """name: of the fault that it is after so many seconds; since: Unix seconds, None where not known."""

    name: str
    text: str
    next: str
    since: float | None = None
    limit_s: float = 0.0
    failing: bool = False

    def is_fault(self, now: float) -> bool:
        return self.limit_s == 0 or (self.since is not None and now - self.since >= self.limit_s)

    def age(self, now: float) -> str:
        return f", for {short_time(now - self.since)}" if self.since is not None else ""


def doing(pod: Pod, now: float) -> str:
    """What a pod that does not run is at, and for how long; "" of one that runs or is over."""
    wait = waiting(pod)
    if wait is None:
        return ""
    patience = (
        " (a large image takes minutes; it is not stuck)"
        if wait.name == "pulling" and not wait.is_fault(now)
        else ""
    )
    return f"{wait.text}{wait.age(now)}{patience}"


def waiting(pod: Pod) -> Wait | None:
    """What keeps a pod from running; None where it runs, leaves or is over."""
    if pod.phase not in WAITING:
        return None
    if pod.waiting in CANNOT_FETCH:
        return fetching(pod)
    if pod.waiting in CANNOT_START:
        said = f": {one_line(pod.message, 200)}" if pod.message else ""
        return Wait(
            "not-started",
            f"its container cannot be started ({pod.waiting}{said})",
            "make restart makes its settings anew; make logs ONLY=errors where it has said something",
            failing=True,
        )
    if not pod.node:
        return without_node(pod)
    if pod.pulling_since is not None and (pod.pulled is None or pod.pulled < pod.pulling_since):
        return Wait(
            "pulling",
            f"fetches its image {pod.image}",
            f"kubectl describe pod {pod.name} says how it goes; "
            "a smaller image, or a registry that is nearer, comes sooner",
            pod.pulling_since,
            60 * PULL_MINUTES,
        )
    if mount := next(
        (
            text
            for text in reversed(pod.said)
            if text.startswith(("FailedMount:", "FailedAttachVolume:", "FailedMapVolume:"))
        ),
        "",
    ):
        return mounting(pod, mount.partition(": ")[2])
    if not pod.said and pod.pulled is None:  # no event can be read
        return Wait(
            "pending",
            "its image is being fetched, or its volume mounted",
            describe(pod),
            pod.scheduled or pod.created,
            60 * max(PULL_MINUTES, PENDING_MINUTES),
        )
    return Wait(
        "pending",
        "its container is being made",
        describe(pod),
        pod.scheduled or pod.created,
        60 * PENDING_MINUTES,
    )


def describe(pod: Pod) -> str:
    return f"kubectl describe pod {pod.name} says more; make restart takes it to another node"


# ---------------------------------------------------------------------------------------------------
# A node
# ---------------------------------------------------------------------------------------------------


def without_node(pod: Pod) -> Wait:
    """Why the scheduler finds no node."""
    said = pod.unschedulable.partition(" preemption:")[0].strip().rstrip(".")
    if wait := claim(pod, said):
        return wait
    lacking = {
        what: int(count) for count, what in re.findall(r"(\d+) Insufficient ([\w./-]+)", said)
    }
    asks, patience = pod.asks, 60 * PENDING_MINUTES
    gpus = lacking.get(asks.resource, 0)
    if gpus:
        who = (
            "the one node that would do has not"
            if gpus == 1
            else f"none of {gpus} nodes that would do has"
        )
        return Wait(
            "no-free-gpu",
            f"no room: {who} {asks.gpus} {asks.resource} free",
            "make sites shows where GPUs are; more GPU_PRODUCTS, another SITE or fewer NODES with make "
            "restart, or wait",
            pod.created,
            patience,
        )
    if lacking:
        settings = {
            "cpu": "GPUS_PER_NODE",
            "memory": "POD_MEMORY_GB",
        }
        less = [settings[what] for what in lacking if what in settings]
        return Wait(
            "no-room",
            f"no room: nodes that would do lack {', '.join(lacking)}",
            f"a smaller {' or '.join(less)} with make restart, or wait" if less else describe(pod),
            pod.created,
            patience,
        )
    taints = [
        f"{key}={value}" if value else key
        for key, value in re.findall(r"taint \{([^:}]+): ?([^}]*)\}", said)
        if not FOR_SYSTEM.match(key)
    ]
    tolerate = f"TOLERATIONS={','.join(dict.fromkeys(taints))}" if taints else ""
    if re.search(r"didn't match Pod's node affinity|didn't match node selector", said):
        products = f", {' or '.join(asks.products)}" if asks.products else ""
        return Wait(
            "no-such-gpu",
            f"no node that takes pods is what is asked for{products} ({one_line(said, 200)})",
            "make sites lists the GPUs there are; then GPU_PRODUCTS=... or SITE=... with make restart"
            + (f"; {tolerate} if nodes with that taint have them" if tolerate else ""),
            pod.created,
            SETTLE_S,
            failing=True,
        )
    if taints:
        return Wait(
            "taints",
            f"the nodes keep pods away that do not tolerate their taints ({one_line(said, 200)})",
            f"{tolerate} with make restart, if you may use these nodes",
            pod.created,
            SETTLE_S,
            failing=True,
        )
    why = one_line(said, 300) or "the scheduler has given no reason yet"
    return Wait(
        "pending",
        f"finds no node ({why})",
        "make sites shows which nodes take pods",
        pod.created,
        patience,
    )


def claim(pod: Pod, said: str) -> Wait | None:
    """Where it is the volume that keeps it from having a node."""
    gone = re.search(
        r'persistentvolumeclaim "([^"]+)" (?:not found|is being deleted|bound to non-existent)',
        said,
    )
    if gone:
        return Wait(
            "volume",
            f"its volume's claim {gone[1]} is not there",
            f"make restart VOLUME={gone[1]} makes it, of VOLUME_GB; kubectl get pvc lists claims",
            pod.created,
            SETTLE_S,
            failing=True,
        )
    if re.search(
        r"unbound (?:immediate )?PersistentVolumeClaims|didn't find available persistent volumes",
        said,
    ):
        return Wait(
            "volume",
            f"claim {pod.asks.claim} has no storage yet (it is not bound)",
            f"kubectl describe pvc {pod.asks.claim} says why; another STORAGE_CLASS wants another VOLUME",
            pod.created,
            MOUNT_S,
        )
    if re.search(r"volume node affinity conflict|volume affinity", said):
        return Wait(
            "volume",
            f"volume {pod.asks.claim} lies where the nodes that would do cannot reach it",
            "the SITE of the volume, or a new VOLUME where the GPUs are, with make restart",
            pod.created,
            SETTLE_S,
            failing=True,
        )
    return None


# ---------------------------------------------------------------------------------------------------
# On its node
# ---------------------------------------------------------------------------------------------------


def mounting(pod: Pod, said: str) -> Wait:
    """Why a volume is not mounted. said: by the kubelet."""
    since = pod.scheduled or pod.created
    if re.search(r"multi-attach", said, re.IGNORECASE):
        return Wait(
            "volume",
            f"volume {pod.asks.claim} is held by another node, and allows one at a time",
            "a STORAGE_CLASS of which volumes can be shared (ReadWriteMany), with another VOLUME and make "
            "restart; where the other pod is just leaving, wait",
            since,
            MOUNT_S,
        )
    if gone := re.search(r'(secret|configmap) "([^"]+)" not found', said):
        return Wait(
            "not-started",
            f"its {gone[1]} {gone[2]} is not there",
            "make restart creates it again",
            since,
            SETTLE_S,
            failing=True,
        )
    return Wait(
        "volume",
        f"its volume cannot be mounted ({one_line(said, 200)})",
        f"kubectl describe pvc {pod.asks.claim} says how it is; make restart may take another node",
        since,
        MOUNT_S,
    )


def fetching(pod: Pod) -> Wait:
    """Why an image cannot be fetched."""
    told = [
        *filter(None, [pod.message]),
        *(
            text
            for text in reversed(pod.said)
            if text.startswith(("Failed:", "FailedToRetrieve", "BackOff:"))
        ),
    ]
    image = pod.image
    if pod.waiting == "InvalidImageName":
        return Wait(
            "image-pull",
            f"IMAGE={image} is not the name of an image",
            "IMAGE=registry/name:tag with make restart",
            failing=True,
        )
    secret = any(text.startswith("FailedToRetrieveImagePullSecret") for text in told)
    for text in told:
        if re.search(BUSY, text, re.IGNORECASE):
            return Wait(
                "image-pull",
                f"the registry gives image {image} no more for now: too many were fetched",
                "IMAGE_PULL_SECRET=NAME of a login has a limit of its own; or make push IMAGE=... to another "
                "registry, then make restart",
            )
        if re.search(DENIED, text, re.IGNORECASE):
            login = pod.asks.secret
            how = "without a login"
            if secret:
                how = f"Secret {login} is not in the namespace"
            elif login:
                how = f"with the login of Secret {login}"
            return Wait(
                "image-pull",
                f"the registry does not give image {image} ({how}), or has none of that name",
                "make the image public, or IMAGE_PULL_SECRET=NAME (kubectl create secret docker-registry "
                "NAME ...); make push if it is not there; then make restart",
                failing=True,
            )
        if re.search(r"no match for platform", text):
            return Wait(
                "image-pull",
                f"image {image} is not made for the node's processor",
                "make image on a machine of that kind, and make push",
                failing=True,
            )
        if re.search(r"no space left", text):
            return Wait(
                "image-pull",
                f"the disk of node {pod.node} is full, so image {image} does not fit",
                "make restart takes another node; tell its administrator",
            )
        if re.search(ABSENT, text, re.IGNORECASE) and not re.search(r"no such host", text):
            return Wait(
                "image-pull",
                f"image {image} is not in the registry",
                f"make push IMAGE={image}, then it is fetched within minutes",
                failing=True,
            )
        if re.search(CUT_OFF, text):
            return Wait(
                "image-pull",
                f"node {pod.node} does not reach the registry of image {image}",
                "make restart takes another node; see that the registry's name is right",
            )
    said = f": {one_line(told[0], 200)}" if told else ""
    return Wait(
        "image-pull",
        f"image {image} cannot be fetched ({pod.waiting}{said})",
        "make push IMAGE=... puts it there, IMAGE_PULL_SECRET names a login",
    )
