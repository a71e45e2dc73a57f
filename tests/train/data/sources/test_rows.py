"""train/data/sources/rows.py and formats.py: the same documents from any place on; what is wrong is refused or dropped."""

import hashlib
import json
import random
import re
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from settings import ROOT
from tests.train.data.sources.source_files import (
    PAGE,
    POINTER,
    ROWS,
    SUFFIXES,
    compress,
    declare,
    encode,
    encode_small,
    give,
    outcomes,
    read,
    refusal,
)
from train.data.sources import fetch, formats, pin, rows
from train.data.sources.rows import REASONS, Cursor, Document, Dropped, documents
from train.data.sources.source import CorpusError, Source

# ---- Documents


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_documents_from_any_place_on(tmp_path, suffix):
    files = {"a": ROWS[:90], "b": ROWS[90:]}
    p = declare(
        tmp_path, {f"{name}.{suffix}": encode_small(of, suffix) for name, of in files.items()}
    )
    whole = read(p)
    places = [(0, i) for i in range(90)] + [(1, i) for i in range(160)]
    assert whole == [
        Document(row["id"], row["text"], Cursor(*at)) for row, at in zip(ROWS, places, strict=True)
    ]
    for k in (1, 29, 30, 40, 41, 89, 90, 91, 130, 249):
        assert read(p, whole[k].at) == whole[k:], k
        after = Cursor(whole[k].at.file, whole[k].at.row + 1)
        assert read(p, after) == whole[k + 1 :], k
    assert read(p, Cursor(2, 0)) == []


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"\xef\xbb\xbfone\r\ntwo\n", ["one\r\ntwo\n"]),
        ("a.txt", b"  \n", [("empty",)]),
        ("a.md", b"\xff", [("utf-8",)]),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}', ["a", "b"]),
        ("a.jsonl", b"", []),
        ("a.jsonl", b'["a", "b"]\n"c"\n{"text": "d"}\n7\n', ["a\n\nb", "c", "d", ("not json",)]),
        ("a.jsonl", b'{"text": "d"}\n["a"]\n"c"\n', ["d", ("not json",), ("not json",)]),
        ("a.jsonl", b'[\n{"text": "d"}\n]', ["d"]),
        ("a.json", b'{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        ("a.json", b'[{"text": "a"}, {"text": "b"}]', ["a", "b"]),
        ("a.json", b'\xef\xbb\xbf [\n  "a"\n ,\n"b\\n"\n]\n\n', ["a", "b\n"]),
        ("a.json", b'[["a", "b"], "c"]', ["a\n\nb", "c"]),
        ("a.json", b'["a", "b"]\n["c"]\n', ["a\n\nb", "c"]),
        ("a.json", b"[ ]", []),
    ],
)
def test_what_becomes_of_each_row(tmp_path, compression, name, content, expected):
    p = declare(tmp_path, {name + compression: compress(content, compression)})
    whole = read(p)
    assert outcomes(whole) == expected
    for k in range(len(whole)):
        assert whole[k].at == (0, k) and read(p, Cursor(0, k)) == whole[k:]


def test_files_are_asked_for_one_after_the_other_and_the_next_one_ahead(tmp_path):
    calls = []

    class Watched(fetch.Files):
        def path(self, i):
            calls.append(f"path {i}")
            return super().path(i)

        def prefetch(self, i):
            calls.append(f"prefetch {i}")

        def done(self, i):
            calls.append(f"done {i}")

    p = declare(tmp_path, {f"{k}.jsonl": encode(ROWS[k : k + 2], "jsonl") for k in range(3)})
    calls += [f"row {item.at}" for item in documents(p, Watched(p, tmp_path), Cursor(2, 1))]
    assert [call.split("(")[0] for call in calls] == [
        "path 2",
        "prefetch 3",
        "done 2",
        "row Cursor",
    ]


def test_row_groups_before_the_place_are_not_read(tmp_path):
    content = bytearray(encode_small(ROWS, "parquet"))
    content[10:60] = bytes(50)  # in the first of seven groups of 40 rows
    p = declare(tmp_path, {"a.parquet": bytes(content)})
    assert "damaged or truncated" in refusal(read, p, Cursor(0, 39))
    assert outcomes(read(p, Cursor(0, 40))) == [row["text"] for row in ROWS[40:]]


