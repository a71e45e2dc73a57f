"""train/data/sources/pin.py: which files a source has at a revision, written once and read from then on."""

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import xxhash

from tests.faults.hub import REVISION, Hub, Repository, hub
from train.data.sources import given, pin
from train.data.sources.pin import File, Pinned
from train.data.sources.source import CorpusError, Source


def papers(folder: Path, *patterns: str) -> Source:
    return Source(
        "papers", "files", 0.2, files=tuple(str(folder / pattern) for pattern in patterns)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a/c.jsonl", "a/d.jsonl", "a/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


# ---- Files here


def test_globs_give_each_file_once_in_order_with_size_and_hash(folder: Path) -> None:
    s = papers(folder, "b.jsonl", "**/*.jsonl", "a/*")
    p = pin.pin(s, folder / "data")
    names = ["a/c.jsonl", "a/d.jsonl", "a/e.txt", "b.jsonl"]
    assert p.files == tuple(
        File(str(folder / name), len(name), "xxh3:" + xxhash.xxh3_128(name.encode()).hexdigest())
        for name in names
    )
    assert p.revision.startswith("local-") and p.key == f"{p.revision[:12]}-{s.identity}"
    assert pin.pinned(s, folder / "data") == p == pin.pin(s, folder / "data")


def test_names_stay_as_they_were_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(given, "ROOT", folder)
    s = Source("papers", "files", 0.2, files=("a/*.jsonl", "~/b.jsonl"))
    p = pin.pin(s, folder / "data")
    assert [file.name for file in p.files] == ["a/c.jsonl", "a/d.jsonl", "~/b.jsonl"]
    assert [pin.local_path(s, file.name) for file in p.files] == [
        folder / "a/c.jsonl",
        folder / "a/d.jsonl",
        folder / "b.jsonl",
    ]


def test_a_local_revision_is_that_of_names_sizes_and_contents(folder: Path) -> None:
    s, seen = papers(folder, "**/*.jsonl"), set()
    seen.add(pin.pin(s, folder / "data").revision)
    os.utime(folder / "b.jsonl", ns=(1, 1))
    assert {pin.pin(s, folder / "data").revision} == seen
    (folder / "b.jsonl").write_text("B.jsonl")
    seen.add(pin.pin(s, folder / "data").revision)
    (folder / "b.jsonl").rename(folder / "z.jsonl")
    seen.add(pin.pin(s, folder / "data").revision)
    (folder / "z.jsonl").unlink()
    last = pin.pin(s, folder / "data")
    assert len(seen | {last.revision}) == 4 and pin.pinned(s, folder / "data") == last


def test_a_file_is_hashed_again_only_when_its_size_or_time_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, real = [], pin.digest_of

    def digest_of(path: Path, kind: str) -> str:
        hashed.append(path.name)
        return real(path, kind)

    monkeypatch.setattr(pin, "digest_of", digest_of)
    s = papers(folder, "**/*.jsonl")
    first = pin.pin(s, folder / "data")
    assert hashed == ["c.jsonl", "d.jsonl", "b.jsonl"]
    assert pin.pin(s, folder / "data") == first and len(hashed) == 3
    stat = (folder / "b.jsonl").stat()
    (folder / "b.jsonl").write_text("B.jsonl")
    os.utime(folder / "b.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert pin.pin(s, folder / "data").revision != first.revision and hashed[3:] == ["b.jsonl"]
    for damage in ("{", "[1]", '"x"'):
        (folder / "data" / f"hashes-{s.identity}.json").write_text(damage)
        assert len(pin.pin(s, folder / "data").files) == 3
    assert len(hashed) == 4 + 9


def test_what_matches_no_file_is_named(folder: Path) -> None:
    with pytest.raises(
        CorpusError, match=r"papers: no file matches '.*x\*' \(looked for .*x\*\); check files"
    ):
        pin.pin(papers(folder, "b.jsonl", "x*"), folder / "data")
    with pytest.raises(CorpusError, match="no file matches"):
        pin.pin(papers(folder, "a"), folder / "data")  # a folder
    assert not list(folder.glob("data/*"))


def test_the_embedded_corpus_is_pinned_by_the_interpreters_version(tmp_path: Path) -> None:
    s = Source("python-stdlib", "stdlib", 0.05)
    p = pin.pin(s, tmp_path)
    names = [file.name for file in p.files]
    assert p.revision == "{}.{}.{}".format(*sys.version_info) and names == sorted(set(names))
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not [
        n for n in names if {"test", "tests", "site-packages", "__pycache__"} & set(n.split("/"))
    ]
    assert 5e6 < sum(file.bytes for file in p.files) < 50e6  # 12 MB with 3.11
    assert pin.pinned(s, tmp_path) == p


def test_what_a_declaration_leaves_out_of_the_embedded_corpus_is_not_pinned(
    tmp_path: Path,
) -> None:
    whole = pin.pin(Source("python-stdlib", "stdlib", 0.05), tmp_path)
    left_out = ("encodings/*", "_sysconfigdata_*", "stringprep.py")
    part = pin.pin(Source("python", "stdlib", 0.05, leave_out=left_out), tmp_path)
    gone = {file.name for file in whole.files} - {file.name for file in part.files}
    assert {"encodings/cp037.py", "stringprep.py"} < gone
    assert all(name.startswith(("encodings/", "_sysconfigdata_", "stringprep.py")) for name in gone)
    assert not any(file.name.startswith("encodings/") for file in part.files)


def test_an_interpreter_without_source_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin, "stdlib_root", lambda: tmp_path)
    with pytest.raises(CorpusError, match=r"holds no Python source.*DATA_MIX") as raised:
        pin.pin(Source("python-stdlib", "stdlib", 0.05), tmp_path / "data")
    assert str(tmp_path) in str(raised.value)


# ---- The written pin


def test_a_source_that_was_never_prepared_is_told_how_to(tmp_path: Path) -> None:
    with pytest.raises(
        CorpusError, match=r"pin-.*\.json: there is no such file.*prepare the data with: make data"
    ):
        pin.pinned(papers(tmp_path, "x"), tmp_path)


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"schema": 2}', pytest.param("[" * 100_000, id="nested"), "half", "other"],
)
def test_a_pin_that_is_damaged_is_named(folder: Path, damage: str) -> None:
    s = papers(folder, "b.jsonl")
    pin.pin(s, folder / "data")
    path = pin.pin_path(s, folder / "data")
    content = {
        "half": path.read_text()[:-20],
        "other": path.read_text().replace(s.identity, "0" * 8),
    }
    path.write_text(content.get(damage, damage))
    with pytest.raises(
        CorpusError, match=f"{path}: not the pin of a source .*; delete it and run: make data"
    ):
        pin.pinned(s, folder / "data")


