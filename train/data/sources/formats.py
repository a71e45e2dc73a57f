"""Files to rows: Parquet, JSON lines, JSON arrays and plain text, the last three also in gzip or zstd.

    read(path, ...) -> (row, {column: value}) for each row in order, or (row, Bad) where it is none

Memory is bounded by the rows, not by the file: lines are read up to LONGEST_TEXT, and of Parquet
one page and BATCH_ROWS rows are decoded at once. Only the text of a JSON array is read whole. What is
wrong with a file raises Broken.
"""

import dataclasses
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet

from train.data.sources.content import (
    BUFFER_BYTES,
    BYTE_ORDER_MARK,
    DAMAGED,
    PARQUET,
    compression_of,
    describe,
    foreign,
    format_of,
    is_json,
    open_stream,
    read_start,
)

LONGEST_TEXT = 2**28  # bytes; also of a line of JSON
LONGEST_ARRAY = 2**29  # characters
# Of Parquet. Any row may be the largest, and where there is a dictionary, all of them: 518 bytes of file
# were 5 GiB of text. What a batch costs is 20 us or so, far less than the tokens of eight rows.
BATCH_ROWS = 8
LARGE_ROW = 2**20  # bytes on average: one at a time
BLANKS = re.compile(r"[ \t\n\r]*")  # of JSON
UNREADABLE = (*DAMAGED, pa.ArrowException)
TEXT = "text"  # the column of rows that are no more than a text
MESSAGES = "messages"  # the column of rows that are no more than a list of messages


class Broken(Exception):
    """What is wrong with a file.

    Args:
        what: in words.
        remedy: a sentence, a key of the source's remedies, or "" for getting the file again.
        row: the row at which reading ended, if it is known.
    """

    def __init__(self, what: str, remedy: str = "", row: int | None = None):
        super().__init__(what)
        self.remedy = remedy
        self.row = row


class Bad(NamedTuple):
    """A row that holds no text. reason: a key of REASONS in rows.py; why: what the parser says, to follow `what`."""

    reason: str
    what: str
    why: str = ""


SAVE_AS_UTF8 = "Save it in UTF-8"
Rows = Iterator[tuple[int, "dict[str, Any] | Bad"]]


def read(
    path: Path, name: str, columns: tuple[str, ...] = (), start: int = 0, piece_bytes: int = 0
) -> Rows:
    """Yield the rows of a file. Those before `start` are left out if the format allows it.

    Args:
        path: where it lies.
        name: what it is called.
        columns: of Parquet, those that are read if there are; of plain text, the one of its text.
        start: the first row that is wanted.
        piece_bytes: plain text is cut into pieces of about this size; 0 leaves it whole.

    Raises:
        Broken: it is an error page, not what its name says, damaged or truncated.
    """
    row = -1
    try:
        for row, value in read_format(path, name, columns, start, piece_bytes):
            yield row, value
    except UNREADABLE as error:
        raise damaged(error, row + 1) from error


def read_format(
    path: Path, name: str, columns: tuple[str, ...], start: int, piece_bytes: int
) -> Rows:
    kind = read_start(path, name).kind
    if kind == "parquet":
        return parquet_rows(path, columns, start)
    if kind in ("lines", "json"):
        return json_rows(path, name)
    if piece_bytes:
        return piece_rows(path, name, columns[0], piece_bytes)
    return text_rows(path, name, columns[0])


def damaged(error: Exception, row: int | None = None) -> Broken:
    return Broken(f"damaged or truncated ({' '.join(str(error).split())})", row=row)


def remedy_for(start: bytes) -> str:
    """Say what to do about a file that is something else than its name says; "" for getting it again."""
    if is_json(start):
        return "It holds JSON: rename it to .json, or .jsonl for a row per line"
    return foreign(start)[1]


def not_utf8(error: UnicodeDecodeError, of: str = "") -> Bad:
    some = error.object[error.start : error.start + 4]
    return Bad("utf-8", f"byte {error.start}{of} is {some!r}")


# ---- Parquet


