"""`make plots`: the records of runs to CSV, an interactive page and a picture.

    python -m analysis.plots [RUN_FOLDER ...] [--runs-dir DIR] [--output DIR] [--static]

Writes into each run's folder training_*.csv, plots/loss_curves.html and plots/loss_curves.png; with --output
also one page and one picture that hold all the runs given. With --static only pictures, fine enough for print.
Without a folder it takes the run of the settings. With LOG_DIR and no folder, all logs and runs in that folder,
as analysis/parse_logs.py has them.
A run that cannot be drawn is named with what to do, and the others are drawn. Exit codes: 0 all drawn,
64 bad settings or arguments, 78 a record that is missing or unreadable, or a folder that cannot be written.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis import parse_logs
from analysis.energy.energy import with_energy
from analysis.load import RecordError, Run, load, run_folders, shown
from analysis.page.build import write_page
from analysis.picture import DPI, PAPER_DPI, write_picture
from analysis.prices import prices
from analysis.tables import write_tables
from settings import ROOT, SettingsError
from settings.config import Config

DONE, BAD_SETTING, BAD_DATA = 0, 64, 78


def main(argv: Sequence[str]) -> int:
    """Draw what the arguments or the settings name; returns the exit code."""
    try:
        arguments = parser().parse_args(argv)
        if not (arguments.run_folders or arguments.runs_dir) and (logs := Config.load().log_dir):
            return draw_logs(ROOT / logs, arguments.output, arguments.static)
        folders = run_folders(arguments.run_folders, arguments.runs_dir)
    except SystemExit as stop:  # argparse has said what is wrong, and its own code for that is 2
        return BAD_SETTING if stop.code else DONE
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_SETTING
    runs: list[Run] = []
    written: list[Path] = []
    troubles: list[str] = []
    for folder in folders:
        try:
            run = with_energy(load(folder), prices())
            written.extend(draw_run(run, arguments.static))
            runs.append(run)
        except RecordError as error:
            troubles.append(str(error))
        except OSError as error:
            troubles.append(not_written(error, folder))
    try:
        if arguments.output and runs:
            written.extend(draw_together(arguments.output, runs, arguments.static))
    except OSError as error:
        troubles.append(not_written(error, arguments.output))
    sys.stderr.write("".join(f"{trouble}\n" for trouble in troubles))
    sys.stdout.write("".join(f"{shown(path)}\n" for path in written))
    return BAD_DATA if troubles else DONE


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m analysis.plots",
        allow_abbrev=False,
        description="Draw training runs: CSV, page and picture.",
    )
    made.add_argument(
        "run_folders",
        nargs="*",
        metavar="RUN_FOLDER",
        help="a folder that holds metrics.jsonl, or the name of a run in --runs-dir; default: "
        "the run of the settings (RUN_NAME)",
    )
    made.add_argument(
        "--runs-dir", metavar="DIR", help="holds the runs; default: the setting RUNS_DIR"
    )
    made.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="also draw all the runs in one page and one picture there",
    )
    made.add_argument(
        "--static",
        action="store_true",
        help=f"no CSV and no page: a PNG of {PAPER_DPI} dots an inch, for a paper",
    )
    return made


def draw_logs(folder: Path, output: Path | None, static: bool) -> int:
    """CSV, page and picture of all logs and runs in a folder, into it or into `output`; returns the exit code."""
    into = output or folder
    page = None if static else into / parse_logs.PAGE
    return parse_logs.parse(
        [folder],
        into,
        csv=not static,
        check=False,
        page=page,
        picture=into / parse_logs.PICTURE,
        dpi=PAPER_DPI if static else DPI,
    )


def draw_run(run: Run, static: bool) -> Iterator[Path]:
    """Write a run's own files; yields the path of each that is written."""
    if not static:
        yield from write_tables(run)
    yield from drawn(run.paths.plots, [run], [run.name], static)


def draw_together(folder: Path, runs: Sequence[Run], static: bool) -> Iterator[Path]:
    """Write one page and one picture of all runs; yields the path of each that is written."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # two folders of one name: tell them apart
        names = [str(run.paths.folder) for run in runs]
    yield from drawn(folder, runs, names, static)


def drawn(folder: Path, runs: Sequence[Run], names: Sequence[str], static: bool) -> Iterator[Path]:
    """Page and picture, or a finer picture alone."""
    if not static:
        yield write_page(folder / parse_logs.PAGE, runs, names)
    yield write_picture(folder / parse_logs.PICTURE, runs, names, PAPER_DPI if static else DPI)


def not_written(error: OSError, folder: Path) -> str:
    """The error in one sentence; a full disk does not name the file."""
    path = error.filename or folder
    return f"{path} cannot be written ({error.strerror}): make its folder writable or free its disk"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
