"""Entry point: the sources of DATA_MIX -> tokenizer -> verified token shards under DATA_DIR.

    python -m train.data.prepare          what is absent is made; what is there is checked and left alone
    python -m train.data.prepare data     the same, also where make train would stream
    python -m train.data.prepare verify   every hash of every shard

    DATA_DIR/tokenizers/NAME/tokenizer.json
    DATA_DIR/SOURCE/REVISION/TOKENIZER/{manifest.json, train_*.bin, validation_*.bin}

A killed run goes on behind the last sealed shard. This is the one process of a job that speaks to the hub before
training; while a run streams, its producer is (producer.py).
"""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import itertools
import logging
import lzma
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from record import number_formats
from record.durable import make_printable, write_whole
from record.locks import take_lock
from record.regular_file import only_regular
from settings import SettingsError, explain_error, load_config
from settings.config import Config
from settings.resolve import repeat_typed, take_words
from train.console import for_terminals, start_logging
from train.data import data_paths
from train.data.data_paths import (
    data_dir,
    find_repetition,
    has_dropped_near_duplicates,
    is_enough,
    pinned_of,
    shard_folder,
    source_of,
    token_limit,
    tokenizer_path,
    wanted_tokens,
)
from train.data.manifest import DataError, read_manifest
from train.data.progress import Progress
from train.data.shard_writer import ShardWriter
from train.data.shards import ShardSet
from train.data.sources.fetch import Files
from train.data.sources.pin import Pinned, pin
from train.data.sources.rows import Document, documents
from train.data.sources.source import CorpusError
from train.data.tokenizer import TokenizerError, Vocabulary, from_hub, load, too_few_words
from train.data.tokenizer import train as train_tokenizer
from train.distributed.pod import exit_code_of

log = logging.getLogger(__name__)

TOKENIZER_TEXT_BYTES = (
    200_000_000  # of training text, over all sources, that a tokenizer is trained on
)


def files_of(c: Config, p: Pinned) -> Files:
    return files_in(data_dir(c) / p.source.name, p, c.hf_token)


@functools.cache
def files_in(folder: Path, p: Pinned, token: str) -> Files:
    """One for each source in a process: two would fetch the same file, and clear away what the other has half of."""
    return Files(p, folder, token)


def vocabulary(c: Config, make: bool = False, may_shrink: bool = False) -> Vocabulary:
    """The run's tokenizer. With `make`, trained or fetched if it is absent; else TokenizerError.

    may_shrink: one that is trained may have fewer entries than VOCAB_SIZE.
    """
    target = tokenizer_path(c)
    if target.is_file() or not target.is_relative_to(data_dir(c) / "tokenizers"):
        there = load(target)
        if make and c.tokenizer == "train" and there.size < c.vocab_size and not may_shrink:
            raise too_few_words(there.size, c.vocab_size)
        return there
    if not make:
        raise TokenizerError(
            f"{target}: there is no tokenizer yet; prepare the data with: make data{repeat_typed('data')}"
        )
    if c.tokenizer != "train":
        return from_hub(c.tokenizer, c.hf_token, target)
    began = time.perf_counter()
    trained = train_tokenizer(tokenizer_text(c), c.vocab_size, target, may_shrink)
    if trained.size < c.vocab_size:  # the run looks for it by its own VOCAB_SIZE
        write_whole(tokenizer_path(c.replace(vocab_size=trained.size)), trained.content)
    log.info(
        "trained BPE tokenizer: %s tokens, sha256 %s, in %.1f s",
        f"{trained.size:,}",
        trained.sha256[:12],
        time.perf_counter() - began,
    )
    return trained


def tokenizer_text(c: Config) -> Iterator[str]:
    """Training text of every source in proportion to its weight."""
    for name, weight in c.mixture.items():
        p = pinned_of(c, name)
        left = TOKENIZER_TEXT_BYTES * weight // sum(c.mixture.values())
        for item in documents(p, files_of(c, p)):  # what is dropped is counted when shards are made
            if left <= 0:
                break
            if isinstance(item, Document) and not p.holds_out(item.name):
                left -= len(item.text)
                yield item.text


