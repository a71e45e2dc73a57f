"""Entry point: the sources of DATA_MIX -> tokenizer -> verified token shards under DATA_DIR.

    python -m train.prepare          what is absent is made; what is there is checked and left alone
    python -m train.prepare verify   every hash of every shard

    DATA_DIR/tokenizers/NAME/tokenizer.json
    DATA_DIR/SOURCE/REVISION/TOKENIZER/{manifest.json, train_*.bin, validation_*.bin}

A killed run goes on behind the last sealed shard: progress.jsonl counts the documents that sealed ones
hold, and becomes the manifest at the end. Train and validation shards are sealed together.
"""

import contextlib
import dataclasses
import fcntl
import gzip
import json
import logging
import lzma
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from train import corpus, tokenizer
from train.config import Config
from train.corpus import CorpusError, Document, Source
from train.settings import ROOT, SettingsError
from train.shards import SPLITS, DataError, ShardInfo, ShardSet, write_shard
from train.tokenizer import TokenizerError, Vocabulary, write_whole

log = logging.getLogger(__name__)

TOKENIZER_TEXT_BYTES = 200_000_000  # of training text, over all sources, that a tokenizer is trained on
BATCH_BYTES = 4_000_000             # of text handed to the tokenizer at once, to keep all cores busy


def data_dir(c: Config) -> Path:
    return (ROOT / c.data_dir).absolute()


def revision_of(c: Config, s: Source) -> str:
    """The revision of a source; that of a hub data set is looked up once and then kept in DATA_DIR."""
    if s.kind == "stdlib":
        return corpus.revision(s)
    path = data_dir(c) / s.name / "REVISION"
    if not path.is_file():
        write_whole(path, corpus.revision(s, c.hf_token).encode())
    return path.read_text().strip()


def vocabulary(c: Config, make: bool = False) -> Vocabulary:
    """The run's tokenizer. With `make`, trained or fetched if it is absent; else TokenizerError."""
    if c.tokenizer != "train" and (path := ROOT / c.tokenizer).suffix == ".json":
        return tokenizer.load(path)
    if c.tokenizer != "train":
        name = c.tokenizer.replace("/", "--")
    else:
        name = "+".join(f"{n}-{revision_of(c, corpus.source(n))[:12]}" for n in c.mixture) + f"-bpe{c.vocab_size}"
    target = data_dir(c) / "tokenizers" / name / "tokenizer.json"
    if target.is_file():
        return tokenizer.load(target)
    if not make:
        raise TokenizerError(f"{target}: there is no tokenizer yet; prepare the data with: make data")
    if c.tokenizer != "train":
        return tokenizer.from_hub(c.tokenizer, c.hf_token, target)
    began = time.perf_counter()
    trained = tokenizer.train(tokenizer_text(c), c.vocab_size, target)
    log.info("tokenizer: trained a BPE of %d tokens, sha256 %s, in %.1f s", trained.size, trained.sha256[:12],
             time.perf_counter() - began)
    return trained


def tokenizer_text(c: Config) -> Iterator[str]:
    """Training text of every source in proportion to its weight."""
    for name, weight in c.mixture.items():
        s = corpus.source(name)
        left = TOKENIZER_TEXT_BYTES * weight // sum(c.mixture.values())
        for document in corpus.documents(s, revision_of(c, s), token=c.hf_token):
            if left <= 0:
                break
            if document.text and not corpus.is_validation(s, document.name):
                left -= len(document.text)
                yield document.text


def source_folder(c: Config, s: Source, v: Vocabulary) -> Path:
    return data_dir(c) / s.name / revision_of(c, s)[:12] / v.sha256[:12]


def token_limit(c: Config, s: Source) -> float:
    """Training tokens to prepare of a source; a local one is taken whole."""
    if s.kind == "stdlib":
        return math.inf
    return c.data_tokens or math.ceil(c.train_tokens * c.mixture[s.name] / sum(c.mixture.values()))


