"""A run as numbers: what `make plots`, `make compare`, `make energy` and model cards read.

    metrics.jsonl, config.json -> read_run() -> Run
    a log of any trainer       -> analysis/logs -> Run

A column has one float64 per step, and NaN where nothing was said. Of a step that was taken again after a resume, the
last attempt counts; so does the last evaluation of a step, and one that failed does not replace one that did not.
Training time is the sum of the step times, without evaluations, saving, waiting between attempts and lost work.
"""

import datetime
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hardware.model_size import parameters
from record.exit_codes import BAD_DATA
from record.goodput import Timeline
from record.metrics import GOES_BACK, STEP_KEYS, Record, RecordReader
from record.run_paths import RunPaths
from record.status import suggest
from settings.config import SETTINGS, Config, build_config
from settings.json_file import read_object
from settings.resolve import name_run

if TYPE_CHECKING:  # analysis.energy reads runs
    from analysis.energy.result import Energy

# Columns that every run has, if only with NaN. `minutes` is training time, `lrm` the learning rate over its peak.
COLUMNS = ("step", "tokens", "time", "minutes", "lrm", *STEP_KEYS)


class RunError(Exception):
    """A run that cannot be read. The message names the file and says what to do."""

    exit_code = BAD_DATA


@dataclass(frozen=True)
class Run:
    """One run, of this repository or from a log.

    Attributes:
        name: as shown; folder names and log names.
        columns: name -> (n,) float64, NaN where nothing was said; at least COLUMNS.
        not_finite: column -> (n,) bool, where a number was recorded that is NaN or infinite.
            Columns without one are missing.
        evals: evaluations by step; one of a subset before the full one of the same step.
        events: all other records, as written.
        started: Unix seconds of the first start.
        folder: with metrics.jsonl and GPU samples; None for a log.
        last_step: of the whole training; None if unknown.
        log_stamp: YYYYMMDD_HHMMSS in the name of a log; "" without one.
        loss_is: what the recorded loss is a mean of; "" for the loss of the step itself.
        state: complete or stopped, in words, if a log says so; "" for a record.
        settings: as the run was started last; empty if unknown.
        attempts: machine, versions and commit of each attempt, as config.json has them.
        timeline: when the run did what, and where its time went; None for a log.
        energy: of its GPUs; None if they were not sampled.
        samples: of its GPUs: time in Unix seconds, and what was sampled around it (energy/downsample.py).
        remarks: what a reader of these numbers must know, in sentences.
    """

    name: str
    columns: Mapping[str, np.ndarray]
    evals: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    started: float
    not_finite: Mapping[str, np.ndarray] = field(default_factory=dict)
    folder: Path | None = None
    last_step: int | None = None
    log_stamp: str = ""
    loss_is: str = ""
    state: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    attempts: Sequence[Mapping[str, Any]] = ()
    timeline: Timeline | None = None
    energy: "Energy | None" = None
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)
    remarks: Sequence[str] = ()

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return len(self.columns["step"])

    def is_not_finite(self, column: str) -> np.ndarray:
        """Return (n,) bool: the steps where a column has a number that is NaN or infinite."""
        return self.not_finite.get(column, np.zeros(self.steps, bool))

    @property
    def stamp(self) -> str:
        """That of the log, or the first start as YYYYMMDD_HHMMSS in UTC, so that every machine names files alike."""
        start = datetime.datetime.fromtimestamp(int(self.started), datetime.UTC)
        return self.log_stamp or start.strftime("%Y%m%d_%H%M%S")


