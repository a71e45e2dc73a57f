"""make fetch-run: a run from the cluster's volume to RUNS_DIR/RUN_NAME here, checked file by file.

    RUNS_DIR/RUN_NAME/fetched.json   what was brought, from where, with hashes: what a second call compares with
                      .fetch/        what is half here; the next call goes on with it
                      checkpoints/.fetch-step_N/   a checkpoint that is not whole yet: no trainer takes such a name

Brought are settings, record, status, logs, GPU samples, plots and one checkpoint: STEP, else the newest that is whole.
Of a run at several sites these are the first's, and of each other the record. make plots brings the same without a
checkpoint. A folder that holds a run of this machine, or one that was trained further here since, is left alone.
"""

import dataclasses
import json
import os
import re
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from k8s import checkpoints, transfer
from k8s.checkpoints import Checkpoint
from k8s.cluster.kubectl import Refused
from k8s.cluster.volume import Volume
from k8s.cluster.where import is_run
from k8s.transfer import Meter, Vanished
from record import locks, number_formats
from record.durable import flush_folder, write_whole
from record.run_paths import RunPaths, list_checkpoints, name_checkpoint
from settings.json_file import read_small
from settings.resolve import show_path
from train.checkpoint.manifest import CheckpointError, describe, load_manifest

RECORD, HALF = "fetched.json", ".fetch"
SPARE = 64 * 2**20  # bytes that stay free
# Of the run's folder: the clock, and every file with size and time, but checkpoints and W&B's own.
LIST = (
    'cd "$1" || exit 2; date +%s; find . -type f -not -path "*/checkpoints/*" -not -path "*/wandb/*" '
    '-printf "%P\\t%s\\t%T@\\n"'
)
WANTED = re.compile(
    r"(config\.json|metrics\.jsonl|STATUS\.json|gpu_metrics_[0-9_]+\.json|"
    r"[A-Za-z0-9_.-]+\.(?:log|csv|txt)|"
    r"site_[0-9]+/(?:config\.json|metrics\.jsonl|STATUS\.json|train\.log)|"
    r"(?:logs|plots|hang)/[A-Za-z0-9_.-]+|hang/[A-Za-z0-9_-]+/[A-Za-z0-9_.-]+)"
)
OWN = ("config.json", "metrics.jsonl")  # what training here would change


@dataclasses.dataclass(frozen=True)
class File:
    """A file on the volume when it was listed."""

    name: str
    size: int
    at: str  # its time, as text that is compared and nothing else


class Record:
    """fetched.json: what of this folder was brought, written before anything gets its final name."""

    def __init__(self, paths: RunPaths, origin: dict[str, str]):
        self.path, self.origin = paths.folder / RECORD, origin
        try:
            self.content: dict[str, Any] = json.loads(read_small(self.path))
            self.files: dict[str, dict[str, Any]] = self.content["files"]
            self.steps: list[str] = self.content["checkpoints"]
        except (OSError, ValueError, KeyError, TypeError):
            self.content, self.files, self.steps = {}, {}, []

    @property
    def known(self) -> bool:
        return bool(self.content)

    def is_here(self, file: File, path: Path) -> bool:
        """Whether the file is the one that was brought, and has not changed there since."""
        was = self.files.get(file.name) or {}
        return (
            (was.get("size"), was.get("at")) == (file.size, file.at)
            and path.is_file()
            and transfer.sha256(path) == was.get("sha256")
        )

    def is_brought(self, name: str, path: Path) -> bool:
        """Whether what is here was brought by us, this time or the time before a kill."""
        was = self.files.get(name)
        return not path.exists() or (
            was is not None and transfer.sha256(path) in (was["sha256"], was.get("before"))
        )

    def note(self, file: File, digest: str) -> None:
        before = (self.files.get(file.name) or {}).get("sha256")
        self.files[file.name] = {
            "size": file.size,
            "at": file.at,
            "sha256": digest,
            "before": before,
        }
        self.write()

    def note_checkpoint(self, name: str) -> None:
        self.steps = sorted({*self.steps, name})
        self.write()

    def write(self) -> None:
        self.content = {
            "schema": 1,
            "from": self.origin,
            "time": time.time(),
            "files": self.files,
            "checkpoints": self.steps,
        }
        write_whole(self.path, (json.dumps(self.content, indent=1) + "\n").encode())


