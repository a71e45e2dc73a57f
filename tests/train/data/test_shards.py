"""train/data/shards.py: what is written is read back, and every fault of a file is found, named and given a remedy."""

import contextlib
import hashlib
import json
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.shard_folder import write_source
from train.data import shards as shards_module
from train.data.manifest import DataError, ShardInfo, hash_content, parse_manifest
from train.data.shards import HEADER_BYTES, ShardSet, write_shard

TOKENIZER = hashlib.sha256(b"a tokenizer").hexdigest()
OTHER = hashlib.sha256(b"another").hexdigest()
ERROR_PAGE = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>".ljust(278)
REMEDY = "run: make data, with the DATA or DATA_MIX of the run"


def numbers(n, vocab=500):
    """Token ids that repeat late; no random generator."""
    return (np.arange(n, dtype=np.int64) * 7919 + 13) % vocab


def make(folder, sizes=(300, 200), vocab=500, end="all"):
    """A source with these training shards and one of validation; returns the first shard."""
    train = [(numbers(count, vocab), k + 1, 3 * count) for k, count in enumerate(sizes)]
    validation = [(numbers(50, vocab), 1, 150)]
    write_source(folder, train, validation, TOKENIZER, vocab, shard_tokens=200, end=end)
    return folder / "train_00000.bin"


def flip(content, at):
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def change_shard(manifest, change):
    """The manifest with another entry of its first shard."""
    first, *rest = manifest["seals"]
    changed = first | {"train": first["train"] | change}
    return json.dumps(manifest | {"seals": [changed, *rest]})


def without_hash(manifest):
    """The same as an earlier version has written it."""
    return {key: manifest[key] for key in manifest if key != "hash"} | {"schema": 2}


def overwrite(path, content):
    """In its place: the file stays the one that is open."""
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate()


def read(shards, shard=0):
    return shards.tokens("train", shard).tolist()


def refusal(action):
    """What DataError says."""
    with pytest.raises(DataError) as raised:
        action()
    return str(raised.value)


# ---- Writing and reading


@pytest.mark.parametrize(("vocab", "width"), [(2**16, 2), (2**16 + 1, 4)])
def test_tokens_come_back_as_written_in_the_width_that_they_need(tmp_path, vocab, width):
    path = make(tmp_path, (1000, 333), vocab)
    shards = ShardSet(tmp_path)
    assert path.stat().st_size == HEADER_BYTES + 1000 * width
    for split, k, count in (("train", 0, 1000), ("train", 1, 333), ("validation", 0, 50)):
        assert shards.tokens(split, k).tolist() == numbers(count, vocab).tolist()


def test_a_file_is_the_documented_header_and_little_endian_ids(tmp_path):
    info = write_shard(tmp_path / "s.bin", np.array([1, 258, 499]), 2, 11, TOKENIZER, "web", 500)
    content = (tmp_path / "s.bin").read_bytes()
    # format, bytes a token, tokens, documents
    assert content[:32] == b"PTTOKENS" + struct.pack("<IIQQ", 1, 2, 3, 2)
    assert content[32:256] == bytes.fromhex(TOKENIZER) + b"web".ljust(192, b"\0")
    assert content[256:] == bytes([1, 0, 2, 1, 243, 1])
    assert info == ShardInfo("s.bin", 262, 3, 2, 11, 499, xxhash.xxh3_64_hexdigest(content))


# ---- Files that will not do


