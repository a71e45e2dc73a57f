"""DATA tokenized once, as arrays on disk, and which conversations are held out.

    DATA_DIR/finetune/KEY/ids.bin       the tokens of all examples, one after the other
                          scored.bin    a byte for each: whether it is scored
                          index.bin     where each example ends, its scored tokens, hash, file and row
                          manifest.json how long these are, their hashes, and what became of the rows

KEY is the hash of the files' hashes, the chat template with its tokenizer, and SEQ_LEN. A folder is
there whole or not at all. Memory is bounded by a batch of conversations.

An example is a conversation up to its last scored token, of SEQ_LEN + 1 tokens at most, since each but
the first is predicted. A longer one is cut at its end. A template that rewrites earlier replies makes
several examples of one conversation, which have its hash and its row.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from finetune import chat_template, conversations
from finetune.chat_template import ChatTemplate, Labelled, hash_parts
from finetune.conversations import Located, Tally, pinned_files, sources_in
from finetune.row_shapes import Conversation
from record.durable import flush_folder, write_whole
from settings.json_file import read_object
from settings.resolve import show_path
from train.data.mixture import key_of as seed_key
from train.data.mixture import mix64
from train.data.prepare import one_at_a_time
from train.data.sources.content import digest_of
from train.data.sources.fetch import Files
from train.data.sources.formats import Bad
from train.data.sources.pin import Pinned
from train.data.sources.source import CorpusError

VERSION = 3  # changes when the same rows give other examples
BATCH = 1024  # conversations tokenized at once
LOG_EVERY_S = 30
MOST_HELD_OUT = 10  # at most one in this many different conversations
INDEX = np.dtype(
    [("end", "<i8"), ("hash", "<u8"), ("row", "<i8"), ("file", "<i4"), ("scored", "<i4")]
)
SENTENCES = (
    conversations.SENTENCES
    | chat_template.REASONS
    | {
        "nothing": "no token is scored. Remove the row",
        "cut": "the first reply begins after SEQ_LEN tokens. Raise SEQ_LEN, or shorten the row",
        "longer": "conversations longer than SEQ_LEN, cut at their end",
        "truncated": "replies cut by SEQ_LEN, scored up to there and without their end",
        "lost": "replies left out, since they begin after SEQ_LEN tokens",
        "altered": "replies of which the chat template leaves text out, or writes it differently",
    }
)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Part:
    """The examples of one source, memory-mapped.

    Attributes:
        ids: (tokens,) uint16 or uint32.
        scored: (tokens,) bool.
        index: (examples,) of INDEX.
        files: names of its files.
        report: what became of its rows, as lines.
        key: hash of everything that decides it.
    """

    ids: np.ndarray
    scored: np.ndarray
    index: np.ndarray
    files: tuple[str, ...]
    report: tuple[str, ...]
    key: str


class Examples:
    """The examples of all sources of DATA, one source after the other.

    Attributes:
        index: (examples,) of INDEX; `end` counts within the source.
        positions: (examples,) int64, that each takes in a window: one less than it has tokens.
        report: what became of the rows, as lines.
        key: hash of everything that decides the examples.
    """

    def __init__(self, parts: list[Part], report: list[str]):
        self.parts = parts
        self.report = report
        self.index = np.concatenate([part.index for part in parts])
        lengths = [np.diff(part.index["end"], prepend=0) for part in parts]
        self.positions = np.concatenate(lengths) - 1
        self.starts = np.cumsum([0] + [len(part.index) for part in parts[:-1]])
        self.key = parts[0].key
        if len(parts) > 1:
            self.key = hash_parts("several", [part.key for part in parts])[:16]

    def __len__(self) -> int:
        return len(self.index)

    def example(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, scored) of an example. A scored token is predicted from those before it."""
        part = self.part_of(number)
        end = int(self.index["end"][number])
        begin = end - int(self.positions[number]) - 1
        return part.ids[begin:end], part.scored[begin:end]

    def place(self, number: int) -> str:
        """Return FILE:LINE of the row that an example comes from."""
        entry = self.index[number]
        return f"{self.part_of(number).files[entry['file']]}:{entry['row'] + 1}"

    def part_of(self, number: int) -> Part:
        return self.parts[int(np.searchsorted(self.starts, number, side="right")) - 1]


