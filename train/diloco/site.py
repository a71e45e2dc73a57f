"""What a process does about the other sites: it syncs fragments with them, and counts syncs.

    SYNC_EVERY / SYNC_FRAGMENTS inner steps at each site by itself
    -> a quorum: who takes part; a site that is behind gets the weights of one that is not
    -> a sync of the next fragment (outer_step.py), summed over the sites by allreduce.py

With SYNC_DELAY a sync begins that many steps before it is due, and ends then. A sync that fails
costs the steps since the last. A process syncs its own part of each weight, with the
processes of its rank at the other sites.
"""

import contextlib
import datetime
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from settings.config import Config
from train import timeouts
from train.checkpoint.checkpoint import make_moments, tensor_states
from train.diloco.allreduce import StripedGloo
from train.diloco.outer_step import OuterOptimizer
from train.diloco.quorum import Quorums
from train.diloco.site_registry import SYNC_STREAMS, own_address
from train.diloco.site_rendezvous import describe_apart
from train.diloco.weight_server import WeightServer
from train.distributed.parallel import local
from train.distributed.run_secret import find_secret
from train.distributed.signed_http import listen
from train.distributed.world import (
    PeersDiffer,
    PeersMissing,
    World,
    all_gather_object,
    broadcast_object,
    group_of,
)
from train.optim import Optimizer

AGAIN_S = 5  # until torchft asks a lighthouse again that is away or went away amid a quorum
CONNECT_S = 20.0  # for a lighthouse or a manager to answer at all


