"""Rows to documents, in a fixed order, from any place on. What is wrong is refused or dropped.

What is wrong with a file is refused: an error page or a git-lfs pointer, another format than its name
says, a file that is truncated or damaged, half a last line, a column that it does not have (for JSON:
that none of the first 100 objects has) or that holds something else than text. The error names the
file, the line or row, and the remedy; nothing after it is read.

What is wrong with a row is dropped, named and counted by reason (REASONS). A file of which at least
100 rows were read, and more than the source's `max_dropped` of them dropped, is refused at its end:
most often a column was renamed. (Not a Parquet file of which another process has read the beginning.)

The text is taken as it is, but for a byte-order mark at the start of a file. A plain text file of a
declared source is one document, named like the file. Elsewhere the `id` column names a document, and
"FILE:ROW" does where there is none. Documents of DATA, and of a source with hold_out_by = "text", are
named by the hash of their text, so that equal texts are held out together.
"""

import dataclasses
import functools
import hashlib
import logging
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from record.durable import make_printable
from train.data.sources.content import EMBEDDED_ONLY, FORMATS, format_of
from train.data.sources.fetch import Files
from train.data.sources.formats import (
    LONGEST_TEXT,
    UNREADABLE,
    Bad,
    Broken,
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
    """Yield the rows of a source from a place on, in the order of its files. Raises CorpusError."""
    check_formats(pinned)
    column = ""
    for number in range(at.file, len(pinned.files)):
        path = files.path(number)
        files.prefetch(number + 1)
        start = at.row if number == at.file else 0
        reading = Reading(pinned, number)
        try:
            column = reading.choose_column(path, column)
            yield from reading.read(path, start)
        except Broken as broken:
            raise reading.refusal(str(broken), broken.remedy, broken.row) from None
        except UNREADABLE as error:
            what = f"damaged or truncated ({' '.join(str(error).split())})"
            raise reading.refusal(what, row=reading.rows) from error
        files.done(number)


@functools.cache  # a source is read several times
def say_column(file: str, column: str) -> None:
    log.info("%s: its text is the column %r", make_printable(file), column)


def piece_bytes(pinned: Pinned) -> int:
    """Return the size of the pieces that plain text is cut into: small enough to hold out some."""
    total = sum(file.bytes for file in pinned.files)
    return min(max(total // PIECES, SMALLEST_PIECE), LARGEST_PIECE)


def check_formats(pinned: Pinned) -> None:
    """Raise CorpusError if a file cannot be read, by its name."""
    source = pinned.source
    if source.place and source.kind == "files":
        return  # every file was looked at when the source was pinned
    readable = [
        suffix for suffix in FORMATS if source.kind == "stdlib" or suffix not in EMBEDDED_ONLY
    ]
    for file in pinned.files:
        if not file.name.lower().endswith(tuple(readable)):
            raise CorpusError(
                f"{file.name}: not a kind of file that {source.name} can be read from; there are: "
                f"{', '.join(readable)}. {source.remedies['format']}."
            )


class Reading:
    """What is known of a file while its rows are read."""

    def __init__(self, pinned: Pinned, number: int):
        self.pinned, self.number = pinned, number
        self.source = pinned.source
        self.name = pinned.files[number].name
        self.is_text = format_of(self.name) in ("", "text")
        self.rows = 0  # up to the one that is read next, from the start of the file
        self.count = self.dropped = self.objects = 0
        self.unseen = set(self.source.columns)  # columns that no object had so far
        self.columns: dict[str, None] = {}  # of the first objects
        self.first_drop = 0, ""  # the row that was dropped first, and why

    def choose_column(self, path: Path, before: str) -> str:
        """Find the column of text where none is named, and return it. before: that of the last file."""
        source = self.source
        if source.place and source.text and self.is_text:
            raise Broken("is plain text and has no columns", f"Remove #{source.text}")
        if source.text:
            return before
        column = find_text_column(path, self.name, source.place)
        self.source = dataclasses.replace(source, text=column)
        self.unseen = {column}
        if column != before and not self.is_text:
            say_column(self.name, column)
        return column

    def read(self, path: Path, start: int) -> Iterator[Document | Dropped]:
        """Yield what becomes of the rows from `start` on. Raises Broken."""
        source = self.source
        pieces = piece_bytes(self.pinned) if source.place else 0
        for row, value in read(
            path, self.name, source.columns, bool(source.template), source.id, start, pieces
        ):
            item = self.take(row, value)
            self.rows = row + 1
            if row >= start:
                yield item
        self.finish()

    def take(self, row: int, value: dict[str, Any] | Bad) -> Document | Dropped:
        """Return the document of a row, or why there is none."""
        self.count += 1
        at = Cursor(self.number, row)
        if isinstance(value, dict):
            if self.unseen:
                self.look_for_columns(row, value)
            made = text_of(self.source, value, self.name, row)
        else:
            made = value
        if isinstance(made, Bad):
            if not self.first_drop[1]:
                self.first_drop = row, made.what
            self.dropped += 1
            return Dropped(made.reason, at, made.what)
        name, text = made
        if self.source.place or self.source.hold_out_by == "text":
            name = hashlib.sha256(text.encode()).hexdigest()  # so the text decides what is held out
        return Document(name, text, at)

    def look_for_columns(self, row: int, value: Mapping[str, Any]) -> None:
        """Raise Broken if a column is in none of the first objects."""
        self.objects += 1
        self.unseen -= value.keys()
        self.columns |= dict.fromkeys(list(value)[:20])
        if self.unseen and self.objects >= ENOUGH_ROWS:
            self.refuse_columns(row)

    def refuse_columns(self, row: int | None = None) -> None:
        raise Broken(
            f"no column {min(self.unseen)!r} in {self.objects} rows; they have: "
            f"{', '.join(self.columns)}",
            "column",
            row,
        )

    def finish(self) -> None:
        """Raise Broken if the whole file was not what it should be."""
        if self.unseen and self.objects:
            self.refuse_columns()
        if self.count < self.rows:
            return  # another process has read its beginning
        row, why = self.first_drop
        if self.source.place and self.count == self.dropped > 0:
            raise Broken(f"has no text in its {self.count:,} rows ({why})", "Leave it out", row)
        most = self.source.max_dropped
        if self.count >= ENOUGH_ROWS and self.dropped > most * self.count:
            raise Broken(
                f"{self.dropped} of {self.count} rows had to be dropped, more than max_dropped = "
                f"{most:g} of them ({why})",
                "rows",
                row,
            )

    def place(self, row: int) -> str:
        """Name a row as an editor counts: FILE:LINE, or FILE: row N where a row is no line."""
        if format_of(self.name) == "lines":
            return f"{self.name}:{row + 1}"
        return f"{self.name}: row {row + 1}"

    def refusal(self, what: str, remedy: str = "", row: int | None = None) -> CorpusError:
        """Return the error for the file, or for a row of it."""
        source = self.source
        again = "hub" if source.kind == "hub" else "files"  # on the Hub its bytes are like this
        remedy = source.remedies.get(remedy or again, remedy)
        place = self.name if row is None else self.place(row)
        return CorpusError(f"{place} of {source.name}: {what}. {remedy}.")


def text_of(source: Source, value: dict[str, Any], file: str, row: int) -> tuple[str, str] | Bad:
    """Return (name, text) of a row, or what is wrong with it."""
    text = fill(source.template, value) if source.template else value.get(source.text)
    if isinstance(text, Bad):
        return text
    if text is None:
        how = "null" if source.text in value else "absent"
        return Bad("null", f"column {source.text!r} is {how}")
    if type(text) is not str:
        kind = type(text).__name__
        return Bad("type", f"column {source.text!r} is {kind}: {str(text)[:40]!r}")
    if not text or text.isspace():
        return Bad("empty", f"{len(text)} characters of white space" if text else "no characters")
    if "\0" in text:
        return Bad("nul", f"character {text.index(chr(0))} of {len(text)} is NUL")
    if not text.isascii() and (half := half_pair(text)) >= 0:
        return Bad("surrogate", f"character {half} of {len(text)} is {text[half]!r}")
    if len(text) > LONGEST_TEXT // 4 and len(text.encode()) > LONGEST_TEXT:
        return Bad("long", f"{len(text)} characters")
    name = value.get(source.id)
    if type(name) is not str and name is not None:
        name = str(name)
    if not name or (not name.isascii() and half_pair(name) >= 0):
        name = file if format_of(file) == "text" else f"{file}:{row}"
    return name, text


def half_pair(text: str) -> int:
    """Return the place of the first lone surrogate, or -1."""
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


def fill(template: str, value: dict[str, Any]) -> str | Bad:
    """Return the text that a template makes of a row, or what is wrong with it."""
    try:
        return FILLER.vformat(template, (), value)
    except Unfit as unfit:
        return unfit.bad
    except KeyError as missing:
        return Bad("template", f"no {missing.args[0]!r}; there are: {', '.join(list(value)[:20])}")
    except (IndexError, TypeError, ValueError) as error:
        return Bad("template", f"{error}")
