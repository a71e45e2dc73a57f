"""The checkpoints of a run, here or on its volume: step, size, age, and whether they are whole.

As train/checkpoint/checkpoint.py writes them: a folder step_N with a manifest of sizes and hashes was written whole. Here the
hashes are checked; on the volume the sizes are, and make fetch-run checks the hashes of what it brings.
"""

import dataclasses
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from k8s.cluster.volume import Volume
from k8s.cluster.words import short_time, table
from record import number_formats
from record.regular_file import open_inside
from record.run_paths import RunPaths, step_of_checkpoint
from settings.json_file import read_whole
from settings.resume import read_run_config
from train.checkpoint.identity import Identity
from train.checkpoint.manifest import DAMAGE, CheckpointError, OtherFormat, parse_manifest, verify

ASIDE = {
    "tmp": "being written, or left by a killed save",
    "damaged": "set aside: damaged",
    "fetch": "half fetched",
    "trash": "being deleted",
    "rolled-back": "set aside: the run went back behind it",
}

# Of a folder of checkpoints: the clock, every file with size and time, and all manifests behind a line with their name.
LOOK = (
    'date +%s; cd "$1" 2>/dev/null || exit 0; find . -mindepth 1 -maxdepth 2 -type f -printf "%P\\t%s\\t%T@\\n"; '
    'for f in step_*/MANIFEST.json; do [ -f "$f" ] || continue; printf "== %s\\n" "$f"; cat "$f"; echo; done'
)


@dataclasses.dataclass
class Checkpoint:
    """A folder of checkpoints/: its files by size, and what its manifest says. wrong: why it is of no use, "" if it
    is whole as far as was looked."""

    name: str
    files: dict[str, int]
    written: float
    manifest: dict[str, Any]
    wrong: str = ""

    @property
    def step(self) -> int:
        """-1 for what is no committed checkpoint."""
        step = step_of_checkpoint(self.name)
        return -1 if step is None else step

    @property
    def size(self) -> int:
        return sum(self.files.values())

    @property
    def hashes(self) -> dict[str, tuple[int, str]]:
        """File -> (size, xxh3) as the manifest has them."""
        return {
            name: (int(size), str(digest))
            for name, (size, digest) in self.manifest["files"].items()
        }


def judged(name: str, files: dict[str, int], written: float, content: bytes) -> Checkpoint:
    """A checkpoint by its listing and its manifest's content: whether all is there, in full size."""
    found = Checkpoint(name, files, written, {})
    if found.step < 0:
        kind = re.search(r"\.(tmp)-|^\.([a-z-]+)-(?=step_|\d)", name)
        found.wrong = ASIDE.get((kind[1] or kind[2]) if kind else "", "no checkpoint")
        return found
    try:
        found.manifest = parse_manifest(content, name)
        listed = found.hashes
    except OtherFormat:
        found.wrong = "of a later version of this code"
        return found
    except DAMAGE:
        found.manifest, found.wrong = {}, "damaged: MANIFEST.json is missing or cannot be read"
        return found
    for part, (size, _) in listed.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]+", part):
            found.wrong = "damaged: MANIFEST.json names what cannot be a file of it"
        elif part not in files:
            found.wrong = f"damaged: {part} is missing"
        elif files[part] != size:
            found.wrong = f"damaged: {part} has {files[part]} bytes, not {size}"
    return found


def on_volume(volume: Volume) -> tuple[list[Checkpoint], float]:
    """All on the volume, oldest first, and the time there. Raises Refused."""
    return parsed(volume.ask("sh", "-c", LOOK, "sh", f"{volume.folder}/checkpoints"))


def parsed(text: str) -> tuple[list[Checkpoint], float]:
    """What LOOK prints."""
    listing, *manifests = re.split(r"^== (?=\S+/MANIFEST\.json$)", text, flags=re.MULTILINE)
    clock, *lines = listing.splitlines()
    folders: dict[str, dict[str, int]] = {}
    times: dict[str, float] = {}
    for line in lines:
        path, size, at = line.rsplit("\t", 2)
        folder, _, name = path.rpartition("/")
        if folder:
            folders.setdefault(folder, {})[name] = int(size)
            times[folder] = max(times.get(folder, 0.0), float(at))
    said = {
        head.split("/")[0]: body for head, _, body in (part.partition("\n") for part in manifests)
    }
    found = [
        judged(name, files, times[name], said.get(name, "").encode())
        for name, files in folders.items()
    ]
    return sorted(found, key=order), float(clock)


def here(paths: RunPaths, hashes: bool = True) -> list[Checkpoint]:
    """All in the run's folder on this machine, oldest first, hashes checked. Raises RunConfigError."""
    stored = read_run_config(paths.config)
    identity = Identity.read(stored, {})
    found = []
    folders = (
        [path for path in paths.checkpoints.iterdir() if path.is_dir()]
        if paths.checkpoints.is_dir()
        else []
    )
    for folder in folders:
        files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        written = max(
            [path.stat().st_mtime for path in folder.iterdir()], default=folder.stat().st_mtime
        )
        try:
            with open_inside(folder, "MANIFEST.json") as file:
                content = read_whole(file)
        except OSError:
            content = b""
        one = judged(folder.name, files, written, content)
        if stored and not one.wrong and not identity.is_mine(one.manifest):
            one.wrong = "of another run"
        if hashes and not one.wrong:
            one.wrong = damage_of(folder)
        found.append(one)
    return sorted(found, key=order)


def order(one: Checkpoint) -> tuple[int, str]:
    return (one.step, one.name)


def damage_of(folder: Path) -> str:
    """What is wrong with the content of a checkpoint; "" if it is what was written."""
    try:
        verify(folder)
    except CheckpointError as error:
        return f"damaged: {str(error).removeprefix(f'{folder.name}: ')}"
    return ""


def newest_whole(found: Iterable[Checkpoint]) -> Checkpoint | None:
    """The last committed one with which nothing is wrong."""
    return next(
        (one for one in sorted(found, key=order, reverse=True) if one.step >= 0 and not one.wrong),
        None,
    )


def listing(found: list[Checkpoint], good: str, now: float | None = None) -> str:
    """The table that make checkpoints prints; good: what is said of one with which nothing is wrong."""
    clock = time.time() if now is None else now
    newest = newest_whole(found)
    rows = [("CHECKPOINT", "STEP", "SIZE", "AGE", "STATE")]
    for one in found:
        state = one.wrong or good + (", the newest" if one is newest else "")
        rows.append(
            (
                one.name,
                str(one.step) if one.step >= 0 else "-",
                number_formats.size(one.size),
                short_time(clock - one.written),
                state,
            )
        )
    return "\n".join(table(rows))
