"""What `make plots` and `make compare` read: runs and logs, by name, pattern or path."""

import glob
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from analysis.energy.join import add_energy
from analysis.logs.runs import read_log
from analysis.runs import Run, RunError, read_run
from analysis.summary import list_remarks
from record.run_paths import RunPaths

LOGS = (".log", ".txt", ".out", ".err", "trainer_state.json")


def find_paths(name: str, runs_dir: Path) -> list[Path]:
    """Return the runs in `runs_dir`, or else the paths from the working folder, that a name or pattern leads to."""
    for path in (runs_dir / name, Path(name)):
        if path.exists():
            return [path]
        matches = map(Path, sorted(glob.glob(str(path))))
        inputs = [match for match in matches if match.is_file() or is_record(match)]
        if inputs:
            return inputs
    return []


def is_record(path: Path) -> bool:
    """Return whether a path is the record of a run, or its folder."""
    return path == RunPaths(path.parent).metrics or RunPaths(path).metrics.is_file()


class Inputs:
    """Runs that were read, and what there is to say of them.

    Attributes:
        runs: each with a name of its own.
        lines: what the logs have.
        empty: logs without a run.
        problems: what cannot be read, and what to do.
        known: real paths that were read already: links may lead there again.
        names: of the runs.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Read logs, records, run folders and folders of these. Raises DialectError."""
        self.runs: list[Run] = []
        self.lines: list[str] = []
        self.empty: list[Path] = []
        self.problems: list[str] = []
        self.known: set[str] = set()
        self.names: set[str] = set()
        for path in paths:
            self.read(path)

    def read(self, path: Path) -> None:
        """Read a log, a record, a run folder, or all of these in a folder, each once."""
        if is_record(path) and path.is_dir():
            path = RunPaths(path).metrics
        real = os.path.realpath(path)
        if real in self.known:
            return
        self.known.add(real)
        try:
            if is_record(path):
                self.add(add_energy(read_run(path.parent)))
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
                f"{path} cannot be read ({error.strerror}). Name a run, a log or a folder of these; "
                "`make runs` lists the runs"
            )

    def read_log(self, path: Path) -> None:
        """Read a log, and say what is in it."""
        log = read_log(path)
        self.lines.append(f"{path}, runs found: {len(log.runs)}")
        if not log.runs:
            self.empty.append(path)
        for run in log.runs:
            counts = f"{run.steps:,} step lines, {len(run.evals)} evaluations"
            self.lines += [f"  {run.name}: {counts}; {run.state}"]
            self.lines += [f"    {remark}" for remark in list_remarks(run)]
            self.add(run)
        self.lines += [f"  {note}" for note in log.notes]

    def add(self, run: Run) -> None:
        self.runs.append(replace(run, name=make_unique(run.name, self.names)))


def make_unique(name: str, names: set[str]) -> str:
    """Add a name to others and return it, with a number if it is taken."""
    unique = name
    count = 1
    while unique in names:
        count += 1
        unique = f"{name}_{count}"
    names.add(unique)
    return unique
