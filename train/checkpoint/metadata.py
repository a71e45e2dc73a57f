"""A checkpoint's `.metadata`, read without running code.

torch.distributed.checkpoint (DCP) keeps the list of tensors as a pickle, and a pickle can call any
function when it is read. Checkpoints travel: `make fetch-run` copies them from a shared volume. The
manifest does not protect them, since whoever writes another pickle can write its hash too. So only
the few classes that DCP needs are allowed here, and this is the only place that opens the file.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

FILE = ".metadata"
ALLOWED = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),  # the layout of a tensor by its name, "torch.strided"
}


class ForbiddenPickle(pickle.UnpicklingError):
    """A pickle that asks for more than a list of tensors."""


class MetadataUnpickler(pickle.Unpickler):
    """Reads the classes of ALLOWED and data types such as torch.float32; refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return memory_format
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ForbiddenPickle(
            f"{FILE} asks for {module}.{name}, which no checkpoint of this trainer has: somebody "
            "else wrote it, and reading it could run their code"
        )


def memory_format(kind: Any, name: Any) -> Any:
    """In the place of getattr, by which some Pythons (3.11.2) pickle a member of an enumeration."""
    kinds = dcp.metadata._MEM_FORMAT_ENCODING
    if kind is kinds and name in kinds.__members__:
        return kinds[name]
    raise ForbiddenPickle(f"{FILE} asks for {name!r} of {kind!r}, which no checkpoint has")


def read(folder: Path) -> dcp.Metadata:
    """The list of tensors of a checkpoint. Raises OSError, and pickle.UnpicklingError for a damaged or hostile file."""
    with open(folder / FILE, "rb") as file:
        metadata = MetadataUnpickler(file).load()
    if not isinstance(metadata, dcp.Metadata):
        raise ForbiddenPickle(f"{FILE} holds a {type(metadata).__name__}, not a list of tensors")
    tensors(metadata)
    return metadata


def tensors(metadata: dcp.Metadata) -> dict[str, dcp.metadata.TensorStorageMetadata]:
    """Key -> size, data type and parts of each tensor. Raises ForbiddenPickle where there is anything else."""
    found = {}
    for name, facts in metadata.state_dict_metadata.items():
        # DCP would unpickle anything else, as it is.
        if not isinstance(facts, dcp.metadata.TensorStorageMetadata):
            raise ForbiddenPickle(f"{FILE} lists {name} as a {type(facts).__name__}, not a tensor")
        found[name] = facts
    return found


class Reader(dcp.FileSystemReader):
    """DCP's reader of files, which reads the list of tensors here, and once instead of for each load."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        self.metadata: dcp.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        if self.metadata is None:
            self.metadata = read(self.folder)
            if self.metadata.storage_meta is None:
                self.metadata.storage_meta = dcp.metadata.StorageMeta()
            self.metadata.storage_meta.load_id = self.load_id
        return self.metadata
