"""train/checkpoint/saver.py: who copies and writes what, and what is ready before the first save."""

import dataclasses
import threading

import pytest
import torch

from tests.train.checkpoint.test_checkpoint import ALONE, trained
from train import timeouts
from train.checkpoint import checkpoint
from train.checkpoint import saver as saver_module
from train.checkpoint.saver import Saver
from train.distributed import parallel
from train.distributed.world import World


def worlds(size, local_size):
    places = [(rank, rank % local_size, rank // local_size) for rank in range(size)]
    return [World(*place, size, ALONE.device, "CPU", "here", local_size) for place in places]


def test_under_ddp_each_process_of_a_node_writes_about_as_much_and_all_is_written_once(
    tiny, tmp_path
):
    states = checkpoint.tensor_states(*trained(tiny, 1))
    savers = [Saver(tmp_path, tiny, world, 2**20) for world in worlds(8, 4)]
    assert [saver.writes for saver in savers] == [True] * 4 + [False] * 4
    names, sizes = [], []
    for saver in savers[:4]:
        part = saver.share(states)
        names += [(kind, name) for kind in part for name in part[kind]]
        sizes.append(sum(tensor.nbytes for kind in part for tensor in part[kind].values()))
    assert sorted(names) == sorted((kind, name) for kind in states for name in states[kind])
    assert max(sizes) - min(sizes) <= max(t.nbytes for t in states["model"].values())


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ({"parallel": "ddp"}, [0, 1]),
        ({"parallel": "fsdp"}, list(range(8))),
        ({"parallel": "hsdp"}, [0, 1]),
        ({"parallel": "hsdp", "shard_ranks": 4}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_a_checkpoint_is_written_by_one_copy_of_the_weights(tiny, how, ranks):
    assert parallel.writers(dataclasses.replace(tiny, **how), worlds(8, 2)[5]) == ranks


def test_the_copy_has_its_room_before_the_first_save(tiny, tmp_path):
    model, optimizer = trained(tiny, 1)
    saver = Saver(tmp_path, tiny, ALONE, 2**20)
    saver.warm_up(model, optimizer)
    saver.wait()
    assert saver.poll() is None and not list(tmp_path.iterdir())
    first = saver.copy(checkpoint.tensor_states(model, optimizer))
    again = saver.copy(checkpoint.tensor_states(model, optimizer))
    for name, weight in model.named_parameters():
        assert torch.equal(first["model"][name], weight)
        assert (
            first["model"][name].data_ptr() == again["model"][name].data_ptr() != weight.data_ptr()
        )


def test_a_save_begins_after_the_one_before_it_has_ended(tiny, tmp_path, monkeypatch):
    may_write, write = threading.Event(), checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *args: (may_write.wait(30), write(*args))[1])
    model, optimizer = trained(tiny, 1)
    saver = Saver(tmp_path, tiny, ALONE, 2**20)
    saver.start(1, model, optimizer, {"data": {}})
    first, join = saver.thread, saver.thread.join
    monkeypatch.setattr(first, "join", lambda: (may_write.set(), join()))
    saver.start(2, model, optimizer, {"data": {}})
    assert not first.is_alive()
    saver.wait()
    assert saver.verified == {1, 2}


def test_a_save_that_failed_leaves_no_group_behind_that_works_no_more(tiny, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(saver_module, "group_of", lambda ranks, seconds: made.append(seconds))
    model, optimizer = trained(tiny, 1)
    monkeypatch.setattr(timeouts, "CHECKPOINT_TIMEOUT_S", 100)
    saver = Saver(tmp_path, tiny, ALONE, 2_000_000_000)
    assert made == [200.0] and saver.limit_s == 300.0  # a disk that writes 20 MB/s has 100 s for it
    for step, failures in ((1, 0), (2, 1), (3, 0)):
        saver.failures = failures
        saver.start(step, model, optimizer, {"data": {}})
        saver.wait()
        assert saver.poll().problem is None
    assert made == [200.0, 200.0]
