"""The whole plan of a run: the parts, put together."""

import dataclasses
import datetime
import time
from collections.abc import Sequence

from plan import data_wanted, limits, scaling, storage, this_machine
from plan.checks import RECOMPUTE, as_split, capacity_bytes
from plan.fleet import Fleet
from plan.hours import Pace, Time, time_of, waiting_s
from plan.measured import Probe, cpu_name, of_card, read
from plan.memory import Memory, largest_micro_batch, memory
from plan.milestones import Milestone, milestones
from plan.network import traffic
from plan.network.outer import of_a_site
from plan.run_so_far import Begun, begun
from plan.speed import speed
from settings.config import Config
from settings.finding import Finding


@dataclasses.dataclass(frozen=True)
class Held:
    """What a process holds in one of the ways to spread a model and to recompute. c: the run's settings, so changed;
    chosen: it is what the run does; largest_micro_batch: 0 where none fits."""

    c: Config
    need: Memory
    largest_micro_batch: int
    fits: bool
    chosen: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will take, or what is left of it will. Computed, but for what says that it was measured. None: not
    known. pace: its speed, and what a step waits for the network; time, kwh, cost: from step `done` on; places: that
    it writes to here, none where that is not known."""

    c: Config
    fleet: Fleet
    probe: Probe | None
    now: datetime.datetime
    begun: Begun | None
    pace: Pace
    time: Time | None
    milestones: list[Milestone]
    capacity_bytes: float
    memory: list[Held]
    places: list[storage.Place]
    write_mb_s: float
    write_why: str
    syncs: list[traffic.Sync]
    epochs: list[data_wanted.Epochs]
    findings: list[Finding]

    @property
    def done(self) -> int:
        """Steps that are made."""
        return self.begun.step if self.begun else 0

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.c.last_step * self.c.batch_tokens

    @property
    def expected_loss(self) -> float | None:
        """Nats a token at the end; None where the law knows none."""
        return scaling.loss_of(self.c)

    @property
    def gpu_hours(self) -> float | None:
        return (
            self.time.total * self.fleet.processes if self.time and not self.fleet.on_cpu else None
        )

    @property
    def kwh(self) -> float | None:
        """Of the GPUs alone at their limit, which training comes close to: the lab's H100 drew 673 to 681 of 700 W."""
        if self.time is None or self.fleet.on_cpu:
            return None
        return self.time.total * sum(count * card.watts for count, card in self.fleet.cards) / 1000

    @property
    def cost(self) -> float | None:
        """Of GPUs and power, at the prices that are given; None where neither is."""
        parts = [
            hours * price
            for hours, price in (
                (self.gpu_hours, self.c.price_gpu_hour),
                (self.kwh, self.c.price_kwh),
            )
            if hours is not None and price
        ]
        return sum(parts) if parts else None

    @property
    def save_s(self) -> float | None:
        """Seconds until a checkpoint is safe on its disk; None where the run has none."""
        return None if self.c.save_every == 0 else storage.save_s(self.c, self.write_mb_s)

    @property
    def chosen(self) -> Held:
        return next(held for held in self.memory if held.chosen)


def plan(
    c: Config, fleet: Fleet, now: datetime.datetime, places: Sequence[storage.Place] = ()
) -> Plan:
    """Of c on these devices, from now on: where a run of this name has made steps, of what is left. places: that the
    run writes to, with what is free there; none where that is not known. Raises SettingsError, CorpusError."""
    probe, so_far = probe_of(c, fleet), begun(c)
    fast = speed(c, fleet, probe)
    syncs = traffic.syncs(c, fleet, fast.step_s, probe.link_gb_s if probe else None)
    pace, done = Pace(fast, waiting_s(syncs)), so_far.step if so_far else 0
    hours, left = time_of(c, fast, pace.wait_s, done), c.last_step - done
    step_s = 3600 * hours.total / left if hours and left else None
    capacity, read = capacity_bytes(fleet), data_wanted.epochs(c)
    places = [storage.at_pace(c, place, pace.step_s) for place in places]
    return Plan(
        c,
        fleet,
        probe,
        now,
        so_far,
        pace,
        hours,
        milestones(c, step_s, now, done) if step_s else [],
        capacity,
        [held(of, c, fleet, capacity) for of in ways(c, fleet)],
        places,
        *storage.write_mb_s(probe),
        syncs,
        read,
        [*limits.problems(c, fleet, probe, capacity, places, done), *data_wanted.findings(c, read)],
    )


def probe_of(c: Config, fleet: Fleet) -> Probe | None:
    """What was measured of the slowest of these devices; of a CPU, where nothing was, its products now."""
    if fleet.cards:
        return of_card(c, fleet.slowest(c.dtype))
    name = cpu_name()
    return read(c, name) or Probe(name, time.time(), "", {"float32": this_machine.float32_tflops()})


def ways(c: Config, fleet: Fleet) -> list[Config]:
    """DDP and FSDP2, and where it is asked for FSDP2 in replicas, with each of what backward may compute anew; one
    process, which under SYNC=diloco is one of its site, has nothing to split."""
    as_ddp = c.replace(parallel="ddp", grad_sync="step", shard_ranks=None)
    spread = [c if c.parallel == "ddp" else as_ddp]
    if of_a_site(c, fleet.processes) > 1:
        spread.append(
            c
            if c.parallel == "fsdp"
            else c.replace(shard_ranks=None, **as_split(c) | {"parallel": "fsdp"})
        )
        spread += [c] if c.parallel == "hsdp" else []
        if (
            c.sync == "diloco" and c.parallel != "ddp"
        ):  # whose copies would each send everything to the other sites
            del spread[0]
    return [way.replace(activation_checkpointing=how) for way in spread for how in RECOMPUTE]


def held(of: Config, c: Config, fleet: Fleet, capacity: float) -> Held:
    where = (fleet.processes, fleet.processes_of_a_node, fleet.on_cpu)
    need = memory(of, *where)
    same = of == c or (
        of_a_site(c, fleet.processes) == 1
        and of.activation_checkpointing == c.activation_checkpointing
    )
    return Held(of, need, largest_micro_batch(of, *where, capacity), need.total <= capacity, same)
