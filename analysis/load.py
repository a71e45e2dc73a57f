"""A run's folder to numpy columns: metrics.jsonl, and the settings in config.json where it is there.

    records -> the last of each step -> one float column a key, NaN where the record is silent

Evaluations follow the same rule as steps: what a resume went back behind was done again, and only the last
is kept; one that failed does not displace one that did not. Training time is the sum of the kept steps'
step_ms, so it leaves out evaluations, saving, waiting between attempts, and work that was lost.
The whole record is held in memory, about 1 KiB a step.
"""

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.config import Config
from train.goodput import Goodput, account
from train.record import GOES_BACK, STEP_UNITS, last_of_each_step, read
from train.runs import RunPaths
from train.settings import declared_fields

COMMON = ("step", "tokens", "time")
PLACED = ("step", "eval", *GOES_BACK)  # meaningless without a step


class RecordError(Exception):
    """A run that cannot be read. The message names the path and says what to do."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The record of one run, ready to be written or drawn."""

    paths: RunPaths
    columns: Mapping[str, np.ndarray]    # every key with numbers, and `minutes` and `lrm`; (n,) float64 each
    evals: Sequence[Mapping[str, Any]]   # by step; a subset's before the full one
    events: Sequence[Mapping[str, Any]]  # every record that is neither step nor evaluation, as written
    started: float                       # Unix seconds of the first start
    goodput: Goodput                     # where the time from the first start to the last record went
    lost_steps: int                      # steps that were taken and then gone back behind
    last_step: int | None                # where the settings say that the run is done

    @property
    def name(self) -> str:
        return self.paths.name

    def minutes_at(self, step: int) -> float:
        """Minutes of training behind the run when `step` was done; 0 before the first."""
        minutes = self.columns["minutes"]
        done = int(np.searchsorted(self.columns["step"], step, side="right"))
        while done and np.isnan(minutes[done - 1]):
            done -= 1
        return float(minutes[done - 1]) if done else 0.0

    @property
    def stamp(self) -> str:
        """The first start as YYYYMMDD_HHMMSS in UTC, so that every machine names the files alike."""
        return datetime.datetime.fromtimestamp(self.started, datetime.UTC).strftime("%Y%m%d_%H%M%S")


def load(folder: Path) -> Run:
    """The run in `folder`. Raises RecordError where there is no record, or a broken one, or no step in it."""
    paths = RunPaths(folder)
    records = read_all(paths)
    steps = last_of_each_step(records)
    if not steps:
        raise RecordError(f"{paths.metrics} holds no step yet: call `make plots` again after the first")
    config = stored_config(paths.config)
    columns = {key: column(steps, key) for key in numeric_keys(steps)}
    took = columns["step_ms"]  # where it is silent the time is unknown, but not that of all later steps
    columns["minutes"] = np.where(np.isnan(took), np.nan, np.nancumsum(took) / 60_000)
    columns["lrm"] = columns["lr"] / peak_rate(config, columns["lr"])
    return Run(paths=paths, columns=columns, evals=last_of_each_eval(records),
               events=[r for r in records if r["event"] not in ("step", "eval")],
               started=next((r["time"] for r in records if r["event"] == "start"), records[0]["time"]),
               goodput=account(records),
               lost_steps=sum(r["event"] == "step" for r in records) - len(steps),
               last_step=config.last_step if config else None)


def read_all(paths: RunPaths) -> list[dict[str, Any]]:
    """Every record of the run, each known to have the keys that readers rely on."""
    path = paths.metrics
    try:
        records = list(read(path))
        for record in records:
            needed = ("event", "time", "step") if record.get("event") in PLACED else ("event", "time")
            if missing := [key for key in needed if key not in record]:
                raise ValueError(f"{path} has a record without {missing[0]!r}: {json.dumps(record)[:60]}")
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist: {advice(paths)}") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): make it a readable file") from None
    except ValueError as error:
        raise RecordError(f"{error}: restore it from a copy, or use the version that wrote it") from None
    return records


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
        stored = json.loads(path.read_text(encoding="utf-8"))["settings"]
        return Config(**{field.name: stored[name] for name, field in declared_fields(Config).items()
                         if name in stored})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} does not hold the settings of a run ({type(error).__name__}: {error}): "
                          "restore it from a copy, or move it away, and the highest learning rate seen "
                          "counts as the peak") from None


def numeric_keys(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of STEP_UNITS, silent or not, and whatever else holds a number in any record."""
    keys = dict.fromkeys((*COMMON, *STEP_UNITS))
    for record in records:
        keys.update((key, None) for key, value in record.items() if is_number(value))
    return list(keys)


def column(records: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """(n,) float64 of the key's values; NaN where a record has none. Whole numbers are exact below 2^53."""
    values: Iterable[Any] = (record.get(key) for record in records)
    return np.array([float(value) if is_number(value) else np.nan for value in values], dtype=np.float64)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def peak_rate(config: Config | None, rates: np.ndarray) -> float:
    """The run's highest learning rate: the setting, or without settings the highest that was used."""
    if config:
        return config.learning_rate
    known = rates[np.isfinite(rates)]
    return float(known.max()) if known.size and known.max() > 0 else float("nan")


def last_of_each_eval(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Evaluations by step, without those that a resume went back behind; a step can have one of each set."""
    kept: dict[tuple[int, bool], Mapping[str, Any]] = {}
    for record in records:
        if record["event"] == "eval":
            key = (record["step"], bool(record.get("full")))
            if key not in kept or record.get("val_loss") is not None:
                kept[key] = record
        elif record["event"] in GOES_BACK:
            kept = {key: r for key, r in kept.items() if key[0] <= record["step"]}
    return [kept[key] for key in sorted(kept)]
