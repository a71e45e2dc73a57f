"""A row to a conversation: the shapes that data sets come in, and what is no conversation.

    messages                    [{"role": "user", "content": "Hi"}, ...]; role and content may be called from and value
    conversations               the same, as ShareGPT has it: [{"from": "human", "value": "Hi"}, ...]
    prompt, completion          two texts, or two lists of messages of which the first comes first
    prompt, response            two texts
    question, options, answer   multiple choice: the options go behind the question, by letter; the letter is answered
    question, answer            two texts
    instruction, output         two texts; an `input` that is there goes behind the instruction, a blank line between

The first that a row has all columns of is taken. A `system` column that holds text becomes the system message.

A conversation is an optional system message, then user and assistant in turn, beginning with the user. What else is in
a row is dropped for one of REASONS; what is mended, because nothing scored is lost by it, is noted for one of NOTES.
Keys that say what is learned from a message or row (LEARNED) are followed, and those that say what else belongs to an
answer (TOOLS, THOUGHTS) are reasons to drop it: without them another answer would be learned.
"""

import dataclasses
import string
from typing import Any

from train.data.sources.formats import Bad
from train.data.sources.rows import half_pair
from train.generate.chat_format import ROLES, Message

SHAPES = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "prompt/response": ("prompt", "response"),
    "question/options/answer": ("question", "options", "answer"),
    "question/answer": ("question", "answer"),
    "instruction/output": ("instruction", "output"),
}
BESIDE = {
    "question/options/answer": ("answer_idx",),
    "instruction/output": ("input",),
}  # read where they are there
SYSTEM = "system"
LEARNED = ("weight", "train", "training", "trainable", "loss")  # 0 or false: not learned from
TOOLS = ("tool_calls", "function_call", "tools", "functions")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
OF_MESSAGES = (*LEARNED, *TOOLS, *THOUGHTS)
OF_ROWS = ("weight", "train", "tools", "functions", "reasoning_content", "thinking")
COLUMNS = tuple(
    dict.fromkeys(
        [column for columns in (*SHAPES.values(), *BESIDE.values()) for column in columns]
        + [SYSTEM, *OF_ROWS]
    )
)
THEIR_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
LETTERS = string.ascii_uppercase