def hold_out_one(c: Config, p: Pinned) -> Pinned:
    """Choose a document of DATA to hold out, if its text is so little that the hash chooses none.

    Raises CorpusError where there are no two different documents, one to train on and one to hold out.
    """
    if not p.source.place:
        return p
    names: set[str] = set()
    choices: set[bool] = set()
    for item in documents(p, files_of(c, p)):
        if isinstance(item, Document):
            names.add(item.name)
            choices.add(p.holds_out(item.name))
            if len(choices) == 2:
                return p
    if len(names) < 2 or choices == {True}:
        raise CorpusError(
            f"DATA={p.source.place}: Has only one document, or all are equal. One must be held out. Use "
            "more text."
        )
    return dataclasses.replace(p, held_out=min(names))


def source_folder(c: Config, name: str, v: Vocabulary) -> Path:
    return shard_folder(c, name, v.sha256)


def find_unfinished(c: Config, v: Vocabulary) -> list[str]:
    """Return the sources of which not all shards are there.

    Raises DataError if those of a run that began with NEAR_DUPLICATES=drop are missing.
    """
    unfinished = [name for name in c.mixture if not is_finished(c, name, v)]
    if unfinished and has_dropped_near_duplicates(c):
        raise DataError(
            f"{source_folder(c, unfinished[0], v)}: has not all shards, and run {c.run_name} began "
            "with NEAR_DUPLICATES=drop: such shards are no longer made. Restore them and the run's "
            "TRAIN_TOKENS, or start a new run with another RUN_NAME"
        )
    return unfinished


def streams(c: Config, v: Vocabulary) -> bool:
    """Whether shards are made while the run trains: where DATA_STREAM says so, or a source on the hub has none."""
    unfinished = find_unfinished(c, v)
    if c.data_stream == "auto":
        return any(source_of(c, name).kind == "hub" for name in unfinished)
    return c.data_stream == "1" and bool(unfinished)


def is_finished(c: Config, name: str, v: Vocabulary) -> bool:
    """Whether all shards of a source that the settings ask for are there."""
    folder = source_folder(c, name, v)
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return False
    except DataError:
        return True  # there is one, and opening it says what is wrong
    there = {path.name for path in folder.glob("*.bin")}
    if any(info.file not in there for info in manifest.infos()):
        return False
    return is_enough(c, source_of(c, name), manifest.end, manifest.tokens())


def hash_origin(sources: Mapping[str, ShardSet]) -> str:
    """Hash where the text comes from: the end of a run's data fingerprint is the beginning of this."""
    return hash_keys([(name, shards.key) for name, shards in sources.items()])


def hash_keys(keys: list[tuple[str, str]]) -> str:
    return hashlib.sha256(repr(keys).encode()).hexdigest()


def find_folders(c: Config, v: Vocabulary, origin: str) -> dict[str, Path]:
    """Find the shards that a run was trained with, of which something else may be pinned since.

    Args:
        origin: the end of the run's data fingerprint.

    Returns:
        Folder by source; {} if they are not all there.
    """
    choices = []
    for name in c.mixture:
        prepared = []
        for path in sorted((data_dir(c) / name).glob(f"*/{v.sha256[:12]}/manifest.json")):
            with contextlib.suppress(OSError, DataError):  # of another one
                prepared.append((path.parent, read_manifest(path.parent).origin()))
        choices.append(prepared)
    for chosen in itertools.product(*choices):
        keys = [(name, key) for name, (_, key) in zip(c.mixture, chosen, strict=True)]
        if hash_keys(keys).startswith(origin):
            return {name: folder for name, (folder, _) in zip(c.mixture, chosen, strict=True)}
    return {}


def open_sources(
    c: Config, v: Vocabulary, partial: bool = False, folders: Mapping[str, Path] | None = None
) -> dict[str, ShardSet]:
    """Open the prepared shards of each source, checked against the tokenizer and VOCAB_SIZE. Raises DataError.

    partial: a source may still be streamed, if its manifest is there. folders: where the shards of a source are,
    if they are not those of its pin.
    """
    check_tokenizer(c, v)
    opened = {}
    for name in c.mixture:
        folder = (folders or {}).get(name) or source_folder(c, name, v)
        shards = ShardSet(folder, partial)
        shards.check_vocabulary(v.sha256, c.vocab_size)
        tokens = shards.total("train", "tokens")
        if not (tokens and shards.total("validation", "tokens")):
            word = "validation" if tokens else "training"
            raise DataError(f"{folder}: holds no {word} document; prepare more text")
        if shards.ended and not sum(shards.windows("train", c.seq_len)):
            raise DataError(
                f"{folder}: holds no training shard of SEQ_LEN + 1 = {c.seq_len + 1} tokens; "
                "prepare more, or take a shorter SEQ_LEN"
            )
        source = source_of(c, name)
        if shards.ended and not is_enough(c, source, shards.manifest.end, tokens):
            raise DataError(
                f"{folder}: holds {tokens:,} training tokens and {token_limit(c, source):,} are asked for; "
                f"run: make data{repeat_typed('data')}"
            )
        opened[name] = shards
    return opened


