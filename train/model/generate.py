"""Text from a model, a token at a time: which token comes next, where a text ends, and how it is shown as it comes.

    ids -> logits behind them (kv_cache.py, or a whole pass) -> choose -> one id more -> text, in whole characters

A text may outgrow SEQ_LEN: the model then goes on with the latest half of what it has seen, and with all that follows
(window_start). A prompt that is longer is not cut; who asks must refuse it.

Row r of a batch draws from a generator of its own seed. So its text is the same alone and in any batch, as far as sums
over floats are: products of another number of rows round differently, and two entries may be equally likely.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from train.data.tokenizer import Vocabulary
from train.model.kv_cache import Cache
from train.model.model import Transformer

REPLACED = "\ufffd"  # what decoding makes of bytes that are no character, or none yet
COLDEST = 1e-30  # colder is no different: of two logits that differ the likelier is certain
CONTEXT = 16  # tokens before the new ones that are decoded with them: what a token reads like may depend on it


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a token is chosen: among the top_k likeliest (0: all), of those among the likeliest that make up top_p of
    the probability, at the temperature (0: always the likeliest)."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0


class Reader(Protocol):
    """What gives logits behind texts: a Cache, or Recomputing."""

    @property
    def is_full(self) -> bool: ...

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor: ...

    def add(self, tokens: Tensor) -> Tensor: ...


class Recomputing:
    """Reads the whole of one text for each token: for a model that is split over processes, and for tests."""

    is_full = False

    def __init__(self, model: Transformer):
        self.model, self.ids = model, list[int]()

    @torch.no_grad()
    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        (text,) = texts
        self.ids = list(text)
        # each length would be compiled anew; setting the stance imports the compiler
        as_written = (
            torch.compiler.set_stance("force_eager")
            if self.model.compiled
            else contextlib.nullcontext()
        )
        with as_written:  # a split model has its weights only within its own forward pass
            logits: Tensor = self.model(torch.tensor([self.ids], device=self.model.rotary.device))
        return logits[:, -1]

    def add(self, tokens: Tensor) -> Tensor:
        return self.read([[*self.ids, *tokens.tolist()]])


def choose(logits: Tensor, how: Choice, generators: Sequence[torch.Generator]) -> Tensor:
    """(B,) int64: a token for each row of logits (B, V) float32, drawn with the row's own generator."""
    if how.temperature == 0:
        return logits.argmax(dim=-1)
    if 0 < how.top_k < logits.shape[-1]:
        logits, entries = logits.topk(how.top_k)
    elif how.top_p < 1:
        logits, entries = logits.sort(descending=True)
    else:
        entries = None
    likeliest = logits.amax(
        -1, keepdim=True
    )  # taken off, or at a temperature near 0 there were infinite ones
    heaps = (
        ((logits - likeliest) / max(how.temperature, COLDEST))
        .softmax(-1)
        .cumsum(-1, dtype=torch.float64)
    )
    total = heaps[:, -1:]
    if how.top_p < 1:  # up to and with the entry that reaches it
        total = heaps.gather(
            -1, torch.searchsorted(heaps, how.top_p * total).clamp_(max=heaps.shape[-1] - 1)
        )
    each = [
        torch.rand((), dtype=torch.float64, generator=generator) for generator in generators
    ]  # in [0, 1)
    drawn = torch.stack(each).to(heaps.device)[:, None]
    place = torch.searchsorted(heaps, drawn * total, right=True).clamp_(max=heaps.shape[-1] - 1)
    return (place if entries is None else entries.gather(-1, place))[:, 0]


