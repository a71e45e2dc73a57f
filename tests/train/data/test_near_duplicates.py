"""train/data/near_duplicates.py against the exact Jaccard similarity of all pairs of documents."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from train.data import near_duplicates
from train.data.near_duplicates import SeenKeys, compute_keys
from train.data.sources.rows import Cursor, Document, Dropped
from train.data.word_hashes import hash_documents

PLANTED = (1, 3, 5, 8, 11, 15, 20, 30)  # words of 300 that are replaced in a copy


def edit(rng, words, count):
    edited = list(words)
    for place in rng.sample(range(len(words)), count):
        edited[place] = f"edit{rng.randrange(10**9)}"
    return edited


@pytest.fixture(scope="module")
def texts():
    """60 documents with 8 edited copies each, in a random order, and some odd ones."""
    rng = random.Random(11)
    found = []
    for _ in range(60):
        words = [f"w{rng.randrange(5000)}" for _ in range(300)]
        found += [" ".join(words), *(" ".join(edit(rng, words, n)) for n in PLANTED)]
    found += ["", "!", "?!", "one", "One.", "one two", "日本 é", "日本 É!", "a b c d e f g"]
    rng.shuffle(found)
    return found


def runs(text):
    words = ["".join(ch for ch in word if ch.isalnum()) for word in text.lower().split()]  # by hand
    padded = [*(word for word in words if word), "", "", "", ""]
    return {tuple(padded[i : i + 5]) for i in range(len(padded) - 4)}


def test_pairs_are_found_as_often_as_theory_says(texts):
    """In each band of similarity, within four standard deviations; and no others."""
    keys = compute_keys(hash_documents(texts))
    pairs = [
        (len(a & b) / len(a | b), bool((keys[i] == keys[j]).any()))
        for (i, a), (j, b) in itertools.combinations(enumerate(map(runs, texts)), 2)
        if a and b
    ]
    s, is_found = np.array(pairs, dtype=float).T
    expected = 1 - (1 - s**8) ** 14
    assert not is_found[s < 0.2].any()
    assert is_found[s == 1].all() and (s == 1).sum() == 2
    for low, high in itertools.pairwise((0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.999)):
        inside = (s >= low) & (s < high)
        deviation = np.sqrt((expected * (1 - expected))[inside].sum()) + 1
        assert inside.sum() >= 60
        assert abs(is_found[inside].sum() - expected[inside].sum()) < 4 * deviation


def test_keys_are_always_the_same_and_of_one_document_alone(texts):
    together = compute_keys(hash_documents(texts)).tolist()
    assert together == [compute_keys(hash_documents([text]))[0].tolist() for text in texts]
    assert compute_keys(hash_documents(texts, continued="the rest of one")).tolist() == together
    (keys,) = compute_keys(hash_documents(["the quick brown fox jumps over the lazy dog"]))
    assert hex(keys[0]) == "0xa53e0fdb7b6bc684"
    without_words = compute_keys(hash_documents(["", "!", "...", "a", "A!"]))
    assert SeenKeys().add(without_words).tolist() == [False, False, False, False, True]
    assert SeenKeys().add(compute_keys(hash_documents([]))).tolist() == []


@pytest.mark.parametrize("batch", [1, 7, 100, 10**6])
def test_a_document_is_near_if_any_earlier_one_has_a_key_of_it(texts, batch):
    keys = compute_keys(hash_documents(texts))
    seen = SeenKeys()
    earlier: set[int] = set()
    near = 0
    for begin in range(0, len(keys), batch):
        some = keys[begin : begin + batch]
        before = seen.find(some)
        for row, was_seen, is_near in zip(some.tolist(), before, seen.add(some), strict=True):
            assert is_near == bool(earlier & set(row)) and is_near >= was_seen
            earlier |= set(row) - {0}
            near += is_near
    assert 200 < near < 480
    lengths = [len(array) for array in seen.arrays]
    assert all(a >= 2 * b for a, b in itertools.pairwise(lengths))
    assert set(np.concatenate(seen.arrays).tolist()) - {0} == earlier


# ---- Leaving them out


def rows_of(texts):
    rows: list[Document | Dropped] = []
    for k, text in enumerate(texts):
        rows.append(Document(f"d{k}", text, Cursor(k // 10, 2 * (k % 10))))
        if k % 5 == 4:
            rows.append(Dropped("null", Cursor(k // 10, 2 * (k % 10) + 1), "null"))
    return rows


def left_out(rows, monkeypatch, at, held_out=""):
    def documents(pinned, files):
        yield from rows

    monkeypatch.setattr(near_duplicates, "documents", documents)
    pinned = SimpleNamespace(held_out=held_out)
    return list(near_duplicates.drop_near_duplicates(pinned, None, at))  # type: ignore[arg-type]


@pytest.mark.parametrize("characters", [1, 5000, 10**9])
def test_near_duplicates_become_dropped_rows_from_any_place_on(texts, monkeypatch, characters):
    """Whatever is read at once, and wherever preparing goes on after it was killed."""
    monkeypatch.setattr(near_duplicates, "BATCH_CHARACTERS", characters)
    rows = rows_of(texts)
    near = SeenKeys().add(compute_keys(hash_documents(texts)))
    expected = [
        Dropped("near-duplicate", row.at, "most of its text is in an earlier document")
        if isinstance(row, Document) and near[int(row.name[1:])]
        else row
        for row in rows
    ]
    for at in (Cursor(0, 0), Cursor(0, 7), Cursor(20, 4), Cursor(99, 0)):
        assert left_out(rows, monkeypatch, at) == [row for row in expected if row.at >= at]
    one = f"d{np.flatnonzero(near)[5]}"
    kept = left_out(rows, monkeypatch, Cursor(0, 0), held_out=one)
    assert [row for row, other in zip(kept, expected, strict=True) if row != other] == [
        row for row in rows if isinstance(row, Document) and row.name == one
    ]


def test_of_a_long_document_the_beginning_decides(monkeypatch):
    monkeypatch.setattr(near_duplicates, "LONGEST_CHARACTERS", 1000)
    beginning = " ".join(f"w{k}" for k in range(400))
    texts = [" ".join([beginning, *(f"{rest}{k}" for k in range(999))]) for rest in "xy"]
    first, second = left_out(rows_of(texts), monkeypatch, Cursor(0, 0))
    assert isinstance(first, Document) and isinstance(second, Dropped)
