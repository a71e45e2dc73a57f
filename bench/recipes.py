"""Two ways to train a model of one shape on the same tokens, a step at a time, and one way to score what came out.

    ours       the functions that the trainer calls, with the preset's settings: build, Loader, lr_at, train_step;
               without its record, its checkpoints and its guard against spikes
    nanoGPT    its model and configure_optimizers from a checkout, and around them what its train.py does in a step

nanoGPT's numbers are those that it has for small models: config/train_shakespeare_char.py, and of a CPU's what its
README gives there, without dropout. DTYPE=bfloat16 is by autocast, on a CPU too, where its train.py has none. It gets
the fused AdamW, which its own code takes on a GPU only: the same update in less time.
"""

import dataclasses
import importlib.util
import math
import socket
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from doctor.gpu_probe import worker
from settings.config import Config
from train.data.batch import Loader
from train.data.shards import ShardSet
from train.distributed.world import World
from train.model import attention
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.schedule import lr_at
from train.step import train_step

NANOGPT = "nanoGPT"
RATE, LEAST_RATE, WARMUP_STEPS = 1e-3, 1e-4, 100
BETAS, DECAY, CLIP = (0.9, 0.99), 0.1, 1.0
ROWS = 16  # windows that are scored at once


@dataclasses.dataclass(frozen=True)
class Text:
    """A corpus as tokens. byte_lengths: (VOCAB_SIZE,) bytes that each token stands for."""

    shards: ShardSet
    byte_lengths: np.ndarray
    end_of_text: int

    def stream(self, split: str) -> np.ndarray:
        """All tokens of a split in their order."""
        return np.concatenate(
            [self.shards.tokens(split, k) for k in range(len(self.shards.shards[split]))]
        )


class Recipe(Protocol):
    """A model in training. done: its steps so far."""

    done: int
    parameters: int

    def step(self) -> float:
        """Take one; returns its loss (nats/token)."""

    def logits(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, V) float32."""


class Ours:
    """By the functions that training calls, in its order (loop.py)."""

    def __init__(self, c: Config, text: Text):
        device = worker.device()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self.c, self.done = c, 0
        self.world = World(0, 0, 0, 1, device, name, socket.gethostname())
        self.model = build(c, device, attention.choose(c, device))
        self.optimizer = build_optimizer(self.model, c)
        self.loader = Loader(c, {next(iter(c.mixture)): text.shards}, self.world, text.end_of_text)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def step(self) -> float:
        batch = self.loader.batch(self.done)
        set_rate(self.optimizer, lr_at(self.done + 1, self.c), self.c)
        numbers = train_step(self.model, self.optimizer, batch, self.c.grad_clip, self.world)
        self.done += 1
        return numbers.loss

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


class NanoGPT:
    """A checkout's model and optimizer in the shape and the batch of `c`, over c.last_step steps."""

    def __init__(self, c: Config, text: Text, checkout: str, rate: float = RATE):
        spec = importlib.util.spec_from_file_location("nanogpt_model", Path(checkout) / "model.py")
        assert spec and spec.loader
        theirs: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(theirs)
        torch.manual_seed(c.seed)
        self.c, self.done, self.rate = c, 0, rate
        self.model = theirs.GPT(
            theirs.GPTConfig(
                block_size=c.seq_len,
                vocab_size=c.padded_vocab_size,
                n_layer=c.n_layer,
                n_head=c.n_head,
                n_embd=c.n_embd,
                dropout=0.0,
                bias=False,
            )
        ).to(worker.device())
        self.optimizer = self.model.configure_optimizers(
            DECAY, rate, BETAS, "cuda"
        )  # "cuda": the fused one
        self.stream, self.generator = text.stream("train"), torch.Generator().manual_seed(c.seed)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def batch(self) -> tuple[Tensor, Tensor]:
        """Windows from anywhere in the stream, and the tokens behind each of theirs."""
        length = self.c.seq_len
        starts = torch.randint(
            len(self.stream) - length, (self.c.batch_windows,), generator=self.generator
        )
        windows = np.stack([self.stream[i : i + length + 1] for i in starts.tolist()]).astype(
            np.int64
        )
        tokens = torch.from_numpy(windows).to(worker.device())
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of_nanogpt(self.done, self.c.last_step, self.rate)
        total = 0.0
        size = self.c.micro_batch(1)
        for tokens, targets in zip(*(part.split(size) for part in self.batch()), strict=True):
            with worker.half(self.c.dtype):
                _, loss = self.model(tokens, targets)
            loss = loss * (len(tokens) / self.c.batch_windows)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return total

    def logits(self, tokens: Tensor) -> Tensor:
        with worker.half(self.c.dtype):
            return self.model(tokens, tokens)[
                0
            ]  # with targets: all positions; the loss of these is of no use


def rate_of_nanogpt(done: int, steps: int, peak: float = RATE) -> float:
    """Its schedule: warm-up over WARMUP_STEPS, then half a cosine down to a tenth at the last step."""
    if done < WARMUP_STEPS:
        return peak * (done + 1) / (WARMUP_STEPS + 1)
    progress = min(1.0, (done - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    low = peak * LEAST_RATE / RATE
    return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * progress))


@torch.no_grad()
def bits_per_byte(recipe: Recipe, text: Text, length: int) -> dict[str, float]:
    """Of all validation tokens but the first, in windows one behind the other: bits per byte, tokens and bytes.

    The same sums for every model: cross-entropy in float32 from its logits, added up in float64.
    """
    stream = torch.from_numpy(text.stream("validation").astype(np.int64))
    nats, scored = 0.0, stream[1:]
    whole = (len(scored) // length) * length
    parts = [
        (stream[:whole].view(-1, length), scored[:whole].view(-1, length)),
        (stream[whole:-1][None], scored[whole:][None]),
    ]  # and a shorter window
    for tokens, targets in parts:
        for x, y in zip(tokens.split(ROWS), targets.split(ROWS), strict=True):
            if x.numel():
                logits = recipe.logits(x.to(worker.device())).float().flatten(0, 1)
                nats += (
                    F.cross_entropy(logits, y.to(logits.device).flatten(), reduction="none")
                    .double()
                    .sum()
                    .item()
                )
    text_bytes = int(text.byte_lengths[scored.numpy()].sum())
    return {"bpb": nats / math.log(2) / text_bytes, "tokens": len(scored), "bytes": text_bytes}
