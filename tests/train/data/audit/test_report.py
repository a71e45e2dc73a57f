"""train/data/audit/report.py, scan.py and report_text.py: each figure against one that plain Python counts from the documents."""

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
from train.data.audit import report, report_text, scan
from train.data.manifest import SPLITS
from train.data.near_duplicates import SeenKeys, compute_keys
from train.data.shards import ShardSet
from train.data.word_hashes import hash_documents

CONTROL = "\x1b[31m é\ttab\n"
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

    def make(sources, dropped=None, **changes):
        opened = {}
        for name, (train, validation) in sources.items():
            shards = [[shard(documents) for documents in each] for each in (train, [validation])]
            identity = vocabulary.sha256, vocabulary.size
            write_source(tmp_path / name, *shards, *identity, dropped=dropped or {"empty": 0})
            opened[name] = ShardSet(tmp_path / name)
        monkeypatch.setattr(prepare, "vocabulary", lambda c: vocabulary)
        monkeypatch.setattr(prepare, "open_sources", lambda c, v: opened)
        settings = {"data_dir": str(tmp_path), "vocab_size": 512, "seq_len": 32}
        settings |= {"core_bundle": "none"} | changes
        config = dataclasses.replace(Config(), **settings).derived()
        monkeypatch.setattr(report, "load_config", lambda: config)
        return report.make_report(config)

    return make


@pytest.fixture(params=[2**19, 1000])
def part_tokens(request, monkeypatch):
    monkeypatch.setattr(scan, "PART_TOKENS", request.param)


def text(rng, least=3, most=40):
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def question(rng):
    return " ".join(str(rng.randrange(10**6)) for _ in range(20))


def write_task(path, questions):
    path.write_text("".join(json.dumps({"q": q}) + "\n" for q in questions))
    return str(path)


# ---- Documents


@pytest.mark.usefixtures("part_tokens")
def test_figures_are_those_of_plain_counting(make, vocabulary):
    """About every third document repeats an earlier one of any shard; every other is edited later."""
    rng = random.Random(2)
    documents = [" red green stone", " stone green red"]  # the same tokens in another order
    while len(documents) < 140:
        words = (rng.choice(documents) if rng.random() < 0.7 else text(rng, 60, 90)).split(" ")
        if rng.random() < 0.5:
            words[rng.randrange(len(words))] = "other"
        documents.append(" ".join(words))
    splits = {"train": documents[:100], "validation": documents[100:]}
    train = [documents[:40], documents[40:41], documents[41:100]]
    source = make({"a": (train, splits["validation"])})["sources"]["a"]
    seen, keys = SeenKeys(), {}
    for split in SPLITS:
        texts, found = splits[split], source["splits"][split]
        lengths = np.array([1 + len(vocabulary.encode(t)) for t in texts])
        assert (found["documents"], found["tokens"]) == (len(texts), lengths.sum())
        assert found["bytes_per_token"] == sum(len(t.encode()) for t in texts) / lengths.sum()
        keys[split] = compute_keys(hash_documents(texts))
        is_equal = np.array([t in texts[:k] for k, t in enumerate(texts)])
        is_near = SeenKeys().add(keys[split])
        for name, repeated in (("duplicates", is_equal), ("near_duplicates", is_near)):
            tokens = lengths[repeated].sum()
            share = {"tokens": tokens, "token_share": tokens / lengths.sum()}
            assert found[name] == {"documents": repeated.sum()} | share and repeated.sum() >= 3
        for q in report.QUANTILES:
            place = max(0, math.ceil(q / 100 * len(lengths)) - 1)
            assert found["length_quantiles"][str(q)] == sorted(lengths)[place]
    copied = sum(t in splits["train"] for t in splits["validation"])
    seen.add(keys["train"])
    near = seen.find(keys["validation"]).sum()
    assert (source["validation_in_train"], source["validation_near_train"]) == (copied, near)
    assert near > copied > 3


def test_documents_of_two_sources_are_counted_on_both_sides(make):
    a = [["red", "red", "blue", "stone"]], ["green"]
    b = [["river", "green"]], ["red", "é"]
    found = make({"a": a, "b": b, "other": ([["stone red"]], ["blue red"])})
    assert found["in_two_sources"] == [{"sources": ["a", "b"], "documents": [3, 2]}]
    assert [w for w in found["warnings"] if "3 of a are in b, 2 of b in a" in w]


