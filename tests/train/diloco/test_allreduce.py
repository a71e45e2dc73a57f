"""train/diloco/allreduce.py: the sum over sites, against the same sum made here."""

import datetime
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchft")
from train.diloco import allreduce, outer_step
from train.diloco.allreduce import StripedGloo, pieces_of


def together(members: int, work: Callable[[int, str], torch.Tensor]) -> list[torch.Tensor]:
    """What each member's thread returns, given its rank and a store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(members) as threads:
        return list(
            threads.map(lambda rank: work(rank, f"127.0.0.1:{store.port}/quorum"), range(members))
        )


def values(rank: int, numbers: int) -> torch.Tensor:
    return torch.randn(numbers, generator=torch.Generator().manual_seed(rank))


def summed(members: int, numbers: int, streams: int, dtype: torch.dtype) -> list[torch.Tensor]:
    def work(rank: int, store: str) -> torch.Tensor:
        group, tensor = StripedGloo("127.0.0.1", streams, dtype, 60), values(rank, numbers)
        group.configure(store, f"site-{rank}", rank, members)
        work = group.allreduce([tensor], dist.ReduceOp.SUM)
        assert work.wait() and torch.equal(work.get_future().wait(), tensor)
        own = sum(end - begin for begin, end in pieces_of(numbers, members)) // members
        assert group.bytes_sent == 2 * (members - 1) * own * dtype.itemsize
        group.reset()
        assert group.bytes_sent == 0
        group.shutdown()
        return tensor

    return together(members, work)


@pytest.mark.parametrize(
    ("members", "numbers", "streams"), [(2, 1, 1), (2, 1000, 3), (3, 10_001, 4), (4, 4_097, 8)]
)
def test_all_get_the_sum_rounded_once_each_way(
    members: int, numbers: int, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allreduce, "PIECES", 512)  # so that a stream has several
    expected = sum(values(rank, numbers).bfloat16().double() for rank in range(members))
    found = summed(members, numbers, streams, torch.bfloat16)
    for tensor in found:
        assert torch.equal(tensor, found[0])
        assert torch.equal(tensor, expected.float().bfloat16().float())


def test_in_float32_it_is_the_sum() -> None:
    expected = sum(values(rank, 5000).double() for rank in range(3))
    for tensor in summed(3, 5000, 2, torch.float32):
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("numbers", "members", "streams"),
    [(1, 4, 8), (7, 3, 1), (2**21 * 3 + 5, 4, 8), (100, 2, 2), (2**21 * 3 + 5, 4, 64)],
)
def test_pieces_hold_each_number_once_in_equal_shares(
    numbers: int, members: int, streams: int
) -> None:
    pieces = pieces_of(numbers, members, streams)
    assert [begin for begin, _ in pieces[1:]] == [end for _, end in pieces[:-1]]
    assert pieces[0][0] == 0 and pieces[-1][0] < numbers <= pieces[-1][1]
    assert {(end - begin) % members for begin, end in pieces} == {0}
    longest = max(end - begin for begin, end in pieces)
    assert (
        longest <= allreduce.PIECES / members + members
        and longest * streams <= allreduce.UNDER_WAY + members * streams
    )


def test_tensors_follow_one_another_whatever_their_sizes() -> None:
    sizes = (5, 4000, 0, 1, 77, 100_000, 3)

    def work(rank: int, store: str) -> torch.Tensor:
        group, tensors = (
            StripedGloo("127.0.0.1", 3, torch.float32, 60),
            [values(rank, size) for size in sizes],
        )
        group.configure(store, f"site-{rank}", rank, 3)
        for pending in [group.allreduce([tensor], dist.ReduceOp.SUM) for tensor in tensors]:
            assert pending.wait()
        return torch.cat(tensors)

    expected = torch.cat([sum(values(rank, size).double() for rank in range(3)) for size in sizes])
    for found in together(3, work):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_alone_nothing_is_sent_and_nothing_changes() -> None:
    group, tensor = StripedGloo("127.0.0.1", 4, torch.bfloat16, 60), values(0, 1000)
    group.configure("nowhere:1/q", "site-0", 0, 1)
    assert group.allreduce([tensor], dist.ReduceOp.SUM).wait()
    assert torch.equal(tensor, values(0, 1000)) and group.bytes_sent == 0


def test_a_member_that_is_gone_is_an_error_that_the_manager_hears_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allreduce, "STALL_S", 2.0)
    connected, left = threading.Event(), threading.Event()

    def work(rank: int, store: str) -> torch.Tensor:
        group, tensor = StripedGloo("127.0.0.1", 2, torch.bfloat16, 2.0), values(rank, 100)
        group.configure(store, f"site-{rank}", rank, 2)
        if rank == 1:
            assert connected.wait(60)
            group.abort()  # its connections are closed
            left.set()
            return tensor
        connected.set()
        assert left.wait(60)
        pending = group.allreduce([tensor], dist.ReduceOp.SUM)
        with pytest.raises(RuntimeError):
            pending.wait(datetime.timedelta(seconds=60))
        assert isinstance(group.errored(), RuntimeError)
        group.configure(store, "site-0", 0, 1)  # the quorum behind it is of one
        assert group.errored() is None
        return tensor

    together(2, work)


def test_a_site_that_is_there_twice_is_known_by_the_later_of_the_two() -> None:
    ports = socket.create_server(("127.0.0.1", 0))
    first, second = (StripedGloo("127.0.0.1", 1, torch.bfloat16, 60) for _ in range(2))
    for group, rank in ((first, 0), (second, 1)):
        group.connected = lambda *_: None  # type: ignore[method-assign]
        group.configure(
            f"127.0.0.1:{ports.getsockname()[1]}/q", "x", rank, 3, global_ranks=[2, 2, 3]
        )
    assert not first.is_double and second.is_double


def test_only_sums_are_offered() -> None:
    group = StripedGloo("127.0.0.1", 1, torch.bfloat16, 60)
    with pytest.raises(ValueError, match="adds up"):
        group.allreduce([values(0, 4)], dist.ReduceOp.MAX)


def test_all_processes_of_a_site_look_for_its_store_where_the_first_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = SimpleNamespace(
        world=SimpleNamespace(is_first=False), address="10.0.0.6"
    )  # on the site's second machine
    monkeypatch.setattr(outer_step, "from_first", lambda mine: ("10.0.0.5", 4321))
    assert outer_step.Site.own_store(site) is None and (site.store_addr, site.store_port) == (
        "10.0.0.5",
        4321,
    )
    monkeypatch.undo()
    site.world.is_first = True
    assert outer_step.Site.own_store(site).port == site.store_port and site.store_addr == "10.0.0.6"
