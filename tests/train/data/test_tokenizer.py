"""train/data/tokenizer.py: text to ids and back without loss, bytes counted exactly, files that are no tokenizer refused."""

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from train.data import tokenizer
from train.data.tokenizer import SPECIAL_TOKENS, TokenizerError

AWKWARD = [
    "def f(x):\n    return x**2  # naïve\n",
    "",
    " ",
    "\n\n\t\r\n",
    "1234567890.5e-3",
    "日本語と한국어",
    "\U0001f642\u200d\u2194\ufe0f e\u0301",
    "\x00\x01\x7f",
    "a" * 3000,
    "don't  stop",
    "\ufeffBOM",
    "٣٤٥",
    "x" + " " * 50 + "y",
    "<|endoftext|>",
    "before<|endoftext|>after <|user|>hello<|end|>",
]


def some_text():
    """Words of a little language, the same at every call."""
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(300)]
    return [
        " ".join(rng.choices(words, k=200)) + f"\n    x{i} = {rng.randint(0, 10**6)}\n"
        for i in range(40)
    ]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return tokenizer.train(iter(some_text()), 400, tmp_path_factory.mktemp("t") / "tokenizer.json")


def test_a_trained_vocabulary_reserves_special_tokens_and_splits_words(
    vocabulary,
):
    special = list(range(len(SPECIAL_TOKENS)))
    assert [vocabulary.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == special
    assert vocabulary.end_of_text == vocabulary.tokenizer.token_to_id("<|endoftext|>")
    assert {"<|user|>", "<|assistant|>", "<|system|>", "<|end|>"} <= set(SPECIAL_TOKENS)
    assert np.flatnonzero(vocabulary.byte_lengths() == 0).tolist() == special
    for token in SPECIAL_TOKENS:  # never made from text
        assert not set(special) & set(vocabulary.encode(f"a{token}b {token}"))
    spelled = [vocabulary.decode([i]) for i in range(len(special), vocabulary.size)]
    assert sum(len(token) > 2 for token in spelled) > 20  # merges were learnt
    assert not [token for token in spelled if re.search(r"\w\s+\w|\d{4}|[a-z]\d|\d[a-z]", token)]


def test_training_gives_one_identity_or_a_size_that_fits(tmp_path, vocabulary):
    path = tmp_path / "deep" / "tokenizer.json"
    again = tokenizer.train(iter(some_text()), 400, path)
    assert again.sha256 == vocabulary.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    other = tmp_path / "other.json"
    said = r"not VOCAB_SIZE=5000; set VOCAB_SIZE=(\d+), or train on more"
    with pytest.raises(TokenizerError, match=said) as raised:
        tokenizer.train(iter(some_text()[:3]), 5000, other)
    assert not other.exists()
    size = int(re.findall(said, str(raised.value))[0])
    made = tokenizer.train(iter(some_text()[:3]), size, other)
    assert made.size == size and made.sha256 != again.sha256


# ---- Tokenizers of others

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
METASPACE_DECODERS = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]


def sentencepiece(model="BPE", byte_fallback=True):
    """As SentencePiece's look when converted: entries in characters, a blank as U+2581, a token for each byte."""
    learnt = Tokenizer(models.BPE() if model == "BPE" else models.Unigram())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>", *(BYTES if byte_fallback else [])]
    kinds: dict[str, Any] = {"BPE": trainers.BpeTrainer, "Unigram": trainers.UnigramTrainer}
    learnt.train_from_iterator(
        some_text(),
        kinds[model](
            vocab_size=600, special_tokens=special, show_progress=False, unk_token="<unk>"
        ),
    )
    content = json.loads(learnt.to_str())
    content["model"] |= {"byte_fallback": byte_fallback} | (
        {"unk_token": "<unk>"} if model == "BPE" else {"unk_id": 0}
    )
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in BYTES
    ]
    made = Tokenizer.from_str(json.dumps(content))
    made.pre_tokenizer = None
    made.decoder = decoders.Sequence(METASPACE_DECODERS)
    return made


def changed(made, **parts):
    for name, part in parts.items():
        setattr(made, name, part)
    return made


STRIPPING = decoders.Sequence([*METASPACE_DECODERS, decoders.Strip(" ", 1, 0)])
TO_METASPACE = normalizers.Replace(" ", "\u2581")


def llama_2():
    prepending = normalizers.Sequence([normalizers.Prepend("\u2581"), TO_METASPACE])
    return changed(sentencepiece(), normalizer=prepending, decoder=STRIPPING)


