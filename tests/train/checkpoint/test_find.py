"""Which checkpoint is taken up, which are kept, and which are out of the way."""

import json
import os
import re
import shutil

import pytest

from tests import metadata_pickle
from tests.train.checkpoint.test_checkpoint import ALONE, states_of
from train.checkpoint import checkpoint, find
from train.checkpoint.manifest import FILE, CheckpointError, OtherFormat, seal_manifest, verify


def make(root, *steps, **small):
    """Commit checkpoints of a tensor that nobody reads, and return the folder of the last."""
    for step in steps:
        folder = root / f"step_{step:07d}.tmp-1a2b"
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(os.urandom(1000))
        listed = metadata_pickle.metadata({"model.w": ("__0_0.distcp", 250)})
        (folder / ".metadata").write_bytes(metadata_pickle.dumps(listed))
        files = checkpoint.flush_and_describe(folder, 0)
        checkpoint.commit(
            folder,
            find.folder_of(root, step),
            {"step": step, "files": files, **states_of(step, **small)},
        )
    return find.folder_of(root, steps[-1])


def damage(root, *steps):
    for step in steps:
        os.truncate(find.folder_of(root, step) / "__0_0.distcp", 10)


def edit(folder, **values):
    """Change a manifest as with an editor."""
    manifest = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(manifest | values))


def move_out(folder):
    """Leave a link to another place."""
    folder.rename(folder.parent.parent / "elsewhere")
    folder.symlink_to(folder.parent.parent / "elsewhere")


TERABYTES = 4 * 10**12  # of a file without content: to read it takes an hour

DAMAGES = {
    "link": move_out,
    "endless manifest": lambda folder: os.truncate(folder / FILE, TERABYTES),
    "endless file": lambda folder: os.truncate(folder / "__0_0.distcp", TERABYTES),
    "endless list": lambda folder: os.truncate(folder / ".metadata", TERABYTES),
    "truncate": lambda folder: os.truncate(folder / "__0_0.distcp", 500),
    "remove": lambda folder: (folder / "__0_0.distcp").unlink(),
    "manifest": lambda folder: (folder / FILE).write_text("<?xml version='1.0'?>"),
    "no manifest": lambda folder: (folder / FILE).unlink(),
    "edited": lambda folder: edit(folder, step=10),
}


@pytest.mark.fault(13, 14)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_set_aside_with_a_warning_that_names_both(
    tmp_path, damage, caplog
):
    tmp_path /= "checkpoints"
    make(tmp_path, 8, 12)
    damage(find.folder_of(tmp_path, 12))
    folder, manifest = find.find_latest(tmp_path)
    assert (folder.name, manifest["step"]) == ("step_0000008", 8)
    assert re.search("checkpoint step_0000012: .*; falling back to step_0000008", caplog.text)
    assert find.committed(tmp_path) == [8, 12]  # a reader renames nothing
    assert find.latest_for_all(tmp_path, ALONE)[0] == folder
    assert find.committed(tmp_path) == [8]
    assert "step_0000012 was set aside as" in caplog.text
    make(tmp_path, 12)
    find.prune(tmp_path, keep_last=1, keep_every=0)
    assert len(list(tmp_path.glob(".damaged-step_0000012-*"))) == 1


def test_a_flipped_bit_of_a_file_is_found(tmp_path):
    folder = make(tmp_path, 1)
    verify(folder)
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[500] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is damaged \(its hash differs\)"):
        verify(folder)


@pytest.mark.fault(14)
def test_a_copy_under_another_step_touches_no_good_checkpoint(tmp_path, caplog):
    make(tmp_path, 4, 8, 12)
    shutil.copytree(tmp_path / "step_0000004", tmp_path / "step_0000100")
    assert find.latest_for_all(tmp_path, ALONE)[0].name == "step_0000012"
    assert find.committed(tmp_path) == [4, 8, 12]
    assert "step_0000100: MANIFEST.json is missing or damaged (it is of step 4" in caplog.text