def test_of_a_large_source_every_nth_shard_is_compared(make, monkeypatch, tmp_path):
    """Counts and exact duplicates are of all of it."""
    task = write_task(tmp_path / "task.jsonl", [question(random.Random(3))])
    monkeypatch.setattr(scan, "MOST_DOCUMENTS", 4)
    for place, touched in ((0, 1), (1, 0), (2, 1), (3, 0)):
        shards = [["one two"], ["one two"], ["three four"], ["one two"], ["one two"]]
        shards[place] = [question(random.Random(3))]
        found = make({f"at {place}": (shards, ["blue"])}, core_bundle=task)
        (compared,), (source,) = found["compared"].values(), found["sources"].values()
        assert compared["tasks"]["task"]["rows_touched"] == touched
        assert compared["of_tokens"] == sum(source["splits"][split]["tokens"] for split in SPLITS)
        assert 0 < compared["tokens"] < compared["of_tokens"]


def test_a_run_of_words_is_found_wherever_a_long_document_is_cut(make, tmp_path, monkeypatch):
    """And its near-duplicates by its beginning."""
    monkeypatch.setattr(scan, "PART_TOKENS", 600)
    long = " ".join(f"w{i}" for i in range(900))
    task = write_task(tmp_path / "task.jsonl", [[long, "few words"], "short"])
    documents = ["red stone", long, "blue river", long + " end"]
    found = make({"a": ([documents], ["green"])}, core_bundle=task)
    shared = found["compared"]["a"]["tasks"]["task"]
    assert shared["grams_found"] == shared["grams"] == 888
    assert found["tasks"]["task"] == {"file": task, "rows": 2, "short": 1}
    assert found["sources"]["a"]["splits"]["train"]["near_duplicates"]["documents"] == 1


def test_sequences_are_the_shards_text_at_places_that_the_seed_decides(make, vocabulary, tmp_path):
    rng = random.Random(4)
    source = [[text(rng) for _ in range(n)] for n in (40, 1, 60)], ["red"]

    def draw(**changes):
        return make({"a": source}, **changes)["sources"]["a"]["splits"]["train"]["windows"]

    sequences = draw()
    assert sequences == draw() != draw(seed=1)
    assert len(sequences) == 10 == len({(w["shard"], w["token"]) for w in sequences})
    shards = ShardSet(tmp_path / "a")
    files = [info.file for info in shards.shards["train"]]
    for sequence in sequences:
        ids = shards.tokens("train", files.index(sequence["shard"]))[sequence["token"] :][:32]
        assert len(ids) == sequence["tokens"]
        assert sequence["text"] == vocabulary.decode(ids.tolist())


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
    source = [[CONTROL + "long " * 99, *train]], ["same", "long"]
    dropped = {"empty": 2, "near-duplicate": 7, "nul byte": 0}
    return make({"a": source}, dropped=dropped, core_bundle=str(tmp_path))


def test_warnings_name_the_tasks_and_what_that_means(overlapping):
    assert overlapping["warnings"] == [
        "a shares 13-grams with 8 of 9 questions of usmle. Results on it mean nothing.",
        "a shares 13-grams with 1 of 40 questions of quiz. Results on it may be 2.5 points too high.",
        "a: 1 of 2 validation documents are equal to one in train, or nearly so. The validation "
        "loss is too low.",
    ]
    overlapping["compared"]["a"]["of_tokens"] += 1
    overlapping["sources"]["a"]["splits"]["train"]["near_duplicates"]["token_share"] = 0.2
    warnings = report_text.list_warnings(overlapping)
    assert warnings[1] == (
        "a shares 13-grams with at least 1 of 40 questions of quiz. Results on it may be at least "
        "2.5 points too high."
    )
    assert warnings[3].endswith("make data NEAR_DUPLICATES=drop")


@pytest.mark.parametrize("copies", [1, 12])
def test_the_screen_has_80_columns_and_of_one_source_40_lines(overlapping, copies):
    source = overlapping["sources"]["a"]
    source["splits"]["train"]["windows"][0]["text"] = CONTROL + "x" * 999
    expected = [
        "Dropped rows of a: 9 of 43 (2 empty, 7 near-duplicate)",
        "Evaluation tasks: 3 compared, ",
        "  | \\x1b[31m é\\ttab\\nxxx",
    ]
    if copies > 1:
        for split in source["splits"].values():
            split.update(documents=10**8, tokens=10**11)
            split["length_quantiles"] = dict.fromkeys(split["length_quantiles"], 10**6)
        for k in range(copies):
            name = f"a-very-long-name-of-a-source-{k}"
            overlapping["sources"][name] = source
            overlapping["compared"][name] = overlapping["compared"]["a"] | {"of_tokens": 10**11}
        overlapping["warnings"] = report_text.list_warnings(overlapping)
        expected += ["a-very-long-n train", "Warnings (5 of ", "Compared with tasks and each other"]
    else:
        expected += ["2 with 13-grams that are in a source"]
    lines = list(report_text.render(overlapping))
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
    assert found["tasks"] == {} == found["compared"]["a"]["tasks"]
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
