"""Checkpoints: exact, verified, never half there."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from settings.config import Config
from tests.train.test_step import as_batch, masked_batch
from train.checkpoint import checkpoint
from train.checkpoint.checkpoint import CheckpointError
from train.distributed.world import World
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.step import train_step

ALONE = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")
COMMITTED = Path(__file__).with_name("checkpoint_schema_1")


def trained(c: Config, steps: int):
    """(model, optimizer) after a few steps."""
    model = build(c, ALONE.device)
    optimizer = build_optimizer(model, c)
    go_on(c, model, optimizer, steps)
    return model, optimizer


def go_on(c: Config, model, optimizer, steps: int) -> list[float]:
    set_rate(optimizer, 1e-2, c)
    batch = as_batch(*masked_batch(c, 8), 4)
    return [train_step(model, optimizer, batch, 1.0, ALONE).loss for _ in range(steps)]


def save(root: Path, step: int, model, optimizer, small: dict) -> tuple[Path, int]:
    """Write a checkpoint of one process."""
    states = checkpoint.tensor_states(model, optimizer)
    return checkpoint.write(root, step, states, checkpoint.needed_bytes(model), small, ALONE)


def write(root: Path, step: int, c: Config) -> Path:
    return save(root, step, *trained(c, 1), {"tokens": 1, "data": {"step": step}})[0]


@pytest.mark.parametrize("tied", [True, False])
def test_training_goes_on_to_the_bit_from_a_checkpoint(
    tiny: Config, tmp_path: Path, tied: bool
) -> None:
    c = dataclasses.replace(tiny, tie_embeddings=tied)
    model, optimizer = trained(c, 5)
    folder, size = save(tmp_path, 5, model, optimizer, {"data": {"step": 5}})
    expected = go_on(c, model, optimizer, 5)

    other = build(dataclasses.replace(c, seed=99), ALONE.device)
    other_optimizer = build_optimizer(other, c)
    assert checkpoint.read_manifest(folder)["data"] == {"step": 5}
    checkpoint.load_into(folder, other, other_optimizer)
    assert go_on(c, other, other_optimizer, 5) == expected
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert 0.5 * checkpoint.needed_bytes(model) < size <= checkpoint.needed_bytes(model)
    if tied:
        assert other.lm_head.weight is other.embed_tokens.weight


def test_what_sites_have_in_common_is_kept_and_read_where_it_is_asked_for(
    tiny: Config, tmp_path: Path
) -> None:
    model, optimizer = trained(tiny, 1)
    outer = {
        f"{kind}.{name}": torch.randn(w.shape)
        for name, w in model.named_parameters()
        for kind in ("weights", "momentum")
    }

    def written(step: int, small: dict, outer: dict | None) -> Path:
        states = checkpoint.tensor_states(model, optimizer, outer)
        folder, size = checkpoint.write(
            tmp_path, step, states, checkpoint.needed_bytes(model, 2), small, ALONE
        )
        assert size <= checkpoint.needed_bytes(model, 2)
        return folder

    folder = written(1, {"sites": {"exchanges": 1}}, outer)
    for asked in (None, {}):
        checkpoint.load_into(folder, *trained(tiny, 2), outer=asked)  # type: ignore[misc]
        assert asked is None or (
            set(asked) == set(outer) and all(torch.equal(asked[k], outer[k]) for k in outer)
        )
    asked = {}
    checkpoint.load_into(written(2, {}, None), *trained(tiny, 2), outer=asked)  # type: ignore[misc]
    assert asked == {}  # of one site
    outer = {key: value + 1 for key, value in outer.items()}
    assert (
        written(1, {"sites": {"exchanges": 1}}, outer) == folder
    )  # left alone: nothing was exchanged since
    checkpoint.load_into(folder, model, optimizer, outer=asked)
    assert not any(torch.equal(asked[key], outer[key]) for key in outer)
    assert written(1, {"sites": {"exchanges": 2}}, outer) == folder
    checkpoint.load_into(folder, model, optimizer, outer=asked)
    assert all(torch.equal(asked[key], outer[key]) for key in outer)
    assert checkpoint.read_manifest(folder)["sites"] == {"exchanges": 2}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_keys_are_the_models_own_names(tiny: Config) -> None:
    states = checkpoint.tensor_states(*trained(tiny, 1))
    assert set(states["model"]) == {
        name for name, _ in build(tiny, ALONE.device).named_parameters()
    }
    assert "state.layers.0.self_attn.q_proj.weight.exp_avg" in states["optimizer"]


@pytest.mark.fault(13, 14)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_both(
    tiny: Config, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1, tiny)
    newest = write(tmp_path, 2, tiny)
    tensors = newest / "__0_0.distcp"
    if damage == "flip":
        content = bytearray(tensors.read_bytes())
        content[len(content) // 2] ^= 1
        tensors.write_bytes(content)
    elif damage == "truncate":
        os.truncate(tensors, 1000)
    elif damage == "remove":
        tensors.unlink()
    elif damage == "manifest":
        (newest / "MANIFEST.json").write_text("<?xml version='1.0'?>")
    else:
        (newest / "MANIFEST.json").unlink()
    (tmp_path / "latest").write_text("step_0000002")  # by whom ever: what is the latest is derived
    folder, manifest = checkpoint.find_latest(tmp_path)
    assert (folder.name, manifest["step"]) == ("step_0000001", 1)
    assert "step_0000002" in caplog.text and "step_0000001" in caplog.text


@pytest.mark.fault(15)
def test_if_no_checkpoint_verifies_nothing_starts_over(tiny: Config, tmp_path: Path) -> None:
    for step in (1, 2):
        os.truncate(write(tmp_path, step, tiny) / "__0_0.distcp", 10)
    with pytest.raises(
        CheckpointError, match=r"no valid checkpoint.*2 found.*step_0000002.*step_0000001.*RUN_NAME"
    ):
        checkpoint.find_latest(tmp_path)
    assert checkpoint.find_latest(tmp_path / "absent") is None


def damage(root: Path, *steps: int) -> None:
    for step in steps:
        os.truncate(root / f"step_{step:07d}" / "__0_0.distcp", 10)


def test_a_resume_sets_damaged_checkpoints_aside_so_that_their_steps_are_written_again(
    tiny: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, tiny)
    damage(tmp_path, 2, 3)
    assert checkpoint.find_latest(tmp_path)[0].name == "step_0000001"
    assert checkpoint.committed(tmp_path) == [1, 2, 3]  # a reader renames nothing
    assert checkpoint.latest_for_all(tmp_path, ALONE)[0].name == "step_0000001"
    assert checkpoint.committed(tmp_path) == [1]
    aside = sorted(path.name.rsplit("-", 1)[0] for path in tmp_path.glob(".damaged-*"))
    assert aside == [".damaged-step_0000002", ".damaged-step_0000003"]
    assert "step_0000003 was set aside as" in caplog.text
    assert checkpoint.read_manifest(write(tmp_path, 3, tiny))["step"] == 3
    assert (
        checkpoint.prune(tmp_path, keep_last=2, keep_every=0) == []
        and len(list(tmp_path.glob(".damaged-*"))) == 2
    )


@pytest.mark.fault(15)
def test_where_none_verifies_nothing_is_set_aside(tiny: Config, tmp_path: Path) -> None:
    write(tmp_path, 1, tiny)
    damage(tmp_path, 1)
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpoint.latest_for_all(tmp_path, ALONE)
    assert checkpoint.committed(tmp_path) == [1]


def test_a_checkpoint_of_a_later_version_is_neither_passed_over_nor_set_aside(
    tiny: Config, tmp_path: Path
) -> None:
    write(tmp_path, 1, tiny)
    manifest = write(tmp_path, 2, tiny) / "MANIFEST.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": 2}))
    with pytest.raises(
        CheckpointError, match=r"step_0000002: has format 2; this version reads 1.*RUN_NAME"
    ):
        checkpoint.latest_for_all(tmp_path, ALONE)
    assert checkpoint.committed(tmp_path) == [1, 2]


def test_a_committed_step_is_never_written_again(tiny: Config, tmp_path: Path) -> None:
    folder = write(tmp_path, 1, tiny)
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert save(tmp_path, 1, *trained(tiny, 2), {"data": {}})[1] == 0
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_pruning_keeps_the_newest_and_the_permanent_and_clears_leftovers(
    tiny: Config, tmp_path: Path
) -> None:
    template = write(tmp_path, 1, tiny)
    for step in (2, 4, 5, 7, 8, 9):
        shutil.copytree(template, tmp_path / f"step_{step:07d}")
    (tmp_path / "step_0000010.tmp-abc").mkdir()
    (tmp_path / ".trash-3-abc").mkdir()
    assert checkpoint.prune(tmp_path, keep_last=2, keep_every=4) == [1, 2, 5, 7]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_{s:07d}" for s in (4, 8, 9)]


def test_pruning_never_deletes_the_two_newest_that_verify(
    tiny: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = write(tmp_path, 1, tiny)
    for step in (2, 3, 4, 5, 6, 7):
        shutil.copytree(template, tmp_path / f"step_{step:07d}")
    damage(tmp_path, 4, 6, 7)
    assert checkpoint.prune(tmp_path, keep_last=3, keep_every=0) == [1, 2, 4]
    assert checkpoint.committed(tmp_path) == [3, 5, 6, 7]
    assert "step_0000007" in caplog.text and "an older one is kept" in caplog.text


def test_pruning_hashes_nothing_that_is_known_to_be_sound(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = write(tmp_path, 1, tiny)
    for step in (2, 3, 4):
        shutil.copytree(template, tmp_path / f"step_{step:07d}")
    monkeypatch.setattr(
        checkpoint, "read_manifest", lambda folder: pytest.fail(f"{folder} was hashed")
    )
    assert (
        checkpoint.prune(tmp_path, keep_last=4, keep_every=0) == []
    )  # nothing to delete, nothing to know
    assert checkpoint.prune(tmp_path, keep_last=2, keep_every=0, sound={1, 3, 4}) == [1, 2]


def test_what_cannot_be_deleted_is_said_and_ends_nothing(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    template = write(tmp_path, 1, tiny)
    for step in (2, 3, 4):
        shutil.copytree(template, tmp_path / f"step_{step:07d}")
    rename = os.rename

    def busy(source: Path, target: Path) -> None:
        if source.name == "step_0000001":
            raise OSError(16, "Device or resource busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", busy)
    assert checkpoint.prune(tmp_path, keep_last=2, keep_every=0) == [2]
    assert checkpoint.committed(tmp_path) == [1, 3, 4]
    assert "step_0000001 could not be deleted (Device or resource busy)" in caplog.text


@pytest.mark.fault(7)
def test_a_full_disk_leaves_the_last_checkpoint_and_no_half_one(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, tiny)

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.distributed.checkpoint, "save", no_space)
    with pytest.raises(CheckpointError, match=r"step_0000002.*No space left.*KEEP_LAST"):
        write(tmp_path, 2, tiny)
    assert [p.name for p in tmp_path.iterdir()] == ["step_0000001"]
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint, "flush_folder", no_space)  # past all the files, in the commit
    with pytest.raises(CheckpointError, match=r"step_0000002.*No space left"):
        write(tmp_path, 2, tiny)
    assert [p.name for p in tmp_path.iterdir()] == ["step_0000001"]
    monkeypatch.undo()
    monkeypatch.setattr(
        checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})
    )
    with pytest.raises(
        CheckpointError, match=r"takes 0\.00 GiB and the disk has 0\.00 GiB free.*RUNS_DIR"
    ):
        write(tmp_path, 2, tiny)
    assert [p.name for p in tmp_path.iterdir()] == ["step_0000001"]


def test_a_checkpoint_of_another_shape_says_so(tiny: Config, tmp_path: Path) -> None:
    folder = write(tmp_path, 1, tiny)
    wider = dataclasses.replace(tiny, n_embd=64)
    with pytest.raises(
        CheckpointError, match=r"step_0000001: does not fit this model: Size mismatch"
    ):
        checkpoint.load_into(folder, *trained(wider, 1))


def test_the_committed_checkpoint_of_schema_1_still_loads(
    tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format is a promise: checkpoint_schema_1 was written when schema 1 was defined."""
    facts = json.loads((COMMITTED / "facts.json").read_text())
    monkeypatch.setattr(
        Config, "padded_vocab_size", 300
    )  # it was written before there was any padding
    c = dataclasses.replace(tiny, n_embd=8, n_head=2, n_layer=1, vocab_size=300, mlp_dim=16)
    folder = COMMITTED / "step_0000003"
    assert checkpoint.read_manifest(folder)["data"] == facts["data"]
    model, optimizer = trained(c, 0)
    checkpoint.load_into(folder, model, optimizer)
    assert {name: w.double().sum().item() for name, w in model.named_parameters()} == facts["sums"]
    moments = checkpoint.tensor_states(model, optimizer)["optimizer"]
    assert {name: m.double().sum().item() for name, m in moments.items()} == facts["moments"]
