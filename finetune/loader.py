"""What the trainer's loop asks of DATA: batches by global step, as tensors.

It has no state of its own, so any step can be asked for at any time. Dropout, of LORA_DROPOUT or of
the model's own config.json, is drawn from the step and the process, so a resumed run draws the same.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from finetune.batches import MicroBatch, Step
from finetune.prepare_data import Data
from settings.config import Config
from train.data.batch import Batch, to_device
from train.data.mixture import Gap, key_of
from train.distributed.world import World


class Mixture(NamedTuple):
    """Names of what is read, as of train/data/mixture.py."""

    names: list[str]


class Loader:
    """Batches of the conversations to train on, EPOCHS times.

    Where samples were skipped, more epochs follow.
    """

    mixture = Mixture(["DATA"])
    sources: Sequence[Any] = ()

    def __init__(self, config: Config, data: Data, world: World):
        self.config = config
        self.data = data
        self.world = world
        self.batches = data.batches(world.size, config.epochs)
        self.endless = data.batches(world.size)
        self.micro_batch = self.batches.micro_batch

    def batch(self, step: int, gaps: Sequence[Gap] = ()) -> Batch:
        """Return the batch of the step after `step` committed ones."""
        step_data = self.step(step, gaps)
        number = step * self.world.size + self.world.rank
        torch.manual_seed(int(key_of(self.config.seed, "dropout", number)) >> 1)
        micro_batches = [tensors(part, self.world.device) for part in step_data.micro_batches]
        return Batch(micro_batches, step_data.scored, step_data.windows, step_data.whole)

    def step(self, step: int, gaps: Sequence[Gap]) -> Step:
        step_data = self.batches.step(step, self.world.rank, self.world.size, gaps)
        if step_data.scored:
            return step_data
        return self.endless.step(step, self.world.rank, self.world.size, gaps)

    def blank(self) -> tuple[Tensor, ...]:
        """Return a micro-batch of the usual shape in which nothing is scored."""
        windows = [np.empty(0, dtype=np.int64)] * self.micro_batch
        return tensors(self.batches.arrays(windows), self.world.device)

    def names(self, samples: Sequence[int]) -> list[str]:
        """Return what messages call samples: FILE:LINE of the first conversation of each."""
        names = []
        for sample in samples:
            window = self.endless.window(sample)
            name = "none"
            if len(window):
                name = self.data.examples.place(int(self.data.train[window[0]]))
            if len(window) > 1:
                name += f" and {len(window) - 1} more"
            names.append(name)
        return names

    def shares(self, step: int, gaps: Sequence[Gap]) -> dict[str, dict[str, float]]:
        """Return the tokens that the model has seen, and how often it has seen each conversation."""
        windows = step * self.config.batch_windows
        epochs = windows / max(1, self.batches.packing.windows)
        return {"DATA": {"tokens": windows * self.config.seq_len, "share": 1.0, "epochs": epochs}}

    def missing(self, step: int, gaps: Sequence[Gap]) -> str:
        """Nothing is waited for."""
        return ""

    def opened(self, step: int, gaps: Sequence[Gap]) -> dict[str, Any]:
        """The fingerprint says everything."""
        return {}


def tensors(part: MicroBatch, device: torch.device) -> tuple[Tensor, ...]:
    """Return what the model's forward takes, on the device."""
    return tuple(to_device(values, device) for values in part)