def gemma():
    return changed(sentencepiece(), normalizer=TO_METASPACE)


def mistral(model="BPE", scheme="first"):
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return changed(sentencepiece(model), pre_tokenizer=metaspace, decoder=STRIPPING)


def byte_level(**how):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(**how), decoders.ByteLevel()
    made.train_from_iterator(
        some_text(),
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<eos>"],
            show_progress=False,
            initial_alphabet=made.pre_tokenizer.alphabet(),
        ),
    )
    return made


def unigram():
    """One that cannot make a special token from text: none of them is an entry of the model."""
    content = json.loads(mistral("Unigram", "always").to_str())
    for entry in content["model"]["vocab"][:3]:
        entry[0] = f"\ue000{entry[0]}"
    content["added_tokens"] = []
    made = Tokenizer.from_str(json.dumps(content))
    made.add_special_tokens(["</s>"])
    return made


def plain(**parts):
    return changed(byte_level(add_prefix_space=False), **parts)


def taken(made):
    return tokenizer.from_tokenizer(Tokenizer.from_str(made.to_str()), "00" * 32, "here")


# What is taken, and by whose blank before a text, if any, what comes back may differ
KINDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "byte-level": (plain, "none"),
    "with NFC": (lambda: plain(normalizer=normalizers.NFC()), "none"),
    "byte-level with a prefix": (lambda: byte_level(add_prefix_space=True), "stays"),
    "Gemma": (gemma, "none"),
    "Llama 2": (llama_2, "is taken away"),
    "Mistral": (mistral, "may take one along"),
    "Unigram": (unigram, "may take one along"),
}


def check_text(v, blank, text):
    """It comes back, and its ids stand for its bytes, but for a blank at its start."""
    text = (
        unicodedata.normalize("NFC", text) if v.tokenizer.normalizer and blank == "none" else text
    )
    text = text.replace("\u2581", " ")
    ids = v.encode(text)
    before = " " * (blank == "stays" and text[:1] not in ("", " "))
    back, surplus = v.decode(ids), int(v.byte_lengths()[ids].sum()) - len(text.encode())
    if blank == "may take one along" and text.startswith((" ", "\u2581")):
        assert (back, surplus) == (text[1:], 0)
    else:
        assert (back, surplus) == (
            before + text,
            len(before) if blank in ("none", "stays") else bool(text),
        )


@pytest.mark.parametrize(("make", "blank"), KINDS.values(), ids=KINDS)
def test_every_kind_that_is_taken_gives_text_back_and_counts_its_bytes(make, blank, monkeypatch):
    """Also in pieces, between which no blank is put."""
    v = taken(make())
    for text in [*AWKWARD, *some_text(), " x", "  x", "a </s> b<0x41"]:
        check_text(v, blank, text)
    text = "ab cde \u65e5\u672c\u8a9e" * 20 + "x" * 80 + " fin"
    monkeypatch.setattr(tokenizer, "LONGEST_PIECE", 30)
    (ids,) = v.encode_all([text])
    assert v.decode(ids.tolist()) == " " * (blank == "stays") + text


