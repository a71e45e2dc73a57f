"""The way to read a hundred megabytes: a line that was understood becomes a pattern for all lines like it.

    step 00010/12800 | loss: 9.123456 | ...   ->   ^step ([0-9][0-9,]*)/([0-9][0-9,]*) \\| loss: ([0-9]+\\.[0-9]{6}) ...

All letters between the numbers must be the same, so a line that says something else goes the slow way (dialect.py). A
block of text is split at such lines in one call. Numbers with a fixed count of decimals are read as whole numbers and
divided by a power of ten: both are exact in float64 up to 15 digits, so the quotient is the nearest float64, as float()
would give it.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from analysis.logs.dialect import DECIMAL, NUMBER, SHORT, SHORT_NUMBER, Dialect, Line, Number

CLOCK = re.compile(
    rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?|\d\d/\d\d/\d{4} \d\d:\d\d:\d\d"
)
DIGITS = re.compile(rb"([0-9][0-9.,]*(?:[eE][-+]?[0-9]+)?)|([ \t]+)|([^0-9 \t]+)")
FIXED = re.compile(rb"[0-9]+\.([0-9]+)")
TAG = re.compile(rb"\[(pod/[^\]]*)\]|\[rank *(\d+)\]|\[default(\d+)\]|\brank[ =](\d+)|^ *(\d+): ")
EXACT_DIGITS = 15

INT, FLOAT, TEXT = -1, -2, -3  # kinds of number; a positive kind has so many decimals
PATTERNS = {
    INT: rb"([0-9][0-9,]{0,%d})" % (EXACT_DIGITS - 1),
    FLOAT: b"(" + DECIMAL + b")",
    TEXT: b"(" + NUMBER + b")",
}
CLOCK_COLUMN = "time"
NO_TAG = b"|"
SILENT = -1.7976931348623157e308  # where a line says nothing, or n/a; a NaN is one that was printed


@dataclasses.dataclass(frozen=True)
class Shape:
    """Lines that differ in their numbers only."""

    dialect: Dialect
    kind: str  # step or eval
    tag: bytes  # of the process that prints it
    literals: tuple[bytes, ...]  # patterns of what stands between the numbers, one more than those
    numbers: tuple[Number, ...]
    kinds: tuple[int, ...]
    regex: re.Pattern[bytes]

    def or_wider(self, other: "Shape") -> "Shape":
        """The other, or where the two differ in the form of numbers only, a shape that is both."""
        same = (self.literals, self.tag, self.kind) == (other.literals, other.tag, other.kind)
        if not same or self.dialect is not other.dialect or self.kinds == other.kinds:
            return other
        kinds = tuple(
            a if a == b else TEXT if TEXT in (a, b) else FLOAT
            for a, b in zip(self.kinds, other.kinds, strict=True)
        )
        return shape_of_parts(
            other.dialect, other.kind, other.tag, other.literals, other.numbers, kinds
        )

    def columns(self, pieces: Sequence[bytes]) -> dict[str, np.ndarray]:
        """Columns of the lines that `regex.split` found."""
        width = len(self.numbers) + 1
        return {
            number.column: values(pieces[group::width], kind, number)
            for group, (number, kind) in enumerate(zip(self.numbers, self.kinds, strict=True), 1)
        }


def shape_of(line: bytes, read: Line) -> Shape:
    """The shape of a line that was understood."""
    wrapper = line[: read.start]
    numbers = list(read.numbers)
    if clock := CLOCK.search(wrapper):
        numbers.insert(0, Number(*clock.span(), CLOCK_COLUMN))
    literals, kinds, place = [], [], 0
    for number in numbers:
        literals.append(literal(line[place : number.start], place < read.start))
        text = line[number.start : number.end]
        fixed = FIXED.fullmatch(text)
        kinds.append(
            TEXT
            if number.column == CLOCK_COLUMN or number.short or not text[-1:].isdigit()
            else FLOAT
            if len(text) > EXACT_DIGITS
            else len(fixed[1])
            if fixed
            else INT
            if text.replace(b",", b"").isdigit()
            else FLOAT
        )
        place = number.end
    literals.append(literal(line[place:].rstrip(), False))
    return shape_of_parts(
        read.dialect, read.kind, tag_of(wrapper), tuple(literals), tuple(numbers), tuple(kinds)
    )


def shape_of_parts(
    dialect: Dialect,
    kind: str,
    tag: bytes,
    literals: tuple[bytes, ...],
    numbers: tuple[Number, ...],
    kinds: tuple[int, ...],
) -> Shape:
    pattern = literals[0]
    for number, form, behind in zip(numbers, kinds, literals[1:], strict=True):
        if number.column == CLOCK_COLUMN:
            pattern += b"(" + CLOCK.pattern + b")"
        elif number.short:
            pattern += b"(" + SHORT_NUMBER + b")"
        else:
            pattern += PATTERNS.get(form) or rb"([0-9]{1,%d}\.[0-9]{%d})" % (
                EXACT_DIGITS - form,
                form,
            )
        pattern += behind
    return Shape(
        dialect, kind, tag, literals, numbers, kinds, re.compile(b"(?m)^" + pattern + rb"[ \t]*$")
    )


def literal(text: bytes, in_wrapper: bool) -> bytes:
    """A pattern for text between numbers: digits in it may be others, but in the tag of a process."""
    tag = TAG.search(text) if in_wrapper else None
    pattern = b""
    for found in DIGITS.finditer(text):
        if tag and tag.start() <= found.start() < tag.end():
            pattern += re.escape(found[0])
        else:
            padding = found[2] and (found.end() == len(text) or text[found.end()] in b"0123456789")
            pattern += (
                rb"[0-9][0-9.,]*(?:[eE][-+]?[0-9]+)?"
                if found[1]
                else rb"[ \t]+"
                if padding
                else re.escape(found[0])
            )
    return pattern


def tag_of(wrapper: bytes) -> bytes:
    """Which process prints the line, as far as its wrapper says: `pod|rank`, either of which may be empty."""
    pod = rank = b""
    for found in TAG.finditer(wrapper):
        pod = found[1] or pod
        rank = found[2] or found[3] or found[4] or found[5] or rank
    return pod + b"|" + rank


# ---------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------


def values(texts: Sequence[bytes], kind: int, number: Number) -> np.ndarray:
    """(n,) float64 in the column's unit."""
    if number.column == CLOCK_COLUMN:
        return seconds(texts)
    if kind >= INT:
        whole = np.fromstring(b" ".join(texts).translate(None, b".,"), dtype=np.int64, sep=" ")
        exponent = max(kind, 0)
        if number.scale.startswith("*"):
            exponent -= len(number.scale) - 2  # a power of ten
        scaled = (
            whole / 10**exponent if exponent >= 0 else (whole * 10**-exponent).astype(np.float64)
        )
        return scaled / int(number.scale[1:]) if number.scale.startswith("/") else scaled
    return np.array([value(text, number) for text in texts], np.float64)


