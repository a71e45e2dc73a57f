"""train/data/shard_writer.py against the shards worked out document by document: the same bytes, whatever happened."""

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import random
import shutil
import tracemalloc
from functools import partial

import numpy as np
import pytest

from tests.killing import killed_at
from train.data import shard_writer, tokenizer
from train.data.manifest import SPLITS, DataError, Manifest, Seal, read_manifest
from train.data.shard_writer import EXAMPLES, ShardWriter
from train.data.shards import HEADER_BYTES
from train.data.sources.fetch import Files
from train.data.sources.pin import pin
from train.data.sources.rows import Cursor, Document, Dropped, documents
from train.data.sources.source import Source

SHARD_TOKENS = 800
REASONS = {None: "null", "": "empty", "a\0b": "nul"}


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


@pytest.fixture(scope="module")
def v(tmp_path_factory):
    texts = (row["text"] for file in rows() for row in file if row["text"])
    return tokenizer.train(texts, 300, tmp_path_factory.mktemp("vocabulary") / "tokenizer.json")


def source(folder, files, fraction=0.2, **keys):
    folder.mkdir()
    for k, content in enumerate(files):
        (folder / f"{k}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    declared = Source("papers", "files", fraction, files=(str(folder / "*.jsonl"),), **keys)
    return pin(declared, folder / "data")


@pytest.fixture
def papers(tmp_path):
    return source(tmp_path / "papers", rows())


def writer(p, v, folder):
    return ShardWriter(p, v, folder, SHARD_TOKENS, Files(p, folder))


def make(p, v, folder, limit=math.inf):
    """Make up to the limit, with what is missing made again first, as prepare does."""
    made = writer(p, v, folder)
    for seal in made.incomplete():
        made.remake(seal)
    for _ in made.make(limit):
        pass
    return made


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- The shards, once more


@dataclasses.dataclass
class Expected:
    """One of the shards of a seal: ids end to end."""

    ids: list[int] = dataclasses.field(default_factory=list)
    documents: int = 0
    text_bytes: int = 0


def expected(v, limit=math.inf):
    """Where each seal begins, what it dropped, and its shards, by the documented rule, a row at a time."""
    seals = [((0, 0), collections.Counter(), (Expected(), Expected()))]
    made = 0
    for f, file in enumerate(rows()):
        for r, row in enumerate(file):
            _, dropped, (train, validation) = seals[-1]
            text = row["text"]
            if text in REASONS:
                dropped[REASONS[text]] += 1
                continue
            draw = int.from_bytes(hashlib.sha256(row["id"].encode()).digest()[:8], "little") / 2**64
            shard = validation if draw < 0.2 else train
            shard.documents += 1
            before = len(train.ids)
            shard.ids += [v.end_of_text, *v.encode(text)]
            shard.text_bytes += len(text.encode())
            made += len(train.ids) - before
            if made >= limit:
                return seals
            if len(train.ids) >= SHARD_TOKENS:
                seals.append(((f, r + 1), collections.Counter(), (Expected(), Expected())))
    return seals


def check(folder, v, limit=math.inf):
    """The files and the manifest are those that were worked out."""
    manifest = read_manifest(folder)
    wanted = expected(v, limit)
    names = {"manifest.json"}
    numbers = collections.Counter()
    for seal, (begins, dropped, shards) in zip(manifest.seals, wanted, strict=True):
        assert (seal.begins, seal.dropped) == (begins, dropped)
        assert seal.documents == sum(shard.documents for shard in shards)
        for split, shard in zip(SPLITS, shards, strict=True):
            info = getattr(seal, split)
            if not shard.ids:
                assert info is None
                continue
            stem = f"{split}_{numbers[split]:05d}"
            numbers[split] += 1
            names.add(f"{stem}.bin")
            facts = (f"{stem}.bin", len(shard.ids), shard.documents, shard.text_bytes)
            assert (info.file, info.tokens, info.documents, info.text_bytes) == facts
            stored = np.fromfile(folder / info.file, "<u2")[HEADER_BYTES // 2 :]
            assert stored.tolist() == shard.ids
    assert manifest.documents == sum(seal.documents for seal in manifest.seals)
    assert {path.name for path in folder.iterdir()} == names


def shard_ends(v):
    """Training tokens at the end of each seal."""
    return list(itertools.accumulate(len(train.ids) for _, _, (train, _) in expected(v)))


# ---- Undisturbed


@pytest.mark.parametrize("batch_bytes", [1, 300, tokenizer.BATCH_BYTES])
def test_each_document_is_sealed_once_in_order_in_its_split_however_many_are_encoded_at_once(
    papers, v, tmp_path, monkeypatch, batch_bytes
):
    monkeypatch.setattr(tokenizer, "BATCH_BYTES", batch_bytes)
    places = []
    made = writer(papers, v, tmp_path / "made")
    made.progress = lambda tokens, at, text_bytes: places.append((tokens, at))
    assert len(list(made.make(math.inf))) == len(expected(v)) > 2
    check(tmp_path / "made", v)
    manifest = json.loads(made.path.read_text())
    facts = {"schema": 3, "source": "papers", "key": papers.key, "tokenizer_sha256": v.sha256}
    facts |= {"shard_tokens": SHARD_TOKENS, "end": "all", "next": [3, 0]}
    assert manifest.items() >= facts.items()
    count = sum(shard.documents for _, _, shards in expected(v) for shard in shards)
    assert len(places) == count and places == sorted(places)
    assert places[-1][0] == made.tokens() == shard_ends(v)[-1]


GOOD = [row for row in rows()[0] if row["text"] not in REASONS]


@pytest.mark.parametrize(
    ("files", "seals"),
    [
        (rows(), 8),
        # Nothing but dropped rows.
        ([[{"id": "x", "text": None}] * 7 + [{"id": "y", "text": ""}] * 150], 0),
        # Behind the last document, where none is left for a shard of its own.
        ([[*GOOD[:8], *[{"id": "x", "text": ""}] * 3]], 1),
    ],
)
def test_rows_left_out_are_counted_by_reason_and_the_first_of_each_are_named(
    v, tmp_path, files, seals
):
    p = source(tmp_path / "papers", files, 1e-12, max_dropped=1.0)
    bad = collections.defaultdict(list)
    for f, file in enumerate(files):
        for r, row in enumerate(file):
            if row["text"] in REASONS:
                bad[REASONS[row["text"]]].append((f"{tmp_path}/papers/{f}.jsonl", r))
    for _ in range(2):
        manifest = make(p, v, tmp_path / "made").manifest
        assert (len(manifest.seals), manifest.end) == (seals, "all")
        assert manifest.dropped == {reason: len(places) for reason, places in bad.items()}
        for reason, places in bad.items():
            named = [e for e in manifest.dropped_examples if e["reason"] == reason]
            assert [(e["file"], e["row"]) for e in named] == places[:EXAMPLES]
            assert all(e["what"] for e in named)


def test_a_million_null_rows_in_a_row_take_no_memory(papers, v, tmp_path, monkeypatch):
    def nulls(*_):
        yield from itertools.repeat(Dropped("null", Cursor(0, 0), "column 'text' is null"), 10**6)
        yield Document("last", "abcd", Cursor(0, 10**6))

    monkeypatch.setattr(shard_writer, "documents", nulls)
    tracemalloc.start()
    manifest = make(papers, v, tmp_path / "made").manifest
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert manifest.dropped == {"null": 10**6} and manifest.seals[-1].documents == 1
    assert peak < 2e6  # bytes


# ---- What was there before


def test_an_edited_manifest_without_a_hash_gets_none_and_loses_no_shard(papers, v, tmp_path):
    path = make(papers, v, tmp_path / "made").path
    manifest = json.loads(path.read_text()) | {"schema": 2}
    del manifest["hash"]
    path.write_text(json.dumps(manifest))
    before = sorted(path.parent.iterdir())
    writer(papers, v, path.parent)  # one that was not edited
    manifest["seals"][0]["train"]["tokens"] //= 2
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"says of train_00000\.bin what its header does not say"):
        writer(papers, v, path.parent)
    assert sorted(path.parent.iterdir()) == before


def test_a_manifest_that_is_none_is_refused_and_no_shard_is_deleted(papers, v, tmp_path):
    make(papers, v, tmp_path / "made").path.write_text("{}")
    before = content(tmp_path / "made")
    with pytest.raises(DataError, match=rf"{tmp_path}/made/manifest\.json: not a manifest "):
        writer(papers, v, tmp_path / "made")
    assert content(tmp_path / "made") == before


def test_shards_go_on_in_the_size_that_they_have_and_files_that_are_not_sealed_are_removed(
    papers, v, tmp_path
):
    folder = tmp_path / "made"
    make(papers, v, folder, 1000)
    for name in ("train_00077.bin", "validation_00000.bin.tmp", "manifest.json.tmp-0123abcd"):
        (folder / name).write_bytes(b"left over")
    again = ShardWriter(papers, v, folder, 900, Files(papers, tmp_path))
    check(folder, v, 1000)
    for _ in again.make(math.inf):
        pass
    check(folder, v)


# ---- Limits


@pytest.mark.parametrize("number", range(6))
def test_limits_raised_step_by_step_give_what_is_made_at_once(papers, v, tmp_path, number):
    """Some limits are the end of a shard, one token before or after it, or after the last document."""
    ends = shard_ends(v)
    folder = tmp_path / "made"
    for limit in [
        [1000, 2000],
        [1, 2, 3, 500, 501, 799, 800, 801],
        [ends[0] - 1, ends[0], ends[0] + 1],
        [ends[1], ends[2]],
        [ends[-2], ends[-1]],
        [ends[-1] + 1],
    ][number]:
        made = make(papers, v, folder, limit)
        check(folder, v, limit)
        assert made.manifest.end == ("limit" if limit <= ends[-1] else "all")
        before = content(folder)
        whole = [seal.train for seal in made.manifest.seals if seal.train.tokens >= SHARD_TOKENS]
        numbers = [(folder / info.file).stat().st_ino for info in whole]
        make(papers, v, folder, limit - 1)  # what is there is enough
        assert content(folder) == before
        make(papers, v, tmp_path / f"fresh {limit}", limit)
        assert content(tmp_path / f"fresh {limit}") == before
    make(papers, v, folder)
    make(papers, v, tmp_path / "once")
    assert content(folder) == content(tmp_path / "once")
    assert [(folder / info.file).stat().st_ino for info in whole] == numbers  # not written again


def test_a_limit_that_was_lowered_below_what_is_sealed_ends_there(papers, v, tmp_path):
    """As when a long preparation was stopped, and less will do."""
    first = writer(papers, v, tmp_path / "made")
    sealed = list(itertools.islice(first.make(math.inf), 2))
    manifest = make(papers, v, tmp_path / "made", 1000).manifest
    assert manifest.seals == sealed and manifest.end == "limit"
    make(papers, v, tmp_path / "made")
    check(tmp_path / "made", v)


# ---- Killed


def test_killed_at_any_write_behind_a_raised_limit_it_ends_with_the_same_bytes(papers, v, tmp_path):
    """And at every moment the manifest counts the rows that were dropped before its next row, once."""
    make(papers, v, tmp_path / "once")
    make(papers, v, tmp_path / "first", 1000)
    bad = [
        ((f, r), REASONS[row["text"]])
        for f, file in enumerate(rows())
        for r, row in enumerate(file)
        if row["text"] in REASONS
    ]
    for point in itertools.count():
        folder = tmp_path / f"killed {point}"
        shutil.copytree(tmp_path / "first", folder)
        reached = killed_at(point, partial(make, papers, v, folder))
        manifest: Manifest = read_manifest(folder)
        before = collections.Counter(reason for at, reason in bad if at < tuple(manifest.next))
        of_seals = [collections.Counter(seal.dropped) for seal in manifest.seals]
        if reached:
            assert manifest.dropped == before == sum(of_seals, collections.Counter())
        make(papers, v, folder)
        assert content(folder) == content(tmp_path / "once"), point
        if not reached:
            break
    assert point > 10


@pytest.fixture
def work(monkeypatch):
    """What is read from the source, and written as a shard."""
    done = {"begins": [], "read": [], "written": []}
    real = shard_writer.write_shard

    def read(p, files, at):
        done["begins"].append(at)
        for item in documents(p, files, at):
            done["read"].append(item)
            yield item

    def write(path, *rest):
        done["written"].append(path.name)
        return real(path, *rest)

    monkeypatch.setattr(shard_writer, "write_shard", write)
    monkeypatch.setattr(shard_writer, "documents", read)
    return done


def test_sealed_documents_are_neither_read_nor_written_again(papers, v, tmp_path, work):
    next(writer(papers, v, tmp_path / "made").make(math.inf))
    for places in work.values():
        places.clear()
    for _ in range(2):
        seals: list[Seal] = make(papers, v, tmp_path / "made").manifest.seals
    assert work["begins"] == [seals[1].begins] and seals[1].begins > (0, 0)
    assert sorted(work["written"]) == sorted(i.file for seal in seals[1:] for i in seal.infos())


# ---- Made again


def test_any_shard_that_was_deleted_is_made_again_to_the_byte(papers, v, tmp_path):
    made = make(papers, v, tmp_path / "made")
    before = content(tmp_path / "made")
    files = [[info.file for info in seal.infos()] for seal in made.manifest.seals]
    names = [name for seal in files for name in seal]
    for gone in [*([name] for name in names), names]:
        for name in gone:
            (tmp_path / "made" / name).unlink()
        again = writer(papers, v, tmp_path / "made")
        seals = zip(made.manifest.seals, files, strict=True)
        assert again.incomplete() == [seal for seal, names in seals if set(gone) & set(names)]
        make(papers, v, tmp_path / "made")
        assert content(tmp_path / "made") == before, gone


def test_making_a_shard_again_reads_no_more_than_its_stretch_and_leaves_the_others_alone(
    papers, v, tmp_path, monkeypatch, work
):
    monkeypatch.setattr(tokenizer, "BATCH_BYTES", 1)
    seal = make(papers, v, tmp_path / "made").manifest.seals[1]
    (tmp_path / "made" / seal.train.file).unlink()
    for places in work.values():
        places.clear()
    make(papers, v, tmp_path / "made")
    assert work["begins"] == [seal.begins] and work["written"] == [seal.train.file]
    two_batches_ahead = 4
    rows_of_seal = seal.documents + sum(seal.dropped.values())
    assert len(work["read"]) <= rows_of_seal + two_batches_ahead


@pytest.mark.parametrize("gone", SPLITS)
def test_a_shard_that_is_made_again_between_two_others_leaves_nothing_behind_for_the_next(
    papers, v, tmp_path, gone
):
    """As the producer does it: the making goes on behind."""
    made = writer(papers, v, tmp_path / "made")
    making = made.make(math.inf)
    sealed = list(itertools.islice(making, 2))
    seal = next(seal for seal in sealed if seal.validation)
    (tmp_path / "made" / getattr(seal, gone).file).unlink()
    made.remake(seal)
    for _ in making:
        pass
    check(tmp_path / "made", v)


@pytest.mark.parametrize("gone", SPLITS)
def test_a_shard_that_comes_out_otherwise_is_refused_and_not_left_there(
    papers, v, tmp_path, monkeypatch, gone
):
    seals = make(papers, v, tmp_path / "made").manifest.seals
    info = next(getattr(seal, gone) for seal in seals if seal.validation)
    folder = tmp_path / "made"
    (folder / info.file).unlink()
    before = content(folder)

    def read(*place):
        for item in documents(*place):
            is_dropped = isinstance(item, Dropped)
            yield item if is_dropped else dataclasses.replace(item, text=item.text[::-1])

    words = rf"{info.file} does not come out as it was .*delete {folder} .*make data"
    monkeypatch.setattr(shard_writer, "documents", read)
    with pytest.raises(DataError, match=words):
        make(papers, v, folder)
    assert content(folder) == before
