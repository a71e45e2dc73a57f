"""train/data/sources/pin.py: which files a source has at a revision, written once and read from then on."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.faults.hub import REVISION, Repository, hub
from tests.train.data.sources.source_files import refusal
from train.data.sources import given, pin
from train.data.sources.pin import File, Pinned
from train.data.sources.source import Source


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a/c.jsonl", "a/d.jsonl", "a/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def papers(folder, *patterns):
    files = tuple(str(folder / pattern) for pattern in patterns)
    return Source("papers", "files", 0.2, files=files)


def names(p):
    return [file.name for file in p.files]


# ---- Files here


def test_globs_give_each_file_once_in_order_with_size_and_hash(folder):
    s = papers(folder, "b.jsonl", "**/*.jsonl", "a/*")
    p = pin.pin(s, folder / "data")
    assert p.files == tuple(
        File(str(folder / name), len(name), "xxh3:" + xxhash.xxh3_128(name.encode()).hexdigest())
        for name in ("a/c.jsonl", "a/d.jsonl", "a/e.txt", "b.jsonl")
    )
    assert p.revision.startswith("local-") and p.key == f"{p.revision[:12]}-{s.identity}"
    assert pin.pinned(s, folder / "data") == p == pin.pin(s, folder / "data")


def test_names_stay_as_they_were_given(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(given, "ROOT", folder)
    s = Source("papers", "files", 0.2, files=("a/*.jsonl", "~/b.jsonl"))
    p = pin.pin(s, folder / "data")
    assert names(p) == ["a/c.jsonl", "a/d.jsonl", "~/b.jsonl"]
    paths = [pin.local_path(s, name) for name in names(p)]
    assert paths == [folder / name for name in ("a/c.jsonl", "a/d.jsonl", "b.jsonl")]


def test_a_revision_is_of_names_and_contents_that_are_hashed_when_size_or_time_changed(
    folder, monkeypatch
):
    hashed, real = [], pin.digest_of

    def digest_of(path, kind):
        hashed.append(path.name)
        return real(path, kind)

    monkeypatch.setattr(pin, "digest_of", digest_of)
    s, b = papers(folder, "**/*.jsonl"), folder / "b.jsonl"

    def revision():
        hashed.clear()
        p = pin.pin(s, folder / "data")
        assert pin.pinned(s, folder / "data") == p
        return p.revision, list(hashed)

    first, of_all = revision()
    assert of_all == ["c.jsonl", "d.jsonl", "b.jsonl"] and revision() == (first, [])
    os.utime(b, ns=(1, 1))
    assert revision() == (first, ["b.jsonl"])
    b.write_text("B.jsonl")
    os.utime(b, ns=(1, 2))
    second, of_one = revision()
    b.rename(folder / "z.jsonl")
    third, _ = revision()
    (folder / "z.jsonl").unlink()
    assert of_one == ["b.jsonl"] and len({first, second, third, revision()[0]}) == 4
    for damage in ("{", "[1]", '"x"'):
        (folder / "data" / f"hashes-{s.identity}.json").write_text(damage)
        assert revision()[1] == ["c.jsonl", "d.jsonl"]


def test_what_matches_no_file_is_named(folder):
    for patterns in (("b.jsonl", "x*"), ("a",)):  # a folder
        said = refusal(pin.pin, papers(folder, *patterns), folder / "data")
        assert f"papers: no file matches '{folder}/{patterns[-1]}' (looked for {folder}/" in said
    assert not list(folder.glob("data/*"))


@pytest.mark.parametrize(
    "pattern", ["**/*.txt", "texts/**", "**/texts/**/*.txt", "texts/**/**/*.txt"]
)
def test_files_are_read_once_however_links_and_copies_multiply_them(tmp_path, pattern, caplog):
    texts = tmp_path / "texts"
    (texts / "sub").mkdir(parents=True)
    for name, content in {"a": "a", "b": "b", "sub/c": "c", "sub/copy": "a"}.items():
        (texts / f"{name}.txt").write_text(content)
    for link, target in {"again": ".", "sub/up": "..", "l.txt": "b.txt", "x.txt": "x.txt"}.items():
        (texts / link).symlink_to(target)
    p = pin.pin(papers(tmp_path, pattern), tmp_path / "data")
    assert sorted(Path(name).read_text() for name in names(p)) == ["a", "b", "c"]
    assert "papers: left out copies of other files (1), for example " in caplog.text


def test_the_embedded_corpus_is_pinned_by_the_interpreters_version(tmp_path, monkeypatch):
    whole = pin.pin(Source("python-stdlib", "stdlib", 0.05), tmp_path)
    assert whole.revision == "{}.{}.{}".format(*sys.version_info)
    assert names(whole) == sorted(set(names(whole)))
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names(whole))
    assert 5e6 < sum(file.bytes for file in whole.files) < 50e6  # 12 MB with 3.11
    left_out = ("encodings/*", "_sysconfigdata_*", "stringprep.py")
    part = pin.pin(Source("python", "stdlib", 0.05, leave_out=left_out), tmp_path)
    gone = set(names(whole)) - set(names(part))
    assert {"encodings/cp037.py", "stringprep.py"} < gone
    assert all(name.startswith(("encodings/", "_sysconfigdata_", "stringprep.py")) for name in gone)
    monkeypatch.setattr(pin, "stdlib_root", lambda: tmp_path)
    said = refusal(pin.pin, Source("python-stdlib", "stdlib", 0.05), tmp_path / "data")
    assert f"{tmp_path} holds no Python source" in said and "DATA_MIX" in said


# ---- The written pin


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (None, "there is no such file: papers has not been prepared with its current declaration"),
        *((text, "not the pin of a source") for text in ("", "{", "[]", '{"schema": 2}')),
        pytest.param("[" * 100_000, "not the pin of a source", id="nested"),
        ("half", "not the pin of a source"),
        ("other", "not the pin of a source"),
    ],
)
def test_a_pin_that_is_absent_or_damaged_is_named_with_the_remedy(folder, damage, said):
    s = papers(folder, "b.jsonl")
    pin.pin(s, folder / "data")
    path = pin.pin_path(s, folder / "data")
    text = path.read_text()
    damaged = {"half": text[:-20], "other": text.replace(s.identity, "0" * 8)}
    path.unlink()
    if damage is not None:
        path.write_text(damaged.get(damage, damage))
    message = refusal(pin.pinned, s, folder / "data")
    assert message.startswith(f"{path}: {said}") and message.endswith("make data")


def test_another_revision_in_the_declaration_asks_for_another_pin(tmp_path, monkeypatch):
    made = []

    def hub_pin(s, token):
        made.append(s.revision)
        return Pinned(s, s.revision, (File("a.jsonl", 1, "git-sha1:0"),))

    monkeypatch.setattr(pin, "hub_pin", hub_pin)
    first, other, any_one = (
        Source("x", "hub", 0.1, repository="a/b", revision=revision)
        for revision in ("0" * 40, "1" * 40, "")
    )
    assert pin.pin(first, tmp_path) == pin.pin(first, tmp_path)
    said = refusal(pin.pinned, other, tmp_path)
    assert "pins x at 000000000000, but its source says revision = 111111111111; " in said
    assert pin.pin(other, tmp_path).revision == "1" * 40
    assert pin.pin(any_one, tmp_path).revision == "1" * 40
    assert made == ["0" * 40, "1" * 40]


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


def git(content):
    return "git-sha1:" + hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def test_the_files_of_a_config_and_split_are_pinned_with_what_the_hub_says_of_them(
    tmp_path,
):
    files = {
        "README.md": CARD,
        "one/train-1.jsonl": b"b" * 5,
        "one/train-0.jsonl": b"a" * 3,
        "one/test.jsonl": b"t",
        "two/x.parquet": b"PAR1" * 10,
        "other.txt": b"o",
    }
    repositories = {
        "a/many": Repository(files),
        "a/plain": Repository({"train.jsonl": b"1", "test.jsonl": b"2"}),
        "a/none": Repository({"README.md": b"hello"}),
    }
    plain = [["train.jsonl", 1, git(b"1")]]
    table: list[tuple[dict[str, str], Any]] = [
        (
            {"repository": "a/many", "config": "one"},
            [["one/train-0.jsonl", 3, git(b"aaa")], ["one/train-1.jsonl", 5, git(b"bbbbb")]],
        ),
        (
            {"repository": "a/many", "config": "two"},
            [["two/x.parquet", 40, "sha256:" + hashlib.sha256(b"PAR1" * 10).hexdigest()]],
        ),
        (
            {"repository": "a/many", "config": "one", "split": "test"},
            [["one/test.jsonl", 1, git(b"t")]],
        ),
        ({"repository": "a/plain"}, plain),
        ({"repository": "a/plain", "revision": REVISION}, plain),
        (
            {"repository": "a/many", "config": "three"},
            "a/many has no config three; there are: 'one', 'two'. Name one of them as config in",
        ),
        ({"repository": "a/many"}, "a/many has several configs; there are: 'one', 'two'. Name one"),
        (
            {"repository": "a/many", "config": "one", "split": "validation"},
            "a/many, config one, has no split validation; there are: test, train. Name one of them",
        ),
        ({"repository": "a/plain", "config": "x"}, "a/plain has no config x; there are: 'default'"),
        ({"repository": "a/none"}, "a/none"),
    ]
    with hub(repositories=repositories) as server:
        sources = [keys for keys, _ in table]
        answers, _ = server.run(tmp_path, ASK, tmp_path, json.dumps(sources))
        for (keys, expected), answer in zip(table, answers, strict=True):
            if isinstance(expected, str):
                assert answer.startswith("CorpusError") and expected in answer, keys
            else:
                assert answer == [REVISION, expected], keys
        assert not list(tmp_path.glob("s5/*"))
        asked = len(server.requests)
        again, _ = server.run(tmp_path, ASK, tmp_path, json.dumps(sources[:1]))
        assert again == answers[:1] and len(server.requests) == asked > 20
