"""train/data/sources/formats.py and rows.py: what is wrong with a file is refused, by name, row and remedy."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.train.data.sources.test_rows import (
    ROWS,
    SUFFIXES,
    compressed,
    dropped,
    encoded,
    lines,
    read,
    refused,
    source,
    texts,
)
from train.data.sources import fetch, formats, pin
from train.data.sources.given import given_source
from train.data.sources.rows import Cursor, Document, documents
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
@pytest.mark.parametrize("suffix", ["parquet", "jsonl.gz", "json.gz", "jsonl.zst"])
def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path, suffix: str) -> None:
    content = encoded(
        [row | {"noise": random.Random(i).random()} for i, row in enumerate(ROWS)], suffix
    )
    n = len(content)
    for cut in [0, 1, 3, 5, 20, n // 4, n // 2, 3 * n // 4, n - 9, n - 4, n - 1]:
        folder = tmp_path / str(cut)
        message = refused(source(folder, {f"a.{suffix}": content[:cut]}))
        assert message.startswith(f"{folder}/a.{suffix}"), message
        assert "truncated" in message or cut < 10, message
    assert len(read(source(tmp_path, {f"a.{suffix}": content}))) == len(ROWS)


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
    p = source(tmp_path, {f"a.{suffix}": compressed(content, suffix)})
    found = documents(p, fetch.Files(p, tmp_path))
    assert [next(found).at.row, next(found).at.row] == [0, 1]
    with pytest.raises(
        CorpusError,
        match=r"a\.jsonl\S*:3 of papers: half a last line, it ends with b'.*Get it again",
    ):
        next(found)


def test_a_last_line_without_its_end_is_whole_when_its_object_is(tmp_path: Path) -> None:
    assert (
        len(read(source(tmp_path, {"a.jsonl": b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}'}))) == 2
    )
    assert read(source(tmp_path, {"a.jsonl": b""})) == []


ARRAYS = [
    (b'[{"text": "a"}, {"text": "b"}]', ["a", "b"]),
    (b'\xef\xbb\xbf [\n  "a"\n ,\n"b\\n"\n]\n\n', ["a", "b\n"]),
    (b'[["a", "b"], "c"]', ["a\n\nb", "c"]),
    (b'["a", "b"]\n["c"]\n', ["a\n\nb", "c"]),
    (b"[ ]", []),
]


@pytest.mark.parametrize(("content", "expected"), ARRAYS)
@pytest.mark.parametrize("suffix", ["json", "json.gz", "json.zst"])
def test_an_array_over_the_whole_file_is_its_elements(
    tmp_path: Path, suffix: str, content: bytes, expected: list
) -> None:
    p = source(tmp_path, {f"a.{suffix}": compressed(content, suffix)})
    found = read(p)
    assert [item.text for item in found if isinstance(item, Document)] == expected
    assert [item.at.row for item in found] == list(range(len(expected)))
    assert read(p, Cursor(0, 1)) == found[1:]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.json",
            b'{\n "text": "a"\n}\n',
            "a.json of papers: one JSON object over the whole file",
        ),
        ("a.json", b'["a", "b', "half an array, it ends with"),
        ("a.json", b'["a", "b"', "half an array, it ends with"),
        ("a.json", b'["a",\n"b" "c"]', 'not valid JSON at \'["a",\\n"b" "c"]\' (line 2, column 5)'),
        ("a.json", b'["a",\n"b"]\n["c"]', "more than one JSON value (line 3, column 1)"),
        ("a.json", b'["a", "\xff"]', "a.json of papers: is not UTF-8. Convert it"),
        ("a.json", b'["a", ' + b"[" * 100_000, "an element that is nested too deeply"),
        ("a.json", b'["a", "b", "c", "d", "e"]', "more than 20 characters. Write it as JSON lines"),
    ],
)
def test_json_that_is_not_rows_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, said: str
) -> None:
    if "20 characters" in said:
        monkeypatch.setattr(formats, "LONGEST_ARRAY", 20)
    assert said in refused(source(tmp_path, {name: content}))


def test_lines_of_texts_and_arrays_are_rows_where_the_first_one_is(tmp_path: Path) -> None:
    content = b'["a", "b"]\n"c"\n{"text": "d"}\n7\n'
    found = read(source(tmp_path, {"a.jsonl": content}))
    assert [item.text for item in found if isinstance(item, Document)] == ["a\n\nb", "c", "d"]
    assert dropped(found) == [("not json", 3)]
    found = read(source(tmp_path, {"b.jsonl": b'{"text": "d"}\n' + content}))
    assert dropped(found) == [("not json", 1), ("not json", 2), ("not json", 4)]
    (item,) = read(source(tmp_path, {"c.jsonl": b'[\n{"text": "d"}\n]'}))  # an array over lines
    assert isinstance(item, Document) and item.text == "d"


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    "keys",
    [
        {"compression": "zstd"},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    ],
)
def test_parquet_that_multiplies_a_text_is_decoded_row_by_row(tmp_path: Path, keys: dict) -> None:
    text = "word " * 100_000
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [text] * 1024, "id": ["x"] * 1024}), path, **keys)
    assert path.stat().st_size < 2**20
    with formats.open_parquet(path) as file:
        group, schema = file.metadata.row_group(0), file.schema_arrow
        assert formats.count_batch_rows(group, schema, ["text"]) <= 16  # 8 MiB, and not 512
        assert formats.count_batch_rows(group, schema, ["id"]) == formats.BATCH_ROWS
    before = pa.total_allocated_bytes()
    for _, value in formats.read(path, path.name, ("text",), False, "id", 0):
        assert value == {"text": text, "id": "x"}
        assert pa.total_allocated_bytes() - before < 2**25


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), "dictionary"])
def test_text_of_every_arrow_type_is_read(tmp_path: Path, kind: object) -> None:
    plain = pa.array(["a", None, "naïve"])
    column = plain.dictionary_encode() if kind == "dictionary" else plain.cast(kind)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": column}), sink)
    found = read(source(tmp_path, {"a.parquet": sink.getvalue().to_pybytes()}))
    assert [item.text for item in found if isinstance(item, Document)] == ["a", "naïve"]
    assert dropped(found) == [("null", 1)]


def test_dates_that_python_has_not_are_dropped_or_not_looked_at(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": ["a", "b"],
            "day": pa.array([1, 2**31 - 1], pa.date32()),
            "time": pa.array([2**62, 1], pa.timestamp("us")),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    content = {"a.parquet": sink.getvalue().to_pybytes()}
    assert len(texts(read(source(tmp_path, content)))) == 2
    given = given_source(str(tmp_path / "a.parquet"), "mine")
    assert len(texts(read(pin.pin(given, tmp_path / "given")))) == 2
    for column, row in (("day", 1), ("time", 0)):
        found = read(source(tmp_path, content, template="{text} {" + column + "}"))
        assert ("type", row) in dropped(found)
        assert "that Python has not" in found[row].what


@pytest.mark.fault(11)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
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
    assert "a.jsonl:100 of papers: no column 'text' in 100 rows; they have: body" in refused(
        source(tmp_path, {"a.jsonl": lines(of)})
    )
    p = source(tmp_path, {"a.jsonl": lines(of[1:])})
    whole = read(p)
    assert dropped(whole) == [("null", i) for i in range(99)] and len(whole) == 999
    assert read(p, Cursor(0, 50)) == whole[50:]


@pytest.mark.parametrize("suffix", ["parquet"])
def test_a_column_of_another_type_is_refused(tmp_path: Path, suffix: str) -> None:
    assert " of papers: column 'text' is int64, not text" in refused(
        source(tmp_path, {f"a.{suffix}": encoded([{"text": 1}], suffix)})
    )
    p = source(tmp_path, {f"a.{suffix}": encoded([{"text": None}], suffix)})
    assert dropped(read(p)) == [("null", 0)]


def test_a_file_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    for name in ("a.csv", "a.arrow", "a.txt.bz2", "a.jsonl.bz2", "a.py", "jsonl"):
        message = refused(source(tmp_path, {name: b"x"}))
        assert (
            f"{name}: not a kind of file that papers can be read from; there are: .parquet, .jsonl"
            in message
        )
        assert ".py" not in message.split("there are")[1]


def test_another_format_than_the_name_says_is_refused(tmp_path: Path) -> None:
    for suffix, said in (
        ("parquet", "not parquet"),
        ("jsonl.gz", "not gzip"),
        ("jsonl.zst", "not zstd"),
    ):
        assert said in refused(
            source(tmp_path, {f"a.{suffix}": b"something else entirely, and long enough to be"})
        )
