"""What the lines of a trainer look like: analysis/logs/dialects/NAME.toml, one small file per trainer.

    head = "iter {step}:"      fields = ["loss {loss}", "time {step_ms}ms"]      separators = ","

A line is a head and then fields in any order. Each field comes after a separator, and is followed by one or by the
end of the line. Only a field that ends with its unit may be followed by anything: another process may have printed
into the line. {column} is a number, {column:short} one like 4.71K; {column*1000} and {column/60} convert its unit; {_} is a
number and {~} a text that nobody needs; [x] may be missing; a blank is any number of blanks. Every column of `fields`
must be there, so a line that was cut short is no step. Those of `optional` need not: one that is torn is missing.
Fields that are not declared are ignored. docs/logs.md shows how to add a trainer.
"""

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from record.exit_codes import BAD_SETTING

FOLDER = Path(__file__).resolve().parent / "dialects"
Values = dict[str, float | None]  # column -> value, None if it is printed as not known

# So many digits that every number is finite.
DIGITS = r"[-+]?(?:[0-9]{1,99}(?:,[0-9]{3}){0,9}(?:\.[0-9]*)?|\.[0-9]+)"
WHOLE = r"(?![.,]?[0-9])"  # so that 430 is never read of a torn 430,6, nor 6.0 of 6.006.000
NUMBER = rf"(?:{DIGITS}(?:[eE][-+]?[0-9]{{1,3}})?|[-+]?(?:nan|NaN|inf|Infinity)|n/a|None){WHOLE}"
NUMBERS = {
    ":short": rf"(?:{DIGITS}[KMBGTP]|{NUMBER})",
    "step": DIGITS + WHOLE,  # a line whose step is nan is no step
    "last_step": DIGITS + WHOLE,
}
SYNTAX = {
    " ": r"[ \t]*",
    "[": "(?:",
    "]": ")?",
    "[[": r"\[",
    "]]": r"\]",
    "{{": r"\{",
    "}}": r"\}",
    "{~}": ".*?",
}
SHORT = {"K": 3, "M": 6, "B": 9, "G": 9, "T": 12, "P": 15}  # powers of ten
LINE_END = r"(?=[ \t|]*$)"

PIECES = re.compile(r"(\{\{|\}\}|\{[^{}]*\}|\[\[|\]\]|[\[\]]| )")
PLACEHOLDER = re.compile(r"\{(\w+)(:short)?(?:\*1(0+)|/([1-9][0-9]*))?\}")
COLUMN = re.compile(r"\{([a-z]\w*)")
OPTIONAL_ENDS = re.compile(r"(?:\[[^\[\]]*\])+$")

# What makes a line a string of a program, a quotation or a comment, when it stands before the head.
CODE = re.compile(r"""(?:^|[\s=(\[{,:]|\b[bfr])["'`]+\s*$|^\s*(?:#|//)|\s#\s""")
NEAR = 300  # characters before the head that are searched for these
# Without a step, as in "val loss 3.2", an evaluation may also be a part of another line.
OTHER_LINE = re.compile(r"\b(?:[Ss]tep|[Ii]ter|[Ll]oss)\b")

# Every key, as an example.
EXAMPLES = """\
source = "my trainer"
head = "iter {step}:"
separators = "|"
fields = ["loss {loss}", "{step_ms*1000} s"]
optional = ["norm {grad_norm}"]
evals = ["val loss {val_loss}"]
details = ["lr={lr}"]
ends = ["Training complete"]
unknown = { mfu = [0.0] }
zero_based = true
loss_is = "a mean over the last steps"
bar = true
"""


class DialectError(Exception):
    """A declaration that cannot be used. The message names the file, the rule and a valid value."""

    exit_code = BAD_SETTING


@dataclass(frozen=True)
class Number:
    """A number of a template.

    Attributes:
        kind: of the template: step, eval, detail or field.
        power: of ten, to multiply with.
        unknown: values that mean that it is not known.
    """

    kind: str
    column: str
    power: int
    divisor: int
    unknown: Sequence[float]

    def read(self, text: str) -> float | None:
        """Return the value in the column's unit; None if it is not known."""
        if text in ("n/a", "None"):
            return None
        text = text.replace(",", "")
        power = self.power + SHORT.get(text[-1], 0)
        if power:  # the nearest float, as if it were so printed
            value = float(Decimal(text.rstrip("KMBGTP")).scaleb(power))
        else:
            value = float(text) / self.divisor
        return None if value in self.unknown else value


