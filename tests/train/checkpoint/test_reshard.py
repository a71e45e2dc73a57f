"""A checkpoint is the same whatever wrote it and whatever reads it; a split model is never whole in one process."""

import dataclasses
import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_ranks
from tests.train.checkpoint.test_checkpoint import states_of
from tests.train.test_step import as_batch, masked_batch
from train.checkpoint import checkpoint
from train.checkpoint.saver import Saver
from train.distributed import world as distributed
from train.distributed.parallel import Sharding, is_split, local, parallelize, unwrap, writers
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.step import train_step

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp 2": (2, {}),
    "ddp 4": (4, {}),
    "fsdp 2": (2, {"parallel": "fsdp"}),
    "fsdp 4": (4, {"parallel": "fsdp"}),
    "hsdp 2 x 2": (4, {"parallel": "hsdp", "shard_ranks": 2}),
}


def joined(rank, size, c):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=os.environ["TEST_PORT"],
    )
    torch.set_num_threads(1)
    world = distributed.join(c)
    model = parallelize(
        build(c, world.device, sharding=Sharding(c, world) if is_split(c, world) else None),
        c,
        world,
    )
    return world, model, build_optimizer(unwrap(model), c)


def digests(model, optimizer):
    """Name -> hash of every whole weight and moment."""
    states = checkpoint.tensor_states(model, optimizer)
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for part in states.values()
        for name, value in part.items()
    }
    return {
        name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
        for name, value in whole.items()
    }


def write_or_read(rank, size, c, folder, reads, shared):
    """Train a step, save and write down the hashes; or read each of these checkpoints and do so."""
    world, model, optimizer = joined(rank, size, c)
    saver = Saver(Path(folder), c, world, 2**20)
    found = {}
    if not reads:
        set_rate(optimizer, 1e-2, c)
        tokens, targets = masked_batch(c, 8)
        share = slice(rank * 8 // size, (rank + 1) * 8 // size)
        train_step(model, optimizer, as_batch(tokens[share], targets[share], 2), 1.0, world)
        saver.start(1, model, optimizer, states_of(1))
        saver.wait()
    for path in reads or [f"{folder}/step_0000001"]:
        if reads:
            see = Path(path) if shared or rank in writers(c, world) else Path("/absent")
            checkpoint.load_into(see, model, optimizer, shared)
        found[path] = digests(model, optimizer)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    distributed.broadcast_object(None)
    os._exit(0)


@pytest.fixture
def config(tiny, free_port, monkeypatch):
    monkeypatch.setenv("TEST_PORT", str(free_port))
    return dataclasses.replace(tiny, device="cpu")


def run(c, mode, folder, reads=None, shared=True):
    """What each rank found: path of the checkpoint -> hashes."""
    size, settings = MODES[mode]
    folder.mkdir()
    c = dataclasses.replace(c, **settings)
    run_ranks(write_or_read, (size, c, str(folder), list(map(str, reads or [])), shared), size)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        (("fsdp 2",), ("one",)),
        pytest.param(
            ("one", "ddp 2", "hsdp 2 x 2"),
            ("ddp 2", "fsdp 2", "fsdp 4", "hsdp 2 x 2"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["some", "more"],
)
def test_whatever_wrote_it_whatever_reads_it_all_tensors_are_the_same_to_the_bit(
    tmp_path, config, writers, readers
):
    written = {}
    for mode in writers:
        first, *others = run(config, mode, tmp_path / mode)
        assert all(other == first for other in others)
        written |= first
    for mode in readers:
        size, _ = MODES[mode]
        read = run(config, mode, tmp_path / f"{mode} reads", list(written))
        assert read == [written] * size, mode


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp 2", "hsdp 2 x 2"])
def test_ranks_that_do_not_see_the_folder_get_what_the_first_copy_has(tmp_path, config, mode):
    (written,) = run(config, "one", tmp_path / "one")
    size, _ = MODES[mode]
    assert run(config, mode, tmp_path / "reads", list(written), shared=False) == [written] * size


# ---------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------


def peak_mib():
    """The most that this process has had resident since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def save_whole(rank, c, folder):
    world, model, optimizer = joined(rank, 1, c)
    for weight in model.parameters():
        ones = {name: torch.ones_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.set_moments(weight, {"step": torch.ones(())} | ones)
    saver = Saver(Path(folder), c, world, 2**20)
    saver.write(1, checkpoint.tensor_states(model, optimizer), states_of(1))
    assert saver.poll().problem is None


def load_part(rank, size, c, folder):
    importlib.import_module("torch.distributed.checkpoint")  # what is imported later would count
    importlib.import_module("torch.distributed.fsdp")
    forget_peak()
    before = peak_mib()
    _, model, optimizer = joined(rank, size, c)
    checkpoint.load_into(Path(folder) / "step_0000001", model, optimizer)
    mine = 0.0
    for states in checkpoint.tensor_states(model, optimizer).values():
        mine += sum(local(value).nbytes for value in states.values()) / 2**20
    Path(f"{folder}/memory-{rank}.json").write_text(json.dumps([peak_mib() - before, mine]))
    distributed.broadcast_object(None)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory"
)
def test_building_and_loading_a_split_model_never_holds_it_whole(tmp_path, config):
    c = dataclasses.replace(
        config,
        n_layer=16,
        n_embd=512,
        n_head=8,
        n_kv_head=8,
        mlp_dim=2048,
        vocab_size=8192,
        seq_len=32,
    )
    run_ranks(save_whole, (c, str(tmp_path)), 1)
    split = dataclasses.replace(c, parallel="fsdp")
    run_ranks(load_part, (4, split, str(tmp_path)), 4)
    for rank in range(4):
        rose, mine = json.loads((tmp_path / f"memory-{rank}.json").read_text())
        assert mine > 150  # MiB of weights and moments on this rank, a quarter of all
        assert rose < mine + 150  # and little beside: the whole has 600 and more