def test_a_document_is_named_by_its_column_its_place_or_its_text(tmp_path):
    """The name decides what is held out, so with hold_out_by = "text" equal texts are together."""
    ids = [None, 7, "", "\ud800", "own"]
    content = encode([{"text": "a"}, *({"id": k, "text": "b"} for k in ids)], "jsonl")

    def names(files, **keys):
        found = read(declare(tmp_path, files, **keys))
        return [item.name for item in found if isinstance(item, Document)]

    at = tmp_path / "a.jsonl"
    places = [f"{at}:0", f"{at}:1", "7", f"{at}:3", f"{at}:4", "own"]
    assert names({"a.jsonl": content}) == places
    assert names({"a.txt": b"text"}) == [str(tmp_path / "a.txt")]
    hashes = [hashlib.sha256(text).hexdigest() for text in (b"a", *[b"b"] * 5)]
    assert names({"a.jsonl": content}, hold_out_by="text") == hashes


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_template_makes_the_text_of_several_columns(tmp_path, suffix):
    good = {"q": "Why?", "o": {"A": "this", "B": "that"}, "n": 3}
    wrong = [good | {"n": None}, good | {"o": {"A": None, "B": "x"}}]
    content = {f"a.{suffix}": encode([good, *wrong], suffix)}

    def made(template):
        return outcomes(read(declare(tmp_path, content, template=template)))

    assert made("{q} {o[A]} {n:02d}") == ["Why? this 03", ("null",), ("null",)]
    assert made("{q} {o}") == [("type",)] * 3
    assert "no column 'choices'" in refusal(made, "{q} {choices}")
    if suffix == "jsonl":
        lines = [{"q": {"x": "1"}}, {"q": {"y": "2"}}, {"r": 1}, {"q": "text"}]
        content = {"a.jsonl": encode(lines, "jsonl")}
        assert made("{q[x]}") == ["1", *[("template",)] * 3]


def test_the_embedded_corpus_is_the_interpreters_own(tmp_path, monkeypatch):
    contents = {
        "b.py": b"b = 'na\xc3\xafve'\r\n",
        "a/z.py": b"z",
        "a/latin.py": b"# \xe9",
        "test/t.py": b"t",
        "empty.py": b"",
        "lib/tests/x.py": b"x",
        "site-packages/p.py": b"p",
        "data.txt": b"d",
        "testing.py": b"kept",
    }
    for name, content in contents.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_bytes(content)
    monkeypatch.setattr(pin, "stdlib_root", lambda: tmp_path / "lib")
    found = read(pin.pin(Source("python-stdlib", "stdlib", 0.05), tmp_path / "data"))
    assert outcomes(found) == [("utf-8",), "z", "b = 'naïve'\n", ("empty",), "kept"]
    assert [item.name for item in found if isinstance(item, Document)] == [
        "a/z.py",
        "b.py",
        "testing.py",
    ]


# ---- Rows that are dropped

BAD_LINES: dict[str, list[bytes]] = {
    "null": [b'{"text": null}', b'{"body": "x"}'],
    "empty": [b"", b"   ", b'{"text": ""}', b'{"text": " \\n\\t"}'],
    "not json": [b'{"text": "x"', b"[1]", b"12", b"null", b"{'text': 'x'}", b"[" * 3000],
    "utf-8": [b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}'],
    "nul": [b'{"text": "a\\u0000b"}'],
    "surrogate": [b'{"text": "a \\ud800 b"}'],
    "type": [b'{"text": 3}', b'{"text": ["x"]}'],
}


def test_rows_of_json_lines_are_dropped_with_their_reason_and_the_others_stay(
    tmp_path,
):
    content, expected = b"", list[Any]()
    for reason, bad in BAD_LINES.items():
        for line in bad:
            content += b'{"text": "good"}\n' + line + b"\n"
            expected += ["good", (reason,)]
    found = read(declare(tmp_path, {"a.jsonl": content}))
    assert outcomes(found) == expected
    assert BAD_LINES.keys() | {"template", "long"} == REASONS.keys()
    assert all(0 < len(item.what) < 200 for item in found if isinstance(item, Dropped))


