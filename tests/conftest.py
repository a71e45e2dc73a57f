"""What tests share: a tiny recipe, and token shards of it that need no corpus."""

import dataclasses
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hardware import ports
from settings.config import Config
from train.data import tokenizer
from train.data.manifest import Seal, manifest_of
from train.data.shards import write_shard
from train.data.sources.pin import pin

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"

# Settings of a model that trains in milliseconds, as a subprocess is given them.
TINY = {
    "VOCAB_SIZE": "512",
    "N_LAYER": "2",
    "N_HEAD": "2",
    "N_EMBD": "32",
    "SEQ_LEN": "32",
    "BATCH_TOKENS": "512",
    "MICRO_BATCH_SIZE": "4",
    "TRAIN_TOKENS": "20480",
    "WARMUP_TOKENS": "2048",
    "LEARNING_RATE": "3e-3",
    "EVAL_TOKENS": "512",
    "SAMPLE_TOKENS": "8",
    "LOG_EVERY": "5",
}


# What is started in the background of a shell ignores these from birth, and so would all that the tests start.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )


# Each of pytest's workers, up to 8, has ports of its own: another could take what one has found before the process that
# it is for listens.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    share = len(ports.RANGE) // 8
    ports.RANGE = ports.RANGE[share * (int(worker.removeprefix("gw")) % 8) :][:share]


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """What a test draws without a generator of its own is the same each time, whichever tests ran before it."""
    random.seed(20)
    np.random.seed(20)  # libraries draw from it
    torch.manual_seed(20)


@pytest.fixture
def tiny() -> Config:
    """The recipe of TINY."""
    values = {
        name.lower(): type(getattr(Config(), name.lower()))(value) for name, value in TINY.items()
    }
    return dataclasses.replace(Config(), **values).derived()


def make_data(folder: Path, tokens: int = 20_000) -> dict[str, str]:
    """A DATA_DIR with random token shards of the default source; returns the settings that find it."""
    from train.data import prepare

    rng = np.random.default_rng(7)
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(400)]
    path = folder / "tokenizer.json"
    text = (" ".join(rng.choice(words, 200)) for _ in range(50))
    vocabulary = tokenizer.train(text, 512, path)
    settings = {"DATA_DIR": str(folder), "TOKENIZER": str(path)}
    c = dataclasses.replace(Config(), data_dir=str(folder), tokenizer=str(path), vocab_size=512)
    pinned = pin(prepare.source_of(c, "python-stdlib"), folder / "python-stdlib")
    shards = prepare.source_folder(c, "python-stdlib", vocabulary)
    shards.mkdir(parents=True)
    lengths, made = vocabulary.byte_lengths(), {}
    for name, size in (
        ("train_00000", tokens // 2),
        ("train_00001", tokens // 3),
        ("validation_00000", 2000),
    ):
        ids = np.repeat(rng.integers(7, 512, -(-size // 2)), 2)[:size]  # pairs: something to learn
        info = write_shard(
            shards / f"{name}.bin",
            ids,
            3,
            int(lengths[ids].sum()),
            vocabulary.sha256,
            "python-stdlib",
            512,
        )
        made[name] = info
    seals = [
        Seal((0, 0), 6, {}, made["train_00000"], made["validation_00000"]),
        Seal((6, 0), 3, {}, made["train_00001"], None),
    ]
    (shards / "manifest.json").write_bytes(
        manifest_of(
            seals,
            source="python-stdlib",
            revision=pinned.revision,
            key=pinned.key,
            tokenizer_sha256=vocabulary.sha256,
            shard_tokens=c.shard_tokens,
            end="all",
        )
    )
    return settings


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that find a DATA_DIR for TINY. Do not write to it."""
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on, nor on the next."""
    return ports.free_ports(2)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen]]:
    """Whatever is put in here is gone at the end of the test."""
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
