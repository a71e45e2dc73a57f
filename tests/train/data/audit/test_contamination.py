"""train/data/audit/contamination.py and train/data/word_hashes.py against sets of 13-tuples of words, counted in plain Python."""

import json
import logging
import random
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from settings import SettingsError
from tests.train.data.test_tokenizer import gemma, mistral
from train.data import tokenizer
from train.data.audit.contamination import RunTable, Task, read_tasks
from train.data.audit.scan import read_words
from train.data.data_paths import core_bundle_path
from train.data.manifest import DataError
from train.data.tokenizer import Vocabulary
from train.data.word_hashes import hash_documents, split_words

WORDS = [
    "apple",
    "Don't",
    "naïve",
    "x-ray",
    "ÉCOLE",
    "42",
    "3.5",
    "日本",
    "_name_",
    "—",
    "“so”",
    "end.",
]
PLAIN = {
    "Don't": "dont",
    "x-ray": "xray",
    "ÉCOLE": "école",
    "3.5": "35",
    "_name_": "name",
    "—": "",
    "“so”": "so",
    "end.": "end",
}  # by hand


def sentence(rng: random.Random, n: int) -> str:
    return " ".join(
        rng.choice(["".join(rng.choices(string.ascii_lowercase, k=5)), *WORDS]) for _ in range(n)
    )


def plainly(text: str) -> list[str]:
    """The words of a sentence made above."""
    return [word for word in (PLAIN.get(w, w) for w in text.split()) if word]


def tuples(text: str, n: int = 13) -> set[tuple[str, ...]]:
    words = plainly(text)
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    rng = random.Random(3)
    return tokenizer.train(
        (sentence(rng, 50) for _ in range(200)),
        400,
        tmp_path_factory.mktemp("tokenizer") / "tokenizer.json",
    )


def write(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids_of(v: Vocabulary, documents: list[str]) -> np.ndarray:
    return np.array([i for text in documents for i in (v.end_of_text, *v.encode(text))])


def compared(v: Vocabulary, folder: Path, rows: list, documents: list[str]) -> dict:
    """What documents share with a task of these rows."""
    (task,) = read_tasks(str(write(folder / "task.jsonl", rows)), folder)
    table = RunTable([task])
    is_found = np.zeros(len(table.runs), dtype=bool)
    is_found[table.find(read_words(v, ids_of(v, documents)))] = True
    return table.count_shared(task, is_found)


# ---- Words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't   STOP\tme,\nnow!", ["dont", "stop", "me", "now"]),
        ("a — b … (c)", ["a", "b", "c"]),
        ("snake_case x² 3.14", ["snakecase", "x²", "314"]),
        ("no\u00a0break\u3000space", ["no", "break", "space"]),
        ("“Größe” ÉCOLE 日本", ["größe", "école", "日本"]),
        ("[ < { } >", []),
    ],
)
def test_a_word_is_lower_case_without_punctuation(text: str, words: list[str]) -> None:
    assert split_words(text) == words


@pytest.mark.parametrize("make", [gemma, mistral])
def test_tokens_of_sentencepiece_give_the_words_of_their_text(make: Callable[[], Any]) -> None:
    v = tokenizer.from_tokenizer(make(), 64 * "0", "here")
    texts = ["two words, one é 日本", "and \0 more"]
    assert read_words(v, ids_of(v, texts)).tolist() == hash_documents(texts).tolist()
    assert hash_documents(["a\0b"]).tolist() == hash_documents(["ab"]).tolist()


# ---- What is found


