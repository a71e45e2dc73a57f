"""Validation loss, in nats per token and in bits per byte, so that tokenizers compare.

Each rank sums over its share of a fixed set of windows; one all-reduce at the end.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from train.batch import document_bounds, to_device
from train.config import Config
from train.distributed import World, sum_over_ranks
from train.loss import IGNORED
from train.shards import ShardSet

FULL_SET = 20  # the end of a run scores at most this many times EVAL_TOKENS


@dataclasses.dataclass(frozen=True)
class Validation:
    """nats over tokens, and over the bytes that those tokens stand for."""

    nats: float
    tokens: int
    text_bytes: int

    @property
    def loss(self) -> float:
        """nats/token"""
        return self.nats / self.tokens

    @property
    def bpb(self) -> float:
        """bits/byte"""
        return self.nats / math.log(2) / self.text_bytes


class Evaluator:
    """Scores a model on the validation split of a mixture's sources, each by its weight in tokens.

    Windows are chosen by a seeded hash, the same in every run of the same SEQ_LEN. The last window of a
    shard may be short: what is missing is not scored, so that the full set scores every token but the first.
    """

    def __init__(self, c: Config, sources: Mapping[str, ShardSet], byte_lengths: np.ndarray, world: World,
                 end_of_text: int = -1):
        self.c, self.world, self.end_of_text = c, world, end_of_text
        self.byte_lengths = byte_lengths
        candidates = {name: self.candidates(name, shards) for name, shards in sources.items()}
        self.subset = self.choose(candidates, c.eval_tokens)
        self.full = self.choose(candidates, FULL_SET * c.eval_tokens)
        self.full_is_all = len(self.full) == sum(map(len, candidates.values()))
        self.sources = sources

    def candidates(self, name: str, shards: ShardSet) -> list[tuple[str, int, int]]:
        """(source, shard, window) of every validation window, in the order of their hashes."""
        windows = [(name, k, w) for k, info in enumerate(shards.shards["validation"])
                   for w in range(-(-max(0, info.tokens - 1) // self.c.seq_len))]
        return sorted(windows, key=lambda window: hashlib.sha256(repr(window).encode()).digest())

    def choose(self, candidates: Mapping[str, list], tokens: int) -> list[tuple[str, int, int]]:
        """Up to `tokens` of windows, each source in proportion to its weight."""
        total = sum(self.c.mixture.values()) * self.c.seq_len
        return [window for name, weight in self.c.mixture.items()
                for window in candidates[name][:max(1, tokens * weight // total)]]

    @torch.no_grad()
    def __call__(self, model: nn.Module, full: bool = False,
                 interrupted: Callable[[], bool] = lambda: False) -> Validation | None:
        """Score; None if `interrupted` said so in between, on any rank."""
        windows = (self.full if full else self.subset)[self.world.rank::self.world.size]
        sums = torch.zeros(4, dtype=torch.float64)  # nats, tokens, bytes, interrupted
        size = self.c.micro_batch(self.world.size)  # as in training, for which alone the model may be compiled
        for start in range(0, len(windows), size):
            if interrupted():
                sums[3] = 1
                break
            tokens, targets = self.padded(windows[start:start + size], size)
            inputs = [tokens, targets, *([document_bounds(tokens, self.end_of_text)] if self.c.doc_mask else [])]
            nats, scored = model(*(to_device(values, self.world.device) for values in inputs))
            ids = targets[targets != IGNORED]
            sums[0] += nats.double().cpu()
            sums[1] += scored.double().cpu()
            sums[2] += int(self.byte_lengths[ids].sum())
        nats_sum, tokens_sum, bytes_sum, stopped = sum_over_ranks(sums).tolist()
        return None if stopped else Validation(nats_sum, int(tokens_sum), int(bytes_sum))

    def padded(self, windows: list[tuple[str, int, int]], rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets), each (rows, T) int64; what windows leave over is filled up with unscored positions."""
        length = self.c.seq_len
        tokens = np.zeros((rows, length), dtype=np.int64)
        targets = np.full((rows, length), IGNORED, dtype=np.int64)
        for row, (name, shard, window) in enumerate(windows):
            whole = self.sources[name].tokens("validation", shard)
            ids = whole[window * length:(window + 1) * length + 1]
            tokens[row, :len(ids) - 1], targets[row, :len(ids) - 1] = ids[:-1], ids[1:]
        return tokens, targets
