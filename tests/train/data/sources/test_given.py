"""DATA of make train: which files it stands for, which column is their text, and what is held out."""

import hashlib
import json
import os
import random
import shlex
import subprocess

import pyarrow as pa
import pytest
import xxhash

from tests.train.data.sources.source_files import (
    PAGE,
    POINTER,
    compress,
    encode,
    give,
    outcomes,
    read,
    refusal,
)
from train.data.sources import rows
from train.data.sources.given import given_source, list_files
from train.data.sources.pin import File, Pinned
from train.data.sources.rows import Document, piece_bytes


def texts(data, folder):
    return outcomes(read(give(data, folder / "data")))


def write(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


# ---- Plain text


@pytest.fixture
def book(tmp_path):
    """Paragraphs of words of several lengths."""
    random.seed(5000)
    words = ["naïve", "tree", "of", "the", "running", "Übermut", "sea"]
    paragraphs = [" ".join(random.choices(words, k=random.randrange(5, 60))) for _ in range(5000)]
    text = "\n\n".join(paragraphs)
    (tmp_path / "book.txt").write_text(text)
    return text


def test_pieces_of_plain_text_are_the_file_and_end_at_blank_lines(tmp_path, book):
    found = texts(tmp_path / "book.txt", tmp_path)
    assert "".join(found) == book
    size = len(book.encode()) // 400
    assert all(piece.endswith("\n") for piece in found[:-1])
    assert all(size <= len(piece.encode()) < 2 * size + 1000 for piece in found[:-1])
    large = Pinned(given_source("hf:a/b", "mine"), "", (File("a.txt", 2**32, ""),))
    assert piece_bytes(large) == 65_536
    (tmp_path / "dos.txt").write_bytes(b"one\r\n\r\ntwo\r\n")
    assert texts(tmp_path / "dos.txt", tmp_path) == ["one\r\n\r\ntwo\r\n"]
    (tmp_path / "cut").write_text("a" * 4095 + "é" * 10)  # a character across the first bytes
    assert texts(tmp_path / "cut", tmp_path)


def test_the_size_of_pieces_is_computed_once_and_not_for_each_file(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(rows, "piece_bytes", lambda pinned: calls.append(pinned) or 500)
    folder = write(tmp_path / "in", {f"{n}.txt": b"text %d" % n for n in range(20)})
    assert len(texts(folder, tmp_path)) == 20 and len(calls) == 1


def test_a_twentieth_is_held_out_by_the_hash_of_the_text(tmp_path, book):
    def held_out(path):
        pinned = give(path, tmp_path / "data")
        found = [item for item in read(pinned) if isinstance(item, Document)]
        assert all(item.name == hashlib.sha256(item.text.encode()).hexdigest() for item in found)
        chosen = {item.text for item in found if pinned.holds_out(item.name)}
        return [item.text for item in found], chosen

    pieces, chosen = held_out(tmp_path / "book.txt")
    assert 0.02 * len(pieces) < len(chosen) < 0.1 * len(pieces)
    # The same text under another name, in another order, is held out again.
    path = tmp_path / "book.jsonl"
    path.write_bytes(encode([{"body": text, "n": 1} for text in reversed(pieces)], "jsonl"))
    assert held_out(path)[1] == chosen


# ---- Which files


def test_a_folder_gives_its_text_and_names_what_it_leaves_out(tmp_path, caplog):
    contents = {
        ".git/config": b"hidden",
        "b.md": b"# b\n",
        "sub/a.py": "print('ü')\n".encode(),
        "c.jsonl": b'{"text": "a line"}\n',
        "figure.png": b"\x89PNG\r\n\x1a\n\0\0",
        "latin.txt": "é".encode("latin-1") * 100,
        "table.csv": b"a,b\n",
        "settings.json": b'{\n  "a": 1\n}\n',
        "__init__.py": b"",
        "sub/__init__.py": b"\n",
        "plot.svg": b"<?xml version='1.0'?><svg/>",
    }
    folder = write(tmp_path / "my papers [1]", contents)
    assert texts(folder, tmp_path) == ["# b\n", "a line", "print('ü')\n"]
    names, left_out = list_files(f"{folder}/")
    assert names == [f"{folder}/{name}" for name in ("b.md", "c.jsonl", "sub/a.py")]
    suffixes = (".png", ".txt", ".csv", ".json", ".svg", ".py", "empty")
    assert left_out == dict.fromkeys(suffixes, 1)
    assert "left out files that are no data (7): " in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        '{\n "a": 1\n}',
        '{"a": 1}',
        '{"content": ["./src"], "messages": {"a": "x"}}',
        '{ "a": 1,\n "b": "x"}',
        "[1, 2]",
        "[[1, 2]]",
        '[{"a": 1}]',
        '[{"a": "x", "b": "y"}]',
        "[",
        "[]",
        "7",
    ],
)
def test_json_without_text_does_not_spoil_its_folder(tmp_path, content):
    folder = write(tmp_path / "texts", {"a.txt": b"a", "b.json": content.encode()})
    assert list_files(str(folder)) == ([f"{folder}/a.txt"], {".json": 1})
    refusal(texts, folder / "b.json", tmp_path)  # a sentence