def test_another_revision_in_the_declaration_asks_for_another_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = Source("x", "hub", 0.1, repository="a/b", revision="0" * 40)
    made = []

    def hub_pin(s: Source, token: str) -> Pinned:
        made.append(Pinned(s, s.revision or "f" * 40, (File("a.jsonl", 1, "git-sha1:0"),)))
        return made[-1]

    monkeypatch.setattr(pin, "hub_pin", hub_pin)
    assert pin.pin(s, tmp_path).revision == "0" * 40 and len(made) == 1
    assert pin.pin(s, tmp_path).revision == "0" * 40 and len(made) == 1
    other = dataclasses.replace(s, revision="1" * 40)
    with pytest.raises(
        CorpusError, match="pins x at 000000000000, but its source says revision = 111111111111; "
    ):
        pin.pinned(other, tmp_path)
    assert pin.pin(other, tmp_path).revision == "1" * 40 and len(made) == 2
    assert (
        pin.pin(dataclasses.replace(s, revision=""), tmp_path).revision == "1" * 40
        and len(made) == 2
    )


# ---- On the hub

ASK = """
import json, sys
from pathlib import Path
from train.data.sources import hub, pin
from train.data.sources.source import Source
hub.FIRST_PAUSE_S = 0.01
answers = []
for number, keys in enumerate(json.loads(sys.argv[2])):
    s = Source(f"s{number}", "hub", 0.1, **keys)
    try:
        made = pin.pin(s, Path(sys.argv[1]) / s.name)
        assert made == pin.pinned(s, Path(sys.argv[1]) / s.name)
        answers.append([made.revision, [[file.name, file.bytes, file.digest] for file in made.files]])
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""
CARD = b"""---
configs:
- config_name: one
  data_files:
  - split: train
    path: one/train-*.jsonl
  - split: test
    path: one/test.jsonl
