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


class Reader(dcp.FileSystemReader):
    """DCP's reader of a checkpoint's files, which reads the list of tensors here, and once."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        self.metadata: dcp.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Raises OSError, and pickle.UnpicklingError for a damaged or hostile file."""
        if self.metadata is None:
            with open(self.folder / FILE, "rb") as file:
                metadata = MetadataUnpickler(file).load()
            if not isinstance(metadata, dcp.Metadata):
                raise ForbiddenPickle(f"{FILE} holds no list of tensors")
            for facts in metadata.state_dict_metadata.values():
                # DCP would unpickle anything else, as it is.
                if not isinstance(facts, dcp.metadata.TensorStorageMetadata):
                    raise ForbiddenPickle(f"{FILE} lists what is no tensor")
            metadata.storage_meta = dcp.metadata.StorageMeta(load_id=self.load_id)
            self.metadata = metadata
        return self.metadata

    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and the data type of each tensor, by key. Raises as read_metadata."""
        listed: dict[str, Any] = self.read_metadata().state_dict_metadata
        return {key: (facts.size, facts.properties.dtype) for key, facts in listed.items()}
