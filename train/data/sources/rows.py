"""Rows to documents, in a fixed order, from any place on; what is wrong is refused or dropped by this rule.

What is wrong with a file is refused: an error page or a git-lfs pointer instead of it, another format than its name
says, a gzip, zstd, parquet or Arrow file that is truncated or damaged, half a last line of JSON, a column that it
does not have (for JSON lines: that none of the first 100 objects has) or that holds something else than text. The
error names the file, the row as far as reading got, and the remedy; nothing behind it is read.

What is wrong with a row is dropped, named and counted by reason (REASONS). A file of at least 100 rows of which more
than the source's `max_dropped` were dropped is refused at its end: most often a column was renamed.

The text is taken as it is, but for a byte-order mark at the start of a file. A .txt file is one document, named like
the file. Elsewhere the `id` column names a document, and "FILE:ROW" does where there is none.
"""

import dataclasses
import functools
import hashlib
import logging
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from record.durable import make_printable
from train.data.sources.content import EMBEDDED_ONLY, FORMATS, format_of
from train.data.sources.fetch import Files
from train.data.sources.formats import (
    LONGEST_TEXT,
    UNREADABLE,
    Bad,
    Broken,
    Skipped,
    find_text_column,
    read,
)
from train.data.sources.pin import Pinned
from train.data.sources.source import CorpusError, Source

log = logging.getLogger(__name__)

ENOUGH_ROWS = 100  # to judge a file by
PIECES = 400  # of plain text, at least: of 400, a twentieth is held out for certain (but 1 in 10^9)
SMALLEST_PIECE = 500  # bytes
LARGEST_PIECE = 2**16

REASONS = {
    "null": "the text is null, or absent where other rows of the file have it",
    "empty": "the text is empty or only white space, or the line is blank",
    "not json": "a whole line that is not a JSON object",
    "utf-8": "bytes that are not UTF-8",
    "nul": "NUL characters in the text",
    "surrogate": "half a surrogate pair in the text",
    "type": "the text is not a string",
    "template": "a key that the template names is missing in this row",
    "long": f"longer than {LONGEST_TEXT} bytes",
}


class Cursor(NamedTuple):
    """The next row to read: (0, 0) at the start, (number of files, 0) at the end."""

    file: int
    row: int


