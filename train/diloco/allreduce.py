"""The sum of a tensor over sites: several connections at once, bfloat16 on the wire, added up in float32.

    a tensor, in pieces that SYNC_STREAMS gloo groups take in turn, at the same time; for each piece
        a site sends every other its share of the piece       all-to-all, (S - 1) / S of the piece
        adds up what it received for its own share, in float32
        and sends the sum to every other                      all-to-all, as many bytes again

A ring sends as many bytes, in 2 (S - 1) hops one after another, each with the latency of the link: over one connection
gloo's ring fills a quarter of a long link. Each sum is rounded once, by the site that made it, before it goes to all: so
all sites get the same bits. The ring would add up in bfloat16, and round at each hop.

torchft's manager uses this in place of its own ProcessGroupGloo, and calls `configure` with each change of members.
"""

import concurrent.futures
import datetime
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchft.process_group import ProcessGroup, create_store_client

# Numbers per piece, at most, times the members: what make wan-lab finds best with SYNC_STREAMS.
PIECES = 2**21
JOIN_S = 60.0  # for the members to connect
# A piece that takes longer never arrives: the link is down, or a member hangs. One that fetches
# weights first, since it was away, has as long.
STALL_S = 300.0


class Pending(dist._Work):
    """A sum that threads work on, in a buffer on the host. `wait` raises what went wrong in any of them."""

    def __init__(
        self,
        group: "StripedGloo",
        tensor: Tensor,
        buffer: Tensor,
        pieces: Sequence["concurrent.futures.Future[None]"],
    ):
        super().__init__()
        self.group = group
        self.tensor = tensor
        self.buffer = buffer
        self.pieces = pieces

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        concurrent.futures.wait(
            self.pieces
        )  # all: those after one that failed still use the groups
        for piece in self.pieces:
            piece.result()
        if self.pieces:
            values = self.tensor.view(-1)
            values.copy_(self.buffer[: len(values)], non_blocking=True)
            self.group.seconds = time.perf_counter() - self.group.began
        return True

    def get_future(self) -> Any:
        """Return the tensor as a future, for torchft, which asks for it after `wait`."""
        done: Any = torch.futures.Future()
        done.set_result(self.tensor)
        return done


class StripedGloo(ProcessGroup):
    """A group of one process of each site, whose members come and go.

    Args:
        address: of this site, at which the others reach it.
        streams: connections to each of them.
        dtype: of the numbers on the wire.
    """

    def __init__(self, address: str, streams: int, dtype: torch.dtype):
        super().__init__(0, 1)
        self.address = address
        self.dtype = dtype
        self.members = 1
        self.rank_here = 0
        self.sites: list[int] = []
        self.groups: list[Any] = []
        # one thread for each stream, so that its pieces follow one another in the same order at all sites
        self.threads = [
            concurrent.futures.ThreadPoolExecutor(1, f"between-sites-{i}") for i in range(streams)
        ]
        self.failed: Exception | None = None
        self.is_double = False  # an earlier member has this site's number
        self.next_stream = 0  # for the next piece
        self.reset()

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
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        """Connect to the members anew.

        store_addr: host:port/prefix, another prefix each time. Raises if a member cannot be reached in JOIN_S.
        """
        self.abort()
        self.failed = None
        self.next_stream = 0
        self.members = world_size
        self.rank_here = rank
        self.sites = list(global_ranks or [])
        self.is_double = rank < len(self.sites) and self.sites[rank] in self.sites[:rank]
        if world_size > 1:
            connecting = [
                thread.submit(self.connect, store_addr, stream)
                for stream, thread in enumerate(self.threads)
            ]
            self.groups = [group.result() for group in connecting]

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Pending:
        """Begin to replace the tensor by its sum over the members.

        Only one tensor, and only sums, which is all that torchft asks for. All members call it with tensors of the
        same sizes in the same order.
        """
        (tensor,) = tensors
        values = tensor.view(-1)
        pieces = pieces_of(len(values), self.members)
        if self.members == 1 or not pieces:
            return Pending(self, tensor, values, [])

        on_gpu = tensor.is_cuda
        # the end of the last piece may lie behind the numbers: zeros
        buffer = torch.zeros(pieces[-1][1], dtype=self.dtype, pin_memory=on_gpu)
        # a GPU rounds itself: numbers cross to the host once each way, in the type of the wire
        buffer[: len(values)].copy_(values.to(self.dtype), non_blocking=True)
        copied = torch.cuda.Event() if on_gpu else None
        if copied:
            copied.record()
        parts = []
        for begin, end in pieces:
            stream = self.next_stream
            self.next_stream = (stream + 1) % len(self.threads)
            piece = buffer[begin:end]
            parts.append(
                self.threads[stream].submit(self.add_up, self.groups[stream], piece, copied)
            )
            self.bytes_sent += 2 * (self.members - 1) * piece.nbytes // self.members
        return Pending(self, tensor, buffer, parts)

    def reset(self) -> None:
        """Begin another sync: bytes_sent and seconds are of that."""
        self.bytes_sent = 0
        self.seconds = 0.0
        self.began = time.perf_counter()

    def errored(self) -> Exception | None:
        """Return what went wrong since the members last changed, so that the manager has them connect anew."""
        return self.failed

    def abort(self) -> None:
        self.groups = []

    def shutdown(self) -> None:
        self.abort()
        for thread in self.threads:
            thread.shutdown(wait=False, cancel_futures=True)

    # ---- In the threads

    def connect(self, store_addr: str, stream: int) -> Any:
        """Return a gloo group of all members, with a store client of its own: a wait in one would hold up all others."""
        timeout = datetime.timedelta(seconds=JOIN_S)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # the only way to say at which address it listens
        options._devices = [gloo.create_device(hostname=self.address)]
        options._timeout = timeout
        options._threads = 1
        store = create_store_client(f"{store_addr}/stream_{stream}", timeout)
        return gloo(store, self.rank_here, self.members, options)

    def add_up(self, group: Any, piece: Tensor, copied: Any) -> None:
        """Replace a piece by its sum. Once one piece has failed the others are not tried."""
        if self.failed:
            raise RuntimeError(f"given up, since another piece failed: {self.failed}")
        try:
            if copied:
                copied.synchronize()
            parts = self.swap(group, piece).view(self.members, -1)
            total = parts.sum(0, dtype=torch.float32).to(self.dtype)
            piece.copy_(self.swap(group, total.repeat(self.members)))
        except Exception as error:
            self.failed = self.failed or error
            raise

    def swap(self, group: Any, values: Tensor) -> Tensor:
        """All-to-all: send the i-th part of the values to the i-th member. Returns what came, in the members' order."""
        options = dist.AllToAllOptions()
        options.timeout = datetime.timedelta(seconds=STALL_S)
        arrived = torch.empty_like(values)
        sent, received = values.view(torch.uint8), arrived.view(torch.uint8)
        group.alltoall_base(received, sent, [], [], options).wait()
        return arrived


def pieces_of(numbers: int, members: int) -> list[tuple[int, int]]:
    """Return (begin, end) of the pieces of a tensor: equally long, and the same on all members.

    The length is a multiple of `members`; the last piece may end behind the numbers. Of no numbers there is no piece:
    FSDP2 leaves some processes none of a small weight.
    """
    if not numbers:
        return []
    pieces = math.ceil(numbers / (PIECES // members))
    length = math.ceil(numbers / (pieces * members)) * members
    return [(begin, begin + length) for begin in range(0, numbers, length)]