def test_links_are_followed_and_what_they_lead_to_is_taken_once(tmp_path):
    folder = write(tmp_path / "texts", {"b.txt": b"b", "sub/d.txt": b"d"})
    elsewhere = write(tmp_path / "elsewhere", {"c.txt": b"c"})
    for link, target in {
        "sub/again.txt": folder / "b.txt",
        "sub/gone.txt": folder / "nothing",
        "sub/loop": folder,
        "linked": elsewhere,
        "twice": elsewhere,
    }.items():
        (folder / link).symlink_to(target)
    names, left_out = list_files(str(folder))
    assert names == [f"{folder}/{name}" for name in ("b.txt", "linked/c.txt", "sub/d.txt")]
    assert left_out == {"broken link": 1}


def test_each_kind_of_text_is_read_from_a_file_a_folder_and_a_pattern(tmp_path):
    rows = {
        "lines.jsonl": b'{"text": "lines"}\n',
        "arrays.jsonl": b'["arrays"]\n["arrays too"]\n',
        "array.json": b'[\n "array"\n]',
        "objects.json": b'[{"text": "objects"}]',
        "note.txt": b"note",
        "page.md": b"page",
    }
    folder = tmp_path / "texts"
    for name, content in rows.items():
        for suffix in ("", ".gz", ".zst"):
            more = suffix.encode() if name.endswith((".txt", ".md")) else b""  # no copies
            write(folder, {f"{name}{suffix}": compress(content + more, suffix)})
            assert texts(folder / f"{name}{suffix}", tmp_path)[0].startswith(name.split(".")[0])
    assert len(give(folder, tmp_path / "data").files) == 18 and len(texts(folder, tmp_path)) == 21
    assert texts(f"{folder}/*.jsonl.gz", tmp_path) == ["arrays", "arrays too", "lines"]
    assert len(list_files(f"{tmp_path}/**/*.zst")[0]) == 6
    assert len(list_files(f"{tmp_path}/*/**.zst")[0]) == 6  # a part of a name is any characters


@pytest.mark.parametrize(
    ("data", "config", "split", "column"),
    [
        ("hf:roneneldan/TinyStories", None, "train", ""),
        ("hf:a/b:validation#story", None, "validation", "story"),
        ("hf:a/b:en:train", "en", "train", ""),
    ],
)
def test_a_data_set_of_the_hub_is_named_with_config_split_and_column(data, config, split, column):
    source = given_source(data, "stories")
    assert (source.kind, source.config, source.split, source.text) == ("hub", config, split, column)
    assert data.startswith(f"hf:{source.repository}")
    assert (source.validation_fraction, source.max_epochs) == (0.01, 64)


# ---- The column of text


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"id": "7", "url": "x", "text": "the text"}, "text"),
        ({"path": "a.py", "content": "the code"}, "content"),
        ({"story": "the story", "n": 7}, "story"),
        ({"text": "whole", "answer": "42"}, "text"),
    ],
)
def test_the_column_of_text_is_found_and_printed(tmp_path, suffix, row, column, caplog):
    caplog.set_level("INFO")
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(encode([row], suffix))
    assert texts(path, tmp_path) == [row[column]]
    assert f"{path}: its text is the column {column!r}" in caplog.text


