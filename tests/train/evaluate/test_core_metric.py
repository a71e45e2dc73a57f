"""The number: centred accuracies, their intervals, their mean, and where CORE goes from there."""

import math

import pytest

from analysis.runs import find_last_evals
from record.trackers.follow import make_row
from train.evaluate.core.metric import (
    PUBLISHED,
    Counts,
    Result,
    format_table,
    references,
    wilson,
)
from train.evaluate.core.tasks import CORE_TASKS, Task


def task(label: str, baseline: float = 0.25) -> Task:
    return Task(label, "multiple_choice", f"{label}.jsonl", 0, " ", baseline)


ALL = [task(label) for label in CORE_TASKS]


def test_core_is_the_mean_of_22_centred_accuracies() -> None:
    counts = {label: Counts(right=i, asked=40) for i, label in enumerate(CORE_TASKS)}
    found = Result.of([*ALL, task("another")], counts | {"another": Counts(40, 40)}, {})
    expected = sum((i / 40 - 0.25) / 0.75 for i in range(22)) / 22
    assert (
        found.core == pytest.approx(expected) and found.partial == found.core and not found.lacking
    )
    assert found.scores["another"].centred == 1  # said, and no part of the mean
    halves = [(high - low) / 2 / 0.75 for low, high in (wilson(i, 40) for i in range(22))]
    assert found.margin == pytest.approx(math.sqrt(sum(half**2 for half in halves)) / 22)
    assert found.record()["core"] == found.core and found.record()["core_partial"] is None
    assert found.describe() == f"CORE {expected:.4f} +- {found.margin:.4f} (22 tasks)"
    assert "another (not of CORE)" in "\n".join(format_table(found, references({})))


def test_without_one_task_there_is_no_core_and_the_others_have_another_name() -> None:
    counts = {label: Counts(right=20, asked=40) for label in CORE_TASKS} | {
        "squad": Counts(0, 0, too_long=40)
    }
    found = Result.of(ALL[:-1], counts, {CORE_TASKS[-1]: "the file is gone", "boolq": "by then"})
    assert found.core is None and found.partial == pytest.approx((0.5 - 0.25) / 0.75)
    assert found.lacking == {
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
    lines = list(format_table(found, references({})))
    assert next(line for line in lines if line.startswith("CORE")).split()[:3] == [
        "CORE",
        "20",
        "n/a",
    ]
    assert next(line for line in lines if line.startswith("core_partial")).split()[1:3] == [
        "20",
        "0.3333",
    ]
    assert "missing: squad: none of its questions could be asked" in lines
    assert found.describe().startswith(
        "CORE n/a, 2 of 22 tasks are missing; core_partial 0.3333 +- "
    )


def test_without_any_task_there_is_nothing() -> None:
    found = Result.of([], {}, dict.fromkeys(CORE_TASKS, "not named"))
    assert (found.core, found.partial, found.margin, len(found.lacking)) == (None, None, None, 22)
    assert found.describe() == "CORE n/a: no task could be asked" and list(
        format_table(found, references({}))
    )


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_intervals_are_wilsons(right: int, asked: int, low: float, high: float) -> None:
    """The last is the example of Newcombe, Statistics in Medicine 17 (1998), table I."""
    assert wilson(right, asked) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_gpt2_is_shown_from_the_bundle_or_else_as_published() -> None:
    published = references({})
    assert published == {model: {"CORE": core} for model, core in PUBLISHED.items()}
    given = references({"gpt2": {"copa": 0.28, "CORE": 0.11}})
    assert (
        given["gpt2"] == {"copa": 0.28, "CORE": 0.11} and given["gpt2-xl"] == published["gpt2-xl"]
    )
    found = Result.of(ALL, {label: Counts(1, 4) for label in CORE_TASKS}, {})
    (line,) = [line for line in format_table(found, given) if line.startswith("copa")]
    assert line.split()[-2:] == ["0.2800", "n/a"]


def test_what_could_not_be_asked_as_it_is_is_counted_in_the_table() -> None:
    found = Result.of(
        ALL, {label: Counts(1, 4) for label in CORE_TASKS} | {"coqa": Counts(1, 4, 3, 2, 1)}, {}
    )
    assert (
        "coqa: 3 cropped from the left, to SEQ_LEN, 2 left out, an answer alone exceeds SEQ_LEN, 1 whose question "
        "ends within a token" in list(format_table(found, references({})))
    )


# ---- Behind the record


def test_trackers_have_the_metric_and_each_task() -> None:
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


def test_plots_put_together_what_the_records_of_one_step_say() -> None:
    core = {"event": "eval", "step": 5, "core": None, "core_partial": 0.25}
    loss = {"event": "eval", "step": 5, "val_loss": 2.0, "full": False}
    failed = {"event": "eval", "step": 5, "val_loss": None, "error": "late"}
    both = core | loss
    assert find_last_evals([loss, core]) == [both] == find_last_evals([core, loss])
    assert find_last_evals([loss, core, failed]) == [both]
    assert find_last_evals([failed, core]) == [failed | core]
    assert find_last_evals([core, {"event": "resume", "step": 4}]) == []
