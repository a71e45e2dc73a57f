"""train/prepare.py: each document once, in order; the same bytes however often it is killed; faults in a sentence."""

import dataclasses
import fcntl
import itertools
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from train import corpus, prepare, tokenizer
from train.config import Config
from train.corpus import CorpusError, Document, Source
from train.settings import ROOT
from train.shards import DataError, ShardSet

EMPTY = (5, 41)  # numbers of the documents without text


class Killed(BaseException):
    """Ends the process as far as the code under test can tell: nothing of it handles this."""


def documents(count: int = 60) -> list[Document]:
    """Texts of different lengths in a small language, the same at every call."""
    rng = random.Random(11)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(200)]
    texts = [" ".join(rng.choices(words, k=rng.randint(10, 60))) + " é\n" for _ in range(count)]
    return [Document(f"paper {i}", "" if i in EMPTY else text) for i, text in enumerate(texts)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A mixture of one source on the hub's road, in a local folder; shards are of about 800 tokens of its 6,400."""
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "papers"
    folder.mkdir()
    rows = [json.dumps({"id": d.name, "text": d.text or None}) + "\n" for d in documents()]
    (folder / "a.jsonl").write_text("".join(rows[:35]))
    (folder / "b.jsonl").write_text("".join(rows[35:]))
    source = Source("papers", "hub", validation_fraction=0.2, prompt="the", repository=str(folder))
    monkeypatch.setitem(corpus.SOURCES, "papers", source)
    return dataclasses.replace(Config(), data_mix="papers:1", data_dir=str(tmp_path / "data"), vocab_size=300,
                               shard_tokens=800).derived()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "BATCH_BYTES", 300)


def opened(c: Config) -> ShardSet:
    return prepare.open_sources(c, prepare.vocabulary(c))["papers"]


def content(c: Config) -> dict[str, bytes]:
    """Every file below DATA_DIR but the lock."""
    folder = Path(c.data_dir)
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def stored_texts(c: Config, split: str) -> list[list[str]]:
    """The documents of each shard, decoded."""
    v, shards = prepare.vocabulary(c), opened(c)
    texts = []
    for k in range(len(shards.shards[split])):
        ids = shards.tokens(split, k).tolist()
        assert ids[0] == v.end_of_text
        ends = [i for i, token in enumerate(ids) if token == v.end_of_text] + [len(ids)]
        texts.append([v.decode(ids[a + 1:b]) for a, b in itertools.pairwise(ends)])
    return texts


# ---- What is written

@pytest.mark.usefixtures("small_batches")
def test_every_document_is_stored_once_in_order_in_its_split(config: Config) -> None:
    prepare.prepare(config)
    source = corpus.source("papers")
    shards = opened(config)
    for split in ("train", "validation"):
        held_out = split == "validation"
        expected = [d.text for d in documents() if d.text and corpus.is_validation(source, d.name) == held_out]
        stored = stored_texts(config, split)
        assert len(stored) > 2
        assert [text for shard in stored for text in shard] == expected
        assert shards.total(split, "documents") == len(expected)
        assert shards.total(split, "text_bytes") == sum(len(text.encode()) for text in expected)


@pytest.mark.usefixtures("small_batches")
def test_the_manifest_counts_documents_and_those_without_text(config: Config) -> None:
    prepare.prepare(config)
    manifest = opened(config).manifest
    assert (manifest["source"], manifest["revision"], manifest["tokenizer_size"]) == ("papers", "local", 300)
    assert manifest["documents"] == 60 and manifest["dropped"] == {"empty": len(EMPTY)}
    assert sum(opened(config).total(split, "documents") for split in ("train", "validation")) == 60 - len(EMPTY)
    assert not list(Path(config.data_dir).rglob("progress.jsonl")) and not list(Path(config.data_dir).rglob("*.tmp*"))


@pytest.mark.parametrize("batch_bytes", [300, prepare.BATCH_BYTES])
def test_a_shard_is_sealed_at_the_first_document_end_past_its_size(config: Config, monkeypatch: pytest.MonkeyPatch,
                                                                   batch_bytes: int) -> None:
    """However many documents are encoded at once."""
    monkeypatch.setattr(prepare, "BATCH_BYTES", batch_bytes)
    prepare.prepare(config)
    *sealed, _ = opened(config).shards["train"]
    longest = max(len(prepare.vocabulary(config).encode(d.text)) for d in documents()) + 1
    assert len(sealed) >= 4
    assert all(800 <= info.tokens < 800 + longest + 300 for info in sealed)  # 300: one small batch


