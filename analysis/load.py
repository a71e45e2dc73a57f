"""A run's folder to numpy columns: metrics.jsonl, and the settings in config.json where it is there.

    records -> the last of each step -> one float column a key, NaN where the record is silent

Evaluations follow the same rule as steps: what a resume went back behind was done again, and only the last
is kept; one that failed does not displace one that did not. Training time is the sum of the kept steps'
step_ms, so it leaves out evaluations, saving, waiting between attempts, and work that was lost.
Steps are read one by one into columns: in memory a number takes eight bytes, and the timeline of goodput about 200 a step.
"""

import dataclasses
import datetime
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.prices import Prices
from analysis.record_blocks import Block, parts_of
from record.durable import read_object
from record.goodput import Claim, Goodput, Timeline
from record.metrics import GOES_BACK, STEP_KEYS
from record.run_paths import RunPaths
from settings import ROOT
from settings.config import SETTINGS, Config

COMMON = ("step", "tokens", "time")


class RecordError(Exception):
    """A run that cannot be read. The message names the path and says what to do."""


@dataclasses.dataclass
class Cause:
    """seconds: of the run; gpu_s: of all its GPUs; covered_s: what samples cover of these; joules: in that part."""

    seconds: float = 0.0
    gpu_s: float = 0.0
    covered_s: float = 0.0
    joules: float = 0.0

    def __add__(self, other: "Cause") -> "Cause":
        return Cause(
            self.seconds + other.seconds,
            self.gpu_s + other.gpu_s,
            self.covered_s + other.covered_s,
            self.joules + other.joules,
        )

    @property
    def mean_w(self) -> float:
        """Of a GPU, while it was covered; NaN where nothing was."""
        return self.joules / self.covered_s if self.covered_s else math.nan


@dataclasses.dataclass(frozen=True)
class Energy:
    """causes: category, and UNSPLIT where there is any -> what it took; total is their sum. steps: GPU -> joules of
    each step of the run, NaN where it is not covered; energy_j, power_w: of all GPUs; step_s: seconds. power_j: of the
    total, by power and not by the counter. disagreement: GPU -> (joules by the counter, by power) of the time that both
    cover."""

    causes: dict[str, Cause]
    total: Cause
    energy_j: np.ndarray
    power_w: np.ndarray
    step_s: np.ndarray
    steps: dict[str, np.ndarray]
    power_j: float
    disagreement: dict[str, tuple[float, float]]
    prices: Prices
    remarks: list[str]

    @property
    def kwh(self) -> float:
        return self.total.joules / 3.6e6

    @property
    def cost(self) -> float | None:
        return self.prices.cost(self.total.joules, self.total.gpu_s)

    @property
    def coverage(self) -> float:
        """The fraction of the GPUs' time that samples cover; 0 of no time at all."""
        return min(1.0, self.total.covered_s / self.total.gpu_s) if self.total.gpu_s else 0.0

    @property
    def per_cent(self) -> float | None:
        """By how much integrated power is above the counter; None where they cannot be compared."""
        counted, integrated = (sum(pair[i] for pair in self.disagreement.values()) for i in (0, 1))
        return 100 * (integrated / counted - 1) if counted else None


@dataclasses.dataclass(frozen=True)
class Sampled:
    """One value a stretch; the arrays are (BUCKETS,) float64. Network is None where nothing was recorded of it."""

    gpus: int
    time: np.ndarray  # Unix seconds, of the stretch's middle
    power_w: np.ndarray  # mean of a GPU
    power_low_w: np.ndarray
    power_high_w: np.ndarray
    energy_kwh: np.ndarray  # of all GPUs, up to the end of the stretch
    in_mb_s: np.ndarray | None
    out_mb_s: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Run:
    """The record of one run, ready to be written or drawn. The optional parts a log of another trainer may have."""

    name: str
    paths: RunPaths  # its folder; of a log, the one that its files are written to
    columns: Mapping[
        str, np.ndarray
    ]  # every key with numbers, and `minutes` and `lrm`; (n,) float64 each
    evals: Sequence[Mapping[str, Any]]  # by step; a subset's before the full one
    events: Sequence[
        Mapping[str, Any]
    ]  # every record that is neither step nor evaluation, as written
    started: float  # Unix seconds of the first start
    goodput: Goodput | None  # where the time from the first start to the last record went
    lost_steps: int  # steps that were taken and then gone back behind
    last_step: int | None  # where the settings say that the run is done
    state: str = ""  # complete or stopped, where a log and no record says so
    loss_is: str = ""  # where the loss is a mean already: of what
    silent: np.ndarray | None = None  # of a log: its lines that name no loss at all, (n,) bool
    nth: int = 1  # of runs that started in the same second, for their files' names
    timeline: Timeline = dataclasses.field(
        default_factory=Timeline
    )  # the same, and when; empty for a log
    energy: Energy | None = None  # where its GPUs were sampled, and that was joined
    sampled: Sampled | None = None  # the same as a curve

    def minutes_at(self, step: int) -> float:
        """Minutes of training behind the run when `step` was done; 0 before the first."""
        minutes = self.columns["minutes"]
        done = int(np.searchsorted(self.columns["step"], step, side="right"))
        while done and np.isnan(minutes[done - 1]):
            done -= 1
        return float(minutes[done - 1]) if done else 0.0

    @property
    def not_finite(self) -> np.ndarray:
        """(n,) bool: where a loss was recorded that is no finite number; our own record has null for that."""
        bad = ~np.isfinite(self.columns["loss"])
        return bad if self.silent is None else bad & ~self.silent

    @property
    def nan_word(self) -> str:
        """What the record has there, where no infinity is told from nan."""
        return "not finite" if self.silent is None else "nan"

    @property
    def stamp(self) -> str:
        """The first start as YYYYMMDD_HHMMSS in UTC, so that every machine names the files alike."""
        began = datetime.datetime.fromtimestamp(self.started, datetime.UTC).strftime(
            "%Y%m%d_%H%M%S"
        )
        return began + (f"_{self.nth}" if self.nth > 1 else "")


