"""train/faults/double_check.py: a loss that is another when it is computed again names the hardware."""

import dataclasses
import math

import pytest
import torch

from record.metrics import read_records
from tests.train.making import Samples, make_job
from train import loop
from train.faults.double_check import is_same
from train.model.model import build


class Faulty(torch.nn.Module):
    """A model whose loss is multiplied in the passes, counted from 1, that `is_hit` names."""

    def __init__(self, model, factor, is_hit):
        super().__init__()
        self.model, self.factor, self.is_hit = model, factor, is_hit
        self.count = 0
        self.compiled = False

    def forward(self, tokens, targets):
        self.count += 1
        loss, scored = self.model(tokens, targets)
        return loss * (self.factor if self.is_hit(self.count, tokens) else 1), scored


@pytest.mark.fault(45)
@pytest.mark.parametrize(
    ("factor", "at"), [(math.nan, 5), (100.0, 36), (math.nan, None)], ids=["nan", "spike", "data"]
)
def test_a_loss_that_is_wrong_once_is_put_down_to_the_hardware(tiny, tmp_path, factor, at, caplog):
    """And one that comes of the data, the third, is not."""
    caplog.set_level("INFO")
    config = dataclasses.replace(
        tiny, max_steps=40, save_every=0, warmup_tokens=0, train_tokens=40 * 512
    )
    bad = Samples(config).batch(5, ()).micro_batches[0][0]

    def is_hit(count, tokens):
        return count == at if at else torch.equal(tokens, bad)

    model = Faulty(build(config, torch.device("cpu")), factor, is_hit)
    job = make_job(config, tmp_path, model=model)
    assert loop.train(job)
    (skip,) = [record for record in read_records(job.paths.metrics) if record["event"] == "skip"]
    assert ("gave two losses" in caplog.text) == bool(at)
    if not at:
        assert "suspects" not in skip
        return
    (suspect,) = skip["suspects"]
    assert (suspect["rank"], suspect["host"]) == (0, "here")
    assert 0 < suspect["again"] < 1e5 and suspect["loss"] != suspect["again"]
    assert "make doctor PROBE=1" in caplog.text


@pytest.mark.parametrize(
    ("first", "again", "same"),
    [
        (2.0, 2.001, True),
        (math.nan, math.nan, True),
        (math.nan, math.inf, True),
        (2.0, 2.5, False),
        (math.nan, 2.0, False),
        (2.0, math.inf, False),
    ],
)
def test_losses_are_the_same_but_for_rounding(first, again, same):
    assert is_same(first, again) is same
