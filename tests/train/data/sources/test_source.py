"""train/data/sources/source.py: a source is declared in a file; what is wrong there is named with what would be right."""

import dataclasses
import hashlib
import math
from typing import Any

import pytest

from settings import ROOT
from tests.train.data.sources.source_files import refusal
from train.data.sources.source import (
    KEYS,
    Source,
    declared,
    is_validation,
    template_columns,
)

HERE = ROOT / "sources"
FILES = 'files = ["a.jsonl"]\nvalidation_fraction = 0.1\n'


def of(folder, content):
    (folder / "mine.toml").write_text(content)
    return declared("mine", [folder])


# ---- Those that are here


def test_the_declared_sources_are_those_of_the_labs_mixture_and_the_embedded_one():
    assert {path.stem for path in HERE.glob("*")} == {
        "python",
        "python-stdlib",
        "fineweb-edu",
        "finepdfs",
        "usmle",
    }
    assert declared("python-stdlib", [HERE]).prompt == "def "
    assert "encodings/*" in declared("python", [HERE]).leave_out
    assert declared("finepdfs", [HERE]).config == "eng_Latn"
    for path in HERE.glob("*.toml"):
        assert declared(path.stem, [HERE]).tokens
        assert (
            path.read_text().startswith("# ")
            and "licence" in path.read_text()
            and "size" in path.read_text()
        )


def test_a_question_of_usmle_becomes_text_by_its_template():
    row = {
        "question": "Which nerve?",
        "options": {"A": "Ulnar", "B": "Median", "C": "Radial", "D": "Vagus"},
        "answer_idx": "B",
        "answer": "Median",
    }
    s = declared("usmle", [HERE])
    assert (
        s.template.format(**row)
        == "Question: Which nerve?\nA. Ulnar\nB. Median\nC. Radial\nD. Vagus\n"
        "Answer: B. Median"
    )
    assert s.columns == ("question", "options", "answer_idx", "answer")


# ---- Declarations


def test_a_declaration_of_files_gives_every_key_its_place(tmp_path):
    s = of(
        tmp_path,
        'files = ["a/*.jsonl", "~/b.txt"]\ntext = "body"\nid = "url"\nvalidation_fraction = 0.25\n'
        'prompt = "Once"\ncompressors = true\nmax_dropped = 0.1\ntokens = 5_000\nmax_epochs = 40\n',
    )
    assert s == Source(
        "mine",
        "files",
        0.25,
        files=("a/*.jsonl", "~/b.txt"),
        text="body",
        id="url",
        prompt="Once",
        compressors=True,
        max_dropped=0.1,
        tokens=5000,
        max_epochs=40,
    )
    s = of(
        tmp_path,
        f'repository = "a/b"\nconfig = "c"\nsplit = "s"\nrevision = "{"0f" * 20}"\n'
        'template = "{q}"\nvalidation_fraction = 0.1',
    )
    assert s == Source(
        "mine",
        "hub",
        0.1,
        repository="a/b",
        config="c",
        split="s",
        revision="0f" * 20,
        template="{q}",
    )


def test_an_unknown_source_is_named_with_those_that_there_are(tmp_path):
    for name, folder, said in (
        (
            "wiki",
            HERE,
            "DATA_MIX names wiki, which is no source; there are: finepdfs, fineweb-edu, ",
        ),
        ("wiki", HERE, "sources/wiki.toml"),
        ("fineweb-ed", HERE, "did you mean fineweb-edu?"),
        ("../unit/x", tmp_path, "there are: none"),
    ):
        assert said in refusal(declared, name, [folder])


