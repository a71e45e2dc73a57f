"""`make plots`: runs and logs of other trainers to CSV, an interactive page and a figure.

    python -m analysis.plots [RUN_FOLDER ...] [--runs-dir DIR] [--output DIR] [--static]

Writes into the folder of each run training_*.csv, plots/loss_curves.html and plots/loss_curves.png; with --output also
a page and a figure of all runs there. With --static only figures, fine enough for print. Without a folder it takes the
run of the settings. With LOG_DIR and no folder it takes all logs and runs in that folder, and writes into plots/ there,
or into --output. What cannot be read is reported, and the rest is drawn. Exit codes: 0 all drawn, 64 invalid settings
or arguments, 78 a run, log or output that cannot be read or written, or no run.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from analysis.energy.join import add_energy
from analysis.energy.prices import read_prices
from analysis.figure import DPI, PAPER_DPI, write_figure
from analysis.logs.check import check_run
from analysis.logs.dialect import DialectError
from analysis.logs.runs import read_log
from analysis.page.build import write_page
from analysis.runs import Run, RunError, find_folders, keep_numbered, read_run
from analysis.summary import describe_not_finite
from analysis.tables import write_tables
from record.exit_codes import BAD_DATA, BAD_SETTING, DONE
from settings import ROOT, SettingsError
from settings.config import Config

RECORD = "metrics.jsonl"
LOGS = (".log", ".txt", ".out", ".err", "trainer_state.json")
PAGE, FIGURE = "loss_curves.html", "loss_curves.png"
PAGES = (".html", ".htm")
ENDINGS = (*PAGES, ".png", ".pdf", ".svg")


def main(argv: Sequence[str], is_for_logs: bool = False) -> int:
    """Draw what the arguments or the settings name, as analysis.parse_logs does or not; return the exit code."""
    command = "parse_logs" if is_for_logs else "plots"
    parser = argparse.ArgumentParser(prog=f"python -m analysis.{command}", allow_abbrev=False)
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="a run folder or a name in --runs-dir; a log")
    add("--output", type=Path, help=f"a folder, or a file that ends in {', '.join(ENDINGS)}")
    add("--static", action="store_true", help=f"draw a PNG for print ({PAPER_DPI} dpi), no page")
    if is_for_logs:
        add("--log-dir", metavar="DIR", help="a folder of logs and runs; output goes there")
        add("--csv", action="store_true", help="write a CSV of every run next to the output")
        add("--check", action="store_true", help="print how far each log contradicts itself")
    else:
        add("--runs-dir", metavar="DIR", help="holds the runs; default: the setting RUNS_DIR")
    try:
        arguments = parser.parse_args(argv)
        drawing = Drawing()
        if is_for_logs:
            draw_logs(drawing, arguments)
        else:
            draw_runs(drawing, arguments)
    except SystemExit as stop:  # argparse has said what is wrong, and its own code for that is 2
        return BAD_SETTING if stop.code else DONE
    except (SettingsError, DialectError, argparse.ArgumentTypeError) as error:
        sys.stderr.write(f"{error}\n")
        return BAD_SETTING
    return drawing.report()


def draw_logs(drawing: "Drawing", arguments: argparse.Namespace) -> None:
    """Draw logs and runs together. Raises ArgumentTypeError."""
    paths = [Path(path) for path in (arguments.log_dir, *arguments.paths) if path]
    if not paths:
        raise argparse.ArgumentTypeError(
            "name a log, a run folder or a folder of these; for example: --log-dir logs"
        )
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    files = name_files(arguments.output or folder, arguments.static)
    tables = files[0].parent if arguments.csv else None
    drawing.read_all(paths)
    if arguments.check:
        for run in drawing.runs:
            drawing.lines += [f"{run.name}: {sentence}" for sentence in check_run(run)]
        if not (arguments.output or arguments.static):
            files = []
    drawing.write(drawing.runs, files, tables)


def draw_runs(drawing: "Drawing", arguments: argparse.Namespace) -> None:
    """Draw each run in its own folder, and with --output all together; or what is in LOG_DIR. Raises ArgumentTypeError."""
    output = arguments.output
    is_static = arguments.static
    if not (arguments.paths or arguments.runs_dir):
        log_dir = Config.load().log_dir
        if log_dir:
            files = name_files(output or ROOT / log_dir / "plots", is_static)
            drawing.read_all([ROOT / log_dir])
            drawing.write(drawing.runs, files, None if is_static else files[0].parent)
            return
    together = name_files(output, is_static) if output else []
    folders = find_folders(arguments.paths, arguments.runs_dir)
    drawing.read_all([folder / RECORD for folder in folders])
    for run in drawing.runs:
        if run.folder:
            files = name_files(run.folder / "plots", is_static)
            drawing.write([run], files, None if is_static else run.folder)
    drawing.write(drawing.runs, together)


def name_files(output: Path, is_static: bool) -> list[Path]:
    """Return the file that an output is, or the figure and page in its folder. Raises ArgumentTypeError."""
    if output.is_dir() or not output.suffix:
        names = [FIGURE] if is_static else [FIGURE, PAGE]  # the page holds the figure
        return [output / name for name in names]
    if output.suffix.lower() not in ENDINGS:
        raise argparse.ArgumentTypeError(
            f"--output {output}: the name of a page or figure must end in {', '.join(ENDINGS)}; "
            f"for example: {output.with_suffix('.html')}"
        )
    return [output]


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
                f"no training step was found in {', '.join(map(str, paths))}: docs/logs.md lists the "
                "trainers that are known, and how to add one"
            )

    def read(self, path: Path) -> None:
        """Read a log, a record, a run folder, or all of these in a folder, each once."""
        real = os.path.realpath(path)
        if real in self.known:
            return
        self.known.add(real)
        try:
            if path.name == RECORD:
                self.add(add_energy(read_run(path.parent), read_prices()))
            elif (path / RECORD).is_file():
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
            remarks = filter(None, [*run.remarks, describe_not_finite(run)])
            self.lines.append("\n    ".join([f"  {run.name}: {counts}; {run.state}", *remarks]))
            self.add(run)
        self.lines += [f"  {note}" for note in log.notes]

    def add(self, run: Run) -> None:
        self.runs.append(replace(run, name=find_free(run.name, self.names)))

    def write(self, runs: Sequence[Run], files: Sequence[Path], tables: Path | None = None) -> None:
        """Write tables into a folder, and pages and figures. Figures without a page are for print."""
        drawn = [run for run in map(keep_numbered, runs) if run.steps]
        dpi = DPI if len(files) > 1 else PAPER_DPI
        stems: set[str] = set()
        try:
            for run in runs:
                if tables:
                    stem = find_free(f"training_{run.stamp}", stems)
                    paths = write_tables(run, tables, stem)
                    self.lines += [f"{path}  {run.name}" for path in paths]
            if files and runs and not drawn:
                self.problems.append(f"{files[0]} was not drawn: no run has numbered steps")
                return
            for file in files:
                if file.suffix.lower() in PAGES:
                    write_page(file, drawn)
                else:
                    write_figure(file, drawn, dpi)
                self.lines.append(str(file))
        except OSError as error:
            self.problems.append(
                f"{error.filename or tables or files[0]} cannot be written ({error.strerror}): make "
                "its folder writable, free its disk, or name another place with --output"
            )

    def report(self) -> int:
        """Print what was done and what could not be; return the exit code."""
        sys.stderr.writelines(f"{problem}\n" for problem in self.problems)
        here = f"{Path.cwd()}/"
        try:
            sys.stdout.writelines(f"{line.removeprefix(here)}\n" for line in self.lines)
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads on, as after `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
