"""Validation loss, in nats per token and in bits per byte, so that tokenizers compare.

Each rank sums over its share of a fixed set of windows, source by source; one all-reduce at the end. What goes wrong
here costs the number, never the run: all ranks learn of it in that all-reduce.
"""

import contextlib
import dataclasses
import hashlib
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from settings.config import Config
from train.data.batch import document_bounds, to_device
from train.data.shards import ShardSet
from train.distributed.parallel import waits_in_forward
from train.distributed.world import World, from_all, sum_over_ranks
from train.model.loss import IGNORED

FULL_SET = 20  # the end of a run scores at most this many times EVAL_TOKENS


class EvaluationFailed(Exception):
    """There is no number; the message says why, the same on all ranks."""


class _OverTime(BaseException):
    """EVAL_MINUTES have passed. Not an Exception, so that nothing in between swallows it."""


@dataclasses.dataclass(frozen=True)
class Validation:
    """nats over tokens, and over the bytes that those tokens stand for; by_source: the same of each source by itself,
    where anything of it was scored."""

    nats: float
    tokens: int
    text_bytes: int
    by_source: Mapping[str, "Validation"] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_sources(cls, sums: Mapping[str, list[float]]) -> "Validation":
        """From nats, tokens and bytes of each source."""
        nats, tokens, text_bytes = (sum(column) for column in zip(*sums.values(), strict=True))
        return cls(
            nats,
            int(tokens),
            int(text_bytes),
            {name: cls(n, int(t), int(b)) for name, (n, t, b) in sums.items() if t and b},
        )

    @property
    def loss(self) -> float:
        """nats/token"""
        return self.nats / self.tokens

    @property
    def bpb(self) -> float:
        """bits/byte"""
        return self.nats / math.log(2) / self.text_bytes

    def record(self) -> dict[str, Any]:
        """The evaluation's values as the record has them."""
        return {
            "val_loss": self.loss,
            "val_bpb": self.bpb,
            "scored_tokens": self.tokens,
            "val_loss_by_source": {name: of.loss for name, of in self.by_source.items()},
            "val_bpb_by_source": {name: of.bpb for name, of in self.by_source.items()},
        }


