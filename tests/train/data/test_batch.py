"""Batches against slices of the shards' files, read without any code of ours."""

import collections
import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from settings.config import Config
from tests.shard_folder import write_source
from train.data import prepare
from train.data.batch import Loader
from train.data.manifest import DataError
from train.data.mixture import Gap, NotSealed, sample_range
from train.data.shards import ShardSet
from train.distributed.world import World

END = 3  # no token of the test data


@pytest.fixture
def open_loader(tiny, data):
    """Opens the text of the session, as one of several processes and with other settings."""
    c = dataclasses.replace(tiny, data_dir=data["DATA_DIR"], tokenizer=data["TOKENIZER"])
    sources = prepare.open_sources(c, prepare.vocabulary(c))

    def open_one(rank=0, size=1, end_of_text=END, **settings):
        world = World(rank, rank, 0, size, torch.device("cpu"), "CPU", "here")
        return Loader(dataclasses.replace(c, **settings), sources, world, end_of_text)

    return open_one


def tokens_of(*batches):
    return torch.cat([part[0] for batch in batches for part in batch.micro_batches])


def test_a_window_is_a_slice_of_the_file_and_its_targets_the_next_tokens(open_loader):
    loader = open_loader()
    c, batch = loader.config, loader.batch(3)
    tokens = tokens_of(batch)
    targets = torch.cat([pair[1] for pair in batch.micro_batches])
    assert tokens.shape == targets.shape == (c.batch_windows, c.seq_len)
    assert batch.scored == c.batch_tokens
    assert batch.samples == range(3 * c.batch_windows, 4 * c.batch_windows)
    for row, name in enumerate(loader.names(list(batch.samples))):
        _, _, file, window = name.split(":")
        whole = np.fromfile(Path(loader.sources[0].folder) / file, dtype="<u2")
        begin = 128 + int(window.removeprefix("window ")) * c.seq_len  # 256 bytes of header
        assert tokens[row].tolist() == whole[begin : begin + c.seq_len].tolist()
        assert targets[row].tolist() == whole[begin + 1 : begin + c.seq_len + 1].tolist()


@pytest.mark.parametrize("doc_mask", [False, True])
def test_a_blank_micro_batch_has_the_shape_of_all_and_reads_no_shard(
    open_loader, monkeypatch, doc_mask
):
    loader = open_loader(doc_mask=doc_mask)
    shapes = [(t.shape, t.dtype, t.stride()) for t in loader.batch(0).micro_batches[0]]
    monkeypatch.setattr(ShardSet, "read", lambda *_: pytest.fail("a shard was read"))
    assert [(t.shape, t.dtype, t.stride()) for t in loader.blank()] == shapes