class Site:
    """This site, as one of its ranks knows it. All ranks create it together, once weights are there.

    An example: SYNC_EVERY=100 SYNC_FRAGMENTS=4 SYNC_DELAY=5. The sync_interval is 25 steps, and base
    is 0. The third sync is due at step 0 + 3 x 25 = 75, and its fragment is 2 of 0 to 3. After
    step 70 it begins: syncs is 2, and last_sync_step 50. After step 75 it ends: syncs is 3.
    A run that ends at step 90 syncs fragments 3, 0, 1 and 2 there: syncs is 7, finished is
    90, and base becomes 90 - 7 x 25 = -85. If MAX_STEPS is raised, the eighth sync is due at
    step -85 + 8 x 25 = 115, an interval after step 90.

    Args:
        stop_requested: whether this process was told to stop.
        step: at which the model is, by a checkpoint or anew.
        tensors, facts: what this class gave to that checkpoint. Where the run had no sites there
            are none of either: the model's weights are global then, and win over those of a site
            at step 0.

    Attributes:
        step: that the model has made, as of the last call.
        outer: the global weights, and what optimizes them.
        sync_interval: steps from one sync to the next.
        base: the step at which sync 0 would have been due.
        finished: the step after which nothing was left to sync; -1 before.
        number: of the fragment in flight, or of the last one.
        healed_at: the step of the site whose weights the last call of `sync` took over, since
            this site was behind; None if it was not.
        present: sites that took part in the last sync.
        seconds, waited_s: what the last sync took, and what training waited of that.
        digests: of each fragment's global weights.
        manager: torchft's, which counts the syncs.
    """

    manager: Quorums
    address: str

    def __init__(
        self,
        config: Config,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        stop_requested: Callable[[], bool],
        step: int,
        tensors: dict[str, Tensor],
        facts: Mapping[str, int],
    ):
        """Raises PeersMissing."""
        self.config = config
        self.world = world
        self.model = model
        self.optimizer = optimizer
        self.sync_interval = config.sync_every // config.sync_fragments
        self.number = 0
        self.healed_at: int | None = None
        self.present = config.sites
        self.began = 0.0
        self.seconds = 0.0
        self.waited_s = 0.0
        self.outer = OuterOptimizer(model, config)
        with torch.no_grad():
            for name, values in self.outer.tensors().items():
                if name in tensors:
                    local(values).copy_(local(tensors[name]))
        self.digests = self.digest_all()
        self.step = step
        if facts:
            self.finished = facts["finished"]
            syncs = facts["exchanges"]
            last_sync_step = facts["base"] + syncs * facts["turn"]  # the same at all sites
        else:
            self.finished = -1
            syncs = int(step > 0)
            last_sync_step = step - step % self.sync_interval
        self.base = last_sync_step - syncs * self.sync_interval
        self.connect(stop_requested)
        self.manager.load_state_dict({"step": syncs, "batches_committed": 0})

    # ---- Connections

    def connect(self, stop_requested: Callable[[], bool]) -> None:
        """Open what the sites, and the ranks of this one, find each other by. Raises PeersMissing."""
        config, world = self.config, self.world
        patience_s = timeouts.SYNC_TIMEOUT_S
        patience = datetime.timedelta(seconds=patience_s)
        group = group_of(list(range(world.size)), patience_s)
        # Members are sorted by site, then by start; torchft reads the last figures.
        name = broadcast_object(f"{config.site_rank:05d}-{time.time_ns()}-{config.site_rank}")
        try:
            self.address = own_address(config.lighthouse)
            dtype = getattr(torch, config.sync_dtype)
            self.gloo = StripedGloo(self.address, SYNC_STREAMS, dtype)
            self.store, store_address, store_port = open_store(self.address, world)
            self.manager = Quorums(
                stop_requested,
                group,
                config.lighthouse,
                pg=self.gloo,
                load_state_dict=self.take_over,
                state_dict=self.hand_over,
                min_replica_size=config.min_sites,
                use_async_quorum=False,
                timeout=patience,
                quorum_timeout=patience,
                connect_timeout=datetime.timedelta(seconds=CONNECT_S),
                rank=world.rank,
                world_size=world.size,
                store_addr=store_address,
                store_port=store_port,
                lighthouse_addr=f"http://{config.lighthouse}",
                replica_id=name,
                hostname=self.address,
                checkpoint_transport=WeightServer(
                    self.address, lambda: find_secret(config), patience_s
                ),
                init_sync=False,
                quorum_retries=patience_s // AGAIN_S,
            )
        except (RuntimeError, OSError) as error:
            raise PeersMissing(
                f"LIGHTHOUSE={config.lighthouse}: cannot be reached ({str(error).splitlines()[0]}); "
                "start make lighthouse there, and look at the name and the network"
            ) from None

    def leave(self) -> bool:
        """Take no part in syncs any more. Returns whether a thread still waits for other sites."""
        with contextlib.suppress(Exception):
            self.manager.shutdown(wait=False)
        self.gloo.shutdown()
        return self.manager.is_given_up or self.in_flight

    # ---- Counting

    @property
    def in_flight(self) -> bool:
        """Whether the changes of a fragment travel."""
        return bool(self.outer.changes)

    @property
    def syncs(self) -> int:
        """Syncs in which this site took part, or whose result it took over."""
        return self.manager.current_step()

    @property
    def last_sync_step(self) -> int:
        """The step at which the last sync was due. It may have been made before."""
        return self.base + self.syncs * self.sync_interval

    def progress(self) -> dict[str, Any]:
        """Return the syncs, and a hash of all global weights: the same at all that are as far."""
        weights = xxhash.xxh3_64("".join(self.digests).encode()).hexdigest()
        return {"exchanges": self.syncs, "weights": weights}

    @property
    def away(self) -> list[int]:
        """Sites that did not take part in the last sync."""
        there = {member // self.world.size for member in self.gloo.sites}
        return [site for site in range(self.config.sites) if there and site not in there]

    def is_due(self, step: int) -> bool:
        """Whether a sync begins or ends after this step."""
        due = self.last_sync_step + self.sync_interval
        return step >= (due if self.in_flight else due - self.config.sync_delay)

    def is_all_synced(self, step: int) -> bool:
        """Whether each fragment has been synced since the last sync before this step."""
        others = len(self.outer.fragments) - 1
        return not self.in_flight and self.last_sync_step >= step + others * self.sync_interval

    # ---- Syncing

    def sync(self, step: int) -> bool | None:
        """End the sync that is in flight. If none is, begin one, and end it if it has no delay.

        step: that the model has made. Raises Interrupted, with all as it was before the sync;
        PeersMissing, PeersDiffer.

        Returns:
            Whether the sync counts that has ended now, the same on all ranks; None if none has.
        """
        called = time.perf_counter()
        self.step = step
        self.healed_at = None
        is_new = not self.in_flight
        if is_new:
            self.began = called
            self.waited_s = 0.0
            self.begin()
        is_committed = None
        if not (is_new and self.config.sync_delay):
            is_committed = self.outer.receive(self.manager)
            self.digests[self.number] = self.digest(self.outer.fragments[self.number])
            if not is_committed:
                self.gloo.abort()  # the others may wait for this site
            self.seconds = time.perf_counter() - self.began
        self.waited_s += time.perf_counter() - called
        return is_committed

    def begin(self) -> None:
        """Find the sites that take part, catch up with them, and send the changes of a fragment."""
        config, before = self.config, self.step
        self.gloo.reset()
        try:
            self.manager.start_quorum()
        except (RuntimeError, OSError) as error:
            raise PeersMissing(
                f"LIGHTHOUSE={config.lighthouse}: no quorum of sites ({str(error).splitlines()[0]}); "
                "look at make lighthouse there, and at the network"
            ) from None
        if self.gloo.is_double:
            raise PeersMissing(
                f"another process takes part as site {config.site_rank} "
                f"(NODE_RANK={config.node_rank}), since before this one; stop one of them"
            )
        self.present = self.manager.num_participants()
        if len(set(all_gather_object((self.healed_at, self.syncs)))) > 1:  # a model of two halves
            raise PeersMissing(
                "the weights of another site came through to some processes of this one only; it "
                "goes back to its checkpoint"
            )
        if self.healed_at is not None:
            if self.healed_at < before:  # it has made more syncs in fewer steps
                raise PeersDiffer(describe_apart(config, "another site"))
            self.step = self.healed_at
            self.digests = self.digest_all()
        self.number = self.syncs % len(self.outer.fragments)
        self.outer.send(self.number, self.manager)

    def digest_all(self) -> list[str]:
        return [self.digest(names) for names in self.outer.fragments]

    def digest(self, names: list[str]) -> str:
        """Hash the global weights of a fragment, over all ranks."""
        hashed = xxhash.xxh3_64()
        for name in sorted(names):
            hashed.update(name.encode())
            hashed.update(local(self.outer.weights[name]).cpu().contiguous().numpy().data)
        return xxhash.xxh3_64("".join(all_gather_object(hashed.hexdigest())).encode()).hexdigest()

    def finish(self, step: int) -> None:
        """Take the global weights after the run's last step. A longer run begins an interval here."""
        self.outer.reset_to_global()
        self.base += step - self.last_sync_step
        self.finished = step

    # ---- What is saved, and what travels

    def facts(self) -> dict[str, int]:
        """Return what a checkpoint keeps beside tensors."""
        return {
            "exchanges": self.syncs,
            "turn": self.sync_interval,
            "base": self.base,
            "finished": self.finished,
        }

    def states(self) -> dict[str, Tensor]:
        """Return all tensors that make up this site, or this process's part of each."""
        groups = tensor_states(self.model, self.optimizer, self.outer.tensors())
        return {
            f"{group}.{name}": tensor
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
        }

    def hand_over(self) -> dict[str, Any]:
        """Copy all that a site needs which is behind. Called in a thread of torchft's."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the last update too: this thread has another stream
        states = self.states()
        return {
            "step": self.step,
            "base": self.base,
            "shapes": {name: list(tensor.shape) for name, tensor in states.items()},
            # in host memory: a GPU has no room for another of all weights and moments
            "parts": {name: local(tensor).to("cpu", copy=True) for name, tensor in states.items()},
        }

    @torch.no_grad()
    def take_over(self, state: dict[str, Any]) -> None:
        """Take what another site has handed over."""
        parts = state["parts"]
        stored = {
            name: (torch.Size(shape), parts[name].dtype) for name, shape in state["shapes"].items()
        }
        make_moments(self.model, self.optimizer, None, stored)
        for name, tensor in self.states().items():
            local(tensor).copy_(parts[name])
        self.base = state["base"]
        self.healed_at = state["step"]


def open_store(address: str, world: World) -> tuple[Any, str, int]:
    """Open the store over which the members of a quorum find each other, on the first rank.

    Returns:
        The store, which must live on, or None; and where all ranks look for it, also those on
        other machines: at the address of the first.
    """
    store = None
    if world.is_first:
        listener = listen(address, 0)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    where, port = broadcast_object((address, store.port if store else 0))
    return store, where, port
