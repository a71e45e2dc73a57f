"""Safetensors files, written with one tensor in memory at a time.

    [length of the header, 8 bytes][header: JSON of name -> type, shape, offsets][tensors]

The header comes first, so all shapes must be known before the first tensor is.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from settings import ExpectedError

INDEX = "model.safetensors.index.json"
TYPES = {"float32": "F32", "bfloat16": "BF16"}  # DTYPE -> its name in a header
SIZES = {"float32": 4, "bfloat16": 2}  # bytes of an element
FILE_GB = 5  # GB of weights in one file at most, as on the Hugging Face Hub

Shapes = Mapping[str, tuple[int, ...]]


class WeightsError(ExpectedError):
    """Weights that are of no use. The message says what to do."""


def size_of(shapes: Shapes, dtype: str) -> int:
    """Return the bytes of all weights."""
    return sum(map(math.prod, shapes.values())) * SIZES[dtype]


def split_names(shapes: Shapes, dtype: str) -> dict[str, list[str]]:
    """Return file name -> names of the weights in it, in the order of `shapes`."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * SIZES[dtype]
        if files[-1] and filled + size > FILE_GB * 1e9:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    count = len(files)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(files, 1)
    }


def write(
    folder: Path, shapes: Shapes, dtype: str, read: Callable[[str], Tensor]
) -> dict[str, str]:
    """Write weights to as many files as they need, and an index if there are several.

    Args:
        read: returns the weight of a name, float32.

    Returns:
        File name -> sha256 of what was written. Raises WeightsError, OSError.
    """
    files = split_names(shapes, dtype)
    hashes = {}
    for file_name, names in files.items():
        tensors = (check_finite(name, read(name)).to(getattr(torch, dtype)) for name in names)
        hashes[file_name] = write_file(
            folder / file_name, make_header(shapes, names, dtype), tensors
        )
    if len(files) > 1:
        size = size_of(shapes, dtype)
        index = {
            "metadata": {"total_parameters": size // SIZES[dtype], "total_size": size},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return hashes


def write_file(path: Path, header: bytes, tensors: Iterable[Tensor]) -> str:
    """Write a header and the tensors that it announces. Returns the sha256 of the file."""
    digest = hashlib.sha256(header)
    with open(path, "wb") as file:
        file.write(header)
        for tensor in tensors:
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def make_header(shapes: Shapes, names: list[str], dtype: str) -> bytes:
    """Return the header of a file with these weights, padded so that they are aligned to 8 bytes."""
    # Without this entry transformers does not read the file.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin = end
        end += math.prod(shapes[name]) * SIZES[dtype]
        entries[name] = {
            "dtype": TYPES[dtype],
            "shape": list(shapes[name]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[bytes, list[str]]:
    """Return the header of a file, and the names of its tensors in their order."""
    with open(path, "rb") as file:
        length = file.read(8)
        text = file.read(int.from_bytes(length, "little"))
    entries = json.loads(text)
    entries.pop("__metadata__", None)
    return length + text, sorted(entries, key=lambda name: entries[name]["data_offsets"])


def check_finite(name: str, weight: Tensor) -> Tensor:
    """Return a weight. Raises WeightsError if it holds values that are infinite or NaN."""
    if weight.isfinite().all():
        return weight
    raise WeightsError(
        f"{name} holds values that are infinite or NaN, so the model computes nothing. Export an "
        "earlier checkpoint with STEP (make checkpoints lists them)."
    )


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
