"""train/data/sample_text.py and document_index.py: which text is sample i, against the rows that were written."""

import dataclasses
import json
import random

import numpy as np
import pytest
import xxhash

from settings.config import Config
from tests.train.making import ALONE
from train.data import tokenizer
from train.data.batch import Loader
from train.data.document_index import DocumentIndex, index_path, read_index
from train.data.sample_text import CHARACTERS, list_documents
from train.data.shard_writer import Maker
from train.data.shards import ShardSet
from train.data.sources.fetch import Files
from train.data.sources.pin import pin
from train.data.sources.source import Source

T = 16


def texts():
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(100)]
    made = [" ".join(rng.choices(words, k=rng.randint(1, 120))) for _ in range(60)]
    made[7] = "\x1b[31mred\r\n\u202eleft é日" + made[7]
    return made


@pytest.fixture
def made(tmp_path):
    """Two files of rows in three shards; the loader of a run, and the vocabulary."""
    rows = [json.dumps({"id": f"{i}", "text": text}) + "\n" for i, text in enumerate(texts())]
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "a.jsonl").write_text("".join(rows[:25]))
    (tmp_path / "papers" / "b.jsonl").write_text("".join(rows[25:]))
    vocabulary = tokenizer.train(iter(texts()), 300, tmp_path / "tokenizer.json")
    source = Source("papers", "files", 0.1, files=(str(tmp_path / "papers" / "*"),))
    pinned = pin(source, tmp_path / "data")
    folder = tmp_path / "made"
    maker = Maker(pinned, vocabulary, folder, 2000, Files(pinned, folder))
    for _ in maker.make(np.inf):
        pass
    config = dataclasses.replace(
        Config(), data_mix="papers:1", seq_len=T, batch_tokens=8 * T, micro_batch_size=8
    )
    sources = {"papers": ShardSet(folder)}
    return Loader(config, sources, ALONE, vocabulary.end_of_text), vocabulary


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
            offset = 25 if document["file"].endswith("b.jsonl") else 0
            text = texts()[offset + document["row"] - 1]
            assert part.strip("\ufffd") in text
            assert document["hash"] == f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"
            assert document["source"] == "papers" and document["sample"] == sample
            if text.isascii():
                assert document["text"] == text[:CHARACTERS]
            seen.add(offset + document["row"] - 1)
    held_out = loader.sources[0].total("validation", "documents")
    assert len(seen) == len(texts()) - held_out > 40 and 7 in seen


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
        if known["text"].isascii():
            text = texts()[(25 if known["file"].endswith("b.jsonl") else 0) + known["row"] - 1]
            assert document["text"] in text
            begun += text.startswith(document["text"])
    assert begun > 30


def test_what_cannot_be_read_is_left_out_and_there_are_no_more_than_asked_for(made, monkeypatch):
    loader, vocabulary = made
    shards = loader.sources[0]
    documents = list_documents(loader, vocabulary, range(50), 10_000)
    assert list_documents(loader, vocabulary, range(50), 7) == documents[:7]
    shards.keep_open([])
    (shards.folder / "train_00000.bin").unlink()
    left = list_documents(loader, vocabulary, range(windows(loader)), 10_000)
    assert left and {document["shard"] for document in left}.isdisjoint({"train_00000.bin"})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content, other: b"",
        lambda content, other: content[:-30],
        lambda content, other: content[:200] + b"xxxx" + content[204:],
        lambda content, other: b"<html>",
        lambda content, other: other,
    ],
    ids=["empty", "cut", "damaged", "error page", "of another shard"],
)
def test_an_index_that_is_not_that_of_its_shard_is_not_believed(made, spoil):
    loader, _ = made
    shards = loader.sources[0]
    first, second = shards.shards["train"][:2]
    path = index_path(shards.folder, first)
    other = index_path(shards.folder, second).read_bytes()
    assert isinstance(read_index(shards.folder, first), DocumentIndex)
    path.write_bytes(spoil(path.read_bytes(), other))
    assert read_index(shards.folder, first) is None
