"""The kinds of object that the in-memory API knows, and what it says of them to kubectl's discovery."""

import functools
from typing import Any, NamedTuple

SERVER = {"major": "1", "minor": "32", "gitVersion": "v1.32.4", "platform": "linux/amd64"}
VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


class Kind(NamedTuple):
    """A kind, in the words of discovery."""

    group_version: str
    plural: str
    kind: str
    short: tuple[str, ...] = ()
    namespaced: bool = True
    verbs: tuple[str, ...] = VERBS

    @property
    def group(self) -> str:
        """'' of the oldest ones."""
        return self.group_version.rpartition("/")[0]

    @property
    def qualified(self) -> str:
        """As errors name it: 'jobs.batch', 'pods'."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def singular(self) -> str:
        return self.kind.lower()


KINDS = (
    Kind("v1", "pods", "Pod", ("po",)),
    Kind("v1", "services", "Service", ("svc",)),
    Kind("v1", "configmaps", "ConfigMap", ("cm",)),
    Kind("v1", "secrets", "Secret"),
    Kind("v1", "persistentvolumeclaims", "PersistentVolumeClaim", ("pvc",)),
    Kind("v1", "resourcequotas", "ResourceQuota", ("quota",)),
    Kind("v1", "limitranges", "LimitRange", ("limits",)),
    Kind("v1", "serviceaccounts", "ServiceAccount", ("sa",)),
    Kind("v1", "events", "Event", ("ev",)),
    Kind("v1", "namespaces", "Namespace", ("ns",), namespaced=False),
    Kind("v1", "nodes", "Node", ("no",), namespaced=False),
    Kind("batch/v1", "jobs", "Job"),
    Kind("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", ("netpol",)),
    Kind("storage.k8s.io/v1", "storageclasses", "StorageClass", ("sc",), namespaced=False),
    Kind("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", ("pc",), namespaced=False),
    Kind(
        "authorization.k8s.io/v1",
        "selfsubjectaccessreviews",
        "SelfSubjectAccessReview",
        (),
        False,
        ("create",),
    ),
    Kind(
        "authorization.k8s.io/v1",
        "selfsubjectrulesreviews",
        "SelfSubjectRulesReview",
        (),
        False,
        ("create",),
    ),
)
SUBRESOURCES = (
    ("pods/log", "Pod", ("get",)),
    ("pods/exec", "PodExecOptions", ("create", "get")),
    ("pods/status", "Pod", ("get", "patch", "update")),
)
GROUP_VERSIONS = tuple(dict.fromkeys(kind.group_version for kind in KINDS))


@functools.cache
def kind_of(name: str) -> Kind:
    """The kind of any name that kubectl takes: 'Job', 'jobs', 'job', 'po'."""
    for kind in KINDS:
        if name.lower() in (kind.singular, kind.plural, *kind.short):
            return kind
    raise KeyError(name)


def at(group_version: str, plural: str) -> Kind | None:
    """The kind that an address of the API is about."""
    return next(
        (kind for kind in KINDS if (kind.group_version, kind.plural) == (group_version, plural)),
        None,
    )


def groups() -> dict[str, Any]:
    """The answer to /apis."""
    versions = [
        {"groupVersion": gv, "version": gv.split("/")[1]} for gv in GROUP_VERSIONS if "/" in gv
    ]
    return {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [
            {
                "name": entry["groupVersion"].split("/")[0],
                "versions": [entry],
                "preferredVersion": entry,
            }
            for entry in versions
        ],
    }


def resources(group_version: str) -> dict[str, Any]:
    """The answer to /api/v1 and /apis/GROUP/VERSION."""
    found: list[dict[str, Any]] = [
        {
            "name": kind.plural,
            "singularName": kind.singular,
            "kind": kind.kind,
            "shortNames": list(kind.short),
            "namespaced": kind.namespaced,
            "verbs": list(kind.verbs),
        }
        for kind in KINDS
        if kind.group_version == group_version
    ]
    if group_version == "v1":
        found += [
            {
                "name": name,
                "singularName": "",
                "kind": kind,
                "namespaced": True,
                "verbs": list(verbs),
            }
            for name, kind, verbs in SUBRESOURCES
        ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": found,
    }


def address(group_version: str) -> str:
    """Where a group is served."""
    return ("apis/" if "/" in group_version else "api/") + group_version


def openapi_index() -> dict[str, Any]:
    """The answer to /openapi/v3."""
    return {
        "paths": {
            address(gv): {"serverRelativeURL": f"/openapi/v3/{address(gv)}?hash=1"}
            for gv in GROUP_VERSIONS
        }
    }


def openapi(group_version: str) -> dict[str, Any]:
    """As much of OpenAPI v3 as makes kubectl leave the validation of fields, and dry runs, to the server."""
    paths = {}
    for kind in KINDS:
        if kind.group_version == group_version:
            place = "namespaces/{namespace}/" if kind.namespaced else ""
            paths[f"/{address(group_version)}/{place}{kind.plural}/{{name}}"] = {
                "patch": {
                    "x-kubernetes-group-version-kind": {
                        "group": kind.group,
                        "kind": kind.kind,
                        "version": group_version.rpartition("/")[2],
                    },
                    "parameters": [
                        {"name": name, "in": "query"} for name in ("fieldValidation", "dryRun")
                    ],
                    "responses": {},
                }
            }
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": SERVER["gitVersion"]},
        "paths": paths,
        "components": {},
    }
