"""train/data/audit/report.py and scan.py: each figure against one that plain Python counts from the documents."""

import dataclasses
import json
import logging
import math
import random
from pathlib import Path

import numpy as np
import pytest

from settings.config import Config
from tests.shard_folder import write_source
from train.data import prepare, tokenizer
from train.data.audit import report, scan
from train.data.manifest import SPLITS
from train.data.shards import ShardSet

WORDS = ["red", "green", "blue", "river", "stone", "é"]


@pytest.fixture
def vocabulary(data):
    return tokenizer.load(Path(data["TOKENIZER"]))


@pytest.fixture
def make(tmp_path, vocabulary, monkeypatch):
    """Makes the report of sources: name -> training shards, each a list of documents, and validation documents."""

    def shard(documents):
        ids = [i for text in documents for i in (vocabulary.end_of_text, *vocabulary.encode(text))]
        return np.array(ids), len(documents), sum(len(text.encode()) for text in documents)

    def make(sources, **changes):
        opened = {}
        for name, (train, validation) in sources.items():
            shards = [[shard(documents) for documents in each] for each in (train, [validation])]
            write_source(tmp_path / name, *shards, vocabulary.sha256, vocabulary.size)
            opened[name] = ShardSet(tmp_path / name)
        monkeypatch.setattr(prepare, "vocabulary", lambda c: vocabulary)
        monkeypatch.setattr(prepare, "open_sources", lambda c, v: opened)
        settings = {"data_dir": str(tmp_path), "vocab_size": 512, "seq_len": 32}
        settings |= {"core_bundle": "none"} | changes
        config = dataclasses.replace(Config(), **settings).derived()
        monkeypatch.setattr(report, "load_config", lambda: config)
        return report.make_report(config)

    return make


def text(rng, least=3, most=40):
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def question(rng):
    return " ".join(str(rng.randrange(10**6)) for _ in range(20))


def write_task(path, questions):
    path.write_text("".join(json.dumps({"q": q}) + "\n" for q in questions))
    return str(path)


# ---- Documents


def test_figures_are_those_of_plain_counting(make, vocabulary):
    """More than half of the documents repeat an earlier one of any shard."""
    rng = random.Random(2)
    documents = [" red green stone", " stone green red"]  # the same tokens in another order
    while len(documents) < 140:
        documents.append(rng.choice(documents) if rng.random() < 0.6 else text(rng, 60, 90))
    splits = {"train": documents[:100], "validation": documents[100:]}
    train = [documents[:40], documents[40:41], documents[41:100]]
    source = make({"a": (train, splits["validation"])})["sources"]["a"]
    for split in SPLITS:
        texts, found = splits[split], source["splits"][split]
        lengths = np.array([1 + len(vocabulary.encode(t)) for t in texts])
        assert (found["documents"], found["tokens"]) == (len(texts), lengths.sum())
        is_copy = np.array([t in texts[:k] for k, t in enumerate(texts)])
        tokens = lengths[is_copy].sum()
        share = {"tokens": tokens, "token_share": tokens / lengths.sum()}
        assert found["copies"] == {"documents": is_copy.sum()} | share and is_copy.sum() >= 3
        for name, percent in report.QUANTILES.items():
            place = max(0, math.ceil(percent / 100 * len(lengths)) - 1)
            assert found["lengths"][name] == sorted(lengths)[place]
    copied = sum(t in splits["train"] for t in splits["validation"])
    assert source["validation_in_train"] == copied > 3


def test_documents_of_two_sources_are_counted_on_both_sides(make):
    a = [["red", "red", "blue", "stone"]], ["green"]
    b = [["river", "green"]], ["red", "é"]
    found = make({"a": a, "b": b, "other": ([["stone red"]], ["blue red"])})
    assert found["in_two_sources"] == [{"sources": ["a", "b"], "documents": [3, 2]}]
    assert [w for w in found["warnings"] if "3 of a are in b, 2 of b in a" in w]


def test_of_a_large_source_every_nth_shard_is_compared(make, monkeypatch, tmp_path):
    """Counts and copies are of all of it."""
    task = write_task(tmp_path / "task.jsonl", [question(random.Random(3))])
    monkeypatch.setattr(scan, "MOST_TOKENS", 150)
    for place, touched in ((0, 1), (1, 0), (2, 1), (3, 0)):
        shards = [["one two"], ["one two"], ["three four"], ["one two"], ["one two"]]
        shards[place] = [question(random.Random(3))]
        found = make({f"at {place}": (shards, ["blue"])}, core_bundle=task)
        (compared,), (source,) = found["compared"].values(), found["sources"].values()
        assert compared["tasks"]["task"]["rows_touched"] == touched
        assert compared["of_tokens"] == sum(source["splits"][split]["tokens"] for split in SPLITS)
        assert 0 < compared["tokens"] < compared["of_tokens"]


