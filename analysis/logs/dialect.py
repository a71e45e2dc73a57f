"""What a trainer's step line looks like: analysis/logs/dialects/NAME.toml, one small table a trainer.

    head = "iter {step}:"      fields = ["loss {loss}", "time {step_ms}ms"]      separators = ","

A line is its head and then fields in any order, with one of the separators between them. {column} is a number;
{column:short} one like 4.71K; {column*1000} and {column/60} give it another unit; {_} is a number and {~} a text that
nobody needs; [x] may be missing; a blank stands for any number of blanks, none too. Every column of `fields` must be
there, so that a line which was cut short is no step; those of `optional` need not be. A field of another name is passed
over. A field that begins like a known one and goes on otherwise, as a number without its unit does, spoils the line:
it is not understood, and counted. docs/logs.md shows how to add a trainer.
"""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "dialects"

PLAIN = rb"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
DECIMAL = (
    PLAIN + rb"(?:[eE][-+]?[0-9]+)?"
)  # every one is a number for float() too, a torn 6.006.000e-04 is none
NUMBER = rb"(?:" + DECIMAL + rb"|[-+]?(?:nan|NaN|inf|Infinity)|n/a|None)"
SHORT_NUMBER = rb"(?:" + PLAIN + rb"[KMBGTP]|" + NUMBER + rb")"
COUNTS = ("step", "last_step")  # a line whose step is nan is no step
SHORT = {b"K": "e3", b"M": "e6", b"B": "e9", b"G": "e9", b"T": "e12", b"P": "e15"}
TOKEN = re.compile(
    r"\{([a-z_][a-z0-9_]*|~)(:short)?([*/][0-9]+)?\}|(\[\[|\]\])|([\[\]])|( +)|([^{}\[\] ]+)"
)

# Behind what a step line may stand: whatever a logger, kubectl, torchrun or Slurm writes there. Not behind what makes
# the line a string in a program, a quotation, or the rest of another line.
BRACKETS = re.compile(rb"\[[^\[\]]*\]|\([\w ]*pid=[^()]*\)|\brank=\d+")
NO_WRAPPER = re.compile(rb"""["'#={}`]|\bprint|//|\b(?:[Ss]tep|[Ii]ter|[Ll]oss)\b""")
LONGEST_WRAPPER = 300


class DialectError(Exception):
    """A declaration that cannot be used. The message names the file, the rule and a valid value."""


@dataclasses.dataclass(frozen=True)
class Number:
    """Where a number of a column stands in a line, and its unit."""

    start: int
    end: int
    column: str
    short: bool = False
    scale: str = ""  # "*" and a power of ten, "/60" or the like, or nothing


