"""finetune/subset.py: what is held out is fixed, no copy of it is trained on, and perplexity is by its definition."""

import math
import random

import numpy as np
import pytest

from finetune.store import hash_of
from finetune.subset import chosen, perplexity, split
from tests.finetune.making import talk

HASHES = np.array([hash_of(talk(f"q{i}?", "a")) for i in range(300)], dtype=np.uint64)


def test_the_subset_is_that_of_the_hashes_whatever_their_order_and_company() -> None:
    subset = set(HASHES[chosen(HASHES, 1, 20)].tolist())
    assert len(subset) == 20
    order = list(range(300))
    random.Random(1).shuffle(order)
    assert set(HASHES[order][chosen(HASHES[order], 1, 20)].tolist()) == subset
    more = np.concatenate((HASHES, HASHES[:50]))
    assert set(more[chosen(more, 1, 20)].tolist()) == subset and len(chosen(more, 1, 20)) == 20
    fewer = set(HASHES[:150][chosen(HASHES[:150], 1, 20)].tolist())
    assert (
        subset & set(HASHES[:150].tolist()) <= fewer
    )  # those that are still there are still chosen
    assert set(HASHES[chosen(HASHES, 2, 20)].tolist()) != subset
    assert (
        chosen(HASHES, 1, None).tolist() == list(range(300)) and len(chosen(HASHES, 1, 1000)) == 300
    )


def test_the_subset_is_no_part_of_the_file_by_place() -> None:
    found = chosen(HASHES, 1, 100)
    assert abs(found.mean() - 149.5) < 30 and (found < 150).sum() > 25


def test_held_out_is_not_trained_on_and_neither_are_its_copies() -> None:
    hashes = np.concatenate((HASHES, HASHES))
    parts = split(hashes, 1, 20)
    assert len(parts.held_out) == 20 == parts.copies and len(parts.train) == 560
    assert not set(hashes[parts.train].tolist()) & set(hashes[parts.held_out].tolist())


def test_at_most_a_tenth_is_held_out() -> None:
    assert len(split(HASHES, 1, 200).held_out) == 30
    assert len(split(HASHES[:9], 1, 200).held_out) == 0
    assert len(split(np.repeat(HASHES[:10], 30), 1, 200).held_out) == 1  # a tenth of what differs
    assert len(split(HASHES, 1, 0).train) == 300


def test_with_other_data_to_evaluate_with_only_copies_of_it_are_left_out() -> None:
    parts = split(HASHES, 1, 20, beside=HASHES[10:15])
    assert (len(parts.held_out), parts.copies) == (0, 5)
    assert parts.train.tolist() == [*range(10), *range(15, 300)]


def test_what_is_said_decides_the_hash() -> None:
    talks = [
        talk("a", "b"),
        talk("a", "c"),
        talk("ab", ""),
        talk("a", "b", system="s"),
        talk("a", "b", "c", "d"),
    ]
    assert len({hash_of(messages) for messages in talks}) == 5
    assert hash_of(talk("a", "b")) == hash_of(list(talk("a", "b")))


def test_perplexity_is_one_over_the_geometric_mean_of_the_probabilities() -> None:
    probabilities = [0.5, 0.125, 0.9, 0.01]
    nats = -sum(map(math.log, probabilities))
    assert perplexity(nats, 4) == pytest.approx(math.prod(probabilities) ** -0.25)
    assert perplexity(0.0, 3) == 1 and perplexity(1e6, 1) == math.inf
    with pytest.raises(ValueError, match="no token was scored"):
        perplexity(0.0, 0)
