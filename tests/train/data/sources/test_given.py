"""DATA of make train: what it stands for, which column is its text, and what is held out."""

import hashlib
import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.train.data.sources.test_rows import compressed
from train.data.sources.fetch import Files
from train.data.sources.formats import find_text_column
from train.data.sources.given import given_source, list_files
from train.data.sources.pin import File, Pinned, pin
from train.data.sources.rows import Document, documents, piece_bytes
from train.data.sources.source import CorpusError, is_validation


def read(data: str | Path, folder: Path) -> tuple[Pinned, list[Document]]:
    """Pin what DATA stands for, and read all of its documents."""
    pinned = pin(given_source(str(data), "mine"), folder)
    found = list(documents(pinned, Files(pinned, folder)))
    return pinned, [item for item in found if isinstance(item, Document)]


def refusal(data: str | Path, folder: Path) -> str:
    """Return the error of reading what DATA stands for."""
    with pytest.raises(CorpusError) as error:
        read(data, folder)
    return str(error.value)


def write_book(path: Path, paragraphs: int) -> str:
    """Write paragraphs of words of several lengths, and return the text."""
    random.seed(paragraphs)
    words = ["naïve", "tree", "of", "the", "running", "Übermut", "sea"]
    text = "\n\n".join(
        " ".join(random.choices(words, k=random.randrange(5, 60))) for _ in range(paragraphs)
    )
    path.write_text(text)
    return text


def test_pieces_of_plain_text_are_the_file_and_end_at_blank_lines(tmp_path: Path) -> None:
    text = write_book(tmp_path / "book.txt", 5000)
    pinned, found = read(tmp_path / "book.txt", tmp_path / "data")
    assert "".join(document.text for document in found) == text
    size = piece_bytes(pinned)
    assert size == len(text.encode()) // 400
    assert all(
        document.text.endswith("\n\n") or document.text.endswith("\n") for document in found[:-1]
    )
    assert all(size <= len(document.text.encode()) < 2 * size + 1000 for document in found[:-1])


def test_a_twentieth_is_held_out_by_the_hash_of_the_text(tmp_path: Path) -> None:
    write_book(tmp_path / "book.txt", 5000)
    pinned, found = read(tmp_path / "book.txt", tmp_path / "data")
    held_out = [document for document in found if is_validation(pinned.source, document.name)]
    assert 0.02 * len(found) < len(held_out) < 0.1 * len(found)
    for document in found:
        assert document.name == hashlib.sha256(document.text.encode()).hexdigest()

    # The same text under another name, in another order, is held out again.
    lines = [{"body": document.text, "n": k} for k, document in enumerate(reversed(found))]
    path = tmp_path / "book.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again, others = read(path, tmp_path / "data")
    texts = {document.text for document in others if is_validation(again.source, document.name)}
    assert texts == {document.text for document in held_out}


def test_a_folder_gives_its_text_and_names_what_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "my papers [1]"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "b.md").write_text("# b\n")
    (folder / "sub" / "a.py").write_text("print('ü')\n")
    (folder / "c.jsonl").write_text('{"text": "a line"}\n')
    (folder / "figure.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (folder / "latin.txt").write_bytes("é".encode("latin-1") * 100)
    (folder / "table.csv").write_text("a,b\n")
    (folder / "settings.json").write_text('{\n  "a": 1\n}\n')
    (folder / "__init__.py").write_text("")
    (folder / "sub" / "__init__.py").write_text("\n")
    (folder / "plot.svg").write_text("<?xml version='1.0'?><svg/>")
    _, found = read(folder, tmp_path / "data")
    assert [document.text for document in found] == ["# b\n", "a line", "print('ü')\n"]
    names, left_out = list_files(str(folder))
    assert names == [f"{folder}/{name}" for name in ("b.md", "c.jsonl", "sub/a.py")]
    assert left_out == {
        ".png": 1,
        ".txt": 1,
        ".csv": 1,
        ".json": 1,
        ".svg": 1,
        ".py": 1,
        "empty": 1,
    }
    assert (
        "left out files that are not plain text in UTF-8, JSON lines, JSON arrays or Parquet (7): "
        in caplog.text
    )


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"id": "7", "url": "x", "text": "the text"}, "the text"),
        ({"path": "a.py", "content": "the code"}, "the code"),
        ({"story": "the story", "n": 7}, "the story"),
        ({"text": "whole", "answer": "42"}, "whole"),
        ({"text": None, "url": "x"}, None),
    ],
)
def test_the_column_of_text_is_found(
    tmp_path: Path, suffix: str, row: dict[str, object], text: str
) -> None:
    path = tmp_path / f"rows{suffix}"
    write_rows(path, [row])
    assert find_text_column(path, path.name, str(path)) == next(
        column for column in row if row[column] == text
    )