@pytest.mark.parametrize(
    ("sites", "size", "micro"), [(1, 1, 16), (1, 2, 4), (1, 4, 1), (1, 16, 4), (2, 2, 2)]
)
def test_all_processes_together_read_the_same_batch_whatever_they_read_before(
    open_loader, sites, size, micro
):
    whole = open_loader()
    loaders = [
        open_loader(
            rank, size, sync="diloco", sites=sites, nodes=sites, node_rank=k, micro_batch_size=micro
        )
        for k in range(sites)
        for rank in range(size)
    ]
    for step in (5, 19, 3, 0):
        parts = [loader.batch(step) for loader in loaders]
        assert torch.equal(tokens_of(whole.batch(step)), tokens_of(*parts))
        assert all(part.scored == whole.config.batch_tokens // sites for part in parts)
        windows = min(micro, whole.config.batch_windows // size // sites)
        assert {len(part[0]) for batch in parts for part in batch.micro_batches} == {windows}


@pytest.mark.parametrize(("size", "micro"), [(1, 16), (2, 3)])
def test_bounds_are_those_of_the_documents_in_each_micro_batch(open_loader, size, micro):
    often = int(tokens_of(open_loader().batch(2)).flatten().mode().values)
    loaders = [
        open_loader(rank, size, often, doc_mask=True, micro_batch_size=micro)
        for rank in range(size)
    ]
    inner = 0
    for tokens, _, bounds in (part for each in loaders for part in each.batch(2).micro_batches):
        begins = tokens == often
        begins[:, 0] = True
        starts = begins.flatten().nonzero().flatten().tolist()
        inner += len(starts) - len(tokens)
        assert bounds.dtype == torch.int32 and bounds[: len(starts)].tolist() == starts
        assert set(bounds[len(starts) :].tolist()) == {tokens.numel()}
    assert inner > 5  # documents that begin inside a window


# ---- Two sources, of which one may still be made

T = 8
SIZES = {"a": [40, 52, 33, 90, 41, 60, 70, 44], "b": [120, 48]}  # tokens of each shard
WINDOWS = {name: sum((size - 1) // T for size in sizes) for name, sizes in SIZES.items()}
GROUPS = {"a": [[0], [1], [2, 3], [4, 5, 6, 7]], "b": [[0], [1]]}
SHA = hashlib.sha256(b"a tokenizer").hexdigest()


def write_two(folder, made, end, spoilt=None):
    """Sources a, of which so many shards are made, and b. spoilt: a shard of a that has other tokens."""
    for name, sizes in SIZES.items():
        is_growing = name == "a"
        shards = []
        for k, size in enumerate(sizes[: made if is_growing else None]):
            ids = (np.arange(size) * 7919 + 13 * k + (is_growing and k == spoilt)) % 500
            shards.append((ids, 1, size))
        end_of_source = end if is_growing else "all"
        write_source(folder / name, shards, [], SHA, shard_tokens=30, end=end_of_source)


def open_two(folder, made=8, end="all", spoilt=None, partial=True):
    """Batches are of 8 windows of 8 tokens: 6 of a, 2 of b."""
    write_two(folder, made, end, spoilt)
    c = dataclasses.replace(
        Config(), data_mix="a:3,b:1", seq_len=T, batch_tokens=8 * T, micro_batch_size=8
    )
    sources = {name: ShardSet(folder / name, partial) for name in SIZES}
    return Loader(c, sources, World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here"), END)


def shards_of(loader, samples):
    """Source and shard of each sample."""
    found = []
    for name in loader.names(samples) if samples else []:
        source, _, file, _ = name.split(":")
        found.append((source, int(file[6:11])))
    return found


GAPS = [(), (Gap(3, 8),), (Gap(9, 1), Gap(0, 5), Gap(4, 16), Gap(4, 3))]


@pytest.mark.parametrize("gaps", GAPS)
def test_shares_and_counts_are_those_of_the_samples_that_were_trained_on(tmp_path, gaps):
    loader = open_two(tmp_path)
    for step in (0, 1, 3, 4, 5, 9, 10, 40):
        samples = [i for s in range(step) for i in sample_range(s, 8, gaps=gaps)]
        seen = collections.Counter(source for source, _ in shards_of(loader, samples))
        assert loader.trained(step, gaps) == {name: seen[name] for name in SIZES}
        assert loader.shares(step, gaps) == {
            name: {
                "tokens": seen[name] * T,
                "share": seen[name] / max(1, len(samples)),
                "epochs": seen[name] / WINDOWS[name],
            }
            for name in SIZES
        }
        passed = range(sample_range(step, 8, gaps=gaps).start)
        past = collections.Counter(source for source, _ in shards_of(loader, passed))
        assert loader.consumed(step, gaps) == {name: past[name] for name in SIZES}


def test_batches_of_a_source_that_grows_are_those_of_the_finished_one(tmp_path):
    """Each as soon as its groups are whole, and until then the source is named and has no number of epochs."""
    finished, steps = open_two(tmp_path / "whole"), 30
    loader, step, reached = open_two(tmp_path / "growing", 1, None), 0, []
    for made, end in [*((k, None) for k in range(1, 9)), (8, "all")]:
        write_two(tmp_path / "growing", made, end)
        while step < steps and not (missing := loader.missing(step, ())):
            assert torch.equal(tokens_of(loader.batch(step)), tokens_of(finished.batch(step)))
            step += 1
        assert (loader.shares(1, ())["a"]["epochs"] == 0) is (step < steps)
        if step < steps:
            assert missing == "a"
            with pytest.raises(NotSealed):
                loader.batch(step)
        reached.append(step)
    assert reached == sorted(reached) and len(set(reached)) > 3 and reached[-1] == steps


@pytest.mark.parametrize("gaps", GAPS)
def test_a_step_waits_for_deleted_shards_of_its_own_groups_only(tmp_path, gaps):
    loader = open_two(tmp_path)
    for name, gone in (("a", 0), ("a", 2), ("a", 7), ("b", 1)):
        path = tmp_path / name / f"train_{gone:05d}.bin"
        content = path.read_bytes()
        path.unlink()
        (group,) = (group for group in GROUPS[name] if gone in group)
        for step in range(12):
            used = shards_of(loader, sample_range(step, 8, gaps=gaps))
            is_needed = any((name, shard) in used for shard in group)
            assert loader.missing(step, gaps) == (name if is_needed else "")
        path.write_bytes(content)
        assert not any(loader.missing(step, gaps) for step in range(12))


def test_a_shard_that_is_missing_where_all_should_be_there_is_an_error_and_no_wait(tmp_path):
    loader = open_two(tmp_path, partial=False)
    (tmp_path / "a" / "train_00000.bin").unlink()
    assert loader.missing(0, ()) == ""
    batch = loader.batch(0)
    assert isinstance(batch.problem, DataError) and math.isnan(batch.scored)
    assert "train_00000.bin: cannot be read" in str(batch.problem)
    assert len(tokens_of(batch)) == len(batch.samples)


def gap_before(loader, windows):
    """A gap at the start after which that many windows of a are taken."""
    return next(
        (gap,)
        for gap in (Gap(0, n) for n in range(100))
        if loader.consumed(0, (gap,))["a"] == windows
    )


@pytest.mark.parametrize(
    ("windows", "number"),
    [(0, 0), (1, 1), (4, 1), (5, 2), (10, 2), (11, 4), (25, 4), (26, 8), (WINDOWS["a"] - 1, 8)],
)
def test_what_was_opened_may_have_more_behind_it_and_may_not_have_changed(
    tmp_path, windows, number
):
    """A group is fixed once its first window was read. Until then, more shards may change it."""
    loader = open_two(tmp_path / "then")
    gaps = gap_before(loader, windows)
    opened = json.loads(json.dumps(loader.opened(0, gaps)))  # as a checkpoint keeps it
    assert opened["a"]["shards"] == number and not opened["a"]["round"]
    for spoilt in range(8):
        other = open_two(tmp_path / "changed", spoilt=spoilt)
        assert other.differs(opened, 0, gaps) == ("a" if spoilt < number else "")
    fewer = open_two(tmp_path / "fewer", max(1, number), None)
    assert fewer.differs(opened, 0, gaps) == ""


def test_a_manifest_may_get_a_hash_and_may_not_lose_it(tmp_path):
    """Those of schema 2 have none: an edited manifest would pass as one of them."""
    hashed = open_two(tmp_path)
    opened = json.loads(json.dumps(hashed.opened(0, ())))
    path = tmp_path / "a" / "manifest.json"
    manifest = json.loads(path.read_text()) | {"schema": 2}
    del manifest["hash"]
    path.write_text(json.dumps(manifest))
    sources = {name: ShardSet(tmp_path / name, partial=True) for name in SIZES}
    bare = Loader(hashed.config, sources, hashed.world, END)
    assert bare.differs(opened, 0, ()) == "a"
    without = bare.opened(0, ())
    assert bare.differs(without, 0, ()) == hashed.differs(without, 0, ()) == ""


@pytest.mark.parametrize(
    ("step", "gaps", "number", "fits"),
    [
        (4, (), 4, {4, 5, 6, 8}),
        (4, (Gap(4, 3),), 5, {5}),
        (5, (), 5, {5}),
        (10, (), 5, {5}),
    ],
)
def test_an_epoch_that_ended_holds_the_source_to_the_shards_that_it_had(
    tmp_path, step, gaps, number, fits
):
    """Its second epoch is another with more of them, and so is a last group that was cut short."""
    opened = open_two(tmp_path / "then", 5, "limit").opened(step, gaps)
    assert (opened["a"]["shards"], opened["a"]["round"]) == (number, step >= 5)
    for made in (4, 5, 6, 8):
        other = open_two(tmp_path / f"{made}", made, "limit")
        assert (other.differs(opened, step, gaps) == "") is (made in fits)


def test_shards_of_the_open_and_the_next_group_are_opened_ahead_and_no_others(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("train.data.batch.LOOK_AHEAD", 8)
    loader = open_two(tmp_path)
    kept = []
    monkeypatch.setattr(loader.sources[0], "keep_open", kept.append)
    for step in range(10):
        samples = loader.samples(step, ())
        used = {shard for source, shard in shards_of(loader, samples) if source == "a"}
        loader.locate(step, samples, ())
        group = loader.mixture.orders[0].turn_of(6 * (step + 1)) % 4
        ahead = {*GROUPS["a"][group], *GROUPS["a"][(group + 1) % 4]}
        assert set(kept[-1]) == used | ahead
