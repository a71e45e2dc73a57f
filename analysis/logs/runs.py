"""The rows of a log to runs: repeated lines dropped, restarts joined, the steps that they lost counted.

    ProcessLog -> without repeats -> stretches in which the step grows -> Run        trainer_state.json -> Run

Where the step goes back, a run that begins at its first step is a new one. Any other is the same run, resumed from a
checkpoint: the steps printed since then are lost, and the last attempt counts. Another trainer or another number of
steps is another run too, unless it goes on right after the step before. Of several processes that print the same run
the one with the lowest rank counts; pods are separate runs. An evaluation without a step belongs to the step above it.
"""

import bisect
import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.logs.dialect import read_dialects
from analysis.logs.read import ProcessLog, Reader
from analysis.runs import Run, find_highest
from record.durable import make_printable

Columns = Mapping[str, np.ndarray]
Event = dict[str, Any]

STAMP = re.compile(r"\d{8}_\d{6}|$")
OWN = "pure_transformer"
NOT_EVALUATED = ("step", "last_step", "time")  # what an evaluation names besides its results


@dataclass
class Log:
    """What a file has.

    Attributes:
        notes: what was left out and why, in sentences.
        runs: in the order in which they began.
    """

    notes: list[str]
    runs: list[Run] = field(default_factory=list)


@dataclass
class RunRows:
    """The rows of one run.

    Attributes:
        first: its first row in the log.
        before: the step before that one.
        rows: (n,) int64, of the last attempt at each step.
        restarts: events as our own record has them, with the row that goes on.
        remarks: about these, in words.
    """

    first: int
    before: float
    rows: np.ndarray
    restarts: list[Event] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_log(path: Path) -> Log:
    """Return the runs of a file. Raises OSError if it cannot be read, DialectError for an invalid declaration."""
    reader = Reader(read_dialects()).read(path)
    log = Log(reader.notes)
    for stream in reader.streams.values():
        if stream.rows:
            add_runs(log, stream, path)
    if not log.runs and (0, "error") in reader.stream.marks:
        log.notes.append(f"no step; its last error: {reader.stream.marks[0, 'error']}")
    return log


def add_runs(log: Log, stream: ProcessLog, path: Path) -> None:
    """Add the runs that a process printed. Those without a clock began when the log was modified."""
    name = make_printable(Path(path.name.removesuffix(".gz")).stem)
    columns, not_finite = stream.to_columns()
    runs = split_runs(stream, columns)
    evals = assign_evals(stream, columns["step"], runs)
    stops = [*(run.first for run in runs[1:]), stream.rows]
    for run, run_evals, stop in zip(runs, evals, stops, strict=True):
        dialect = [dialect for row, dialect in stream.dialects if row <= run.first][-1]
        chosen = {key: column[run.rows] for key, column in columns.items()}
        last_step = chosen.pop("last_step")[-1]
        if dialect.name == OWN:
            chosen["lrm"] = chosen["lr"] / find_highest(chosen["lr"])
        started = columns["time"][run.first]
        if np.isnan(started):
            started = stream.marks.get((run.first, "clock"), path.stat().st_mtime)
        for kind, words in (("error", "after its last step"), ("late error", "after its end")):
            if (stop, kind) in stream.marks:
                run.remarks.append(f"{words}: {stream.marks[stop, kind]}")
        has_ended = (stop, "end") in stream.marks
        number = len(log.runs) + 1
        log.runs.append(
            Run(
                name=name if number == 1 else f"{name} #{number}",
                columns=chosen,
                evals=run_evals,
                events=run.restarts,
                started=started,
                not_finite={key: mask[run.rows] for key, mask in not_finite.items()},
                last_step=None if np.isnan(last_step) else int(last_step),
                log_stamp=STAMP.findall(path.name)[0],
                loss_is=dialect.loss_is,
                state=describe_state(chosen["step"][-1], last_step, dialect.zero_based, has_ended),
                remarks=[f"format: {dialect.name}", *run.remarks],
            )
        )


