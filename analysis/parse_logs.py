"""Any training log to CSV and curves: `python -m analysis.parse_logs PATH... [--log-dir DIR]`.

    --csv          training_YYYYMMDD_HHMMSS.csv of every run beside the output, and its evaluations in a second file
    --static       a PNG instead of the page
    --output FILE  the page or picture, or a folder for it; default: loss_curves.html in DIR, or beside the first PATH
    --check        what each log implies of itself; writes nothing unless another of these is given

A PATH is a log, packed by gzip or not, a trainer_state.json, a run folder of this repository, or a folder that holds
such; folders in folders are looked into, and what links lead to twice is read once. Trainers are declared in
analysis/logs/dialects (docs/logs.md). Exit codes: 0 at least one run was found, 64 bad arguments, 78 no run was found, none
that can be drawn, or something could not be read or written.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from analysis.curves import not_finite_words
from analysis.energy.energy import with_energy
from analysis.load import RecordError, Run, load
from analysis.logs import log_check
from analysis.logs.attempts import LoggedRun
from analysis.logs.dialect import Dialect, DialectError, read_dialects
from analysis.logs.log_runs import Log, drawn, read_log, state
from analysis.logs.log_tables import write_log_tables
from analysis.prices import prices
from analysis.tables import write_tables
from record.run_paths import RunPaths

DONE, BAD_SETTING, BAD_DATA = 0, 64, 78
LOGS = (".log", ".txt", ".out", ".err")
PAGE, PICTURE = "loss_curves.html", "loss_curves.png"
PAGE_ENDS, PICTURE_ENDS = (".html", ".htm"), (".png",)


@dataclasses.dataclass
class Found:
    """The runs of all paths, and what went wrong."""

    runs: list[tuple[Run, LoggedRun | None]] = dataclasses.field(default_factory=list)
    troubles: list[str] = dataclasses.field(default_factory=list)
    seen: set[Path] = dataclasses.field(
        default_factory=set
    )  # a link may lead to what was read already


def main(argv: Sequence[str]) -> int:
    try:
        given = parser().parse_args(argv)
        if not given.paths and not given.log_dir:
            parser().error(
                "name a log, a folder of logs or a run folder; for example: runs/tiny, or --log-dir logs"
            )
        ends = PICTURE_ENDS if given.static else PAGE_ENDS
        if given.output and not given.output.is_dir() and given.output.suffix.lower() not in ends:
            parser().error(
                f"--output {given.output}: the name of a {'picture' if given.static else 'page'} ends in "
                f"{' or '.join(ends)}; for example: {given.output.with_suffix(ends[0])}"
            )
    except SystemExit as stop:
        return BAD_SETTING if stop.code else DONE
    paths = [*given.paths, *([given.log_dir] if given.log_dir else [])]
    first = given.log_dir or (paths[0] if paths[0].is_dir() else paths[0].parent)
    name = PICTURE if given.static else PAGE
    output = given.output or first / name
    if given.output and output.is_dir():
        output /= name
    return parse(
        paths,
        output.parent,
        csv=given.csv,
        check=given.check,
        page=output if not given.static and (given.output or not given.check) else None,
        picture=output if given.static else None,
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m analysis.parse_logs",
        allow_abbrev=False,
        description="Training logs of many trainers to CSV, a page or a picture.",
    )
    made.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="a log, a run folder, or a folder of such",
    )
    made.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="a folder of logs and runs; output goes there"
    )
    made.add_argument(
        "--csv", action="store_true", help="write a CSV of every run beside the output"
    )
    made.add_argument("--static", action="store_true", help="draw a PNG instead of the page")
    made.add_argument(
        "--output", type=Path, metavar="FILE", help=f"the page or picture; default: {PAGE} in DIR"
    )
    made.add_argument("--check", action="store_true", help="verify what each log implies of itself")
    return made


def parse(
    paths: Sequence[Path],
    folder: Path,
    *,
    csv: bool,
    check: bool,
    page: Path | None,
    picture: Path | None,
    dpi: int = 300,
) -> int:
    """Read all paths, say what was found and write what is asked for; returns the exit code."""
    found = Found()
    try:
        dialects = read_dialects()
    except DialectError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_SETTING
    for path in paths:
        for file in logs_in(path, found):
            read_one(file, folder, dialects, check, found)
    if not found.runs:
        found.troubles.append(
            f"no training step was found in {', '.join(map(str, paths))}: docs/logs.md lists the "
            "trainers that are known, and how to add one"
        )
    number_equal_stamps(found.runs)
    try:
        if found.runs:
            folder.mkdir(parents=True, exist_ok=True)
        if csv:
            for run, logged in found.runs:
                files = write_log_tables(run, logged) if logged else write_tables(run)
                say(f"{files[0]}  {run.name}\n")
        runs = [run for run, _ in found.runs if len(run.columns["step"])]
        if found.runs and not runs and (page or picture):
            found.troubles.append(
                f"{page or picture} was not drawn: no run has numbered steps; --csv writes the rest"
            )
        if runs and page:
            from analysis.page.build import write_page

            say(f"{write_page(page, runs, names_apart(runs))}\n")
        if runs and picture:
            from analysis.picture import write_picture

            say(f"{write_picture(picture, runs, names_apart(runs), dpi)}\n")
    except OSError as error:
        found.troubles.append(
            f"{error.filename or folder} cannot be written ({error.strerror}): name another place "
            "with --output FILE"
        )
    sys.stderr.write("".join(f"{trouble}\n" for trouble in found.troubles))
    return BAD_DATA if found.troubles else DONE


def logs_in(path: Path, found: Found) -> Iterator[Path]:
    """The logs and run folders of a path, each once; a folder that cannot be read is a trouble.

    A run folder is one thing: its train.log says the same as its record.
    """
    try:
        real = path.resolve()
        if path.name == "metrics.jsonl":
            real = real.parent
        if real in found.seen:
            return
        found.seen.add(real)
        inside = (
            None
            if not path.is_dir() or (path / "metrics.jsonl").is_file()
            else list(path.iterdir())
        )
        names = (
            []
            if inside is None
            else sorted(
                (place.is_symlink(), place.name) for place in inside if is_folder_or_log(place)
            )
        )
    except (
        OSError,
        RuntimeError,
    ) as error:  # before Python 3.13 a link to itself is a RuntimeError
        found.troubles.append(unreadable(path, error))
        return
    if inside is None:
        yield path
    for _, name in names:
        yield from logs_in(path / name, found)


def is_folder_or_log(path: Path) -> bool:
    if path.is_dir():
        return not path.name.startswith(".")
    return path.name.removesuffix(".gz").endswith((*LOGS, "trainer_state.json")) and path.is_file()


def unreadable(path: Path, error: Exception) -> str:
    said = getattr(error, "strerror", None) or error
    return f"{path} cannot be read ({said}): name a log, a run folder or a folder of such"


def say(text: str) -> None:
    """Write to the terminal. Where nobody reads on, as behind `| head`, the files are written all the same."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_one(
    path: Path, folder: Path, dialects: Sequence[Dialect], check: bool, found: Found
) -> None:
    """Read a file or a run folder, and say what is in it."""
    try:
        if (path / "metrics.jsonl").is_file() or path.name == "metrics.jsonl":
            run = with_energy(load(path if path.is_dir() else path.parent), prices())
            found.runs.append((dataclasses.replace(run, paths=RunPaths(folder)), None))
            say(f"{path}: a run of this repository, {len(run.columns['step']):,} steps\n")
            if check:
                say("".join(f"    {line}\n" for line in log_check.record_checks(run)))
            return
        log = read_log(path, dialects)
        mtime = path.stat().st_mtime
    except RecordError as error:
        found.troubles.append(str(error))
        return
    except OSError as error:
        found.troubles.append(unreadable(path, error))
        return
    say(
        f"{path}: "
        + (f"{len(log.runs)} run{'s' * (len(log.runs) > 1)}" if log.runs else without_steps(log))
        + "\n"
    )
    for run_, name in zip(log.runs, log.names, strict=True):
        say("".join(f"  {line}\n" for line in described(run_, name)))
        if check:
            say("".join(f"    {line}\n" for line in log_check.checks(run_)))
        found.runs.append((drawn(run_, name, folder, mtime), run_))
    for loss_is in dict.fromkeys(run_.dialect.loss_is for run_ in log.runs if run_.dialect.loss_is):
        say(f"  the loss is {loss_is}: it is not smoothed again\n")
    if any(run_.started is None for run_ in log.runs):
        say("  without a clock: CSVs are named by the time at which the log was last written\n")
    if log.not_understood:
        say(f"  {log.not_understood:,} lines that look like steps were not understood\n")
    say("".join(f"  {note}\n" for note in log.notes))


