"""The chunked loss against plain cross-entropy, by the plain functions and by those for a CPU."""

import pytest
import torch
import torch.nn.functional as F

from train.model import cpu_kernels, loss
from train.model.loss import IGNORED, scored_answers, softmax_part, summed_loss

SOFTMAXES = pytest.mark.parametrize(
    "softmax", [cpu_kernels.softmax_part, softmax_part], ids=["cpu", "plain"]
)


def case(tokens=37, entries=50):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(tokens, 16, generator=g), torch.randn(entries, 16, generator=g)
    targets = torch.randint(entries, (tokens,), generator=g)
    targets[::5] = IGNORED
    return x, w, targets


def exact_loss(x, w, targets):
    """(loss, its gradients by x and w) in float64"""
    x, w = (tensor.double().requires_grad_() for tensor in (x, w))
    total = F.cross_entropy(x @ w.t(), targets, ignore_index=IGNORED, reduction="sum")
    total.backward()
    return total.detach(), x.grad, w.grad


@SOFTMAXES
@pytest.mark.parametrize("chunk", [3, 64, None])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(chunk, softmax):
    x, w, targets = case()
    expected, dx, dw = exact_loss(x, w, targets)
    x.requires_grad_(), w.requires_grad_()
    total, scored = summed_loss(x, w, targets, chunk=chunk, softmax=softmax)
    (3 * total).backward()
    assert scored.item() == (targets != IGNORED).sum()
    found = [total, x.grad / 3, w.grad / 3]
    torch.testing.assert_close(found, [expected.float(), dx.float(), dw.float()])


def test_chunks_in_bfloat16_add_up_to_the_gradient_in_float32():
    x, w, targets = case(300)
    x, w = x.bfloat16(), w.bfloat16().float().requires_grad_()
    expected = exact_loss(x, w.detach(), targets)[1:]
    x.requires_grad_()
    scale = 1 / 3  # bfloat16 has 0.33398
    (scale * summed_loss(x, w, targets, chunk=64)[0]).backward()
    for found, exact in zip((x.grad, w.grad), expected, strict=True):
        assert (found - scale * exact).norm() < 0.01 * scale * exact.norm()
        factor = (found * exact).sum() / exact.square().sum()
        assert factor.item() == pytest.approx(scale, rel=1e-3)


@SOFTMAXES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_gives_the_gradient_also_where_a_target_is_impossible(softmax, dtype):
    logits = 8 * torch.randn(70, 50)
    targets = torch.randint(50, (70,))
    targets[::7] = IGNORED
    logits[3] = -100.0
    logits[3, 5] = 100.0
    targets[3] = 9  # a loss of 200 nats: its probability is zero in float32
    targets[4] = 8
    logits[4, 8] = -300.0
    logits = logits.to(dtype)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="sum")
    expected.backward()
    total, factors = softmax(logits, targets)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (factors * logits)[4, 8] == -1  # what outweighs the rest of a row is exact
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(factors * logits.double(), exact.grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_the_head_are_exact_over_all_columns(dtype):
    g = torch.Generator().manual_seed(0)
    # small whole numbers are exact in either type
    x, w = (
        torch.randint(-4, 5, shape, generator=g).to(dtype)
        for shape in ((3, 8), (2 * cpu_kernels.COLUMNS + 5, 8))
    )
    logits = loss.multiply(x, w, torch.full((3, len(w)), torch.nan, dtype=dtype))
    assert torch.equal(logits.double(), x.double() @ w.double().t())
    dw, grad = torch.ones(w.shape), logits.clamp(-4, 4)
    loss.add_product(x, grad, dw)
    assert torch.equal(dw.double(), 1 + grad.double().t() @ x.double())


def test_no_step_holds_all_logits():
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    x, w = torch.randn(4096, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with Watch():
        summed_loss(x, w, torch.zeros(4096, dtype=torch.int64), chunk=256)[0].backward()
    assert max(sizes) == 256 * 1000


@pytest.mark.parametrize(
    ("tokens", "on_cpu", "on_gpu"),
    [(1, 1, 1), (1536, 1536, 1536), (1537, 769, 1537), (4096, 1366, 2048), (16384, 1490, 2048)],
)
def test_chunks_are_equally_large_and_at_most_as_large_as_they_may_be(tokens, on_cpu, on_gpu):
    assert loss.chunk_of(tokens, torch.device("cpu")) == on_cpu
    assert loss.chunk_of(tokens, torch.device("cuda")) == on_gpu


def test_answers_are_scored_by_the_entries_of_the_vocabulary_alone():
    x, w, targets = case()
    targets = targets.clamp(min=0)
    logits = x @ w[:45].t()
    targets[:3], targets[3:] = logits[:3].argmax(1), targets[3:] % 45
    nats, is_likeliest = scored_answers(x, w, targets, 45, chunk=10)
    torch.testing.assert_close(nats, F.cross_entropy(logits, targets, reduction="none"))
    assert torch.equal(is_likeliest, logits.argmax(1) == targets) and is_likeliest[:3].all()
    nothing = scored_answers(x[:0], w, targets[:0], 45)
    assert [(len(part), part.dtype) for part in nothing] == [(0, torch.float32), (0, torch.bool)]
