"""Settings of a run that exists: what a resume takes from it, and what must not change."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from settings.config import DEFAULTS, SETTINGS, build_config, derive_defaults
from settings.declare import FREE, FROZEN, SettingsError, format_value
from settings.names import CONSTANTS, NAMES


class RunConfigError(SettingsError):
    """The config.json of a run cannot be used: the file must be repaired, and not a setting."""

    exit_code = 78

    def __str__(self) -> str:
        return self.problems[0]


def read_run_config(path: Path) -> dict[str, Any]:
    """Return what a run's config.json holds; {} if the run has none yet.

    Raises RunConfigError if it does not hold settings and a list of attempts.
    """
    fault = "is damaged, or is not the config.json of a run"
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
            raise ValueError
        content = json.loads(path.read_bytes())
        attempts = content.get("attempts", [])
        if isinstance(content["settings"], dict) and all(
            isinstance(each, dict) for each in attempts
        ):
            return dict(content)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        fault = f"cannot be read ({error.strerror})"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    raise RunConfigError([f"{path}: {fault}. Restore it from a copy, or choose another RUN_NAME."])


def find_lasting(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """Return the stored settings that hold for a resume too, as text.

    A setting without influence on the result is chosen by each command. A default that followed
    from a setting which is now given another value follows from it again.

    Args:
        given: values that are set explicitly, by name.
    """
    values = DEFAULTS | parse_stored(stored)
    before = derive_defaults(values)
    now = derive_defaults(values | dict(given))
    lasting = {}
    for name, declared in SETTINGS.items():
        if declared.resume == FREE and name != "PRESET":
            continue
        value = stored.get(name)
        follows = name in before and is_same(values[name], before[name])
        if follows and before[name] != now.get(name):
            value = now.get(name)
        lasting[name] = format_value(value)
    return lasting


def parse_stored(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored values that are valid."""
    values = {}
    for name, declared in SETTINGS.items():
        value = declared.convert(format_value(stored.get(name)))
        if value is not None:
            values[name] = value
    return values


def is_same(before: Any, now: Any) -> bool:
    """Tell whether two values are equal, up to how earlier versions rounded derived ones."""
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=1e-11)
    return bool(before == now)


def compare_with_stored(
    stored: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[str], dict[str, list[Any]]]:
    """Compare the values of settings with those that a run was started with.

    A setting that the run did not know yet counts as having had its default.

    Returns:
        A sentence for each setting that must not change, and the tracked differences as
        NAME -> [before, now].
    """
    refusals = []
    changes = {}
    earlier = build_config(parse_stored(stored)).values()
    derived_then, derived_now = derive_defaults(earlier), derive_defaults(earlier | dict(now))
    for name, value in now.items():
        before = earlier[name]
        if SETTINGS[name].resume == FREE or is_same(before, value):
            continue
        if SETTINGS[name].resume == FROZEN:
            followed = is_same(before, derived_then.get(name))
            if followed and is_same(value, derived_now.get(name)):
                continue  # the setting that it follows from is refused
            started = f"{name}={format_value(before)}"
            refusals.append(
                f"{name}={format_value(value)}: The run was started with {started}, which cannot "
                f"change. Set {started}, or choose another RUN_NAME."
            )
        else:
            changes[name] = [before, value]
    for name, constant in list_constants(stored).items():
        before = stored.get(name)
        if before not in (None, constant):
            refusals.append(
                f"The run was started with {name}={format_value(before)}, but it is always "
                f"{format_value(constant)} now. Finish the run with the version that started it, or "
                "choose another RUN_NAME."
            )
    return refusals, changes


def list_constants(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are gone and shaped this run, with the values built in now."""
    constants = {name: CONSTANTS[name] for name in NAMES["shaped_a_run"]}
    constants["SYNC_ALPHA"] = 0.5 if stored.get("SYNC_DELAY") else 0.0
    if stored.get("EVAL_DATA"):  # else some of DATA was held out, this many conversations
        del constants["EVAL_CONVERSATIONS"]
    return constants
