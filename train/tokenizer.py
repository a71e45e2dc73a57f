"""Text to token ids and back: a byte-level BPE, trained here or brought along.

Special tokens are never made from text: a document that spells one out is encoded as ordinary
characters. Every document is preceded by END_OF_TEXT, which therefore also starts a sample.
"""

import dataclasses
import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
# Reserved in every tokenizer trained here, so that fine-tuning needs no new rows in the embedding.
SPECIAL_TOKENS = (END_OF_TEXT, "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")

# Splits text before BPE, so that no token spans a word and its neighbour: an optional blank or other
# single character and letters; up to three digits; punctuation; line ends with their indentation; blanks.
SPLIT = r" ?\p{L}+|[^\s\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


class TokenizerError(Exception):
    """A tokenizer that cannot be had or does not fit; the message names the remedy."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, its identity and what the trainer needs to know of it."""

    tokenizer: Tokenizer
    sha256: str
    end_of_text: int

    @property
    def size(self) -> int:
        """Entries, special tokens included; the embedding may have more rows."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, on all cores."""
        return [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def byte_lengths(self) -> np.ndarray:
        """(size,) int64: bytes of text that each id stands for; 0 for special tokens.

        Exact for byte-level BPE, whose entries spell each byte as one printable character.
        """
        lengths = np.zeros(self.size, dtype=np.int64)
        special = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        for token, i in self.tokenizer.get_vocab(with_added_tokens=True).items():
            lengths[i] = 0 if i in special else len(token)
        return lengths


def load(path: Path) -> Vocabulary:
    """The tokenizer in a tokenizer.json. Raises TokenizerError if it is not one, or lacks END_OF_TEXT."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror}); TOKENIZER must be the path of a "
                             "tokenizer.json, a repository on the hub, or 'train'") from None
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception:  # the library raises a bare Exception
        raise TokenizerError(f"{path}: not a tokenizer.json ({len(content)} bytes, starts with "
                             f"{content[:20]!r}); fetch it again") from None
    return from_tokenizer(tokenizer, hashlib.sha256(content).hexdigest(), str(path))


def from_tokenizer(tokenizer: Tokenizer, sha256: str, where: str) -> Vocabulary:
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise TokenizerError(f"{where}: has no token {END_OF_TEXT}, which separates documents; add it to the tokenizer")
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise TokenizerError(f"{where}: is not byte-level, so bytes per token cannot be counted; take a byte-level BPE")
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Vocabulary(tokenizer, sha256, end)


def from_hub(repository: str, token: str, target: Path) -> Vocabulary:
    """The tokenizer.json of a hub repository, kept at `target` from the first time on."""
    if not target.is_file():
        from huggingface_hub import hf_hub_download
        try:
            fetched = Path(hf_hub_download(repository, "tokenizer.json", token=token or None))
        except Exception as error:  # as in corpus.py: many types, one remedy
            raise TokenizerError(f"TOKENIZER={repository}: neither a file here nor to be had from the hub: {error}; "
                                 "give the path of a tokenizer.json") from error
        load(fetched)
        write_whole(target, fetched.read_bytes())
    return load(target)


def train(texts: Iterator[str], vocab_size: int, target: Path) -> Vocabulary:
    """A byte-level BPE of exactly `vocab_size` entries trained on the texts, written to `target`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    if (got := tokenizer.get_vocab_size()) != vocab_size:
        raise TokenizerError(f"the text gives a vocabulary of {got} tokens only, not VOCAB_SIZE={vocab_size}; "
                             f"set VOCAB_SIZE={got}, or train on more text")
    write_whole(target, tokenizer.to_str(pretty=True).encode())
    return load(target)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is either whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