@pytest.mark.parametrize(
    "first", [{"text": None, "url": "x"}, {"url": "x"}, {"text": 5, "url": "x"}, {"text": ""}]
)
def test_the_first_row_alone_does_not_choose_the_column(tmp_path, first):
    rows = [{"text": f"text {n}", "url": "x"} for n in range(600)]
    story = encode([{"story": "a story"}], "jsonl")
    write(tmp_path / "in", {"a.jsonl": encode([first, *rows], "jsonl"), "b.jsonl": story})
    assert texts(tmp_path / "in", tmp_path)[1:] == [*(row["text"] for row in rows), "a story"]


SEVERAL = "has several text columns: body, title. Choose one: DATA={path}#body."


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("row", "column", "said"),
    [
        ({"title": "a", "body": "more text"}, "", SEVERAL),
        ({"n": 1}, "", "has no column of text (columns: n). Leave it out."),
        ({"messages": [{"role": "user"}]}, "", "make finetune DATA={path} MODEL="),
        ({"question": "how", "answer": "so"}, "", "make finetune DATA={path} MODEL="),
        ({"n": 1, "body": "b"}, "#c", "no column 'c'; it has: n, body. Name another one: DATA="),
    ],
)
def test_a_column_that_is_not_plain_is_asked_for(tmp_path, suffix, row, column, said):
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(encode([row], suffix))
    assert said.format(path=path) in refusal(texts, f"{path}{column}", tmp_path)
    for name, cell in row.items():
        if isinstance(cell, str):
            assert texts(f"{path}#{name}", tmp_path) == [cell]


# ---- What is refused

NO_COLUMN = b'{"n": 1}\n' * 3


@pytest.mark.parametrize(
    ("data", "content", "said"),
    [
        (
            "notes",
            b"\x00\x01\x02\0",
            "Must be plain text in UTF-8, JSON lines, JSON arrays or Parquet",
        ),
        ("notes", b"", "Is empty."),
        ("notes", b" \n\n", "Has only blank lines."),
        ("notes", PAGE, "Is a web or error page. Get the file again."),
        ("a.json", POINTER, "Is a git-lfs pointer, not the file that it stands for. Get the file"),
        ("notes", b"caf\xe9 " * 10, "Is not UTF-8: byte 3 is b'\\xe9 ca'. Save it in UTF-8."),
        ("notes", b"a" * 5000 + b"\xff\xfe" * 9, "notes: row 1: is not UTF-8. Save it"),
        ("a.csv", b"a,b\n", "Convert it to JSON lines."),
        ("a.arrow", b"ARROW1", "Convert it to Parquet"),
        ("a.csv.gz", compress(b"a,b\n", ".gz"), "Is a table"),
        ("a.txt#body", b"text", "a.txt: is plain text and has no columns. Remove #body."),
        ("a.jsonl#n", NO_COLUMN, "jsonl:1: has no text in its 3 rows (column 'n' is int"),
        ("nothing.txt", None, "nothing.txt: There is no such file or folder. A data set"),
        (".", None, "Holds no plain text"),
        ("*.bz2", None, "No file matches"),
        ("link", None, "Is a link that leads nowhere, or in a circle"),
        ("~nobody-is-here/x", None, "There is no such user"),
        ("/dev/null", None, "Is neither a file nor a folder"),
        ("#", None, "Use DATA=FILE#COLUMN."),
        ("hf:TinyStories", None, "Must be hf:OWNER/NAME"),
        ("https://a.b/c.txt", None, "Must be a file, a folder, a pattern or hf:"),
    ],
    ids=str,
)
def test_data_that_is_no_text_is_refused_by_name(tmp_path, data, content, said):
    if content is not None:
        write(tmp_path, {data.split("#")[0]: content})
    (tmp_path / "link").symlink_to(tmp_path / "link")
    place = data if data.startswith(("~", "/", "#", "h")) else f"{tmp_path}/{data}"
    message = refusal(texts, place, tmp_path)
    assert said in message and data.split("#")[0].rstrip(".") in message


# ---- What a file is follows from its content

ROWS = [{"text": f"text {n}", "n": n} for n in range(5)]
LINES = encode(ROWS, "jsonl")
ARRAY = json.dumps(ROWS, indent=1).encode()
SKIPPED = b"\x5a\x2a\x4d\x18\x04\0\0\0abcd"  # a frame of zstd without data


def in_frames(rows, before=b""):
    """Return JSON lines in a zstd frame per row, as pzstd writes them."""
    return b"".join(before + compress(encode([row], "jsonl"), "zst") for row in rows)


