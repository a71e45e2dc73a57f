"""Declare a setting: its type, its range, its help, and the make targets that use it.

A section is a frozen dataclass. Each field is one setting: the name in upper case is the setting's
name, the annotation is its type, and `setting` says the rest.

    batch_tokens: int = setting(8192, "Global batch size in tokens.", unit=TOKENS, minimum=2)

sources.py finds the values.
"""

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping, Set
from decimal import Decimal
from typing import Annotated, Any, ClassVar

from settings.targets import ALL_SETTINGS

Texts = Mapping[str, str]
Values = Mapping[str, Any]

# What happens if a resumed run is given another value than it was started with.
FROZEN = "frozen"  # refused: it would no longer be the same run
TRACKED = "tracked"  # accepted, printed and recorded
FREE = "free"  # accepted: it does not change the result

DERIVED: Any = None  # the default follows from other settings (config.derive_defaults)

LARGEST = 10**15  # default maximum: no calculation overflows
TOKENS = "tokens; M and B allowed, K not"  # the unit of counts that may be written as 2.5M
NUMBERS = {  # neither nan nor inf
    int: re.compile(r"[0-9]{1,30}"),
    float: re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
}
MANY_TOKENS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([MB])")
MULTIPLES = {"M": 10**6, "B": 10**9}


class ExpectedError(Exception):
    """What its message explains: a process ends by it without a traceback, with this exit code.

    Codes are those of record/exit_codes.py. This one: data or environment are bad.

    machine_fault: what of record/machine_faults.py it may be; "" for what is the same on every node.
    """

    exit_code = 78
    machine_fault = ""


class SettingsError(ExpectedError):
    """Settings that cannot be used. `problems` holds a sentence for each. Warnings come first."""

    exit_code = 64  # a setting must change

    def __init__(self, problems: list[str], warnings: Iterable[str] = ()):
        title = "Invalid setting:" if len(problems) == 1 else "Invalid settings:"
        super().__init__("\n".join([*warnings, "\n    ".join([title, *problems])]))
        self.problems = problems
        self.warnings = warnings


@dataclasses.dataclass(frozen=True)
class Format:
    """What a text must look like: a regular expression, and the same in words."""

    pattern: str
    words: str


# Python reads bytes that are not UTF-8 into surrogates.
PRINTABLE = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+"
ONE_LINE = Format(PRINTABLE, "text in UTF-8 without control characters")
ANY = Format(r"[^\ud800-\udfff]*", "text in UTF-8")


# Types with rules that several settings share.
Count = Annotated[int, ("minimum", 1)]
Steps = Annotated[int, ("unit", "steps")]
Tokens = Annotated[int, ("unit", TOKENS)]
Seconds = Annotated[int, ("unit", "seconds"), ("maximum", 10**6)]
Positive = Annotated[float, ("positive", True)]
PathText = Annotated[str, ("format", Format(PRINTABLE, "a path without control characters"))]


