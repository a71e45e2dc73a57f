"""What a process does about the other sites: it exchanges fragments with them, and counts exchanges.

    SYNC_EVERY / SYNC_FRAGMENTS inner steps at each site by itself
    -> a quorum: who takes part; a site that is behind gets the weights of one that is not
    -> an exchange of the next fragment (outer_step.py), summed over the sites by allreduce.py

With SYNC_DELAY the exchange begins so many steps earlier, and ends when it is due. One that fails
costs the steps since the last. A process exchanges its own part of each weight, with the
processes of its rank at the other sites.

Steps are counted from the exchanges: number n is due at step base + n x SYNC_EVERY / SYNC_FRAGMENTS.
"""

import contextlib
import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from settings.config import Config
from train import timeouts
from train.checkpoint.checkpoint import make_moments, tensor_states
from train.diloco.allreduce import StripedGloo
from train.diloco.outer_step import Fragment, divide
from train.diloco.quorum import Quorums
from train.diloco.result import APART
from train.diloco.site_registry import SYNC_STREAMS, own_address
from train.diloco.weight_server import Transport, finish_on_gpu
from train.distributed.parallel import local, weights_of
from train.distributed.run_secret import find_secret
from train.distributed.world import (
    PeersMissing,
    World,
    from_all,
    from_first,
    group_of,
    sum_over_ranks,
)
from train.optim import Optimizer

AGAIN_S = 5  # between two tries of a lighthouse that went away amid a quorum; one try would hang
CONNECT_S = 20.0  # for a lighthouse or a manager to answer at all


