"""A run to CSV files, named by its start, so that they are rewritten.

    STEM.csv         a line for each step: the columns that existing notebooks read, then what else is known
    STEM_evals.csv   a line for each evaluation
    STEM_events.csv  of a run of this repository: a line for each start, checkpoint, skipped step, rollback and so on

Numbers are written in full. A cell is empty where the run says nothing, which is never the same as 0; nan and inf
stand where it says that a number is not finite.
"""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from analysis.runs import Run

FIRST_COLUMNS = ["step", "loss", "grad_norm", "lrm", "step_ms", "tokens_per_s", "mfu", "minutes"]
RECORD_COLUMNS = ["lr", "tokens", "mem_gib", "data_wait_s", "time"]
SAMPLED_COLUMNS = ["energy_j", "power_w"]  # joules and watts of all GPUs
TITLES = {"step_ms": "dt_ms", "tokens_per_s": "tok_per_sec", "minutes": "total_time_min"}
# The keys of our records; details beyond these are in metrics.jsonl.
EVAL_COLUMNS = [
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
]
EVENT_COLUMNS = [
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
]


def write_tables(run: Run, folder: Path, stem: str) -> list[Path]:
    """Write the files into a folder, which is made, and return their paths. Raises OSError."""
    fixed = FIRST_COLUMNS
    others: Iterable[str] = run.columns
    if run.folder:
        fixed = FIRST_COLUMNS + RECORD_COLUMNS
        others = SAMPLED_COLUMNS if run.energy else ()
    steps = {}
    for name in dict.fromkeys([*fixed, *others]):
        column = run.columns[name]
        is_silent = np.isnan(column)
        if name in run.not_finite:
            is_silent &= ~run.not_finite[name]
        known = np.where(is_silent, np.array(None), column)
        cells = map(format_cell, known)
        if name in fixed or not is_silent.all():
            steps[TITLES.get(name, name)] = cells
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.csv"]
    write_csv(paths[0], steps, zip(*steps.values(), strict=True))

    tables = [("evals", EVAL_COLUMNS, run.evals), ("events", EVENT_COLUMNS, run.events)]
    if run.folder is None:
        names = [name for record in run.evals for name in record if name != "event"]
        tables = [("evals", list(dict.fromkeys(["step", *names])), run.evals)]
    for kind, header, records in tables:
        if records:
            rows = ([format_cell(record.get(name)) for name in header] for record in records)
            paths.append(folder / f"{stem}_{kind}.csv")
            write_csv(paths[-1], header, rows)
    return paths


def format_cell(value: Any) -> str:
    """Return a value as text: a number in its shortest exact form, and nothing for None."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a file, with an empty cell for None. Raises OSError."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
