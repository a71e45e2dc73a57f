"""Losses that are no number, and those that jump: the same decision on all ranks, and after a kill the same run."""

import json
import math

import pytest

from tests.faults.inject import Fault
from tests.faults.trial import Trial

BATCH = 16  # samples of a step


def of_step(step, shift=0, steps=1):
    """The samples of a step, or of several, where so many steps' samples were passed over before."""
    first = (step - 1 + shift) * BATCH
    return first, first + steps * BATCH


@pytest.mark.fault(16)
@pytest.mark.parametrize(
    ("value", "rank", "first"),
    [(math.nan, None, 64), pytest.param(math.inf, 1, 64 + BATCH // 2, marks=pytest.mark.slow)],
    ids=["one process", "one of two ranks"],
)
def test_a_loss_that_is_no_number_is_skipped_and_three_in_a_row_lead_back(
    trial, value, rank, first
):
    """One skip at step 5, three at step 12, and the way back from there to step 8."""
    bad = [
        Fault("forward", "multiply", rank=rank, samples=samples, value=value, every=True)
        for samples in (of_step(5), of_step(12, shift=1, steps=3))
    ]
    out = trial.train(*bad, **({"NPROC": 2} if rank else {}))
    skips = trial.events("skip")
    assert [skip["step"] for skip in skips] == [5, 12, 12, 12]
    assert all(skip["loss"] is None for skip in skips)
    assert skips[0]["samples"] == [first, 79] and len(skips[0]["names"]) == 80 - first
    assert skips[0]["names"][0].startswith("python-stdlib:epoch 0:train_0000")
    (back,) = trial.events("rollback")
    assert (back["from"], back["step"]) == (11, 8)
    # The record has the text, of the first rank's knowledge, of what was skipped and passed over.
    texts = [event["texts"][0]["sample"] for event in (skips[0], back)]
    assert texts == [first, (8 + 1) * BATCH]
    assert "The weights were not touched, the step is skipped" in out
    assert "3 steps in a row were skipped: went back to step_0000008" in out
    assert sorted(trial.losses) == list(range(1, 25))
    assert all(map(math.isfinite, sum(trial.losses.values(), ())))


@pytest.mark.fault(16)
def test_weights_that_are_nan_are_those_of_the_last_checkpoint_again(trial):
    spoil = Fault("step", "spoil the weights", step=7)
    slow_disk = Fault("verify", "sleep", value=7)
    out = trial.train(spoil, slow_disk, SAVE_EVERY=4, MAX_STEPS=12, TRAIN_TIMEOUT_S=12)
    assert "step 7: loss=nan" in out and "Traceback" not in out
    assert [skip["samples"] for skip in trial.events("skip")] == [[96, 111], [112, 127], [128, 143]]
    (back,) = trial.events("rollback")
    # Steps 5 and 6, and the three that were skipped.
    assert (back["step"], back["from"], back["passed_over"]) == (4, 6, 5 * BATCH)
    assert list(trial.losses) == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"SAVE_EVERY": 4, "MAX_ROLLBACKS": 2}, "going back 2 times did not help. Lower LEARNING"),
        ({"SAVE_EVERY": 9}, "there is no checkpoint to go back to"),
    ],
    ids=["again and again", "no checkpoint"],
)
def test_a_run_that_stays_astray_ends_with_a_code_that_nobody_retries(trial, settings, words):
    out = trial.train(Fault("step", "spoil the weights", step=7, every=True), code=70, **settings)
    assert words in out and "Traceback" not in out
    assert json.loads((trial.run / "STATUS.json").read_text())["phase"] == "crashed"


@pytest.mark.slow
@pytest.mark.fault(17)
def test_a_spike_is_skipped_and_a_kill_around_it_changes_nothing(tmp_path, data):
    spike = Fault("forward", "multiply", samples=of_step(40), value=50.0, every=True)
    kills = [
        Fault("numbers", "kill", step=41),
        Fault("numbers", "kill", step=44),
        Fault("step", "wait for the save", step=44, every=True),  # the checkpoint of step 42
    ]
    whole, killed = (
        Trial(tmp_path / name, data, MAX_STEPS=48, SAVE_EVERY=14) for name in ("whole", "killed")
    )
    whole.train(spike)
    for code in (-9, -9, 0):
        out = killed.train(spike, *kills, code=code)
    assert "resumed from step_0000042" in out
    # Killed before it was saved, it came to the same decision again.
    for run, count in ((whole, 1), (killed, 2)):
        assert [(skip["step"], skip["reason"]) for skip in run.events("skip")] == [
            (40, "loss")
        ] * count
        assert all(norm < 5 for _, norm in run.losses.values())
    assert killed.losses == whole.losses and killed.has_tensors_of(whole, 48)