- config_name: two
  data_files: two/*.parquet
---
# A data set
"""


def ask(server: Hub, folder: Path, *sources: dict[str, str]) -> list:
    return server.run(folder, ASK, folder, json.dumps(sources))[0]


def test_the_files_of_a_config_and_split_are_pinned_with_what_the_hub_says_of_them(
    tmp_path: Path,
) -> None:
    files = {
        "README.md": CARD,
        "one/train-1.jsonl": b"b" * 5,
        "one/train-0.jsonl": b"a" * 3,
        "one/test.jsonl": b"t",
        "two/x.parquet": b"PAR1" * 10,
        "other.txt": b"o",
    }
    plain = {"train.jsonl": b"1", "test.jsonl": b"2"}
    with hub(
        repositories={
            "a/many": Repository(files),
            "a/plain": Repository(plain),
            "a/none": Repository({"README.md": b"hello"}),
        }
    ) as server:
        one, two, test, missing, none, split, current, revised, config, empty = ask(
            server,
            tmp_path,
            *(
                {"repository": "a/many"} | keys
                for keys in (
                    {"config": "one"},
                    {"config": "two"},
                    {"config": "one", "split": "test"},
                    {"config": "three"},
                    {},
                    {"config": "one", "split": "validation"},
                )
            ),
            {"repository": "a/plain"},
            {"repository": "a/plain", "revision": REVISION},
            {"repository": "a/plain", "config": "x"},
            {"repository": "a/none"},
        )

        def git(content: bytes) -> str:
            return "git-sha1:" + hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

        assert one == [
            REVISION,
            [["one/train-0.jsonl", 3, git(b"aaa")], ["one/train-1.jsonl", 5, git(b"bbbbb")]],
        ]
        assert two == [
            REVISION,
            [["two/x.parquet", 40, "sha256:" + hashlib.sha256(b"PAR1" * 10).hexdigest()]],
        ]
        assert test == [REVISION, [["one/test.jsonl", 1, git(b"t")]]]
        assert current == revised == [REVISION, [["train.jsonl", 1, git(b"1")]]]
        assert (
            "a/many has no config three; there are: 'one', 'two'. Name one of them as config in the declaration"
            in missing
        )
        assert "a/many has several configs; there are: 'one', 'two'. Name one" in none
        assert (
            "a/many, config one, has no split validation; there are: test, train. Name one of them as split"
            in split
        )
        assert "a/plain has no config x; there are: 'default'" in config
        assert empty.startswith("CorpusError") and "a/none" in empty
        assert not (tmp_path / "s3").exists() or not list((tmp_path / "s3").iterdir())
        asked = len(server.requests)
        assert asked > 20
        again = ask(server, tmp_path, {"repository": "a/many", "config": "one"})  # s0, as above
        assert again == [one] and len(server.requests) == asked


@pytest.mark.parametrize(
    "pattern", ["**/*.txt", "texts/**", "**/texts/**/*.txt", "texts/**/**/*.txt"]
)
def test_files_are_read_once_however_links_and_copies_multiply_them(
    tmp_path: Path, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    texts = tmp_path / "texts"
    (texts / "sub").mkdir(parents=True)
    for name in ("a", "b", "sub/c"):
        (texts / f"{name}.txt").write_text(name)
    (texts / "sub" / "copy.txt").write_text("a")
    (texts / "again").symlink_to(texts)
    (texts / "sub" / "up").symlink_to(texts)
    (texts / "linked.txt").symlink_to(texts / "b.txt")
    (texts / "x.txt").symlink_to(texts / "y.txt")
    (texts / "y.txt").symlink_to(texts / "x.txt")
    s = Source("papers", "files", 0.2, files=(f"{tmp_path}/{pattern}",))
    p = pin.pin(s, tmp_path / "data")
    contents = [Path(file.name).read_text() for file in p.files]
    assert sorted(contents) == ["a", "b", "sub/c"]
    assert "papers: left out copies of other files (1), for example " in caplog.text


def test_a_pin_with_copies_of_an_earlier_version_stays(folder: Path) -> None:
    (folder / "z.jsonl").write_bytes((folder / "b.jsonl").read_bytes())
    s = papers(folder, "*.jsonl")
    path = pin.pin_path(s, folder / "data")
    once = pin.pin(s, folder / "data")
    extra = dataclasses.replace(once.files[0], name=str(folder / "z.jsonl"))
    path.write_text(pin.text_of(pin.Pinned(s, "local-before", (*once.files, extra))))
    kept = pin.pin(s, folder / "data")
    assert kept.files == (*once.files, extra) and kept.revision != once.revision
    assert pin.pin(s, folder / "data") == kept
    (folder / "new.jsonl").write_text("more")
    again = pin.pin(s, folder / "data")
    assert [Path(file.name).name for file in again.files] == ["b.jsonl", "new.jsonl"]