@pytest.mark.parametrize("name", ["a.txt", "a.log", "a", "a.jl", "a.md", "a.csv"])
@pytest.mark.parametrize(
    "content",
    [
        LINES,
        b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
        ARRAY,
        json.dumps([row["text"] for row in ROWS]).encode(),
        encode(ROWS, "parquet"),
        compress(LINES, "gz"),
        b"".join(compress(encode([row], "jsonl"), "gz") for row in ROWS),
        in_frames(ROWS),
        in_frames(ROWS, SKIPPED),
    ],
    ids=["lines", "dos", "array", "texts", "parquet", "gzip", "members", "zstd", "pzstd"],
)
def test_rows_are_read_under_any_name(tmp_path, name, content):
    write(tmp_path / "in", {name: content, "b.txt": b"plain text"})
    expected = [row["text"] for row in ROWS]
    assert texts(tmp_path / "in" / name, tmp_path) == expected
    assert texts(tmp_path / "in", tmp_path) == [*expected, "plain text"]


def test_rows_that_an_earlier_version_read_as_text_are_prepared_anew(tmp_path):
    folder = write(tmp_path / "in", {"a.txt": LINES})
    made = give(folder / "a.txt", tmp_path / "data")
    names = [[file.name, file.bytes, file.digest] for file in made.files]
    assert made.revision != f"local-{xxhash.xxh3_128(json.dumps(names).encode()).hexdigest()}"
    (folder / "a.txt").write_bytes(b"plain")
    made = give(folder / "a.txt", tmp_path / "data")
    names = [[file.name, file.bytes, file.digest] for file in made.files]
    assert made.revision == f"local-{xxhash.xxh3_128(json.dumps(names).encode()).hexdigest()}"


@pytest.mark.parametrize(
    "content",
    [
        "[Index](README.md)\n\nText.\n",
        "[1] Smith et al.\n\n[2] Jones.\n",
        "[section]\na = 1\n",
        '["Hello", he said.\n\nMore.\n',
        '{\n "title": "x"\n}\n\n# A page with its facts before it\n',
        '"Hello," he said.\n"No."\n',
        "{\\bf TeX}\n",
        "{{ page }}\n",
        '{"a", 1},\n{"b", 2},\n',
        "BZhang is a name.\n",
        "Rar! said the lion.\n",
        "7z is a format.\n",
        "GIF89a is an image format.\n",
        "II* is not MM.\n",
        "%PDF-1.7 is a version.\n",
        "{\\rtf is a group.\n",
        "ARROW1 and FEA1 are magic.\n",
        "FEA1 is magic.\n",
        "PAR1 is magic.\n",
        "SQLite format 3 is a format.\n",
        "version https://git-lfs.github.com is an address.\n",
        f"{'x' * 257}ustar\n",
        "<Header note>\n",
        "<body language> is a play.\n",
        "<html> is a tag that <head> follows.\n",
        "<?xml is a declaration.\n",
        "<!doctype html> is a declaration.\n",
        "<error> at line 3: x < y\n",
        '{"name": "x", "v": 1}\n\nThat is an object.\n',
        '{"name": "x", "v": 1}\n{braces} and more.\n',
        '{"name": "x"}\n{"name": "y"}\nThose were objects.\n',
        '{"name": "x"}\n{x} is y\n',
        '{"name": "x"}\n[1] Smith et al.\n',
        '{\n "title": "x"\n}\n\n[Index](README.md)\n',
        '["a", "b"]\n["c"] is an array.\n',
        "{'a': 1, 'b': True}\nprint('x')\n",
        '{"a": 1, "b": True}\nprint("x")\n',
        "{\n    'a': 1,\n}\nprint('x')\n",
        "import os,sys\nimport re,json\n\nx = 1\n",
        "Tyger, tyger, burning bright\nIn the forests, of the, night\n",
        "\tindented\n\ttext\n",
        "|a|b\n|-|-\n|1|2\n",
        ",comma\nfirst,words\n",
        "---\ntitle: x\nby:\n  name: y\n---\n\n# A page\n\nText.\n",
        "---\ntitle: x\n---\n",
        "Alice: Hello.\nBob: Good morning.\nAlice:\n  Hello again.\nBob: Yes.\n",
        "# 1.0\n\nFixed:\n  - a thing\n  - another\n\n# 0.9\n\n- first: version\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |\n",
        "<!-- markdownlint-disable -->\n# Title\n\nText.\n",
        "<!-- <html> -->\nText.\n",
        "<p align='center'>\n<img src='a.svg'>\n</p>\n\n# Title\n",
        "<svg> is a tag.\n",
        "One, two,\nthree, four,\nfive, six,\nseven, eight,\nnine, ten,\n",
        "Yes, he said\nNo, she said\nAnd, then\nSo, what\nWell, well\n",
        "A = [0, 1, 2]\nB = [3, 4, 5]\nC = [6, 7, 8]\nD = [9, 0, 1]\nE = [2, 3, 4]\n",
        "1, 2, 3\n4, 5\n6\n7, 8\n9\n",
        "try:\n    x: int = 1\nexcept ValueError:\n    pass\n",
        '# Title\n\n{"a": 1}\n\nThat is an object.\n',
        "# A data file\n{\n    'a': 1,\n}\n",
        "all:\n\tcc x.c\n\nclean:\n\trm x\n",
    ],
)
def test_text_that_begins_like_something_else_stays_text(tmp_path, content):
    for name in ("a.md", "a.py", "a.txt", "a"):
        write(tmp_path, {name: content.encode()})
        assert texts(tmp_path / name, tmp_path) == [content]


