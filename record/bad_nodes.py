"""Nodes of a cluster on which a pod has found a machine fault: RUNS_DIR/.bad_nodes/NODE.json on the volume.

Each has a file of its own, since several pods may write at once. After a day an entry counts no more:
the node may be repaired, and a pod that lands there checks it anew. Standard library only.
"""

import contextlib
import dataclasses
import json
import re
import time
from pathlib import Path

from record.durable import write_whole

FOLDER = ".bad_nodes"
NAME = re.compile(r"[a-z0-9][-a-z0-9.]*")  # of a node in Kubernetes
EXPIRY_S = 24 * 3600
# For a shell where the volume is, with the folder as its first argument.
LIST_COMMAND = 'cd "$1" 2>/dev/null || exit 0; for f in *.json; do [ ! -f "$f" ] || cat "$f"; done'
CLEAR_COMMAND = 'rm -rf "$1"'


@dataclasses.dataclass(frozen=True)
class BadNode:
    """A node that pods refuse.

    Attributes:
        reason: what is wrong with it.
        found_at: Unix time.
        refusals: how many pods have refused it since.
    """

    name: str
    reason: str
    found_at: float
    refusals: int = 0


def write(folder: Path, node: BadNode) -> None:
    """List a node, if the volume can be written."""
    with contextlib.suppress(OSError):
        text = json.dumps(dataclasses.asdict(node)) + "\n"
        write_whole(folder / f"{node.name}.json", text.encode())


def add(folder: Path, name: str, reason: str) -> None:
    """List a node on which a fault was found now."""
    write(folder, BadNode(name, reason, time.time()))


def find(folder: Path, name: str) -> BadNode | None:
    """Return the entry of a node; None if it is not listed, or no longer."""
    try:
        entries = parse((folder / f"{name}.json").read_text(errors="replace"))
    except OSError:
        return None
    return entries[0] if entries else None


def parse(text: str) -> list[BadNode]:
    """Return the entries of a text of one JSON object per line, without those that are over or damaged."""
    entries = []
    for line in text.splitlines():
        try:
            node = BadNode(**json.loads(line))
            is_over = time.time() - node.found_at > EXPIRY_S
            is_whole = NAME.fullmatch(node.name) and isinstance(node.reason, str)
        except (ValueError, TypeError):
            continue
        if is_whole and type(node.refusals) is int and not is_over:
            entries.append(node)
    return entries
