"""Token shards on disk: written once, described by a manifest, verified before anything is read from them.

    DATA_DIR/SOURCE/REVISION/TOKENIZER/manifest.json   sizes, hashes and counts of every shard
                                         train_00000.bin validation_00000.bin ...

A shard is a 256-byte header and little-endian token ids, uint16 where the vocabulary fits and uint32
where not. Documents never cross a shard; each begins with the end-of-text token. Opening a source
checks every size and header; a shard's hash is checked when its tokens are first asked for.
"""

import dataclasses
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

MAGIC = b"PTTOKENS"
HEADER = struct.Struct("<8sIIQQ32s64s")  # magic, format, bytes a token, tokens, documents, tokenizer, source
HEADER_BYTES = 256
FORMAT = 1
DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
SPLITS = ("train", "validation")


class DataError(Exception):
    """Data that cannot be trained on; the message names the file, what is wrong and the remedy."""


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


def write_shard(path: Path, ids: np.ndarray, documents: int, text_bytes: int, tokenizer_sha256: str,
                source: str, vocab_size: int) -> ShardInfo:
    """Write a shard whole or not at all, durably, and return its entry for the manifest. ids (n,) integer."""
    width = 2 if vocab_size <= 2**16 else 4
    header = HEADER.pack(MAGIC, FORMAT, width, len(ids), documents, bytes.fromhex(tokenizer_sha256),
                         source.encode()[:64]).ljust(HEADER_BYTES, b"\0")
    payload = ids.astype(DTYPES[width]).tobytes()
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(header)
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    digest = xxhash.xxh3_64(header)
    digest.update(payload)
    return ShardInfo(path.name, HEADER_BYTES + len(payload), len(ids), documents, text_bytes,
                     int(ids.max(initial=0)), digest.hexdigest())


class ShardSet:
    """The shards of one source under one tokenizer.

    Raises DataError on opening if a file is missing, truncated, foreign or of another tokenizer.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / "manifest.json"
        try:
            self.manifest: dict[str, Any] = json.loads(path.read_text())
            self.shards = {split: [ShardInfo(**entry) for entry in self.manifest["shards"][split]] for split in SPLITS}
            self.tokenizer_sha256: str = self.manifest["tokenizer_sha256"]
        except FileNotFoundError:
            raise DataError(f"{path}: there is no such file; prepare the data with: make data") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a manifest of token shards ({error!r}); {self.remedy()}") from None
        self._open: dict[tuple[str, int], np.ndarray] = {}
        for split in SPLITS:
            for info in self.shards[split]:
                self.check_header(info)

    def remedy(self) -> str:
        return f"delete {self.folder} and run: make data"

    def check_header(self, info: ShardInfo) -> None:
        """Size, magic and the facts that the header repeats."""
        path = self.folder / info.file
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                head = file.read(HEADER_BYTES)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); {self.remedy()}") from None
        if head[:8] != MAGIC:
            page = "; it looks like an error page" if head.lstrip()[:1] == b"<" else ""
            raise DataError(f"{path}: not a token shard ({size} bytes, starts with {head[:20]!r}{page}); "
                            f"{self.remedy()}")
        if size != info.bytes:
            raise DataError(f"{path}: {size} bytes, but the manifest says {info.bytes}; {self.remedy()}")
        _, layout, width, tokens, documents, tokenizer, _ = HEADER.unpack(head[:HEADER.size])
        if layout != FORMAT or width not in DTYPES or tokens * width + HEADER_BYTES != size:
            raise DataError(f"{path}: header says format {layout}, {tokens} tokens of {width} bytes, which does not "
                            f"fit its {size} bytes; {self.remedy()}")
        if (tokens, documents) != (info.tokens, info.documents):
            raise DataError(f"{path}: holds {tokens} tokens of {documents} documents, but the manifest says "
                            f"{info.tokens} of {info.documents}; {self.remedy()}")
        if tokenizer.hex() != self.tokenizer_sha256:
            raise DataError(f"{path}: made with tokenizer {tokenizer.hex()[:12]}, but the manifest says "
                            f"{self.tokenizer_sha256[:12]}; {self.remedy()}")

    def check_vocabulary(self, tokenizer_sha256: str, vocab_size: int) -> None:
        """Raises DataError unless the shards are of this tokenizer and every id has a row in the embedding."""
        if self.tokenizer_sha256 != tokenizer_sha256:
            raise DataError(f"{self.folder}: the shards are of tokenizer {self.tokenizer_sha256[:12]}, but TOKENIZER "
                            f"gives {tokenizer_sha256[:12]}; choose that tokenizer, or {self.remedy()}")
        for split in SPLITS:
            for info in self.shards[split]:
                if info.max_id >= vocab_size:
                    raise DataError(f"{self.folder / info.file}: holds token id {info.max_id}, but VOCAB_SIZE="
                                    f"{vocab_size}; set VOCAB_SIZE to at least {info.max_id + 1}")

    def tokens(self, split: str, shard: int) -> np.ndarray:
        """(n_tokens,) ids of a shard, memory-mapped, its hash checked the first time."""
        key = (split, shard)
        if key not in self._open:
            info = self.shards[split][shard]
            self.check_hash(info)
            width = (info.bytes - HEADER_BYTES) // info.tokens if info.tokens else 2
            self._open[key] = np.memmap(self.folder / info.file, DTYPES[width], "r", HEADER_BYTES, (info.tokens,))
        return self._open[key]

    def check_hash(self, info: ShardInfo) -> None:
        """Raises DataError if the file's bytes are not those that were written."""
        path, digest = self.folder / info.file, xxhash.xxh3_64()
        with open(path, "rb") as file:
            while piece := file.read(2**24):
                digest.update(piece)
        if digest.hexdigest() != info.xxh3:
            raise DataError(f"{path}: damaged, its hash is {digest.hexdigest()} and the manifest says {info.xxh3}; "
                            f"{self.remedy()}")

    def windows(self, split: str, seq_len: int) -> list[int]:
        """Windows of seq_len + 1 tokens, each starting seq_len after the last, in each shard."""
        return [max(0, info.tokens - 1) // seq_len for info in self.shards[split]]

    def total(self, split: str, field: str) -> int:
        """Sum of a ShardInfo field over a split."""
        return sum(getattr(info, field) for info in self.shards[split])
