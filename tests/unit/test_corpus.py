"""train/corpus.py: the same documents in the same order, from any document on, and a split that needs no list."""

import dataclasses
import hashlib
import json
import sys
import sysconfig
from pathlib import Path

import pytest

from train import corpus
from train.corpus import CorpusError, Document, Source

HUB = Source("papers", "hub", validation_fraction=0.2, prompt="The")


def folder_source(folder: Path, **files: list[dict] | bytes) -> Source:
    """A source on the hub's road whose repository is a folder with these .jsonl files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        content = rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"{name}.jsonl").write_bytes(content)
    return Source("papers", "hub", validation_fraction=0.2, prompt="The", repository=str(folder))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whatever `datasets` keeps goes here. Imported late: it takes a second."""
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "source"


# ---- The standard library

def test_the_standard_library_is_the_interpreters_own_without_its_tests() -> None:
    documents = list(corpus.stdlib_documents())
    names = [d.name for d in documents]
    assert names == sorted(set(names))
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not [n for n in names if {"test", "tests", "site-packages", "__pycache__"} & set(n.split("/"))]
    text = {d.name: d.text for d in documents}
    assert text["json/decoder.py"] == (Path(json.__file__).parent / "decoder.py").read_text(encoding="utf-8")
    assert 5e6 < sum(len(d.text) for d in documents) < 50e6  # 12 MB with 3.11
    held_out = sum(corpus.is_validation(corpus.SOURCES["python-stdlib"], name) for name in names)
    assert 0.02 < held_out / len(names) < 0.09  # declared as 0.05
    assert corpus.revision(corpus.SOURCES["python-stdlib"]) == "{}.{}.{}".format(*sys.version_info)


def test_files_are_taken_by_name_and_those_that_are_not_utf8_keep_their_number(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"b.py": b"b = 'na\xc3\xafve'\r\n", "a/z.py": b"z", "a/latin.py": b"# \xe9", "test/t.py": b"t",
             "empty.py": b"", "lib/tests/x.py": b"x",
             "site-packages/p.py": b"p", "data.txt": b"d", "testing.py": b"kept"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    expected = [Document("a/latin.py", ""), Document("a/z.py", "z"), Document("b.py", "b = 'naïve'\n"),
                Document("empty.py", ""), Document("testing.py", "kept")]
    for skip in range(len(expected) + 1):
        assert list(corpus.documents(corpus.SOURCES["python-stdlib"], "", skip)) == expected[skip:]


def test_an_interpreter_without_source_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(CorpusError, match="holds no Python source") as raised:
        list(corpus.stdlib_documents())
    assert "DATA_MIX" in str(raised.value) and str(tmp_path) in str(raised.value)


# ---- The split

def test_the_split_is_the_hash_of_the_name_against_the_share() -> None:
    for i in range(200):
        digest = hashlib.sha256(f"doc{i}".encode()).digest()
        assert corpus.is_validation(HUB, f"doc{i}") == (int.from_bytes(digest[:8], "little") / 2**64 < 0.2)


def test_the_share_held_out_is_the_declared_one_and_grows_with_it() -> None:
    def held_out(fraction: float) -> set[int]:
        s = Source("x", "hub", validation_fraction=fraction, prompt="")
        return {i for i in range(20_000) if corpus.is_validation(s, f"name {i}")}

    assert len(held_out(0.05)) / 20_000 == pytest.approx(0.05, abs=0.005)  # three standard deviations
    assert held_out(0.0) == set() and len(held_out(1.0)) == 20_000
    assert held_out(0.01) < held_out(0.05)


# ---- Sources by name, and the hub

def test_an_unknown_source_is_named_with_those_that_there_are() -> None:
    with pytest.raises(CorpusError, match="DATA_MIX names wiki, which is no source; there are: python-stdlib, fineweb"):
        corpus.source("wiki")
    assert corpus.source("python-stdlib").kind == "stdlib"


def test_rows_come_in_the_order_of_the_files_from_any_number_on(own_cache: Path) -> None:
    rows = [{"id": f"p{i}", "text": f"text {i}"} for i in range(6)]
    s = folder_source(own_cache, a=rows[:4], b=rows[4:])
    assert corpus.revision(s) == "local"
    for skip in (0, 1, 4, 5, 6):
        assert list(corpus.documents(s, "local", skip)) == [Document(f"p{i}", f"text {i}") for i in range(skip, 6)]


def test_a_row_without_text_is_an_empty_document_and_one_without_a_name_has_its_number(own_cache: Path) -> None:
    s = folder_source(own_cache, a=[{"text": "a"}, {"text": None}, {"text": "c"}])
    assert list(corpus.documents(s, "local", 1)) == [Document("1", ""), Document("2", "c")]


def test_rows_without_the_text_column_are_named_with_the_columns_that_they_have(own_cache: Path) -> None:
    s = folder_source(own_cache, a=[{"id": "1", "body": "x"}])
    with pytest.raises(CorpusError, match="row 0 has no column 'text'; it has: id, body"):
        list(corpus.documents(s, "local"))


def test_a_template_makes_the_text_of_several_columns(own_cache: Path) -> None:
    row = {"question": "Which nerve?", "options": {"A": "Ulnar", "B": "Median", "C": "Radial", "D": "Vagus"},
           "answer_idx": "B", "answer": "Median"}
    s = dataclasses.replace(folder_source(own_cache, a=[row]), template=corpus.source("usmle").template)
    (document,) = corpus.documents(s, "local")
    assert document.text == "Question: Which nerve?\nA. Ulnar\nB. Median\nC. Radial\nD. Vagus\nAnswer: B. Median"
    s = dataclasses.replace(s, template="{question} {choices}")
    with pytest.raises(CorpusError, match="row 0 has no column 'choices'; it has: question, options"):
        list(corpus.documents(s, "local"))


@pytest.mark.parametrize("content", [
    None, b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>".ljust(278),
    b'{"id": "1", "text": "whole"}\n{"id": "2", "te'], ids=["no files", "error page", "truncated"])
def test_a_source_that_cannot_be_read_is_named(own_cache: Path, content: bytes | None) -> None:
    s = folder_source(own_cache, **({} if content is None else {"a": content}))
    with pytest.raises(CorpusError, match=f"{s.repository}"):
        list(corpus.documents(s, "local"))


def test_a_network_that_fails_between_rows_is_said_to_be_the_network(own_cache: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    class Rows:
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield {"id": "1", "text": "one"}
            raise ConnectionError("connection reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: Rows())
    rows = corpus.documents(HUB, "main")
    assert next(rows) == Document("1", "one")
    with pytest.raises(CorpusError, match=r"connection reset by peer.*network"):
        next(rows)


def test_a_hub_that_does_not_answer_is_told_with_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> None:
        raise OSError("403 Forbidden")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with pytest.raises(CorpusError, match="revision of some/where: 403 Forbidden; check the network, and HF_TOKEN"):
        corpus.revision(Source("x", "hub", 0.1, "", repository="some/where"))
