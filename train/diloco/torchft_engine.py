"""What torchft is given, and how it is made to fit: parts of a model, outer optimizers, weights over HTTP, quorums.

torchft waits for a quorum without hearing of a signal, gives up where the lighthouse is away, advertises the host's
name, moves on by hooks of an optimizer, and reads what peers send as pickles. Here it does not.
"""

import contextlib
import datetime
import logging
import time
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager

from settings.config import Config
from train.diloco.result import SitesMissing, ToldToStop
from train.diloco.weight_server import finish_on_gpu
from train.distributed.parallel import local, weights_of

log = logging.getLogger(__name__)

for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
    logging.getLogger(name).setLevel(
        logging.CRITICAL
    )  # what went wrong is said here, in a sentence
ASK_S = 0.5  # between two looks at whether a wait is over, or the process was told to stop
SAY_S = 30.0  # of waiting, after which that is said
RETRY_S = 2.0  # before a lighthouse that does not answer is asked again


class Fragment(nn.Module):
    """Some weights of a model, by name, as torchft asks for them; of FSDP2 the parts that this process holds."""

    def __init__(self, model: nn.Module, names: list[str]):
        super().__init__()
        self.weights: Callable[[], dict[str, nn.Parameter]] = lambda: weights_of(model)
        self.names = names

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        weights = self.weights()
        return ((name, weights[name]) for name in self.names)


def fragments_of(sizes: dict[str, int], count: int) -> list[list[str]]:
    """Names of weights by fragment: blocks strided, as Douillard et al. 2025 have them, and all else with the smallest.

    sizes: name -> numbers of a weight, of all weights.
    """
    found: list[list[str]] = [[] for _ in range(count)]
    rest = []
    for name in sizes:
        if name.startswith("layers."):
            found[int(name.split(".")[1]) % count].append(name)
        else:
            rest.append(name)
    smallest = min(found, key=lambda names: sum(sizes[name] for name in names))
    smallest.extend(rest)
    return found


