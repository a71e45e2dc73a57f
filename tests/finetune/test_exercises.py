"""Questions that are made up: right, always the same, and those held out nowhere else."""

import json
import re
from pathlib import Path

from finetune import exercises
from finetune.row_shapes import Conversation, conversation_of


def test_answers_are_right_and_held_out_questions_are_in_no_other_part(tmp_path: Path) -> None:
    folder = exercises.made(tmp_path, 5)
    parts = {
        part: [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]
        for part in exercises.ROWS
    }
    assert {part: len(rows) for part, rows in parts.items()} == exercises.ROWS
    kind_of = {word: kind for kind, words in exercises.KINDS.items() for word in words.split()}
    for rows in parts.values():
        for row in rows:
            assert isinstance(conversation_of(row), Conversation)
            if "options" in row:
                assert row["options"][row["answer_idx"]] == row["answer"]
                wanted = re.fullmatch(r"Which of these is (.+)\?", row["question"])
                assert (
                    wanted
                    and [kind_of[word] for word in row["options"].values()].count(wanted[1]) == 1
                )
                assert kind_of[row["answer"]] == wanted[1]
            elif "answer" in row:
                a, b = map(int, re.findall("[0-9]+", row["question"]))
                assert row["answer"] == str(a + b)
    held_out = [json.dumps(row) for row in parts["held_out"]]
    assert len(set(held_out)) == len(held_out)
    assert not set(held_out) & {json.dumps(row) for part in ("mid", "sft") for row in parts[part]}


def test_a_seed_gives_the_same_rows_and_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in exercises.made(tmp_path, 5).iterdir()}
    (tmp_path / "exercises" / "5" / "sft.jsonl").write_text("{")
    assert {
        path.name: path.read_bytes() for path in exercises.made(tmp_path, 5).iterdir()
    } == before
    assert (exercises.made(tmp_path, 6) / "sft.jsonl").read_bytes() != before["sft.jsonl"]
