"""Token shards on disk: written once, described by a manifest, verified before anything is read from them.

    DATA_DIR/SOURCE/REVISION/TOKENIZER/manifest.json   sizes, hashes and counts of every shard
                                         train_00000.bin validation_00000.bin ...

A shard is a 256-byte header and little-endian token ids, uint16 where the vocabulary fits and uint32
where not. Documents never cross a shard; each begins with the end-of-text token. The manifest
(manifest.py) is rewritten whole behind each seal and tells where in the source a shard begins: any can be made again.
Opening a source checks every size and header; a shard's hash is checked, by a thread ahead of training, before its
tokens are first handed out.
"""

import os
import struct
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from train.data.data_paths import token_bytes
from train.data.manifest import SPLITS, DataError, Seal, ShardInfo, make_anew, read_manifest

MAGIC = b"PTTOKENS"
HEADER = struct.Struct(
    "<8sIIQQ32s64s"
)  # magic, format, bytes a token, tokens, documents, tokenizer, source
HEADER_BYTES = 256
FORMAT = 1  # of a shard
DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def write_shard(
    path: Path,
    ids: np.ndarray,
    documents: int,
    text_bytes: int,
    tokenizer_sha256: str,
    source: str,
    vocab_size: int,
) -> ShardInfo:
    """Write a shard whole or not at all, durably, and return its entry for the manifest. ids (n,) integer."""
    width = token_bytes(vocab_size)
    header = HEADER.pack(
        MAGIC,
        FORMAT,
        width,
        len(ids),
        documents,
        bytes.fromhex(tokenizer_sha256),
        source.encode()[:64],
    ).ljust(HEADER_BYTES, b"\0")
    payload = np.ascontiguousarray(ids.astype(DTYPES[width], copy=False)).data
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(header)
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    digest = xxhash.xxh3_64(header)
    digest.update(payload)
    return ShardInfo(
        path.name,
        HEADER_BYTES + payload.nbytes,
        len(ids),
        documents,
        text_bytes,
        int(ids.max(initial=0)),
        digest.hexdigest(),
    )


