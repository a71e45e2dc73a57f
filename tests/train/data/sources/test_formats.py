"""train/data/sources/formats.py and rows.py: what is wrong with a file is refused, by name, row and remedy."""

import gzip
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from tests.train.data.sources.test_rows import (
    ROWS,
    SUFFIXES,
    dropped,
    encoded,
    lines,
    read,
    refused,
    source,
    texts,
)
from train.data.sources import fetch
from train.data.sources.rows import Cursor, documents
from train.data.sources.source import CorpusError

PAGE = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>".ljust(278)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.mark.fault(11)
@pytest.mark.parametrize("suffix", [*SUFFIXES, "txt"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (PAGE, 'a web or error page, 278 bytes, it starts with b"<?xml version='),
        (b"\n <!DOCTYPE html><html>", "a web or error page"),
        (POINTER, "a git-lfs pointer"),
    ],
    ids=["error", "page", "pointer"],
)
def test_a_file_that_is_something_else_is_named(
    tmp_path: Path, suffix: str, content: bytes, said: str
) -> None:
    message = refused(source(tmp_path, {f"a.{suffix}": content}))
    assert said in message and message.startswith(f"{tmp_path / f'a.{suffix}'} of papers: ")
    assert "Get it again, or leave it out" in message


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    "suffix", ["parquet", "arrow", "feather", "jsonl.gz", "json.gz", "jsonl.zst"]
)
def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path, suffix: str) -> None:
    content = encoded(
        [row | {"noise": random.Random(i).random()} for i, row in enumerate(ROWS)], suffix
    )
    n = len(content)
    batch_ends = [n - 8] if suffix == "arrow" else []  # a stream without its end mark
    for cut in [0, 1, 3, 5, 20, n // 4, n // 2, 3 * n // 4, n - 9, n - 4, n - 1, *batch_ends]:
        folder = tmp_path / str(cut)
        message = refused(source(folder, {f"a.{suffix}": content[:cut]}))
        assert message.startswith(f"{folder}/a.{suffix} of papers"), message
        assert "truncated" in message or cut < 10, message
    assert len(read(source(tmp_path, {f"a.{suffix}": content}))) == len(ROWS)


@pytest.mark.fault(11)
@pytest.mark.parametrize("offsets", [[0, 10**6, 4], [0, -3, 4], [4, 2, 4]])
def test_arrow_text_that_points_outside_of_its_file_is_refused(
    tmp_path: Path, offsets: list[int]
) -> None:
    buffers = [None, pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"text")]
    column = pa.Array.from_buffers(pa.string(), 2, buffers)
    for k, (array, keys) in enumerate(
        [(column, {}), (pa.StructArray.from_arrays([column], ["en"]), {"template": "{text[en]}"})]
    ):
        wrong = pa.RecordBatch.from_arrays([array], ["text"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, wrong.schema) as writer:
            writer.write_batch(wrong)
        assert "damaged or truncated" in refused(
            source(tmp_path, {f"{k}.arrow": sink.getvalue().to_pybytes()}, **keys)
        )


@pytest.mark.fault(11)
def test_a_stream_that_is_cut_between_batches_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    stream = pa.ipc.open_stream(sink.getvalue())
    first = pa.BufferOutputStream()
    with pa.ipc.new_stream(first, table.schema) as writer:
        writer.write_batch(stream.read_next_batch())
    whole = sink.getvalue().to_pybytes()
    cut = len(first.getvalue().to_pybytes()) - 8
    assert pa.ipc.open_stream(whole[:cut]).read_all().num_rows == 30  # to Arrow it looks well
    assert "truncated Arrow stream" in refused(source(tmp_path, {"a.arrow": whole[:cut]}))


@pytest.mark.fault(11)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl.gz"])
def test_a_file_with_bytes_that_changed_gives_no_other_text(tmp_path: Path, suffix: str) -> None:
    content = encoded(ROWS, suffix, compression="none")
    expected = read(source(tmp_path / "good", {f"a.{suffix}": content}))
    rng, wrong = random.Random(3), 0
    for _ in range(25):
        damaged = bytearray(content)
        damaged[rng.randrange(20, len(content) - 12)] ^= 1 << rng.randrange(8)
        (tmp_path / "bad").mkdir(exist_ok=True)
        p = source(tmp_path / "bad", {f"a.{suffix}": bytes(damaged)})
        try:
            found = read(p)
        except CorpusError:
            wrong += 1
        else:
            assert texts(found) == texts(expected)
    assert (
        wrong > {"jsonl.gz": 20, "parquet": 5}[suffix]
    )  # many of a small parquet file's bytes mean nothing


@pytest.mark.fault(11)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("end", [b'{"id": "2", "te', b'{"id": "2", "text": "na\xc3', b"1"])
def test_half_a_last_line_is_refused_behind_the_whole_ones(
    tmp_path: Path, suffix: str, end: bytes
) -> None:
    content = b'{"text": "whole"}\n{"text": "whole"}\n' + end
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    whole = {
        "jsonl": content,
        "jsonl.gz": gzip.compress(content),
        "jsonl.zst": sink.getvalue().to_pybytes(),
    }[suffix]
    p = source(tmp_path, {f"a.{suffix}": whole})
    found = documents(p, fetch.Files(p, tmp_path))
    assert [next(found).at.row, next(found).at.row] == [0, 1]
    with pytest.raises(
        CorpusError, match=r"at line 2: half a last line, it ends with b'.*Get it again"
    ):
        next(found)


def test_a_last_line_without_its_end_is_whole_when_its_object_is(tmp_path: Path) -> None:
    assert (
        len(read(source(tmp_path, {"a.jsonl": b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}'}))) == 2
    )
    assert read(source(tmp_path, {"a.jsonl": b""})) == []


@pytest.mark.parametrize(
    "content",
    [b'[{"text": "a"}]', b'[\n{"text": "a"},\n{"text": "b"}\n]\n', b'{\n "text": "a"\n}\n'],
)
def test_json_that_is_not_in_lines_is_told_so(tmp_path: Path, content: bytes) -> None:
    assert (
        "one JSON value over the whole file, not one object a line. Convert it to JSON lines"
        in refused(source(tmp_path, {"a.json": content}))
    )


@pytest.mark.fault(11)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow", "feather"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, suffix: str
) -> None:
    good, other = encoded(ROWS[:5], suffix), encoded([{"id": "1", "body": "x"}] * 5, suffix)
    p = source(tmp_path, {f"a.{suffix}": good, f"b.{suffix}": other})
    message = refused(p)
    assert (
        f"b.{suffix} of papers" in message
        and "no column 'text'" in message
        and "have: id, body" in message.replace("it has", "they have")
    )
    found = documents(p, fetch.Files(p, tmp_path))
    assert texts([next(found) for _ in range(5)]) == [(row["id"], row["text"]) for row in ROWS[:5]]


def test_a_column_that_no_line_has_is_found_out_after_a_hundred(tmp_path: Path) -> None:
    of = [{"body": "x"}] * 100 + [{"text": "x"}] * 900
    assert "at line 100: no column 'text' in 100 rows; they have: body" in refused(
        source(tmp_path, {"a.jsonl": lines(of)})
    )
    p = source(tmp_path, {"a.jsonl": lines(of[1:])})
    whole = read(p)
    assert dropped(whole) == [("null", i) for i in range(99)] and len(whole) == 999
    assert read(p, Cursor(0, 50)) == whole[50:]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_of_another_type_is_refused(tmp_path: Path, suffix: str) -> None:
    assert " of papers: column 'text' is int64, not text" in refused(
        source(tmp_path, {f"a.{suffix}": encoded([{"text": 1}], suffix)})
    )
    p = source(tmp_path, {f"a.{suffix}": encoded([{"text": None}], suffix)})
    assert dropped(read(p)) == [("null", 0)]


def test_a_file_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    for name in ("a.csv", "a.jsonl.bz2", "a.py", "jsonl"):
        message = refused(source(tmp_path, {name: b"x"}))
        assert (
            f"{name}: not a kind of file that papers can be read from; there are: .parquet, .arrow"
            in message
        )
        assert ".py" not in message.split("there are")[1]


def test_another_format_than_the_name_says_is_refused(tmp_path: Path) -> None:
    for suffix, said in (
        ("parquet", "not parquet"),
        ("arrow", "not Arrow"),
        ("jsonl.gz", "not gzip"),
        ("jsonl.zst", "not zstd"),
    ):
        assert said in refused(
            source(tmp_path, {f"a.{suffix}": b"something else entirely, and long enough to be"})
        )
