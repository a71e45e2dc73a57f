"""Show which text samples are: the first characters of each window, for the record and `make status`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from record.durable import make_printable
from train.data.batch import Loader
from train.data.manifest import DataError
from train.data.tokenizer import Vocabulary

CHARACTERS = 200  # of a sample that are shown
TOKENS_PER_CHARACTER = 4  # at most: a character is up to 4 bytes, and a token at least one


def list_texts(
    loader: Loader, vocabulary: Vocabulary, samples: Sequence[int], most: int
) -> list[dict[str, Any]]:
    """List how up to `most` samples begin.

    Returns:
        Of each sample: sample, source, shard, and text, with escapes, so that nothing in it acts on
        a terminal. A sample that cannot be read is left out.
    """
    texts: list[dict[str, Any]] = []
    at = loader.mixture.locate(np.asarray(samples[:most], dtype=np.int64))
    for sample, source, shard, window in zip(samples, at.source, at.shard, at.window, strict=False):
        shards = loader.sources[source]
        begin = int(window) * loader.config.seq_len
        end = begin + min(loader.config.seq_len, CHARACTERS * TOKENS_PER_CHARACTER)
        try:
            (ids,) = shards.read("train", int(shard), [(begin, end)])
        except DataError:  # the next batch says so
            continue
        texts.append(
            {
                "sample": int(sample),
                "source": loader.mixture.names[source],
                "shard": shards.shards["train"][shard].file,
                "text": make_printable(vocabulary.decode(ids)[:CHARACTERS]),
            }
        )
    return texts