@pytest.mark.parametrize("batch_bytes", [300, prepare.BATCH_BYTES])
def test_no_more_is_prepared_than_data_tokens_and_the_document_that_reaches_it(
        config: Config, monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    monkeypatch.setattr(prepare, "BATCH_BYTES", batch_bytes)
    c = dataclasses.replace(config, data_tokens=2000)
    prepare.prepare(c)
    longest = max(len(prepare.vocabulary(c).encode(d.text)) for d in documents()) + 1
    assert 2000 <= opened(c).total("train", "tokens") < 2000 + longest + 300
    assert stored_texts(c, "train")[0][0] == documents()[0].text


def test_the_limit_is_the_share_of_the_horizon_and_none_for_local_text() -> None:
    c = dataclasses.replace(Config(), data_mix="fineweb-edu:2,python-stdlib:1", train_tokens=1000)
    assert prepare.token_limit(c, corpus.source("fineweb-edu")) == 667
    assert prepare.token_limit(c, corpus.source("python-stdlib")) == float("inf")
    assert prepare.token_limit(dataclasses.replace(c, data_tokens=50), corpus.source("fineweb-edu")) == 50


@pytest.mark.usefixtures("small_batches")
def test_a_limit_that_was_raised_is_met_or_the_shortage_is_an_error(config: Config) -> None:
    """Else a rehearsal on a few tokens becomes a long run of many epochs over them, without a word."""
    prepare.prepare(dataclasses.replace(config, data_tokens=1000))
    more = dataclasses.replace(config, data_tokens=4000)
    said = ""
    try:
        prepare.prepare(more)
    except DataError as error:
        said = str(error)
    assert "DATA_TOKENS" in said or opened(more).total("train", "tokens") >= 4000


@pytest.mark.usefixtures("small_batches")
def test_what_is_there_is_left_alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare.prepare(config)
    before = content(config)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing was to be made")

    writers = ((prepare, "write_shard"), (prepare, "write_whole"), (tokenizer, "train"), (corpus, "documents"))
    for module, name in writers:
        monkeypatch.setattr(module, name, refuse)
    prepare.prepare(config)
    assert content(config) == before


@pytest.mark.usefixtures("small_batches")
def test_a_mixture_is_prepared_by_source_with_one_tokenizer(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "stdlib_documents", lambda skip=0: iter(documents(40)[skip:]))
    c = dataclasses.replace(config, data_mix="papers:3,python-stdlib:1")
    prepare.prepare(c)
    sources = prepare.open_sources(c, prepare.vocabulary(c))
    assert list(sources) == ["papers", "python-stdlib"]
    assert len({shards.tokenizer_sha256 for shards in sources.values()}) == 1
    assert sources["python-stdlib"].manifest["documents"] == 40
    assert sources["python-stdlib"].folder.parent.name == ".".join(map(str, sys.version_info[:3]))


def test_the_tokenizer_sees_training_text_only_by_weight(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "stdlib_documents", lambda skip=0: (Document(f"f{i}", "x" * 100) for i in range(10**6)))
    monkeypatch.setattr(prepare, "TOKENIZER_TEXT_BYTES", 8000)
    texts = list(prepare.tokenizer_text(dataclasses.replace(config, data_mix="papers:1,python-stdlib:3")))
    source = corpus.source("papers")
    train = [d.text for d in documents() if d.text and not corpus.is_validation(source, d.name)]
    papers = [text for text in texts if "x" not in text]
    assert papers == train[:len(papers)]
    assert sum(map(len, papers[:-1])) < 2000 <= sum(map(len, papers))  # the document that reaches the share is whole
    assert texts[len(papers):] == ["x" * 100] * 60


@pytest.mark.parametrize(("name", "command"), [("gzip -9", ["gzip", "-9", "-n"]), ("xz -9", ["xz", "-9"])])
def test_bits_per_byte_of_a_compressor_are_those_of_its_command(monkeypatch: pytest.MonkeyPatch, name: str,
                                                                command: list[str]) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"no {command[0]} on this machine")
    monkeypatch.setattr(corpus, "stdlib_documents", lambda skip=0: iter(documents(2000)))
    source = corpus.source("python-stdlib")
    held_out = "".join(d.text for d in documents(2000) if corpus.is_validation(source, d.name)).encode()
    compressed = subprocess.run(command, input=held_out, capture_output=True, check=True).stdout
    got = prepare.compressed_bpb(source, "")
    assert set(got) == {"gzip -9", "xz -9"}
    assert got[name] == pytest.approx(8 * len(compressed) / len(held_out), rel=0.01)


# ---- Killed, and again

def kill_at(monkeypatch: pytest.MonkeyPatch, name: str, at: int, when: str) -> None:
    """End the process before or behind the at-th call of a function of prepare.py that writes."""
    real, calls = getattr(prepare, name), [0]

    def write(path: Path, *rest: object) -> object:
        calls[0] += 1
        if calls[0] == at and when == "before":
            path.with_name(path.name + ".tmp").write_bytes(b"half a sh")
            raise Killed
        result = real(path, *rest)
        if calls[0] == at:
            raise Killed
        return result

    monkeypatch.setattr(prepare, name, write)


