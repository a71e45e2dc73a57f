"""The text of a source to token shards: read in order, encoded on all cores, sealed one after another.

    documents -> ids -> pending, by split -> seal: a training shard, a validation shard, the manifest

The manifest knows where in the source each seal begins. So a killed run continues after the last one, a
larger limit continues where a smaller one ended, and a missing shard is made again. The bytes depend
only on the source at its revision, the tokenizer and the size of shards: not on batches, cores, kills
or limits.
"""

import itertools
import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from record.durable import write_whole
from train.data.manifest import (
    SPLITS,
    UNPROTECTED,
    DataError,
    Manifest,
    Seal,
    ShardInfo,
    make_anew,
    name_shard,
    read_manifest,
)
from train.data.shards import DTYPES, ShardSet, token_bytes, write_shard
from train.data.sources.fetch import Files
from train.data.sources.pin import Pinned
from train.data.sources.rows import Cursor, Document, Dropped, documents
from train.data.tokenizer import Vocabulary

log = logging.getLogger(__name__)

EXAMPLES = 5  # of the rows dropped for each reason, that the manifest names


class Drops:
    """Rows left out one after another: how many for each reason, and the first of them by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[dict[str, Any]] = []

    def add(self, row: Dropped, file: str) -> None:
        self.counts[row.reason] += 1
        if self.counts[row.reason] <= EXAMPLES:
            self.examples.append(
                {"file": file, "row": row.at.row, "reason": row.reason, "what": row.what}
            )


class Pending:
    """Encoded documents of one split that are not sealed yet.

    Attributes:
        ids: their tokens, end to end.
    """

    def __init__(self, vocabulary: Vocabulary):
        self.end_of_text = vocabulary.end_of_text
        self.dtype = DTYPES[token_bytes(vocabulary.size)]
        self.clear()

    def clear(self) -> None:
        self.ids = array(self.dtype.char)
        self.text_bytes = 0
        self.documents = 0

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def add(self, document: Document, ids: np.ndarray) -> int:
        """Add a document. Returns the bytes of its text."""
        self.ids.append(self.end_of_text)
        self.ids.frombytes(ids.astype(self.dtype).tobytes())
        text_bytes = len(document.text.encode())
        self.documents += 1
        self.text_bytes += text_bytes
        return text_bytes


class ShardWriter:
    """Makes the shards of one source in a folder. Only one process may do so at a time.

    Args:
        shard_tokens: a shard is sealed at the first end of a document past this, unless the folder has
            shards of another size.

    Attributes:
        manifest: as it is in the folder; its dropped rows are those before what is pending ends.
        progress: called for each document with the training tokens, the place in the source and the
            bytes of its text.
    """

    def __init__(
        self,
        pinned: Pinned,
        vocabulary: Vocabulary,
        folder: Path,
        shard_tokens: int,
        files: Files,
    ):
        self.pinned = pinned
        self.vocabulary = vocabulary
        self.folder = folder
        self.files = files
        self.progress: Callable[[int, Cursor, int], None] = lambda tokens, at, text_bytes: None
        self.pending = {split: Pending(vocabulary) for split in SPLITS}
        self.unsealed: Counter[str] = Counter()  # reason -> rows dropped since the last seal
        self.rest = Drops()
        self.path = folder / "manifest.json"
        self.manifest = Manifest(
            pinned.source.name, pinned.revision, pinned.key, vocabulary.sha256, shard_tokens
        )
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            self.manifest = read_manifest(folder)
            if self.manifest.schema == UNPROTECTED:
                ShardSet(folder, partial=True)  # refuses an edited one, before it gets a hash
        self.remove_unsealed()

    def remove_unsealed(self) -> None:
        """Remove the files of what is not sealed: an earlier process was killed."""
        sealed = {info.file for info in self.manifest.infos()}
        for pattern in ("*.bin*", f"{self.path.name}.tmp*"):
            for path in self.folder.glob(pattern):
                if path.name not in sealed:
                    path.unlink()

    # ---- Making

    def tokens(self) -> int:
        """Return the training tokens, sealed or not."""
        return self.manifest.tokens() + self.pending["train"].tokens

    def make(self, limit: float) -> Iterator[Seal]:
        """Seal shard after shard, up to the document that reaches `limit` training tokens; yield each seal."""
        manifest = self.manifest
        if manifest.end == "limit" and self.tokens() < limit:
            self.go_on()
        if manifest.end is None and self.tokens() >= limit:  # it was lowered
            manifest.end = "limit"
            self.write_manifest()
        if manifest.end is not None:
            return
        if manifest.seals:
            log.info(
                "source %s: continuing after %d documents in %d sealed shards",
                manifest.source,
                sum(seal.documents for seal in manifest.seals),
                len(manifest.seals),
            )
        sealed = self.tokens()
        for document, drops, ids in self.encoded(Cursor(*manifest.next)):
            text_bytes = self.add(document, ids)
            self.drop(drops)
            pending = self.pending["train"].tokens
            made = sealed + pending
            self.progress(made, document.at, text_bytes)
            is_enough = made >= limit
            if is_enough or pending >= manifest.shard_tokens:
                after = Cursor(document.at.file, document.at.row + 1)
                yield self.seal(after, "limit" if is_enough else None)
                sealed = made
            if is_enough:
                return
        self.drop(self.rest)
        last = self.seal(Cursor(len(self.pinned.files), 0), "all")
        if last.documents:
            yield last

    def encoded(self, at: Cursor) -> Iterator[tuple[Document, Drops, np.ndarray]]:
        """Yield the documents from a place in the source on, with what was dropped before each, and their ids.

        `rest` has what was dropped after the last.
        """
        drawn: deque[tuple[Document, Drops]] = deque()

        def texts() -> Iterator[str]:
            drops = Drops()
            for item in documents(self.pinned, self.files, at):
                if isinstance(item, Dropped):
                    drops.add(item, self.pinned.files[item.at.file].name)
                    continue
                drawn.append((item, drops))
                drops = Drops()
                yield item.text
            self.rest = drops

        for ids in self.vocabulary.encode_all(texts()):
            yield *drawn.popleft(), ids

    def add(self, document: Document, ids: np.ndarray) -> int:
        """Add a document to what is pending of its split. Returns the bytes of its text."""
        split = "validation" if self.pinned.holds_out(document.name) else "train"
        return self.pending[split].add(document, ids)

    def drop(self, drops: Drops) -> None:
        """Count rows that were left out."""
        self.unsealed.update(drops.counts)
        for example in drops.examples:
            reasons = [known["reason"] for known in self.manifest.dropped_examples]
            if reasons.count(example["reason"]) < EXAMPLES:
                self.manifest.dropped_examples.append(example)
        for reason, count in drops.counts.items():
            self.manifest.dropped[reason] = self.manifest.dropped.get(reason, 0) + count

    def seal(self, after: Cursor, end: str | None) -> Seal:
        """Write what is pending as one shard per split, and the manifest that knows them.

        after: where in the source the next seal begins.
        """
        manifest = self.manifest
        infos = {}
        for split in SPLITS:
            number = sum(getattr(seal, split) is not None for seal in manifest.seals)
            infos[split] = self.write(split, name_shard(split, number))
        file, row = manifest.next
        seal = Seal(
            begins=(file, row),
            documents=sum(info.documents for info in infos.values() if info),
            dropped={
                reason: self.unsealed[reason]
                for reason in manifest.dropped
                if self.unsealed[reason]
            },
            train=infos["train"],
            validation=infos["validation"],
        )
        manifest.next = after
        manifest.end = end
        if seal.documents:
            manifest.seals.append(seal)
        self.unsealed.clear()
        self.write_manifest()
        return seal

    def write(self, split: str, file: str) -> ShardInfo | None:
        """Write what is pending of a split as a shard; None where that is nothing."""
        pending = self.pending[split]
        if not pending.documents:
            return None
        info = write_shard(
            self.folder / file,
            np.frombuffer(pending.ids, pending.dtype),
            pending.documents,
            pending.text_bytes,
            self.vocabulary.sha256,
            self.pinned.source.name,
            self.vocabulary.size,
        )
        pending.clear()
        return info

    def write_manifest(self) -> None:
        write_whole(self.path, self.manifest.text())

    def go_on(self) -> None:
        """The limit was raised: make a last shard that it cut short again, as if it had not been there."""
        manifest = self.manifest
        manifest.end = None
        if not manifest.seals:
            return
        last = manifest.seals[-1]
        if last.train and last.train.tokens >= manifest.shard_tokens:
            return
        manifest.seals.pop()
        manifest.next = last.begins
        manifest.dropped = dict(Counter(manifest.dropped) - Counter(last.dropped))
        numbers = {file.name: number for number, file in enumerate(self.pinned.files)}
        manifest.dropped_examples = [
            example
            for example in manifest.dropped_examples
            if (numbers[example["file"]], example["row"]) < last.begins
        ]
        self.write_manifest()
        for info in last.infos():
            (self.folder / info.file).unlink(missing_ok=True)

    # ---- Making again

    def incomplete(self) -> list[Seal]:
        """Return the seals of which a shard is not there."""
        missing = []
        for seal in self.manifest.seals:
            if not all((self.folder / info.file).is_file() for info in seal.infos()):
                missing.append(seal)
        return missing

    def remake(self, seal: Seal) -> None:
        """Make the missing shards of a seal again, between two others.

        Raises DataError where one does not come out as it was; then it is not there.
        """
        encoded = self.encoded(Cursor(*seal.begins))
        for document, _, ids in itertools.islice(encoded, seal.documents):
            text_bytes = self.add(document, ids)
            self.progress(self.tokens(), document.at, text_bytes)
        self.files.done(document.at.file)
        for split, info in (("train", seal.train), ("validation", seal.validation)):
            is_gone = info and not (self.folder / info.file).is_file()
            if info and is_gone and self.write(split, info.file) != info:
                (self.folder / info.file).unlink(missing_ok=True)
                raise DataError(
                    f"{self.folder}: {info.file} does not come out as it was when it is made again "
                    f"(revision {self.pinned.revision}, tokenizer {self.vocabulary.sha256[:12]}); "
                    f"{make_anew(self.folder)}"
                )
            self.pending[split].clear()
