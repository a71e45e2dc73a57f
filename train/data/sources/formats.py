"""Files to rows, by extension: parquet, Arrow, JSON lines (plain, gzip, zstd), one text a file.

    read(path, ...) -> (row, {column: value}) or (row, Bad) for each row in order, (row, Skipped) for those behind

Memory is bounded by a row, not by the file: rows come in batches of about BATCH_BYTES, lines are read up to
LONGEST_TEXT. Parquet is read by pages, which most writers end at 1 MB or 1,024 rows, whichever comes last. What is
wrong with a file raises Broken, or the error of the library that reads it (UNREADABLE).
"""

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from train.data.sources.content import foreign, format_of

LONGEST_TEXT = 2**28  # bytes; also of a line of JSON
BATCH_BYTES, BATCH_ROWS = 2**23, 1024
BUFFER_BYTES = 2**20
UNREADABLE = (OSError, EOFError, zlib.error, pa.ArrowException)
FEATHER_1 = b"FEA1"
FILE_MAGIC, STREAM_START, STREAM_END = b"ARROW1", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\0\0\0\0"


class Broken(Exception):
    """What is wrong with a file, in words, and the remedy: a sentence, a key of the source's, or "" to get it again."""

    def __init__(self, what: str, remedy: str = ""):
        super().__init__(what)
        self.remedy = remedy


class Bad(NamedTuple):
    """A row that holds no text. reason: a key of REASONS in rows.py."""

    reason: str
    what: str


class Skipped(NamedTuple):
    """Rows before the first that was asked for; so many of them are known to be null."""

    rows: int
    nulls: int


Rows = Iterator[tuple[int, "dict[str, Any] | Bad | Skipped"]]


def read(
    path: Path,
    name: str,
    columns: tuple[str, ...],
    is_template: bool,
    id: str,
    start: int,
    piece_bytes: int = 0,
) -> Rows:
    """The rows of a file. Those before `start` are skipped where the format allows, and come all the same where not.

    columns: what a row's text is made of, or () for all; a column named `id` comes with them if there is one. piece_bytes: plain text
    is cut into pieces of about this size; 0 reads it whole.
    """
    begin, end = ends(path)
    if what := foreign(begin):
        raise Broken(f"{what}, {path.stat().st_size} bytes, it starts with {begin!r}")
    format = format_of(name)
    if format == "parquet":
        return parquet_rows(path, begin, end, columns, is_template, id, start)
    if format == "arrow":
        return arrow_rows(path, begin, end, columns, is_template, id, start)
    if piece_bytes and format in ("", "text"):
        return piece_rows(path, columns[0], piece_bytes)
    if format == "text":
        return text_rows(path, columns[0], newlines=name.endswith(".py"))
    return json_rows(opened(path, begin, format))


def ends(path: Path) -> tuple[bytes, bytes]:
    """The first and the last 40 bytes of a file."""
    with open(path, "rb") as file:
        begin = file.read(40)
        file.seek(-min(40, path.stat().st_size), io.SEEK_END)
        return begin, file.read(40)


# ---- Columns


def check_columns(schema: pa.Schema, columns: tuple[str, ...], is_template: bool) -> None:
    """Raises Broken unless the file has the columns, and the one that is the text holds text."""
    if doubled := [name for name in schema.names if schema.names.count(name) > 1]:
        raise Broken(f"two columns are named {doubled[0]!r}", "Rename one of them")
    for column in columns:
        if column not in schema.names:
            raise Broken(f"no column {column!r}; it has: {', '.join(schema.names)}", "column")
        kind = schema.field(column).type
        if not is_template and not (is_text(kind) or pa.types.is_null(kind)):
            raise Broken(f"column {column!r} is {kind}, not text", "column")


def chosen_columns(schema: pa.Schema, columns: tuple[str, ...], id: str) -> list[str]:
    """Return the columns to read: all of them where none is named."""
    return [name for name in schema.names if not columns or name in (*columns, id)]


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def values(column: pa.Array) -> list[Any]:
    """A column's values; a cell with text that is not UTF-8 is a Bad."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        column = column.cast(pa.binary() if pa.types.is_string(column.type) else pa.large_binary())
        check_offsets(column)
        return [None if cell is None else decoded(cell) for cell in column.to_pylist()]
    check_offsets(column)
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [nested(column, k) for k in range(len(column))]


def check_offsets(column: pa.Array) -> None:
    """Raises ArrowInvalid if the column of a damaged file points outside of it; what is not UTF-8 is for its row."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


def decoded(cell: bytes) -> Any:
    """The text, or a Bad."""
    try:
        return cell.decode()
    except UnicodeDecodeError as error:
        return Bad("utf-8", f"byte {error.start} is {cell[error.start : error.start + 4]!r}")


