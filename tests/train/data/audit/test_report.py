"""train/data/audit/report.py and report_text.py: each figure against one that plain Python counts from the documents' ids."""

import collections
import dataclasses
import itertools
import json
import logging
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from settings import ROOT
from settings.config import Config
from train.data import prepare, tokenizer
from train.data.audit import report, report_text
from train.data.audit.report import Documents
from train.data.manifest import SPLITS, Seal, manifest_of
from train.data.shards import ShardSet, write_shard
from train.data.tokenizer import Vocabulary

SHARED = ROOT.parent / "shared" / "data"
CONTROL = "\x1b[31m é\ttab\n"
Texts = dict[str, list[list[str]]]  # split -> shards -> documents


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    rng = random.Random(3)
    words = ["red", "green", "blue", "river", "stone", "mountain", "valley", "\n"]
    texts = (" ".join(rng.choices(words, k=30)) for _ in range(99))
    return tokenizer.train(texts, 300, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def shard_set(folder: Path, v: Vocabulary, texts: Texts, **manifest: object) -> ShardSet:
    """A source of these documents, in these shards."""
    folder.mkdir(parents=True)
    entries: dict[str, list] = {split: [] for split in SPLITS}
    for split, shards in texts.items():
        for k, documents in enumerate(shards):
            ids = np.array([i for text in documents for i in (v.end_of_text, *v.encode(text))])
            info = write_shard(
                folder / f"{split}_{k:05d}.bin",
                ids,
                len(documents),
                sum(len(text.encode()) for text in documents),
                v.sha256,
                folder.name,
                v.size,
            )
            entries[split].append(info)
    count = sum(len(documents) for shards in texts.values() for documents in shards)
    seals = [
        Seal((k, 0), 0, {}, train, validation)
        for k, (train, validation) in enumerate(
            itertools.zip_longest(entries["train"], entries["validation"])
        )
    ]
    facts = json.loads(
        manifest_of(
            seals,
            source=folder.name,
            revision="local",
            key="local",
            shard_tokens=1000,
            tokenizer_sha256=v.sha256,
            end="all",
        )
    )
    (folder / "manifest.json").write_text(
        json.dumps(facts | {"documents": count, "dropped": {"empty": 0}} | manifest)
    )
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


@pytest.fixture(params=[2**20, 7])
def hashed_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "HASHED_AT_ONCE", request.param)


def made(
    c: Config, v: Vocabulary, sources: dict[str, ShardSet], monkeypatch: pytest.MonkeyPatch
) -> dict:
    """The report of these sources."""
    monkeypatch.setattr(prepare, "vocabulary", lambda c: v)
    monkeypatch.setattr(prepare, "open_sources", lambda c, v: sources)
    return report.make(c)


def read(v: Vocabulary, shards: ShardSet) -> dict[str, Documents]:
    return {split: report.read_documents(shards, split, v.end_of_text) for split in SPLITS}


# ---- Documents


