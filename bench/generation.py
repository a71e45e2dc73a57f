"""How fast text is written (train/model/generate.py, train/model/kv_cache.py), beside transformers' generate on the same weights.

    python -m bench.generation ROUNDS

Writes a JSON line for each shape and number of texts side by side: tokens/s of both in every round, greedy, from
prompts of PROMPT tokens, PIECE more of each; `same` says whether both wrote the same tokens. Ours and theirs take
turns. The peer is the Llama class with our weights, in the form of a test (tests/train/model/test_model.py), and comes with
make setup-dev; without it there are our figures alone.
"""

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from doctor.gpu_probe import worker
from doctor.gpu_probe.foreign_load import Foreign, worst
from doctor.gpu_probe.messages import say
from settings import load_preset
from settings.config import Config
from train.model import attention
from train.model.generate import Choice, generate
from train.model.model import Transformer, build

PROMPT, PIECE = 16, 96  # tokens
TURN_S = 1.5  # a turn has as many texts as take about this long
BATCHES = (1, 8)
HEADER_ROWS = (
    "| text, greedy | side by side | tokens/s | times as fast as transformers | its tokens/s | the same "
    "text | foreign load, % |",
    "|---|---|---|---|---|---|---|",
)


def shapes() -> dict[str, Config]:
    """Name -> what is measured: the tiny preset, and wider models with heads that share keys."""
    base = Config().replace(vocab_size=4096, seq_len=256, n_layer=6)
    return {
        "tiny": load_preset(PRESET="tiny"),
        "6 x 256": base.replace(n_embd=256, n_head=4, n_kv_head=4).derived(),
        "6 x 512": base.replace(n_embd=512, n_head=8, n_kv_head=2).derived(),
    }


def ours(model: Transformer, prompts: list[list[int]], piece: int) -> list[list[int | None]]:
    """What our generate writes behind each prompt, in the forms that make sample calls."""
    words: Any = SimpleNamespace(
        size=model.vocab_size, end_of_text=-1
    )  # so that no text ends early
    steps = generate(
        model,
        prompts,
        piece,
        Choice(temperature=0),
        [0] * len(prompts),
        words,
    )
    return [list(row) for row in zip(*steps, strict=True)]


def transformers_beside(
    model: Transformer, c: Config
) -> Callable[[list[list[int]], int], list[list[int]]] | None:
    """The same by transformers; None where it is not installed."""
    try:
        other: Any = importlib.import_module("tests.train.model.test_model").hugging_face(model, c)
    except ImportError:
        return None
    other = other.to(device=model.rotary.device, dtype=model.dtype)

    @torch.no_grad()
    def write(prompts: list[list[int]], piece: int) -> list[list[int]]:
        tokens = torch.tensor(prompts, device=model.rotary.device)
        found = other.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=piece,
            min_new_tokens=piece,
            eos_token_id=None,
            pad_token_id=0,
        )
        return found[:, tokens.shape[1] :].tolist()

    return write


def measure(
    rounds: int, turn_s: float = TURN_S, piece: int = PIECE, names: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """A row for each shape and batch; names: of those shapes only."""
    device = worker.device()
    for name, c in shapes().items():
        if names and name not in names:
            continue
        c = c.replace(dtype="bfloat16" if device.type == "cuda" else "float32")
        model = build(c, device, attention.choose(c, device)).eval()
        model.to(model.dtype)  # once, as make sample does
        beside = transformers_beside(model, c)
        for batch in BATCHES:
            prompts = torch.randint(
                c.vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(1)
            ).tolist()
            ways = {"ours": lambda prompts=prompts, model=model: ours(model, prompts, piece)}
            if beside:
                ways["theirs"] = lambda prompts=prompts, beside=beside: beside(prompts, piece)
            written = {way: write() for way, write in ways.items()}  # also warms up
            count = max(1, round(turn_s / seconds(ways["ours"])))
            row: dict[str, Any] = {
                "shape": name,
                "dtype": c.dtype,
                "batch": batch,
                "texts": count,
                "rounds": [],
                "same": written["theirs"] == written["ours"] if beside else None,
            }
            for number in range(rounds):
                foreign, taken = Foreign([], time.monotonic()), dict[str, Any]()
                for way in list(ways) if number % 2 else reversed(list(ways)):
                    took = statistics.median(seconds(ways[way]) for _ in range(count))
                    taken[f"{way}_tokens_per_s"] = batch * piece / took
                row["rounds"].append(taken | {"foreign_percent": foreign.percent(time.monotonic())})
            yield row


def seconds(write: Callable[[], object]) -> float:
    began = time.perf_counter()
    write()
    worker.synchronize()
    return time.perf_counter() - began


def row(found: dict[str, Any], spread: Callable[..., str]) -> str:
    """A line of the table: medians over rounds, with the least and the most; ratios are of one round."""

    def of(way: str) -> list[float]:
        return [taken[f"{way}_tokens_per_s"] for taken in found["rounds"]]

    ratio, theirs, same = "n/a, it is not installed (make setup-dev)", "n/a", "n/a"
    if found["same"] is not None:
        ratio = spread([a / b for a, b in zip(of("ours"), of("theirs"), strict=True)], 2)
        theirs, same = spread(of("theirs")), "yes" if found["same"] else "no"
    return (
        f"| {found['shape']} in {found['dtype']} | {found['batch']} | {spread(of('ours'))} | {ratio} | {theirs} | "
        f"{same} | {worst(found['rounds'])} |"
    )


if __name__ == "__main__":
    for found in measure(int(sys.argv[1])):
        say(**found)