class Site:
    """This site, as one of its ranks knows it. All ranks create it together, once weights are there.

    Args:
        is_told: whether this process was told to stop.

    Attributes:
        step: that the model has made, as of the last call.
        turn: steps from one exchange to the next.
        exchanges: in which this site took part, or whose result it took over.
        base: steps when exchanges were counted from 0.
        finished: the step after which nothing was left to exchange; -1 before.
        in_flight: the fragment whose changes travel.
        lands_at: the step at which they have arrived.
        number: the fragment of the last exchange that ended.
        missed: the steps that this site took no part in, as (from, to), if the last call of
            `exchange` found it behind.
        present: sites that took part in the last exchange.
        seconds, waited_s: what the last exchange took, and what training waited of that.
        digests: of each fragment's common weights.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        is_told: Callable[[], bool],
    ):
        """Raises PeersMissing."""
        self.config = config
        self.world = world
        self.model = model
        self.optimizer = optimizer
        self.is_told = is_told
        self.step = 0
        self.turn = config.sync_every // config.sync_fragments
        self.exchanges = 0
        self.base = 0
        self.finished = -1
        self.in_flight: Fragment | None = None
        self.lands_at = 0
        self.number = 0
        self.missed: tuple[int, int] | None = None
        self.present = config.sites
        self.began = 0.0
        self.seconds = 0.0
        self.waited_s = 0.0
        self.healed_at: int | None = None  # the step of the site whose weights were taken over
        try:
            self.address = own_address(config.lighthouse)
        except OSError as error:
            raise PeersMissing(
                f"LIGHTHOUSE={config.lighthouse}: this machine cannot reach it ({error.strerror}); "
                "check the name and the network"
            ) from None
        self.group = group_of(list(range(world.size)), timeouts.SYNC_TIMEOUT_S)
        dtype = getattr(torch, config.sync_dtype)
        self.striped = StripedGloo(self.address, SYNC_STREAMS, dtype, timeouts.SYNC_TIMEOUT_S)
        self.store = self.open_store()
        try:
            self.manager = self.open_manager()
        except (RuntimeError, TimeoutError) as error:
            raise PeersMissing(
                f"LIGHTHOUSE={config.lighthouse}: does not answer ({str(error).splitlines()[0]}); "
                "start make lighthouse there, and look at the network"
            ) from None
        sizes = {name: weight.numel() for name, weight in weights_of(model).items()}
        self.fragments = [
            Fragment(model, names, config) for names in divide(sizes, config.sync_fragments)
        ]
        self.digests = [self.digest(fragment) for fragment in self.fragments]

    def open_store(self) -> Any:
        """Open the store over which the members of a quorum find each other, if it is this site's.

        It is on the first rank. All ranks look for it at that one's address, also from other machines.
        """
        store = None
        if self.world.is_first:
            store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        here = (self.address, store.port if store else 0)
        self.store_addr, self.store_port = from_first(here)
        return store

    def open_manager(self) -> Quorums:
        config = self.config
        patience = datetime.timedelta(seconds=timeouts.SYNC_TIMEOUT_S)
        # Members are sorted by site, then by start; torchft reads the last figures.
        name = f"{config.site_rank:05d}-{time.time_ns()}-{config.site_rank}"
        return Quorums(
            self.agree,
            timeouts.SYNC_TIMEOUT_S,
            config.lighthouse,
            pg=self.striped,
            load_state_dict=self.take_over,
            state_dict=self.hand_over,
            min_replica_size=config.min_sites,
            use_async_quorum=False,
            timeout=patience,
            quorum_timeout=patience,
            connect_timeout=datetime.timedelta(seconds=CONNECT_S),
            rank=self.world.rank,
            world_size=self.world.size,
            store_addr=self.store_addr,
            store_port=self.store_port,
            lighthouse_addr=f"http://{config.lighthouse}",
            replica_id=from_first(name),
            hostname=self.address,
            checkpoint_transport=Transport(
                self.address, lambda: find_secret(config), timeouts.SYNC_TIMEOUT_S
            ),
            init_sync=False,
            quorum_retries=timeouts.SYNC_TIMEOUT_S // AGAIN_S,
        )

    def agree(self, is_over: bool, has_failed: bool) -> tuple[bool, bool, bool]:
        """Return whether all ranks are over, whether any has failed, and whether any was told to stop."""
        here = torch.tensor([float(is_over), float(has_failed), float(self.is_told())])
        over, failed, told = sum_over_ranks(here, self.group).tolist()
        return over == self.world.size, failed > 0, told > 0

    # ---- Counting

    @property
    def common_step(self) -> int:
        """The step at which the last exchange was due. It may have been made before."""
        return self.base + self.exchanges * self.turn

    @property
    def common(self) -> str:
        """A hash of all that the sites have in common: the same at all that are equally far."""
        return xxhash.xxh3_64("".join(self.digests).encode()).hexdigest()

    @property
    def away(self) -> list[int]:
        """Sites that did not take part in the last exchange."""
        there = {member // self.world.size for member in self.striped.sites}
        return [site for site in range(self.config.sites) if there and site not in there]

    def is_due(self, step: int) -> bool:
        """Whether an exchange begins after this step."""
        begins_at = self.common_step + self.turn - self.config.sync_delay
        return not self.in_flight and step >= begins_at

    def is_landing(self, step: int) -> bool:
        """Whether the exchange that is in flight ends after this step."""
        return self.in_flight is not None and step >= self.lands_at

    def is_through(self, step: int) -> bool:
        """Whether each fragment has been exchanged since the last exchange before this step."""
        others = len(self.fragments) - 1
        return not self.in_flight and self.common_step >= step + others * self.turn

    # ---- Exchanging

    def exchange(self, step: int) -> bool | None:
        """End the exchange that is in flight. If none is, begin one, and end it if it has no delay.

        step: that the model has made. Raises ToldToStop, with all as it was before the exchange;
        PeersMissing.

        Returns:
            Whether the exchange counts that has ended now, the same on all ranks; None if none has.
        """
        called = time.perf_counter()
        self.step = step
        self.missed = None
        if self.in_flight is None:
            self.began = called
            self.waited_s = 0.0
            self.healed_at = None
            self.missed = self.begin()
            if self.config.sync_delay:
                self.waited_s += time.perf_counter() - called
                return None
        assert self.in_flight
        self.number = self.fragments.index(self.in_flight)
        is_committed = self.in_flight.receive(self.manager)
        self.in_flight = None
        self.exchanges += is_committed
        self.waited_s += time.perf_counter() - called
        self.digests[self.number] = self.digest(self.fragments[self.number])
        if not is_committed:
            self.striped.abort()  # the others may wait for this site
        self.seconds = time.perf_counter() - self.began
        return is_committed

    def begin(self) -> tuple[int, int] | None:
        """Find the sites that take part, catch up with them, and send the changes of a fragment.

        Returns:
            The steps that this site has missed, as (from, to), if it was behind.
        """
        self.striped.reset()
        self.manager.start_quorum()
        if self.striped.is_double:
            raise PeersMissing(
                f"another process takes part as site {self.config.site_rank} "
                f"(NODE_RANK={self.config.node_rank}), since before this one; stop one of them"
            )
        self.present = self.manager.num_participants()
        before = self.step
        if self.healed_at is not None:
            self.step = self.healed_at
            self.exchanges = self.manager.current_step()
            self.digests = [self.digest(fragment) for fragment in self.fragments]
        if len(set(from_all((self.healed_at, self.exchanges)))) > 1:  # a model of two halves
            raise PeersMissing(
                "the weights of another site came through to some processes of this one only; it "
                "goes back to its checkpoint"
            )
        self.in_flight = self.fragments[self.exchanges % len(self.fragments)]
        self.lands_at = self.step + self.config.sync_delay
        self.in_flight.send(self.manager)
        return None if self.healed_at is None else (before, self.healed_at)

    def digest(self, fragment: Fragment) -> str:
        """Hash what the sites have in common of a fragment, over all ranks."""
        hashed = xxhash.xxh3_64()
        for name, common in sorted(fragment.common.items()):
            hashed.update(name.encode())
            hashed.update(common.cpu().contiguous().numpy().data)
        return xxhash.xxh3_64("".join(from_all(hashed.hexdigest())).encode()).hexdigest()

    def drop(self) -> None:
        """Go back to the common weights, without what this site has trained since."""
        for fragment in self.fragments:
            fragment.take_common()

    def finish(self, step: int) -> None:
        """Stand at the common weights after the run's last step. A longer run begins a turn here."""
        self.drop()
        self.base += step - self.common_step
        self.finished = step

    def count(self, exchanges: int) -> None:
        self.exchanges = exchanges
        self.manager.load_state_dict({"step": exchanges, "batches_committed": 0})

    def fall_behind(self) -> None:
        """Count as further behind than any other site, whose weights are then taken over."""
        self.base = self.common_step - APART * self.turn
        self.count(APART)

    def leave(self) -> None:
        """Take no part in exchanges any more."""
        with contextlib.suppress(Exception):
            self.manager.shutdown(wait=False)
        self.striped.shutdown()

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still waits for a quorum or for other sites."""
        return self.manager.is_given_up or self.in_flight is not None

    # ---- What is saved, and what travels

    def facts(self) -> dict[str, int]:
        """Return what a checkpoint keeps beside tensors."""
        return {
            "exchanges": self.exchanges,
            "turn": self.turn,
            "base": self.base,
            "finished": self.finished,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return weights.NAME and momentum.NAME, split over processes as the weights are."""
        weights = weights_of(self.model)
        tensors = {}
        for fragment in self.fragments:
            for name in fragment.names:
                for kind, part in (("weights", fragment.common), ("momentum", fragment.momentum)):
                    tensors[f"{kind}.{name}"] = as_split(part[name], weights[name])
        return tensors

    @torch.no_grad()
    def stand(self, tensors: dict[str, Tensor], step: int, exchanges: int, base: int) -> None:
        """Stand where a checkpoint was taken. Without tensors, the model's weights are in common."""
        for fragment in self.fragments:
            fragment.declare_common()
        for name, values in self.tensors().items():
            if name in tensors:
                local(values).copy_(local(tensors[name]))
        self.step = step
        self.base = base
        self.count(exchanges)
        self.digests = [self.digest(fragment) for fragment in self.fragments]

    def states(self) -> dict[str, Tensor]:
        """Return all tensors that make up this site, or this process's part of each."""
        groups = tensor_states(self.model, self.optimizer, self.tensors())
        return {
            f"{group}.{name}": tensor
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
        }

    def hand_over(self) -> dict[str, Any]:
        """Copy all that a site needs which is behind. Called in a thread of torchft's."""
        finish_on_gpu()  # the last update too
        states = self.states()
        return {
            "step": self.step,
            "base": self.base,
            "shapes": {name: list(tensor.shape) for name, tensor in states.items()},
            # in host memory: a GPU has no room for another of all weights and moments
            "parts": {name: local(tensor).to("cpu", copy=True) for name, tensor in states.items()},
        }

    @torch.no_grad()
    def take_over(self, given: dict[str, Any]) -> None:
        """Take what another site has handed over."""
        parts = given["parts"]
        stored = {
            name: (torch.Size(shape), parts[name].dtype) for name, shape in given["shapes"].items()
        }
        make_moments(self.model, self.optimizer, None, stored)
        for name, tensor in self.states().items():
            local(tensor).copy_(parts[name])
        self.base = given["base"]
        self.healed_at = given["step"]


def as_split(values: Tensor, weight: Tensor) -> Tensor:
    """Return a process's part of something as large as a weight as a tensor split as the weight is."""
    if not hasattr(weight, "device_mesh"):
        return values
    from torch.distributed.tensor import DTensor

    split: Any = weight
    return DTensor.from_local(
        values,
        split.device_mesh,
        split.placements,
        run_check=False,
        shape=split.shape,
        stride=split.stride(),
    )
