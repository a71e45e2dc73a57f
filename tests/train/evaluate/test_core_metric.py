"""The number: centred accuracies, their intervals, their mean, and where CORE goes from there."""

import math

import pytest

from analysis.runs import find_last_evals
from train.evaluate.core.metric import Result, Score, format_table, wilson
from train.evaluate.core.tasks import CORE_TASKS, Task
from train.hooks.trackers import make_row


def score(label, right=1, asked=4, *more):
    task = Task(label, "multiple_choice", f"{label}.jsonl", 0, " ", 0.25)
    return Score(task, right, asked, *more)


def table(found, others=None):
    """First word of each line -> the others."""
    lines = [line.split() for line in format_table(found, others or {})]
    return {first: words for first, *words in lines}


def test_core_is_the_mean_of_22_centred_accuracies():
    scores = [score(label, i, 40) for i, label in enumerate(CORE_TASKS)]
    found = Result.of([*scores, score("another", 40, 40)], {})
    expected = sum((i / 40 - 0.25) / 0.75 for i in range(22)) / 22
    assert found.core == found.partial == pytest.approx(expected)
    assert not found.unscored
    assert found.scores["another"].centred == 1  # reported, and no part of the mean
    halves = [(high - low) / 2 / 0.75 for low, high in (wilson(i, 40) for i in range(22))]
    assert found.margin == pytest.approx(math.hypot(*halves) / 22)
    assert found.record()["core"] == found.core
    assert found.record()["core_partial"] is None
    assert found.describe() == f"CORE {expected:.4f} +- {found.margin:.4f} (22 tasks)"
    assert table(found)["another"][:3] == ["(not", "of", "CORE)"]
    assert table(found)["CORE"][:2] == ["22", f"{expected:.4f}"]


def test_without_one_task_there_is_no_core_and_the_others_have_another_name():
    scores = [score(label, 20, 40) for label in CORE_TASKS[:-1] if label != "squad"]
    gone = {CORE_TASKS[-1]: "the file is gone", "boolq": "by then"}
    found = Result.of([*scores, score("squad", 0, 0, 0, 40)], gone)
    assert found.partial == pytest.approx((0.5 - 0.25) / 0.75)
    assert found.unscored == {
        "squad": "none of its questions could be asked",
        "bigbench_language_identification": "the file is gone",
    }
    assert found.record() | {"core_centred": {}} == {
        "core": None,
        "core_partial": found.partial,
        "core_margin": found.margin,
        "core_tasks": 20,
        "core_centred": {},
    }
    assert table(found)["CORE"] == ["20", "n/a"]
    assert table(found)["core_partial"][:2] == ["20", "0.3333"]
    assert "missing: squad: none of its questions could be asked" in format_table(found, {})
    assert found.describe().startswith("CORE n/a, 2 of 22 tasks are missing; core_partial 0.3333")


def test_without_any_task_there_is_nothing():
    found = Result.of([], dict.fromkeys(CORE_TASKS, "not named"))
    assert (found.core, found.partial, found.margin, len(found.unscored)) == (None, None, None, 22)
    assert found.describe() == "CORE n/a: no task could be asked"
    assert table(found)["core_partial"] == ["0", "n/a"]


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_intervals_are_wilsons(right, asked, low, high):
    """The last is the example of Newcombe, Statistics in Medicine 17 (1998), table I."""
    assert wilson(right, asked) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_the_table_has_other_models_of_the_bundle_and_what_was_not_asked_as_it_is():
    scores = [score(label) for label in CORE_TASKS if label != "coqa"]
    found = Result.of([*scores, score("coqa", 1, 4, 3, 2, 1)], {})
    others = {"gpt2": {"copa": 0.28, "CORE": 0.11}, "gpt2-large": {"copa": 0.5}}
    rows = table(found, others)
    assert rows["task"][-2:] == ["GPT-2", "124M"]
    assert (rows["copa"][-1], rows["CORE"][-1], rows["squad"][-1]) == ("0.2800", "0.1100", "n/a")
    assert (
        "coqa: 3 cropped from the left, to SEQ_LEN, 2 left out, an answer alone exceeds SEQ_LEN, 1 whose question "
        "ends within a token" in format_table(found, others)
    )


# ---- Behind the record


def test_trackers_have_the_metric_and_each_task():
    record = {
        "event": "eval",
        "step": 5,
        "time": 2.0,
        "core": None,
        "core_partial": 0.25,
        "core_margin": 0.125,
        "core_tasks": 2,
        "core_centred": {"copa": 0.5, "squad": 0.0},
    }
    assert make_row(record).values == {
        "core/partial": 0.25,
        "core/margin": 0.125,
        "core/tasks": 2,
        "core/copa": 0.5,
        "core/squad": 0.0,
    }


def test_plots_put_together_what_the_records_of_one_step_say():
    core = {"event": "eval", "step": 5, "core": None, "core_partial": 0.25}
    loss = {"event": "eval", "step": 5, "val_loss": 2.0, "full": False}
    failed = {"event": "eval", "step": 5, "val_loss": None, "error": "late"}
    both = core | loss
    assert find_last_evals([loss, core]) == [both] == find_last_evals([core, loss])
    assert find_last_evals([loss, core, failed]) == [both]
    assert find_last_evals([failed, core]) == [failed | core]
    assert find_last_evals([core, {"event": "resume", "step": 4}]) == []