class Evaluator:
    """Scores a model on the validation split of a mixture's sources, each by its weight in tokens.

    Windows are chosen by a seeded hash, the same in every run of the same SEQ_LEN. The last window of a
    shard may be short: what is missing is not scored, so that the full set scores every token but the first.
    """

    def __init__(
        self,
        c: Config,
        sources: Mapping[str, ShardSet],
        byte_lengths: np.ndarray,
        world: World,
        end_of_text: int = -1,
        shards: Mapping[str, int] | None = None,
    ):
        """shards: take the first so many of each source only, those that there were when the run began."""
        self.c, self.world, self.end_of_text = c, world, end_of_text
        self.shards = shards or {}
        self.byte_lengths = byte_lengths
        candidates = {name: self.candidates(name, shards) for name, shards in sources.items()}
        self.subset = self.choose(candidates, c.eval_tokens)
        self.full = self.choose(candidates, FULL_SET * c.eval_tokens)
        self.full_is_all = len(self.full) == sum(map(len, candidates.values()))
        self.sources = sources
        for name, shard in {(name, shard) for name, shard, _ in self.full}:
            sources[name].tokens("validation", shard)  # verified now, not hours into the run

    def candidates(self, name: str, shards: ShardSet) -> list[tuple[str, int, int]]:
        """(source, shard, window) of every validation window, in the order of their hashes."""
        windows = [
            (name, k, w)
            for k, info in enumerate(shards.shards["validation"][: self.shards.get(name)])
            for w in range(-(-max(0, info.tokens - 1) // self.c.seq_len))
        ]
        return sorted(windows, key=lambda window: hashlib.sha256(repr(window).encode()).digest())

    def choose(self, candidates: Mapping[str, list], tokens: int) -> list[tuple[str, int, int]]:
        """Up to `tokens` of windows, each source in proportion to its weight."""
        total = sum(self.c.mixture.values()) * self.c.seq_len
        return [
            window
            for name, weight in self.c.mixture.items()
            for window in candidates[name][: max(1, tokens * weight // total)]
        ]

    @torch.no_grad()
    def __call__(
        self,
        model: nn.Module,
        full: bool = False,
        interrupted: Callable[[], bool] = lambda: False,
        limit_s: float = math.inf,
        progress: Callable[[str], None] = lambda what: None,
    ) -> Validation | None:
        """Score; None if `interrupted` said so in between, on any rank.

        progress: called with "batch" at each, and with "others" before they are waited for.
        Raises EvaluationFailed, on all ranks, where one failed or needed longer than limit_s.
        """
        # nats, tokens, bytes of each source; then ranks that were interrupted, ranks that failed
        names = list(self.sources)
        sums, problem = (
            torch.zeros(3 * len(names) + 2, dtype=torch.float64, device=self.world.device),
            "",
        )
        together = waits_in_forward(
            model
        )  # then all ranks stop at the same batch, or some would wait for ever
        try:
            with overtime(limit_s, anywhere=not together) as clock:
                problem = self.add_up(sums, model, full, together, clock, interrupted, progress)
        except (Exception, _OverTime) as error:
            if together:  # in a forward pass, in which the others wait: no agreement is possible
                raise
            problem = self.words(error)
            sums[-1] += 1
        progress("others")
        *values, stopped, failed = sum_over_ranks(sums).tolist()
        if failed:
            problems = [
                f"rank {rank}: {text}" for rank, text in enumerate(from_all(problem)) if text
            ]
            raise EvaluationFailed(problems[0])
        return (
            None
            if stopped
            else Validation.of_sources(
                {name: values[3 * i : 3 * i + 3] for i, name in enumerate(names)}
            )
        )

    def add_up(
        self,
        sums: torch.Tensor,
        model: nn.Module,
        full: bool,
        together: bool,
        clock: "_Clock",
        interrupted: Callable[[], bool],
        progress: Callable[[str], None],
    ) -> str:
        """Score this rank's share into the sums, as many batches on each rank; returns what is wrong on this one."""
        size, places = (
            self.c.micro_batch(self.world.size),
            {name: 3 * i for i, name in enumerate(self.sources)},
        )
        batches = self.batches(self.full if full else self.subset, size)  # as large as in training
        mine, most = (
            batches[self.world.rank :: self.world.size],
            -(-len(batches) // self.world.size),
        )
        for number in range(most if together else len(mine)):
            problem, windows = "", mine[number] if number < len(mine) else []
            try:
                with clock.may_raise():
                    tokens, targets = self.padded(windows, size)
            except (Exception, _OverTime) as error:
                if not together:
                    raise
                problem = self.words(error)
            progress("batch")
            flags = torch.tensor([interrupted(), bool(problem)], dtype=torch.float64)
            if (sum_over_ranks(flags) if together else flags).any():
                sums[-2:] += flags.to(sums.device)
                return problem
            place = places[windows[0][0]] if windows else 0
            sums[place : place + 3] += self.score(model, tokens, targets)
        return ""

    @staticmethod
    def batches(windows: list[tuple[str, int, int]], size: int) -> list[list[tuple[str, int, int]]]:
        """The windows in batches of one source each, since a model sums over all that it is given."""
        by_source: dict[str, list[tuple[str, int, int]]] = {}
        for window in windows:
            by_source.setdefault(window[0], []).append(window)
        return [
            part[start : start + size]
            for part in by_source.values()
            for start in range(0, len(part), size)
        ]

    def words(self, error: BaseException) -> str:
        if isinstance(error, _OverTime):
            return f"it took longer than EVAL_MINUTES={self.c.eval_minutes:g}; lower EVAL_TOKENS"
        return f"{type(error).__name__}: {error}"

    def score(self, model: nn.Module, tokens: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        """(3,) float64 on the device: nats, tokens and bytes of a batch."""
        inputs = [
            tokens,
            targets,
            *([document_bounds(tokens, self.end_of_text)] if self.c.doc_mask else []),
        ]
        nats, scored = model(*(to_device(values, self.world.device) for values in inputs))
        text = float(self.byte_lengths[targets[targets != IGNORED]].sum())
        return torch.stack(
            [nats.double(), scored.double(), nats.new_tensor(text, dtype=torch.float64)]
        )

    def padded(
        self, windows: list[tuple[str, int, int]], rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets), each (rows, T) int64; what windows leave over is filled up with unscored positions."""
        length = self.c.seq_len
        tokens = np.zeros((rows, length), dtype=np.int64)
        targets = np.full((rows, length), IGNORED, dtype=np.int64)
        for row, (name, shard, window) in enumerate(windows):
            whole = self.sources[name].tokens("validation", shard)
            ids = whole[window * length : (window + 1) * length + 1]
            tokens[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
        return tokens, targets


class _Clock:
    """Lets the alarm raise where that harms nobody."""

    def __init__(self, anywhere: bool):
        self.late, self.harmless = False, anywhere

    @contextlib.contextmanager
    def may_raise(self) -> Iterator[None]:
        before, self.harmless = self.harmless, True
        try:
            if self.late:
                raise _OverTime
            yield
        finally:
            self.harmless = before

    def ring(self, number: int, frame: FrameType | None) -> None:
        self.late = True
        if self.harmless:
            raise _OverTime


@contextlib.contextmanager
def overtime(limit_s: float, anywhere: bool) -> Iterator[_Clock]:
    """Raises _OverTime inside once the time is over, also where Python sleeps or reads: wherever it is, or else only
    in a part marked by may_raise."""
    clock = _Clock(anywhere)
    if math.isinf(limit_s) or threading.current_thread() is not threading.main_thread():
        yield clock
        return
    before = signal.signal(signal.SIGALRM, clock.ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # in here, since it may ring at once
        yield clock
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
