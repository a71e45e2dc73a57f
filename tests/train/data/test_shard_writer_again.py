"""train/data/shard_writer.py where it goes on: limits raised, killed at every write, shards made again; the same bytes."""

import collections
import dataclasses
import itertools
import json
import math
import shutil
from functools import partial

import pytest

from tests.killing import killed_at
from tests.train.data.test_shard_writer import (
    REASONS,
    check,
    content,
    expected,
    make,
    maker,
    papers,
    rows,
    v,
)
from train.data import shard_writer, tokenizer
from train.data.document_index import index_path
from train.data.manifest import DataError
from train.data.sources.rows import Document, documents

__all__ = ["papers", "v"]  # fixtures


# ---- Limits


def limits(v):
    """Limits one after another; some are where a shard ends anyway, or one token off, or behind the last document."""
    ends = list(itertools.accumulate(len(seal.ids["train"]) for seal in expected(v)))
    return [
        [1000, 2000],
        [1, 2, 3, 500, 501, 799, 800, 801],
        [ends[0]],
        [ends[0] - 1, ends[0], ends[0] + 1],
        [ends[1], ends[2]],
        [ends[-1]],
        [ends[-1] + 1],
        [ends[-2]],
        [],
    ]


@pytest.mark.parametrize("number", range(9))
def test_limits_raised_step_by_step_give_what_is_made_at_once(papers, v, tmp_path, number):
    make(papers, v, tmp_path / "once")
    for limit in limits(v)[number]:
        made = make(papers, v, tmp_path / "made", limit)
        check(tmp_path / "made", v, limit)
        assert made.end == (
            "limit" if limit <= sum(len(seal.ids["train"]) for seal in expected(v)) else "all"
        )
        before = content(tmp_path / "made")
        make(papers, v, tmp_path / "made", limit)
        make(papers, v, tmp_path / "made", limit - 1)  # what is there is enough
        assert content(tmp_path / "made") == before
        make(papers, v, tmp_path / f"fresh {limit}", limit)
        assert content(tmp_path / f"fresh {limit}") == before
    make(papers, v, tmp_path / "made")
    assert content(tmp_path / "made") == content(tmp_path / "once")


def test_a_limit_that_is_raised_leaves_whole_shards_as_they_are(papers, v, tmp_path):
    """Also where it fell on the end of one."""
    ends = list(itertools.accumulate(len(seal.ids["train"]) for seal in expected(v)))
    for limit, whole in (
        (ends[1], 2),
        (ends[1] + 1, 2),
        (ends[2] - 1, 3),
    ):  # the last document reaches it
        folder = tmp_path / f"{limit}"
        made = make(papers, v, folder, limit)
        kept = [info.file for seal in made.seals[:whole] for info in seal.infos()]
        before = [(folder / name).stat().st_ino for name in kept]
        make(papers, v, folder)
        assert [(folder / name).stat().st_ino for name in kept] == before
        check(folder, v)


def test_a_limit_that_was_lowered_below_what_is_sealed_ends_there(papers, v, tmp_path):
    """As when a long preparation was stopped, and less will do."""
    first = maker(papers, v, tmp_path / "made")
    sealed = [seal for _, seal in zip(range(2), first.make(math.inf), strict=False)]
    made = make(papers, v, tmp_path / "made", 1000)
    assert made.seals == sealed and made.end == "limit"
    make(papers, v, tmp_path / "made")
    check(tmp_path / "made", v)


# ---- Killed


@pytest.mark.parametrize("first", [1000, 2000])
def test_killed_at_any_write_behind_a_raised_limit_it_ends_with_the_same_bytes(
    papers, v, tmp_path, first
):
    make(papers, v, tmp_path / "once")
    make(papers, v, tmp_path / "first", first)
    for point in itertools.count():
        folder = tmp_path / f"killed {point}"
        shutil.copytree(tmp_path / "first", folder)
        reached = killed_at(point, partial(make, papers, v, folder))
        make(papers, v, folder)
        assert content(folder) == content(tmp_path / "once"), point
        if not reached:
            break
    assert point > 10


def test_rows_left_out_are_counted_once_at_every_moment_of_it(papers, v, tmp_path):
    """The manifest as it stands behind each kill: what lies before its next row, no more and no less."""
    bad = [
        ((f, r), REASONS[row["text"]])
        for f, file in enumerate(rows())
        for r, row in enumerate(file)
        if row["text"] in REASONS
    ]
    seen = set()
    for point in itertools.count():
        folder = tmp_path / f"killed {point}"
        if not killed_at(point, partial(make, papers, v, folder)):
            break
        if (folder / "manifest.json").exists():
            manifest = json.loads((folder / "manifest.json").read_text())
            before = collections.Counter(
                reason for at, reason in bad if at < tuple(manifest["next"])
            )
            assert manifest["dropped"] == dict(before)
            assert (
                sum(
                    (collections.Counter(seal["dropped"]) for seal in manifest["seals"]),
                    collections.Counter(),
                )
                == before
            )
            seen.add(tuple(manifest["next"]))
    assert len(seen) >= 3


