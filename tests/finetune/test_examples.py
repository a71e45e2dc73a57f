"""finetune/examples.py: examples as they should be by hand, made once, whole or not at all; held out."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune import examples as module
from finetune.batches import Batches
from finetune.chat_template import ChatTemplate, Labelled, hash_parts
from finetune.conversations import Tally
from finetune.examples import (
    INDEX,
    SENTENCES,
    Examples,
    Part,
    choose,
    cut_all,
    examples_of,
    hash_of,
    split,
)
from finetune.row_shapes import Conversation
from tests.finetune.making import CHATML, THINKS, chat_template, row, talk, write_rows
from train.data.sources.content import digest_of
from train.data.sources.formats import Bad
from train.data.sources.source import CorpusError

TALKS = [talk(f"q{i}?", f"a{i}", "b?", "c" * i + "!") for i in range(30)]
ROWS = [{"messages": messages} for messages in TALKS]
ARRAYS = ("ids.bin", "scored.bin", "index.bin")


@pytest.fixture(scope="module")
def chatml() -> ChatTemplate:
    return chat_template(CHATML)


def prepare(path: Path, template: ChatTemplate, seq_len: int = 64) -> Examples:
    return examples_of(str(path), template, seq_len, path.parent / "data" / "finetune")


def lists(examples: Examples) -> list[tuple[list[int], list[bool]]]:
    found = []
    for number in range(len(examples)):
        ids, scored = examples.example(number)
        found.append((ids.tolist(), scored.tolist()))
    return found


# ---- What an example is


def test_examples_are_conversations_up_to_their_last_scored_token(
    tmp_path: Path, chatml: ChatTemplate
) -> None:
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    examples = prepare(path, chatml)
    assert len(examples) == 30 and examples.report == ["30 rows: 30 of the shape messages"]
    labelled = chatml.label([Conversation(messages) for messages in TALKS])
    for number, made in enumerate(labelled):
        assert isinstance(made, list)
        ids, scored = examples.example(number)
        assert chatml.decode(ids[-1:]) == "<|im_end|>"  # the line end after it is left out
        assert ids.tolist() == made[0].ids[:-1].tolist()
        assert scored.tolist() == made[0].scored[:-1].tolist()
        assert examples.index["scored"][number] == scored.sum()
        assert examples.positions[number] == len(ids) - 1
        assert examples.place(number) == f"{path}:{number + 1}"


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
        ("--xx----", "--xx", {}),
        ("--xx----xx-xx", "--xx", {"longer": 1, "lost": 2}),
        ("--xx--xxx-xx", "--xx--x", {"longer": 1, "truncated": 1, "lost": 1}),
        ("--xx--x-xx", "--xx--x", {"longer": 1, "lost": 1}),
        ("--xx---xx", "--xx", {"longer": 1, "lost": 1}),
        ("xxx", "-xx", {}),  # the first token is not predicted
    ],
)
def test_cut_by_hand(text: str, kept: str, notes: dict[str, int]) -> None:
    found = cut_all([labelled(text)], "f:1", tally := Tally(), 6)
    assert isinstance(found, list)
    assert found[0].ids.tolist() == list(range(len(kept)))
    assert found[0].scored.tolist() == labelled(kept).scored.tolist()
    assert tally.notes == notes and all(tally.first[note] == ["f:1"] for note in notes)


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("----", Bad("nothing", "4 tokens")),
        ("x---", Bad("nothing", "4 tokens")),
        ("-------xx", Bad("cut", "9 tokens")),
    ],
)
def test_what_has_no_scored_token_left_is_dropped(text: str, bad: Bad) -> None:
    assert cut_all([labelled(text)], "f:1", tally := Tally(), 6) == bad
    assert not tally.notes


def test_everything_that_is_lost_is_counted_and_named(tmp_path: Path, chatml: ChatTemplate) -> None:
    path = write_rows(
        tmp_path / "x.jsonl",
        [*ROWS[:3], row("q?", "a" * 99), row("q" * 99, "a"), row("a"), row("<|im_end|>", "a")],
    )
    examples = prepare(path, chatml)
    assert len(examples) == 4 and examples.positions[3] == 64
    assert examples.report == [
        "7 rows: 6 of the shape messages",
        f"1 {SENTENCES['longer']} ({path}:4)",
        f"1 {SENTENCES['truncated']} ({path}:4)",
        f"dropped 1: {SENTENCES['no assistant']}",
        f"  {path}:6: 1 messages: user",
        f"dropped 1: {SENTENCES['cut']}",
        f"  {path}:5: 112 tokens",
        f"dropped 1: {SENTENCES['spells']}",
        f"  {path}:7: message 1 contains <|im_end|>",
    ]
    with pytest.raises(CorpusError, match=r"1 of 1 rows had to be dropped(.|\n)*Raise SEQ_LEN"):
        prepare(write_rows(tmp_path / "y.jsonl", [row("q" * 99, "a")]), chatml)


def test_each_rewritten_reply_is_an_example_of_the_same_conversation(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [*ROWS, row("q?", "a", "b?", "c" * 99)])
    examples = prepare(path, chat_template(THINKS))
    assert len(examples) == 62 and [examples.place(i) for i in (0, 1)] == [f"{path}:1"] * 2
    assert len(set(examples.index["hash"].tolist())) == 31
    parts = split(examples, 1, 2)
    assert len(parts.held_out) == 4 and len(parts.train) == 58 and parts.copies == 0
    assert parts.held_out[1] == parts.held_out[0] + 1
    (line,) = [line for line in examples.report if SENTENCES["longer"] in line]
    assert line.startswith("15 ")


# ---- Once


def count_labels(template: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many conversations each call labels from now on."""
    calls: list[int] = []
    label = template.label
    monkeypatch.setattr(template, "label", lambda rows: calls.append(len(rows)) or label(rows))
    return calls


