"""train/data/audit/report.py, scan.py and report_text.py: each figure against one that plain Python counts from the documents' ids."""

import dataclasses
import itertools
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
from train.data.tokenizer import Vocabulary
from train.data.word_hashes import hash_documents

CONTROL = "\x1b[31m é\ttab\n"
Texts = dict[str, list[list[str]]]  # split -> shards -> documents


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    rng = random.Random(3)
    words = ["red", "green", "blue", "river", "stone", "mountain", "valley", "\n"]
    texts = (" ".join(rng.choices(words, k=30)) for _ in range(99))
    return tokenizer.train(texts, 300, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def shard_set(folder: Path, v: Vocabulary, texts: Texts) -> ShardSet:
    """A source of these documents, in these shards."""

    def shard(documents: list[str]) -> tuple[np.ndarray, int, int]:
        ids = np.array([i for text in documents for i in (v.end_of_text, *v.encode(text))])
        return ids, len(documents), sum(len(text.encode()) for text in documents)

    train, validation = (list(map(shard, texts[split])) for split in SPLITS)
    write_source(folder, train, validation, v.sha256, v.size, dropped={"empty": 0})
    return ShardSet(folder)


def text(rng: random.Random, least: int = 3, most: int = 40) -> str:
    return " ".join(
        rng.choices(["red", "green", "blue", "river", "stone", "é"], k=rng.randint(least, most))
    )


def some_texts(rng: random.Random) -> Texts:
    """Three training shards and one of validation; about every third document repeats an earlier one of any shard."""
    seen: list[str] = []

    def next_text() -> str:
        seen.append(rng.choice(seen) if seen and rng.random() < 0.35 else text(rng))
        return seen[-1]

    return {
        "train": [[next_text() for _ in range(n)] for n in (40, 1, 60)],
        "validation": [[next_text() for _ in range(30)]],
    }


def flat(texts: Texts, split: str) -> list[str]:
    return list(itertools.chain(*texts[split]))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return dataclasses.replace(
        Config(), data_dir=str(tmp_path), vocab_size=300, seq_len=32
    ).derived()


@pytest.fixture(params=[2**19, 50])
def part_tokens(request, monkeypatch):
    monkeypatch.setattr(scan, "PART_TOKENS", request.param)


@pytest.fixture
def make(config, vocabulary, monkeypatch):
    """Makes the report of these sources."""

    def make(sources, v=vocabulary, **changes):
        monkeypatch.setattr(prepare, "vocabulary", lambda c: v)
        monkeypatch.setattr(prepare, "open_sources", lambda c, v: sources)
        changes = {"core_bundle": "none"} | changes
        return report.make_report(dataclasses.replace(config, **changes))

    return make


@pytest.fixture
def shards_of(tmp_path, vocabulary):
    """Makes a source of texts."""
    return lambda texts, name="a": shard_set(tmp_path / name, vocabulary, texts)


# ---- Documents


@pytest.mark.usefixtures("part_tokens")
def test_figures_are_those_of_plain_counting(make, shards_of, vocabulary):
    texts = some_texts(random.Random(2))
    texts["train"][2] += [
        " red green stone",
        " stone green red",
    ]  # the same tokens in another order
    source = make({"a": shards_of(texts)})["sources"]["a"]
    for split in SPLITS:
        documents, found = flat(texts, split), source["splits"][split]
        lengths = [1 + len(vocabulary.encode(t)) for t in documents]
        assert (found["documents"], found["tokens"]) == (len(documents), sum(lengths))
        assert found["bytes_per_token"] == sum(len(t.encode()) for t in documents) / sum(lengths)
        repeats = [k for k, t in enumerate(documents) if t in documents[:k]]
        assert found["duplicates"]["documents"] == len(repeats) > 3
        assert found["duplicates"]["token_share"] == sum(lengths[k] for k in repeats) / sum(lengths)
        for q in report.QUANTILES:
            assert (
                found["length_quantiles"][str(q)]
                == sorted(lengths)[max(0, math.ceil(q / 100 * len(lengths)) - 1)]
            )
    train = set(flat(texts, "train"))
    assert source["validation_in_train"] == sum(t in train for t in flat(texts, "validation")) > 3


def test_documents_of_two_sources_are_counted_on_both_sides(make, shards_of):
    a = {"train": [["red", "red", "blue", "stone"]], "validation": [["green"]]}
    b = {"train": [["river", "green"]], "validation": [["red", "é"]]}
    other = {"train": [["stone red"]], "validation": [["blue red"]]}
    texts = {"a": a, "b": b, "other": other}
    found = make({name: shards_of(texts[name], name) for name in texts})
    assert found["in_two_sources"] == [{"sources": ["a", "b"], "documents": [3, 2]}]
    assert [w for w in found["warnings"] if "3 of a are in b, 2 of b in a" in w]


def edited(rng, document):
    words = document.split()
    words[rng.randrange(len(words))] = "other"
    return " ".join(words)


@pytest.fixture
def near_texts():
    """Half of the documents are edited copies of earlier ones."""
    rng = random.Random(8)
    documents = [text(rng, 60, 90) for _ in range(40)]
    documents += [edited(rng, rng.choice(documents)) for _ in range(40)]
    return {"train": [documents[:30], documents[30:70]], "validation": [documents[70:]]}


@pytest.mark.usefixtures("part_tokens")
def test_near_duplicates_are_counted_as_in_preparation(make, shards_of, vocabulary, near_texts):
    source = make({"a": shards_of(near_texts)})["sources"]["a"]
    keys = {split: compute_keys(hash_documents(flat(near_texts, split))) for split in SPLITS}
    for split in SPLITS:
        documents = flat(near_texts, split)
        lengths = np.array([1 + len(vocabulary.encode(t)) for t in documents])
        is_near = SeenKeys().add(keys[split])
        assert source["splits"][split]["near_duplicates"] == {
            "documents": is_near.sum(),
            "tokens": lengths[is_near].sum(),
            "token_share": lengths[is_near].sum() / lengths.sum(),
        }
    assert source["splits"]["train"]["near_duplicates"]["documents"] > 15
    seen = SeenKeys()
    seen.add(keys["train"])
    assert source["validation_near_train"] == seen.find(keys["validation"]).sum() > 5


def test_of_a_large_source_every_nth_shard_is_compared(make, shards_of, monkeypatch, tmp_path):
    """Counts and exact duplicates are of all of it."""
    rng = random.Random(3)
    question = " ".join(str(rng.randrange(10**6)) for _ in range(20))
    (tmp_path / "task.jsonl").write_text(json.dumps([question]))
    monkeypatch.setattr(scan, "MOST_DOCUMENTS", 4)
    for place, touched in ((0, 1), (1, 0), (2, 1), (3, 0)):
        shards = [["one two"], ["one two"], ["three four"], ["one two"], ["one two"]]
        shards[place] = [question]
        source = shards_of({"train": shards, "validation": [["blue"]]}, f"at {place}")
        sources = {"a": source}
        found = make(sources, core_bundle=str(tmp_path / "task.jsonl"))
        compared = found["compared"]["a"]
        assert compared["tasks"]["task"]["rows_touched"] == touched
        assert compared["of_tokens"] == sum(source.total(split, "tokens") for split in SPLITS)
        assert 0 < compared["tokens"] < compared["of_tokens"]


def test_a_run_of_words_is_found_wherever_a_long_document_is_cut(
    make, shards_of, tmp_path, monkeypatch
):
    """And its near-duplicates by its beginning."""
    monkeypatch.setattr(scan, "PART_TOKENS", 600)
    words = [f"w{i}" for i in range(900)]
    (tmp_path / "task.jsonl").write_text(json.dumps({"q": " ".join(words)}) + "\n")
    documents = ["red stone", " ".join(words), "blue river", " ".join(words) + " end"]
    shards = shards_of({"train": [documents], "validation": [["green"]]})
    found = make({"a": shards}, core_bundle=str(tmp_path / "task.jsonl"))
    shared = found["compared"]["a"]["tasks"]["task"]
    assert shared["grams_found"] == shared["grams"] == 888
    assert shared["examples"] == [{"row": 1, "words": 900, "text": " ".join(words)}]
    assert found["sources"]["a"]["splits"]["train"]["near_duplicates"]["documents"] == 1


# ---- Sequences


def test_sequences_are_the_shards_text_at_places_that_the_seed_decides(
    config, make, shards_of, vocabulary
):
    shards = shards_of(some_texts(random.Random(4)))

    def draw(**changes):
        return make({"a": shards}, **changes)["sources"]["a"]["splits"]["train"]["windows"]

    sequences = draw()
    assert sequences == draw() != draw(seed=1)
    assert len(sequences) == 10 == len({(w["shard"], w["token"]) for w in sequences})
    files = [info.file for info in shards.shards["train"]]
    for sequence in sequences:
        k = files.index(sequence["shard"])
        ids = shards.tokens("train", k)[sequence["token"] :][:32]
        assert len(ids) == sequence["tokens"]
        assert sequence["text"] == vocabulary.decode(ids.tolist())


# ---- The screen


@pytest.fixture
def overlapping(config, make, shards_of, tmp_path):
    """Reports a source that has 8 of the 9 questions of one task, 1 of 40 of another and none of a third."""
    rng = random.Random(6)

    def question():
        return " ".join(str(rng.randrange(10**6)) for _ in range(20))

    tasks = {
        "quiz": [question() for _ in range(40)],
        "usmle": [question() for _ in range(9)],
        "clean": [question() for _ in range(3)],
    }
    for name, questions in tasks.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"q": q}) + "\n" for q in questions)
        )
    train = [*tasks["usmle"][1:], tasks["quiz"][7], *(text(rng) for _ in range(20)), "same", "same"]
    texts = {"train": [[CONTROL + "long " * 99, *train]], "validation": [["same", "long"]]}
    shards = shards_of(texts)
    shards.manifest["dropped"] = {"empty": 2, "near-duplicate": 7, "nul byte": 0}
    return make({"a": shards}, core_bundle=str(tmp_path))


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
    if copies > 1:
        for split in source["splits"].values():
            split.update(documents=10**8, tokens=10**11)
            split["length_quantiles"] = dict.fromkeys(split["length_quantiles"], 10**6)
        for k in range(copies):
            name = f"a-very-long-name-of-a-source-{k}"
            overlapping["sources"][name] = source
            overlapping["compared"][name] = overlapping["compared"]["a"] | {"of_tokens": 10**11}
        overlapping["warnings"] = report_text.list_warnings(overlapping)
    lines = list(report_text.render(overlapping))
    assert max(map(len, lines)) <= 80 and (copies > 1 or len(lines) < 40)
    assert all(ch.isprintable() for line in lines for ch in line)
    screen = "\n".join(lines)
    assert "Dropped rows of a: 9 of 43 (2 empty, 7 near-duplicate)" in screen
    assert "Evaluation tasks: 3 compared, " in screen
    assert "  | \\x1b[31m é\\ttab\\nxxx" in screen
    if copies > 1:
        assert "a-very-long-n train" in screen and "Warnings (5 of " in screen
        assert "Compared with tasks and each other: " in screen
    else:
        assert "2 with 13-grams that are in a source" in screen
        for warning in overlapping["warnings"]:
            assert warning in " ".join(screen.split())


