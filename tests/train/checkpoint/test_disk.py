"""Whatever happens to the disk, a run goes on from the newest checkpoint that was reported and is whole."""

import dataclasses
import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.train.checkpoint.disk import Disk
from tests.train.checkpoint.test_checkpoint import ALONE, states_of
from train.checkpoint import checkpoint, find
from train.checkpoint.manifest import CheckpointError
from train.checkpoint.saver import MOST_FAILURES, Saver
from train.model.model import build
from train.optim import build_optimizer

SYNCS = 6  # of a save
SMALL = {"n_embd": 8, "n_head": 1, "n_kv_head": 1, "n_layer": 1, "vocab_size": 64, "mlp_dim": 16}


class Run:
    """A run of one process, whose weights all are its step."""

    def __init__(self, config, folder, seed, patch):
        self.choose = random.Random(seed)
        self.folder = folder / str(seed)
        self.disk = Disk(self.folder / "0", self.choose)
        self.disk.root.mkdir(parents=True)
        self.disk.install(patch)
        self.config = dataclasses.replace(config, keep_last=2, **SMALL)
        self.model = build(self.config, ALONE.device)
        self.optimizer = build_optimizer(self.model, self.config)
        self.reported: set[int] = set()  # and not damaged since
        self.unreported: set[int] = set()  # there, but the last sync of their save has failed
        self.damaged: set[int] = set()
        self.step = self.lives = 0
        self.begin()

    def begin(self):
        self.saver = Saver(self.disk.root, self.config, ALONE, 2**10)
        self.misses = 0

    def on_disk(self):
        return set(find.committed(self.disk.root))

    def folder_of(self, step):
        return find.folder_of(self.disk.root, step)

    def train(self):
        self.step += 1
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.fill_(self.step)

    def load(self, step):
        checkpoint.load_into(self.folder_of(step), self.model)  # no step was made: no moments
        assert all(weight.eq(step).all() for weight in self.model.parameters())

    def start_save(self):
        self.train()
        self.damaged.discard(self.step)  # written again
        arguments = self.step, self.model, self.optimizer, states_of(self.step)
        if self.misses >= MOST_FAILURES:
            with pytest.raises(CheckpointError, match="5 checkpoints in a row"):
                self.saver.start(*arguments)
            self.begin()
        self.saver.start(*arguments)

    def end_save(self):
        self.saver.thread.join()
        ended = self.saver.poll()
        if ended.problem:
            self.misses += 1
            self.unreported |= {ended.step} & self.on_disk()
        else:
            self.misses = 0
            self.reported |= {ended.step, *self.unreported}
            self.unreported = set()
            assert set(sorted(self.reported)[-2:]) <= self.on_disk()
            self.reported &= self.on_disk()
        assert not list(self.disk.root.glob("*.tmp-*"))
        return ended.problem

    # What happens

    def save(self):
        self.start_save()
        self.train()  # while it is written
        assert self.end_save() is None

    def save_twice(self):
        """The second begins before the first has ended, if that is possible."""
        self.disk.may_write.clear()
        self.start_save()
        first = self.step
        self.reported.add(first)
        self.start_save()
        self.disk.may_write.set()
        assert self.end_save() is None
        self.load(first)

    def save_on_full_disk(self):
        for _ in range(self.choose.randrange(1, MOST_FAILURES)):
            self.disk.full_in = self.choose.randrange(SYNCS)
            self.start_save()
            assert "No space left" in str(self.end_save() or "No space left")
            self.disk.full_in = 10**9

    def lose_power(self):
        before = self.reported.copy()
        self.disk.fails_in = self.choose.randrange(SYNCS + 1)
        self.start_save()
        self.end_save()
        if self.disk.image:  # nobody heard of that save
            self.reported = before
        self.lives += 1
        self.disk.lose_power(self.folder / str(self.lives))
        self.resume()

    def flip_bit(self):
        if len(self.reported) > 1:
            step = self.choose.choice(sorted(self.reported))
            path = self.choose.choice(sorted(self.folder_of(step).iterdir()))
            content = bytearray(path.read_bytes())
            content[self.choose.randrange(len(content))] ^= 1 << self.choose.randrange(8)
            self.disk.change(path, bytes(content))
            self.reported.remove(step)
            self.damaged.add(step)
        self.resume()

    def copy_folder(self):
        step = self.choose.choice(sorted(self.reported))
        shutil.copytree(self.folder_of(step), self.folder_of(self.step + 100))
        self.resume()

    def resume(self):
        """A new process."""
        found = find.latest_for_all(self.disk.root, ALONE)
        find.clear_leftovers(self.disk.root)
        self.step = found[1]["step"] if found else 0
        assert self.step >= max(self.reported, default=0)
        assert self.step not in self.damaged
        assert self.reported <= self.on_disk()
        if found:
            assert max(self.on_disk()) == self.step
            self.load(self.step)
            self.reported.add(self.step)
        self.unreported = set()
        self.begin()

    def live(self):
        self.save()
        running = [self.save, self.save_twice, self.save_on_full_disk]
        ending = [self.lose_power, self.flip_bit, self.copy_folder]
        for _ in range(20):
            self.choose.choice(2 * running + ending)()
        self.disk.close()


@pytest.mark.fault(2, 7, 13, 14)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_goes_on_from_the_newest_checkpoint_that_was_reported(
    tiny, tmp_path, seed, monkeypatch
):
    Run(tiny, tmp_path, seed, monkeypatch).live()


# ---------------------------------------------------------------------------------------------------
# Faults planted in the code
# ---------------------------------------------------------------------------------------------------


def skips(function, skipped):
    """A function of a path that does nothing for those of which `skipped` is true."""
    return lambda path, *more: None if skipped(path) else function(path, *more)


def is_list(path):
    return path.name == ".metadata"


def is_step(path):
    return path.name.startswith("step")


NEVER_RESET = property(
    lambda saver: saver.__dict__.get("most", 0),
    lambda saver, count: saver.__dict__.update(most=max(count, saver.failures)),
)
flush, flush_folder = checkpoint.flush_file, checkpoint.flush_folder
PLANTED = {
    "manifest not synced": (checkpoint, "write_whole", Path.write_bytes),
    "tensors not synced": (checkpoint, "flush_file", skips(flush, lambda path: not is_list(path))),
    "list of tensors not synced": (checkpoint, "flush_file", skips(flush, is_list)),
    "new folder not synced": (checkpoint, "flush_folder", skips(flush_folder, is_step)),
    "its parent not synced": (
        checkpoint,
        "flush_folder",
        skips(flush_folder, lambda path: not is_step(path)),
    ),
    "no folder synced": (checkpoint, "flush_folder", lambda _: None),
    "misses not reset": (Saver, "failures", NEVER_RESET),
    "a save does not wait": (Saver, "wait", lambda _: None),
    "no hash compared": (find, "verify", find.load_manifest),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_noticed(tiny, tmp_path, fault, monkeypatch):
    owner, name, planted = PLANTED[fault]
    monkeypatch.setattr(owner, name, planted, raising=False)
    for seed in range(4):
        try:
            Run(tiny, tmp_path, seed, monkeypatch).live()
        except (AssertionError, CheckpointError):
            return
    pytest.fail("nothing was noticed")
