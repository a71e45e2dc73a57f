"""finetune/row_shapes.py: what each shape of row means, by hand, and what is no conversation."""

import json
from typing import Any

import pytest

from finetune.row_shapes import NOTES, REASONS, Conversation, conversation_of
from tests.conftest import SHARED
from tests.finetune.making import row, talk
from train.data.sources.formats import Bad

PAIR = talk("2+2?", "4")
Q, A = PAIR
S = {"role": "system", "content": "Be brief."}
CHOICE = talk("2+2?\nA. 3\nB. 4", "B. 4")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "name": "add"}
ADD = {"name": "add", "parameters": {}}


def read(value: dict[str, Any]) -> Conversation:
    made = conversation_of(value)
    assert isinstance(made, Conversation), made
    return made


def pair(asked: str, answered: str) -> dict[str, str]:
    return {asked: "2+2?", answered: "4"}


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ({"messages": PAIR}, "messages"),
        ({"messages": json.dumps(PAIR)}, "messages"),
        ({"conversation": PAIR}, "conversation"),
        (
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
            "conversations",
        ),
        (
            {"messages": [{"role": "User", "value": "2+2?"}, {"role": "ASSISTANT", "text": "4"}]},
            "messages",
        ),
        ({"messages": [{"from": "human", "value": "2+2?", "role": None}, A]}, "messages"),
        (
            {"messages": [Q | {"content": [{"type": "text", "text": t} for t in ("2+", "2?")]}, A]},
            "messages",
        ),
        ({"prompt": [Q], "completion": [A]}, "prompt/completion"),
        (pair("prompt", "response") | {"messages": None}, "prompt/response"),
        (pair("question", "answer"), "question/answer"),
        (pair("instruction", "output") | {"input": "", "history": []}, "instruction/output"),
        (pair("instruction", "response") | {"context": ""}, "instruction/response"),
        (pair("query", "response"), "query/response"),
        (pair("input", "output"), "input/output"),
        (pair("Question", "Response") | {"id": None}, "question/response"),
        ({"prompt": [Q], "response": "4"}, "prompt/response"),
        ({"messages": PAIR} | pair("prompt", "response"), "messages"),
    ],
)
def test_shapes_of_one_question_and_its_answer(value: dict, shape: str) -> None:
    made = read(value)
    assert (made.messages, made.shape, made.notes, made.tools) == (PAIR, shape, (), None)


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ({"messages": [S, Q, A]}, [S, Q, A]),
        ({"messages": [S | {"role": "developer"}, Q, A]}, [S, Q, A]),
        ({"system": "Be brief.", **pair("prompt", "completion")}, [S, Q, A]),
        ({"system_prompt": "Be brief.", **pair("question", "response")}, [S, Q, A]),
        ({"system": "", "messages": [S, Q, A]}, [S, Q, A]),
        (
            {"instruction": "Add", "input": "2, 2", "output": "4"},
            talk("Add\n\n2, 2", "4"),
        ),
        (
            {"instruction": "Who?", "context": "It is I.", "response": "I", "category": "qa"},
            talk("Who?\n\nIt is I.", "I"),
        ),
        (pair("instruction", "output") | {"history": [["a", "b"]]}, talk("a", "b", "2+2?", "4")),
        ({"question": "2+2?", "choices": ["3", "4"], "answer": 1, "subject": "sums"}, CHOICE),
        ({"question": "2+2?", "options": ["3", "4"], "answer": "4", "answer_idx": 1}, CHOICE),
        (
            {"question": "2+2?", "options": {"A": "3", "B": "4", "E": None}, "answer": "B"},
            CHOICE,
        ),
        (
            {
                "question": "2+2?",
                "choices": {"text": ["3", "4"], "label": ["1", "2"]},
                "answerKey": "2",
            },
            talk("2+2?\n1. 3\n2. 4", "2. 4"),
        ),
        (pair("question", "answer") | {"thinking": "2"}, [Q, A | {"reasoning_content": "2"}]),
        ({"messages": [Q, A | {"reasoning": "2"}]}, [Q, A | {"reasoning_content": "2"}]),
        (
            {"Question": "2+2?", "Complex_CoT": "2", "Response": "4"},
            [Q, A | {"reasoning_content": "2"}],
        ),
        (
            {
                "messages": [
                    Q,
                    A
                    | {
                        "content": [
                            {"type": "thinking", "thinking": "2"},
                            {"type": "text", "text": "4"},
                        ]
                    },
                ]
            },
            [Q, A | {"reasoning_content": "2"}],
        ),
    ],
)
def test_what_else_a_row_says(value: dict, messages: list) -> None:
    assert read(value).messages == messages


