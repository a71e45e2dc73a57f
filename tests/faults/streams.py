"""Runs whose shards are made while they train: two small sources here, and what the disk holds of them."""

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from record import metrics as record_reader
from tests.running import ROOT, environment, keep_final_steps

# 16 windows a step, 12 of one source, 1.4 times round it, and 4 of the other, 2.4 times; shards have 31 or more
SETTINGS = {
    "DATA_MIX": "long:3,short:1",
    "SHARD_TOKENS": 1000,
    "GROUP_SHARDS": 2,
    "MAX_STEPS": 40,
    "SAVE_EVERY": 8,
    "EVAL_EVERY": 0,
    "EVAL_TOKENS": 256,
    "SAMPLE_TOKENS": 0,
}


def make_sources(folder, long=80, short=16):
    """A folder that declares two sources of so many documents, of 40 words each: about seven are a shard."""
    rng, words = (
        np.random.default_rng(3),
        ["bone", "cell", "the", "of", "nerve", "a", "blood", "in", "is", "heart"],
    )
    for name, count in (("long", long), ("short", short)):
        texts = [" ".join(rng.choice(words, 40)) for _ in range(count)]
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.jsonl").write_text(
            "".join(
                json.dumps({"id": f"{name}-{i}", "text": text}) + "\n"
                for i, text in enumerate(texts)
            )
        )
        (folder / f"{name}.toml").write_text(
            f'files = ["{folder}/{name}.jsonl"]\ntext = "text"\nid = "id"\n'
            "validation_fraction = 0.15\n"
        )
    return folder


def settings(folder: Path, sources: Path, tokenizer: str, **more: object) -> dict[str, str]:
    """The environment of a run in `folder` that streams."""
    folder.mkdir(parents=True, exist_ok=True)
    where = {"TOKENIZER": tokenizer, "DATA_DIR": str(folder / "data")}
    declare_in(folder / "data", sources)
    return environment(folder, where, **(SETTINGS | {"DATA_STREAM": 1} | more))


def declare_in(data_dir, sources):
    """Have DATA_DIR declare the sources of a folder."""
    data_dir.mkdir(parents=True, exist_ok=True)
    if not (data_dir / "sources").exists():
        (data_dir / "sources").symlink_to(sources)


def prepare(env: dict[str, str], *what: str) -> str:
    """make data, or with no further word what make train does before it trains."""
    done = subprocess.run(
        [sys.executable, "-m", "train.data.prepare", *what],
        env=env,
        cwd=ROOT,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=270,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def steps(folder):
    """The records of a run's steps, as it finally has them."""
    return list(keep_final_steps(record_reader.read_records(folder / "run" / "metrics.jsonl")))


@dataclasses.dataclass
class Disk:
    """Looks at the training shards in a folder while a block runs.

    most: bytes at once; gone, came_back: shards, as source/file, that were deleted, and then made again.
    """

    folder: Path
    most: int = 0
    seen: set[str] = dataclasses.field(default_factory=set)
    gone: set[str] = dataclasses.field(default_factory=set)
    came_back: set[str] = dataclasses.field(default_factory=set)

    def __enter__(self):
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def watch(self):
        while not self.over.wait(0.01):
            sizes = {}
            for path in self.folder.rglob("train_*.bin"):
                try:
                    sizes[f"{path.parents[2].name}/{path.name}"] = path.stat().st_size
                except OSError:  # deleted just now
                    continue
            self.most = max(self.most, sum(sizes.values()))
            self.came_back |= self.gone & sizes.keys()
            self.gone = (self.gone | self.seen) - sizes.keys()
            self.seen |= sizes.keys()
