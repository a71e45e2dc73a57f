"""finetune/store.py: examples as they should be by hand, made once, whole or not at all."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune import store
from finetune.reading import Tally
from finetune.store import SENTENCES, Examples, cut, examples_of
from finetune.template import Labelled, Theirs
from tests.finetune.making import CHATML, THINKS, row, talk, theirs, write_rows
from train.data.sources.formats import Bad
from train.data.sources.source import CorpusError

ROWS = [row(f"q{i}?", f"a{i}", "b?", "c" * i + "!") for i in range(30)]


@pytest.fixture(scope="module")
def chatml() -> Theirs:
    return theirs(CHATML)


def made(path: Path, t: Theirs, seq_len: int = 64) -> Examples:
    return examples_of(str(path), t, seq_len, path.parent / "data" / "finetune")


# ---- What an example is


def test_examples_are_conversations_up_to_their_last_scored_token(
    tmp_path: Path, chatml: Theirs
) -> None:
    examples = made(write_rows(tmp_path / "x.jsonl", ROWS), chatml)
    assert len(examples) == 30 and len(examples.ids) == examples.index["end"][-1]
    labelled = chatml.label([talk(f"q{i}?", f"a{i}", "b?", "c" * i + "!") for i in range(30)])
    for i, one in enumerate(labelled):
        assert isinstance(one, Labelled)
        ids, scored = examples.of(i)
        end = chatml.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert ids[-1] == end and one.ids.tolist() == [
            *ids.tolist(),
            one.ids[-1],
        ]  # the line end behind is left out
        assert scored.tolist() == one.scored[:-1].tolist()
        assert examples.index["scored"][i] == scored.sum() and examples.positions[i] == len(ids) - 1
        assert examples.place(i) == f"{tmp_path}/x.jsonl:{i + 1}"
    assert examples.report == ("30 rows: 30 of the shape messages",)


def labelled(text: str) -> Labelled:
    """x: scored."""
    return Labelled(np.arange(len(text)), np.array([letter == "x" for letter in text]))


@pytest.mark.parametrize(
    ("text", "kept", "notes"),
    [
        ("--xx", "--xx", {}),
        ("--xx-xx-", "--xx-xx", {}),  # 7 tokens fit into SEQ_LEN=6
        ("--xx---", "--xx", {}),
        ("--xxxxxx", "--xxxxx", {"longer": 1, "truncated": 1}),
        ("--xx----", "--xx", {}),  # what is longer is told to nobody
        ("--xx----xx-xx", "--xx", {"longer": 1, "lost": 2}),
        ("--xx--xxx-xx", "--xx--x", {"longer": 1, "truncated": 1, "lost": 1}),
        ("--xx--x-xx", "--xx--x", {"longer": 1, "lost": 1}),
        ("--xx---xx", "--xx", {"longer": 1, "lost": 1}),
        ("xxx", "-xx", {}),  # nothing tells the first
    ],
)
def test_cut_by_hand(text: str, kept: str, notes: dict[str, int]) -> None:
    found = cut(labelled(text), "f:1", tally := Tally(), 6)
    assert isinstance(found, Labelled)
    assert (
        found.ids.tolist() == list(range(len(kept)))
        and found.scored.tolist() == labelled(kept).scored.tolist()
    )
    assert tally.notes == notes and all(tally.first[note] == ["f:1"] for note in notes)


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("----", Bad("nothing", "4 tokens")),
        ("x---", Bad("nothing", "4 tokens")),
        ("-------xx", Bad("cut", "9 tokens, the first scored one is number 8")),
    ],
)
def test_what_has_no_scored_token_left_is_dropped(text: str, bad: Bad) -> None:
    assert cut(labelled(text), "f:1", tally := Tally(), 6) == bad
    assert not tally.notes


def test_all_that_is_lost_is_counted_and_named(tmp_path: Path, chatml: Theirs) -> None:
    path = write_rows(
        tmp_path / "x.jsonl",
        [*ROWS[:3], row("q?", "a" * 99), row("q" * 99, "a"), row("a"), row("<|im_end|>", "a")],
    )
    examples = made(path, chatml)
    assert len(examples) == 4 and examples.positions[3] == 64
    assert examples.report == (
        "7 rows: 6 of the shape messages",
        f"1 conversations longer than SEQ_LEN, cut at their end ({path}:4)",
        f"1 answers cut through by SEQ_LEN: scored as far as they go, without their end ({path}:4)",
        f"dropped 1: {SENTENCES['no assistant']}",
        f"  {path}:6: 1 messages: user",
        f"dropped 1: {SENTENCES['cut']}",
        examples.report[6],
        f"dropped 1: {SENTENCES['spells']}",
        f"  {path}:7: message 1 has '<|im_end|>'",
    )
    assert examples.report[6].startswith(f"  {path}:5: ")
    (line,) = [line for line in made(path, theirs(THINKS)).report if "answers not scored" in line]
    assert line.startswith("3 answers not scored, since the chat template writes them otherwise")


def test_data_of_which_nothing_is_left_is_refused(tmp_path: Path, chatml: Theirs) -> None:
    path = write_rows(tmp_path / "x.jsonl", [row("q" * 99, "a")])
    with pytest.raises(
        CorpusError, match=r"1 of 1 rows had to be dropped.* or raise SEQ_LEN(.|\n)*x\.jsonl:1"
    ):
        made(path, chatml)
    assert not [one for one in (tmp_path / "data" / "finetune").iterdir() if one.is_dir()]


# ---- Once


def labelling(t: Theirs, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many conversations each call labels, from now on."""
    calls: list[int] = []
    label = t.label
    monkeypatch.setattr(t, "label", lambda talks: calls.append(len(talks)) or label(talks))
    return calls


