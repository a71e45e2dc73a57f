"""Tasks of CORE and their prompts: what is asked, in which words, and what of it is scored."""

import random
from pathlib import Path

import pytest

from tests.conftest import SHARED
from tests.core_bundle import example, files, lines
from train.data import tokenizer
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
KINDS = [CHOICE, SCHEMA, LANGUAGE]


# ---- What a bundle declares


def test_a_bundle_declares_its_tasks_and_what_guessing_scores():
    content = files()
    tasks = read_tasks(content["core.yaml"], content["eval_meta_data.csv"], "here")
    copa, piqa, _, jeopardy = tasks
    file = "commonsense_reasoning/piqa.jsonl"
    assert piqa == Task("piqa", "multiple_choice", file, 2, "\nAnswer: ", 0.5)
    assert (copa.delimiter, copa.shots, jeopardy.baseline) == (" ", 0, 0.0)
    assert [piqa.centred(share) for share in (0.5, 1, 0.25)] == [0, 1, -0.5]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the bundle of ../shared is not here")
def test_the_metric_is_of_the_22_tasks_that_the_real_bundle_names():
    folder = SHARED / "eval" / "core"
    tasks = read_tasks(
        (folder / "core.yaml").read_bytes(), (folder / "eval_meta_data.csv").read_bytes(), "here"
    )
    assert tuple(task.label for task in tasks) == CORE_TASKS
    assert len(set(CORE_TASKS)) == 22
    assert {task.label: task.baseline for task in tasks}["boolq"] == 0.62


META = "eval_meta_data.csv"


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("core.yaml", "multiple_choice", "essay", "copa: icl_task_type essay is none of multi"),
        ("core.yaml", "label: piqa", "label: copa", "core.yaml has the label copa twice"),
        ("core.yaml", "icl_tasks:", "tasks:", "core.yaml is no list icl_tasks of label"),
        ("core.yaml", "  - 0", "  - .inf", "copa: num_fewshot inf"),
        ("core.yaml", "  - 0", "  - -3", "copa: num_fewshot -3"),
        ("core.yaml", "icl_tasks:", "icl_tasks: " + "[" * 5000, "core.yaml is no list icl_tasks"),
        (META, "copa,50", "copa,100", "copa: a random baseline of 100 percent"),
        (META, "copa,50\n", "", "copa: eval_meta_data.csv has no random baseline of it"),
        (META, "Random baseline", "Chance", "needs the columns Eval Task and Random baseline"),
    ],
)
def test_a_bundle_that_declares_nonsense_is_refused(name, old, new, words):
    content = files()
    content[name] = content[name].replace(old.encode(), new.encode(), 1)
    with pytest.raises(CoreError, match=f"here: .*{words}"):
        read_tasks(content["core.yaml"], content[META], "here")


@pytest.mark.parametrize(
    ("task", "change", "words"),
    [
        (CHOICE, {"gold": 3}, "gold 3 of 3 options"),
        (CHOICE, {"choices": ["a"]}, "gold 0 of 1 options"),
        (CHOICE, {"query": 5}, "a text is no string"),
        (SCHEMA, {"continuation": None}, "a text is no string"),
        (LANGUAGE, {"continuation": " "}, "nothing to continue with"),
        (SCHEMA, {"gold": "x"}, "gold 'x' of 2 options"),
        (CHOICE, {"gold": 0.9}, "gold 0.9 of 3 options"),
        (CHOICE, {"gold": float("inf")}, "gold inf of 3 options"),
    ],
)
def test_a_line_that_is_no_example_is_refused_by_its_number(task, change, words):
    good = example(task.kind, 0)
    place = r"\.jsonl \(\d+ bytes\) line 3 is no example of"
    with pytest.raises(CoreError, match=f"{place} {task.kind} .*{words}"):
        read_examples(task, lines(good, good, good | change))
    with pytest.raises(CoreError, match=r"has 1 examples. \w+ needs more than 1"):
        read_examples(task, lines(good))


# ---- Which examples, and which shots


