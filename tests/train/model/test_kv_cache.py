"""A model that remembers: it says what it says without memory, for texts of any lengths side by side."""

import dataclasses

import pytest
import torch

from tests.train.model.test_model import VARIANTS, recipe
from train.model import attention
from train.model.kv_cache import Cache
from train.model.model import build

CPU = torch.device("cpu")


def some_texts(c, *lengths):
    g = torch.Generator().manual_seed(3)
    return [torch.randint(c.vocab_size, (length,), generator=g).tolist() for length in lengths]


def one_by_one(model, texts):
    """(B, V) logits behind each text, by a whole pass over it alone."""
    with torch.no_grad():
        return torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])


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
    cache = Cache(model, len(texts), max(lengths) + 9)
    found = cache.read(texts)
    for token in range(9):
        torch.testing.assert_close(
            found[:, : c.vocab_size], one_by_one(model, texts), rtol=1e-4, atol=1e-4
        )
        more = [(17 * token + row) % c.vocab_size for row in range(len(texts))]
        texts = [[*text, new] for text, new in zip(texts, more, strict=True)]
        assert not cache.is_full
        found = cache.add(torch.tensor(more))
    assert cache.is_full
    torch.testing.assert_close(
        found[:, : c.vocab_size], one_by_one(model, texts), rtol=1e-4, atol=1e-4
    )


def test_what_was_read_before_is_forgotten(tiny):
    c = recipe(tiny)
    model, cache = made(c), None
    cache = Cache(model, 2, 20)
    cache.read(some_texts(c, 15, 2))
    cache.add(torch.tensor([1, 2]))
    texts = some_texts(c, 3, 6)
    torch.testing.assert_close(cache.read(texts), one_by_one(model, texts), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        cache.add(torch.tensor([5, 6])),
        one_by_one(model, [[*texts[0], 5], [*texts[1], 6]]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_in_bfloat16_it_computes_what_the_model_does_and_casts_once(tiny):
    c = dataclasses.replace(recipe(tiny, tie_embeddings=True), dtype="bfloat16")
    model, texts = made(c), some_texts(c, 6, 6)
    cache = Cache(model, 2, 8)
    assert {w.dtype for w in cache.model.parameters()} == {torch.bfloat16}
    assert cache.model.lm_head.weight is cache.model.embed_tokens.weight
    assert torch.equal(cache.read(texts).float(), one_by_one(model, texts))
    after = cache.add(torch.tensor([1, 2])).float()
    exact = one_by_one(model, [[*texts[0], 1], [*texts[1], 2]])
    assert (
        after - exact
    ).abs().max() < 0.03 * exact.abs().max()  # another kernel: bfloat16 has 8 bits


def test_the_model_is_left_as_it_was_and_its_float32_weights_are_not_copied(tiny):
    c = recipe(tiny)
    model = made(c)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    cache = Cache(model, 1, 8)
    cache.read(some_texts(c, 4))
    assert all(layer.self_attn.kernel is model.kernel for layer in model.layers)
    assert all(
        torch.equal(weight, before[name]) and weight.requires_grad
        for name, weight in model.named_parameters()
    )
    ours = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    assert {name: weight.data_ptr() for name, weight in cache.model.named_parameters()} == ours
