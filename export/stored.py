"""The weights of a checkpoint, one at a time.

    .metadata, __0_0.distcp ... -> one weight, whole, in float32; moments stay where they are

However many processes wrote the checkpoint, and however the weights were split over them, each comes back whole. In
memory is one weight, and once more the part of it that a file is being read for.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from train.checkpoint import metadata
from train.checkpoint.checkpoint import cause
from train.checkpoint.manifest import CheckpointError

MODEL = "model."  # before the names of weights, as checkpoint.tensor_states has them


class Weights:
    """shapes: name -> shape of each weight, as the model calls it. Raises CheckpointError."""

    def __init__(self, folder: Path):
        self.folder, self.reader = folder, metadata.Reader(folder)
        try:
            described = self.reader.tensors()
        except Exception as error:  # whatever a pickle raises
            raise CheckpointError(
                f"{folder}: its .metadata cannot be read ({cause(error)})"
            ) from None
        found = {
            key.removeprefix(MODEL): (tuple(size), dtype)
            for key, (size, dtype) in described.items()
            if key.startswith(MODEL)
        }
        if not found or any(dtype != torch.float32 for _, dtype in found.values()):
            raise CheckpointError(
                f"{folder}: holds no weights in float32, as this trainer writes them"
            )
        self.shapes = {name: size for name, (size, _) in found.items()}

    def read(self, name: str) -> Tensor:
        """The weight of that name, float32 in the shape that `shapes` has for it. Raises CheckpointError."""
        weight = torch.empty(self.shapes[name])
        try:
            dcp.load({MODEL + name: weight}, storage_reader=self.reader, no_dist=True)
        except (Exception, dcp.api.CheckpointException) as error:
            raise CheckpointError(
                f"{self.folder}: {name} cannot be read ({cause(error)}); if a trainer has deleted "
                "this checkpoint meanwhile, call again for its newest"
            ) from None
        return weight
