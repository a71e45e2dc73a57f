"""How a change meets what is there: server-side apply with owners of fields, strategic, merge and JSON patches.

Lists whose items have a name (containers, env, volumes ...) are merged item by item, as the API's own schemas say; all
others are replaced whole. A path to a field is a tuple of keys, and of Items inside such lists.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

# Field name -> what its items are told apart by, where the API declares the list to be a map.
MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "ownerReferences": ("uid",),
    "conditions": ("type",),
}
PORTS = (("containerPort", "protocol"), ("port", "protocol"))  # of a container, of a Service
DEFAULTS = {"protocol": "TCP"}

Path = tuple[Any, ...]


class Item(NamedTuple):
    """One of a list whose items have names."""

    key: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return "[" + ",".join(f'{name}="{value}"' for name, value in self.key) + "]"


class Conflict(Exception):
    """Fields that others own and that this apply would change: (manager, path) of each."""

    def __init__(self, fields: list[tuple[str, str]]):
        super().__init__(fields)
        self.fields = fields


class BadPatch(Exception):
    """The patch cannot be applied; the message says why."""


def dotted(path: Path) -> str:
    """As conflicts name it: .spec.template.spec.containers[name="trainer"].image."""
    return "".join(str(part) if isinstance(part, Item) else f".{part}" for part in path)


def names_of(field: Any, items: list[Any]) -> tuple[str, ...] | None:
    """What tells the items of this list apart; None: it is one value, replaced whole."""
    if not items or not all(isinstance(item, dict) for item in items):
        return None
    for names in PORTS if field == "ports" else (MERGE_KEYS.get(field, ()),):
        if names and all(names[0] in item for item in items):
            return names
    return None


def item_of(value: dict[str, Any], names: tuple[str, ...]) -> Item:
    return Item(tuple((name, value.get(name, DEFAULTS.get(name))) for name in names))


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The fields that hold something, and each named item of a list by itself."""
    names = names_of(path[-1], value) if isinstance(value, list) and path else None
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif names:
        for item in value:
            there = (*path, item_of(item, names))
            yield there, None
            yield from leaves(item, there)
    else:
        yield path, value


def merge(live: Any, patch: Any, field: Any = None, *, strategic: bool = False) -> Any:
    """`live` with `patch` laid over it: maps by key; if strategic, named lists by item."""
    if isinstance(patch, dict):
        if strategic and patch.get("$patch") == "replace":
            return {key: value for key, value in patch.items() if key != "$patch"}
        kept = dict(live) if isinstance(live, dict) else {}
        if strategic and "$retainKeys" in patch:
            kept = {key: value for key, value in kept.items() if key in patch["$retainKeys"]}
        for key, value in patch.items():
            if strategic and key.startswith("$deleteFromPrimitiveList/"):
                name = key.partition("/")[2]
                kept[name] = [item for item in kept.get(name, []) if item not in value]
            elif strategic and key.startswith("$"):
                continue
            elif value is None:
                kept.pop(key, None)
            else:
                kept[key] = merge(kept.get(key), value, key, strategic=strategic)
        return kept
    names = names_of(field, patch) if isinstance(patch, list) and strategic else None
    if not names or not isinstance(live, list):
        return (
            [merge(None, item, strategic=strategic) for item in patch]
            if isinstance(patch, list)
            else patch
        )
    merged = {item_of(item, names): item for item in live}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item_of(item, names), None)
        else:
            merged[item_of(item, names)] = merge(
                merged.get(item_of(item, names)), item, strategic=True
            )
    return list(merged.values())


def remove(value: Any, path: Path) -> None:
    """Take the field at a path away, and the maps that it leaves empty."""
    head, rest = path[0], path[1:]
    if isinstance(head, Item):
        found = next(
            (item for item in value if item_of(item, tuple(name for name, _ in head.key)) == head),
            None,
        )
        if found is not None and not rest:
            value.remove(found)
        elif found is not None:
            remove(found, rest)
    elif isinstance(value, dict) and head in value:
        if rest:
            remove(value[head], rest)
        if not rest or value[head] in ({}, []):
            del value[head]


class Owners:
    """Which manager set which fields of one object."""

    def __init__(self) -> None:
        self.fields: dict[str, set[Path]] = {}

    def apply(
        self, live: dict[str, Any], wanted: dict[str, Any], manager: str, *, force: bool
    ) -> dict[str, Any]:
        """`live` as this manager wants it: what it left out since is gone, unless another owns it."""
        new = dict(leaves(wanted))
        before = dict(leaves(live))
        others = {name: paths for name, paths in self.fields.items() if name != manager}
        taken = [
            (name, path)
            for name, paths in sorted(others.items())
            for path in sorted(paths & new.keys(), key=str)
            if before.get(path) != new[path]
        ]
        if taken and not force:
            raise Conflict([(name, dotted(path)) for name, path in taken])
        result: dict[str, Any] = copy.deepcopy(live)
        theirs = set().union(*others.values())
        # An item of a list goes whole, with what the API filled in, unless another owns a part of it.
        for path in sorted(
            self.fields.get(manager, set()) - new.keys() - theirs, key=len, reverse=True
        ):
            if not any(other[: len(path)] == path for other in theirs | new.keys()):
                remove(result, path)
        for name, path in taken:
            self.fields[name].discard(path)
        self.fields[manager] = set(new)
        return merge(result, copy.deepcopy(wanted), strategic=True)  # type: ignore[no-any-return]

    def changed(self, old: dict[str, Any], new: dict[str, Any], manager: str) -> None:
        """A plain write: the fields that it changed are this manager's from now on, and nobody else's."""
        before, after = dict(leaves(old)), dict(leaves(new))
        different = {path for path in after if path not in before or before[path] != after[path]}
        for name, paths in self.fields.items():
            if name != manager:
                paths -= different | (before.keys() - after.keys())
        self.fields.setdefault(manager, set()).update(different)


def json_patch(value: Any, operations: list[dict[str, Any]]) -> Any:
    """RFC 6902: add, replace, remove and test."""
    value = copy.deepcopy(value)
    for operation in operations:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        place = value
        try:
            for part in parents:
                place = place[int(part)] if isinstance(place, list) else place[part]
            key: Any = last
            if isinstance(place, list):
                key = len(place) if last == "-" else int(last)
            if operation["op"] == "add" and isinstance(place, list):
                place.insert(key, operation["value"])
            elif operation["op"] == "add":
                place[key] = operation["value"]
            elif operation["op"] == "replace":
                place[key], _ = operation["value"], place[key]
            elif operation["op"] == "remove":
                del place[key]
            elif operation["op"] == "test" and place[key] != operation["value"]:
                raise BadPatch(f"testing value {operation['path']} failed")
        except (KeyError, IndexError, ValueError):
            raise BadPatch(f"the path {operation['path']} does not exist") from None
    return value