@pytest.mark.parametrize("template", ["", "{text[en]}"])
def test_rows_of_columns_are_dropped_with_their_reason_and_the_others_stay(tmp_path, template):
    cells = [b"good", None, b"", b"  \n", b"\xff\xfe", b"a\0b", b"good"]
    text = pa.array(cells, pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(text), text.buffers(), text.null_count)
    if template:
        column = pa.StructArray.from_arrays([column], ["en"])
    content = encode(pa.table({"text": column}), "parquet")
    reasons = [(reason,) for reason in ("null", "empty", "empty", "utf-8", "nul")]
    found = read(declare(tmp_path, {"a.parquet": content}, template=template))
    assert outcomes(found) == ["good", *reasons, "good"]


def test_what_is_too_long_is_dropped_without_being_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LONGEST_TEXT", 1000)
    monkeypatch.setattr(rows, "LONGEST_TEXT", 1000)
    monkeypatch.setattr(formats, "BUFFER_BYTES", 64)
    texts = ["x" * 980, "y" * 990, "z", "ï" * 5000, "end"]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    long = [{"text": "ï" * 500}, {"text": "ï" * 501}]
    for name, content, expected in (
        ("a.jsonl", lines.encode(), [texts[0], ("long",), "z", ("long",), "end"]),
        ("a.parquet", encode(long, "parquet"), ["ï" * 500, ("long",)]),
        ("a.txt", b"x" * 1000, ["x" * 1000]),
        ("b.txt", b"x" * 1001, [("long",)]),
    ):
        assert outcomes(read(declare(tmp_path, {name: content}))) == expected, name


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_of_which_too_much_was_dropped_is_refused_wherever_reading_began(tmp_path, suffix):
    of = [{"id": str(i), "text": None if i < 51 else "x"} for i in range(100)]

    def made(of, **keys):
        return declare(tmp_path, {f"a.{suffix}": encode_small(of, suffix)}, **keys)

    said = "51 of 100 rows had to be dropped, more than max_dropped = 0.5 of them (column 'text' is"
    for start in (0, 1, 45, 80, 99) if suffix == "jsonl" else (0,):
        message = refusal(read, made(of), Cursor(0, start))
        assert said in message and re.match(r"\S+(l:|parquet: row )1 of papers: ", message)
    # A part of a Parquet file says little of the whole.
    rest = [{"id": str(i), "text": "x" if i < 150 else None} for i in range(270)]
    assert len(read(made(rest))) == 270 and len(read(made(rest), Cursor(0, 160))) == 110
    assert len(read(made(of, max_dropped=0.51))) == 100
    assert len(read(made(of[1:]))) == 99  # too few to judge by
    assert len(read(made([*of[1:], of[-1]]))) == 100  # a half


# ---- Files that are refused


@pytest.mark.fault(11)
@pytest.mark.parametrize("suffix", [*SUFFIXES, "txt"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (PAGE, 'a web or error page, it starts with b"<?xml version='),
        (b"\xef\xbb\xbf\n <!DOCTYPE html><html>", "a web or error page"),
        (POINTER, "a git-lfs pointer"),
    ],
    ids=["error", "page", "pointer"],
)
def test_a_file_that_is_something_else_is_named(tmp_path, suffix, content, said):
    message = refusal(read, declare(tmp_path, {f"a.{suffix}": content}))
    assert message.startswith(f"{tmp_path / f'a.{suffix}'} of papers: is not ") and said in message
    assert "Get it again, or leave it out" in message


