"""train/hooks/evaluation.py: when a run is evaluated, what is recorded, and which checkpoint is the best."""

import dataclasses
from types import SimpleNamespace

import pytest

from record.metrics import read_records
from tests.train.making import make_job
from train import when_to_save
from train.checkpoint import find
from train.checkpoint.find import best
from train.evaluate.scoring import ScoringFailed
from train.evaluate.validation import Validation
from train.hooks.evaluation import Evaluation
from train.hooks.hook import SAVE, STOP


def score(*_, **__):
    return Validation(10.0, 5, 20)


def fail(*_, **__):
    raise ScoringFailed("rank 1: no such file")


@pytest.fixture
def make(tiny, tmp_path):
    """A job and its hook, which validated step `at` last and scored CORE at step `core_at`."""

    def make(evaluator=score, *, step=0, at=0, loss=None, core=None, core_at=0, **changes):
        config = dataclasses.replace(tiny, **{"eval_every": 4, "max_steps": 12} | changes)
        hook = Evaluation(evaluator, core)
        hook.validation.last_at, hook.validation_loss = at, loss
        hook.core_score.last_at = core_at
        return make_job(config, tmp_path, hook, step=step), hook

    return make


def evaluations(job):
    return [record for record in read_records(job.paths.metrics) if record["event"] == "eval"]


# settings, steps, last steps that were scored -> (what is scored, step, last one)
DUE = [
    ({}, range(13), (0, 4, 8), [("text", 4, 0), ("text", 4, 8), ("text", 8, 0), ("text", 8, 4)]),
    ({"eval_every": 0}, [4], [0], []),
    ({"eval_tokens": 0}, range(13), (0, 4, 8), []),
    # The last checkpoint is compared with the others by the same text.
    ({"keep_best": True}, [12, 13], (8, 12), [("text", 12, 8)]),
    (
        {"eval_every": 0, "core_every": 5},
        (0, 4, 5, 10, 12),
        (0, 5),
        [("core", 5, 0), ("core", 10, 0), ("core", 10, 5)],
    ),
]


@pytest.mark.parametrize("tokens", [0, 256])
def test_the_last_evaluation_is_left_out_on_request_and_the_log_says_how(
    make, caplog, monkeypatch, tokens
):
    caplog.set_level("INFO")
    job, hook = make(step=12, eval_tokens=tokens)
    scored = []
    monkeypatch.setattr(hook, "validate", lambda job, full: scored.append(full))
    hook.at_end(job)
    assert scored == [True] * bool(tokens) and "EVAL_TOKENS=0" in caplog.text


@pytest.mark.parametrize(("changes", "steps", "last_ones", "expected"), DUE)
def test_an_evaluation_is_due_once_at_its_step_and_not_at_the_last(
    make, monkeypatch, changes, steps, last_ones, expected
):
    due = []
    for step in steps:
        for last in last_ones:
            core = object() if "core_every" in changes else None
            job, hook = make(step=step, at=last, core=core, core_at=last, **changes)
            for name, method in (("text", "validate"), ("core", "score_core")):
                row = (name, step, last)
                monkeypatch.setattr(hook, method, lambda job, row=row: due.append(row))
            hook.between_steps(job, frozenset())
    assert due == expected


@pytest.mark.parametrize(("last", "scored"), [(5, [12]), (12, [])])
def test_core_is_scored_once_at_the_end(make, monkeypatch, last, scored):
    job, hook = make(step=12, core=object(), core_at=last, core_every=5)
    steps = []
    monkeypatch.setattr(hook, "score_core", lambda job: steps.append(job.step))
    monkeypatch.setattr(hook, "validate", lambda job, full: None)
    hook.at_end(job)
    assert steps == scored


@pytest.mark.fault(37)
def test_an_evaluation_that_fails_costs_its_number_and_is_not_tried_again(make, caplog):
    caplog.set_level("INFO")
    job, hook = make(fail, step=4)
    hook.between_steps(job, frozenset())
    hook.between_steps(job, frozenset())
    (entry,) = evaluations(job)
    assert entry["val_loss"] is None and entry["error"] == "rank 1: no such file"
    assert entry["eval_s"] >= 0 and hook.loss_at(4) is None
    assert "the evaluation at step 4 failed, and training continues" in caplog.text


def test_one_that_is_interrupted_stops_the_run_and_is_made_by_the_next_attempt(make):
    job, hook = make(lambda *_, **__: None, step=4)
    assert hook.at_start(job) == hook.between_steps(job, frozenset()) == hook.at_end(job) == STOP
    hook.evaluator = score
    assert hook.between_steps(job, STOP) is None
    assert evaluations(job) == []
    hook.at_start(job)
    (entry,) = evaluations(job)
    assert entry["val_loss"] == 2.0 and entry["full"] is False


