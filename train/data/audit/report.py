"""Entry point: what is in the prepared shards, before anything is trained on them.

    python -m train.data.audit.report           a screen of it, and all of it in DATA_DIR/report.json

For each source: documents, tokens, lengths, exact duplicates, near-duplicates (near_duplicates.py),
dropped rows, random sequences, and the evaluation tasks that it shares text with
(contamination.py). A length in tokens counts the end-of-text token that a document begins with.

Two documents are exact duplicates if their tokens are equal. 64-bit hashes decide that: among 10^8
documents, two others agree with a probability of 0.03%.
"""

import itertools
import json
import logging
import sys
import zlib
from typing import Any

import numpy as np

from record.durable import write_whole
from settings import load_config
from settings.config import Config
from train.console import start_logging
from train.data import prepare
from train.data.audit import report_text
from train.data.audit.contamination import RunTable, read_tasks
from train.data.audit.scan import Source, read_source
from train.data.manifest import SPLITS, DataError
from train.data.shards import ShardSet
from train.data.tokenizer import Vocabulary

log = logging.getLogger(__name__)

QUANTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)  # percent of the documents
SEQUENCES = 10


def make_report(config: Config) -> dict[str, Any]:
    """Return all of the report, as it is written to report.json. Raises SettingsError, DataError."""
    tasks = read_tasks(config.core_bundle, prepare.data_dir(config))
    v = prepare.vocabulary(config)
    table = RunTable(tasks)
    opened = prepare.open_sources(config, v)
    sources = {name: read_source(v, shards, table) for name, shards in opened.items()}
    report: dict[str, Any] = {
        "schema": 1,
        "mixture": config.mixture,
        "tokenizer_sha256": v.sha256,
        "tokenizer_size": v.size,
        "seed": config.seed,
        "seq_len": config.seq_len,
        "sources": {name: describe_source(config, v, sources[name]) for name in sources},
        "in_two_sources": compare_sources(sources),
        "tasks": {
            task.name: {
                "file": str(task.file),
                "rows": task.rows,
                "short": task.short,
            }
            for task in tasks
        },
        "compared": {},
    }
    for name, source in sources.items():
        report["compared"][name] = {
            "tokens": source.compared_tokens,
            "of_tokens": sum(source.shards.total(split, "tokens") for split in SPLITS),
            "tasks": {task.name: table.count_shared(task, source.is_found) for task in tasks},
        }
    report["warnings"] = report_text.list_warnings(report)
    return report


def describe_source(config: Config, v: Vocabulary, source: Source) -> dict[str, Any]:
    """Return the part of the report on one source, without what it shares with others."""
    shards = source.shards
    manifest = shards.manifest
    splits = {}
    for split, documents in source.documents.items():
        tokens = shards.total(split, "tokens")
        text_bytes = shards.total(split, "text_bytes")
        quantiles = np.percentile(documents.lengths, QUANTILES, method="inverted_cdf")
        splits[split] = {
            "documents": len(documents.hashes),
            "tokens": tokens,
            "text_bytes": text_bytes,
            "bytes_per_token": text_bytes / tokens,
            "duplicates": count_repeated(find_repeated(documents.hashes), documents.lengths),
            "near_duplicates": count_repeated(documents.is_near, documents.lengths),
            "length_quantiles": dict(zip(map(str, QUANTILES), quantiles.tolist(), strict=True)),
            "windows": draw_sequences(config, v, shards, split),
        }
    train, validation = (source.documents[split].hashes for split in SPLITS)
    return {
        "folder": str(shards.folder),
        "revision": manifest.revision,
        "documents_read": manifest.documents + sum(manifest.dropped.values()),
        "dropped": manifest.dropped,
        "dropped_examples": manifest.dropped_examples,
        "splits": splits,
        "validation_in_train": int(np.isin(validation, train).sum()),
        "validation_near_train": source.validation_near_train,
    }


def find_repeated(hashes: np.ndarray) -> np.ndarray:
    """Tell which documents are equal to an earlier one: (documents,) bool. hashes: (documents,) uint64."""
    _, firsts = np.unique(hashes, return_index=True)
    is_repeated = np.ones(len(hashes), dtype=bool)
    is_repeated[firsts] = False
    return is_repeated


def count_repeated(is_repeated: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """Count documents and their tokens.

    Args:
        is_repeated: (documents,) bool.
        lengths: (documents,), in tokens.
    """
    tokens = int(lengths[is_repeated].sum())
    share = tokens / int(lengths.sum())
    return {"documents": int(is_repeated.sum()), "tokens": tokens, "token_share": share}


def draw_sequences(
    config: Config, v: Vocabulary, shards: ShardSet, split: str
) -> list[dict[str, Any]]:
    """Decode SEQ_LEN tokens, or up to the end of the shard, from random positions.

    SEED and the source decide the positions, counted over all shards.
    """
    infos = shards.shards[split]
    ends = np.cumsum([info.tokens for info in infos])
    seed = [config.seed, zlib.crc32(f"{shards.manifest.source} {split}".encode())]
    chosen = np.random.default_rng(seed).choice(ends[-1], min(SEQUENCES, ends[-1]), replace=False)
    sequences = []
    for position in np.sort(chosen):
        number = int(np.searchsorted(ends, position, "right"))
        begin = int(position - ends[number]) + infos[number].tokens
        end = min(begin + config.seq_len, infos[number].tokens)
        (ids,) = shards.read(split, number, [(begin, end)])
        sequences.append(
            {
                "shard": infos[number].file,
                "token": begin,
                "tokens": len(ids),
                "text": v.decode(ids.tolist()),
            }
        )
    return sequences


def compare_sources(sources: dict[str, Source]) -> list[dict[str, Any]]:
    """List pairs of sources with equal documents, and how many of each are in the other."""
    hashes = {
        name: np.concatenate([source.documents[split].hashes for split in SPLITS])
        for name, source in sources.items()
    }
    pairs = []
    for one, other in itertools.combinations(hashes, 2):
        there = int(np.isin(hashes[one], hashes[other]).sum())
        back = int(np.isin(hashes[other], hashes[one]).sum())
        if there:
            pairs.append({"sources": [one, other], "documents": [there, back]})
    return pairs


def write_report(config: Config) -> None:
    """Write the report, and print a screen of it. Raises SettingsError, DataError."""
    report = make_report(config)
    path = prepare.data_dir(config) / "report.json"
    try:
        write_whole(path, json.dumps(report, indent=1, ensure_ascii=False).encode(errors="replace"))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); make room, or choose another folder with "
            "DATA_DIR"
        ) from error
    for line in report_text.render(report):
        log.info("%s", line)
    log.info("All figures, sequences and examples: %s", path)


def main() -> int:
    start_logging()
    return prepare.exit_code(lambda: write_report(load_config()))


if __name__ == "__main__":
    sys.exit(main())
