"""Shards that somebody overwrites, cuts short or deletes while a run trains on them."""

import functools
import os
import re

import pytest

from tests.conftest import make_data
from tests.faults.trial import STEPS, Trial
from tests.processes import run_trainer
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


def disturb(step, change, by):
    """In the trainer's process: rank `by` changes a shard before its batch."""
    if int(os.environ.get("RANK", "0")) == by:
        at_batch(step, change)


class Shaken(Trial):
    """A run with data of its own, of which a file changes."""

    def __init__(self, folder):
        super().__init__(folder, make_data(folder / "data"), **STEPS)
        self.shard = next((folder / "data").rglob("train_00000.bin"))

    def run_with(self, step, change, code, size=1, by=0, **settings):
        """Train while a change is made before the batch of a step. Returns what was printed."""
        before = functools.partial(disturb, step, change, by)
        env = self.env(**settings)
        found, out = run_trainer(["-m", "train.main"], env, size=size, before=before)
        assert found == code, out
        return out


@pytest.fixture
def shaken(tmp_path):
    return Shaken(tmp_path)


@pytest.mark.fault(45)
@pytest.mark.parametrize(
    ("change", "size"),
    [(overwrite, 1), (cut, 1), (overwrite, 2)],
    ids=["overwritten", "cut", "two"],
)
def test_a_shard_that_changes_is_not_trained_on_and_nothing_is_lost(shaken, alone, change, size):
    shard = shaken.shard
    whole = shard.read_bytes()
    # Of two ranks the second makes the change; the first may have read its batch before.
    out = shaken.run_with(13, functools.partial(change, shard), 78, size, by=size - 1)
    assert re.search(rf"\S+, rank \d: {shard}: was overwritten or truncated while it was read", out)
    assert f"delete {shard} and run: make data, with the DATA or DATA_MIX of the run" in out
    assert "Then run the same command to resume" in out and "Traceback" not in out
    assert sorted(shaken.losses) == list(range(1, 13))
    assert shaken.events("skip") == []
    assert shaken.events("end")[-1]["reason"] == "crashed"
    assert shaken.saved == [8, 12]

    out = shaken.train(code=78)  # as long as nothing is done about it
    assert str(shard) in out and sorted(shaken.losses) == list(range(1, 13))
    shard.write_bytes(whole)
    assert "resumed from step_0000012" in shaken.train()
    if size == 1:
        assert shaken.losses == alone.losses and shaken.has_tensors_of(alone, 24)


@pytest.mark.fault(10)
def test_a_bad_shard_that_is_opened_late_ends_the_run_with_what_it_has(shaken):
    """Beyond the first group, whose hash is checked when training begins."""
    later = shaken.shard.with_name("train_00001.bin")
    out = shaken.run_with(1, functools.partial(overwrite, later), 78)
    assert f"{later}: damaged" in out
    assert shaken.saved[-1] == max(shaken.losses)


def test_a_run_without_checkpoints_ends_with_the_same_sentence(shaken):
    out = shaken.run_with(3, functools.partial(overwrite, shaken.shard), 78, SAVE_EVERY=0)
    assert "Then run the same command to resume" in out


def test_held_out_text_that_changes_costs_the_number_and_not_the_run(shaken, alone):
    held_out = shaken.shard.with_name("validation_00000.bin")
    shaken.run_with(13, functools.partial(cut, held_out), 0, EVAL_EVERY=8)
    first, *others = shaken.events("eval")
    assert first["step"] == 8 and first["val_loss"] > 0
    assert others and all(entry["val_loss"] is None for entry in others)
    assert f"{held_out}: was overwritten or truncated while it was read" in others[0]["error"]
    assert shaken.losses == alone.losses