def split_runs(stream: ProcessLog, columns: Columns) -> list[RunRows]:
    """Return the rows of each run, in order."""
    step = columns["step"]
    total = np.nan_to_num(columns["last_step"])
    counter = np.where(np.isnan(step), columns["epoch"], step)
    is_break = (np.diff(counter) <= 0) | (np.diff(total) != 0)
    changes = [row for row, _ in stream.dialects]
    starts = sorted({*changes, *(np.flatnonzero(is_break) + 1).tolist()})

    runs: list[RunRows] = []
    spacing = 1.0
    for start, stop in itertools.pairwise([*starts, stream.rows]):
        rows = np.arange(start, stop)
        if len(rows) > 1:
            spacing = float(np.median(np.diff(step[start:stop])))
        before, first = step[start - 1], step[start]
        # A run that begins at its first step is a new one.
        goes_back = max(1.0, spacing) < first <= before and total[start] == total[start - 1]
        if start not in changes and (first == before + spacing or goes_back):
            resume(runs[-1], rows, step)
        else:
            runs.append(RunRows(start, max(first - spacing, 0.0), rows))
    return runs


def resume(run: RunRows, rows: np.ndarray, step: np.ndarray) -> None:
    """Go on with these rows; what the run has of these steps and later ones is lost."""
    is_lost = step[run.rows] >= step[rows[0]]
    lost = int(is_lost.sum())
    if lost:
        to = int(step[rows[0]])
        attempt = len(run.restarts) + 1
        run.restarts.append({"event": "resume", "step": to, "attempt": attempt, "row": rows[0]})
        run.remarks.append(
            f"went back from step {step[run.rows[-1]]:,.0f} to {to:,}: {lost:,} step lines lost, "
            "the last attempt is kept"
        )
    run.rows = np.concatenate([run.rows[~is_lost], rows])


def assign_evals(
    stream: ProcessLog, step: np.ndarray, runs: Sequence[RunRows]
) -> list[list[Event]]:
    """Return the evaluations of each run, by step: the last of each kind, and none that a restart undid.

    One without a step belongs to the line above it; a second one of its kind there is left out.
    """
    begins = [run.first for run in runs]
    evals: list[dict[Any, Event]] = [{} for _ in runs]
    for row, values in stream.evals:
        results: Event = {name: value for name, value in values.items() if value is not None}
        kind = tuple(name for name in results if name not in NOT_EVALUATED)
        owner = max(bisect.bisect_left(begins, row) - 1, 0)
        above = step[row - 1] if row else runs[0].before
        has_step = "step" in results
        number = results.get("step", above)
        if row in begins and has_step and number <= step[row]:
            owner = begins.index(row)
        is_undone = any(  # without a step number, it belongs to a step that was repeated
            row <= restart["row"] and number >= restart["step"] + has_step
            for restart in runs[owner].restarts
        )
        key = (number, kind)
        is_second = not has_step and key in evals[owner]
        if is_undone or is_second or np.isnan(number):
            continue
        results |= {"event": "eval", "step": int(number)}
        results.pop("last_step", None)
        evals[owner][key] = results
    return [sorted(by_step.values(), key=operator.itemgetter("step")) for by_step in evals]


def describe_state(reached: float, last_step: float, is_zero_based: bool, has_ended: bool) -> str:
    """Return whether a run is complete, or where it stopped."""
    if math.isnan(reached):
        return f"{'complete' if has_ended else 'stopped'}; the log does not number its steps"
    done = reached + is_zero_based
    if has_ended or done >= last_step:
        if done < last_step:
            return f"complete; the last step in the log is {reached:,.0f} of {last_step:,.0f}"
        return f"complete at step {reached:,.0f}"
    if math.isnan(last_step):
        return f"ends at step {reached:,.0f}; the log does not say how many steps there are"
    return f"stopped at {100 * done / last_step:.1f}% (step {reached:,.0f} of {last_step:,.0f})"