def without_steps(log: Log) -> str:
    return "without steps" + (f"; its last error: {log.error}" if log.error else "")


def described(run: LoggedRun, name: str) -> Iterator[str]:
    """A run in a line, and what a reader of its numbers must know below it."""
    step = run.columns["step"]
    evals = len(next(iter(run.evals.values()), ()))
    yield (
        f"{name}: {run.dialect.name}, {len(step):,} step lines"
        + (f", {evals} evaluations" if evals else "")
        + f"; {state(run)}"
    )
    for back in run.backs:
        yield (
            f"  went back from step {back.reached:,} to {back.to:,}: {back.rows:,} step lines lost, the last "
            "attempt is kept"
        )
    if words := not_finite_words(~np.isfinite(run.columns.get("loss", step * 0)), step):
        yield f"  {words}"
    if run.repeats:
        yield f"  {run.repeats:,} lines were there twice"
    if run.error:
        yield f"  behind its last step: {run.error}"
    if run.outside:
        yield f"  behind its end, outside of any run, the last error: {run.outside}"


def names_apart(runs: Sequence[Run]) -> list[str]:
    """Names that differ: equal ones get a number."""
    names: list[str] = []
    for run in runs:
        name, count = run.name, 1
        while name in names:
            count += 1
            name = f"{run.name} ({count})"
        names.append(name)
    return names


def number_equal_stamps(runs: list[tuple[Run, LoggedRun | None]]) -> None:
    """Give runs that began in the same second names of their own."""
    seen: dict[str, int] = {}
    for i, (run, logged) in enumerate(runs):
        seen[run.stamp] = seen.get(run.stamp, 0) + 1
        runs[i] = dataclasses.replace(run, nth=seen[run.stamp]), logged


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