@pytest.mark.parametrize(
    "calls",
    [
        {"content": None, "tool_calls": [CALL]},
        {"content": "", "tool_calls": json.dumps([CALL])},
        {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]},
        {"function_call": {"name": "add", "arguments": '{"a": 2}'}},
        {"role": "function_call", "content": '{"name": "add", "arguments": {"a": 2}}'},
    ],
)
def test_tools_and_calls_reach_the_chat_template(calls: dict) -> None:
    messages = [Q, {"role": "assistant"} | calls, RESULT | {"role": "function"}, A]
    for tools in ({"tools": [ADD]}, {"functions": json.dumps([{"function": ADD}])}):
        made = read({"messages": messages} | tools)
        assert made.messages == [Q, CALLS, RESULT, A] and not made.unread
        assert made.tools and made.tools[0]["function"] == ADD


@pytest.mark.parametrize(
    ("messages", "kept", "notes"),
    [
        ([S | {"content": " "}, Q, A], PAIR, ("empty system",)),
        ([Q, A, Q | {"content": ""}], PAIR, ("unanswered",)),
        ([Q, CALLS, RESULT], [Q, CALLS], ("unanswered",)),
        ([S, A, Q, A], [S, Q, A], ("leading",)),
        ([A, A, Q, A], PAIR, ("leading", "leading")),
        ([Q, Q, A], talk("2+2?\n\n2+2?", "4"), ("joined",)),
        ([Q, A, A], talk("2+2?", "4\n\n4"), ("joined",)),
    ],
)
def test_what_is_repaired_is_noted(messages: list, kept: list, notes: tuple) -> None:
    made = read({"messages": messages})
    assert (made.messages, made.notes) == (kept, notes) and set(notes) <= set(NOTES)


@pytest.mark.parametrize(
    ("reason", "value", "words"),
    [
        ("shape", {"text": "2+2?", "id": 1}, "it has text, id"),
        ("shape", {"prompt": "2+2?", "response": None}, "it has prompt, response (null)"),
        (
            "shape",
            {"prompt": "2+2?", "Answer": "4", "answer": "5"},
            "differ in case alone: prompt, Answer",
        ),
        ("type", {"messages": "2+2?"}, "column 'messages' is '2+2?', not a list of messages"),
        ("type", {"messages": [Q, "4"]}, "message 2 of column 'messages' is '4', not an object"),
        ("type", row("2+2?", 4), "message 2 of column 'messages' is int, not text"),  # type: ignore[arg-type]
        ("type", {"messages": [{"text": "2+2?"}, A]}, "has no role; it has text"),
        ("type", pair("prompt", "completion") | {"completion": {"x": 1}}, "is dict, not text"),
        ("type", {"question": "q", "options": "3, 4", "answer": "4"}, "'options' is '3, 4', not"),
        ("type", pair("instruction", "output") | {"history": ["a"]}, "not a list of pairs"),
        ("role", {"messages": [Q, A | {"role": "robot"}]}, "has the role 'robot'"),
        (
            "order",
            {"messages": [Q, S, A]},
            "message 2 has the role system, in user, system, assistant",
        ),
        ("order", {"messages": [RESULT, Q, A]}, "message 1 has the role tool, in tool, user"),
        (
            "order",
            {"messages": [Q, CALLS, A]},
            "message 3 follows another one of the role assistant",
        ),
        ("order", {"system": "s", "messages": [S, Q, A]}, "a system column, and a system message"),
        ("empty", {"messages": [Q, A | {"content": " \n"}]}, "message 2 (assistant) has no"),
        ("empty", {"messages": [Q, A | {"content": None}]}, "message 2 (assistant) has no"),
        ("no assistant", {"messages": [Q]}, "1 messages: user"),
        ("no assistant", {"messages": [A, Q]}, "2 messages: assistant, user"),
        ("no assistant", {"messages": []}, "0 messages: none"),
        ("tools", {"messages": [Q, A | {"tool_calls": [{"id": 1}]}]}, "which has no name"),
        ("tools", {"messages": PAIR, "tools": "add(a, b)"}, "column 'tools' is 'add(a, b)'"),
        ("thoughts", row("a", "b", "c", "d", thinking="2"), "it has thinking and 2 replies"),
        ("weight", {"messages": [Q, A | {"weight": 0.5}]}, "has weight = '0.5'"),
        ("weight", {"messages": PAIR, "weight": 2}, "the row has weight = '2'"),
        ("weight", {"messages": [Q, A | {"mask": 0}]}, "message 2 of column 'messages' has mask"),
        (
            "rendering",
            {"messages": PAIR, "chat_template_kwargs": {"enable_thinking": False}},
            "it has chat_template_kwargs = ",
        ),
        ("unlearned", {"messages": PAIR, "train": False}, "its weight is 0"),
        ("unlearned", {"messages": [Q, A | {"loss": False}]}, "the weight of its 1 replies is 0"),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}, "it has chosen and rej"),
        ("preference", pair("prompt", "response") | {"rejected": "b"}, "it has rejected"),
        ("preference", {"messages": PAIR, "chosen": [Q], "rejected": [A]}, "it has rejected"),
        ("preference", pair("prompt", "completion") | {"label": False}, "it has label = False"),
        ("media", {"messages": [Q | {"content": [{"type": "image_url"}]}, A]}, "type image_url"),
        ("media", {"messages": PAIR, "images": ["x.png"]}, "it has images"),
        ("options", {"question": "q", "options": {"A": "3"}, "answer": "4"}, "is none of the opt"),
        (
            "options",
            {"question": "q", "choices": ["3", "4"], "answer": 2},
            "is none of the options",
        ),
        ("options", {"question": "q", "options": ["4", "4"], "answer": "4"}, "'4' is A and B"),
        (
            "options",
            {"question": "q", "options": ["3", "4"], "answer": "4", "answer_idx": "A"},
            "answer is B, but answer_idx is A",
        ),
        ("nul", {"prompt": "a\0", "completion": "4"}, "column 'prompt': character 1 is NUL"),
        ("surrogate", pair("prompt", "response") | {"response": "\ud83d"}, "character 0 is '\\ud"),
    ],
)
def test_each_reason_is_named_with_what_is_there(reason: str, value: dict, words: str) -> None:
    made = conversation_of(value)
    assert isinstance(made, Bad) and (made.reason, words in made.what) == (reason, True), made