class Templates:
    """Templates as one regular expression, with a group for each number of a column."""

    def __init__(self, before: str, unknown: Mapping[str, Sequence[float]]) -> None:
        self.before = before
        self.unknown = unknown
        self.patterns: list[str] = []
        self.numbers: list[Number] = []
        self.by_last_group: dict[int | None, list[tuple[int, Number]]] = {None: []}

    def add(self, kind: str, templates: Sequence[str], after: str) -> None:
        """Add templates; `after` must follow one that ends with a number. Raises ValueError."""
        for template in templates:
            pattern = ""
            first = len(self.numbers)
            for piece in PIECES.split(template):
                place = PLACEHOLDER.fullmatch(piece)
                if place:
                    column, short, zeros, divisor = place.groups()
                    digits = NUMBERS.get(short or column, NUMBER)
                    if column == "_":
                        pattern += digits
                        continue
                    pattern += f"({digits})"
                    unknown = self.unknown.get(column, ())
                    power = len(zeros or "")
                    number = Number(kind, column, power, int(divisor or 1), unknown)
                    self.numbers.append(number)
                elif "{" in piece and piece not in SYNTAX:
                    raise ValueError(
                        f"{piece} is no part of a template; some are: {{loss}}, {{step_ms*1000}}, "
                        "{minutes/60}, {tokens:short}, {_} and {~}"
                    )
                else:
                    pattern += SYNTAX.get(piece, re.escape(piece))
            if OPTIONAL_ENDS.sub("", template).endswith("}"):
                pattern += after
            self.patterns.append(pattern)
            groups = list(enumerate(self.numbers[first:], first + 1))
            self.by_last_group |= {group: groups for group, _ in groups}

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(f"{self.before}(?:{'|'.join(self.patterns) or '(?!)'})")

    def add_numbers(self, match: re.Match[str], values: Values) -> bool:
        """Add the numbers of a match; return False if there is one already."""
        for group, number in self.by_last_group[match.lastindex]:
            text = match[group]
            if text is None:
                continue
            if number.column in values:
                return False
            values[number.column] = number.read(text)
        return True


class Line(NamedTuple):
    """A step line, an evaluation or a detail of a step.

    Attributes:
        prefix: the text before it: what a logger or kubectl writes there, or another process.
        text: the line itself.
        end: where it ends.
    """

    kind: str
    prefix: str
    text: str
    end: int
    values: Values


@dataclass(eq=False)
class Dialect:
    """The lines of one trainer, as declared. Raises ValueError for what cannot be used."""

    name: str
    source: str  # the trainer, and the file of it that prints the line
    head: str = ""
    separators: str = "|"
    fields: Sequence[str] = ()
    optional: Sequence[str] = ()
    evals: Sequence[str] = ()
    details: Sequence[str] = ()
    ends: Sequence[str] = ()  # texts that only a finished run prints
    unknown: Mapping[str, Sequence[float]] = field(default_factory=dict)
    zero_based: bool = False  # the last of N steps is N - 1
    loss_is: str = ""  # what the loss is a mean of, if it is one
    bar: bool = False  # the next progress bar shows the step

    def __post_init__(self) -> None:
        apart = f"[{re.escape(self.separators)}]"
        field_end = rf"(?=[ \t]*(?:{apart}|$))"
        self.starts = Templates("", self.unknown)
        self.starts.add("eval", self.evals, LINE_END)
        self.starts.add("detail", self.details, LINE_END)
        self.starts.add("step", [self.head], field_end)
        self.rest = Templates(rf"{apart}[ \t]*", self.unknown)
        self.rest.add("field", [*self.fields, *self.optional], field_end)
        columns = COLUMN.findall("".join(self.fields))
        self.required = set(columns)
        columns += COLUMN.findall(self.head)
        if "step" not in columns and not self.bar:
            raise ValueError('head must hold {step}, as in: head = "iter {step}:"')
        for column in columns:
            if columns.count(column) > 1:
                raise ValueError(
                    f"column {column} is there twice; give one another name, as in: {{{column}_mean}}"
                )

    def read(self, line: str) -> list[Line]:
        """Return what is whole in a line: nothing, or several things if several processes printed into it."""
        lines: list[Line] = []
        end = 0
        starts = list(self.starts.regex.finditer(line))
        limits = [*(start.start() for start in starts[1:]), len(line)]
        for start, limit in zip(starts, limits, strict=False):
            values: Values = {}
            self.starts.add_numbers(start, values)
            kind = self.starts.numbers[start.lastindex - 1].kind if start.lastindex else "step"
            stop = start.end()
            if kind == "step":
                text = self.separators[0] + line[stop:limit]
                for match in self.rest.regex.finditer(text):
                    if not self.rest.add_numbers(match, values):
                        break  # a column that comes again is of another line, and so is the rest
                    stop = start.end() - 1 + match.end()
                if not self.required <= values.keys():
                    continue
            before = (line, max(end, start.start() - NEAR), start.start())
            if CODE.search(*before) or ("step" not in values and OTHER_LINE.search(*before)):
                continue
            text = line[start.start() : stop]
            lines.append(Line(kind, line[end : start.start()], text, stop, values))
            end = stop
        return lines


@functools.cache
def read_dialects(folder: Path = FOLDER) -> Sequence[Dialect]:
    """Return the dialects of a folder, by name. Raises DialectError."""
    dialects = []
    examples = tomllib.loads(EXAMPLES)
    for path in sorted(folder.glob("*.toml")):
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            for key, value in content.items():
                if type(value) is not type(examples.get(key)):
                    raise ValueError(f"{key} = {value!r} is none of these keys:\n{EXAMPLES}")
            dialects.append(Dialect(path.stem, **content))
        except (OSError, ValueError, TypeError, re.error) as error:
            raise DialectError(f"{path} declares no dialect: {error}") from None
    return dialects
