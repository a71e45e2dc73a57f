"""Batches against slices of the shards' files, read without any code of ours."""

import collections
import dataclasses
import hashlib
import json
import math
import re
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


def world(rank=0, size=1):
    return World(rank, rank, 0, size, torch.device("cpu"), "CPU", "here")


@pytest.fixture
def opened(tiny, data):
    c = dataclasses.replace(tiny, data_dir=data["DATA_DIR"], tokenizer=data["TOKENIZER"])
    return c, prepare.open_sources(c, prepare.vocabulary(c))


def test_a_window_is_a_slice_of_the_file_and_its_targets_the_next_tokens(opened):
    c, sources = opened
    loader = Loader(c, sources, world(), END)
    batch = loader.batch(3)
    tokens = torch.cat([pair[0] for pair in batch.micro_batches])
    targets = torch.cat([pair[1] for pair in batch.micro_batches])
    assert tokens.shape == targets.shape == (c.batch_windows, c.seq_len)
    assert batch.scored == c.batch_tokens and batch.samples == range(
        3 * c.batch_windows, 4 * c.batch_windows
    )
    for row, name in enumerate(loader.names(list(batch.samples))):
        _, _, file, window = name.split(":")
        whole = np.fromfile(Path(sources["python-stdlib"].folder) / file, dtype="<u2")[
            128:
        ]  # 256 bytes of header
        begin = int(window.removeprefix("window ")) * c.seq_len
        assert tokens[row].tolist() == whole[begin : begin + c.seq_len].tolist()
        assert targets[row].tolist() == whole[begin + 1 : begin + c.seq_len + 1].tolist()


@pytest.mark.parametrize("doc_mask", [False, True])
def test_a_blank_micro_batch_has_the_shape_of_all_and_reads_no_shard(opened, monkeypatch, doc_mask):
    c, sources = opened
    loader = Loader(dataclasses.replace(c, doc_mask=doc_mask), sources, world(), END)
    real = loader.batch(0).micro_batches[0]
    monkeypatch.setattr(
        type(sources["python-stdlib"]), "tokens", lambda *_: pytest.fail("a shard was read")
    )
    blank = loader.blank()
    assert [(part.shape, part.dtype, part.stride()) for part in blank] == [
        (part.shape, part.dtype, part.stride()) for part in real
    ]


