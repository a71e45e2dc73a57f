"""DATA tokenised once, as arrays on disk that are found again by what decides them.

    DATA_DIR/finetune/KEY/ids.bin       the tokens of all examples, one behind the other
                          scored.bin    a byte for each: whether it is scored
                          index.bin     where each example ends, its scored tokens, hash, file and row
                          manifest.json how long these are, their hashes, and what became of the rows

KEY is the hash of the files' hashes, the chat template with its tokenizer, and SEQ_LEN. The folder is there whole or
not at all; memory is bounded by a batch of conversations.

An example is a conversation up to its last scored token, of SEQ_LEN + 1 tokens at most: SEQ_LEN of them have a next one
to be told. A longer one is cut at its end: an answer that is cut through is scored as far as it goes, and counted; one
of which no scored token is left is dropped.
"""

import dataclasses
import functools
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
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash

from finetune import reading, template
from finetune.reading import Located, Tally, conversations, pinned_files
from finetune.row_shapes import OF_MESSAGES
from finetune.template import Labelled, Template, digest
from record.durable import flush_folder, write_whole
from settings.resolve import show_path
from train.data.prepare import one_at_a_time
from train.data.sources.content import digest_of
from train.data.sources.formats import Bad
from train.data.sources.pin import Pinned
from train.data.sources.source import CorpusError
from train.generate.chat_format import Message

RULES = 1  # changes when the same rows give other examples
BATCH = 1024  # conversations tokenised at once
SAY_EVERY_S = 30
INDEX = np.dtype(
    [("end", "<i8"), ("hash", "<u8"), ("row", "<i8"), ("file", "<i4"), ("scored", "<i4")]
)
SENTENCES = (
    reading.SENTENCES
    | template.REASONS
    | {
        "nothing": "no token of it is scored",
        "cut": "SEQ_LEN tokens pass before the first scored one",
        "longer": "conversations longer than SEQ_LEN, cut at their end",
        "truncated": "answers cut through by SEQ_LEN: scored as far as they go, without their end",
        "lost": "answers left out, since they begin behind SEQ_LEN",
        "unscored": "answers not scored, since the chat template writes them otherwise where another message follows",
        "altered": "answers of which the chat template leaves something out, or writes it otherwise",
    }
)
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Examples:
    """Arrays over the tokens of all examples, and over the examples; nothing of them is in memory until it is read.

    ids (n,) uint16 or uint32, scored (n,) bool; index (examples,) of INDEX. report: what became of the rows, as lines.
    key: of what decides all of it.
    """

    ids: np.ndarray
    scored: np.ndarray
    index: np.ndarray
    files: tuple[str, ...]
    report: tuple[str, ...]
    key: str

    def __len__(self) -> int:
        return len(self.index)

    def of(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, scored) of example i; a token is scored where it is told from those before it."""
        begin = int(self.index["end"][i - 1]) if i else 0
        part = slice(begin, int(self.index["end"][i]))
        return self.ids[part], self.scored[part]

    @functools.cached_property
    def positions(self) -> np.ndarray:
        """(examples,) int64: positions that each takes in a window, one less than it has tokens."""
        return np.diff(self.index["end"], prepend=0) - 1

    def place(self, i: int) -> str:
        """FILE:LINE of the row that example i comes from."""
        return f"{self.files[self.index['file'][i]]}:{self.index['row'][i] + 1}"


def examples_of(
    data: str,
    made_for: Template,
    seq_len: int,
    folder: Path,
    token: str = "",
    setting: str = "DATA",
) -> Examples:
    """The examples of DATA, tokenised now or as they were before. folder: DATA_DIR/finetune. Raises CorpusError."""
    try:
        with one_at_a_time(folder):
            pinned, files = pinned_files(data, folder, token, setting)
            key = key_of(pinned, made_for, seq_len)
            for half in folder.glob(
                f".{key}-*"
            ):  # of a process that was killed, since this one is alone here
                shutil.rmtree(half, ignore_errors=True)
            found = opened(folder / key)
            if not found:
                write(
                    folder,
                    key,
                    pinned,
                    conversations(pinned, files, tally := Tally()),
                    tally,
                    made_for,
                    seq_len,
                )
                found = opened(folder / key)
    except OSError as error:
        raise CorpusError(
            f"{error.filename or folder}: cannot be read or written ({error.strerror or error}); make "
            "room there, mend its permissions, or set another DATA_DIR"
        ) from error
    assert found, "what was written opens"
    return found


def key_of(pinned: Pinned, made_for: Template, seq_len: int) -> str:
    """16 hex digits of what decides the examples; where files lie is not part of it."""
    files = [(file.bytes, file.digest) for file in pinned.files]
    return digest(RULES, template.RULES, files, made_for.fingerprint, seq_len)[:16]


# ---- Writing


@dataclasses.dataclass
class Written:
    """A file on its way, and the hash of what was written."""

    file: BinaryIO
    digest: Any = dataclasses.field(default_factory=xxhash.xxh3_128)
    bytes: int = 0

    def add(self, values: np.ndarray) -> None:
        content = np.ascontiguousarray(values).tobytes()
        self.file.write(content)
        self.digest.update(content)
        self.bytes += len(content)

    def close(self) -> list[Any]:
        """[bytes, hash], once it is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return [self.bytes, f"xxh3:{self.digest.hexdigest()}"]


