"""Several sources in one DATA: as if their rows stood in one file, those of a source with *2 twice."""

from pathlib import Path

import numpy as np
import pytest

from finetune import several, store
from finetune.batches import Batches
from tests.finetune.making import CHATML, row, theirs, write_rows
from train.data.sources.source import CorpusError


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    rows = {
        "a": [row(f"Is {i}?", "It is so.") for i in range(30)],
        "b": [row("Why?", f"I know {i}.") for i in range(7)],
    }
    rows["both"] = [*rows["a"], *rows["b"], *rows["b"]]
    return {name: write_rows(tmp_path / f"{name}.jsonl", own) for name, own in rows.items()}


def test_several_are_trained_on_as_one_file_with_all_their_rows(
    files: dict[str, Path], tmp_path: Path
) -> None:
    t, folder = theirs(CHATML), tmp_path / "data"
    made = several.examples_of(f"{files['a']},{files['b']}*2", t, 64, folder)
    one = store.examples_of(str(files["both"]), t, 64, folder)
    assert len(made) == len(one) == 44
    for i in range(44):
        assert all(np.array_equal(x, y) for x, y in zip(made.of(i), one.of(i), strict=True))
    assert (
        made.place(29) == f"{files['a']}:30"
        and made.place(30) == made.place(37) == f"{files['b']}:1"
    )
    both = [Batches(examples, np.arange(44), 64, 4, 2, 7, 1) for examples in (made, one)]
    assert both[0].steps == both[1].steps > 2
    for step in range(both[0].steps):
        x, y = (batches.step(step) for batches in both)
        assert x.scored == y.scored
        assert all(
            np.array_equal(p, q)
            for left, right in zip(x.micro_batches, y.micro_batches, strict=True)
            for p, q in zip(left, right, strict=True)
        )
    assert made.report == (
        f"{files['a']}: 30 rows: 30 of the shape messages",
        f"{files['b']}, counted 2 times: 7 rows: 7 of the shape messages",
    )


def test_what_is_there_decides_the_key_and_a_single_source_is_itself(
    files: dict[str, Path], tmp_path: Path
) -> None:
    t, folder, names = theirs(CHATML), tmp_path / "data", [str(files[name]) for name in ("a", "b")]
    keys = {
        several.examples_of(data, t, 64, folder).key
        for data in (
            ",".join(names),
            ",".join(reversed(names)),
            f"{names[0]},{names[1]}*2",
            names[0],
            f"{names[0]}*2",
        )
    }
    assert len(keys) == 5
    assert (
        several.examples_of(names[0], t, 64, folder).key
        == store.examples_of(names[0], t, 64, folder).key
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("a.jsonl,", "'' is none of the sources"),
        ("a.jsonl*0,b.jsonl", "'a.jsonl[*]0' is none of the sources"),
        ("a.jsonl*1000", "TIMES from 1 to 100"),
        ("a.jsonl,b.jsonl,a.jsonl*3", "has a.jsonl twice; a.jsonl[*]2 says"),
    ],
)
def test_what_is_no_list_of_sources_is_refused(data: str, words: str) -> None:
    with pytest.raises(CorpusError, match=f"MID_DATA=.*{words}"):
        several.sources_in(data, "MID_DATA")


def test_a_file_with_a_comma_in_its_name_is_a_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a,b*2", [row("Is it?", "It is.")])
    assert several.sources_in(str(path)) == [(str(path), 1)]


def test_a_list_longer_than_a_name_may_be_is_a_list() -> None:
    names = [f"conversations_of_{i}.jsonl" for i in range(40)]
    assert several.sources_in(",".join(names)) == [(name, 1) for name in names]
