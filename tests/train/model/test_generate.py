"""The choice of tokens, by counting; texts with and without a cache, alone and in a batch; text as it comes."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.train.model.test_kv_cache import made, some_texts
from tests.train.model.test_model import recipe
from train.data import tokenizer
from train.data.tokenizer import from_tokenizer
from train.model.generate import (
    Choice,
    TextStream,
    choose,
    continue_text,
    generate,
    window_start,
)

GREEDY = Choice(temperature=0)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    texts = (f"word{i} \u00e9t\u00e9 " * 5 for i in range(400))
    return tokenizer.train(texts, 512, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


# ---- The choice


def chosen(how, logits, times):
    """Share of each entry, of so many draws from one generator."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor(logits).expand(times, -1)
    found = Counter(choose(rows, how, [generator] * times).tolist())
    return {entry: count / times for entry, count in sorted(found.items())}


LOGITS = [0.5, 2.0, -1.0, 1.5, 0.0]  # of probability 0.10, 0.46, 0.02, 0.28, 0.06 or so


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ((1.0, 0, 1.0), "01234"),
        ((1.0, 5, 1.0), "01234"),
        ((1.0, 99, 1.0), "01234"),
        ((1.0, 2, 1.0), "13"),
        ((2.0, 3, 1.0), "013"),
        ((1.0, 0, 0.3), "1"),
        ((1.0, 0, 0.6), "13"),
        ((1.0, 4, 0.9), "013"),
        ((1.0, 2, 0.99), "13"),
        ((0.1, 0, 0.9), "1"),  # alone 0.99 at that temperature
        ((10.0, 0, 0.9), "01234"),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(how, kept):
    temperature = how[0]
    heaps = {int(i): math.exp(LOGITS[int(i)] / temperature) for i in kept}
    found = chosen(Choice(*how), LOGITS, 20_000)
    assert found.keys() == heaps.keys()
    for i, heap in heaps.items():  # within four standard deviations
        assert found[i] == pytest.approx(heap / sum(heaps.values()), abs=0.015)


def test_greedy_takes_the_likeliest_and_asks_no_generator():
    assert choose(torch.tensor([LOGITS, LOGITS[::-1]]), GREEDY, []).tolist() == [1, 3]


@pytest.mark.parametrize("temperature", [1e-20, 1e-40, 5e-324])
@pytest.mark.parametrize("how", [(0, 1.0), (3, 1.0), (0, 0.9)])
def test_next_to_no_temperature_is_none(temperature, how):
    assert chosen(Choice(temperature, *how), LOGITS, 50) == {1: 1.0}
    assert chosen(Choice(temperature, *how), [-x for x in LOGITS], 50) == {2: 1.0}


# ---- With a cache and without


@torch.no_grad()
def recompute(model, text, n, how, seed, vocabulary):
    """The same by a whole pass over the window for each token."""
    generator, seq_len = torch.Generator().manual_seed(seed), model.rotary.shape[1]
    text = list(text)
    for _ in range(n):
        seen = text[window_start(len(text), seq_len) :]
        logits = model(torch.tensor([seen]))[:, -1, : vocabulary.size]
        (token,) = choose(logits, how, [generator]).tolist()
        if token == vocabulary.end_of_text:
            return
        text.append(token)
        yield (token,)


@pytest.mark.parametrize("how", [GREEDY, Choice(1.2, 40, 0.95), Choice(1.0, 0, 1.0)], ids=str)
def test_a_text_is_the_same_with_a_cache_and_without_alone_and_in_any_batch(tiny, vocabulary, how):
    """Also where it outgrows SEQ_LEN=32, at other places than the others."""
    c = recipe(tiny, n_kv_head=2)
    model, texts, seeds, n = made(c), some_texts(c, 9, 3, 32, 20), [5, 6, 7, 5], 70
    alone = [
        [row for (row,) in recompute(model, text, n, how, seed, vocabulary)]
        for text, seed in zip(texts, seeds, strict=True)
    ]
    assert max(map(len, alone)) > 40
    for rows in ([0], [2], [0, 1, 2, 3], [3, 1]):
        of_rows = [[every[row] for row in rows] for every in (texts, seeds, alone)]
        steps = generate(model, of_rows[0], n, how, of_rows[1], vocabulary)
        for found, expected in zip(zip(*steps, strict=True), of_rows[2], strict=True):
            assert [*expected, *[None] * (len(found) - len(expected))] == list(found)


def test_the_window_is_the_whole_text_and_then_at_least_its_latest_half():
    starts = [window_start(length, 8) for length in range(20)]
    assert starts == [0] * 9 + [4] * 4 + [8] * 4 + [12] * 3
    assert all(4 < length - start <= 8 for length, start in enumerate(starts) if length > 8)
    assert [window_start(length, 3) for length in range(6)] == [0, 0, 0, 0, 1, 2]


