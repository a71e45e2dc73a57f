"""Folders of token shards that no text was read for."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.data.data_paths import SHARD_TOKENS
from train.data.manifest import SPLITS, Manifest, Seal
from train.data.shards import write_shard

Shard = tuple[np.ndarray, int, int]  # ids, documents, bytes of their text


def write_source(
    folder: Path,
    train: Sequence[Shard],
    validation: Sequence[Shard],
    tokenizer_sha256: str,
    vocab_size: int = 500,
    **facts: Any,
) -> None:
    """Write shards, and a manifest that has these facts too, as a new file in the place of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "source": folder.name,
        "revision": "r",
        "key": "r-i",
        "tokenizer_sha256": tokenizer_sha256,
        "shard_tokens": SHARD_TOKENS,
        "end": "all",
    } | facts
    seals = []
    for number, pair in enumerate(itertools.zip_longest(train, validation)):
        infos = []
        for split, shard in zip(SPLITS, pair, strict=True):
            path = folder / f"{split}_{number:05d}.bin"
            infos.append(
                shard and write_shard(path, *shard, tokenizer_sha256, facts["source"], vocab_size)
            )
        documents = sum(info.documents for info in infos if info)
        seals.append(Seal((number, 0), documents, {}, *infos))
    (folder / "new").write_bytes(Manifest(**facts, seals=seals).text())
    (folder / "new").rename(folder / "manifest.json")