def test_examples_and_shots_are_those_that_nanochat_draws():
    """By its rule: shuffled by Random(1337), and the shots of the i-th drawn by Random(1234 + i) among the others."""
    entries = [example(CHOICE.kind, i) for i in range(30)]
    found = read_examples(CHOICE, lines(*entries))
    expected = list(entries)
    random.Random(1337).shuffle(expected)
    assert found == expected != entries
    for number in range(30):
        rng = random.Random(1234 + number)
        drawn = rng.sample([i for i in range(30) if i != number], 1)
        assert shots_of(CHOICE, found, number) == [expected[i] for i in drawn]


def test_a_part_of_a_task_is_always_the_same_and_grows_by_more():
    some = chosen(CHOICE, 1000, 100)
    assert some == sorted(some) == chosen(CHOICE, 1000, 100)
    assert len(some) == 100
    assert max(some) > 900
    assert set(some) < set(chosen(CHOICE, 1000, 200))
    assert chosen(CHOICE, 50, 0) == chosen(CHOICE, 50, 50) == list(range(50))


# ---- In which words


def test_the_texts_of_each_kind():
    choice = {"query": "Q1 ", "choices": ["yes", "no"], "gold": 1}
    assert texts_of(CHOICE, choice, [{"query": "Q0", "choices": ["x", "y"], "gold": 0}]) == [
        "Q0\nAnswer: x\n\nQ1 \nAnswer: yes",
        "Q0\nAnswer: x\n\nQ1 \nAnswer: no",
    ]
    schema = {"context_options": ["A", "B"], "continuation": "c.", "gold": 1}
    assert texts_of(SCHEMA, schema, [schema]) == ["B c.\n\nA c.", "B c.\n\nB c."]
    language = {"context": " ask\n", "continuation": "Tell"}
    question = "ask\nAnswer: Tell\n\nask\nAnswer:"
    assert texts_of(LANGUAGE, language, [language]) == [question, f"{question} Tell"]


# ---- What is scored


@pytest.mark.parametrize(
    ("task", "texts", "starts", "flags"),
    [
        (CHOICE, [[0, 1, 2, 3], [0, 1, 4, 5, 6]], [2, 2], ""),
        (SCHEMA, [[0, 1, 7, 8], [0, 2, 3, 7, 8]], [2, 3], ""),
        (LANGUAGE, [[0, 1, 2], [0, 1, 2, 3, 4]], [3], ""),
        # a token holds the end of the question and the beginning of the answer
        (LANGUAGE, [[0, 1, 2], [0, 1, 9, 4]], [2], "merged"),
        # a choice that another one begins with
        (CHOICE, [[0, 1, 2], [0, 1, 2, 3]], [2, 2], ""),
        (CHOICE, [[0, 1, 2], [0, 1, 2]], [2, 2], ""),
        # a context of 5 tokens: the first ones are cut
        (CHOICE, [[0, 1, 2, 3, 4, 8], [0, 1, 2, 3, 4, 9, 9]], [4, 3], "cropped"),
        (CHOICE, [[0, 1, 8], [0, 1, 9, 9, 9, 9, 9]], [2, 0], "cropped too_long"),
    ],
)
def test_scored_is_what_follows_the_common_beginning_or_is_the_common_end(
    task, texts, starts, flags
):
    found = question_of(task, {"gold": 1}, 7, texts, 5)
    assert [choice.start for choice in found.choices] == starts
    whole = texts[-len(starts) :]
    assert [choice.tokens.tolist() for choice in found.choices] == [text[-5:] for text in whole]
    assert [choice.cut for choice in found.choices] == [max(0, len(text) - 5) for text in whole]
    assert (found.number, found.gold) == (7, 1)
    names = ("merged", "cropped", "too_long")
    assert [name for name in names if getattr(found, name)] == flags.split()


@pytest.mark.parametrize("task", KINDS, ids=lambda task: task.kind)
def test_a_text_is_tokenized_whole(task, data):
    vocabulary = tokenizer.load(Path(data["TOKENIZER"]))
    entries = [example(task.kind, i) for i in range(12)]
    several = list(questions(task, entries, [7, 2, 3], vocabulary, 10_000))
    assert [found.number for found in several] == [7, 2, 3]
    for found in several:
        shots = shots_of(task, entries, found.number)
        texts = texts_of(task, entries[found.number], shots)
        expected = [[vocabulary.end_of_text, *vocabulary.encode(text)] for text in texts]
        whole = expected[-len(found.choices) :]
        assert [choice.tokens.tolist() for choice in found.choices] == whole
