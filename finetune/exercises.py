"""Questions and talks that are made up, for a first try: what `exercises` stands for in MID_DATA, SFT_DATA, EVAL_DATA.

    which of four words is an animal?   multiple choice, by letter
    what is 3 plus 4?                   an answer to be written
    short talks, in which such things are asked

Rows are drawn by SEED and kept as DATA_DIR/exercises/SEED/{mid,sft,held_out}.jsonl; no question of held_out is in the
others, though its words are. A model that has learned the form and nothing else gets a fourth of the choices right.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record.durable import write_whole
from settings.config import Config
from train.data.data_paths import data_dir

NAME = "exercises"
ROWS = {"mid": 4000, "sft": 3000, "held_out": 400}
PART = {
    "MID_DATA": "mid",
    "SFT_DATA": "sft",
    "EVAL_DATA": "held_out",
}  # what each setting takes of them
LETTERS = "ABCD"
LARGEST = (
    50  # of what is added: a fifth of so many squared must be more than half of those held out
)
KINDS = {
    "an animal": "cat dog horse cow sheep goat mouse lion tiger bear wolf fox",
    "a fruit": "apple pear plum cherry grape lemon orange banana peach melon fig mango",
    "a colour": "red green blue yellow black white brown pink grey purple violet cyan",
    "a number": "one two three four five six seven eight nine ten twelve twenty",
    "a day": "monday tuesday wednesday thursday friday saturday sunday",
    "a tool": "hammer saw drill axe knife file pliers wrench shovel rake brush chisel",
    "a part of the body": "hand foot arm leg head nose ear eye mouth knee elbow shoulder",
    "a metal": "iron copper silver gold zinc tin lead nickel steel bronze",
}
NAMES = (
    "Ada",
    "Ben",
    "Carl",
    "Dora",
    "Emil",
    "Fay",
    "Gus",
    "Hana",
    "Ivan",
    "Jo",
    "Kim",
    "Lea",
    "Max",
    "Nora",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tom",
    "Vera",
)


def choice(draw: random.Random) -> dict[str, Any]:
    """As MedQA has it."""
    kinds = draw.sample(list(KINDS), len(LETTERS))
    words = [draw.choice(KINDS[kind].split()) for kind in kinds]
    right = draw.randrange(len(LETTERS))
    return {
        "question": f"Which of these is {kinds[right]}?",
        "options": dict(zip(LETTERS, words, strict=True)),
        "answer": words[right],
        "answer_idx": LETTERS[right],
    }


def addition(draw: random.Random) -> dict[str, Any]:
    a, b = draw.randrange(LARGEST), draw.randrange(LARGEST)
    return {"question": f"What is {a} plus {b}?", "answer": str(a + b)}


def talk(draw: random.Random) -> dict[str, Any]:
    """Of four messages or six."""
    name, kind = draw.choice(NAMES), draw.choice(list(KINDS))
    word, other = draw.sample(KINDS[kind].split(), 2)
    said = [
        f"Hello, I am {name}.",
        f"Hello {name}. What would you like to know?",
        f"What is {word}?",
        f"It is {kind}.",
    ]
    if draw.random() < 0.5:
        said += ["Name another one.", f"{other}."]
    return {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)
        ]
    }


def rows(part: str, seed: int) -> Iterator[dict[str, Any]]:
    """All of a part, in order. Which questions are held out is a property of the question, not of the draw."""
    draw, count = random.Random(f"{seed} {part}"), 0
    makers = {
        "mid": (talk, choice, addition),
        "sft": (choice, addition),
        "held_out": (choice, addition),
    }[part]
    seen: set[str] = set()
    while count < ROWS[part]:
        made = makers[count % len(makers)](draw)
        text = json.dumps(made)
        if "messages" not in made:
            held_out = random.Random(text).random() < 0.2
            if held_out != (part == "held_out") or (held_out and text in seen):
                continue
        seen.add(text)
        count += 1
        yield made


def made(folder: Path, seed: int) -> Path:
    """The folder of the files below DATA_DIR, which are made where they are not there. Raises OSError."""
    folder = folder / NAME / str(seed)
    for part in ROWS:
        content = "".join(json.dumps(row) + "\n" for row in rows(part, seed)).encode()
        path = folder / f"{part}.jsonl"
        if not path.is_file() or path.read_bytes() != content:
            write_whole(path, content)
    return folder


def are_in(c: Config, name: str) -> bool:
    """Whether the setting of that name asks for them."""
    return any(part.partition("*")[0] == NAME for part in getattr(c, name.lower()).split(","))


def data_of(c: Config, name: str) -> str:
    """MID_DATA, SFT_DATA or EVAL_DATA as DATA takes it: exercises by the file that holds them, which is made.
    Raises OSError."""
    if not are_in(c, name):
        return str(getattr(c, name.lower()))
    made(data_dir(c), c.seed)
    path = f"{c.data_dir}/{NAME}/{c.seed}/{PART[name]}.jsonl"
    return ",".join(
        path + part.removeprefix(NAME) if part.partition("*")[0] == NAME else part
        for part in getattr(c, name.lower()).split(",")
    )