def test_an_evaluation_may_take_eval_minutes_and_its_first_batch_the_time_of_a_start(make):
    def scoring(*_, limit_s, progress, **__):
        assert limit_s == 60 * 3 * 20
        progress("batch")
        progress("others")
        return score()

    job, hook = make(scoring, step=4, eval_minutes=3, start_timeout_s=300, train_timeout_s=120)
    hook.validate(job, full=True)
    assert job.deadlines.watch.told[:3] == [
        ("an evaluation", limit, "EVAL_MINUTES") for limit in (3720, 300, 3720)
    ]


def test_the_best_checkpoint_outlives_those_that_come_after_it(make):
    """By the loss of its own step; of equal ones the earlier; and a run that is resumed still knows it."""
    rows = [  # loss -> which are kept
        (5.0, [1]),
        (3.0, [1, 2]),
        (None, [2, 3]),
        (3.0, [2, 3, 4]),
        (4.0, [2, 4, 5]),
        (6.0, [2, 5, 6]),
    ]
    for step, (loss, expected) in enumerate(rows, 1):
        job, _ = make(step=step, at=step, loss=loss, keep_best=True, keep_last=2)
        root = job.paths.checkpoints
        when_to_save.save(job, wait=True)
        assert find.committed(root) == expected
    again, _ = make(step=7, at=6, loss=1.0, keep_best=True, keep_last=2)  # of another step
    when_to_save.save(again, wait=True)
    assert find.committed(root) == [2, 6, 7] and best(root) == (3.0, 2)
    without, _ = make(step=8, keep_last=2)
    when_to_save.save(without, wait=True)
    assert find.committed(root) == [7, 8] and best(root) is None


def test_a_checkpoint_that_was_evaluated_since_knows_its_loss(make):
    """One was told to stop before it evaluated, and saved; resumed it evaluates first."""
    for loss in (None, 2.5):
        job, _ = make(step=4, at=4, loss=loss, keep_best=True)
        when_to_save.save(job, wait=True)
    assert best(job.paths.checkpoints) == (2.5, 4)


def test_only_an_evaluation_that_beats_all_checkpoints_asks_for_one(make):
    def is_best(step, loss, at=None, **changes):
        job, hook = make(step=step, at=at or step, loss=loss, **{"keep_best": True} | changes)
        return job, hook.between_steps(job, frozenset()) == SAVE

    job, asks = is_best(2, 3.0)
    assert asks
    when_to_save.save(job, wait=True)
    for loss, expected in ((3.0, False), (float("nan"), False), (None, False), (2.0, True)):
        job, asks = is_best(5, loss)
        assert asks is expected
    # No checkpoint of 2.0 was written: it may have failed.
    job, asks = is_best(5, 2.0)
    assert asks and not is_best(5, 1.0, at=3)[1] and not is_best(5, 1.0, keep_best=False)[1]
    when_to_save.save(job, wait=True)
    assert not is_best(6, 2.0)[1] and is_best(6, 1.5)[1]
    find.quarantine_later(job.paths.checkpoints, job.world, 2, "rolled-back")
    assert is_best(6, 2.5)[1]


def test_what_a_checkpoint_keeps_is_taken_up_again_and_going_back_forgets(make):
    def state(hook):
        return hook.validation.last_at, hook.validation_loss, hook.core_score.last_at

    job, hook = make(step=8, at=8, loss=2.5, core_at=5)
    manifest = {}
    hook.before_save(job, manifest)
    assert manifest == {"evaluated_at": 8, "val_loss": 2.5, "core_at": 5}
    _, again = make(step=8)
    again.after_load(job, manifest, {})
    assert state(again) == (8, 2.5, 5)
    hook.after_jump(job)  # a step was skipped
    assert state(hook) == (8, 2.5, 5)
    job.step = 4
    hook.after_jump(job)
    assert state(hook) == (4, None, 4)


@pytest.mark.parametrize(
    ("is_all", "figures"), [(True, " (gzip -9: 1.958, xz -9: 1.692)"), (False, "")]
)
def test_the_end_of_a_run_names_compressors_only_where_they_had_the_same_text(
    make, caplog, is_all, figures
):
    caplog.set_level("INFO")
    job, _ = make()
    compressed = {"gzip -9": 1.958, "xz -9": 1.692}
    hook = Evaluation(SimpleNamespace(full_is_all=is_all), compressed=compressed)
    hook.evaluator = score
    hook.validate(job)
    hook.at_end(job)
    recorded = [record.get("compressed_bpb") for record in evaluations(job)]
    assert recorded == [None, compressed if is_all else None]
    line = f"validation: {score().bpb:.3f} bits per byte on 20 held-out bytes{figures}"
    assert line in caplog.text.splitlines()[-1]
