"""What a file holds, by its name, its first bytes and its hash; and how it differs from what it should be."""

import hashlib
import os
from pathlib import Path
from typing import Any

import xxhash

HASHES: dict[str, Any] = {
    "sha256": hashlib.sha256,
    "git-sha1": hashlib.sha1,
    "xxh3": xxhash.xxh3_128,
}

LFS = b"version https://git-lfs"
PAGES = (b"<!doctype", b"<html", b"<?xml", b"<error")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

TEXT_KINDS = {".jsonl": "lines", ".json": "json", ".txt": "text", ".md": "text"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# How a file is read, by the end of its name.
FORMATS = {".parquet": "parquet", **TEXT_KINDS}
for suffix, kind in TEXT_KINDS.items():
    FORMATS |= {suffix + compression: kind for compression in COMPRESSIONS}


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


def explain_encoding(path: Path) -> str:
    """Say how to convert a file that is not UTF-8."""
    copy = path.with_name(f"utf8-{path.name}")
    return f"Convert it, for example: iconv -f latin1 -t utf-8 {path} > {copy}"


def looks_like(path: Path) -> str:
    """Say how a file begins, and what it is if that is known: " (a web or error page, it starts with b'<!DOC')"."""
    with open(path, "rb") as file:
        start = file.read(40)
    what = foreign(start)
    begins = f"it starts with {start!r}"
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