TABLE = b"id,text,label\n" + b"".join(b'%d,"a text, of words",x\n' % n for n in range(9))


@pytest.mark.parametrize("name", ["a.txt", "a.dat", "a"])
@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"%PDF-1.7\n%\xe2\xe3", "pdftotext"),
        (compress(b"%PDF-1.7\n", "gz"), "pdftotext"),
        (b"PK\x03\x04\x14\0[Content_Types].xml", "office document"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1", "office document"),
        (b"{\\rtf1\\ansi text}", "rich text"),
        (b"\xff\xd8\xff\xe0", "an image"),
        (b"a.txt".ljust(257, b"\0") + b"ustar", "an archive"),
        (compress(b"a.txt".ljust(257, b"\0") + b"ustar", "gz"), "an archive"),
        (b"BZh91AY&SY", "an archive"),
        (b"ARROW1\0\0", "Parquet"),
        (b"\xff\xff\xff\xff\x10", "Parquet"),
        (TABLE, "a table"),
        (TABLE.replace(b",", b"\t"), "a table"),
        (b",text\n0,hello\n", "a table"),
        (b"\ttext\tn\n0\thello\t1\n1\tbye\t2\n", "a table"),
        (b",text\n0,%s\n" % (b"word " * 2000), "a table"),
        (b"id,text\n1,%s\n" % (b"word " * 2000), "a table"),
        ("text".encode("utf-16"), "iconv -f utf-16 -t utf-8 '"),
        ("text\n".encode("utf-16-le"), "iconv -f utf-16le -t utf-8 '"),
        ("text\n".encode("utf-16-be"), "iconv -f utf-16be -t utf-8 '"),
        (b"<html><body>404", "a web or error page"),
        (b"<body>Not found</body>\n", "a web or error page"),
        (b'<html lang="en">\n<head>', "a web or error page"),
        (b"<Error><Code>AccessDenied", "a web or error page"),
        (b"Rar!\x1a\x07\x01\0", "an archive"),
        (b"GIF89a\x10\0\x10\0\x80\0\0", "an image"),
        (
            b"apple,3,red\npear,4,green\nplum,5.5,blue\nfig,-6,red\nkiwi,7,green\n",
            "a table without",
        ),
        (b"Hello, world!\tBonjour !\n" * 6, "a table without headings (it begins with 'Hello"),
        (b"<!-- saved page -->\n<!DOCTYPE html>\n<html><body>x", "a web or error page"),
        (b"<!-- a picture -->\n<svg width='1'><text>x</text></svg>", "Is XML"),
        (b'<svg xmlns="http://www.w3.org/2000/svg">', "Is XML"),
        (b"<?xml version='1.0'?>\n<feed><title>x</title></feed>", "Is XML"),
        (b'<feed xmlns="http://www.w3.org/2005/Atom">\n<title>x</title>', "Is XML"),
        (b"# notes\na:\n  b: 1\n  c: |\n    Some text, and more.\nd: [1, 2]\n", "Is YAML"),
        (b"---\non:\n  push:\n    branches: [main]\njobs:\n- name: x\n", "Is YAML"),
        (b"# from a tool\n# version 2\n" + LINES, "Remove the comments"),
        (b"// from a tool\n\n" + LINES + b'{"text": "%s"}' % (b"word " * 2000), "Remove the comm"),
    ],
)
def test_what_no_person_would_call_text_is_refused_by_name_and_left_out_of_a_folder(
    tmp_path, name, content, word
):
    folder = write(tmp_path / "it's mine", {name: content, "b.md": b"text"})
    message = refusal(texts, folder / name, tmp_path)
    assert word in message and name in message
    if "iconv" in message:
        assert subprocess.run(
            [*shlex.split(message.partition("example: ")[2])[:6]], check=True, capture_output=True
        ).stdout.startswith(b"text")
    assert texts(folder, tmp_path) == ["text"]
    assert list_files(str(folder))[1].total() == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize(
    ("content", "row", "word"),
    [
        (LINES.replace(b"}\n", b"},\n"), 1, "Extra data at column 27"),
        ("".join(f"{row}\n" for row in ROWS).encode(), 1, "double quotes at column 2"),
        (LINES + b'{"text": "x", "n": %s}\n' % (b"1" * 5000), 6, "5000 digits"),
        (LINES + b'{"text": "x", "text": "y"}\n', 6, "the key 'text' comes twice"),
        (LINES + b'{"text": "x", "n": [{"a": 1, "a": 2}]}\n', 6, "the key 'a' comes twice"),
    ],
)
def test_json_that_cannot_be_taken_as_it_is_is_refused_by_line(tmp_path, name, content, row, word):
    write(tmp_path, {name: content})
    for column in ("", "#text"):
        message = refusal(texts, f"{tmp_path / name}{column}", tmp_path)
        assert message.startswith(f"{tmp_path / name}:{row}: ") and word in message
    array = b"[" + LINES.replace(b"}\n", b"},\n") + b'{"text": "x", "text": "y"}]'
    write(tmp_path, {name: array})
    message = refusal(texts, tmp_path / name, tmp_path)
    assert message.startswith(f"{tmp_path / name}: row 6: ") and "(line 6)" in message