def open_sources(c: Config, v: Vocabulary) -> dict[str, ShardSet]:
    """The prepared shards of each source of the mixture, checked against the tokenizer and VOCAB_SIZE."""
    if v.size > c.vocab_size:
        raise DataError(f"the tokenizer has {v.size} entries, but VOCAB_SIZE={c.vocab_size}; "
                        f"set VOCAB_SIZE={-(-v.size // 128) * 128}")
    opened = {}
    for name in c.mixture:
        opened[name] = ShardSet(source_folder(c, corpus.source(name), v))
        opened[name].check_vocabulary(v.sha256, c.vocab_size)
        for split, word in (("train", "training"), ("validation", "validation")):
            if not opened[name].total(split, "tokens"):
                raise DataError(f"{opened[name].folder}: holds no {word} document; prepare more with DATA_TOKENS")
        if (made := opened[name].manifest.get("shard_tokens", c.shard_tokens)) != c.shard_tokens:
            raise DataError(f"{opened[name].folder}: was prepared with SHARD_TOKENS={made}, not {c.shard_tokens}; "
                            f"set that, or {opened[name].remedy()}")
        have, limit = opened[name].total("train", "tokens"), token_limit(c, corpus.source(name))
        if have < limit and not opened[name].manifest.get("complete", True):
            raise DataError(f"{opened[name].folder}: holds {have} training tokens and {limit} are asked for; "
                            f"DATA_TOKENS={have} makes do with these, or {opened[name].remedy()}")
    return opened


# ---------------------------------------------------------------------------------------------------
# Making shards
# ---------------------------------------------------------------------------------------------------

class Pending:
    """Documents of one split that are encoded and not sealed yet."""

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.tokens = self.text_bytes = 0

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        self.ids.append(ids)
        self.tokens += len(ids)
        self.text_bytes += text_bytes


