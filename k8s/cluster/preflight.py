"""What can be told before anything is changed: each check returns sentences, and all are said at once.

What a user may not see is no fault: it is remarked on and left unchecked.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from k8s.cluster import nodes as sites
from k8s.cluster import secret
from k8s.cluster.kubectl import (
    BAD_ENVIRONMENT,
    BAD_SETTING,
    Refused,
    kubectl,
    no_namespace,
    refusal,
    short,
)
from k8s.cluster.standing import get
from k8s.cluster.target import when
from settings.config import Config

# What a launch does, and what the commands after it do: (verb, resource, subresource).
NEEDED = (
    ("get", "jobs", ""),
    ("create", "jobs", ""),
    ("patch", "jobs", ""),
    ("delete", "jobs", ""),
    ("create", "services", ""),
    ("patch", "services", ""),
    ("create", "configmaps", ""),
    ("patch", "configmaps", ""),
    ("create", "networkpolicies", ""),
    ("patch", "networkpolicies", ""),
    ("get", "persistentvolumeclaims", ""),
    ("list", "pods", ""),
    ("get", "pods", "log"),
)
GROUPS = {"jobs": "batch", "networkpolicies": "networking.k8s.io"}  # of all others it is ""
FOR_A_CLAIM = (("create", "persistentvolumeclaims", ""), ("patch", "persistentvolumeclaims", ""))
FOR_A_SECRET = (("create", "secrets", ""), ("patch", "secrets", ""))
HANDY = {
    ("get", "pods", ""): "make status says less",
    ("get", "configmaps", ""): "in what settings a Job that is there differs is not told",
    ("list", "jobs", ""): "settings of earlier launches stay behind",
    ("watch", "jobs", ""): "make stop and restart cannot wait for its end",
    ("create", "pods", "exec"): "make fetch-run cannot work",
    (
        "create",
        "pods",
        "",
    ): "make checkpoints and fetch-run cannot read the volume without a pod of the run",
    (
        "delete",
        "pods",
        "",
    ): "the pod by which make checkpoints and fetch-run read the volume stays for a while",
    ("delete", "configmaps", ""): "settings of earlier launches stay behind",
}


@dataclasses.dataclass
class Found:
    """What the checks saw, what is wrong, and what is worth a remark."""

    namespace: str
    problems: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # exit code, sentence
    remarks: list[str] = dataclasses.field(default_factory=list)
    nodes: list[sites.Node] | None = None  # None: may not be listed
    claim: dict[str, Any] | None = None  # the volume, where there is one
    namespace_is_there: bool = True
    one_node_disk: bool = False  # a new volume is of a class that only one node at a time can mount

    def refuse(self) -> None:
        """Raise all problems together."""
        if self.problems:
            code = (
                BAD_ENVIRONMENT
                if any(code == BAD_ENVIRONMENT for code, _ in self.problems)
                else BAD_SETTING
            )
            raise Refused(code, *(sentence for _, sentence in self.problems))

    def environment(self, *sentences: str) -> None:
        self.problems += [(BAD_ENVIRONMENT, sentence) for sentence in sentences]

    def setting(self, *sentences: str) -> None:
        self.problems += [(BAD_SETTING, sentence) for sentence in sentences]


def check(c: Config, namespace: str, on_gpus: bool) -> Found:
    """All checks of a cluster that has answered. on_gpus: whether pods of the wished shape are to find room."""
    found = Found(namespace)
    there = found.namespace_is_there = check_namespace(found)
    if there:
        found.claim = get_or_none(found, "pvc", c.volume)
        check_rights(found, c)
        check_keys(found, c)
        check_pull_secret(found, c)
    check_storage(found, c, storage_classes())
    if there and found.claim:
        check_claim(found, c)
    check_nodes(found, c, on_gpus)
    check_priority(found, c)
    return found


def check_namespace(found: Found) -> bool:
    """Whether there is one to look into; a user who may not see namespaces has one all the same."""
    done = kubectl("get", "namespace", found.namespace, "-o", "name")
    if "(NotFound)" in done.err:
        found.environment(no_namespace(found.namespace))
        return False
    if done.code and "(Forbidden)" not in done.err:
        raise refusal(done, ("get", "namespace"))
    return True


def get_or_none(found: Found, kind: str, name: str) -> dict[str, Any] | None:
    """The object; None where there is none, or the right to see it is lacking, which check_rights names."""
    try:
        return get(kind, name, found.namespace)
    except Refused as refused:
        if refused.kind != "rights":
            raise
        return None


# ---------------------------------------------------------------------------------------------------
# Rights
# ---------------------------------------------------------------------------------------------------


def check_rights(found: Found, c: Config) -> None:
    """What this user may not do, together."""
    needed = (
        NEEDED + (() if found.claim else FOR_A_CLAIM) + (FOR_A_SECRET if secret.to_send(c) else ())
    )
    allowed = may(found.namespace, [*needed, *HANDY])
    if not allowed:
        found.remarks.append("your rights are unchecked: the cluster does not tell them")
    if lacking := [right for right in needed if not allowed.get(right, True)]:
        found.environment(
            f"you may not {in_words(lacking)} in namespace {found.namespace}; ask its administrator for "
            "these rights, or choose another NAMESPACE or context (kubectl config get-contexts)"
        )
    found.remarks += [
        f"you may not {in_words([right])} in namespace {found.namespace}: {otherwise}"
        for right, otherwise in HANDY.items()
        if not allowed.get(right, True)
    ]


def may(namespace: str, rights: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str, str], bool]:
    """Whether this user may do each of these: what kubectl auth can-i asks, in one call. {} where nobody tells."""
    asked = [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {
                "resourceAttributes": {
                    "namespace": namespace,
                    "verb": verb,
                    "group": GROUPS.get(resource, ""),
                    "resource": resource,
                    "subresource": part,
                }
            },
        }
        for verb, resource, part in rights
    ]
    done = kubectl(
        "create",
        "--validate=false",
        "-f",
        "-",
        "-o",
        r'jsonpath={.status.allowed}{"\n"}',
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": asked}),
    )
    answers = [line.strip() == "true" for line in done.out.splitlines()]
    return dict(zip(rights, answers, strict=True)) if len(answers) == len(rights) else {}


def in_words(rights: Iterable[tuple[str, str, str]]) -> str:
    """'create, patch jobs; get pods/log'"""
    verbs: dict[str, list[str]] = {}
    for verb, resource, subresource in rights:
        verbs.setdefault(resource + (f"/{subresource}" if subresource else ""), []).append(verb)
    return ", or ".join(f"{' or '.join(said)} {what}" for what, said in verbs.items())


# ---------------------------------------------------------------------------------------------------
# Secrets and priority
# ---------------------------------------------------------------------------------------------------


def check_keys(found: Found, c: Config) -> set[str] | None:
    """The keys of the run; the names of those that the cluster has, None where that may not be seen."""
    sent = secret.to_send(c)
    there = secret.keys_there(found.namespace)
    if there is None and len(sent) < len(secret.KEYS):
        found.remarks.append(
            f"Secret {secret.NAME}: you may not see Secrets, so whether it has what is not "
            "set here is unchecked"
        )
    found.environment(*secret.problems(c, found.namespace, there))
    if c.wandb_mode == "auto" and "WANDB_API_KEY" not in {
        *sent,
        *(there if there is not None else secret.KEYS),
    }:
        found.remarks.append(
            "no WANDB_API_KEY is set here or in the cluster: the run is not sent to W&B"
        )
    return there


def check_pull_secret(found: Found, c: Config) -> None:
    """What fetches the image, where it is said."""
    if not c.image_pull_secret:
        return
    done = kubectl("get", "secret", c.image_pull_secret, "-n", found.namespace, "-o", "name")
    if "(NotFound)" in done.err:
        found.environment(
            f"IMAGE_PULL_SECRET={c.image_pull_secret}: there is no such Secret in namespace {found.namespace}; make it "
            "of a login to that registry alone: docker --config FOLDER login HOST, then kubectl create secret generic "
            f"{c.image_pull_secret} -n {found.namespace} --type=kubernetes.io/dockerconfigjson "
            "--from-file=.dockerconfigjson=FOLDER/config.json"
        )
    elif "(Forbidden)" in done.err:
        found.remarks.append(
            f"IMAGE_PULL_SECRET={c.image_pull_secret} is unchecked: you may not see Secrets"
        )


def check_priority(found: Found, c: Config) -> None:
    if not c.priority_class:
        return
    done = kubectl(
        "get", "priorityclass", "--no-headers", "-o", "custom-columns=NAME:.metadata.name"
    )
    if done.code:
        found.remarks.append(
            f"PRIORITY_CLASS={c.priority_class} is unchecked: you may not list priority classes"
        )
    elif c.priority_class not in done.out.split():
        found.setting(
            f"PRIORITY_CLASS={c.priority_class}: there is no such class; there are "
            f"{sites.some(done.out.split())}"
        )


# ---------------------------------------------------------------------------------------------------
# The volume
# ---------------------------------------------------------------------------------------------------

CLASSES = (
    "custom-columns=NAME:.metadata.name,"
    r"DEFAULT:.metadata.annotations.storageclass\.kubernetes\.io/is-default-class,BINDING:.volumeBindingMode,"
    "PROVISIONER:.provisioner"
)
# Who makes disks that one node at a time may write to; a claim for many nodes waits for ever for one of these.
OF_ONE_NODE = re.compile(r"rbd\.csi|/rbd$|\bebs\b|pd\.csi|gce-pd|disk\.csi|azure-disk|\bcinder\b")
# Who makes those that many may write to; of all others that is not known here (kubernetes-csi.github.io/docs/drivers).
OF_MANY_NODES = re.compile(
    r"cephfs|nfs|\befs\.csi|file\.csi|azure-file|filestore|lustre|\bfsx\.csi|gluster|beegfs|"
    r"\bsmb\.csi|juicefs|\bweka\b|\bgpfs\b|spectrumscale"
)


@dataclasses.dataclass(frozen=True)
class StorageClass:
    """A line of `kubectl get storageclass`."""

    name: str
    default: bool
    binding: str
    provisioner: str


def storage_classes() -> list[StorageClass] | None:
    """All classes; None where they may not be listed."""
    done = kubectl("get", "storageclass", "--no-headers", "-o", CLASSES)
    if done.code:
        return None
    rows = [line.split() for line in done.out.splitlines() if line.split()]
    return [StorageClass(row[0], row[1] == "true", row[2], row[3]) for row in rows]


def default_of(classes: Iterable[StorageClass]) -> str:
    """The cluster's default class; "" where it has none."""
    return next((one.name for one in classes if one.default), "")