@pytest.mark.parametrize(
    "first",
    [
        {"text": None, "url": "x"},
        {"url": "x"},
        {"text": 5, "url": "x"},
        {"text": "", "url": "x"},
        {"text": None},
    ],
)
def test_the_first_row_alone_does_not_choose_the_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: dict[str, object]
) -> None:
    caplog.set_level("INFO")
    rows = [{"text": f"text {n}", "url": "x"} for n in range(600)]
    write_rows(tmp_path / "a.jsonl", [first, *rows])
    write_rows(tmp_path / "b.jsonl", [{"story": "a story"}])
    _, found = read(tmp_path, tmp_path / "data")
    assert [document.text for document in found] == [*(row["text"] for row in rows), "a story"]
    said = [record.getMessage() for record in caplog.records if "column" in record.getMessage()]
    assert said == [
        f"{tmp_path}/a.jsonl: its text is the column 'text'",
        f"{tmp_path}/b.jsonl: its text is the column 'story'",
    ]


def test_a_column_of_a_dictionary_is_text_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    texts = pa.array(["one", "two", "one"]).dictionary_encode()
    pyarrow.parquet.write_table(pa.table({"n": [1, 2, 3], "body": texts}), path)
    _, found = read(path, tmp_path / "data")
    assert [document.text for document in found] == ["one", "two", "one"]
    doubled = pa.Table.from_arrays([texts, texts], names=["text", "text"])
    pyarrow.parquet.write_table(doubled, path)
    assert "two columns are named 'text'. Rename one of them." in refusal(path, tmp_path / "data")


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows of equal columns as JSON lines or Parquet, by the suffix."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"title": "a", "body": "more text"},
            "has several columns of text (body, title). Choose one: DATA={path}#body.",
        ),
        ({"n": 1}, "has no column of text (columns: n). Leave it out."),
        ({"messages": [{"role": "user", "content": "hi"}]}, "make finetune DATA={path} MODEL="),
        ({"question": "how", "answer": "so"}, "make finetune DATA={path} MODEL="),
    ],
)
def test_a_column_that_is_not_plain_is_asked_for(
    tmp_path: Path, suffix: str, row: dict[str, object], said: str
) -> None:
    path = tmp_path / f"rows{suffix}"
    write_rows(path, [row])
    assert said.format(path=path) in refusal(path, tmp_path / "data")
    named = f"{path}#{next(iter(row))}"
    if isinstance(next(iter(row.values())), str):
        assert [document.text for document in read(named, tmp_path / "data")[1]] == list(
            row.values()
        )[:1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x89PNG\0", "Must be plain text in UTF-8, JSON lines, JSON arrays or Parquet"),
        (b"", "Is empty."),
        (b" \n\n", "Has only blank lines."),
        (b"<!DOCTYPE html>\n<p>Sorry", "Is a web or error page. Get the file again."),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00",
            "Is a git-lfs pointer, not the file that it stands for. Get the file again.",
        ),
        (b"caf\xe9 " * 10, "Is not UTF-8. Convert it, for example: iconv -f latin1 -t utf-8 /"),
        (
            b"a" * 5000 + b"\xff\xfe" + b"a" * 10,
            "is not UTF-8. Convert it, for example: iconv -f latin1 -t utf-8 notes > utf8-notes.",
        ),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    assert said in refusal(path, tmp_path / "data")


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    assert "There is no such file or folder" in refusal(tmp_path / "nothing.txt", tmp_path / "data")
    (tmp_path / "empty").mkdir()
    assert "Holds no plain text" in refusal(tmp_path / "empty", tmp_path / "data")
    assert "There is no such user" in refusal("~nobody-is-here/x", tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "link")
    circle = refusal(tmp_path / "link", tmp_path / "data")
    assert "Is a link that leads nowhere, or in a circle" in circle
    assert "Is neither a file nor a folder" in refusal("/dev/null", tmp_path / "data")
    assert "Use DATA=FILE#COLUMN." in refusal("#", tmp_path / "data")
    (tmp_path / "a.csv").write_text("a,b\n")
    assert "Convert it to JSON lines." in refusal(tmp_path / "a.csv", tmp_path / "data")
    assert "Must be hf:OWNER/NAME" in refusal("hf:TinyStories", tmp_path / "data")
    assert "Must be a file, a folder, a pattern or hf:" in refusal(
        "https://a.b/c.txt", tmp_path / "data"
    )