@dataclasses.dataclass(frozen=True)
class Field:
    """A compiled template."""

    regex: re.Pattern[bytes]
    columns: tuple[tuple[str, bool, str], ...]  # column, short, scale of each group
    literal: bytes  # what it begins with, up to the first number

    def numbers(self, found: re.Match[bytes]) -> Iterator[Number]:
        for group, (column, short, scale) in enumerate(self.columns, 1):
            if found.start(group) >= 0:
                yield Number(*found.span(group), column, short, scale)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line that was understood."""

    dialect: "Dialect"
    kind: str  # step, eval or detail
    start: int  # where the wrapper ends
    numbers: tuple[Number, ...]


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The lines of one trainer."""

    name: str
    source: str  # the trainer, and the file of it that prints the line
    head: Field | None
    separators: bytes
    fields: tuple[Field, ...]  # required ones first
    required: frozenset[str]
    evals: tuple[Field, ...] = ()  # whole lines
    details: tuple[Field, ...] = ()  # whole lines below a step line, of the same step
    ends: tuple[bytes, ...] = ()  # texts that only a finished run prints
    resumes: tuple[bytes, ...] = ()  # texts that only a resumed run prints
    unknown: Mapping[str, tuple[float, ...]] = dataclasses.field(
        default_factory=dict
    )  # values that mean: not known
    zero_based: bool = False  # the last step is N - 1
    loss_is: str = ""  # where the loss is not that of the step's batch: what it is
    keys: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # of Python dictionaries: key -> column

    def read(self, line: bytes) -> Line | None:
        """What the line says, or None where it is not one of this trainer's."""
        for kind, whole in (("eval", self.evals), ("detail", self.details)):
            for template in whole:
                found = template.regex.search(line)
                if (
                    found
                    and not line[found.end() :].strip(b" \t|")
                    and wraps(line[: found.start()])
                ):
                    return Line(self, kind, found.start(), tuple(template.numbers(found)))
        if (
            self.head is None
            or (found := self.head.regex.search(line)) is None
            or not wraps(line[: found.start()])
        ):
            return None
        numbers = [*self.head.numbers(found)]
        place, end = found.end(), len(line.rstrip())
        while (place := skip(line, place, self.separators)) < end:
            if (after := self.read_field(line, place, numbers)) is None:
                return None
            place = after
        if not self.required <= {number.column for number in numbers}:
            return None
        return Line(self, "step", found.start(), tuple(sorted(numbers, key=lambda n: n.start)))

    def read_field(self, line: bytes, place: int, numbers: list[Number]) -> int | None:
        """Where the field at `place` ends, its numbers added; None where it spoils the line."""
        for field in self.fields:
            if found := field.regex.match(line, place):
                numbers.extend(field.numbers(found))
                return found.end()
        if any(field.literal and line.startswith(field.literal, place) for field in self.fields):
            return None
        other = self.other.match(line, place)
        return other.end() if other else None

    @functools.cached_property
    def other(self) -> re.Pattern[bytes]:
        """A field that is not declared: a name, and behind it something."""
        if self.separators == b" ":
            return re.compile(rb"[A-Za-z][\w/()%.-]*[:=] *[^\s:=]+(?=\s|$)")
        apart = re.escape(self.separators)
        return re.compile(rb"[A-Za-z][^" + apart + rb"]*?[:=(][^" + apart + rb"]*")


def wraps(text: bytes) -> bool:
    """Whether a step line may stand behind this."""
    return not text or (
        len(text) <= LONGEST_WRAPPER and not NO_WRAPPER.search(BRACKETS.sub(b"", text))
    )


def skip(line: bytes, place: int, separators: bytes) -> int:
    """The place behind separators and blanks."""
    while place < len(line) and line[place] in b" \t\r" + separators:
        place += 1
    return place


# ---------------------------------------------------------------------------------------------------
# Declarations
# ---------------------------------------------------------------------------------------------------

KEYS = (
    "source",
    "head",
    "separators",
    "fields",
    "optional",
    "evals",
    "details",
    "ends",
    "resumes",
    "unknown",
    "zero_based",
    "loss_is",
    "keys",
)


LISTS = ("fields", "optional", "evals", "details", "ends", "resumes")
TAKEN = ("time", "row")  # the log's clock, and the place of an evaluation


def check(content: Mapping[str, Any]) -> None:
    """Raises ValueError where a key holds something else than it must."""
    for key in LISTS:
        texts = content.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f'{key} must be a list of texts, as in: {key} = ["loss {{loss}}"]')
    if not isinstance(content.get("zero_based", False), bool):
        raise ValueError("zero_based must be true or false, as in: zero_based = true")
    keys, unknown = content.get("keys", {}), content.get("unknown", {})
    if not isinstance(keys, dict) or not all(isinstance(column, str) for column in keys.values()):
        raise ValueError(
            'keys must be a table of columns, as in: keys = { eval_loss = "val_loss" }'
        )
    if not isinstance(unknown, dict) or not all(
        isinstance(values, list) for values in unknown.values()
    ):
        raise ValueError(
            "unknown must be a table of lists of numbers, as in: unknown = { mfu = [0.0] }"
        )
    if taken := [column for column in keys.values() if column in TAKEN]:
        raise ValueError(f"column {taken[0]} is taken, choose another name, as in: {taken[0]}_s")


