"""The folder of an export: written under another name, renamed when it is complete.

    runs/RUN_NAME/.export-XXXXXXXX -> runs/RUN_NAME/export

An export that fails or is killed leaves the earlier one as it was, and the next export deletes what
it left. A folder with a file that no export wrote, or that was edited, is not replaced.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from export.weight_files import sha256_of
from record import number_formats
from record.durable import flush_file, flush_folder
from settings import ExpectedError
from settings.resolve import show_path

SUMS = "SHA256SUMS"
FACTS = "export.json"  # run, step, model and stop token of an export
UNFINISHED = ".export-"
REPLACED = ".replaced-export-"
SMALL_FILES = 2**24  # bytes that all files except the weights and the tokenizer take at most
NEVER_EDITED = (".safetensors", ".gguf")


class PlaceError(ExpectedError):
    """A folder that cannot be written or must not be replaced. The message says what to do."""


@contextlib.contextmanager
def new_export(run: Path, size: int) -> Iterator[Path]:
    """Yield a folder to write to. It becomes the run's export unless an error leaves the block.

    Args:
        size: bytes that weights and tokenizer will take.

    Raises PlaceError.
    """
    target = run / "export"
    with hold(run):
        clear(run)
        refuse_to_lose(target)
        check_space(run, size + SMALL_FILES)
        folder = run / f"{UNFINISHED}{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        try:
            yield folder
            replace(folder, target)
        finally:
            clear(run)


@contextlib.contextmanager
def hold(run: Path) -> Iterator[None]:
    """Keep a second export of the run out. Raises PlaceError."""
    try:
        lock: TextIO = open(run / ".export", "a+", encoding="utf-8")  # noqa: SIM115 (held until it is closed)
    except OSError as error:
        raise PlaceError(
            f"{run}: Cannot be written ({error.strerror}). Fix its permissions."
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlaceError(f"{run}: Another process exports this run. Wait for it.") from None
        yield


def clear(run: Path) -> None:
    """Restore an export whose replacement was interrupted, and delete incomplete ones."""
    for old in run.glob(f"{REPLACED}*"):
        if not (run / "export").exists():
            os.rename(old, run / "export")
        shutil.rmtree(old, ignore_errors=True)
    for incomplete in run.glob(f"{UNFINISHED}*"):
        shutil.rmtree(incomplete, ignore_errors=True)


def refuse_to_lose(folder: Path) -> None:
    """Raise PlaceError if a folder that would be replaced holds what no export wrote."""
    if folder.is_symlink() or folder.is_file():
        raise PlaceError(f"{folder}: Is not the folder of an export. Rename it.")
    if not folder.exists():
        return
    known = read_sums(folder)
    foreign = []
    for path in sorted(folder.iterdir()):
        is_ours = path.name in known and not path.is_dir()
        if is_ours and path.suffix not in NEVER_EDITED:
            is_ours = sha256_of(path) == known[path.name]
        if not is_ours and path.name != SUMS:
            foreign.append(path.name)
    if foreign:
        raise PlaceError(
            f"{folder}: {', '.join(foreign[:8])}: Was edited, or no export wrote it. Rename the folder "
            "to keep it, or delete it, and run the same command again."
        )


def check_space(run: Path, need: int) -> None:
    """Print what an export takes. Raises PlaceError if the disk has less."""
    free = shutil.disk_usage(run).free
    sizes = f"{number_formats.size(need)} of disk; {number_formats.size(free)} are free"
    if free < need:
        raise PlaceError(
            f"{run}: The export takes {sizes}. An earlier export stays until the new one is complete. "
            "Free disk space. For a pretrained run, DTYPE=bfloat16 halves a float32 export."
        )
    sys.stdout.write(f"Writing {show_path(run / 'export')}: takes {sizes}.\n")
    sys.stdout.flush()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write export.json, which says what an export was made of."""
    write_json(folder / FACTS, {"schema": 1, **facts})


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


def read_sums(folder: Path) -> dict[str, str]:
    """Return file name -> sha256 of SHA256SUMS; {} if there is none that can be read."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    sums = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        if name:
            sums[name] = digest
    return sums


def seal(folder: Path, written: Mapping[str, str]) -> None:
    """Write SHA256SUMS over all files, and flush them to disk.

    Args:
        written: file name -> sha256 of what was written to it.

    Raises PlaceError if the disk holds anything else.
    """
    for path in folder.iterdir():
        flush_file(path)
    sums = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    wrong = [name for name, digest in written.items() if sums[name] != digest]
    if wrong:
        raise PlaceError(
            f"{folder}: {', '.join(wrong)}: What the disk holds is not what was written. The disk or the "
            "memory of this machine is at fault. Run the same command again, then on another machine."
        )
    lines = [f"{digest}  {name}\n" for name, digest in sums.items()]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    flush_file(folder / SUMS)
    flush_folder(folder)


def replace(folder: Path, target: Path) -> None:
    """Give a complete folder its name. `clear` then deletes the one that had it."""
    if target.exists():
        os.rename(target, target.parent / f"{REPLACED}{uuid.uuid4().hex[:8]}")
    os.rename(folder, target)
    flush_folder(target.parent)
