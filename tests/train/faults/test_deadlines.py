"""train/faults/deadlines.py: what is slow by nature does not hang."""

import dataclasses

import pytest

from tests.train.making import Watch, make_job
from train.faults.deadlines import Deadlines


@pytest.fixture
def deadlines(tiny):
    return Deadlines(dataclasses.replace(tiny, start_timeout_s=300, train_timeout_s=120), Watch())


def test_a_step_may_take_ten_times_as_long_as_steps_do(deadlines):
    told = deadlines.watch.told
    deadlines.begin_step(1)  # it may load, compile and wait for others
    assert told[-1] == ("step 1", 300, "TRAIN_TIMEOUT_S")
    for seconds in (1.0, 1.2, 0.9):
        deadlines.end_step(seconds)
    deadlines.begin_step(2)
    assert told[-1] == ("step 2", 60, "TRAIN_TIMEOUT_S")
    for seconds in (*[50.0] * 9, 900.0):  # one that was slow counts as the others
        deadlines.end_step(seconds)
    deadlines.begin_step(3)
    assert told[-1] == ("step 3", 500, "TRAIN_TIMEOUT_S")


def test_behind_an_activity_what_was_done_before_has_its_own_time_again(deadlines):
    deadlines.begin_step(1)
    with deadlines.allow("an evaluation", 700, "EVAL_MINUTES"):
        deadlines.progress(50)
        assert deadlines.watch.told[-1] == ("an evaluation", 50, "EVAL_MINUTES")
        with pytest.raises(KeyError), deadlines.allow("a checkpoint", 9):
            raise KeyError
        assert deadlines.watch.told[-1] == ("an evaluation", 50, "EVAL_MINUTES")
    assert deadlines.watch.told[-1] == ("step 1", 300, "TRAIN_TIMEOUT_S")


def test_the_status_names_an_activity_and_a_failed_one_to_the_end(tiny, tmp_path):
    job = make_job(tiny, tmp_path)
    job.status.phase("training")
    with job.activity("an evaluation", 10, phase="evaluating"):
        assert job.status.facts["phase"] == "evaluating"
    assert job.status.facts["phase"] == "training"
    with pytest.raises(KeyError), job.activity("an evaluation", 10, phase="evaluating"):
        raise KeyError
    assert job.status.facts["phase"] == "evaluating"