def test_what_was_made_is_found_again_and_what_decides_it_makes_it_again(
    tmp_path: Path, chatml: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    first = prepare(path, chatml)
    calls = count_labels(chatml, monkeypatch)
    again = prepare(path, chatml)
    assert again.key == first.key and lists(again) == lists(first) and again.report == first.report
    moved = path.rename(tmp_path / "y.jsonl")
    assert prepare(moved, chatml).key == first.key and not calls
    keys = {first.key, prepare(moved, chatml, 63).key, prepare(moved, chat_template(THINKS)).key}
    write_rows(moved, ROWS[:-1])
    assert len({*keys, prepare(moved, chatml).key}) == 4 and calls == [30, 29]
    manifest = json.loads(
        (tmp_path / "data" / "finetune" / first.key / "manifest.json").read_text()
    )
    assert (manifest["template"], manifest["seq_len"], manifest["examples"]) == ("a-model", 64, 30)
    assert manifest["sources"] == [str(path)]


def test_tokens_are_not_in_memory(tmp_path: Path, chatml: ChatTemplate) -> None:
    (part,) = prepare(write_rows(tmp_path / "x.jsonl", ROWS), chatml).parts
    assert isinstance(part.ids, np.memmap) and isinstance(part.scored, np.memmap)
    assert part.ids.dtype == np.uint16 and not part.ids.flags.writeable


def test_batches_of_rows_give_what_one_gives(
    tmp_path: Path, chatml: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "x.jsonl", [*ROWS, row("a"), *ROWS])
    whole = prepare(path, chatml)
    monkeypatch.setattr(module, "BATCH", 7)
    batched = examples_of(str(path), chatml, 64, tmp_path / "other")
    assert lists(whole) == lists(batched) and np.array_equal(whole.index, batched.index)


@pytest.mark.parametrize("name", [*ARRAYS, "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "short", "empty", "gone"])
def test_what_is_damaged_is_made_again(
    tmp_path: Path, chatml: ChatTemplate, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    first = prepare(path, chatml)
    before = lists(first)
    file = tmp_path / "data" / "finetune" / first.key / name
    content = file.read_bytes()
    file.unlink()
    if how != "gone":
        flipped = bytes([content[0] ^ 4]) + content[1:]
        file.write_bytes({"flipped": flipped, "short": content[:-8], "empty": b""}[how])
    with caplog.at_level(logging.WARNING):
        again = prepare(path, chatml)
    assert lists(again) == before and file.read_bytes() == content
    assert ("damaged" in caplog.text) == (how != "gone")


def test_what_fails_midway_leaves_nothing_and_clears_what_a_killed_process_left(
    tmp_path: Path, chatml: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    folder = tmp_path / "data" / "finetune"
    label = chatml.label
    times = iter(range(9))

    def fail(rows: Any) -> Any:
        if next(times) == 2:
            raise OSError(28, "No space left on device")
        return label(rows)

    def folders() -> list[str]:
        return [entry.name for entry in folder.iterdir() if entry.is_dir()]

    monkeypatch.setattr(module, "BATCH", 7)
    monkeypatch.setattr(chatml, "label", fail)
    with pytest.raises(CorpusError, match=r"No space left on device.*set another DATA_DIR"):
        prepare(path, chatml)
    assert not folders()
    monkeypatch.setattr(chatml, "label", label)
    first = prepare(path, chatml)
    (folder / first.key).rename(folder / f".{first.key}-12345678")  # as a kill leaves it
    assert prepare(path, chatml).key == first.key and folders() == [first.key]


def test_a_run_of_version_0_2_0_continues_with_its_own_examples(
    tmp_path: Path, chatml: ChatTemplate
) -> None:
    """Their folder has a key of its own. A new run tokenizes again."""
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    folder = tmp_path / "data" / "finetune"
    first = prepare(path, chatml)
    tokenizer = chatml.tokenizer
    special = sorted(map(str, tokenizer.special_tokens_map.items()))
    parts = [1, "theirs", chatml.template, tokenizer.backend_tokenizer.to_str(), special]
    file = [path.stat().st_size, digest_of(path, "xxh3")]
    older = hash_parts(1, 1, [file], hash_parts(*parts), 64)[:16]
    (folder / first.key).rename(folder / older)
    manifest = folder / older / "manifest.json"
    manifest.write_text(manifest.read_text().replace(first.key, older))
    stored = examples_of(str(path), chatml, 64, folder, stored_key=older[:12])
    assert stored.key == older and not (folder / first.key).exists()
    assert examples_of(str(path), chatml, 64, folder, stored_key="0" * 12).key == first.key


# ---- Several sources


def test_several_sources_are_trained_on_as_one_file_with_all_their_rows(
    tmp_path: Path, chatml: ChatTemplate
) -> None:
    folder = tmp_path / "data"
    a, b, both = (
        str(write_rows(tmp_path / f"{number}.jsonl", rows))
        for number, rows in enumerate([ROWS, ROWS[:7], [*ROWS, *ROWS[:7], *ROWS[:7]]])
    )
    several = examples_of(f"{a},{b}*2", chatml, 64, folder)
    one = examples_of(both, chatml, 64, folder)
    assert lists(several) == lists(one) and len(one) == 44
    assert [several.place(i) for i in (29, 30, 37)] == [f"{a}:30", f"{b}:1", f"{b}:1"]
    steps = [Batches(it, np.arange(44), 64, 4, 2, 7, 1).step(3) for it in (several, one)]
    for left, right in zip(steps[0].micro_batches, steps[1].micro_batches, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(left, right, strict=True))
    assert several.report == [
        f"{a}: 30 rows: 30 of the shape messages",
        f"{b}, counted 2 times: 7 rows: 7 of the shape messages",
    ]
    others = [f"{b},{a}", f"{a},{b}", a, f"{a}*2"]
    assert len({several.key, *(examples_of(it, chatml, 64, folder).key for it in others)}) == 5


# ---- Held out

HASHES = np.array([hash_of(Conversation(talk(f"q{i}?", "a"))) for i in range(300)], dtype=np.uint64)


def of_hashes(hashes: np.ndarray) -> Examples:
    index = np.zeros(len(hashes), dtype=INDEX)
    index["hash"] = hashes
    index["row"] = np.arange(len(hashes))
    return Examples([Part(hashes[:0], hashes[:0], index, (), (), "")], [])


def test_the_choice_is_that_of_the_hashes_whatever_their_order_and_company() -> None:
    chosen = set(HASHES[choose(HASHES, 1, 20)].tolist())
    assert len(chosen) == 20
    order = list(range(300))
    random.Random(1).shuffle(order)
    assert set(HASHES[order][choose(HASHES[order], 1, 20)].tolist()) == chosen
    more = np.concatenate([HASHES, HASHES[:50]])
    assert choose(more, 1, 20).tolist() == choose(HASHES, 1, 20).tolist()
    fewer = set(HASHES[:150][choose(HASHES[:150], 1, 20)].tolist())
    assert chosen & set(HASHES[:150].tolist()) <= fewer  # those that are still there
    assert set(HASHES[choose(HASHES, 2, 20)].tolist()) != chosen
    assert choose(HASHES, 1, None).tolist() == list(range(300))
    places = choose(HASHES, 1, 100)  # and no part of the file by place
    assert abs(places.mean() - 149.5) < 30 and (places < 150).sum() > 25


def test_held_out_is_not_trained_on_and_neither_are_its_copies() -> None:
    hashes = np.concatenate([HASHES, HASHES])
    parts = split(of_hashes(hashes), 1, 20)
    assert (len(parts.held_out), parts.copies, len(parts.train)) == (20, 20, 560)
    assert not set(hashes[parts.train].tolist()) & set(hashes[parts.held_out].tolist())


def test_at_most_a_tenth_of_what_differs_is_held_out() -> None:
    for hashes, held_out in [(HASHES, 30), (HASHES[:9], 0), (np.repeat(HASHES[:10], 30), 1)]:
        assert len(split(of_hashes(hashes), 1, 200).held_out) == held_out


def test_with_other_data_to_evaluate_with_only_its_copies_are_left_out() -> None:
    parts = split(of_hashes(HASHES), 1, 20, beside=of_hashes(HASHES[10:15]))
    assert (len(parts.held_out), parts.copies) == (0, 5)
    assert parts.train.tolist() == [*range(10), *range(15, 300)]


def test_what_is_said_decides_the_hash() -> None:
    said = [
        Conversation(talk("a", "b")),
        Conversation(talk("a", "c")),
        Conversation(talk("ab", "")),
        Conversation(talk("a", "b", system="s")),
        Conversation(talk("a", "b"), tools=[{"name": "f"}]),
        Conversation([*talk("a", "b")[:1], {**talk("a", "b")[1], "reasoning_content": "c"}]),
    ]
    assert len({hash_of(it) for it in said}) == len(said)
    assert hash_of(said[0]) == 4441407330897016289  # as in 0.2.0, whose runs continue
