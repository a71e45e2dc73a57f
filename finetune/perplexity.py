"""How sure a model is of the conversations that are held out: perplexity of their scored tokens, each once.

Each process sums over its share of a fixed set of windows, and one all-reduce ends an evaluation. Where a forward pass
is one of all processes (FSDP2) every one of them makes as many, and they agree now and then whether to go on.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from finetune.loader import tensors
from finetune.prepare_data import Data
from finetune.subset import perplexity
from hardware.out_of_memory import is_out_of_memory
from settings.config import Config
from train.distributed.parallel import waits_in_forward
from train.distributed.world import World, from_all, sum_over_ranks
from train.evaluate.validation import EvaluationFailed, overtime
from train.faults.memory_advice import memory_advice

AGREE = 32  # batches between two agreements of processes that wait for each other


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
    """Scores a model on the conversations that are held out. Its signature is that of train/evaluate/validation.py."""

    shards: Mapping[str, int] = {}
    full_is_all = True

    def __init__(self, c: Config, data: Data, world: World):
        self.c, self.world = c, world
        self.batches = data.evaluation_batches(world.size)
        self.steps = self.batches.steps if len(data.held_out) else 0

    @torch.no_grad()
    def __call__(
        self,
        model: nn.Module,
        full: bool = False,
        interrupted: Callable[[], bool] = lambda: False,
        limit_s: float = math.inf,
        progress: Callable[[str], None] = lambda what: None,
    ) -> Scored | None:
        """Score; None if `interrupted` said so in between, on any process. full: the end of a run takes the same.

        Raises EvaluationFailed, on all processes, where one failed or needed longer than limit_s.
        """
        together, problem = waits_in_forward(model), ""
        sums = torch.zeros(
            4, dtype=torch.float64, device=self.world.device
        )  # nats, tokens, interrupted, failed
        model.eval()  # nothing is left out
        try:
            with overtime(limit_s, anywhere=not together) as clock:
                for step in range(self.steps):
                    progress("batch")
                    ends = interrupted(), clock.late
                    if together and step % AGREE == AGREE - 1:
                        ends = tuple(
                            sum_over_ranks(torch.tensor(ends, dtype=torch.float64)).tolist()
                        )
                    if any(ends) and (not together or step % AGREE == AGREE - 1):
                        sums[2:] += torch.tensor(ends, dtype=torch.float64, device=sums.device)
                        problem = self.late if ends[1] else ""
                        break
                    (part,) = self.batches.step(
                        step, self.world.rank, self.world.size
                    ).micro_batches
                    nats, scored = model(*tensors(part, self.world.device))
                    sums[:2] += torch.stack([nats.double(), scored.double()])
        except BaseException as error:
            # in a forward pass, in which the others wait, no agreement is possible
            if together or not (
                isinstance(error, Exception) or type(error).__name__ == "_OverTime"
            ):
                raise
            problem = (
                f"{type(error).__name__}: {error}" if isinstance(error, Exception) else self.late
            )
            if is_out_of_memory(error):
                problem = memory_advice(self.c, self.world, evaluating=True)
            sums[3] += 1
        finally:
            model.train()
        progress("others")
        nats, tokens, stopped, failed = sum_over_ranks(sums).tolist()
        if failed:
            problems = [
                f"rank {rank}: {text}" for rank, text in enumerate(from_all(problem)) if text
            ]
            raise EvaluationFailed(problems[0])
        return None if stopped else Scored(nats, int(tokens))

    @property
    def late(self) -> str:
        return (
            f"it took longer than EVAL_MINUTES={self.c.eval_minutes:g}. Raise EVAL_MINUTES, or "
            "MICRO_BATCH_SIZE if memory allows."
        )