def fetch(volume: Volume, paths: RunPaths, step: int | None, weights: bool = True) -> str:
    """Bring a run; returns what was done, in words. weights: a checkpoint too. Raises Refused."""
    record = Record(paths, origin_of(volume))
    refuse_mixture(paths, record)
    files = listed(volume)
    chosen = choose(volume, step) if weights else None
    missing = [file for file in files if not record.is_here(file, paths.folder / file.name)]
    half = paths.checkpoints / f"{HALF}-{chosen.name}" if chosen else None
    if chosen and is_same(chosen, paths.checkpoints / chosen.name):
        half = None
    need = sum(file.size for file in missing) + (remaining(chosen, half) if chosen and half else 0)
    check_space(paths, need)
    meter = Meter(need)
    count = len(missing) + (len(chosen.hashes) if chosen and half else 0)
    sys.stdout.write(
        f"fetching {count} files, {number_formats.size(need)}, from {volume.folder} of volume "
        f"{volume.origin.value('volume')} to {show_path(paths.folder)}\n"
        if count
        else ""
    )
    try:
        for file in missing:
            fetch_file(volume, file, paths, record, meter)
        if chosen and half:
            fetch_checkpoint(volume, chosen, half, paths, record, meter)
    except Vanished as gone:
        raise Refused(
            1,
            f"{gone} was deleted on the volume while it was fetched (KEEP_LAST, or a new attempt); the "
            "same command takes what is there now" + ("" if step is None else ", without STEP"),
        ) from None
    except OSError as error:
        raise Refused(
            78,
            f"{error.filename or paths.folder}: cannot be written ({error.strerror}); make room or mend "
            "its permissions. Run the same command to resume.",
        ) from None
    finally:
        meter.end()
    shutil.rmtree(paths.folder / HALF, ignore_errors=True)
    if not weights:
        return f"the record of {paths.name}: {number_formats.size(meter.moved)} moved, into {show_path(paths.folder)}"
    return summary(paths, chosen, missing, len(files) - len(missing), meter, bool(half))


def summary(
    paths: RunPaths,
    chosen: Checkpoint | None,
    missing: list[File],
    unchanged: int,
    meter: Meter,
    new: bool,
) -> str:
    """What was done, and what to type next."""
    what = f"fetched {len(missing)} files" + (
        f" ({unchanged} had not changed)" if unchanged else ""
    )
    if chosen:
        what += (
            f" and checkpoint {chosen.name}, verified by its manifest"
            if new
            else f"; checkpoint {chosen.name} was here already"
        )
    else:
        what += "; there is no whole checkpoint on the volume yet"
    name = paths.name
    return (
        f"{what}: {number_formats.size(meter.moved)} moved, into {show_path(paths.folder)}\n"
        f"  make plots RUN_NAME={name}        make checkpoints WHERE=local RUN_NAME={name}"
    )


def origin_of(volume: Volume) -> dict[str, str]:
    target = volume.target
    return {
        "context": target.context,
        "namespace": target.namespace,
        "volume": volume.origin.value("volume"),
        "run": volume.origin.paths.name,
    }


def refuse_mixture(paths: RunPaths, record: Record) -> None:
    """Raises Refused where the folder here holds something else than what was brought into it from there."""
    elsewhere = f"choose another place for it, for example make fetch-run RUNS_DIR=fetched RUN_NAME={paths.name}"
    if locks.is_at_work(paths):
        raise Refused(
            78, f"{show_path(paths.folder)}: a run of this machine is at work there; {elsewhere}"
        )
    present = {name_checkpoint(step) for step in list_checkpoints(paths.checkpoints)}
    if not record.known:
        if is_run(paths) or present:
            raise Refused(
                78,
                f"{show_path(paths.folder)}: holds a run of this machine, which is not mixed with one of the "
                f"cluster; {elsewhere}",
            )
        return
    was = record.content.get("from")
    if was != record.origin:
        raise Refused(
            78,
            f"{show_path(paths.folder)}: was fetched from {was}, and this is {record.origin}; {elsewhere}",
        )
    changed = [name for name in OWN if not record.is_brought(name, paths.folder / name)]
    if changed or (present := present - set(record.steps)):
        raise Refused(
            78,
            f"{show_path(paths.folder)}: was trained further here since it was fetched "
            f"({', '.join([*changed, *sorted(present)][:3])} changed), and is not overwritten; {elsewhere}",
        )


