"""Tasks of CORE and their prompts: what is asked, in which words, and what of it is scored."""

import json
import random
from typing import Any

import pytest

from tests.conftest import SHARED
from tests.core_bundle import examples, files
from train.data import tokenizer
from train.evaluate.core import prompts
from train.evaluate.core.prompts import question_of, questions, texts_of
from train.evaluate.core.tasks import (
    CORE_TASKS,
    CoreError,
    Task,
    chosen,
    read_examples,
    read_tasks,
    shots_of,
)

CHOICE = Task("piqa", "multiple_choice", "a.jsonl", 1, "\nAnswer: ", 0.5)
SCHEMA = Task("winograd", "schema", "b.jsonl", 1, " ", 0.5)
LANGUAGE = Task("jeopardy", "language_modeling", "c.jsonl", 1, "\nAnswer: ", 0.0)
GPT2 = SHARED / "tokenizers" / "gpt2" / "tokenizer.json"


def lines(*entries: Any) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


# ---- What a bundle declares


def test_a_bundle_declares_its_tasks_and_what_guessing_scores() -> None:
    content = files()
    tasks = {
        task.label: task
        for task in read_tasks(content["core.yaml"], content["eval_meta_data.csv"], "here")
    }
    assert tasks["piqa"] == Task(
        "piqa", "multiple_choice", "commonsense_reasoning/piqa.jsonl", 2, "\nAnswer: ", 0.5
    )
    assert (tasks["copa"].delimiter, tasks["copa"].shots, tasks["jeopardy"].baseline) == (
        " ",
        0,
        0.0,
    )
    assert (
        tasks["piqa"].centred(0.5) == 0
        and tasks["piqa"].centred(1) == 1
        and tasks["piqa"].centred(0.25) == -0.5
    )


@pytest.mark.skipif(not SHARED.is_dir(), reason="the bundle of ../shared is not here")
def test_the_metric_is_of_the_22_tasks_that_the_real_bundle_names() -> None:
    folder = SHARED / "eval" / "core"
    tasks = read_tasks(
        (folder / "core.yaml").read_bytes(), (folder / "eval_meta_data.csv").read_bytes(), "here"
    )
    assert tuple(task.label for task in tasks) == CORE_TASKS and len(set(CORE_TASKS)) == 22
    assert {task.label: task.baseline for task in tasks}["boolq"] == 0.62


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        (
            "core.yaml",
            b"multiple_choice",
            b"essay",
            "copa: icl_task_type essay is none of multiple_choice, schema",
        ),
        ("core.yaml", b"label: piqa", b"label: copa", "core.yaml has the label copa twice"),
        ("core.yaml", b"icl_tasks:", b"tasks:", "core.yaml is no list icl_tasks of label"),
        ("eval_meta_data.csv", b"copa,50", b"copa,100", "copa: a random baseline of 100 percent"),
        (
            "eval_meta_data.csv",
            b"copa,50\n",
            b"",
            "copa: eval_meta_data.csv has no random baseline of it",
        ),
        (
            "eval_meta_data.csv",
            b"Random baseline",
            b"Chance",
            "needs the columns Eval Task and Random baseline",
        ),
    ],
)
def test_a_bundle_that_declares_nonsense_is_refused(
    name: str, old: bytes, new: bytes, said: str
) -> None:
    content = files()
    content[name] = content[name].replace(old, new, 1)
    with pytest.raises(CoreError, match="here: ") as raised:
        read_tasks(content["core.yaml"], content["eval_meta_data.csv"], "here")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("task", "entry", "said"),
    [
        (CHOICE, {"query": "q", "choices": ["a", "b"], "gold": 2}, "gold 2 of 2 options"),
        (CHOICE, {"query": "q", "choices": ["a"], "gold": 0}, "gold 0 of 1 options"),
        (CHOICE, {"query": 5, "choices": ["a", "b"], "gold": 0}, "a text is no string"),
        (SCHEMA, {"context_options": ["a", "b"], "gold": 0}, "KeyError: 'continuation'"),
        (LANGUAGE, {"context": "a", "continuation": " "}, "nothing to continue with"),
    ],
)
def test_a_line_that_is_no_example_is_refused_by_its_number(
    task: Task, entry: dict, said: str
) -> None:
    good = {
        "query": "q",
        "choices": ["a", "b"],
        "gold": 0,
        "context_options": ["a", "b"],
        "context": "a",
        "continuation": "b",
    }
    with pytest.raises(CoreError, match=r"jsonl \(\d+ bytes\) line 3 is no example of") as raised:
        read_examples(task, lines(good, good, entry))
    assert said in str(raised.value)
    with pytest.raises(CoreError, match=r"has 1 examples; \w+ needs 1 beside each"):
        read_examples(task, lines(good))


# ---- Which examples, and which shots


def test_examples_and_shots_are_those_that_nanochat_draws() -> None:
    """By its rule: shuffled by Random(1337), and the shots of the i-th drawn by Random(1234 + i) among the others."""
    entries = examples("piqa", 30)
    found, expected = read_examples(CHOICE, lines(*entries)), list(entries)
    random.Random(1337).shuffle(expected)
    assert found == expected and found != entries
    for number in range(30):
        rng = random.Random(1234 + number)
        drawn = rng.sample([i for i in range(30) if i != number], 1)
        assert shots_of(CHOICE, found, number) == [expected[i] for i in drawn]


