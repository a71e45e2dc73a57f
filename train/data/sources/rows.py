"""Rows to documents, in a fixed order, from any place on. What is wrong is refused or dropped.

What is wrong with a file is refused: an error page or a git-lfs pointer, a format that is not read, a
file that is truncated or damaged, half a last line, a row that is ambiguous (a key that comes twice), a
column that it does not have (for JSON: that none of the first 100 rows has) or that holds something else
than text. The error names the file, the line or row, and the remedy; nothing after it is read. A file
without rows is left out and counted.

What is wrong with a row is dropped, named and counted by reason (REASONS). A file of which at least
100 rows were read, and more than the source's `max_dropped` of them dropped, is refused at its end:
most often a column was renamed. (Not a Parquet file of which another process has read the beginning.)

The text is taken as it is, but for a byte-order mark at the start of a file. A plain text file of a
declared source is one document, named like the file. Elsewhere the `id` column names a document, and
"FILE:ROW" does where there is none. Documents of DATA, and of a source with hold_out_by = "text", are
named by the hash of their text, so that equal texts are held out together.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from record.durable import make_printable
from train.data.sources.content import FORMATS, format_of, read_start
from train.data.sources.fetch import Files
from train.data.sources.formats import (
    LONGEST_TEXT,
    TEXT,
    UNREADABLE,
    Bad,
    Broken,
    check_columns,
    find_text_column,
    is_array,
    read,
)
from train.data.sources.given import find_path
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
    """A row that gives no document. reason: a key of REASONS; what: a short sentence; why: what the parser says."""

    reason: str
    at: Cursor
    what: str
    why: str = ""


def documents(pinned: Pinned, files: Files, at: Cursor = START) -> Iterator[Document | Dropped]:
    """Yield the rows of a source from a place on, in the order of its files. Raises CorpusError."""
    check_formats(pinned)
    pieces = piece_bytes(pinned) if pinned.source.place else 0
    column = ""
    empty = []
    for number in range(at.file, len(pinned.files)):
        path = files.path(number)
        files.prefetch(number + 1)
        name = pinned.files[number].name
        start = at.row if number == at.file else 0
        kind = "text" if pinned.source.kind == "stdlib" else read_start(path, name).kind
        try:
            source = choose_column(pinned.source, path, name, kind)
            if not source.columns[0]:
                empty.append(name)
            else:
                if source.text != column and not pinned.source.text and kind != "text":
                    column = source.text
                    say_column(name, column)
                yield from read_file(pinned, source, path, kind, Cursor(number, start), pieces)
        except Broken as broken:
            raise refusal(pinned.source, path, name, kind, broken) from None
        files.done(number)
    if len(empty) == len(pinned.files):
        raise CorpusError(
            f"{empty[0]} of {pinned.source.name}: Has no rows. Choose a file with text."
        )
    if empty:
        say_empty(pinned.source.name, tuple(empty))


@functools.cache  # a source is read several times
def say_column(file: str, column: str) -> None:
    log.info("%s: its text is the column %r", make_printable(file), column)


@functools.cache
def say_empty(source: str, files: tuple[str, ...]) -> None:
    names = make_printable(files[0])
    log.warning("%s: left out files without rows (%d), for example %s", source, len(files), names)


def piece_bytes(pinned: Pinned) -> int:
    """Return the size of the pieces that plain text is cut into: small enough to hold out some."""
    total = sum(file.bytes for file in pinned.files)
    return min(max(total // PIECES, SMALLEST_PIECE), LARGEST_PIECE)


def check_formats(pinned: Pinned) -> None:
    """Raise CorpusError if a file cannot be read, by its name."""
    source = pinned.source
    if source.kind == "stdlib" or (source.place and source.kind == "files"):
        return  # its files were looked at when it was pinned
    for file in pinned.files:
        if not format_of(file.name):
            raise CorpusError(
                f"{file.name}: not a kind of file that {source.name} can be read from; there are: "
                f"{', '.join(FORMATS)}. {source.remedies['format']}."
            )


def check_first(source: Source, name: str) -> None:
    """Raise CorpusError if no column of a file of DATA is its text, before anything is computed from its size."""
    path = find_path(name)
    kind = read_start(path, name).kind
    try:
        choose_column(source, path, name, kind)
    except Broken as broken:
        raise refusal(source, path, name, kind, broken) from None


def choose_column(source: Source, path: Path, name: str, kind: str) -> Source:
    """Return the source with the column of a file's text, found where none is named; "" if it has no rows.

    kind: how the file is read. Raises Broken.
    """
    if kind == "text":
        if source.place and source.text:
            raise Broken("is plain text and has no columns", f"Remove #{source.text}")
        return dataclasses.replace(source, text=source.text or TEXT)
    if source.text:
        check_columns(path, name, source.columns, bool(source.template))
        return source
    return dataclasses.replace(source, text=find_text_column(path, name, source.place))


def read_file(
    pinned: Pinned, source: Source, path: Path, kind: str, at: Cursor, pieces: int
) -> Iterator[Document | Dropped]:
    """Yield what becomes of the rows of a file from a place on. Raises Broken.

    source: that of the pin, with the column of this file.
    """
    name = pinned.files[at.file].name
    columns = source.columns if kind == "text" else (*source.columns, source.id)
    row = -1
    count = dropped = 0
    first = None
    for row, value in read(path, name, columns, at.row, pieces):
        place = name if kind == "text" else f"{name}:{row}"
        item = make_document(source, value, place, Cursor(at.file, row))
        count += 1
        if isinstance(item, Dropped):
            dropped += 1
            first = first or item
        if row >= at.row:
            yield item
    if first and count == row + 1:  # else another process has read its beginning
        check_dropped(source, count, dropped, first)


def make_document(
    source: Source, value: dict[str, Any] | Bad, place: str, at: Cursor
) -> Document | Dropped:
    """Return the document of a row, or why there is none. place: its name if it has none."""
    made = text_of(source, value, place) if isinstance(value, dict) else value
    if isinstance(made, Bad):
        return Dropped(made.reason, at, made.what, made.why)
    name, text = made
    if source.place or source.hold_out_by == "text":
        name = hashlib.sha256(text.encode()).hexdigest()  # so the text decides what is held out
    return Document(name, text, at)


def check_dropped(source: Source, count: int, dropped: int, first: Dropped) -> None:
    """Raise Broken if too many of the rows of a file were dropped."""
    row = first.at.row
    what = f"{first.what}{first.why}"
    if source.place and count == dropped:
        raise Broken(f"has no text in its {count:,} rows ({what})", "Leave it out", row)
    if count >= ENOUGH_ROWS and dropped > source.max_dropped * count:
        raise Broken(
            f"{dropped} of {count} rows had to be dropped, more than max_dropped = "
            f"{source.max_dropped:g} of them ({what})",
            "rows",
            row,
        )


def refusal(source: Source, path: Path, name: str, kind: str, broken: Broken) -> CorpusError:
    """Return the error for a file, or for a row of it, named as an editor counts.

    It is FILE:LINE, or FILE: row N where a row is no line.
    """
    place = name
    if broken.row is not None:
        separator = ": row "
        with contextlib.suppress(Broken, *UNREADABLE):
            if kind in ("lines", "json") and not is_array(path, name):
                separator = ":"
        place = f"{name}{separator}{broken.row + 1}"
    again = "hub" if source.kind == "hub" else "files"  # on the Hub its bytes are like this
    remedy = source.remedies.get(broken.remedy or again, broken.remedy)
    if not source.place:  # DATA is named by the file itself
        place += f" of {source.name}"
    return CorpusError(f"{place}: {broken}. {remedy}.")


def text_of(source: Source, value: dict[str, Any], place: str) -> tuple[str, str] | Bad:
    """Return (name, text) of a row, or what is wrong with it. place: its name if it has none."""
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
        name = place
    return name, text


def half_pair(text: str) -> int:
    """Return the place of the first lone surrogate, or -1."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return -1


class Unfit(Exception):
    """A value that a template cannot take: the reason, and what it is."""


class Filler(string.Formatter):
    """str.format over a row, for which a null or a structure is no text."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if value is None:
            raise Unfit("null", f"{{{field_name}}} is null")
        if not isinstance(value, (str, int, float)):
            kind = type(value).__name__
            raise Unfit("type", f"{{{field_name}}} is {kind}: {str(value)[:40]!r}")
        return value, first


FILLER = Filler()


def fill(template: str, value: dict[str, Any]) -> str | Bad:
    """Return the text that a template makes of a row, or what is wrong with it."""
    try:
        return FILLER.vformat(template, (), value)
    except Unfit as unfit:
        return Bad(*unfit.args)
    except KeyError as missing:
        return Bad("template", f"no {missing.args[0]!r}; there are: {', '.join(list(value)[:20])}")
    except (IndexError, TypeError, ValueError) as error:
        return Bad("template", f"{error}")
