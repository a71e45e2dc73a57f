"""A source's text into token shards: read in order, encoded on all cores, sealed one after another.

    documents -> ids -> pending, by split -> seal: a training shard, a validation shard, the manifest

The manifest knows where in the source each seal begins, so that a killed run goes on behind the last one, a larger
limit continues where a smaller one ended, and a shard that is missing is made again. The bytes depend on the source
at its revision, the tokenizer and the size of shards only: not on batches, cores, kills or limits.
"""

import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from record.durable import write_whole
from train.data.manifest import (
    SPLITS,
    DataError,
    Seal,
    ShardInfo,
    manifest_of,
    read_manifest,
)
from train.data.shards import DTYPES, token_bytes, write_shard
from train.data.sources.fetch import Files
from train.data.sources.pin import Pinned
from train.data.sources.rows import Cursor, Document, Dropped, documents
from train.data.tokenizer import Vocabulary

log = logging.getLogger(__name__)

EXAMPLES = 5  # of the rows dropped for each reason, that the manifest names


@dataclasses.dataclass(frozen=True)
class Entry:
    """A document whose text went to the tokenizer, and what was dropped since the one before it."""

    name: str
    at: Cursor
    text_bytes: int
    dropped: "Drops"

    @property
    def behind(self) -> Cursor:
        return Cursor(self.at.file, self.at.row + 1)