def test_a_part_of_a_task_is_always_the_same_and_grows_by_more() -> None:
    some, more = chosen(CHOICE, 1000, 100), chosen(CHOICE, 1000, 200)
    assert (
        len(some) == 100
        and set(some) < set(more)
        and some == sorted(some) == chosen(CHOICE, 1000, 100)
    )
    assert max(some) > 900 and some != list(range(100))
    assert chosen(CHOICE, 50, 0) == chosen(CHOICE, 50, 50) == list(range(50))


# ---- In which words


def test_the_texts_of_each_kind() -> None:
    choice = {"query": "Q1 ", "choices": ["yes", "no"], "gold": 1}
    assert texts_of(CHOICE, choice, [{"query": "Q0", "choices": ["x", "y"], "gold": 0}]) == [
        "Q0\nAnswer: x\n\nQ1 \nAnswer: yes",
        "Q0\nAnswer: x\n\nQ1 \nAnswer: no",
    ]
    schema = {"context_options": ["A", "B"], "continuation": "c.", "gold": 1}
    assert texts_of(SCHEMA, schema, [schema]) == ["B c.\n\nA c.", "B c.\n\nB c."]
    language = {"context": " ask\n", "continuation": "Tell"}
    assert texts_of(LANGUAGE, language, [language]) == [
        "ask\nAnswer: Tell\n\nask\nAnswer:",
        "ask\nAnswer: Tell\n\nask\nAnswer: Tell",
    ]


# ---- What is scored


def test_scored_is_what_lies_behind_the_common_beginning_or_is_the_common_end() -> None:
    found = question_of(CHOICE, {"gold": 1}, 5, [[0, 1, 2, 3], [0, 1, 4, 5, 6]], 10)
    assert [(choice.tokens.tolist(), choice.start) for choice in found.choices] == [
        ([0, 1, 2, 3], 2),
        ([0, 1, 4, 5, 6], 2),
    ]
    assert (found.number, found.gold, found.cropped) == (5, 1, False)
    found = question_of(SCHEMA, {"gold": 0}, 5, [[0, 1, 7, 8], [0, 2, 3, 7, 8]], 10)
    assert [choice.start for choice in found.choices] == [2, 3]
    found = question_of(LANGUAGE, {}, 5, [[0, 1, 2], [0, 1, 2, 3, 4]], 10)
    assert [(choice.tokens.tolist(), choice.start) for choice in found.choices] == [
        ([0, 1, 2, 3, 4], 3)
    ]
    assert not found.merged


def test_where_a_token_holds_the_end_of_the_question_it_is_scored_and_counted() -> None:
    found = question_of(LANGUAGE, {}, 0, [[0, 1, 2], [0, 1, 9, 4]], 10)
    assert found.choices[0].start == 2 and found.merged


@pytest.mark.parametrize("ids", [[[0, 1, 2], [0, 1, 2, 3]], [[0, 1, 2], [0, 1, 2]]])
def test_of_a_choice_that_another_begins_with_the_last_token_is_scored(
    ids: list[list[int]],
) -> None:
    assert [choice.start for choice in question_of(CHOICE, {"gold": 0}, 0, ids, 10).choices] == [
        2,
        2,
    ]


def test_a_long_text_loses_its_beginning_and_never_its_answer() -> None:
    found = question_of(CHOICE, {"gold": 0}, 0, [[0, 1, 2, 3, 4, 8], [0, 1, 2, 3, 4, 9, 9]], 4)
    assert [(choice.tokens.tolist(), choice.start, choice.cut) for choice in found.choices] == [
        ([2, 3, 4, 8], 3, 2),
        ([3, 4, 9, 9], 2, 3),
    ]
    assert found.cropped and not found.too_long
    assert question_of(
        CHOICE, {"gold": 0}, 0, [[0, 1, 8], [0, 1, 9, 9, 9, 9]], 4
    ).too_long  # nothing predicts it


@pytest.mark.skipif(not GPT2.is_file(), reason="the tokenizer of ../shared is not here")
@pytest.mark.parametrize(
    ("task", "label"), [(CHOICE, "piqa"), (SCHEMA, "winograd"), (LANGUAGE, "jeopardy")]
)
def test_a_text_is_tokenized_whole(task: Task, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "EXAMPLES_AT_ONCE", 2)
    v = tokenizer.load(GPT2)
    entries = examples(label)
    for found in questions(task, entries, [7, 2, 3], v, 10_000):
        texts = texts_of(task, entries[found.number], shots_of(task, entries, found.number))
        whole = texts[1:] if task is LANGUAGE else texts
        assert [v.decode(choice.tokens[1:]) for choice in found.choices] == whole
        assert all(choice.tokens[0] == v.end_of_text for choice in found.choices)
        assert [choice.tokens[1:].tolist() for choice in found.choices] == [
            v.encode(text) for text in whole
        ]
