"""train/faults/double_check.py: a loss that is another when it is computed again names the hardware."""

import dataclasses

import pytest
import torch

from record.metrics import read_records
from tests.train.making import make_job
from train import loop
from train.faults.double_check import is_same
from train.model.model import build


class Faulty(torch.nn.Module):
    """A model whose loss is multiplied, at the given passes or for all samples of a step."""

    def __init__(self, model, factor, passes=(), step=None):
        super().__init__()
        self.model, self.factor, self.passes, self.step = model, factor, passes, step
        self.count = 0
        self.compiled = False

    def forward(self, tokens, targets):
        self.count += 1
        loss, scored = self.model(tokens, targets)
        is_step = self.step is not None and torch.equal(tokens, self.step)
        hit = self.count in self.passes or is_step
        return (loss * self.factor if hit else loss), scored


def skips(job):
    assert loop.train(job)
    return [record for record in read_records(job.paths.metrics) if record["event"] == "skip"]


@pytest.fixture
def config(tiny):
    return dataclasses.replace(
        tiny, max_steps=40, save_every=0, warmup_tokens=0, train_tokens=40 * 512
    )


@pytest.mark.fault(45)
@pytest.mark.parametrize(("factor", "at"), [(float("nan"), 5), (100.0, 36)])
def test_a_loss_that_is_wrong_once_is_put_down_to_the_hardware(
    config, tmp_path, factor, at, caplog
):
    caplog.set_level("INFO")
    model = build(config, torch.device("cpu"))
    job = make_job(config, tmp_path, model=Faulty(model, factor, passes=(at,)))
    job.rates.flops = job.rates.flops_causal = 1.0
    (skip,) = skips(job)
    (suspect,) = skip["suspects"]
    assert (suspect["rank"], suspect["host"]) == (0, "here")
    assert 0 < suspect["again"] < 1e5 and suspect["loss"] != suspect["again"]
    assert "gave two losses" in caplog.text and "make doctor PROBE=1" in caplog.text


def test_a_loss_that_comes_of_the_data_or_the_weights_is_not(config, tmp_path, caplog):
    caplog.set_level("INFO")
    model = build(config, torch.device("cpu"))
    job = make_job(config, tmp_path)
    tokens = job.loader.batch(5, ()).micro_batches[0][0]
    job = make_job(config, tmp_path, model=Faulty(model, float("nan"), step=tokens))
    (skip,) = skips(job)
    assert "suspects" not in skip and "gave two losses" not in caplog.text


def test_losses_are_the_same_but_for_rounding():
    nan, inf = float("nan"), float("inf")
    assert is_same(2.0, 2.001) and is_same(nan, nan) and is_same(nan, inf)
    assert not is_same(2.0, 2.5) and not is_same(nan, 2.0) and not is_same(2.0, inf)
