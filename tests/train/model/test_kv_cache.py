"""A model that remembers: it says what it says without memory, for texts of any lengths side by side."""

import dataclasses

import pytest
import torch

from tests.train.model.test_model import VARIANTS, recipe
from train.model import attention
from train.model.generate import forward, read
from train.model.model import build

CPU = torch.device("cpu")


def some_texts(c, *lengths):
    g = torch.Generator().manual_seed(3)
    return [torch.randint(c.vocab_size, (length,), generator=g).tolist() for length in lengths]


def one_by_one(model, texts):
    """(B, V) logits behind each text, by a whole pass over it alone."""
    with torch.no_grad():
        return torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])


def add(model, cache, tokens):
    return forward(model, torch.tensor(tokens)[:, None], cache)


def made(c):
    model = build(c, CPU, attention.choose(c, CPU)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # norms of 1 would hide one that is left out
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            elif "embed" not in name:
                weight.mul_(3)
    return model


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("lengths", [(5,), (4, 4, 4), (7, 1, 12, 3)], ids=str)
def test_logits_are_those_of_whole_passes(tiny, changes, lengths):
    c = recipe(tiny, **changes)
    model, texts = made(c), some_texts(c, *lengths)
    cache = model.new_cache(len(texts), max(lengths) + 9)
    found = read(model, cache, texts)
    for token in range(9):
        torch.testing.assert_close(found, one_by_one(model, texts), rtol=1e-4, atol=1e-4)
        more = [(17 * token + row) % c.vocab_size for row in range(len(texts))]
        texts = [[*text, new] for text, new in zip(texts, more, strict=True)]
        assert not cache.is_full
        found = add(model, cache, more)
    assert cache.is_full
    torch.testing.assert_close(found, one_by_one(model, texts), rtol=1e-4, atol=1e-4)


def test_what_was_read_before_is_forgotten(tiny):
    c = recipe(tiny)
    model = made(c)
    cache = model.new_cache(2, 20)
    read(model, cache, some_texts(c, 15, 2))
    assert not add(model, cache, [1, 2]).requires_grad
    texts = some_texts(c, 3, 6)
    torch.testing.assert_close(
        read(model, cache, texts), one_by_one(model, texts), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        add(model, cache, [5, 6]),
        one_by_one(model, [[*texts[0], 5], [*texts[1], 6]]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_in_bfloat16_it_computes_what_the_model_does_also_with_weights_that_are_cast_once(tiny):
    c = dataclasses.replace(recipe(tiny, tie_embeddings=True), dtype="bfloat16")
    model, texts = made(c), some_texts(c, 6, 6)
    exact = one_by_one(model, texts)
    cache = model.new_cache(2, 8)
    assert torch.equal(read(model, cache, texts), exact)
    after = add(model, cache, [1, 2])
    whole = one_by_one(model, [[*texts[0], 1], [*texts[1], 2]])
    # another kernel: bfloat16 has 8 bits
    assert (after - whole).abs().max() < 0.03 * whole.abs().max()
    model.to(model.dtype)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.equal(read(model, cache, texts), exact)
    assert torch.equal(add(model, cache, [1, 2]), after)