def value(text: bytes, number: Number) -> float:
    """One number in the column's unit; SILENT for n/a."""
    if text in (b"n/a", b"None"):
        return SILENT
    said = text.replace(b",", b"").decode()
    if number.short and text[-1:] in SHORT:
        said = said[:-1] + SHORT[text[-1:]]
    if number.scale.startswith("*") and said[-1].isdigit() and "e" not in said:
        return float(f"{said}e{len(number.scale) - 2}")
    return float(said) / int(number.scale[1:]) if number.scale.startswith("/") else float(said)


def seconds(texts: Sequence[bytes]) -> np.ndarray:
    """(n,) Unix seconds of clocks that name no time zone, taken as UTC."""
    said = [text.decode().replace(",", ".").replace(" ", "T") for text in texts]
    said = [f"{t[6:10]}-{t[:2]}-{t[3:5]}{t[10:]}" if t[2] == "/" else t for t in said]
    try:
        return np.array(said, "datetime64[us]").astype(np.int64) / 1e6
    except ValueError:  # a 31st of February, or the like
        return np.full(len(texts), np.nan)


def row(line: bytes, read: Line) -> Mapping[str, float]:
    """The columns of one line that was understood."""
    found = {
        number.column: value(line[number.start : number.end], number) for number in read.numbers
    }
    clock = CLOCK.search(line[: read.start])
    return found | ({CLOCK_COLUMN: float(seconds([clock[0]])[0])} if clock else {})