def nested(column: pa.Array, k: int) -> Any:
    """One value of a column of structures or lists, or a Bad."""
    try:
        return column[k].as_py()
    except UnicodeDecodeError as error:
        return Bad("utf-8", f"a text in it: {error.reason}")


def batch_rows(
    batch: pa.RecordBatch, row: int, start: int, names: list[str], columns: tuple[str, ...]
) -> Rows:
    """The rows of a batch whose first has that number, from `start` on."""
    if skip := min(max(0, start - row), len(batch)):
        yield row, Skipped(skip, batch.column(names.index(columns[0])).slice(0, skip).null_count)
        batch, row = batch.slice(skip), row + skip
    lists = [values(column) for column in batch.columns]
    for k, cells in enumerate(zip(*lists, strict=True)):
        bad = next((cell for cell in cells if type(cell) is Bad), None)
        yield row + k, bad or dict(zip(names, cells, strict=True))


def rows_a_batch(bytes: int, rows: int) -> int:
    """So many rows that a batch has about BATCH_BYTES."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(1, bytes)))


def parquet_rows(
    path: Path,
    begin: bytes,
    end: bytes,
    columns: tuple[str, ...],
    is_template: bool,
    id: str,
    start: int,
) -> Rows:
    """Row groups before `start` are skipped by what the file's footer says of them."""
    if begin[:4] != b"PAR1":
        raise Broken(f"not parquet, it starts with {begin[:8]!r}")
    if end[-4:] != b"PAR1":
        raise Broken(f"truncated parquet, it ends with {end[-4:]!r} and not with b'PAR1'")
    with pa.OSFile(str(path)) as source:
        file = pa.parquet.ParquetFile(
            source, buffer_size=BUFFER_BYTES, page_checksum_verification=True
        )
        check_columns(file.schema_arrow, columns, is_template)
        names = chosen_columns(file.schema_arrow, columns, id)
        row = 0
        for g in range(file.num_row_groups):
            group = file.metadata.row_group(g)
            parts = [group.column(k) for k in range(group.num_columns)]
            parts = [part for part in parts if part.path_in_schema.split(".")[0] in names]
            if row + group.num_rows <= start:
                nulls = [
                    part.statistics.null_count or 0
                    for part in parts
                    if part.path_in_schema == columns[0] and part.statistics
                ]
                yield row, Skipped(group.num_rows, sum(nulls))
                row += group.num_rows
                continue
            size = rows_a_batch(sum(part.total_uncompressed_size for part in parts), group.num_rows)
            for batch in file.iter_batches(size, row_groups=[g], columns=names, use_threads=False):
                yield from batch_rows(batch.select(names), row, start, names, columns)
                row += len(batch)


def arrow_rows(
    path: Path,
    begin: bytes,
    end: bytes,
    columns: tuple[str, ...],
    is_template: bool,
    id: str,
    start: int,
) -> Rows:
    """Both layouts of Arrow's: with a footer, and the stream that `datasets` writes."""
    with pa.memory_map(str(path)) as source:
        if begin.startswith(FILE_MAGIC):
            if not end.endswith(FILE_MAGIC):
                raise Broken(
                    f"truncated Arrow file, it ends with {end[-6:]!r} and not with {FILE_MAGIC!r}"
                )
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(k) for k in range(file.num_record_batches))
        elif begin.startswith(STREAM_START):
            if not end.endswith(
                STREAM_END
            ):  # between two batches a stream that was cut looks like one that ended
                raise Broken("truncated Arrow stream, its end mark is missing")
            file = pa.ipc.open_stream(source)
            batches = iter(file)
        elif begin.startswith(FEATHER_1):
            raise Broken("the first version of Feather, which is not read", "Convert it to Parquet")
        else:
            raise Broken(f"not Arrow, it starts with {begin[:8]!r}")
        check_columns(file.schema, columns, is_template)
        names = chosen_columns(file.schema, columns, id)
        row = 0
        for whole in batches:
            batch = whole.select(names)
            size = rows_a_batch(batch.nbytes, len(batch))
            for k in range(0, len(batch), size):
                part = batch.slice(k, size)
                yield from batch_rows(part, row, start, names, columns)
                row += len(part)


# ---- The column of text, where none was named

TEXT_COLUMNS = ("text", "content")
FIRST_ROWS = 100  # by which the column is chosen
CONVERSATIONS = {"messages", "conversations", "conversation"}
ANSWERS = {"answer", "completion", "response", "output", "chosen"}