def test_rows_and_grams_found_are_those_of_plain_sets(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    rng = random.Random(5)
    rows = [
        {"q": sentence(rng, 40), "choices": [sentence(rng, 20), {"deep": sentence(rng, 30)}]}
        for _ in range(60)
    ]
    documents = [sentence(rng, 80) for _ in range(40)]
    read = set()
    for k, row in enumerate(
        rows
    ):  # each fourth leaks a part of one of its strings, under other punctuation
        if k % 4 == 0:
            leaked = " ".join(
                (row["q"] if k % 8 else row["choices"][1]["deep"]).split()[3 : 16 + k % 11]
            )  # type: ignore
            read |= tuples(documents[k // 2] + " " + leaked)
            documents[k // 2] += " " + leaked.upper().replace(" ", ",\n") + "!"
    read |= {gram for document in documents[1::2] for gram in tuples(document)}
    strings = [[row["q"], row["choices"][0], row["choices"][1]["deep"]] for row in rows]  # type: ignore[index]
    grams = [set().union(*map(tuples, texts)) for texts in strings]
    found = compared(vocabulary, tmp_path, rows, documents)
    assert found["rows"] == 60
    assert 10 <= found["rows_touched"] == sum(bool(g & read) for g in grams) < 30
    assert found["grams"] == len(set().union(*grams))
    assert found["grams_found"] == len(set().union(*grams) & read) > found["rows_touched"]
    for example in found["examples"]:
        words = example["text"].split()
        assert len(words) == example["words"] >= 13
        assert all(
            tuple(words[i : i + 13]) in grams[example["row"] - 1] & read
            for i in range(len(words) - 12)
        )
    assert len(found["examples"]) == 3 == len({example["row"] for example in found["examples"]})


def test_no_gram_spans_two_documents_or_two_strings(vocabulary: Vocabulary, tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(26)]
    assert (
        compared(
            vocabulary, tmp_path, [" ".join(words)], [" ".join(words[:12]), " ".join(words[12:24])]
        )["rows_touched"]
        == 0
    )
    assert (
        compared(
            vocabulary,
            tmp_path,
            [[" ".join(words[:13]), " ".join(words[13:])]],
            [" ".join(words[1:25])],
        )["rows_touched"]
        == 0
    )


def test_of_a_text_the_longest_stretch_is_shown(vocabulary: Vocabulary, tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(60)]
    documents = [" ".join(words[5:18]), " ".join(words[19:36]), " ".join(words[40:53])]
    found = compared(vocabulary, tmp_path, [" ".join(words)], documents)
    assert found["grams_found"] == 1 + 5 + 1
    assert [e["text"] for e in found["examples"]] == [documents[1]]


def test_examples_are_the_longest_stretches_of_three_rows(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """A stretch ends with its string, though the next one is shared too; of a row, the longest counts."""
    rows = [
        [" ".join(f"r{k}x{i}" for i in range(20)), " ".join(f"r{k}y{i}" for i in range(20))]
        for k in range(5)
    ]
    lengths = ((14, 13), (20, 20), (16, 0), (18, 17), (13, 0))
    documents = [
        " ".join(text.split()[20 - n :])
        for texts, ns in zip(rows, lengths, strict=True)
        for text, n in zip(texts, ns, strict=True)
    ]
    found = compared(vocabulary, tmp_path, rows, documents)
    assert [(e["row"], e["words"]) for e in found["examples"]] == [(2, 20), (4, 18), (3, 16)]
    assert [e["text"] for e in found["examples"]] == [documents[2], documents[6], documents[4]]


def test_short_rows_are_compared_whole_or_said_not_to_be(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    words = [f"w{i}" for i in range(40)]
    rows = [
        {"q": " ".join(words[:8])},  # 8: as a whole
        {"q": " ".join(words[8:15])},  # 7: not at all
        {"q": " ".join(words[:9]), "gold": 3},  # 9, of which 8 are in the source
        {"q": " ".join(words[15:20]), "a": " ".join(words[20:25])},  # 5 + 5: as a whole
        {"q": " ".join(words[20:33]), "a": " ".join(words[33:40])},  # a string of 13
        {"q": " ".join(words[16:24]), "a": "yes"},  # 8 and 1: the 8
        7,
        None,
    ]
    (task,) = read_tasks(str(write(tmp_path / "task.jsonl", rows)), tmp_path)
    assert (task.rows, task.short) == (8, 7)
    found = compared(
        vocabulary, tmp_path, rows, [" ".join(words[:8]), "x " + " ".join(words[8:25])]
    )
    assert found["rows_touched"] == 3
    assert {(e["row"], e["words"]) for e in found["examples"]} == {(1, 8), (4, 10), (6, 8)}


# ---- Tasks on disk


def words_of(task: Task) -> list[str]:
    return [text.words for text in task.texts]


def test_all_tasks_of_a_folder_or_zip_are_read_and_named_by_their_stem(tmp_path: Path) -> None:
    rng = random.Random(1)
    folder = tmp_path / "bundle"
    for name in ("core/qa/boolq.jsonl", "core/qa/piqa.jsonl", "small/qa/boolq.jsonl"):
        write(folder / name, [sentence(rng, 30)])
    (folder / "core" / "notes.txt").write_text("no task")
    shutil.make_archive(str(folder), "zip", folder)
    tasks, packed = (read_tasks(str(path), tmp_path) for path in (folder, f"{folder}.zip"))
    assert [task.name for task in tasks] == ["core/qa/boolq", "piqa", "small/qa/boolq"]
    assert [(task.name, words_of(task)) for task in tasks] == [
        (task.name, words_of(task)) for task in packed
    ]
    (alone,) = read_tasks(str(folder / "core" / "qa" / "piqa.jsonl"), tmp_path)
    assert words_of(alone) == words_of(tasks[1])


def test_the_download_of_make_eval_is_read_and_nothing_is_downloaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = f"https://example.invalid/a.zip@sha256:{64 * '0'}"
    assert read_tasks(address, tmp_path) == []
    assert "`make eval` of any run downloads them" in caplog.text
    write(tmp_path / "tasks" / "a.jsonl", [sentence(random.Random(1), 30)])
    path = core_bundle_path(address, tmp_path)
    path.parent.mkdir()
    shutil.make_archive(str(path.with_suffix("")), "zip", tmp_path / "tasks")
    assert [task.name for task in read_tasks(address, tmp_path)] == ["a"]
    assert read_tasks("none", tmp_path) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"q": "a"}\n<?xml version="1.0"?>\n', "row 2: not JSON"),
        (b'"\xff"\n', "row 1: not JSON"),
        (b'{"q": "half a', "row 1: not JSON"),
        (b"\n", "holds no row"),
    ],
)
def test_a_damaged_task_is_refused_by_file_and_row(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=rf"{tmp_path}/t\.jsonl.*{says}.*CORE_BUNDLE=none"):
        read_tasks(str(tmp_path), tmp_path)


def test_a_damaged_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(b"PK half")
    with pytest.raises(DataError, match=r"a\.zip: cannot be read .*CORE_BUNDLE=none"):
        read_tasks(str(path), tmp_path)
    write(tmp_path / "tasks" / "a.jsonl", [sentence(random.Random(1), 30)])
    shutil.make_archive(str(path.with_suffix("")), "zip", tmp_path / "tasks")
    content = bytearray(path.read_bytes())
    content[60] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read .*CORE_BUNDLE=none"):
        read_tasks(str(path), tmp_path)


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_path_without_tasks_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=rf"CORE_BUNDLE={tmp_path}/{name}: There is no"):
        read_tasks(f"{tmp_path}/{name}", tmp_path)