REASONS = {
    "shape": "the row has none of the accepted shapes",
    "type": "a column or a message holds something else than it should",
    "role": f"a message has another role than {', '.join(ROLES)}",
    "order": "roles out of order: a system message that is not the first, or user and assistant not in turn",
    "empty": "a message without text",
    "no assistant": "no message of the assistant",
    "tools": "tools are called or described, which are not learned",
    "thoughts": "thoughts beside an answer, which are not learned: write them into the answer's text, or remove them",
    "weight": "a weight other than 0 and 1",
    "unlearned": "the row is not to be learned from",
    "options": "the answer is none of the options, or several",
    "nul": "NUL characters in a text",
    "surrogate": "half a surrogate pair in a text",
}
NOTES = {
    "empty system": "empty system messages left out",
    "unanswered": "last questions without an answer cut off",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that keep the rules above. notes: keys of NOTES; unread: columns and keys of messages that were not
    looked at; options: the answers that a multiple choice is among, as the assistant would write them."""

    messages: list[Message]
    shape: str
    notes: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()


class Unlearned(Message):
    """A message of the assistant that is not learned from: it is read, and not scored."""


class Unfit(Exception):
    """Why a row is no conversation, as a Bad."""

    def __init__(self, reason: str, what: str):
        super().__init__(what)
        self.bad = Bad(reason, what)


def conversation_of(row: dict[str, Any]) -> Conversation | Bad:
    """The conversation in a row, or what is wrong with it."""
    shape = shape_of(row)
    if not shape:
        has = ", ".join(map(str, list(row)[:10])) or "no column"
        return Bad(
            "shape",
            f"it has {has}; accepted are " + "; ".join(" + ".join(s) for s in SHAPES.values()),
        )
    unread = {str(name) for name in row} - {
        *SHAPES[shape],
        *BESIDE.get(shape, ()),
        SYSTEM,
        *OF_ROWS,
    }
    try:
        if not is_learned(row, "the row", OF_ROWS):
            raise Unfit("unlearned", "its weight is 0")
        messages = MAKERS.get(shape, pair)(row, shape, unread)
        if (system := row.get(SYSTEM)) is not None:
            if messages[:1] and messages[0].role == "system":
                raise Unfit("order", "a system column, and a system message as well")
            messages.insert(0, Message("system", text_of(system, "column 'system'")))
        messages, notes = checked(messages)
    except Unfit as unfit:
        return unfit.bad
    options = tuple(lines_of(lettered(row["options"]))) if MAKERS.get(shape) is choice else ()
    return Conversation(messages, shape, notes, frozenset(unread), options)


def shape_of(row: dict[str, Any]) -> str:
    """The first shape of which the row has all columns, none of them null; "" where there is none."""
    return next(
        (
            shape
            for shape, columns in SHAPES.items()
            if all(row.get(name) is not None for name in columns)
        ),
        "",
    )


# ---- One function for each shape: the messages as they stand in the row. Each raises Unfit.


def listed(row: dict[str, Any], shape: str, unread: set[str]) -> list[Message]:
    return messages_of(row[shape], f"column {shape!r}", unread)


def pair(row: dict[str, Any], shape: str, unread: set[str]) -> list[Message]:
    asked, answered = SHAPES[shape]
    if isinstance(row[asked], list) or isinstance(row[answered], list):
        return [
            message
            for name in (asked, answered)
            for message in messages_of(row[name], f"column {name!r}", unread)
        ]
    return [
        Message(role, text_of(row[name], f"column {name!r}"))
        for role, name in (("user", asked), ("assistant", answered))
    ]


def instructed(row: dict[str, Any], shape: str, unread: set[str]) -> list[Message]:
    question, answer = pair(row, shape, unread)
    if (more := row.get("input")) is None or not (more := text_of(more, "column 'input'")).strip():
        return [question, answer]
    return [Message("user", f"{question.text}\n\n{more}"), answer]


def choice(row: dict[str, Any], shape: str, unread: set[str]) -> list[Message]:
    """The options as lines "A. text" behind the question; answered is such a line."""
    options = lettered(row["options"])
    answer = text_of(row["answer"], "column 'answer'")
    letters = [letter for letter, text in options.items() if text == answer]
    if not letters and answer in options:
        letters = [answer]
    if (index := row.get("answer_idx")) is not None:
        letter = LETTERS[index] if type(index) is int and 0 <= index < len(LETTERS) else index
        if letter not in letters:
            raise Unfit(
                "options",
                f"answer_idx is {index!r}, but {answer[:40]!r} is "
                f"{' and '.join(letters) or 'none of the options'}",
            )
        letters = [letter]
    if len(letters) != 1:
        raise Unfit(
            "options", f"{answer[:40]!r} is {' and '.join(letters) or 'none of the options'}"
        )
    question = text_of(row["question"], "column 'question'")
    right = letters[0]
    return [
        Message("user", "\n".join([question, *lines_of(options)])),
        Message("assistant", f"{right}. {options[right]}"),
    ]


def lines_of(options: dict[str, str]) -> list[str]:
    return [f"{letter}. {text}" for letter, text in options.items()]


def lettered(options: Any) -> dict[str, str]:
    """Letter -> text of the options; a null is none (parquet has all letters in every row)."""
    if isinstance(options, list) and len(options) <= len(LETTERS):
        options = dict(zip(LETTERS, options, strict=False))
    if not isinstance(options, dict) or not options:
        raise Unfit(
            "type",
            f"column 'options' is {type(options).__name__}, not letters with texts or a list of texts",
        )
    return {
        str(letter): text_of(text, f"option {letter}")
        for letter, text in options.items()
        if text is not None
    }


MAKERS = {
    "messages": listed,
    "conversations": listed,
    "instruction/output": instructed,
    "question/options/answer": choice,
}


# ---- Messages


def messages_of(value: Any, where: str, unread: set[str]) -> list[Message]:
    if not isinstance(value, list):
        raise Unfit(
            "type",
            f"{where} is {type(value).__name__}, not a list of messages: {str(value)[:40]!r}",
        )
    return [
        message_of(message, f"message {i + 1} of {where}", unread)
        for i, message in enumerate(value)
    ]


def message_of(value: Any, where: str, unread: set[str]) -> Message:
    if not isinstance(value, dict):
        raise Unfit(
            "type", f"{where} is {type(value).__name__}, not an object: {str(value)[:40]!r}"
        )
    keys = (
        ("role", "content") if value.get("role") is not None else ("from", "value")
    )  # parquet may have both
    for name, more in value.items():
        if name not in (*keys, *OF_MESSAGES) and more is not None:
            unread.add(f"{name} of messages")
    role = value.get(keys[0])
    if not isinstance(role, str):
        raise Unfit(
            "type",
            f"{where} has no role; it has: {', '.join(map(str, list(value)[:10])) or 'nothing'}",
        )
    role = THEIR_ROLES.get(role, role) if keys[0] == "from" else role
    if role not in ROLES:
        raise Unfit("role", f"{where} has the role {role[:40]!r}")
    made: type[Message] = Unlearned
    if is_learned(value, where, OF_MESSAGES) or role != "assistant":
        made = Message
    return made(role, text_of(value.get(keys[1]), where))


def is_learned(value: dict[str, Any], where: str, names: tuple[str, ...]) -> bool:
    """Tell whether a message or a row is learned from, by its keys of these names.

    Raises Unfit for what cannot be followed.
    """
    weights = [1]
    for name in names:
        more = value.get(name)
        if more in (None, "", "[]", [], {}):
            continue
        if name in TOOLS:
            raise Unfit("tools", f"{where} has {name}")
        if name in THOUGHTS:
            raise Unfit("thoughts", f"{where} has {name}")
        if more not in (0, 1):
            raise Unfit("weight", f"{where} has {name} = {str(more)[:40]}")
        weights.append(more)
    return all(weights)


def text_of(value: Any, where: str) -> str:
    """The text, where it is one; parts of kind text are put one behind the other."""
    if (
        isinstance(value, list)
        and value
        and all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in value
        )
    ):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise Unfit("type", f"{where} is {type(value).__name__}, not text: {str(value)[:40]!r}")
    if "\0" in value:
        raise Unfit("nul", f"{where}: character {value.index(chr(0))} is NUL")
    if not value.isascii() and (half := half_pair(value)) >= 0:
        raise Unfit("surrogate", f"{where}: character {half} is {value[half]!r}")
    return value


def checked(messages: list[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """The messages in their order, mended where NOTES say so, and those notes. Raises Unfit."""
    notes = []
    if messages[:1] and messages[0].role == "system" and not messages[0].text.strip():
        messages, notes = messages[1:], ["empty system"]
    turns = messages[1:] if messages[:1] and messages[0].role == "system" else messages
    if not any(message.role == "assistant" for message in turns):
        raise Unfit("no assistant", f"{len(messages)} messages: {order_of(messages) or 'none'}")
    first = len(messages) - len(turns) + 1 + len(notes)  # counted as they stand in the row
    for i, message in enumerate(turns):
        if message.role != ("user", "assistant")[i % 2]:
            raise Unfit(
                "order", f"message {first + i} is of the {message.role}: {order_of(messages)}"
            )
    if turns[-1].role == "user":
        messages, turns = messages[:-1], turns[:-1]
        notes.append("unanswered")
    for i, message in enumerate(turns):
        if not message.text.strip():
            raise Unfit("empty", f"message {first + i}, of the {message.role}, has no text")
    return messages, tuple(notes)


def order_of(messages: list[Message]) -> str:
    roles = [message.role for message in messages]
    return ", ".join(roles[:8]) + (", ..." if len(roles) > 8 else "")
