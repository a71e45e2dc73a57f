"""Text to token ids and back: a byte-level BPE trained here, or a tokenizer.json brought along.

Taken are tokenizers that have a token for every byte, so that any text can be written and its bytes be counted:
byte-level ones (GPT-2, Llama 3, Qwen), and those of SentencePiece with byte fallback, which write a blank as U+2581
(Llama 2, Mistral, Gemma). One that loses text, by lower case, accents or unknown characters, is refused.

What comes back is the text, but for what such a file itself says:
- a blank before the text: where it puts one there (add_prefix_space, prepend_scheme, Prepend), a text may come back
  with one blank more or less at its start, and its ids stand for up to one byte too many. Never within a document.
- NFC: where it normalises so (Qwen), text comes back in that form, which Unicode holds to be the same.
- U+2581 in a text becomes a blank with those of SentencePiece.

Special tokens are never made from text: a document that spells one out is encoded as ordinary characters. Every
document is preceded by the separator, the first of SEPARATORS that there is, which therefore also starts a sample.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import (
    AddedToken,
    Encoding,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

from record.durable import write_whole
from record.regular_file import open_regular
from settings import ExpectedError
from settings.config import SETTINGS
from settings.json_file import read_whole
from train.data.sources.hub import ask
from train.data.sources.source import CorpusError

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
# Of OLMo, GPT-2 and Qwen; Llama 3; DeepSeek; Llama 2 and Mistral; Gemma; and what ends a turn of a chat.
SEPARATORS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
    "<|im_end|>",
)
LONGEST_PIECE = 2**16  # characters of a document that are encoded at once
BATCH_BYTES = 4_000_000  # of text handed to the tokenizer at once, to keep all cores busy
BATCH_PIECES = 2**15  # at most; each takes a kilobyte besides its text
# Reserved in every tokenizer trained here, so that fine-tuning needs no new rows in the embedding.
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
)

# Splits text before BPE, so that no token spans a word and its neighbour: an optional blank or other
# single character and letters; up to three digits; punctuation; line ends with their indentation; blanks.
SPLIT = r" ?\p{L}+|[^\s\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

METASPACE = "\u2581"  # a blank, as SentencePiece writes it
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that are in no UTF-8
# What a tokenizer must give back, by what it is called where one does not.
PROBES = {
    "capital letters": "Abc XYZ",
    "accents": "a \u00e9 \u00ef\u00df",
    "runs of blanks": "a  b   c ",
    "line ends and tabs": "a\n\tb\r\n\n",
    "compatibility characters": "x\u00b2 \ufb01 \uff21",
    "other scripts": "a \u65e5\u672c \u0639\u0631 \U0001f642",
    "control characters": "a\x01\x7f\u200d",
}


class TokenizerError(ExpectedError):
    """A tokenizer that cannot be had or does not fit; the message names the remedy."""


class Piece(NamedTuple):
    """Of a document: a part that is encoded at once, and whether it is the first, and the last."""

    text: str
    begins: bool
    ends: bool


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, its identity and what the trainer needs to know of it.

    inner: what encodes the second and later pieces of a document, without a blank before them. size: entries,
    special tokens included, up to the highest id; the embedding may have more rows. content: the tokenizer.json.
    """

    tokenizer: Tokenizer
    inner: Tokenizer
    sha256: str
    end_of_text: int
    size: int
    content: bytes = b""

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The least type that holds every id."""
        return np.uint16 if self.size <= 2**16 else np.uint32

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """(n,) ids of each text, of `dtype` and without a separator, in order, on all cores.

        Memory is bounded by BATCH_BYTES and the longest text: long ones are encoded in pieces over several batches,
        short ones share a batch. A thread has a batch encoded while the caller's draws the texts of the next and makes
        arrays of the last, so that at most two batches are read ahead of what was yielded. A text with a lone surrogate
        is a TypeError.
        """
        drawn = batches(texts)
        parts: list[np.ndarray] = []
        with concurrent.futures.ThreadPoolExecutor(
            1
        ) as worker:  # leaving it waits for the batch under way
            batch = next(drawn, None)
            running = worker.submit(self.encode_pieces, batch or [])
            while batch:
                following = next(drawn, None)
                encoded = running.result()
                running = worker.submit(self.encode_pieces, following or [])
                for piece, encoding in zip(batch, encoded, strict=True):
                    parts.append(np.array(encoding.ids, dtype=self.dtype))
                    if piece.ends:
                        yield parts[0] if len(parts) == 1 else np.concatenate(parts)
                        parts = []
                batch, encoded = following, []

    def encode_pieces(self, batch: list[Piece]) -> list[Encoding]:
        """Return the ids of each piece, in order."""
        encoded = {}
        for tokenizer, begins in ((self.tokenizer, True), (self.inner, False)):
            texts = [piece.text for piece in batch if piece.begins is begins]
            encoded[begins] = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [next(encoded[piece.begins]) for piece in batch]

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def byte_lengths(self) -> np.ndarray:
        """(size,) int64: bytes of text that each id stands for; 0 for special tokens.

        A byte-level entry spells each byte as one printable character, one of SentencePiece a character as itself, a
        blank as U+2581 and a single byte as <0x0A>.
        """
        lengths = np.zeros(self.size, dtype=np.int64)
        added = self.tokenizer.get_added_tokens_decoder()
        spelled = is_byte_level(self.tokenizer)
        for token, i in self.tokenizer.get_vocab(with_added_tokens=True).items():
            if i in added:  # these are written as they are
                lengths[i] = 0 if added[i].special else len(added[i].content.encode())
            elif spelled or BYTE_TOKEN.fullmatch(token):
                lengths[i] = len(token) if spelled else 1
            else:
                lengths[i] = len(token.replace(METASPACE, " ").encode())
        return lengths


def load(path: Path) -> Vocabulary:
    """The tokenizer in a tokenizer.json. Raises TokenizerError if it is not one, or will not do."""
    try:
        with open_regular(path) as file:
            content = read_whole(file)
    except OSError as error:
        raise TokenizerError(
            f"{path}: cannot be read ({error.strerror}); TOKENIZER must be the path of a "
            "tokenizer.json, a repository on the hub, or 'train'"
        ) from None
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception:  # the library raises a bare Exception
        raise TokenizerError(
            f"{path}: not a tokenizer.json ({len(content)} bytes, starts with "
            f"{content[:20]!r}); fetch it again"
        ) from None
    vocabulary = from_tokenizer(tokenizer, hashlib.sha256(content).hexdigest(), str(path))
    return dataclasses.replace(vocabulary, content=content)


def from_tokenizer(tokenizer: Tokenizer, sha256: str, where: str) -> Vocabulary:
    """The vocabulary of a tokenizer, once it is known to lose nothing. Raises TokenizerError."""
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    separator = next((token for token in SEPARATORS if token in added), None)
    if separator is None:
        raise TokenizerError(
            f"{where}: has no special token that separates documents; there must be one of "
            f"{' '.join(SEPARATORS)} among its added_tokens, as add_special_tokens of the tokenizers "
            "library puts it there"
        )
    if not added[separator].special:  # or text that spells it out would be taken for it
        tokenizer.add_special_tokens([AddedToken(separator, special=True, normalized=False)])
    inner = without_prefix(tokenizer)
    for made in (tokenizer, inner):
        made.encode_special_tokens = True
        made.no_truncation()
        made.no_padding()
    entries = tokenizer.get_vocab(with_added_tokens=True)
    vocabulary = Vocabulary(tokenizer, inner, sha256, entries[separator], max(entries.values()) + 1)
    try:
        lost = what_it_loses(vocabulary, entries)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, and of no module
            raise
        lost = f"the library fails at it: {error}"
    if lost:
        raise TokenizerError(
            f"{where}: a {type(tokenizer.model).__name__} tokenizer that loses text ({lost}), so that "
            "bytes cannot be counted; take a byte-level BPE, or a SentencePiece one with byte "
            "fallback and no normalizer that changes characters"
        )
    return vocabulary


def what_it_loses(v: Vocabulary, entries: dict[str, int]) -> str:
    """What text does not survive encoding and decoding, or has another length by its ids; "" where all does."""
    spelled = [f"<0x{byte:02X}>" for byte in range(256) if byte not in NEVER]
    if is_byte_level(v.tokenizer):
        spelled = [c for c in pre_tokenizers.ByteLevel.alphabet() if ord(c) not in NEVER]
    if missing := set(spelled) - entries.keys():
        return f"it has no token for {len(missing)} of the bytes"
    lengths = v.byte_lengths()
    added = v.tokenizer.get_added_tokens_decoder()
    lost = []
    if any(token.lstrip or token.rstrip for token in added.values() if not token.special):
        lost.append("blanks next to its added tokens")
    special = {i: token.content for i, token in added.items() if token.special}
    spelled_out = (*special.values(), "a".join(["", *special.values(), ""]))
    if any(special.keys() & v.encode(text) for text in spelled_out):
        lost.append("special tokens that a text spells out")
    for name, text in PROBES.items():
        ids = v.encode(text)
        blank = int(lengths[ids].sum()) - len(text.encode())  # one may stand before the text
        if v.decode(ids) not in (text, " " + text) or blank not in (0, 1):
            lost.append(name)
    return ", ".join(lost)


def part_of(tokenizer: Tokenizer, name: str) -> dict[str, Any] | None:
    """The normalizer, pre_tokenizer or decoder as it stands in the file."""
    part = getattr(tokenizer, name)
    return part and dict(json.loads(part.__getstate__()))


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether entries spell each byte as one printable character."""
    decoder = part_of(tokenizer, "decoder") or {}
    return any(part.get("type") == "ByteLevel" for part in decoder.get("decoders", [decoder]))


