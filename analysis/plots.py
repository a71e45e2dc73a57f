"""`make plots`: runs and logs of other trainers to CSV, an interactive page and a figure.

    python -m analysis.plots [PATH ...] [--output PATH] [--check]

A PATH is a run folder, the name of a run, a log, packed by gzip or not, or a folder of these, which is searched. Runs are
drawn each in its own folder: training_*.csv, plots/loss_curves.html and plots/loss_curves.png. With a log among them,
all are drawn together, in plots/ next to the first. Without a PATH it takes LOG_DIR, or else the run of the settings.
What cannot be read is reported, and the rest is drawn. Exit codes: 0 all drawn, 64 invalid settings or arguments, 78 a
run, log or output that cannot be read or written, or no run.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from analysis.energy.join import add_energy
from analysis.figure import DPI, PAPER_DPI, write_figure
from analysis.logs.check import check_run
from analysis.logs.dialect import DialectError
from analysis.logs.runs import read_log
from analysis.page.build import write_page
from analysis.runs import Run, RunError, keep_numbered, read_run
from analysis.summary import list_remarks
from analysis.tables import write_tables
from record.durable import make_printable
from record.exit_codes import BAD_DATA, BAD_SETTING, DONE
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config

RECORD = "metrics.jsonl"
LOGS = (".log", ".txt", ".out", ".err", "trainer_state.json")
PAGE, FIGURE = "loss_curves.html", "loss_curves.png"
PAGES = (".html", ".htm")
ENDINGS = (*PAGES, ".png", ".pdf", ".svg")


def main(argv: Sequence[str]) -> int:
    """Draw what the arguments or the settings name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.plots", allow_abbrev=False)
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="a run folder, the name of a run, or a log")
    add("--output", type=check_output, help="a folder, or a page or figure, for all together")
    add("--check", action="store_true", help="print how far each log contradicts itself; draw none")
    drawing = Drawing()
    try:
        arguments = parser.parse_args(argv)
        paths = find_paths(arguments.paths)
        drawing.read_all(paths)
    except SystemExit as stop:  # argparse has said what is wrong, and its own code for that is 2
        return BAD_SETTING if stop.code else DONE
    except (SettingsError, DialectError) as error:
        sys.stderr.write(f"{error}\n")
        return BAD_SETTING
    runs = drawing.runs
    if arguments.check:
        drawing.lines += [f"{run.name}: {words}" for run in runs for words in check_run(run)]
    elif all(is_record(path) for path in paths):
        for run in runs:
            if run.folder:
                drawing.write([run], run.folder / "plots", run.folder)
        if arguments.output:
            drawing.write(runs, arguments.output)
    else:
        folder = paths[0] if paths[0].is_dir() else paths[0].parent
        output = arguments.output or folder / "plots"
        drawing.write(runs, output, output.parent if output.suffix else output)
    return drawing.report()


def check_output(name: str) -> Path:
    """Return the path of a folder, a page or a figure. Raises ArgumentTypeError for another ending."""
    path = Path(name)
    if path.suffix and not path.is_dir() and path.suffix.lower() not in ENDINGS:
        raise argparse.ArgumentTypeError(
            f"{name}: the name of a page or figure must end in {', '.join(ENDINGS)}; for example: "
            f"{path.with_suffix('.html')}"
        )
    return path


def find_paths(names: Sequence[str]) -> list[Path]:
    """Return what to read; without a name LOG_DIR, or the run of the settings. Raises SettingsError."""
    paths = []
    for name in names:
        path = Path(name)
        if not (path.exists() or path.name.endswith(LOGS)):
            path = RunPaths.of_node(Config.load(), ROOT).folder.parent / name / RECORD
        paths.append(path)
    if not paths:
        config = Config.load()
        paths = [ROOT / config.log_dir]
        if not config.log_dir:
            paths = [RunPaths.of_node(config, ROOT).metrics]
    return paths


def is_record(path: Path) -> bool:
    """Return whether a path is the record of a run, or its folder."""
    return path.name == RECORD or (path / RECORD).is_file()


