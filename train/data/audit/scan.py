"""Read the documents of a prepared source: their lengths and hashes, and which runs of words are in
evaluation tasks.

Memory: 16 bytes per document, and a shard with a few documents as text.
"""

import dataclasses
import logging
import math
from typing import NamedTuple

import numpy as np
import xxhash

from train.data.audit.contamination import RunTable
from train.data.manifest import SPLITS
from train.data.shards import ShardSet
from train.data.tokenizer import Vocabulary
from train.data.word_hashes import hash_documents

log = logging.getLogger(__name__)

MOST_TOKENS = 250_000_000  # of a source that are compared with tasks, about: 1 GB, two minutes
DOCUMENTS_AT_ONCE = 64  # that are decoded


class Documents(NamedTuple):
    """All documents of a split, in the order of the shards.

    Attributes:
        hashes: (documents,) uint64, of their tokens.
        lengths: (documents,) int64, in tokens with the end-of-text token.
    """

    hashes: np.ndarray
    lengths: np.ndarray


@dataclasses.dataclass
class Source:
    """What was read of a source.

    Attributes:
        is_found: (n,) bool, the tasks' runs that it has.
        documents: by split.
        compared_tokens: how many were compared with the tasks.
    """

    shards: ShardSet
    is_found: np.ndarray
    documents: dict[str, Documents] = dataclasses.field(default_factory=dict)
    compared_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return sum(self.shards.total(split, "tokens") for split in SPLITS)


def read_source(vocabulary: Vocabulary, shards: ShardSet, table: RunTable) -> Source:
    """Read all documents of a source. Every n-th shard of a very large one is compared with tasks."""
    source = Source(shards, np.zeros(len(table.runs), dtype=bool))
    log.info("reading %s", shards.folder)
    step = math.ceil(source.tokens / MOST_TOKENS)
    for split in SPLITS:
        parts = []
        for number in range(len(shards.shards[split])):
            ids = shards.tokens(split, number)
            begins = np.flatnonzero(ids == vocabulary.end_of_text)
            documents = np.split(ids, begins)[1:]
            hashes = [xxhash.xxh3_64_intdigest(document.data) for document in documents]
            lengths = np.diff(np.append(begins, len(ids)))
            parts.append((np.array(hashes, dtype=np.uint64), lengths))
            if number % step == 0:
                source.compared_tokens += len(ids)
                find_runs(vocabulary, documents, table, source.is_found)
        source.documents[split] = Documents(*map(np.concatenate, zip(*parts, strict=True)))
    return source


def find_runs(
    vocabulary: Vocabulary, documents: list[np.ndarray], table: RunTable, is_found: np.ndarray
) -> None:
    """Find the tasks' runs in documents.

    Args:
        documents: tokens of each, which begin with the end-of-text token.
        is_found: (n,) bool, set where a run is found.
    """
    if not len(table.runs):
        return
    for first in range(0, len(documents), DOCUMENTS_AT_ONCE):
        batch = documents[first : first + DOCUMENTS_AT_ONCE]
        tokens = [document[1:].tolist() for document in batch]
        texts = vocabulary.tokenizer.decode_batch(tokens, skip_special_tokens=False)
        is_found[table.find(hash_documents(texts))] = True
