"""Runs of logs in the form that CSV, page and picture take: a file to Run (load.py), with what there is to say of it.

    file -> Reader -> runs of the process that counts -> Run        trainer_state.json -> Run

Of several processes that print the same run, the one of the lowest rank counts; pods are runs of their own.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.load import Run, peak_rate
from analysis.logs.attempts import LoggedRun, runs_of
from analysis.logs.dialect import Dialect
from analysis.logs.log_reader import Reader, Stream, shown
from analysis.logs.shape import NO_TAG, SILENT
from record.run_paths import RunPaths

DRAWN = (
    "step",
    "minutes",
    "loss",
    "tokens_per_s",
    "lr",
    "grad_norm",
    "step_ms",
    "tokens",
    "time",
    "lrm",
    "mfu",
    "mem_gib",
    "data_wait_s",
)
OWN = "pure_transformer"


@dataclasses.dataclass
class Log:
    """What was found in one file."""

    path: Path
    runs: list[LoggedRun]
    names: list[str]
    notes: list[str]  # what was left out, and why
    not_understood: int = 0  # lines that look like steps
    error: str = ""  # the last line that tells of an error, where there is no run


def read_log(path: Path, dialects: Sequence[Dialect]) -> Log:
    """The runs of a file. Raises OSError where it cannot be read."""
    if path.suffix == ".json":
        return read_trainer_state(path, dialects)
    reader = Reader(dialects).read(path)
    log = Log(path, [], [], list(reader.notes), reader.not_understood)
    log.notes += [f"not understood: {shown(line)}" for line in reader.examples]
    chosen, others = those_that_count([s for s in reader.streams.values() if s.steps.rows])
    if others:
        log.notes.append(
            f"{sum(s.steps.rows for s in others):,} lines of {len(others)} other ranks were left out: of "
            "a run that several processes print, the lowest rank counts"
        )
    for stream in chosen:
        log.runs += runs_of(stream)
    log.names = names_of(path, len(log.runs))
    if not log.runs:
        errors = [
            m.text
            for s in (*reader.streams.values(), reader.stream)
            for m in s.marks
            if m.kind == "error"
        ]
        log.error = shown(errors[-1]) if errors else ""
    return log


def those_that_count(streams: Sequence[Stream]) -> tuple[list[Stream], list[Stream]]:
    """Of each pod the stream of the lowest rank, and of lines without a rank; and the others."""
    lowest: dict[bytes, Stream] = {}
    for stream in sorted(streams, key=lambda s: int(s.tag.rpartition(b"|")[2] or -1)):
        pod, _, rank = stream.tag.rpartition(b"|")
        lowest.setdefault(pod + (b"|ranks" if rank else NO_TAG), stream)
    chosen = [stream for stream in streams if stream in lowest.values()]
    return chosen, [stream for stream in streams if stream not in chosen]


def names_of(path: Path, count: int) -> list[str]:
    name = path.name.removesuffix(".gz")
    name = name.removesuffix(Path(name).suffix) or name
    return [name] if count == 1 else [f"{name} #{i + 1}" for i in range(count)]


# ---------------------------------------------------------------------------------------------------
# Hugging Face's own record
# ---------------------------------------------------------------------------------------------------


def read_trainer_state(path: Path, dialects: Sequence[Dialect]) -> Log:
    """The run of a trainer_state.json; a Log without runs and with the reason for another file."""
    keys = next((d.keys for d in dialects if d.keys), {})
    dialect = next((d for d in dialects if d.keys), None)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        history = content["log_history"]
    except (ValueError, KeyError, TypeError):
        history = None
    if dialect is None or not history or not isinstance(history, list):
        return Log(path, [], [], ["no trainer_state.json of Hugging Face: it has no log_history"])
    last = content.get("max_steps")
    stream, total, odd = (
        Stream(NO_TAG),
        {"last_step": float(last)} if isinstance(last, int) and last else {},
        0,
    )
    for entry in history:
        try:
            numbers = {"step": float(int(entry["step"]))} | {
                column: SILENT if entry[key] is None else float(entry[key])
                for key, column in keys.items()
                if key in entry
            }
        except (ValueError, KeyError, TypeError, OverflowError):
            odd += 1
            continue
        if "loss" in entry:
            stream.is_in(dialect)
            stream.steps.add_row(numbers | total)
        elif "val_loss" in numbers:
            stream.evals.add_row(numbers | {"row": float(stream.steps.rows)})
        elif "train_runtime" in entry:
            stream.mark("end", b"train_runtime")
    runs = runs_of(stream)
    notes = [
        f"{odd:,} entries of its log_history without a step, or with a value that is no number, were left out"
    ]
    return Log(path, runs, names_of(path, len(runs)), notes if odd else [])


# ---------------------------------------------------------------------------------------------------
# To draw and to write
# ---------------------------------------------------------------------------------------------------


def drawn(run: LoggedRun, name: str, folder: Path, mtime: float) -> Run:
    """The run as page and picture take it; steps without a number, which have no place there, left out."""
    numbered = run.columns["step"] != SILENT
    columns = {key: plain(column[numbered]) for key, column in run.columns.items()}
    for key in DRAWN:
        columns.setdefault(key, np.full(int(numbered.sum()), np.nan))
    columns["lrm"] = multiplier(run, columns)
    return Run(
        name=name,
        paths=RunPaths(folder),
        columns=columns,
        evals=list(evaluations(run)),
        events=restarts(run),
        started=mtime if run.started is None else run.started,
        goodput=None,
        lost_steps=sum(back.rows for back in run.backs),
        last_step=run.last_step,
        state=state(run),
        loss_is=run.dialect.loss_is,
        silent=(run.columns.get("loss", np.full(len(numbered), SILENT)) == SILENT)[numbered],
    )


def restarts(run: LoggedRun) -> list[dict[str, Any]]:
    """Where the log went back, as our own record has it."""
    return [
        {"event": "resume", "step": back.to, "attempt": i} for i, back in enumerate(run.backs, 1)
    ]


def plain(column: np.ndarray) -> np.ndarray:
    return np.where(column == SILENT, np.nan, column)


def multiplier(run: LoggedRun, columns: dict[str, np.ndarray]) -> np.ndarray:
    """The rate over its peak: as printed, or of our own lines, whose log does not name the peak, over the highest."""
    if run.dialect.name != OWN or "lrm" in run.columns:
        return columns["lrm"]
    return columns["lr"] / peak_rate(None, columns["lr"])


def evaluations(run: LoggedRun) -> Iterator[dict[str, Any]]:
    """One record an evaluation, with the keys that the log has for it."""
    count = len(next(iter(run.evals.values()), ()))
    for i in range(count):
        record = {
            name: float(column[i]) for name, column in run.evals.items() if column[i] != SILENT
        }
        if "step" in record:
            yield record | {"event": "eval", "step": int(record["step"])}


def state(run: LoggedRun) -> str:
    """complete or stopped, and where."""
    reached = run.reached
    if reached is None:
        return ("complete" if run.ended else "stopped") + "; the log numbers no steps"
    if run.complete:
        behind = run.last_step is not None and reached < run.last_step - run.dialect.zero_based
        return f"complete; its last step line is that of {reached:,}" + (
            f" of {run.last_step:,}" if behind else ""
        )
    if run.last_step:
        share = 100 * (reached + run.dialect.zero_based) / run.last_step
        return f"stopped at {share:.1f}% (step {reached:,} of {run.last_step:,})"
    return f"ends at step {reached:,}; the log does not say of how many"