def listed(volume: Volume) -> list[File]:
    """The files of the run that are worth bringing. Raises Refused."""
    found = []
    for line in volume.ask("sh", "-c", LIST, "sh", volume.folder).splitlines()[1:]:
        name, size, at = line.rsplit("\t", 2)
        if WANTED.fullmatch(name):
            found.append(File(name, int(size), at))
    if not found:
        raise volume.no_run()
    return sorted(found, key=lambda file: file.name)


def choose(volume: Volume, step: int | None) -> Checkpoint | None:
    """The checkpoint to bring; None if there is none yet. Raises Refused where STEP's is not there, or damaged."""
    found, _ = checkpoints.on_volume(volume)
    committed = [one for one in found if one.step >= 0]
    if step is None:
        return checkpoints.newest_whole(committed)
    listed_steps = ", ".join(str(one.step) for one in committed if not one.wrong) or "none"
    chosen = next((one for one in committed if one.step == step), None)
    if chosen is None or chosen.wrong:
        why = f"is {chosen.wrong}" if chosen else "is not on the volume"
        raise Refused(
            64,
            f"STEP={step}: that checkpoint {why}; whole ones are of steps {listed_steps} (make "
            "checkpoints)",
        )
    return chosen


def is_same(chosen: Checkpoint, folder: Path) -> bool:
    """Whether this very checkpoint is here already, in full size."""
    try:
        manifest = load_manifest(folder)
    except CheckpointError:
        return False
    return manifest == chosen.manifest and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, (size, _) in chosen.hashes.items()
    )


def remaining(chosen: Checkpoint, half: Path) -> int:
    """Bytes of a checkpoint that are not here yet."""
    return sum(
        max(0, size - ((half / name).stat().st_size if (half / name).exists() else 0))
        for name, (size, _) in chosen.hashes.items()
    )


def check_space(paths: RunPaths, need: int) -> None:
    """Raises Refused where the disk has no room for it."""
    parent = paths.folder
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < need + SPARE:
        raise Refused(
            78,
            f"{show_path(paths.folder)}: this takes {number_formats.size(need)}, and the disk has {number_formats.size(free)} "
            "free; make room, or put it on another disk with RUNS_DIR",
        )


def fetch_file(volume: Volume, file: File, paths: RunPaths, record: Record, meter: Meter) -> None:
    """Bring one file; what has only grown is continued."""
    final, partial = paths.folder / file.name, paths.folder / HALF / file.name
    if (
        not partial.exists()
        and file.size > transfer.SMALL
        and final.is_file()
        and final.stat().st_size <= file.size
        and record.is_brought(file.name, final)
    ):
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # a link that leads nowhere
        shutil.copyfile(final, partial)
    if partial.exists() and file.size > transfer.SMALL:
        meter.done += min(partial.stat().st_size, file.size)
    digest = transfer.whole(volume, f"{volume.folder}/{file.name}", file.size, partial, meter)
    record.note(file, digest)
    final.parent.mkdir(parents=True, exist_ok=True)
    os.replace(partial, final)


def fetch_checkpoint(
    volume: Volume, chosen: Checkpoint, half: Path, paths: RunPaths, record: Record, meter: Meter
) -> None:
    """Bring a checkpoint into a hidden folder, compare every hash of its manifest, then give it its name."""
    folder = f"{volume.folder}/checkpoints/{chosen.name}"
    for name, (size, digest) in chosen.hashes.items():
        for again in range(transfer.TRIES):
            transfer.bring(volume, f"{folder}/{name}", size, half / name, meter)
            if describe(half, name)[1] == digest:
                break
            meter.done -= size
            (half / name).unlink()
            if again + 1 == min(3, transfer.TRIES):
                raise Refused(
                    1,
                    f"checkpoint {chosen.name}: {name} arrives with another hash than its manifest says, "
                    f"{again + 1} times; it is damaged on the volume: take another with STEP (make "
                    "checkpoints lists them)",
                )
    for stray in [path for path in half.iterdir() if path.name not in chosen.hashes]:
        stray.unlink()  # of a checkpoint of the same step that was another
    write_whole(half / "MANIFEST.json", json.dumps(chosen.manifest, indent=1).encode())
    flush_folder(half)
    record.note_checkpoint(chosen.name)
    final = paths.checkpoints / chosen.name
    if final.exists():  # the run went back there, and wrote that step again
        os.rename(final, paths.checkpoints / f".replaced-{chosen.name}-{uuid.uuid4().hex[:8]}")
    os.rename(half, final)
    flush_folder(paths.checkpoints)
