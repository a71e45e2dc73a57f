"""Declare a setting: its type, its range, its help, and the make targets that use it.

A section is a frozen dataclass. Each field is one setting: the name in upper case is the setting's
name, the annotation is its type, and `setting` says the rest.

    batch_tokens: int = setting(8192, "Global batch size in tokens.", unit="tokens", minimum=2)

sources.py finds the values.
"""

import dataclasses
import re
import typing
from collections.abc import Set
from typing import Any, ClassVar

from settings.targets import ALL_SETTINGS

# What happens if a resumed run is given another value than it was started with.
FROZEN = "frozen"  # refused: it would no longer be the same run
TRACKED = "tracked"  # accepted, printed and recorded
FREE = "free"  # accepted: it does not change the result

DERIVED: Any = None  # the default follows from other settings (config.derive_defaults)

LARGEST = 10**15  # default maximum: no calculation overflows
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,30}")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")  # neither nan nor inf
MILLIONS_OR_BILLIONS = re.compile(r"([0-9]{1,9})\.?([0-9]{0,9})([MB])")
ZEROS = {"M": 6, "B": 9}


class SettingsError(Exception):
    """Settings that cannot be used. `problems` holds a sentence for each."""

    exit_code = 64  # of record/exit_codes.py: a setting must change

    def __init__(self, problems: list[str]):
        self.problems = problems
        title = "Invalid setting:" if len(problems) == 1 else "Invalid settings:"
        super().__init__("\n    ".join([title, *problems]))


@dataclasses.dataclass(frozen=True)
class Format:
    """What a text must look like: a regular expression, and the same in words."""

    pattern: str
    words: str


# One line of UTF-8, which Python reads into surrogates where it is damaged.
ONE_LINE = Format(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+", "text without control characters")
# Text that is UTF-8 whatever the locale has.
ANY = Format(r"[^\ud800-\udfff]*", "text in UTF-8")


class Section:
    """What holds for the settings of a section that do not say otherwise."""

    USED_BY: ClassVar[Set[str]] = frozenset()
    RESUME: ClassVar[str] = FREE
    NEEDS: ClassVar[str] = ""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A declared setting. `read_section` fills in what the declaration leaves to its section.

    Attributes:
        needs: what this setting has no effect without: "SYNC=diloco", "PARALLEL=fsdp|hsdp", or
            "LORA_RANK>0".
        used_by: make targets.
    """

    default: Any
    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float = 0
    positive: bool = False  # more than 0
    maximum: float = LARGEST
    format: Format = ONE_LINE
    example: str = ""
    secret: bool = False
    resume: str = ""
    needs: str = ""
    used_by: Set[str] = frozenset()
    name: str = ""
    kind: type = str
    section: str = ""

    def parse(self, text: str) -> Any:
        """Convert text to the setting's type. Raises ValueError if it breaks the rule."""
        value: Any = text
        if self.kind is bool:
            value = {"0": False, "1": True}.get(text)
        elif self.kind is int:
            value = parse_whole_number(text, self.unit)
        elif self.kind is float:
            value = float(text) if NUMBER.fullmatch(text) else None
        elif self.format is ANY:  # bytes that the locale could not read are lone surrogates
            value = text.encode(errors="surrogateescape").decode(errors="surrogateescape")
        if value is None or not self.accepts(value):
            raise ValueError(f"Must be {self.rule()}, for example {self.name}={self.example}.")
        return value

    def accepts(self, value: Any) -> bool:
        """Tell whether a value of the right type is allowed."""
        if self.choices:
            return value in self.choices
        if self.kind is str:
            return re.fullmatch(self.format.pattern, value) is not None
        if self.positive and value == 0:
            return False
        return bool(self.minimum <= value <= self.maximum)

    def rule(self) -> str:
        """Describe the allowed values: `a whole number of tokens, at least 2 and at most 100`."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "0 or 1"
        if self.kind is str:
            return self.format.words
        words = "a whole number" if self.kind is int else "a number"
        if self.unit:
            words += f" of {self.unit}"
        words += ", greater than 0" if self.positive else f", at least {format_value(self.minimum)}"
        return f"{words} and at most {self.maximum:,}"

    def redact(self, text: str) -> str:
        """Return a value for printing: on one line, and never a secret."""
        if self.secret and text:
            return "(secret)"
        return text if text.isprintable() else ascii(text)


def setting(default: Any, help: str, **rules: Any) -> Any:
    """Declare a field of a section as a setting. A secret is kept out of the section's repr."""
    declared = Setting(default, help, **rules)
    is_shown = not declared.secret
    return dataclasses.field(default=default, repr=is_shown, metadata={"setting": declared})


def read_section(section: str, section_class: type[Section]) -> dict[str, Setting]:
    """Return the settings of a section by name, in the order of declaration."""
    settings = {}
    types = typing.get_type_hints(section_class)
    for field in dataclasses.fields(section_class):  # type: ignore[arg-type]
        declared = field.metadata["setting"]
        name = field.name.upper()
        optional = typing.get_args(types[field.name])  # of int | None
        example = declared.example or format_value(declared.default)
        if not example:
            example = declared.choices[0] if declared.choices else "1"
        settings[name] = dataclasses.replace(
            declared,
            name=name,
            kind=optional[0] if optional else types[field.name],
            section=section,
            example=example,
            resume=declared.resume or section_class.RESUME,
            needs=declared.needs or section_class.NEEDS,
            used_by=(declared.used_by or section_class.USED_BY) | ALL_SETTINGS,
        )
    return settings


def parse_whole_number(text: str, unit: str) -> int | None:
    """Return the number, or None. Tokens may be given as 2.5M or 100B."""
    if WHOLE_NUMBER.fullmatch(text):
        return int(text)
    match = MILLIONS_OR_BILLIONS.fullmatch(text)
    if match is None or unit != "tokens":
        return None
    whole, decimals, suffix = match.groups()
    zeros = ZEROS[suffix] - len(decimals)
    if zeros < 0:  # a fraction of a token
        return None
    return int(whole + decimals) * 10**zeros


def round_as_typed(value: float) -> float:
    """Return the number that somebody would type: 0.003 / 10 is 0.00030000000000000003."""
    return float(f"{value:.12g}")


def format_value(value: Any) -> str:
    """Write a value as it is typed."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)