def find_text_column(path: Path, name: str, place: str) -> str:
    """Return the column that holds the text of a file. Raises Broken where it is not plain which.

    place: DATA, for what to do. The first rows decide: in JSON lines a row may lack the text, or have null in its place.
    """
    if format_of(name) in ("", "text"):
        return "text"  # as text_rows and piece_rows call it
    sizes: dict[str, int | None] = {}  # characters of text; None where there is something else
    try:
        for _, value in itertools.islice(read(path, name, (), True, "", 0), FIRST_ROWS):
            if isinstance(value, dict):
                measure_cells(value, sizes)
    except (Broken, *UNREADABLE):
        if not sizes:
            raise  # else whoever reads the rows finds it again, and says in which
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
    texts = [column for column, size in sizes.items() if size]
    texts.sort(key=lambda column: -(sizes[column] or 0))
    if not texts:
        raise Broken(f"has no column of text (columns: {names})", "Leave it out")
    if len(texts) > 1:
        raise Broken(
            f"has several columns of text ({', '.join(texts)})",
            f"Choose one: DATA={place}#{texts[0]}",
        )
    return texts[0]


def measure_cells(row: dict[str, Any], sizes: dict[str, int | None]) -> None:
    """Add a row's characters of text to those of its columns. Null is text of no characters."""
    for column, cell in row.items():
        if cell is None or type(cell) is str:
            sizes[column] = (sizes.get(column) or 0) + len(cell or "")
        else:
            sizes.setdefault(column, None)


# ---- Lines and texts


def opened(path: Path, begin: bytes, format: str) -> BinaryIO:
    """The file, decompressed. Both libraries tell an end that comes too early."""
    if format == "json gzip":
        if begin[:2] != b"\x1f\x8b":
            raise Broken(
                f"not gzip, it starts with {begin[:8]!r}" if begin else "not gzip, it is empty"
            )
        return io.BufferedReader(gzip.open(path), BUFFER_BYTES)
    if format == "json zstd":
        if begin[:4] != b"\x28\xb5\x2f\xfd":
            raise Broken(
                f"not zstd, it starts with {begin[:8]!r}" if begin else "not zstd, it is empty"
            )
        return io.BufferedReader(
            pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), BUFFER_BYTES
        )
    return open(path, "rb", buffering=BUFFER_BYTES)


def json_rows(file: BinaryIO) -> Rows:
    """A row for each line, as it is parsed."""
    with file:
        for row, line in enumerate(lines(file)):
            if row == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
                if line.lstrip()[:1] == b"[" or line.strip() == b"{":
                    raise Broken(
                        "one JSON value over the whole file, not one object a line",
                        "Convert it to JSON lines",
                    )
            yield row, parsed(line, at_end=not line.endswith(b"\n"))


def lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines with their ends; of one that is longer than LONGEST_TEXT the first bytes, so that it is longer by one."""
    while line := file.readline(LONGEST_TEXT + 1):
        if len(line) > LONGEST_TEXT and not line.endswith(b"\n"):
            while (rest := file.readline(BUFFER_BYTES)) and not rest.endswith(b"\n"):
                pass
        yield line


def parsed(line: bytes, at_end: bool) -> dict[str, Any] | Bad:
    """The object of a line. Raises Broken where the last line has no end and no whole object."""
    if len(line) > LONGEST_TEXT:
        return Bad("long", f"a line of more than {LONGEST_TEXT} bytes")
    try:
        value = json.loads(line.decode())
        if type(value) is dict:
            return value
        what = Bad("not json", f"a JSON value that is no object: {line[:40]!r}")
    except UnicodeDecodeError as error:
        what = Bad(
            "utf-8", f"byte {error.start} of the line is {line[error.start : error.start + 4]!r}"
        )
    except (ValueError, RecursionError):
        if not line.strip():
            return Bad("empty", "a blank line")
        what = Bad("not json", f"not valid JSON: {line[:40].decode(errors='replace').strip()}")
    if at_end:
        raise Broken(f"half a last line, it ends with {line[-40:]!r}")
    return what


def text_rows(path: Path, column: str, newlines: bool) -> Rows:
    """The whole file as the only row. newlines: all kinds of line ends become \\n, as Python reads its source."""
    if path.stat().st_size > LONGEST_TEXT:
        yield 0, Bad("long", f"a file of {path.stat().st_size} bytes")
        return
    text = decoded(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    if newlines and isinstance(text, str):
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    yield 0, text if type(text) is Bad else {column: text}


def piece_rows(path: Path, column: str, piece_bytes: int) -> Rows:
    """Plain text in pieces that end at a blank line, and at any line where none comes.

    Joined, the pieces are the file, but for a byte-order mark at its start. Raises Broken where it is
    not UTF-8.
    """
    row = size = 0
    piece: list[str] = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            while line := file.readline(piece_bytes):
                piece.append(line)
                size += len(line.encode())
                is_boundary = not line.strip() or size >= 2 * piece_bytes
                if size >= piece_bytes and is_boundary:
                    yield row, {column: "".join(piece)}
                    row, size, piece = row + 1, 0, []
    except UnicodeDecodeError:
        raise Broken(
            "is not UTF-8",
            f"Convert it, for example: iconv -f latin1 -t utf-8 {path.name} > utf8-{path.name}",
        ) from None
    if piece:
        yield row, {column: "".join(piece)}
