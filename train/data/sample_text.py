"""Which text a sample is: its documents, with file and row where the shard has an index, and how they begin."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from record.durable import make_printable
from train.data.batch import Loader
from train.data.document_index import DocumentIndex, index_path, read_index
from train.data.manifest import DataError
from train.data.shards import ShardSet
from train.data.tokenizer import Vocabulary

CHARACTERS = 200  # of a document that are shown
TOKENS_PER_CHARACTER = 4  # at most: a character is up to 4 bytes, and a token at least one


def list_documents(
    loader: Loader, vocabulary: Vocabulary, samples: Sequence[int], most: int
) -> list[dict[str, Any]]:
    """List up to `most` documents that samples are taken from, in the order of the samples.

    Returns:
        Of each document: sample, source, shard; file, row (from 1) and hash (XXH3 of the text) where
        the shard has an index; text: its first characters, or those of the sample without an index.
        Nothing in it can act on a terminal. What cannot be read is left out.
    """
    documents: list[dict[str, Any]] = []
    indexes: dict[Path, DocumentIndex | None] = {}
    at = loader.mixture.locate(np.asarray(samples[:most], dtype=np.int64))
    for sample, source, shard, window in zip(samples, at.source, at.shard, at.window, strict=False):
        shards = loader.sources[source]
        info = shards.shards["train"][shard]
        facts = {
            "sample": int(sample),
            "source": loader.mixture.names[source],
            "shard": info.file,
        }
        path = index_path(shards.folder, info)
        if path not in indexes:
            indexes[path] = read_index(shards.folder, info)
        begin = int(window) * loader.config.seq_len
        end = begin + loader.config.seq_len
        try:
            for document in read_documents(
                shards, int(shard), indexes[path], begin, end, vocabulary
            ):
                documents.append(facts | document)
        except DataError:  # the next batch says so
            continue
    return documents[:most]


def read_documents(
    shards: ShardSet,
    shard: int,
    index: DocumentIndex | None,
    begin: int,
    end: int,
    vocabulary: Vocabulary,
) -> Iterator[dict[str, Any]]:
    """Yield the documents that have a token in [begin, end) of a training shard. Raises DataError."""
    if index:
        for number in index.find(begin, end):
            first, after = index.begin[number : number + 2]
            yield {
                "file": make_printable(index.names[index.file[number]]),
                "row": int(index.row[number]) + 1,
                "hash": f"{index.text_hash[number]:016x}",
                "text": read_text(shards, shard, int(first), int(after), vocabulary),
            }
        return
    (ids,) = shards.read("train", shard, [(begin, end)])
    inside = np.flatnonzero(ids[1:] == vocabulary.end_of_text) + 1
    firsts = [begin, *(begin + inside).tolist()]
    for first, after in zip(firsts, [*firsts[1:], end], strict=True):
        yield {"text": read_text(shards, shard, first, after, vocabulary)}


def read_text(shards: ShardSet, shard: int, begin: int, end: int, vocabulary: Vocabulary) -> str:
    """Return the first CHARACTERS of the text of these tokens, with escapes."""
    most = 1 + CHARACTERS * TOKENS_PER_CHARACTER
    (ids,) = shards.read("train", shard, [(begin, min(end, begin + most))])
    text = vocabulary.decode(ids[ids != vocabulary.end_of_text])
    return make_printable(text[:CHARACTERS])