def open_parquet(path: Path) -> pa.parquet.ParquetFile:
    """Open a Parquet file, whose pages are checked when they are read. Raises Broken."""
    try:
        start = read_start(path, path.name)
        if start.compression:
            raise Broken("is compressed Parquet", "Decompress it")
        if not start.content.startswith(PARQUET):
            raise Broken(f"is not parquet{describe(start.content)}", remedy_for(start.content))
        file = pa.parquet.ParquetFile(
            path, buffer_size=BUFFER_BYTES, page_checksum_verification=True, memory_map=False
        )
        names = file.schema_arrow.names
    except UNREADABLE as error:
        raise damaged(error) from error
    if doubled := [name for name in names if names.count(name) > 1]:
        raise Broken(f"two columns are named {doubled[0]!r}", "Rename one of them")
    return file


def parquet_rows(path: Path, columns: tuple[str, ...], start: int) -> Rows:
    """Of row groups before `start`, only the footer is read."""
    with open_parquet(path) as file:
        names = [name for name in file.schema_arrow.names if name in columns]
        row = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            if row + group.num_rows <= start:
                row += group.num_rows
                continue
            size = BATCH_ROWS if group.total_byte_size < LARGE_ROW * group.num_rows else 1
            for batch in file.iter_batches(
                size, row_groups=[number], columns=names, use_threads=False
            ):
                skipped = min(max(0, start - row), len(batch))
                row += skipped
                cells = [read_cells(batch.column(name).slice(skipped)) for name in names]
                for values in zip(*cells, strict=True):
                    bad = next((value for value in values if type(value) is Bad), None)
                    yield row, bad or dict(zip(names, values, strict=True))
                    row += 1


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a column of this type holds text, or nothing but nulls."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view(), pa.null())


def read_cells(column: pa.Array) -> Iterator[Any]:
    """Yield the values of a column one by one, so that a batch is in memory only once."""
    for cell in column:
        try:
            yield cell.as_py()
        except UnicodeDecodeError as error:
            yield not_utf8(error)
        except (ValueError, OverflowError) as error:  # a date after the year 9999
            yield Bad("type", f"a value of {column.type} that Python has not: {error}")


# ---- The columns of text


def check_columns(path: Path, name: str, columns: tuple[str, ...], is_template: bool) -> None:
    """Raise Broken unless a file of rows has the columns, and the one that is the text holds text.

    In JSON the first rows decide. is_template: the columns may hold something else than text.
    """
    kinds: dict[str, Any] = {}
    if read_start(path, name).kind == "parquet":
        with open_parquet(path) as file:
            if not file.metadata.num_rows:
                return
            kinds = {field.name: field.type for field in file.schema_arrow}
    names = kinds or measure_columns(path, name).sizes
    for column in columns:
        if names and column not in names:
            raise Broken(f"no column {column!r}; it has: {', '.join(names)}", "column")
        if column in kinds and not is_template and not is_text(kinds[column]):
            raise Broken(f"column {column!r} is {kinds[column]}, not text", "column")


TEXT_COLUMNS = ("text", "content")
FIRST_ROWS = 100  # by which the column is chosen
CONVERSATIONS = {MESSAGES, "conversations", "conversation"}
ANSWERS = {"answer", "completion", "response", "output", "chosen"}
# Types, of Arrow or Python, that may stand beside the only text; and columns that name a row.
PLAIN = re.compile(
    r"u?int\d*|halffloat|float|double|bool|null|(decimal|date|time|duration).*|"
    r"(dictionary<values=)?(large_)?string.*"
)
IDENTIFIER = re.compile(
    r"(.*_)?(id|ur[il]|path|hash)|u?uid|guid|file_?(name)?|sha(_?\d+\w*)?|licen[sc]e|lang|language|source|date",
    re.IGNORECASE,
)


@dataclasses.dataclass
class Columns:
    """What the first rows of a file hold.

    Attributes:
        sizes: characters of text by column. None: there is something else in it.
        kinds: what that is.
        rows: how many there are, without blank lines.
        bad: the first that is no row, and its number.
    """

    sizes: dict[str, int | None] = dataclasses.field(default_factory=dict)
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    rows: int = 0
    bad: tuple[int, Bad] | None = None


