"""A checkpoint's `.metadata`: its list of tensors, read without running code and without torch.

torch.distributed.checkpoint (DCP) keeps that list as a pickle, and a pickle can call any function and
set any attribute when it is read. Checkpoints travel: `make fetch-run` copies them from a shared
volume. The manifest does not protect them, since whoever writes another pickle can write its hash
too. So a pickle gets none of the classes that it asks for. It gets a StandIn of the same name,
which keeps what it is given and does nothing, and the list is made of what these hold.

What is read does not depend on the Python that wrote it. Pythons differ in where pathlib's classes
are and in how they pickle a member of an enumeration, and none of these is looked at here.
"""

import dataclasses
import io
import math
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from record.regular_file import open_inside

FILE = ".metadata"
PART = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
DTYPE = re.compile(r"bool|(b?float|u?int|complex)[0-9]{1,3}\w{0,20}")

MOST_VALUES = 1000  # in a tuple: a size has one per dimension, a path one per folder
MOST_DIMENSIONS = 8
MOST_NUMBER = 2**63  # of a size, an offset or a length
MOST_BYTES = 2**30  # of a list: a part of a tensor takes about 200
FEWEST_BYTES = 4  # of a pickle, per object that it makes: those of a checkpoint take 6 or more
NESTED = 2  # further objects that a tuple of tuples counts for, which is kept with its count

Numbers = tuple[int, ...]


class ForbiddenPickle(pickle.UnpicklingError):
    """A pickle that is not the list of tensors of a checkpoint."""


class Sealed(type):
    """The class of classes whose attributes nobody sets: a pickle may try to."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise ForbiddenPickle(f"{FILE} sets {name} of {cls.__name__}, as no checkpoint does")


class StandIn(metaclass=Sealed):
    """In the place of a class or function that a pickle asks for.

    Attributes:
        arguments: of the call.
        state: what would have been set afterwards.
    """

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


DCP = "torch.distributed.checkpoint"
STAND_INS = {
    (module, name): Sealed(name, (StandIn,), {"__slots__": ()})
    for module, name in (
        ("builtins", "getattr"),  # of a member of an enumeration, in Python 3.11.2
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        (f"{DCP}.filesystem", "_StorageInfo"),
        (f"{DCP}.metadata", "BytesStorageMetadata"),
        (f"{DCP}.metadata", "ChunkStorageMetadata"),
        (f"{DCP}.metadata", "Metadata"),
        (f"{DCP}.metadata", "MetadataIndex"),
        (f"{DCP}.metadata", "StorageMeta"),
        (f"{DCP}.metadata", "TensorProperties"),
        (f"{DCP}.metadata", "TensorStorageMetadata"),
        (f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    )
}


def counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return pickle's method that makes an object, or marks where one begins, and count what it makes."""

    def count_and_load(unpickler: Any) -> None:
        unpickler.count(1)
        load(unpickler)

    return count_and_load


