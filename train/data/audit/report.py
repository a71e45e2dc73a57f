"""Entry point: what is in the prepared shards, before anything is trained on them.

    python -m train.data.audit.report           as text, and in full in DATA_DIR/report.json

Of each source: documents, tokens, lengths, exact duplicates, what was dropped, windows to look at, and which
evaluation tasks it shares text with (overlap.py). A length in tokens counts the end-of-text token that a
document begins with. Two documents are the same where their tokens are: 64-bit hashes say so, which
takes 8 bytes a document, and 4 for its length; among 10**8 documents two others agree with a probability of 0.03%.
"""

import concurrent.futures
import dataclasses
import json
import logging
import os
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from record.durable import write_whole
from settings.config import Config
from train.console import start_logging
from train.data import prepare
from train.data.audit import overlap, report_text
from train.data.audit.overlap import Task
from train.data.manifest import SPLITS, DataError
from train.data.shards import ShardSet
from train.data.tokenizer import Vocabulary

log = logging.getLogger(__name__)

QUANTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)  # per cent of the documents
WINDOWS = 10
DROPPED_EXAMPLES = 5
HASHED_AT_ONCE = 2**20  # tokens
SCANNED_AT_ONCE = 2**19  # tokens handed to a process
DOCUMENTS_AT_ONCE = 2**18
PIECE = 2**13  # tokens of a long document that are taken, or not, together
SEAM = 256  # tokens behind a piece that are read too, for the grams that begin in it
SAID_EVERY_S = 10
REPORT_TOKENS = 50_000_000  # of each source that are compared with the tasks, at most
WORTH_PROCESSES = 4_000_000  # tokens to scan: below, one is done before others have started


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------------
# Documents
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Documents:
    """All documents of a split, in the order of the shards. hashes (n,) uint64, lengths (n,) uint32 in tokens."""

    hashes: np.ndarray
    lengths: np.ndarray


def read_documents(shards: ShardSet, split: str, end_of_text: int) -> Documents:
    """Hash every document of a split, on all cores: a thread a shard, of bounded memory each."""
    infos, began = shards.shards[split], time.perf_counter()
    found, last = [(np.zeros(0, np.uint64), np.zeros(0, np.uint32))], began

    def one(k: int) -> tuple[np.ndarray, np.ndarray]:
        hashes, lengths = hash_documents(shards.tokens(split, k), end_of_text)
        if len(hashes) != infos[k].documents or lengths.sum(dtype=np.int64) != infos[k].tokens:
            raise DataError(
                f"{shards.folder / infos[k].file}: {len(hashes)} end-of-text tokens, the first of them not "
                f"in front or not one for each of the {infos[k].documents} documents of the manifest; "
                f"{shards.remedy()}"
            )
        return hashes, lengths

    with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
        for k, hashed in enumerate(pool.map(one, range(len(infos))), 1):
            found.append(hashed)
            if time.perf_counter() - last > SAID_EVERY_S:
                last = time.perf_counter()
                log.info(
                    "%s %s: documents of %d of %d shards read", shards.folder, split, k, len(infos)
                )
    return Documents(np.concatenate([h for h, _ in found]), np.concatenate([n for _, n in found]))


def hash_documents(ids: np.ndarray, end_of_text: int) -> tuple[np.ndarray, np.ndarray]:
    """(documents,) uint64 hashes and (documents,) uint32 lengths of a shard. ids (n,) begins with end_of_text.

    A document's hash is the sum of one 64-bit word for each token, mixed from the token and its place in the document.
    """
    n, step = len(ids), HASHED_AT_ONCE
    starts = np.concatenate(
        [
            np.zeros(0, np.int64),
            *(np.flatnonzero(ids[a : a + step] == end_of_text) + a for a in range(0, n, step)),
        ]
    )
    hashes = np.zeros(len(starts), dtype=np.uint64)
    for a in range(int(starts[0]) if starts.size else n, n, step):
        b = min(a + step, n)
        first, last = np.searchsorted(starts, a, "right") - 1, np.searchsorted(starts, b, "left")
        begins = starts[
            first:last
        ]  # of the document that is open at a, and of those that begin before b
        cuts = np.maximum(begins, a) - a
        places = np.arange(a, b) - np.repeat(begins, np.diff(cuts, append=b - a))
        words = places.astype(np.uint64) << np.uint64(32) | ids[a:b].astype(np.uint64)
        hashes[first:last] += np.add.reduceat(mixed(words), cuts)
    return hashes, np.diff(starts, append=n).astype(np.uint32)