def find_text_column(path: Path, name: str, place: str) -> str:
    """Return the column that holds the text of a file; "" if the file has no rows.

    The first rows decide: in JSON lines a row may lack the text, or have null in its place.

    Args:
        path, name: as of `read`.
        place: DATA without its column, for what to do.

    Raises:
        Broken: no column holds text, or several do and none is called as text is. Or it is not plain
            that the only one is the text: it names the row, or another has a type that is not read.
    """
    columns = measure_columns(path, name)
    sizes = columns.sizes
    if not columns.rows:
        return ""
    if not sizes and columns.bad:
        row, bad = columns.bad
        raise Broken(f"has no row that can be read: {bad.what}{bad.why}", ONE_VALUE, row)
    for column in TEXT_COLUMNS:
        if sizes.get(column) is not None:
            return column
    names = ", ".join(sizes) or "none"
    if (CONVERSATIONS | ANSWERS) & sizes.keys():
        raise Broken(
            f"holds conversations (columns: {names})",
            f"They are for fine-tuning: make finetune DATA={place} MODEL=RUN_OR_FOLDER (docs/finetune.md "
            f"has whole commands). To pretrain on one column, name it: DATA={place}#COLUMN",
        )
    for column, kind in columns.kinds.items():
        if column.lower() in TEXT_COLUMNS and sizes[column] is None:
            raise Broken(
                f"column {column!r} is {kind}, not text",
                f"Convert it to text, or name another column: DATA={place}#COLUMN",
            )
    texts = [column for column, size in sizes.items() if size]
    texts.sort(key=lambda column: -(sizes[column] or 0))
    if not texts:
        raise Broken(f"has no column of text (columns: {names})", "Leave it out")
    if len(texts) > 1:
        raise Broken(
            f"has several text columns: {', '.join(texts)}",
            f"Choose one: DATA={place}#{texts[0]}",
        )
    others = [kind for column, kind in columns.kinds.items() if column != texts[0]]
    if IDENTIFIER.fullmatch(texts[0]) or not all(map(PLAIN.fullmatch, others)):
        types = ", ".join(f"{column}: {columns.kinds.get(column, 'string')}" for column in sizes)
        raise Broken(
            f"has no column that is plainly its text ({types})",
            f"Name the one that is, or convert it to text: DATA={place}#COLUMN",
        )
    return texts[0]


def measure_columns(path: Path, name: str) -> Columns:
    """Look at the first rows of a file of rows. Raises Broken if nothing is read before the fault."""
    columns = Columns()
    names: tuple[str, ...] = ()
    if read_start(path, name).kind == "parquet":
        with open_parquet(path) as file:
            columns.rows = file.metadata.num_rows
            columns.sizes = dict.fromkeys(file.schema_arrow.names)
            columns.kinds = {field.name: str(field.type) for field in file.schema_arrow}
            names = tuple(field.name for field in file.schema_arrow if is_text(field.type))
        if not names:
            return columns
    try:
        for row, value in itertools.islice(read(path, name, names), FIRST_ROWS):
            if isinstance(value, dict):
                columns.rows += 1
                measure_cells(value, columns)
            elif value.reason != "empty":
                columns.rows += 1
                columns.bad = columns.bad or (row, value)
    except Broken:
        if not any(size is not None for size in columns.sizes.values()):
            raise  # else whoever reads the rows finds it again, and says in which
    return columns


def measure_cells(row: dict[str, Any], columns: Columns) -> None:
    """Add a row's characters of text to those of its columns. Null is text of no characters."""
    for column, cell in row.items():
        if cell is None or type(cell) is str:
            columns.sizes[column] = (columns.sizes.get(column) or 0) + len(cell or "")
        else:
            columns.sizes.setdefault(column, None)
            if PLAIN.fullmatch(columns.kinds.get(column, "null")):
                columns.kinds[column] = type(cell).__name__


# ---- JSON


def open_file(path: Path, name: str) -> BinaryIO:
    """Open a file, decompressed. Raises Broken for an error page, or another compression than its name says."""
    start = read_start(path, name)
    named = compression_of(name)
    is_other = named not in ("", start.compression)
    what, remedy = foreign(start.content, None if start.compression else path)
    if what or is_other:
        expected = named if is_other else "text"
        raise Broken(
            f"is not {expected}{describe(start.content)}", remedy or remedy_for(start.content)
        )
    return open_stream(path, start.compression)


