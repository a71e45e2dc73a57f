"""Find near-duplicates: documents that have most of their text in common with an earlier one.

    text -> words -> runs of 5 words -> MinHash: 14 keys of 8 hashes each -> a key that was seen before

Each of the 112 hashes of a document is the smallest one of its runs, under a permutation of its
own. Two documents agree in one with a probability that is the Jaccard similarity s of their sets
of runs (Broder 1997). So they have a key in common with a probability of 1 - (1 - s^8)^14:

    s             0.5    0.6    0.7    0.75   0.8    0.85   0.9
    probability   5%     21%    56%    77%    92%    99%    99.9%

These are the parameters of FineWeb (Penedo et al. 2024). Nothing is verified afterwards. An
earlier document counts even if it was left out itself: of a chain of versions, the first stays.

The result depends on the documents and their order only. Memory: 112 bytes per document, three
times that while sorted keys are merged, and one batch of text.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from train.data.sources.fetch import Files
from train.data.sources.pin import Pinned
from train.data.sources.rows import START, Cursor, Document, Dropped, documents
from train.data.word_hashes import (
    MARKER_HASH,
    MARKER_WORDS,
    MULTIPLIER,
    hash_documents,
    hash_runs,
)

RUN_WORDS = 5
BANDS = 14  # keys per document
ROWS = 8  # hashes per key
NO_KEY = 0  # of a document without a word, which is like no other
REASON = "near-duplicate"  # in the manifest's counts of dropped rows
BATCH_CHARACTERS = 2**22
LONGEST_CHARACTERS = 2**21  # of a longer document, only its beginning is compared


def draw_constants(name: str) -> np.ndarray:
    """Draw one constant per permutation, always the same: (BANDS, ROWS) uint64."""
    drawn = [xxhash.xxh3_64_intdigest(f"{name} {k}".encode()) for k in range(BANDS * ROWS)]
    return np.array(drawn, dtype=np.uint64).reshape(BANDS, ROWS)


# x -> (x ^ MASKS) * FACTORS mod 2^64 permutes the 64-bit integers, as FACTORS are odd.
MASKS = draw_constants("mask")
FACTORS = draw_constants("factor") | np.uint64(1)


def compute_keys(words: np.ndarray) -> np.ndarray:
    """Compute the MinHash keys of documents.

    The last runs of a document reach into the marker after it, so that a document of one word has
    a run too.

    Args:
        words: (words,) uint64 of word_hashes.hash_documents.

    Returns:
        (documents, BANDS) uint64.
    """
    markers = np.flatnonzero(words == MARKER_HASH).reshape(-1, MARKER_WORDS)
    lengths = markers[1:, 0] - markers[:-1, -1] - 1
    begin = markers[0, 0]
    is_word = words[begin : 1 - RUN_WORDS] != MARKER_HASH
    runs = hash_runs(words[begin:], RUN_WORDS)[is_word]
    keys = np.full((len(lengths), BANDS), NO_KEY, dtype=np.uint64)
    has_words = lengths > 0
    if not has_words.any():
        return keys
    first_runs = (np.cumsum(lengths) - lengths)[has_words]
    for band in range(BANDS):
        key = np.zeros(len(first_runs), dtype=np.uint64)
        for mask, factor in zip(MASKS[band], FACTORS[band], strict=True):
            smallest = np.minimum.reduceat((runs ^ mask) * factor, first_runs)
            key = key * MULTIPLIER + smallest
        keys[has_words, band] = key
    return keys


class SeenKeys:
    """Keys of the documents so far, in sorted arrays. Each is at least twice as long as the next."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Say which documents have a key that was seen: (documents,) bool.

        Args:
            keys: (documents, BANDS) uint64.
        """
        is_seen = np.zeros(keys.shape, dtype=bool)
        for array in self.arrays:
            places = np.searchsorted(array, keys)
            places[places == len(array)] = 0
            is_seen |= array[places] == keys
        return (is_seen & (keys != NO_KEY)).any(axis=1)

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Add documents, and say which have a key of an earlier one, also one of these.

        Args:
            keys: (documents, BANDS) uint64.

        Returns:
            (documents,) bool.
        """
        if not keys.size:
            return np.zeros(0, dtype=bool)
        new, first_places = np.unique(keys, return_index=True)
        is_repeated = np.ones(keys.size, dtype=bool)
        is_repeated[first_places] = False
        is_repeated = is_repeated.reshape(keys.shape) & (keys != NO_KEY)
        is_near = self.find(keys) | is_repeated.any(axis=1)
        self.arrays.append(new)
        while len(self.arrays) > 1 and len(self.arrays[-2]) < 2 * len(self.arrays[-1]):
            last = self.arrays.pop()
            self.arrays[-1] = np.union1d(self.arrays[-1], last)
        return is_near


def drop_near_duplicates(
    pinned: Pinned, files: Files, at: Cursor = START
) -> Iterator[Document | Dropped]:
    """Yield the rows of a source from a place on, near-duplicates of earlier documents as dropped.

    The source is always read from its start, because the documents before `at` decide too.
    Raises CorpusError.
    """
    seen = SeenKeys()
    for rows in split_batches(documents(pinned, files)):
        texts = [row.text[:LONGEST_CHARACTERS] for row in rows if isinstance(row, Document)]
        is_near = iter(seen.add(compute_keys(hash_documents(texts))))
        for row in rows:
            # a document that was chosen for want of another one to hold out must stay
            if isinstance(row, Document) and next(is_near) and row.name != pinned.held_out:
                row = Dropped(REASON, row.at, "most of its text is in an earlier document")
            if row.at >= at:
                yield row


def split_batches(rows: Iterable[Document | Dropped]) -> Iterator[list[Document | Dropped]]:
    """Split rows into lists of about BATCH_CHARACTERS."""
    batch: list[Document | Dropped] = []
    characters = 0
    for row in rows:
        batch.append(row)
        if isinstance(row, Document):
            characters += len(row.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    yield batch