def test_a_column_that_is_named_must_be_there_and_hold_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"n": 1, "body": "b"}] * 3)
    said = refusal(f"{path}#title", tmp_path / "data")
    assert "no column 'title' in 3 rows; they have: n, body. Name another one: DATA=" in said
    said = refusal(f"{path}#n", tmp_path / "data")
    assert "has no text in its 3 rows (column 'n' is int: '1'). Leave it out." in said
    (tmp_path / "book.txt").write_text("text")
    said = refusal(f"{tmp_path}/book.txt#body", tmp_path / "data")
    assert said.endswith("book.txt of mine: is plain text and has no columns. Remove #body.")


def test_links_are_followed_and_what_they_lead_to_is_taken_once(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("c")
    (folder / "b.txt").write_text("b")
    (folder / "sub" / "again.txt").symlink_to(folder / "b.txt")
    (folder / "sub" / "gone.txt").symlink_to(folder / "nothing")
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "twice").symlink_to(tmp_path / "elsewhere")
    names, left_out = list_files(str(folder))
    assert names == [f"{folder}/b.txt", f"{folder}/linked/c.txt"]
    assert left_out == {"broken link": 1}


def test_a_folder_that_cannot_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")
    scan = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "closed: Cannot be read: Permission denied." in refusal(tmp_path, tmp_path / "data")


def test_line_ends_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "dos.txt").write_bytes(b"one\r\n\r\ntwo\r\n")
    _, found = read(tmp_path / "dos.txt", tmp_path / "data")
    assert "".join(document.text for document in found) == "one\r\n\r\ntwo\r\n"


def test_pieces_of_a_large_file_are_at_most_64_kib(tmp_path: Path) -> None:
    source = given_source("hf:a/b", "mine")
    assert (source.validation_fraction, source.max_epochs) == (0.01, 64)
    large = Pinned(source, "", (File("a.txt", 2**32, ""),))
    assert piece_bytes(large) == 65_536


def test_json_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    for name in ("bom.json", "bom.jsonl"):
        (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
        assert [document.text for document in read(tmp_path / name, tmp_path / name[4:])[1]] == [
            "a"
        ]


def test_a_character_across_the_first_bytes_is_still_text(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("a" * 4095 + "é" * 10)
    assert read(path, tmp_path / "data")[1]


@pytest.mark.parametrize(
    ("data", "config", "split", "column"),
    [
        ("hf:roneneldan/TinyStories", None, "train", ""),
        ("hf:a/b:validation#story", None, "validation", "story"),
        ("hf:a/b:en:train", "en", "train", ""),
    ],
)
def test_a_data_set_of_the_hub_is_named_with_config_split_and_column(
    data: str, config: str | None, split: str, column: str
) -> None:
    source = given_source(data, "stories")
    assert (source.kind, source.config, source.split, source.text) == ("hub", config, split, column)
    assert source.repository == data.removeprefix("hf:").split(":")[0].split("#")[0]


def test_each_kind_of_text_is_read_from_a_file_a_folder_and_a_pattern(tmp_path: Path) -> None:
    rows = {
        "lines.jsonl": b'{"text": "lines"}\n',
        "arrays.jsonl": b'["arrays"]\n["arrays too"]\n',
        "array.json": b'[\n "array"\n]',
        "objects.json": b'[{"text": "objects"}]',
        "note.txt": b"note",
        "page.md": b"page",
    }
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in rows.items():
        for suffix in ("", ".gz", ".zst"):
            more = suffix.encode() if name.endswith((".txt", ".md")) else b""  # no copies
            (folder / f"{name}{suffix}").write_bytes(compressed(content + more, suffix))
            _, found = read(folder / f"{name}{suffix}", tmp_path / "data" / name / suffix)
            assert found[0].text.startswith(name.split(".")[0])
    pinned, found = read(folder, tmp_path / "data" / "folder")
    assert len(pinned.files) == 18 and len(found) == 21
    pinned, found = read(f"{folder}/*.jsonl.gz", tmp_path / "data" / "pattern")
    assert [document.text for document in found] == ["arrays", "arrays too", "lines"]
    assert len(read(f"{tmp_path}/**/*.zst", tmp_path / "data" / "deep")[0].files) == 6
    said = refusal(f"{folder}/*.bz2", tmp_path / "data")
    assert "No file matches" in said and "write it in quotes" in said


@pytest.mark.parametrize(
    "content",
    ['{\n "a": 1\n}', "[1, 2]", "[[1, 2]]", '[{"a": 1}]', '[{"a": "x", "b": "y"}]', "[", "[]", "7"],
)
def test_json_without_text_does_not_spoil_its_folder(tmp_path: Path, content: str) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "texts" / "b.json").write_text(content)
    names, left_out = list_files(str(tmp_path / "texts"))
    assert names == [f"{tmp_path}/texts/a.txt"] and left_out == {".json": 1}
    refusal(tmp_path / "texts" / "b.json", tmp_path / "data")  # a sentence
