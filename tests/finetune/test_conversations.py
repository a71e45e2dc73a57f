"""finetune/conversations.py: which files DATA stands for, and that every row is taken, or counted and named."""

import fcntl
import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from finetune import conversations as reading
from finetune.conversations import (
    Located,
    Tally,
    conversations,
    pinned_files,
    read_all,
    source_of,
    sources_in,
)
from settings import ROOT
from tests.faults.hub import REVISION, Hub, Repository, hub
from tests.finetune.making import row, talk, write_rows
from train.data.sources.source import CorpusError

ROWS = [row(f"q{i}?", f"a{i}") for i in range(5)]


def read(data: Path | str, folder: Path) -> tuple[list[Located], Tally]:
    tally = Tally()
    return list(conversations(*pinned_files(str(data), folder), tally)), tally


def said(found: list[Located]) -> list[list]:
    return [one.conversation.messages for one in found]


# ---- Kinds of files


def as_table() -> pa.Table:
    return pa.table({"id": list(range(5)), "messages": [one["messages"] for one in ROWS]})


def write(path: Path) -> None:
    lines = "".join(json.dumps(one) + "\n" for one in ROWS).encode()
    if path.suffix == ".parquet":
        pa.parquet.write_table(as_table(), path, row_group_size=2)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        path.write_bytes(pa.compress(lines, "zstd", asbytes=True))
    else:
        path.write_bytes(lines)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz", "x.jsonl.zst", "x.parquet"])
def test_each_kind_of_file_gives_the_same(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    found, tally = read(tmp_path / name, tmp_path / "data")
    assert said(found) == [talk(f"q{i}?", f"a{i}") for i in range(5)]
    assert [(one.file, one.row, one.place) for one in found] == [
        (0, i, f"{tmp_path / name}:{i + 1}") for i in range(5)
    ]
    assert (tally.rows, tally.shapes, tally.dropped) == (5, Counter(messages=5), Counter())
    assert tally.unread == ({"id": 5} if name == "x.parquet" else {})


def test_a_folder_is_all_such_files_below_it_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i, name in enumerate(
        ["b.jsonl", "a/[1].jsonl", "c.ndjson", "a/.hidden/x.jsonl", "a/chats.txt"]
    ):
        write_rows(tmp_path / "chats" / name, [row(f"q{i}?", f"a{i}")])
    (tmp_path / "chats" / "README.md").write_text("about these")
    found, tally = read(tmp_path / "chats", tmp_path / "data")
    assert said(found) == [talk(f"q{i}?", f"a{i}") for i in (1, 4, 0, 2)] and tally.rows == 4
    assert found[0].place == f"{tmp_path}/chats/a/[1].jsonl:1"
    assert [one.file for one in found] == [0, 1, 2, 3]
    assert "left out files that hold no rows (1): 1 .md" in caplog.text


def test_names_stay_as_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.data.sources import given

    for module in (reading, given):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_rows(tmp_path / "chats" / "x.jsonl", ROWS[:1])
    write_rows(tmp_path / "home" / "y.jsonl", ROWS[:1])
    places = [
        read(data, tmp_path / "data")[0][0].place
        for data in ("chats/x.jsonl", "chats/", "~/y.jsonl")
    ]
    assert places == ["chats/x.jsonl:1", "chats/x.jsonl:1", "~/y.jsonl:1"]


def test_rows_of_one_file_may_have_different_shapes(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "x.jsonl",
        [
            row("q?", "a"),
            {"prompt": "q?", "completion": "a"},
            {"question": "q?", "answer": "a", "id": 1},
        ],
    )
    found, tally = read(path, tmp_path / "data")
    assert said(found) == [talk("q?", "a")] * 3
    lines = tally.report()
    assert lines == [
        "3 rows: 1 of the shape messages, 1 of the shape prompt/completion, "
        "1 of the shape question/answer",
        "columns that are not used: id",
    ]


# ---- What is wrong


def test_rows_that_are_wrong_are_counted_and_the_first_three_of_each_reason_named(
    tmp_path: Path,
) -> None:
    path = write_rows(
        tmp_path / "x.jsonl",
        [
            row("q?", "a"),
            "{oops",
            row("q?"),
            row("q?", " "),
            row("q?"),
            "",
            row("q?"),
            row("q?"),
            row("q?", "a", "b?"),
            *[row("q?", "a")] * 9,
        ],
    )
    found, tally = read(path, tmp_path / "data")
    assert len(found) == 11 and tally.rows == 18
    assert tally.dropped == {"no assistant": 4, "not json": 1, "empty": 1, "blank": 1}
    lines = "\n".join(tally.report())
    assert (
        f"""dropped 4: no reply of the assistant. Add one, or remove the row
  {path}:3: 1 messages: user
  {path}:5: 1 messages: user
  {path}:7: 1 messages: user
"""
        in lines
    )
    assert f"  {path}:4: message 2 (assistant) has no text" in lines
    assert f"dropped 1: a blank line. Remove it\n  {path}:6: " in lines
    assert f"1 last messages without a reply left out ({path}:9)" in lines


def test_a_file_of_which_no_row_is_a_conversation_is_refused_early(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"text": "q?"}] * 100 + ["{"])
    with pytest.raises(
        CorpusError,
        match=r"x\.jsonl:1 of DATA: none of its first 100 rows is a conversation. The first: it has "
        r"text. Reason: columns that are not those of a conversation. Rename them; accepted are mess",
    ):
        read(path, tmp_path / "data")


