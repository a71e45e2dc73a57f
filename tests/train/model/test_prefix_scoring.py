"""Continuations that share a text, beside the same continuations each read by itself."""

import pytest
import torch

from tests.train.model.test_model import CPU, recipe
from train.model import prefix_scoring
from train.model.attention import MATH, SDPA, Kernel, by_products
from train.model.model import build
from train.model.prefix_scoring import lay_out


@pytest.fixture
def model(tiny):
    return build(recipe(tiny, n_kv_head=2, seq_len=64, vocab_size=300), CPU)


def rows(seed, count):
    """Trunks and branches of all lengths that fit, an empty branch among them."""
    random = torch.Generator().manual_seed(seed)

    def words(count):
        return torch.randint(300, (count,), generator=random).tolist()

    return [
        (
            words(1 + int(torch.randint(9, (), generator=random))),
            [words(n) for n in torch.randperm(5, generator=random).tolist()],
        )
        for _ in range(count)
    ]


def alone(one, trunk, branch):
    """Nats and hits of a branch, from the logits of the whole text by itself."""
    logits = one(torch.tensor([trunk + branch]))[0, len(trunk) - 1 : -1].double()
    chosen = torch.tensor(branch, dtype=torch.int64)
    return -logits.log_softmax(1)[range(len(branch)), chosen], logits.argmax(1) == chosen


@torch.no_grad()
@pytest.mark.parametrize(
    "kernel", [SDPA, MATH, Kernel("by bounds", lambda q, k, v, b: by_products(q, k, v), True)]
)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_each_branch_is_scored_as_if_it_were_alone(tiny, kernel, qk_norm):
    c = recipe(tiny, n_kv_head=2, seq_len=64, vocab_size=300, qk_norm=qk_norm)
    one, given = build(c, CPU, kernel), rows(1, 5)
    tokens, branches = lay_out(given)
    nats, hits = one(tokens, branches=branches)
    expected = [alone(one, trunk, branch) for trunk, all_of in given for branch in all_of if branch]
    torch.testing.assert_close(
        nats.double(), torch.cat([n for n, _ in expected]), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(hits, torch.cat([h for _, h in expected]))


@torch.no_grad()
def test_what_is_likeliest_is_a_hit(model):
    text = [5, 7, 11]
    best = int(model(torch.tensor([text]))[0, -1].argmax())
    tokens, branches = lay_out([(text, [[best], [(best + 1) % 300]])])
    assert model(tokens, branches=branches)[1].tolist() == [True, False]


def test_a_token_sees_its_trunk_and_its_branch_up_to_itself(monkeypatch):
    monkeypatch.setattr(prefix_scoring, "ROUND", 3)
    _, branches = lay_out([([9, 9], [[9, 9], [9]])])
    assert branches.positions.tolist() == [[0, 1, 2, 3, 2, 0]]
    assert branches.mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    assert branches.at.tolist() == [1, 2, 1]


@torch.no_grad()
def test_nothing_to_score_is_scored_as_nothing(model):
    tokens, branches = lay_out([([1, 2], [[]])])
    nats, hits = model(tokens, branches=branches.to(CPU))
    assert nats.shape == hits.shape == (0,)
