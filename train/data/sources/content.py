"""What a file is, by its first bytes; and how it differs from what it should be.

The name decides only where the bytes leave it open: whether text is plain or JSON lines that are damaged.
"""

import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

HASHES: dict[str, Any] = {
    "sha256": hashlib.sha256,
    "git-sha1": hashlib.sha1,
    "xxh3": xxhash.xxh3_128,
}

LFS = re.compile(rb"version https://git-lfs\S*\s+(ext-\S+ \S+\s+)*oid \w+:")
COMMENTS = re.compile(rb"(\s*<!--.*?-->)*\s*", re.DOTALL)  # of a page, before it begins
# Of the web, or an error in XML: tags follow each other, or the file ends with the one that closes it.
PAGE = re.compile(
    rb"<!doctype\s+html[^>]*>[ \t\r]*(<|\n|\Z)|"
    rb"(<\?xml\s[^>]*>\s*)?(<!doctype\s[^>]*>\s*)?<(html|head|body|error)(\s[^>]*)?>"
    rb"(\s*(<|\Z)|.*</(html|head|body|error)>\s*\Z)",
    re.IGNORECASE | re.DOTALL,
)
XML = re.compile(
    rb"<(\?xml|!doctype)\s[^>]*>\s*(<|\Z)|<svg(\s[\w:-]+=[^<>]*>|>\s*<)|"
    rb"<[\w:.-]+\s[^<>]*\bxmlns(:\w+)?=",
    re.IGNORECASE,
)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
START_BYTES = 4096  # of a file, by which it is known
FIRST_VALUES = 20  # of JSON under another name
BUFFER_BYTES = 2**20
DAMAGED = (OSError, EOFError, zlib.error)
PARQUET = b"PAR1"
PARQUET_START = re.compile(rb"PAR1[\0-\x08\x0e-\x1f]")

TEXT_KINDS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".txt": "text",
    ".md": "text",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# How a file is read, by the end of its name.
FORMATS = {".parquet": "parquet", **TEXT_KINDS}
for suffix, kind in TEXT_KINDS.items():
    FORMATS |= {suffix + compression: kind for compression in COMPRESSIONS}

IMAGE = ("an image", "Leave it out")
ARCHIVE = ("an archive", "Unpack it")
ARROW = ("Arrow", "Convert it to Parquet, for example with to_parquet of datasets or pandas")
# What files that are no text begin with, what they are, and what to do. Text begins with none of these:
# what looks like text goes on up to what does not.
BINARY = {
    rb"%PDF-\d\.\d *[\r\n%]": ("a PDF", "Extract its text, for example with pdftotext"),
    rb"PK\x03\x04": ("a zip archive or an office document", "Unpack it, or save it as plain text"),
    rb"\xd0\xcf\x11\xe0": ("an office document", "Save it as plain text"),
    rb"\{\\rtf\d?\s*[\\{]": ("a document in rich text format", "Save it as plain text"),
    rb"\x89PNG": IMAGE,
    rb"\xff\xd8\xff": IMAGE,
    rb"GIF8[79]a.{0,6}\0": IMAGE,
    rb"II\*\0": IMAGE,
    rb"MM\0\*": IMAGE,
    rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)": ARCHIVE,
    rb"\xfd7zXZ": ARCHIVE,
    rb"7z\xbc\xaf": ARCHIVE,
    rb"Rar!\x1a\x07": ARCHIVE,
    rb"ARROW1\0": ARROW,
    rb"FEA1\0": ARROW,
    rb"\xff{4}": ARROW,
    rb"SQLite format 3\0": ("a database", "Export its text as JSON lines"),
}
TAR = slice(257, 262)  # where a tar archive says what it is
TABLE = ("a table", "Convert it to JSON lines")
HEADING = re.compile(r'"?[^\W\d][\w.-]*( [\w.-]+)*"?')  # of a column
NUMBER = re.compile(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)(e[-+]?\d+)?%?", re.IGNORECASE)
CODE = re.compile(r"[=([{]")
LEAST_LINES = 5  # of a table without headings
# A line of YAML, unless it is blank or in a block of text: a comment, a key or an element of a list.
YAML_LINE = re.compile(
    r"---|\.\.\.|\s*#.*|(?P<indent> *)(?P<dash>(- +)*)(?P<key>[\w.\"'/$-]+:)?(?P<value> .*|)"
)
YAML_BLOCK = re.compile(r" *[|>][+-]?\d?")
ROW = re.compile(
    r"""\[?\s*\{\s*(["'])[^"'\n]*\1\s*:"""
)  # the beginning of a JSON object with a key


class Start(NamedTuple):
    """How a file begins.

    Attributes:
        content: its first bytes, decompressed; none where it is damaged.
        compression: gzip, zstd or "".
        kind: how it is read: parquet, lines, json or text.
    """

    content: bytes
    compression: str
    kind: str


def format_of(name: str) -> str:
    """Return how a file of that name is read: parquet, lines, json or text. "" for any other."""
    return next((kind for suffix, kind in FORMATS.items() if name.lower().endswith(suffix)), "")


