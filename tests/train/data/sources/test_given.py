"""DATA of make train: which files it stands for, which column is their text, and what is held out."""

import hashlib
import os
import random

import pytest

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
    assert "left out files that are not plain text in UTF-8, JSON lines" in caplog.text


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


SEVERAL = "has several columns of text (body, title). Choose one: DATA={path}#body."


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
        ("notes", b"\x89PNG\0", "Must be plain text in UTF-8, JSON lines, JSON arrays or Parquet"),
        ("notes", b"", "Is empty."),
        ("notes", b" \n\n", "Has only blank lines."),
        ("notes", PAGE, "Is a web or error page. Get the file again."),
        ("a.json", POINTER, "Is a git-lfs pointer, not the file that it stands for. Get the file"),
        ("notes", b"caf\xe9 " * 10, "Is not UTF-8. Convert it, for example: iconv -f latin1 -t"),
        ("notes", b"a" * 5000 + b"\xff\xfe" * 9, "notes: row 1 of mine: is not UTF-8. Convert it"),
        ("a.csv", b"a,b\n", "Convert it to JSON lines."),
        ("a.arrow", b"ARROW1", "Convert it to Parquet"),
        ("a.csv.gz", compress(b"a,b\n", ".gz"), "Must be plain text"),
        ("a.txt#body", b"text", "a.txt of mine: is plain text and has no columns. Remove #body."),
        ("a.jsonl#n", NO_COLUMN, "jsonl:1 of mine: has no text in its 3 rows (column 'n' is int"),
        ("nothing.txt", None, "There is no such file or folder"),
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


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch):
    write(tmp_path, {"closed/b.txt": b"b", "a.txt": b"a"})
    scan = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "closed: Cannot be read: Permission denied." in refusal(texts, tmp_path, tmp_path)