class Drops:
    """Rows left out: how many for each reason, and the first of them by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[dict[str, Any]] = []

    def add(self, row: Dropped, file: str) -> None:
        self.counts[row.reason] += 1
        if self.counts[row.reason] <= EXAMPLES:
            self.examples.append(
                {"file": file, "row": row.at.row, "reason": row.reason, "what": row.what}
            )

    def update(self, other: "Drops") -> None:
        for example in other.examples:
            if sum(known["reason"] == example["reason"] for known in self.examples) < EXAMPLES:
                self.examples.append(example)
        self.counts.update(other.counts)


class Pending:
    """Documents of one split that are encoded and not sealed yet, end to end in one array that grows."""

    def __init__(self, vocabulary: Vocabulary):
        self.end_of_text = vocabulary.end_of_text
        self.ids = np.empty(2**16, DTYPES[token_bytes(vocabulary.size)])
        self.clear()

    def clear(self) -> None:
        self.tokens = self.documents = self.text_bytes = 0

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        end = self.tokens + 1 + len(ids)
        if end > len(self.ids):
            self.ids = np.concatenate(
                (self.ids[: self.tokens], np.empty(end, self.ids.dtype))
            )  # about twice as long
        self.ids[self.tokens] = self.end_of_text
        self.ids[self.tokens + 1 : end] = ids
        self.tokens, self.documents, self.text_bytes = (
            end,
            self.documents + 1,
            self.text_bytes + text_bytes,
        )


class Maker:
    """Makes the shards of one source in a folder. Only one process may do so at a time.

    shard_tokens: a shard is sealed at the first end of a document past this, unless the folder has shards of another
    size. progress: called with the training tokens, the place in the source and the bytes of text, for each document.
    """

    def __init__(
        self,
        pinned: Pinned,
        v: Vocabulary,
        folder: Path,
        shard_tokens: int,
        files: Files,
        progress: Callable[[int, Cursor, int], None] = lambda tokens, at, text_bytes: None,
    ):
        self.pinned, self.v, self.folder, self.shard_tokens = pinned, v, folder, shard_tokens
        self.files, self.progress = files, progress
        self.read = documents  # what gives the rows of the source from a place on
        self.pending = {split: Pending(v) for split in SPLITS}
        self.seals: list[Seal] = []
        self.next: Cursor = Cursor(0, 0)
        self.end: str | None = None  # "all": the source has no more; "limit": enough of it
        self.dropped, self.since_seal = Drops(), Drops()
        self.compressed_bpb: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.take_up()

    @property
    def path(self) -> Path:
        return self.folder / "manifest.json"

    def take_up(self) -> None:
        """Go on behind what is sealed, and remove files of what is not."""
        if self.path.is_file():
            manifest, self.seals = read_manifest(self.folder)
            self.next, self.end = Cursor(*manifest["next"]), manifest["end"]
            self.dropped.counts.update(manifest["dropped"])
            self.dropped.examples = manifest["dropped_examples"]
            self.compressed_bpb = manifest["compressed_bpb"]
            self.shard_tokens = manifest["shard_tokens"]  # as those that are there
        kept = {info.file for seal in self.seals for info in seal.infos()}
        for path in (*self.folder.glob("*.bin*"), *self.folder.glob(f"{self.path.name}.tmp*")):
            if path.name not in kept:
                path.unlink()

    # ---- Making

    def tokens(self) -> int:
        """Training tokens, sealed or not."""
        return (
            sum(seal.train.tokens for seal in self.seals if seal.train)
            + self.pending["train"].tokens
        )

    def make(self, limit: float) -> Iterator[Seal]:
        """Seal shard after shard, up to the document that reaches `limit` training tokens; yields each seal."""
        if self.end == "limit" and self.tokens() < limit:
            self.go_on()
        if self.end is None and self.tokens() >= limit:  # it was lowered
            self.end = "limit"
            self.write_manifest()
        if self.end is not None:
            return
        if self.seals:
            log.info(
                "source %s: going on behind %d documents in %d sealed shards",
                self.pinned.source.name,
                sum(seal.documents for seal in self.seals),
                len(self.seals),
            )
        made, begins, count, behind = self.tokens(), self.next, 0, self.next
        rest = Drops()
        for entry, ids in self.encoded(self.next, rest):
            split = self.add(entry, ids)
            self.since_seal.update(entry.dropped)
            count, behind = count + 1, entry.behind
            made += len(ids) + 1 if split == "train" else 0
            self.progress(made, entry.at, entry.text_bytes)
            reached = made >= limit
            if reached or self.pending["train"].tokens >= self.shard_tokens:
                yield self.seal(begins, behind, count, "limit" if reached else None)
                begins, count = behind, 0
            if reached:
                return
        self.since_seal.update(rest)
        self.seal(begins, Cursor(len(self.pinned.files), 0), count, "all")
        if count:
            yield self.seals[-1]

    def encoded(self, at: Cursor, rest: Drops) -> Iterator[tuple[Entry, np.ndarray]]:
        """Documents from a place in the source on, with their ids; what is dropped behind the last goes into `rest`."""
        drawn: deque[Entry] = deque()

        def texts() -> Iterator[str]:
            drops = Drops()
            for item in self.read(self.pinned, self.files, at):
                if isinstance(item, Dropped):
                    drops.add(item, self.pinned.files[item.at.file].name)
                    continue
                drawn.append(self.entry(item, drops))
                drops = Drops()
                yield item.text
            rest.update(drops)

        for ids in self.v.encode_all(texts()):
            yield drawn.popleft(), ids

    @staticmethod
    def entry(document: Document, drops: Drops) -> Entry:
        text = document.text
        return Entry(
            document.name, document.at, len(text) if text.isascii() else len(text.encode()), drops
        )

    def add(self, entry: Entry, ids: np.ndarray) -> str:
        """A document goes to its split, which is returned."""
        split = "validation" if self.pinned.holds_out(entry.name) else "train"
        self.pending[split].add(ids, entry.text_bytes)
        return split

    def seal(self, begins: Cursor, behind: Cursor, count: int, end: str | None) -> Seal:
        """Write what is pending as one shard a split, and the manifest that knows them."""
        infos = {}
        for split in SPLITS:
            number = sum(bool(getattr(seal, split)) for seal in self.seals)
            infos[split] = self.write(split, f"{split}_{number:05d}.bin")
        seal = Seal(
            (begins.file, begins.row),
            count,
            dict(self.since_seal.counts),
            infos["train"],
            infos["validation"],
        )
        self.dropped.update(self.since_seal)
        self.since_seal.counts.clear()
        self.since_seal.examples.clear()
        self.next, self.end = behind, end
        self.seals += [seal] if count else []
        self.write_manifest()
        return seal

    def write(self, split: str, file: str) -> ShardInfo | None:
        """Write what is pending of a split as a shard; None where that is nothing."""
        pending = self.pending[split]
        if not pending.documents:
            return None
        info = write_shard(
            self.folder / file,
            pending.ids[: pending.tokens],
            pending.documents,
            pending.text_bytes,
            self.v.sha256,
            self.pinned.source.name,
            self.v.size,
        )
        pending.clear()
        return info

    def write_manifest(self) -> None:
        p = self.pinned
        write_whole(
            self.path,
            manifest_of(
                self.seals,
                source=p.source.name,
                revision=p.revision,
                key=p.key,
                tokenizer_sha256=self.v.sha256,
                shard_tokens=self.shard_tokens,
                end=self.end,
                next=self.next,
                dropped=self.dropped.counts,
                dropped_examples=self.dropped.examples,
                compressed_bpb=self.compressed_bpb,
            ),
        )

    def go_on(self) -> None:
        """The limit was raised: a last shard that it cut short is made anew, as if the limit had not been there."""
        last = self.seals[-1] if self.seals else None
        self.end = None
        if last and (last.train is None or last.train.tokens < self.shard_tokens):
            self.seals.pop()
            self.next = Cursor(*last.begins)
            self.dropped.counts.subtract(last.dropped)
            self.dropped.counts = +self.dropped.counts
            behind = [last.begins[0], last.begins[1]]
            self.dropped.examples = [
                example
                for example in self.dropped.examples
                if [self.file_number(example["file"]), example["row"]] < behind
            ]
            self.write_manifest()
            for info in last.infos():
                (self.folder / info.file).unlink(missing_ok=True)

    def file_number(self, name: str) -> int:
        return next(i for i, file in enumerate(self.pinned.files) if file.name == name)

    # ---- Making again

    def absent(self) -> list[int]:
        """Seals of which a shard is not there."""
        return [
            k
            for k, seal in enumerate(self.seals)
            if not all((self.folder / info.file).is_file() for info in seal.infos())
        ]

    def remake(self, k: int) -> None:
        """Make what is not there of a seal's shards again, between two others. Raises DataError where it does not come
        out as it was; then it is not there."""
        seal = self.seals[k]
        for count, (entry, ids) in enumerate(self.encoded(Cursor(*seal.begins), Drops()), 1):
            self.add(entry, ids)
            self.progress(self.tokens(), entry.at, entry.text_bytes)
            if count == seal.documents:
                break
        self.files.done(entry.at.file)
        for split, info in zip(SPLITS, (seal.train, seal.validation), strict=True):
            if (
                info
                and not (path := self.folder / info.file).is_file()
                and self.write(split, info.file) != info
            ):
                path.unlink(missing_ok=True)
                raise DataError(
                    f"{self.folder}: {info.file} does not come out as it was when it is made again "
                    f"(revision {self.pinned.revision}, tokenizer {self.v.sha256[:12]}); delete "
                    f"{self.folder} and run: make data"
                )
            self.pending[split].clear()


def rows_dropped(counts: dict[str, int]) -> str:
    """Reasons and numbers, for a message."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "none"
