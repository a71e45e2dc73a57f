"""How far a run of this name has come, so that a plan counts what is left. Reads little, however long the run is.

it is being trained now    the last step of its record
it is not                  its newest checkpoint, from which the same command goes on; nothing is verified here
"""

import dataclasses
import json
import re
from pathlib import Path

from record import status
from record.reader import GOES_BACK
from record.run_paths import RunPaths
from settings.config import Config
from settings.declare import ROOT

NAME = re.compile(
    r"step_([0-9]{7,})"
)  # of a checkpoint's folder (train/checkpoint/checkpoint.py, which imports torch)
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
    recorded, running = last_recorded(paths.metrics), status.is_held(paths)
    step = recorded if running else newest_checkpoint(paths.checkpoints)
    return None if not step else Begun(min(step, c.last_step), recorded, running)


def newest_checkpoint(folder: Path) -> int | None:
    """None where there is none, or the folder cannot be looked into."""
    try:
        names = [NAME.fullmatch(path.parent.name) for path in folder.glob("step_*/MANIFEST.json")]
    except OSError:
        return None
    return max((int(name[1]) for name in names if name), default=None)


def last_recorded(metrics: Path) -> int | None:
    """The last step in the end of the file; where a resume or a rollback comes behind it, the step that it went back
    to. Lines that are no records are passed over: to name them is the plots' part."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    step = None
    for line in lines[:-1]:  # the last has no end: a kill cut it
        try:
            record = json.loads(line)
            if record["event"] in ("step", *GOES_BACK):
                step = int(record["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return step