@pytest.mark.fault(15)
def test_if_none_verifies_nothing_starts_over_and_nothing_is_renamed(tmp_path):
    make(tmp_path, 1, 2)
    damage(tmp_path, 1, 2)
    words = r"no valid checkpoint.*2 found.*step_0000002.*step_0000001.*RUN_NAME"
    with pytest.raises(CheckpointError, match=words):
        find.latest_for_all(tmp_path, ALONE)
    assert find.committed(tmp_path) == [1, 2]
    assert find.find_latest(tmp_path, before=2) is None
    assert find.find_latest(tmp_path / "absent") is None


def test_a_checkpoint_of_a_later_version_is_neither_passed_over_nor_renamed(tmp_path):
    folder = make(tmp_path, 1, 2)
    for later in ({"schema": 3, "step": 2}, {"schema": 3, "steps": {}}):
        (folder / FILE).write_bytes(seal_manifest(later))
        with pytest.raises(OtherFormat, match=r"step_0000002: has format 3.*reads 2.*RUN_NAME"):
            find.latest_for_all(tmp_path, ALONE)
    assert find.committed(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("damaged", "settings", "stay"),
    [
        ([], {"keep_last": 2, "keep_every": 4, "always": [5]}, [4, 5, 8, 9]),
        ([8, 9], {"keep_last": 2, "keep_every": 0}, [5, 7, 8, 9]),
        ([4, 7, 9], {"keep_last": 3, "keep_every": 0}, [5, 7, 8, 9]),
        ([], {"keep_last": 9, "keep_every": 0}, [1, 2, 4, 5, 7, 8, 9]),
    ],
    ids=["the newest and the permanent", "two that verify", "a sound one between", "all"],
)
def test_pruning_keeps_what_it_must_and_clears_leftovers(tmp_path, caplog, damaged, settings, stay):
    make(tmp_path, 1, 2, 4, 5, 7, 8, 9)
    damage(tmp_path, *damaged)
    (tmp_path / "step_0000010.tmp-abc").mkdir()
    (tmp_path / ".trash-step_0000003-abc").mkdir()
    find.prune(tmp_path, **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:07d}" for step in stay]
    assert ("an older one is kept in its place" in caplog.text) == bool(damaged)


def test_pruning_hashes_nothing_that_is_known_to_be_sound(tmp_path, monkeypatch):
    make(tmp_path, 1, 2, 3, 4)
    monkeypatch.setattr(find, "verify", lambda folder: pytest.fail(f"{folder} was hashed"))
    find.prune(tmp_path, keep_last=4, keep_every=0)
    find.prune(tmp_path, keep_last=2, keep_every=0, verified={1, 3, 4})
    assert find.committed(tmp_path) == [3, 4]


def test_what_cannot_be_renamed_ends_a_resume_but_no_training(tmp_path, monkeypatch, caplog):
    make(tmp_path, 1, 2, 3, 4)
    quarantine = find.quarantine

    def busy(folder, reason):
        if folder.name in ("step_0000001", "step_0000004"):
            raise OSError(16, "Device or resource busy")
        return quarantine(folder, reason)

    monkeypatch.setattr(find, "quarantine", busy)
    find.prune(tmp_path, keep_last=2, keep_every=0)
    assert find.committed(tmp_path) == [1, 3, 4]
    assert "step_0000001 could not be deleted (Device or resource busy)" in caplog.text
    with pytest.raises(CheckpointError, match="step_0000004: is rolled-back and cannot be renamed"):
        find.latest_for_all(tmp_path, ALONE, before=4, reason="rolled-back")


def test_the_best_is_the_lowest_validation_loss_and_the_earliest(tmp_path):
    make(tmp_path, 1)
    assert find.best(tmp_path) is None
    make(tmp_path, 2, val_loss=float("nan"))
    assert find.best(tmp_path) is None
    for step, loss in ((3, 2.5), (4, 2.5), (5, 2.0)):
        make(tmp_path, step, val_loss=loss)
    edit(find.folder_of(tmp_path, 5), val_loss=1.0)
    assert find.best(tmp_path) == (2.5, 3)
