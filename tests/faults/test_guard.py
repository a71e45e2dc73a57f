"""Losses that are no number, and those that jump: the same decision on all ranks, and after a kill the same run."""

import math

import pytest

from record import metrics as record_reader
from tests.faults.conftest import LAUNCH, STEPS
from tests.faults.inject import Fault, faulty
from tests.running import environment, losses, same, tensors, train

BATCH = 16  # samples of a step


def of_step(step, shift=0, steps=1):
    """The samples of a step, or of several, where so many steps' samples were passed over before."""
    first = (step - 1 + shift) * BATCH
    return first, first + steps * BATCH


def events(run, name):
    return [r for r in record_reader.read_records(run / "metrics.jsonl") if r["event"] == name]


def check_skips(run, out):
    """One skip at step 5, three at step 12, and the way back from there to step 8."""
    assert [r["step"] for r in events(run, "skip")] == [5, 12, 12, 12]
    for found in events(run, "skip"):
        assert found["loss"] is None and found["names"][0].startswith(
            "python-stdlib:epoch 0:train_0000"
        )
    (back,) = events(run, "rollback")
    assert (back["from"], back["step"]) == (11, 8)
    assert "The weights were not touched, the step is skipped" in out
    assert (
        "3 steps in a row were skipped: went back to step_0000008" in out and "passed over" in out
    )
    assert sorted(losses(run)) == list(range(1, 25))
    assert all(math.isfinite(loss) and math.isfinite(norm) for loss, norm in losses(run).values())


@pytest.mark.fault(16)
def test_a_loss_that_is_no_number_is_skipped_and_three_in_a_row_lead_back(tmp_path, data):
    bad = [
        Fault("forward", "multiply", samples=samples, value=math.nan, every=True)
        for samples in (of_step(5), of_step(12, shift=1, steps=3))
    ]
    out = train(faulty(environment(tmp_path, data, **STEPS), tmp_path, *bad))
    check_skips(tmp_path / "run", out)
    skip = events(tmp_path / "run", "skip")[0]
    first, end = of_step(5)
    assert skip["samples"] == [first, end - 1] and len(skip["names"]) == BATCH


@pytest.mark.slow
@pytest.mark.fault(16)
def test_where_one_of_two_ranks_has_no_number_both_skip_and_name_its_samples(tmp_path, data):
    bad = [
        Fault("forward", "multiply", rank=1, samples=samples, value=math.inf, every=True)
        for samples in (of_step(5), of_step(12, shift=1, steps=3))
    ]
    out = train(
        faulty(environment(tmp_path, data, NPROC=2, **STEPS), tmp_path, *bad), command=LAUNCH
    )
    check_skips(tmp_path / "run", out)
    first, end = of_step(5)
    skip = events(tmp_path / "run", "skip")[0]
    assert skip["samples"] == [first + BATCH // 2, end - 1]  # rank 1's
    assert len(skip["names"]) == BATCH // 2


@pytest.mark.slow
@pytest.mark.fault(17)
def test_a_spike_is_skipped_and_a_kill_around_it_changes_nothing(tmp_path, data):
    spike = Fault("forward", "multiply", samples=of_step(40), value=50.0, every=True)
    runs = []
    kill = [
        Fault("numbers", "kill", step=41),
        Fault("numbers", "kill", step=44),
        Fault("step", "wait for the save", step=44, every=True),
    ]  # the checkpoint of step 42
    for name, faults in (("whole", [spike]), ("killed", [spike, *kill])):
        (tmp_path / name).mkdir()
        env = environment(tmp_path / name, data, **STEPS | {"MAX_STEPS": 48, "SAVE_EVERY": 14})
        for code in [-9, -9, 0] if name == "killed" else [0]:
            out = train(faulty(env, tmp_path / name, *faults), code=code)
        runs.append(tmp_path / name / "run")
    whole, killed = runs
    assert "resumed from step_0000042" in out
    for run in runs:
        assert {(r["step"], r["reason"]) for r in events(run, "skip")} == {(40, "loss")}
        assert all(norm < 5 for _, norm in losses(run).values())
    assert (
        len(events(killed, "skip")) == 2
    )  # killed before it was saved, it came to the same decision again
    assert losses(killed) == losses(whole) and same(tensors(killed, 48), tensors(whole, 48))
