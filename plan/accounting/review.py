"""make plan REVIEW=1: what was predicted of the runs in RUNS_DIR before they trained, and what they took.

Each run with a plan.json counts as far as its record goes, also one that was killed or disturbed.
"""

import statistics
from pathlib import Path
from typing import Any

from plan.report import table
from record.account import ITEMS, SHOW, find_known, hold_to_plan
from record.number_formats import percent
from record.status import find_runs
from settings.json_file import read_object
from settings.resolve import show_path


def review(folder: Path) -> dict[str, Any]:
    """Return what JSON=1 prints. Raises RunFolderError if the folder cannot be read.

    runs: each with its figures (record/account.py)
    errors: of each device and dtype the median difference from the plan, as a share of it; null if nothing is known
    left_out: a sentence for each run that cannot be read
    """
    runs = []
    left_out = []
    for paths in find_runs(folder):
        try:
            plan = read_object(paths.plan)
            run = {"name": paths.name, "device": str(plan["device"]), "dtype": str(plan["dtype"])}
            runs.append({**run, "figures": hold_to_plan(paths)})
        except FileNotFoundError:
            continue
        except (KeyError, OSError, ValueError) as error:
            left_out.append(f"Left out: {show_path(paths.plan)}: {error}")
    errors = []
    for device, dtype in sorted({(run["device"], run["dtype"]) for run in runs}):
        own = [run for run in runs if (run["device"], run["dtype"]) == (device, dtype)]
        machine = {"device": device, "dtype": dtype, "runs": len(own)}
        errors.append({**machine, **{item: find_error(own, item) for item in ITEMS}})
    return {"schema": 1, "runs": runs, "errors": errors, "left_out": left_out}


def find_error(runs: list[dict[str, Any]], item: str) -> float | None:
    shares = []
    for run in runs:
        if figure := find_known(run["figures"]).get(item):
            _, predicted, actual = figure
            shares.append(abs(actual / predicted - 1))
    return statistics.median(shares) if shares else None


def report(summary: dict[str, Any], folder: Path) -> str:
    """Return what `review` found as two tables."""
    lines = summary["left_out"]
    if not summary["runs"]:
        lines += [f"No run in {show_path(folder)} has a plan to compare with."]
        return "\n".join(lines) + "\n"
    runs = [["planned -> actual, ratio", "dtype", *ITEMS]]
    for run in summary["runs"]:
        known = find_known(run["figures"])
        runs.append([run["name"], run["dtype"], *(compared(known.get(item)) for item in ITEMS)])
    errors = [["median difference", "dtype", "runs", *ITEMS]]
    for one in summary["errors"]:
        shares = ["n/a" if one[item] is None else percent(one[item]) for item in ITEMS]
        errors.append([one["device"], one["dtype"], str(one["runs"]), *shares])
    return "\n".join([*lines, *table(runs, left=(0, 1)), "", *table(errors, left=(0, 1))]) + "\n"


def compared(figure: tuple[str, float, float] | None) -> str:
    if figure is None:
        return "n/a"
    name, predicted, actual = figure
    return f"{SHOW[name](predicted)} -> {SHOW[name](actual)}, {actual / predicted:.2f}"
