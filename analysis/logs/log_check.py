"""What a log implies of itself: numbers that must agree, and by how much they do not.

tokens/s x step time = tokens of a step, the same in each      total time grows by the step time
step_avg = total time / steps                                   tokens grow alike in each step
"""

from collections.abc import Iterator

import numpy as np

from analysis.load import Run
from analysis.logs.attempts import LoggedRun
from analysis.logs.log_runs import plain

ROUNDING_S = (
    0.61  # of the difference of two times in minutes with two decimals, and of a step time with two
)


def checks(run: LoggedRun) -> list[str]:
    """A line for each that can be checked, with the largest deviation and its step."""
    return checks_of({name: plain(column) for name, column in run.columns.items()})


def record_checks(run: Run) -> list[str]:
    """The same of our own record. Its minutes are the sum of its step times by load.py, so they prove nothing."""
    return checks_of({name: column for name, column in run.columns.items() if name != "minutes"})


def checks_of(columns: dict[str, np.ndarray]) -> list[str]:
    found = [*batch(columns), *total_time(columns), *average(columns), *tokens(columns)]
    return found or ["nothing in this log can be checked against another number of it"]


def batch(columns: dict[str, np.ndarray]) -> Iterator[str]:
    if not {"tokens_per_s", "step_ms"} <= columns.keys():
        return
    product = columns["tokens_per_s"] * columns["step_ms"] / 1000
    if (known := np.isfinite(product)).any():
        middle = float(np.median(product[known]))
        off = np.where(known, np.abs(product / middle - 1), 0)
        yield (
            f"tokens/s x step time = {middle:,.0f} tokens a step (median of {known.sum():,}); "
            f"largest deviation {100 * off.max():.3f}%{at(columns, int(off.argmax()))}"
        )


def total_time(columns: dict[str, np.ndarray]) -> Iterator[str]:
    if not {"minutes", "step_ms"} <= columns.keys():
        return
    grown = np.diff(columns["minutes"]) * 60
    off = np.abs(grown - columns["step_ms"][1:] / 1000)
    off[(np.diff(columns["step"]) != 1) | ~np.isfinite(off)] = -1
    if (known := off >= 0).any():
        within = (off[known] <= ROUNDING_S).sum()
        yield (
            f"total time grows by the step time on {within:,} of {known.sum():,} steps, within {ROUNDING_S} s, the "
            f"rounding of minutes; largest deviation {off.max():.2f} s{at(columns, int(off.argmax()) + 1)}"
        )


def average(columns: dict[str, np.ndarray]) -> Iterator[str]:
    if not {"minutes", "step_avg_ms"} <= columns.keys():
        return
    step, took = columns["step"], columns["minutes"] * 60_000
    ways = {
        words: np.abs(took / np.where(step > less, step - less, np.nan) - columns["step_avg_ms"])
        for words, less in (("step", 0), ("(step - 10)", 10))
    }
    words, off = min(ways.items(), key=lambda way: float(np.nanmedian(way[1])))
    if (known := np.isfinite(off)).any():
        off = np.where(known, off, 0)
        yield (
            f"step_avg = train_time / {words} on {known.sum():,} lines; largest deviation {off.max():.2f} ms"
            f"{at(columns, int(off.argmax()))}"
        )


def tokens(columns: dict[str, np.ndarray]) -> Iterator[str]:
    if "tokens" not in columns:
        return
    each = np.diff(columns["tokens"]) / np.diff(columns["step"])
    if (known := np.isfinite(each)).any():
        middle = float(np.median(each[known]))
        off = np.where(known, np.abs(each - middle), 0)
        yield (
            f"tokens grow by {middle:,.0f} a step (median of {known.sum():,}); largest deviation {off.max():,.0f}"
            f"{at(columns, int(off.argmax()) + 1)}"
        )


def at(columns: dict[str, np.ndarray], row: int) -> str:
    step = columns["step"][row]
    return f" at step {step:,.0f}" if np.isfinite(step) else ""
