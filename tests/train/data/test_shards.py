"""train/data/shards.py: what is written is read back, and every fault of a file is found, named and given a remedy."""

import contextlib
import hashlib
import json
import math
import os
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.shard_folder import write_source
from train.data.manifest import KEYS, DataError, ShardInfo
from train.data.shards import HEADER_BYTES, MAGIC, TICK_S, ShardSet, write_shard

TOKENIZER = hashlib.sha256(b"a tokenizer").hexdigest()
OTHER = hashlib.sha256(b"another").hexdigest()
ERROR_PAGE = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>".ljust(278)


def numbers(n, vocab=500):
    """Token ids that repeat late; no random generator."""
    return (np.arange(n, dtype=np.int64) * 7919 + 13) % vocab


def make(folder, sizes=(300, 200), vocab=500, end="all"):
    """A source with these training shards and one of validation beside the first; returns the first shard."""
    train = [(numbers(count, vocab), k + 1, 3 * count) for k, count in enumerate(sizes)]
    validation = [(numbers(50, vocab), 1, 150)]
    write_source(
        folder, train, validation, TOKENIZER, vocab, source="a-source", shard_tokens=200, end=end
    )
    return folder / "train_00000.bin"


def write_manifest(folder, manifest):
    """As it is written: a new file in the place of the last."""
    (folder / "manifest.json.tmp").write_text(json.dumps(manifest))
    (folder / "manifest.json.tmp").replace(folder / "manifest.json")


# ---- Writing and reading


@pytest.mark.parametrize(("vocab", "width"), [(500, 2), (2**16, 2), (2**16 + 1, 4), (128_256, 4)])
def test_tokens_come_back_as_written_in_the_width_that_they_need(tmp_path, vocab, width):
    path = make(tmp_path, (1000, 333), vocab)
    shards = ShardSet(tmp_path)
    assert path.stat().st_size == HEADER_BYTES + 1000 * width
    assert shards.tokens("train", 1).dtype.itemsize == width
    for split, k, count in (("train", 0, 1000), ("train", 1, 333), ("validation", 0, 50)):
        assert shards.tokens(split, k).tolist() == numbers(count, vocab).tolist()
    assert numbers(1000, vocab).max() > 255  # more than one byte is at work


def test_a_file_is_the_documented_header_and_little_endian_ids(tmp_path):
    ids = np.array([1, 258, 499])
    info = write_shard(tmp_path / "s.bin", ids, 2, 11, TOKENIZER, "a-source", 500)
    content = (tmp_path / "s.bin").read_bytes()
    assert content[:8] == MAGIC == b"PTTOKENS"
    assert struct.unpack("<IIQQ", content[8:32]) == (
        1,
        2,
        3,
        2,
    )  # format, bytes a token, tokens, documents
    assert content[32:64].hex() == TOKENIZER
    assert content[64:128].rstrip(b"\0") == b"a-source"
    assert content[256:] == bytes([1, 0, 2, 1, 243, 1])
    assert info == ShardInfo("s.bin", 262, 3, 2, 11, 499, xxhash.xxh3_64_hexdigest(content))
    assert [p.name for p in tmp_path.iterdir()] == ["s.bin"]


def test_a_shard_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "s.bin", numbers(10), 1, 1, TOKENIZER, "x", 500)
    assert not (tmp_path / "s.bin").exists()


# ---- Files that will not do


def flip(content, at):
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