def test_the_separator_is_the_first_of_the_list_and_never_made_from_text():
    made = plain()
    made.add_special_tokens(["<|im_end|>", "</s>"])
    assert taken(made).end_of_text == made.token_to_id("</s>")
    made.add_tokens([AddedToken("<|endoftext|>", special=False)])  # which would be found in text
    v = taken(made)
    assert v.end_of_text == made.token_to_id("<|endoftext|>") == v.size - 1
    assert v.end_of_text not in v.encode("a<|endoftext|>b") and v.byte_lengths()[v.end_of_text] == 0
    assert v.decode(v.encode("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_an_added_token_that_is_text_counts_as_such_and_ids_may_have_holes():
    made = plain()
    content = json.loads(made.to_str())
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    content["model"]["vocab"][last] = 700
    made = Tokenizer.from_str(json.dumps(content))
    made.add_tokens(["    ", "na\u00efve"])
    v = taken(made)
    ids = v.encode("x    na\u00efve")
    assert v.size == len(v.byte_lengths()) == max(700, *ids) + 1
    assert v.byte_lengths()[ids].tolist() == [1, 4, 6] and v.byte_lengths()[700] == len(last)


def few_bytes():
    """A tokenizer without a token for one byte."""
    content = json.loads(plain().to_str())
    model = content["model"]
    model["vocab"]["\u0120\u0120\u0120"] = model["vocab"].pop("!")
    model["merges"] = [pair for pair in model["merges"] if "!" not in "".join(pair)]
    return Tokenizer.from_str(json.dumps(content))


def greedy_added_token():
    made = plain()
    made.add_tokens([AddedToken("<mask>", lstrip=True, special=False)])
    return made


def words(model):
    made = Tokenizer(model({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
    made.add_special_tokens(["</s>"])
    return made


NO_ACCENTS = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: plain(normalizer=normalizers.Lowercase()), "(capital letters, "),
        (lambda: plain(normalizer=NO_ACCENTS), "(accents)"),
        (lambda: plain(normalizer=normalizers.NFKC()), "(compatibility characters)"),
        (
            lambda: changed(gemma(), pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
            "line ends and tabs",
        ),
        (lambda: changed(gemma(), decoder=decoders.Metaspace()), "other scripts"),
        (few_bytes, "(it has no token for 1 of the bytes)"),
        (lambda: mistral("Unigram"), "(special tokens that a text spells out)"),
        (greedy_added_token, "(blanks next to its added tokens)"),
        (lambda: sentencepiece("Unigram", byte_fallback=False), "a Unigram tokenizer that loses"),
        (lambda: words(models.WordPiece), "a WordPiece tokenizer that loses"),
        (lambda: words(models.WordLevel), "a WordLevel tokenizer that loses"),
    ],
)
def test_what_loses_text_is_refused_with_what_it_loses(make, said):
    with pytest.raises(TokenizerError, match=r"^here: .*; take a byte-level BPE, or") as raised:
        taken(make())
    assert said in str(raised.value)


# ---- Files


UNSEPARATED = changed(Tokenizer(models.BPE()), decoder=decoders.ByteLevel()).to_str().encode()


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read (No such file or directory); TOKENIZER must be"),
        (b"<?xml version='1.0'?><Error/>".ljust(278), "not a tokenizer.json (278 bytes, starts w"),
        (b"", "not a tokenizer.json (0 bytes"),
        (b'{"version": "1.0"', "not a tokenizer.json"),
        (b'{"a": 1}', "not a tokenizer.json"),
        (b"\xff\xfe\x00", "not a tokenizer.json (3 bytes"),
        (UNSEPARATED, "has no special token that separates documents; there must be one of <|end"),
    ],
    ids=["absent", "error page", "empty", "truncated", "other json", "binary", "no end of text"],
)
def test_a_file_that_will_not_do_is_named_with_what_is_wrong(tmp_path, content, said):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenizerError) as raised:
        tokenizer.load(path)
    assert str(raised.value).startswith(f"{path}: {said}")


def test_truncation_and_padding_in_a_file_are_not_applied(tmp_path, vocabulary):
    made = Tokenizer.from_str(vocabulary.content.decode())
    made.enable_truncation(4)
    made.enable_padding(pad_id=1, pad_token="<|pad|>", length=9)
    path = tmp_path / "tokenizer.json"
    path.write_text(made.to_str())
    texts = ["ab", some_text()[0]]
    expected = [vocabulary.encode(text) for text in texts]
    v = tokenizer.load(path)
    assert [v.encode(text) for text in texts] == expected
    assert [ids.tolist() for ids in v.encode_all(texts)] == expected


@pytest.mark.fault(12)
def test_a_tokenizer_of_the_hub_is_fetched_once_and_refused_with_the_remedy(
    tmp_path, vocabulary, monkeypatch
):
    """By the rules by which data are fetched (test_fetch.py)."""
    served = tmp_path / "served.json"
    fetched = []

    def download(repository, name, token):
        fetched.append(repository)
        if repository != "a/good":
            raise FileNotFoundError(name)
        return str(served)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    target = tmp_path / "kept" / "tokenizer.json"
    with pytest.raises(
        TokenizerError, match=r"TOKENIZER=a/bad: neither .* https://huggingface\.co/a/bad;"
    ):
        tokenizer.from_hub("a/bad", "", target)
    served.write_bytes(b'{"model": ')
    with pytest.raises(TokenizerError, match=r"served\.json: not a tokenizer\.json \(10 bytes"):
        tokenizer.from_hub("a/good", "", target)
    assert not target.exists()
    served.write_bytes(vocabulary.content)
    for _ in range(2):
        assert tokenizer.from_hub("a/good", "", target).sha256 == vocabulary.sha256
    assert fetched == ["a/bad", "a/good", "a/good"]