class Drawing:
    """Runs that were read, and what there is to say about them and about the files that were written.

    Attributes:
        runs: each with a name of its own.
        lines: what to print.
        problems: what cannot be read or written, and what to do.
        known: real paths that were read already: links may lead there again.
        names: of the runs.
    """

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.lines: list[str] = []
        self.problems: list[str] = []
        self.known: set[str] = set()
        self.names: set[str] = set()

    def read_all(self, paths: Sequence[Path]) -> None:
        """Read logs, records, run folders and folders of these."""
        for path in paths:
            self.read(path)
        if not self.runs and not self.problems:
            self.problems.append(
                f"no training step was found in {', '.join(map(str, paths))}. docs/logs.md lists the "
                "trainers whose logs can be read, and shows how to add one"
            )

    def read(self, path: Path) -> None:
        """Read a log, a record, a run folder, or all of these in a folder, each once."""
        real = os.path.realpath(path)
        if real in self.known:
            return
        self.known.add(real)
        try:
            if path.name == RECORD:
                self.add(add_energy(read_run(path.parent)))
            elif is_record(path):
                self.read(path / RECORD)
            elif path.is_dir():
                for child in sorted(path.iterdir()):
                    is_log = child.name.removesuffix(".gz").endswith(LOGS) and child.is_file()
                    if is_log or (child.is_dir() and not child.name.startswith(".")):
                        self.read(child)
            else:
                self.read_log(path)
        except RunError as error:
            self.problems.append(str(error))
        except OSError as error:
            self.problems.append(
                f"{path} cannot be read ({error.strerror}): name a log, a run folder or a folder of these"
            )

    def read_log(self, path: Path) -> None:
        """Read a log, and say what is in it."""
        log = read_log(path)
        self.lines.append(f"{path}, runs: {len(log.runs)}")
        for run in log.runs:
            counts = f"{run.steps:,} step lines, {len(run.evals)} evaluations"
            self.lines += [f"  {run.name}: {counts}; {run.state}"]
            self.lines += [f"    {remark}" for remark in list_remarks(run)]
            self.add(run)
        self.lines += [f"  {note}" for note in log.notes]

    def add(self, run: Run) -> None:
        self.runs.append(replace(run, name=find_free(run.name, self.names)))

    def write(self, runs: Sequence[Run], output: Path, tables: Path | None = None) -> None:
        """Write tables into a folder, and a page, a figure, or both into a folder. A figure alone is for print."""
        files, dpi = [output], PAPER_DPI
        if output.is_dir() or not output.suffix:
            files, dpi = [output / FIGURE, output / PAGE], DPI  # the page holds the figure
        drawn = [run for run in map(keep_numbered, runs) if run.steps]
        stems: set[str] = set()
        try:
            for run in runs:
                if tables:
                    stem = find_free(f"training_{run.stamp}", stems)
                    self.lines += [
                        f"{path}  {run.name}" for path in write_tables(run, tables, stem)
                    ]
            if runs and not drawn:
                self.problems.append(f"{files[0]} was not drawn: no run has numbered steps")
            if not drawn:
                return
            for file in files:
                if file.suffix.lower() in PAGES:
                    write_page(file, drawn)
                else:
                    write_figure(file, drawn, dpi)
                self.lines.append(str(file))
        except OSError as error:
            self.problems.append(
                f"{error.filename or output} cannot be written ({error.strerror}): make its folder "
                "writable, free its disk, or name another place with --output"
            )

    def report(self) -> int:
        """Print what was done and what could not be; return the exit code."""
        here = f"{Path.cwd()}/"
        try:
            sys.stdout.writelines(
                f"{make_printable(line.removeprefix(here))}\n" for line in self.lines
            )
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads on, as after `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stderr.writelines(f"{make_printable(problem)}\n" for problem in self.problems)
        return BAD_DATA if self.problems else DONE


def find_free(name: str, names: set[str]) -> str:
    """Add a name to others and return it, with a number if it is taken."""
    free = name
    count = 1
    while free in names:
        count += 1
        free = f"{name}_{count}"
    names.add(free)
    return free


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