@pytest.mark.fault(9, 11)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda c: ERROR_PAGE, ["not a token shard (278 bytes, starts with b", "error page"]),
        (lambda c: b"", ["not a token shard (0 bytes"]),
        (lambda c: b"PK\x03\x04" + c[4:], ["not a token shard (856 bytes"]),
        (lambda c: c[:-1], ["855 bytes, but the manifest says 856"]),
        (lambda c: c[:100], ["100 bytes, but the manifest says 856"]),
        (lambda c: c[:10], ["10 bytes, but the manifest says 856"]),
        (lambda c: c + b"\0\0", ["858 bytes, but the manifest says 856"]),
        (lambda c: flip(c, 8), ["header says format 5, 300 tokens of 2 bytes"]),
        (lambda c: flip(c, 12), ["tokens of 6 bytes"]),
        (lambda c: flip(c, 16), ["header says format 1, 296 tokens"]),
        (
            lambda c: c[:32] + bytes.fromhex(OTHER) + c[64:],
            [f"tokenizer {OTHER[:12]}, but the manifest says", TOKENIZER[:12]],
        ),
    ],
    ids=[
        "error page",
        "empty",
        "foreign",
        "one byte less",
        "cut in the header",
        "cut in the magic",
        "longer",
        "other format",
        "other width",
        "other count",
        "other tokenizer",
    ],
)
def test_a_bad_file_is_found_on_opening_and_named_with_the_remedy(tmp_path, spoil, words):
    path = make(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError) as raised:
        ShardSet(tmp_path)
    assert str(raised.value).startswith(f"{path}: ")
    assert str(raised.value).endswith(
        f"; delete {path} and run: make data, with the DATA or DATA_MIX of the run"
    )
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_a_missing_shard_is_found_on_opening(tmp_path):
    make(tmp_path)
    path = tmp_path / "validation_00000.bin"
    path.unlink()
    with pytest.raises(
        DataError, match=rf"{path}: cannot be read \(No such file or directory\); .*make data"
    ):
        ShardSet(tmp_path)


@pytest.mark.fault(10)
def test_any_flipped_bit_is_found_when_the_shard_is_first_read(tmp_path):
    """Beyond what opening compares: the name of the source, the padding, the first token, one within, the last."""
    path = make(tmp_path)
    whole = path.read_bytes()
    for at in (64, 200, 256, 555, 855):
        path.write_bytes(flip(whole, at))
        shards = ShardSet(tmp_path)
        with pytest.raises(
            DataError,
            match=rf"{path}: damaged, its hash is [0-9a-f]{{16}} and .*delete .* make data",
        ):
            shards.tokens("train", 0)
        assert shards.tokens("train", 1).tolist() == numbers(200).tolist()  # the others are good
    path.write_bytes(whole)
    assert ShardSet(tmp_path).tokens("train", 0).tolist() == numbers(300).tolist()


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"schema": 2}',
        b'{"schema": 2, "seals": {}}',
        b'{"schema": 2, "seals": [{"begins": [0, 0]}], "tokenizer_sha256": ""}',
        b'{"schema": 2, "seals": [{"begins": [0], "documents": 1, "dropped": {}, "train": null, "validation": null}]}',
        b'{"schema": 2, "seals": []}',
        b"\xff\xfe",
        ERROR_PAGE,
    ],
    ids=repr,
)
def test_a_damaged_manifest_is_named_with_the_remedy(tmp_path, content):
    make(tmp_path)
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(
        DataError, match=rf"{tmp_path}/manifest\.json: not a manifest .*delete {tmp_path} and run"
    ):
        ShardSet(tmp_path)