START = Cursor(0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A text with a name that is unique in its source. at: its own place."""

    name: str
    text: str
    at: Cursor


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """A row that gives no document. reason: a key of REASONS; what: a short sentence."""

    reason: str
    at: Cursor
    what: str


def documents(pinned: Pinned, files: Files, at: Cursor = START) -> Iterator[Document | Dropped]:
    """The rows of a source from a place on, in the order of its files. Raises CorpusError."""
    check_formats(pinned)
    pieces = piece_bytes(pinned) if pinned.source.place else 0
    column = ""
    for number in range(at.file, len(pinned.files)):
        path = files.path(number)
        files.prefetch(number + 1)
        start = at.row if number == at.file else 0
        reading = Reading(pinned.source, pinned.files[number].name, number)
        try:
            source = reading.s
            if source.place and source.text and format_of(reading.name) in ("", "text"):
                raise Broken("is plain text and has no columns", f"Remove #{source.text}")
            if not source.text:
                text = find_text_column(path, reading.name, source.place)
                source = dataclasses.replace(source, text=text)
                reading.take_source(source)
                if text != column and format_of(reading.name) not in ("", "text"):
                    say_column(reading.name, text)
                column = text
            for row, value in read(
                path,
                reading.name,
                source.columns,
                bool(source.template),
                source.id,
                start,
                pieces,
            ):
                item = reading.take(row, value)
                if item and row >= start:
                    yield item
            reading.finish()
        except Broken as broken:
            raise reading.refusal(str(broken), broken.remedy) from None
        except UNREADABLE as error:
            raise reading.refusal(
                f"damaged or truncated ({' '.join(str(error).split())})"
            ) from error
        files.done(number)


@functools.cache  # a source is read several times
def say_column(file: str, column: str) -> None:
    log.info("%s: its text is the column %r", make_printable(file), column)


def piece_bytes(pinned: Pinned) -> int:
    """Return the size of the pieces that plain text is cut into: small enough to hold out some."""
    total = sum(file.bytes for file in pinned.files)
    return min(max(total // PIECES, SMALLEST_PIECE), LARGEST_PIECE)


def check_formats(pinned: Pinned) -> None:
    """Raises CorpusError if a file cannot be read, by its name."""
    if pinned.source.place and pinned.source.kind == "files":
        return  # every file was looked at when the source was pinned
    embedded = pinned.source.kind == "stdlib"
    readable = [suffix for suffix in FORMATS if embedded or suffix not in EMBEDDED_ONLY]
    for file in pinned.files:
        if not format_of(file.name) or not file.name.lower().endswith(tuple(readable)):
            raise CorpusError(
                f"{file.name}: not a kind of file that {pinned.source.name} can be read from; there are: "
                f"{', '.join(readable)}. {pinned.source.remedies['format']}."
            )


class Reading:
    """What is known of a file while its rows are read: how many there were, how many were dropped."""

    def __init__(self, s: Source, name: str, number: int):
        self.name, self.number = name, number
        self.row = self.rows = self.dropped = self.objects = 0
        self.has: dict[str, None] = {}  # the columns of the first objects
        self.why = ""  # the last row was dropped
        self.take_source(s)

    def take_source(self, s: Source) -> None:
        """Read by this declaration."""
        self.s = s
        self.unseen = set(s.columns)

    def take(self, row: int, value: dict[str, Any] | Bad | Skipped) -> Document | Dropped | None:
        """The document of a row, or why there is none; None for rows that were skipped."""
        self.row = row
        if isinstance(value, Skipped):
            self.rows += value.rows
            self.dropped += value.nulls
            return None
        self.rows += 1
        made: tuple[str, str] | Bad
        if isinstance(value, dict):
            if self.unseen:
                self.look_for_columns(value)
            made = text_of(self.s, value, self.name, row)
        else:
            made = value
        if isinstance(made, Bad):
            self.dropped += 1
            self.why = made.what
            return Dropped(made.reason, Cursor(self.number, row), made.what)
        name, text = made
        if self.s.place:
            name = hashlib.sha256(text.encode()).hexdigest()  # so the text decides what is held out
        return Document(name, text, Cursor(self.number, row))

    def look_for_columns(self, value: Mapping[str, Any]) -> None:
        """Raises Broken if a column is in none of the first objects."""
        self.objects += 1
        self.unseen -= value.keys()
        self.has |= dict.fromkeys(list(value)[:20])
        if self.unseen and self.objects >= ENOUGH_ROWS:
            self.no_column()

    def no_column(self) -> None:
        raise Broken(
            f"no column {min(self.unseen)!r} in {self.objects} rows; they have: {', '.join(self.has)}",
            "column",
        )

    def finish(self) -> None:
        """Raises Broken if the whole file was not what it should be."""
        if self.unseen and self.objects:
            self.no_column()
        if self.s.place and self.rows == self.dropped > 0:
            raise Broken(f"has no text in its {self.rows:,} rows ({self.why})", "Leave it out")
        if self.rows >= ENOUGH_ROWS and self.dropped > self.s.max_dropped * self.rows:
            raise Broken(
                f"{self.dropped} of {self.rows} rows had to be dropped, more than max_dropped = "
                f"{self.s.max_dropped:g} of them",
                "rows",
            )

    def refusal(self, what: str, remedy: str = "") -> CorpusError:
        """The error for the file as far as it was read. Rows are counted from 1, as editors count lines."""
        again = "hub" if self.s.kind == "hub" else "files"  # on the hub its bytes are so
        remedy = self.s.remedies.get(remedy or again, remedy)
        row = "line" if format_of(self.name).startswith("json") else "row"
        place = f", at {row} {self.row + 1}" if self.row else ""
        return CorpusError(f"{self.name} of {self.s.name}{place}: {what}. {remedy}.")


def text_of(s: Source, value: dict[str, Any], file: str, row: int) -> tuple[str, str] | Bad:
    """(name, text) of a row, or what is wrong with it."""
    text: Any
    if s.template:
        text = filled(s.template, value)
        if isinstance(text, Bad):
            return text
    else:
        text = value.get(s.text)
    if text is None:
        return Bad("null", f"column {s.text!r} is {'null' if s.text in value else 'absent'}")
    if type(text) is not str:
        return Bad("type", f"column {s.text!r} is {type(text).__name__}: {str(text)[:40]!r}")
    if not text or text.isspace():
        return Bad("empty", f"{len(text)} characters of white space" if text else "no characters")
    if "\0" in text:
        return Bad("nul", f"character {text.index(chr(0))} of {len(text)} is NUL")
    if not text.isascii() and (half := half_pair(text)) >= 0:
        return Bad("surrogate", f"character {half} of {len(text)} is {text[half]!r}")
    if len(text) > LONGEST_TEXT // 4 and len(text.encode()) > LONGEST_TEXT:
        return Bad("long", f"{len(text)} characters")
    name = value.get(s.id)
    if type(name) is not str and name is not None:
        name = str(name)
    if not name or (not name.isascii() and half_pair(name) >= 0):
        name = file if format_of(file) == "text" else f"{file}:{row}"
    return name, text


def half_pair(text: str) -> int:
    """The place of the first lone surrogate, or -1."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return -1


class Filler(string.Formatter):
    """str.format over a row, for which a null or a structure is no text."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if value is None:
            raise Unfit(Bad("null", f"{{{field_name}}} is null"))
        if not isinstance(value, (str, int, float)):
            raise Unfit(
                Bad("type", f"{{{field_name}}} is {type(value).__name__}: {str(value)[:40]!r}")
            )
        return value, first


class Unfit(Exception):
    """A value that a template cannot take, as a Bad."""

    def __init__(self, bad: Bad):
        super().__init__(bad)
        self.bad = bad


FILLER = Filler()


def filled(template: str, value: dict[str, Any]) -> str | Bad:
    """The text that a template makes of a row, or a Bad."""
    try:
        return FILLER.vformat(template, (), value)
    except Unfit as unfit:
        return unfit.bad
    except KeyError as missing:
        return Bad("template", f"no {missing.args[0]!r}; there are: {', '.join(list(value)[:20])}")
    except (IndexError, TypeError, ValueError) as error:
        return Bad("template", f"{error}")