@pytest.mark.parametrize("column", ["text", "content", "Text"])
@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (pa.array([b"a", b"b"]), "binary"),
        (pa.array([b"a", b"b"], pa.large_binary()), "large_binary"),
        (pa.array([["a"], ["b"]]), "list<"),
        (pa.array([{"body": "a"}, {"body": "b"}]), "struct<"),
        (pa.array([b"a", b"b"]).dictionary_encode(), "dictionary<values=binary"),
    ],
    ids=str,
)
def test_another_column_is_not_taken_where_text_has_a_type_that_is_not_read(
    tmp_path, column, cells, kind
):
    table = pa.table({column: cells, "url": ["x", "y"]})
    write(tmp_path, {"a.parquet": encode(table, "parquet")})
    message = refusal(texts, tmp_path / "a.parquet", tmp_path)
    assert f"column {column!r} is {kind}" in message and "#COLUMN" in message
    rows = [{column: ["a"], "url": "x"}]
    write(tmp_path, {"a.jsonl": encode(rows, "jsonl")})
    message = refusal(texts, tmp_path / "a.jsonl", tmp_path)
    assert f"column {column!r} is list" in message
    assert texts(f"{tmp_path / 'a.jsonl'}#url", tmp_path) == ["x"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"document": {"body": "a"}, "title": "x"}, "document: "),
        ({"doc": "x", "paragraphs": ["a"]}, "paragraphs: list"),
        ({"name": "x", "n": 1, "input_ids": [1]}, "name: string, n: int"),
        *(
            ({name: "x", "n": 1}, f"{name}: string")
            for name in ("id", "_id", "doc_id", "url", "URI")
        ),
        *(({name: "x", "n": 1}, f"{name}: string") for name in ("path", "sha256", "license")),
        *(({name: "x"}, f"{name}: string") for name in ("filename", "lang", "source", "date")),
    ],
    ids=str,
)
def test_the_only_column_of_text_is_not_taken_where_it_may_not_be_the_text(
    tmp_path, suffix, row, said
):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(encode([row], suffix))
    message = refusal(texts, path, tmp_path)
    assert said in message and f"DATA={path}#COLUMN" in message
    column = next(name for name, cell in row.items() if isinstance(cell, str))
    assert texts(f"{path}#{column}", tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("cells", "is_read"),
    [
        (pa.array([b"a"]), False),
        (pa.array([b"a"]).dictionary_encode(), False),
        (pa.array([1], pa.uint8()), True),
        (pa.array([1.5], pa.float16()), True),
        (pa.array([True]), True),
        (pa.array([None]), True),
        (pa.array([""]), True),
        (pa.array([""]).dictionary_encode(), True),
        (pa.array([1], pa.decimal128(5, 2)), True),
        (pa.array([1], pa.timestamp("us", "UTC")), True),
        (pa.array([1], pa.date32()), True),
    ],
    ids=str,
)
def test_columns_of_numbers_and_times_leave_the_only_text_plain(tmp_path, cells, is_read):
    path = tmp_path / "a.parquet"
    path.write_bytes(encode(pa.table({"raw_content": cells, "story": ["x"]}), "parquet"))
    if is_read:
        assert texts(path, tmp_path) == ["x"]
    else:
        assert "raw_content: " in refusal(texts, path, tmp_path)


