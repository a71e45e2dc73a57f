"""How sure a model is of the conversations that are held out: perplexity of their scored tokens, each once.

The processes share a fixed set of windows (train/evaluate/scoring.py).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from finetune.loader import tensors
from finetune.prepare_data import Data
from settings.config import Config
from train.distributed.world import World
from train.evaluate.scoring import add_up


@dataclasses.dataclass(frozen=True)
class Scored:
    """nats over scored tokens."""

    nats: float
    tokens: int

    @property
    def loss(self) -> float:
        """nats/token"""
        return self.nats / self.tokens

    def record(self) -> dict[str, Any]:
        """The evaluation's values as the record has them."""
        return {
            "val_loss": self.loss,
            "val_ppl": perplexity(self.nats, self.tokens),
            "scored_tokens": self.tokens,
        }


class Evaluator:
    """Scores a model on the conversations that are held out, as train/evaluate/validation.py does on text."""

    shards: Mapping[str, int] = {}
    full_is_all = True

    def __init__(self, config: Config, data: Data, world: World):
        self.config = config
        self.world = world
        self.batches = data.evaluation_batches(world.size)
        self.steps = self.batches.steps if len(data.held_out) else 0

    def __call__(self, model: nn.Module, full: bool = False, **limits: Any) -> Scored | None:
        """Score all of them, also at the end of a run. All processes call it together.

        limits: interrupted, limit_s and progress of scoring.add_up.

        Returns:
            None if any process was interrupted. Raises ScoringFailed, on all processes.
        """

        def score(part: Any, sums: Tensor) -> None:
            nats, scored = model(*tensors(part, self.world.device))
            sums += torch.stack([nats.double(), scored.double()])

        model.eval()  # nothing is left out
        try:
            values = add_up(
                model,
                self.config,
                self.world,
                self.read_batches(),
                score,
                2,
                advice="raise EVAL_MINUTES, or MICRO_BATCH_SIZE if memory allows",
                **limits,
            )
        finally:
            model.train()
        return None if values is None else Scored(values[0], int(values[1]))

    def read_batches(self) -> Iterator[Any]:
        """Read this process's part of each batch; as many on all processes."""
        for step in range(self.steps):
            batch = self.batches.step(step, self.world.rank, self.world.size)
            (part,) = batch.micro_batches
            yield part


def perplexity(nats: float, scored: int) -> float:
    """Return exp of the mean loss of the scored tokens; inf where that is beyond any number."""
    try:
        return math.exp(nats / scored)
    except OverflowError:
        return math.inf
