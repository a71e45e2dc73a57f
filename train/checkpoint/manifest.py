"""A checkpoint's MANIFEST.json: which files belong to it, and where training stood. Loads no torch.

    {"schema": 2, "step": 1000, "data": {"step": 1000, "gaps": [], ...}, ...,
     "files": {"__0_0.distcp": [size, xxh3], ...}, "hash": xxh3 of all of the above}

`make checkpoints` and `make fetch-run` read it here, too. The hash finds every flipped bit. It does not
keep anybody from editing a manifest: it has no key. A later schema is to keep the hash as it is, so that
a manifest of another version can be told from a damaged one.
"""

import json
import os
from pathlib import Path
from typing import Any

import xxhash

from record.regular_file import is_file_name, open_inside
from record.run_paths import step_of_checkpoint
from settings import ExpectedError
from settings.json_file import parse_object, read_whole
from train.checkpoint import tensor_list

FILE = "MANIFEST.json"
SCHEMA = 2
LITE = ("adapter_model.safetensors", "adapter_config.json")  # of adapters alone (finetune/lite.py)
CHUNK_BYTES = 2**24  # that are read at once to hash a file
DAMAGE = (ValueError, LookupError, TypeError, AttributeError)  # what a damaged manifest raises


class CheckpointError(ExpectedError):
    """A checkpoint that cannot be written, or none that can be read; the message says what to do."""


class OtherFormat(CheckpointError):
    """A checkpoint of another version of this code: nothing is wrong with it."""


def seal_manifest(content: dict[str, Any]) -> bytes:
    """Return the file that holds this content, with its schema and its hash."""
    # As it will be read back: with lists for tuples.
    content = json.loads(json.dumps({"schema": SCHEMA, **content}))
    return json.dumps(content | {"hash": hash_content(content)}, indent=1).encode()


def hash_content(content: dict[str, Any]) -> str:
    """Return the xxh3 of all but the hash, which does not depend on order and layout."""
    canonical = json.dumps(content | {"hash": None}, sort_keys=True)
    return xxhash.xxh3_64_hexdigest(canonical.encode())


def parse_manifest(content: bytes, name: str) -> dict[str, Any]:
    """Return what a manifest holds. `name` is that of its folder.

    Raises:
        OtherFormat: another version wrote it.
        DAMAGE: it is damaged, or of another step.
    """
    manifest = parse_object(content)
    if manifest.get("hash") != hash_content(manifest):
        raise ValueError("its own hash differs")
    if manifest["schema"] != SCHEMA:
        raise OtherFormat(
            f"{name}: has format {manifest['schema']}; this version reads {SCHEMA}. Continue with the "
            "version that wrote it, or choose another RUN_NAME"
        )
    check_names(manifest["files"])
    if take(manifest, "step", int) != step_of_checkpoint(name):
        raise ValueError(f"it is of step {manifest['step']}: the folder is a copy, or was renamed")
    check_states(manifest)
    return manifest


def check_names(files: dict[str, Any]) -> None:
    """Check that a manifest lists a checkpoint's files, and nothing outside its folder. Raises DAMAGE."""
    if not all(isinstance(described, list) for described in files.values()):
        raise ValueError("its files have no sizes and hashes")
    for name in files:
        if not is_file_name(name):
            raise ValueError(f"{name!r} is not the name of a file in its folder")
    if tensor_list.FILE not in files and files.keys() != set(LITE):
        raise ValueError(f"it does not list {tensor_list.FILE}")


def check_states(manifest: dict[str, Any]) -> None:
    """Check the form of everything that a resume reads in a manifest. Raises DAMAGE.

    The hash has no key, so somebody who edits a manifest can write a hash that fits.
    """
    data = take(manifest, "data", dict)
    if take(data, "step", int) != manifest["step"]:
        raise ValueError(f"its data is of step {data['step']}")
    take(data, "fingerprint", str)
    check_pairs(data, "gaps")
    for shards in take(data, "opened", dict).values():
        take(shards, "shards", int)
        take(shards, "digest", str)
        take(shards, "round", bool)
    for name in ("evaluated_at", "core_at", "tensors", "moments"):
        if name in manifest:
            take(manifest, name, int)
    if "val_loss" in manifest:
        take(manifest, "val_loss", int, float, type(None))
    is_lite = tensor_list.FILE not in manifest["files"]
    if manifest.get("mode") != ("lite" if is_lite else None):
        raise ValueError(f"its mode is {manifest.get('mode')!r}, which does not fit its files")
    if "guard" in manifest:
        check_guard(take(manifest, "guard", dict))
    if "sites" in manifest:
        sites = take(manifest, "sites", dict)
        for name in ("exchanges", "turn", "base", "finished"):
            take(sites, name, int)
        if "away" in sites:
            check_pairs(sites, "away")
    if "run" in manifest:
        run = take(manifest, "run", dict)
        take(run, "id", str)
        take(run, "attempt", str)
        take(run, "settings", dict)


