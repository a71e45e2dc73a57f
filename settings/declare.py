"""Declare a setting: its type, its range, its help, and the make targets that use it.

A section is a frozen dataclass. Each field is one setting: the name in upper case is the setting's
name, the annotation is its type, and `setting` says the rest.

    batch_tokens: int = setting(8192, "Global batch size in tokens.", unit="tokens", minimum=2)

sources.py finds the values.
"""

import dataclasses
import re
import typing
from collections.abc import Iterable, Set
from decimal import Decimal
from typing import Any, ClassVar

from settings.targets import ALL_SETTINGS

# What happens if a resumed run is given another value than it was started with.
FROZEN = "frozen"  # refused: it would no longer be the same run
TRACKED = "tracked"  # accepted, printed and recorded
FREE = "free"  # accepted: it does not change the result

DERIVED: Any = None  # the default follows from other settings (config.derive_defaults)

LARGEST = 10**15  # default maximum: no calculation overflows
INTEGER = re.compile(r"[0-9]{1,30}")
NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")  # neither nan nor inf
MANY_TOKENS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?[MB]")
MULTIPLES = {"M": 10**6, "B": 10**9}


class SettingsError(Exception):
    """Settings that cannot be used. `problems` holds a sentence for each. Warnings come first."""

    exit_code = 64  # of record/exit_codes.py: a setting must change

    def __init__(self, problems: list[str], warnings: Iterable[str] = ()):
        self.problems = problems
        title = "Invalid setting:" if len(problems) == 1 else "Invalid settings:"
        super().__init__("\n".join([*warnings, "\n    ".join([title, *problems])]))


@dataclasses.dataclass(frozen=True)
class Format:
    """What a text must look like: a regular expression, and the same in words."""

    pattern: str
    words: str


# One line of UTF-8, which Python reads into surrogates where it is damaged.
ONE_LINE = Format(
    r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+", "text in UTF-8 without control characters"
)
# Text that is UTF-8 whatever the locale has.
ANY = Format(r"[^\ud800-\udfff]*", "text in UTF-8")


@dataclasses.dataclass(frozen=True)
class Section:
    """What holds for the settings of a section that do not say otherwise."""

    USED_BY: ClassVar[Set[str]] = frozenset()
    RESUME: ClassVar[str] = FREE
    NEEDS: ClassVar[str] = ""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A declared setting. `read_section` fills in what the declaration leaves to its section.

    Attributes:
        positive: 0 is not allowed.
        needs: what this setting has no effect without: "SYNC=diloco", "PARALLEL=fsdp|hsdp", or
            "LORA_RANK>0".
        used_by: make targets.
    """

    default: Any
    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float = 0
    positive: bool = False
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
        value = self.convert(text)
        if value is None:
            no_k = " K is not supported; write it out, as in 2048."
            is_thousands = self.unit == "tokens" and text.endswith("K")
            raise ValueError(f"Must be {self.rule()}.{no_k if is_thousands else ''}")
        return value

    def convert(self, text: str) -> Any:
        """Return the value, or None if it breaks the rule."""
        if self.choices:
            return text if text in self.choices else None
        if self.kind is bool:
            return {"0": False, "1": True}.get(text)
        if self.kind is str:
            # Bytes that the locale could not read are lone surrogates.
            text = text.encode(errors="surrogateescape").decode(errors="surrogateescape")
            return text if re.fullmatch(self.format.pattern, text) else None
        number = parse_number(text, self.kind, self.unit)
        if number is None or (self.positive and number == 0):
            return None
        return number if self.minimum <= number <= self.maximum else None

    def rule(self) -> str:
        """Describe the allowed values: `an integer from 2 to 10^15 (tokens; M and B allowed)`."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "0 or 1"
        if self.kind is str:
            return f"{self.format.words}, for example {self.name}={self.example}"
        words = "an integer" if self.kind is int else "a number"
        words += " above 0, up to" if self.positive else f" from {format_value(self.minimum)} to"
        words += " 10^15" if self.maximum == LARGEST else f" {format_value(self.maximum)}"
        if self.unit == "tokens":
            words += " (tokens; M and B allowed)"
        elif self.unit:
            words += f" ({self.unit})"
        return words

    def show(self, text: str) -> str:
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
    for field in dataclasses.fields(section_class):
        declared = field.metadata["setting"]
        name = field.name.upper()
        optional = typing.get_args(types[field.name])  # of int | None
        settings[name] = dataclasses.replace(
            declared,
            name=name,
            kind=optional[0] if optional else types[field.name],
            section=section,
            example=declared.example or format_value(declared.default) or "1",
            resume=declared.resume or section_class.RESUME,
            needs=declared.needs or section_class.NEEDS,
            used_by=(declared.used_by or section_class.USED_BY) | ALL_SETTINGS,
        )
    return settings


def parse_number(text: str, kind: type, unit: str) -> float | None:
    """Return the number, or None. Tokens may be given as 2.5M or 100B."""
    if kind is float:
        return float(text) if NUMBER.fullmatch(text) else None
    if unit == "tokens" and MANY_TOKENS.fullmatch(text):
        return int(Decimal(text[:-1]) * MULTIPLES[text[-1]])
    return int(text) if INTEGER.fullmatch(text) else None


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
