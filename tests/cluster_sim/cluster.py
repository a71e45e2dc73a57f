"""A cluster in memory, for the real kubectl: an API server on loopback, what tests ask of it and do to it.

It holds to what an API server does (strict validation, defaults, owners of fields, immutable fields, versions, watches,
tables, logs, exec) as far as the commands of this repository can tell. Left out: quotas are listed and not counted,
claims that are in use can be deleted, and access is refused by Cluster.forbid() rather than by roles.
"""

import copy
import json
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.cluster_sim import rules
from tests.cluster_sim.api import handler_for
from tests.cluster_sim.controller import JobController
from tests.cluster_sim.kinds import KINDS, Kind, kind_of
from tests.cluster_sim.store import Key, Refusal, Store, Thing

NAMESPACE, USER = "lab", "lab-user"
ENDED = ("Succeeded", "Failed")


class Request(NamedTuple):
    """What kubectl asked."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes


def echo(pod: str, container: str, argv: list[str], **_: bytes) -> tuple[int, bytes]:
    """What exec does until a test or the kubelet puts something else there."""
    return 0, f"{pod} {container}: {' '.join(argv)}\n".encode()


class Cluster:
    """The API server, and what a test sees and does behind its back."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.store = Store()
        self.requests: list[Request] = []
        self.forbidden: set[tuple[str, str]] = set()
        self.nodes_list_only = (
            True  # as on NRP: kubectl get nodes -L works, -o yaml and describe do not
        )
        self.own_namespace_only = False  # kubectl get -A is refused
        self.login_expired = False
        self.logs: dict[str, str | bytes] = {}
        self.log_files: dict[str, Path] = {}  # the kubelet's
        self.exec: Callable[..., tuple[Any, ...]] = echo
        self.kubelet: Any = None
        self.controller: Any = None
        self.closing = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(self))
        self.server.daemon_threads = True
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self.thread.start()
        # GOGC: kubectl lives for a moment, and a fifth of its time would go into collecting garbage
        self.env = {
            "KUBECONFIG": str(self.kubeconfig()),
            "KUBECACHEDIR": str(folder / "kube-cache"),
            "GOGC": "off",
        }
        self.put({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": NAMESPACE}})
        self.put(
            {
                "kind": "StorageClass",
                "apiVersion": "storage.k8s.io/v1",
                "provisioner": "test.example.org",
                "metadata": {"name": "standard", "annotations": {rules.DEFAULT_CLASS: "true"}},
            }
        )

    def kubeconfig(self) -> Path:
        path = self.folder / "kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [
                        {
                            "name": "test",
                            "cluster": {"server": f"http://127.0.0.1:{self.server.server_port}"},
                        }
                    ],
                    "users": [{"name": USER, "user": {"token": "a-token"}}],
                    "contexts": [
                        {
                            "name": "test",
                            "context": {"cluster": "test", "user": USER, "namespace": NAMESPACE},
                        }
                    ],
                }
            )
        )
        path.chmod(0o600)
        return path

    def close(self) -> None:
        """End what was started: pods, controllers, the server."""
        self.closing = True
        for part in (self.controller, self.kubelet):
            if part is not None:
                part.close()
        self.server.shutdown()
        self.server.server_close()

    # ---- What a test looks at
    def objects(self, kind: str, namespace: str | None = None) -> list[Thing]:
        """Of one namespace, or of all."""
        return self.store.list(kind_of(kind), namespace)

    def get(self, kind: str, name: str, namespace: str = NAMESPACE) -> Thing:
        """An object; KeyError where there is none."""
        try:
            return self.store.find(*self.key(kind, name, namespace))
        except Refusal as refusal:
            raise KeyError(str(refusal)) from None

    def key(self, kind: str, name: str, namespace: str = NAMESPACE) -> Key:
        found = kind_of(kind)
        return found, namespace if found.namespaced else None, name

    def note(self, method: str, path: str, query: dict[str, str], body: bytes) -> None:
        self.requests.append(Request(method, path, query, body))

    def log_of(self, pod: str) -> bytes | None:
        """What a pod has said; None: it has not begun."""
        if pod in self.log_files:
            return self.log_files[pod].read_bytes()
        said = self.logs.get(pod)
        return said.encode() if isinstance(said, str) else said

    def ended(self, namespace: str | None, pod: str) -> bool:
        """Whether a pod will say no more."""
        try:
            return self.store.find(kind_of("Pod"), namespace, pod)["status"].get("phase") in ENDED
        except Refusal:
            return True

    # ---- What a test does
    def put(self, thing: Thing) -> Thing:
        """Make or replace an object, status and all, checked as if kubectl had sent it."""
        thing = copy.deepcopy(thing)
        key = self.key(
            thing["kind"], thing["metadata"]["name"], thing["metadata"].get("namespace", NAMESPACE)
        )
        with self.store.changed:
            if key in self.store.things:
                thing["metadata"].pop("resourceVersion", None)
                return self.store.update(key, thing, "test", system=True)
            return self.store.create(key[0], key[1], thing, "test")

    def nodes(self, *nodes: dict[str, Any]) -> None:
        """Put nodes there: name, zone, region, product and gpus of each, the resource by which it offers them, and
        ready=False or other labels."""
        for number, node in enumerate(nodes):
            labels = {
                "kubernetes.io/hostname": node.get("name", f"node-{number}"),
                **node.get("labels", {}),
            }
            for label, field in {
                "topology.kubernetes.io/zone": "zone",
                "topology.kubernetes.io/region": "region",
                "nvidia.com/gpu.product": "product",
                "nvidia.com/gpu.count": "gpus",
            }.items():
                if field in node:
                    labels[label] = str(node[field])
            resource = node.get("resource", "nvidia.com/gpu")
            room = {"cpu": "64", "memory": "512Gi", resource: str(node.get("gpus", 0))}
            self.put(
                {
                    "kind": "Node",
                    "apiVersion": "v1",
                    "metadata": {"name": node.get("name", f"node-{number}"), "labels": labels},
                    "spec": {"taints": node["taints"]} if "taints" in node else {},
                    "status": {
                        "capacity": room,
                        "allocatable": room,
                        "conditions": [
                            {
                                "type": "Ready",
                                "status": "True" if node.get("ready", True) else "False",
                            }
                        ],
                    },
                }
            )

    def set_pod(
        self,
        name: str,
        *,
        phase: str | None = None,
        node: str | None = None,
        waiting_reason: str | None = None,
        exit_code: int | None = None,
        message: str = "",
        namespace: str = NAMESPACE,
    ) -> None:
        """What a kubelet would report of a pod: where it is, that it runs, why it waits, how it ended."""
        pod = self.get("Pod", name, namespace)
        status = pod["status"]
        if node:
            pod["spec"]["nodeName"] = node
        if exit_code is not None and phase is None:
            phase = "Failed" if exit_code else "Succeeded"
        status["phase"] = phase or status.get("phase", "Pending")
        state: Thing = {}
        if waiting_reason:
            state = {"waiting": {"reason": waiting_reason, "message": message}}
        elif status["phase"] == "Running":
            state = {"running": {"startedAt": rules.now()}}
            status.setdefault("startTime", rules.now())
        elif status["phase"] in ENDED:
            code = exit_code if exit_code is not None else int(status["phase"] == "Failed")
            state = {
                "terminated": {
                    "exitCode": code,
                    "reason": "Error" if code else "Completed",
                    "message": message,
                    "startedAt": status.get("startTime", rules.now()),
                    "finishedAt": rules.now(),
                }
            }
        if state:
            status["containerStatuses"] = [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "restartCount": 0,
                    "ready": "running" in state,
                    "state": state,
                }
                for container in pod["spec"]["containers"]
            ]
        elif message:
            status["conditions"] = [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": message,
                }
            ]
        self.store.update(self.key("Pod", name, namespace), pod, "kubelet", system=True)

    def forbid(self, verb: str, resource: str) -> None:
        """Refuse a verb ('*': all) on a resource: jobs, or pods/exec."""
        self.forbidden.add((verb, resource))

    def start_kubelet(self, *, processes: bool = True, **options: Any) -> Any:
        """Let Jobs make pods, and pods run: as processes of this machine, or as set_pod() says."""
        if processes:
            from tests.cluster_sim.kubelet import Kubelet

            self.kubelet = Kubelet(self, **options)
        self.controller = JobController(self)
        return self.kubelet

    def event(self, about: Thing, type_: str, reason: str, message: str) -> None:
        """What kubectl describe and get events show; told again, it is counted."""
        meta = about["metadata"]
        with self.store.changed:
            for other in self.store.list(kind_of("Event"), meta.get("namespace")):
                if (other["involvedObject"].get("uid"), other["reason"], other["message"]) == (
                    meta["uid"],
                    reason,
                    message,
                ):
                    other |= {"count": other["count"] + 1, "lastTimestamp": rules.now()}
                    self.put(other)
                    return
            self.put(
                {
                    "kind": "Event",
                    "apiVersion": "v1",
                    "type": type_,
                    "reason": reason,
                    "message": message,
                    "metadata": {
                        "name": f"{meta['name']}.{rules.suffix(16)}",
                        "namespace": meta["namespace"],
                    },
                    "involvedObject": {
                        "kind": about["kind"],
                        "apiVersion": about["apiVersion"],
                        "uid": meta["uid"],
                        "name": meta["name"],
                        "namespace": meta["namespace"],
                    },
                    "count": 1,
                    "firstTimestamp": rules.now(),
                    "lastTimestamp": rules.now(),
                    "source": {
                        "component": "job-controller" if about["kind"] == "Job" else "kubelet"
                    },
                }
            )

    # ---- Rights
    def allowed(self, verb: str, resource: str) -> bool:
        if resource == "nodes" and self.nodes_list_only and verb not in ("list", "watch"):
            return False
        return not any((v, r) in self.forbidden for v in (verb, "*") for r in (resource, "*"))

    def check_right(
        self, verb: str, kind: Kind, sub: str | None, namespace: str | None, name: str
    ) -> None:
        resource = kind.plural + (f"/{sub}" if sub else "")
        of_others = self.own_namespace_only and kind.namespaced and namespace is None
        if of_others or not self.allowed(verb, resource):
            raise self.refused(verb, kind, resource, namespace, name)

    def refused(
        self, verb: str, kind: Kind, resource: str, namespace: str | None, name: str
    ) -> Refusal:
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        return Refusal(
            403,
            "Forbidden",
            f"{kind.qualified}{f' {json.dumps(name)}' if name else ''} is forbidden: User "
            f'"{USER}" cannot {verb} resource "{resource}" in API group "{kind.group}" {where}',
            {"name": name, "group": kind.group, "kind": kind.plural},
        )

    def check_login(self) -> None:
        if self.login_expired:
            raise Refusal(401, "Unauthorized", "Unauthorized")

    def check_nodes_shown(self) -> None:
        """Users who may only list nodes get the table of them, and no more."""
        if self.nodes_list_only:
            raise self.refused("get", kind_of("Node"), "nodes", None, "")

    def review(self, asked: Thing) -> Thing:
        """The answer to kubectl auth can-i."""
        if asked["kind"] == "SelfSubjectRulesReview":
            rights = [
                {
                    "verbs": [verb for verb in kind.verbs if self.allowed(verb, kind.plural)],
                    "apiGroups": [kind.group],
                    "resources": [kind.plural],
                }
                for kind in KINDS
            ]
            return asked | {
                "status": {"resourceRules": rights, "nonResourceRules": [], "incomplete": False}
            }
        about = asked["spec"].get("resourceAttributes", {})
        resource = about.get("resource", "*") + (
            f"/{about['subresource']}" if about.get("subresource") else ""
        )
        return asked | {"status": {"allowed": self.allowed(about.get("verb", "*"), resource)}}