def mixed(words: np.ndarray) -> np.ndarray:
    """Each 64-bit word as another that depends on all its bits, one to one (the finaliser of splitmix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


def duplicates(v: Vocabulary, shards: ShardSet, split: str, docs: Documents) -> dict[str, Any]:
    """Documents that are equal to an earlier one of the split, their share of its tokens, and the most frequent."""
    order = np.argsort(docs.hashes, kind="stable")
    ranked = docs.hashes[order]
    begins = np.flatnonzero(
        np.diff(ranked, prepend=~ranked[:1])
    )  # of each group of equal ones, the earliest first
    sizes = np.diff(begins, append=len(ranked))
    repeated = np.ones(len(ranked), dtype=bool)
    repeated[order[begins]] = False
    tokens = int(docs.lengths[repeated].sum(dtype=np.int64))
    found: dict[str, Any] = {
        "documents": int(repeated.sum()),
        "tokens": tokens,
        "token_share": tokens / max(1, int(docs.lengths.sum(dtype=np.int64))),
        "worst": None,
    }
    if found["documents"]:
        firsts = order[begins]
        worst = int(firsts[sizes == sizes.max()].min())
        found["worst"] = {
            "count": int(sizes.max()),
            "text": beginning(v, shards, split, docs, worst)[:80],
        }
    return found


def beginning(
    v: Vocabulary, shards: ShardSet, split: str, docs: Documents, document: int, tokens: int = 400
) -> str:
    """The text of a document's first tokens."""
    ends = np.cumsum([info.documents for info in shards.shards[split]])
    k = int(np.searchsorted(ends, document, "right"))
    start = int(
        docs.lengths[ends[k] - shards.shards[split][k].documents : document].sum(dtype=np.int64)
    )
    return v.decode(
        shards.tokens(split, k)[
            start + 1 : start + min(int(docs.lengths[document]), tokens)
        ].tolist()
    )


def quantiles(lengths: np.ndarray) -> dict[str, int | None]:
    """Per cent -> the smallest length that so many of the documents do not exceed, in tokens."""
    if not lengths.size:
        return {str(q): None for q in QUANTILES}
    values = np.percentile(lengths, QUANTILES, method="inverted_cdf")
    return {str(q): int(value) for q, value in zip(QUANTILES, values, strict=True)}


def windows(
    c: Config, v: Vocabulary, name: str, shards: ShardSet, split: str
) -> list[dict[str, Any]]:
    """WINDOWS stretches of SEQ_LEN tokens, none across a shard, at places that SEED decides, decoded."""
    places = np.array(
        [
            max(1, info.tokens - c.seq_len + 1) if info.tokens else 0
            for info in shards.shards[split]
        ],
        dtype=np.int64,
    )
    rng = np.random.default_rng([c.seed, zlib.crc32(f"{name} {split}".encode())])
    total = int(places.sum())
    chosen = []
    for place in np.sort(rng.choice(total, min(WINDOWS, total), replace=False)) if total else ():
        k = int(np.searchsorted(places.cumsum(), place, "right"))
        start = int(place - places[:k].sum())
        ids = shards.tokens(split, k)[start : start + c.seq_len]
        chosen.append(
            {
                "shard": shards.shards[split][k].file,
                "token": start,
                "tokens": len(ids),
                "text": v.decode(ids.tolist()),
            }
        )
    return chosen


# ---------------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------------