def test_sealed_documents_are_neither_read_nor_encoded_nor_written_again(
    papers, v, tmp_path, monkeypatch
):
    wanted = expected(v)
    first = maker(papers, v, tmp_path / "made")
    next(first.make(math.inf))
    read = []
    encoded = []
    written = []

    def watched(p, files, at):
        read.append(at)
        for item in documents(p, files, at):
            encoded.extend([item.text] if isinstance(item, Document) else [])
            yield item

    real = shard_writer.write_shard

    def write(path, *rest):
        written.append(path.name)
        return real(path, *rest)

    monkeypatch.setattr(shard_writer, "write_shard", write)
    make(papers, v, tmp_path / "made", read=watched)
    assert read == [wanted[1].begins] and read[0] > (0, 0)
    assert len(encoded) == sum(seal.documents for seal in wanted[1:])
    assert "train_00000.bin" not in written and len(written) == len(set(written)) == sum(
        bool(ids) for seal in wanted[1:] for ids in seal.ids.values()
    )
    read.clear()
    make(papers, v, tmp_path / "made", read=watched)
    assert read == []


# ---- Made again


def test_any_shard_that_was_deleted_is_made_again_to_the_byte(papers, v, tmp_path):
    made = make(papers, v, tmp_path / "made")
    before = content(tmp_path / "made")
    names = [info.file for seal in made.seals for info in seal.infos()]
    for gone in [*([name] for name in names), names[::2], names]:
        for name in gone:
            (tmp_path / "made" / name).unlink()
        again = maker(papers, v, tmp_path / "made")
        assert again.absent() == [
            k for k, seal in enumerate(made.seals) if {i.file for i in seal.infos()} & set(gone)
        ]
        make(papers, v, tmp_path / "made")
        assert content(tmp_path / "made") == before, gone


def test_making_a_shard_again_reads_no_more_than_its_stretch_and_leaves_the_others_alone(
    papers, v, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokenizer, "BATCH_BYTES", 1)
    made = make(papers, v, tmp_path / "made")
    (tmp_path / "made" / made.seals[1].infos()[0].file).unlink()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    del before[index_path(tmp_path / "made", made.seals[1].infos()[0]).name]
    drawn = []

    def watched(p, files, at):
        for item in documents(p, files, at):
            drawn.append(item.at)
            yield item

    make(papers, v, tmp_path / "made", read=watched)
    assert drawn[0] >= made.seals[1].begins
    assert (
        len(drawn) <= made.seals[1].documents + sum(made.seals[1].dropped.values()) + 4
    )  # two batches ahead
    assert {name: (tmp_path / "made" / name).stat().st_mtime_ns for name in before} == before


@pytest.mark.parametrize("gone", ["train", "validation"])
def test_a_shard_that_is_made_again_in_a_source_that_goes_on_leaves_nothing_behind_for_the_next(
    papers, v, tmp_path, gone
):
    first = maker(papers, v, tmp_path / "made")
    sealed = [seal for _, seal in zip(range(3), first.make(math.inf), strict=False)]
    k = next(k for k, seal in enumerate(sealed) if seal.validation)
    (tmp_path / "made" / getattr(sealed[k], gone).file).unlink()
    make(papers, v, tmp_path / "made")
    check(tmp_path / "made", v)


@pytest.mark.parametrize("gone", ["train", "validation"])
def test_a_shard_that_comes_out_otherwise_is_refused_and_not_left_there(papers, v, tmp_path, gone):
    made = make(papers, v, tmp_path / "made")
    k = next(k for k, seal in enumerate(made.seals) if seal.validation)
    path = tmp_path / "made" / getattr(made.seals[k], gone).file
    path.unlink()
    index_path(path.parent, getattr(made.seals[k], gone)).unlink()
    before = content(tmp_path / "made")
    other = tokenizer.train(
        (text[::-1] for file in rows() for row in file if (text := row["text"])),
        290,
        tmp_path / "other.json",
    )
    with pytest.raises(
        DataError,
        match=rf"{path.name} does not come out as it was .*delete {path.parent} .*make data",
    ):
        make(papers, dataclasses.replace(other, sha256=v.sha256), tmp_path / "made")
    assert content(tmp_path / "made") == before