def window_start(length: int, seq_len: int) -> int:
    """Where of a text of so many tokens the model begins to read: at 0, and each time that SEQ_LEN of it are full, half
    of that further on."""
    half = seq_len // 2
    return -(-max(0, length - seq_len) // half) * half


def generate(
    reader: Reader,
    texts: Sequence[Sequence[int]],
    n_tokens: int,
    how: Choice,
    seeds: Sequence[int],
    vocabulary: Vocabulary,
    seq_len: int,
    stops: Collection[int] = (),
    agree: Callable[[list[int]], list[int]] | None = None,
) -> Iterator[list[int | None]]:
    """The next token of each text, up to n_tokens times; None where a text has ended, in one of `stops` or the token
    that separates documents, which are not given themselves. Ends when all have.

    texts (ids, none empty) at most seq_len long; seeds: of each; agree: where several processes sample together, what
    makes one choice of theirs. Rows of the embedding that the tokenizer has no entry for are never chosen.
    """
    stops = {*stops, vocabulary.end_of_text}
    ids = [list(text) for text in texts]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    ended, starts = [False] * len(ids), [0] * len(ids)
    logits = reader.read(ids) if n_tokens else None
    for number in range(n_tokens):
        assert logits is not None
        chosen = choose(logits[:, : vocabulary.size].float(), how, generators)
        row = agree(chosen.tolist()) if agree else chosen.tolist()
        ended = [over or token in stops for over, token in zip(ended, row, strict=True)]
        yield [None if over else token for over, token in zip(ended, row, strict=True)]
        if all(ended) or number == n_tokens - 1:
            return
        for text, token in zip(ids, row, strict=True):
            text.append(token)
        begin = [
            0 if over else window_start(len(text), seq_len)
            for over, text in zip(ended, ids, strict=True)
        ]
        if reader.is_full or any(now > before for now, before in zip(begin, starts, strict=True)):
            logits = reader.read(
                [
                    [vocabulary.end_of_text] if over else text[start:]
                    for over, text, start in zip(ended, ids, begin, strict=True)
                ]
            )
        else:
            logits = reader.add(torch.tensor(row, device=logits.device))
        starts = begin


def cache_for(model: Transformer, texts: Sequence[Sequence[int]], n_tokens: int) -> Cache:
    """A cache for these texts and so many tokens more, or SEQ_LEN of them."""
    return Cache(model, len(texts), min(max(map(len, texts)) + n_tokens, model.rotary.shape[1]))


class Shown:
    """Turns tokens into text as they come: characters are whole, and all that was given together is the text."""

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()):
        self.vocabulary, self.ids = vocabulary, list(before)[-CONTEXT:]
        self.said = vocabulary.decode(self.ids)

    def add(self, token: int) -> str:
        """What can be shown now; "" while a character is not whole."""
        self.ids.append(token)
        text = self.vocabulary.decode(self.ids)
        return "" if text.endswith(REPLACED) else self.show(text)

    def rest(self) -> str:
        """What is left at the end: bytes that are no character."""
        return self.show(self.vocabulary.decode(self.ids))

    def show(self, text: str) -> str:
        new = text[len(self.said) :]
        self.ids = self.ids[-CONTEXT:]
        self.said = self.vocabulary.decode(self.ids)
        return new


def continue_text(
    model: Transformer,
    vocabulary: Vocabulary,
    prompt: str,
    n_tokens: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 50,
    agree: Callable[[list[int]], list[int]] | None = None,
) -> str:
    """The prompt and up to n_tokens more, ended early by the end-of-text token. agree: as `generate` has it, for a
    split model. Of a prompt beyond SEQ_LEN the model sees the end."""
    seq_len, ids = model.rotary.shape[1], [vocabulary.end_of_text, *vocabulary.encode(prompt)]
    seen = ids[window_start(len(ids), seq_len) :]
    reader = Recomputing(model) if agree else cache_for(model, [seen], n_tokens)
    more = [
        token
        for (token,) in generate(
            reader,
            [seen],
            n_tokens,
            Choice(temperature, top_k),
            [seed],
            vocabulary,
            seq_len,
            agree=agree,
        )
        if token is not None
    ]
    return vocabulary.decode([*ids[1:], *more])