class ShardSet:
    """The shards of one source under one tokenizer.

    partial: training shards may be absent, and more may come (refresh). Else the manifest must have its end.
    check: look at every file's size and header on opening.
    Raises DataError on opening if a file is missing, truncated, foreign or of another tokenizer.
    """

    def __init__(self, folder: Path, partial: bool = False, check: bool = True):
        self.folder, self.partial, self.check = folder, partial, check
        self.shards: dict[str, list[ShardInfo]] = {split: [] for split in SPLITS}
        self.manifest: dict[str, Any] = {}
        self.seals: list[Seal] = []
        self.tokenizer_sha256 = ""
        self._stamp: tuple[int, int] | None = None
        self._open: dict[tuple[str, int], np.ndarray] = {}
        self._checks: dict[tuple[str, int], tuple[tuple[int, int], Future[None]]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self.refresh()

    def refresh(self) -> bool:
        """Read the manifest again if it was written anew; returns whether there are more shards, or the end has come.

        Raises DataError where what was there has changed.
        """
        path = self.folder / "manifest.json"
        try:
            stamp = (path.stat().st_ino, path.stat().st_mtime_ns)
            if stamp == self._stamp:
                return False
            manifest, seals = read_manifest(self.folder)
        except FileNotFoundError:
            raise DataError(
                f"{path}: there is no such file; prepare the data with: make data"
            ) from None
        if seals[: len(self.seals)] != self.seals:
            raise DataError(
                f"{path}: shards that were there have changed while they were in use; {self.remedy()}"
            )
        if not self.partial and manifest["end"] is None:
            raise DataError(
                f"{self.folder}: is not finished; go on with: make data, or set DATA_STREAM=1"
            )
        grown = len(seals) > len(self.seals) or manifest["end"] != self.manifest.get("end")
        self.tokenizer_sha256 = manifest["tokenizer_sha256"]
        for seal in seals[len(self.seals) :]:
            for info in seal.infos() if self.check else ():
                self.check_header(info, may_be_absent=self.partial and info is seal.train)
        self.shards = {
            split: [info for seal in seals if (info := getattr(seal, split))] for split in SPLITS
        }
        self.manifest, self.seals, self._stamp = manifest, seals, stamp
        return grown

    @property
    def ended(self) -> bool:
        """Whether no more shards will come: the source has no more, or its limit is reached."""
        return self.manifest["end"] is not None

    @property
    def key(self) -> str:
        """Of all that decides which tokens come in which order: source, revision, tokenizer, size of a shard."""
        m = self.manifest
        return f"{m['source']} {m['key']} {self.tokenizer_sha256} {m['shard_tokens']}"

    def remedy(self) -> str:
        return make_anew(self.folder)

    def remedy_of(self, info: ShardInfo) -> str:
        """A single shard is made again from where it begins in its source."""
        return f"delete {self.folder / info.file} and run: make data"

    def check_header(self, info: ShardInfo, may_be_absent: bool = False) -> None:
        """Size, magic and the facts that the header repeats."""
        path = self.folder / info.file
        try:
            with open(path, "rb") as file:
                head = file.read(HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            if may_be_absent and isinstance(error, FileNotFoundError):
                return
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); make it again with: make data"
            ) from None
        if head[:8] != MAGIC:
            page = "; it looks like an error page" if head.lstrip()[:1] == b"<" else ""
            raise DataError(
                f"{path}: not a token shard ({size} bytes, starts with {head[:20]!r}{page}); "
                f"{self.remedy_of(info)}"
            )
        if size != info.bytes:
            raise DataError(
                f"{path}: {size} bytes, but the manifest says {info.bytes}; {self.remedy_of(info)}"
            )
        _, layout, width, tokens, documents, tokenizer, _ = HEADER.unpack(head[: HEADER.size])
        if layout != FORMAT or width not in DTYPES or tokens * width + HEADER_BYTES != size:
            raise DataError(
                f"{path}: header says format {layout}, {tokens} tokens of {width} bytes, which does not "
                f"fit its {size} bytes; {self.remedy_of(info)}"
            )
        if (tokens, documents) != (info.tokens, info.documents):
            raise DataError(
                f"{path}: holds {tokens} tokens of {documents} documents, but the manifest says "
                f"{info.tokens} of {info.documents}; {self.remedy_of(info)}"
            )
        if tokenizer.hex() != self.tokenizer_sha256:
            raise DataError(
                f"{path}: made with tokenizer {tokenizer.hex()[:12]}, but the manifest says "
                f"{self.tokenizer_sha256[:12]}; {self.remedy()}"
            )

    def check_vocabulary(self, tokenizer_sha256: str, vocab_size: int) -> None:
        """Raises DataError unless the shards are of this tokenizer and every id has a row in the embedding."""
        if self.tokenizer_sha256 != tokenizer_sha256:
            raise DataError(
                f"{self.folder}: the shards are of tokenizer {self.tokenizer_sha256[:12]}, but TOKENIZER "
                f"gives {tokenizer_sha256[:12]}; choose that tokenizer, or {self.remedy()}"
            )
        for split in SPLITS:
            for info in self.shards[split]:
                if info.max_id >= vocab_size:
                    raise DataError(
                        f"{self.folder / info.file}: holds token id {info.max_id}, but VOCAB_SIZE="
                        f"{vocab_size}; set VOCAB_SIZE to at least {info.max_id + 1}"
                    )

    # ---- Reading

    def tokens(self, split: str, shard: int) -> np.ndarray:
        """(n_tokens,) ids of a shard, memory-mapped, once its hash is found right."""
        key = (split, shard)
        if key not in self._open:
            info = self.shards[split][shard]
            self.check_soon(split, shard).result()
            width = (info.bytes - HEADER_BYTES) // info.tokens if info.tokens else 2
            mapped = np.memmap(
                self.folder / info.file, DTYPES[width], "r", HEADER_BYTES, (info.tokens,)
            )
            self._open[key] = mapped.view(
                np.ndarray
            )  # a slice of a memmap is one too, which costs more than its copy
        return self._open[key]

    def check_soon(self, split: str, shard: int) -> "Future[None]":
        """Have a thread check a shard's hash, unless it was; the result raises what is wrong."""
        key, info = (split, shard), self.shards[split][shard]
        try:
            facts = (self.folder / info.file).stat()
        except OSError as error:
            missing: Future[None] = Future()
            missing.set_exception(
                DataError(
                    f"{self.folder / info.file}: cannot be read ({error.strerror}); make it "
                    "again with: make data"
                )
            )
            return missing
        stamp = (
            facts.st_ino,
            facts.st_mtime_ns,
        )  # one that was deleted and made again is checked again
        if key not in self._checks or self._checks[key][0] != stamp:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="hash")
            self._checks[key] = stamp, self._pool.submit(self.check_hash, info)
        return self._checks[key][1]

    def is_there(self, shard: int) -> bool:
        """Whether the file of a training shard exists: beyond DATA_CACHE_GB those that are through are deleted."""
        return (self.folder / self.shards["train"][shard].file).is_file()

    def keep_open(self, shards: Iterable[int]) -> None:
        """Let go of all training shards but these: a deleted one takes its room as long as it is mapped."""
        kept = set(shards)
        self._open = {
            key: ids for key, ids in self._open.items() if key[0] != "train" or key[1] in kept
        }

    def check_hash(self, info: ShardInfo) -> None:
        """Raises DataError if the file's bytes are not those that were written."""
        path, digest = self.folder / info.file, xxhash.xxh3_64()
        try:
            with open(path, "rb") as file:
                while piece := file.read(2**24):
                    digest.update(piece)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); make it again with: make data"
            ) from None
        if digest.hexdigest() != info.xxh3:
            raise DataError(
                f"{path}: damaged, its hash is {digest.hexdigest()} and the manifest says {info.xxh3}; "
                f"{self.remedy_of(info)}"
            )

    def windows(self, split: str, seq_len: int) -> list[int]:
        """ShardInfo.windows of each shard."""
        return [info.windows(seq_len) for info in self.shards[split]]

    def total(self, split: str, field: str) -> int:
        """Sum of a ShardInfo field over a split."""
        return sum(getattr(info, field) for info in self.shards[split])
