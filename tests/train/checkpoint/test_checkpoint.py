"""Checkpoints: exact, verified, never half there."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.train.test_step import as_batch, masked_batch
from train.checkpoint import checkpoint
from train.checkpoint.find import folder_of
from train.checkpoint.manifest import CheckpointError, verify
from train.distributed.world import World
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.step import train_step

ALONE = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")
COMMITTED = Path(__file__).with_name("committed_checkpoint")


def trained(c, steps):
    """(model, optimizer) after a few steps."""
    model = build(c, ALONE.device)
    optimizer = build_optimizer(model, c)
    go_on(c, model, optimizer, steps)
    return model, optimizer


def go_on(c, model, optimizer, steps):
    set_rate(optimizer, 1e-2, c)
    batch = as_batch(*masked_batch(c, 8), 4)
    return [train_step(model, optimizer, batch, 1.0, ALONE).loss for _ in range(steps)]


def states_of(step, **states):
    """What the manifest of a checkpoint needs for a resume, and these states."""
    data = {"step": step, "gaps": [], "fingerprint": "0123-4567-89ab", "opened": {}}
    return {"tokens": 1, "data": data, **states}


def save(root, step, model, optimizer, small):
    """Write a checkpoint of one process. Returns its folder, and its bytes or 0 if it was there."""
    small = states_of(step, **small)
    states = checkpoint.tensor_states(model, optimizer)
    need = checkpoint.needed_bytes(model)
    return folder_of(root, step), checkpoint.write(root, step, states, need, small, ALONE)


def write(root, step, c):
    return save(root, step, *trained(c, 1), {})[0]


def test_the_first_checkpoint_of_a_run_makes_the_name_of_its_folder_durable(
    tiny, tmp_path, monkeypatch
):
    flushed = []
    monkeypatch.setattr(checkpoint, "flush_folder", flushed.append)
    root = tmp_path / "run" / "checkpoints"
    folder = write(root, 1, tiny)
    assert {folder.parent, folder.parent.parent} == {root, tmp_path / "run"} <= set(flushed)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_training_goes_on_to_the_bit_from_a_checkpoint(tiny, tmp_path, tied, optimizer):
    c = dataclasses.replace(tiny, tie_embeddings=tied, optimizer=optimizer).derived()
    model, optimizer = trained(c, 5)
    folder, size = save(tmp_path, 5, model, optimizer, {})
    expected = go_on(c, model, optimizer, 5)

    other = build(dataclasses.replace(c, seed=99), ALONE.device)
    other_optimizer = build_optimizer(other, c)
    assert verify(folder)["data"]["step"] == 5
    checkpoint.load_into(folder, other, other_optimizer)
    assert go_on(c, other, other_optimizer, 5) == expected
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert 0.5 * checkpoint.needed_bytes(model) < size <= checkpoint.needed_bytes(model)
    if tied:
        assert other.lm_head.weight is other.embed_tokens.weight


def test_what_sites_have_in_common_is_kept_and_read_if_it_is_asked_for(tiny, tmp_path):
    model, optimizer = trained(tiny, 1)
    need = checkpoint.needed_bytes(model, 2)
    sites = {"turn": 2, "base": 0, "finished": -1}

    def common(step, syncs, value):
        """Write a checkpoint in which all that sites have in common has this value; what is read from it."""
        outer = {}
        for name, weight in model.named_parameters():
            for kind in ("weights", "momentum"):
                outer[f"{kind}.{name}"] = torch.full(weight.shape, value)
        states = checkpoint.tensor_states(model, optimizer, outer if syncs else None)
        small = states_of(step)
        if syncs:
            small["sites"] = sites | {"exchanges": syncs}
        assert checkpoint.write(tmp_path, step, states, need, small, ALONE) <= need
        stored: dict = {}
        checkpoint.load_into(folder_of(tmp_path, step), *trained(tiny, 2), outer=stored)
        assert stored.keys() == (outer.keys() if syncs else set())
        return {values.unique().item() for values in stored.values()}

    assert common(1, 1, 3.0) == {3.0}
    assert common(1, 1, 4.0) == {3.0}  # left alone: nothing was synced since
    assert common(1, 2, 5.0) == {5.0}
    assert common(2, 0, 6.0) == set()  # of one site
    assert verify(tmp_path / "step_0000001")["sites"]["exchanges"] == 2
    checkpoint.load_into(tmp_path / "step_0000001", model, optimizer)  # it is not asked for


def test_a_committed_step_is_written_again_only_for_its_evaluation(tiny, tmp_path):
    folder = write(tmp_path, 1, tiny)
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert save(tmp_path, 1, *trained(tiny, 2), {})[1] == 0
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    for size in (True, False):
        assert bool(save(tmp_path, 1, *trained(tiny, 2), {"val_loss": 2.5})[1]) is size
    assert verify(folder)["val_loss"] == 2.5
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000001"]


@pytest.mark.fault(7)
def test_a_disk_without_room_is_named_before_anything_is_written(tiny, tmp_path, monkeypatch):
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    words = r"takes [0-9.]+ [kM]B and the disk has \S+ kB free.*KEEP_LAST.*RUNS_DIR"
    with pytest.raises(CheckpointError, match=words):
        write(tmp_path, 2, tiny)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_shape_says_so(tiny, tmp_path):
    folder = write(tmp_path, 1, tiny)
    wider = dataclasses.replace(tiny, n_embd=64)
    with pytest.raises(
        CheckpointError, match=r"step_0000001: could not read it.*has another shape than"
    ):
        checkpoint.load_into(folder, *trained(wider, 1))


def test_the_committed_checkpoint_still_loads(tiny):
    """The format is a promise: committed_checkpoint was written by commit 9fc3810."""
    facts = json.loads((COMMITTED / "facts.json").read_text())
    c = dataclasses.replace(tiny, n_embd=8, n_head=2, n_layer=1, vocab_size=300, mlp_dim=16)
    folder = COMMITTED / "step_0000003"
    assert verify(folder)["data"] == facts["data"]
    model, optimizer = trained(c, 0)
    checkpoint.load_into(folder, model, optimizer)
    assert {name: w.double().sum().item() for name, w in model.named_parameters()} == facts["sums"]
    moments = checkpoint.tensor_states(model, optimizer)["optimizer"]
    assert {name: m.double().sum().item() for name, m in moments.items()} == facts["moments"]