def examples_of(
    data: str,
    template: ChatTemplate,
    seq_len: int,
    folder: Path,
    token: str = "",
    setting: str = "DATA",
    stored_key: str = "",
) -> Examples:
    """Return the examples of DATA, tokenized now or earlier. Raises CorpusError.

    Args:
        folder: DATA_DIR/finetune.
        stored_key: how the key begins of what a run was trained on so far. A run of commit
            9fc3810 continues with its examples, some of which are labeled differently now.
    """
    sources = sources_in(data, setting)
    parts: list[Part] = []
    try:
        with one_at_a_time(folder):
            opened = [pinned_files(source, folder, token, setting) for source, _ in sources]
            if stored_key:
                older = open_older(opened, sources, template, seq_len, folder)
                if older and older.key.startswith(stored_key):
                    return older
            for pinned, files in opened:
                parts.append(tokenize(pinned, files, template, seq_len, folder))
    except OSError as error:
        raise CorpusError(
            f"{error.filename or folder}: cannot be read or written ({error.strerror or error}). "
            "Free some space, fix its permissions, or set another DATA_DIR."
        ) from error
    return join(parts, sources)


def tokenize(
    pinned: Pinned, files: Files, template: ChatTemplate, seq_len: int, folder: Path
) -> Part:
    """Return the examples of one source. Raises CorpusError, OSError."""
    key = hash_parts(VERSION, identify(pinned), template.fingerprint, seq_len)[:16]
    for left in folder.glob(f".{key}-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    part = open_part(folder / key)
    if part is None:
        tally = Tally()
        rows = conversations.conversations(pinned, files, tally)
        write(folder, key, pinned, rows, tally, template, seq_len)
        part = open_part(folder / key)
    assert part, "what was written opens"
    return part


def identify(pinned: Pinned) -> list[tuple[int | None, str]]:
    """Return what tells files apart. Where they are is not part of it."""
    return [(file.bytes, file.digest) for file in pinned.files]


def open_older(
    opened: list[tuple[Pinned, Files]],
    sources: list[tuple[str, int]],
    template: ChatTemplate,
    seq_len: int,
    folder: Path,
) -> Examples | None:
    """Return the examples as commit 9fc3810 wrote them, None if they are not all there."""
    tokenizer = template.tokenizer
    special = sorted(map(str, tokenizer.special_tokens_map.items()))
    backend = tokenizer.backend_tokenizer.to_str()
    fingerprint = hash_parts(1, "theirs", template.template, backend, special)
    parts: list[Part] = []
    for pinned, _ in opened:
        part = open_part(folder / hash_parts(1, 1, identify(pinned), fingerprint, seq_len)[:16])
        if part is None:
            return None
        parts.append(part)
    return join(parts, sources)


def join(parts: list[Part], sources: list[tuple[str, int]]) -> Examples:
    """Return the examples of all sources, each as often as it counts."""
    if len(parts) == 1 and sources[0][1] == 1:
        return Examples(parts, list(parts[0].report))
    counted: list[Part] = []
    report: list[str] = []
    for part, (source, times) in zip(parts, sources, strict=True):
        counted += [part] * times
        name = f"{source}, counted {times} times" if times > 1 else source
        report += [f"{name}: {line}" for line in part.report]
    return Examples(counted, report)


# ---- Writing


class Output:
    """A file that is being written, and the hash of its content."""

    def __init__(self, path: Path):
        self.file: BinaryIO = open(path, "xb")  # noqa: SIM115 (close() syncs it)
        self.hash = xxhash.xxh3_128()
        self.bytes = 0

    def add(self, values: np.ndarray) -> None:
        content = np.ascontiguousarray(values).tobytes()
        self.file.write(content)
        self.hash.update(content)
        self.bytes += len(content)

    def close(self) -> list[Any]:
        """Return [bytes, hash], once it is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return [self.bytes, f"xxh3:{self.hash.hexdigest()}"]


def write(
    folder: Path,
    key: str,
    pinned: Pinned,
    rows: Iterable[Located],
    tally: Tally,
    template: ChatTemplate,
    seq_len: int,
) -> None:
    """Write folder/KEY. Raises CorpusError or OSError, and then there is nothing."""
    half = folder / f".{key}-{uuid.uuid4().hex[:8]}"
    half.mkdir()
    try:
        began = time.monotonic()
        outputs = {name: Output(half / f"{name}.bin") for name in ("ids", "scored", "index")}
        examples = 0
        logged = log_progress(rows, pinned.source.name)
        while batch := list(itertools.islice(logged, BATCH)):
            examples += write_batch(batch, template, tally, seq_len, outputs)
        tally.check(pinned.source.name, SENTENCES)
        tokens = outputs["scored"].bytes
        log.info(
            "%s: %s tokens in %s examples; reading and tokenizing took %.1f s",
            pinned.source.name,
            f"{tokens:,}",
            f"{examples:,}",
            time.monotonic() - began,
        )
        manifest = {
            "key": key,
            "template": template.name,
            "seq_len": seq_len,
            "ids": np.dtype(template.dtype).name,
            "examples": examples,
            "tokens": tokens,
            "sources": [file.name for file in pinned.files],
            "report": tally.report(SENTENCES),
            "files": {f"{name}.bin": output.close() for name, output in outputs.items()},
        }
        write_whole(half / "manifest.json", json.dumps(manifest, indent=1).encode())
        if (folder / key).exists():  # it did not open
            shutil.rmtree(folder / key)
        os.rename(half, folder / key)
        flush_folder(folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def write_batch(
    batch: list[Located],
    template: ChatTemplate,
    tally: Tally,
    seq_len: int,
    outputs: dict[str, Output],
) -> int:
    """Write the examples of these conversations and count what they lose. Returns how many there are."""
    entries = []
    examples: list[Labelled] = []
    end = outputs["scored"].bytes
    labelled = template.label([row.conversation for row in batch])
    for row, made in zip(batch, labelled, strict=True):
        result = made if isinstance(made, Bad) else cut_all(made, row.place, tally, seq_len)
        if isinstance(result, Bad):
            tally.drop(row.place, result)
            continue
        digest = hash_of(row.conversation)
        for example in result:
            end += len(example.ids)
            entries.append((end, digest, row.row, row.file, int(example.scored.sum())))
        examples += result
    if examples:
        outputs["ids"].add(np.concatenate([example.ids for example in examples]))
        outputs["scored"].add(np.concatenate([example.scored for example in examples]))
        outputs["index"].add(np.array(entries, dtype=INDEX))
    return len(examples)


def cut_all(made: list[Labelled], place: str, tally: Tally, seq_len: int) -> list[Labelled] | Bad:
    """Return the examples of a conversation, each cut to SEQ_LEN, or why none is left."""
    notes: collections.Counter[str] = collections.Counter()
    shortened: list[Labelled] = []
    for example in made:
        one = cut(example, notes, seq_len)
        if one is not None:
            shortened.append(one)
    if not shortened:
        longest = max(len(example.ids) for example in made)
        if any(example.scored[1:].any() for example in made):
            return Bad("cut", f"{longest} tokens")
        return Bad("nothing", f"{longest} tokens")
    for note, times in notes.items():
        tally.note(place, note, 1 if note == "longer" else times)
    return shortened


def cut(made: Labelled, notes: collections.Counter[str], seq_len: int) -> Labelled | None:
    """Return an example up to its last scored token, None if there is none. notes: what it loses."""
    scored = made.scored.copy()
    scored[:1] = False  # nothing comes before the first token to predict it from
    places = np.flatnonzero(scored)
    if not len(places):
        return None
    size = int(places[-1]) + 1
    if size > seq_len + 1:
        after = scored[seq_len + 1 :]
        notes["longer"] += 1
        notes["truncated"] += int(scored[seq_len] and after[0])
        notes["lost"] += int((after & ~scored[seq_len:-1]).sum())
        places = places[places <= seq_len]
        if not len(places):
            return None
        size = int(places[-1]) + 1
    notes["altered"] += made.altered
    return made._replace(ids=made.ids[:size], scored=scored[:size])


def hash_of(conversation: Conversation) -> int:
    """Return 64 bits of what a conversation says, whatever its file, the template and SEQ_LEN."""
    content_parts: list[Any] = []
    for message in conversation.messages:
        is_plain = len(message) == 2
        content_parts.append([message["role"], message["content"]] if is_plain else message)
    if conversation.tools:
        content_parts.append(conversation.tools)
    content = json.dumps(content_parts).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def log_progress(rows: Iterable[Located], name: str) -> Iterator[Located]:
    """Yield the same rows, and log how far they are."""
    began = logged = time.monotonic()
    for number, row in enumerate(rows):
        now = time.monotonic()
        if now > logged + LOG_EVERY_S:
            logged = now
            rate = number / (now - began)
            log.info("%s: %s rows, %.0f a second, at %s", name, f"{number:,}", rate, row.place)
        yield row


# ---- Reading


def open_part(folder: Path) -> Part | None:
    """Return what a folder holds, verified by size and hash; None if it is damaged or not there."""
    try:
        manifest = read_object(folder / "manifest.json")
        kinds = {"ids": manifest["ids"], "scored": "bool", "index": INDEX}
        ids, scored, index = (
            open_array(folder / f"{name}.bin", kind, *manifest["files"][f"{name}.bin"])
            for name, kind in kinds.items()
        )
        if not len(ids) == len(scored) == manifest["tokens"] == int(index["end"][-1]):
            raise ValueError("parts of different length")
        names = tuple(manifest["sources"])
        return Part(ids, scored, index, names, tuple(manifest["report"]), manifest["key"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        log.warning("%s: damaged (%s). It is made again.", show_path(folder), error)
        return None


def open_array(path: Path, kind: Any, size: int, digest: str) -> np.ndarray:
    """Memory-map a file. Raises ValueError if it is not what was written, FileNotFoundError."""
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
    if not size:
        raise ValueError(f"{path.name} is empty")
    if digest_of(path, "xxh3") != digest:
        raise ValueError(f"{path.name} has another hash")
    return np.memmap(path, dtype=kind, mode="r")


# ---- Held out


class Split(NamedTuple):
    """Numbers of examples, (n,) int64 each. copies: of held-out ones, which are in neither."""

    train: np.ndarray
    held_out: np.ndarray
    copies: int


def choose(hashes: np.ndarray, seed: int, count: int | None) -> np.ndarray:
    """Choose `count` different conversations by a seeded hash of what they say; None: all of them.

    So they are the same in every run, whatever else is in the data and in which order.

    Args:
        hashes: (n,) uint64.

    Returns:
        (m,) int64: the first place of each chosen hash, in order.
    """
    different, first = np.unique(hashes, return_index=True)
    order = np.argsort(mix64(different ^ seed_key(seed, "held out")), kind="stable")
    return np.sort(first[order[:count]])


def choose_examples(index: np.ndarray, seed: int, count: int) -> np.ndarray:
    """Return (n,) int64: the examples of `count` different conversations, of each copy the first."""
    rows = index[["row", "file", "hash"]]
    conversation = np.cumsum(np.concatenate([[0], rows[1:] != rows[:-1]]))
    chosen = conversation[choose(index["hash"], seed, count)]
    return np.flatnonzero(np.isin(conversation, chosen))


def split(examples: Examples, seed: int, count: int, beside: Examples | None = None) -> Split:
    """Hold out `count` different conversations, at most one in MOST_HELD_OUT.

    beside: other data to evaluate with. None of these examples is held out then, and none that says
    the same is trained on.
    """
    hashes = examples.index["hash"]
    if beside is None:
        most = len(np.unique(hashes)) // MOST_HELD_OUT
        held_out = choose_examples(examples.index, seed, min(count, most))
        excluded = hashes[held_out]
    else:
        held_out = np.empty(0, dtype=np.int64)
        excluded = beside.index["hash"]
    train = np.flatnonzero(~np.isin(hashes, excluded))
    return Split(train, held_out, len(hashes) - len(train) - len(held_out))