class Says(torch.nn.Module):
    """A model that wants to say these tokens, row by row."""

    def __init__(self, c, *rows):
        super().__init__()
        self.inner, self.rows, self.at = made(c), rows, 0
        self.rotary, self.compiled, self.dtype = self.inner.rotary, False, self.inner.dtype
        self.new_cache = self.inner.new_cache

    def forward(self, tokens, cache):
        self.inner(tokens, cache=cache)
        self.at += 1
        said = torch.tensor([row[self.at - 1] for row in self.rows])
        return torch.nn.functional.one_hot(said, 600).float()


def test_a_text_ends_at_its_stops_and_others_go_on(tiny, vocabulary):
    eot, stop = vocabulary.end_of_text, 9
    c = recipe(tiny)
    model = Says(c, [20, 21, eot, 30, 31], [22, 23, 24, 25, stop], [stop, 26, 27, 28, 29])
    found = list(generate(model, [[1], [1], [1]], 9, GREEDY, [0, 0, 0], vocabulary, stops=[stop]))
    assert list(zip(*found, strict=True)) == [
        (20, 21, None, None, None),
        (22, 23, 24, 25, None),
        (None,) * 5,
    ]
    assert model.at == 5  # and no pass after the last


@pytest.mark.parametrize("vocab_size", [640, 513])  # 513 is padded to 640
def test_rows_without_a_token_are_never_sampled(tiny, vocabulary, vocab_size):
    model = made(recipe(tiny, vocab_size=vocab_size))
    with torch.no_grad():  # they are by far the likeliest
        model.lm_head.weight[512:] = 100 * model.lm_head.weight[512:].sign()
    found = list(generate(model, [[1]], 30, GREEDY, [3], vocabulary))
    assert len(found) == 30
    assert all(token is None or token < 512 for (token,) in found)


def test_where_processes_hold_a_part_each_the_first_one_chooses(tiny, vocabulary, monkeypatch):
    model = made(recipe(tiny))
    monkeypatch.setattr("train.model.generate.broadcast_object", lambda row: [400 + len(row)])
    alone = continue_text(model, vocabulary, "word1", 3, seed=1)
    monkeypatch.setattr(type(model), "reshard", None, raising=False)  # as FSDP2 does
    text = continue_text(model, vocabulary, "word1", 3, seed=1)
    assert text == vocabulary.decode([*vocabulary.encode("word1"), 401, 401, 401]) != alone


# ---- As it comes


def shown(vocabulary, before, ids):
    made_ = TextStream(vocabulary, before)
    return [*(made_.add(token) for token in ids), made_.rest()]


def by_bytes(path):
    """A SentencePiece-like tokenizer: blanks as U+2581, a single byte as <0x0A>."""
    entries = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    entries |= {piece: len(entries) + i for i, piece in enumerate(("\u2581", "a", "b", "\u2581a"))}
    made_ = Tokenizer(
        models.BPE(vocab=entries, merges=[("\u2581", "a")], byte_fallback=True, unk_token="<unk>")
    )
    made_.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made_.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made_.add_special_tokens(["</s>"])
    return from_tokenizer(made_, "0" * 64, str(path))


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_text_comes_in_whole_characters_and_is_the_text(is_byte_level, vocabulary, tmp_path):
    v = vocabulary if is_byte_level else by_bytes(tmp_path)
    text = "a b  ab\n \u65e5\u672c\u8a9e \U0001f642\U0001f642 e\u0301 \ufb01 a" * 3
    ids = v.encode(text)
    assert len(ids) > len(text)  # characters of several tokens
    parts = shown(v, v.encode("ab a"), ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts) and "" in parts and parts[-1] == ""
    assert all(len(part) <= 2 for part in parts)  # as it comes, and not at the end


def test_bytes_that_are_no_character_are_shown_as_decoding_shows_them(
    vocabulary,
):
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        ids = torch.randint(7, vocabulary.size, (40,), generator=generator).tolist()
        assert "".join(shown(vocabulary, [], ids)) == vocabulary.decode(ids)
    half = vocabulary.encode("\u65e5")[:-1]
    assert shown(vocabulary, [], half) == ["" for _ in half] + [vocabulary.decode(half)]


def test_a_sample_in_bfloat16_needs_no_gradient_and_no_eval(tiny, vocabulary):
    c = dataclasses.replace(recipe(tiny), dtype="bfloat16")
    model = made(c).train()
    assert continue_text(model, vocabulary, "word2", 60, seed=1).startswith("word2")
    assert model.training and all(weight.requires_grad for weight in model.parameters())
