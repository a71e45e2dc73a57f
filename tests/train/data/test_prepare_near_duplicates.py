"""NEAR_DUPLICATES=drop: what is left out of prepared data, and that nothing else changes."""

import dataclasses
import json
import random
from functools import partial
from pathlib import Path

import pytest

from settings.config import Config
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
from train.data.manifest import DataError, read_manifest
from train.data.near_duplicates import SeenKeys, compute_keys
from train.data.word_hashes import hash_documents

__all__ = ["config", "web"]  # fixtures


def read_papers(c: Config) -> list[dict]:
    files = sorted((Path(c.data_dir).parent / "papers").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture
def repetitive(config: Config) -> Config:
    """Papers of which every third is an edited copy of an earlier one."""
    rng = random.Random(4)
    folder = Path(config.data_dir).parent / "papers"
    texts: list[str] = []
    for file in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for k, row in enumerate(rows):
            if row["text"] and k % 3 == 2:
                words = rng.choice(texts).split()
                words[rng.randrange(len(words))] = "edited"
                row["text"] = " ".join(words)
            if row["text"]:
                texts.append(row["text"])
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


def dropping(c: Config) -> Config:
    return dataclasses.replace(c, near_duplicates="drop")


def manifest_of(c: Config) -> dict:
    return read_manifest(opened(c).folder)[0]


def test_what_is_near_an_earlier_document_is_left_out_and_counted(repetitive: Config) -> None:
    rows = read_papers(repetitive)
    texts = [row["text"] for row in rows if row["text"]]
    is_near = SeenKeys().add(compute_keys(hash_documents(texts)))
    prepare.prepare(dropping(repetitive))
    kept = [text for text, near in zip(texts, is_near, strict=True) if not near]
    c = dropping(repetitive)
    assert sorted(stored_texts(c, "train") + stored_texts(c, "validation")) == sorted(kept)
    manifest = manifest_of(dropping(repetitive))
    assert manifest["dropped"] == {"near-duplicate": is_near.sum(), "null": 2}
    assert manifest["documents"] == len(kept) and is_near.sum() > 10
    examples = [e for e in manifest["dropped_examples"] if e["reason"] == "near-duplicate"]
    assert len(examples) == 5
    assert sum(seal["dropped"].get("near-duplicate", 0) for seal in manifest["seals"]) == (
        is_near.sum()
    )


def test_data_that_keeps_them_stays_as_it_was(repetitive: Config) -> None:
    """Another folder, and another identity of a run's data; the tokenizer is the same one."""
    prepare.prepare(repetitive)
    before = content(repetitive)
    prepare.prepare(dropping(repetitive))
    after = content(repetitive)
    assert {name: after[name] for name in before} == before
    v = prepare.vocabulary(repetitive)
    assert tokenizer_path(dropping(repetitive)) == tokenizer_path(repetitive)
    keep, drop = (shard_folder(c, "papers", v.sha256) for c in (repetitive, dropping(repetitive)))
    assert drop.parent.name == f"{keep.parent.name}-without-near-duplicates"
    assert "near" not in keep.as_posix().removeprefix(repetitive.data_dir)
    for c, folder in ((repetitive, keep), (dropping(repetitive), drop)):
        fingerprint = f"x-{prepare.hash_origin({'papers': opened(c)})[:12]}"
        assert prepare.find_folders(repetitive, v, fingerprint) == {"papers": folder}


def test_a_killed_preparation_leaves_out_the_same(repetitive: Config, tmp_path: Path) -> None:
    c = dropping(repetitive)
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


def test_streaming_is_refused(web: Config) -> None:
    for how in ("auto", "1"):
        c = dataclasses.replace(dropping(web), data_stream=how)
        with pytest.raises(DataError, match=r"NEAR_DUPLICATES=drop: .*make data NEAR_DUPL"):
            prepare.prepare(c)
    prepare.prepare(dropping(web), whole=True)
    assert not prepare.streams(dropping(web), prepare.vocabulary(web))


def test_compressors_are_asked_for_what_is_held_out(repetitive: Config) -> None:
    declare_papers(repetitive, "twice", seed=3, compressors=True)
    folder = Path(repetitive.data_dir).parent / "twice"
    rows = (folder / "a.jsonl").read_text().splitlines(keepends=True)
    (folder / "c.jsonl").write_text("".join(reversed(rows)))  # a copy would be left out anyway
    c = dataclasses.replace(repetitive, data_mix="twice:1")
    once, many = (
        read_manifest(opened(x, "twice").folder)[0]["compressed_bpb"]
        for x in (dropping(c), c)
        if prepare.prepare(x) is None
    )
    assert once["gzip -9"] > many["gzip -9"]
