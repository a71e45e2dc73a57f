"""What a pipeline has done: RUNS_DIR/RUN_NAME-pipeline/pipeline.json, replaced whole behind each stage.

    stages: key -> state (begun, done), settings and inputs that it began with, what it made (by its path from the
            repository's root, so that this may be moved, or be another's mount), seconds, exit code

A stage that is done is not run again. So what it was made with must be what the command says now: a difference is
refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.stages import FROZEN_ONES, Stage
from record.durable import write_whole
from record.locks import RunFolderError
from settings.config import Config
from settings.declare import format_value

SCHEMA = 1
FILE = "pipeline.json"


class State:
    """The file of a pipeline in `folder`. Raises RunFolderError where it cannot be read."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.stages: dict[str, dict[str, Any]] = {}
        try:
            facts = json.loads(self.path.read_text(encoding="utf-8"))
            if facts["schema"] != SCHEMA:
                raise ValueError(f"schema {facts['schema']}, not {SCHEMA}")
            self.stages = {key: dict(stage) for key, stage in facts["stages"].items()}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise RunFolderError(
                f"{self.path}: damaged ({error}); restore it, or choose another RUN_NAME"
            ) from error

    def is_done(self, stage: Stage) -> bool:
        return self.stages.get(stage.key, {}).get("state") == "done"

    def seconds(self, stage: Stage) -> float:
        """That a stage took, over all attempts."""
        return float(self.stages.get(stage.key, {}).get("seconds", 0.0))

    def begin(self, stage: Stage, c: Config, inputs: Mapping[str, str]) -> None:
        before = self.stages.get(stage.key, {})
        self.stages[stage.key] = {
            "state": "begun",
            "run": stage.run,
            "seconds": before.get("seconds", 0.0),
            "inputs": dict(inputs),
            "settings": {
                name: value for name, value in c.stored().items() if name in stage.watched
            },
        }
        self.write()

    def end(self, stage: Stage, seconds: float, code: int, made: Mapping[str, str]) -> None:
        """The stage's commands are over, with this exit code. made: what later stages stand on."""
        facts = self.stages[stage.key]
        facts |= {
            "seconds": facts["seconds"] + seconds,
            "exit_code": code,
            "made": dict(made),
            "state": "begun" if code else "done",
        }
        self.write()

    def write(self) -> None:
        """Raises RunFolderError where there is no room."""
        try:
            write_whole(
                self.path,
                (json.dumps({"schema": SCHEMA, "stages": self.stages}, indent=1) + "\n").encode(),
            )
        except OSError as error:
            raise RunFolderError(
                f"{self.path}: cannot be written ({error.strerror}); make room, or choose another "
                "place with RUNS_DIR"
            ) from error

    # ---- What has changed

    def changed_settings(self, stage: Stage, c: Config, told: set[str], has_run: bool) -> list[str]:
        """Complaints about settings that a stage was made with. told: names that were complained of before; has_run:
        whether there is a run, which a stage that has begun goes on with."""
        facts, problems = self.stages.get(stage.key, {}), []
        if not facts or not (has_run or facts["state"] == "done"):
            return []
        held = stage.watched if facts["state"] == "done" else stage.watched & FROZEN_ONES
        now = c.stored()
        for name in sorted(held & facts["settings"].keys()):
            before, own = facts["settings"][name], stage.names.get(name, name)
            if before == now[name] or own in told:
                continue
            told.add(own)
            what = "is done" if facts["state"] == "done" else "has begun"
            problems.append(
                f"{own}={format_value(now[name])}: the stage {stage.title} {what} with {own}="
                f"{format_value(before)}, and would not be what it is; go on with that, "
                + (
                    "or choose another RUN_NAME"
                    if stage.trains
                    else f"choose another RUN_NAME, or measure by make eval RUN_NAME={stage.run}"
                )
            )
        return problems

    def changed_inputs(self, stage: Stage, inputs: Mapping[str, str]) -> list[str]:
        """Complaints about what a stage that is done has read, and what is something else now. Of one that has begun
        the trainer says it, where it has taken a step."""
        before = self.stages[stage.key]["inputs"] if self.is_done(stage) else {}
        return [
            f"{name}: is not what the stage {stage.title} was done with; bring that back, or choose another "
            "RUN_NAME"
            for name in sorted(before.keys() & inputs.keys())
            if before[name] != inputs[name]
        ]

    def changed_outputs(self, stage: Stage, made: Mapping[str, str]) -> list[str]:
        """Complaints about what a stage that is done has made. made: what is there now, by path; "" for none."""
        before = self.stages.get(stage.key, {}).get("made", {}) if self.is_done(stage) else {}
        return [
            f"{path}: is {'not what' if made.get(path) else 'gone, which'} the stage {stage.title} "
            "made; bring that back, or choose another RUN_NAME"
            for path in sorted(before)
            if made.get(path) != before[path]
        ]