def check_columns(names: Sequence[str]) -> None:
    """Raises ValueError where the columns of a line are not usable together."""
    for name in names:
        if name in TAKEN:
            raise ValueError(f"column {name} is taken, choose another name, as in: {{{name}_s}}")
        if names.count(name) > 1:
            raise ValueError(
                f"column {name} is there twice in a line; give one another name, as in: {{{name}_mean}}"
            )


def compiled(template: str, behind: bytes = b"") -> Field:
    """A template as a regular expression with a group for each number of a column, and `behind` it."""
    pattern, columns, literal, whole, place = b"", list[tuple[str, bool, str]](), b"", True, 0
    while place < len(template):
        if (token := TOKEN.match(template, place)) is None:
            raise ValueError(
                f"{template[place:]!r} is no part of a template; one looks like: time {{step_ms}}ms"
            )
        name, short, scale, escaped, bracket, blank, text = token.groups()
        place = token.end()
        if scale and not re.fullmatch(r"\*10+|/0*[1-9][0-9]*", scale):
            raise ValueError(
                f"{{{name}{scale}}} is no unit: multiply by a power of ten or divide by a whole number, "
                "as in: {step_ms*1000} or {minutes/60}"
            )
        if name or bracket:
            whole = False
        if name == "~":
            pattern += rb".*?"
        elif name:
            number = SHORT_NUMBER if short else PLAIN if name in COUNTS else NUMBER
            pattern += number if name == "_" else b"(" + number + b")"
            columns += [(name, bool(short), scale or "")] if name != "_" else []
        elif bracket:
            pattern += b"(?:" if bracket == "[" else b")?"
        else:
            pattern += (
                rb"[ \t]*" if blank else re.escape((escaped[0] if escaped else text).encode())
            )
            literal += (escaped[0] if escaped else blank or text).encode() if whole else b""
    check_columns([column for column, _, _ in columns])
    return Field(re.compile(pattern + behind), tuple(columns), literal.rstrip())


def declared(path: Path) -> Dialect:
    """The dialect of a file. Raises DialectError for one that cannot be used."""
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        if wrong := [key for key in content if key not in KEYS]:
            raise ValueError(f"{wrong[0]} is no key; there are {', '.join(KEYS)}")
        check(content)
        separators = content.get("separators", "|").encode()
        apart = rb"(?=[ \t]*(?:$|[\r" + re.escape(separators) + rb"]))"
        required = [compiled(text, apart) for text in content.get("fields", ())]
        optional = [compiled(text, apart) for text in content.get("optional", ())]
        made = Dialect(
            path.stem,
            content["source"],
            compiled(content["head"]) if "head" in content else None,
            separators,
            (*required, *optional),
            frozenset(column for field in required for column, _, _ in field.columns),
            evals=tuple(map(compiled, content.get("evals", ()))),
            details=tuple(compiled(text, rb"[ \t]*$") for text in content.get("details", ())),
            ends=tuple(text.encode() for text in content.get("ends", ())),
            resumes=tuple(text.encode() for text in content.get("resumes", ())),
            unknown={
                key: tuple(map(float, values)) for key, values in content.get("unknown", {}).items()
            },
            zero_based=content.get("zero_based", False),
            loss_is=content.get("loss_is", ""),
            keys=content.get("keys", {}),
        )
        check_columns(
            [
                column
                for field in ([made.head] if made.head else []) + required
                for column, _, _ in field.columns
            ]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DialectError(f"{path} declares no dialect: {said}") from None
    if not (made.keys or (made.head and "step" in {column for column, _, _ in made.head.columns})):
        raise DialectError(
            f'{path} declares no dialect: head must hold {{step}}, as in: head = "iter {{step}}:"'
        )
    return made


def read_dialects(folder: Path = FOLDER) -> Sequence[Dialect]:
    """All that are declared, by name."""
    return [declared(path) for path in sorted(folder.glob("*.toml"))]
