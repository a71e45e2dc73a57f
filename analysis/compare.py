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
from analysis.groups import NOTHING, compare, group_runs, read_lines
from analysis.logs.runs import read_log
from analysis.page.build import write_page
from analysis.runs import Run, RunError, keep_numbered, read_run
from analysis.tables import print_table
from record.exit_codes import BAD_DATA, DONE, INTERRUPTED
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config
from settings.resolve import show_path

NAMES = "Must be names or paths of runs or logs; for example RUNS='base-seed*,muon-seed*'"
NAME_LENGTH = 100  # of the page: file systems allow 255


def read_runs(names: str, runs_dir: Path) -> list[Run]:
    """Read the runs and logs that names, globs and paths lead to, each once.

    Raises:
        SettingsError: nothing has one of these names, or two runs have the same.
        RunError, OSError: a run or log cannot be read.
    """
    paths: dict[Path, None] = {}
    for name in map(str.strip, names.rstrip(",").split(",")):
        found = find_paths(runs_dir, name) or find_paths(ROOT, name)
        if not found:
            raise SettingsError(
                [
                    f"RUNS={name}: {NAMES}. {runs_dir} has {', '.join(list_names(runs_dir)) or 'none'}"
                ]
            )
        paths |= dict.fromkeys(path.resolve() for path in found)
    runs = [*itertools.chain(*map(read_path, paths))]
    if len({run.name for run in runs}) < len(runs):
        raise SettingsError(
            [
                f"RUNS={names}: Two runs have the same name. Rename a folder, for example to base-seed2"
            ]
        )
    return runs


def find_paths(folder: Path, name: str) -> list[Path]:
    """Return the files, which may be logs, and folders of runs that a name or glob leads to, in a folder or not."""
    paths = [folder / name]
    if not paths[0].exists():
        paths = [Path(match) for match in sorted(glob.glob(str(paths[0])))]
    return [path for path in paths if path.is_file() or RunPaths(path).metrics.exists()]


def list_names(runs_dir: Path) -> list[str]:
    """Return the names of the runs in a folder."""
    return sorted(path.parent.name for path in runs_dir.glob("*/metrics.jsonl"))


def read_path(path: Path) -> list[Run]:
    """Return the run in a folder, or those of a log, without steps that have no number. Raises RunError, OSError."""
    if path.is_dir():
        return [read_run(path)]
    log = read_log(path)
    runs = [run for run in map(keep_numbered, log.runs) if run.steps]
    if not runs:
        raise RunError(f"{path} has no step with a number. docs/logs.md lists the trainers")
    return runs


def main() -> int:
    """Compare RUNS; returns the exit code."""
    try:
        config = Config.load()
        runs_dir = ROOT / config.runs_dir
        runs = read_runs(config.runs, runs_dir)
        groups = group_runs(runs)
        comparison = compare(groups)
        figure = "For a paper: FIGURE=loss.pdf"
        if config.figure:
            lines = next(read_lines(groups, ("tokens", "step"), is_range=True), None)
            if lines is None:
                raise RunError(NOTHING)
            write_paper_figure(ROOT / config.figure, lines)
            figure = f"Figure of the {lines.curve.name}: {config.figure}"
        if config.json:
            sys.stdout.write(json.dumps(asdict(comparison), indent=1) + "\n")
            return DONE
        name = "-".join(groups)[:NAME_LENGTH]
        page = runs_dir / "compare" / f"{name}.html"
        write_figure(page.with_suffix(".png"), runs)
        write_page(page, runs, comparison)
        print_table(comparison.rows, "", *comparison.sentences)
        sys.stdout.write(f"Curves: {show_path(page)}. {figure}\n")
        return DONE
    except (SettingsError, RunError) as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{error.filename}: {error.strerror}\n")
        return BAD_DATA
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
