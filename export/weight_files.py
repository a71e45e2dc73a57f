"""Safetensors files, written with one tensor in memory at a time.

    [length of the header, 8 bytes][header: JSON of name -> type, shape, offsets][tensors]

The header comes first, so all shapes must be known before the first tensor is. `safetensors` writes a
file only from tensors that are all in memory.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from settings import ExpectedError
from train.model import hf_import
from train.model.hf_import import read_json

INDEX = "model.safetensors.index.json"
TYPES = {"float32": "F32", "bfloat16": "BF16"}  # DTYPE -> its name in a header
EXPORT_SHARD_GB = 5  # GB of weights in one file at most, as on the Hugging Face Hub
SAMPLED = 2**20  # bytes of each file that `fingerprint` reads

Shapes = Mapping[str, tuple[int, ...]]


class WeightsError(ExpectedError):
    """Weights that are of no use. The message says what to do."""


def sizes_of(shapes: Shapes, dtype: str) -> dict[str, int]:
    """Return the bytes of each weight."""
    item = getattr(torch, dtype).itemsize
    return {name: math.prod(shape) * item for name, shape in shapes.items()}


def write(
    folder: Path, shapes: Shapes, dtype: str, read: Callable[[str], Tensor]
) -> dict[str, str]:
    """Write weights to as many files as they need, and an index if there are several.

    Args:
        read: returns the weight of a name, float32.

    Returns:
        File name -> sha256 of what was written. Raises WeightsError, OSError.
    """
    split = split_state_dict_into_shards_factory(
        sizes_of(shapes, dtype),
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(EXPORT_SHARD_GB * 1e9),
    )
    hashes = {}
    for file_name, names in split.filename_to_tensors.items():
        tensors = (check_finite(name, read(name)).to(getattr(torch, dtype)) for name in names)
        header = make_header({name: shapes[name] for name in names}, dtype)
        hashes[file_name] = write_file(folder / file_name, header, tensors)
    if split.is_sharded:
        count = sum(map(math.prod, shapes.values()))
        write_json(
            folder / INDEX,
            {
                "metadata": {"total_parameters": count, **split.metadata},
                "weight_map": split.tensor_to_filename,
            },
        )
    return hashes


def write_file(path: Path, header: bytes, tensors: Iterable[Tensor]) -> str:
    """Write a header and the tensors that it announces. Returns the sha256 of the file."""
    digest = hashlib.sha256(header)
    with open(path, "xb") as file:
        file.write(header)
        for tensor in tensors:
            content = as_bytes(tensor).data
            digest.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def as_bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor as a NumPy array, since NumPy has no bfloat16."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def make_header(shapes: Shapes, dtype: str) -> bytes:
    """Return the header of a file with these weights, padded so that they are aligned to 8 bytes."""
    # Without this entry transformers does not read the file.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in sizes_of(shapes, dtype).items():
        begin = end
        end += size
        entries[name] = {
            "dtype": TYPES[dtype],
            "shape": list(shapes[name]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> bytes:
    """Return all bytes of a file before its first tensor."""
    with open(path, "rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def check_finite(name: str, weight: Tensor) -> Tensor:
    """Return a weight. Raises WeightsError if it holds values that are infinite or NaN."""
    if weight.isfinite().all():
        return weight
    raise WeightsError(
        f"{name} holds values that are infinite or NaN, so the model computes nothing. Export an "
        "earlier checkpoint with STEP (make checkpoints lists them)."
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


# ---- Which weights a file or folder has


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_hash_of(path: Path, entry: Any) -> bool:
    """Tell whether a file has the hash that the Hub gives: SHA-256 if it is in LFS, else a git blob's.

    Args:
        entry: what huggingface_hub returns about the file on the Hub.
    """
    if entry.lfs:
        return bool(sha256_of(path) == entry.lfs.sha256)
    content = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content)
    return bool(blob.hexdigest() == entry.blob_id)


def fingerprint(folder: Path) -> str:
    """Return a hash by which fine-tuning recognizes a model.

    It covers config.json, the name, type and shape of each tensor, and SAMPLED bytes in the middle of
    each file, where the weights of a base model differ from tuned ones. Reading all would take minutes.
    """
    stored = hf_import.tensors(folder)
    facts: list[Any] = [
        read_json(folder / "config.json"),
        sorted((name, one.dtype, one.shape) for name, one in stored.items()),
    ]
    for path in hf_import.weight_files(folder):
        size = path.stat().st_size
        with open(path, "rb") as file:
            file.seek(max(0, size - SAMPLED) // 2)
            sample = file.read(SAMPLED)
        facts.append((path.name, size, hashlib.sha256(sample).hexdigest()))
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
