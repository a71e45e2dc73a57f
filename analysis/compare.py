"""`make compare`: which run is better, by how much, and is that more than noise (groups.py)?

RUNS -> read_runs() -> groups.py -> terminal or JSON, page, FIGURE
"""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from analysis.figure import write_figure, write_paper_figure
from analysis.groups import NOTHING, compare, group_runs, read_lines
from analysis.logs.dialect import DialectError
from analysis.page.build import write_page
from analysis.read_inputs import Inputs, find_paths, is_record
from analysis.runs import Run, RunError, keep_numbered
from analysis.tables import print_table
from record.exit_codes import BAD_DATA, DONE, INTERRUPTED
from settings import ROOT, SettingsError, explain_error, load_config
from settings.names import find_nearest
from settings.resolve import show_path
from settings.terminal import complain, say

NAMES = "No such run, log or pattern. Separate them by commas: RUNS='base-seed*,muon-seed*'"
NAME_LENGTH = 100  # of the page: file systems allow 255


def read_runs(names: str, runs_dir: Path) -> list[Run]:
    """Read the runs and logs that names, patterns and paths lead to, each once, without steps that have no number.

    Raises:
        SettingsError: nothing has one of these names.
        DialectError: an invalid declaration.
        RunError: a run or log cannot be read.
    """
    paths: list[Path] = []
    for name in map(str.strip, names.rstrip(",").split(",")):
        matches = find_paths(name, runs_dir) if name else []
        if not matches:
            known = sorted(path.name for path in runs_dir.glob("*") if is_record(path))
            nearest = find_nearest(name, known)
            hint = f"Did you mean {nearest}? " if nearest else ""
            raise SettingsError(
                [f"RUNS={name}: {NAMES}. {hint}Runs in {runs_dir}: {', '.join(known) or 'none'}"]
            )
        paths += matches
    inputs = Inputs(paths)
    runs = [run for run in map(keep_numbered, inputs.runs) if run.steps]
    if inputs.problems:
        raise RunError("\n".join(inputs.problems))
    for path in inputs.empty:
        complain(f"{path} is left out: it has no training step that can be read")
    if not runs:
        raise RunError(f"RUNS={names}: no step with a number. docs/logs.md lists the trainers")
    return runs


def main() -> int:
    """Compare RUNS; returns the exit code."""
    try:
        config = load_config()
        runs_dir = ROOT / config.runs_dir
        complain(f"Reading {config.runs}")
        runs = read_runs(config.runs, runs_dir)
        groups = group_runs(runs)
        comparison = compare(groups)
        lines = next(read_lines(groups, ("tokens", "step"), is_range=True), None)  # of a figure
        if config.json:
            sys.stdout.write(json.dumps(asdict(comparison), indent=1) + "\n")
        else:
            print_table(comparison.rows, "", *comparison.sentences)
            name = re.sub("[^A-Za-z0-9_.-]+", "_", "-".join(groups))[:NAME_LENGTH]
            page = runs_dir / "compare" / f"{name}.html"
            picture = page.with_suffix(".png")
            complain("Drawing the curves")
            write_figure(picture, runs)
            write_page(page, runs, picture.read_bytes(), comparison)
            is_offered = lines is not None and not config.figure
            paper = ". For a paper: FIGURE=loss.pdf" if is_offered else ""
            say(f"Curves: {show_path(page)}{paper}")
        if config.figure:
            if lines is None:
                raise RunError(f"No figure was written. {NOTHING}")
            write_paper_figure(ROOT / config.figure, lines)
            complain(f"Figure of the {lines.curve.name}: {config.figure}")
        return DONE
    except (SettingsError, DialectError, RunError) as error:
        complain(explain_error(error))
        return error.exit_code
    except OSError as error:
        where = error.filename or runs_dir
        complain(
            f"{where} cannot be read or written ({error.strerror}). Free some space, fix its permissions, "
            "or name another"
        )
        return BAD_DATA
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
