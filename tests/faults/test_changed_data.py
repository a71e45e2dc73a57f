"""Shards that somebody overwrites, cuts short or deletes while a run trains on them."""

import functools
import os
from types import MappingProxyType

import pytest

from tests.conftest import make_data
from tests.faults.conftest import STEPS
from tests.processes import run_trainer
from tests.running import environment, events, losses, same, saved_steps, tensors, train
from train.data import shards
from train.data.batch import Loader


def at_batch(step, action):
    """In the trainer's process: act when the batch of a step is about to be read."""
    real = Loader.batch

    def batch(self, done, *args):
        if done + 1 == step:
            action()
        return real(self, done, *args)

    Loader.batch = batch


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(300)
        file.write(bytes(1000))


def cut(path):
    os.truncate(path, 1000)


def rewrite(path):
    path.write_bytes(path.read_bytes())


def disturb(step, change, seen_at, by):
    """In the trainer's process: rank `by` changes a shard before its batch. Ranks of `seen_at` see it late."""
    rank = int(os.environ.get("RANK", "0"))
    if rank in seen_at:
        show_changes_late(seen_at[rank])
    if rank == by:
        at_batch(step, change)


def run(env, step, change, size=1, seen_at=MappingProxyType({}), by=0):
    """Train while a shard changes before the batch of a step. Returns exit code and output."""
    before = functools.partial(disturb, step, change, dict(seen_at), by)
    return run_trainer(["-m", "train.main"], env, size=size, before=before)


def prepare(folder):
    """Settings of a run with data of its own, and its first shard."""
    own = make_data(folder / "data")
    shard = next((folder / "data").rglob("train_00000.bin"))
    return environment(folder, own, **STEPS), shard


@pytest.mark.fault(46)
@pytest.mark.parametrize(
    ("change", "size"),
    [(overwrite, 1), (cut, 1), (overwrite, 2)],
    ids=["overwritten", "cut", "two"],
)
def test_a_shard_that_changes_is_not_trained_on_and_nothing_is_lost(tmp_path, alone, change, size):
    env, shard = prepare(tmp_path)
    whole = shard.read_bytes()
    # Of two ranks the second alone sees it, as on another node. It makes the change, or it might
    # have read its batch before.
    seen_at = {0: 99} if size == 2 else {}
    code, out = run(env, 13, functools.partial(change, shard), size, seen_at, by=size - 1)
    assert code == 78, out
    assert f"{shard}: was overwritten while the run read it" in out
    assert (
        f"delete {shard} and run: make data, with the DATA or DATA_MIX of the run. Then the same command continues from step 12"
        in out
    )
    assert "Traceback" not in out
    folder = tmp_path / "run"
    assert sorted(losses(folder)) == list(range(1, 13))
    assert events(folder, "skip") == []
    assert events(folder, "end")[-1]["reason"] == "crashed"
    assert saved_steps(folder) == [8, 12]

    out = train(env, code=78)  # as long as nothing is done about it
    assert str(shard) in out and sorted(losses(folder)) == list(range(1, 13))
    shard.write_bytes(whole)
    assert "resumed from step_0000012" in train(env)
    if size == 1:
        assert losses(folder) == losses(alone)
        assert same(tensors(folder, 24), tensors(alone, 24))


def show_changes_late(step):
    """In the trainer's process: a network disk that shows changes of a file from a step on."""
    real = shards.stamp_of
    remembered = {}
    is_late = [True]

    def stamp_of(facts):
        if is_late[0]:
            return remembered.setdefault(facts.st_ino, real(facts))
        return real(facts)

    shards.stamp_of = stamp_of
    at_batch(step, lambda: is_late.__setitem__(0, False))


@pytest.mark.fault(46)
@pytest.mark.parametrize("seen_at", [{0: 19}, {0: 19, 1: 99}], ids=["one", "first of two"])
def test_a_change_that_shows_late_takes_the_run_back_to_the_checkpoint_before_it(
    tmp_path, alone, seen_at
):
    env, shard = prepare(tmp_path)
    whole = shard.read_bytes()
    code, out = run(env, 11, functools.partial(overwrite, shard), len(seen_at), seen_at)
    assert code == 78, out
    assert f"{shard}: was overwritten while the run read it" in out
    assert "Then the same command continues from step 8" in out
    checkpoints = tmp_path / "run" / "checkpoints"
    assert "step_0000016 was set aside" in out
    assert [path.name for path in checkpoints.glob("step_*")] == ["step_0000008"]
    assert len(list(checkpoints.glob(".changed-data-step_0000016-*"))) == 1
    assert sorted(losses(tmp_path / "run")) == list(range(1, 19))
    assert losses(tmp_path / "run") != losses(alone)

    shard.write_bytes(whole)
    assert "resumed from step_0000008" in train(env)
    if len(seen_at) == 1:
        assert losses(tmp_path / "run") == losses(alone)


def test_a_shard_that_is_written_again_with_the_same_bytes_changes_nothing(tmp_path, alone):
    env, shard = prepare(tmp_path)
    code, out = run(env, 13, functools.partial(rewrite, shard))
    assert code == 0, out
    assert losses(tmp_path / "run") == losses(alone)


@pytest.mark.fault(10)
def test_a_bad_shard_that_is_opened_late_ends_the_run_with_what_it_has(tmp_path):
    """Beyond the first group, whose hash is checked when training begins."""
    env, shard = prepare(tmp_path)
    later = shard.with_name("train_00001.bin")
    code, out = run(env | {"MAX_STEPS": "24"}, 1, functools.partial(overwrite, later))
    assert code == 78, out
    assert f"{later}: damaged" in out
    done = max(losses(tmp_path / "run"))
    assert f"continues from step {done}" in out and saved_steps(tmp_path / "run")[-1] == done


def test_a_run_without_checkpoints_ends_with_the_same_sentence(tmp_path):
    env, shard = prepare(tmp_path)
    code, out = run(env | {"SAVE_EVERY": "0"}, 3, functools.partial(overwrite, shard))
    assert code == 78, out
    assert "Then the same command continues from the start" in out


def test_held_out_text_that_changes_costs_the_number_and_not_the_run(tmp_path, alone):
    env, shard = prepare(tmp_path)
    held_out = shard.with_name("validation_00000.bin")
    env |= {"EVAL_EVERY": "8"}
    code, out = run(env, 13, functools.partial(cut, held_out))
    assert code == 0, out
    first, *others = events(tmp_path / "run", "eval")
    assert first["step"] == 8 and first["val_loss"] > 0
    assert others and all(found["val_loss"] is None for found in others)
    assert f"{held_out}: was overwritten while the run read it" in others[0]["error"]
    assert losses(tmp_path / "run") == losses(alone)