def open_text(path: Path, name: str) -> io.TextIOWrapper:
    """Open a file as text: without a byte-order mark, line ends as they are."""
    return io.TextIOWrapper(open_file(path, name), encoding="utf-8-sig", newline="")


def json_rows(path: Path, name: str) -> Rows:
    """Return the rows of JSON lines, or the elements of one JSON array over the whole file."""
    if is_array(path, name):
        return array_rows(path, name)
    return line_rows(open_file(path, name))


def is_array(path: Path, name: str) -> bool:
    """Tell whether JSON is one array over the whole file, and not a row per line. Raises Broken if it is an object."""
    with open_file(path, name) as file:
        first = b""
        while not first and (line := file.readline(LONGEST_TEXT + 1)):
            first = line.removeprefix(BYTE_ORDER_MARK).strip()
        if first == b"{":
            raise Broken(
                "one JSON object over the whole file",
                "Make it a JSON array (.json) or one object a line (.jsonl)",
            )
        if first[:1] != b"[" or not first.endswith(b"]"):
            return first[:1] == b"["
        # Of one line: one row of several, or all of the file
        return format_of(name) != "lines" and not any(line.strip() for line in lines(file))


def lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines with their ends. One of more than LONGEST_TEXT is cut to one byte more than that."""
    while line := file.readline(LONGEST_TEXT + 1):
        if len(line) > LONGEST_TEXT and not line.endswith(b"\n"):
            while (rest := file.readline(BUFFER_BYTES)) and not rest.endswith(b"\n"):
                pass
        yield line


def line_rows(file: BinaryIO) -> Rows:
    """Yield a row for each line. They may be texts and arrays if the first one is no object."""
    only_objects = True
    with file:
        for row, line in enumerate(lines(file)):
            if row == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
                only_objects = line.lstrip()[:1] not in (b"[", b'"')
            yield row, parse_line(row, line, only_objects)


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError for a key that it has twice: the parser would drop a value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        doubled = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {doubled!r} comes twice in an object")
    return made


def explain(error: ValueError) -> str:
    """Return why JSON cannot be taken as it is, without Python's advice about numbers of many digits."""
    return str(error).partition(";")[0]


JSON = json.JSONDecoder(object_pairs_hook=make_object)
FIX_ROW = "Fix the row, or leave it out"
ONE_VALUE = "Write one JSON value per line, as json.dumps does, and nothing after it"


def parse_line(row: int, line: bytes, only_objects: bool) -> dict[str, Any] | Bad:
    """Return the row of a line. Raises Broken for half a last line: one without its end that is no row."""
    if len(line) > LONGEST_TEXT:
        return Bad("long", f"a line of more than {LONGEST_TEXT} bytes")
    try:
        value = JSON.decode(line.decode())
        made = make_row(value, only_objects)
        if isinstance(made, dict):
            return made
        some = line[:40].decode(errors="replace").strip()
        bad = Bad("not json", f"neither an object nor a text: {some}")
    except UnicodeDecodeError as error:
        bad = not_utf8(error, " of the line")
    except (json.JSONDecodeError, RecursionError) as error:
        if not line.strip():
            return Bad("empty", "a blank line")
        some = line[:40].decode(errors="replace").strip()
        why = "nested too deeply"
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        bad = Bad("not json", f"not valid JSON: {some}", f" ({why})")
    except ValueError as error:
        raise Broken(f"not valid JSON: {explain(error)}", FIX_ROW, row) from None
    if not line.endswith(b"\n"):
        raise Broken(f"half a last line, it ends with {line[-40:]!r}", row=row)
    return bad


def make_row(value: Any, only_objects: bool = False) -> dict[str, Any] | Bad:
    """Return a JSON value as a row.

    A string is a text; an array of strings is one too, with blank lines between them; an array of
    objects is a conversation, as nanochat writes them.
    """
    if type(value) is dict:
        return cast(dict[str, Any], value)
    if type(value) is str and not only_objects:
        return {TEXT: value}
    if type(value) is list and value and not only_objects:
        if all(type(part) is str for part in value):
            return {TEXT: "\n\n".join(value)}
        if all(type(part) is dict for part in value):
            return {MESSAGES: value}
    return Bad("not json", f"neither an object nor a text: {str(value)[:40]}")