def check_guard(guard: dict[str, Any]) -> None:
    """Check that a guard's state is windows of numbers, and counts. Raises DAMAGE."""
    for name in guard:
        if name not in ("loss", "grad_norm"):
            take(guard, name, int, float)
            continue
        for value in take(guard, name, list):
            if type(value) not in (int, float):
                raise ValueError(f"its guard has {value!r:.40} in {name}")


def take(states: dict[str, Any], name: str, *types: type) -> Any:
    """Return the value of this name, which must be of one of these types. Raises DAMAGE."""
    if name not in states:
        raise ValueError(f"it has no {name}")
    value = states[name]
    if type(value) not in types:  # not isinstance: True is no step
        raise ValueError(f"its {name} is {value!r:.40}")
    return value


def check_pairs(states: dict[str, Any], name: str) -> None:
    """Check that the value of this name is a list of pairs of integers. Raises DAMAGE."""
    for pair in take(states, name, list):
        if [type(number) for number in pair] != [int, int]:
            raise ValueError(f"its {name} have {pair!r:.40}")


def load_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose other files nobody has looked at.

    Raises CheckpointError, OtherFormat.
    """
    if folder.is_symlink():
        raise CheckpointError(f"{folder.name}: is a link, and a checkpoint is a folder of its run")
    try:
        with open_inside(folder, FILE) as file:
            return parse_manifest(read_whole(file), folder.name)
    except (OSError, *DAMAGE) as error:
        raise CheckpointError(f"{folder.name}: {FILE} is missing or damaged ({error})") from None


def verify(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, all files of which are as they were written.

    Raises CheckpointError, OtherFormat.
    """
    manifest = load_manifest(folder)
    check_sizes(folder, manifest["files"])
    for name, described in manifest["files"].items():
        try:
            if describe(folder, name) != tuple(described):
                raise ValueError("its hash differs")
        except (OSError, ValueError) as error:
            raise damaged(folder, name, str(error)) from None
    if tensor_list.FILE in manifest["files"]:
        check_tensors(folder, manifest)
    return manifest


def check_sizes(folder: Path, files: dict[str, list[Any]]) -> None:
    """Check the size of every file before any is hashed: that of one which has grown may take days.

    Raises CheckpointError.
    """
    for name, described in files.items():
        try:
            with open_inside(folder, name) as file:
                size = os.fstat(file.fileno()).st_size
            if [size] != described[:1]:
                raise ValueError(f"it has {size} bytes, which are not as many as were written")
        except (OSError, ValueError) as error:
            raise damaged(folder, name, str(error)) from None


def check_tensors(folder: Path, manifest: dict[str, Any]) -> None:
    """Check that a manifest lists the files of all tensors, as many as were written.

    Raises CheckpointError.
    """
    try:
        listing = tensor_list.read_tensor_list(folder)
    except (OSError, tensor_list.ForbiddenPickle) as error:
        raise damaged(folder, tensor_list.FILE, str(error)) from None
    files = manifest["files"]
    if missing := listing.files() - files.keys():
        raise damaged(folder, FILE, f"it does not list {min(missing)}, which holds tensors")
    for part in listing.parts.values():
        if part.offset + part.length > files[part.file][0]:
            why = f"it has a part that ends after the {files[part.file][0]} bytes of {part.file}"
            raise damaged(folder, tensor_list.FILE, why)
    for name, (size, _) in files.items():
        # A process that had no tensor to write has left an empty file.
        if size and name != tensor_list.FILE and name not in listing.files():
            raise damaged(folder, FILE, f"it lists {name}, which holds no tensor")
    count = manifest.get("tensors", len(listing.tensors))  # commit 9fc3810 did not count them
    if count != len(listing.tensors):
        why = f"it has {len(listing.tensors)} tensors, and {count} were written"
        raise damaged(folder, tensor_list.FILE, why)


def damaged(folder: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{folder.name}: {name} is damaged ({why})")


def describe(folder: Path, name: str) -> tuple[int, str]:
    """Return the size in bytes and the xxh3 of a file in a folder. Raises OSError."""
    digest = xxhash.xxh3_64()
    with open_inside(folder, name) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
        return file.tell(), digest.hexdigest()
