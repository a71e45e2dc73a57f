"""torchft's manager, made to fit a run that may be stopped, or lose its lighthouse, at any moment.

Each class here replaces something of torchft 0.2.0 (docs/decisions/0026-torchft-as-it-comes.md).
"""

import contextlib
import datetime
import logging
import time
import types
import zlib
from collections.abc import Callable
from typing import Any

from torchft.manager import Manager

from train.diloco.result import ToldToStop
from train.distributed.world import PeersMissing

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

    Args:
        say_heals: told whether any member has weights to fetch first.
    """

    def __init__(self, client: Any, say_heals: Callable[[bool], None]):
        self.client = client
        self.say_heals = say_heals

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def _quorum(self, **asked: Any) -> Any:
        found = self.client._quorum(**asked)
        facts = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
        heals = found.max_world_size < found.replica_world_size
        members = repr((found.replica_ids, found.max_step if heals else None))
        facts["quorum_id"] = found.quorum_id << 32 | zlib.crc32(members.encode())
        facts["store_address"] = f"{found.store_address}/{found.max_step}"
        self.say_heals(heals)
        return types.SimpleNamespace(**facts)


class Quorums(Manager):
    """torchft's manager of one process. It asks again where the lighthouse is away, and can be told to stop.

    Args:
        agree: takes whether this rank's wait is over, and whether it failed. Returns whether the
            waits of all ranks of the site are over, whether any failed, and whether any rank was
            told to stop. All ranks call it together.
        patience_s: for a lighthouse that does not answer.
        lighthouse: its address, for messages.
        manager: arguments of torchft's manager.

    Attributes:
        is_given_up: whether a thread may still wait for a quorum.
    """

    def __init__(
        self,
        agree: Callable[[bool, bool], tuple[bool, bool, bool]],
        patience_s: float,
        lighthouse: str,
        **manager: Any,
    ):
        self.agree = agree
        self.patience_s = patience_s
        self.lighthouse = lighthouse
        self.is_given_up = False
        self.agreed_on: Any = None  # a quorum that all ranks of the site know of
        super().__init__(**manager)
        self._client: Any = NumberedByMembers(self._client, manager["pg"].expect)

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        """Return when the quorum stands, with the weights of others where this site was behind.

        Raises ToldToStop, PeersMissing.
        """
        deadline = time.monotonic() + self.patience_s
        is_said = False
        while True:
            self._quorum_future = None  # of one that has failed, torchft would raise its error anew
            try:
                return super().start_quorum(allow_heal, shrink_only, timeout)
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                trouble = str(error).splitlines()[0]
            if time.monotonic() > deadline:
                raise PeersMissing(
                    f"LIGHTHOUSE={self.lighthouse}: no quorum of sites in {self.patience_s:.0f} s: "
                    f"{trouble}; look at make lighthouse there, and at the network"
                )
            if not is_said:
                log.warning(
                    "the lighthouse at %s does not answer (%s); trying for %.0f s",
                    self.lighthouse,
                    trouble,
                    self.patience_s,
                )
                is_said = True
            time.sleep(RETRY_S)

    def wait_quorum(self) -> None:
        """Wait for the quorum, in slices between which a signal is heard. Raises ToldToStop."""
        future: Any = self._quorum_future
        began = time.monotonic()
        is_said = False
        while future is not self.agreed_on:  # torchft waits once more before each sum
            with contextlib.suppress(TimeoutError):
                future.exception(LOOK_S)
            is_over = future.done()
            has_failed = is_over and future.exception() is not None
            all_over, any_failed, is_stopped = self.agree(is_over, has_failed)
            if all_over:
                self.agreed_on = future
                if any_failed and not has_failed:
                    raise ConnectionError("another process of this site got none")
            elif is_stopped:
                # The others would else begin with this site, which is about to go.
                self.shutdown(wait=False)
                self.is_given_up = True
                raise ToldToStop
            if not is_said and time.monotonic() - began > SAY_S:
                log.warning(
                    "waiting for a quorum of sites for %.0f s: the lighthouse at %s is away, or a "
                    "site that is up is not there yet",
                    SAY_S,
                    self.lighthouse,
                )
                is_said = True
        super().wait_quorum()
