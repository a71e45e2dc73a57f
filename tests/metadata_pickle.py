"""A checkpoint's .metadata, byte for byte as a Python pickles it, written without torch and without that Python."""

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

DCP = "torch.distributed.checkpoint"
KINDS = (f"{DCP}.metadata", "_MEM_FORMAT_ENCODING")
MEMBER = "TORCH_CONTIGUOUS_FORMAT"
PATH_OF = {  # Python -> where pathlib's classes are
    "3.11.2": "pathlib",
    "3.11.7": "pathlib",
    "3.12.1": "pathlib",
    "3.13.0": "pathlib._local",
    "3.14.0": "pathlib",
}


@dataclasses.dataclass(frozen=True)
class Global:
    """A class or function by its name."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> "Call":
        return Call(self, arguments)


@dataclasses.dataclass(frozen=True)
class Call:
    """The result of a call."""

    function: Any
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """An object with this state; `of` is its class, or what is built with that state."""

    of: Any
    state: Any
    is_new: bool = True


def encode(value: Any) -> bytes:
    """Return the opcodes that put this value on the pickle's stack."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return b"J" + struct.pack("<i", value)
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case bytes():  # opcodes as they are
            return value
        case tuple():
            return b"(" + b"".join(map(encode, value)) + b"t"
        case list():
            return b"(" + b"".join(map(encode, value)) + b"l"
        case dict():
            return b"(" + b"".join(encode(key) + encode(of) for key, of in value.items()) + b"d"
        case Global():
            return f"c{value.module}\n{value.name}\n".encode()
        case Call():
            return encode(value.function) + encode(value.arguments) + b"R"
        case Made():
            return (
                encode(value.of) + (b")\x81" if value.is_new else b"") + encode(value.state) + b"b"
            )
    raise TypeError(value)


def dumps(value: Any) -> bytes:
    return b"\x80\x02" + encode(value) + b"."


def size(*numbers: int) -> Call:
    return Global("torch", "Size")(numbers)


def made(name: str, state: Any, module: str = f"{DCP}.metadata") -> Made:
    return Made(Global(module, name), state)


def metadata(tensors: Mapping[str, tuple[str, int]], python: str = "3.11.7") -> Made:
    """A list of vectors of float32: key -> (file, numbers), one after another in their file."""
    format = Global(*KINDS)(0)
    if python == "3.11.2":
        format = Global("builtins", "getattr")(Global(*KINDS), MEMBER)
    layout = Global("torch.serialization", "_get_layout")("torch.strided")
    facts = {}
    storage = {}
    for key, (file, count) in tensors.items():
        properties = made(
            "TensorProperties", (Global("torch", "float32"), layout, False, format, False)
        )
        chunk = made("ChunkStorageMetadata", {"offsets": size(0), "sizes": size(count)})
        facts[key] = made(
            "TensorStorageMetadata",
            {"properties": properties, "size": size(count), "chunks": [chunk]},
        )
        index = made("MetadataIndex", {"fqn": key, "index": 0, "offset": size(0)})
        place = {"relative_path": file, "offset": 0, "length": 4 * count}
        storage[index] = made("_StorageInfo", place, f"{DCP}.filesystem")
    path = Global(PATH_OF[python], "PosixPath")("/", "runs", "x")
    meta = made("StorageMeta", {"checkpoint_id": path, "save_id": "s", "load_id": None})
    return made(
        "Metadata",
        {
            "state_dict_metadata": facts,
            "planner_data": None,
            "storage_data": storage,
            "storage_meta": meta,
        },
    )
