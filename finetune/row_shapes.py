"""A row of a data set to a conversation, or the reason why it is none.

A conversation is an optional system message, then user and assistant in turn. A reply may call tools,
whose results follow it. docs/finetune.md lists the columns that are read (SHAPES).

What changes what is learned is followed, or the row is dropped with the reason (REASONS). What can be
repaired without another reply being learned is repaired and noted (NOTES).
"""

import dataclasses
import itertools
import json
import string
from collections.abc import Iterable
from typing import Any

from train.data.sources.formats import Bad
from train.data.sources.rows import half_pair

Message = dict[str, Any]  # role, content; where given reasoning_content, tool_calls and others
Row = dict[str, Any]

LISTS = ("messages", "conversations", "conversation")
ASKED = ("prompt", "question", "instruction", "query")
ANSWERED = ("completion", "response", "answer", "output")
PAIRS = [
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "output"),
    *itertools.product(ASKED, ANSWERED),
    ("input", "output"),
]
CHOICES = [*itertools.product(["question"], ["options", "choices"], ["answer", "answerkey"])]
# The first of these of which a row has all columns is taken.
SHAPES = {"/".join(columns): columns for columns in [*zip(LISTS), *CHOICES, *PAIRS]}
ACCEPTED = (
    "messages, conversations, a question (prompt, question, instruction or query) with an answer "
    "(completion, response, answer or output), or question + choices + answer"
)
SYSTEM = ("system", "system_prompt")
ADDED = ("input", "context")  # follows the question
INDEX = ("answer_idx", "answer_index")
OF_PAIRS = (*ADDED, "history")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # as chat templates name them
THOUGHT_COLUMNS = (*THOUGHTS, "thought", "complex_cot", "chain_of_thought", "cot")
TOOLS = ("tools", "functions")
# 0 or false: not learned.
WEIGHTS = ("weight", "loss_weight", "train", "training", "trainable", "loss", "loss_mask")
MASKS = ("mask", "masked", "ignore")  # some data set them for what is learned, some for what is not
RENDERING = "chat_template_kwargs"  # which TRL passes on
PREFERENCES = ("chosen", "rejected", "label")
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
OF_ROWS = (
    *SYSTEM,
    *THOUGHT_COLUMNS,
    *TOOLS,
    *WEIGHTS,
    *MASKS,
    *PREFERENCES,
    *MEDIA,
    RENDERING,
)
COLUMNS = {*itertools.chain(*SHAPES.values()), *OF_PAIRS, *INDEX, *OF_ROWS}

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
FOLLOWS = {  # the role before, "" at the start -> the roles that may follow
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool", "user"),
}
ROLE_KEYS = ("role", "from")
TEXT_KEYS = ("content", "value", "text")
CALLS = ("tool_calls", "function_call")
OF_RESULTS = ("name", "tool_call_id")
TEXT_PARTS = ("text", "input_text", "output_text")
UNLEARNED = "unlearned"  # key of a reply that is not scored, while its row is read
LABELS = string.ascii_uppercase

