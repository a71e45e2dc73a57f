"""The manifest of a folder of token shards: what each shard holds, and where in the source it begins.

It is rewritten as a whole after each seal: a training shard, the validation shard of the same stretch of
the source, and where in the source that stretch begins. Standard library only: make plan and make doctor
read it too.
"""

import dataclasses
import errno
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMA = 2
SPLITS = ("train", "validation")
KEYS = (
    "source",
    "revision",
    "key",
    "tokenizer_sha256",
    "shard_tokens",
    "end",
    "next",
    "documents",
    "dropped",
    "dropped_examples",
    "compressed_bpb",
)  # in this order, between schema and seals
DEFAULTS: dict[str, Any] = {
    "next": (0, 0),
    "dropped": {},
    "dropped_examples": [],
    "compressed_bpb": {},
}


class DataError(Exception):
    """Data that cannot be trained on; the message names the file, what is wrong and the remedy.

    Attributes:
        changed_s: Unix time at which a file changed that was read since; infinite if none was.
    """

    changed_s = math.inf


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """One shard's entry in the manifest. `text_bytes` are those of the documents, in UTF-8."""

    file: str
    bytes: int
    tokens: int
    documents: int
    text_bytes: int
    max_id: int
    xxh3: str

    def windows(self, seq_len: int) -> int:
        """Return the number of windows of seq_len + 1 tokens, each starting seq_len after the last."""
        return max(0, self.tokens - 1) // seq_len


@dataclasses.dataclass(frozen=True)
class Seal:
    """What was sealed together: a stretch of the source, from (file, row) on.

    Attributes:
        documents: number of those in the two shards.
        dropped: reason -> rows left out.
    """

    begins: tuple[int, int]
    documents: int
    dropped: dict[str, int]
    train: ShardInfo | None
    validation: ShardInfo | None

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Seal":
        """Return a seal from the manifest's JSON. Raises KeyError, TypeError, ValueError."""
        train, validation = (
            ShardInfo(**entry[split]) if entry[split] else None for split in SPLITS
        )
        file, row = entry["begins"]
        return cls((file, row), entry["documents"], entry["dropped"], train, validation)

    def infos(self) -> list[ShardInfo]:
        return [info for info in (self.train, self.validation) if info]


def manifest_of(seals: Sequence[Seal], **facts: Any) -> bytes:
    """Return the text of manifest.json.

    Args:
        facts: the other KEYS. `key` is of the declaration at its revision. `end` is "all" if the source
            has no more, "limit" if no more was wanted, None while more is made. `next` is the place in
            the source from which on more is made.
    """
    facts = DEFAULTS | facts | {"documents": sum(seal.documents for seal in seals)}
    content = {"schema": SCHEMA, **{key: facts[key] for key in KEYS}}
    content["seals"] = [dataclasses.asdict(seal) for seal in seals]
    return json.dumps(content, indent=1).encode()


def read_manifest(folder: Path) -> tuple[dict[str, Any], list[Seal]]:
    """Read the manifest of a folder of shards. Raises FileNotFoundError; DataError if it is none."""
    path = folder / "manifest.json"
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
            raise OSError(errno.EINVAL, "is not a file")
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); correct its permissions, or {make_anew(folder)}"
        ) from None
    return parse_manifest(path, content)


def parse_manifest(path: Path, content: bytes) -> tuple[dict[str, Any], list[Seal]]:
    """Return a manifest, which has all of its keys, and its seals. Raises DataError with the path."""
    try:
        manifest = json.loads(content)
        if manifest["schema"] != SCHEMA:
            raise DataError(
                f"{path}: has format {manifest['schema']}; this version reads {SCHEMA}; "
                f"{make_anew(path.parent)}"
            )
        seals = [Seal.of(entry) for entry in manifest["seals"]]
        return {key: manifest[key] for key in KEYS} | manifest, seals
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path}: not a manifest of token shards ({error!r}); {make_anew(path.parent)}"
        ) from None


def make_anew(folder: Path) -> str:
    """Return the remedy if a folder of shards as a whole is not what it should be."""
    return f"delete {folder} and run: make data, with the DATA or DATA_MIX of the run"