def check_storage(found: Found, c: Config, listed: Sequence[StorageClass] | None) -> None:
    """The class of a volume that is to be made, and whether one that is there waits for something."""
    if listed is None and found.claim is None and c.storage_class:
        found.remarks.append(
            f"STORAGE_CLASS={c.storage_class} is unchecked: you may not list storage classes"
        )
    classes = {one.name: one for one in listed or []}
    default = default_of(listed or [])
    if found.claim is None:
        if listed is not None and c.storage_class and c.storage_class not in classes:
            found.setting(
                f"STORAGE_CLASS={c.storage_class}: there is no such class in this cluster; there are "
                f"{sites.some(classes)}"
            )
        elif listed is not None and not c.storage_class and not default:
            found.setting(
                f"STORAGE_CLASS is not set, and this cluster has no default class; there are "
                f"{sites.some(classes)}: take one that many nodes can write to, such as CephFS or NFS"
            )
        wanted = classes.get(c.storage_class or default)
        found.one_node_disk = wanted is not None and bool(OF_ONE_NODE.search(wanted.provisioner))
        found.setting(
            *of_one_node(
                {one.name: one.provisioner for one in classes.values()},
                c.storage_class or default,
                c,
            )
        )
        return
    phase = (found.claim.get("status") or {}).get("phase")
    its_class = classes.get(found.claim["spec"].get("storageClassName") or default)
    waits = its_class is not None and its_class.binding == "WaitForFirstConsumer"
    if phase == "Lost":
        found.environment(
            f"VOLUME={c.volume}: the disk behind this claim is gone, and what was on it; choose another "
            "VOLUME, and ask the cluster's administrators about the old one"
        )
    elif phase == "Pending" and listed is None:
        found.remarks.append(
            f"VOLUME={c.volume}: this claim still waits for its disk, perhaps for its first pod; "
            f"kubectl describe pvc {c.volume} -n {found.namespace} says for what"
        )
    elif phase == "Pending" and not waits:
        found.environment(
            f"VOLUME={c.volume}: this claim still waits for its disk ({last_warning(found, c.volume)}); "
            f"see kubectl describe pvc {c.volume} -n {found.namespace}, or choose another VOLUME and "
            "STORAGE_CLASS"
        )


