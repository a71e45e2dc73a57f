"""torchft's manager, made to fit a run that may be stopped, or have another lighthouse, at any moment.

Each class here replaces something of torchft 0.2.0 (docs/decisions/0019-diloco.md).
"""

import contextlib
import logging
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torchft.manager import Manager

from train.diloco.result import Interrupted
from train.distributed.world import sum_over_ranks

log = logging.getLogger(__name__)

for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
    # What went wrong is said here, in a sentence.
    logging.getLogger(name).setLevel(logging.CRITICAL)
LOOK_S = 0.5  # between two looks at whether a wait is over, or the process was told to stop
SAY_S = 30.0  # of waiting, after which that is said


class NumberedByMembers:
    """torchft's client of a lighthouse, whose quorums have a number that other members cannot have.

    A lighthouse that starts again counts quorums from 1 anew. The number of other members, or the
    place where they found each other long ago, would be taken for those of this quorum. So the
    members go into the number, and the sync into the place. A site that was away may even know
    the number of these members from before and would not connect anew, as the others do: where a
    site is behind, the sync goes into the number too.
    """

    def __init__(self, client: Any):
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def _quorum(self, **request: Any) -> Any:
        quorum = self.client._quorum(**request)
        is_healing = quorum.max_world_size < quorum.replica_world_size
        members = repr((quorum.replica_ids, quorum.max_step if is_healing else None))
        quorum.quorum_id = quorum.quorum_id << 32 | zlib.crc32(members.encode())
        quorum.store_address = f"{quorum.store_address}/{quorum.max_step}"
        return quorum


class Quorums(Manager):
    """torchft's manager of one process, which can be told to stop while it waits for a quorum.

    Args:
        stop_requested: whether this process was told to stop.
        group: the processes of this site, which wait for a quorum together.
        lighthouse: its address, for messages.
        manager: arguments of torchft's manager.

    Attributes:
        is_given_up: whether a thread may still wait for a quorum.
    """

    def __init__(
        self, stop_requested: Callable[[], bool], group: Any, lighthouse: str, **manager: Any
    ):
        self.stop_requested = stop_requested
        self.group = group
        self.lighthouse = lighthouse
        self.is_given_up = False
        self.agreed_on: Any = None  # a quorum that all ranks of the site know of
        super().__init__(**manager)
        self._client: Any = NumberedByMembers(self._client)

    def wait_quorum(self) -> None:
        """Wait for the quorum, in slices between which a signal is heard. Called by `start_quorum`.

        Raises Interrupted; RuntimeError or OSError on all ranks, if one of them got no quorum.
        """
        future: Any = self._quorum_future
        began = time.monotonic()
        is_logged = False
        while future is not self.agreed_on:  # torchft waits once more before each sum
            with contextlib.suppress(TimeoutError):
                future.exception(LOOK_S)
            is_over = future.done()
            has_failed = is_over and future.exception() is not None
            votes = torch.tensor([float(is_over), float(has_failed), float(self.stop_requested())])
            over, failed, is_stopped = sum_over_ranks(votes, self.group).tolist()
            if over == self._group_world_size:
                self.agreed_on = future
                if failed and not has_failed:
                    raise ConnectionError("another process of this site got none")
            elif is_stopped:
                # The others would else begin with this site, which is about to go.
                self.shutdown(wait=False)
                self.is_given_up = True
                raise Interrupted
            if not is_logged and time.monotonic() - began > SAY_S:
                log.warning(
                    "waiting for a quorum of sites for %.0f s: the lighthouse at %s is away, or a "
                    "site that is up is not there yet",
                    SAY_S,
                    self.lighthouse,
                )
                is_logged = True
        super().wait_quorum()