@pytest.mark.fault(9, 11)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda c: ERROR_PAGE, "not a token shard (278 bytes, starts with b"),
        (lambda c: b"", "not a token shard (0 bytes"),
        (lambda c: b"PK\x03\x04" + c[4:], "not a token shard (856 bytes"),
        (lambda c: c[:-1], "855 bytes, but the manifest says 856"),
        (lambda c: c + b"\0\0", "858 bytes, but the manifest says 856"),
    ],
    ids=["error page", "empty", "foreign", "one byte less", "longer"],
)
def test_a_bad_file_is_found_on_opening_and_named_with_the_remedy(tmp_path, spoil, words):
    path = make(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    said = refusal(lambda: ShardSet(tmp_path))
    assert said.startswith(f"{path}: {words}") and said.endswith(f"; delete {path} and {REMEDY}")
    assert ("error page" in said) is (path.stat().st_size == 278)


def test_all_of_a_large_shard_is_hashed(tmp_path, monkeypatch):
    path = make(tmp_path)
    monkeypatch.setattr(shards_module, "CHUNK_BYTES", 100)
    with open(path, "rb") as file:
        found = shards_module.hash_file(file.fileno())
    assert found == xxhash.xxh3_64_hexdigest(path.read_bytes())


@pytest.mark.fault(10)
@pytest.mark.parametrize("at", [8, 12, 16, 24, 40, 64, 200, 256, 555, 855])
def test_any_flipped_bit_is_found_when_the_shard_is_first_read(tmp_path, at):
    """Each field of the header, the padding, the first token, one within, the last."""
    path = make(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(flip(whole, at))
    shards = ShardSet(tmp_path)
    said = refusal(lambda: read(shards))
    assert said.startswith(f"{path}: damaged: its hash is ")
    assert said.endswith(f"; delete {path} and {REMEDY}")
    assert read(shards, 1) == numbers(200).tolist()  # the others are good


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    "spoil",
    [
        *(lambda m, text=text: text for text in ("", "[]", "null", "\xff", ERROR_PAGE.decode())),
        lambda m: json.dumps(m | {"seals": {"a": 1}}),
        lambda m: json.dumps(m | {"seals": [m["seals"][0] | {"begins": [0]}]}),
        lambda m: json.dumps(m | {"seals": [*m["seals"], m["seals"][0]]}),
        *(
            lambda m, change=change: json.dumps(m | change)
            for change in ({"end": "soon"}, {"next": [-1, 0]}, {"shard_tokens": "x"})
        ),
        *(
            lambda m, change=change: change_shard(m, change)
            for change in ({"tokens": "5"}, {"file": None}, {"max_id": None})
        ),
        *(
            lambda m, key=key: json.dumps({name: m[name] for name in m if name != key})
            for key in ("schema", "key", "next", "documents", "compressed_bpb", "seals")
        ),
    ],
)
def test_a_damaged_manifest_is_named_with_the_remedy(tmp_path, spoil):
    """Of the schema without a hash, whose every key is looked at."""
    path = make(tmp_path).with_name("manifest.json")
    path.write_text(spoil(without_hash(json.loads(path.read_text()))), "latin-1")
    said = refusal(lambda: ShardSet(tmp_path))
    assert said.startswith(f"{path}: not a manifest ")
    assert said.endswith(f"; delete {tmp_path} and {REMEDY}")


def test_a_manifest_of_another_version_or_none_at_all_is_named(tmp_path):
    assert refusal(lambda: ShardSet(tmp_path)) == (
        f"{tmp_path}/manifest.json: there is no such file; prepare the data with: make data"
    )
    (tmp_path / "manifest.json").write_text('{"schema": 1, "shards": {}}')
    said = refusal(lambda: ShardSet(tmp_path))
    assert said.startswith(f"{tmp_path}/manifest.json: has format 1; this version reads 3; delete ")


EDITS = {
    "seals removed": lambda m: m | {"seals": m["seals"][:1]},
    "a seal twice as large": lambda m: json.loads(change_shard(m, {"tokens": 600})),
    "another end": lambda m: m | {"end": "limit"},
    "without its hash": lambda m: {key: m[key] for key in m if key != "hash"},
    "another hash": lambda m: m | {"hash": "0" * 16},
    "said to be without a hash": lambda m: m | {"schema": 2, "seals": m["seals"][:1]},
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_manifest_is_named_with_the_remedy(tmp_path, name):
    path = make(tmp_path).with_name("manifest.json")
    path.write_text(json.dumps(EDITS[name](json.loads(path.read_text()))))
    said = refusal(lambda: ShardSet(tmp_path))
    assert said.startswith(f"{path}: is damaged or was edited") and said.endswith(REMEDY)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("tokenizer_sha256",), None),
        (("revision",), "\x1b[2J"),
        (("shard_tokens",), True),
        (("dropped",), {"short": "x"}),
        (("dropped_examples",), [1]),
        (("compressed_bpb",), {"gzip": "x"}),
        (("seals", 0, "begins"), [0, None]),
        (("seals", 0, "dropped"), [1]),
        (("seals", 0, "train", "xxh3"), "\x1b[2J"),
    ],
)
def test_a_manifest_with_another_kind_of_value_is_named_with_the_remedy(tmp_path, where, value):
    """Its hash has no key: whoever edits a manifest can write a hash that fits."""
    path = make(tmp_path).with_name("manifest.json")
    content = json.loads(path.read_text())
    *outer, name = where
    inner = content
    for key in outer:
        inner = inner[key]
    inner[name] = value
    content["hash"] = hash_content(content)
    path.write_text(json.dumps(content))
    said = refusal(lambda: ShardSet(tmp_path))
    assert said.startswith(f"{path}: not a manifest of token shards ")
    assert said.endswith(REMEDY) and said.isprintable()


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_noticed_or_changes_nothing(tmp_path):
    path = make(tmp_path).with_name("manifest.json")
    content = path.read_bytes()
    written = parse_manifest(path, content)
    changed = [content[:end] for end in range(len(content) - 1)]
    for bit in range(8):
        for at in range(len(content)):
            changed.append(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    for spoilt in changed:
        with contextlib.suppress(DataError):
            assert parse_manifest(path, spoilt) == written


def test_a_manifest_of_the_schema_without_a_hash_is_read(tmp_path):
    path = make(tmp_path).with_name("manifest.json")
    written = parse_manifest(path, path.read_bytes())
    path.write_text(json.dumps(without_hash(json.loads(path.read_text())), indent=1))
    assert ShardSet(tmp_path).manifest == written


@pytest.mark.parametrize(
    "change",
    [{"tokens": 150}, {"tokens": 301}, {"documents": 9}, {"bytes": 500}, {"xxh3": "0" * 16}],
)
def test_an_edited_manifest_of_the_schema_without_a_hash_must_fit_its_shards(tmp_path, change):
    path = make(tmp_path).with_name("manifest.json")
    path.write_text(change_shard(without_hash(json.loads(path.read_text())), change))
    said = refusal(lambda: read(ShardSet(tmp_path)))
    if change.keys() & {"tokens", "documents"}:
        assert said.startswith(f"{path}: says of train_00000.bin what its header does not say")
    else:
        assert said.startswith(f"{tmp_path}/train_00000.bin: ")


def test_a_manifest_of_the_schema_without_a_hash_has_all_of_its_shards(tmp_path):
    path = make(tmp_path).with_name("manifest.json")
    manifest = without_hash(json.loads(path.read_text()))
    path.write_text(json.dumps(manifest | {"seals": manifest["seals"][:1]}))
    assert "its documents are not those of its shards" in refusal(lambda: ShardSet(tmp_path))


ORDERS = {
    "reversed": lambda seals: seals[::-1],
    "the first removed": lambda seals: seals[1:],
    "the second removed": lambda seals: [seals[0], *seals[2:]],
    "shards exchanged": lambda seals: [
        seals[0] | {"train": seals[1]["train"]},
        seals[1] | {"train": seals[0]["train"]},
        *seals[2:],
    ],
    "stretches exchanged": lambda seals: [
        seals[0] | {"begins": seals[1]["begins"]},
        seals[1] | {"begins": seals[0]["begins"]},
        *seals[2:],
    ],
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_manifest_of_the_schema_without_a_hash_has_its_shards_in_order(tmp_path, name):
    path = make(tmp_path).with_name("manifest.json")
    manifest = without_hash(json.loads(path.read_text()))
    (seal,) = manifest["seals"][:1]
    seals = []
    for number in range(3):
        train = seal["train"] | {"file": f"train_{number:05d}.bin"}
        seals.append(seal | {"begins": [0, 10 * number], "train": train, "validation": None})

    def read_with(seals):
        documents = sum(seal["documents"] for seal in seals)
        content = manifest | {"seals": seals, "documents": documents}
        return parse_manifest(path, json.dumps(content).encode())

    assert len(read_with(seals).seals) == 3
    with pytest.raises(DataError, match=r"its (train )?shards (are not in order|do not follow)"):
        read_with(ORDERS[name](seals))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", ["train_00000.bin", "manifest.json"])
@pytest.mark.parametrize(
    "put",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(__file__)],
    ids=["pipe", "folder", "link"],
)
@pytest.mark.parametrize("check", [True, False])
def test_nothing_but_a_regular_file_is_opened(tmp_path, file, put, check):
    path = make(tmp_path).with_name(file)
    path.unlink()
    put(path)
    said = refusal(lambda: read(ShardSet(tmp_path, check=check)))
    assert said.startswith(f"{path}: cannot be read (")


# ---- Shards that are good, for another model


@pytest.mark.fault(26)
def test_shards_of_another_tokenizer_are_refused_with_both_names(tmp_path):
    make(tmp_path)
    said = refusal(lambda: ShardSet(tmp_path).check_vocabulary(OTHER, 500))
    assert f"of tokenizer {TOKENIZER[:12]}, but TOKENIZER gives {OTHER[:12]};" in said
    assert said.startswith(f"{tmp_path}: ")


@pytest.mark.fault(27)
@pytest.mark.parametrize(
    ("sizes", "file", "count"),
    [((300, 200), "train_00000.bin", 300), ((10,), "validation_00000.bin", 50)],
)
def test_a_token_id_beyond_the_vocabulary_is_refused_with_the_size_that_holds_it(
    tmp_path, sizes, file, count
):
    make(tmp_path, sizes)
    highest = int(numbers(count).max())
    shards = ShardSet(tmp_path)
    assert refusal(lambda: shards.check_vocabulary(TOKENIZER, highest)) == (
        f"{tmp_path}/{file}: holds token id {highest}, but VOCAB_SIZE={highest}; "
        f"set VOCAB_SIZE to at least {highest + 1}"
    )
    shards.check_vocabulary(TOKENIZER, highest + 1)


def test_the_key_tells_apart_all_that_decides_the_tokens(tmp_path):
    keys = []
    changes = ({}, {"source": "b"}, {"key": "s-i"}, {"shard_tokens": 300}, {"end": "limit"})
    for change in changes:
        write_source(tmp_path, [(numbers(300), 1, 9)], [], TOKENIZER, **change)
        keys.append(ShardSet(tmp_path).key)
    assert len(set(keys)) == 4 and keys[0] == keys[-1]


# ---- Sources of which more shards come


def test_a_source_that_is_still_being_made_is_taken_in_shard_by_shard(tmp_path):
    make(tmp_path, (300,), end=None)
    said = refusal(lambda: ShardSet(tmp_path))
    assert said.startswith(
        f"{tmp_path}: is not finished; finish it with: make data, or set DATA_STREAM"
    )
    shards = ShardSet(tmp_path, partial=True)
    key = shards.key
    make(tmp_path, (300,), end=None)  # rewritten, with nothing new in it
    assert not shards.refresh() and not shards.ended
    for sizes in ((300, 201), (300, 201, 350, 500)):
        make(tmp_path, sizes, end=None)
        assert shards.refresh() and not shards.refresh() and not shards.ended
        assert [info.tokens for info in shards.shards["train"]] == list(sizes)
        assert len(shards.shards["validation"]) == 1
        for k, count in enumerate(sizes):
            assert read(shards, k) == numbers(count).tolist()
    make(tmp_path, sizes, end="limit")
    assert shards.refresh() and shards.ended and not shards.refresh()
    assert shards.key == key == ShardSet(tmp_path).key


@pytest.mark.parametrize("sizes", [(300,), (300, 202), (301, 201, 350), ()])
def test_shards_that_change_while_they_are_in_use_are_refused(tmp_path, sizes):
    make(tmp_path, (300, 201), end=None)
    shards = ShardSet(tmp_path, partial=True)
    make(tmp_path, sizes, end=None)
    for _ in range(2):
        assert "shards that were there have changed" in refusal(shards.refresh)


def test_a_bad_shard_that_comes_is_named_each_time_and_not_taken_in(tmp_path):
    make(tmp_path, (300,), end=None)
    shards = ShardSet(tmp_path, partial=True)
    make(tmp_path, (300, 201), end=None)
    path = tmp_path / "train_00001.bin"
    whole = path.read_bytes()
    path.write_bytes(ERROR_PAGE)
    for _ in range(2):
        assert refusal(shards.refresh).startswith(f"{path}: not a token shard")
    path.write_bytes(whole)
    assert shards.refresh() and shards.windows("train", 100) == [2, 2]


def test_training_shards_may_be_absent_where_a_source_streams_and_those_of_validation_not(
    tmp_path,
):
    make(tmp_path, (300, 200, 250))
    path = tmp_path / "train_00001.bin"
    whole = path.read_bytes()
    path.unlink()
    lacks = f"{path}: cannot be read (No such file or directory); make it again with: make data"
    assert refusal(lambda: ShardSet(tmp_path)) == lacks
    shards = ShardSet(tmp_path, partial=True)
    assert [shards.is_there(k) for k in range(3)] == [True, False, True]
    assert refusal(lambda: read(shards, 1)) == lacks
    path.write_bytes(whole)
    assert shards.is_there(1) and read(shards, 1) == numbers(200).tolist()
    (tmp_path / "validation_00000.bin").unlink()
    said = refusal(lambda: ShardSet(tmp_path, partial=True))
    assert "validation_00000.bin: cannot be read" in said


# ---- When hashes are checked


@pytest.fixture
def hashed(monkeypatch):
    """Threads, one for each hash of a file."""
    threads = []
    real = shards_module.hash_file

    def hash_file(file):
        threads.append(threading.current_thread())
        return real(file)

    monkeypatch.setattr(shards_module, "hash_file", hash_file)
    return threads


def test_a_thread_hashes_each_shard_before_its_first_token_is_handed_out(tmp_path, hashed):
    make(tmp_path)
    shards = ShardSet(tmp_path)
    shards.keep_open([0])
    shards._opened["train", 0].hash.result()
    assert len(hashed) == 1 and threading.current_thread() not in hashed
    for _ in range(2):
        assert read(shards) == numbers(300).tolist()
    assert len(hashed) == 1
    read(shards, 1)
    assert len(hashed) == 2 and threading.current_thread() not in hashed


def test_a_shard_that_was_deleted_and_made_anew_is_hashed_again(tmp_path, hashed):
    path = make(tmp_path)
    whole = path.read_bytes()
    shards = ShardSet(tmp_path, partial=True)
    for content in (whole, flip(whole, 500)):
        read(shards)
        shards.keep_open([])
        # Another file, whatever the clock's grain.
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").rename(path)
    assert len(hashed) == 2
    assert "damaged" in refusal(lambda: read(shards))


def test_shards_are_closed_when_training_is_through_with_them(tmp_path):
    """A deleted file takes its space as long as it is open."""

    def count_open():
        links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
        return sum(link.resolve().parent == tmp_path for link in links)

    make(tmp_path, (300, 200, 250))
    shards = ShardSet(tmp_path, partial=True)
    shards.tokens("validation", 0)
    (tmp_path / "train_00001.bin").unlink()
    for kept, count in (([0, 2], 2), ([2, 1], 1), ([], 0)):
        shards.keep_open(kept)
        assert count_open() == count + 1
    assert read(shards, 2) == numbers(250).tolist()


# ---- Shards that change while a run reads them


@pytest.fixture
def opened(tmp_path):
    """The first shard, written an hour ago, and the set that has read from it."""
    path = make(tmp_path)
    hour_ago_s = path.stat().st_mtime - 3600
    os.utime(path, (hour_ago_s, hour_ago_s))
    shards = ShardSet(tmp_path)
    shards.read("train", 0, [(0, 10)])
    return path, shards


@pytest.mark.fault(45)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: flip(c, 500),
        lambda c: c[:-99],  # in the middle of a token
        lambda c: b"",
        lambda c: c + b"more",
        lambda c: ERROR_PAGE,
    ],
    ids=["overwritten", "truncated", "emptied", "longer", "error page"],
)
def test_a_shard_that_is_written_to_while_it_is_open_is_refused(opened, spoil):
    path, shards = opened
    overwrite(path, spoil(path.read_bytes()))
    for _ in range(2):
        said = refusal(lambda: read(shards))
        assert said.startswith(f"{path}: was overwritten or truncated while it was read; delete ")
        assert said.endswith(REMEDY)


