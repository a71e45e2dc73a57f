"""Settings of a run that exists: what a resume takes from it, and what must not change."""

from pathlib import Path
from typing import Any

from settings.config import DEFAULTS, SETTINGS, build_config, derive_defaults
from settings.declare import FREE, FROZEN, SettingsError, Values, format_value
from settings.json_file import read_object
from settings.sources import add_origin, parse


class RunConfigError(SettingsError):
    """The config.json of a run cannot be used: the file must be repaired, and not a setting."""

    exit_code = 78

    def __str__(self) -> str:
        return self.problems[0]


def read_run_config(path: Path) -> dict[str, Any]:
    """Return what a run's config.json holds; {} if the run has none yet.

    Raises RunConfigError if it does not hold settings and a list of attempts, or if what a resume reads beside
    them was edited.
    """
    fault = "is not the config.json of a run"
    try:
        content = read_object(path)
        parts = [content["settings"], *content.get("attempts", [])]
        if all(isinstance(part, dict) for part in parts):
            check_form(content)
            return content
    except FileNotFoundError:
        return {}
    except ValueError as error:
        fault = str(error)
    except (LookupError, TypeError):
        pass
    raise RunConfigError([f"{path}: {fault}. Restore it from a copy, or choose another RUN_NAME."])


def check_form(content: dict[str, Any]) -> None:
    """Check the types in a run's config.json. An earlier version did not store all of it. Raises ValueError."""
    identity = content.get("identity", {})
    shards = content.get("validation_shards", {})
    is_valid = {
        "identity": isinstance(identity, dict)
        and isinstance(identity.get("id", ""), str)
        and is_names(identity.get("attempts", []))
        and (identity.get("adopted") is None or is_names(identity["adopted"])),
        "validation_shards": isinstance(shards, dict)
        and all(type(count) is int for count in shards.values()),
        "attempts": all(
            type(part.get("norm_eps")) in (float, int, type(None))
            for part in content.get("attempts", [])
        ),
    }
    for name, valid in is_valid.items():
        if not valid:
            raise ValueError(f"its `{name}` was edited or is damaged")


def is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def parse_stored(stored: Values) -> dict[str, Any]:
    """Return the stored values that are valid, and the defaults of the others."""
    texts = {name: format_value(value) for name, value in stored.items()}
    values, _ = parse(add_origin(texts, ""))
    return DEFAULTS | values


def persisted_settings(stored: Values, explicit: Values) -> dict[str, str]:
    """Return the stored settings that hold for a resume too, as text.

    A setting without influence on the result is chosen by each command. A default that followed
    from a setting which is now given another value follows from it again.

    Args:
        explicit: values that are set explicitly, by name.
    """
    earlier = parse_stored(stored)
    derived_before = derive_defaults(earlier)
    derived_now = derive_defaults(earlier | dict(explicit))
    persisted = {}
    for name in stored.keys() & SETTINGS.keys():
        if SETTINGS[name].resume == FREE and name != "PRESET":
            continue
        before = derived_before.get(name)
        now = derived_now.get(name)
        is_rederived = earlier[name] == before and before != now
        persisted[name] = format_value(now if is_rederived else stored[name])
    return persisted


def compare_with_stored(stored: Values, now: Values) -> tuple[list[str], dict[str, list[Any]]]:
    """Compare the values of settings with those that a run was started with.

    Returns:
        A sentence for each setting that must not change, and the tracked differences as
        NAME -> [before, now].
    """
    refusals = []
    changes = {}
    earlier = build_config(parse_stored(stored)).values()
    for name, value in now.items():
        before = earlier[name]
        resume = SETTINGS[name].resume
        if resume == FREE or before == value:
            continue
        if resume == FROZEN:
            started = f"{name}={format_value(before)}"
            refusals.append(
                f"{name}={format_value(value)}: The run was started with {started}, which cannot "
                f"change. Set {started}, or choose another RUN_NAME."
            )
        else:
            changes[name] = [before, value]
    return refusals, changes