def compression_of(name: str) -> str:
    """Return how a file of that name is compressed: gzip or zstd; "" if it is not."""
    return COMPRESSIONS.get(Path(name.lower()).suffix, "")


def read_start(path: Path, name: str) -> Start:
    """Look at the first bytes of a file. Raises OSError. name: what it is called."""
    with open(path, "rb") as file:
        content = file.read(START_BYTES)
    compression = ""
    if content.startswith(b"\x1f\x8b"):
        compression = "gzip"
    elif content.startswith(b"\x28\xb5\x2f\xfd") or is_skippable(content):
        compression = "zstd"
    if compression:
        try:
            with open_stream(path, compression) as stream:
                content = stream.read(START_BYTES)
        except DAMAGED:  # whoever reads it says what is wrong
            content = b""
    return Start(content, compression, kind_of(name, content))


def is_skippable(start: bytes) -> bool:
    """Tell whether a zstd frame without data begins here, as pzstd writes them (RFC 8878, 3.1.2)."""
    return start[1:4] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F


def open_stream(path: Path, compression: str) -> BinaryIO:
    """Open a file, decompressed. Both libraries report an end that comes too early."""
    if not compression:
        return open(path, "rb", buffering=BUFFER_BYTES)
    if compression == "gzip":
        return io.BufferedReader(gzip.open(path), BUFFER_BYTES)
    import pyarrow as pa  # not for those who read names only, such as make plan

    stream = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
    return io.BufferedReader(stream, BUFFER_BYTES)


def kind_of(name: str, content: bytes) -> str:
    """Return how a file that begins like this is read."""
    if PARQUET_START.match(content):
        return "parquet"
    named = format_of(name)
    if named in ("", "text"):
        return "json" if is_json(content) else "text"
    return named


def is_json(content: bytes) -> bool:
    """Tell whether this is plainly JSON: objects with keys, or an array of texts, arrays or objects.

    Text may begin with a bracket too, and with an object or array before the text. So the first
    FIRST_VALUES must all be objects or arrays.
    """
    text = content.removeprefix(BYTE_ORDER_MARK).decode(errors="replace").lstrip()
    if not text.startswith(("{", "[")):
        return False
    rest = text
    for number in range(FIRST_VALUES):
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated string") or error.pos > len(rest) - 10
            if is_cut and number:
                return re.match(r'[{\[]\s*(["{\[]|\Z)', rest) is not None
            is_array = is_cut and len(content) == START_BYTES and re.match(r'\[\s*["\[]', rest)
            return bool(is_array) or is_damaged_json(rest, is_cut)
        except (ValueError, RecursionError):
            return bool(ROW.match(rest))
        if number == 0:
            first = value[:1] if isinstance(value, list) else [value]
            if not value or not isinstance(first[0], (str, list, dict)):
                return False
        elif not isinstance(value, (list, dict)):
            return False
        rest = rest[end:].lstrip(" \t\r\n,")
        if not rest:
            break
    return True


def is_damaged_json(text: str, is_cut: bool) -> bool:
    """Tell whether this was meant as JSON: it begins like a row, and so does each line after it."""
    if not ROW.match(text):
        return False
    following = text.split("\n")[1:FIRST_VALUES]
    return is_cut or text[0] == "[" or all(line.lstrip()[:1] in ("", "{") for line in following)


def foreign(start: bytes, path: Path | None = None) -> tuple[str, str]:
    """Name a file that begins like this and is no data, and say what to do; "" for getting it again.

    path: where these bytes lie as they are. ("", "") for any other file.
    """
    if LFS.match(start):
        return "a git-lfs pointer, not the file that it stands for", ""
    markup = COMMENTS.sub(b"", start.removeprefix(BYTE_ORDER_MARK), count=1)
    if PAGE.match(markup):
        return "a web or error page", ""
    if XML.match(markup):
        return "XML", "Extract its text and save it as plain text, or get the file again"
    for magic, kind in BINARY.items():
        if re.match(magic, start, re.DOTALL):
            return kind
    if start[TAR] == b"ustar" and b"\0" in start[: TAR.start]:
        return ARCHIVE
    encoding = wide_encoding(start)
    if not encoding:
        return "", ""
    remedy = "Convert it to UTF-8"
    if path:
        copy = path.with_name(f"utf8-{path.name}")
        names = f"{shlex.quote(str(path))} > {shlex.quote(str(copy))}"
        remedy += f", for example: iconv -f {encoding} -t utf-8 {names}"
    return f"text in {encoding.upper()}", remedy


def wide_encoding(start: bytes) -> str:
    """Return the encoding of text in units of two or four bytes, as iconv calls it; "" for any other."""
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if len(start) > 2 and 0 not in start[::2] and not any(start[1:-1:2]):
        return "utf-16le"
    if len(start) > 2 and 0 not in start[1::2] and not any(start[:-1:2]):
        return "utf-16be"
    return ""