class ColumnBuilder:
    """ColumnBuilder by row and name, 16 bytes each, as they are read.

    Attributes:
        by_name: name -> the rows that name it, and what they say.
    """

    def __init__(self) -> None:
        self.by_name = defaultdict[str, tuple[Any, Any]](lambda: (array("q"), array("d")))

    def add(self, row: int, values: Mapping[str, Any]) -> None:
        """Add what a row says; only its numbers."""
        for name, value in values.items():
            if is_number(value):
                rows, numbers = self.by_name[name]
                rows.append(row)
                numbers.append(value)

    def to_columns(self, size: int, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return (size,) float64 for these names and all that were read, NaN where nothing was said."""
        columns = {name: np.full(size, np.nan) for name in (*self.by_name, *names)}
        for name, (rows, numbers) in self.by_name.items():
            columns[name][rows] = numbers
        return columns


def is_number(value: Any) -> bool:
    """Return whether a value is a number. A bool is none."""
    return type(value) in (int, float)


def read_run(folder: Path) -> Run:
    """Return the run in a folder. Raises RunError without a record, or with one that has no step."""
    paths = RunPaths(folder)
    if not paths.metrics.exists():
        raise RunError(
            f"There is no run {paths.name} in {folder.parent}: {paths.metrics} does not exist. "
            f"{suggest(paths)}`make runs` lists the runs, and `make train {name_run(folder)}` trains this one"
        )
    reader = RecordReader(paths.metrics)
    timeline = Timeline()
    numbers = ColumnBuilder()
    n_steps = 0
    rows: dict[int, int] = {}  # step -> its last row
    events: list[Record] = []
    try:
        for record in reader.read_all():
            timeline.add(record)
            if record["event"] == "step":
                rows[record["step"]] = n_steps
                numbers.add(n_steps, record)
                n_steps += 1
            else:
                events.append(record)
    except OSError as error:
        raise RunError(
            f"{paths.metrics} cannot be read ({error.strerror}): make it a readable file"
        ) from None
    counted = [rows[claim.step] for claim in timeline.steps()]
    if not counted:
        cause = "the run has not taken its first step; try again later"
        if reader.first_damage:
            cause = f"{reader.first_damage}; restore the file from a copy"
        raise RunError(f"{paths.metrics} has no step: {cause}")

    columns = numbers.to_columns(n_steps, ("step", "tokens", "time", *STEP_KEYS))
    columns = {name: column[counted] for name, column in columns.items()}
    config, attempts = read_config(paths.config)
    step_ms = columns["step_ms"]
    columns["minutes"] = np.where(np.isnan(step_ms), np.nan, np.nancumsum(step_ms) / 60_000)
    peak_rate = config.learning_rate if config else find_highest(columns["lr"])
    columns["lrm"] = columns["lr"] / peak_rate
    starts = (record["time"] for record in events if record["event"] == "start")
    not_finite = ~np.isfinite(columns["loss"])  # a record has null there
    remarks = []
    if reader.damaged_lines:
        remarks.append(
            f"{paths.metrics}: {reader.first_damage}. Damaged lines that are left out: "
            f"{reader.damaged_lines:,}"
        )
    return Run(
        name=paths.name,
        columns=columns,
        evals=find_last_evals(events),
        events=[record for record in events if record["event"] != "eval"],
        started=float(next(starts, columns["time"][0])),
        not_finite={"loss": not_finite} if not_finite.any() else {},
        folder=folder,
        last_step=config.last_step if config else None,
        settings=config.stored() if config else {},
        attempts=attempts,
        timeline=timeline,
        remarks=remarks,
    )


def keep_numbered(run: Run) -> Run:
    """Return a run without the steps that its log does not number: they have no place in a curve."""
    is_numbered = ~np.isnan(run.columns["step"])
    columns = {name: column[is_numbered] for name, column in run.columns.items()}
    not_finite = {name: mask[is_numbered] for name, mask in run.not_finite.items()}
    return replace(run, columns=columns, not_finite=not_finite)


def read_config(path: Path) -> tuple[Config | None, Sequence[Mapping[str, Any]]]:
    """Return the settings of a run and the facts of its attempts; None and () without a config.json.

    A setting that this version does not know is left out; one that the file does not have is its default.
    """
    try:
        stored = read_object(path)
        settings = stored["settings"]
        known = {name: settings[name] for name in SETTINGS if name in settings}
        attempts = [each for each in stored.get("attempts") or () if isinstance(each, dict)]
        config = build_config(known)
        parameters(config)  # or it is no model
        return config, attempts
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError) as error:
        raise RunError(
            f"{path} does not have the settings of a run ({type(error).__name__}: {error}). "
            "Restore it from a copy, or move it away: then the highest learning rate counts as the peak"
        ) from None


def find_highest(values: np.ndarray) -> float:
    """Return the highest value, such as the peak of a learning rate; NaN if none is above 0."""
    return float(np.fmax.reduce(values, initial=0.0)) or math.nan


def find_last_evals(records: Iterable[Record]) -> list[Record]:
    """Return the evaluations that count, by step: the last of each step and set, without those that the run went back
    past. What records of one step say of different things, validation loss and CORE, is put together."""
    last: dict[tuple[int, bool], Record] = {}
    for record in records:
        if record["event"] in GOES_BACK:
            last = {key: each for key, each in last.items() if key[0] <= record["step"]}
        if record["event"] != "eval":
            continue
        key = (record["step"], bool(record.get("full")))
        before = last.get(key, {})
        has_failed = record.get("val_loss") is None and "core" not in record
        if has_failed and "val_loss" in before:
            continue
        last[key] = before | record
    return [last[key] for key in sorted(last)]