def test_a_source_is_declared_here_or_next_to_the_data_and_not_in_both(tmp_path):
    ours, own = folders = [tmp_path / "sources", tmp_path / "data"]
    for folder in folders:
        folder.mkdir()
    (own / "mine.toml").write_text(FILES + 'max_epochs = "unlimited"\n')
    assert declared("mine", folders).max_epochs == math.inf
    (ours / "mine.toml").write_text(FILES)
    said = refusal(declared, "mine", folders)
    assert "mine, which is declared twice, in " in said and f"rename {own}/mine.toml" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            FILES + 'tekst = "body"',
            'tekst is no key of a source; did you mean text, as in text = "text"?',
        ),
        (FILES + "zzzzz = 1", "zzzzz is no key of a source; there are: repository, files"),
        (FILES + "text = 3", 'text = 3 must be a string; for example: text = "text"'),
        (FILES + "compressors = 1", "compressors = 1 must be true or false; for example: compr"),
        (FILES + "max_dropped = 1.5", "max_dropped = 1.5 must be a share of rows"),
        (FILES + "tokens = 1e9", "tokens = 1000000000.0 must be about how many tokens"),
        (
            FILES + "tokens = 0",
            "tokens = 0 must be about how many tokens the source has, or left out",
        ),
        (FILES + "max_epochs = 0", 'must be a whole number, at least 1, or "unlimited"'),
        (FILES + "max_epochs = nan", "max_epochs = nan must be a whole number, at least 1"),
        (FILES + 'hold_out_by = "hash"', "hold_out_by = 'hash' must be name or text"),
        ('files = "a.jsonl"\nvalidation_fraction = 0.1', "files = 'a.jsonl' must be a list of"),
        ("files = [1]\nvalidation_fraction = 0.1", "files = [1] must be a list of patterns"),
        (
            "validation_fraction = 0.1",
            "a source has one of repository, files and embedded, and none is given; for example",
        ),
        (FILES + 'repository = "a/b"', "and repository and files are given; for example"),
        (
            'embedded = "shakespeare"\nvalidation_fraction = 0.1',
            "embedded = 'shakespeare' must be python-stdlib",
        ),
        (
            'embedded = "python-stdlib"\ntext = "x"\nvalidation_fraction = 0.1',
            "text does not go with embedded; leave it",
        ),
        (FILES + 'split = "test"', "split does not go with files; leave it out"),
        (
            'files = ["a"]',
            "validation_fraction is missing; it must be the share of documents held out, between 0 and 1; "
            "for example: validation_fraction = 0.001",
        ),
        ('files = ["a"]\nvalidation_fraction = 0', "validation_fraction = 0 must be"),
        ('files = ["a"]\nvalidation_fraction = nan', "validation_fraction = nan must be"),
        (
            'repository = "./folder/x"\nvalidation_fraction = 0.1',
            "must be OWNER/NAME as the Hub shows it",
        ),
        (
            'repository = "a/b"\nrevision = "main"\nvalidation_fraction = 0.1',
            "revision = 'main' must be a commit of 40",
        ),
        (
            FILES + 'text = "a"\ntemplate = "{b}"',
            "text and template are given, and a row's text is made by one of them",
        ),
        (
            FILES + 'template = "no column"',
            "must be text with columns in braces (it names no column); for example",
        ),
        (FILES + 'template = "{a"', "must be text with columns in braces (expected '}'"),
        (FILES + 'template = "{a.b}"', "{a.b} is no column; write {column} or {column[key]}"),
        (FILES + 'template = "{0}"', "{0} is a number, and columns have names"),
        (FILES + 'template = "{a:{b}}"', "has braces in its format"),
        ("files = [", "not TOML"),
    ],
)
def test_a_declaration_that_is_wrong_is_refused_with_the_key_and_what_would_be_right(
    tmp_path, content, said
):
    message = refusal(of, tmp_path, content)
    assert said in message and message.startswith(f"{tmp_path}/mine.toml: ")


def test_every_key_has_a_valid_example(tmp_path):
    for key, (kinds, example, _, _) in KEYS.items():
        base = {
            "hub": 'repository = "a/b"',
            "files": 'files = ["a"]',
            "stdlib": 'embedded = "python-stdlib"',
        }
        lines = {
            line.split(" = ")[0]: line
            for line in (base[kinds.split()[0]], "validation_fraction = 0.1", example)
        }
        assert of(tmp_path, "\n".join(lines.values())).name == "mine", key


def test_columns_of_a_template_come_once_and_in_order():
    assert template_columns("{b} {a[x]} {b!r:>10} {{c}} {a[y][z]}") == ("b", "a")


# ---- Identity and split


def test_the_identity_changes_with_what_decides_the_text_and_with_nothing_else():
    s = Source("a", "hub", 0.1, repository="a/b")
    other: dict[str, Any] = {
        "kind": "files",
        "repository": "a/c",
        "config": "x",
        "split": "test",
        "files": ("x",),
        "text": "t",
        "template": "{x}",
        "id": "url",
        "validation_fraction": 0.2,
        "leave_out": ("x",),
        "place": "a.txt",
        "hold_out_by": "text",
    }
    seen = {s.identity} | {
        dataclasses.replace(s, **{key: value}).identity for key, value in other.items()
    }
    assert len(seen) == 1 + len(other) and all(len(identity) == 8 for identity in seen)
    same: dict[str, Any] = {
        "name": "b",
        "prompt": "x",
        "compressors": True,
        "max_dropped": 0.1,
        "revision": "0" * 40,
        "tokens": 7,
        "max_epochs": 7,
        "remedies": {},
    }
    assert {field.name for field in dataclasses.fields(s)} == other.keys() | same.keys()
    assert {dataclasses.replace(s, **{key: value}).identity for key, value in same.items()} == {
        s.identity
    }


def test_the_split_is_the_hash_of_the_name_against_the_share():
    s = Source("x", "hub", validation_fraction=0.2)
    for i in range(200):
        digest = hashlib.sha256(f"doc{i}".encode()).digest()
        assert is_validation(s, f"doc{i}") == (int.from_bytes(digest[:8], "little") / 2**64 < 0.2)
