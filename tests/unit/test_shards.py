"""train/shards.py: what is written is read back, and every fault of a file is found, named and given a remedy."""

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from train.shards import HEADER_BYTES, MAGIC, DataError, ShardInfo, ShardSet, write_shard

TOKENIZER = hashlib.sha256(b"a tokenizer").hexdigest()
OTHER = hashlib.sha256(b"another").hexdigest()
ERROR_PAGE = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>".ljust(278)


def numbers(n: int, vocab: int = 500) -> np.ndarray:
    """Token ids that repeat late; no random generator."""
    return (np.arange(n, dtype=np.int64) * 7919 + 13) % vocab


def make(folder: Path, sizes: tuple[int, ...] = (300, 200), vocab: int = 500, tokenizer: str = TOKENIZER) -> Path:
    """A source with these training shards and one of validation; returns the first shard."""
    entries: dict[str, list] = {"train": [], "validation": []}
    for split, counts in (("train", sizes), ("validation", (50,))):
        for k, count in enumerate(counts):
            info = write_shard(folder / f"{split}_{k:05d}.bin", numbers(count, vocab), k + 1, 3 * count, tokenizer,
                               "a-source", vocab)
            entries[split].append(dataclasses.asdict(info))
    write_manifest(folder, {"schema": 1, "tokenizer_sha256": tokenizer, "shards": entries})
    return folder / "train_00000.bin"


def write_manifest(folder: Path, manifest: object) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest))


# ---- Writing and reading

@pytest.mark.parametrize(("vocab", "width"), [(500, 2), (2**16, 2), (2**16 + 1, 4), (128_256, 4)])
def test_tokens_come_back_as_written_in_the_width_that_they_need(tmp_path: Path, vocab: int, width: int) -> None:
    path = make(tmp_path, (1000, 333), vocab)
    shards = ShardSet(tmp_path)
    assert path.stat().st_size == HEADER_BYTES + 1000 * width
    assert shards.tokens("train", 1).dtype.itemsize == width
    for split, k, count in (("train", 0, 1000), ("train", 1, 333), ("validation", 0, 50)):
        assert shards.tokens(split, k).tolist() == numbers(count, vocab).tolist()
    assert numbers(1000, vocab).max() > 255  # more than one byte is at work


def test_a_file_is_the_documented_header_and_little_endian_ids(tmp_path: Path) -> None:
    ids = np.array([1, 258, 499])
    info = write_shard(tmp_path / "s.bin", ids, 2, 11, TOKENIZER, "a-source", 500)
    content = (tmp_path / "s.bin").read_bytes()
    assert content[:8] == MAGIC == b"PTTOKENS"
    assert struct.unpack("<IIQQ", content[8:32]) == (1, 2, 3, 2)  # format, bytes a token, tokens, documents
    assert content[32:64].hex() == TOKENIZER
    assert content[64:128].rstrip(b"\0") == b"a-source"
    assert content[256:] == bytes([1, 0, 2, 1, 243, 1])
    assert info == ShardInfo("s.bin", 262, 3, 2, 11, 499, xxhash.xxh3_64_hexdigest(content))
    assert [p.name for p in tmp_path.iterdir()] == ["s.bin"]


def test_a_shard_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "s.bin", numbers(10), 1, 1, TOKENIZER, "x", 500)
    assert not (tmp_path / "s.bin").exists()


def test_totals_and_windows_are_those_of_the_shards(tmp_path: Path) -> None:
    make(tmp_path, (300, 201, 100, 101, 1))
    shards = ShardSet(tmp_path)
    assert shards.total("train", "tokens") == 703 and shards.total("validation", "tokens") == 50
    assert shards.total("train", "documents") == 1 + 2 + 3 + 4 + 5
    # A window of 101 tokens starts every 100; one with its last target missing is none.
    expected = [len([b for b in range(0, n, 100) if b + 101 <= n]) for n in (300, 201, 100, 101, 1)]
    assert shards.windows("train", 100) == expected == [2, 2, 0, 1, 0]


# ---- Files that will not do

def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1:]


@pytest.mark.parametrize(("spoil", "words"), [
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
    (lambda c: c[:32] + bytes.fromhex(OTHER) + c[64:], [f"made with tokenizer {OTHER[:12]}", TOKENIZER[:12]]),
], ids=["error page", "empty", "foreign", "one byte less", "cut in the header", "cut in the magic", "longer",
        "other format", "other width", "other count", "other tokenizer"])