def test_a_change_during_a_read_is_refused(opened, monkeypatch):
    path, shards = opened
    pread = os.pread

    def change_and_read(*where):
        monkeypatch.setattr(os, "pread", pread)
        overwrite(path, flip(path.read_bytes(), 300))
        return pread(*where)

    monkeypatch.setattr(os, "pread", change_and_read)
    assert "was overwritten" in refusal(lambda: read(shards))


def test_a_shard_of_terabytes_is_refused_before_it_is_hashed(opened):
    path, shards = opened
    os.truncate(path, 4 * 10**12)
    info = shards.shards["train"][0]
    assert "4000000000000 bytes, but the man" in refusal(lambda: shards.verify(info))


def test_a_shard_that_is_deleted_or_replaced_while_it_is_open_is_read_on(opened):
    path, shards = opened
    path.unlink()
    path.write_bytes(ERROR_PAGE)
    assert read(shards) == numbers(300).tolist()
    shards.keep_open([])
    assert "278 bytes, but the manifest says 856" in refusal(lambda: read(shards))


def test_a_shard_that_cannot_be_read_any_more_is_named(opened, monkeypatch):
    path, shards = opened

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    for shard in (0, 1):
        said = refusal(lambda shard=shard: read(shards, shard))
        assert said.startswith(f"{path.with_name(f'train_0000{shard}.bin')}: cannot be read (Input")