def not_begun(c: Config, v: Vocabulary, held_out: Mapping[str, int]) -> str:
    """Return the first source of a run that streams which has too little to begin with; "" if none.

    It needs something to train on, and as many validation shards as `held_out` has of it.
    """
    for name in c.mixture:
        try:
            manifest = read_manifest(source_folder(c, name, v))
        except FileNotFoundError:
            return name
        except DataError:
            continue  # opening it says what is wrong
        validated = sum(seal.validation is not None for seal in manifest.seals)
        is_begun = manifest.tokens() and validated >= held_out.get(name, 1)
        if manifest.end is None and not is_begun:
            return name
    return ""


def check_tokenizer(c: Config, v: Vocabulary) -> None:
    """Raises DataError where the model has no row for some of the tokenizer's entries."""
    if v.size > c.vocab_size:
        raise DataError(
            f"the tokenizer has {v.size} entries, but VOCAB_SIZE={c.vocab_size}; set VOCAB_SIZE={v.size}"
        )


def planned_epochs(c: Config, shards: ShardSet, name: str) -> float:
    """How often the run will see each window of a source that has ended."""
    windows = sum(shards.windows("train", c.seq_len))
    return wanted_tokens(c, name) / max(1, windows * c.seq_len)


def refuse_repetition(c: Config, sources: dict[str, ShardSet], is_resumed: bool = False) -> None:
    """Warn where text is repeated often. Raises DataError where it is so beyond its max_epochs.

    is_resumed: the run has begun already: how large a source is that is streamed shows late.
    """
    problems = []
    for name, shards in sources.items():
        if not shards.ended:
            continue
        tokens = sum(shards.windows("train", c.seq_len)) * c.seq_len
        repetition = find_repetition(c, name, tokens)
        if repetition and repetition.remedy and not is_resumed:
            problems.append(f"{repetition.text}. {repetition.remedy}")
        elif repetition:
            log.warning("warning: %s%s", repetition.text, repetition.meaning)
    if problems:
        raise DataError("\n".join(problems))


# ---------------------------------------------------------------------------------------------------
# Making shards
# ---------------------------------------------------------------------------------------------------


def maker_of(c: Config, name: str, v: Vocabulary) -> ShardWriter:
    p = pinned_of(c, name)
    return ShardWriter(p, v, source_folder(c, name, v), data_paths.SHARD_TOKENS, files_of(c, p))


def make_source(c: Config, name: str, v: Vocabulary) -> None:
    """Prepare the shards of one source, from wherever an earlier run was killed."""
    began = time.perf_counter()
    writer = maker_of(c, name, v)
    limit = token_limit(c, writer.pinned.source)
    before = writer.tokens()
    files = writer.pinned.files
    writer.progress = Progress(name, limit, [file.bytes for file in files], before).at
    with contextlib.closing(writer.files):
        if writer.pinned.source.compressors and not writer.manifest.compressed_bpb:
            writer.manifest.compressed_bpb = compressed_bpb(writer)  # written with the end
        for seal in writer.incomplete():
            shards = " and ".join(info.file for info in seal.infos())
            log.info("source %s: making %s again, of which not all is there", name, shards)
            writer.remake(seal)
        if not is_enough(c, writer.pinned.source, writer.manifest.end, before):
            for _ in writer.make(limit):
                pass
        # The limit may be reached in the middle of a file, with another one downloaded ahead.
        for number in range(len(files)):
            writer.files.done(number)
    seconds = time.perf_counter() - began
    made = writer.tokens() - before
    counts = sorted(writer.manifest.dropped.items())
    dropped = ", ".join(f"{count} {reason}" for reason, count in counts)
    log.info(
        "source %s: %d documents, %s training tokens; rows dropped: %s; %.1f s, %s",
        name,
        sum(seal.documents for seal in writer.manifest.seals),
        number_formats.count(writer.tokens()),
        dropped or "none",
        seconds,
        number_formats.rate(made / seconds),
    )
    for example in writer.manifest.dropped_examples:
        file = make_printable(example["file"])
        log.info("  dropped: %s, row %d: %s", file, example["row"] + 1, example["what"])


