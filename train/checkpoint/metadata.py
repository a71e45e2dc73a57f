"""DCP's reader and writer of a checkpoint's files, with a list of tensors that runs no code."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from record.regular_file import open_inside
from train.checkpoint.tensor_list import (
    FILE,
    ForbiddenPickle,
    StoredTensor,
    TensorList,
    read_tensor_list,
)


class Writer(dcp.FileSystemWriter):
    """Writes no path into `.metadata`, which Pythons pickle in different ways."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class RegularFiles(FileSystem):
    """Opens nothing but regular files in the folder of a checkpoint."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        path = Path(path)
        with open_inside(path.parent, path.name) as stream:
            yield stream


class Reader(dcp.FileSystemReader):
    """DCP's reader of a checkpoint's files, which reads the list of tensors once."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.fs = RegularFiles()
        self.folder = folder
        self.metadata: dcp.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Raises OSError, and ForbiddenPickle for a damaged or hostile file."""
        if self.metadata is None:
            self.metadata = build_metadata(read_tensor_list(self.folder))
            self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self.metadata

    def tensors(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and the data type of each tensor, by key. Raises as read_metadata."""
        entries: dict[str, Any] = self.read_metadata().state_dict_metadata
        return {key: (facts.size, facts.properties.dtype) for key, facts in entries.items()}


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, weights and optimizer state, by key.

    Raises as Reader.read_metadata, and what DCP raises for a damaged file.
    """
    reader = Reader(folder)
    tensors = {
        key: torch.empty(size, dtype=dtype) for key, (size, dtype) in reader.tensors().items()
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def build_metadata(listing: TensorList) -> dcp.Metadata:
    """Return DCP's form of a list of tensors. Raises ForbiddenPickle."""
    storage = {
        MetadataIndex(key, offsets): _StorageInfo(part.file, part.offset, part.length)
        for (key, offsets), part in listing.parts.items()
    }
    tensors: dict[str, Any] = {
        key: describe_tensor(tensor) for key, tensor in listing.tensors.items()
    }
    return dcp.Metadata(tensors, storage_data=storage)


def describe_tensor(tensor: StoredTensor) -> TensorStorageMetadata:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ForbiddenPickle(f"{FILE} has a tensor of {tensor.dtype}, which this torch has not")
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in tensor.chunks
    ]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(tensor.shape), chunks)
