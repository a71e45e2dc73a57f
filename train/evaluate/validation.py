"""Validation loss of held-out text, in nats per token and in bits per byte, so that tokenizers compare.

A fixed set of windows is scored source by source, shared out among the ranks (scoring.py).
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from settings.config import Config
from train.data.batch import document_bounds, to_device
from train.data.manifest import DataError
from train.data.shards import ShardSet
from train.distributed.world import World
from train.evaluate.scoring import add_up
from train.model.loss import IGNORED

FULL_SET = 20  # the end of a run scores at most this many times EVAL_TOKENS


Batch = tuple[str, np.ndarray, np.ndarray]  # source, and what `Evaluator.padded` returns


class Window(NamedTuple):
    """SEQ_LEN tokens of a validation shard."""

    source: str
    shard: int
    number: int

    def hash(self) -> bytes:
        return hashlib.sha256(repr(tuple(self)).encode()).digest()


@dataclasses.dataclass(frozen=True)
class Validation:
    """What was scored.

    Attributes:
        nats: loss, summed over tokens.
        text_bytes: that the tokens stand for.
        by_source: the same of each source of which anything was scored.
    """

    nats: float
    tokens: int
    text_bytes: int
    by_source: Mapping[str, "Validation"] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> float:
        """nats/token"""
        return self.nats / self.tokens

    @property
    def bpb(self) -> float:
        """bits/byte"""
        return self.nats / math.log(2) / self.text_bytes

    def record(self) -> dict[str, Any]:
        """Return the evaluation's values as the record has them."""
        return {
            "val_loss": self.loss,
            "val_bpb": self.bpb,
            "scored_tokens": self.tokens,
            "val_loss_by_source": {name: part.loss for name, part in self.by_source.items()},
            "val_bpb_by_source": {name: part.bpb for name, part in self.by_source.items()},
        }


class Evaluator:
    """Scores a model on the validation split of a mixture's sources, each by its weight in tokens.

    Windows are chosen by a hash, the same in every run of the same SEQ_LEN. The last window of a
    shard may be short: what is missing is not scored, so that the full set scores every token but
    the first.

    Args:
        byte_lengths: bytes that each token stands for.
        shards: take the first so many of each source only, those that there were when the run began.
    """

    def __init__(
        self,
        config: Config,
        sources: Mapping[str, ShardSet],
        byte_lengths: np.ndarray,
        world: World,
        end_of_text: int = -1,
        shards: Mapping[str, int] | None = None,
    ):
        self.config = config
        self.sources = sources
        self.byte_lengths = byte_lengths
        self.world = world
        self.end_of_text = end_of_text
        self.shards = shards or {}
        candidates = {name: self.list_windows(name) for name in sources}
        self.subset = self.choose(candidates, config.eval_tokens)
        self.full = self.choose(candidates, FULL_SET * config.eval_tokens)
        self.full_is_all = len(self.full) == sum(map(len, candidates.values()))
        for name, shard in {(window.source, window.shard) for window in self.full}:
            sources[name].read("validation", shard, [])  # verified now, not hours into the run

    def list_windows(self, name: str) -> list[Window]:
        """List every validation window of a source, in the order of their hashes."""
        infos = self.sources[name].shards["validation"]
        count = self.shards.get(name, len(infos))
        if len(infos) < count:  # shards are only ever added
            raise DataError(
                f"{self.sources[name].folder}: its manifest lists {len(infos)} validation shards, and this "
                f"run began with {count}. Restore manifest.json and the shards, or start a new run"
            )
        windows = []
        for shard, info in enumerate(infos[:count]):
            full = range(math.ceil(max(0, info.tokens - 1) / self.config.seq_len))
            windows += [Window(name, shard, number) for number in full]
        return sorted(windows, key=Window.hash)

    def choose(self, candidates: Mapping[str, list[Window]], tokens: int) -> list[Window]:
        """Choose up to so many tokens, of each source in proportion to its weight."""
        total = sum(self.config.mixture.values()) * self.config.seq_len
        chosen = []
        for name, weight in self.config.mixture.items():
            chosen += candidates[name][: max(1, tokens * weight // total)]
        return chosen

    def __call__(self, model: nn.Module, full: bool = False, **limits: Any) -> Validation | None:
        """Score the subset, or the full set. All ranks call it together.

        limits: interrupted, limit_s and progress of scoring.add_up.

        Returns:
            None if any rank was interrupted. Raises ScoringFailed, on all ranks.
        """
        names = list(self.sources)

        def score(batch: Batch, sums: Tensor) -> None:
            name, tokens, targets = batch
            sums.view(-1, 3)[names.index(name)] += self.score(model, tokens, targets)

        values = add_up(
            model,
            self.config,
            self.world,
            self.read_batches(full),
            score,
            3 * len(names),
            advice="lower EVAL_TOKENS",
            empty=(names[0], *self.blank()),
            **limits,
        )
        if values is None:
            return None
        by_source = {}
        for number, name in enumerate(names):
            nats, tokens, text_bytes = values[3 * number : 3 * number + 3]
            if tokens and text_bytes:
                by_source[name] = Validation(nats, int(tokens), int(text_bytes))
        nats, tokens, text_bytes = (sum(values[column::3]) for column in range(3))
        return Validation(nats, int(tokens), int(text_bytes), by_source)

    def read_batches(self, full: bool) -> Iterator[Batch]:
        """Read this rank's batches, as large as in training.

        A batch is of one source, since a model sums over all that it is given.
        """
        for windows in self.list_batches(full):
            yield windows[0].source, *self.padded(windows)

    def list_batches(self, full: bool) -> list[list[Window]]:
        """List the windows of each of this rank's batches."""
        size = self.config.micro_batch(self.world.size)
        windows = self.full if full else self.subset
        batches = []
        for name in self.config.mixture:
            of_source = [window for window in windows if window.source == name]
            batches += [of_source[i : i + size] for i in range(0, len(of_source), size)]
        return batches[self.world.rank :: self.world.size]

    def score(self, model: nn.Module, tokens: np.ndarray, targets: np.ndarray) -> Tensor:
        """Return nats, tokens and bytes of a batch: (3,) float64 on the device."""
        inputs = [tokens, targets]
        if self.config.doc_mask:
            inputs.append(document_bounds(tokens, self.end_of_text))
        nats, scored = model(*(to_device(values, self.world.device) for values in inputs))
        text_bytes = float(self.byte_lengths[targets[targets != IGNORED]].sum())
        sums = [nats, scored, torch.tensor(text_bytes, dtype=torch.float64, device=nats.device)]
        return torch.stack([value.double() for value in sums])

    def blank(self) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and targets, each (B, T) int64, of which nothing is scored."""
        shape = self.config.micro_batch(self.world.size), self.config.seq_len
        return np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)

    def padded(self, windows: list[Window]) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and targets, each (B, T) int64. Rows and ends without text are not scored."""
        length = self.config.seq_len
        tokens, targets = self.blank()
        for row, window in enumerate(windows):
            begin = window.number * length
            shards = self.sources[window.source]
            (ids,) = shards.read("validation", window.shard, [(begin, begin + length + 1)])
            tokens[row, : len(ids) - 1] = ids[:-1]
            targets[row, : len(ids) - 1] = ids[1:]
        return tokens, targets
