"""Token shards on disk: written once, described by a manifest, verified before anything is read from them.

    DATA_DIR/SOURCE/REVISION/TOKENIZER/manifest.json   sizes, hashes and counts of every shard
                                       train_00000.bin validation_00000.bin ...

A shard is a 256-byte header and little-endian token ids, uint16 where the vocabulary fits and uint32
where not. Documents never cross a shard; each begins with the end-of-text token. The manifest
(manifest.py) is rewritten after each seal and says where in the source a shard begins, so that any
shard can be made again.

Opening a source checks every size and header. The hash of a shard is checked by a thread ahead of
training, before its tokens are first handed out. Each read checks that nobody has written to the
file since (OpenShard).
"""

import contextlib
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from record.durable import open_whole
from record.regular_file import open_descriptor, open_inside
from settings.resolve import repeat_typed
from train.data.data_paths import token_bytes
from train.data.manifest import (
    FILE,
    SPLITS,
    UNPROTECTED,
    DataError,
    Manifest,
    ShardInfo,
    make_anew,
    read_manifest,
)

MAGIC = b"PTTOKENS"
# magic, format, bytes per token, tokens, documents, SHA-256 of the tokenizer, source
HEADER = struct.Struct("<8sIIQQ32s64s")
HEADER_BYTES = 256
FORMAT = 1  # of a shard
DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}

CHUNK_BYTES = 2**24  # that are read at once to hash a file

# Inode, size and time of the last write of a file. Deleting an open shard does not change them.
Stamp = tuple[int, int, int]


def write_shard(
    path: Path,
    ids: np.ndarray,
    documents: int,
    text_bytes: int,
    tokenizer_sha256: str,
    source: str,
    vocab_size: int,
) -> ShardInfo:
    """Write a shard whole or not at all, durably. ids: (n,) integer. Returns its entry in the manifest."""
    width = token_bytes(vocab_size)
    tokenizer = bytes.fromhex(tokenizer_sha256)
    name = source.encode()[:64]
    header = HEADER.pack(MAGIC, FORMAT, width, len(ids), documents, tokenizer, name)
    header = header.ljust(HEADER_BYTES, b"\0")
    payload = np.ascontiguousarray(ids.astype(DTYPES[width], copy=False)).data
    with open_whole(path) as file:
        file.write(header)
        file.write(payload)
    digest = xxhash.xxh3_64(header)
    digest.update(payload)
    return ShardInfo(
        file=path.name,
        bytes=HEADER_BYTES + payload.nbytes,
        tokens=len(ids),
        documents=documents,
        text_bytes=text_bytes,
        max_id=int(ids.max(initial=0)),
        xxh3=digest.hexdigest(),
    )


def stamp_of(facts: os.stat_result) -> Stamp:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def hash_file(file: int) -> str:
    """Return the XXH3 of all bytes of an open file. Raises OSError."""
    digest = xxhash.xxh3_64()
    position = 0
    while chunk := os.pread(file, CHUNK_BYTES, position):
        digest.update(chunk)
        position += len(chunk)
    return digest.hexdigest()


def dtype_of(info: ShardInfo) -> np.dtype:
    """Return the type of a shard's token ids. Raises DataError."""
    for width, dtype in DTYPES.items():
        if info.bytes == HEADER_BYTES + width * info.tokens:
            return dtype
    raise DataError(
        f"{info.file}: the manifest says {info.bytes} bytes and {info.tokens} tokens, which does not "
        "fit. Delete the folder that it is in and run: make data"
    )


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror}); make it again with: make data")


def is_header_of(head: bytes, info: ShardInfo, manifest: Manifest) -> bool:
    """Return whether these first bytes of a shard say the same as its manifest."""
    _, _, width, tokens, documents, tokenizer, source = HEADER.unpack_from(head)
    return (
        (tokens, documents, tokenizer.hex())
        == (info.tokens, info.documents, manifest.tokenizer_sha256)
        and info.bytes == HEADER_BYTES + width * tokens
        and source.rstrip(b"\0") == manifest.source.encode()[:64]
    )


def wrong_size(path: Path, size: int, info: ShardInfo) -> DataError:
    return DataError(f"{path}: {size} bytes, but the manifest says {info.bytes}; {remake(path)}")


