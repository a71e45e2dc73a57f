"""train/data/audit/contamination.py and train/data/word_hashes.py against sets of 13-tuples of words, counted in plain Python."""

import json
import logging
import random
import shutil
import string
from pathlib import Path

import numpy as np
import pytest

from settings import SettingsError
from tests.train.data.test_tokenizer import gemma, mistral
from train.data import tokenizer
from train.data.audit.contamination import RunTable, read_tasks
from train.data.audit.scan import find_runs
from train.data.data_paths import core_bundle_path
from train.data.manifest import DataError
from train.data.word_hashes import hash_documents, split_words

# Words as they are written, and as they are compared.
WORDS = {
    "apple": "apple",
    "Don't": "dont",
    "x-ray": "xray",
    "ÉCOLE": "école",
    "3.5": "35",
    "日本": "日本",
    "_name_": "name",
    "—": "",
    "“so”": "so",
    "end.": "end",
    "x²": "x²",
    "[": "",
}


def sentence(rng, n):
    return " ".join(
        rng.choice(["".join(rng.choices(string.ascii_lowercase, k=5)), *WORDS]) for _ in range(n)
    )


def tuples(text):
    """The runs of 13 words of a sentence made above."""
    words = [word for word in (WORDS.get(w, w) for w in text.split()) if word]
    return {tuple(words[i : i + 13]) for i in range(len(words) - 12)}


@pytest.fixture
def vocabulary(data):
    return tokenizer.load(Path(data["TOKENIZER"]))


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def compared(v, folder, rows, documents):
    """What documents share with a task of these rows."""
    (task,) = read_tasks(str(write(folder / "task.jsonl", rows)), folder)
    table = RunTable([task])
    is_found = np.zeros(len(table.runs), dtype=bool)
    tokens = [np.array([v.end_of_text, *v.encode(text)]) for text in documents]
    find_runs(v, tokens, table, is_found)
    return table.count_shared(task, is_found)


def test_a_word_is_lower_case_without_punctuation():
    written = "\u00a0 \u3000\t\n".join([*WORDS, "snake_case", "… (c)", "{ } >"])
    assert split_words(written) == [word for word in WORDS.values() if word] + ["snakecase", "c"]


@pytest.mark.parametrize("make", [gemma, mistral])
def test_text_of_a_sentencepiece_tokenizer_is_found(make, tmp_path):
    v = tokenizer.from_tokenizer(make(), 64 * "0", "here")
    words = [
        "two",
        "words,",
        "one",
        "é",
        "日本",
        "and",
        "three",
        "more",
        "of",
        "them",
        "again",
        "and",
        "again",
    ]
    text = " ".join(words)
    found = compared(v, tmp_path, [text], ["before", text + " \0 after"])
    assert found["rows_touched"] == 1
    assert hash_documents(["a\0b"]).tolist() == hash_documents(["ab"]).tolist()


