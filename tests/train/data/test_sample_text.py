"""train/data/sample_text.py: which text is sample i, against the tokens of its window."""

import dataclasses

import numpy as np
import pytest

from settings.config import Config
from tests.train.data.test_shard_writer import make, papers, v
from tests.train.making import ALONE
from train.data import sample_text
from train.data.batch import Loader
from train.data.sample_text import CHARACTERS, list_texts
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


def windows(loader):
    return sum(loader.sources[0].windows("train", T))


def test_each_sample_has_the_text_of_its_window(made):
    loader, vocabulary = made
    texts = list_texts(loader, vocabulary, range(windows(loader)), 10_000)
    assert [text["sample"] for text in texts] == list(range(windows(loader)))
    assert {text["source"] for text in texts} == {"papers"}
    assert len({text["shard"] for text in texts}) >= 3
    for text in texts:
        tokens = loader.read(loader.mixture.locate(np.array([text["sample"]])), 0, 1)[0, :T]
        whole = vocabulary.decode(tokens)
        if whole.isprintable():
            assert text["text"] == whole[:CHARACTERS]


def test_a_text_is_cut_and_nothing_of_it_can_act_on_a_terminal(made, monkeypatch):
    loader, vocabulary = made
    texts = list_texts(loader, vocabulary, range(windows(loader)), 10_000)
    assert all(text["text"].isprintable() for text in texts)
    assert any("\\x1b[31mred" in text["text"] for text in texts)
    monkeypatch.setattr(sample_text, "CHARACTERS", 5)
    for text, whole in zip(list_texts(loader, vocabulary, range(7), 7), texts, strict=False):
        assert whole["text"].startswith(text["text"][:5])


def test_what_cannot_be_read_is_left_out_and_there_are_no_more_than_asked_for(made):
    loader, vocabulary = made
    shards = loader.sources[0]
    texts = list_texts(loader, vocabulary, range(50), 10_000)
    assert list_texts(loader, vocabulary, range(50), 7) == texts[:7]
    shards.keep_open([])
    (shards.folder / "train_00000.bin").unlink()
    left = list_texts(loader, vocabulary, range(windows(loader)), 10_000)
    assert left and {text["shard"] for text in left}.isdisjoint({"train_00000.bin"})
