"""The folder of an export: written under another name, renamed when it is complete.

    runs/RUN_NAME/.export-XXXXXXXX -> runs/RUN_NAME/export

An export that fails or is killed leaves the earlier one as it was, and the next export deletes what
it left. A folder with a file that no export wrote, or that was edited, is not replaced. An earlier
export that a run was fine-tuned from is renamed, since that run needs it to resume:

    runs/RUN_NAME/export -> runs/RUN_NAME/export-FINGERPRINT
"""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from export.weight_files import fingerprint, sha256_of, write_json
from record import number_formats
from record.durable import flush_file, flush_folder
from record.regular_file import only_regular
from record.run_paths import SITE
from settings import ExpectedError
from settings.json_file import read_object
from settings.resolve import show_path
from settings.resume import RunConfigError, read_run_config
from settings.terminal import complain, say
from train.model.hf_import import ForeignError

SUMS = "SHA256SUMS"
FACTS = "export.json"  # run, step, model and stop token of an export
UNFINISHED = ".export-"
REPLACED = ".replaced-export-"
EARLIER = "export-"  # followed by the fingerprint of what a run was fine-tuned from
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
    with lock(run):
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
def lock(run: Path) -> Iterator[None]:
    """Allow one export of the run at a time. Raises PlaceError, OSError."""
    with open(run / ".export", "a+", encoding="utf-8", opener=only_regular) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlaceError(f"{run}: Another process exports this run. Wait for it.") from None
        yield


def clear(run: Path) -> None:
    """Restore an export whose replacement was interrupted, and delete replaced and incomplete ones."""
    for old in run.glob(f"{REPLACED}*"):
        if (run / "export").exists():
            retire(old)
        else:
            os.rename(old, run / "export")
    for incomplete in run.glob(f"{UNFINISHED}*"):
        shutil.rmtree(incomplete, ignore_errors=True)


def refuse_to_lose(folder: Path) -> None:
    """Raise PlaceError if a folder that would be replaced holds what no export wrote."""
    if folder.is_symlink() or folder.is_file():
        raise PlaceError(f"{folder}: Is not the folder of an export. Rename it.")
    if not folder.exists():
        return
    sums = read_sums(folder)
    foreign = []
    for path in sorted(folder.iterdir()):
        is_ours = path.name in sums and not path.is_dir()
        if is_ours and path.suffix not in NEVER_EDITED:
            is_ours = sha256_of(path) == sums[path.name]
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
    say(f"Writing {show_path(run / 'export')}: takes {sizes}.")


# ---- What an export says of itself


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write export.json, which says what an export was made of."""
    write_json(folder / FACTS, {"schema": 1, **facts})


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what export.json says; {} for a folder without one."""
    with contextlib.suppress(OSError, ValueError):
        return read_object(folder / FACTS)
    return {}


def read_sums(folder: Path) -> dict[str, str]:
    """Return file name -> sha256 of SHA256SUMS; {} if there is none that can be read."""
    sums = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
            digest, _, name = line.partition("  ")
            sums[name] = digest
    sums.pop("", None)  # of a line that names no file
    return sums


def seal(folder: Path, written: Mapping[str, str]) -> None:
    """Write SHA256SUMS over all files, and flush them to disk.

    Args:
        written: file name -> sha256 of what was written to it.

    Raises PlaceError if the disk holds anything else.
    """
    sums = {}
    for path in sorted(folder.iterdir()):
        flush_file(path)
        sums[path.name] = sha256_of(path)
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


# ---- Earlier exports


def replace(folder: Path, target: Path) -> None:
    """Give a complete folder its name. `clear` then takes care of the one that had it."""
    if target.exists():
        os.rename(target, target.parent / f"{REPLACED}{uuid.uuid4().hex[:8]}")
    os.rename(folder, target)
    flush_folder(target.parent)


def retire(old: Path) -> None:
    """Delete an export that was replaced, or rename it if another run needs it to resume."""
    run = old.parent
    with contextlib.suppress(ForeignError):
        model = fingerprint(old)
        earlier = run / f"{EARLIER}{model}"
        users = find_users(run.parent).get(model)
        if users and model != fingerprint(run / "export") and not earlier.exists():
            os.rename(old, earlier)
            complain(
                f"The earlier export is now {show_path(earlier)}, because these runs were fine-tuned from "
                f"it: {', '.join(users)}. Delete it when you no longer resume any of them."
            )
            return
    shutil.rmtree(old, ignore_errors=True)


def find_users(runs: Path) -> dict[str, list[str]]:
    """Return the fingerprint of each model that runs were fine-tuned from -> their names."""
    users: dict[str, list[str]] = {}
    for path in [*runs.glob("*/config.json"), *runs.glob(f"*/{SITE}*/config.json")]:
        with contextlib.suppress(RunConfigError):
            for attempt in read_run_config(path).get("attempts", []):
                names = users.setdefault(attempt.get("model_fingerprint"), [])
                name = str(path.parent.relative_to(runs))
                if name not in names:
                    names.append(name)
    return users
