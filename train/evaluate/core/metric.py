"""CORE: the mean accuracy over 22 tasks, each centered on what guessing scores, with an interval.

Where a task is missing, or none of its questions could be asked, there is no CORE. The mean of the
others is called core_partial, and how many they are is said with it.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from train.evaluate.core.tasks import CORE_TASKS, Task

COUNTS = 5  # numbers of a Score
Z = 1.96  # standard deviations of a 95% interval

SHOWN = {"gpt2": "GPT-2 124M", "gpt2-xl": "GPT-2 1.6B"}  # of the other models of a bundle


@dataclasses.dataclass(frozen=True)
class Score:
    """What became of a task's questions.

    Attributes:
        cropped: asked, without the beginning, which exceeds the context.
        too_long: not asked, since an answer alone exceeds the context.
        merged: asked, though the question ends within a token.
    """

    task: Task
    right: int = 0
    asked: int = 0
    cropped: int = 0
    too_long: int = 0
    merged: int = 0

    @property
    def accuracy(self) -> float:
        """From 0 to 1."""
        return self.right / self.asked

    @property
    def centred(self) -> float:
        """The same, 0 for guessing and 1 for all right."""
        return self.task.centred(self.accuracy)

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of `centred`: (low, high)."""
        low, high = wilson(self.right, self.asked)
        return self.task.centred(low), self.task.centred(high)


@dataclasses.dataclass(frozen=True)
class Result:
    """What was found.

    Attributes:
        scores: label -> score.
        unscored: label -> why it has no score, of the tasks of CORE.
    """

    scores: dict[str, Score]
    unscored: dict[str, str]

    @classmethod
    def of(cls, scores: Iterable[Score], missing: Mapping[str, str]) -> "Result":
        asked = {score.task.label: score for score in scores if score.asked}
        unscored = {}
        for label in CORE_TASKS:
            if label not in asked:
                unscored[label] = missing.get(label, "none of its questions could be asked")
        return cls(asked, unscored)

    @property
    def counted(self) -> list[Score]:
        """The scores that make up CORE."""
        return [self.scores[label] for label in CORE_TASKS if label in self.scores]

    @property
    def core(self) -> float | None:
        """None unless all tasks have a score."""
        return None if self.unscored else self.partial

    @property
    def partial(self) -> float | None:
        """The mean over the tasks of CORE that have a score."""
        if not self.counted:
            return None
        return sum(score.centred for score in self.counted) / len(self.counted)

    @property
    def margin(self) -> float | None:
        """Half of the 95% interval of that mean, as if the tasks were independent."""
        halves = [(score.interval[1] - score.interval[0]) / 2 for score in self.counted]
        return math.hypot(*halves) / len(halves) if halves else None

    def record(self) -> dict[str, Any]:
        """Return the keys of an evaluation's record (record/metrics.py)."""
        return {
            "core": self.core,
            "core_partial": self.partial if self.unscored else None,
            "core_margin": self.margin,
            "core_tasks": len(self.counted),
            "core_centred": {label: score.centred for label, score in self.scores.items()},
        }

    def describe(self) -> str:
        """Return the result in a sentence."""
        if self.partial is None or self.margin is None:
            return "CORE n/a: no task could be asked"
        if self.core is not None:
            return f"CORE {self.core:.4f} +- {self.margin:.4f} (22 tasks)"
        return (
            f"CORE n/a, {len(self.unscored)} of {len(CORE_TASKS)} tasks are missing; core_partial "
            f"{self.partial:.4f} +- {self.margin:.4f} is the mean of the {len(self.counted)} others"
        )


def wilson(right: int, asked: int) -> tuple[float, float]:
    """Return the 95% interval of a share (Wilson 1927), which does not collapse at 0 and 1."""
    share = right / asked
    z2 = Z * Z / asked
    middle = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / asked + z2 / asked / 4) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


ROW = "{:<33}{:>6}{:>7}{:>10}{:>10}{:>20}"


def format_table(result: Result, others: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Return lines: each task, CORE, and what the reader must know about them.

    others: model -> label or CORE -> centered accuracy.
    """
    shown = {title: others[model] for model, title in SHOWN.items() if model in others}

    def format_row(label: str, *cells: str) -> str:
        row = ROW.format(label, *cells)
        return row + "".join(f"{format_number(table.get(label)):>13}" for table in shown.values())

    heading = ROW.format("task", "shots", "n", "accuracy", "centered", "95% interval")
    yield heading + "".join(f"{title:>13}" for title in shown)
    for label in CORE_TASKS:
        yield format_row(label, *format_score(result.scores.get(label)))
    for label, score in result.scores.items():
        if label not in CORE_TASKS:
            yield format_row(f"{label} (not of CORE)", *format_score(score))
    mean, margin = result.partial, result.margin
    span = ""
    if mean is not None and margin is not None:
        span = f"{mean - margin:.4f} to {mean + margin:.4f}"
    count = str(len(result.counted))
    label = "CORE"
    if result.unscored:
        yield format_row("CORE", "", count, "", "n/a", "")
        label = "core_partial"
    yield format_row(label, "", count, "", format_number(mean), span)
    for label, why in result.unscored.items():
        yield f"missing: {label}: {why}"
    for label, score in result.scores.items():
        if remarks := list_remarks(score):
            yield f"{label}: {', '.join(remarks)}"


def format_score(score: Score | None) -> list[str]:
    if score is None:
        return ["", "0", "missing", "n/a", ""]
    low, high = score.interval
    return [
        str(score.task.shots),
        str(score.asked),
        format_number(score.accuracy),
        format_number(score.centred),
        f"{low:.4f} to {high:.4f}",
    ]


def format_number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def list_remarks(score: Score) -> list[str]:
    """List what was not asked as it stands."""
    remarks = {
        "cropped from the left, to SEQ_LEN": score.cropped,
        "left out, an answer alone exceeds SEQ_LEN": score.too_long,
        "whose question ends within a token": score.merged,
    }
    return [f"{count} {remark}" for remark, count in remarks.items() if count]
