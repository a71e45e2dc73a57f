"""metrics.jsonl read fast: long stretches of steps as columns, by pyarrow, and every other record by itself.

    bytes -> lines -> steps that follow each other -> Block (columns)
                      anything else, or few of them -> the records, one by one

A block that pyarrow cannot read, or that is not of consecutive steps of one attempt, is read record by record, which
says what is wrong and where. A calm run is read in less than half of the time.
"""

import dataclasses
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from record.metrics import SCHEMA, parse_record

READ_BYTES = 2**25
FEWEST = 256  # lines of which a block is worth making
STEP = b'"event": "step"'
HEAD = 80  # bytes of a line in which it stands


@dataclasses.dataclass(frozen=True)
class Block:
    """Step records whose steps count up one by one, in one attempt, on a clock that goes on.

    columns: key -> (n,) float64, of the keys with numbers; NaN where a record is silent. last: the last of the records.
    lines: as they are, and `number` that of the first, for who must read them one by one.
    """

    columns: dict[str, np.ndarray]
    last: dict[str, Any]
    path: Path
    number: int
    lines: list[bytes]

    def records(self) -> Iterator[dict[str, Any]]:
        yield from check_records(self.path, self.number, self.lines)


def check_records(path: Path, number: int, lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records of lines; `number` counts the first of them within the file.

    Raises ValueError naming file and line where one is not a record.
    """
    for offset, line in enumerate(lines):
        try:
            yield parse_record(line)
        except ValueError as fault:
            text = line[:60].decode(errors="replace")
            raise ValueError(f"{path} line {number + offset} {fault}: {text!r}") from None


def parts_of(path: Path) -> Iterator[Block | dict[str, Any]]:
    """Records in order, many steps as a block. A last line that a kill cut short is left out. Raises OSError, and
    ValueError naming file and line for what is no record."""
    with open(path, "rb") as file:
        rest, number = b"", 1
        while read := file.read(READ_BYTES):
            lines = (rest + read).split(b"\n")
            rest = lines.pop()
            yield from grouped(path, number, lines)
            number += len(lines)


def grouped(path: Path, number: int, lines: list[bytes]) -> Iterator[Block | dict[str, Any]]:
    """number: that of the first of these lines in the file."""
    is_step = [STEP in line[:HEAD] for line in lines]
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and is_step[end]:
            end += 1
        block = block_of(path, number + start, lines[start:end]) if end - start >= FEWEST else None
        if block:
            yield block
            start = end
            continue
        end = max(end, start + 1)
        yield from check_records(path, number + start, lines[start:end])
        start = end


def block_of(path: Path, number: int, lines: list[bytes]) -> Block | None:
    """None where they are to be read one by one."""
    import pyarrow
    from pyarrow import json as arrow_json

    text = b"\n".join(lines)
    try:
        table = arrow_json.read_json(
            io.BytesIO(text), arrow_json.ReadOptions(block_size=len(text) + 1)
        )
        (last,) = check_records(path, number + len(lines) - 1, lines[-1:])
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, ValueError):
        return None  # no JSON, columns of mixed types, or NaN: read one by one, which takes it or names file and line
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type):
            columns[name] = floats(column)
    same = {
        "event": "step",
        "schema": SCHEMA,
        "attempt": last.get("attempt"),
        "host": last.get("host"),
    }
    if table.num_rows != len(lines) or any(
        value is None
        or name not in table.column_names
        or table.column(name).unique().to_pylist() != [value]
        for name, value in same.items()
    ):
        return None
    if not {"step", "time", "mono_s"} <= columns.keys() or not np.isfinite(columns["time"]).all():
        return None
    if (np.diff(columns["step"]) != 1).any() or not (np.diff(columns["mono_s"]) > 0).all():
        return None
    return Block(columns, last, path, number, lines)


def floats(column: Any) -> np.ndarray:
    """Numbers of pyarrow as float64, NaN for null. Not by its to_numpy or fill_null, which import pandas: a second."""
    import pyarrow

    whole = column.cast(pyarrow.float64()).combine_chunks()
    (array,) = whole.chunks if isinstance(whole, pyarrow.ChunkedArray) else (whole,)
    known, numbers = array.buffers()
    values = np.frombuffer(numbers, np.float64, len(array), 8 * array.offset).copy()
    if array.null_count:
        bits = np.unpackbits(np.frombuffer(known, np.uint8), bitorder="little")
        values[bits[array.offset : array.offset + len(array)] == 0] = np.nan
    return values
