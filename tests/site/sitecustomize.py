"""Replace constants of the product in the process that starts, as TEST_CONSTANTS says.

The folder of this file is in PYTHONPATH then, so that Python imports it at its start
(tests/constants.py sets both). The fork server calls `replace` in its children.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

VARIABLE = "TEST_CONSTANTS"


class Finder(importlib.abc.MetaPathFinder):
    """Replaces the constants of a module right after it has been executed."""

    def __init__(self, replacements: Mapping[str, Mapping[str, Any]]):
        self.replacements = replacements

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as always, with a loader that replaces its constants."""
        if name not in self.replacements:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            set_constants(module, self.replacements[name])

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
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


def replace(environ: Mapping[str, str]) -> None:
    """Replace what TEST_CONSTANTS names, in modules that are imported and in those to come."""
    replacements = json.loads(environ.get(VARIABLE, "{}"))
    if not replacements:
        return
    sys.meta_path.insert(0, Finder(replacements))
    for name, values in replacements.items():
        if name in sys.modules:
            set_constants(sys.modules[name], values)


replace(os.environ)