def compressed_bpb(writer: ShardWriter) -> dict[str, float]:
    """Return the bits per byte that general compressors need for the held-out documents, all in one file."""
    held_out = bytearray()
    for item in documents(writer.pinned, writer.files):
        if isinstance(item, Document) and writer.pinned.holds_out(item.name):
            held_out += item.text.encode()
    if not held_out:
        return {}
    return {
        "gzip -9": 8 * len(gzip.compress(held_out, 9, mtime=0)) / len(held_out),
        "xz -9": 8 * len(lzma.compress(held_out, preset=9)) / len(held_out),
    }


# ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_at_a_time(folder: Path, patience_s: float = math.inf) -> Iterator[None]:
    """Hold a folder of DATA_DIR against another process that prepares there. Raises DataError if that takes too long."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", opener=only_regular) as lock:
        if not take_lock(lock, patience_s=0):
            log.info("another process prepares data in %s; waiting for it", folder)
            if not take_lock(lock, patience_s):
                raise DataError(
                    f"{folder}: another process makes shards there (make data, or a run that streams); "
                    "wait for it, or give this run another DATA_DIR"
                )
        yield


def unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"{error.filename or folder}: cannot be written ({error.strerror or error}); choose another "
        "folder with DATA_DIR, or make room"
    )


def prepare(c: Config, whole: bool = False, may_shrink: bool = False) -> None:
    """Make what is absent, then open everything, so that a fault shows now and not in training.

    whole: also what would be streamed. may_shrink: as of `vocabulary`.

    Other nodes than the first make nothing, so that one process of a job speaks to
    the hub: they wait for what the first prepares on a disk that they share, or get it when training starts (node_transfer.py).
    """
    try:
        if c.rank_in_site:
            log.info("data: node %d takes what the first node prepares", c.rank_in_site)
            for folder in (data_dir(c), *(data_dir(c) / name for name in c.mixture)):
                with one_at_a_time(folder):
                    pass
            return
        with one_at_a_time(data_dir(c)):
            for name in c.mixture:
                source = source_of(c, name)
                pin(source, data_dir(c) / name, c.hf_token, lambda p: hold_out_one(c, p))
            v = vocabulary(c, make=True, may_shrink=may_shrink)
        check_tokenizer(c, v)
        if not whole and streams(c, v):
            log.info(
                "data: %s will be streamed while the run trains; make data prepares all of it beforehand",
                ", ".join(find_unfinished(c, v)),
            )
            return
        for name in find_unfinished(c, v):
            with one_at_a_time(data_dir(c) / name):
                make_source(c, name, v)
    except OSError as error:
        raise unwritable(data_dir(c), error) from error
    sources = open_sources(c, v)
    for name, shards in sources.items():
        tokens = (
            f"data: {name} {shards.manifest.revision[:12]}, "
            f"{number_formats.count(shards.total('train', 'tokens'))} tokens to train on, "
            f"{number_formats.count(shards.total('validation', 'tokens'))} held out"
        )
        log.info("%s, in %s", tokens, shards.folder, extra=for_terminals(tokens))
    refuse_repetition(c, sources)


def verify(c: Config) -> None:
    """Check size, header and hash of every shard of the mixture; all that is wrong is said."""
    problems: list[str] = []
    v = vocabulary(c)
    for name in c.mixture:
        count_before = len(problems)
        try:
            shards = ShardSet(source_folder(c, name, v), check=False)
        except DataError as error:
            problems.append(str(error))
            continue
        infos = shards.manifest.infos()
        for info in infos:
            try:
                shards.check_file(info, shards.manifest)
                shards.verify(info)
            except DataError as error:
                problems.append(str(error))
        if len(problems) == count_before:
            log.info("data: %s: %d shards, all hashes match", name, len(infos))
    if problems:
        raise DataError("\n".join(problems))
    open_sources(c, v)


def main(argv: Sequence[str]) -> int:
    start_logging()

    def work() -> None:
        take_words(argv, ("data", "verify"))
        config = load_config()
        if "verify" in argv:
            verify(config)
        else:
            prepare(config, "data" in argv, data_paths.may_shrink(config))

    return exit_code(work)


def exit_code(action: Callable[[], None]) -> int:
    """Do something with data; what is wrong is said, and is the exit code of the process."""
    try:
        action()
    except (SettingsError, CorpusError, TokenizerError, DataError) as error:
        log.error("%s", explain_error(error))
        return exit_code_of(error, error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
