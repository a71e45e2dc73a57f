"""finetune/row_shapes.py: what each shape of row means, by hand, and what is no conversation."""

import json

import pytest

from finetune.row_shapes import NOTES, REASONS, Conversation, conversation_of
from finetune.template import is_scored
from tests.conftest import SHARED
from train.data.sources.formats import Bad

Q, A = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
PAIR = [("user", "2+2?"), ("assistant", "4")]


@pytest.mark.parametrize(
    ("row", "shape", "messages"),
    [
        ({"messages": [Q, A]}, "messages", PAIR),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, Q, A]},
            "messages",
            [("system", "Be brief."), *PAIR],
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}],
                    },
                    A,
                ]
            },
            "messages",
            PAIR,
        ),
        (
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
            "conversations",
            PAIR,
        ),
        ({"conversations": [Q, A]}, "conversations", PAIR),
        (
            {
                "conversations": [
                    {"role": None, "content": None, "from": "human", "value": "2+2?"},
                    A | {"from": None, "value": None},
                ]
            },
            "conversations",
            PAIR,
        ),
        ({"prompt": "2+2?", "completion": "4"}, "prompt/completion", PAIR),
        ({"prompt": [Q], "completion": [A]}, "prompt/completion", PAIR),
        ({"prompt": "2+2?", "response": "4"}, "prompt/response", PAIR),
        ({"question": "2+2?", "answer": "4"}, "question/answer", PAIR),
        ({"instruction": "2+2?", "input": "", "output": "4"}, "instruction/output", PAIR),
        (
            {"instruction": "Add", "input": "2, 2", "output": "4"},
            "instruction/output",
            [("user", "Add\n\n2, 2"), ("assistant", "4")],
        ),
        (
            {"question": "2+2?", "answer": "4", "options": {"A": "3", "B": "4"}, "answer_idx": "B"},
            "question/options/answer",
            [("user", "2+2?\nA. 3\nB. 4"), ("assistant", "B. 4")],
        ),
        (
            {"question": "2+2?", "answer": "4", "options": ["3", "4"], "answer_idx": 1},
            "question/options/answer",
            [("user", "2+2?\nA. 3\nB. 4"), ("assistant", "B. 4")],
        ),
        (
            {"question": "2+2?", "answer": "B", "options": {"A": "3", "B": "4", "E": None}},
            "question/options/answer",
            [("user", "2+2?\nA. 3\nB. 4"), ("assistant", "B. 4")],
        ),
        ({"messages": None, "prompt": "2+2?", "completion": "4"}, "prompt/completion", PAIR),
        ({"messages": [Q, A], "prompt": "other", "completion": "other"}, "messages", PAIR),
        (
            {"system": "Be brief.", "prompt": "2+2?", "completion": "4"},
            "prompt/completion",
            [("system", "Be brief."), *PAIR],
        ),
    ],
)
def test_each_shape_by_hand(row: dict, shape: str, messages: list) -> None:
    made = conversation_of(row)
    assert isinstance(made, Conversation), made
    assert (made.shape, made.messages, made.notes) == (shape, messages, ())


