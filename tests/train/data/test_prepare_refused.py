"""train/data/prepare.py: what is damaged, missing or does not fit is refused in a sentence, and its remedy mends it."""

import dataclasses
import logging
import shutil
from pathlib import Path

import pytest

from tests.train.data.test_prepare import config, declare, declare_papers, opened, settings
from train.data import prepare
from train.data.manifest import DataError
from train.data.sources.source import CorpusError

__all__ = ["config"]  # a fixture


def with_tokenizer(c, **changes):
    """The settings with the tokenizer that was trained for them."""
    path = next(Path(c.data_dir).rglob("tokenizer.json"))
    return dataclasses.replace(c, tokenizer=str(path), **changes)


@pytest.mark.fault(10)
def test_all_that_is_damaged_is_named_by_verify_with_code_78(config, monkeypatch, caplog):
    """In both sources; and what the messages say mends it."""
    declare_papers(config, "notes", seed=13)
    c = dataclasses.replace(config, data_mix="papers:1,notes:1")
    settings(monkeypatch, c)
    caplog.set_level(logging.INFO)
    assert prepare.main([]) == 0 and prepare.main(["verify"]) == 0
    for name in c.mixture:
        count = len(list(opened(c, name).folder.glob("*.bin")))
        assert count > 5 and f"data: {name}: {count} shards, all hashes match" in caplog.messages
    papers, notes = opened(c, "papers").folder, opened(c, "notes").folder
    wrong = {
        papers / "train_00001.bin": (lambda b: b[:-1] + b"?", "damaged: its hash is"),
        papers / "validation_00000.bin": (lambda b: b[:-1] + b"?", "damaged: its hash is"),
        papers / "train_00002.bin": (lambda b: b[:-2], "bytes, but the manifest says"),
        notes / "train_00000.bin": (lambda b: b"<html>403</html>", "it looks like an error page"),
    }
    for path, (spoil, _) in wrong.items():
        path.write_bytes(spoil(path.read_bytes()))
    absent = papers / "train_00003.bin"
    absent.unlink()
    caplog.clear()
    assert prepare.main(["verify"]) == 78
    (said,) = caplog.messages
    words = {str(path): what for path, (_, what) in wrong.items()} | {str(absent): "cannot be read"}
    found = {line.split(": ")[0]: line for line in said.splitlines()}
    assert found.keys() == words.keys() and len(said.splitlines()) == len(words)
    for path, what in words.items():
        assert what in found[path] and "make data" in found[path]
        Path(path).unlink(missing_ok=True)
    assert prepare.main(["data"]) == 0 and prepare.main(["verify"]) == 0


@pytest.mark.parametrize(
    ("environ", "argv", "code", "words"),
    [
        ({"DATA_MIX": "wiki:1"}, [], 78, "DATA_MIX names wiki, which is no source"),
        ({"SEED": "x"}, [], 64, "SEED=x"),
        ({}, ["verify"], 78, "has not been prepared with its current declaration; prepare"),
        ({"TOKENIZER": "a/b"}, ["verify"], 78, "there is no tokenizer yet; prepare the data with"),
        ({"TOKENIZER": "absent.json"}, [], 78, "absent.json: cannot be read"),
    ],
)
def test_faults_end_with_their_code_and_one_message(
    tmp_path,
    monkeypatch,
    caplog,
    environ,
    argv,
    code,
    words,
):
    for name, value in {"DATA_DIR": str(tmp_path), **environ}.items():
        monkeypatch.setenv(name, value)
    assert prepare.main(argv) == code
    assert words in caplog.messages[-1]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_a_size_that_holds_it(
    config,
):
    prepare.prepare(config)
    small = with_tokenizer(config, vocab_size=256)
    words = "the tokenizer has 300 entries, but VOCAB_SIZE=256; set VOCAB_SIZE=300"
    for refuse in (prepare.prepare, prepare.verify):
        with pytest.raises(DataError, match=words):
            refuse(small)
    prepare.prepare(dataclasses.replace(small, vocab_size=300))


@pytest.mark.fault(26)
def test_shards_of_another_tokenizer_in_its_place_are_refused(config):
    """As when folders are copied by hand."""
    prepare.prepare(config)
    here = opened(config).folder
    other = dataclasses.replace(config, vocab_size=310)
    prepare.prepare(other)
    there = opened(other).folder
    shutil.rmtree(there)
    shutil.copytree(here, there)
    words = rf"{there}: .* tokenizer {here.name}, but TOKENIZER gives {there.name}"
    with pytest.raises(DataError, match=words):
        prepare.prepare(other)


@pytest.mark.fault(28)
@pytest.mark.parametrize(("fraction", "word"), [(1e-9, "validation"), (1 - 1e-9, "training")])
def test_a_split_without_a_document_is_an_error(config, fraction, word):
    prepare.prepare(config)
    files = [str(Path(config.data_dir).parent / "papers" / "*.jsonl")]
    declare(config, "papers", files=files, validation_fraction=fraction)
    with pytest.raises(DataError, match=f"holds no {word} document; prepare more text"):
        prepare.prepare(with_tokenizer(config))


def test_a_source_that_fails_while_it_is_read_is_not_blamed_on_the_disk(config):
    """It changes between the pin and the reading."""
    prepare.prepare(config)
    (Path(config.data_dir).parent / "papers" / "b.jsonl").write_bytes(b"cut")
    shutil.rmtree(opened(config).folder)
    words = r"b\.jsonl: 3 bytes, not \d+.*it changed since papers was prepared"
    with pytest.raises(CorpusError, match=words):
        prepare.make_source(config, "papers", prepare.vocabulary(config))


@pytest.mark.fault(8)
@pytest.mark.parametrize("node", [0, 1])
def test_a_file_in_the_place_of_data_dir_is_named(config, node):
    Path(config.data_dir).write_text("in the way")
    c = dataclasses.replace(config, nodes=2, node_rank=node, master_addr="a")
    with pytest.raises(DataError, match=rf"{c.data_dir}: cannot be written \(.*\); .*DATA_DIR"):
        prepare.prepare(c)