class SourceWriter:
    """Seals shards of one source and keeps the account that lets a killed run go on."""

    def __init__(self, c: Config, s: Source, v: Vocabulary, folder: Path):
        self.c, self.s, self.v, self.folder = c, s, v, folder
        self.progress = folder / "progress.jsonl"
        self.shards: dict[str, list[ShardInfo]] = {split: [] for split in SPLITS}
        self.documents = self.empty = 0  # taken from the source so far; of those without text
        self.pending = {split: Pending() for split in SPLITS}
        folder.mkdir(parents=True, exist_ok=True)
        self.resume()

    def resume(self) -> None:
        """Take over what sealed shards hold, and remove files of an unsealed one."""
        written = self.progress.read_text() if self.progress.exists() else ""
        whole = written[:written.rfind("\n") + 1]
        if whole != written:  # the line that a full disk cut short
            write_whole(self.progress, whole.encode())
        for line in whole.splitlines():
            entry = json.loads(line)
            self.documents, self.empty = entry["documents"], entry["empty"]
            for split in SPLITS:
                self.shards[split] += [ShardInfo(**info) for info in entry[split]]
        kept = {info.file for split in SPLITS for info in self.shards[split]}
        for path in self.folder.glob("*.bin*"):
            if path.name not in kept:
                path.unlink()
        if self.documents:
            log.info("source %s: going on behind document %d, %d shards sealed", self.s.name, self.documents, len(kept))

    def tokens(self) -> int:
        """Training tokens, sealed or not."""
        return sum(info.tokens for info in self.shards["train"]) + self.pending["train"].tokens

    def add(self, batch: list[Document], limit: float) -> None:
        """Encode documents, in order, up to the one that reaches the limit; seal behind each that fills a shard."""
        for document, ids in zip(batch, self.v.encode_batch([d.text for d in batch]), strict=True):
            if self.tokens() >= limit:
                return
            self.documents += 1
            if not document.text:
                self.empty += 1
                continue
            split = "validation" if corpus.is_validation(self.s, document.name) else "train"
            with_end = np.array([self.v.end_of_text, *ids], dtype=np.uint32)
            self.pending[split].add(with_end, len(document.text.encode(errors="surrogatepass")))
            if self.pending["train"].tokens >= self.c.shard_tokens:
                self.seal()

    def seal(self) -> None:
        """Write what is pending as one shard a split and record it."""
        entry: dict[str, Any] = {"documents": self.documents, "empty": self.empty}
        for split in SPLITS:
            pending, entry[split] = self.pending[split], []
            if pending.ids:
                path = self.folder / f"{split}_{len(self.shards[split]):05d}.bin"
                info = write_shard(path, np.concatenate(pending.ids), len(pending.ids), pending.text_bytes,
                                   self.v.sha256, self.s.name, self.v.size)
                self.shards[split].append(info)
                entry[split] = [dataclasses.asdict(info)]
            self.pending[split] = Pending()
        with open(self.progress, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def finish(self, revision: str, complete: bool) -> None:
        """Seal the rest and turn the account into the manifest. complete: the source has no more."""
        if any(self.pending[split].ids for split in SPLITS):
            self.seal()
        manifest = {
            "schema": 1, "source": self.s.name, "revision": revision, "tokenizer_sha256": self.v.sha256,
            "tokenizer_size": self.v.size, "documents": self.documents, "dropped": {"empty": self.empty},
            "complete": complete, "shard_tokens": self.c.shard_tokens,
            "compressed_bpb": compressed_bpb(self.s, revision) if self.s.compressors else {},
            "shards": {split: [dataclasses.asdict(info) for info in self.shards[split]] for split in SPLITS}}
        write_whole(self.folder / "manifest.json", json.dumps(manifest, indent=1).encode())
        self.progress.unlink()


def make_source(c: Config, s: Source, v: Vocabulary) -> None:
    """Prepare the shards of one source, from wherever an earlier run was killed."""
    began = last = time.perf_counter()
    revision, writer, limit = revision_of(c, s), SourceWriter(c, s, v, source_folder(c, s, v)), token_limit(c, s)
    for batch in batches(corpus.documents(s, revision, skip=writer.documents, token=c.hf_token), BATCH_BYTES):
        writer.add(batch, limit)
        if writer.tokens() >= limit:
            break
        if time.perf_counter() - last > 10:
            last = time.perf_counter()
            log.info("source %s: %.1f M tokens of %s", s.name, writer.tokens() / 1e6,
                     "all" if math.isinf(limit) else f"{limit / 1e6:.0f} M")
    writer.finish(revision, complete=writer.tokens() < limit)
    seconds = time.perf_counter() - began
    log.info("source %s: %d documents (%d empty, dropped), %.2f M training tokens, in %.1f s", s.name, writer.documents,
             writer.empty, writer.tokens() / 1e6, seconds)


def batches(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    """Documents in lists of about `size` bytes of text."""
    batch: list[Document] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document.text)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def compressed_bpb(s: Source, revision: str) -> dict[str, float]:
    """Bits per byte that general compressors need for the held-out documents, all in one file."""
    held_out = b"".join(d.text.encode() for d in corpus.documents(s, revision) if corpus.is_validation(s, d.name))
    return {"gzip -9": 8 * len(gzip.compress(held_out, 9, mtime=0)) / len(held_out),
            "xz -9": 8 * len(lzma.compress(held_out, preset=9)) / len(held_out)}


# ---------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold DATA_DIR against another process that prepares there."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process prepares data in %s; waiting for it", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(c: Config) -> None:
    """Make what is absent, then open everything, so that a fault shows now and not in training."""
    try:
        with one_at_a_time(data_dir(c)):
            v = vocabulary(c, make=True)
            for name in c.mixture:
                s = corpus.source(name)
                if not (source_folder(c, s, v) / "manifest.json").is_file():
                    make_source(c, s, v)
    except OSError as error:
        raise DataError(f"{error.filename or data_dir(c)}: cannot be written ({error.strerror}); choose another folder "
                        "with DATA_DIR, or make room") from error
    for name, shards in open_sources(c, v).items():
        log.info("data: %s %s, %.2f M training and %.2f M validation tokens in %s", name,
                 shards.manifest["revision"][:12], shards.total("train", "tokens") / 1e6,
                 shards.total("validation", "tokens") / 1e6, shards.folder)


def verify(c: Config) -> None:
    """Check every hash of every shard of the mixture."""
    for name, shards in open_sources(c, vocabulary(c)).items():
        for split in SPLITS:
            for info in shards.shards[split]:
                shards.check_hash(info)
        log.info("data: %s is whole, %d shards", name, sum(len(shards.shards[split]) for split in SPLITS))


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        verify(Config.load()) if argv == ["verify"] else prepare(Config.load())
    except SettingsError as error:
        log.error("%s", error)
        return 64
    except (CorpusError, TokenizerError, DataError) as error:
        log.error("%s", error)
        return 78
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