HUGE = b"[1%s]" % (b"0" * 5000)
NESTED = b'["a", ' + b"[" * 100_000
LATER = encode([{"body": "x"}] * 100 + [{"text": "x"}] * 900, "jsonl")
DOUBLED = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"])
NO_KIND = "not a kind of file that papers can be read from; there are: .parquet, .jsonl"


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'{\n "text": "a"\n}\n', " of papers: one JSON object over the whole file"),
        ("a.json", b'["a", "b', " of papers: half an array, it ends with"),
        ("a.json", b'["a", "b"', "half an array, it ends with"),
        ("a.json", b'["a",\n"b" "c"]', 'not valid JSON at \'["a",\\n"b" "c"]\' (line 2, column 5)'),
        ("a.json", b'["a",\n"b"]\n["c"]', "more than one JSON value (line 3, column 1)"),
        ("a.json", b'["a", "\xff"]', " of papers: is not UTF-8. Save it in UTF-8"),
        ("a.json", b'["a",]', "not valid JSON at '[\"a\",]' (line 1"),
        ("a.json", HUGE, "not valid JSON: Exceeds the limit (4300 digits)"),
        ("a.json", NESTED, "an element that is nested too deeply"),
        ("a.json", b'["%s"]' % (b"a" * 999), "more than 800 characters. Write it as JSON lines"),
        ("a.jsonl", encode([{"a": "", "b": 1}], "jsonl"), "no column 'text'; it has: a, b. Name"),
        ("a.jsonl", LATER, "no column 'text'; it has: body. Name the right one"),
        ("a.parquet", encode([{"a": "", "b": 1}], "parquet"), "no column 'text'; it has: a, b. "),
        ("a.parquet", encode([{"text": 1}], "parquet"), "column 'text' is int64, not text"),
        ("a.parquet", encode(DOUBLED, "parquet"), "two columns are named 'text'. Rename one of"),
        (
            "a.parquet",
            b"something else, and long enough",
            "is not parquet (it starts with b'someth",
        ),
        ("a.jsonl.gz", b"something else", "not gzip"),
        ("a.jsonl.zst", b"something else", "not zstd"),
        *((name, b"x", NO_KIND) for name in ("a.csv", "a.arrow", "a.txt.bz2", "a.py", "jsonl")),
    ],
    ids=str,
)
def test_a_file_that_holds_no_rows_of_text_is_refused_with_the_remedy(
    tmp_path, monkeypatch, name, content, said
):
    monkeypatch.setattr(formats, "LONGEST_ARRAY", 10**6 if content in (HUGE, NESTED) else 800)
    message = refusal(read, declare(tmp_path, {name: content}))
    assert said in message and message.startswith(f"{tmp_path}/{name}")


def test_a_column_may_be_absent_from_99_of_the_first_lines(tmp_path):
    p = declare(tmp_path, {"a.jsonl": LATER[LATER.index(b"\n") + 1 :]})
    assert outcomes(read(p)) == [("null",)] * 99 + ["x"] * 900
    nulls = declare(tmp_path, {"a.parquet": encode([{"text": None}], "parquet")})
    assert outcomes(read(nulls)) == [("null",)]


