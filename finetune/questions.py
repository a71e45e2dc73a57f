"""Questions with known answers, as a chat is asked them: EVAL_DATA, whose last answers are what is right.

    a row with options     each option is an answer to choose; scored is its letter, as its line begins
    any other row          the answer is to be written

A question is asked as `make chat` asks: the messages up to the last answer, written up to where a reply begins.
Which are asked is decided by a seeded hash of what is said, as of held-out conversations (subset.py).
"""

import dataclasses
import hashlib
import json
import logging
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from finetune import exercises, reading, several, subset
from finetune.reading import Tally, conversations, pinned_files
from finetune.store import hash_of
from finetune.template import digest
from record.durable import write_whole
from settings.config import Config
from settings.resolve import show_path
from train.data.data_paths import data_dir
from train.data.prepare import one_at_a_time
from train.data.sources.pin import Pinned
from train.data.sources.source import CorpusError
from train.data.tokenizer import Vocabulary
from train.evaluate.core.prompts import Choice, Question
from train.generate import chat_format
from train.generate.chat_format import Message

SETTING = "EVAL_DATA"
RULES = 1  # changes when the same rows give other questions
log = logging.getLogger(__name__)


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

    @property
    def chance(self) -> float:
        """Share of the questions with options that guessing gets right; nan where there is none."""
        shares = [1 / len(one.options) for one in self.asked if one.options]
        return sum(shares) / len(shares) if shares else float("nan")


def sheet_of(c: Config) -> Sheet:
    """The questions of EVAL_DATA, EVAL_EXAMPLES of them at most. Raises CorpusError, OSError."""
    if not c.eval_data:
        raise CorpusError(
            f"{SETTING} is not set; give questions with answers that the model was not trained on, for "
            f"example {SETTING}=held_out.jsonl"
        )
    found, report = list[Asked](), list[str]()
    folder = data_dir(c) / "finetune"
    with one_at_a_time(
        folder
    ):  # of several processes that ask: files of the hub are deleted once they are read
        for source, _ in several.sources_in(exercises.data_of(c, SETTING), SETTING):
            rows, said = read(source, folder, c)
            found += rows
            report += said
    hashes = np.array(
        [hash_of([*one.messages, Message("assistant", one.answer)]) for one in found],
        dtype=np.uint64,
    )
    drawn = subset.chosen(hashes, c.seed, c.eval_examples or None)
    return Sheet([found[i] for i in drawn.tolist()], len(found), report)


def read(source: str, folder: Path, c: Config) -> tuple[list[Asked], list[str]]:
    """The questions of one source, and what became of its rows. Those of the hub are kept in folder/questions, so that
    a stage of a pipeline asks nothing of it hours later. Raises CorpusError, OSError."""
    pinned, files = pinned_files(source, folder, c.hf_token, SETTING)
    kept, of_hub = folder / "questions" / f"{key_of(pinned)}.json", pinned.source.kind == "hub"
    if of_hub and (held := opened(kept)):
        return held
    tally = Tally()
    found = [asked(row.conversation, row.place) for row in conversations(pinned, files, tally)]
    reading.check_dropped(pinned, tally, reading.SENTENCES)
    report = tally.report(reading.SENTENCES)
    if of_hub:
        content = json.dumps([[dataclasses.astuple(one) for one in found], report]).encode()
        write_whole(kept, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    return found, report


def key_of(pinned: Pinned) -> str:
    """16 hex digits of what decides the questions."""
    return digest(RULES, [(file.name, file.bytes, file.digest) for file in pinned.files])[:16]


def opened(path: Path) -> tuple[list[Asked], list[str]] | None:
    """What is kept, verified by its hash; None where it is not there, or not that."""
    try:
        wanted, content = path.read_bytes().split(b"\n", 1)
        if hashlib.sha256(content).hexdigest().encode() != wanted:
            raise ValueError("another hash")
        rows, report = json.loads(content)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s: damaged (%s); it is made again", show_path(path), error)
        return None
    return [
        Asked([Message(*one) for one in messages], answer, tuple(options), place)
        for messages, answer, options, place in rows
    ], report


def asked(conversation: reading.Conversation, place: str) -> Asked:
    """The last answer of a conversation is what is asked for."""
    *before, last = conversation.messages
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


def is_same(written: str, answer: str) -> bool:
    """Whether a written answer is the right one: to the letter, but for case, blanks and a stop at the end."""
    return plain(written) == plain(answer)


def plain(text: str) -> str:
    return " ".join(text.split()).casefold().rstrip(" .!")
