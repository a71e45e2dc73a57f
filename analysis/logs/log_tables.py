"""A run of a log to CSV, in the form that a run of ours has (tables.py): the same eight columns first.

    training_YYYYMMDD_HHMMSS.csv        a line for each step
    training_YYYYMMDD_HHMMSS_evals.csv  a line for each evaluation, where there is one

A cell is empty where the log says nothing, which is never the same as 0; nan and inf are written where it has them.
"""

from pathlib import Path

import numpy as np

from analysis.load import Run
from analysis.logs.attempts import LoggedRun
from analysis.logs.log_runs import evaluations, multiplier, plain
from analysis.logs.shape import SILENT
from analysis.tables import STEP_COLUMNS, write_csv

FIRST = {
    name: key
    for name, key in STEP_COLUMNS.items()
    if name in ("step", "loss", "grad_norm", "lrm", "dt_ms", "tok_per_sec", "mfu", "total_time_min")
}
NOT_WRITTEN = ("last_step",)  # the same in every line


def write_log_tables(run: Run, logged: LoggedRun) -> list[Path]:
    """Write the files; returns their paths."""
    columns = dict(logged.columns)
    if "lr" in columns and "lrm" not in columns:
        rates = multiplier(
            logged, {"lr": plain(columns["lr"]), "lrm": np.full(len(columns["lr"]), np.nan)}
        )
        columns["lrm"] = np.where(np.isnan(rates), SILENT, rates)
    behind = [key for key in columns if key not in FIRST.values() and key not in NOT_WRITTEN]
    named = FIRST | {key: key for key in behind}
    silent = np.full(len(columns["step"]), SILENT)
    steps = run.paths.folder / f"training_{run.stamp}.csv"
    write_csv(
        steps,
        list(named),
        zip(*(texts(columns.get(key, silent)) for key in named.values()), strict=True),
    )
    records = list(evaluations(logged))
    if not records:
        return [steps]
    keys = list(
        dict.fromkeys(
            [
                "step",
                *(
                    key
                    for record in records
                    for key in record
                    if key not in ("event", *NOT_WRITTEN)
                ),
            ]
        )
    )
    evals = run.paths.folder / f"training_{run.stamp}_evals.csv"
    write_csv(
        evals,
        keys,
        (
            texts(np.array([record.get(key, SILENT) for key in keys], np.float64))
            for record in records
        ),
    )
    return [steps, evals]


def texts(values: np.ndarray) -> list[str]:
    """The shortest exact text of each value, whole numbers without a point; empty where the log is silent."""
    return [
        "" if v == SILENT else str(int(v)) if v.is_integer() and abs(v) < 2**53 else repr(v)
        for v in values.tolist()
    ]