def describe(
    c: Config, v: Vocabulary, name: str, shards: ShardSet, docs: dict[str, Documents]
) -> dict[str, Any]:
    """All but the overlaps of one source."""
    splits = {}
    for split in SPLITS:
        tokens, text_bytes = shards.total(split, "tokens"), shards.total(split, "text_bytes")
        splits[split] = {
            "documents": shards.total(split, "documents"),
            "tokens": tokens,
            "text_bytes": text_bytes,
            "bytes_per_token": text_bytes / tokens if tokens else None,
            "duplicates": duplicates(v, shards, split, docs[split]),
            "length_quantiles": quantiles(docs[split].lengths),
            "windows": windows(c, v, name, shards, split),
        }
    reasons: dict[str, Any] = {}
    for reason, count in shards.manifest["dropped"].items():
        examples = [e for e in shards.manifest["dropped_examples"] if e["reason"] == reason]
        reasons[reason] = {"documents": count, "examples": examples[:DROPPED_EXAMPLES]}
    return {
        "folder": str(shards.folder),
        "revision": shards.manifest["revision"],
        "documents_read": shards.manifest["documents"] + sum(shards.manifest["dropped"].values()),
        "dropped": reasons,
        "splits": splits,
        "validation_in_train": int(np.isin(docs["validation"].hashes, docs["train"].hashes).sum()),
    }


def in_two_sources(docs: dict[str, dict[str, Documents]]) -> list[dict[str, Any]]:
    """Pairs of sources with the same document in both: how many of each are in the other one too."""
    hashes = {
        name: np.concatenate([of[split].hashes for split in SPLITS]) for name, of in docs.items()
    }
    pairs = []
    for one in hashes:
        for other in list(hashes)[list(hashes).index(one) + 1 :]:
            if there := int(np.isin(hashes[one], hashes[other]).sum()):
                back = int(np.isin(hashes[other], hashes[one]).sum())
                pairs.append({"sources": [one, other], "documents": [there, back]})
    return pairs


def spread(
    shards: ShardSet, docs: dict[str, Documents], end_of_text: int, limit: int
) -> Iterator[tuple[int, np.ndarray]]:
    """About `limit` tokens of a source (0: all), evenly over its documents: (tokens, ids that hold them).

    What is taken or left is a document, or a piece of a long one: every so many of them, the first always. A
    piece within a document is opened by end_of_text, so that no gram spans what lies apart, and is read on for SEAM
    tokens.
    """
    total = sum(shards.total(split, "tokens") for split in SPLITS)
    share = min(1.0, limit / total) if limit and total else 1.0
    opener, held, tokens, seen = np.array([end_of_text]), [], 0, 0
    for split in SPLITS:
        document = 0
        for k, info in enumerate(shards.shards[split]):
            ids = np.asarray(shards.tokens(split, k))  # a memory map itself is slow to slice
            lengths = docs[split].lengths[document : document + info.documents]
            document += info.documents
            for begin, end, inside in pieces(lengths):
                number = np.arange(seen, seen + len(begin))
                seen += len(begin)
                taken = np.ceil((number + 1) * share) > np.ceil(number * share)
                for a, b, within in zip(
                    *(x[taken].tolist() for x in (begin, end, inside)), strict=True
                ):
                    held += (
                        [opener, ids[a : min(b, a + PIECE + SEAM)]]
                        if within
                        else [ids[a : min(b, a + PIECE + SEAM)]]
                    )
                    tokens += min(b, a + PIECE) - a
                    if tokens >= SCANNED_AT_ONCE:
                        yield tokens, np.concatenate(held)
                        held, tokens = [], 0
    if held:
        yield tokens, np.concatenate(held)


