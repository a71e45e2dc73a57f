"""How far a run of this name has come, so that a plan counts what is left. Reads little, however long the run is.

it is being trained now    the last step of its record
it is not                  its newest checkpoint, from which the same command goes on; nothing is verified here
"""

import dataclasses
from pathlib import Path

from record import locks
from record.metrics import GOES_BACK, RecordReader
from record.run_paths import RunPaths, list_checkpoints, name_checkpoint
from settings import ROOT
from settings.config import Config

TAIL_BYTES = 65_536  # of the record: some hundred steps


@dataclasses.dataclass(frozen=True)
class Begun:
    """step: that training goes on behind; recorded: the last that metrics.jsonl has, None where it has none."""

    step: int
    recorded: int | None
    running: bool


def begun(c: Config) -> Begun | None:
    """None where no run of this name has made a step that is still there. A run of more steps than are asked for now
    is at its end."""
    paths = RunPaths.of(c.runs_dir, c.run_name, ROOT)
    recorded, running = last_recorded(paths.metrics), locks.is_held(paths)
    step = recorded if running else newest_checkpoint(paths.checkpoints)
    return None if not step else Begun(min(step, c.last_step), recorded, running)


def newest_checkpoint(folder: Path) -> int | None:
    """None where there is none, or the folder cannot be looked into."""
    try:
        steps = list_checkpoints(folder)
    except OSError:
        return None
    whole = (step for step in steps if (folder / name_checkpoint(step) / "MANIFEST.json").exists())
    return max(whole, default=None)


def last_recorded(metrics: Path) -> int | None:
    """The last step in the end of the file; where a resume or a rollback comes behind it, the step that it went back
    to. Lines that are no records are passed over: to name them is the plots' part."""
    try:
        records = RecordReader(metrics, TAIL_BYTES).read_new()
    except OSError:
        return None
    steps = (record["step"] for record in records if record["event"] in ("step", *GOES_BACK))
    return next(reversed([*steps]), None)
