"""Conversations that are made up: right, always the same, and words that are held out nowhere else."""

import json
import re
from pathlib import Path

from finetune.pipeline import exercises
from finetune.row_shapes import Conversation, conversation_of
from settings import load_preset


def read(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def answer(text: str, earlier: list[str]) -> str:
    """Return the right reply to a message, by reading it."""
    match text.rstrip(".?").split():
        case ["Say", word]:
            return word
        case ["My", "name", "is", name]:
            return f"Hello {name}."
        case ["Who", "am", "I"]:
            name = earlier[-1].rstrip(".").split()[-1]
            return f"You are {name}."
        case ["What", "follows", word, "in", *listed]:
            words = [other.strip(",") for other in listed]
            return f"After {word} comes {words[words.index(word) + 1]}."
        case ["What", "is", left, "plus", right]:
            return f"{int(left) + int(right)}."
    raise AssertionError(text)


def test_every_reply_is_right_and_held_out_words_are_never_trained_on(tmp_path: Path) -> None:
    paths = exercises.make_files(load_preset(DATA_DIR=str(tmp_path)))
    files = {name: read(Path(path)) for name, path in paths.items()}
    assert files.keys() == {"mid", "sft", "copying", "names", "lists", "sums"}
    for conversations in files.values():
        for messages in conversations:
            assert isinstance(conversation_of({"messages": messages}), Conversation)
            asked = [message["content"] for message in messages[::2]]
            replies = [message["content"] for message in messages[1::2]]
            for i, reply in enumerate(replies):
                assert answer(asked[i], asked[:i]) == reply
    replies = [messages[-1]["content"] for messages in files["lists"]]
    assert max(map(replies.count, replies)) <= 3  # so nothing is gained by guessing
    trained = json.dumps(files["mid"] + files["sft"]).lower()
    trained_words = set(re.findall("[a-z]+", trained))
    names = set(re.findall(r"My name is (\w+)", json.dumps(files["mid"])))
    assert len(names) > 500
    for kind in ("copying", "names"):
        words = [
            re.findall("[a-z]+", messages[0]["content"].lower())[-1] for messages in files[kind]
        ]
        assert len(set(words)) > 110 and not trained_words & set(words)
    assert len({messages[-2]["content"] for messages in files["sums"]}) > 40
    for messages in files["sums"]:
        assert messages[-2]["content"].lower() in trained
        assert messages not in files["mid"] and messages not in files["sft"]


def test_a_file_is_always_the_same_and_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    config = load_preset(DATA_DIR=str(tmp_path))
    before = {path: Path(path).read_bytes() for path in exercises.make_files(config).values()}
    Path(next(iter(before))).write_text("{")
    after = {path: Path(path).read_bytes() for path in exercises.make_files(config).values()}
    assert after == before and len(set(before.values())) == 6
