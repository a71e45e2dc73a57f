"""DiLoCo between sites (Douillard et al. 2023), by torchft, whose manager and DiLoCo are wired to a run of ours here.

    SYNC_EVERY / SYNC_FRAGMENTS inner steps at each site by itself
    -> a quorum: who takes part now; who is behind gets weights and moments of one that is not ("heals")
    -> the change of a fragment's weights since its last exchange, averaged over those sites
    -> a Nesterov step of the synchronised weights by that mean, the same at each site; training goes on from them

With SYNC_DELAY the quorum comes so many steps earlier, and training goes on while changes travel (Douillard et al.
2025). A change that fails on the way is dropped at all processes of the site: it goes back to the synchronised weights,
and the steps since then are lost. A process sends only the part of each weight that it holds, to those of its rank.

torchft_engine.py has what torchft is given, allreduce.py the sum over sites; site_registry.py says who is there before that.
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
from train.checkpoint.checkpoint import blank
from train.diloco.allreduce import StripedGloo
from train.diloco.result import APART, DoubleSite, Outcome, SitesMissing
from train.diloco.site_registry import SYNC_STREAMS, own_address
from train.diloco.torchft_engine import (
    Engine,
    Fragment,
    Nesterov,
    Quorums,
    aside,
    fragments_of,
)
from train.diloco.weight_server import Transport
from train.distributed.parallel import local, weights_of
from train.distributed.run_secret import find_secret
from train.distributed.world import World, from_all, from_first, group_of, sum_over
from train.optim import Optimizer

AGAIN_S = 5  # between two tries of a lighthouse that went away in the midst of a quorum; one try would hang
SYNC_ALPHA = (
    0.5  # share of a site's own weights in the mean, where it trained on meanwhile (SYNC_DELAY)
)
CONNECT_S = 20.0  # for a lighthouse or a manager to answer at all


class Site:
    """What a process does about the other sites. Created by all ranks of a site together, once weights are there."""

    def __init__(
        self,
        c: Config,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        asked: Callable[[], bool],
    ):
        """asked: whether this process was told to stop. Raises SitesMissing."""
        self.c, self.world, self.model, self.optimizer, self.asked = (
            c,
            world,
            model,
            optimizer,
            asked,
        )
        try:
            self.address = own_address(c.lighthouse)
        except OSError as error:
            raise SitesMissing(
                f"LIGHTHOUSE={c.lighthouse}: this machine cannot reach it ({error.strerror}); check the name and "
                "the network"
            ) from None
        self.present, self.began, self.waited_s = c.sites, 0.0, 0.0
        self.step, self.base = (
            0,
            0,
        )  # so many were made; this many when exchanges were counted from 0
        self.finished = -1  # the step behind which nothing was left to exchange
        self.healed_at: int | None = None  # the step of the site whose weights were taken over
        self.digests: list[str] = []
        self.group = group_of(list(range(world.size)), timeouts.SYNC_TIMEOUT_S)
        self.striped = StripedGloo(
            self.address, SYNC_STREAMS, getattr(torch, c.sync_dtype), timeouts.SYNC_TIMEOUT_S
        )
        self.store = self.own_store()
        patience = datetime.timedelta(seconds=timeouts.SYNC_TIMEOUT_S)
        try:
            self.manager = Quorums(
                self.told,
                timeouts.SYNC_TIMEOUT_S,
                c.lighthouse,
                pg=self.striped,
                load_state_dict=self.take_over,
                state_dict=self.hand_over,
                min_replica_size=c.min_sites,
                use_async_quorum=False,
                timeout=patience,
                quorum_timeout=patience,
                connect_timeout=datetime.timedelta(seconds=CONNECT_S),
                rank=world.rank,
                world_size=world.size,
                store_addr=self.store_addr,
                store_port=self.store_port,
                lighthouse_addr=f"http://{c.lighthouse}",
                replica_id=self.replica_id(),
                hostname=self.address,
                checkpoint_transport=Transport(
                    self.address, lambda: find_secret(c), timeouts.SYNC_TIMEOUT_S
                ),
                init_sync=False,
                quorum_retries=timeouts.SYNC_TIMEOUT_S // AGAIN_S,
            )
        except (RuntimeError, TimeoutError) as error:
            raise SitesMissing(
                f"LIGHTHOUSE={c.lighthouse}: does not answer ({str(error).splitlines()[0]}); start make "
                "lighthouse there, and look at the network"
            ) from None
        names = fragments_of(
            {name: weight.numel() for name, weight in weights_of(model).items()}, c.sync_fragments
        )
        fragments = [Fragment(model, part) for part in names]
        self.outer = [Nesterov(fragment, c) for fragment in fragments]
        device, unused = (
            next(iter(weights_of(model).values())).device,
            Any,
        )  # the inner optimizer is ours to step
        self.engine = Engine(
            self.manager,
            list(fragments),
            unused,
            list(self.outer),
            c.sync_every,
            backup_device=device,
            fragment_sync_delay=c.sync_delay,
            fragment_update_alpha=SYNC_ALPHA if c.sync_delay else 0.0,
        )

    def replica_id(self) -> str:
        """What this site is called in a quorum: sorted by site and then by start; torchft reads its last figures."""
        return from_first(f"{self.c.site_rank:05d}-{time.time_ns()}-{self.c.site_rank}")

    def own_store(self) -> Any:
        """The store over which the members of a quorum find each other, where it is of this site. On the first rank,
        at whose address all others look for it, those on another machine too."""
        store = (
            dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            if self.world.is_first
            else None
        )
        found: tuple[str, int] = from_first((self.address, store.port if store else 0))
        self.store_addr, self.store_port = found
        return store

    def told(self, through: bool, failed: bool) -> tuple[bool, bool, bool]:
        """(whether all ranks of the site are through, whether any has failed, whether any was told to stop)."""
        values = sum_over(
            torch.tensor([float(through), float(failed), float(self.asked())]), self.group
        )
        done, failures, stop = values.tolist()
        return done == self.world.size, failures > 0, stop > 0

    # ---- Steps

    @property
    def turn(self) -> int:
        return self.engine.turn

    @property
    def exchanges(self) -> int:
        """How many this site has taken part in or taken over."""
        return int(self.manager.current_step())

    @property
    def common_step(self) -> int:
        """The step behind which the last exchange was due, if it did not end early."""
        return self.base + self.exchanges * self.turn

    @property
    def common(self) -> str:
        """A hash of all that the sites have in common: the same at all that are equally far."""
        return xxhash.xxh3_64("".join(self.digests).encode()).hexdigest()

    def is_through(self, step: int) -> bool:
        """Whether each fragment has been exchanged, once the last exchange before the run's last step was."""
        return (
            not self.engine.in_flight
            and step - self.common_step <= -(len(self.engine) - 1) * self.turn
        )

    @property
    def away(self) -> list[int]:
        """Sites that did not take part in the last exchange."""
        there = {member // self.world.size for member in self.striped.sites}
        return [site for site in range(self.c.sites) if there and site not in there]

    @property
    def waits_next(self) -> bool:
        """Whether the next step ends with a wait for others."""
        return self.engine.position + 1 in (self.engine.opens, self.engine.turn)

    def advance(self, step: int, now: bool = False) -> Outcome:
        """A step was made, `step` in all, and what is due is done; now: what the next exchange would do, without one.

        Raises ToldToStop, with the site as it was before the exchange; SitesMissing; DoubleSite.
        """
        self.step = step
        engine, called, flew = self.engine, time.perf_counter(), self.engine.in_flight
        begins = not flew and (now or engine.position + 1 == engine.opens)
        self.healed_at = None
        if begins:
            self.began, self.waited_s = called, 0.0
            self.striped.reset()
        if not now:
            engine.count_step()
        elif flew:
            engine.end_now()
        else:
            engine.begin_now()
        ended = (begins or flew) and not engine.in_flight
        if not begins and not ended:
            return Outcome(outer=self.exchanges, sites=self.present)
        if self.striped.is_double:
            raise DoubleSite(
                f"another process takes part as site {self.c.site_rank} (NODE_RANK={self.c.node_rank}), "
                "since before this one; stop one of them"
            )
        if (
            begins and len(set(from_all((self.healed_at, self.exchanges)))) > 1
        ):  # a model of two halves
            raise SitesMissing(
                "the weights of another site came through to some processes of this one only; it goes "
                "back to its checkpoint"
            )
        committed = ended and self.manager.committed
        before = self.exchanges - committed
        behind = None if self.healed_at is None else (step, self.healed_at)
        self.present, fragment = self.manager.num_participants(), before % len(engine)
        self.waited_s += time.perf_counter() - called
        for number in range(len(engine)) if behind else [fragment] * ended:
            self.digests[number] = self.digest(number)
        if not ended:
            return Outcome(behind, outer=self.exchanges, sites=self.present)
        if not committed:
            self.striped.abort()  # the others may wait for this site
        return Outcome(
            behind,
            fragment,
            committed,
            self.exchanges,
            self.present,
            time.perf_counter() - self.began,
            self.waited_s,
            self.striped.bytes_sent,
            self.digests[fragment],
        )

    def digest(self, fragment: int) -> str:
        """xxh3 of what the sites have in common of a fragment, over all ranks."""
        hashed = xxhash.xxh3_64()
        for name, values in sorted(self.engine.synchronised(fragment).items()):
            hashed.update(name.encode())
            hashed.update(values.cpu().contiguous().numpy().data)
        return xxhash.xxh3_64("".join(from_all(hashed.hexdigest())).encode()).hexdigest()

    # ---- What is kept and what travels

    def states(self) -> dict[str, Tensor]:
        """For checkpoints, split as the weights are: "weights.NAME", what the sites have in common, "momentum.NAME"."""
        weights, found = weights_of(self.model), dict[str, Tensor]()
        for number, outer in enumerate(self.outer):
            found |= {
                f"weights.{name}": alike(values, weights[name])
                for name, values in self.engine.synchronised(number).items()
            }
            found |= {f"momentum.{name}": buffer for name, buffer in outer.momentum().items()}
        return found

    def adopt(self, states: dict[str, Tensor], step: int, exchanges: int, base: int) -> None:
        """Stand where a checkpoint was taken. states: as above; without any, the model's weights are in common. Called
        by all ranks."""
        if not states:
            self.engine._save_parameters()
        for number, outer in enumerate(self.outer):
            for name, values in self.engine.synchronised(number).items() if states else ():
                values.copy_(local(states[f"weights.{name}"]))
            outer.load_state_dict(
                {
                    name: local(states[f"momentum.{name}"])
                    for name in outer.fragment.names
                    if f"momentum.{name}" in states
                }
            )
        self.manager.load_state_dict({"step": exchanges, "batches_committed": 0})
        self.base = base
        self.engine.position = step - self.common_step
        self.digests = [self.digest(number) for number in range(len(self.engine))]

    def fall_behind(self) -> None:
        """Count as further behind than any other site, whose weights are then taken over. Called by all ranks."""
        self.base = self.common_step - APART * self.turn
        self.manager.load_state_dict({"step": APART, "batches_committed": 0})

    def finish(self, step: int) -> None:
        """Nothing is left to exchange behind the run's last step: stand there with what the sites have in common. Where
        the run is made longer, a whole turn begins here."""
        self.forget_own()
        self.base += step - self.common_step
        self.engine.position, self.finished = 0, step

    def small(self) -> dict[str, int]:
        """What a checkpoint keeps beside tensors."""
        return {
            "exchanges": self.exchanges,
            "turn": self.turn,
            "base": self.base,
            "finished": self.finished,
        }

    def hand_over(self) -> dict[str, Any]:
        """What a site that is behind gets from this rank beside what torchft's DiLoCo keeps; a copy."""
        weights = weights_of(self.model)
        moments = {
            f"{name}/{key}": aside(value)
            for name, weight in weights.items()
            for key, value in self.optimizer.moments(weight).items()
        }
        return {
            "step": self.step,
            "base": self.base,
            "moments": moments,
            "weights": {name: aside(weight) for name, weight in weights.items()},
        }

    @torch.no_grad()
    def take_over(self, given: dict[str, Any]) -> None:
        """The other side of that."""
        for name, weight in weights_of(self.model).items():
            local(weight).copy_(given["weights"][name])
            moments = {}
            for key, value in given["moments"].items():
                if key.startswith(f"{name}/"):
                    whole = value.shape == local(weight).shape
                    moments[key.removeprefix(f"{name}/")] = kept = blank(
                        weight, weight.shape if whole else value.shape, value.dtype
                    )
                    local(kept).copy_(value)
            self.optimizer.set_moments(weight, moments)
        self.healed_at, self.base = int(given["step"]), int(given["base"])

    def drop(self) -> None:
        """Go back to what the sites have in common. No exchange may be in flight."""
        self.forget_own()
        self.engine.position = min(0, self.step - self.common_step)

    def forget_own(self) -> None:
        """Have the model be what the sites have in common, without what SYNC_ALPHA mixed in and later steps changed."""
        self.engine._restore_parameters()

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still waits for a quorum, or for other sites, that this process has given up on."""
        return self.manager.abandoned or self.engine.in_flight

    def leave(self) -> None:
        """No more part in any exchange."""
        with contextlib.suppress(Exception):
            self.manager.shutdown(wait=False)
        self.striped.shutdown()


def alike(values: Tensor, weight: Tensor) -> Tensor:
    """A process's part of something as large as a weight, as a tensor that is split as the weight is."""
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
