"""NEAR_DUPLICATES=drop: what is left out of prepared data, and that nothing else changes."""

import dataclasses
import json
import random
from functools import partial
from pathlib import Path

import pytest

from tests.killing import killed_at
from tests.train.data.test_prepare import (
    config,
    content,
    declare_papers,
    opened,
    stored_texts,
    web,
)
from train.data import prepare
from train.data.data_paths import shard_folder, tokenizer_path
from train.data.manifest import DataError
from train.data.near_duplicates import SeenKeys, compute_keys
from train.data.word_hashes import hash_documents

__all__ = ["config", "web"]  # fixtures


@pytest.fixture
def repetitive(config):
    """Papers of which every third is an edited copy of an earlier one; settings that drop these, and the texts."""
    rng = random.Random(4)
    texts: list[str] = []
    for file in sorted((Path(config.data_dir).parent / "papers").glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for k, row in enumerate(rows):
            if row["text"] and k % 3 == 2:
                words = rng.choice(texts).split()
                words[rng.randrange(len(words))] = "edited"
                row["text"] = " ".join(words)
            if row["text"]:
                texts.append(row["text"])
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dataclasses.replace(config, near_duplicates="drop"), texts


def test_what_is_near_an_earlier_document_is_left_out_and_counted(
    repetitive,
):
    """In another folder, with another identity of a run's data; other shards and the tokenizer stay as they were."""
    drop, texts = repetitive
    keep = dataclasses.replace(drop, near_duplicates="keep")
    prepare.prepare(keep)
    before = content(keep)
    prepare.prepare(drop)
    after = content(drop)
    assert {name: after[name] for name in before} == before
    assert tokenizer_path(drop) == tokenizer_path(keep)
    v = prepare.vocabulary(drop)
    folders = [shard_folder(c, "papers", v.sha256) for c in (keep, drop)]
    assert folders[1].parent.name == f"{folders[0].parent.name}-without-near-duplicates"
    older = folders[0].parent.with_name("older") / folders[0].name
    older.mkdir(parents=True)
    (older / "manifest.json").write_text('{"schema": 1}')  # passed over
    for c, folder in zip((keep, drop), folders, strict=True):
        fingerprint = f"x-{prepare.hash_origin({'papers': opened(c)})[:12]}"
        assert prepare.find_folders(keep, v, fingerprint) == {"papers": folder}

    is_near = SeenKeys().add(compute_keys(hash_documents(texts)))
    kept = [text for text, near in zip(texts, is_near, strict=True) if not near]
    assert sorted(stored_texts(drop, "train") + stored_texts(drop, "validation")) == sorted(kept)
    manifest = json.loads((folders[1] / "manifest.json").read_text())
    assert manifest["dropped"] == {"near-duplicate": is_near.sum(), "null": 2}
    assert manifest["documents"] == len(kept) and is_near.sum() > 10
    examples = [e for e in manifest["dropped_examples"] if e["reason"] == "near-duplicate"]
    assert len(examples) == 5
    sealed = [seal["dropped"].get("near-duplicate", 0) for seal in manifest["seals"]]
    assert sum(sealed) == is_near.sum()


def test_a_killed_preparation_leaves_out_the_same(repetitive, tmp_path):
    c, _ = repetitive
    prepare.prepare(c)
    undisturbed = content(c)
    other = dataclasses.replace(c, data_dir=str(tmp_path / "killed"))
    kills = sum(killed_at(point, partial(prepare.prepare, other)) for point in [29] * 20)
    assert kills >= 3
    assert content(other) == undisturbed
    deleted = next(opened(c).folder.glob("train_00001.bin"))
    deleted.unlink()
    prepare.prepare(c)
    assert content(c) == undisturbed


def test_streaming_is_refused(web):
    c = dataclasses.replace(web, near_duplicates="drop")
    for how in ("auto", "1"):
        with pytest.raises(DataError, match=r"NEAR_DUPLICATES=drop: .*make data NEAR_DUPL"):
            prepare.prepare(dataclasses.replace(c, data_stream=how))
    prepare.prepare(c, whole=True)
    assert not prepare.streams(c, prepare.vocabulary(c))


def test_compressors_are_asked_for_what_is_held_out(config):
    declare_papers(config, "twice", seed=3, compressors=True)
    folder = Path(config.data_dir).parent / "twice"
    rows = (folder / "a.jsonl").read_text().splitlines(keepends=True)
    (folder / "c.jsonl").write_text("".join(reversed(rows)))  # a copy would be left out anyway
    bits = {}
    for how in ("keep", "drop"):
        c = dataclasses.replace(config, data_mix="twice:1", near_duplicates=how)
        prepare.prepare(c)
        bits[how] = opened(c, "twice").manifest.compressed_bpb["gzip -9"]
    assert bits["drop"] > bits["keep"]
