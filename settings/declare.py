"""The machinery behind settings: declare once, read from five places, report every problem at once.

    make NAME=value  >  environment  >  ENV_FILE (.env)  >  presets/PRESET.env  >  default in config.py

make hands its command-line variables on through the environment, and their names in MAKE_SETTINGS, so
one reader serves make, the shell and Python. Nobody else parses an env file: make's include, bash's
source, docker and kustomize read the same line in four ways. What is declared is in config.py.
"""

import dataclasses
import difflib
import math
import os
import re
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent

# What a difference from the stored run means when it is resumed.
FROZEN = "frozen"  # refused, by name: the run would not be the same run
TRACKED = "tracked"  # accepted, printed and recorded
FREE = "free"  # of no consequence to the result

# make's own variables and the names that scripts pass between themselves; legal, but not settings.
NOT_SETTINGS = {
    "MAKE_SETTINGS",
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "SHELL",
    "VENV",
    "PYTHON",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
}


class SettingsError(Exception):
    """One or more settings that cannot be used. `problems` holds a sentence for each."""

    def __init__(self, problems: list[str], remarks: Iterable[str] = ()):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            "\n  ".join([f"{count} in the settings:", *problems, *(f"({r})" for r in remarks)])
        )


@dataclasses.dataclass(frozen=True)
class Declared:
    """What the declaration of a setting says besides its name, type and default."""

    help: str
    unit: str = ""
    resume: str = FREE
    secret: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    pattern: str = ""
    example: str = ""
    hint: str = ""  # said behind the rule when a value is refused


def setting(default: Any, **declared: Any) -> Any:
    """A dataclass field that is a setting; its name in upper case is the setting's name."""
    return dataclasses.field(
        default=default,
        repr=not declared.get("secret"),
        metadata={"declared": Declared(**declared)},
    )


def declared_fields(config_class: type) -> dict[str, dataclasses.Field]:
    """Setting name -> dataclass field, in the order of declaration."""
    return {f.name.upper(): f for f in dataclasses.fields(config_class)}


def value_type(field: dataclasses.Field) -> type:
    """int, float, bool or str; `int | None` counts as int (None: derived, or off)."""
    if get_origin(field.type) is types.UnionType:
        return next(t for t in get_args(field.type) if t is not type(None))
    return field.type  # type: ignore[return-value]


def environment(settings: Mapping[str, str], without: Collection[str] = ()) -> dict[str, str]:
    """This process's environment with these settings in it, for a target that starts others; without: names that are
    left out of it."""
    return {
        **{name: value for name, value in os.environ.items() if name not in without},
        **settings,
    }


# ---------------------------------------------------------------------------------------------------
# One value
# ---------------------------------------------------------------------------------------------------


def rule_of(field: dataclasses.Field) -> str:
    """The rule a value must keep, in words: 'a whole number of tokens, at least 1'."""
    d: Declared = field.metadata["declared"]
    if d.choices:
        return "one of " + ", ".join(d.choices)
    words = {int: "a whole number", float: "a number", bool: "0 or 1", str: "text"}[
        value_type(field)
    ]
    if d.unit:
        words += f" ({d.unit})"
    bounds = [
        f"{word} {format_value(bound)}"
        for word, bound in (("at least", d.minimum), ("above", d.above), ("at most", d.maximum))
        if bound is not None
    ]
    if d.pattern:
        bounds.append(f"matching {d.pattern}")
    return ", ".join([words, *filter(None, bounds)])


def example_of(name: str, field: dataclasses.Field) -> str:
    """A value that would be accepted, as NAME=value."""
    d: Declared = field.metadata["declared"]
    if d.example:
        return f"{name}={d.example}"
    if field.default is not None and field.default != "":
        return f"{name}={format_value(field.default)}"
    return f"{name}={d.choices[0] if d.choices else format_value(d.minimum or 1)}"