def checked(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return pickle's method that makes a tuple, with a check of the tuple."""

    def load_and_check(unpickler: Any) -> None:
        load(unpickler)
        unpickler.check_tuple(unpickler.stack[-1])

    return load_and_check


class Memo(list):
    """What a pickle refers to again: number -> object. A dict would take 14 times as much memory."""

    def __setitem__(self, number: Any, value: Any) -> None:
        if number == len(self):
            self.append(value)
        else:
            super().__setitem__(number, value)


class Unpickler(pickle._Unpickler):
    """Imports nothing: a class or function becomes a StandIn, and a data type its name.

    Few bytes can make a tuple that holds another twice, which does so too, and so on. To hash it as a key
    would never end. So tuples are checked when they are made. There are no frozensets, which can be
    nested alike, and no bytearrays, for which 9 bytes take as much memory as they ask for.

    One byte makes an empty list of 56 bytes. So objects are counted: memory is at most 40 times the file.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    for opcode in (pickle.FROZENSET, pickle.EMPTY_SET, pickle.BYTEARRAY8):
        del dispatch[opcode[0]]
    for opcode in (pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.LIST, pickle.DICT):
        dispatch[opcode[0]] = counted(dispatch[opcode[0]])
    for opcode in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[opcode[0]] = checked(dispatch[opcode[0]])

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))  # a read of more bytes than there are takes no memory
        self.memo: Any = Memo()
        self.objects_left = len(content) // FEWEST_BYTES
        self.counts: dict[
            int, tuple[int, tuple]
        ] = {}  # id -> values, and a tuple that holds tuples

    def count(self, objects: int) -> None:
        """Raise ForbiddenPickle if a pickle makes more objects than a checkpoint's of its size."""
        self.objects_left -= objects
        if self.objects_left < 0:
            raise ForbiddenPickle(f"{FILE} holds more objects than a list of tensors of its size")

    def check_tuple(self, made: tuple) -> None:
        """Raise ForbiddenPickle if a tuple holds many values, with those of the tuples in it."""
        self.count(1)
        count = 1 + len(made)
        inner = [value for value in made if type(value) is tuple]
        for value in inner:
            count += self.counts[id(value)][0] - 1 if id(value) in self.counts else len(value)
        if count > MOST_VALUES:
            raise ForbiddenPickle(
                f"{FILE} has a tuple of more than {MOST_VALUES} values, as no checkpoint does"
            )
        if inner:
            self.count(NESTED)
            self.counts[id(made)] = (count, made)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and DTYPE.fullmatch(name):
            return name
        if module.startswith("pathlib."):  # pathlib._local, in Python 3.13
            module = "pathlib"
        if (module, name) in STAND_INS:
            return STAND_INS[module, name]
        raise ForbiddenPickle(
            f"{FILE} asks for {module}.{name}, which no checkpoint of this trainer has: somebody "
            "else wrote it"
        )


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. chunks: (offsets, sizes) of its parts, which tile it."""

    dtype: str
    shape: Numbers
    chunks: list[tuple[Numbers, Numbers]]


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """Where a part of a tensor is: bytes of a file."""

    file: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class TensorList:
    """What a checkpoint holds. parts: (key of the tensor, offsets of the part) -> where it is."""

    tensors: dict[str, StoredTensor]
    parts: dict[tuple[str, Numbers], StoredPart]

    def files(self) -> set[str]:
        """Return the names of all files that hold a part."""
        return {part.file for part in self.parts.values()}


def read_tensor_list(folder: Path) -> TensorList:
    """Read the list of a checkpoint's tensors. Raises OSError, ForbiddenPickle."""
    with open_inside(folder, FILE) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise ForbiddenPickle(f"{FILE} has more than {MOST_BYTES} bytes, as no checkpoint does")
        content = file.read()
    try:
        return list_tensors(Unpickler(content).load())
    except ForbiddenPickle:
        raise
    except Exception as error:  # whatever a damaged pickle raises
        raise ForbiddenPickle(f"{FILE} is no list of tensors ({type(error).__name__})") from None


def list_tensors(root: Any) -> TensorList:
    """Return the list that a pickle holds. Raises ForbiddenPickle, or what comes of wrong types.

    A pickle may have one list of chunks in many tensors. Each chunk has a place of its own, and of these
    there are no more than the pickle has bytes for.
    """
    content = state_of(root, "Metadata")
    tensors = {}
    parts = {}
    chunks_left = len(content["storage_data"])
    for key, stored in content["state_dict_metadata"].items():
        facts = state_of(stored, "TensorStorageMetadata")
        dtype, *_ = state_of(facts["properties"], "TensorProperties")
        chunks_left -= len(facts["chunks"])
        if chunks_left < 0:
            raise ForbiddenPickle(f"{FILE} does not say where all parts of its tensors are")
        chunks = []
        for chunk in facts["chunks"]:
            place = state_of(chunk, "ChunkStorageMetadata")
            chunks.append((numbers(place["offsets"]), numbers(place["sizes"])))
        tensors[key] = StoredTensor(dtype, numbers(facts["size"]), chunks)
    for index, stored in content["storage_data"].items():
        where = state_of(index, "MetadataIndex")
        facts = state_of(stored, "_StorageInfo")
        if not PART.fullmatch(facts["relative_path"]):
            named = ascii(facts["relative_path"][:40])
            raise ForbiddenPickle(f"{FILE} names {named}, which is no file of it")
        if facts.get("transform_descriptors"):
            raise ForbiddenPickle(f"{FILE} has compressed tensors, as no checkpoint does")
        begin, length = numbers_of((facts["offset"], facts["length"]))
        part = StoredPart(facts["relative_path"], begin, length)
        parts[where["fqn"], numbers(where["offset"])] = part
    for key, tensor in tensors.items():
        check_tensor(key, tensor, parts)
    check_places(parts)
    return TensorList(tensors, parts)


def check_tensor(
    key: Any, tensor: StoredTensor, parts: dict[tuple[str, Numbers], StoredPart]
) -> None:
    """Check that a tensor has a type, and that its parts tile it. Raises ForbiddenPickle.

    Each part is whole rows, as FSDP2 splits tensors: they follow each other along the first dimension.
    """
    if type(key) is not str or len(key) > MOST_VALUES:
        raise ForbiddenPickle(f"{FILE} lists what is no tensor")
    if type(tensor.dtype) is not str or not DTYPE.fullmatch(tensor.dtype):
        raise ForbiddenPickle(f"{FILE} lists what is no tensor")
    value_bytes = count_bits(tensor.dtype) / 8
    shape = tensor.shape or (1,)
    row = 0
    for offsets, sizes in sorted(tensor.chunks):
        if (key, offsets) not in parts:
            raise ForbiddenPickle(f"{FILE} does not say where {key} is")
        if math.prod(sizes) * value_bytes > parts[key, offsets].length:
            raise ForbiddenPickle(f"{FILE} has a part of {key} that is larger than its bytes")
        if 0 in sizes:  # of a process that has no rows of it
            continue
        begins = offsets or (0,)
        counts = sizes or (1,)
        if begins != (row, *[0 for _ in shape[1:]]) or counts[1:] != shape[1:]:
            raise ForbiddenPickle(f"{FILE} has parts of {key} that do not follow each other")
        row += counts[0]
    if row != shape[0]:
        raise ForbiddenPickle(f"{FILE} has {row} rows of {key}, which has {shape[0]}")


def count_bits(dtype: str) -> int:
    """Return the bits of a value: 16 of bfloat16, 8 of bool."""
    bits = re.search(r"[0-9]+", dtype)
    return int(bits[0]) if bits else 8


def check_places(parts: dict[tuple[str, Numbers], StoredPart]) -> None:
    """Check that no two parts share bytes of a file. Raises ForbiddenPickle."""
    ends: dict[str, int] = {}
    for part in sorted(parts.values(), key=lambda part: (part.file, part.offset)):
        if part.offset < ends.get(part.file, 0):
            raise ForbiddenPickle(f"{FILE} has two parts at byte {part.offset} of {part.file}")
        ends[part.file] = part.offset + part.length


def state_of(value: Any, name: str) -> Any:
    """Return the state of a StandIn of this name. Raises ForbiddenPickle."""
    if type(value).__name__ != name or not isinstance(value, StandIn):
        raise ForbiddenPickle(f"{FILE} lists what is no tensor: there is no {name}")
    return value.state


def numbers(size: Any) -> Numbers:
    """Return the numbers of a torch.Size. Raises ForbiddenPickle."""
    if type(size).__name__ == "Size" and isinstance(size, StandIn):
        (values,) = size.arguments
        return numbers_of(values)
    raise ForbiddenPickle(f"{FILE} has a size that is none")


def numbers_of(values: Any) -> Numbers:
    """Return a few integers from 0 up. Raises ForbiddenPickle for anything else.

    What it is instead is not shown: a few bytes of a pickle can be a text without end.
    """
    is_short = type(values) is tuple and len(values) <= MOST_DIMENSIONS
    if is_short and all(type(value) is int and 0 <= value < MOST_NUMBER for value in values):
        return values
    raise ForbiddenPickle(f"{FILE} has something else instead of sizes or offsets")