# ---- The screen


@pytest.fixture
def overlapping(make, tmp_path):
    """Reports a source that has 8 of the 9 questions of one task, 1 of 40 of another and none of a third."""
    rng = random.Random(6)
    tasks = {
        name: [question(rng) for _ in range(n)]
        for name, n in {"quiz": 40, "usmle": 9, "clean": 3}.items()
    }
    for name, questions in tasks.items():
        write_task(tmp_path / f"{name}.jsonl", questions)
    train = [*tasks["usmle"][1:], tasks["quiz"][7], *(text(rng) for _ in range(20)), "same", "same"]
    source = [["long " * 99, *train]], ["same", "long"]
    return make({"a": source}, core_bundle=str(tmp_path))


def test_warnings_name_the_tasks_and_what_that_means(overlapping):
    assert overlapping["warnings"] == [
        "a shares 13-grams with 8 of 9 questions of usmle. Results on it mean nothing.",
        "a shares 13-grams with 1 of 40 questions of quiz. Results on it may be 2.5 points too high.",
        "a: 1 of 2 validation documents are equal to one in train. The validation loss is too low.",
    ]
    overlapping["compared"]["a"]["of_tokens"] += 1
    assert report.list_warnings(overlapping)[1] == (
        "a shares 13-grams with at least 1 of 40 questions of quiz. Results on it may be at least "
        "2.5 points too high."
    )


@pytest.mark.parametrize("copies", [1, 12])
def test_the_screen_has_80_columns_and_of_one_source_40_lines(overlapping, copies):
    source = overlapping["sources"]["a"]
    expected = ["Evaluation tasks: 3 compared, 2 with 13-grams in a source"]
    if copies > 1:
        for split in source["splits"].values():
            split.update(documents=10**8, tokens=10**11)
            split["lengths"] = dict.fromkeys(split["lengths"], 10**6)
        for k in range(copies):
            name = f"a-very-long-name-of-a-source-{k}"
            overlapping["sources"][name] = source
            overlapping["compared"][name] = overlapping["compared"]["a"] | {"of_tokens": 10**11}
        overlapping["warnings"] = report.list_warnings(overlapping)
        expected += ["a-very-long-n train", "Warnings (5 of ", "Compared with tasks: "]
    lines = list(report.render(overlapping))
    assert max(map(len, lines)) <= 80 and (copies > 1 or len(lines) < 40)
    assert all(ch.isprintable() for line in lines for ch in line)
    screen = "\n".join(lines)
    assert [words for words in expected if words not in screen] == []
    shown = overlapping["warnings"] if copies == 1 else []
    assert all(warning in " ".join(screen.split()) for warning in shown)


# ---- The command


def run(caplog):
    with caplog.at_level(logging.INFO):
        return report.main(), caplog.text


def test_the_command_writes_what_it_says(tmp_path, overlapping, caplog):
    code, said = run(caplog)
    assert code == 0 and str(tmp_path / "report.json") in said.splitlines()[-1]
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == json.loads(json.dumps(overlapping))


def test_without_tasks_the_screen_says_how_to_give_some(make, caplog):
    found = make({"a": ([["red green"]], ["blue"])})
    assert found["compared"]["a"]["tasks"] == {}
    assert "make data-report CORE_BUNDLE=" in run(caplog)[1]


@pytest.mark.parametrize(
    ("setting", "value", "code", "said"),
    [
        ("core_bundle", "absent", 64, "absent: There is no *.jsonl"),
        ("tokenizer", "no.json", 78, "no.json: cannot be read"),
    ],
)
def test_a_bad_setting_ends_with_64_and_bad_data_with_78(
    tmp_path, monkeypatch, caplog, setting, value, code, said
):
    settings = {"data_dir": str(tmp_path), "core_bundle": "none", setting: str(tmp_path / value)}
    config = dataclasses.replace(Config(), **settings)
    monkeypatch.setattr(report, "load_config", lambda: config)
    found, log = run(caplog)
    assert found == code and said in log
    assert not (tmp_path / "report.json").exists()
