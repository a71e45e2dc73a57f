"""A number: accuracy, centred on what guessing scores, with an interval; their mean over 22 tasks is CORE.

Where a task is missing, or has nothing that could be asked, there is no CORE: the mean of the others is called
core_partial, and how many they are is said with it.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from train.evaluate.core.tasks import CORE_TASKS, Task

Z = 1.96  # standard deviations of a 95 % interval

# Centred accuracies of OpenAI's checkpoints, and CORE, as published: karpathy/nanochat, dev/estimate_gpt3_core.ipynb
# (Jan 2026), tables of the GPT-2 family; CORE of GPT-2 XL also in its README. A bundle that has the tables of all tasks
# (openai-community-gpt2*.csv) is read instead.
MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
SIZES = dict(zip(MODELS, ("124M", "355M", "774M", "1.6B"), strict=True))
PUBLISHED = {
    "hellaswag_zeroshot": (0.0780, 0.1867, 0.2533, 0.3360),
    "lambada_openai": (0.3229, 0.4260, 0.4880, 0.5230),
    "hellaswag": (0.0772, 0.1933, 0.2587, 0.3493),
    "piqa": (0.2459, 0.3400, 0.3960, 0.4500),
    "arc_easy": (0.2166, 0.3067, 0.3800, 0.4600),
    "arc_challenge": (-0.0375, 0.0160, 0.0187, 0.0653),
    "CORE": (0.1139, 0.1849, 0.2146, 0.2565),
}
SHOWN = ("gpt2", "gpt2-xl")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Questions of a task: right, asked, of those cropped from the left; not asked because an answer alone exceeds the
    context; asked though their question ends within a token."""

    right: int = 0
    asked: int = 0
    cropped: int = 0
    too_long: int = 0
    merged: int = 0


@dataclasses.dataclass(frozen=True)
class Score:
    """Of a task: accuracy from 0 to 1, centred, and the 95 % interval (low, high) of the centred one."""

    task: Task
    counts: Counts
    accuracy: float
    centred: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, task: Task, counts: Counts) -> "Score | None":
        """None where nothing was asked."""
        if not counts.asked:
            return None
        accuracy = counts.right / counts.asked
        low, high = wilson(counts.right, counts.asked)
        return cls(
            task, counts, accuracy, task.centred(accuracy), (task.centred(low), task.centred(high))
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """What was found. lacking: the tasks of CORE without a score, and why."""

    scores: dict[str, Score]
    lacking: dict[str, str]

    @classmethod
    def of(
        cls, tasks: Iterable[Task], counts: Mapping[str, Counts], missing: Mapping[str, str]
    ) -> "Result":
        found = {
            task.label: Score.of(task, counts[task.label]) for task in tasks if task.label in counts
        }
        scores = {label: score for label, score in found.items() if score}
        empty = {
            label: "none of its questions could be asked"
            for label, score in found.items()
            if not score
        }
        lacking = {
            label: (dict(missing) | empty).get(label, "not in the bundle")
            for label in CORE_TASKS
            if label not in scores
        }
        return cls(scores, lacking)

    @property
    def counted(self) -> list[Score]:
        """Of the tasks that make up CORE."""
        return [self.scores[label] for label in CORE_TASKS if label in self.scores]

    @property
    def core(self) -> float | None:
        """None unless all tasks have a score."""
        return None if self.lacking else self.partial

    @property
    def partial(self) -> float | None:
        """The mean over the tasks of CORE that have a score."""
        return (
            sum(score.centred for score in self.counted) / len(self.counted)
            if self.counted
            else None
        )

    @property
    def margin(self) -> float | None:
        """Half of the 95 % interval of that mean, as if the tasks had nothing in common."""
        halves = [(score.interval[1] - score.interval[0]) / 2 for score in self.counted]
        return math.hypot(*halves) / len(halves) if halves else None

    def record(self) -> dict[str, Any]:
        """Keys of an evaluation's record (record/metrics.py)."""
        return {
            "core": self.core,
            "core_partial": self.partial if self.lacking else None,
            "core_margin": self.margin,
            "core_tasks": len(self.counted),
            "core_centred": {label: score.centred for label, score in self.scores.items()},
        }

    def words(self) -> str:
        """In a sentence."""
        if self.partial is None or self.margin is None:
            return "CORE n/a: no task could be asked"
        if self.core is not None:
            return f"CORE {self.core:.4f} +- {self.margin:.4f} (22 tasks)"
        return (
            f"CORE n/a, {len(self.lacking)} of {len(CORE_TASKS)} tasks are missing; core_partial "
            f"{self.partial:.4f} +- {self.margin:.4f} is the mean of the {len(self.counted)} others"
        )


def wilson(right: int, asked: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927); it does not collapse at 0 and 1."""
    share, z2 = right / asked, Z * Z / asked
    middle = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / asked + z2 / asked / 4) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def references(tables: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Model -> label or CORE -> centred accuracy: of the bundle's tables where it has them, else as published."""
    published = {
        model: {label: values[i] for label, values in PUBLISHED.items()}
        for i, model in enumerate(MODELS)
    }
    return {model: dict(tables.get(model) or published[model]) for model in MODELS}


def table(result: Result, others: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Lines: a task each, CORE, and what the reader must know beside."""

    def number(value: float | None, form: str = ".4f") -> str:
        return "n/a" if value is None else format(value, form)

    heads = [
        "task",
        "shots",
        "n",
        "accuracy",
        "centred",
        "95 % interval",
        *(f"GPT-2 {SIZES[m]}" for m in SHOWN),
    ]
    rows = [heads]
    for label in [*CORE_TASKS, *(label for label in result.scores if label not in CORE_TASKS)]:
        score = result.scores.get(label)
        seen = [number(others[model].get(label)) for model in SHOWN]
        if score is None:
            rows.append([label, "", "0", "missing", "n/a", "", *seen])
            continue
        name = label if label in CORE_TASKS else f"{label} (not of CORE)"
        rows.append(
            [
                name,
                str(score.task.shots),
                str(score.counts.asked),
                f"{score.accuracy:.4f}",
                f"{score.centred:.4f}",
                "{:.4f} to {:.4f}".format(*score.interval),
                *seen,
            ]
        )
    span = (
        ""
        if result.partial is None or result.margin is None
        else f"{result.partial - result.margin:.4f} to {result.partial + result.margin:.4f}"
    )
    seen = [number(others[model].get("CORE")) for model in SHOWN]
    rows.append(
        [
            "CORE",
            "",
            str(len(result.counted)),
            "",
            number(result.core),
            "" if result.lacking else span,
            *seen,
        ]
    )
    if result.lacking:
        rows.append(
            ["core_partial", "", str(len(result.counted)), "", number(result.partial), span, "", ""]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    for row in rows:
        yield "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
    for label, why in result.lacking.items():
        yield f"missing: {label}: {why}"
    for label, score in result.scores.items():
        counts = score.counts
        said = [
            (counts.cropped, "cropped from the left, to SEQ_LEN"),
            (counts.too_long, "left out, an answer alone exceeds SEQ_LEN"),
            (counts.merged, "whose question ends within a token"),
        ]
        if any(count for count, _ in said):
            yield f"{label}: " + ", ".join(f"{count} {what}" for count, what in said if count)
