"""train/tokenizer.py: text to ids and back without loss, bytes counted exactly, files that are no tokenizer refused."""

import hashlib
import json
import os
import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.conftest import SHARED
from train import tokenizer
from train.tokenizer import END_OF_TEXT, SPECIAL_TOKENS, TokenizerError, Vocabulary

AWKWARD = [
    "def f(x):\n    return x**2  # naïve\n", "", " ", "\n\n\t\r\n", "1234567890.5e-3", "日本語と한국어",
    "\U0001f642\u200d\u2194\ufe0f e\u0301",
    "\x00\x01\x7f", "a" * 3000, "don't  stop", "\ufeffBOM", "٣٤٥", "x" + " " * 50 + "y", "<|endoftext|>",
    "before<|endoftext|>after <|user|>hello<|end|>",
]


def some_text() -> list[str]:
    """Words of a little language, the same at every call."""
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(300)]
    return [" ".join(rng.choices(words, k=200)) + f"\n    x{i} = {rng.randint(0, 10**6)}\n" for i in range(40)]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return tokenizer.train(iter(some_text()), 400, tmp_path_factory.mktemp("t") / "tokenizer.json")


def test_a_trained_vocabulary_has_the_asked_size_and_the_reserved_tokens(vocabulary: Vocabulary) -> None:
    assert vocabulary.size == 400
    ids = [vocabulary.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(len(SPECIAL_TOKENS)))
    assert vocabulary.end_of_text == vocabulary.tokenizer.token_to_id("<|endoftext|>")
    assert {"<|user|>", "<|assistant|>", "<|system|>", "<|end|>"} <= set(SPECIAL_TOKENS)


@pytest.mark.parametrize("text", AWKWARD, ids=repr)
def test_every_text_comes_back_whole(vocabulary: Vocabulary, text: str) -> None:
    assert vocabulary.decode(vocabulary.encode(text)) == text


@pytest.mark.parametrize("text", AWKWARD, ids=repr)
def test_bytes_of_the_ids_are_the_bytes_of_the_text(vocabulary: Vocabulary, text: str) -> None:
    assert int(vocabulary.byte_lengths()[vocabulary.encode(text)].sum()) == len(text.encode())


def test_a_special_token_stands_for_no_bytes_and_is_never_made_from_text(vocabulary: Vocabulary) -> None:
    lengths = vocabulary.byte_lengths()
    special = range(len(SPECIAL_TOKENS))
    assert [int(lengths[i]) for i in special] == [0] * len(SPECIAL_TOKENS)
    assert lengths.min() == 0 and (lengths == 0).sum() == len(SPECIAL_TOKENS)
    for token in SPECIAL_TOKENS:
        assert not set(special) & set(vocabulary.encode(f"a{token}b {token}"))


def test_many_texts_at_once_give_what_each_gives_alone(vocabulary: Vocabulary) -> None:
    texts = AWKWARD + some_text()
    assert vocabulary.encode_batch(texts) == [vocabulary.encode(text) for text in texts]


def test_no_token_spans_two_words_or_more_than_three_digits(vocabulary: Vocabulary) -> None:
    spelled = [vocabulary.decode([i]) for i in range(len(SPECIAL_TOKENS), vocabulary.size)]
    assert sum(len(token) > 2 for token in spelled) > 20  # merges were learnt
    assert not [token for token in spelled if re.search(r"\w\s+\w|\d{4}|[a-z]\d|\d[a-z]", token)]


def test_training_twice_gives_one_identity_the_hash_of_the_file(tmp_path: Path, vocabulary: Vocabulary) -> None:
    path = tmp_path / "deep" / "tokenizer.json"
    again = tokenizer.train(iter(some_text()), 400, path)
    assert again.sha256 == vocabulary.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert tokenizer.load(path).sha256 == again.sha256
    other = tokenizer.train(iter(some_text()), 401, tmp_path / "other.json")
    assert other.sha256 != again.sha256


def test_too_little_text_is_refused_with_a_size_that_it_gives(tmp_path: Path) -> None:
    target = tmp_path / "tokenizer.json"
    with pytest.raises(TokenizerError, match=r"not VOCAB_SIZE=5000; set VOCAB_SIZE=\d+, or train on more") as raised:
        tokenizer.train(iter(some_text()[:3]), 5000, target)
    assert not target.exists()
    size = int(str(raised.value).split("set VOCAB_SIZE=")[1].split(",")[0])
    assert tokenizer.train(iter(some_text()[:3]), size, target).size == size


def without_end_of_text() -> str:
    made = Tokenizer(models.BPE())
    made.decoder = decoders.ByteLevel()
    return str(made.to_str())


def not_byte_level() -> str:
    made = Tokenizer(models.WordLevel({END_OF_TEXT: 0, "word": 1}, unk_token=END_OF_TEXT))
    return str(made.to_str())


@pytest.mark.parametrize(("content", "words"), [
    (None, ["cannot be read (No such file", "TOKENIZER must be"]),
    (b"<?xml version='1.0'?><Error/>".ljust(278), ["not a tokenizer.json (278 bytes,", "<?xml", "fetch it again"]),
    (b"", ["not a tokenizer.json (0 bytes"]),
    (b'{"version": "1.0"', ["not a tokenizer.json"]),
    (b'{"a": 1}', ["not a tokenizer.json"]),
    (b"\xff\xfe\x00", ["not a tokenizer.json (3 bytes"]),
    (without_end_of_text().encode(), ["has no token <|endoftext|>"]),
    (not_byte_level().encode(), ["is not byte-level"]),
], ids=["absent", "error page", "empty", "truncated", "other json", "binary", "no end of text", "words"])
def test_a_file_that_will_not_do_is_named_with_what_is_wrong(tmp_path: Path, content: bytes | None,
                                                             words: list[str]) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenizerError) as raised:
        tokenizer.load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_truncation_and_padding_in_a_file_are_not_applied(tmp_path: Path, vocabulary: Vocabulary) -> None:
    content = json.loads(vocabulary.tokenizer.to_str())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
                          "pad_type_id": 0, "pad_token": "<|pad|>"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    text = some_text()[0]
    assert tokenizer.load(path).encode(text) == vocabulary.encode(text)
    assert tokenizer.load(path).encode_batch(["ab", text]) == vocabulary.encode_batch(["ab", text])


def test_the_tokenizer_of_gpt2_gives_its_published_ids() -> None:
    path = SHARED / "tokenizers" / "gpt2" / "tokenizer.json"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    gpt2 = tokenizer.load(path)
    assert (gpt2.size, gpt2.end_of_text) == (50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    for text in AWKWARD:
        ids = gpt2.encode(text)
        assert gpt2.end_of_text not in ids
        assert int(gpt2.byte_lengths()[ids].sum()) == len(text.encode())


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "file"
    tokenizer.write_whole(path, b"first")
    assert path.read_bytes() == b"first"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tokenizer.write_whole(path, b"second")
    assert path.read_bytes() == b"first"
