"""What a file holds, by its name and its first bytes. Standard library only."""

from pathlib import Path

LFS = b"version https://git-lfs"
PAGES = (b"<!doctype", b"<html", b"<?xml", b"<error")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

TEXT_KINDS = {".jsonl": "lines", ".json": "json", ".txt": "text", ".md": "text"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# How a file is read, by the end of its name.
FORMATS = {".parquet": "parquet", ".py": "text", **TEXT_KINDS}
for suffix, kind in TEXT_KINDS.items():
    FORMATS |= {suffix + compression: kind for compression in COMPRESSIONS}
EMBEDDED_ONLY = {".py"}


def format_of(name: str) -> str:
    """Return how a file of that name is read: parquet, lines, json or text. "" for any other."""
    return next((kind for suffix, kind in FORMATS.items() if name.lower().endswith(suffix)), "")


def compression_of(name: str) -> str:
    """Return how a file of that name is compressed: gzip or zstd; "" if it is not."""
    return COMPRESSIONS.get(Path(name.lower()).suffix, "")


def foreign(start: bytes) -> str:
    """Name a file that begins like this and is no data: an error page or a git-lfs pointer. "" for any other."""
    if start.startswith(LFS):
        return "a git-lfs pointer, not the file that it stands for"
    if start.lstrip(BYTE_ORDER_MARK + b" \t\r\n").lower().startswith(PAGES):
        return "a web or error page"
    return ""


def looks_like(path: Path) -> str:
    """Say how a file begins, and what it is if that is known: " (a web or error page, it starts with b'<!DOC')"."""
    with open(path, "rb") as file:
        start = file.read(40)
    what = foreign(start)
    begins = f"it starts with {start!r}"
    return f" ({what}, {begins})" if what else f" ({begins})"