def array_rows(path: Path, name: str) -> Rows:
    """Yield the elements of a JSON array. Its text is in memory as a whole, and one element."""
    with open_text(path, name) as file:
        try:
            text = file.read(LONGEST_ARRAY + 1)
        except UnicodeDecodeError:
            raise Broken("is not UTF-8", SAVE_AS_UTF8) from None
    if len(text) > LONGEST_ARRAY:
        raise Broken(
            f"a JSON array of more than {LONGEST_ARRAY} characters",
            f"Write it as JSON lines, for example: jq -c '.[]' {path.name} > {path.stem}.jsonl",
        )
    try:
        for row, element in enumerate(elements(text)):
            yield row, make_row(element)
    except RecursionError:
        raise Broken("an element that is nested too deeply", "Leave it out") from None
    except json.JSONDecodeError as error:
        raise refuse_array(text, error) from None


def elements(text: str) -> Iterator[Any]:
    """Yield the elements of an array of JSON. Raises Broken, ValueError, RecursionError."""
    decode = JSON.raw_decode
    row = 0
    at = after_blanks(text, text.index("[") + 1)
    mark = ","
    if text[at : at + 1] == "]":
        mark, at = "]", after_blanks(text, at + 1)
    while mark == ",":
        try:
            element, at = decode(text, at)
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # a number of more than 4,300 digits, or a key that comes twice
            line = text.count("\n", 0, at) + 1
            raise Broken(f"not valid JSON: {explain(error)} (line {line})", FIX_ROW, row) from None
        yield element
        row += 1
        at = after_blanks(text, at)
        mark = text[at : at + 1]
        if mark not in ("]", ","):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = after_blanks(text, at + 1)
    if at < len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def after_blanks(text: str, at: int) -> int:
    """Return where the next character of JSON is from `at` on that is no blank."""
    match = BLANKS.match(text, at)
    return match.end() if match else at


def refuse_array(text: str, error: json.JSONDecodeError) -> Broken:
    """Say what is wrong with a JSON array, and where."""
    place = f"line {error.lineno}, column {error.colno}"
    if error.msg == "Extra data":
        return Broken(
            f"more than one JSON value ({place})", "Write one array, or a line for each row"
        )
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
        return Broken(f"half an array, it ends with {text[-40:]!r}")
    some = text[max(0, error.pos - 20) : error.pos + 20]
    return Broken(f"not valid JSON at {some!r} ({place}): {error.msg}", "Fix it there")


# ---- Plain text


def text_rows(path: Path, name: str, column: str) -> Rows:
    """Yield the whole file as the only row. In Python's source all kinds of line ends become \\n."""
    with open_file(path, name) as file:
        content = file.read(LONGEST_TEXT + 1)
    if len(content) > LONGEST_TEXT:
        yield 0, Bad("long", f"a file of more than {LONGEST_TEXT} bytes")
        return
    try:
        text = content.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        yield 0, not_utf8(error)
        return
    if name.endswith(".py"):
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    yield 0, {column: text}


def piece_rows(path: Path, name: str, column: str, piece_bytes: int) -> Rows:
    """Yield plain text in pieces that end at a blank line, and at any line where none comes.

    Joined, the pieces are the file, but for a byte-order mark at its start. Raises Broken where it is
    not UTF-8.
    """
    row = size = 0
    piece: list[str] = []
    try:
        with open_text(path, name) as file:
            while line := file.readline(piece_bytes):
                piece.append(line)
                size += len(line.encode())
                is_boundary = not line.strip() or size >= 2 * piece_bytes
                if size >= piece_bytes and is_boundary:
                    yield row, {column: "".join(piece)}
                    row, size, piece = row + 1, 0, []
    except UnicodeDecodeError:
        raise Broken("is not UTF-8", SAVE_AS_UTF8, row) from None
    if piece:
        yield row, {column: "".join(piece)}