def without_prefix(tokenizer: Tokenizer) -> Tokenizer:
    """The same without the blank that some put before every text; the tokenizer itself where it puts none."""
    parts = {name: part_of(tokenizer, name) for name in ("normalizer", "pre_tokenizer")}
    unprefixed = {name: part and part_without_prefix(part) for name, part in parts.items()}
    return (
        tokenizer
        if unprefixed == parts
        else Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | unprefixed))
    )


def part_without_prefix(part: dict[str, Any]) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer that puts no blank before the text; None where that was all it did."""
    for several in part.keys() & {"normalizers", "pretokenizers"}:
        return part | {several: [p for p in map(part_without_prefix, part[several]) if p]}
    never: dict[str, Any] = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
    }
    return None if part["type"] == "Prepend" else part | never.get(part["type"], {})


def batches(texts: Iterable[str]) -> Iterator[list[Piece]]:
    """Pieces of the texts in lists of about BATCH_BYTES."""
    batch: list[Piece] = []
    size = 0
    for text in texts:
        left = len(text)
        for part in pieces(text):
            begins = left == len(text)
            left -= len(part)
            batch.append(Piece(part, begins, ends=left == 0))
            size += len(part) if part.isascii() else len(part.encode(errors="surrogatepass"))
            if size >= BATCH_BYTES or len(batch) == BATCH_PIECES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def pieces(text: str) -> Iterator[str]:
    """The text in pieces, cut before a blank, where a word begins anyway, or else wherever it must be: the regular
    expression that cuts it into words takes memory many times its length where it is a single word."""
    start = 0
    while len(text) - start > LONGEST_PIECE:
        blank = text.rfind(" ", start + 1, start + LONGEST_PIECE)
        end = blank if blank > 0 else start + LONGEST_PIECE
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def from_hub(repository: str, token: str, target: Path) -> Vocabulary:
    """The tokenizer.json of a hub repository, kept at `target` from the first time on."""
    if not target.is_file():

        def download() -> Path:
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(repository, "tokenizer.json", token=token or None))

        try:
            fetched = ask(
                repository, f"tokenizer.json of {repository}", download, "https://huggingface.co/"
            )
        except CorpusError as error:
            raise TokenizerError(
                f"TOKENIZER={repository}: neither a file here nor to be had from the hub: {error}; "
                "or give the path of a tokenizer.json"
            ) from error
        load(fetched)
        write_whole(target, fetched.read_bytes())
    return load(target)


def too_few_words(size: int, vocab_size: int) -> TokenizerError:
    return TokenizerError(
        f"the text gives a vocabulary of {size} tokens only, not VOCAB_SIZE={vocab_size}; "
        f"set VOCAB_SIZE={size}, or train on more text"
    )


def train(
    texts: Iterator[str], vocab_size: int, target: Path, may_shrink: bool = False
) -> Vocabulary:
    """A byte-level BPE of `vocab_size` entries trained on the texts, written to `target`.

    may_shrink: it has fewer where the texts have too few different words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (got := tokenizer.get_vocab_size()) != vocab_size:
        minimum = round(SETTINGS["VOCAB_SIZE"].minimum)
        if got < minimum:
            raise TokenizerError(
                f"The text is too short to train a tokenizer of {minimum} tokens. Use more text."
            )
        if not may_shrink:
            raise too_few_words(got, vocab_size)
        log.warning(
            "The text has few different words: VOCAB_SIZE=%d, instead of %d in the preset",
            got,
            vocab_size,
        )
    write_whole(target, tokenizer.to_str(pretty=True).encode())
    return load(target)
