"""train/data/sources/rows.py and formats.py: the same documents from any place on; what is wrong with a row is dropped."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from settings import ROOT
from train.data.sources import fetch, formats, pin, rows
from train.data.sources.rows import REASONS, Cursor, Document, Dropped, documents
from train.data.sources.source import CorpusError, Source

ROWS = [
    {"id": f"d{i}", "text": f"text {i} naïve \U0001f600\n" * (i % 7 + 1), "score": i / 3}
    for i in range(250)
]
SUFFIXES = ["parquet", "jsonl", "json", "jsonl.gz", "json.gz", "jsonl.zst", "json.zst"]


def lines(of: list[Any]) -> bytes:
    return "".join(
        (json.dumps(row) if isinstance(row, dict) else row) + "\n" for row in of
    ).encode()


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix.endswith("gz"):
        return gzip.compress(content)
    if suffix.endswith("zst"):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()
    return content


def encoded(of: list[Any], suffix: str, compression: str = "zstd") -> bytes:
    """A file of these rows, in small groups."""
    if suffix != "parquet":
        return compressed(lines(of), suffix)
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_pylist(of),
        sink,
        row_group_size=40,
        compression=compression,
        write_page_checksum=True,
        use_dictionary=False,
        write_batch_size=1,
    )  # a page a row
    return sink.getvalue().to_pybytes()


def source(folder: Path, contents: dict[str, bytes], **keys: Any) -> pin.Pinned:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    s = Source("papers", "files", 0.2, files=tuple(str(folder / name) for name in contents), **keys)
    return pin.pin(s, folder / "data")


def read(p: pin.Pinned, at: Cursor = rows.START) -> list[Document | Dropped]:
    return list(documents(p, fetch.Files(p, Path("unused")), at))


def texts(found: list[Document | Dropped]) -> list[tuple[str, str]]:
    assert all(isinstance(item, Document) for item in found), found
    return [(item.name, item.text) for item in found if isinstance(item, Document)]


def dropped(found: list[Document | Dropped]) -> list[tuple[str, int]]:
    return [(item.reason, item.at.row) for item in found if isinstance(item, Dropped)]


def refused(p: pin.Pinned, at: Cursor = rows.START) -> str:
    with pytest.raises(CorpusError) as raised:
        read(p, at)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ---- The split


def test_equal_texts_under_two_names_are_never_on_both_sides_of_a_split_by_text(
    tmp_path: Path,
) -> None:
    twice = [{"id": f"{name} {k}", "text": f"text {k}"} for name in "ab" for k in range(200)]
    by_name = source(tmp_path, {"a.jsonl": lines(twice)})
    by_text = source(tmp_path, {"a.jsonl": lines(twice)}, hold_out_by="text")
    assert by_text.key != by_name.key and by_text.revision == by_name.revision

    def sides(pinned: pin.Pinned) -> dict[str, set[bool]]:
        found: dict[str, set[bool]] = {}
        for document in read(pinned):
            assert isinstance(document, Document)
            found.setdefault(document.text, set()).add(pinned.holds_out(document.name))
        return found

    assert sum(len(of_text) == 2 for of_text in sides(by_name).values()) > 20
    assert all(len(of_text) == 1 for of_text in sides(by_text).values())
    held_out = sum(of_text == {True} for of_text in sides(by_text).values())
    assert 20 < held_out < 60  # a fifth of 200


# ---- What is right


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_documents_from_any_place_on(
    tmp_path: Path, suffix: str
) -> None:
    p = source(
        tmp_path,
        {f"a.{suffix}": encoded(ROWS[:90], suffix), f"b.{suffix}": encoded(ROWS[90:], suffix)},
    )
    whole = read(p)
    assert texts(whole) == [(row["id"], row["text"]) for row in ROWS]
    assert [item.at for item in whole] == [(0, i) for i in range(90)] + [(1, i) for i in range(160)]
    for k in (1, 29, 30, 40, 41, 89, 90, 91, 130, 249):
        assert read(p, whole[k].at) == whole[k:], k
        after = Cursor(whole[k].at.file, whole[k].at.row + 1)
        assert read(p, after) == whole[k + 1 :], k
    assert read(p, Cursor(2, 0)) == []


def test_files_are_asked_for_one_after_the_other_and_the_next_one_ahead(tmp_path: Path) -> None:
    p, calls = (
        source(tmp_path, {f"{name}.jsonl": lines(ROWS[k : k + 2]) for k, name in enumerate("abc")}),
        [],
    )

    class Watched(fetch.Files):
        def path(self, i: int) -> Path:
            calls.append(f"path {i}")
            return super().path(i)

        def prefetch(self, i: int) -> None:
            calls.append(f"prefetch {i}")

        def done(self, i: int) -> None:
            calls.append(f"done {i}")

    for item in documents(p, Watched(p, tmp_path), Cursor(1, 1)):
        calls.append(f"row {item.at.file} {item.at.row}")
    assert calls == [
        "path 1",
        "prefetch 2",
        "row 1 1",
        "done 1",
        "path 2",
        "prefetch 3",
        "row 2 0",
        "row 2 1",
        "done 2",
    ]


def test_row_groups_before_the_place_are_not_read(tmp_path: Path) -> None:
    content = bytearray(encoded(ROWS, "parquet"))
    content[10:60] = bytes(50)  # in the first of seven groups of 40 rows
    p = source(tmp_path, {"a.parquet": bytes(content)})
    assert "damaged or truncated" in refused(p) and "damaged or truncated" in refused(
        p, Cursor(0, 39)
    )
    assert texts(read(p, Cursor(0, 40))) == [(row["id"], row["text"]) for row in ROWS[40:]]


def test_a_text_file_is_one_document_as_it_is(tmp_path: Path) -> None:
    p = source(
        tmp_path,
        {"a.txt": b"\xef\xbb\xbfone\r\ntwo\n", "b.txt": b"  \n", "c.txt": b"\xff", "d.txt": b"d"},
    )
    found = read(p)
    assert texts(found[:1] + found[3:]) == [
        (str(tmp_path / "a.txt"), "one\r\ntwo\n"),
        (str(tmp_path / "d.txt"), "d"),
    ]
    assert [(item.reason, item.at) for item in found[1:3] if isinstance(item, Dropped)] == [
        ("empty", (1, 0)),
        ("utf-8", (2, 0)),
    ]
    assert read(p, Cursor(1, 1)) == found[2:]


def test_a_row_without_a_name_has_that_of_its_place(tmp_path: Path) -> None:
    content = lines(
        [
            {"text": "a"},
            {"id": None, "text": "b"},
            {"id": 7, "text": "c"},
            {"id": "", "text": "d"},
            {"id": "\ud800", "text": "e"},
        ]
    )
    p = source(tmp_path, {"a.jsonl": content})
    at = tmp_path / "a.jsonl"
    assert [name for name, _ in texts(read(p))] == [f"{at}:0", f"{at}:1", "7", f"{at}:3", f"{at}:4"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_template_makes_the_text_of_several_columns(tmp_path: Path, suffix: str) -> None:
    good = {"q": "Why?", "o": {"A": "this", "B": "that"}, "n": 3}
    p = source(
        tmp_path,
        {
            f"a.{suffix}": encoded(
                [good, good | {"n": None}, good | {"o": {"A": None, "B": "x"}}], suffix
            )
        },
        template="{q} {o[A]} {n:02d}",
    )
    found = read(p)
    assert isinstance(found[0], Document) and found[0].text == "Why? this 03"
    assert dropped(found) == [("null", 1), ("null", 2)]
    p = source(tmp_path, {f"b.{suffix}": encoded([good], suffix)}, template="{q} {choices}")
    assert "no column 'choices'" in refused(p)
    p = source(tmp_path, {f"c.{suffix}": encoded([good], suffix)}, template="{q} {o}")
    assert [item.reason for item in read(p) if isinstance(item, Dropped)] == ["type"]


def test_a_template_with_a_key_that_a_row_lacks_drops_that_row(tmp_path: Path) -> None:
    p = source(
        tmp_path,
        {"a.jsonl": lines([{"q": {"x": "1"}}, {"q": {"y": "2"}}, {"r": 1}, {"q": "text"}])},
        template="{q[x]}",
    )
    assert dropped(read(p)) == [("template", 1), ("template", 2), ("template", 3)]


def test_the_embedded_corpus_is_the_interpreters_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    p = pin.pin(Source("python-stdlib", "stdlib", 0.05), tmp_path / "data")
    found = read(p)
    assert dropped(found) == [("utf-8", 0), ("empty", 0)]
    assert texts([item for item in found if isinstance(item, Document)]) == [
        ("a/z.py", "z"),
        ("b.py", "b = 'naïve'\n"),
        ("testing.py", "kept"),
    ]


# ---- What is wrong with a row

BAD_LINES: dict[str, list[bytes]] = {
    "null": [b'{"text": null}', b'{"body": "x"}'],
    "empty": [b"", b"   ", b'{"text": ""}', b'{"text": " \\n\\t"}'],
    "not json": [b'{"text": "x"', b"[1]", b"12", b"null", b"{'text': 'x'}", b"[" * 3000],
    "utf-8": [b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}'],
    "nul": [b'{"text": "a\\u0000b"}'],
    "surrogate": [b'{"text": "a \\ud800 b"}'],
    "type": [b'{"text": 3}', b'{"text": ["x"]}'],
}


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_rows_of_json_lines_are_dropped_with_their_reason_and_the_others_stay(
    tmp_path: Path, suffix: str
) -> None:
    content, expected = b"", []
    for reason, bad in BAD_LINES.items():
        for line in bad:
            content += b'{"text": "good"}\n' + line + b"\n"
            expected.append(reason)
    p = source(
        tmp_path, {f"a.{suffix}": gzip.compress(content) if suffix.endswith("gz") else content}
    )
    found = read(p)
    assert dropped(found) == [(reason, 2 * k + 1) for k, reason in enumerate(expected)]
    assert [item.text for item in found if isinstance(item, Document)] == ["good"] * len(expected)
    for k in range(len(found)):
        assert read(p, Cursor(0, k)) == found[k:]
    assert set(expected) | {"template", "long"} == REASONS.keys()
    assert all(0 < len(item.what) < 200 for item in found if isinstance(item, Dropped))


@pytest.mark.parametrize("template", ["", "{text[en]}"])
def test_rows_of_columns_are_dropped_with_their_reason_and_the_others_stay(
    tmp_path: Path, template: str
) -> None:
    cells = [b"good", None, b"", b"  \n", b"\xff\xfe", b"a\0b", b"good"]
    text = pa.array(cells, pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(text), text.buffers(), text.null_count)
    if template:
        column = pa.StructArray.from_arrays([column], ["en"])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": column}), sink)
    keys = {"template": template} if template else {}
    found = read(source(tmp_path, {"a.parquet": sink.getvalue().to_pybytes()}, **keys))
    assert dropped(found) == [("null", 1), ("empty", 2), ("empty", 3), ("utf-8", 4), ("nul", 5)]
    assert [item.at.row for item in found if isinstance(item, Document)] == [0, 6]


def test_what_is_too_long_is_dropped_without_being_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "LONGEST_TEXT", 1000)
    monkeypatch.setattr(rows, "LONGEST_TEXT", 1000)
    monkeypatch.setattr(formats, "BUFFER_BYTES", 64)
    of = [
        {"text": "x" * 980},
        {"text": "y" * 990},
        {"text": "z"},
        {"text": "ï" * 5000},
        {"text": "end"},
    ]
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in of).encode()
    found = read(source(tmp_path, {"a.jsonl": content}))
    assert dropped(found) == [("long", 1), ("long", 3)]
    assert [item.text[0] for item in found if isinstance(item, Document)] == ["x", "z", "e"]
    found = read(
        source(
            tmp_path, {"a.parquet": encoded([{"text": "ï" * 500}, {"text": "ï" * 501}], "parquet")}
        )
    )
    assert dropped(found) == [("long", 1)]
    found = read(source(tmp_path, {"a.txt": b"x" * 1000, "b.txt": b"x" * 1001}))
    assert [type(item) for item in found] == [Document, Dropped]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_of_which_too_much_was_dropped_is_refused_wherever_reading_began(
    tmp_path: Path, suffix: str
) -> None:
    of = [{"id": str(i), "text": None if i < 51 else "x"} for i in range(100)]
    p = source(tmp_path, {f"a.{suffix}": encoded(of, suffix)})
    for start in (0, 1, 45, 80, 99) if suffix == "jsonl" else (0,):
        assert (
            "51 of 100 rows had to be dropped, more than max_dropped = 0.5 of them (column 'text' is null)"
            in refused(p, Cursor(0, start))
        ), start
    # A part of a Parquet file says little of the whole.
    rest = [{"id": str(i), "text": "x" if i < 150 else None} for i in range(270)]
    p = source(tmp_path, {f"a.{suffix}": encoded(rest, suffix)})
    assert len(read(p)) == 270 and len(read(p, Cursor(0, 160))) == 110
    assert (
        len(read(source(tmp_path, {f"a.{suffix}": encoded(of, suffix)}, max_dropped=0.51))) == 100
    )
    assert (
        len(read(source(tmp_path, {f"a.{suffix}": encoded(of[1:], suffix)}))) == 99
    )  # too few to judge by
    assert (
        len(read(source(tmp_path, {f"a.{suffix}": encoded([*of[1:], of[-1]], suffix)}))) == 100
    )  # a half


# ---- In bounds, and on real text

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
@pytest.mark.parametrize(
    ("suffix", "large", "tiny"),
    [("jsonl", 5, 200_000), ("parquet", 5, 200_000), ("jsonl.gz", 3, 100_000)],
)
def test_memory_is_bounded_by_a_document_and_not_by_the_file(
    tmp_path: Path, suffix: str, large: int, tiny: int
) -> None:
    """KiB above what the process had before; a text of 50 MB is there a few times at once, as bytes and as text."""
    for name, of, most_mb in (
        ("large", [{"text": f"{i} " + "word " * 10_000_000} for i in range(large)], 450),
        ("tiny", [{"id": str(i), "text": f"t{i}"} for i in range(tiny)], 100),
    ):
        path = tmp_path / f"{name}.{suffix}"
        path.write_bytes(encoded(of, suffix))
        out = subprocess.run(
            [sys.executable, "-c", READER, path, tmp_path / "data"],
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=True,
        ).stdout
        count, kib = map(int, out.split())
        assert count == len(of) and kib * 1024 < most_mb * 1e6, (name, kib)
