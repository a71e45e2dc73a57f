"""train/hooks/evaluation.py: when a run is evaluated, what is recorded, and which checkpoint is the best."""

import dataclasses

import pytest

from record.metrics import read_records
from tests.train.making import make_job
from train import when_to_save
from train.checkpoint import find
from train.checkpoint.find import best
from train.evaluate.scoring import ScoringFailed
from train.evaluate.validation import Validation
from train.hooks.evaluation import Evaluation, Score
from train.hooks.hook import StopTraining


def score(*_, **__):
    return Validation(10.0, 5, 20)


def fail(*_, **__):
    raise ScoringFailed("rank 1: no such file")


def with_hook(config, folder, evaluator=score, core=None, *, at=0, loss=None, **facts):
    """A job and its hook, which validated step `at` last."""
    hook = Evaluation(evaluator, core)
    hook.validation.last_at, hook.validation_loss = at, loss
    job = make_job(config, folder, hook, **facts)
    return job, hook


def evaluations(job):
    return [record for record in read_records(job.paths.metrics) if record["event"] == "eval"]


# name, settings, steps, last steps that were scored -> the pairs of them at which it is due
DUE = [
    (
        "validate",
        {"eval_every": 4},
        range(13),
        (0, 4, 8),
        [(4, 0), (4, 8), (8, 0), (8, 4)],
    ),
    ("validate", {"eval_every": 0}, [4], [0], []),
    # The last checkpoint is compared with the others by the same text.
    ("validate", {"eval_every": 4, "keep_best": True}, [12, 13], (8, 12), [(12, 8)]),
    (
        "score_core",
        {"core_every": 5},
        (0, 4, 5, 10, 12),
        (0, 5, 12),
        [(5, 0), (5, 12), (10, 0), (10, 5), (10, 12)],
    ),
    ("score_core", {"core_every": 0}, [5, 10], [0], []),
]


@pytest.mark.parametrize(("name", "changes", "steps", "last_ones", "expected"), DUE)
def test_an_evaluation_is_due_once_at_its_step_and_not_at_the_last(
    tiny, tmp_path, monkeypatch, name, changes, steps, last_ones, expected
):
    config = dataclasses.replace(tiny, **{"max_steps": 12, "eval_every": 0} | changes)
    due = []
    for step in steps:
        for last in last_ones:
            job, hook = with_hook(config, tmp_path, step=step, at=last)
            hook.core_score.last_at = last
            monkeypatch.setattr(hook, name, lambda job, last=last: due.append((job.step, last)))
            hook.between_steps(job, set())
    assert due == expected


@pytest.mark.parametrize(("last", "scored"), [(5, [12]), (12, [])])
def test_core_is_scored_once_at_the_end(tiny, tmp_path, monkeypatch, last, scored):
    job, hook = with_hook(dataclasses.replace(tiny, core_every=5), tmp_path, core=object(), step=12)
    hook.core_score.last_at = last
    steps = []
    monkeypatch.setattr(hook, "score_core", lambda job: steps.append(job.step))
    monkeypatch.setattr(hook, "validate", lambda job, full: None)
    hook.at_end(job)
    assert steps == scored


@pytest.mark.fault(37)
def test_an_evaluation_that_fails_costs_its_number_and_is_not_tried_again(tiny, tmp_path, caplog):
    caplog.set_level("INFO")
    config = dataclasses.replace(tiny, eval_every=4, max_steps=12)
    job, hook = with_hook(config, tmp_path, fail, step=4)
    assert hook.validate(job) is None
    assert not hook.validation.is_due(4, 4) and hook.loss_at(4) is None
    (entry,) = evaluations(job)
    assert entry["val_loss"] is None and entry["error"] == "rank 1: no such file"
    assert entry["eval_s"] >= 0
    assert "the evaluation at step 4 failed, and training goes on" in caplog.text


def test_one_that_is_interrupted_stops_the_run_and_is_made_by_the_next_attempt(tiny, tmp_path):
    config = dataclasses.replace(tiny, eval_every=4, max_steps=12)
    job, hook = with_hook(config, tmp_path, lambda *_, **__: None, step=4)
    with pytest.raises(StopTraining):
        hook.between_steps(job, set())
    assert hook.validation.is_due(4, 4) and evaluations(job) == []
    hook.evaluator = score
    hook.between_steps(job, {"stop"})
    assert evaluations(job) == []
    hook.at_start(job)
    (entry,) = evaluations(job)
    assert entry["val_loss"] == 2.0 and entry["full"] is False


def test_an_evaluation_may_take_eval_minutes_and_its_first_batch_the_time_of_a_start(
    tiny, tmp_path
):
    def scoring(*_, limit_s, progress, **__):
        assert limit_s == 60 * 3 * 20
        progress("batch")
        progress("others")
        return score()

    config = dataclasses.replace(tiny, eval_minutes=3, start_timeout_s=300, train_timeout_s=120)
    job, hook = with_hook(config, tmp_path, scoring, step=4)
    hook.validate(job, full=True)
    limits = [(doing, limit) for doing, limit, _ in job.deadlines.watch.told]
    assert limits[:3] == [
        ("an evaluation", 3600 + 120),
        ("an evaluation", 300),
        ("an evaluation", 3600 + 120),
    ]
    assert job.deadlines.watch.told[0][2] == "EVAL_MINUTES"


