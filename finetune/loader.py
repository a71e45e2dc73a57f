"""What the trainer's loop takes of DATA: batches by global step, as tensors.

It has no state of its own, so any step can be asked for at any time. What dropout leaves out, LORA_DROPOUT's or that of
the model's own config.json, is drawn from the step and the process: a run that goes on draws what it would have drawn.
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


class Mixed(NamedTuple):
    """Names of what is read, as a mixture has them."""

    names: list[str]


class Loader:
    """Batches of the conversations to train on, each EPOCHS times; behind that, where samples were passed over, more
    epochs."""

    def __init__(self, c: Config, data: Data, world: World):
        self.c, self.data, self.world = c, data, world
        self.batches, self.endless = data.batches(world.size, c.epochs), data.batches(world.size)
        self.micro_batch, self.mixture = self.batches.micro_batch, Mixed(["DATA"])
        self.sources: list[Any] = []

    def batch(self, step: int, gaps: Sequence[Gap] = ()) -> Batch:
        """The batch of the step after `step` committed ones."""
        made = self.step(step, gaps)
        torch.manual_seed(
            int(key_of(self.c.seed, "dropout", step * self.world.size + self.world.rank)) >> 1
        )
        return Batch(
            [tensors(part, self.world.device) for part in made.micro_batches],
            made.scored,
            made.windows,
            made.whole,
        )

    def step(self, step: int, gaps: Sequence[Gap]) -> Step:
        """As arrays."""
        made = self.batches.step(step, self.world.rank, self.world.size, gaps)
        return (
            made if made.scored else self.endless.step(step, self.world.rank, self.world.size, gaps)
        )

    def blank(self) -> tuple[Tensor, ...]:
        """A micro-batch of the shape that all have, in which nothing is scored."""
        return tensors(
            self.batches.arrays([np.empty(0, dtype=np.int64)] * self.micro_batch), self.world.device
        )

    def names(self, samples: Sequence[int]) -> list[str]:
        """What to call samples in a message: where the first conversation of each stands."""
        found = []
        for sample in samples:
            window = self.endless.window(sample)
            place = (
                self.data.examples.place(int(self.data.train[window[0]])) if len(window) else "none"
            )
            found.append(f"{place}" + (f" and {len(window) - 1} more" if len(window) > 1 else ""))
        return found

    def shares(self, step: int, gaps: Sequence[Gap]) -> dict[str, dict[str, float]]:
        """DATA -> positions that the model has seen, and how often it has seen each conversation."""
        windows = step * self.c.batch_windows
        return {
            "DATA": {
                "tokens": windows * self.c.seq_len,
                "share": 1.0,
                "epochs": windows / max(1, self.batches.packing.windows),
            }
        }

    def missing(self, step: int, gaps: Sequence[Gap]) -> str:
        """Nothing is waited for."""
        return ""

    def opened(self, step: int, gaps: Sequence[Gap]) -> dict[str, Any]:
        """The fingerprint says all."""
        return {}


def tensors(part: MicroBatch, device: torch.device) -> tuple[Tensor, ...]:
    """What the model's forward takes, on the device."""
    return tuple(to_device(values, device) for values in part)
