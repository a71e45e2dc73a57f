"""`make compare`: which run is better, by how much, and is that more than noise (groups.py)?

RUNS -> read_runs() -> groups.py -> terminal or JSON, page, FIGURE
"""

import glob
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path

from analysis.figure import write_figure, write_paper_figure
from analysis.groups import NOTHING, Comparison, Groups, Lines, compare, group_runs, read_lines
from analysis.logs.runs import read_log
from analysis.page.build import write_page
from analysis.runs import Run, RunError, keep_numbered, read_run
from record.exit_codes import BAD_DATA, DONE
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config
from settings.resolve import show_path

NOT_FOUND = (
    "There is no such run in RUNS_DIR, and no such path. For example "
    "RUNS='base-seed*,muon-seed*'; make runs lists the runs."
)
SAME_NAME = "Two runs have the same name. Rename a folder, for example to base-seed2."
WIDTH = 100  # of the terminal
NAME_LENGTH = 100  # of the page: file systems allow 255


def read_runs(names: str, runs_dir: Path) -> list[Run]:
    """Read the runs and logs that names, globs and paths lead to, each once.

    Raises:
        SettingsError: nothing has one of these names, or two runs have the same.
        RunError, OSError: a run or log cannot be read.
    """
    runs: dict[Path, list[Run]] = {}
    for name in names.split(","):
        is_known = False
        for match in sorted(glob.glob(str(runs_dir / name)) or glob.glob(str(ROOT / name))):
            path = Path(match).resolve()
            if path.is_file():
                runs[path] = read_numbered(path)
            elif RunPaths(path).metrics.exists():
                runs[path] = [read_run(path)]
            is_known |= path in runs
        if not is_known:
            raise SettingsError([f"RUNS={name}    {NOT_FOUND}"])
    members = list(itertools.chain(*runs.values()))
    if len({run.name for run in members}) < len(members):
        raise SettingsError([f"RUNS={names}    {SAME_NAME}"])
    return members


def read_numbered(path: Path) -> list[Run]:
    """Return the runs of a log, without steps that have no number. Raises RunError, OSError."""
    log = read_log(path)
    runs = [run for run in map(keep_numbered, log.runs) if run.steps]
    if not runs:
        raise RunError(f"{path} has no step with a number. {' '.join(log.notes)}")
    return runs


def choose_lines(groups: Groups) -> Lines:
    """Return the curve for a figure. Raises RunError without one that all runs have for a while."""
    for lines in read_lines(groups, ("tokens", "step")):
        if lines.start < lines.end:
            return lines
    raise RunError(NOTHING)


def show(comparison: Comparison) -> None:
    """Print the table and the sentences."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in comparison.rows[0]:
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for row in comparison.rows:
        table.add_row(*row.values())
    console = Console(width=WIDTH, markup=False, highlight=False, emoji=False)
    console.print(table, "", *comparison.sentences, sep="\n")


def main() -> int:
    """Compare RUNS; returns the exit code."""
    try:
        config = Config.load()
        runs_dir = ROOT / config.runs_dir
        runs = read_runs(config.runs, runs_dir)
        groups = group_runs(runs)
        comparison = compare(groups)
        if config.json:
            sys.stdout.write(json.dumps(asdict(comparison), indent=1) + "\n")
            return DONE
        show(comparison)
        name = "-".join(groups)[:NAME_LENGTH]
        page = runs_dir / "compare" / f"{name}.html"
        write_figure(page.with_suffix(".png"), runs)
        write_page(page, runs, comparison)
        figure = "For a paper: FIGURE=loss.pdf"
        if config.figure:
            write_paper_figure(ROOT / config.figure, choose_lines(groups))
            figure = f"Figure: {config.figure}"
        sys.stdout.write(f"Curves: {show_path(page)}. {figure}\n")
        return DONE
    except (SettingsError, RunError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return getattr(error, "exit_code", BAD_DATA)


if __name__ == "__main__":
    sys.exit(main())
