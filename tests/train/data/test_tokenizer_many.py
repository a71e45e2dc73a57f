"""train/data/tokenizer.py: texts of any number and length are encoded in bounded batches, in order, beside their reading."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.train.data.test_tokenizer import AWKWARD, some_text, taken, vocabulary
from train.data import tokenizer

__all__ = ["vocabulary"]  # a fixture


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(tokenizer, "LONGEST_PIECE", 50)
    monkeypatch.setattr(tokenizer, "BATCH_BYTES", 200)
    monkeypatch.setattr(tokenizer, "BATCH_PIECES", 6)


def test_ids_of_all_are_those_of_each_in_order(vocabulary, small_batches):
    texts = [*AWKWARD, "", *some_text()[:3], *["a b"] * 30, ""]
    found = list(vocabulary.encode_all(iter(texts)))
    assert [ids.dtype for ids in found] == [np.uint16] * len(texts)
    assert [vocabulary.decode(ids.tolist()) for ids in found] == texts
    spaced = [i for i, text in enumerate(texts) if len(text) <= 50]
    assert len(spaced) > 35 and all(
        found[i].tolist() == vocabulary.encode(texts[i]) for i in spaced
    )
    assert list(vocabulary.encode_all([])) == []


def test_a_large_vocabulary_has_ids_of_four_bytes(vocabulary):
    made = Tokenizer.from_str(vocabulary.tokenizer.to_str())
    made.add_tokens([f"\x00{i}\x00" for i in range(2**16 - 400 + 1)])
    v = taken(made)
    (ids,) = v.encode_all(["a\x0065136\x00"])
    assert v.size == 2**16 + 1 and ids.dtype == np.uint32 and ids[-1] == 2**16


def test_batches_are_bounded_in_bytes_and_in_pieces(small_batches):
    many = list(tokenizer.batches(["x"] * 20))
    assert [len(batch) for batch in many] == [6, 6, 6, 2] and all(
        p.begins and p.ends for batch in many for p in batch
    )
    long = list(tokenizer.batches(["\u65e5" * 500]))
    assert [len(batch) for batch in long] == [2] * 5  # 150 bytes a piece
    flags = [(p.begins, p.ends) for batch in long for p in batch]
    assert flags == [(True, False), *[(False, False)] * 8, (False, True)]


def test_two_batches_at_most_are_read_ahead_and_nothing_is_left_open(vocabulary, small_batches):
    drawn = 0
    closed = []

    def texts():
        nonlocal drawn
        try:
            while True:
                drawn += 1
                yield "ab"
        finally:
            closed.append(True)

    before = threading.active_count()
    encoded = vocabulary.encode_all(texts())
    assert drawn == 0  # lazy
    for done in range(1, 101):
        next(encoded)
        assert done <= drawn <= done + 2 * 6  # and never waits for texts that it does not need
    encoded.close()  # type: ignore[attr-defined]
    del encoded
    assert threading.active_count() == before and closed == [True]


@pytest.mark.fault(29)
def test_a_long_document_is_encoded_in_pieces_and_to_the_same_ids(data, monkeypatch):
    vocabulary = tokenizer.load(Path(data["TOKENIZER"]))
    chance = random.Random(3)
    text = "".join(
        chance.choice(["abca", " ", "  ", "\n", "de\t", " f", "\u00e9 "]) for _ in range(4000)
    )
    long = text * (tokenizer.LONGEST_PIECE // len(text) * 3)
    several = [ids.tolist() for ids in vocabulary.encode_all([text, long, ""])]
    assert several == [vocabulary.encode(text), vocabulary.encode(long), []]
    monkeypatch.setattr(tokenizer, "LONGEST_PIECE", 100)
    parts = list(tokenizer.pieces(text))
    assert "".join(parts) == text and max(map(len, parts)) <= 100 and len(parts) > 80
    assert [i for part in parts for i in vocabulary.encode(part)] == vocabulary.encode(text)
    assert list(tokenizer.pieces("a" * 250)) == ["a" * 100, "a" * 100, "a" * 50]