def test_without_tasks_the_screen_says_how_to_give_some(make, shards_of):
    found = make({"a": shards_of({"train": [["red green"]], "validation": [["blue"]]})})
    assert found["tasks"] == {} == found["compared"]["a"]["tasks"]
    assert "make data-report CORE_BUNDLE=" in "\n".join(report_text.render(found))


# ---- The command


def run(c, monkeypatch, caplog):
    monkeypatch.setattr(Config, "load", classmethod(lambda cls: c))
    with caplog.at_level(logging.INFO):
        return report.main(), caplog.text


def test_the_command_writes_what_it_says(config, tmp_path, overlapping, monkeypatch, caplog):
    code, said = run(dataclasses.replace(config, core_bundle=str(tmp_path)), monkeypatch, caplog)
    assert code == 0 and str(tmp_path / "report.json") in said.splitlines()[-1]
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == json.loads(json.dumps(overlapping))


def test_a_bad_setting_ends_with_64_and_bad_data_with_78(config, tmp_path, monkeypatch, caplog):
    absent = dataclasses.replace(config, core_bundle=str(tmp_path / "absent"))
    code, said = run(absent, monkeypatch, caplog)
    assert code == 64 and f"CORE_BUNDLE={tmp_path}/absent: There is no *.jsonl" in said
    none = dataclasses.replace(config, tokenizer=str(tmp_path / "no.json"), core_bundle="none")
    code, said = run(none, monkeypatch, caplog)
    assert code == 78 and "no.json: cannot be read" in said
    assert not (tmp_path / "report.json").exists()


# ---- Real text
