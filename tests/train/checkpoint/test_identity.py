"""train/checkpoint/identity.py: a checkpoint of another run is refused by name."""

import json
import logging
import shutil

import pytest

from tests.train.checkpoint.test_find import make
from train.checkpoint import find
from train.checkpoint.identity import Identity, check_identity, hash_unnamed
from train.checkpoint.manifest import CheckpointError, load_manifest


def identity(config, before=None, new_id="mine"):
    return Identity.of(before or {}, config, new_id)


def commit(root, step, run=None):
    facts = {"run": run.of_checkpoint()} if run else {}
    folder = make(root, step, **facts)
    return folder, load_manifest(folder)


def test_a_run_keeps_its_id_and_what_it_adopted(tiny, tmp_path):
    mine = identity(tiny)
    mine.adopted = hash_unnamed(tmp_path)
    again = identity(tiny.replace(learning_rate=0.5), {"identity": mine.stored()}, "another")
    assert (again.id, again.adopted) == (mine.id, []) == ("mine", [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learning_rate": 0.5}, ["LEARNING_RATE=0.5 (here 0.01)"]),
        ({"weight_decay": 0.5, "seed": 9}, ["WEIGHT_DECAY=0.5", "SEED=9"]),
        ({}, ["another run"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(tiny, tmp_path, change, words):
    tiny = tiny.replace(learning_rate=0.01)
    folder, manifest = commit(tmp_path, 4, identity(tiny.replace(**change), new_id="theirs"))
    mine = identity(tiny)
    mine.adopted = hash_unnamed(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        mine.check(folder, manifest)
    assert not Identity.read({"identity": mine.stored()}, {}).is_mine(manifest)
    for word in [str(folder), "INIT_FROM", *words]:
        assert word in str(raised.value)


def test_a_change_on_resume_is_of_the_same_run_and_a_frozen_one_is_not(tiny, tmp_path):
    mine = identity(tiny)
    mine.adopted = hash_unnamed(tmp_path)
    before = {"identity": mine.stored()}
    folder, manifest = commit(tmp_path, 4, mine)
    identity(tiny.replace(learning_rate=0.5), before).check(folder, manifest)
    assert Identity.read(before, {}).is_mine(manifest)
    with pytest.raises(CheckpointError, match="SEED"):
        identity(tiny.replace(seed=9), before).check(folder, manifest)


def test_a_checkpoint_of_a_copy_that_went_its_own_way_is_refused(tiny, tmp_path):
    """A run, and a copy of its folder: both are resumed, each with other settings and for itself."""
    first = identity(tiny)
    first.adopted = hash_unnamed(tmp_path)
    before = {"identity": first.stored()}
    shared = commit(tmp_path, 4, first)
    second = identity(tiny.replace(learning_rate=0.5), before, "second")
    copied = identity(tiny.replace(weight_decay=0.25), before, "copied")
    mine = commit(tmp_path, 6, second)
    theirs = commit(tmp_path, 8, copied)
    for run, accepted, refused in ((second, mine, theirs), (copied, theirs, mine)):
        later = {"identity": json.loads(json.dumps(run.stored()))}
        for resumed in (run, identity(tiny, later, "third")):  # in a rollback, and at a resume
            resumed.check(*shared)
            resumed.check(*accepted)
            with pytest.raises(CheckpointError, match=r"of a copy of this run, with .*INIT_FROM"):
                resumed.check(*refused)
        check_identity(later, tiny, *accepted)
        with pytest.raises(CheckpointError, match=r"is not in config\.json"):
            check_identity(later, tiny, *refused)


def test_checkpoints_of_an_earlier_version_are_taken_over_once(tiny, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    theirs = commit(tmp_path, 2)
    last = commit(tmp_path, 4)
    mine = identity(tiny)
    mine.check(*last)
    mine.adopted = hash_unnamed(tmp_path)
    assert caplog.text.count("do not say of which run they are (2)") == 1
    later = identity(tiny, {"identity": mine.stored()})
    later.check(*theirs)  # where the newer ones are damaged
    later.check(*last)
    shutil.rmtree(find.folder_of(tmp_path, 4))
    for step in (4, 6):  # of whatever run: they came since
        with pytest.raises(CheckpointError, match=f"step_000000{step}.*does not name its run"):
            later.check(*commit(tmp_path, step))


def test_a_new_run_takes_no_checkpoint_without_an_identity(tiny, tmp_path):
    mine = identity(tiny)
    mine.adopted = hash_unnamed(tmp_path)
    with pytest.raises(CheckpointError, match="does not name its run"):
        mine.check(*commit(tmp_path, 4))


def test_a_config_that_lost_its_identity_takes_no_checkpoint_that_has_one(tiny, tmp_path):
    folder, manifest = commit(tmp_path, 4, identity(tiny))
    for check in (
        identity(tiny, new_id="another").check,
        lambda *checkpoint: check_identity({}, tiny, *checkpoint),
    ):
        with pytest.raises(CheckpointError, match=r"config\.json lost its `identity`"):
            check(folder, manifest)