@pytest.mark.parametrize("key", ["schema", "seals", *KEYS])
def test_a_manifest_without_one_of_its_keys_is_named_with_the_remedy(tmp_path, key):
    make(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest[key]
    write_manifest(tmp_path, manifest)
    with pytest.raises(
        DataError,
        match=rf"{tmp_path}/manifest\.json: not a manifest .*'{key}'.*delete {tmp_path} and",
    ):
        ShardSet(tmp_path)


def test_a_manifest_of_another_version_is_named_with_both(tmp_path):
    make(tmp_path)
    write_manifest(tmp_path, {"schema": 1, "shards": {}})
    with pytest.raises(
        DataError, match=rf"{tmp_path}/manifest\.json: has format 1; this version reads 2; delete "
    ):
        ShardSet(tmp_path)


def test_a_folder_without_a_manifest_names_the_target_that_makes_it(tmp_path):
    with pytest.raises(
        DataError, match=rf"{tmp_path}/manifest\.json: there is no such file; prepare .*: make data"
    ):
        ShardSet(tmp_path)


# ---- Shards that are good, for another model


@pytest.mark.fault(26)
def test_shards_of_another_tokenizer_are_refused_with_both_names(tmp_path):
    make(tmp_path)
    both = f"of tokenizer {TOKENIZER[:12]}, but TOKENIZER gives {OTHER[:12]};"
    with pytest.raises(DataError, match=rf"{tmp_path}: .* {both} .*make data"):
        ShardSet(tmp_path).check_vocabulary(OTHER, 500)


@pytest.mark.fault(27)
@pytest.mark.parametrize(
    ("sizes", "file", "count"),
    [((300, 200), "train_00000.bin", 300), ((10,), "validation_00000.bin", 50)],
)
def test_a_token_id_beyond_the_vocabulary_is_refused_with_the_size_that_holds_it(
    tmp_path, sizes, file, count
):
    path = make(tmp_path, sizes).with_name(file)
    highest = int(numbers(count).max())
    shards = ShardSet(tmp_path)
    with pytest.raises(
        DataError,
        match=rf"{path}: holds token id {highest}, but VOCAB_SIZE={highest}; "
        rf"set VOCAB_SIZE to at least {highest + 1}",
    ):
        shards.check_vocabulary(TOKENIZER, highest)
    shards.check_vocabulary(TOKENIZER, highest + 1)


# ---- Sources of which more shards come


def test_a_source_that_is_still_being_made_is_refused_unless_it_is_opened_as_such(
    tmp_path,
):
    make(tmp_path, end=None)
    with pytest.raises(
        DataError,
        match=rf"{tmp_path}: is not finished; go on with: make data, or set DATA_STREAM=1",
    ):
        ShardSet(tmp_path)
    assert not ShardSet(tmp_path, partial=True).ended


def test_a_manifest_that_grows_is_taken_in_shard_by_shard(tmp_path):
    make(tmp_path, (300,), end=None)
    shards = ShardSet(tmp_path, partial=True)
    key = shards.key
    assert not shards.refresh() and shards.windows("train", 100) == [2]
    make(tmp_path, (300,), end=None)  # rewritten, with nothing new in it
    assert not shards.refresh()
    for sizes in ((300, 201), (300, 201, 350, 500)):
        make(tmp_path, sizes, end=None)
        assert shards.refresh() and not shards.refresh() and not shards.ended
        assert [info.tokens for info in shards.shards["train"]] == list(sizes)
        assert len(shards.shards["validation"]) == 1
        for k, count in enumerate(sizes):
            assert shards.tokens("train", k).tolist() == numbers(count).tolist()
    make(tmp_path, sizes, end="limit")
    assert shards.refresh() and shards.ended and not shards.refresh()
    assert shards.key == key == ShardSet(tmp_path).key


@pytest.mark.parametrize("sizes", [(300,), (300, 202), (301, 201, 350), ()])
def test_shards_that_change_while_they_are_in_use_are_refused(tmp_path, sizes):
    make(tmp_path, (300, 201), end=None)
    shards = ShardSet(tmp_path, partial=True)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for path in tmp_path.glob("train*"):
        path.unlink()
    if sizes:
        make(tmp_path, sizes, end=None)
    else:
        write_manifest(tmp_path, manifest | {"seals": []})
    for _ in range(2):
        with pytest.raises(
            DataError,
            match=rf"{tmp_path}/manifest\.json: shards that were there have changed .*make",
        ):
            shards.refresh()


def test_a_bad_shard_that_comes_is_named_each_time_and_not_taken_in(tmp_path):
    make(tmp_path, (300,), end=None)
    shards = ShardSet(tmp_path, partial=True)
    make(tmp_path, (300, 201), end=None)
    path = tmp_path / "train_00001.bin"
    whole = path.read_bytes()
    path.write_bytes(ERROR_PAGE)
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{path}: not a token shard"):
            shards.refresh()
    assert shards.windows("train", 100) == [2]
    path.write_bytes(whole)
    assert shards.refresh() and shards.windows("train", 100) == [2, 2]


def test_training_shards_may_be_absent_where_a_source_streams_and_those_of_validation_not(
    tmp_path,
):
    make(tmp_path, (300, 200, 250), end=None)
    whole = (tmp_path / "train_00001.bin").read_bytes()
    (tmp_path / "train_00001.bin").unlink()
    shards = ShardSet(tmp_path, partial=True)
    assert [shards.is_there(k) for k in range(3)] == [True, False, True]
    assert shards.windows("train", 100) == [2, 1, 2]
    with pytest.raises(
        DataError, match=rf"{tmp_path}/train_00001\.bin: cannot be read \(No such .*make data"
    ):
        shards.tokens("train", 1)
    (tmp_path / "train_00001.bin").write_bytes(whole)
    assert shards.is_there(1) and shards.tokens("train", 1).tolist() == numbers(200).tolist()
    (tmp_path / "validation_00000.bin").unlink()
    with pytest.raises(DataError, match=r"validation_00000\.bin: cannot be read"):
        ShardSet(tmp_path, partial=True)


def test_a_hash_is_checked_beside_and_before_the_first_token_is_handed_out(tmp_path, monkeypatch):
    path = make(tmp_path)
    shards, may_go_on, threads = ShardSet(tmp_path), threading.Event(), []
    real = shards.check_hash

    def slow(info):
        threads.append(threading.current_thread())
        assert may_go_on.wait(30)
        real(info)

    monkeypatch.setattr(shards, "check_hash", slow)
    check = shards.check_soon("train", 0)
    assert not check.done()  # and this goes on meanwhile
    path.write_bytes(flip(path.read_bytes(), 400))
    may_go_on.set()
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{path}: damaged"):
            shards.tokens("train", 0)
    assert threading.current_thread() not in threads


def test_a_shard_that_was_deleted_and_made_anew_is_hashed_again(tmp_path, monkeypatch):
    path = make(tmp_path)
    shards, checked = ShardSet(tmp_path, partial=True), []
    real = shards.check_hash

    def watched(info):
        checked.append(info.file)
        real(info)

    monkeypatch.setattr(shards, "check_hash", watched)
    whole = path.read_bytes()
    shards.tokens("train", 0)
    shards.keep_open([])
    path.unlink()
    (tmp_path / "other").write_bytes(
        whole
    )  # so that the new file is another, whatever the clock's grain
    (tmp_path / "new").write_bytes(whole)
    (tmp_path / "new").rename(path)
    assert shards.tokens("train", 0).tolist() == numbers(300).tolist()
    assert checked == ["train_00000.bin"] * 2
    shards.keep_open([])
    shards.tokens("train", 0)
    assert len(checked) == 2
    path.unlink()
    path.write_bytes(flip(whole, 500))
    shards.keep_open([])
    with pytest.raises(DataError, match=rf"{path}: damaged"):
        shards.tokens("train", 0)


def open_files(folder):
    """The files in a folder that this process has open."""
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            paths.append(link.readlink())
    return {path.name for path in paths if path.parent == folder}


def test_shards_are_closed_when_training_is_through_with_them(tmp_path):
    """A deleted file takes its space as long as it is open."""
    make(tmp_path, (300, 200, 250))
    shards = ShardSet(tmp_path)
    for k in range(3):
        shards.read("train", k, [(0, 10)])
    shards.read("validation", 0, [(0, 10)])
    train = {f"train_0000{k}.bin" for k in range(3)}
    assert open_files(tmp_path) == {*train, "validation_00000.bin"}
    shards.keep_open([1])
    assert open_files(tmp_path) == {"train_00001.bin", "validation_00000.bin"}
    assert shards.read("train", 2, [(0, 250)])[0].tolist() == numbers(250).tolist()


# ---- Shards that change while a run reads them


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr("train.data.shards.STILL_S", 0.0)


@pytest.mark.fault(46)
@pytest.mark.parametrize(
    ("spoil", "size"),
    [
        (lambda c: flip(c, 500), 856),
        (lambda c: c[:-100], 756),
        (lambda c: b"", 0),
        (lambda c: c + b"more", 860),
        (lambda c: ERROR_PAGE, 278),
    ],
    ids=["overwritten", "cut short", "emptied", "longer", "error page"],
)
def test_a_shard_that_is_written_to_while_it_is_open_is_refused(tmp_path, no_pause, spoil, size):
    path = make(tmp_path)
    whole = path.read_bytes()
    shards = ShardSet(tmp_path)
    shards.read("train", 0, [(0, 10)])
    with open(path, "r+b") as file:
        file.write(spoil(whole))
        file.truncate()
    for _ in range(2):
        with pytest.raises(DataError) as raised:
            shards.read("train", 0, [(0, 10)])
        words = str(raised.value)
        assert words.startswith(
            f"{path}: was overwritten while the run read it: it has {size} bytes"
        )
        assert "the manifest says 856" in words
        assert words.endswith(
            f"; delete {path} and run: make data, with the DATA or DATA_MIX of the run"
        )
        assert raised.value.changed_s == math.inf  # nothing of it was read
    assert shards.read("train", 1, [(0, 200)])[0].tolist() == numbers(200).tolist()
    with open(path, "r+b") as file:
        file.write(whole)
        file.truncate()
    assert shards.read("train", 0, [(0, 300)])[0].tolist() == numbers(300).tolist()


def test_a_change_that_shows_after_the_next_read_says_when_it_was(tmp_path, no_pause, monkeypatch):
    path = make(tmp_path)
    shards = ShardSet(tmp_path)
    shards.read("train", 0, [(0, 10)])
    before_s = time.time() - TICK_S
    path.write_bytes(ERROR_PAGE)
    after_s = time.time()
    time.sleep(0.05)
    with monkeypatch.context() as patch:
        stamp = shards._open["train", 0].stamp
        patch.setattr("train.data.shards.stamp_of", lambda facts: stamp)
        shards.read("train", 0, [(0, 10)])
    with pytest.raises(DataError) as raised:
        shards.read("train", 0, [(0, 10)])
    assert before_s < raised.value.changed_s < after_s


def test_a_shard_is_refused_although_its_time_was_set_back(tmp_path, no_pause):
    path = make(tmp_path)
    shards = ShardSet(tmp_path)
    shards.read("train", 0, [(0, 10)])
    facts = path.stat()
    with open(path, "r+b") as file:
        file.seek(300)
        file.write(b"xx")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert path.stat().st_mtime_ns == facts.st_mtime_ns
    with pytest.raises(DataError, match="was overwritten"):
        shards.read("train", 0, [(0, 10)])


def test_a_shard_that_is_written_again_with_the_same_bytes_is_read_on(tmp_path, monkeypatch):
    """Also while only half of it is there."""
    path = make(tmp_path)
    whole = path.read_bytes()
    shards = ShardSet(tmp_path)
    shards.read("train", 0, [(0, 10)])
    pauses = []

    def go_on_writing(seconds):
        pauses.append(seconds)
        if len(pauses) < 4:
            path.write_bytes(whole[: 200 * len(pauses)])
        elif len(pauses) == 4:
            path.write_bytes(whole)

    monkeypatch.setattr("train.data.shards.time.sleep", go_on_writing)
    path.write_bytes(b"")
    assert shards.read("train", 0, [(0, 300)])[0].tolist() == numbers(300).tolist()
    assert len(pauses) == 5
    shards.read("train", 0, [(0, 300)])
    assert len(pauses) == 5  # it was verified, once


def test_a_shard_that_is_deleted_or_replaced_while_it_is_open_is_read_on(tmp_path, no_pause):
    path = make(tmp_path)
    shards = ShardSet(tmp_path)
    shards.read("train", 0, [(0, 10)])
    path.unlink()
    assert shards.read("train", 0, [(0, 300)])[0].tolist() == numbers(300).tolist()
    path.write_bytes(ERROR_PAGE)
    assert shards.read("train", 0, [(0, 300)])[0].tolist() == numbers(300).tolist()
    shards.keep_open([])
    with pytest.raises(DataError, match="damaged"):
        shards.read("train", 0, [(0, 10)])


def test_a_shard_that_cannot_be_read_any_more_is_named(tmp_path, monkeypatch):
    path = make(tmp_path)
    shards = ShardSet(tmp_path)
    shards.read("train", 0, [(0, 10)])

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(DataError, match=rf"{path}: cannot be read \(Input/output error\)"):
        shards.read("train", 0, [(0, 10)])


def test_the_key_tells_apart_all_that_decides_the_tokens(tmp_path):
    make(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    keys = {ShardSet(tmp_path).key}
    for change in ({"source": "b"}, {"key": "s-i"}, {"shard_tokens": 300}):
        write_manifest(tmp_path, manifest | change)
        keys.add(ShardSet(tmp_path).key)
    write_manifest(tmp_path, manifest | {"end": "limit"})
    assert len(keys) == 4 and ShardSet(tmp_path).key in keys
