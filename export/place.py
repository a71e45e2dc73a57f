"""The folder of an export: made beside its name, renamed when it is whole, checked before another takes its place.

    runs/RUN_NAME/.export-XXXXXXXX -> runs/RUN_NAME/export

A killed export leaves the folder before it as it was, or none; what it has left is cleared by the next. A folder that
holds a file which no export wrote, or one that was changed since, is not replaced: somebody would lose work.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from export.weight_files import sha256_of
from record.durable import flush_folder

SUMS = "SHA256SUMS"
FACTS = "export.json"  # run, step, model and stop token of an export
UNFINISHED, REPLACED = ".export-", ".replaced-export-"


class PlaceError(Exception):
    """A folder that cannot be written or must not be replaced; the message says what to do."""


@contextlib.contextmanager
def alone(run: Path) -> Iterator[None]:
    """Hold the run against a second export, and clear what a killed one has left. Raises PlaceError."""
    try:
        lock: TextIO = open(run / ".export", "a+", encoding="utf-8")  # noqa: SIM115 (held until it is closed)
    except OSError as error:
        raise PlaceError(
            f"{run}: cannot be written ({error.strerror}); mend its permissions"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlaceError(f"{run}: another process exports this run; wait for it") from None
        clear(run)
        yield


def clear(run: Path) -> None:
    """Bring back an export that was on its way to be replaced, and delete halves."""
    for old in run.glob(f"{REPLACED}*"):
        if not (run / "export").exists():
            os.rename(old, run / "export")
        shutil.rmtree(old, ignore_errors=True)
    for half in run.glob(f"{UNFINISHED}*"):
        shutil.rmtree(half, ignore_errors=True)


@contextlib.contextmanager
def unfinished(run: Path) -> Iterator[Path]:
    """A fresh folder to make an export in; gone at the end unless it was renamed."""
    folder = run / f"{UNFINISHED}{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sums(folder: Path) -> dict[str, str]:
    """File name -> sha256 that SHA256SUMS gives; {} where there is none that can be read."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines) if name}


def refuse_to_lose(folder: Path) -> None:
    """Raises PlaceError where a folder that is to be replaced holds what no export wrote."""
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise PlaceError(f"{folder}: is no folder of an export; move it away")
    known = sums(folder)
    try:
        own = sorted(
            path.name
            for path in folder.iterdir()
            if path.name != SUMS
            and (
                path.is_dir()
                or path.name not in known
                or (path.suffix != ".safetensors" and sha256_of(path) != known[path.name])
            )
        )  # nobody edits those
    except OSError as error:
        raise PlaceError(
            f"{error.filename or folder}: cannot be read ({error.strerror}); move it away"
        ) from None
    if own:
        raise PlaceError(
            f"{folder}: holds {', '.join(own[:8])}, which no export wrote or which was changed since; "
            f"rename that folder to keep it, or delete it, and call make export again"
        )


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write export.json, which says what an export was made of."""
    text = json.dumps({"schema": 1, **facts}, indent=2, ensure_ascii=False)
    (folder / FACTS).write_text(f"{text}\n", encoding="utf-8")


def exported_step(folder: Path) -> int | None:
    """Return the step of the run that an export holds, or None if the folder does not say.

    Commit 9fc3810 wrote finetuned.json for a fine-tuned run, and for others only the model card.
    """
    for name in (FACTS, "finetuned.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads((folder / name).read_text(encoding="utf-8"))["step"])
    with contextlib.suppress(OSError, ValueError):
        card = (folder / "README.md").read_text(encoding="utf-8")
        steps = re.search(r"^\| steps \| ([0-9][0-9,]*)", card, re.MULTILINE)
        if steps:
            return int(steps[1].replace(",", ""))
    return None


def seal(folder: Path) -> None:
    """Write SHA256SUMS over all files, in the form that sha256sum -c reads, and have all of them on disk."""
    names = sorted(path.name for path in folder.iterdir())
    (folder / SUMS).write_text(
        "".join(f"{sha256_of(folder / name)}  {name}\n" for name in names), encoding="utf-8"
    )
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    flush_folder(folder)


def replace(folder: Path, target: Path) -> None:
    """Give a whole folder its name; the one that had it is deleted only then."""
    old = target.parent / f"{REPLACED}{uuid.uuid4().hex[:8]}"
    if target.exists():
        os.rename(target, old)
    os.rename(folder, target)
    flush_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
