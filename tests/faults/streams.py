"""Runs whose shards are made while they train: two small sources here, and what the disk holds of them."""

import dataclasses
import json
import threading
from pathlib import Path

import numpy as np

from tests.faults.trial import Trial

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
    "DATA_STREAM": 1,
}
WORDS = ["bone", "cell", "the", "of", "nerve", "a", "blood", "in", "is", "heart"]


def make_sources(folder, long=80, short=16):
    """A folder that declares two sources of so many documents, of 40 words each: about seven are a shard."""
    rng = np.random.default_rng(3)
    folder.mkdir(exist_ok=True)
    for name, count in (("long", long), ("short", short)):
        rows = [
            json.dumps({"id": f"{name}-{i}", "text": " ".join(rng.choice(WORDS, 40))}) + "\n"
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(rows))
        declare(folder / f"{name}.toml", f'files = ["{folder}/{name}.jsonl"]')
    return folder


def declare(path: Path, where: str) -> None:
    """Write a source's file, which says where its rows are."""
    path.write_text(f'{where}\ntext = "text"\nid = "id"\nvalidation_fraction = 0.15\n')


def make_stream(folder: Path, sources: Path, tokenizer: str, **settings: object) -> Trial:
    """A run that streams."""
    where = {"TOKENIZER": tokenizer, "DATA_DIR": str(folder / "data")}
    trial = Trial(folder, where, **SETTINGS | settings)
    declare_in(folder / "data", sources)
    return trial


def declare_in(data_dir, sources):
    """Have DATA_DIR declare the sources of a folder."""
    data_dir.mkdir(parents=True, exist_ok=True)
    if not (data_dir / "sources").exists():
        (data_dir / "sources").symlink_to(sources)


def shards(trial: Trial) -> dict[str, bytes]:
    data = trial.folder / "data"
    return {str(path.relative_to(data)): path.read_bytes() for path in data.rglob("*.bin")}


@dataclasses.dataclass
class Disk:
    """Looks at the training shards in a folder while a block runs.

    most: bytes at once; gone, came_back: shards, as source/file, that were deleted, and then made again.
    """

    folder: Path
    most: int = 0
    known: set[str] = dataclasses.field(default_factory=set)
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
            self.gone = (self.gone | self.known) - sizes.keys()
            self.known |= sizes.keys()
