"""Questions with known answers, as `make pipeline` checks them before there is a model to ask (chat_eval.py asks).

    a row with options     each option is an answer to choose; scored is its letter, as its line begins
    any other row          the answer is to be written

A question is asked as `make chat` asks: the messages up to the last answer, written up to where a reply begins.
Which are asked is decided by a seeded hash of what is said, as of held-out conversations (examples.py).
"""

import dataclasses
from array import array
from collections.abc import Callable

import numpy as np

from finetune import exercises
from finetune.conversations import read_all
from finetune.examples import choose, hash_of
from finetune.row_shapes import Conversation
from settings.config import Config
from train.data.data_paths import data_dir
from train.data.sources.source import CorpusError
from train.data.tokenizer import Vocabulary
from train.evaluate.core.prompts import Choice, Question
from train.generate import chat_format
from train.generate.chat_format import Message

SETTING = "EVAL_DATA"


@dataclasses.dataclass(frozen=True)
class Asked:
    """messages: up to the reply; answer: the right one; options: the replies to choose among, or none; place:
    FILE:LINE."""

    messages: list[Message]
    answer: str
    options: tuple[str, ...]
    place: str


@dataclasses.dataclass(frozen=True)
class Sheet:
    """All that will be asked. rows: in the data, of which `asked` were drawn; report: what became of the rows."""

    asked: list[Asked]
    rows: int
    report: list[str]


def sheet_of(c: Config) -> Sheet:
    """The questions of EVAL_DATA, EVAL_EXAMPLES of them at most. Raises CorpusError, OSError."""
    if not c.eval_data:
        raise CorpusError(
            f"{SETTING} is not set; give questions with answers that the model was not trained on, for "
            f"example {SETTING}=held_out.jsonl"
        )
    folder = data_dir(c) / "finetune"
    rows, report = read_all(exercises.data_of(c, SETTING), folder, c.hf_token, SETTING)
    hashes = np.array([hash_of(row.conversation) for row in rows], dtype=np.uint64)
    drawn = choose(hashes, c.seed, c.eval_examples or None)
    return Sheet(
        [asked(rows[i].conversation, rows[i].place) for i in drawn.tolist()], len(rows), report
    )


def asked(conversation: Conversation, place: str) -> Asked:
    """The last answer of a conversation is what is asked for."""
    *before, last = [
        Message(message["role"], message["content"]) for message in conversation.messages
    ]
    return Asked(before, last.text, conversation.options, place)


def choice_question(number: int, one: Asked, v: Vocabulary, seq_len: int) -> Question:
    """A question with options, as CORE's are: of each option the tokens up to the one that holds its letter.

    The whole line is tokenized, so that the letter is in the token that it is in where such an answer is trained on.
    """
    prompt, choices = chat_format.render(v, one.messages), []
    for line in one.options:
        encoding = v.tokenizer.encode(line, add_special_tokens=False)
        letter = line.index(".")
        count = sum(begin < letter for begin, _ in encoding.offsets)
        choices.append(Choice(array("q", [*prompt, *encoding.ids[:count]]), len(prompt)))
    return Question(
        number,
        tuple(choices),
        one.options.index(one.answer),
        too_long=max(len(choice.tokens) for choice in choices) > seq_len,
    )


def written_question(one: Asked, v: Vocabulary, seq_len: int) -> tuple[list[int], int] | None:
    """(ids of the prompt, tokens that the right answer takes, its end included); None where they exceed seq_len."""
    prompt, answer = chat_format.render(v, one.messages), len(v.encode(one.answer)) + 1
    return (prompt, answer) if len(prompt) + answer <= seq_len else None


def fitting(
    sheet: Sheet, v: Vocabulary, seq_len: int, say: Callable[[str], None] = lambda line: None
) -> int:
    """How many of the questions fit into seq_len tokens. Raises CorpusError where none does, TokenizerError."""
    lost = [
        one.place
        for number, one in enumerate(sheet.asked)
        if (
            choice_question(number, one, v, seq_len).too_long
            if one.options
            else written_question(one, v, seq_len) is None
        )
    ]
    if len(lost) == len(sheet.asked):
        raise CorpusError(
            f"{SETTING}: none of its {len(lost)} questions fits into SEQ_LEN={seq_len} tokens; give "
            "shorter ones, or train with a longer SEQ_LEN"
        )
    if lost:
        say(
            f"{SETTING}: {len(lost)} of {len(sheet.asked)} questions do not fit into SEQ_LEN={seq_len} tokens and are "
            f"left out ({', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''})"
        )
    return len(sheet.asked) - len(lost)