@pytest.mark.usefixtures("hashed_at_once")
def test_equal_documents_and_no_others_have_equal_hashes(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    """Whatever is hashed at once, and where in a shard a document lies; permuted tokens are another document."""
    rng = random.Random(1)
    texts = some_texts(rng)
    texts["train"][1] = ["red green blue", "green red blue", "red", "red red", "red red red"]
    docs = read(vocabulary, shard_set(tmp_path / "a", vocabulary, texts))
    hashes = np.concatenate([docs[split].hashes for split in SPLITS])
    ids = [tuple(vocabulary.encode(t)) for split in SPLITS for t in flat(texts, split)]
    assert len(hashes) == len(ids)
    assert (
        len(set(hashes.tolist()))
        == len(set(ids))
        == len(set(zip(hashes.tolist(), ids, strict=True)))
        < len(ids)
    )
    assert np.concatenate([docs[s].lengths for s in SPLITS]).tolist() == [1 + len(i) for i in ids]


def test_no_order_and_no_length_of_tokens_hashes_as_another() -> None:
    documents = [
        (0, *tokens) for n in range(7) for tokens in itertools.product((1, 2, 3, 65535), repeat=n)
    ]
    hashes, lengths = report.hash_documents(
        np.array(list(itertools.chain(*documents)), dtype=np.uint16), 0
    )
    assert len(set(hashes.tolist())) == len(hashes) == len(documents) == 5461
    assert lengths.tolist() == list(map(len, documents))


@pytest.mark.usefixtures("hashed_at_once")
def test_figures_are_those_of_plain_counting(
    config: Config, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = some_texts(random.Random(2))
    source = made(
        config, vocabulary, {"a": shard_set(tmp_path / "a", vocabulary, texts)}, monkeypatch
    )["sources"]["a"]
    for split in SPLITS:
        documents, found = flat(texts, split), source["splits"][split]
        lengths = [1 + len(vocabulary.encode(t)) for t in documents]
        assert (found["documents"], found["tokens"]) == (len(documents), sum(lengths))
        assert found["bytes_per_token"] == sum(len(t.encode()) for t in documents) / sum(lengths)
        repeats = [k for k, t in enumerate(documents) if t in documents[:k]]
        assert found["duplicates"]["documents"] == len(repeats) > 3
        assert found["duplicates"]["token_share"] == sum(lengths[k] for k in repeats) / sum(lengths)
        most = max(collections.Counter(documents).values())
        worst = found["duplicates"]["worst"]
        assert worst["count"] == most
        assert worst["text"] == next(t for t in documents if documents.count(t) == most)[:80]
        for q in report.QUANTILES:
            assert (
                found["length_quantiles"][str(q)]
                == sorted(lengths)[max(0, math.ceil(q / 100 * len(lengths)) - 1)]
            )
    train = set(flat(texts, "train"))
    assert source["validation_in_train"] == sum(t in train for t in flat(texts, "validation")) > 3


def test_a_source_without_repetition_has_none(
    config: Config, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = shard_set(
        tmp_path / "a", vocabulary, {"train": [["red green"]], "validation": [["blue"]]}
    )
    found = made(config, vocabulary, {"a": shards}, monkeypatch)
    for split in SPLITS:
        assert found["sources"]["a"]["splits"][split]["duplicates"] == {
            "documents": 0,
            "tokens": 0,
            "token_share": 0,
            "worst": None,
        }
    assert found["sources"]["a"]["validation_in_train"] == 0
    assert found["warnings"] == [] == found["in_two_sources"]


def test_documents_of_two_sources_are_counted_on_both_sides(
    config: Config, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    a: Texts = {"train": [["red", "red", "blue", "stone"]], "validation": [["green"]]}
    b: Texts = {"train": [["river", "green"]], "validation": [["red", "é"]]}
    other: Texts = {"train": [["stone red"]], "validation": [["blue red"]]}
    sources = {
        name: shard_set(tmp_path / name, vocabulary, texts)
        for name, texts in (("a", a), ("b", b), ("other", other))
    }
    found = made(config, vocabulary, sources, monkeypatch)
    assert found["in_two_sources"] == [{"sources": ["a", "b"], "documents": [3, 2]}]
    assert [w for w in found["warnings"] if "3 of a are in b, 2 of b in a" in w]


def test_a_shard_whose_documents_are_not_those_of_its_header_is_refused(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    shards = shard_set(
        tmp_path / "a", vocabulary, {"train": [["red", "blue"]], "validation": [["green"]]}
    )
    with pytest.raises(report.DataError, match=r"train_00000\.bin.*2 documents"):
        report.read_documents(shards, "train", end_of_text=int(shards.tokens("train", 0)[1]))


# ---- Windows


def test_windows_are_the_shards_text_at_places_that_the_seed_decides(
    config: Config, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    shards = shard_set(tmp_path / "a", vocabulary, some_texts(random.Random(4)))
    windows = report.windows(config, vocabulary, "a", shards, "train")
    assert windows == report.windows(config, vocabulary, "a", shards, "train")
    assert windows != report.windows(
        dataclasses.replace(config, seed=1), vocabulary, "a", shards, "train"
    )
    assert len(windows) == 10 == len({(w["shard"], w["token"]) for w in windows})
    files = [info.file for info in shards.shards["train"]]
    for window in windows:
        k = files.index(window["shard"])
        ids = shards.tokens("train", k)[window["token"] : window["token"] + 32]
        assert len(ids) == window["tokens"] == min(32, shards.shards["train"][k].tokens)
        assert window["text"] == vocabulary.decode(ids.tolist())


def test_windows_reach_every_place_of_every_shard(
    config: Config, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "WINDOWS", 10**6)
    shards = shard_set(tmp_path / "a", vocabulary, some_texts(random.Random(4)))
    windows = report.windows(
        dataclasses.replace(config, seq_len=700), vocabulary, "a", shards, "train"
    )
    places = [
        (i.file, start)
        for i in shards.shards["train"]
        for start in range(max(1, i.tokens - 700 + 1))
    ]
    assert len(places) > 100
    assert [(w["shard"], w["token"]) for w in windows] == places


# ---- What is compared with tasks


@pytest.mark.parametrize("piece", [2**16, 50])
def test_all_tokens_are_compared_once_and_a_share_is_spread_evenly(
    tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(report, "PIECE", piece)
    monkeypatch.setattr(report, "SEAM", 0)
    monkeypatch.setattr(report, "SCANNED_AT_ONCE", 500)
    monkeypatch.setattr(report, "DOCUMENTS_AT_ONCE", 16)
    rng = random.Random(5)
    texts: Texts = {
        "train": [[text(rng, 3, 200) for _ in range(n)] for n in (90, 1, 50)],
        "validation": [[text(rng) for _ in range(30)]],
    }
    shards = shard_set(tmp_path / "a", vocabulary, texts)
    docs, end = read(vocabulary, shards), vocabulary.end_of_text
    everything = [
        int(i)
        for split in SPLITS
        for k in range(len(shards.shards[split]))
        for i in shards.tokens(split, k)
        if i != end
    ]
    taken = list(report.spread(shards, docs, end, 0))
    assert [int(i) for _, ids in taken for i in ids if i != end] == everything
    assert sum(tokens for tokens, _ in taken) == len(everything) + sum(
        map(len, (d.hashes for d in docs.values()))
    )
    assert len(taken) > 5 and all(ids[0] == end for _, ids in taken)

    limit = len(everything) // 4
    part = list(report.spread(shards, docs, end, limit))
    assert 0.7 * limit < sum(tokens for tokens, _ in part) < 1.3 * limit
    if piece == 2**16:  # whole documents: every fourth, from the first to the last
        ids = [int(i) for _, chunk in part for i in chunk]
        documents = [
            vocabulary.decode(list(run))
            for is_end, run in itertools.groupby(ids, lambda i: i == end)
            if not is_end
        ]
        every = flat(texts, "train") + flat(texts, "validation")
        share = limit / sum(shards.total(split, "tokens") for split in SPLITS)
        assert documents == [
            t for k, t in enumerate(every) if math.ceil((k + 1) * share) > math.ceil(k * share)
        ]
        assert documents[0] == every[0] and abs(len(documents) - share * len(every)) <= 1


def test_a_gram_is_found_wherever_a_long_document_is_cut(
    config: Config, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PIECE", 40)
    words = [f"w{i}" for i in range(300)]
    (tmp_path / "task.jsonl").write_text(json.dumps({"q": " ".join(words)}) + "\n")
    shards = shard_set(
        tmp_path / "a", vocabulary, {"train": [[" ".join(words)]], "validation": [["green"]]}
    )
    c = dataclasses.replace(config, core_bundle=str(tmp_path / "task.jsonl"))
    found = made(c, vocabulary, {"a": shards}, monkeypatch)["compared"]["a"]["tasks"]["task"]
    assert found["grams_found"] == found["grams"] == 288
    assert found["examples"] == [{"row": 1, "words": 300, "text": " ".join(words)}]


# ---- What is said


def overlapping(
    config: Config,
    folder: Path,
    v: Vocabulary,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int = 10**9,
) -> dict:
    """A source that holds 8 of the 9 questions of one task, 1 of the 40 of another and none of a third."""
    rng = random.Random(6)

    def question() -> str:
        return " ".join(str(rng.randrange(10**6)) for _ in range(20))

    tasks = {
        "exam": [question() for _ in range(9)],
        "quiz": [question() for _ in range(40)],
        "clean": [question() for _ in range(3)],
    }
    for name, questions in tasks.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"q": q}) + "\n" for q in questions)
        )
    train = [*tasks["exam"][1:], tasks["quiz"][7], *(text(rng) for _ in range(20)), "same", "same"]
    shards = shard_set(
        folder / "a",
        v,
        {"train": [train], "validation": [["same", CONTROL + "long " * 99]]},
        dropped={"empty": 2, "null": 7, "nul byte": 0},
        dropped_examples=[
            {"file": f"f{k}", "row": k, "reason": r, "what": ""}
            for k, r in enumerate(["empty"] * 2 + ["null"] * 7)
        ],
    )
    c = dataclasses.replace(config, core_bundle=str(folder))
    monkeypatch.setattr(report, "REPORT_TOKENS", tokens)
    return made(c, v, {"a": shards}, monkeypatch)


def test_warnings_name_the_tasks_touched_and_what_that_means(
    config: Config, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = overlapping(config, tmp_path, vocabulary, monkeypatch)
    assert found["warnings"] == [
        "a shares 13-grams with 8 of 9 questions of exam: results on it mean nothing",
        "a shares 13-grams with 1 of 40 questions of quiz: results on it may be 2.5 points too good",
        "a: 1 of 2 validation documents are in train too: its validation loss is too good",
    ]


def test_a_part_that_was_compared_says_so(
    config: Config, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = overlapping(config, tmp_path, vocabulary, monkeypatch, tokens=300)
    compared = found["compared"]["a"]
    assert 0 < compared["tokens"] < compared["of_tokens"]
    assert found["warnings"][0].startswith("a shares 13-grams with at least ")
    said = "\n".join(report_text.lines(found))
    assert f"compared {compared['tokens']:,} of {compared['of_tokens']:,} tokens" in said
    assert "evenly spread over its documents" in said


def test_the_text_has_every_figure_within_a_terminal_of_100_columns(
    config: Config, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = overlapping(config, tmp_path, vocabulary, monkeypatch)
    lines = list(report_text.lines(found))
    said = "\n".join(lines)
    assert max(map(len, lines)) <= 100
    assert all(ch.isprintable() for line in lines for ch in line)
    assert "\\x1b[31m é\\ttab\\n" in said
    assert "dropped: 9 of 42 documents read" in said
    assert "empty: 2; at f0 row 0, f1 row 1\n" in said
    assert "null: 7; at f2 row 2, f3 row 3, f4 row 4, f5 row 5, f6 row 6\n" in said
    assert "nul byte" not in said
    assert "shares nothing with: clean" in said
    for warning in found["warnings"]:
        assert warning in " ".join(said.split())


def test_without_tasks_it_says_how_to_give_some(
    config: Config, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = shard_set(
        tmp_path / "a", vocabulary, {"train": [["red green"]], "validation": [["blue"]]}
    )
    found = made(config, vocabulary, {"a": shards}, monkeypatch)
    assert found["compared"] == {} == found["tasks"]
    assert "make data-report CORE_BUNDLE=" in "\n".join(report_text.lines(found))


@pytest.mark.parametrize(
    ("sentence", "of", "said"),
    [
        (50_000_000, 650_000_000, "50.0M of 650.0M tokens"),
        (1_234, 56_789, "1,234 of 56,789 tokens"),
    ],
)
def test_amounts(sentence: int, of: int, said: str) -> None:
    assert report_text.amount(sentence, of) == said


# ---- The command


def run(
    c: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> tuple[int, str]:
    monkeypatch.setattr(Config, "load", classmethod(lambda cls: c))
    with caplog.at_level(logging.INFO):
        return report.main(), caplog.text


def test_the_command_writes_what_it_says(
    config: Config,
    tmp_path: Path,
    vocabulary: Vocabulary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = overlapping(config, tmp_path, vocabulary, monkeypatch)
    code, said = run(dataclasses.replace(config, core_bundle=str(tmp_path)), monkeypatch, caplog)
    assert code == 0 and str(tmp_path / "report.json") in said.splitlines()[-1]
    written = json.loads((tmp_path / "report.json").read_text())
    for of in (written, found):
        del of["compared"]["a"]["seconds"]
    assert written == json.loads(json.dumps(found))


def test_a_bad_setting_ends_with_64_and_bad_data_with_78(
    config: Config,
    tmp_path: Path,
    vocabulary: Vocabulary,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    absent = dataclasses.replace(config, core_bundle=str(tmp_path / "absent"))
    code, said = run(absent, monkeypatch, caplog)
    assert code == 64 and f"CORE_BUNDLE={tmp_path}/absent: there is no *.jsonl" in said
    code, said = run(
        dataclasses.replace(config, tokenizer=str(tmp_path / "no.json")), monkeypatch, caplog
    )
    assert code == 78 and "no.json: cannot be read" in said
    assert not (tmp_path / "report.json").exists()


# ---- Real text


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def grams_of(string: str) -> set[tuple[str, ...]]:
    words = "".join(ch for ch in string.lower() if ch.isalnum() or ch.isspace()).split()
    return {tuple(words[i : i + 13]) for i in range(len(words) - 12)}


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_rows_touched_on_real_text_are_those_of_plain_sets(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the MedQA rows as the usmle source renders them, and web pages, against MedQA and tasks of CORE."""
    v = tokenizer.load(SHARED / "tokenizers" / "gpt2" / "tokenizer.json")
    medqa = rows_of(SHARED / "medical" / "medqa_4options_test_even.jsonl")
    web = [row["text"] for row in rows_of(SHARED / "web" / "dclm_majority.jsonl")]
    texts = [
        f"Question: {r['question']}\nA. {r['options']['A']}\nAnswer: {r['answer']}"
        for r in medqa[::2]
    ] + web
    shards = shard_set(
        tmp_path / "usmle", v, {"train": [texts[::3], texts[1::3]], "validation": [texts[2::3]]}
    )
    tasks = tmp_path / "tasks"
    for name in ("medical", "eval/core_small"):
        shutil.copytree(SHARED / name, tasks / name)
    c = dataclasses.replace(config, core_bundle=str(tasks), vocab_size=50304)
    found = made(c, v, {"usmle": shards}, monkeypatch)
    read = set().union(*map(grams_of, texts))
    assert len(found["tasks"]) == 12
    for name, task in found["tasks"].items():
        rows = rows_of(Path(task["file"]))
        plain = [set().union(*map(grams_of, strings_in(row))) for row in rows]
        of = found["compared"]["usmle"]["tasks"][name]
        assert of["rows"] == len(rows) and task["short"] == sum(not grams for grams in plain)
        touched = sum(bool(grams & read) for grams in plain)
        assert touched <= of["rows_touched"] <= touched + task["short"]
        if not task["short"]:
            assert of["grams_found"] == len(set().union(*plain) & read)
        assert (touched > 318) == (name == "medqa_4options_test_even")
    assert found["warnings"][0].startswith("usmle shares 13-grams with ")


def strings_in(value: object) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for part in value for text in strings_in(part)]
    return []