@pytest.mark.parametrize(("size", "micro"), [(1, 16), (2, 4), (4, 1), (16, 4)])
def test_all_ranks_together_read_the_same_batch_in_the_same_order(opened, size, micro):
    c, sources = opened
    whole = torch.cat([t for t, _ in Loader(c, sources, world(), END).batch(5).micro_batches])
    parts = [
        Loader(
            dataclasses.replace(c, micro_batch_size=micro), sources, world(rank, size), END
        ).batch(5)
        for rank in range(size)
    ]
    assert torch.equal(whole, torch.cat([t for part in parts for t, _ in part.micro_batches]))
    assert all(part.scored == c.batch_tokens for part in parts)
    assert {len(t) for part in parts for t, _ in part.micro_batches} == {
        min(micro, c.batch_windows // size)
    }


def test_all_sites_together_read_the_batch_once_and_a_gap_of_one_is_no_other_sites_turn(
    opened,
):
    """Three sites, of which one has two processes a site; the second has passed over two steps at its third."""
    c, sources = opened
    c = dataclasses.replace(c, sync="diloco", sites=2, nodes=2, micro_batch_size=2)
    seen = []
    for site, gaps in ((0, ()), (1, (Gap(2, 2 * c.batch_windows),))):
        for rank in range(2):
            loader = Loader(dataclasses.replace(c, node_rank=site), sources, world(rank, 2), END)
            for step in range(6 - 2 * bool(gaps)):
                batch = loader.batch(step, gaps)
                assert (
                    batch.scored == c.batch_tokens // 2
                    and len(batch.samples) == c.batch_windows // 4
                )
                seen += batch.samples
    passed_over = {2, 3}
    of_second = [
        step * c.batch_windows + c.batch_windows // 2 + i
        for step in passed_over
        for i in range(c.batch_windows // 2)
    ]
    assert sorted(seen) == sorted(set(range(6 * c.batch_windows)) - set(of_second))


def test_steps_asked_for_in_any_order_give_the_same_batches(opened):
    c, sources = opened
    one, other = Loader(c, sources, world(), END), Loader(c, sources, world(), END)
    forward = {s: one.batch(s).micro_batches[0][0] for s in range(20)}
    for step in [19, 3, 7, 0]:
        assert torch.equal(other.batch(step).micro_batches[0][0], forward[step])


@pytest.mark.parametrize(("size", "micro"), [(1, 16), (2, 4), (2, 3)])
def test_bounds_are_those_of_the_documents_in_each_micro_batch(opened, size, micro):
    c, sources = opened
    c = dataclasses.replace(c, doc_mask=True, micro_batch_size=micro)
    whole = Loader(dataclasses.replace(c, doc_mask=False), sources, world(), END).batch(2)
    often = int(torch.cat([tokens for tokens, _ in whole.micro_batches]).flatten().mode().values)
    inner = 0
    for rank in range(size):
        loader = Loader(c, sources, world(rank, size), often)
        for tokens, _, bounds in loader.batch(2).micro_batches:
            flat = tokens.flatten().tolist()
            begins = [i for i, token in enumerate(flat) if token == often or i % c.seq_len == 0]
            inner += len(begins) - len(tokens)
            assert bounds.dtype == torch.int32
            assert bounds[: len(begins)].tolist() == begins
            assert len(bounds) > len(begins) and set(bounds[len(begins) :].tolist()) == {len(flat)}
    assert inner > 5  # documents that begin inside a window


# ---- Two sources, of which one may still be made

T = 8
SIZES = {"a": [40, 52, 33, 90, 41, 60, 70, 44], "b": [120, 48]}  # tokens of each shard
SHA = hashlib.sha256(b"a tokenizer").hexdigest()


def two(
    folder,
    made=8,
    end="all",
    partial=False,
    spoilt=None,
):
    """Sources a, of which so many shards are made, and b; batches are of 8 windows of 8 tokens. spoilt: a shard of a
    that has other tokens."""
    opened = {}
    for name, sizes in SIZES.items():
        number = made if name == "a" else len(sizes)
        shards = []
        for k, size in enumerate(sizes[:number]):
            ids = (np.arange(size) * 7919 + 13 * k + (k == spoilt) * (name == "a")) % 500
            shards.append((ids, 1, size))
        write_source(
            folder / name, shards, [], SHA, shard_tokens=30, end=end if name == "a" else "all"
        )
        opened[name] = ShardSet(folder / name, partial)
    c = dataclasses.replace(
        Config(),
        data_mix="a:3,b:1",
        seq_len=T,
        batch_tokens=8 * T,
        micro_batch_size=8,
    )
    return c, opened


GAPS = [(), (Gap(3, 8),), (Gap(0, 5), Gap(4, 16), Gap(4, 3), Gap(9, 1)), (Gap(9, 1), Gap(0, 5))]


def trained_samples(c, step, gaps):
    """Indices of all samples that the steps before `step` trained on."""
    return [i for s in range(step) for i in sample_range(s, c.batch_windows, gaps=gaps)]


@pytest.mark.parametrize("gaps", GAPS)
def test_shares_and_counts_are_those_of_the_samples_that_were_trained_on(tmp_path, gaps):
    c, sources = two(tmp_path)
    loader = Loader(c, sources, world(), END)
    windows = {name: sum((size - 1) // T for size in sizes) for name, sizes in SIZES.items()}
    for step in (0, 1, 3, 4, 5, 9, 10, 40):
        samples = trained_samples(c, step, gaps)
        names = [name.split(":")[0] for name in loader.names(samples)] if samples else []
        seen = collections.Counter(names)
        assert loader.trained(step, gaps) == {name: seen[name] for name in SIZES}
        assert loader.shares(step, gaps) == {
            name: {
                "tokens": seen[name] * T,
                "share": seen[name] / max(1, len(samples)),
                "epochs": seen[name] / windows[name],
            }
            for name in SIZES
        }
        passed = range(sample_range(step, c.batch_windows, gaps=gaps).start)
        past = (
            collections.Counter(name.split(":")[0] for name in loader.names(passed))
            if passed
            else {}
        )
        assert loader.taken(step, gaps) == {name: past.get(name, 0) for name in SIZES}


def test_a_source_that_is_still_being_made_has_no_number_of_epochs(tmp_path):
    c, sources = two(tmp_path, made=4, end=None, partial=True)
    shares = Loader(c, sources, world(), END).shares(1, ())
    assert (
        shares["a"] == {"tokens": 6 * T, "share": 0.75, "epochs": 0.0}
        and shares["b"]["epochs"] == 2 / 19
    )


def test_batches_of_a_source_that_grows_are_those_of_the_finished_one(tmp_path):
    """Each as soon as its groups are whole, and until then the source is named."""
    c, whole = two(tmp_path / "whole")
    finished, steps = Loader(c, whole, world(), END), 30
    expected = [finished.batch(step) for step in range(steps)]
    _, sources = two(tmp_path / "growing", made=1, end=None, partial=True)
    loader, step, reached = Loader(c, sources, world(), END), 0, []
    for made, end in [*((k, None) for k in range(1, 9)), (8, "all")]:
        two(tmp_path / "growing", made, end, partial=True)
        while step < steps and not (lacking := loader.lacking(step, ())):
            assert torch.equal(
                loader.batch(step).micro_batches[0][0], expected[step].micro_batches[0][0]
            )
            step += 1
        if step < steps:
            assert lacking == "a"
            with pytest.raises(NotSealed):
                loader.batch(step)
        reached.append(step)
    assert reached == sorted(reached) and len(set(reached)) > 3 and reached[-1] == steps


@pytest.mark.parametrize("gaps", GAPS)
def test_a_step_waits_for_deleted_shards_of_its_own_groups_only(tmp_path, gaps):
    c, sources = two(tmp_path, partial=True)
    loader = Loader(c, sources, world(), END)
    groups = {"a": [[0], [1], [2, 3], [4, 5, 6, 7]], "b": [[0], [1]]}
    for name, gone in (("a", 0), ("a", 2), ("a", 7), ("b", 1)):
        path = tmp_path / name / f"train_{gone:05d}.bin"
        content = path.read_bytes()
        path.unlink()
        for step in range(12):
            files = {
                (at.split(":")[0], int(at.split(":")[2][6:11]))
                for at in loader.names(sample_range(step, c.batch_windows, gaps=gaps))
            }
            needed = {
                (s, k) for s, shard in files for group in groups[s] if shard in group for k in group
            }
            assert loader.lacking(step, gaps) == (name if (name, gone) in needed else "")
        path.write_bytes(content)
        assert not any(loader.lacking(step, gaps) for step in range(12))


def test_a_shard_that_is_missing_where_all_should_be_there_is_an_error_and_no_wait(
    tmp_path,
):
    c, sources = two(tmp_path)
    loader = Loader(c, sources, world(), END)
    (tmp_path / "a" / "train_00000.bin").unlink()
    assert loader.lacking(0, ()) == ""
    batch = loader.batch(0)
    assert isinstance(batch.problem, DataError) and math.isnan(batch.scored)
    assert re.search(r"train_00000\.bin: cannot be read .*make data", str(batch.problem))
    assert sum(len(tokens) for tokens, _ in batch.micro_batches) == len(batch.samples)


def test_what_was_opened_may_have_more_behind_it_and_may_not_have_changed(tmp_path):
    """Behind each step of a run of which the data grew, with each shard spoilt in turn."""
    group_end = {0: 0, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
    states = [(1, None), (2, None), (4, None), (5, None), (8, "all")]
    loaders = {
        (made, spoilt): Loader(
            *two(tmp_path / f"{made} {spoilt}", made, end, True, spoilt), world(), END
        )
        for made, end in states
        for spoilt in (None, *range(made))
    }
    for made, _ in states:
        loader = loaders[made, None]
        steps = next((step for step in range(7) if loader.lacking(step, ())), 7)
        for step in range(steps + 1):
            opened = json.loads(json.dumps(loader.opened(step, ())))  # as a checkpoint keeps it
            names = loader.names(range(step * 8)) if step else []
            last = max(
                (int(name.split(":")[2][6:11]) + 1 for name in names if name.startswith("a:")),
                default=0,
            )
            assert opened["a"]["shards"] == group_end[last], (made, step)
            for (later, spoilt), other in loaders.items():
                if later >= made:
                    spoils = spoilt is not None and spoilt < opened["a"]["shards"]
                    assert other.differs(opened, step, ()) == ("a" if spoils else ""), (
                        made,
                        step,
                        later,
                        spoilt,
                    )


def test_an_epoch_that_ended_holds_the_source_to_the_shards_that_it_had(tmp_path):
    """Its second epoch is another with more of them, and so is a last group that was cut short."""
    c, sources = two(tmp_path / "then", made=5, end="limit")
    loader = Loader(c, sources, world(), END)
    windows = sum((size - 1) // T for size in SIZES["a"][:5])
    assert (loader.taken(4, ())["a"], loader.taken(5, ())["a"]) == (windows - 6, windows)
    others = {
        made: Loader(*two(tmp_path / f"{made}", made, end), world(), END)
        for made, end in ((4, "limit"), (5, "limit"), (6, "limit"), (8, "all"))
    }
    for step, gaps, number, fits in (
        (4, (), 4, {4, 5, 6, 8}),
        (4, (Gap(4, 3),), 5, {5}),
        (5, (), 5, {5}),
        (10, (), 5, {5}),
    ):
        opened = loader.opened(step, gaps)
        assert (opened["a"]["shards"], opened["a"]["round"]) == (number, step >= 5)
        assert {
            made for made, other in others.items() if other.differs(opened, step, gaps) == ""
        } == fits, (
            step,
            gaps,
        )


def test_shards_of_the_open_and_the_next_group_are_hashed_ahead_and_no_others(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("train.data.batch.LOOK_AHEAD", 8)
    c, sources = two(tmp_path)
    loader, groups = Loader(c, sources, world(), END), [[0], [1], [2, 3], [4, 5, 6, 7]]
    taken = 0
    for step in range(10):
        asked = set()
        real = sources["a"].check_soon
        monkeypatch.setattr(
            sources["a"],
            "check_soon",
            lambda split, k, real=real, asked=asked: (asked.add(k), real(split, k))[1],
        )
        loader.locate(step, loader.samples(step, ()), ())
        monkeypatch.undo()
        monkeypatch.setattr("train.data.batch.LOOK_AHEAD", 8)
        order = loader.mixture.orders[0]
        now, taken = [turn % 4 for turn in order.turns(taken, taken + 6, more=0)], taken + 6
        group = order.turn_of(taken) % 4
        allowed = {k for g in (*now, group, group + 1) for k in groups[g % 4]}
        assert {k for g in (group, group + 1) for k in groups[g % 4]} <= asked <= allowed


def test_a_group_is_open_from_its_first_window_on(tmp_path):
    """Behind the last of the one before, it may still become another."""
    c, sources = two(tmp_path)
    loader = Loader(c, sources, world(), END)
    for windows, number in ((0, 0), (1, 1), (4, 1), (5, 2), (10, 2), (11, 4), (25, 4), (26, 8)):
        gap = next(Gap(0, n) for n in range(100) if loader.taken(0, (Gap(0, n),))["a"] == windows)
        assert loader.opened(0, (gap,))["a"]["shards"] == number, windows