def test_all_reasons_are_in_the_table_and_say_what_works() -> None:
    (mark,) = test_each_reason_is_named_with_what_is_there.pytestmark
    assert {reason for reason, _, _ in mark.args[1]} == set(REASONS)
    assert all(". " in sentence for sentence in REASONS.values())


@pytest.mark.parametrize("zero", [{"weight": 0}, {"train": False}, {"loss": 0.0}])
def test_replies_of_weight_0_are_read_and_not_scored(zero: dict) -> None:
    made = read({"messages": [Q, A | zero, Q | zero, A | {"weight": 1, "thinking": None}]})
    assert made.messages == [*PAIR, *PAIR] and made.unlearned == {1} and not made.unread


def test_columns_that_are_only_information_are_named() -> None:
    made = read(
        {"messages": [Q | {"date": 7, "weight": 1}, A | {"name": ""}], "id": 3, "prompt": "x"}
    )
    assert made.unread == {"id", "prompt", "date of user messages", "weight of user messages"}


def test_preferences_whose_good_reply_is_the_conversation_are_read() -> None:
    assert read({"messages": PAIR, "chosen": PAIR, "rejected": [Q]}).messages == PAIR


def test_medqa() -> None:
    path = SHARED / "medical" / "medqa_4options_test_even.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    for value in map(json.loads, path.read_text().splitlines()):
        question, answer = (message["content"] for message in read(value).messages)
        assert answer == f"{value['answer_idx']}. {value['answer']}"
        assert answer in question.splitlines() and value["question"] in question


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "Which two?", "choices": ["a", "b"], "answer": ["a", "b"]}, "options"),
        ({"question": "q", "choices": ["a", "b"], "answer": {"a": 1}}, "options"),
        ({"question": "q", "choices": {"text": None, "label": None}, "answerKey": "A"}, "type"),
        ({"question": "q", "choices": {"text": ["a"], "label": 5}, "answerKey": "A"}, "type"),
        (
            {"question": "q", "choices": {"text": ["a"], "label": [["A"]]}, "answerKey": "A"},
            "options",
        ),
        ({"prompt": [], "completion": "x", "context": "more"}, "type"),
        ({"messages": ["[" * 3000]}, "type"),
    ],
)
def test_a_malformed_row_is_dropped_and_ends_nothing(row: dict, reason: str) -> None:
    assert conversation_of(row).reason == reason
