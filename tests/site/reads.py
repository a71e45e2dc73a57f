"""Record which settings a process reads, a line each, in a file of the folder RECORD_READS."""

import os
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

VARIABLE = "RECORD_READS"
SETTINGS_ROOM = f"{Path(__file__).parents[2]}/settings/"


def install(resolve: ModuleType) -> None:
    """Record what the rooms read of the settings that settings.resolve has found."""
    config: Any = sys.modules["settings.config"]
    folder = os.environ[VARIABLE]
    recorded: set[str] = set()

    one: Any = config.Config
    properties = {name for name in dir(one) if isinstance(getattr(one, name), property)}
    fields = one.__dataclass_fields__

    def record(name: str, frame: FrameType | None) -> None:
        # What the settings room reads itself, to check, store, compare or print it, does not count,
        # but what it computes for others does.
        while frame and (
            frame.f_code.co_filename.startswith(SETTINGS_ROOM) or frame.f_globals is globals()
        ):
            if frame.f_code.co_name not in ("micro_batch", "read", *properties):
                return
            frame = frame.f_back
        # "<string>": the comparison that dataclasses generate
        if frame is None or frame.f_code.co_filename.endswith(("/dataclasses.py", "<string>")):
            return
        if name in recorded:
            return
        recorded.add(name)
        code = frame.f_code
        with open(f"{folder}/{os.getpid()}", "a") as log:
            log.write(f"{name} {code.co_filename}:{code.co_name}:{frame.f_lineno}\n")

    # What this command's settings gave, not those of a run that it opens.
    own: list[Any] = []
    find = resolve.resolve

    def find_and_note(*arguments: Any, **more: Any) -> Any:
        resolved = find(*arguments, **more)
        own.append(resolved.config)
        return resolved

    resolve.resolve = find_and_note  # type: ignore[attr-defined]

    def read(self: Any, name: str) -> Any:
        if name in fields and any(self is each for each in own):
            record(name.upper(), sys._getframe(1))
        return object.__getattribute__(self, name)

    one.__getattribute__ = read
