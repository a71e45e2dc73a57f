"""train/data/shard_writer.py against the shards worked out document by document, in bounded memory."""

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xxhash

from train.data import tokenizer
from train.data.document_index import read_index
from train.data.manifest import DataError, ShardInfo
from train.data.shard_writer import EXAMPLES, Maker
from train.data.shards import HEADER_BYTES
from train.data.sources.fetch import Files
from train.data.sources.pin import pin
from train.data.sources.rows import Cursor, Document, Dropped
from train.data.sources.source import Source

SHARD_TOKENS = 800


def rows():
    """Three files of rows in a small language; some give no text, the first ones and the last ones among them."""
    rng = random.Random(11)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(200)]
    texts = [" ".join(rng.choices(words, k=rng.randint(10, 60))) + " é\n" for _ in range(70)]
    for i in (0, 5, 6, 24, 25, 40, 41, 42, 43, 44, 68, 69):
        texts[i] = (None, "", "a\0b")[i % 3]
    texts[7] = "\x1b[31mred\r\n\u202eleft é日" + texts[7]
    made = [{"id": f"paper {i}", "text": text} for i, text in enumerate(texts)]
    return [made[:30], made[30:33], made[33:]]


REASONS = {None: "null", "": "empty", "a\0b": "nul"}


@pytest.fixture(scope="module")
def v(tmp_path_factory):
    texts = (row["text"] for file in rows() for row in file if row["text"])
    return tokenizer.train(texts, 300, tmp_path_factory.mktemp("vocabulary") / "tokenizer.json")


def source(folder, files, **keys):
    folder.mkdir()
    for k, content in enumerate(files):
        (folder / f"{k}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return pin(
        Source("papers", "files", 0.2, files=(str(folder / "*.jsonl"),), **keys), folder / "data"
    )


@pytest.fixture
def papers(tmp_path):
    return source(tmp_path / "papers", rows())


def maker(p, v, folder, **settings):
    return Maker(p, v, folder, SHARD_TOKENS, Files(p, folder), **settings)


def make(p, v, folder, limit=math.inf, **settings):
    """Make up to the limit, with what is missing made again first, as prepare does."""
    made = maker(p, v, folder, **settings)
    for k in made.absent():
        made.remake(k)
    for _ in made.make(limit):
        pass
    return made


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- The shards, once more


@dataclasses.dataclass
class Expected:
    """A seal as it must be."""

    begins: tuple[int, int]
    documents: int = 0
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ids: dict[str, list[int]] = dataclasses.field(
        default_factory=lambda: {"train": [], "validation": []}
    )
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    text_bytes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    index: dict[str, list[tuple]] = dataclasses.field(
        default_factory=lambda: {"train": [], "validation": []}
    )


def expected(v, limit=math.inf):
    """Seals by the documented rule, a row at a time."""
    seals, train = [Expected((0, 0))], 0
    for f, file in enumerate(rows()):
        for r, row in enumerate(file):
            seal, text = seals[-1], row["text"]
            if text in REASONS:
                seal.dropped[REASONS[text]] += 1
                continue
            draw = int.from_bytes(hashlib.sha256(row["id"].encode()).digest()[:8], "little") / 2**64
            split = "validation" if draw < 0.2 else "train"
            ids = [v.end_of_text, *v.encode(text)]
            text_hash = xxhash.xxh3_64_intdigest(text.encode())
            seal.index[split].append((f"{f}.jsonl", r, len(seal.ids[split]), text_hash))
            seal.ids[split] += ids
            seal.documents += 1
            seal.counts[split] += 1
            seal.text_bytes[split] += len(text.encode())
            train += len(ids) if split == "train" else 0
            if train >= limit:
                return seals
            if len(seal.ids["train"]) >= SHARD_TOKENS:
                seals.append(Expected((f, r + 1)))
    return seals