def test_the_best_checkpoint_outlives_those_that_come_behind_it(tiny, tmp_path):
    """By the loss of its own step; of equal ones the earlier; and a run that is taken up again still knows it."""
    config = dataclasses.replace(tiny, keep_best=True, keep_last=2)
    job, hook = with_hook(config, tmp_path)
    root = job.paths.checkpoints
    kept = []
    for step, loss in enumerate([5.0, 3.0, None, 3.0, 4.0, 6.0], 1):
        job.step = step
        hook.validation.last_at, hook.validation_loss = step, loss
        when_to_save.save(job, wait=True)
        kept.append(find.committed(root))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    again, _ = with_hook(config, tmp_path, step=7, at=6, loss=1.0)  # of another step than this
    assert best(root) == (3.0, 2)
    when_to_save.save(again, wait=True)
    assert find.committed(root) == [2, 6, 7] and best(root) == (3.0, 2)
    without, _ = with_hook(dataclasses.replace(config, keep_best=False), tmp_path, step=8)
    when_to_save.save(without, wait=True)
    assert find.committed(root) == [7, 8] and best(root) is None


def test_a_checkpoint_that_was_evaluated_since_knows_its_loss(tiny, tmp_path):
    """One was told to stop before it evaluated, and saved; taken up again it evaluates first."""
    job, hook = with_hook(dataclasses.replace(tiny, keep_best=True), tmp_path, step=4)
    when_to_save.save(job, wait=True)
    hook.validation.last_at, hook.validation_loss = 4, 2.5
    when_to_save.save(job, wait=True)
    assert best(job.paths.checkpoints) == (2.5, 4)


def test_only_an_evaluation_that_beats_all_checkpoints_asks_for_one(tiny, tmp_path):
    job, hook = with_hook(dataclasses.replace(tiny, keep_best=True), tmp_path, step=2)

    def is_best(step, loss):
        hook.validation.last_at, hook.validation_loss = step, loss
        return hook.is_best(job)

    assert is_best(2, 3.0)
    when_to_save.save(job, wait=True)
    job.step = 4
    cases = [(3, 1.0), (4, 3.0), (4, float("nan")), (4, 2.0), (4, 2.0), (4, None)]
    # No checkpoint of 2.0 was written: it may have failed.
    assert [is_best(*case) for case in cases] == [False, False, False, True, True, False]
    assert is_best(4, 2.0)
    when_to_save.save(job, wait=True)
    job.step = 6
    assert not is_best(6, 2.0) and is_best(6, 1.5)
    find.set_aside_later(job.paths.checkpoints, job.world, 2, "rolled-back")
    assert is_best(6, 2.5)
    other, hook = with_hook(tiny, tmp_path, step=4, at=4, loss=0.1)
    assert not hook.is_best(other)


def test_what_a_checkpoint_keeps_is_taken_up_again_and_going_back_forgets(tiny, tmp_path):
    job, hook = with_hook(tiny, tmp_path, step=8, at=8, loss=2.5)
    hook.core_score.last_at = 5
    manifest = {}
    hook.before_save(job, manifest)
    assert manifest == {"evaluated_at": 8, "val_loss": 2.5, "core_at": 5}
    other, again = with_hook(tiny, tmp_path, step=8)
    again.after_load(other, manifest, {})
    assert (again.loss_at(8), again.core_score.last_at) == (2.5, 5)
    again.after_load(other, {"evaluated_at": 4}, {})  # of an edition before KEEP_BEST and CORE
    assert (again.validation, again.loss_at(4)) == (Score("the evaluation", 4), None)
    assert again.core_score.last_at == 0
    job.step = 4
    hook.after_jump(job)
    lasts = [hook.validation.last_at, hook.loss_at(4), hook.core_score.last_at]
    assert lasts == [4, None, 4]


def test_the_end_of_a_run_names_compressors_only_where_they_had_the_same_text(tiny, tmp_path):
    said = []
    compressed = {"gzip -9": 1.958, "xz -9": 1.692}
    for is_all in (True, False):

        class Scorer:
            full_is_all = is_all
            __call__ = staticmethod(score)

        hook = Evaluation(Scorer(), compressed=compressed)
        folder = tmp_path / str(is_all)
        folder.mkdir()
        job = make_job(tiny, folder, hook)
        assert hook.validate(job) and hook.validate(job, full=True)
        recorded = [record.get("compressed_bpb") for record in evaluations(job)]
        assert recorded == [None, compressed if is_all else None]
        job.recorder.say = lambda line, terminal=None: said.append(line)
        hook.report(job, score())
    bits = Validation(10.0, 5, 20).bpb
    assert said == [
        f"validation: {bits:.3f} bits per byte on 20 held-out bytes (gzip -9: 1.958, xz -9: 1.692)",
        f"validation: {bits:.3f} bits per byte on 20 held-out bytes",
    ]