@dataclasses.dataclass(frozen=True)
class Section:
    """What holds for the settings of a section that do not say otherwise."""

    USED_BY: ClassVar[Set[str]] = frozenset()
    RESUME: ClassVar[str] = FREE
    NEEDS: ClassVar[str] = ""
    NEEDED_BY: ClassVar[Set[str] | None] = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """A declared setting.

    Attributes:
        positive: 0 is not allowed.
        needs: when this setting has an effect: "SYNC=diloco", "PARALLEL=fsdp|hsdp" or "LORA_RANK!=0".
        needed_by: make targets for which `needs` holds; for others it always has an effect.
        used_by: make targets.
        finds_run: whether it also tells where the folder of a run is.
    """

    name: str
    kind: Any
    default: Any
    help: str
    resume: str
    used_by: Set[str]
    needs: str = ""
    needed_by: Set[str] | None = None  # all
    finds_run: bool = False
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float = 0
    positive: bool = False
    maximum: float = LARGEST
    format: Format = ONE_LINE
    example: str = ""
    secret: bool = False

    def has_effect(self, values: Values, target: str = "") -> bool:
        """Tell whether other settings have the values that this one needs.

        Args:
            values: of all settings, by name.
            target: of make; "" for a command without one.
        """
        if not self.needs or (self.needed_by and target not in self.needed_by):
            return True
        name, _, texts = self.needs.partition("=")
        is_excluded = name.endswith("!")
        is_listed = format_value(values[name.removesuffix("!")]) in texts.split("|")
        return is_listed != is_excluded

    def explain_needs(self) -> str:
        """Say when this setting, which needs others, has no effect."""
        if "!=" in self.needs:
            return f"Has no effect with {self.needs.replace('!', '')}."
        return f"Has no effect without {self.needs}."

    def parse(self, text: str) -> Any:
        """Convert text to the setting's type. Raises ValueError if it breaks the rule."""
        value: Any = text
        if self.choices:
            is_valid = text in self.choices
        elif self.kind is bool:
            is_valid = text in ("0", "1")
            value = text == "1"
        elif self.kind is str:
            # UTF-8 whatever the locale has; bytes that are none stay surrogates
            value = text.encode(errors="surrogateescape").decode(errors="surrogateescape")
            is_valid = re.fullmatch(self.format.pattern, value) is not None
        else:
            value = self.parse_number(text)
            is_valid = value is not None
        if not is_valid:
            raise ValueError(f"Must be {self.rule()}.")
        return value

    def parse_number(self, text: str) -> float | None:
        """Return a number that is in the setting's range, or None."""
        many = MANY_TOKENS.fullmatch(text)
        if many and self.unit == TOKENS:
            number = int(Decimal(many[1]) * MULTIPLES[many[2]])
        elif NUMBERS[self.kind].fullmatch(text):
            number = self.kind(text)
        else:
            return None
        is_in_range = self.minimum <= number <= self.maximum
        return number if is_in_range and (number or not self.positive) else None

    def rule(self) -> str:
        """Describe the allowed values: `an integer from 2 to 10^15 (steps)`."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "0 or 1"
        if self.kind is str:
            return f"{self.format.words}, for example {self.name}={self.example}"
        words = "an integer" if self.kind is int else "a number"
        words += " above 0, up to" if self.positive else f" from {format_value(self.minimum)} to"
        words += " 10^15" if self.maximum == LARGEST else f" {format_value(self.maximum)}"
        return f"{words} ({self.unit})" if self.unit else words

    def show(self, text: str) -> str:
        """Return a value for printing: on one line, and never a secret."""
        if self.secret and text:
            return "(secret)"
        return text if text.isprintable() else ascii(text)


def setting(default: Any, help: str, **rules: Any) -> Any:
    """Declare a field of a section as a setting. A secret is kept out of the section's repr."""
    is_shown = "secret" not in rules
    return dataclasses.field(default=default, repr=is_shown, metadata={"help": help, **rules})


@typing.dataclass_transform(frozen_default=True)
def section(section_class: type) -> type:
    """Declare a class of settings. It becomes a frozen dataclass."""
    return dataclasses.dataclass(frozen=True)(section_class)


def read_section(section: type[Section]) -> dict[str, Setting]:
    """Return the settings of a section by name, in the order of declaration."""
    settings = {}
    types = typing.get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        name = field.name.upper()
        kind = types[field.name]
        shared: Any = ()
        while typing.get_args(kind):  # Count | None, or Annotated[int, ("minimum", 1)]
            kind, *shared = typing.get_args(kind)
        rules: dict[str, Any] = {
            "used_by": section.USED_BY,
            "resume": section.RESUME,
            "needs": section.NEEDS,
            "needed_by": section.NEEDED_BY,
            "example": format_value(field.default) or "1",
            **dict(rule for rule in shared if isinstance(rule, tuple)),
            **field.metadata,
        }
        rules["used_by"] = rules["used_by"] | ALL_SETTINGS
        settings[name] = Setting(name, kind, field.default, **rules)
    return settings


def round_as_typed(value: float) -> float:
    """Return the number that somebody would type: 0.003 / 10 is 0.00030000000000000003."""
    return float(f"{value:.12g}")


def format_tokens(count: int) -> str:
    """Write a number of tokens as it is typed: 8M, or 40960."""
    if count % MULTIPLES["M"]:
        return str(count)
    return f"{count // MULTIPLES['M']}M"


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
