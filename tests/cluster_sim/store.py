"""The objects of the in-memory API: written by whoever asks rightly, numbered by version, watched."""

import base64
import copy
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.cluster_sim import rules, validate
from tests.cluster_sim.kinds import Kind, kind_of
from tests.cluster_sim.patches import Conflict, Owners

Thing = dict[str, Any]
Key = tuple[Kind, str | None, str]


class Refusal(Exception):
    """What the API answers instead: an HTTP code, a reason in one word, a sentence, and particulars."""

    def __init__(self, code: int, reason: str, message: str, details: Thing | None = None):
        super().__init__(message)
        self.code, self.reason, self.details = code, reason, details or {}

    def status(self) -> Thing:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def not_found(kind: Kind, name: str) -> Refusal:
    return Refusal(
        404,
        "NotFound",
        f'{kind.qualified} "{name}" not found',
        {"name": name, "group": kind.group, "kind": kind.plural},
    )


class Change(NamedTuple):
    """One write, as a watch tells of it."""

    version: int
    type: str  # ADDED, MODIFIED or DELETED
    key: Key
    thing: Thing


class Store:
    """All objects. Everything that is handed out is a copy; `changed` is notified of every write."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.things: dict[Key, Thing] = {}
        self.owners: dict[Key, Owners] = {}
        self.history: list[Change] = []
        self.version = 1
        self.restricted = False  # Pod Security "restricted" is enforced
        self.holds: Callable[[Thing], bool] = lambda _: (
            False
        )  # whether a pod that is to go ends by itself, later

    # ---- Reading
    def find(self, kind: Kind, namespace: str | None, name: str) -> Thing:
        with self.changed:
            try:
                return copy.deepcopy(self.things[kind, namespace, name])
            except KeyError:
                raise not_found(kind, name) from None

    def list(self, kind: Kind, namespace: str | None = None) -> list[Thing]:
        """Of one namespace, or of all."""
        with self.changed:
            return [
                copy.deepcopy(thing)
                for (k, ns, _), thing in sorted(self.things.items(), key=lambda i: str(i[0]))
                if k == kind and namespace in (None, ns)
            ]

    # ---- Writing
    def create(
        self, kind: Kind, namespace: str | None, thing: Thing, manager: str, *, dry: bool = False
    ) -> Thing:
        with self.changed:
            thing = copy.deepcopy(thing)
            meta = thing.setdefault("metadata", {})
            if not meta.get("name") and meta.get("generateName"):
                meta["name"] = meta["generateName"][:58] + rules.suffix()
            self.check_place(kind, namespace, thing)
            key = (kind, namespace, meta.get("name", ""))
            if key in self.things:
                raise Refusal(
                    409,
                    "AlreadyExists",
                    f'{kind.qualified} "{key[2]}" already exists',
                    {"name": key[2], "group": kind.group, "kind": kind.plural},
                )
            if kind.kind in ("Pod", "Job") and manager.startswith("kubectl"):
                thing.pop("status", None)
            self.check_schema(thing)
            meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": rules.now(), "generation": 1}
            self.check(kind, thing, None)
            if not dry:
                self.owners[key] = Owners()
                self.owners[key].changed({}, plain(thing), manager)
                self.write(key, thing, "ADDED")
                self.bind(key)
            return copy.deepcopy(self.things[key] if not dry else thing)

    def apply(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        wanted: Thing,
        manager: str,
        *,
        force: bool,
        dry: bool,
    ) -> tuple[Thing, bool]:
        """Server-side apply; also whether the object is new."""
        with self.changed:
            key = (kind, namespace, name)
            if wanted.get("metadata", {}).get("name") != name:
                raise Refusal(
                    400,
                    "BadRequest",
                    f"the name of the object ({wanted.get('metadata', {}).get('name')}) "
                    f"does not match the name on the URL ({name})",
                )
            self.check_schema(wanted)
            if key not in self.things:
                made = self.create(kind, namespace, wanted, manager, dry=dry)
                if not dry:
                    self.owners[key] = Owners()
                    self.owners[key].apply({}, plain(wanted), manager, force=True)
                return made, True
            owners = copy.deepcopy(self.owners[key])
            try:
                new = owners.apply(self.things[key], plain(wanted), manager, force=force)
            except Conflict as conflict:
                raise conflicting(kind, name, conflict) from None
            new = self.update(key, new, manager, dry=dry, owners=owners)
            return new, False

    def update(
        self,
        key: Key,
        new: Thing,
        manager: str,
        *,
        dry: bool = False,
        owners: Owners | None = None,
        system: bool = False,
    ) -> Thing:
        """Replace an object. What does not change it makes no new version. The system itself may write anything."""
        with self.changed:
            old = self.find(*key)
            new = copy.deepcopy(new)
            given = new["metadata"].get("resourceVersion")
            if given and given != old["metadata"]["resourceVersion"]:
                raise Refusal(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {key[0].qualified} "{key[2]}": the '
                    "object has been modified; please apply your changes to the latest version and try again",
                    {"name": key[2], "group": key[0].group, "kind": key[0].plural},
                )
            for field in (
                "uid",
                "creationTimestamp",
                "generation",
                "resourceVersion",
                "deletionTimestamp",
            ):
                if field in old["metadata"]:
                    new["metadata"][field] = old["metadata"][field]
            if not system:
                if "status" in old:
                    new["status"] = old["status"]  # it has an address of its own
                self.check_schema(new)
                self.check(key[0], new, old)
            if new == old:
                return old
            if new.get("spec") != old.get("spec"):
                new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
            if not dry:
                if owners:
                    self.owners[key] = owners
                elif not system:
                    self.owners[key].changed(plain(old), plain(new), manager)
                self.write(key, new, "MODIFIED")
            return copy.deepcopy(new)

    def delete(
        self,
        key: Key,
        *,
        propagation: str = "Background",
        grace: int | None = None,
        dry: bool = False,
    ) -> Thing:
        """Take an object away, and what it owns. A pod that runs is only told; with Foreground a Job waits for its."""
        with self.changed:
            thing = self.find(*key)
            if dry:
                return thing
            owned = [
                k
                for k, other in self.things.items()
                for owner in other["metadata"].get("ownerReferences", [])
                if owner["uid"] == thing["metadata"]["uid"]
            ]
            if key[0].kind == "Pod" and self.holds(thing) and grace != 0:
                if "deletionTimestamp" not in thing["metadata"]:
                    thing["metadata"] |= {
                        "deletionTimestamp": rules.now(),
                        "deletionGracePeriodSeconds": thing["spec"]["terminationGracePeriodSeconds"]
                        if grace is None
                        else grace,
                    }
                    self.write(key, thing, "MODIFIED")
                return copy.deepcopy(thing)
            held = propagation == "Foreground" and [
                k for k in owned if blocks(self.things[k], thing)
            ]
            if held:  # what does not block goes when this has gone
                owned = held
                thing["metadata"] |= {
                    "deletionTimestamp": rules.now(),
                    "finalizers": ["foregroundDeletion"],
                }
                self.write(key, thing, "MODIFIED")
            else:
                self.write(key, thing, "DELETED")
            for inner in owned:
                if propagation == "Orphan":
                    other = self.find(*inner)
                    other["metadata"].pop("ownerReferences")
                    self.write(inner, other, "MODIFIED")
                elif inner in self.things:
                    self.delete(inner, propagation=propagation)
            self.collect()
            return copy.deepcopy(thing)

    # ---- Inside
    def write(self, key: Key, thing: Thing, type_: str) -> None:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        if type_ == "DELETED":
            del self.things[key]
            self.owners.pop(key, None)
        else:
            self.things[key] = copy.deepcopy(thing)
        self.history.append(Change(self.version, type_, key, copy.deepcopy(thing)))
        self.changed.notify_all()

    def collect(self) -> None:
        """End what waited, in foreground deletion, for its dependants, and then those that it had not waited for."""
        for key, thing in list(self.things.items()):
            waits = "foregroundDeletion" in thing["metadata"].get("finalizers", [])
            if (
                key not in self.things
                or not waits
                or any(blocks(other, thing) for other in self.things.values())
            ):
                continue
            self.write(key, thing, "DELETED")
            for inner in [
                k
                for k, other in self.things.items()
                for owner in other["metadata"].get("ownerReferences", [])
                if owner["uid"] == thing["metadata"]["uid"]
            ]:
                self.delete(inner)

    def check_place(self, kind: Kind, namespace: str | None, thing: Thing) -> None:
        if namespace is not None:
            if (kind_of("Namespace"), None, namespace) not in self.things:
                raise not_found(kind_of("Namespace"), namespace)
            if thing["metadata"].setdefault("namespace", namespace) != namespace:
                raise Refusal(
                    400,
                    "BadRequest",
                    f"the namespace of the provided object does not match the namespace "
                    f"sent on the request ({thing['metadata']['namespace']}, {namespace})",
                )

    def check_schema(self, thing: Thing) -> None:
        fault = validate.schema_fault(thing)
        if fault:
            raise Refusal(400, "BadRequest", fault)

    def check(self, kind: Kind, thing: Thing, old: Thing | None) -> None:
        """Fill in what was left open, then refuse what is wrong or may not change."""
        if kind.kind == "Secret" and "stringData" in thing:
            thing["data"] = {
                **thing.get("data", {}),
                **{
                    name: base64.b64encode(text.encode()).decode()
                    for name, text in thing.pop("stringData").items()
                },
            }
        classes = {c["metadata"]["name"]: c for c in self.list(kind_of("StorageClass"))}
        default = next(
            (
                name
                for name, c in classes.items()
                if c["metadata"].get("annotations", {}).get(rules.DEFAULT_CLASS) == "true"
            ),
            None,
        )
        rules.fill_in(thing, default)
        class_of = classes.get(thing.get("spec", {}).get("storageClassName", ""), {})
        found = validate.faults(thing)
        if old:
            found += rules.frozen(old, thing, bool(class_of.get("allowVolumeExpansion")))
        security = (
            validate.insecure(thing["spec"]) if kind.kind == "Pod" and self.restricted else []
        )
        if security and not found:
            raise Refusal(
                403,
                "Forbidden",
                f'pods "{thing["metadata"]["name"]}" is forbidden: violates PodSecurity '
                f'"restricted:latest": {", ".join(security)}',
            )
        if found:
            name = thing["metadata"].get("name", "")
            shown = [f"{fault.field}: {fault.message}" for fault in found]
            whole = shown[0] if len(shown) == 1 else "[" + ", ".join(shown) + "]"
            raise Refusal(
                422,
                "Invalid",
                f'{kind.kind}{"." + kind.group if kind.group else ""} "{name}" is invalid: {whole}',
                {
                    "name": name,
                    "group": kind.group,
                    "kind": kind.kind,
                    "causes": [fault._asdict() for fault in found],
                },
            )

    def bind(self, key: Key) -> None:
        """A claim of a class that there is gets its volume at once."""
        thing = self.things[key]
        if (
            key[0].kind == "PersistentVolumeClaim"
            and (kind_of("StorageClass"), None, thing["spec"].get("storageClassName", ""))
            in self.things
        ):
            thing = copy.deepcopy(thing)
            thing["spec"]["volumeName"] = "pvc-" + thing["metadata"]["uid"]
            thing["status"] = {
                "phase": "Bound",
                "accessModes": thing["spec"]["accessModes"],
                "capacity": {"storage": thing["spec"]["resources"]["requests"]["storage"]},
            }
            self.write(key, thing, "MODIFIED")

    def since(self, version: int) -> Iterator[Change]:
        """The writes after a version. Call with the lock held."""
        return (change for change in self.history if change.version > version)


def blocks(thing: Thing, owner: Thing) -> bool:
    """Whether the deletion of an owner, in the foreground, waits for a thing."""
    return any(
        one["uid"] == owner["metadata"]["uid"] and one.get("blockOwnerDeletion")
        for one in thing["metadata"].get("ownerReferences", [])
    )


def plain(thing: Thing) -> Thing:
    """An object without what the server itself writes, and without what addresses it: nobody owns these."""
    kept = {
        name: value
        for name, value in thing.items()
        if name not in ("kind", "apiVersion", "status", "metadata")
    }
    server = (
        "name",
        "namespace",
        "uid",
        "creationTimestamp",
        "generation",
        "resourceVersion",
        "managedFields",
    )
    meta = {name: value for name, value in thing["metadata"].items() if name not in server}
    return kept | ({"metadata": meta} if meta else {})


def conflicting(kind: Kind, name: str, conflict: Conflict) -> Refusal:
    """The API's words for fields that others own."""
    lines = [
        f'conflict with "{manager}" using {kind.group_version}: {path}'
        for manager, path in conflict.fields
    ]
    count = len(lines)
    return Refusal(
        409,
        "Conflict",
        f"Apply failed with {count} conflict{'s' * (count > 1)}: " + "\n".join(lines),
        {
            "name": name,
            "causes": [
                {"reason": "FieldManagerConflict", "message": line.partition(":")[0], "field": path}
                for line, (_, path) in zip(lines, conflict.fields, strict=True)
            ],
        },
    )