def is_table(content: bytes) -> bool:
    """Tell whether this is plainly a table: headings, and the same number of cells in each line.

    The first heading may be empty, above the numbers of rows, as pandas writes them.
    """
    lines = content.removeprefix(BYTE_ORDER_MARK).decode(errors="replace").splitlines()
    for mark in ",;\t|":
        headings = lines[0].split(mark) if lines else []
        numbered = headings[:1] == [""]
        if len(headings) > 1 and all(map(HEADING.fullmatch, headings[numbered:])):
            rows = list(csv.reader(lines, delimiter=mark))
            if len(content) == START_BYTES:
                last = rows.pop()  # it may be cut
                rows += [last[:1] + headings[1:]] * (1 < len(last) <= len(headings))
            is_numbered = all(row and row[0].isdigit() for row in rows[1:])
            is_even = all(len(row) == len(headings) for row in rows)
            return len(rows) > 1 and is_even and (is_numbered or not numbered)
    return False


def find_structure(content: bytes) -> tuple[str, str]:
    """Name text that is made for programs, by how it begins, and say what to do. ("", "") for any other text."""
    if is_table(content):
        return TABLE
    lines = content.removeprefix(BYTE_ORDER_MARK).decode(errors="replace").splitlines()
    if len(content) == START_BYTES:
        lines = lines[:-1]  # it may be cut
    lines = [line for line in lines if line.strip()]
    if not lines:
        return "", ""
    begins = f"it begins with {lines[0][:40]!r}"
    if any(has_even_cells(lines, mark) for mark in "\t,;"):
        return f"a table without headings ({begins})", TABLE[1]
    if is_json_after_comments(lines):
        remedy = "Remove the comments, and name it .jsonl"
        return f"JSON lines with comments before them ({begins})", remedy
    if is_yaml(lines):
        return f"YAML ({begins})", "Save its texts as plain text or JSON lines"
    return "", ""


def has_even_cells(lines: list[str], mark: str) -> bool:
    """Tell whether each line has the same number of cells, without one that is empty.

    Commas are common in text and in code, so with them one column must be numbers.
    """
    if len(lines) < LEAST_LINES or mark not in lines[0]:
        return False
    rows = list(csv.reader(lines, delimiter=mark))
    if any(len(row) != len(rows[0]) or "" in map(str.strip, row) for row in rows):
        return False
    if mark == "\t":
        return True
    if any(CODE.search(row[0]) for row in rows):
        return False
    columns = zip(*rows, strict=True)
    return any(all(NUMBER.fullmatch(cell.strip()) for cell in column) for column in columns)


def is_json_after_comments(lines: list[str]) -> bool:
    """Tell whether comments come first, and after them nothing but JSON objects, one in each line."""
    rows = list(itertools.dropwhile(lambda line: line.startswith(("#", "//")), lines))
    if not rows or len(rows) == len(lines):
        return False
    try:
        return all(isinstance(json.loads(row), dict) for row in rows)
    except (ValueError, RecursionError):
        return False


def is_yaml(lines: list[str]) -> bool:
    """Tell whether this is plainly YAML: nothing but keys, lists and blocks of text, and keys below keys.

    A dialog and a Markdown list have lines like it too, but no keys below keys.
    """
    keys = nested = 0
    block: int | None = None  # how far the key of a block of text is indented
    is_open = False  # the line before is a key whose value follows
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if block is not None and indent > block:
            continue
        block = None
        match = YAML_LINE.fullmatch(line)
        if match is None:
            return False
        if not (match["key"] or match["dash"]):
            if match["value"]:
                return False
            continue  # a comment
        if match["key"]:
            keys += 1
            nested += is_open and indent > 0
        if YAML_BLOCK.fullmatch(match["value"]):
            block = indent
        is_open = not match["value"].strip()
    return nested > 0 and 2 * keys >= len(lines)


def looks_like(path: Path) -> str:
    """Say how a file begins, and what it is if that is known: " (a web or error page, it starts with b'<!DOC')"."""
    with open(path, "rb") as file:
        return describe(file.read(START_BYTES))


def describe(start: bytes) -> str:
    """Say what begins like this, as `looks_like` does."""
    what, _ = foreign(start)
    begins = f"it starts with {start[:40]!r}"
    return f" ({what}, {begins})" if what else f" ({begins})"


def digest_of(path: Path, kind: str) -> str:
    """Return the hash of a file's content as "KIND:HEX". kind: of HASHES."""
    digest = HASHES[kind]()
    with open(path, "rb") as file:
        if kind == "git-sha1":
            digest.update(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        hashlib.file_digest(file, lambda: digest)
    return f"{kind}:{digest.hexdigest()}"


def difference(path: Path, bytes: int | None, digest: str) -> str:
    """Say how a file differs from its size, if that is known, and its hash; "" if it does not. Raises OSError."""
    size = path.stat().st_size
    if bytes not in (None, size):
        return f"{size} bytes, not {bytes}{looks_like(path)}"
    own = digest_of(path, digest.partition(":")[0])
    if own != digest:
        return f"its hash is {own[:24]}..., not {digest[:24]}..., in {size} bytes{looks_like(path)}"
    return ""