def test_what_was_made_is_found_again_and_what_decides_it_makes_it_anew(
    tmp_path: Path, chatml: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    first, calls = made(path, chatml), labelling(chatml, monkeypatch)
    again = made(path, chatml)
    assert again.key == first.key and not calls
    assert all(
        np.array_equal(getattr(again, name), getattr(first, name))
        for name in ("ids", "scored", "index")
    )
    assert again.report == first.report
    moved = path.rename(tmp_path / "y.jsonl")
    assert made(moved, chatml).key == first.key and not calls
    keys = {first.key, made(moved, chatml, 63).key, made(moved, theirs(THINKS)).key}
    write_rows(moved, ROWS[:-1])
    assert len({*keys, made(moved, chatml).key}) == 4 and calls == [30, 29]


def test_nothing_of_it_is_in_memory(tmp_path: Path, chatml: Theirs) -> None:
    examples = made(write_rows(tmp_path / "x.jsonl", ROWS), chatml)
    assert all(
        isinstance(values, np.memmap) for values in (examples.ids, examples.scored, examples.index)
    )
    assert examples.ids.dtype == np.uint16 and not examples.ids.flags.writeable


def test_batches_of_rows_give_what_one_gives(
    tmp_path: Path, chatml: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "x.jsonl", [*ROWS, row("a"), *ROWS])
    whole = made(path, chatml)
    monkeypatch.setattr(store, "BATCH", 7)
    parts = examples_of(str(path), chatml, 64, tmp_path / "other")
    assert all(
        np.array_equal(getattr(whole, name), getattr(parts, name))
        for name in ("ids", "scored", "index")
    )


@pytest.mark.parametrize("name", ["ids.bin", "scored.bin", "index.bin", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "short", "empty", "gone"])
def test_what_is_damaged_is_made_again(
    tmp_path: Path,
    chatml: Theirs,
    name: str,
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    first = made(path, chatml)
    ids = np.array(first.ids)
    file = tmp_path / "data" / "finetune" / first.key / name
    content = file.read_bytes()
    file.unlink()
    if how != "gone":
        bad = {
            "flipped": bytes([content[0] ^ 4]) + content[1:],
            "short": content[:-8],
            "empty": b"",
        }[how]
        file.write_bytes(bad)
    calls = labelling(chatml, monkeypatch)
    with caplog.at_level(logging.WARNING):
        again = made(path, chatml)
    assert calls == [30] and np.array_equal(again.ids, ids) and file.read_bytes() == content
    assert ("damaged" in caplog.text) == (how != "gone")


def test_what_fails_midway_leaves_nothing_and_clears_what_a_killed_one_left(
    tmp_path: Path, chatml: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    folder = tmp_path / "data" / "finetune"
    label, times = chatml.label, iter(range(9))

    def fail(talks: Any) -> Any:
        if next(times) == 2:
            raise OSError(28, "No space left on device")
        return label(talks)

    monkeypatch.setattr(store, "BATCH", 7)
    monkeypatch.setattr(chatml, "label", fail)
    with pytest.raises(
        CorpusError, match=r"No space left on device.*make room there.* or set another DATA_DIR"
    ):
        made(path, chatml)
    assert not [one for one in folder.iterdir() if one.is_dir()]
    monkeypatch.setattr(chatml, "label", label)
    first = made(path, chatml)
    (folder / first.key).rename(
        folder / f".{first.key}-12345678"
    )  # as a kill just before the rename leaves it
    assert made(path, chatml).key == first.key
    assert [one.name for one in folder.iterdir() if one.is_dir()] == [first.key]


def test_the_manifest_says_what_it_is(tmp_path: Path, chatml: Theirs) -> None:
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    first = made(path, chatml)
    about = json.loads((tmp_path / "data" / "finetune" / first.key / "manifest.json").read_text())
    assert (about["template"], about["seq_len"], about["examples"]) == ("a-model", 64, 30)
    assert about["sources"] == [str(path)]
