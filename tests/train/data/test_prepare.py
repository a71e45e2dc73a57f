"""train/data/prepare.py: the right sources to the right limit, by one tokenizer; what streams, and what is refused."""

import dataclasses
import itertools
import json
import logging
import random
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from settings.config import Config
from train.data import data_paths, prepare, shard_writer
from train.data.manifest import SPLITS, DataError, hash_content
from train.data.sources import pin
from train.data.sources.source import is_validation

EMPTY = (5, 41)  # numbers of the documents without text


class Paper(NamedTuple):
    name: str
    text: str


def documents(count=60, seed=11):
    """Texts of different lengths in a small language, the same at every call."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(200)]
    texts = [" ".join(rng.choices(words, k=rng.randint(10, 60))) + " é\n" for _ in range(count)]
    return [Paper(f"paper {i}", "" if i in EMPTY else text) for i, text in enumerate(texts)]


def lines(papers):
    return "".join(
        json.dumps({"id": paper.name, "text": paper.text or None}) + "\n" for paper in papers
    )


def declare(c, name, **keys):
    """Write sources/NAME.toml."""
    sources_of(c).mkdir(exist_ok=True)
    text = "".join(
        f"{key} = {json.dumps(value)}\n"
        for key, value in ({"validation_fraction": 0.2} | keys).items()
    )
    (sources_of(c) / f"{name}.toml").write_text(text)


def declare_papers(c, name, seed=11, **keys):
    """A source of documents() in two local files."""
    folder = Path(c.data_dir).parent / name
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(documents(seed=seed)[:35]))
    (folder / "b.jsonl").write_text(lines(documents(seed=seed)[35:]))
    declare(c, name, files=[str(folder / "*.jsonl")], **keys)


def sources_of(c):
    """The folder that declares sources in these tests: what is in DATA_DIR may be deleted."""
    return Path(c.data_dir).parent / "sources"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A mixture of one local source; shards are of about 1,000 tokens of its 6,400."""
    monkeypatch.setattr(data_paths, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(data_paths, "source_folders", lambda c: [tmp_path / "sources"])
    c = dataclasses.replace(
        Config(),
        data_mix="papers:1",
        data_dir=str(tmp_path / "data"),
        vocab_size=300,
        seq_len=32,
        batch_tokens=512,
        micro_batch_size=4,
        train_tokens=10240,
        warmup_tokens=1024,
    ).derived()
    declare_papers(c, "papers", prompt="the")
    return c


REVISION = "0123456789" * 4


def declare_hub(c, name, seed=12):
    """A source on the hub, with its pin and its one file here, as if they had been fetched: no network is asked."""
    declare(c, name, repository=f"someone/{name}")
    content = lines(documents(seed=seed)).encode()
    folder = Path(c.data_dir) / name
    path = folder / "downloads" / REVISION[:12] / "train.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    s = prepare.source_of(c, name)
    file = pin.File("train.jsonl", len(content), pin.digest_of(path, "sha256"))
    pin.write_whole(pin.pin_path(s, folder), pin.text_of(pin.Pinned(s, REVISION, (file,))).encode())


@pytest.fixture
def web(config):
    """Of papers and of a source on the hub, with a tokenizer that is there."""
    prepare.prepare(config)
    path = next(Path(config.data_dir).rglob("tokenizer.json")).rename(
        sources_of(config) / "tokenizer.json"
    )
    shutil.rmtree(config.data_dir)
    c = dataclasses.replace(
        config, data_mix="web:3,papers:1", tokenizer=str(path), train_tokens=4000
    )
    declare_hub(c, "web")
    return c


def opened(c, name="papers"):
    return prepare.open_sources(c, prepare.vocabulary(c))[name]


def content(c):
    """Every file below DATA_DIR but the locks."""
    folder = Path(c.data_dir)
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def stored_texts(c, split, name="papers"):
    """The documents of all shards, decoded."""
    v, shards = prepare.vocabulary(c), opened(c, name)
    texts = []
    for k in range(len(shards.shards[split])):
        ids = shards.tokens(split, k).tolist()
        assert ids[0] == v.end_of_text
        ends = [i for i, token in enumerate(ids) if token == v.end_of_text] + [len(ids)]
        texts += [v.decode(ids[a + 1 : b]) for a, b in itertools.pairwise(ends)]
    return texts


def settings(monkeypatch, c):
    """The same in the environment."""
    names = "DATA_MIX DATA_DIR VOCAB_SIZE TOKENIZER TRAIN_TOKENS WARMUP_TOKENS SEQ_LEN BATCH_TOKENS"
    for name in (*names.split(), "MICRO_BATCH_SIZE"):
        monkeypatch.setenv(name, str(getattr(c, name.lower())))


@pytest.mark.fault(28)
def test_a_mixture_is_prepared_by_source_with_one_tokenizer(config, caplog):
    caplog.set_level(logging.INFO)
    declare_papers(config, "notes", seed=13, validation_fraction=0.3)
    c = dataclasses.replace(config, data_mix="papers:3,notes:1")
    prepare.prepare(c)
    v = prepare.vocabulary(c)
    assert list(prepare.open_sources(c, v)) == ["papers", "notes"] and v.size == 300
    for name, seed in (("papers", 11), ("notes", 13)):
        source, shards = prepare.source_of(c, name), opened(c, name)
        key = prepare.pinned_of(c, name).key
        assert shards.folder == Path(c.data_dir) / name / key / v.sha256[:12]
        for split in SPLITS:
            expected = [
                d.text
                for d in documents(seed=seed)
                if d.text and is_validation(source, d.name) == (split == "validation")
            ]
            assert len(expected) > 5 and stored_texts(c, split, name) == expected
        folder = Path(config.data_dir).parent / name
        for line in (
            f"  dropped: {folder}/a.jsonl, row 6: column 'text' is null",
            f"  dropped: {folder}/b.jsonl, row 7: column 'text' is null",
        ):
            assert line in caplog.messages
        assert f"source {name}: 58 documents" in caplog.text
    assert caplog.text.count("rows dropped: 2 null") == 2


def test_sources_on_the_hub_are_made_up_to_the_horizon_and_local_ones_whole(web):
    longest = 200
    for total in (2400, 4000):
        c = dataclasses.replace(web, train_tokens=total)
        declare_hub(c, "web")  # its file, too, which is deleted once it is read
        prepare.prepare(c, whole=True)
        assert 0.75 * total <= opened(c, "web").total("train", "tokens") < 0.75 * total + longest
        assert opened(c, "papers").manifest.end == "all"
        assert not list(Path(web.data_dir).rglob("train.jsonl"))  # of which the rest is of no use
    more = dataclasses.replace(web, train_tokens=6000)
    words = r"web/.*: holds [\d,]+ training tokens and 4,500 are asked for; run: make data"
    with pytest.raises(DataError, match=words):
        opened(more, "web")


def test_what_is_there_is_left_alone(config, monkeypatch):
    prepare.prepare(config)
    before = content(config)
    for module, name in (
        (shard_writer, "write_shard"),
        (shard_writer, "write_whole"),
        (prepare, "train_tokenizer"),
        (pin, "write_whole"),
        (prepare, "documents"),
        (pin, "digest_of"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("nothing was to be made"))
    prepare.prepare(config)
    prepare.prepare(config, whole=True)
    assert content(config) == before


def test_the_tokenizer_sees_training_text_only_by_weight(config, monkeypatch):
    path = Path(config.data_dir).parent / "x.jsonl"
    path.write_text(lines([Paper(f"f{i}", "x" * 100) for i in range(1000) if i not in EMPTY]))
    declare(config, "long", files=[str(path)])
    monkeypatch.setattr(prepare, "TOKENIZER_TEXT_BYTES", 8000)
    c = dataclasses.replace(config, data_mix="papers:1,long:3")
    for name in c.mixture:
        pin.pin(prepare.source_of(c, name), Path(c.data_dir) / name)
    texts = list(prepare.tokenizer_text(c))
    source = prepare.source_of(c, "papers")
    train = [d.text for d in documents() if d.text and not is_validation(source, d.name)]
    papers = [text for text in texts if "x" not in text]
    assert papers == train[: len(papers)]
    # The document that reaches the share is whole.
    assert sum(map(len, papers[:-1])) < 2000 <= sum(map(len, papers))
    assert texts[len(papers) :] == ["x" * 100] * 60


def test_bits_per_byte_of_compressors_are_those_of_their_commands(config, monkeypatch):
    path = Path(config.data_dir).parent / "many.jsonl"
    path.write_text(lines(documents(2000)))
    declare(config, "many", files=[str(path)], compressors=True)
    c = dataclasses.replace(config, data_mix="many:1")
    for module in (data_paths, prepare):
        monkeypatch.setattr(module, "token_limit", lambda c, s: 2000)
    prepare.prepare(c)
    source = prepare.source_of(c, "many")
    held_out = "".join(d.text for d in documents(2000) if is_validation(source, d.name)).encode()
    found = opened(c, "many").manifest.compressed_bpb
    assert list(found) == ["gzip -9", "xz -9"]
    for name, bpb in found.items():
        if shutil.which(name.split()[0]):
            done = subprocess.run(name.split(), input=held_out, capture_output=True, check=True)
            assert bpb == pytest.approx(8 * len(done.stdout) / len(held_out), rel=0.01)


# ---- What is made, and what streams


def streams(c):
    """With DATA_STREAM=auto, 0 and 1."""
    v = prepare.vocabulary(c)
    return [
        prepare.streams(dataclasses.replace(c, data_stream=how), v) for how in ("auto", "0", "1")
    ]


def finished(c):
    return [name for name in c.mixture if prepare.is_finished(c, name, prepare.vocabulary(c))]


def test_what_is_on_the_hub_streams_until_its_limit_is_reached_and_every_file_is_there(
    web,
):
    pin.pin(prepare.source_of(web, "papers"), Path(web.data_dir) / "papers")
    local = dataclasses.replace(web, data_mix="papers:1")
    assert (streams(web), streams(local)) == ([True, False, True], [False, False, True])
    prepare.prepare(local)
    assert finished(web) == ["papers"]
    assert (streams(web), streams(local)) == ([True, False, True], [False] * 3)
    prepare.prepare(web, whole=True)
    assert finished(web) == ["web", "papers"] and streams(web) == [False] * 3
    assert finished(dataclasses.replace(web, train_tokens=6000)) == ["papers"]
    folder = opened(web, "web").folder
    for name in ("train_00001.bin", "validation_00000.bin"):
        (folder / name).rename(folder / "away")
        assert finished(web) == ["papers"]
        (folder / "away").rename(folder / name)
    path = folder / "manifest.json"
    content = json.loads(path.read_text()) | {"end": None}
    path.write_text(json.dumps(content | {"hash": hash_content(content)}))
    assert finished(web) == ["papers"]
    path.write_text("<html>")  # opening it says what is wrong
    assert finished(web) == ["web", "papers"]


def test_other_nodes_than_the_first_make_nothing_and_ask_no_hub(web, monkeypatch):
    shutil.rmtree(web.data_dir)
    other = dataclasses.replace(web, nodes=2, node_rank=1, master_addr="a")
    for name in ("pin", "vocabulary", "make_source", "source_of"):
        monkeypatch.setattr(prepare, name, lambda *_, **__: pytest.fail("not the first node"))
    for whole in (False, True):
        prepare.prepare(other, whole=whole)
    assert content(other) == {}


@pytest.mark.parametrize(("argv", "made"), [([], set()), (["data"], {"web", "papers"})])
def test_make_train_leaves_to_the_stream_what_make_data_makes(
    web,
    monkeypatch,
    caplog,
    argv,
    made,
):
    settings(monkeypatch, web)
    caplog.set_level(logging.INFO)
    assert prepare.main(argv) == 0
    assert {path.parts[-4] for path in Path(web.data_dir).rglob("train_*.bin")} == made
    assert ("web, papers will be streamed while the run trains" in caplog.text) is not made


def test_a_run_that_streams_has_not_begun_until_each_source_has_both_splits(web):
    prepare.prepare(web)  # the pins
    v = prepare.vocabulary(web)
    assert prepare.not_begun(web, v, {}) == "web"
    sealed = []
    writer = prepare.maker_of(web, "web", v)
    for seal in writer.make(3000):
        sealed.append(seal)
        validated = sum(seal.validation is not None for seal in sealed)
        assert prepare.not_begun(web, v, {}) == ("papers" if validated else "web")
        more = prepare.not_begun(web, v, {"web": validated + 1})
        assert more == ("papers" if writer.manifest.end else "web")
    assert len(sealed) > 2
    prepare.prepare(dataclasses.replace(web, data_mix="papers:1"))
    assert prepare.not_begun(web, v, {}) == ""


@pytest.mark.parametrize(
    ("windows", "outcome"), [(2501, ""), (2499, "warned"), (626, "warned"), (624, "refused")]
)
def test_text_that_is_repeated_often_is_warned_of_and_then_refused(
    caplog, config, windows, outcome
):
    """Beyond 4 times, and beyond 16 if its max_epochs does not allow it; of a run that has begun it is late for that."""
    declare(config, "notes", files=["x.jsonl"])
    declare(config, "tests", files=["x.jsonl"], max_epochs="unlimited")
    mix = {"data_mix": "papers:1,notes:1,tests:1", "train_tokens": 3_000_000}
    c = dataclasses.replace(config, seq_len=100, batch_tokens=1000, **mix)

    def refusal(is_resumed=False, ended=True):
        shards = cast(Any, SimpleNamespace(ended=ended, windows=lambda *_: [windows]))
        try:
            prepare.refuse_repetition(c, dict.fromkeys(c.mixture, shards), is_resumed)
        except DataError as error:
            return [line.split()[0] for line in str(error).splitlines()]
        return []

    assert refusal() == (["papers", "notes"] if outcome == "refused" else [])
    assert caplog.text.count("is repeated") == {"": 0, "warned": 3, "refused": 1}[outcome]
    assert refusal(is_resumed=True) == refusal(ended=False) == []


def test_a_run_that_began_without_near_duplicates_keeps_its_shards_and_gets_no_others(config):
    """NEAR_DUPLICATES=drop was a setting once; its shards lie in a folder of their own."""
    c = dataclasses.replace(config, runs_dir=str(Path(config.data_dir).parent / "runs"))
    prepare.prepare(c)
    folder = opened(c).folder
    older = folder.parent.with_name(f"{folder.parent.name}-without-near-duplicates") / folder.name
    folder.parent.rename(older.parent)
    stored = {"settings": {"NEAR_DUPLICATES": "drop"}}
    run = Path(c.run_folder)
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(stored))
    before = content(c)
    prepare.prepare(c)
    assert opened(c).folder == older and content(c) == before
    next(older.glob("train_*.bin")).unlink()
    with pytest.raises(DataError, match=rf"{older}: has not all shards, and run .*another RUN_N"):
        prepare.prepare(c)