class Steps:
    """The step records as columns, without those that were gone back behind; of a step that came twice the last."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {key: array("d") for key in (*COMMON, *STEP_KEYS)}
        self.count = self.taken = 0  # that the run has; that were recorded

    def add(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        self.go_back(step - 1)
        columns, told = self.columns, 0
        for key, value in record.items():
            if type(value) is float or type(value) is int:
                if key not in columns:
                    columns[key] = array("d", [math.nan]) * self.count
                columns[key].append(value)
                told += 1
        self.count += 1
        self.taken += 1
        if told < len(columns):
            for column in columns.values():
                if len(column) < self.count:
                    column.append(math.nan)

    def add_block(self, block: Block) -> None:
        """Steps that count up."""
        self.go_back(int(block.columns["step"][0]) - 1)
        more = len(block.lines)
        for key, values in block.columns.items():
            if key not in self.columns:
                self.columns[key] = array("d", [math.nan]) * self.count
            self.columns[key].frombytes(values.tobytes())
        self.count += more
        self.taken += more
        for column in self.columns.values():
            if len(column) < self.count:
                column.extend(array("d", [math.nan]) * more)

    def go_back(self, step: int) -> None:
        """What the run has past this step is lost."""
        numbers = self.columns["step"]
        while self.count and numbers[-1] > step:
            self.count -= 1
            for column in self.columns.values():
                column.pop()

    def arrays(self) -> dict[str, np.ndarray]:
        """(n,) float64 each; NaN where a record is silent. Whole numbers are exact below 2^53."""
        return {
            key: np.frombuffer(column, np.float64).copy() for key, column in self.columns.items()
        }


def load(folder: Path) -> Run:
    """The run in `folder`. Raises RecordError where there is no record, or a broken one, or no step in it."""
    paths = RunPaths(folder)
    timeline = Timeline()
    steps, others = Steps(), list[dict[str, Any]]()
    started = None
    for record in records_of(paths, steps, timeline):
        timeline.add(record)
        if started is None:
            started = record["time"]
        if record["event"] == "step":
            steps.add(record)
        else:
            others.append(record)
            if record["event"] in GOES_BACK:
                steps.go_back(record["step"])
    if not steps.count or started is None:
        raise RecordError(
            f"{paths.metrics} holds no step yet: call `make plots` again after the first"
        )
    config = stored_config(paths.config)
    columns = steps.arrays()
    took = columns[
        "step_ms"
    ]  # where it is silent the time is unknown, but not that of all later steps
    columns["minutes"] = np.where(np.isnan(took), np.nan, np.nancumsum(took) / 60_000)
    columns["lrm"] = columns["lr"] / peak_rate(config, columns["lr"])
    return Run(
        name=paths.name,
        paths=paths,
        columns=columns,
        evals=last_of_each_eval(others),
        events=[r for r in others if r["event"] != "eval"],
        started=next((r["time"] for r in others if r["event"] == "start"), started),
        goodput=timeline.totals(),
        lost_steps=steps.taken - steps.count,
        last_step=config.last_step if config else None,
        timeline=timeline,
    )


def records_of(paths: RunPaths, steps: Steps, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Every record of the run that is not booked, with its steps, as a part of a block."""
    path = paths.metrics
    try:
        for part in parts_of(path):
            if isinstance(part, Block) and booked(part, timeline):
                steps.add_block(part)
                continue
            yield from part.records() if isinstance(part, Block) else (part,)
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist: {advice(paths)}") from None
    except OSError as error:
        raise RecordError(
            f"{path} cannot be read ({error.strerror}): make it a readable file"
        ) from None
    except ValueError as error:
        raise RecordError(
            f"{error}: restore it from a copy, or use the version that wrote it"
        ) from None


