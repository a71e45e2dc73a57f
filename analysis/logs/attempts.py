"""The rows of a log to runs: lines printed twice dropped, restarts joined, the steps that they lost counted.

    rows -> without repeats -> stretches in which the step grows -> runs

Where the step goes back, a run that begins at its first step is a new one; any other is the same run, taken up again
from a checkpoint: what was printed from that step on is dropped and counted, and the last attempt is kept. Another
trainer or another count of steps is another run too, unless it goes on exactly behind the step before.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from analysis.logs.dialect import Dialect
from analysis.logs.log_reader import Mark, Stream, clock_seconds
from analysis.logs.shape import CLOCK_COLUMN, SILENT

REPEATS_WITHIN = 2  # rows, in which a line may be printed a second time


@dataclasses.dataclass(frozen=True)
class Back:
    """A restart: the step that was reached, the one gone back to, and the rows in between, taken again."""

    reached: int
    to: int
    rows: int
    at: int  # the row that it goes on with


@dataclasses.dataclass
class LoggedRun:
    """One run of a log. Columns have SILENT where the log has nothing, and NaN where it has a NaN."""

    dialect: Dialect
    columns: dict[str, np.ndarray]
    evals: dict[str, np.ndarray]
    backs: list[Back]
    repeats: int  # rows left out since they were there before
    last_step: int | None  # of how many, as the log has it
    ended: bool  # whether the log says that the run is through
    error: str  # the last line that tells of an error behind the last step, and not behind its end
    outside: (
        str  # the same behind the end that the log tells of: of another launch, or of what followed
    )
    started: float | None  # Unix seconds, of the log's own clock

    @property
    def complete(self) -> bool:
        """Whether the last of all steps was printed, or the log says that the run is done."""
        if self.ended:
            return True
        return (
            self.last_step is not None
            and self.reached is not None
            and (self.reached >= self.last_step - self.dialect.zero_based)
        )

    @property
    def reached(self) -> int | None:
        """The last step; None where the log numbers none."""
        step = self.columns["step"][-1]
        return None if step == SILENT else int(step)


def runs_of(stream: Stream) -> list[LoggedRun]:
    """The runs that a process printed, in order."""
    columns = stream.steps.arrays()
    if not stream.steps.rows:
        return []
    for i, (start, dialect) in enumerate(stream.dialects):
        stop = stream.dialects[i + 1][0] if i + 1 < len(stream.dialects) else stream.steps.rows
        for name, sentinels in dialect.unknown.items():
            if name in columns:
                part = columns[name][start:stop]
                part[np.isin(part, sentinels)] = SILENT
    kept = np.flatnonzero(~repeats(columns))
    rows = {name: column[kept] for name, column in columns.items()}
    made: list[LoggedRun] = []
    changes = [int(np.searchsorted(kept, start)) for start, _ in stream.dialects]
    groups = joined(stretches(rows, changes), changes, rows, kept, stream.marks)
    begins = [int(kept[group[0][0]]) for group in groups]
    firsts = [float(rows["step"][group[0][0]]) for group in groups]
    evals = evals_of(
        stream, begins, firsts, [before_first(rows["step"], *group[0]) for group in groups]
    )
    for i, group in enumerate(groups):
        first, stop = group[0][0], group[-1][1]
        chosen, backs = last_attempts(rows["step"], group)
        start_row = begins[i]
        stop_row = begins[i + 1] if i + 1 < len(groups) else stream.steps.rows
        dialect = next(d for start, d in reversed(stream.dialects) if start <= start_row)
        total = rows["last_step"][stop - 1] if "last_step" in rows else SILENT
        made.append(
            LoggedRun(
                dialect,
                {
                    name: column[chosen]
                    for name, column in rows.items()
                    if (column[chosen] != SILENT).any() or name == "step"
                },
                last_evals(evals[i], [(back, int(kept[back.at])) for back in backs]),
                backs,
                stop_row - start_row - (stop - first),
                None if total == SILENT else int(total),
                *end_of([mark for mark in stream.marks if mark.row == stop_row]),
                began(stream.marks, rows.get(CLOCK_COLUMN), first, start_row),
            )
        )
    return made


def end_of(marks: Sequence[Mark]) -> tuple[bool, str, str]:
    """Of the marks behind a run's last step: whether it ended, and the last errors before and behind that."""
    end = next((i for i, mark in enumerate(marks) if mark.kind == "end"), len(marks))
    before, behind = (
        next((m.text.decode("utf-8", "replace") for m in reversed(part) if m.kind == "error"), "")
        for part in (marks[:end], marks[end:])
    )
    return end < len(marks), before, behind


