"""Batches against slices of the shards' files, read without any code of ours."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from train import prepare
from train.batch import Loader
from train.config import Config
from train.distributed import World
from train.mixture import Gap


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, rank, 0, size, torch.device("cpu"), "CPU", "here")


@pytest.fixture
def opened(tiny: Config, data: dict[str, str]):
    c = dataclasses.replace(tiny, data_dir=data["DATA_DIR"], tokenizer=data["TOKENIZER"])
    return c, prepare.open_sources(c, prepare.vocabulary(c))


def test_a_window_is_a_slice_of_the_file_and_its_targets_the_next_tokens(opened) -> None:
    c, sources = opened
    loader = Loader(c, sources, world())
    batch = loader.batch(3)
    tokens = torch.cat([pair[0] for pair in batch.micro_batches])
    targets = torch.cat([pair[1] for pair in batch.micro_batches])
    assert tokens.shape == targets.shape == (c.batch_windows, c.seq_len)
    assert batch.scored == c.batch_tokens and batch.samples == range(3 * c.batch_windows, 4 * c.batch_windows)
    for row, name in enumerate(loader.names(list(batch.samples))):
        _, _, file, window = name.split(":")
        whole = np.fromfile(Path(sources["python-stdlib"].folder) / file, dtype="<u2")[128:]  # 256 bytes of header
        begin = int(window.removeprefix("window ")) * c.seq_len
        assert tokens[row].tolist() == whole[begin:begin + c.seq_len].tolist()
        assert targets[row].tolist() == whole[begin + 1:begin + c.seq_len + 1].tolist()


@pytest.mark.parametrize(("size", "micro"), [(1, 16), (2, 4), (4, 1), (16, 4)])
def test_all_ranks_together_read_the_same_batch_in_the_same_order(opened, size: int, micro: int) -> None:
    c, sources = opened
    whole = torch.cat([t for t, _ in Loader(c, sources, world()).batch(5).micro_batches])
    parts = [Loader(dataclasses.replace(c, micro_batch_size=micro), sources, world(rank, size)).batch(5)
             for rank in range(size)]
    assert torch.equal(whole, torch.cat([t for part in parts for t, _ in part.micro_batches]))
    assert all(part.scored == c.batch_tokens for part in parts)
    assert {len(t) for part in parts for t, _ in part.micro_batches} == {min(micro, c.batch_windows // size)}


def test_steps_asked_for_in_any_order_give_the_same_batches(opened) -> None:
    c, sources = opened
    one, other = Loader(c, sources, world()), Loader(c, sources, world())
    forward = {s: one.batch(s).micro_batches[0][0] for s in range(20)}
    for step in [19, 3, 7, 0]:
        assert torch.equal(other.batch(step).micro_batches[0][0], forward[step])


def test_a_gap_passes_samples_over_from_its_step_on(opened) -> None:
    c, sources = opened
    loader = Loader(c, sources, world())
    gap = (Gap(step=4, windows=2 * c.batch_windows),)
    assert loader.batch(3, gap).samples == loader.batch(3).samples
    assert loader.batch(4, gap).samples == loader.batch(6).samples
    assert torch.equal(loader.batch(4, gap).micro_batches[0][0], loader.batch(6).micro_batches[0][0])
