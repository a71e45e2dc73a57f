"""How fast questions of CORE are scored: what choices begin with read once, beside the plain loop.

    python -m bench.core_speed SHOTS ROUNDS

Questions are made here, with the lengths that hellaswag's have in tokens of GPT-2: a text, four endings of it, and
before the text as many others as SHOTS. The plain loop is that of others: each choice a row of its own, in the order of
the questions, padded to the longest of its batch, and logits of all positions. Both take batches of SIZE rows and the
same model, in turn; the answers are compared. Writes a JSON line.
"""

import random
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from doctor.gpu_probe import messages, worker
from doctor.gpu_probe.foreign_load import Foreign, worst
from settings.config import Config
from train.evaluate.core.prompts import Choice, Question
from train.evaluate.core.score import score_choices
from train.model import attention
from train.model.model import Transformer, build

PARTS = ("0", "10")
SIZE, CHOICES = 16, 4
TEXT, ENDING = (20, 70), (10, 36)  # tokens


def made(shots: int, count: int, vocab_size: int) -> list[Question]:
    """Questions of random tokens."""
    rng = random.Random(shots)

    def words(span: tuple[int, int]) -> list[int]:
        return [rng.randrange(1, vocab_size) for _ in range(rng.randint(*span))]

    found = []
    for number in range(count):
        text = (
            [0]
            + [token for _ in range(shots) for token in words(TEXT) + words(ENDING)]
            + words(TEXT)
        )
        found.append(
            Question(
                number,
                tuple(Choice(array("i", text + words(ENDING)), len(text)) for _ in range(CHOICES)),
                0,
            )
        )
    return found


@torch.no_grad()
def plain(model: Transformer, questions: list[Question], device: torch.device) -> list[float]:
    """Nats of each choice, a row each."""
    nats = []
    choices = [choice for question in questions for choice in question.choices]
    for start in range(0, len(choices), SIZE):
        batch = choices[start : start + SIZE]
        tokens = torch.zeros(
            len(batch), max(len(choice.tokens) for choice in batch), dtype=torch.int64
        )
        for row, choice in enumerate(batch):
            tokens[row, : len(choice.tokens)] = torch.tensor(choice.tokens)
        tokens = tokens.to(device)
        logits = model(tokens)
        each = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        each = each.view(len(batch), -1).cpu().double()
        nats += [
            float(each[row, choice.start - 1 : len(choice.tokens) - 1].sum())
            for row, choice in enumerate(batch)
        ]
    return nats


@torch.no_grad()
def shared(model: Transformer, questions: list[Question], device: torch.device) -> list[float]:
    """The same, as make eval does it."""
    nats: dict[int, list[float]] = {}
    ordered = sorted(questions, key=len, reverse=True)
    for start in range(0, len(ordered), SIZE):
        batch = ordered[start : start + SIZE]
        for question, scores in zip(batch, score_choices(model, batch, device), strict=True):
            nats[question.number] = [score[0] for score in scores]
    return [one for number in sorted(nats) for one in nats[number]]


def main(shots: int, rounds: int) -> None:
    device = worker.device()
    on_gpu = device.type == "cuda"
    layers, width, heads, vocab_size = (12, 768, 12, 50304) if on_gpu else (4, 256, 4, 8192)
    c = (
        Config()
        .replace(
            vocab_size=vocab_size,
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            seq_len=2048,
            dtype="bfloat16" if on_gpu else "float32",
        )
        .derived()
    )
    model = build(c, device, attention.choose(c, device))
    questions = made(shots, 512 if on_gpu else 32, c.vocab_size)
    ways: dict[str, Callable[..., list[float]]] = {"plain": plain, "shared": shared}
    answers = {name: way(model, questions, device) for name, way in ways.items()}  # also warms up
    difference = max(abs(a - b) for a, b in zip(*answers.values(), strict=True))
    taken = []
    for _ in range(rounds):
        foreign, rates = Foreign([], time.monotonic()), dict[str, float | None]()
        for name, way in ways.items():
            worker.synchronize()
            began = time.perf_counter()
            way(model, questions, device)
            worker.synchronize()
            rates[name] = len(questions) / (time.perf_counter() - began)
        taken.append(rates | {"foreign_percent": foreign.percent(time.monotonic())})
    messages.say(shots=shots, questions=len(questions), difference=difference, rounds=taken)


HEADER_ROWS = (
    "| shots | questions/s | plain loop | times as fast | largest difference, nats | foreign load, % |",
    "|---|---|---|---|---|---|",
)


def row(found: dict[str, Any], spread: Callable[..., str]) -> str:
    """A line of the table: medians over rounds, with the least and the most."""
    rounds = found["rounds"]
    return (
        "| "
        + " | ".join(
            [
                str(found["shots"]),
                spread([r["shared"] for r in rounds], 1),
                spread([r["plain"] for r in rounds], 1),
                spread([r["shared"] / r["plain"] for r in rounds], 2),
                f"{found['difference']:.1e}",
                worst(rounds),
            ]
        )
        + " |"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
