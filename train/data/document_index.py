"""Which document is where in a shard: train_00000.index, a small file next to train_00000.bin.

    (source, shard, window) -> documents -> file of the source, row, hash of the text

Written by the shard writer when it seals a shard, and read where a person asks which text a sample
is, and when a step is skipped. Nothing else needs it: shards of earlier versions have none. It names
the hash of its shard, so that the index of another shard is not believed.
"""

import dataclasses
import io
import json
import logging
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from record.durable import write_whole
from train.data.manifest import ShardInfo

log = logging.getLogger(__name__)

SCHEMA = 1
# What numpy and zipfile raise for a damaged file; RuntimeError where a flipped bit says "encrypted".
DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


def index_path(folder: Path, info: ShardInfo) -> Path:
    return (folder / info.file).with_suffix(".index")


@dataclasses.dataclass(frozen=True)
class DocumentIndex:
    """The documents of a shard in their order.

    Attributes:
        names: of the files that they come from.
        file: (n,) index into names.
        row: (n,) row of the file, from 0; of plain text, the piece.
        begin: (n + 1,) first token of each document, and the end of the last.
        text_hash: (n,) XXH3 (64 bits) of the text in UTF-8.
    """

    names: Sequence[str]
    file: np.ndarray
    row: np.ndarray
    begin: np.ndarray
    text_hash: np.ndarray

    def find(self, begin: int, end: int) -> range:
        """Return the documents that have a token in [begin, end)."""
        first = int(np.searchsorted(self.begin, begin, side="right")) - 1
        last = int(np.searchsorted(self.begin, end, side="left"))
        return range(first, min(last, len(self.row)))


def write_index(folder: Path, info: ShardInfo, names: Sequence[str], rows: np.ndarray) -> None:
    """Write the index of a shard. rows: (n, 4) uint64, of each document file, row, tokens and hash.

    names: of all files of the source.
    """
    numbers, file = np.unique(rows[:, 0], return_inverse=True)
    facts = {"schema": SCHEMA, "shard": info.xxh3, "names": [names[int(k)] for k in numbers]}
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        facts=np.frombuffer(json.dumps(facts).encode(), np.uint8),
        name=file.astype(np.uint32),
        # As differences, most of which are 1 and take no space.
        row=np.diff(rows[:, 1].astype(np.int64), prepend=0),
        tokens=rows[:, 2].astype(np.uint32),
        text_hash=rows[:, 3],
    )
    write_whole(index_path(folder, info), buffer.getvalue())


def read_index(folder: Path, info: ShardInfo) -> DocumentIndex | None:
    """Return the index of a shard; None where there is none, or only that of another shard."""
    path = index_path(folder, info)
    if not path.is_file():  # opening a pipe would wait for a writer
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            facts = json.loads(stored["facts"].tobytes())
            if (facts["schema"], facts["shard"]) != (SCHEMA, info.xxh3):
                return None
            ends = np.cumsum(stored["tokens"], dtype=np.int64)
            return DocumentIndex(
                names=facts["names"],
                file=stored["name"],
                row=np.cumsum(stored["row"]),
                begin=np.concatenate(([0], ends)),
                text_hash=stored["text_hash"],
            )
    except DAMAGE as error:
        log.warning("%s: cannot be read (%s); documents are shown without their file", path, error)
        return None