def repeats(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Which rows are there a second time within a few lines, the clock apart."""
    table = [column for name, column in columns.items() if name != CLOCK_COLUMN]
    count = len(table[0])
    twice = np.zeros(count, bool)
    if columns["step"][0] == SILENT:  # without numbers two steps may well look alike
        return twice
    for lag in range(1, min(REPEATS_WITHIN, count - 1) + 1):
        same = columns["step"][lag:] == columns["step"][:-lag]
        if same.any():
            for column in table:
                same &= (column[lag:] == column[:-lag]) | (
                    np.isnan(column[lag:]) & np.isnan(column[:-lag])
                )
            twice[lag:] |= same
    return twice


def stretches(rows: dict[str, np.ndarray], other_dialect: Sequence[int]) -> list[tuple[int, int]]:
    """Rows [start, stop) in which the step grows, of one trainer and one count of steps."""
    step = rows["step"]
    clock = np.where(step == SILENT, rows.get("epoch", step), step)
    new = np.diff(clock) <= 0
    new &= clock[1:] != SILENT
    if "last_step" in rows:
        new |= np.diff(rows["last_step"]) != 0
    starts = sorted(
        {0, *(np.flatnonzero(new) + 1).tolist(), *(row for row in other_dialect if row < len(step))}
    )
    return list(zip(starts, [*starts[1:], len(step)], strict=True))


def joined(
    parts: Sequence[tuple[int, int]],
    changes: Sequence[int],
    rows: dict[str, np.ndarray],
    kept: np.ndarray,
    marks: Sequence[Mark],
) -> list[list[tuple[int, int]]]:
    """The stretches of each run; at the rows of `changes` another trainer begins."""
    step, total = rows["step"], rows.get("last_step", rows["step"] * 0)
    resumed = {mark.row for mark in marks if mark.kind == "resume"}
    runs: list[list[tuple[int, int]]] = []
    for start, stop in parts:
        spacing = spacing_of(step, start, stop)
        if runs and start not in changes:
            before = runs[-1][-1]
            first, reached = step[start], step[before[1] - 1]
            spacing = spacing or spacing_of(step, *before) or 1
            follows = first == reached + spacing
            behind = int(kept[before[1] - 1])
            told = any(behind < row <= int(kept[start]) for row in resumed)
            taken_up = (
                SILENT < first <= reached
                and total[start] == total[before[0]]
                and (told or first > max(1, spacing))
            )
            if follows or taken_up:
                runs[-1].append((start, stop))
                continue
        runs.append([(start, stop)])
    return runs


def spacing_of(step: np.ndarray, start: int, stop: int) -> float:
    """Steps between two lines of a stretch, the usual; 0 for a single line."""
    return float(np.median(np.diff(step[start:stop]))) if stop - start > 1 else 0


def before_first(step: np.ndarray, start: int, stop: int) -> float:
    """The step that a run has behind it when its first line is still to come; SILENT where steps have no number."""
    first = float(step[start])
    return (
        first
        if first == SILENT
        else max(0.0, first - (spacing_of(step, start, stop) or 1))
        if first != 1
        else 0.0
    )


def last_attempts(
    step: np.ndarray, parts: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, list[Back]]:
    """The rows to keep of a run, and its restarts."""
    chosen = np.arange(*parts[0])
    backs: list[Back] = []
    for (start, stop), (_, before) in zip(parts[1:], parts, strict=False):
        lost = step[chosen] >= step[start]
        if lost.any() or step[start] <= step[before - 1]:
            backs.append(Back(int(step[before - 1]), int(step[start]), int(lost.sum()), start))
        chosen = np.concatenate([chosen[~lost], np.arange(start, stop)])
    return chosen, backs


def evals_of(
    stream: Stream, starts: Sequence[int], firsts: Sequence[float], befores: Sequence[float]
) -> list[dict[str, np.ndarray]]:
    """The evaluations of each run, by the row and the step that it begins with, and the step before that one.

    One that stands between two runs belongs to the second where its step is the first of that or less. One without a
    step has that of the line before, or before its run's first line the one of `befores`; where that has no number
    either it is left out.
    """
    columns = stream.evals.arrays()
    if not columns:
        return [{} for _ in starts]
    where = columns.pop("row").astype(int)
    step = columns.setdefault("step", np.full(len(where), SILENT))
    run = np.clip(np.searchsorted(starts, where, side="left") - 1, 0, None)
    for i in range(1, len(starts)):
        run[(where == starts[i]) & (step != SILENT) & (step <= firsts[i])] = i
    steps = stream.steps.arrays()
    unnumbered = step == SILENT
    for i in range(1, len(starts)):
        run[initial(columns, steps, unnumbered, where, starts[i])] = i
    first = np.asarray(starts)[run]
    inside, at_start = unnumbered & (where > first), unnumbered & (where <= first)
    step[inside] = steps["step"][where[inside] - 1]
    step[at_start] = np.asarray(befores)[run[at_start]]
    return [
        {
            name: column[(run == i) & (step != SILENT)]
            for name, column in (columns | {"row": where.astype(float)}).items()
        }
        for i in range(len(starts))
    ]


def initial(
    columns: dict[str, np.ndarray],
    steps: dict[str, np.ndarray],
    unnumbered: np.ndarray,
    where: np.ndarray,
    start: int,
) -> list[int]:
    """Of the evaluations without a step in front of the row `start` those that the run beginning there has made.

    A trainer evaluates at the end of a run, before the first step of the next one, or both. Of two values of a kind
    the last is the next run's. A single one is too, where the run before has stopped early, or where that is not known
    and the file begins with such an evaluation.
    """
    names = [name for name in columns if name not in ("step", CLOCK_COLUMN, "last_step")]
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for i in np.flatnonzero(unnumbered & (where == start)).tolist():
        kinds.setdefault(tuple(bool(columns[name][i] != SILENT) for name in names), []).append(i)
    total, reached = (
        steps[key][start - 1] if key in steps else SILENT for key in ("last_step", "step")
    )
    next_line = reached + max(1.0, reached - steps["step"][start - 2] if start > 1 else 0.0)
    known, stopped = SILENT not in (total, reached), next_line < total
    found: list[int] = []
    for kind, places in kinds.items():
        said = [tuple(columns[name][i] for name in names) for i in places]
        last = next(
            (k for k in range(len(said), 0, -1) if said[k - 1] != said[-1]), 0
        )  # it may be printed twice
        begins = any(
            all((columns[name][i] != SILENT) == has for name, has in zip(names, kind, strict=True))
            for i in np.flatnonzero(unnumbered & (where == 0)).tolist()
        )
        if last or (stopped if known else begins):
            found += places[last:]
    return found


def last_evals(
    columns: dict[str, np.ndarray], backs: Sequence[tuple[Back, int]]
) -> dict[str, np.ndarray]:
    """The last evaluation of each step and kind; none that a restart undid, each with the row that it begins with."""
    if not columns:
        return {}
    where, step = columns.pop("row"), columns["step"]
    kept = np.ones(len(step), bool)
    for back, row in backs:
        kept &= (where > row) | (step <= back.to)
    names = [name for name in columns if name not in ("step", CLOCK_COLUMN, "last_step")]
    last: dict[tuple[float, ...], int] = {}
    for i in np.flatnonzero(kept).tolist():
        last[(step[i], *(columns[name][i] != SILENT for name in names))] = i
    order = sorted(last.values())
    return {
        name: column[order] for name, column in columns.items() if (column[order] != SILENT).any()
    }


def began(marks: Sequence[Mark], clock: np.ndarray | None, first: int, row: int) -> float | None:
    """When the run began: the clock of its first line, or the last one printed before that."""
    if clock is not None and clock[first] != SILENT and np.isfinite(clock[first]):
        return float(clock[first])
    told = [clock_seconds(mark) for mark in marks if mark.kind == "clock" and mark.row == row]
    known = [moment for moment in told if np.isfinite(moment)]
    return known[-1] if known else None