class OpenShard:
    """A training or validation shard that is open. It is hashed by a thread before the first read.

    It is read with pread and not mapped: if somebody truncates a mapped file, SIGBUS kills the
    process before it can name the shard.

    Raises DataError if the file cannot be opened.
    """

    def __init__(self, path: Path, info: ShardInfo, pool: ThreadPoolExecutor):
        self.file = -1
        self.path = path
        self.info = info
        self.dtype = dtype_of(info)
        try:
            self.file = open_descriptor(path, follow=False)
        except OSError as error:
            raise unreadable(path, error) from error
        self.stamp = stamp_of(os.fstat(self.file))
        _, size, _ = self.stamp
        if size != info.bytes:
            raise wrong_size(path, size, info)
        self.hash = pool.submit(hash_file, self.file)

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    __del__ = close

    def read(self, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the tokens of each span, from its begin up to its end. Raises DataError."""
        width = self.dtype.itemsize
        contents = []
        try:
            digest = self.hash.result()
            for begin, end in spans:
                offset = HEADER_BYTES + begin * width
                contents.append(os.pread(self.file, (end - begin) * width, offset))
            # Last, so that what was read is what was hashed.
            has_changed = stamp_of(os.fstat(self.file)) != self.stamp
        except OSError as error:
            raise unreadable(self.path, error) from error
        problem = ""
        if has_changed:
            problem = "was overwritten or truncated while it was read"
        elif digest != self.info.xxh3:
            problem = f"damaged: its hash is {digest}, and the manifest says {self.info.xxh3}"
        if problem:
            raise DataError(f"{self.path}: {problem}; {remake(self.path)}")
        return [np.frombuffer(content, self.dtype) for content in contents]


def remake(path: Path) -> str:
    """Return the remedy for a single shard, which is made again from where it begins in its source."""
    return f"delete {path} and run: make data, with the DATA or DATA_MIX of the run"


class ShardSet:
    """The shards of one source under one tokenizer.

    Args:
        partial: training shards may be absent, and more may come (refresh). Otherwise the manifest
            must have its end.
        check: look at every file's size and first bytes on opening.

    Raises DataError on opening if a file is missing, truncated or foreign.
    """

    def __init__(self, folder: Path, partial: bool = False, check: bool = True):
        self.folder = folder
        self.partial = partial
        self.check = check
        self.shards: dict[str, list[ShardInfo]] = {split: [] for split in SPLITS}
        self.manifest = Manifest("", "", "", "", 0)
        self._manifest_stamp: Stamp | None = None
        self._opened: dict[tuple[str, int], OpenShard] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hash")  # starts no thread yet
        self.refresh()

    def refresh(self) -> bool:
        """Read the manifest again if it was rewritten.

        Returns whether there are more shards, or the end has come. Raises DataError if what was
        there has changed.
        """
        path = self.folder / "manifest.json"
        try:
            stamp = stamp_of(path.stat())
            if stamp == self._manifest_stamp:
                return False
            manifest = read_manifest(self.folder)
        except FileNotFoundError:
            raise DataError(
                f"{path}: there is no such file; prepare the data with: make data{repeat_typed('data')}"
            ) from None
        seals = manifest.seals
        known = len(self.manifest.seals)
        if seals[:known] != self.manifest.seals:
            raise DataError(
                f"{path}: shards that were there have changed while they were in use; "
                f"{make_anew(self.folder)}"
            )
        if not self.partial and manifest.end is None:
            raise DataError(
                f"{self.folder}: is not finished; finish it with: make data{repeat_typed('data')}, or set DATA_STREAM=1"
            )
        if self.check:
            for seal in seals[known:]:
                for info in seal.infos():
                    self.check_file(
                        info, manifest, may_be_absent=self.partial and info is seal.train
                    )
        has_grown = len(seals) > known or manifest.end != self.manifest.end
        self.shards = {
            "train": manifest.train(),
            "validation": [seal.validation for seal in seals if seal.validation],
        }
        self.manifest = manifest
        self._manifest_stamp = stamp
        return has_grown

    @property
    def ended(self) -> bool:
        """Whether no more shards will come: the source has no more, or its limit is reached."""
        return self.manifest.end is not None

    @property
    def key(self) -> str:
        """Manifest.origin of what was read last."""
        return self.manifest.origin()

    def check_file(self, info: ShardInfo, manifest: Manifest, may_be_absent: bool = False) -> None:
        """Check the size and the first bytes, which tell what a wrong file is. Raises DataError.

        A manifest without a hash may have been edited: it must say what the header of each shard says.
        """
        path = self.folder / info.file
        try:
            with open_inside(self.folder, info.file) as file:
                head = file.read(HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            if may_be_absent and isinstance(error, FileNotFoundError):
                return
            raise unreadable(path, error) from error
        problem = ""
        if head[:8] != MAGIC:
            page = "; it looks like an error page" if head.lstrip()[:1] == b"<" else ""
            problem = f"not a token shard ({size} bytes, starts with {head[:20]!r}{page})"
            raise DataError(f"{path}: {problem}; {remake(path)}")
        if size != info.bytes:
            raise wrong_size(path, size, info)
        if manifest.schema == UNPROTECTED and not is_header_of(head, info, manifest):
            raise DataError(
                f"{self.folder / FILE}: says of {info.file} what its header does not say, so that it was "
                f"edited or is damaged; {make_anew(self.folder)}"
            )

    def check_vocabulary(self, tokenizer_sha256: str, vocab_size: int) -> None:
        """Raise DataError unless the shards are of this tokenizer and every id has a row in the embedding."""
        theirs = self.manifest.tokenizer_sha256
        if theirs != tokenizer_sha256:
            raise DataError(
                f"{self.folder}: the shards are of tokenizer {theirs[:12]}, but TOKENIZER "
                f"gives {tokenizer_sha256[:12]}; choose that tokenizer, or {make_anew(self.folder)}"
            )
        for info in self.manifest.infos():
            if info.max_id >= vocab_size:
                raise DataError(
                    f"{self.folder / info.file}: holds token id {info.max_id}, but VOCAB_SIZE="
                    f"{vocab_size}; set VOCAB_SIZE to at least {info.max_id + 1}"
                )

    # ---- Reading

    def open(self, split: str, shard: int) -> OpenShard:
        """Open a shard, and have a thread hash it, unless it is open. Raises DataError."""
        key = (split, shard)
        if key not in self._opened:
            info = self.shards[split][shard]
            self._opened[key] = OpenShard(self.folder / info.file, info, self._pool)
        return self._opened[key]

    def verify(self, info: ShardInfo) -> None:
        """Raise DataError if the file's bytes are not those that were written."""
        OpenShard(self.folder / info.file, info, self._pool).read([])

    def read(self, split: str, shard: int, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the (end - begin,) tokens of each span of a shard, fewer at the shard's end.

        Raises DataError unless they are those whose hash was found right.
        """
        return self.open(split, shard).read(spans)

    def tokens(self, split: str, shard: int) -> np.ndarray:
        """Return all tokens of a shard: (n_tokens,). Raises DataError."""
        (ids,) = self.read(split, shard, [(0, self.shards[split][shard].tokens)])
        return ids

    def is_there(self, shard: int) -> bool:
        """Return whether the file of a training shard exists: DATA_CACHE_GB deletes those that are used up."""
        return (self.folder / self.shards["train"][shard].file).is_file()

    def keep_open(self, shards: Sequence[int]) -> None:
        """Open those of these training shards that are there, in this order, and close all others.

        A deleted file takes its space as long as it is open.
        """
        for split, shard in list(self._opened):
            if split == "train" and shard not in shards:
                self._opened.pop((split, shard)).close()
        for shard in shards:
            if self.is_there(shard):
                with contextlib.suppress(DataError):  # whoever reads it is told
                    self.open("train", shard)

    def windows(self, split: str, seq_len: int) -> list[int]:
        """Return ShardInfo.windows of each shard."""
        return [info.windows(seq_len) for info in self.shards[split]]

    def total(self, split: str, field: str) -> int:
        """Return the sum of a ShardInfo field over a split."""
        return sum(getattr(info, field) for info in self.shards[split])