def write(
    folder: Path,
    key: str,
    pinned: Pinned,
    rows: Iterable[Located],
    tally: Tally,
    made_for: Template,
    seq_len: int,
) -> None:
    """Make folder/KEY of the conversations. Raises CorpusError, OSError; then there is nothing."""
    half = folder / f".{key}-{uuid.uuid4().hex[:8]}"
    half.mkdir()
    try:
        began, number = time.monotonic(), 0
        outs = {
            name: Written(open(half / name, "wb"))  # noqa: SIM115 (close() syncs them)
            for name in ("ids.bin", "scored.bin", "index.bin")
        }
        for part in batched(said_now_and_then(rows, pinned.source.name), BATCH):
            number += add(part, made_for, tally, seq_len, outs)
        reading.check_dropped(pinned, tally, SENTENCES)
        tokens = outs["scored.bin"].bytes
        log.info(
            "%s: %s tokens in %s examples; reading and tokenizing took %.1f s",
            pinned.source.name,
            f"{tokens:,}",
            f"{number:,}",
            time.monotonic() - began,
        )
        write_whole(
            half / "manifest.json",
            json.dumps(
                {
                    "key": key,
                    "template": made_for.name,
                    "seq_len": seq_len,
                    "ids": np.dtype(made_for.dtype).name,
                    "examples": number,
                    "tokens": tokens,
                    "sources": [file.name for file in pinned.files],
                    "report": tally.report(SENTENCES),
                    "files": {name: out.close() for name, out in outs.items()},
                },
                indent=1,
            ).encode(),
        )
        if (folder / key).exists():  # it did not open
            shutil.rmtree(folder / key)
        os.rename(half, folder / key)
        flush_folder(folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def add(
    part: list[Located], made_for: Template, tally: Tally, seq_len: int, outs: dict[str, Written]
) -> int:
    """Write the examples of these conversations, and count what becomes of them; returns how many there are."""
    entries, ids, scored = [], list[np.ndarray](), list[np.ndarray]()
    end = outs["scored.bin"].bytes
    for row, made in zip(
        part, made_for.label([row.conversation.messages for row in part]), strict=True
    ):
        kept = cut(made, row.place, tally, seq_len) if isinstance(made, Labelled) else made
        if isinstance(kept, Bad):
            tally.drop(row.place, kept)
            continue
        end += len(kept.ids)
        entries.append(
            (end, hash_of(row.conversation.messages), row.row, row.file, int(kept.scored.sum()))
        )
        ids.append(kept.ids)
        scored.append(kept.scored)
    if entries:
        outs["ids.bin"].add(np.concatenate(ids))
        outs["scored.bin"].add(np.concatenate(scored))
        outs["index.bin"].add(np.array(entries, dtype=INDEX))
    return len(entries)


def cut(made: Labelled, place: str, tally: Tally, seq_len: int) -> Labelled | Bad:
    """The conversation as an example; what it loses is counted."""
    scored = made.scored.copy()
    scored[:1] = False  # there is nothing before the first to tell it from
    where = np.flatnonzero(scored)
    if not len(where):
        return Bad("nothing", f"{len(scored)} tokens")
    size = int(where[-1]) + 1
    if size > seq_len + 1:
        if where[0] > seq_len:
            return Bad("cut", f"{size} tokens, the first scored one is number {where[0] + 1}")
        behind = scored[seq_len + 1 :]
        tally.note(place, "longer")
        tally.note(place, "truncated", int(scored[seq_len] and behind[0]))
        tally.note(place, "lost", int((behind & ~scored[seq_len:-1]).sum()))
        size = int(where[where <= seq_len][-1]) + 1
    tally.note(place, "unscored", made.unscored)
    tally.note(place, "altered", made.altered)
    return made._replace(ids=made.ids[:size], scored=scored[:size])


def hash_of(messages: list[Message]) -> int:
    """64 bits of what is said, whatever the file, the template and SEQ_LEN."""
    return int.from_bytes(
        hashlib.blake2b(json.dumps(messages).encode(), digest_size=8).digest(), "little"
    )


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(itertools.islice(rest, size)):
        yield part


def said_now_and_then(rows: Iterable[Located], name: str) -> Iterator[Located]:
    """The same rows; the log says how far they are."""
    said, began = time.monotonic(), time.monotonic()
    for number, row in enumerate(rows):
        if (now := time.monotonic()) > said + SAY_EVERY_S:
            said = now
            log.info(
                "%s: %s conversations tokenized, %.0f a second, at %s",
                name,
                f"{number:,}",
                number / (now - began),
                row.place,
            )
        yield row


# ---- Reading


def opened(folder: Path) -> Examples | None:
    """What a folder holds, verified by size and hash; None where that is not all, or not there."""
    try:
        about = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        arrays = [
            array(folder / name, kind, *about["files"][name])
            for name, kind in (
                ("ids.bin", about["ids"]),
                ("scored.bin", "bool"),
                ("index.bin", INDEX),
            )
        ]
        ids, scored, index = arrays
        if (
            not len(ids) == len(scored) == about["tokens"] == int(index["end"][-1])
            or len(index) != about["examples"]
        ):
            raise ValueError("parts of different length")
        if any(f"{name} of messages" in line for name in OF_MESSAGES for line in about["report"]):
            raise ValueError("of a version that did not look at what is learned")
        return Examples(
            ids, scored, index, tuple(about["sources"]), tuple(about["report"]), about["key"]
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        log.warning("%s: damaged (%s); it is made again", show_path(folder), error)
        return None


def array(path: Path, kind: Any, size: int, digest: str) -> np.ndarray:
    """A file as an array of that type. Raises ValueError if it is not what it was, FileNotFoundError."""
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {size}")
    if not size:
        raise ValueError(f"{path.name} is empty")
    if digest_of(path, "xxh3") != digest:
        raise ValueError(f"{path.name} has another hash")
    return np.memmap(path, dtype=kind, mode="r")