def booked(block: Block, timeline: Timeline) -> bool:
    """Add these steps to the timeline at once. False, and none is added, where they must be added one by one: as they
    are of another attempt, go back, or claim more time than has passed."""

    def of(key: str) -> np.ndarray:
        values = block.columns.get(key, np.zeros(len(block.lines)))
        return np.where(values > 0, values, 0.0)  # as goodput.number has it

    steps, ends = block.columns["step"].astype(np.int64), block.columns["mono_s"]
    if timeline.begins_attempt(block.last):
        return False
    attempt, place = timeline.attempts[-1], len(timeline.attempts) - 1
    if not attempt.is_monotonic or ends[0] <= attempt.end:
        return False
    if steps[0] <= timeline.last_step:
        return False
    took, stalls = of("step_ms") / 1000, of("checkpoint_stall_s")
    waited = np.minimum(took, of("data_wait_s"))
    unclaimed = timeline.unclaimed + np.cumsum(np.diff(ends, prepend=attempt.end) - took - stalls)
    if unclaimed.min() < 0:
        return False
    columns = (steps, ends, stalls, waited, took - waited)
    for step, end, *seconds in zip(*(column.tolist() for column in columns), strict=True):
        for category, claimed in zip(("checkpoint", "data_wait", "training"), seconds, strict=True):
            if claimed or category == "training":
                timeline.claims.append(Claim(place, end, claimed, category, step))
    timeline.last_step = int(steps[-1])
    timeline.unclaimed = float(unclaimed[-1])
    attempt.end = float(ends[-1])
    timeline.note(block.last)
    return True


def advice(paths: RunPaths) -> str:
    """What to do where a run has no record: the runs beside it that have one, or how to make one."""
    parent = paths.folder.parent
    names = sorted(p.parent.name for p in parent.glob("*/metrics.jsonl"))
    if names:
        return f"choose another run; in {parent} there is a record of {', '.join(names[:8])}"
    return f"train it first, for example with `make train RUN_NAME={paths.name}`"


def stored_config(path: Path) -> Config | None:
    """The settings that the run was started with; None without a config.json.

    A setting that this version does not know is left out; one that the file does not know has its default.
    """
    try:
        stored = read_object(path)["settings"]
        return Config(**{name.lower(): stored[name] for name in SETTINGS if name in stored})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path} does not hold the settings of a run ({type(error).__name__}: {error}): "
            "restore it from a copy, or move it away, and the highest learning rate seen "
            "counts as the peak"
        ) from None


def peak_rate(config: Config | None, rates: np.ndarray) -> float:
    """The run's highest learning rate: the setting, or without settings the highest that was used."""
    if config:
        return config.learning_rate
    known = rates[np.isfinite(rates)]
    return float(known.max()) if known.size and known.max() > 0 else float("nan")


def last_of_each_eval(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Evaluations by step, without those that a resume went back behind; a step can have one of each set. What one
    step's records say of different things, validation loss and CORE, is put together."""
    kept: dict[tuple[int, bool], Mapping[str, Any]] = {}
    for record in records:
        if record["event"] == "eval":
            key = (record["step"], bool(record.get("full")))
            before = kept.get(key, {})
            if "val_loss" not in before or record.get("val_loss") is not None or "core" in record:
                kept[key] = {**before, **record}
        elif record["event"] in GOES_BACK:
            kept = {key: r for key, r in kept.items() if key[0] <= record["step"]}
    return [kept[key] for key in sorted(kept)]


def run_folders(given: Sequence[str], runs_dir: str | None) -> list[Path]:
    """The folders to draw, each once. Raises SettingsError where none is given and the settings are bad."""
    if given:
        parent = Path(runs_dir or "")
        found = (Path(name) if Path(name).is_dir() else parent / name for name in given)
        return list(dict.fromkeys(path.absolute() for path in found))
    config = Config.load()
    chosen = str(Path(runs_dir).absolute()) if runs_dir else config.runs_dir
    return [RunPaths.of_node(config.replace(runs_dir=chosen), ROOT).folder]


def shown(path: Path) -> str:
    """The path from the current folder where it lies below it."""
    here, there = Path(os.path.abspath(os.curdir)), path.absolute()
    return str(there.relative_to(here)) if there.is_relative_to(here) else str(there)
