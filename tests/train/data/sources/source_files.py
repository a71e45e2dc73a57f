"""Files of every format, sources of them, and what reading them gives."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from train.data.sources import fetch, pin, rows
from train.data.sources.given import given_source
from train.data.sources.rows import Cursor, Document, Dropped, documents
from train.data.sources.source import CorpusError, Source

ROWS = [
    {"id": f"d{i}", "text": f"text {i} naïve \U0001f600\n" * (i % 7 + 1), "score": i / 3}
    for i in range(250)
]
SUFFIXES = ["parquet", "jsonl", "json", "jsonl.gz", "json.gz", "jsonl.zst", "json.zst"]
PAGE = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>".ljust(278)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


def compress(content: bytes, suffix: str) -> bytes:
    if suffix.endswith("gz"):
        return gzip.compress(content, mtime=0)
    if suffix.endswith("zst"):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()
    return content


def encode(rows: Any, suffix: str, **options: Any) -> bytes:
    """Return a file of these rows, or of a pa.Table. options: of pq.write_table."""
    if suffix != "parquet":
        return compress("".join(json.dumps(row) + "\n" for row in rows).encode(), suffix)
    sink = pa.BufferOutputStream()
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def encode_small(rows: Any, suffix: str, compression: str = "zstd") -> bytes:
    """Return the same in small groups, with a page a row."""
    options = {"write_page_checksum": True, "use_dictionary": False, "write_batch_size": 1}
    return encode(rows, suffix, row_group_size=40, compression=compression, **options)


def declare(folder: Path, contents: dict[str, bytes], **keys: Any) -> pin.Pinned:
    """Write files, and pin a source that declares them in this order of their names."""
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    s = Source("papers", "files", 0.2, files=tuple(str(folder / name) for name in contents), **keys)
    return pin.pin(s, folder / "data")


def give(data: Any, folder: Path) -> pin.Pinned:
    """Pin what DATA stands for."""
    return pin.pin(given_source(str(data), "mine"), folder)


def read(p: pin.Pinned, at: Cursor = rows.START) -> list[Document | Dropped]:
    return list(documents(p, fetch.Files(p, Path("unused")), at))


def outcomes(items: list[Document | Dropped]) -> list[Any]:
    """Return the text of each row, or (reason,)."""
    return [item.text if isinstance(item, Document) else (item.reason,) for item in items]


def refusal(action: Any, *arguments: Any) -> str:
    """Return the error of an action that must be refused, one line."""
    with pytest.raises(CorpusError) as raised:
        action(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)
