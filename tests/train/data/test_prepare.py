"""train/data/prepare.py: the right sources to the right limit, by one tokenizer, and what is there left alone."""

import dataclasses
import itertools
import json
import logging
import math
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from settings.config import Config
from train.data import data_paths, prepare, shard_writer
from train.data.manifest import DataError
from train.data.shards import ShardSet
from train.data.sources import pin
from train.data.sources.source import is_validation

EMPTY = (5, 41)  # numbers of the documents without text


class Paper(NamedTuple):
    name: str
    text: str


def documents(count: int = 60, seed: int = 11) -> list[Paper]:
    """Texts of different lengths in a small language, the same at every call."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(200)]
    texts = [" ".join(rng.choices(words, k=rng.randint(10, 60))) + " é\n" for _ in range(count)]
    return [Paper(f"paper {i}", "" if i in EMPTY else text) for i, text in enumerate(texts)]


def lines(papers: list[Paper]) -> str:
    return "".join(
        json.dumps({"id": paper.name, "text": paper.text or None}) + "\n" for paper in papers
    )


def declare(c: Config, name: str, **keys: Any) -> None:
    """Write sources/NAME.toml."""
    sources_of(c).mkdir(exist_ok=True)
    text = "".join(
        f"{key} = {json.dumps(value)}\n"
        for key, value in ({"validation_fraction": 0.2} | keys).items()
    )
    (sources_of(c) / f"{name}.toml").write_text(text)


def declare_papers(c: Config, name: str, seed: int = 11, **keys: Any) -> None:
    """A source of documents() in two local files."""
    folder = Path(c.data_dir).parent / name
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(documents(seed=seed)[:35]))
    (folder / "b.jsonl").write_text(lines(documents(seed=seed)[35:]))
    declare(c, name, files=[str(folder / "*.jsonl")], **keys)


def sources_of(c: Config) -> Path:
    """The folder that declares sources in these tests: what is in DATA_DIR may be deleted."""
    return Path(c.data_dir).parent / "sources"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
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


def declare_hub(c: Config, name: str, seed: int = 12) -> None:
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
def web(config: Config) -> Config:
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


def opened(c: Config, name: str = "papers") -> ShardSet:
    return prepare.open_sources(c, prepare.vocabulary(c))[name]


def content(c: Config) -> dict[str, bytes]:
    """Every file below DATA_DIR but the locks."""
    folder = Path(c.data_dir)
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def stored_texts(c: Config, split: str, name: str = "papers") -> list[str]:
    """The documents of all shards, decoded."""
    v, shards = prepare.vocabulary(c), opened(c, name)
    texts = []
    for k in range(len(shards.shards[split])):
        ids = shards.tokens(split, k).tolist()
        assert ids[0] == v.end_of_text
        ends = [i for i, token in enumerate(ids) if token == v.end_of_text] + [len(ids)]
        texts += [v.decode(ids[a + 1 : b]) for a, b in itertools.pairwise(ends)]
    return texts


def settings(monkeypatch: pytest.MonkeyPatch, c: Config) -> None:
    """The same in the environment."""
    for name in (
        "DATA_MIX",
        "DATA_DIR",
        "VOCAB_SIZE",
        "TOKENIZER",
        "TRAIN_TOKENS",
        "WARMUP_TOKENS",
        "SEQ_LEN",
        "BATCH_TOKENS",
        "MICRO_BATCH_SIZE",
    ):
        monkeypatch.setenv(name, str(getattr(c, name.lower())))


def test_a_mixture_is_prepared_by_source_with_one_tokenizer(config: Config) -> None:
    declare_papers(config, "notes", seed=13, validation_fraction=0.3)
    c = dataclasses.replace(config, data_mix="papers:3,notes:1")
    prepare.prepare(c)
    v = prepare.vocabulary(c)
    assert list(prepare.open_sources(c, v)) == ["papers", "notes"]
    assert v.size == 300
    for name, seed in (("papers", 11), ("notes", 13)):
        source, shards = prepare.source_of(c, name), opened(c, name)
        assert (
            shards.folder
            == Path(c.data_dir) / name / prepare.pinned_of(c, name).key / v.sha256[:12]
        )
        for split in ("train", "validation"):
            expected = [
                d.text
                for d in documents(seed=seed)
                if d.text and is_validation(source, d.name) == (split == "validation")
            ]
            assert len(expected) > 5 and stored_texts(c, split, name) == expected


@pytest.mark.fault(28)
def test_the_manifest_counts_documents_and_those_without_text_and_the_end_says_so(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prepare.prepare(config)
    manifest = opened(config).manifest
    assert (manifest["source"], manifest["end"]) == ("papers", "all")
    assert manifest["documents"] == 60 - len(EMPTY) and manifest["dropped"] == {"null": len(EMPTY)}
    assert any(
        f"source papers: {60 - len(EMPTY)} documents" in said and "rows dropped: 2 null" in said
        for said in caplog.messages
    )
    papers = Path(config.data_dir).parent / "papers"
    assert [said for said in caplog.messages if said.startswith("  dropped:")] == [
        f"  dropped: {papers}/a.jsonl, row 6: column 'text' is null",
        f"  dropped: {papers}/b.jsonl, row 7: column 'text' is null",
    ]


def test_the_limit_of_a_source_is_its_share(tmp_path: Path) -> None:
    c = dataclasses.replace(Config(), data_mix="fineweb-edu:2,python-stdlib:1", train_tokens=1000)

    def limits(**changes: int) -> list[float]:
        changed = dataclasses.replace(c, **changes)
        return [
            prepare.token_limit(changed, prepare.source_of(changed, name))
            for name in changed.mixture
        ]

    assert limits() == [667, math.inf]  # of TRAIN_TOKENS on the hub; what is here is taken whole
    assert limits(train_tokens=10**12) == [math.ceil(2 * 10**12 / 3), math.inf]


def test_sources_on_the_hub_are_made_up_to_the_horizon_and_local_ones_whole(web: Config) -> None:
    prepare.prepare(web, whole=True)
    longest = max(len(prepare.vocabulary(web).encode(d.text)) for d in documents(seed=12)) + 1
    assert 3000 <= opened(web, "web").total("train", "tokens") < 3000 + longest
    assert opened(web, "papers").manifest["end"] == "all"
    assert opened(web, "papers").total("train", "tokens") > 4000
    assert not list(Path(web.data_dir).rglob("train.jsonl"))  # of which the rest is of no use


def test_what_is_made_of_the_hub_may_be_raised(web: Config) -> None:
    longest = 200
    for total in (2400, 4000):
        c = dataclasses.replace(web, train_tokens=total)
        declare_hub(c, "web")  # its file, too, which is deleted once it is read
        prepare.prepare(c, whole=True)
        made = opened(c, "web").total("train", "tokens")
        assert 0.75 * total <= made < 0.75 * total + longest
    more = dataclasses.replace(web, train_tokens=6000)
    with pytest.raises(
        DataError, match=r"web/.*: holds \d+ training tokens and 4500 are asked for; run: make data"
    ):
        opened(more, "web")


def test_a_local_source_that_an_earlier_version_made_a_part_of_stays_as_it_is(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "token_limit", lambda c, s: 2000)
    prepare.prepare(config)
    monkeypatch.undo()
    monkeypatch.setattr(data_paths, "source_folders", lambda c: [sources_of(config)])
    before = content(config)
    assert opened(config).manifest["end"] == "limit" and before
    prepare.prepare(config, whole=True)
    assert content(config) == before
    next(opened(config).folder.glob("train_*.bin")).unlink()
    prepare.prepare(config, whole=True)
    assert content(config) == before


def test_what_is_there_is_left_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare.prepare(config)
    before = content(config)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing was to be made")

    for module, name in (
        (shard_writer, "write_shard"),
        (shard_writer, "write_whole"),
        (prepare, "train_tokenizer"),
        (pin, "write_whole"),
        (prepare, "documents"),
        (pin, "digest_of"),
    ):
        monkeypatch.setattr(module, name, refuse)
    prepare.prepare(config)
    prepare.prepare(config, whole=True)
    assert content(config) == before


def test_the_tokenizer_sees_training_text_only_by_weight(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(config.data_dir).parent / "x.jsonl").write_text(
        "".join(json.dumps({"id": f"f{i}", "text": "x" * 100}) + "\n" for i in range(1000))
    )
    declare(config, "long", files=[str(Path(config.data_dir).parent / "x.jsonl")])
    monkeypatch.setattr(prepare, "TOKENIZER_TEXT_BYTES", 8000)
    c = dataclasses.replace(config, data_mix="papers:1,long:3")
    for name in c.mixture:
        pin.pin(prepare.source_of(c, name), Path(c.data_dir) / name)
    texts = list(prepare.tokenizer_text(c))
    source = prepare.source_of(c, "papers")
    train = [d.text for d in documents() if d.text and not is_validation(source, d.name)]
    papers = [text for text in texts if "x" not in text]
    assert papers == train[: len(papers)]
    assert (
        sum(map(len, papers[:-1])) < 2000 <= sum(map(len, papers))
    )  # the document that reaches the share is whole
    assert texts[len(papers) :] == ["x" * 100] * 60


@pytest.mark.parametrize(
    ("name", "command"), [("gzip -9", ["gzip", "-9", "-n"]), ("xz -9", ["xz", "-9"])]
)
def test_bits_per_byte_of_a_compressor_are_those_of_its_command(
    config: Config, monkeypatch: pytest.MonkeyPatch, name: str, command: list[str]
) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"no {command[0]} on this machine")
    path = Path(config.data_dir).parent / "many.jsonl"
    path.write_text(lines(documents(2000)))
    declare(config, "many", files=[str(path)], compressors=True)
    c = dataclasses.replace(config, data_mix="many:1")
    monkeypatch.setattr(prepare, "token_limit", lambda c, s: 2000)
    prepare.prepare(c)
    source = prepare.source_of(c, "many")
    held_out = "".join(d.text for d in documents(2000) if is_validation(source, d.name)).encode()
    compressed = subprocess.run(command, input=held_out, capture_output=True, check=True).stdout
    got = opened(c, "many").manifest["compressed_bpb"]
    assert set(got) == {"gzip -9", "xz -9"}
    assert got[name] == pytest.approx(8 * len(compressed) / len(held_out), rel=0.01)
