"""Text from a model, a token at a time: which token comes next, where a text ends, and how it is shown as it comes.

    ids -> model(tokens, cache=cache) -> logits -> choose -> one id more -> text, in whole characters

A text may outgrow SEQ_LEN. The model then continues from the latest half of what it has seen
(`window_start`). A longer prompt is not cut: the caller must refuse it.

Row r of a batch draws from a generator with its own seed, so its text is the same alone and in any
batch, up to rounding: products of another number of rows round differently, and two tokens may be
equally likely. A model that was compiled is run as it is written: text of each length would need a
graph of its own.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from train.data.tokenizer import Vocabulary
from train.distributed.parallel import is_fsdp
from train.distributed.world import broadcast_object
from train.model.compilation import as_written
from train.model.kv_cache import KVCache
from train.model.model import Transformer

REPLACED = "\ufffd"  # what decoding makes of bytes that are no character, or none yet
COLDEST = 1e-30  # colder makes no difference: of two logits that differ, the larger one is certain
CONTEXT = 16  # earlier tokens that are decoded with new ones, whose text may depend on them


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a token is chosen.

    Attributes:
        temperature: 0 always takes the likeliest token.
        top_k: only this many of the likeliest tokens are considered; 0 considers all.
        top_p: of those, only the likeliest that together have this share of the probability.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0


def choose(logits: Tensor, how: Choice, generators: Sequence[torch.Generator]) -> Tensor:
    """Return (B,) int64: a token for each row of logits (B, V) float32, drawn with the row's own generator."""
    if how.temperature == 0:
        return logits.argmax(dim=-1)
    tokens = None  # which token each column is, where the columns are not all in their order
    if 0 < how.top_k < logits.shape[-1]:
        logits, tokens = logits.topk(how.top_k)
    elif how.top_p < 1:
        logits, tokens = logits.sort(descending=True)
    # Without the largest one, a temperature near 0 would make infinite logits.
    logits = logits - logits.amax(-1, keepdim=True)
    probabilities = (logits / max(how.temperature, COLDEST)).softmax(-1)
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    last = sums.shape[-1] - 1
    total = sums[:, -1:]
    if how.top_p < 1:  # up to the token that reaches it
        reaches = torch.searchsorted(sums, how.top_p * total).clamp_(max=last)
        total = sums.gather(-1, reaches)
    draws = [torch.rand((), dtype=torch.float64, generator=one) for one in generators]  # in [0, 1)
    drawn = torch.stack(draws).to(sums.device)[:, None]
    columns = torch.searchsorted(sums, drawn * total, right=True).clamp_(max=last)
    if tokens is not None:
        columns = tokens.gather(-1, columns)
    return columns[:, 0]


def window_start(length: int, seq_len: int) -> int:
    """Return the first of so many tokens that the model still sees: 0, then half of SEQ_LEN more
    each time that SEQ_LEN tokens are full."""
    half = seq_len // 2
    surplus = max(0, length - seq_len)
    return -(-surplus // half) * half


def forward(model: Transformer, tokens: Tensor, cache: KVCache) -> Tensor:
    """Return (B, V) logits after (B, T) more tokens, without gradients and without compiling."""
    # FSDP2 gathers weights that are trained later, which inference mode would not allow.
    without_gradients = torch.no_grad if is_fsdp(model) else torch.inference_mode
    with without_gradients(), as_written(model):
        logits: Tensor = model(tokens, cache=cache)
    return logits


def read(model: Transformer, cache: KVCache, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, V) logits after these texts, none of which is empty. What was read before is forgotten."""
    cache.start([len(text) for text in texts])
    longest = max(cache.lengths)
    rows = [[*text, *[0] * (longest - len(text))] for text in texts]
    return forward(model, torch.tensor(rows, device=cache.device), cache)


def generate(
    model: Transformer,
    texts: Sequence[Sequence[int]],
    n_tokens: int,
    how: Choice,
    seeds: Sequence[int],
    vocabulary: Vocabulary,
    stops: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yield the next token of each text, up to n_tokens times, at least 1. It ends when all texts have ended.

    Rows of the embedding that the tokenizer has no entry for are never chosen.

    Args:
        texts: ids, none empty, at most SEQ_LEN of them.
        seeds: one per text.
        stops: tokens that end a text, besides the one that separates documents. They are not
            yielded: a text that has ended yields None.
    """
    stops = {*stops, vocabulary.end_of_text}
    is_split = is_fsdp(model)
    seq_len = model.rotary.shape[1]
    ids = [list(text) for text in texts]
    cache = model.new_cache(len(ids), min(max(map(len, ids)) + n_tokens, seq_len))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    has_ended = [False] * len(ids)
    logits = read(model, cache, ids)
    for count in range(1, n_tokens + 1):
        row = choose(logits[:, : vocabulary.size], how, generators).tolist()
        if is_split:  # all processes go on with the same tokens
            row = broadcast_object(row)
        shown: list[int | None] = list(row)
        for place, token in enumerate(row):
            has_ended[place] = has_ended[place] or token in stops
            ids[place].append(token)
            if has_ended[place]:
                shown[place] = None
                ids[place] = [vocabulary.end_of_text]  # the others may outgrow SEQ_LEN without it
        yield shown
        if all(has_ended) or count == n_tokens:
            return
        if cache.is_full:  # as soon as a text outgrows SEQ_LEN
            windows = [text[window_start(len(text), seq_len) :] for text in ids]
            logits = read(model, cache, windows)
        else:
            logits = forward(model, torch.tensor(row, device=cache.device)[:, None], cache)


class TextStream:
    """Turns tokens into text as they come. Characters are whole, and all parts together are the text."""

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()):
        self.vocabulary = vocabulary
        self.ids = list(before)[-CONTEXT:]
        self.shown = vocabulary.decode(self.ids)

    def add(self, token: int) -> str:
        """Return what can be shown now; "" while a character is not whole."""
        self.ids.append(token)
        if self.vocabulary.decode(self.ids).endswith(REPLACED):
            return ""
        return self.rest()

    def rest(self) -> str:
        """Return what was not shown yet; at the end, also bytes that are no character."""
        new = self.vocabulary.decode(self.ids)[len(self.shown) :]
        self.ids = self.ids[-CONTEXT:]
        self.shown = self.vocabulary.decode(self.ids)
        return new


def continue_text(
    model: Transformer,
    vocabulary: Vocabulary,
    prompt: str,
    n_tokens: int,
    seed: int,
    temperature: float = 0.8,
) -> str:
    """Return the prompt and up to n_tokens more. Of a prompt beyond SEQ_LEN, the model sees the end."""
    ids = [vocabulary.end_of_text, *vocabulary.encode(prompt)]
    window = ids[window_start(len(ids), model.rotary.shape[1]) :]
    choice = Choice(temperature)
    for (token,) in generate(model, [window], n_tokens, choice, [seed], vocabulary):
        if token is not None:
            ids.append(token)
    return vocabulary.decode(ids[1:])
