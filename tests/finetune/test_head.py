"""What a model makes of its hidden states is found by computing it, whatever its kind."""

import pytest
import torch

from finetune.head import Head, find_head
from tests.finetune.models import SMALL
from train.model.loss import IGNORED


def lm_of(kind: str, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | changes))


@pytest.mark.parametrize(
    ("kind", "changes", "head"),
    [
        ("llama", {}, Head(1, 0)),
        ("gemma3_text", {"tie_word_embeddings": True}, Head(1, 0)),
        ("gemma2", {"final_logit_softcapping": 30.0}, Head(1, 30)),
        ("gemma2", {"final_logit_softcapping": None}, Head(1, 0)),
        ("cohere", {"logit_scale": 0.25}, Head(0.25, 0)),
        ("granite", {"logits_scaling": 8.0}, Head(0.125, 0)),
        ("phi", {"pad_token_id": 0}, None),  # its head has a bias
        ("bert", {}, None),  # its head has a block
    ],
)
def test_logits_are_found_by_computing_them(kind: str, changes: dict, head: Head | None) -> None:
    found = find_head(lm_of(kind, **changes))
    assert found == head or (found and found == pytest.approx(head))


@pytest.mark.parametrize("head", [Head(1.0, 2.0), Head(0.5, 3.0), Head(0.25, 0.0)])
def test_loss_and_gradients_are_those_of_the_logits(head: Head) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(40, 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, requires_grad=True)
    targets = torch.randint(50, (40,), generator=generator)
    targets[::3] = IGNORED
    logits = head.scale * hidden @ weight.t()
    if head.cap:
        logits = head.cap * torch.tanh(logits / head.cap)
    wanted = torch.nn.functional.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="sum"
    )
    gradients = torch.autograd.grad(wanted, (hidden, weight))
    nats, scored = head.summed_loss(hidden, weight, targets)
    assert scored == (targets != IGNORED).sum()
    torch.testing.assert_close(nats, wanted)
    torch.testing.assert_close(torch.autograd.grad(nats, (hidden, weight)), gradients)