def test_rows_found_are_those_of_plain_sets(vocabulary, tmp_path):
    """Each fourth row leaks a part of one of its strings, under other punctuation."""
    rng = random.Random(5)
    strings = [[sentence(rng, n) for n in (40, 20, 30)] for _ in range(60)]
    rows = [{"q": q, "choices": [a, {"deep": b}]} for q, a, b in strings]
    documents = [sentence(rng, 80) for _ in range(40)]
    read = set().union(*map(tuples, documents))
    for k in range(0, 60, 4):
        leaked = " ".join(strings[k][k % 3].split()[3 : 16 + k % 11])
        read |= tuples(documents[k // 2] + " " + leaked)
        documents[k // 2] += " " + leaked.upper().replace(" ", ",\n") + "!"
    grams = [set().union(*map(tuples, texts)) for texts in strings]
    found = compared(vocabulary, tmp_path, rows, documents)
    touched = [row for row, own in enumerate(grams, 1) if own & read]
    assert (found["rows"], found["rows_touched"]) == (60, len(touched)) and len(touched) >= 10
    assert [example["row"] for example in found["examples"]] == touched[:3]
    for example in found["examples"]:
        assert tuple(example["text"].split()) in grams[example["row"] - 1] & read


W = [f"w{i}" for i in range(60)]


@pytest.mark.parametrize(
    ("row", "documents", "example"),
    [
        ([" ".join(W[:26])], [" ".join(W[:12]), " ".join(W[12:24])], None),  # in no one document
        ([" ".join(W[:13]), " ".join(W[13:26])], [" ".join(W[1:25])], None),  # nor in one string
        ({"q": " ".join(W)}, [" ".join(W[5:18]), " ".join(W[19:36])], W[5:18]),
        ({"q": " ".join(W[:8])}, [" ".join(W)], W[:8]),  # 8 words: as a whole
        ({"q": " ".join(W[:7])}, [" ".join(W)], None),
        ({"q": " ".join(W[:9]), "gold": 3}, [" ".join(W[:8])], None),
        ({"q": " ".join(W[:5]), "a": " ".join(W[5:10])}, [" ".join(W)], W[:10]),  # 5 and 5
        ({"q": " ".join(W[:13]), "a": " ".join(W[20:27])}, [" ".join(W[14:])], None),
        ({"q": " ".join(W[:8]), "a": "yes"}, [" ".join(W)], W[:8]),  # the 8
        (7, [" ".join(W)], None),
    ],
)
def test_a_row_is_compared_by_its_strings_of_13_words_or_of_8_or_as_a_whole(
    vocabulary, tmp_path, row, documents, example
):
    found = compared(vocabulary, tmp_path, [row, None], documents)
    examples = [] if example is None else [{"row": 1, "text": " ".join(example)}]
    assert (found["examples"], found["rows_touched"]) == (examples, len(examples))


# ---- Tasks on disk


def words_of(tasks):
    return [(task.name, [" ".join(text.words) for text in task.texts]) for task in tasks]


def test_tasks_of_a_folder_a_zip_or_a_download_are_named_by_their_stem(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rng = random.Random(1)
    folder = tmp_path / "bundle"
    for name in ("core/qa/boolq.jsonl", "core/qa/piqa.jsonl", "small/qa/boolq.jsonl"):
        write(folder / name, [sentence(rng, 30)])
    (folder / "core" / "notes.txt").write_text("no task")
    tasks = read_tasks(str(folder), tmp_path)
    assert [task.name for task in tasks] == ["core/qa/boolq", "piqa", "small/qa/boolq"]
    alone = read_tasks(str(folder / "core" / "qa" / "piqa.jsonl"), tmp_path)
    assert words_of(alone) == words_of(tasks[1:2])
    address = f"https://example.invalid/a.zip@sha256:{64 * '0'}"
    assert read_tasks(address, tmp_path) == [] == read_tasks("none", tmp_path)
    assert "`make eval` of any run downloads them" in caplog.text
    path = core_bundle_path(address, tmp_path)
    path.parent.mkdir()
    path.write_bytes(pack(folder))
    assert words_of(read_tasks(address, tmp_path)) == words_of(tasks)


def pack(folder):
    return Path(shutil.make_archive(str(folder.parent / "packed"), "zip", folder)).read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.jsonl", b'{"q": "a"}\n<?xml version="1.0"?>\n', "t.jsonl row 2: not JSON"),
        ("t.jsonl", b'"\xff"\n', "t.jsonl row 1: not JSON"),
        ("t.jsonl", b'{"q": "half a', "t.jsonl row 1: not JSON"),
        ("t.jsonl", b"\n", "t.jsonl: holds no row"),
        ("t.zip", b"PK half", "t.zip: cannot be read "),
        ("t.zip", None, "t.zip/a.jsonl: cannot be read "),
    ],
)
def test_a_damaged_task_is_refused_by_file_and_row(tmp_path, name, content, said):
    if content is None:
        write(tmp_path / "tasks" / "a.jsonl", [sentence(random.Random(1), 30)])
        damaged = bytearray(pack(tmp_path / "tasks"))
        damaged[60] ^= 255
        content = bytes(damaged)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_tasks(str(tmp_path / name), tmp_path)
    assert f"{tmp_path}/{said}" in str(raised.value)
    assert str(raised.value).endswith("CORE_BUNDLE=none")


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_path_without_tasks_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=rf"CORE_BUNDLE={tmp_path}/{name}: There is no"):
        read_tasks(f"{tmp_path}/{name}", tmp_path)
