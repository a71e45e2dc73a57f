"""A run to CSV files, named by its start, so that they are rewritten; and tables for the terminal.

    STEM.csv         a line for each step: the columns that existing notebooks read, then what else is known
    STEM_evals.csv   a line for each evaluation
    STEM_events.csv  of a run of this repository: a line for each start, checkpoint, skipped step, rollback and so on

ColumnBuilder are written in full. A cell is empty where the run says nothing, which is never the same as 0; nan and inf
stand where it says that a number is not finite.
"""

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.runs import Run
from record.durable import open_whole
from settings import terminal

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
    if run.folder:
        fixed = FIRST_COLUMNS + RECORD_COLUMNS
        others = SAMPLED_COLUMNS if run.energy else []
        tables = [("evals", EVAL_COLUMNS, run.evals), ("events", EVENT_COLUMNS, run.events)]
    else:
        fixed = FIRST_COLUMNS
        others = list(run.columns)
        keys = dict.fromkeys(["step", *itertools.chain(*run.evals)])
        tables = [("evals", [key for key in keys if key != "event"], run.evals)]
    columns = {}
    for name in dict.fromkeys([*fixed, *others]):
        column = run.columns[name]
        is_missing = np.isnan(column) & ~run.is_not_finite(name)
        if name in fixed or not is_missing.all():
            columns[TITLES.get(name, name)] = np.ma.array(column, mask=is_missing)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.csv"]
    write_columns(paths[0], columns)
    for kind, header, records in tables:
        if records:
            paths.append(folder / f"{stem}_{kind}.csv")
            write_csv(
                paths[-1], header, ([record.get(key) for key in header] for record in records)
            )
    return paths


def write_columns(path: Path, columns: Mapping[str, np.ma.MaskedArray]) -> None:
    """Write columns, (n,) each, with an empty cell for what is masked. Raises OSError."""
    cells = [column.tolist() for column in columns.values()]
    write_csv(path, columns, zip(*cells, strict=True))


def write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a file. Raises OSError."""
    with (
        open_whole(path, flush=False) as file,
        io.TextIOWrapper(file, encoding="utf-8", newline="") as text,
    ):
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(map(format_cell, row) for row in rows)


def format_cell(value: Any) -> str:
    """Return a value as text: a number in its shortest exact form, and nothing for None."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def print_table(rows: Sequence[Mapping[str, str]], *lines: str) -> None:
    """Print rows, heading -> cell, and then lines, which are wrapped."""
    from rich.console import Console  # takes 0.1 s
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=terminal.find_width(), markup=False, highlight=False, emoji=False)
    console.print(table, *lines, sep="\n")