def test_parquet_with_other_columns_is_refused_and_an_empty_part_is_not(tmp_path: Path) -> None:
    path = tmp_path / "chats" / "x.parquet"
    path.parent.mkdir()
    pa.parquet.write_table(pa.table({"text": ["q?"]}), path)
    with pytest.raises(CorpusError, match=r"has the columns text\. Rename them; accepted are mess"):
        read(path, tmp_path / "data")
    pa.parquet.write_table(pa.table({"messages": pa.array([], pa.string())}), path)
    with pytest.raises(CorpusError, match=r"has no rows\. Give a file with conversations"):
        read_all(str(path), tmp_path / "data")
    write_rows(path.parent / "y.jsonl", ROWS)
    assert len(read(path.parent, tmp_path / "data")[0]) == 5


@pytest.mark.parametrize(
    ("rows", "good", "is_refused"),
    [(99, 1, False), (100, 50, False), (100, 49, True), (3, 0, True)],
)
def test_at_most_half_may_be_dropped(
    rows: int, good: int, is_refused: bool, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "x.jsonl", [row("q?", "a")] * good + [row("q?")] * (rows - good))
    pinned, files = pinned_files(str(path), tmp_path / "data")
    list(conversations(pinned, files, tally := Tally()))
    if not is_refused:
        return tally.check("DATA")
    with pytest.raises(
        CorpusError, match=rf"DATA: {rows - good} of {rows} rows had to be dropped(.|\n)*x.jsonl:"
    ):
        tally.check("DATA")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", b"<html>no such page</html>", "a web or error page"),
        ("x.parquet", b"PAR1 and no more", "damaged or truncated"),
        ("x.parquet", b"nothing", "not parquet"),
        (
            "x.jsonl.gz",
            gzip.compress(b'{"messages": []}\n' * 99, mtime=0)[:-9],
            r"x\.jsonl\.gz:\d+ of DATA: damaged",
        ),
        ("x.jsonl", b'{"messages": []}\n{"mess', "half a last line"),
    ],
)
def test_a_file_that_is_none_is_refused(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=words):
        read(tmp_path / name, tmp_path / "data")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("chats.jsonl", "DATA=chats.jsonl: there is no such file or folder"),
        ("/nowhere/x", "DATA=/nowhere/x: there is no such file"),
        (
            "a/b/c",
            "not the name of a data set on the Hub. For example DATA=chats.jsonl or DATA=OWNER/NAME:CON",
        ),
        ("a/b:c:d:e", "not the name of a data set"),
        (
            "README.md",
            "not a kind of file that conversations are read from. Convert it to one of: .parq",
        ),
        ("presets", "the folder has no file of conversations"),
    ],
)
def test_what_data_cannot_be(data: str, words: str) -> None:
    with pytest.raises(CorpusError) as raised:
        source_of(data)
    assert words in str(raised.value)