@pytest.mark.fault(11)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl.gz", "json.gz", "jsonl.zst"])
def test_a_file_that_is_cut_anywhere_is_refused(tmp_path, suffix):
    noise = [row | {"noise": random.Random(i).random()} for i, row in enumerate(ROWS)]
    content = encode_small(noise, suffix)
    n = len(content)
    for cut in [0, 1, 3, 5, 20, n // 4, n // 2, 3 * n // 4, n - 9, n - 4, n - 1]:
        message = refusal(read, declare(tmp_path, {f"a.{suffix}": content[:cut]}))
        assert message.startswith(f"{tmp_path}/a.{suffix}"), message
        assert "truncated" in message or cut < 10, message


@pytest.mark.fault(11)
@pytest.mark.parametrize(("suffix", "least"), [("parquet", 5), ("jsonl.gz", 20)])
def test_a_file_with_bytes_that_changed_gives_no_other_text(tmp_path, suffix, least):
    """Many of a small Parquet file's bytes mean nothing."""
    content = encode_small(ROWS, suffix, compression="none")
    rng, wrong = random.Random(3), 0
    for _ in range(25):
        damaged = bytearray(content)
        damaged[rng.randrange(20, len(content) - 12)] ^= 1 << rng.randrange(8)
        try:
            found = read(declare(tmp_path, {f"a.{suffix}": bytes(damaged)}))
        except CorpusError:
            wrong += 1
        else:
            assert outcomes(found) == [row["text"] for row in ROWS]
    assert wrong > least


@pytest.mark.fault(11)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("end", [b'{"id": "2", "te', b'{"id": "2", "text": "na\xc3', b"1"])
def test_half_a_last_line_is_refused_behind_the_whole_ones(tmp_path, suffix, end):
    content = b'{"text": "whole"}\n{"text": "whole"}\n' + end
    p = declare(tmp_path, {f"a.{suffix}": compress(content, suffix)})
    found = documents(p, fetch.Files(p, tmp_path))
    assert [next(found).at.row, next(found).at.row] == [0, 1]
    said = r"a\.jsonl\S*:3 of papers: half a last line, it ends with b'.*Get it again"
    assert re.search(said, refusal(next, found))


# ---- Parquet


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd"},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
        {"use_dictionary": False, "compression": "zstd", "write_batch_size": 1},
    ],
)
def test_parquet_that_multiplies_a_text_is_decoded_in_few_rows(tmp_path, options):
    text = "word " * 100_000
    path = tmp_path / "a.parquet"
    texts = [text] * 100 + ["short"] * 20_000
    table = pa.table({"text": texts, "id": ["x"] * len(texts)})
    path.write_bytes(encode(table, "parquet", **options))
    assert path.stat().st_size < 2**20
    before = pa.total_allocated_bytes()
    for row, value in formats.read(path, path.name, ("text", "id")):
        assert value == {"text": texts[row], "id": "x"}
        assert pa.total_allocated_bytes() - before < 2**24


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), "dictionary"])
def test_text_of_every_arrow_type_is_read(tmp_path, kind):
    plain = pa.array(["a", None, "naïve"])
    column = plain.dictionary_encode() if kind == "dictionary" else plain.cast(kind)
    content = encode(pa.table({"n": [1, 2, 3], "text": column}), "parquet")
    p = declare(tmp_path, {"a.parquet": content})
    assert outcomes(read(p)) == ["a", ("null",), "naïve"]
    assert outcomes(read(give(tmp_path / "a.parquet", tmp_path / "given"))) == outcomes(read(p))


def test_dates_that_python_has_not_are_dropped_or_not_looked_at(tmp_path):
    days = pa.array([1, 2**31 - 1], pa.date32())
    times = pa.array([2**62, 1], pa.timestamp("us"))
    content = encode(pa.table({"text": ["a", "b"], "day": days, "time": times}), "parquet")
    assert outcomes(read(declare(tmp_path, {"a.parquet": content}))) == ["a", "b"]
    assert len(read(give(tmp_path / "a.parquet", tmp_path / "given"))) == 2
    for column, row in (("day", 1), ("time", 0)):
        p = declare(tmp_path, {"a.parquet": content}, template="{text} {" + column + "}")
        assert outcomes(read(p))[row] == ("type",)


# ---- In bounds

READER = """
import re, sys
from pathlib import Path
from train.data.sources import fetch, pin, rows
from train.data.sources.source import Source
p = pin.pin(Source("x", "files", 0.1, files=(sys.argv[1],)), Path(sys.argv[2]))
def peak():  # KiB; getrusage would count what the parent had before this program was started
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
count = sum(1 for _ in rows.documents(p, fetch.Files(p, Path(sys.argv[2]))))
print(count, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "jsonl.gz"])
@pytest.mark.parametrize(
    ("text", "count", "most_mb"), [("word " * 10_000_000, 5, 450), ("t", 200_000, 100)]
)
def test_memory_is_bounded_by_a_document_and_not_by_the_file(
    tmp_path, suffix, text, count, most_mb
):
    """KiB above what the process had before; a text of 50 MB is there a few times at once, as bytes and as text."""
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(encode_small([{"text": f"{i} {text}"} for i in range(count)], suffix))
    command = [sys.executable, "-c", READER, path, tmp_path / "data"]
    out = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True).stdout
    rows, kib = map(int, out.split())
    assert rows == count and kib * 1024 < most_mb * 1e6
