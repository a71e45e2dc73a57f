"""`make plots`: runs and logs of other trainers to CSV, an interactive page and a figure.

    python -m analysis.plots [PATH ...] [--output PATH] [--check]

A PATH is a run folder, the name of a run or a pattern of names, a log, packed by gzip or not, or a folder of these, which
is searched. Runs are drawn each in its own folder: training_*.csv, plots/loss_curves.html and plots/loss_curves.png. With
a log or a folder of these among them, all are drawn together, in plots/ next to the first. Without a PATH it takes
LOG_DIR, or else the run of the settings. What cannot be read is reported, and the rest is drawn. Exit codes: 0 all drawn,
64 invalid settings or arguments, 78 a run, log or output that cannot be read or written, or no run.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.figure import DPI, PAPER_DPI, write_figure
from analysis.logs.check import check_run
from analysis.logs.dialect import DialectError
from analysis.page.build import write_page
from analysis.read_inputs import Inputs, find_paths, is_record, make_unique
from analysis.runs import Run, keep_numbered
from analysis.tables import write_tables
from record.durable import make_printable
from record.exit_codes import BAD_DATA, BAD_SETTING, DONE, INTERRUPTED
from record.run_paths import RunPaths
from settings import ROOT, SettingsError, explain_error, load_config
from settings.terminal import complain

PAGE, FIGURE = "loss_curves.html", "loss_curves.png"
ENDINGS = (".html", ".png", ".pdf", ".svg")


def main(argv: Sequence[str]) -> int:
    """Draw what the arguments or the settings name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.plots", allow_abbrev=False)
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="a run folder, the name of a run, or a log")
    add("--output", type=parse_output, help="a folder, or a page or figure, for all together")
    add("--check", action="store_true", help="check logs for inconsistent values; draw nothing")
    try:
        arguments = parser.parse_args(argv)
        paths = list_paths(arguments.paths)
        inputs = Inputs(paths)
    except SystemExit as stop:  # argparse has said what is wrong, and its own code for that is 2
        return BAD_SETTING if stop.code else DONE
    except (SettingsError, DialectError) as error:
        complain(explain_error(error))
        return error.exit_code
    runs = inputs.runs
    lines = inputs.lines
    problems = inputs.problems
    if not runs and not problems:
        problems.append(
            f"no training step was found in {', '.join(map(str, paths))}. docs/logs.md lists the "
            "trainers whose logs can be read, and shows how to add one"
        )
    others = [path for path in paths if path.exists() and not is_record(path)]
    if arguments.check:
        lines += [f"{run.name}: {sentence}" for run in runs for sentence in check_run(run)]
    elif others:
        folder = others[0] if others[0].is_dir() else others[0].parent
        output = arguments.output or folder / "plots"
        lines += write_outputs(runs, output, output.parent if output.suffix else output, problems)
    else:
        for run in runs:
            folder = run.folder or Path()
            lines += write_outputs([run], folder / "plots", folder, problems)
        if arguments.output:
            lines += write_outputs(runs, arguments.output, None, problems)
    report(lines, problems)
    return BAD_DATA if problems else DONE


def parse_output(name: str) -> Path:
    """Return the path of a folder, a page or a figure. Raises ArgumentTypeError for another ending."""
    path = Path(name)
    if path.suffix and not path.is_dir() and path.suffix.lower() not in ENDINGS:
        raise argparse.ArgumentTypeError(
            f"{name}: the name of a page or figure must end in {', '.join(ENDINGS)}; for example: "
            f"{path.with_suffix('.html')}"
        )
    return path


def list_paths(names: Sequence[str]) -> list[Path]:
    """Return what to read; without a name LOG_DIR, or the run of the settings. Raises SettingsError."""
    if names and all(Path(name).exists() for name in names):
        return [Path(name) for name in names]  # whatever the settings are
    config = load_config()
    paths = []
    for name in names:
        paths += find_paths(name, ROOT / config.runs_dir) or [Path(name)]
    if not paths:
        paths = [
            ROOT / config.log_dir if config.log_dir else RunPaths.of_node(config, ROOT).metrics
        ]
    return paths


def write_outputs(
    runs: Sequence[Run], output: Path, tables: Path | None, problems: list[str]
) -> list[str]:
    """Write tables, if a folder is given for them, and a page, a figure, or both into a folder; return their paths.

    A figure alone is for print. What cannot be written is added to the problems.
    """
    lines = []
    numbered = [run for run in map(keep_numbered, runs) if run.steps]
    stems: set[str] = set()
    try:
        for run in runs:
            if tables:
                stem = make_unique(f"training_{run.stamp}", stems)
                lines += [f"{path}  {run.name}" for path in write_tables(run, tables, stem)]
        if not runs:
            return []
        if not numbered:
            problems.append(f"{output} was not drawn: no run has numbered steps")
        elif output.suffix.lower() == ".html":
            write_page(output, numbered)
            lines.append(str(output))
        elif output.suffix and not output.is_dir():
            write_figure(output, numbered, PAPER_DPI)
            lines.append(str(output))
        else:
            write_figure(output / FIGURE, numbered, DPI)
            write_page(output / PAGE, numbered, (output / FIGURE).read_bytes())
            lines += [str(output / FIGURE), str(output / PAGE)]
    except OSError as error:
        problems.append(
            f"{error.filename or output} cannot be written ({error.strerror}): make its folder "
            "writable, free its disk, or name another place with --output"
        )
    return lines


def report(lines: Sequence[str], problems: Sequence[str]) -> None:
    """Print what was done, and what could not be."""
    working_folder = f"{Path.cwd()}/"
    try:
        sys.stdout.writelines(
            f"{make_printable(line.removeprefix(working_folder))}\n" for line in lines
        )
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for problem in problems:
        complain(make_printable(problem))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