REASONS = {
    "shape": f"columns that are not those of a conversation. Rename them; accepted are {ACCEPTED}",
    "type": "a value of another type than is read. Write messages as a list of objects with role and "
    "content, also as JSON in a string, and content as text",
    "role": "a role that is not known. Use system, user, assistant or tool",
    "order": "messages out of order. Put the system message first, then user and assistant in turn, "
    "and results of tools after the reply that calls them",
    "empty": "a message without text. Fill it in, or remove the message or the row",
    "no assistant": "no reply of the assistant. Add one, or remove the row",
    "tools": "tools or calls that cannot be read. Write tools as a list of functions, and tool_calls "
    "as a list of calls with name and arguments, both also as JSON in a string",
    "thoughts": "thoughts of the row, which has several replies. Move them into the message that they "
    "precede, as reasoning_content",
    "weight": "a weight other than 0 and 1, or a mask, which can mean both. Use weight 1 for what is "
    "learned and 0 for what is not, or rename the column",
    "rendering": "options of the chat template, which are not passed on. Remove the column "
    f"{RENDERING}",
    "unlearned": "nothing to learn, since every weight is 0. Remove the row",
    "preference": "preferences (DPO or KTO), which are not learned here. Keep the good replies as "
    "completion, and remove the other rows and the columns chosen, rejected and label",
    "media": "images, audio or files, which are not read here. Remove such rows",
    "options": "an answer that is none of the options, or several. Give its letter, its text or its "
    "number counted from 0",
    "nul": "NUL characters in a text. Remove them",
    "surrogate": "half a surrogate pair in a text. Save the text again as UTF-8",
}
NOTES = {
    "empty system": "empty system messages left out",
    "unanswered": "last messages without a reply left out",
    "leading": "replies before the first question left out",
    "joined": "messages joined with the one before them, which has the same role",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as chat templates take it.

    Attributes:
        messages: role and content each; where given reasoning_content, tool_calls and others.
        tools: the functions that a reply may call.
        unlearned: indexes of replies that are not scored.
        shape: a key of SHAPES.
        notes: keys of NOTES.
        unread: columns, and keys of messages, that nothing here uses.
        options: the replies that a multiple choice is among.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    unlearned: frozenset[int] = frozenset()
    shape: str = ""
    notes: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()


class Unfit(Exception):
    """Why a row is no conversation, as a Bad."""

    def __init__(self, reason: str, what: str):
        super().__init__(what)
        self.bad = Bad(reason, what)


def conversation_of(row: Row) -> Conversation | Bad:
    """Return the conversation in a row, or what is wrong with it."""
    named = {str(name).lower(): value for name, value in row.items()}
    if len(named) < len(row):
        return Bad("shape", f"names that differ in case alone: {', '.join(map(str, row))}")
    try:
        return read_row(named)
    except Unfit as unfit:
        return unfit.bad


def read_row(row: Row) -> Conversation:
    """Return the conversation in a row. Raises Unfit."""
    shape = find_shape(row)
    columns = SHAPES[shape]
    check_kind(row, columns)
    if not is_learned(row, "the row"):
        raise Unfit("unlearned", "its weight is 0")
    used = {*columns, *OF_ROWS}
    unread: set[str] = set()
    options: tuple[str, ...] = ()
    if columns[0] in LISTS:
        messages = read_messages(row[shape], f"column {shape!r}", unread)
    elif columns in CHOICES:
        messages, options = read_choice(row, columns)
        used |= {*INDEX}
    else:
        messages = read_pair(row, columns, unread)
        used |= {*OF_PAIRS}
    add_system(row, messages)
    add_thoughts(row, messages)
    messages, notes = put_in_order(messages)
    unlearned = [number for number, message in enumerate(messages) if message.pop(UNLEARNED, False)]
    replies = sum(message["role"] == "assistant" for message in messages)
    if len(unlearned) == replies:
        raise Unfit("unlearned", f"the weight of its {replies} replies is 0")
    unread |= pick(row, row.keys() - used).keys()
    return Conversation(
        messages,
        read_tools(row),
        frozenset(unlearned),
        shape,
        notes,
        frozenset(unread),
        options,
    )


def find_shape(row: Row) -> str:
    """Return the first shape of which the row has all columns, none of them null. Raises Unfit."""
    for shape, columns in SHAPES.items():
        if all(row.get(name) is not None for name in columns):
            return shape
    if is_given(row.get("rejected")):
        raise Unfit("preference", "it has chosen and rejected")
    names = [name if value is not None else f"{name} (null)" for name, value in row.items()]
    raise Unfit("shape", f"it has {', '.join(names[:10]) or 'no column'}")


def check_kind(row: Row, columns: tuple[str, ...]) -> None:
    """Raise Unfit for data of another kind of training, whose columns change what a row means."""
    is_chosen = row.get("chosen") == row[columns[0]]
    if is_given(row.get("rejected")) and not is_chosen:
        raise Unfit("preference", "it has rejected")
    if row.get("label") in (0, 1):  # of Python, also False and True
        raise Unfit("preference", f"it has label = {row['label']}")
    if is_given(row.get(RENDERING)):
        raise Unfit("rendering", f"it has {RENDERING} = {show(row[RENDERING])}")
    check_media(row, "it")


def check_media(value: Row, where: str) -> None:
    for name in pick(value, MEDIA):
        raise Unfit("media", f"{where} has {name}")


def is_given(value: Any) -> bool:
    """Tell whether a value says anything. Parquet has every column in every row."""
    return value not in (None, "", [], {})


def pick(row: Row, names: Iterable[str]) -> Row:
    """Return what a row has under these names."""
    return {name: row[name] for name in names if is_given(row.get(name))}


def is_learned(value: Row, where: str) -> bool:
    """Tell whether a message or a row is learned. Raises Unfit if that is not clear."""
    weights = pick(value, (*WEIGHTS, *MASKS))
    for name, weight in weights.items():
        if name in MASKS or weight not in (0, 1):
            raise Unfit("weight", f"{where} has {name} = {show(weight)}")
    return all(weights.values())


# ---- Shapes


def read_pair(row: Row, columns: tuple[str, ...], unread: set[str]) -> list[Message]:
    """A question and its answer. Each is a text or a list of messages."""
    asked, answered = columns
    messages = read_history(row)
    for role, name in (("user", asked), ("assistant", answered)):
        value, where = row[name], f"column {name!r}"
        if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            messages += read_messages(value, where, unread)
        else:
            messages.append(make(role, read_text(value, where)))
        if name != asked:
            continue
        for added, more in pick(row, ADDED).items():
            text = read_text(more, f"column {added!r}")
            if text.strip() and added != asked:
                messages[-1]["content"] += f"\n\n{text}"
    return messages


def read_history(row: Row) -> list[Message]:
    """Earlier turns, as Alpaca's data have them: pairs of a question and its answer."""
    history = parse(row.get("history"))
    if not is_given(history):
        return []
    is_pairs = isinstance(history, list) and all(
        isinstance(turn, list) and len(turn) == 2 for turn in history
    )
    if not is_pairs:
        raise Unfit("type", f"column 'history' is not a list of pairs: {show(history)}")
    messages = []
    for number, (question, answer) in enumerate(history, 1):
        where = f"turn {number} of column 'history'"
        messages.append(make("user", read_text(question, where)))
        messages.append(make("assistant", read_text(answer, where)))
    return messages


def read_choice(row: Row, columns: tuple[str, ...]) -> tuple[list[Message], tuple[str, ...]]:
    """Multiple choice: the options follow the question as lines "A. text". The reply is such a line.

    Returns the messages and these lines.
    """
    _, column, answered = columns
    options = read_options(row[column], f"column {column!r}")
    labels = list(options)
    right = ""
    for name in (answered, *INDEX):
        answer = row.get(name)
        if answer is None:
            continue
        right_labels = [label for label, text in options.items() if text == answer]
        if type(answer) is int and 0 <= answer < len(labels):
            right_labels = [labels[answer]]
        elif not right_labels and isinstance(answer, str) and answer in options:
            right_labels = [answer]
        if len(right_labels) != 1:
            which = " and ".join(right_labels) or "none of the options"
            raise Unfit("options", f"{name} = {show(answer)} is {which}")
        if right and right_labels[0] != right:
            raise Unfit("options", f"{answered} is {right}, but {name} is {right_labels[0]}")
        right = right_labels[0]
    lines = {label: f"{label}. {text}" for label, text in options.items()}
    question = "\n".join([read_text(row["question"], "column 'question'"), *lines.values()])
    return [make("user", question), make("assistant", lines[right])], tuple(lines.values())


def read_options(value: Any, where: str) -> dict[str, str]:
    """Return label -> text. A null is none, since Parquet has all labels in every row."""
    if isinstance(value, dict) and {*value} == {"text", "label"}:  # ARC
        lists = (value["label"], value["text"])
        if not all(isinstance(one, list) for one in lists):
            raise Unfit("type", f"{where} is {show(value)}, without lists of labels and texts")
        value = dict(zip(map(str, lists[0]), lists[1], strict=False))
    if isinstance(value, list) and len(value) <= len(LABELS):
        value = dict(zip(LABELS, value, strict=False))
    if not isinstance(value, dict) or not value:
        raise Unfit("type", f"{where} is {show(value)}, not a list of texts or labels with texts")
    given = {label: text for label, text in value.items() if text is not None}
    return {str(label): read_text(text, f"option {label}") for label, text in given.items()}


def add_system(row: Row, messages: list[Message]) -> None:
    for name, text in pick(row, SYSTEM).items():
        if messages and messages[0]["role"] == "system":
            raise Unfit("order", f"a {name} column, and a system message as well")
        messages.insert(0, make("system", read_text(text, f"column {name!r}")))


def add_thoughts(row: Row, messages: list[Message]) -> None:
    """Thoughts in a column of their own belong to the only reply."""
    replies = [message for message in messages if message["role"] == "assistant"]
    for name, thoughts in pick(row, THOUGHT_COLUMNS).items():
        if len(replies) != 1 or "reasoning_content" in replies[0]:
            raise Unfit("thoughts", f"it has {name} and {len(replies)} replies")
        replies[0]["reasoning_content"] = read_text(thoughts, f"column {name!r}")


def read_tools(row: Row) -> list[dict[str, Any]] | None:
    """Return the functions that a reply may call, as chat templates take them."""
    for name in TOOLS:
        tools = parse(row.get(name))
        if not is_given(tools):
            continue
        if not isinstance(tools, list):
            raise Unfit("tools", f"column {name!r} is {show(tools)}")
        return [read_function(tool, f"column {name!r}") for tool in tools]
    return None


def read_function(value: Any, where: str) -> dict[str, Any]:
    """Return a tool or a call as {"type": "function", "function": {"name", ...}}."""
    value = parse(value)
    function = value
    if isinstance(value, dict):
        function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unfit("tools", f"{where} has {show(value)}, which has no name")
    if function is value:
        return {"type": "function", "function": function}
    return value | {"type": "function"}


# ---- Messages


def make(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def read_messages(value: Any, where: str, unread: set[str]) -> list[Message]:
    value = parse(value)
    if not isinstance(value, list):
        raise Unfit("type", f"{where} is {show(value)}, not a list of messages")
    return [
        read_message(parse(message), f"message {number} of {where}", unread)
        for number, message in enumerate(value, 1)
    ]


def read_message(value: Any, where: str, unread: set[str]) -> Message:
    if not isinstance(value, dict):
        raise Unfit("type", f"{where} is {show(value)}, not an object")
    given = {str(name): part for name, part in value.items() if part is not None}
    role_key = first_of(ROLE_KEYS, given)
    text_key = first_of(TEXT_KEYS, given)
    role = given.get(role_key)
    if not isinstance(role, str):
        raise Unfit("type", f"{where} has no role; it has {', '.join(given) or 'nothing'}")
    spelled = role.strip().lower()
    if spelled not in ROLES:
        raise Unfit("role", f"{where} has the role {role[:40]!r}")
    check_media(given, where)
    if spelled == "function_call":  # ShareGPT writes the call as the text
        given["tool_calls"] = given.pop(text_key, "")

    message = make(ROLES[spelled], "")
    if text_key in given:
        message["content"] = read_content(given[text_key], where, message)
    used = {role_key, text_key}
    if message["role"] == "assistant":
        used |= {*THOUGHT_COLUMNS, *CALLS, *WEIGHTS}
        for thoughts in pick(given, THOUGHT_COLUMNS).values():
            message["reasoning_content"] = read_text(thoughts, where)
        for calls in pick(given, CALLS).values():
            message["tool_calls"] = read_calls(calls, where)
        if not is_learned(given, where):
            message[UNLEARNED] = True
    else:
        used |= {name for name in WEIGHTS if not given.get(name)}  # it is not learned anyway
    if message["role"] == "tool":
        used |= {*OF_RESULTS}
        message |= {name: given[name] for name in OF_RESULTS if name in given}
    for name in pick(given, given.keys() - used):
        unread.add(f"{name} of {message['role']} messages")
    return message


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return calls as chat templates take them: their arguments as an object, not as text."""
    value = parse(value)
    calls = []
    for item in value if isinstance(value, list) else [value]:
        call = read_function(item, where)
        function = call["function"]
        arguments = parse(function.get("arguments", {}))
        calls.append(call | {"function": function | {"arguments": arguments}})
    return calls


def read_content(value: Any, where: str, message: Message) -> str:
    """Return the text of a message, also of one in parts. Thoughts among these go to the message."""
    if not isinstance(value, list):
        return read_text(value, where)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "thinking":
            message["reasoning_content"] = read_text(part.get("thinking"), where)
        elif kind in TEXT_PARTS:
            texts.append(read_text(part.get("text"), where))
        elif kind in ("tool_use", "tool_result"):
            raise Unfit("tools", f"{where} has a part of type {kind}")
        else:
            raise Unfit("media", f"{where} has a part of type {kind}")
    return "".join(texts)


def read_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Unfit("type", f"{where} is {type(value).__name__}, not text: {show(value)}")
    if "\0" in value:
        raise Unfit("nul", f"{where}: character {value.index(chr(0))} is NUL")
    if not value.isascii() and (half := half_pair(value)) >= 0:
        raise Unfit("surrogate", f"{where}: character {half} is {value[half]!r}")
    return value


def parse(value: Any) -> Any:
    """Return what JSON in a string holds if that is a list or an object, else the value."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def first_of(names: Iterable[str], given: Row) -> str:
    return next((name for name in names if name in given), "")


def show(value: Any) -> str:
    return f"{str(value)[:40]!r}"


# ---- Order


def put_in_order(written: list[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """Return the messages in the order of a conversation, and what was repaired. Raises Unfit."""
    roles = [message["role"] for message in written]
    order = ", ".join(roles[:8]) + (", ..." if len(roles) > 8 else "")
    if "assistant" not in roles:
        raise Unfit("no assistant", f"{len(roles)} messages: {order or 'none'}")
    notes: list[str] = []
    messages: list[Message] = []
    for number, message in enumerate(written, 1):
        role, before = message["role"], messages[-1]["role"] if messages else ""
        if role == "system" and not message["content"].strip():
            notes.append("empty system")
        elif role == "assistant" and before in ("", "system"):
            notes.append("leading")
        elif role == before and role != "tool":
            join(messages[-1], message, number)
            notes.append("joined")
        elif role in FOLLOWS[before]:
            messages.append(message)
        else:
            raise Unfit("order", f"message {number} has the role {role}, in {order}")
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
        if "unanswered" not in notes:
            notes.append("unanswered")
    if not messages:
        raise Unfit("no assistant", f"{len(roles)} messages: {order}")
    for number, message in enumerate(messages, 1):
        is_result = message["role"] == "tool"
        if not message["content"].strip() and not is_result and "tool_calls" not in message:
            raise Unfit("empty", f"message {number} ({message['role']}) has no text")
    return messages, tuple(notes)


def join(before: Message, message: Message, number: int) -> None:
    """Add a message to the one before it, a blank line between. Raises Unfit for more than texts."""
    if {*before, *message} != {"role", "content"}:
        raise Unfit("order", f"message {number} follows another one of the role {message['role']}")
    before["content"] += f"\n\n{message['content']}"