def of_one_node(provisioners: Mapping[str, str], wanted: str, c: Config) -> list[str]:
    """What is to be said where many pods are to write to a volume that one node at a time may have."""
    if c.nodes == 1 or not OF_ONE_NODE.search(provisioners.get(wanted, "")):
        return []
    may_do = [
        name for name, provisioner in provisioners.items() if not OF_ONE_NODE.search(provisioner)
    ]
    whose = "" if c.storage_class else f", and {wanted} is this cluster's default"
    return [
        f"STORAGE_CLASS={c.storage_class}{whose}: {provisioners[wanted]} makes disks that one node at a time can "
        f"write to, and NODES={c.nodes} pods are to; of the others these may do: {sites.some(may_do)} (CephFS and "
        "NFS do)"
    ]


def last_warning(found: Found, name: str) -> str:
    """What the cluster last complained of about an object."""
    done = kubectl(
        "get",
        "events",
        "-n",
        found.namespace,
        "--field-selector",
        f"involvedObject.name={name}",
        "-o",
        "json",
    )
    events = json.loads(done.out)["items"] if done.code == 0 else []
    said = [event for event in events if event.get("type") == "Warning"]
    return short(sorted(said, key=when)[-1].get("message", "")) if said else "no reason given"


def check_claim(found: Found, c: Config) -> None:
    """A volume that is there stays as it is."""
    assert found.claim
    spec = found.claim["spec"]
    modes, its_class = spec.get("accessModes") or [], spec.get("storageClassName", "")
    if c.nodes > 1 and modes and "ReadWriteMany" not in modes:
        found.environment(
            f"VOLUME={c.volume}: this claim is {' and '.join(modes)}, and NODES={c.nodes} pods write to "
            "it; choose another VOLUME, with a STORAGE_CLASS that many nodes can write to, or NODES=1"
        )
    if c.storage_class and its_class and its_class != c.storage_class:
        found.remarks.append(
            f"VOLUME={c.volume} is there with STORAGE_CLASS={its_class}, not {c.storage_class}, and "
            "is left as it is; for another choose another VOLUME"
        )
    size = claim_bytes(found.claim)
    if size is not None and size < c.volume_gb * 2**30:
        found.remarks.append(
            f"VOLUME={c.volume} is there with {size / 2**30:.0f} GiB, not VOLUME_GB={c.volume_gb}, "
            "and is left as it is"
        )


def claim_bytes(claim: dict[str, Any]) -> float | None:
    """What a claim has, or where that is not told, what it asks for."""
    asked = (claim["spec"].get("resources") or {}).get("requests") or {}
    text = ((claim.get("status") or {}).get("capacity") or {}).get("storage") or asked.get(
        "storage"
    )
    return sites.quantity(str(text)) if text else None


# ---------------------------------------------------------------------------------------------------
# Nodes
# ---------------------------------------------------------------------------------------------------


def check_nodes(found: Found, c: Config, on_gpus: bool) -> None:
    """Whether the wished shape could find room."""
    try:
        found.nodes = sites.nodes()
    except Refused as refused:
        if refused.kind != "rights":
            raise
        found.remarks.append("GPU_PRODUCTS and SITE are unchecked: you may not list nodes")
        return
    if on_gpus:
        found.setting(*sites.problems(found.nodes, c))
        warnings = [sites.without_products(found.nodes, c), sites.waits_for(found.nodes, c)]
        found.remarks += filter(None, warnings)


def site_of(nodes: Sequence[sites.Node] | None, node: str) -> str:
    """The zone of a node, by its name; "" where that is not known."""
    return next((known.zone for known in nodes or [] if known.name == node), "")