def check(folder, v, limit=math.inf):
    """The files and the manifest are those that were worked out."""
    manifest = json.loads((folder / "manifest.json").read_text())
    wanted, numbers = expected(v, limit), collections.Counter[str]()
    assert len(wanted) > (2 if math.isinf(limit) else 0)
    assert len(manifest["seals"]) == len(wanted)
    for seal, entry in zip(wanted, manifest["seals"], strict=True):
        assert (tuple(entry["begins"]), entry["documents"], entry["dropped"]) == (
            seal.begins,
            seal.documents,
            dict(seal.dropped),
        )
        for split in ("train", "validation"):
            if not seal.ids[split]:
                assert entry[split] is None
                continue
            assert entry[split]["file"] == f"{split}_{numbers[split]:05d}.bin"
            numbers[split] += 1
            stored = np.fromfile(folder / entry[split]["file"], "<u2")[HEADER_BYTES // 2 :]
            assert stored.tolist() == seal.ids[split]
            check_index(folder, ShardInfo(**entry[split]), seal.index[split])
            assert (
                entry[split]["documents"],
                entry[split]["text_bytes"],
                entry[split]["tokens"],
            ) == (seal.counts[split], seal.text_bytes[split], len(seal.ids[split]))
    assert manifest["documents"] == sum(seal.documents for seal in wanted)
    assert {path.name for path in folder.iterdir()} == {"manifest.json"} | {
        f"{split}_{k:05d}.{kind}"
        for split in numbers
        for k in range(numbers[split])
        for kind in ("bin", "index")
    }


def check_index(folder, info, wanted):
    """wanted: (file, row, first token, hash of the text) of each document."""
    index = read_index(folder, info)
    names = [Path(index.names[k]).name for k in index.file]
    columns = (names, index.row.tolist(), index.begin[:-1].tolist(), index.text_hash.tolist())
    assert list(zip(*columns, strict=True)) == wanted
    assert index.begin[-1] == info.tokens


# ---- Undisturbed


@pytest.mark.parametrize("batch_bytes", [1, 300, 5000, tokenizer.BATCH_BYTES])
def test_each_document_is_sealed_once_in_order_in_its_split_however_many_are_encoded_at_once(
    papers, v, tmp_path, monkeypatch, batch_bytes
):
    monkeypatch.setattr(tokenizer, "BATCH_BYTES", batch_bytes)
    made = make(papers, v, tmp_path / "made")
    check(tmp_path / "made", v)
    assert made.end == "all"
    manifest = json.loads(made.path.read_text())
    assert manifest["next"] == [3, 0] and manifest["end"] == "all"
    assert (
        manifest["source"],
        manifest["key"],
        manifest["tokenizer_sha256"],
        manifest["shard_tokens"],
    ) == ("papers", papers.key, v.sha256, SHARD_TOKENS)


def test_rows_left_out_are_counted_by_reason_and_the_first_of_each_are_named(papers, v, tmp_path):
    """Those behind the last document too."""
    manifest = json.loads(make(papers, v, tmp_path / "made").path.read_text())
    bad = [
        (f"{tmp_path}/papers/{f}.jsonl", r, REASONS[row["text"]])
        for f, file in enumerate(rows())
        for r, row in enumerate(file)
        if row["text"] in REASONS
    ]
    assert bad[0][1] == 0 and bad[-1][1] == len(rows()[2]) - 1
    assert manifest["dropped"] == dict(collections.Counter(reason for *_, reason in bad))
    named = [
        (example["file"], example["row"], example["reason"])
        for example in manifest["dropped_examples"]
    ]
    assert sorted(named) == sorted(
        entry
        for reason in REASONS.values()
        for entry in [b for b in bad if b[2] == reason][:EXAMPLES]
    )
    assert max(manifest["dropped"].values()) == EXAMPLES  # one more is tried below
    assert all(example["what"] for example in manifest["dropped_examples"])


def test_a_source_of_which_every_row_is_left_out_ends_with_no_shard_and_their_number(v, tmp_path):
    p = source(
        tmp_path / "nothing",
        [[{"id": "x", "text": None}] * 7 + [{"id": "y", "text": " "}] * 150],
        max_dropped=1.0,
    )
    for _ in range(2):
        made = make(p, v, tmp_path / "made")
        assert (made.seals, made.end, made.tokens()) == ([], "all", 0)
        assert json.loads(made.path.read_text())["dropped"] == {"null": 7, "empty": 150}
        assert len(made.dropped.examples) == 2 * EXAMPLES
        assert list(content(tmp_path / "made")) == ["manifest.json"]


def test_rows_left_out_behind_the_last_sealed_document_are_counted_once(v, tmp_path):
    """Where no document is left for a shard of its own."""
    some = [row for row in rows()[0] if row["text"] not in REASONS]
    ids, many = 0, 0
    while ids < SHARD_TOKENS:
        ids, many = ids + 1 + len(v.encode(some[many]["text"])), many + 1
    p = source(tmp_path / "few", [[*some[:many], *[{"id": "x", "text": ""}] * 3]])
    p = dataclasses.replace(p, source=dataclasses.replace(p.source, validation_fraction=1e-12))
    for _ in range(2):
        made = make(p, v, tmp_path / "made")
        assert [(seal.documents, seal.dropped) for seal in made.seals] == [(many, {})]
        assert made.dropped.counts == {"empty": 3} and made.end == "all"


def test_progress_is_told_the_training_tokens_and_the_place(papers, v, tmp_path):
    told = []
    made = maker(papers, v, tmp_path / "made")
    made.progress = lambda tokens, at, text_bytes: told.append((tokens, at))
    for _ in made.make(math.inf):
        pass
    assert [at for _, at in told] == [
        (f, r)
        for f, file in enumerate(rows())
        for r, row in enumerate(file)
        if row["text"] not in REASONS
    ]
    assert [tokens for tokens, _ in told] == sorted(tokens for tokens, _ in told)
    assert told[-1][0] == made.tokens() == sum(len(seal.ids["train"]) for seal in expected(v))


# ---- What was there before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "not a manifest ") for text in ("", "[]", "{}", "<html>", "null")),
        ('{"schema": 1, "shards": {}}', "has format 1; this version reads 2; "),
    ],
)
def test_a_manifest_that_is_none_is_refused_and_no_shard_is_deleted(
    papers, v, tmp_path, text, words
):
    make(papers, v, tmp_path / "made").path.write_text(text)
    before = content(tmp_path / "made")
    with pytest.raises(
        DataError, match=rf"{tmp_path}/made/manifest\.json: {words}.*delete .*make data"
    ):
        maker(papers, v, tmp_path / "made")
    assert content(tmp_path / "made") == before


