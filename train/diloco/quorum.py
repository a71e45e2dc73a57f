"""torchft's manager, made to fit a run that may be stopped, or lose its lighthouse, at any moment.

Each class here replaces something of torchft 0.2.0 (docs/decisions/0026-torchft-as-it-comes.md).
"""

import contextlib
import datetime
import logging
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torchft.manager import Manager

from train import timeouts
from train.diloco.result import ToldToStop
from train.distributed.world import PeersMissing, sum_over_ranks

log = logging.getLogger(__name__)

for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
    # What went wrong is said here, in a sentence.
    logging.getLogger(name).setLevel(logging.CRITICAL)
LOOK_S = 0.5  # between two looks at whether a wait is over, or the process was told to stop
SAY_S = 30.0  # of waiting, after which that is said
RETRY_S = 2.0  # before a lighthouse that does not answer is asked again


class NumberedByMembers:
    """torchft's client of a lighthouse, whose quorums have a number that other members cannot have.

    A lighthouse that starts again counts quorums from 1 anew. The number of other members, or the
    place where they found each other long ago, would be taken for those of this quorum. So the
    members go into the number, and the exchange into the place. A site that was away may even know
    the number of these members from before and would not connect anew, as the others do: where a
    site is behind, the exchange goes into the number too.
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
    """torchft's manager of one process. It asks again where the lighthouse is away, and can be told to stop.

    Args:
        is_told: whether this process was told to stop.
        group: the processes of this site, which wait for a quorum together.
        lighthouse: its address, for messages.
        manager: arguments of torchft's manager.

    Attributes:
        is_given_up: whether a thread may still wait for a quorum.
    """

    def __init__(self, is_told: Callable[[], bool], group: Any, lighthouse: str, **manager: Any):
        self.is_told = is_told
        self.group = group
        self.lighthouse = lighthouse
        self.is_given_up = False
        self.agreed_on: Any = None  # a quorum that all ranks of the site know of
        super().__init__(**manager)
        self._client: Any = NumberedByMembers(self._client)

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        """Return when the quorum stands, with the weights of others where this site was behind.

        Raises ToldToStop, PeersMissing.
        """
        patience_s = timeouts.SYNC_TIMEOUT_S
        deadline = time.monotonic() + patience_s
        is_logged = False
        while True:
            self._quorum_future = None  # of one that has failed, torchft would raise its error anew
            try:
                return super().start_quorum(allow_heal, shrink_only, timeout)
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                trouble = str(error).splitlines()[0]
            if time.monotonic() > deadline:
                raise PeersMissing(
                    f"LIGHTHOUSE={self.lighthouse}: no quorum of sites in {patience_s:.0f} s: "
                    f"{trouble}; look at make lighthouse there, and at the network"
                )
            if not is_logged:
                log.warning(
                    "the lighthouse at %s does not answer (%s); trying for %.0f s",
                    self.lighthouse,
                    trouble,
                    patience_s,
                )
                is_logged = True
            time.sleep(RETRY_S)

    def wait_quorum(self) -> None:
        """Wait for the quorum, in slices between which a signal is heard. Raises ToldToStop."""
        future: Any = self._quorum_future
        began = time.monotonic()
        is_logged = False
        while future is not self.agreed_on:  # torchft waits once more before each sum
            with contextlib.suppress(TimeoutError):
                future.exception(LOOK_S)
            is_over = future.done()
            has_failed = is_over and future.exception() is not None
            votes = torch.tensor([float(is_over), float(has_failed), float(self.is_told())])
            over, failed, told = sum_over_ranks(votes, self.group).tolist()
            if over == self._group_world_size:
                self.agreed_on = future
                if failed and not has_failed:
                    raise ConnectionError("another process of this site got none")
            elif told:
                # The others would else begin with this site, which is about to go.
                self.shutdown(wait=False)
                self.is_given_up = True
                raise ToldToStop
            if not is_logged and time.monotonic() - began > SAY_S:
                log.warning(
                    "waiting for a quorum of sites for %.0f s: the lighthouse at %s is away, or a "
                    "site that is up is not there yet",
                    SAY_S,
                    self.lighthouse,
                )
                is_logged = True
        super().wait_quorum()