@pytest.mark.parametrize(
    ("reason", "row", "words"),
    [
        (
            "shape",
            {"text": "2+2?", "id": 1},
            "it has text, id; accepted are messages; conversations; prompt + completion",
        ),
        ("shape", {"prompt": "2+2?"}, "it has prompt"),
        ("type", {"messages": "2+2?"}, "column 'messages' is str, not a list of messages: '2+2?'"),
        ("type", {"messages": [Q, "4"]}, "message 2 of column 'messages' is str, not an object"),
        (
            "type",
            {"messages": [Q, {"role": "assistant", "content": 4}]},
            "message 2 of column 'messages' is int, not text",
        ),
        (
            "type",
            {"messages": [{"text": "2+2?"}, A]},
            "message 1 of column 'messages' has no role; it has: text",
        ),
        (
            "type",
            {"prompt": "2+2?", "completion": {"x": 1}},
            "column 'completion' is dict, not text",
        ),
        ("type", {"question": "2+2?", "options": "3, 4", "answer": "4"}, "column 'options' is str"),
        (
            "role",
            {"messages": [Q, A, {"role": "tool", "content": "4"}]},
            "message 3 of column 'messages' has the role",
        ),
        ("order", {"messages": [A, Q]}, "message 1 is of the assistant: assistant, user"),
        ("order", {"messages": [Q, Q, A]}, "message 2 is of the user: user, user, assistant"),
        ("order", {"messages": [Q, A, A]}, "message 3 is of the assistant"),
        (
            "order",
            {"messages": [Q, {"role": "system", "content": "s"}, A]},
            "message 2 is of the system",
        ),
        (
            "order",
            {"messages": [{"role": "system", "content": " "}, Q, Q, A]},
            "message 3 is of the user",
        ),
        (
            "order",
            {"system": "s", "messages": [{"role": "system", "content": "s"}, Q, A]},
            "a system column, and a system",
        ),
        (
            "empty",
            {"messages": [Q, {"role": "assistant", "content": " \n"}]},
            "message 2, of the assistant, has no text",
        ),
        ("empty", {"prompt": "", "completion": "4"}, "message 1, of the user, has no text"),
        ("no assistant", {"messages": [Q]}, "1 messages: user"),
        ("no assistant", {"messages": []}, "0 messages: none"),
        (
            "tools",
            {"messages": [Q, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]},
            "has tool_calls",
        ),
        ("tools", {"messages": [Q, A], "tools": [{"name": "add"}]}, "the row has tools"),
        (
            "thoughts",
            {"messages": [Q, A | {"reasoning_content": "2 and 2"}]},
            "has reasoning_content",
        ),
        ("thoughts", {"messages": [Q, A | {"thinking": "2 and 2"}]}, "has thinking"),
        ("thoughts", {"question": "2+2?", "answer": "4", "thinking": "2"}, "the row has thinking"),
        ("weight", {"messages": [Q, A | {"weight": 0.5}]}, "has weight = 0.5"),
        ("weight", {"messages": [Q, A], "weight": 2}, "the row has weight = 2"),
        ("unlearned", {"messages": [Q, A], "train": False}, "its weight is 0"),
        (
            "options",
            {"question": "q", "options": {"A": "3"}, "answer": "4"},
            "'4' is none of the options",
        ),
        (
            "options",
            {"question": "q", "options": {"A": "4", "B": "4"}, "answer": "4"},
            "'4' is A and B",
        ),
        (
            "options",
            {"question": "q", "options": {"A": "3", "B": "4"}, "answer": "4", "answer_idx": "A"},
            "answer_idx is 'A', but '4' is B",
        ),
        ("nul", {"prompt": "a\0", "completion": "4"}, "column 'prompt': character 1 is NUL"),
        (
            "surrogate",
            {"prompt": "2+2?", "completion": "\ud83d"},
            "column 'completion': character 0 is '\\ud83d'",
        ),
    ],
)
def test_each_reason_is_named_with_what_is_there(reason: str, row: dict, words: str) -> None:
    made = conversation_of(row)
    assert isinstance(made, Bad) and made.reason == reason and words in made.what, made


def test_all_reasons_and_notes_are_explained() -> None:
    """The table above has each of them."""
    mark = next(
        m
        for m in test_each_reason_is_named_with_what_is_there.pytestmark
        if m.name == "parametrize"
    )
    assert {reason for reason, _, _ in mark.args[1]} == set(REASONS)
    assert set(NOTES) == {"empty system", "unanswered"}


def test_what_is_mended_is_noted() -> None:
    made = conversation_of(
        {"messages": [{"role": "system", "content": ""}, Q, A, {"role": "user", "content": ""}]}
    )
    assert isinstance(made, Conversation)
    assert (made.messages, set(made.notes)) == (PAIR, set(NOTES))


@pytest.mark.parametrize(
    ("keys", "is_learned"),
    [
        ({"weight": 0}, False),
        ({"weight": 0.0}, False),
        ({"train": False}, False),
        ({"training": False}, False),
        ({"loss": False}, False),
        ({"weight": 1, "train": True}, True),
        ({"weight": None, "tool_calls": [], "reasoning_content": "", "thinking": None}, True),
    ],
)
def test_messages_of_weight_0_are_read_and_not_learned_from(
    keys: dict[str, object], is_learned: bool
) -> None:
    made = conversation_of({"messages": [Q | {"weight": 0}, A | keys], "tools": "[]", "weight": 1})
    assert isinstance(made, Conversation)
    assert made.messages == PAIR and not made.unread
    assert [is_scored(message) for message in made.messages] == [False, is_learned]


def test_what_is_not_read_is_said() -> None:
    made = conversation_of(
        {"messages": [Q, A | {"name": "bot", "date": None}], "id": 3, "prompt": "x"}
    )
    assert isinstance(made, Conversation)
    assert made.unread == {"id", "prompt", "name of messages"}


def test_medqa() -> None:
    path = SHARED / "medical" / "medqa_4options_test_even.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    for row in map(json.loads, path.read_text().splitlines()):
        made = conversation_of(row)
        assert isinstance(made, Conversation)
        (_, asked), (_, answered) = made.messages
        assert (
            answered == f"{row['answer_idx']}. {row['answer']}" and answered in asked.splitlines()
        )
        assert all(text in asked for text in (row["question"], *row["options"].values()))
