"""The manifest of a folder of token shards: what each shard holds, and where in the source it begins.

It is rewritten as a whole after each seal: a training shard, the validation shard of the same stretch of
the source, and where in the source that stretch begins. It has a hash of all of this, which finds damage
and edits. Standard library only: make plan and make doctor read it too.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record.regular_file import is_file_name, open_inside
from settings import ExpectedError
from settings.json_file import read_whole

FILE = "manifest.json"
SCHEMA = 3
UNPROTECTED = 2  # the schema before manifests had a hash
SPLITS = ("train", "validation")


class DataError(ExpectedError):
    """Data that cannot be trained on; the message names the file, what is wrong and the remedy."""


def name_shard(split: str, number: int) -> str:
    return f"{split}_{number:05d}.bin"


def require_counts(*numbers: Any) -> None:
    """Raise ValueError unless these are integers from 0 on."""
    for number in numbers:
        if type(number) is not int or number < 0:  # not isinstance: True is no count
            raise ValueError(f"{number!r:.40} is no count")


def require_texts(*texts: Any) -> None:
    """Raise ValueError unless these are texts that a terminal shows as they are."""
    for text in texts:
        if type(text) is not str or not text.isprintable():
            raise ValueError(f"{text!r:.40} is no text")


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

    def __post_init__(self) -> None:
        require_counts(self.bytes, self.tokens, self.documents, self.text_bytes, self.max_id)
        require_texts(self.xxh3)
        if not is_file_name(self.file):
            raise ValueError(f"{self.file!r} is no name of a shard")

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
        require_counts(file, row, entry["documents"], *entry["dropped"].values())
        return cls((file, row), entry["documents"], entry["dropped"], train, validation)

    def infos(self) -> list[ShardInfo]:
        return [info for info in (self.train, self.validation) if info]


@dataclasses.dataclass
class Manifest:
    """All that is known of a folder of shards: manifest.json has these keys.

    Attributes:
        key: of the declaration at its revision.
        end: "all" if the source has no more, "limit" if no more was wanted, None while more is made.
        next: the place in the source, (file, row), from which on more is made.
        documents: in all seals; counted when the manifest is written.
        dropped: reason -> rows left out before `next`.
        dropped_examples: the first of them for each reason.
        schema: in which it is written; UNPROTECTED has no hash.
    """

    source: str
    revision: str
    key: str
    tokenizer_sha256: str
    shard_tokens: int
    end: str | None = None
    next: Sequence[int] = (0, 0)
    documents: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    dropped_examples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compressed_bpb: dict[str, float] = dataclasses.field(default_factory=dict)
    seals: list[Seal] = dataclasses.field(default_factory=list)
    schema: int = dataclasses.field(default=SCHEMA, compare=False)

    def __post_init__(self) -> None:
        file, row = self.next
        require_counts(self.shard_tokens, file, row, *self.dropped.values())
        require_texts(self.source, self.revision, self.key, self.tokenizer_sha256)
        require_texts(*self.dropped, *self.compressed_bpb)
        if not all(type(value) in (int, float) for value in self.compressed_bpb.values()):
            raise ValueError(f"its compressed_bpb is {self.compressed_bpb!r:.40}")
        if not all(isinstance(example, dict) for example in self.dropped_examples):
            raise ValueError(f"its dropped_examples are {self.dropped_examples!r:.40}")
        if self.end not in ("all", "limit", None):
            raise ValueError(f"its end is {self.end!r}")
        names = [info.file for info in self.infos()]
        if len(set(names)) < len(names):
            raise ValueError("it names a shard twice")

    def origin(self) -> str:
        """Return all that decides which tokens come in which order: source, revision, tokenizer, size of a shard."""
        return f"{self.source} {self.key} {self.tokenizer_sha256} {self.shard_tokens}"

    def text(self) -> bytes:
        """Return the content of manifest.json."""
        self.documents = sum(seal.documents for seal in self.seals)
        self.schema = SCHEMA
        content = {"schema": SCHEMA} | dataclasses.asdict(self)
        return json.dumps(content | {"hash": hash_content(content)}, indent=1).encode()

    def train(self) -> list[ShardInfo]:
        """Return the training shards."""
        return [seal.train for seal in self.seals if seal.train]

    def tokens(self) -> int:
        """Return the training tokens of all seals."""
        return sum(info.tokens for info in self.train())

    def infos(self) -> list[ShardInfo]:
        """Return all shards."""
        return [info for seal in self.seals for info in seal.infos()]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder of shards. Raises FileNotFoundError; DataError if it is none."""
    path = folder / FILE
    try:
        with open_inside(folder, FILE) as file:
            content = read_whole(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); correct its permissions, or {make_anew(folder)}"
        ) from None
    return parse_manifest(path, content)


def parse_manifest(path: Path, content: bytes) -> Manifest:
    """Return a manifest, which must have all of its keys. Raises DataError with the path."""
    try:
        facts = json.loads(content)
        is_sealed = facts.get("hash") == hash_content(facts)
        if facts["schema"] not in (SCHEMA, UNPROTECTED):
            raise DataError(
                f"{path}: has format {facts['schema']!r}; this version reads {SCHEMA}; "
                f"{make_anew(path.parent)}"
            )
        if not is_sealed and (facts["schema"] == SCHEMA or "hash" in facts):
            raise DataError(
                f"{path}: is damaged or was edited: its own hash differs. Restore it, or "
                f"{make_anew(path.parent)}"
            )
        facts["seals"] = [Seal.of(entry) for entry in facts["seals"]]
        if facts["documents"] != sum(seal.documents for seal in facts["seals"]):
            raise ValueError("its documents are not those of its shards")
        check_order(facts["seals"])
        return Manifest(**{field.name: facts[field.name] for field in dataclasses.fields(Manifest)})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: not a manifest of token shards ({error!r}); {make_anew(path.parent)}"
        ) from None


def check_order(seals: Sequence[Seal]) -> None:
    """Check that shards have their numbers, and that none was removed between two. Raises ValueError.

    Before manifests had a hash, nothing else told of it.
    """
    for split in SPLITS:
        shards = [info for info in (getattr(seal, split) for seal in seals) if info]
        if [info.file for info in shards] != [name_shard(split, n) for n in range(len(shards))]:
            raise ValueError(f"its {split} shards are not in order, or one is missing")
    begins = [seal.begins for seal in seals]
    if begins != sorted(set(begins)):
        raise ValueError("its shards do not follow each other in the source")


def hash_content(content: dict[str, Any]) -> str:
    """Return the hash of all but the hash, which does not depend on order and layout."""
    canonical = json.dumps(content | {"hash": None}, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def make_anew(folder: Path) -> str:
    """Return the remedy if a folder of shards as a whole is not what it should be."""
    return f"delete {folder} and run: make data, with the DATA or DATA_MIX of the run"