def is_killed_at(c: Config, name: str, at: int, when: str) -> bool:
    """Prepare until that point; whether it was reached."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, name, at, when)
        try:
            prepare.prepare(c)
        except Killed:
            return True
    return False


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("limit", [None, 2000], ids=["all", "DATA_TOKENS"])
def test_a_killed_prepare_ends_with_the_same_bytes(config: Config, tmp_path: Path, limit: int | None) -> None:
    c = dataclasses.replace(config, data_tokens=limit)
    prepare.prepare(c)
    undisturbed = content(c)
    shards = sum(name.endswith(".bin") for name in undisturbed)
    assert shards >= 4
    points = [("write_shard", at, when) for at in range(1, shards + 1) for when in ("before", "behind")]
    points += [("write_whole", 1, "behind"), ("write_whole", 2, "before")]  # the revision, the manifest
    differing = []
    for number, point in enumerate(points):
        other = dataclasses.replace(c, data_dir=str(tmp_path / f"killed_{number}"))
        assert is_killed_at(other, *point)
        prepare.prepare(other)
        left = {name: data for name, data in content(other).items() if not name.endswith("manifest.json.tmp")}
        if left != undisturbed:
            differing.append(point)
    assert differing == []


@pytest.mark.usefixtures("small_batches")
def test_files_that_no_account_knows_are_removed(config: Config) -> None:
    """Left by a run that was killed between the shard and its line, when less is prepared the next time."""
    assert is_killed_at(config, "write_shard", 4, "before")
    (progress,) = Path(config.data_dir).rglob("progress.jsonl")
    for name in ("train_00077.bin", "validation_00077.bin.tmp"):
        (progress.parent / name).write_bytes(b"left over")
    prepare.prepare(config)
    assert not [name for name in content(config) if "00077" in name]


@pytest.mark.usefixtures("small_batches")
def test_a_prepare_that_is_killed_again_and_again_ends_with_the_same_bytes(config: Config, tmp_path: Path) -> None:
    prepare.prepare(config)
    other = dataclasses.replace(config, data_dir=str(tmp_path / "killed"))
    attempts = next(attempt for attempt in range(100) if not is_killed_at(other, "write_shard", 4, "before"))
    assert attempts >= 2
    assert content(other) == content(config)


@pytest.mark.usefixtures("small_batches")
def test_a_line_of_the_account_that_was_cut_short_does_no_harm_later(config: Config, tmp_path: Path) -> None:
    """A full disk cuts the line; the next run is killed too; the third must still end well."""
    prepare.prepare(config)
    other = dataclasses.replace(config, data_dir=str(tmp_path / "killed"))
    for _ in range(2):
        assert is_killed_at(other, "write_shard", 4, "before")
        (progress,) = Path(other.data_dir).rglob("progress.jsonl")
        progress.write_bytes(progress.read_bytes()[:-20])
    prepare.prepare(other)
    assert content(other) == content(config)


@pytest.mark.usefixtures("small_batches")
def test_a_full_disk_is_said_and_room_lets_it_go_on(config: Config, tmp_path: Path) -> None:
    prepare.prepare(config)
    other = dataclasses.replace(config, data_dir=str(tmp_path / "full"))
    calls = [0]

    def full(_: int) -> None:
        calls[0] += 1
        if calls[0] > 5:
            raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=rf"{other.data_dir}.* cannot be written \(No space left on .*DATA_DIR"):
            prepare.prepare(other)
    prepare.prepare(other)
    assert content(other) == content(config)


# ---- One at a time

@pytest.mark.usefixtures("small_batches")
def test_a_second_prepare_waits_for_the_first(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = Path(config.data_dir)
    folder.mkdir()
    second = threading.Thread(target=prepare.prepare, args=(config,))
    with open(folder / ".lock", "w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second.start()
        deadline = time.monotonic() + 20
        while f"another process prepares data in {folder}; waiting for it" not in caplog.messages:
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.01)
        time.sleep(0.1)
        assert content(config) == {}
    second.join(30)
    assert not second.is_alive()
    assert opened(config).manifest["documents"] == 60


# ---- Faults

def test_a_flipped_bit_is_found_by_verify_with_code_78(config: Config, monkeypatch: pytest.MonkeyPatch,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    for name in ("DATA_MIX", "DATA_DIR", "VOCAB_SIZE"):
        monkeypatch.setenv(name, str(getattr(config, name.lower())))
    caplog.set_level(logging.INFO)
    assert prepare.main([]) == 0
    assert prepare.main(["verify"]) == 0
    assert "data: papers is whole, 2 shards" in caplog.messages
    path = next(Path(config.data_dir).rglob("validation_00000.bin"))
    spoilt = bytearray(path.read_bytes())
    spoilt[-1] ^= 1
    path.write_bytes(spoilt)
    assert prepare.main(["verify"]) == 78
    assert caplog.messages[-1].startswith(f"{path}: damaged") and "make data" in caplog.messages[-1]


@pytest.mark.parametrize(("environ", "argv", "code", "words"), [
    ({"DATA_MIX": "wiki:1"}, [], 78, "DATA_MIX names wiki, which is no source"),
    ({"SEED": "x"}, [], 64, "SEED=x"),
    ({}, ["verify"], 78, "there is no tokenizer yet; prepare the data with: make data"),
    ({"TOKENIZER": "absent.json"}, [], 78, "absent.json: cannot be read"),
])
def test_faults_end_with_their_code_and_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict,
                                                    caplog: pytest.LogCaptureFixture, argv: list[str], code: int,
                                                    words: str) -> None:
    for name, value in {"DATA_DIR": str(tmp_path), **environ}.items():
        monkeypatch.setenv(name, value)
    assert prepare.main(argv) == code
    assert words in caplog.messages[-1]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_a_size_that_holds_it(config: Config) -> None:
    prepare.prepare(config)
    path = next(Path(config.data_dir).rglob("tokenizer.json"))
    small = dataclasses.replace(config, tokenizer=str(path), vocab_size=299)
    with pytest.raises(DataError, match="the tokenizer has 300 entries, but VOCAB_SIZE=299; set VOCAB_SIZE=") as raised:
        prepare.prepare(small)
    size = int(str(raised.value).split("set VOCAB_SIZE=")[1])
    prepare.prepare(dataclasses.replace(small, vocab_size=size))


def test_shards_of_another_tokenizer_in_its_place_are_refused(config: Config) -> None:
    """As when folders are copied by hand."""
    prepare.prepare(config)
    here = opened(config).folder
    other = dataclasses.replace(config, vocab_size=310)
    prepare.prepare(other)
    there = opened(other).folder
    assert here != there
    shutil.rmtree(there)
    shutil.copytree(here, there)
    with pytest.raises(DataError, match=rf"{there}: .* tokenizer {here.name}, but TOKENIZER gives {there.name}"):
        prepare.prepare(other)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_split_without_a_document_is_an_error(config: Config, monkeypatch: pytest.MonkeyPatch,
                                                fraction: float) -> None:
    prepare.prepare(config)
    path = next(Path(config.data_dir).rglob("tokenizer.json"))
    source = dataclasses.replace(corpus.source("papers"), validation_fraction=fraction)
    monkeypatch.setitem(corpus.SOURCES, "papers", source)
    shutil.rmtree(opened(config).folder)
    with pytest.raises(DataError, match=f"holds no {'validation' if fraction == 0 else 'training'} document"):
        prepare.prepare(dataclasses.replace(config, tokenizer=str(path)))


def test_a_source_that_fails_while_it_is_read_is_not_blamed_on_the_disk(config: Config,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the network are OSErrors too."""
    import datasets

    def rows(*_: object, **__: object) -> Iterator[dict[str, str]]:
        yield {"id": "1", "text": "one"}
        raise ConnectionError("connection reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", rows)
    with pytest.raises(CorpusError, match="connection reset by peer"):
        prepare.prepare(config)


AS_ANOTHER_USER = """
import os, sys
from train import prepare
settings = prepare.Config.load()  # now: the other user may not be able to read this repository
prepare.Config.load = classmethod(lambda cls: settings)
if os.getuid() == 0:  # who may write anywhere
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(prepare.main([]))
"""


def test_a_data_dir_that_cannot_be_written_ends_with_code_78() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o555)
        env = os.environ | {"DATA_DIR": str(folder / "data"), "DATA_MIX": "python-stdlib:1"}
        done = subprocess.run([sys.executable, "-c", AS_ANOTHER_USER], cwd=ROOT, env=env, check=False, text=True,
                              capture_output=True)
        assert done.returncode == 78, done.stdout + done.stderr
        assert done.stdout.startswith(f"{folder}/data: cannot be written (Permission denied); choose another folder")
        assert "DATA_DIR" in done.stdout
        assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_file_in_the_place_of_data_dir_is_named(config: Config) -> None:
    Path(config.data_dir).write_text("in the way")
    with pytest.raises(DataError, match=rf"{re.escape(config.data_dir)}: cannot be written \(.*\); .*DATA_DIR"):
        prepare.prepare(config)