class Nesterov(torch.optim.SGD):
    """The outer optimizer of a fragment. Its momentum travels and is kept by the names of weights, as local parts."""

    def __init__(self, fragment: Fragment, c: Config):
        weights = [weight for _, weight in fragment.named_parameters()]
        in_one_pass = not any(
            hasattr(weight, "device_mesh") for weight in weights
        )  # torch has none for split weights
        super().__init__(
            weights,
            lr=c.outer_learning_rate,
            momentum=c.outer_momentum,
            nesterov=c.outer_momentum > 0,
            fused=in_one_pass,
        )
        self.fragment = fragment

    def momentum(self) -> dict[str, Tensor]:
        """By name, as the weights are split; empty before the first exchange."""
        return {
            name: buffer
            for name, weight in self.fragment.named_parameters()
            if (buffer := self.state.get(weight, {}).get("momentum_buffer")) is not None
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: aside(buffer) for name, buffer in self.momentum().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state.clear()
        for name, weight in self.fragment.named_parameters():
            if name in state_dict:
                buffer = torch.zeros_like(weight)
                local(buffer).copy_(state_dict[name])
                self.state[weight]["momentum_buffer"] = buffer


def aside(tensor: Tensor) -> Tensor:
    """A copy of this process's part in host memory: a GPU has no room for another of all weights and moments."""
    return local(tensor.detach()).to("cpu", copy=True)


class Answers:
    """What the lighthouse says of a quorum, as torchft's client hears it, but for two things.

    A lighthouse that was started again counts quorums from 1 anew: the number of other members, or the place at which
    they found each other long ago, would be taken for theirs. So the members go into the one, and how far they are
    into the other. One who was away while the others went on may even know that number as that of these members, and
    would not connect anew, as they do, so that each waits for the other: where any is behind, how far they are goes
    into the number too.
    """

    def __init__(self, client: Any, heals: Callable[[bool], None]):
        """heals: is told whether any member has weights to fetch first."""
        self.client, self.heals = client, heals

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def _quorum(self, **asked: Any) -> Any:
        found = self.client._quorum(**asked)
        said = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
        heals = found.max_world_size < found.replica_world_size
        members = repr((found.replica_ids, found.max_step if heals else None))
        said["quorum_id"] = found.quorum_id << 32 | zlib.crc32(members.encode())
        said["store_address"] = f"{found.store_address}/{found.max_step}"
        self.heals(heals)
        return types.SimpleNamespace(**said)


class Quorums(Manager):
    """torchft's manager of one process, which asks again where the lighthouse is away, and stops waiting when told."""

    def __init__(
        self,
        told: Callable[[bool, bool], tuple[bool, bool, bool]],
        patience_s: float,
        lighthouse: str,
        **arguments: Any,
    ):
        """told: whether all ranks of the site are through, whether any has failed, given that of this one, and whether
        any was told to stop; all ranks must call it together."""
        self.told, self.patience_s, self.lighthouse = told, patience_s, lighthouse
        self.abandoned, self.committed, self.step_before = False, False, 0
        self.settled: Any = None  # a quorum that all ranks of the site know of
        super().__init__(**arguments)
        self._client: Any = Answers(self._client, arguments["pg"].expect)

    def _manager_state_dict(self) -> dict[str, object]:
        finish_on_gpu()  # the last update, too
        return super()._manager_state_dict()

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: datetime.timedelta | None = None,
    ) -> None:
        """Returns when the quorum stands, with its weights taken over where this site was behind. Raises ToldToStop,
        SitesMissing."""
        deadline, said, self.step_before = time.monotonic() + self.patience_s, False, self._step
        while True:
            try:
                return super().start_quorum(allow_heal, shrink_only, timeout)
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                trouble = str(error).splitlines()[0]
            if time.monotonic() > deadline:
                raise SitesMissing(
                    f"LIGHTHOUSE={self.lighthouse}: no quorum of sites in "
                    f"{self.patience_s:.0f} s: {trouble}; look at make lighthouse there, and at the "
                    "network"
                )
            if not said:
                log.warning(
                    "the lighthouse at %s does not answer (%s); trying for %.0f s",
                    self.lighthouse,
                    trouble,
                    self.patience_s,
                )
                said = True
            time.sleep(RETRY_S)
            self._quorum_future = None  # that one has failed

    def wait_quorum(self) -> None:
        """As torchft has it, in pieces between which signals are heard."""
        future: Any = self._quorum_future
        began, said = time.monotonic(), False
        while future is not self.settled:  # asked again behind the quorum, for each sum
            if not said and time.monotonic() - began > SAY_S:
                log.warning(
                    "waiting for a quorum of sites for %.0f s: the lighthouse at %s is away, or a site that is "
                    "up is not there yet",
                    SAY_S,
                    self.lighthouse,
                )
                said = True
            with contextlib.suppress(TimeoutError):
                future.exception(ASK_S)
            done = future.done()
            through, failed, stop = self.told(done, done and future.exception() is not None)
            if through:
                self.settled = future
                if failed and future.exception() is None:
                    raise ConnectionError("another process of this site got none")
            elif stop:
                self.abandoned = True
                if self._manager is not None:
                    self._manager.shutdown()  # or the others would begin with this site, which is about to go
                raise ToldToStop
        super().wait_quorum()

    def current_step(self) -> int:
        """Exchanges so far. A quorum that was given up on may still bring others' number, and no weights with it."""
        return self.step_before if self.abandoned else super().current_step()

    def should_commit(self, timeout: datetime.timedelta | None = None) -> bool:
        """As torchft has it; the answer stays to be asked for."""
        self.committed = super().should_commit(timeout)
        return self.committed


class Engine(DiLoCo):
    """torchft's DiLoCo, moved on step by step instead of by hooks of an optimizer, and set to where one stood."""

    _manager: Quorums

    def __init__(self, *arguments: Any, fragment_update_alpha: float, **named: Any):
        super().__init__(*arguments, fragment_update_alpha=fragment_update_alpha, **named)
        for fragment in self._fragments if not fragment_update_alpha else ():
            # or each exchange would copy all weights once more, to mix in none of them
            fragment._save_local_parameters = fragment._merge_parameters = lambda: None

    @property
    def turn(self) -> int:
        """Steps from one exchange to the next."""
        return self._sync_every

    @property
    def position(self) -> int:
        """Steps since the last exchange; less than 0 where it ended early."""
        return self._local_step

    @position.setter
    def position(self, steps: int) -> None:
        self._local_step = steps

    @property
    def opens(self) -> int:
        """The position at which an exchange begins."""
        return self._sync_every - self._fragment_sync_delay

    @property
    def in_flight(self) -> bool:
        return any(fragment._allreduce_work for fragment in self._fragments)

    def count_step(self) -> None:
        """Another step was made; what is due is done. Raises ToldToStop, SitesMissing."""
        hook: Any = self._step_post_hook  # which asks for none of what torch hands to hooks
        hook(None, (), {})

    def begin_now(self) -> None:
        """Begin an exchange whatever the position, and end it too where none overlaps."""
        self._local_step = self.opens - 1
        self.count_step()

    def end_now(self) -> None:
        """End the exchange that is in flight."""
        self._local_step = self._sync_every - 1
        self.count_step()

    def synchronised(self, fragment: int) -> dict[str, Tensor]:
        """Name -> the weights that all sites have in common, this process's part, of a fragment."""
        return self._fragments[fragment].original_parameters

    def __len__(self) -> int:
        return len(self._fragments)
