"""train/data/sample_text.py and document_index.py: which text is sample i, against the rows that were written."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from settings.config import Config
from tests.train.data.test_shard_writer import make, papers, rows, v
from tests.train.making import ALONE
from train.data.batch import Loader
from train.data.document_index import DocumentIndex, index_path, read_index
from train.data.sample_text import CHARACTERS, list_documents
from train.data.shards import ShardSet

__all__ = ["papers", "v"]  # fixtures

T = 16


@pytest.fixture
def made(papers, v, tmp_path):
    """The loader of a run, and the vocabulary."""
    make(papers, v, tmp_path / "made")
    config = dataclasses.replace(
        Config(), data_mix="papers:1", seq_len=T, batch_tokens=8 * T, micro_batch_size=8
    )
    return Loader(config, {"papers": ShardSet(tmp_path / "made")}, ALONE, v.end_of_text), v


def text_of(document):
    """The text of the row that a document names."""
    return rows()[int(Path(document["file"]).stem)][document["row"] - 1]["text"]


def windows(loader):
    return sum(loader.sources[0].windows("train", T))


def test_every_sample_names_the_rows_that_its_tokens_are_from(made):
    loader, vocabulary = made
    assert len(loader.sources[0].shards["train"]) >= 3
    seen = set()
    for sample in range(windows(loader)):
        documents = list_documents(loader, vocabulary, [sample], 99)
        tokens = loader.read(loader.mixture.locate(np.array([sample])), 0, 1)[0, :T]
        parts = vocabulary.decode(tokens).split(vocabulary.decode([vocabulary.end_of_text]))
        if tokens[0] == vocabulary.end_of_text:
            parts = parts[1:]
        assert len(parts) == len(documents)
        for part, document in zip(parts, documents, strict=True):
            text = text_of(document)
            assert part.strip("\ufffd") in text
            assert document["hash"] == f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"
            assert document["source"] == "papers" and document["sample"] == sample
            if text.isascii():
                assert document["text"] == text[:CHARACTERS]
            seen.add(text)
    assert len(seen) == loader.sources[0].total("train", "documents") > 40


def test_nothing_of_a_text_can_act_on_a_terminal(made):
    loader, vocabulary = made
    documents = list_documents(loader, vocabulary, range(windows(loader)), 10_000)
    (text,) = {document["text"] for document in documents if "red" in document["text"][:20]}
    assert text.startswith("\\x1b[31mred\\r\\n\\u202eleft é日")
    assert all(document["text"].isprintable() for document in documents)


def test_without_an_index_the_text_of_the_sample_itself_is_shown(made):
    loader, vocabulary = made
    with_index = list_documents(loader, vocabulary, range(windows(loader)), 10_000)
    folder = loader.sources[0].folder
    for path in folder.glob("*.index"):
        path.unlink()
    without = list_documents(loader, vocabulary, range(windows(loader)), 10_000)
    assert len(without) == len(with_index)
    assert not any({"file", "row", "hash"} & document.keys() for document in without)
    begun = 0
    for document, known in zip(without, with_index, strict=True):
        assert (document["sample"], document["shard"]) == (known["sample"], known["shard"])
        if known["text"].isascii() and document["text"].isascii():
            text = text_of(known)
            assert document["text"].removesuffix("\\n") in text
            begun += text.startswith(document["text"])
    assert begun > 20


def test_what_cannot_be_read_is_left_out_and_there_are_no_more_than_asked_for(made, monkeypatch):
    loader, vocabulary = made
    shards = loader.sources[0]
    documents = list_documents(loader, vocabulary, range(50), 10_000)
    assert list_documents(loader, vocabulary, range(50), 7) == documents[:7]
    shards.keep_open([])
    (shards.folder / "train_00000.bin").unlink()
    left = list_documents(loader, vocabulary, range(windows(loader)), 10_000)
    assert left and {document["shard"] for document in left}.isdisjoint({"train_00000.bin"})


@pytest.mark.parametrize("damage", ["empty", "cut", "damaged", "error page", "of another shard"])
def test_an_index_that_is_not_that_of_its_shard_is_not_believed(made, damage):
    shards = made[0].sources[0]
    first, second = shards.shards["train"][:2]
    path = index_path(shards.folder, first)
    content = path.read_bytes()
    assert isinstance(read_index(shards.folder, first), DocumentIndex)
    damaged = {
        "empty": b"",
        "cut": content[:-30],
        "damaged": content[:200] + b"xxxx" + content[204:],
        "error page": b"<html>",
        "of another shard": index_path(shards.folder, second).read_bytes(),
    }
    path.write_bytes(damaged[damage])
    assert read_index(shards.folder, first) is None


def test_no_flipped_bit_of_an_index_raises(made):
    """Those of the directory of its parts, where one says "encrypted" and others name a method."""
    shards = made[0].sources[0]
    info = shards.shards["train"][0]
    path = index_path(shards.folder, info)
    content = path.read_bytes()
    for at in range(len(content) - 250, len(content)):
        for bit in range(8):
            flipped = bytes([content[at] ^ 1 << bit])
            path.write_bytes(content[:at] + flipped + content[at + 1 :])
            read_index(shards.folder, info)
    path.unlink()
    os.mkfifo(path)
    assert read_index(shards.folder, info) is None