def format_value(value: Any) -> str:
    """A value as it is written in an env file."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):  # short where that is exact
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


def parse_value(field: dataclasses.Field, text: str) -> Any:
    """The typed value of `text`. Raises ValueError, without a message, where it breaks the rule."""
    d: Declared = field.metadata["declared"]
    kind = value_type(field)
    if kind is bool:
        if text not in ("0", "1"):
            raise ValueError
        return text == "1"
    if kind is int:
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ValueError
        value: Any = int(text)
    elif kind is float:
        if not re.fullmatch(
            r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text
        ):  # also nan and inf
            raise ValueError
        value = float(text)
        if not math.isfinite(value):
            raise ValueError
    else:
        value = text
        if (d.choices and text not in d.choices) or (
            d.pattern and not re.fullmatch(d.pattern, text)
        ):
            raise ValueError
        return value
    # written so that a NaN fails
    if (
        not (d.minimum is None or value >= d.minimum)
        or not (d.above is None or value > d.above)
        or not (d.maximum is None or value <= d.maximum)
    ):
        raise ValueError
    return value


# ---------------------------------------------------------------------------------------------------
# The sources
# ---------------------------------------------------------------------------------------------------


def read_env_file(path: Path) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """NAME -> (value, where) of an env file, and the problems found in it.

    A line is NAME=value, a comment that begins with #, or blank. Quotes, blanks, $, #, backslashes and
    `export` are refused, since every other reader of such files understands them differently.
    """
    values: dict[str, tuple[str, str]] = {}
    problems: list[str] = []
    try:
        text = path.read_bytes().decode()  # read_text would hide carriage returns
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        return {}, [
            f"{shown(path)}: cannot be read ({reason}); it must hold NAME=value lines in UTF-8"
        ]
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{shown(path)} line {number}"
        if line == "" or line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", line)
        if "\r" in line:
            problems.append(
                f"{where}: ends in a carriage return; save the file with Unix line ends"
            )
        elif not match:
            start = re.split(r"[=:]", line, maxsplit=1)[0][:30]  # what follows may be a secret
            problems.append(
                f"{where}: {start!r}... is not NAME=value (no blanks round '=', no export)"
            )
        elif bad := re.search(r"""[\s'"`$#\\]""", match[2]):
            problems.append(
                f"{where}: {match[1]} has {bad[0]!r} in its value; quotes, blanks, $, #, ` and \\ "
                f"are not allowed: write {match[1]}=value and comments on their own line"
            )
        elif match[1] in values:
            problems.append(
                f"{where}: {match[1]} was set before, at {values[match[1]][1]}; keep one of the two"
            )
        else:
            values[match[1]] = (match[2], where)
    return values, problems


def shown(path: Path) -> str:
    """The path relative to the repository where it lies inside it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar name, or None."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return found[0] if found else None


@dataclasses.dataclass
class Resolved:
    """Typed values by setting name, where each came from, and what is to be said about them.

    A setting in `refused` has its default as value, so that the others can still be checked.
    """

    values: dict[str, Any]
    origin: dict[str, str]
    problems: list[str]
    refused: set[str]
    remarks: list[str]


def resolve(
    config_class: type,
    environ: Mapping[str, str] | None = None,
    root: Path = ROOT,
    defaults: Mapping[str, str] | None = None,
) -> Resolved:
    """Read every source and return typed values, with the problems found.

    defaults: NAME -> text that a make target puts in the place of the declared default.
    An empty value counts as unset. An unknown name is an error in an env file and on make's command
    line; the environment is full of other programs' names, so there only a near miss is remarked on.
    """
    env = dict(os.environ if environ is None else environ)
    fields = declared_fields(config_class)
    problems: list[str] = []
    remarks: list[str] = []
    refused: set[str] = set()
    from_make = set(env.get("MAKE_SETTINGS", "").split())
    for name in sorted(from_make - fields.keys() - NOT_SETTINGS):
        problems.append(unknown(name, "make's command line", fields))

    for name in sorted(from_make & fields.keys()):
        if fields[name].metadata["declared"].secret:
            problems.append(
                f"{name} (make's command line): a secret, and command lines are seen by everyone; "
                "it belongs into the environment or ENV_FILE"
            )
    layers: list[dict[str, tuple[str, str]]] = [
        {
            n: (env[n], "make's command line" if n in from_make else "environment")
            for n in fields
            if env.get(n)
        }
    ]
    for name in sorted(env.keys() - fields.keys() - from_make):
        if (guess := nearest(name.upper(), fields, cutoff=0.9)) and guess not in env:
            remarks.append(f"the environment has {name}, which is no setting; was {guess} meant?")

    for chosen in ("ENV_FILE", "PRESET"):
        count = len(problems)
        default = str((defaults or {}).get(chosen, fields[chosen].default))
        path = env_file_path(chosen, default, layers, root, problems)
        if path is None:
            refused |= {chosen} if len(problems) > count else set()
            continue
        values, found = read_env_file(path)
        problems += found
        for name in sorted(
            values.keys() & ({"PRESET", "ENV_FILE"} if chosen == "PRESET" else {"ENV_FILE"})
        ):
            problems.append(
                f"{name} ({values[name][1]}): cannot be set here, since this file was found by it"
            )
        if chosen == "PRESET":
            problems += [
                f"{n} ({where}): a secret; it belongs into the environment or ENV_FILE"
                for n, (_, where) in values.items()
                if n in fields and fields[n].metadata["declared"].secret
            ]
        problems += [
            unknown(n, where, fields) for n, (_, where) in values.items() if n not in fields
        ]
        layers.append({n: v for n, v in values.items() if n in fields and v[0] != ""})

    layers.append({n: (text, "default") for n, text in (defaults or {}).items()})
    resolved = Resolved({}, {}, problems, refused, remarks)
    for name, field in fields.items():
        text, where = next((layer[name] for layer in layers if name in layer), (None, "default"))
        resolved.origin[name] = where
        resolved.values[name] = field.default
        if text is None:
            continue
        try:
            resolved.values[name] = parse_value(field, text)
        except ValueError:
            hint = field.metadata["declared"].hint
            problems.append(
                f"{name}={mask(field, text)} ({where}): must be {rule_of(field)}; "
                f"for example {example_of(name, field)}" + (f"; {hint}" if hint else "")
            )
            resolved.refused.add(name)
    if listed := [
        f"{n}={mask(fields[n], env[n])}" for n, w in resolved.origin.items() if w == "environment"
    ]:
        remarks.append("taken from the environment: " + " ".join(listed))
    return resolved


def given(
    config_class: type, environ: Mapping[str, str] | None = None, root: Path = ROOT
) -> set[str]:
    """Names of the settings that somebody gave for this command: not those that a preset or a default gives."""
    resolved = resolve(config_class, environ, root)
    preset = shown(root / "presets" / f"{resolved.values['PRESET']}.env")
    return {
        name
        for name, where in resolved.origin.items()
        if where != "default" and not where.startswith(f"{preset} line ")
    }


def env_file_path(
    chosen: str, default: str, layers: list, root: Path, problems: list[str]
) -> Path | None:
    """The file that ENV_FILE or PRESET points to; None where there is none to read."""
    text, where = next((layer[chosen] for layer in layers if chosen in layer), (default, "default"))
    if chosen == "PRESET":
        path = root / "presets" / f"{text}.env"
        if not os.path.isfile(path):
            names = sorted(p.stem for p in (root / "presets").glob("*.env"))
            near = nearest(text.lower(), names) if text else None
            problems.append(
                f"PRESET={text} ({where}): there is no presets/{text}.env; "
                f"{f'did you mean {near}? ' if near else ''}there are: {', '.join(names)}"
            )
            return None
        return path
    path = root / text
    if os.path.isfile(path):  # False, and no error, also in a folder that may not be read
        return path
    if where != "default":
        problems.append(
            f"ENV_FILE={text} ({where}): no such file; leave it out, or copy .env.example to {text}"
        )
    return None


def unknown(name: str, where: str, fields: Iterable[str]) -> str:
    guess = nearest(name.upper(), fields)
    remedy = f"did you mean {guess}?" if guess else "`make settings` lists them"
    return f"{name} ({where}): no such setting; {remedy}"


def mask(field: dataclasses.Field, text: str) -> str:
    return "(secret)" if field.metadata["declared"].secret else text
