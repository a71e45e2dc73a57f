"""Read the documents of a prepared source: their hashes and lengths, which are near-duplicates, and
which runs of words are in evaluation tasks.

Memory: 24 bytes per document, 112 for each that is compared, and a part of a shard as text.
"""

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from train.data.audit.contamination import RunTable
from train.data.manifest import SPLITS
from train.data.near_duplicates import BANDS, NO_KEY, SeenKeys, compute_keys
from train.data.shards import ShardSet
from train.data.tokenizer import Vocabulary
from train.data.word_hashes import hash_documents

log = logging.getLogger(__name__)

MOST_TOKENS = 250_000_000  # of a source that are compared, about: a gigabyte, two minutes
MOST_DOCUMENTS = 5_000_000
PART_TOKENS = 2**19  # that are compared at once; of a longer document, the first decide
SEAM_TOKENS = 256  # after a part of a long document, for the runs of words that begin in it
LOG_EVERY_S = 10


class Documents(NamedTuple):
    """All documents of a split, in the order of the shards.

    Attributes:
        hashes: (documents,) uint64.
        lengths: (documents,) int64, in tokens.
        is_near: (documents,) bool, near-duplicates of an earlier one of the split.
    """

    hashes: np.ndarray
    lengths: np.ndarray
    is_near: np.ndarray


@dataclasses.dataclass
class Source:
    """What was read of a source.

    Attributes:
        is_found: (n,) bool, the tasks' runs that it has.
        documents: by split.
        compared_tokens: how many were compared with the tasks and with each other.
        validation_near_train: number of validation documents that are near one in train.
    """

    shards: ShardSet
    is_found: np.ndarray
    documents: dict[str, Documents] = dataclasses.field(default_factory=dict)
    compared_tokens: int = 0
    validation_near_train: int = 0


def read_source(v: Vocabulary, shards: ShardSet, table: RunTable) -> Source:
    """Read all documents of a source. Of a very large one, every n-th shard is compared."""
    source = Source(shards, np.zeros(len(table.runs), dtype=bool))
    tokens = sum(shards.total(split, "tokens") for split in SPLITS)
    documents = sum(shards.total(split, "documents") for split in SPLITS)
    step = math.ceil(max(tokens / MOST_TOKENS, documents / MOST_DOCUMENTS))
    seen = {split: SeenKeys() for split in SPLITS}
    last = time.monotonic()
    for split in SPLITS:
        parts = []
        for number, info in enumerate(shards.shards[split]):
            ids = shards.tokens(split, number)
            bounds = np.append(np.flatnonzero(ids == v.end_of_text), len(ids))
            keys = np.full((len(bounds) - 1, BANDS), NO_KEY, dtype=np.uint64)
            if number % step == 0:
                compare_shard(v, ids, bounds, table, keys, source.is_found)
                source.compared_tokens += len(ids)
            parts.append((hash_tokens(ids, bounds), np.diff(bounds), seen[split].add(keys)))
            if split == "validation":
                source.validation_near_train += int(seen["train"].find(keys).sum())
            if time.monotonic() - last > LOG_EVERY_S:
                last = time.monotonic()
                log.info("Read %s of %s", info.file, shards.folder)
        source.documents[split] = Documents(*map(np.concatenate, zip(*parts, strict=True)))
    return source


def hash_tokens(ids: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Hash the tokens of each document: (documents,) uint64.

    Args:
        ids: (n,) tokens of a shard.
        bounds: (documents + 1,) int64, where documents begin, and the end of the last.
    """
    pairs = itertools.pairwise(bounds.tolist())
    hashes = [xxhash.xxh3_64_intdigest(ids[begin:end].data) for begin, end in pairs]
    return np.array(hashes, dtype=np.uint64)


def compare_shard(
    v: Vocabulary,
    ids: np.ndarray,
    bounds: np.ndarray,
    table: RunTable,
    keys: np.ndarray,
    is_found: np.ndarray,
) -> None:
    """Compute the keys of all documents of a shard, and find the tasks' runs in them.

    Args:
        ids, bounds: as in hash_tokens.
        keys: (documents, BANDS) uint64, to be written.
        is_found: (n,) bool, set where a run is found.
    """
    for begin, end in split_tokens(bounds):
        words = read_words(v, ids[begin:end])
        is_found[table.find(words)] = True
        # a document that begins in a seam is overwritten by the part that has all of it
        part_keys = compute_keys(words)
        first = np.searchsorted(bounds, begin)
        keys[first : first + len(part_keys)] = part_keys


def split_tokens(bounds: np.ndarray) -> Iterator[tuple[int, int]]:
    """Split a shard into ranges of whole documents. A longer document has several ranges.

    Args:
        bounds: as in hash_tokens.
    """
    begin = 0
    while begin < bounds[-1]:
        end = int(bounds[np.searchsorted(bounds, begin + PART_TOKENS, "right") - 1])
        if end > begin:
            yield begin, end
        else:
            end = begin + PART_TOKENS
            yield begin, end + SEAM_TOKENS
        begin = end


def read_words(v: Vocabulary, ids: np.ndarray) -> np.ndarray:
    """Decode tokens (n,), and hash the words of each document."""
    pieces = np.split(ids, np.flatnonzero(ids == v.end_of_text))
    tokens = [piece[piece != v.end_of_text].tolist() for piece in pieces]
    continued, *texts = v.tokenizer.decode_batch(tokens, skip_special_tokens=False)
    return hash_documents(texts, continued)
