"""The sum of a tensor over sites: over several connections at once, bfloat16 on the wire, added up in float32.

    tensors, in pieces that SYNC_STREAMS gloo groups take in turn, side by side; of each piece
        a site sends every other its share of the piece       all-to-all, (S - 1) / S of the piece
        adds up what it got for its own, in float32
        and sends the sum to every other                      all-to-all, as many bytes again

A ring sends as many bytes, in 2 (S - 1) hops one behind another, each of which takes the latency of the link: with one
connection gloo's fills a quarter of a long link. Each sum is rounded once, by the site that made it, before it goes to
all: so all sites get the same bits. The ring would add up in bfloat16, and round at each hop.

torchft's manager uses this in the place of its own ProcessGroupGloo, and calls `configure` with each change of members.
"""

import concurrent.futures
import datetime
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchft.process_group import ProcessGroup, create_store_client

PIECES = (
    2**21
)  # numbers of a piece, at most, times the members; what make wan-lab finds best with SYNC_STREAMS
UNDER_WAY = (
    2**24
)  # numbers of all streams' pieces, which share a link: at 10 Mbit/s less than STALL_S
STALL_S = (
    60.0  # a piece that has not come through by then never will: the link is down, or a peer hangs
)
JOIN_S = 60.0  # for the members to connect


class Pending(dist._Work):
    """A sum that threads are at work on. `wait` raises what went wrong in any of them."""

    def __init__(
        self,
        tensor: Tensor,
        parts: Sequence["concurrent.futures.Future[None]"],
        at_end: Callable[[], None],
    ):
        super().__init__()
        self.tensor, self.parts, self.at_end = tensor, parts, at_end

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        concurrent.futures.wait(self.parts)  # all of them: those behind one that failed still write
        for part in self.parts:
            part.result()
        self.at_end()
        return True

    def get_future(self) -> Any:
        """For torchft, which asks for it behind `wait`."""
        done: Any = torch.futures.Future()
        done.set_result(self.tensor)
        return done


