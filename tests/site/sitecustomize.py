"""What tests change in a process that starts: constants of the product, and a record of reads.

    TEST_CONSTANTS   as JSON, module -> constant -> value (tests/constants.py)
    RECORD_READS     folder that gets a file with the settings that the process reads (reads.py)

The folder of this file is in PYTHONPATH then, so that Python imports it at its start. The fork
server calls `change_process` in its children.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


class Finder(importlib.abc.MetaPathFinder):
    """Changes modules right after they have been executed."""

    def __init__(self, changes: Mapping[str, Change]):
        self.changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as always, with a loader that also changes it."""
        if name not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self.changes[name](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def set_constants(module: ModuleType, values: Mapping[str, Any]) -> None:
    """Set constants of a module, and of those that have imported them from it by name."""
    for name, value in values.items():
        before = getattr(module, name)  # AttributeError: a test replaces what there is not
        if isinstance(before, tuple):
            value = tuple(value)
        for other in list(sys.modules.values()):
            if other is module or getattr(other, "__dict__", {}).get(name) is before:
                setattr(other, name, value)


def record_reads(module: ModuleType) -> None:
    """Record which settings this process reads."""
    sys.path.append(os.path.dirname(__file__))
    import reads

    reads.install(module)


def change_process(environ: Mapping[str, str]) -> None:
    """Change the modules that are imported, and those to come."""
    changes: dict[str, Change] = {
        name: functools.partial(set_constants, values=values)
        for name, values in json.loads(environ.get("TEST_CONSTANTS", "{}")).items()
    }
    if environ.get("RECORD_READS"):
        changes["settings.resolve"] = record_reads
    if changes:
        sys.meta_path.insert(0, Finder(changes))
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])


change_process(os.environ)
