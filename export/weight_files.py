"""Weights to safetensors files, one weight in memory at a time, and read back.

    [length of the header, 8 bytes][header: JSON of name -> type, shape, place][weights, one behind the other]

All shapes are known before the first weight is, so that the header can be written first. Up to a size there is one
file, model.safetensors; above it there are several, each with as many weights as fit and at least one, and an index.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

INDEX = "model.safetensors.index.json"
TYPES = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
}  # type -> its name in a header, bytes of an element
PIECE = 2**24  # bytes read back at once
FILE_GB = 5  # GB of weights in one file at most, as on the Hugging Face Hub

Shapes = Mapping[str, tuple[int, ...]]


class WeightsError(Exception):
    """Weights that are of no use, or files that do not hold what was written; the message says what to do."""


def parts(shapes: Shapes, dtype: str) -> dict[str, list[str]]:
    """File name -> names of the weights in it, in the order of `shapes`."""
    files: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * TYPES[dtype][1]
        if files[-1] and held + size > FILE_GB * 1e9:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, 1)
    }


def write(
    folder: Path, shapes: Shapes, dtype: str, read: Callable[[str], Tensor]
) -> dict[str, str]:
    """Write the files, and the index where there are several; returns name -> hash of the bytes of each weight.

    read: gives the weight of a name, float32 and of its shape. Raises WeightsError for one that holds a value that is
    no number, and OSError.
    """
    hashes: dict[str, str] = {}
    files = parts(shapes, dtype)
    for file_name, names in files.items():
        with open(folder / file_name, "wb") as file:
            file.write(header(shapes, names, dtype))
            for name in names:
                weight = read(name)
                if not weight.isfinite().all():
                    raise WeightsError(
                        f"{name} holds values that are infinite or no numbers: nothing can be computed "
                        "with these weights. Export an earlier checkpoint (STEP; make checkpoints lists "
                        "them)"
                    )
                content = (
                    weight.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().data
                )
                hashes[name] = xxhash.xxh3_128(content).hexdigest()
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
    if len(files) > 1:
        total = sum(math.prod(shape) for shape in shapes.values())
        index = {
            "metadata": {"total_parameters": total, "total_size": total * TYPES[dtype][1]},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return hashes


def header(shapes: Shapes, names: list[str], dtype: str) -> bytes:
    """What a file with these weights begins with; a multiple of 8 bytes, so that weights lie where processors want."""
    entries: dict[str, Any] = {
        "__metadata__": {"format": "pt"}
    }  # without it transformers does not read the file
    end = 0
    for name in names:
        begin, end = end, end + math.prod(shapes[name]) * TYPES[dtype][1]
        entries[name] = {
            "dtype": TYPES[dtype][0],
            "shape": list(shapes[name]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def differing(folder: Path, hashes: Mapping[str, str]) -> list[str]:
    """Names of the weights that the files hold with other bytes than these hashes are of, or that one of both has not.
    Raises OSError."""
    found = {
        name: digest
        for path in sorted(folder.glob("*.safetensors"))
        for name, digest in hashes_in(path)
    }
    return sorted(
        name for name in found.keys() | hashes.keys() if found.get(name) != hashes.get(name)
    )


def hashes_in(path: Path) -> Iterator[tuple[str, str]]:
    """(name, hash of the bytes) of each weight in a file, by its own header."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            digest, left = xxhash.xxh3_128(), end - begin
            while left and (piece := file.read(min(left, PIECE))):
                digest.update(piece)
                left -= len(piece)
            yield name, digest.hexdigest()


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
