"""What tests share: a tiny recipe, and token shards of it that need no corpus."""

import dataclasses
import json
import socket
from pathlib import Path

import numpy as np
import pytest

from train import tokenizer
from train.config import Config
from train.shards import write_shard

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"

# Settings of a model that trains in milliseconds, as a subprocess is given them.
TINY = {"VOCAB_SIZE": "512", "N_LAYER": "2", "N_HEAD": "2", "N_EMBD": "32", "SEQ_LEN": "32", "BATCH_TOKENS": "512",
        "MICRO_BATCH_SIZE": "4", "TRAIN_TOKENS": "20480", "WARMUP_TOKENS": "2048", "LEARNING_RATE": "3e-3",
        "EVAL_TOKENS": "512", "SAMPLE_TOKENS": "8", "LOG_EVERY": "5"}


@pytest.fixture
def tiny() -> Config:
    """The recipe of TINY."""
    values = {name.lower(): type(getattr(Config(), name.lower()))(value) for name, value in TINY.items()}
    return dataclasses.replace(Config(), **values).derived()


def make_data(folder: Path, tokens: int = 20_000) -> dict[str, str]:
    """A DATA_DIR with random token shards of the default source; returns the settings that find it."""
    from train import prepare
    rng = np.random.default_rng(7)
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(400)]
    path = folder / "tokenizer.json"
    text = (" ".join(rng.choice(words, 200)) for _ in range(50))
    vocabulary = tokenizer.train(text, 512, path)
    settings = {"DATA_DIR": str(folder), "TOKENIZER": str(path)}
    c = dataclasses.replace(Config(), data_dir=str(folder), tokenizer=str(path), vocab_size=512)
    shards = prepare.source_folder(c, prepare.corpus.source("python-stdlib"), vocabulary)
    shards.mkdir(parents=True)
    lengths = vocabulary.byte_lengths()
    entries: dict[str, list] = {"train": [], "validation": []}
    for split, sizes in (("train", [tokens // 2, tokens // 3]), ("validation", [2000])):
        for k, size in enumerate(sizes):
            ids = np.repeat(rng.integers(7, 512, -(-size // 2)), 2)[:size]  # pairs: something to learn
            path = shards / f"{split}_{k:05d}.bin"
            info = write_shard(path, ids, 3, int(lengths[ids].sum()), vocabulary.sha256, "python-stdlib", 512)
            entries[split].append(dataclasses.asdict(info))
    revision = prepare.revision_of(c, prepare.corpus.source("python-stdlib"))
    manifest = {"schema": 1, "source": "python-stdlib", "revision": revision,
                "tokenizer_sha256": vocabulary.sha256, "tokenizer_size": 512, "documents": 9, "dropped": {"empty": 0},
                "compressed_bpb": {}, "shards": entries}
    (shards / "manifest.json").write_text(json.dumps(manifest))
    return settings


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that find a DATA_DIR for TINY. Do not write to it."""
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
