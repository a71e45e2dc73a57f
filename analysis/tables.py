"""A run to three CSV files beside its record, named by the run's first start, so that they are rewritten.

    training_YYYYMMDD_HHMMSS.csv        a line for each step
    training_YYYYMMDD_HHMMSS_evals.csv  a line for each evaluation
    training_YYYYMMDD_HHMMSS_events.csv a line for each start, checkpoint, skipped step, rollback and so on

Numbers are written in full; a cell is empty where the record is silent, which is never the same as 0.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.load import Run

# CSV column -> column of the run. The first eight are the names that existing notebooks read.
STEP_COLUMNS = {
    "step": "step",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "lrm": "lrm",
    "dt_ms": "step_ms",
    "tok_per_sec": "tokens_per_s",
    "mfu": "mfu",
    "total_time_min": "minutes",
    "lr": "lr",
    "tokens": "tokens",
    "mem_gib": "mem_gib",
    "data_wait_s": "data_wait_s",
    "time": "time",
}
SAMPLED = (
    "energy_j",
    "power_w",
)  # where the run's GPUs were sampled: joules of the step, and watts, of all of them
WHOLE_NUMBERS = ("step", "tokens")

EVAL_COLUMNS = (
    "step",
    "tokens",
    "val_loss",
    "val_bpb",
    "scored_tokens",
    "full",
    "error",
    "core",
    "core_partial",
    "core_margin",
    "core_tasks",
    "val_ppl",
)

# The keys of the records; details beyond these are in metrics.jsonl.
EVENT_COLUMNS = (
    "event",
    "time",
    "attempt",
    "step",
    "tokens",
    "reason",
    "name",
    "loss",
    "grad_norm",
    "step_ms",
    "from",
    "passed_over",
    "seconds",
    "bytes",
)


def write_tables(run: Run) -> list[Path]:
    """Write the files; returns their paths."""
    steps = run.paths.folder / f"training_{run.stamp}.csv"
    evals = run.paths.folder / f"training_{run.stamp}_evals.csv"
    events = run.paths.folder / f"training_{run.stamp}_events.csv"
    names = STEP_COLUMNS | {key: key for key in SAMPLED if run.energy}
    columns = [cells(run.columns[key], key in WHOLE_NUMBERS) for key in names.values()]
    write_csv(steps, list(names), zip(*columns, strict=True))
    write_csv(evals, EVAL_COLUMNS, ([cell(e.get(key)) for key in EVAL_COLUMNS] for e in run.evals))
    write_csv(
        events, EVENT_COLUMNS, ([cell(e.get(key)) for key in EVENT_COLUMNS] for e in run.events)
    )
    return [steps, evals, events]


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def cells(values: np.ndarray, whole: bool) -> list[str]:
    """The text of each value; empty for NaN."""
    return ["" if v != v else str(int(v)) if whole else repr(v) for v in values.tolist()]


def cell(value: Any) -> str:
    """The text of a value of a record: its shortest exact form, true or false, or empty for null."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else repr(value)