EMPTY = {
    "a.parquet": encode(pa.table({"text": pa.array([], pa.string())}), "parquet"),
    "b.parquet": encode(pa.table({}), "parquet"),
    "c.parquet": encode(pa.table({"text": pa.array([], pa.float64())}), "parquet"),
    "d.jsonl": b"\n\n",
    "e.jsonl.gz": compress(b"", "gz"),
}


def test_parts_without_rows_are_left_out_and_counted(tmp_path, caplog):
    part = {"text": "a text", "url": "x"}
    contents = {**EMPTY, "f.parquet": encode([part], "parquet")}
    write(tmp_path / "in", contents)
    assert texts(tmp_path / "in", tmp_path) == ["a text"]
    assert "left out files without rows (5), for example" in caplog.text
    write(
        tmp_path / "named",
        {name: content for name, content in contents.items() if "d." not in name},
    )
    assert texts(f"{tmp_path / 'named'}#text", tmp_path) == ["a text"]
    for name in EMPTY:
        assert "Has no rows" in refusal(texts, tmp_path / "in" / name, tmp_path)


def test_a_readme_is_data_only_where_it_is_all_there_is(tmp_path, caplog):
    about = {"README.md": b"# about", "LICENSE": b"MIT", "sub/readme.txt": b"more"}
    rows = {"part.jsonl": LINES, "README.jsonl": b'{"text": "rows"}\n'}
    assert texts(write(tmp_path / "alone", about), tmp_path) == ["MIT", "# about", "more"]
    found = texts(write(tmp_path / "in", about | rows), tmp_path)
    assert found == ["rows", *(row["text"] for row in ROWS)]
    assert "(3): 3 README or LICENSE" in caplog.text
    assert texts(tmp_path / "in" / "README.md", tmp_path) == ["# about"]


@pytest.mark.parametrize(
    ("names", "is_about"),
    [
        ("README readme.txt README.md README.rst README.de.md README_zh-CN.md README.md.gz", True),
        ("LICENSE LICENCE.txt LICENSE-MIT LICENSE.Apache-2.0 LICENSE-2.0.txt COPYING.LESSER", True),
        ("LICENSE-BSD-3-Clause.txt LICENSE-CC-BY-SA-4.0 COPYING NOTICE.txt CITATION.cff", True),
        ("citation-needed.txt notice.of.meeting.txt license-to-kill.txt readme-first.md", False),
        ("readme.and.weep.txt copying-machines.txt LICENSE.plate.txt notices.txt", False),
    ],
)
def test_a_text_is_no_readme_or_license_for_how_its_name_begins(tmp_path, names, is_about):
    found = {name: name.encode() for name in names.split()}
    folder = write(tmp_path / "in", {**found, "story.txt": b"text"})
    assert len(list_files(str(folder))[0]) == 1 + (0 if is_about else len(found))


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    write(tmp_path, {"closed/b.txt": b"b", "a.txt": b"a"})
    scan = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "closed: Cannot be read: Permission denied." in refusal(texts, tmp_path, tmp_path)