def test_a_bad_file_is_found_on_opening_and_named_with_the_remedy(tmp_path: Path, spoil: Callable[[bytes], bytes],
                                                                  words: list[str]) -> None:
    path = make(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError) as raised:
        ShardSet(tmp_path)
    assert str(raised.value).startswith(f"{path}: ")
    assert str(raised.value).endswith(f"delete {tmp_path} and run: make data")
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_a_missing_shard_is_found_on_opening(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "validation_00000.bin"
    path.unlink()
    with pytest.raises(DataError, match=rf"{path}: cannot be read \(No such file or directory\); .*make data"):
        ShardSet(tmp_path)


def test_any_flipped_bit_is_found_when_the_shard_is_first_read(tmp_path: Path) -> None:
    """Beyond what opening compares: the name of the source, the padding, the first token, one within, the last."""
    path = make(tmp_path)
    whole = path.read_bytes()
    for at in (64, 200, 256, 555, 855):
        path.write_bytes(flip(whole, at))
        shards = ShardSet(tmp_path)
        with pytest.raises(DataError, match=rf"{path}: damaged, its hash is [0-9a-f]{{16}} and .*delete .* make data"):
            shards.tokens("train", 0)
        assert shards.tokens("train", 1).tolist() == numbers(200).tolist()  # the others are good
    path.write_bytes(whole)
    assert ShardSet(tmp_path).tokens("train", 0).tolist() == numbers(300).tolist()


def test_a_hash_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    shards, checked = ShardSet(tmp_path), []
    monkeypatch.setattr(shards, "check_hash", lambda info: checked.append(info.file))
    for _ in range(3):
        shards.tokens("train", 0)
        shards.tokens("validation", 0)
    assert checked == ["train_00000.bin", "validation_00000.bin"]


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"null", b"{}", b'{"shards": {}}', b'{"shards": {"train": [{"file": "x"}], "validation": []}}',
    b'{"shards": {"train": [], "validation": []}}', b"\xff\xfe", ERROR_PAGE], ids=repr)
def test_a_damaged_manifest_is_named_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    make(tmp_path)
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"{tmp_path}/manifest\.json: not a manifest .*delete {tmp_path} and run"):
        ShardSet(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("tokens", 150), ("tokens", 3000), ("documents", 9)])
def test_a_manifest_that_contradicts_a_header_is_refused(tmp_path: Path, key: str, value: int) -> None:
    path = make(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["shards"]["train"][0][key] = value
    write_manifest(tmp_path, manifest)
    with pytest.raises(DataError, match=f"{path}: .*make data"):
        ShardSet(tmp_path)


def test_a_folder_without_a_manifest_names_the_target_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}/manifest\.json: there is no such file; prepare .*: make data"):
        ShardSet(tmp_path)


# ---- Shards that are good, for another model

def test_shards_of_another_tokenizer_are_refused_with_both_names(tmp_path: Path) -> None:
    make(tmp_path)
    both = f"of tokenizer {TOKENIZER[:12]}, but TOKENIZER gives {OTHER[:12]};"
    with pytest.raises(DataError, match=rf"{tmp_path}: .* {both} .*make data"):
        ShardSet(tmp_path).check_vocabulary(OTHER, 500)


def test_a_token_id_beyond_the_vocabulary_is_refused_with_the_size_that_holds_it(tmp_path: Path) -> None:
    path = make(tmp_path)
    highest = int(numbers(300).max())
    shards = ShardSet(tmp_path)
    with pytest.raises(DataError, match=rf"{path}: holds token id {highest}, but VOCAB_SIZE={highest}; "
                                        rf"set VOCAB_SIZE to at least {highest + 1}"):
        shards.check_vocabulary(TOKENIZER, highest)
    shards.check_vocabulary(TOKENIZER, highest + 1)


def test_a_token_id_beyond_the_vocabulary_is_found_in_validation_too(tmp_path: Path) -> None:
    make(tmp_path, (10,))
    highest = int(numbers(50).max())
    assert highest > numbers(10).max()
    with pytest.raises(DataError, match=r"validation_00000\.bin: holds token id"):
        ShardSet(tmp_path).check_vocabulary(TOKENIZER, highest)