def test_shards_go_on_in_the_size_that_they_have(papers, v, tmp_path):
    make(papers, v, tmp_path / "made", 1000)
    again = Maker(papers, v, tmp_path / "made", 900, Files(papers, tmp_path))
    assert again.shard_tokens == SHARD_TOKENS
    for _ in again.make(math.inf):
        pass
    make(papers, v, tmp_path / "once")
    assert content(tmp_path / "made") == content(tmp_path / "once")


def test_files_that_no_manifest_knows_are_removed(papers, v, tmp_path):
    make(papers, v, tmp_path / "made", 1000)
    before = content(tmp_path / "made")
    for name in (
        "train_00077.bin",
        "train_00077.index",
        "train_00000.index.tmp-01",
        "validation_00000.bin.tmp",
        "manifest.json.tmp-0123abcd",
    ):
        (tmp_path / "made" / name).write_bytes(b"left over")
    maker(papers, v, tmp_path / "made")
    assert content(tmp_path / "made") == before


# ---- Memory


def test_a_million_null_rows_in_a_row_take_no_memory(papers, v, tmp_path):
    def nulls(*_):
        yield from itertools.repeat(Dropped("null", Cursor(0, 0), "column 'text' is null"), 10**6)
        yield Document("last", "abcd", Cursor(0, 10**6))

    made = maker(papers, v, tmp_path / "made", read=nulls)
    tracemalloc.start()
    for _ in made.make(math.inf):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.dropped.counts == {"null": 10**6} and made.seals[-1].documents == 1
    assert peak < 2e6  # bytes