class StripedGloo(ProcessGroup):
    """A group of one process of each site, whose members come and go.

    address: of this site, at which the others reach it. streams: connections to each of them. dtype: on the wire.
    first_s: how long the first piece may take where a member fetches weights before.
    """

    def __init__(self, address: str, streams: int, dtype: torch.dtype, first_s: float):
        super().__init__(0, 1)
        self.address, self.streams, self.dtype, self.first_s = address, streams, dtype, first_s
        self.members, self.rank_here, self.sites = 1, 0, list[int]()
        self.groups: list[Any] = []
        # one thread for each stream, so that its pieces follow one another in the same order at all sites
        self.threads = [
            concurrent.futures.ThreadPoolExecutor(1, f"between-sites-{i}") for i in range(streams)
        ]
        self.failed: Exception | None = None
        self.heals = False  # a member fetches weights before the next sum
        self.first = [
            True
        ] * streams  # whether the next piece of a stream is the first of an exchange
        self.next_stream = 0  # for the next piece
        self.is_double = False  # an earlier member has this site's number
        self.bytes_sent, self.began, self.seconds = 0, 0.0, 0.0  # since `reset`

    # ---- What torchft's manager calls

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Connect to the members anew. store_addr: host:port/prefix, another prefix each time. Raises where one of
        them cannot be reached in JOIN_S."""
        self.abort()
        self.failed, self.next_stream = None, 0
        self.members, self.rank_here, self.sites = world_size, rank, list(global_ranks or [])
        self.is_double = rank < len(self.sites) and self.sites[rank] in self.sites[:rank]
        if world_size > 1:
            connecting = [
                thread.submit(self.connected, store_addr, i)
                for i, thread in enumerate(self.threads)
            ]
            self.groups = [group.result() for group in connecting]

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Pending:
        """Begin to replace the tensor by its sum over the members. Only one tensor, only sums; all members must call it
        with tensors of the same sizes in the same order."""
        (tensor,) = tensors
        op = getattr(opts, "reduceOp", opts)
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"StripedGloo adds up, and was asked for {op}")
        if self.members == 1:
            return Pending(tensor, [], lambda: None)
        carrier, parts = Carrier.of(tensor, self.dtype), []
        first_s = self.first_s if self.heals else JOIN_S + STALL_S
        for begin, end in pieces_of(tensor.numel(), self.members, self.streams):
            stream, self.next_stream = self.next_stream, (self.next_stream + 1) % self.streams
            deadline_s, self.first[stream] = first_s if self.first[stream] else STALL_S, False
            parts.append(
                self.threads[stream].submit(
                    self.add_up, self.groups[stream], carrier, begin, end, deadline_s
                )
            )
            self.bytes_sent += (
                2 * (self.members - 1) * ((end - begin) // self.members) * self.dtype.itemsize
            )

        def finish() -> None:
            carrier.land()
            self.seconds = time.perf_counter() - self.began

        return Pending(tensor, parts, finish)

    def expect(self, heals: bool) -> None:
        """Whether a member of the quorum that stands now fetches weights from another first."""
        self.heals, self.first = heals, [True] * self.streams

    def reset(self) -> None:
        """Another exchange begins: bytes_sent and seconds are of that."""
        self.bytes_sent, self.began, self.seconds = 0, time.perf_counter(), 0.0

    def errored(self) -> Exception | None:
        """What went wrong since the members last changed, so that the manager has them connect anew."""
        return self.failed

    def abort(self) -> None:
        self.groups = []

    def shutdown(self) -> None:
        self.abort()
        for thread in self.threads:
            thread.shutdown(wait=False, cancel_futures=True)

    def size(self) -> int:
        return self.members

    def getBackendName(self) -> str:
        return "striped-gloo"

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Deadlines are of pieces, and follow from STALL_S."""

    # ---- The threads

    def connected(self, store_addr: str, stream: int) -> Any:
        """A gloo group of all members. Each has a store client of its own: a wait in one would hold up all others."""
        timeout = datetime.timedelta(seconds=JOIN_S)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # the only way to say at which address it listens
        options._devices = [gloo.create_device(hostname=self.address)]
        options._timeout, options._threads = timeout, 1
        store = create_store_client(f"{store_addr}/stream_{stream}", timeout)
        return gloo(store, self.rank_here, self.members, options)

    def add_up(
        self, group: Any, carrier: "Carrier", begin: int, end: int, deadline_s: float
    ) -> None:
        """One piece. Once one has failed the others of the sum are not tried."""
        if self.failed:
            raise RuntimeError(f"given up, since another piece failed: {self.failed}")
        try:
            parts = self.swapped(group, carrier.take(begin, end), deadline_s).view(self.members, -1)
            total = parts.sum(0, dtype=torch.float32).to(self.dtype)
            carrier.put(begin, self.swapped(group, total.repeat(self.members), STALL_S))
        except Exception as error:
            self.failed = self.failed or error
            raise

    def swapped(self, group: Any, values: Tensor, deadline_s: float) -> Tensor:
        """All-to-all: the i-th part of the values goes to the i-th member, and what comes is in the members' order."""
        options = dist.AllToAllOptions()
        options.timeout = datetime.timedelta(seconds=deadline_s)
        arrived = torch.empty_like(values)
        group.alltoall_base(
            arrived.view(torch.uint8), values.view(torch.uint8), [], [], options
        ).wait()
        return arrived


class Carrier:
    """The numbers of a tensor on the host in the type of the wire, padded with zeros where a piece ends behind them."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype):
        self.flat, self.dtype = tensor.view(-1), dtype

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype) -> "Carrier":
        return OnGPU(tensor, dtype) if tensor.device.type == "cuda" else cls(tensor, dtype)

    def take(self, begin: int, end: int) -> Tensor:
        """A piece, as it is sent; a copy."""
        part = self.flat[begin:end]
        values = torch.empty(end - begin, dtype=self.dtype)
        values[: len(part)].copy_(part)
        values[len(part) :].zero_()
        return values

    def put(self, begin: int, values: Tensor) -> None:
        """The piece's sum."""
        part = self.flat[begin : begin + len(values)]
        part.copy_(values[: len(part)])

    def land(self) -> None:
        """All pieces have been put."""


class OnGPU(Carrier):
    """The same for a GPU: it rounds, and numbers cross to the host once each way, in the type of the wire."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype):
        self.tensor = tensor.view(-1)
        host = torch.empty(tensor.numel(), dtype=dtype, pin_memory=True)
        host.copy_(self.tensor.to(dtype), non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()
        super().__init__(host, dtype)

    def take(self, begin: int, end: int) -> Tensor:
        self.copied.synchronize()
        return super().take(begin, end)

    def land(self) -> None:
        self.tensor.copy_(self.flat, non_blocking=True)


def pieces_of(numbers: int, members: int, streams: int = 1) -> list[tuple[int, int]]:
    """(begin, end) of the pieces of a tensor, alike in length, each a multiple of `members` long; the last may end
    behind the numbers. The same on all members."""
    if not numbers:  # FSDP2 leaves some processes none of a small weight
        return []
    most = min(PIECES // members, UNDER_WAY // streams)
    length = math.ceil(numbers / (math.ceil(numbers / most) * members)) * members
    return [(begin, begin + length) for begin in range(0, numbers, length)]