def pieces(lengths: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Each document of a shard cut every PIECE tokens: where pieces begin, where their documents end, and whether a
    piece begins within its document; for so many documents at once. lengths (documents,) in tokens."""
    offset = 0
    for some in np.array_split(lengths, -(-len(lengths) // DOCUMENTS_AT_ONCE) or 1):
        ends = offset + np.cumsum(some, dtype=np.int64)
        counts = -(-some.astype(np.int64) // PIECE)
        place = PIECE * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
        yield np.repeat(ends - some, counts) + place, np.repeat(ends, counts), place > 0
        offset += int(some.sum(dtype=np.int64))


def compare(
    c: Config,
    v: Vocabulary,
    opened: dict[str, ShardSet],
    docs: dict[str, dict[str, Documents]],
    tasks: list[Task],
) -> dict[str, dict[str, Any]]:
    """Source -> how much of it was compared with the tasks, how fast, and what it shares with each."""
    began = time.perf_counter()
    scanner = overlap.Scanner(v, tasks)
    totals = {
        name: sum(shards.total(split, "tokens") for split in SPLITS)
        for name, shards in opened.items()
    }
    work = sum(min(REPORT_TOKENS, total) for total in totals.values())
    pool = overlap.Pool(scanner, cores() if work >= WORTH_PROCESSES else 1)
    compared = {}
    try:
        for name, shards in opened.items():
            hit, tokens, text_bytes = np.zeros(len(scanner.known), dtype=bool), 0, 0
            began = last = time.perf_counter()
            sizes: list[int] = []

            def chunks(
                shards: ShardSet = shards, name: str = name, sizes: list[int] = sizes
            ) -> Iterator[np.ndarray]:
                for size, ids in spread(shards, docs[name], v.end_of_text, REPORT_TOKENS):
                    sizes.append(size)
                    yield ids

            for k, (read, found) in enumerate(pool.scan(chunks())):
                hit[found] = True
                tokens, text_bytes = tokens + sizes[k], text_bytes + read
                if time.perf_counter() - last > SAID_EVERY_S:
                    last = time.perf_counter()
                    log.info(
                        "%s: %s compared, %.1f MB/s",
                        name,
                        report_text.amount(tokens, totals[name]),
                        text_bytes / 1e6 / (last - began),
                    )
            compared[name] = {
                "tokens": tokens,
                "of_tokens": totals[name],
                "text_bytes": text_bytes,
                "seconds": time.perf_counter() - began,
                "cores": pool.cores,
                "tasks": {
                    task.name: overlap.shared(task, scanner.found_in(task, hit)) for task in tasks
                },
            }
    finally:
        pool.close()
    return compared


# ---------------------------------------------------------------------------------------------------


def make(c: Config) -> dict[str, Any]:
    """The whole report, as it is written to report.json."""
    tasks = overlap.read_tasks(c.core_bundle, prepare.data_dir(c))
    v = prepare.vocabulary(c)
    opened = prepare.open_sources(c, v)
    docs = {
        name: {split: read_documents(shards, split, v.end_of_text) for split in SPLITS}
        for name, shards in opened.items()
    }
    report: dict[str, Any] = {
        "schema": 1,
        "mixture": c.mixture,
        "tokenizer_sha256": v.sha256,
        "tokenizer_size": v.size,
        "seed": c.seed,
        "seq_len": c.seq_len,
        "sources": {
            name: describe(c, v, name, shards, docs[name]) for name, shards in opened.items()
        },
        "in_two_sources": in_two_sources(docs),
        "tasks": {
            task.name: {
                "file": str(task.file),
                "rows": task.rows,
                "short": task.short,
                "incomparable": task.incomparable,
            }
            for task in tasks
        },
        "compared": compare(c, v, opened, docs, tasks) if tasks else {},
    }
    report["warnings"] = report_text.warnings(report)
    return report


def main() -> int:
    start_logging()
    return prepare.exit_code(lambda: tell(Config.load()))


def tell(c: Config) -> None:
    """Write the report and say it. Raises DataError."""
    report, path = make(c), prepare.data_dir(c) / "report.json"
    try:
        write_whole(path, json.dumps(report, indent=1, ensure_ascii=False).encode(errors="replace"))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); make room, or choose another folder with "
            "DATA_DIR"
        ) from error
    for line in report_text.lines(report):
        log.info("%s", line)
    log.info("all of it, with the windows in full: %s", path)


if __name__ == "__main__":
    sys.exit(main())