# ---- Several sources


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("a.jsonl,", "'' is not a source"),
        ("a.jsonl*0,b.jsonl", "'a.jsonl[*]0' is not a source"),
        ("a.jsonl*1000", "TIMES from 1 to 100"),
        ("a.jsonl,b.jsonl,a.jsonl*3", "has a.jsonl twice. Write a.jsonl[*]2"),
    ],
)
def test_what_is_no_list_of_sources_is_refused(data: str, words: str) -> None:
    with pytest.raises(CorpusError, match=f"MID_DATA=.*{words}"):
        sources_in(data, "MID_DATA")


def test_sources_are_read_once_each_and_commas_may_be_in_a_name(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a,b*2", ROWS)
    assert sources_in(str(path)) == [(str(path), 1)]
    names = [f"conversations_of_{i}.jsonl" for i in range(40)]  # longer than a name may be
    assert sources_in(",".join(names)) == [(name, 1) for name in names]
    more = write_rows(tmp_path / "more.jsonl", ROWS[:2])
    other = write_rows(tmp_path / "other.jsonl", ROWS[2:])
    found, lines = read_all(f"{more},{other}*3", tmp_path / "data")
    assert said(found) == [one["messages"] for one in ROWS]
    assert lines == ["2 rows: 2 of the shape messages", "3 rows: 3 of the shape messages"]


def test_files_are_fetched_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the Hub are deleted once they are read, which another process must not see."""
    held = []
    real = reading.pinned_files

    def check_lock(source: str, folder: Path, *rest: str) -> Any:
        for lock in folder.glob(".*lock*"):
            with open(lock) as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(lock)
        return real(source, folder, *rest)

    monkeypatch.setattr(reading, "pinned_files", check_lock)
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    assert len(read_all(str(path), tmp_path / "data")[0]) == 5 and len(held) == 1


# ---- The hub


def test_a_name_on_the_hub() -> None:
    def parts(data: str) -> tuple:
        s = source_of(data)
        assert s.kind == "hub"
        return s.repository, s.config, s.split, s.revision

    assert parts("a/b") == ("a/b", None, "train", "")
    assert parts("a/b:sft") == ("a/b", None, "sft", "")
    assert parts("a/b:en:sft") == ("a/b", "en", "sft", "")
    assert parts(f"a/b:en:sft@{REVISION}") == ("a/b", "en", "sft", REVISION)
    assert parts("squad") == ("squad", None, "train", "")
    for data in ("a/b", "a/b:en:sft", f"a/b:en:sft@{REVISION}", "squad"):
        assert parts(f"hf:{data}") == parts(data)  # as pretraining writes it


ASK = """
import json, sys
from pathlib import Path
from finetune.conversations import Tally, conversations, pinned_files
from train.data.sources import hub
from train.data.sources.source import CorpusError
hub.FIRST_PAUSE_S = 0.01
for data in sys.argv[2:]:
    try:
        found = conversations(*pinned_files(data, Path(sys.argv[1])), Tally())
        sys.stdout.write(json.dumps([[one.place, one.conversation.messages] for one in found]) + "\\n")
    except CorpusError as error:
        sys.stdout.write(json.dumps(str(error)) + "\\n")
"""


def ask(server: Hub, folder: Path, *data: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(folder), *data],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env=os.environ | server.environment(folder),
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_data_set_on_the_hub_is_read_and_no_download_stays(tmp_path: Path) -> None:
    files = {
        "train.jsonl": json.dumps(row("q?", "a")).encode() + b"\n",
        "test.jsonl": json.dumps({"prompt": "p?", "completion": "c"}).encode() + b"\n",
    }
    with hub(repositories={"a/chats": Repository(files)}) as server:
        train, test, none = ask(server, tmp_path, "a/chats", "a/chats:test", "a/chats:sft")
    assert train == [["train.jsonl:1", talk("q?", "a")]]
    assert test == [["test.jsonl:1", talk("p?", "c")]]
    assert none.startswith("DATA=a/chats:sft: a/chats has no split sft; there are: test, train. ")
    assert none.endswith("Name one of them: DATA=a/chats:SPLIT.")
    assert not list(tmp_path.rglob("*.jsonl"))
