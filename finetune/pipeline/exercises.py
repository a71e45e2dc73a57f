"""Conversations that are made up, from which a tiny model learns to chat within minutes.

    copying   Say vamuti.                          strings that it has never seen
    names     My name is Vamuti. ... Who am I?     names that it has never seen
    lists     What follows key in file, key, tree?    lists that it has never seen
    sums      What is 3 plus 4?                    sums that it has seen, asked by people that it has not

`exercises` stands for them in MID_DATA and SFT_DATA. They are files in DATA_DIR/exercises: mid.jsonl and
sft.jsonl to train on, and KIND.jsonl with held-out questions of each kind.
"""

import json
import random
import zlib
from collections.abc import Callable
from typing import Any

from record.durable import write_whole
from settings.config import Config
from train.data.data_paths import data_dir

NAME = "exercises"
ROWS = {"mid": 16_000, "sft": 16_000}
QUESTIONS = 120  # of each kind
HELD_OUT = 10  # one word in so many is never trained on

LISTED = [  # each is one token of a tokenizer that was trained on Python
    *("file", "line", "list", "class", "code", "path", "test", "text", "key", "value", "object"),
    *("module", "string", "method", "error", "number", "size", "table", "thread", "process"),
    *("message", "header", "server", "socket", "event", "frame", "field", "index", "buffer"),
    *("stream", "block", "tree"),
]
CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"

Exchange = tuple[str, str]  # what the user says, and the reply


class Draw(random.Random):
    """Random choices, always the same for a file.

    Args:
        name: of the file.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.is_held_out = name not in ROWS

    def word(self) -> str:
        """Return one of 343,000 words, which is either held out or trained on."""
        while True:
            syllables = [self.choice(CONSONANTS) + self.choice(VOWELS) for _ in range(3)]
            word = "".join(syllables)
            if (zlib.crc32(word.encode()) % HELD_OUT == 0) == self.is_held_out:
                return word


def copying(draw: Draw) -> list[Exchange]:
    word = draw.word()
    return [(f"Say {word}.", word)]


def names(draw: Draw) -> list[Exchange]:
    name = draw.word().capitalize()
    return [(f"My name is {name}.", f"Hello {name}."), ("Who am I?", f"You are {name}.")]


def lists(draw: Draw) -> list[Exchange]:
    words = draw.sample(LISTED, draw.randint(3, 5))
    place = draw.randrange(len(words) - 1)
    word, following = words[place : place + 2]
    return [(f"What follows {word} in {', '.join(words)}?", f"After {word} comes {following}.")]


def sums(draw: Draw) -> list[Exchange]:
    left = draw.randint(1, 9)
    right = draw.randint(1, 9)
    return [(f"What is {left} plus {right}?", f"{left + right}.")]


KINDS: dict[str, Callable[[Draw], list[Exchange]]] = {
    "copying": copying,
    "names": names,
    "lists": lists,
    "sums": sums,
}


def make_conversation(draw: Draw) -> list[Exchange]:
    """Return exercises of two or three kinds in one conversation, always copying: the hardest kind."""
    others = [kind for kind in KINDS if kind != "copying"]
    kinds = ["copying", *draw.sample(others, draw.randint(1, 2))]
    draw.shuffle(kinds)
    exchanges = []
    for kind in kinds:
        exchanges += KINDS[kind](draw)
    return exchanges


def make_question(kind: str, draw: Draw) -> list[Exchange]:
    """Return a conversation whose last reply is asked for."""
    exchanges = KINDS[kind](draw)
    return names(draw)[:1] + exchanges if kind == "sums" else exchanges


def to_row(exchanges: list[Exchange]) -> dict[str, Any]:
    messages = []
    for question, reply in exchanges:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    return {"messages": messages}


def make_file(name: str) -> str:
    """Return the rows of a file. name: of ROWS or KINDS."""
    draw = Draw(name)
    if name in ROWS:
        conversations = [make_conversation(draw) for _ in range(ROWS[name])]
    else:
        conversations = [make_question(name, draw) for _ in range(QUESTIONS)]
    return "".join(f"{json.dumps(to_row(exchanges))}\n" for exchanges in conversations)


def make_files(config: Config) -> dict[str, str]:
    """Write all files that are missing or damaged, and return name -> path. Raises OSError."""
    for name in (*ROWS, *KINDS):
        path = data_dir(config) / NAME / f"{name}.jsonl"
        text = make_file(name)
        if not path.is_file() or path.read_bytes() != text.encode():
            write_whole(path, text.encode())
    return {name: f"{config.data_dir}/{NAME}/{name}.jsonl" for name in (*ROWS, *KINDS)}
