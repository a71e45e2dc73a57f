"""train/diloco/allreduce.py: the sum over sites, compared with the same sum made here."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchft")
from train.diloco import allreduce
from train.diloco import site as sites
from train.diloco.allreduce import StripedGloo, pieces_of


def together(members, work):
    """What each member's thread returns, given its rank and its group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def member(rank):
        group = StripedGloo("127.0.0.1", 3, torch.bfloat16)
        group.configure(f"127.0.0.1:{store.port}/quorum", f"site-{rank}", rank, members)
        try:
            return work(rank, group)
        finally:
            group.shutdown()

    with ThreadPoolExecutor(members) as threads:
        return list(threads.map(member, range(members)))


def values(rank, numbers):
    return torch.randn(numbers, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("members", [2, 3])
def test_all_get_the_sum_rounded_once_each_way(monkeypatch, members, dtype):
    """Tensors that are under way together, of any size, with several pieces per stream."""
    monkeypatch.setattr(allreduce, "PIECES", 512)
    sizes = (5, 4097, 0, 1, 1000)

    def work(rank, group):
        group.dtype = dtype
        tensors = [values(rank, size) for size in sizes]
        sums = [group.allreduce([tensor], dist.ReduceOp.SUM) for tensor in tensors]
        assert all(pending.wait() for pending in sums)
        assert torch.equal(sums[1].get_future().wait(), tensors[1])
        sent = sum(pieces_of(size, members)[-1][1] for size in sizes if size)
        assert group.bytes_sent == 2 * (members - 1) * sent // members * dtype.itemsize
        group.reset()
        assert group.bytes_sent == 0
        return torch.cat(tensors)

    expected = [
        sum(values(rank, size).to(dtype).float() for rank in range(members)) for size in sizes
    ]
    for found in together(members, work):
        assert torch.equal(found, torch.cat(expected).to(dtype).float())


@pytest.mark.parametrize(("numbers", "members"), [(1, 4), (7, 3), (2**21 * 3 + 5, 4)])
def test_pieces_hold_each_number_once_in_equal_shares(numbers, members):
    pieces = pieces_of(numbers, members)
    assert [begin for begin, _ in pieces[1:]] == [end for _, end in pieces[:-1]]
    assert pieces[0][0] == 0 and pieces[-1][0] < numbers <= pieces[-1][1]
    (length,) = {end - begin for begin, end in pieces}
    assert length % members == 0 and length <= allreduce.PIECES / members + members


def test_a_member_that_is_gone_is_an_error_that_the_manager_hears_of(monkeypatch):
    monkeypatch.setattr(allreduce, "STALL_S", 2.0)
    left = threading.Event()

    def work(rank, group):
        if rank == 1:
            group.abort()  # its connections are closed
            left.set()
            return
        assert left.wait(60)
        tensor = values(rank, 100)
        with pytest.raises(RuntimeError):
            group.allreduce([tensor], dist.ReduceOp.SUM).wait()
        assert isinstance(group.errored(), RuntimeError)
        group.configure("nowhere:1/q", "site-0", 0, 1)  # the next quorum is of one
        assert group.errored() is None
        sent = group.bytes_sent
        assert group.allreduce([tensor], dist.ReduceOp.SUM).wait()
        assert torch.equal(tensor, values(rank, 100)) and group.bytes_sent == sent

    together(2, work)


def test_a_site_that_is_there_twice_is_known_by_the_later_of_the_two(monkeypatch):
    monkeypatch.setattr(StripedGloo, "connect", lambda *_: None)
    first, second = (StripedGloo("127.0.0.1", 1, torch.bfloat16) for _ in range(2))
    for group, rank in ((first, 0), (second, 1)):
        group.configure("127.0.0.1:1/q", "x", rank, 3, global_ranks=[2, 2, 3])
    assert not first.is_double and second.is_double


def test_all_processes_of_a_site_look_for_its_store_where_the_first_one_is(monkeypatch):
    """127.0.0.2 is the site's second machine."""
    world = SimpleNamespace(is_first=False)
    monkeypatch.setattr(sites, "broadcast_object", lambda mine: ("10.0.0.5", 4321))
    assert sites.open_store("127.0.0.2", world) == (None, "10.0.0.5", 4321)
    monkeypatch.undo()
    world.is_first = True
    store, address, port = sites.open_store("127.0.0.2", world)
    assert (address, port) == ("127.0.0.2", store.port)
