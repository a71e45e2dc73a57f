"""The weights of a checkpoint, one at a time.

    .metadata, __0_0.distcp ... -> one weight, whole, float32

However many processes wrote the checkpoint, and however they split the weights, each comes back
whole. Optimizer state is not read. Memory holds one weight, and the part of it that is being read once
more.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from train.checkpoint import metadata
from train.checkpoint.checkpoint import cause
from train.checkpoint.manifest import CheckpointError

MODEL = "model."  # prefix of weights, as checkpoint.tensor_states writes it


class Weights:
    """A checkpoint's weights. Raises CheckpointError.

    Attributes:
        shapes: name in the model -> shape.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.reader = metadata.Reader(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            stored = self.reader.tensors()
        except Exception as error:  # whatever a pickle raises
            raise CheckpointError(
                f"{folder}: Its .metadata cannot be read ({cause(error)})."
            ) from None
        for key, (shape, dtype) in stored.items():
            if key.startswith(MODEL):
                if dtype != torch.float32:
                    raise CheckpointError(f"{folder}: {key} is {dtype} and not float32.")
                self.shapes[key.removeprefix(MODEL)] = tuple(shape)
        if not self.shapes:
            raise CheckpointError(f"{folder}: Holds no weights.")

    def read(self, name: str) -> Tensor:
        """Return a weight, float32. Raises CheckpointError."""
        weight = torch.empty(self.shapes[name])
        try:
            dcp.load({MODEL + name: weight}, storage_reader=self.reader, no_dist=True)
        except (Exception, dcp.api.CheckpointException) as error:
            raise CheckpointError(
                f"{self.folder}: {name} cannot be read ({cause(error)}). If a trainer has deleted this "
                "checkpoint meanwhile: Run the same command again for its newest."
            ) from None
        return weight
