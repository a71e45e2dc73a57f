"""What it costs to keep processes together, for each way to do so, over the fleet's own links. Computed.

    processes of a node    the card's own links (hardware/gpus.toml), or what make doctor PROBE=1 measured
    nodes of a site        LAN_GBIT
    sites                  WAN_GBIT, WAN_RTT_MS

A collective goes level by level: a node adds up its own first, then a site, and one copy of the sum crosses the WAN. At
each level it is a ring of n members (wan.py): an all-reduce of B bytes is 2 (n - 1) hops of B / n, a gather or a
reduce-scatter half of that. A flat ring over all P processes, as NCCL may choose, sends 2 (P - 1) / P of B out of each
site instead: a sixth more with 8 processes at 4 sites, up to twice as much at 2. Rates are of payload, as iperf3 tells
them: packets of 1,500 bytes carry 1,448 of 1,538 on the wire, so that a link sold as 1 Gbit/s gives 0.94. Round trips
are counted between sites only, where they are felt: of each fetch of weights, and of gradients once.

What may hide: FSDP fetches weights beside the passes; gradients travel beside a backward pass, with GRAD_SYNC=step the
last of the step only. `efficiency` is without any of this, `overlapped` as if all did that may; the truth lies between.
Of SYNC=diloco (outer.py) what sites exchange hides for SYNC_DELAY steps in both, since training does not wait for it.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from hardware.model_size import parameters
from plan.fleet import Fleet
from plan.network.outer import (
    OUTER_STEPS,
    Outer,
    exchange_s,
    exchanged_bytes,
    inner,
    outer_of,
    stall_s,
    streaming_of,
)
from plan.network.wan import gradient_bytes, sync_s
from record.number_formats import seconds, size
from settings.checks import count_shard_ranks
from settings.config import Config

BACKWARD = 2 / 3  # of a step's computing: twice the forward pass
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20  # of DistributedDataParallel, as it comes


@dataclasses.dataclass(frozen=True)
class Sync:
    """A way to keep processes together, and what it takes.

    bytes_per_step: that leave each site; each node where there is one site, each process where there is one node.
    seconds_per_step: where nothing hides; between_nodes_s: what of it is not inside nodes, as an MFU that was reached
    on a whole node has that in it already. efficiency: the share of time spent computing, 0 to 1, where nothing hides,
    and overlapped where all does that may. offered: by this version; chosen: by the settings; outer: how sites
    exchange where that is not in every step. None: a link's speed, or a step's seconds, are not known.
    """

    name: str
    bytes_per_step: float
    seconds_per_step: float | None
    efficiency: float | None
    offered: bool
    overlapped: float | None = None
    between_nodes_s: float = 0.0
    chosen: bool = False
    note: str = ""
    outer: Outer | None = None


@dataclasses.dataclass(frozen=True)
class Level:
    """How many there are of one kind, and the links between two of them; gbit_per_s: nan where it is not known."""

    members: int
    gbit_per_s: float
    round_trip_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Traffic:
    """By level: the bytes that leave a member, and the seconds that takes; nan where a link's speed is not known."""

    sizes: tuple[float, ...] = (0.0, 0.0, 0.0)
    seconds: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    def plus(self, other: "Traffic") -> "Traffic":
        return Traffic(
            tuple(a + b for a, b in zip(self.sizes, other.sizes, strict=True)),
            tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True)),
        )

    def times(self, factor: float) -> "Traffic":
        return Traffic(
            tuple(factor * a for a in self.sizes), tuple(factor * a for a in self.seconds)
        )


@dataclasses.dataclass(frozen=True)
class Sent:
    """Bytes of a copy, whole. gradients: in float32, of what is trained; weights: as they are fetched in a forward
    pass, and `again` those that are fetched once more in the backward pass, blocks; blocks: how many."""

    gradients: float
    weights: float
    again: float
    blocks: int


def sent_of(c: Config) -> Sent:
    """Of a model of ours."""
    p, width = parameters(c), 2 if c.dtype == "bfloat16" else 4
    outside = p.embedding + p.head + c.n_embd  # the last norm
    return Sent(gradient_bytes(c), width * p.total, width * (p.total - outside), c.n_layer)


@dataclasses.dataclass(frozen=True)
class Way:
    """What one optimizer step sends: beside each forward pass, beside each backward pass, beside the last of these in
    addition, and beside nothing."""

    micro_batches: int
    forward: Traffic = Traffic()
    backward: Traffic = Traffic()
    last: Traffic = Traffic()
    alone: Traffic = Traffic()

    @property
    def total(self) -> Traffic:
        return (
            self.forward.plus(self.backward)
            .times(self.micro_batches)
            .plus(self.last)
            .plus(self.alone)
        )

    def overlapped_s(self, step_s: float) -> float:
        """Seconds of a step whose network, which is known, hides behind computing as far as it may."""
        forward_s = step_s / self.micro_batches * (1 - BACKWARD)
        backward_s = step_s / self.micro_batches * BACKWARD
        return (
            self.micro_batches * max(forward_s, self.forward.total_s)
            + (self.micro_batches - 1) * max(backward_s, self.backward.total_s)
            + max(backward_s, self.backward.total_s + self.last.total_s)
            + self.alone.total_s
        )


def syncs(
    c: Config,
    fleet: Fleet,
    step_s: float | None,
    link_gb_s: float | None = None,
    sent: Sent | None = None,
) -> list[Sync]:
    """Each way for this fleet; none for one process. Raises SettingsError where SHARD_RANKS cannot be.

    step_s: that a step computes; link_gb_s: between two processes of a node, where it was measured; sent: of another
    model than ours.
    """
    if fleet.processes == 1:
        return []
    levels, count = levels_of(c, fleet, link_gb_s), micro_batches(c, fleet)
    ranks = count_shard_ranks(c, fleet.processes, fleet.processes_of_a_node)
    splits, ours = c.optimizer != "muon", sent is None  # it needs whole matrices
    sent = sent or sent_of(c)
    own = c.parallel if c.sync == "ddp" or fleet.sites == 1 else ""
    ways = [
        ("DDP, float32 gradients", Way(count, last=ring(sent.gradients, levels)), True, "ddp"),
        (
            "DDP, bfloat16 gradients",
            Way(count, last=ring(sent.gradients / 2, levels)),
            False,
            "none",
        ),
        ("FSDP2 over all", split_over(c, sent, levels, fleet.processes, count), splits, "fsdp"),
    ]
    if (
        own == "hsdp" or 1 < ranks < fleet.processes
    ):  # what is set has its row, with 1 and with all ranks too
        ways.append(
            (f"HSDP, {ranks} a copy", split_over(c, sent, levels, ranks, count), splits, "hsdp")
        )
    found = [
        judged(
            name,
            way,
            levels,
            step_s,
            offered,
            parallel == own,
            fetch_note(way) or pieces_note(c, levels, name),
        )
        for name, way, offered, parallel in ways
    ]
    return found + (between_sites(c, levels, count, step_s) if fleet.sites > 1 and ours else [])


def between_sites(
    c: Config, levels: Sequence[Level], count: int, step_s: float | None
) -> list[Sync]:
    """SYNC=diloco: in intervals as published, as it is set, and streaming."""
    sites, own, found = levels[-1].members, outer_of(c), []
    offered = splits_in_a_site(c, levels)
    plain = sorted(
        {Outer(every) for every in OUTER_STEPS}
        | ({own} if c.sync == "diloco" and not own.streaming else set()),
        key=lambda outer: outer.every,
    )
    for outer in [*plain, streaming_of(c, sites, step_s)]:
        one = judged(
            outer.name,
            diloco(c, levels, count, outer, step_s),
            levels,
            step_s,
            offered,
            c.sync == "diloco" and outer == own,
            exchange_note(c, outer, sites, step_s),
        )
        found.append(dataclasses.replace(one, outer=outer))
    return found


def splits_in_a_site(c: Config, levels: Sequence[Level]) -> bool:
    """Whether the optimizer can do with parts of matrices, where a site has several processes."""
    return c.optimizer != "muon" or math.prod(level.members for level in levels[:-1]) == 1


def judged(
    name: str,
    way: Way,
    levels: Sequence[Level],
    step_s: float | None,
    offered: bool,
    chosen: bool,
    note: str,
) -> Sync:
    sent, spent_s = way.total.sizes[widest(levels)], way.total.total_s
    between_s = sum(way.total.seconds[1:])
    if math.isnan(spent_s):
        return Sync(name, sent, None, None, offered, None, between_s, chosen, note)
    if step_s is None:
        return Sync(name, sent, spent_s, None, offered, None, between_s, chosen, note)
    return Sync(
        name,
        sent,
        spent_s,
        step_s / (step_s + spent_s),
        offered,
        step_s / way.overlapped_s(step_s),
        between_s,
        chosen,
        note,
    )


# ---------------------------------------------------------------------------------------------------
# The fleet as levels
# ---------------------------------------------------------------------------------------------------


def levels_of(c: Config, fleet: Fleet, link_gb_s: float | None = None) -> list[Level]:
    """Processes of a node, nodes of a site, sites; between cards that differ the slowest link counts."""
    link = link_gb_s or min((card.link_gb_s for _, card in fleet.cards), default=math.nan)
    return [
        Level(fleet.processes_of_a_node, 8 * link),
        Level(fleet.nodes // fleet.sites, c.lan_gbit),
        Level(fleet.sites, c.wan_gbit, c.wan_rtt_ms / 1000),
    ]


def micro_batches(c: Config, fleet: Fleet) -> int:
    """Forward passes of a process in one step."""
    return max(
        1, math.ceil(c.batch_windows / fleet.processes / max(1, c.micro_batch(fleet.processes)))
    )


def group_of(levels: Sequence[Level], ranks: int) -> Iterator[tuple[Level, Level]]:
    """At each level: those who share a copy, and those who hold the same part of theirs. A copy's `ranks` neighbours
    fill a node first, then a site."""
    for level in levels:
        taken = math.gcd(level.members, ranks)
        ranks //= taken
        yield (
            dataclasses.replace(level, members=taken),
            dataclasses.replace(level, members=level.members // taken),
        )


def widest(levels: Sequence[Level]) -> int:
    """Which level is the last of more than one member."""
    return max(i for i, level in enumerate(levels) if level.members > 1)


# ---------------------------------------------------------------------------------------------------
# What each way sends
# ---------------------------------------------------------------------------------------------------


def ring(size: float | Sequence[float], levels: Sequence[Level], messages: int = 1) -> Traffic:
    """An all-reduce level by level; half of it is a gather or a reduce-scatter.

    size: bytes of each member, one number or one for each level; messages: pieces that make their own round trips.
    """
    sizes = size if isinstance(size, Sequence) else [size] * len(levels)
    sent: list[float] = []
    spent: list[float] = []
    for whole, level in zip(sizes, levels, strict=True):
        n = level.members
        sent.append(2 * (n - 1) / n * whole)
        spent.append(
            messages * sync_s(whole / messages, n, level.gbit_per_s, level.round_trip_s)
            if n > 1
            else 0.0
        )
    return Traffic(tuple(sent), tuple(spent))


def split_over(c: Config, sent: Sent, levels: Sequence[Level], ranks: int, count: int) -> Way:
    """FSDP2 over copies of `ranks` processes.

    Weights are fetched in DTYPE, block by block, for each pass; those outside blocks stay from forward to backward.
    Gradients are scattered in float32 within a copy (GRAD_SYNC), and once a step all-reduced between copies.
    """
    inside, across = (list(part) for part in zip(*group_of(levels, ranks), strict=True))
    forward = ring(sent.weights, inside, sent.blocks + 1).times(0.5)
    again = ring(sent.again, inside, sent.blocks).times(0.5)
    scattered = ring(sent.gradients, inside, sent.blocks + 1).times(0.5)
    held = [
        sent.gradients / math.prod(level.members for level in inside[i:])
        for i in range(len(levels))
    ]
    reduced = ring(held, across)
    if c.grad_sync == "micro-batch":
        return Way(count, forward, again.plus(scattered), reduced)
    return Way(count, forward, again, scattered.plus(reduced))


def diloco(
    c: Config, levels: Sequence[Level], count: int, outer: Outer, step_s: float | None
) -> Way:
    """FSDP2 over the processes of each site, none where it has one, and beside nothing what training waits for an
    exchange between sites (Douillard et al. 2023; in fragments: 2025)."""
    own, sites = [*levels[:-1], dataclasses.replace(levels[-1], members=1)], levels[-1].members
    each = math.prod(level.members for level in own)
    within = dataclasses.replace(c, **inner(c, each))
    inside = Way(count) if each == 1 else split_over(within, sent_of(within), own, each, count)
    sent = 2 * (sites - 1) / sites * exchanged_bytes(c) / outer.every
    waited_s = stall_s(c, outer, sites, step_s) / outer.every
    return dataclasses.replace(inside, alone=Traffic((0.0, 0.0, sent), (0.0, 0.0, waited_s)))


# ---------------------------------------------------------------------------------------------------
# What is to be known beside the numbers
# ---------------------------------------------------------------------------------------------------


def exchange_note(c: Config, outer: Outer, sites: int, step_s: float | None) -> str:
    """How long an exchange takes, and beside what."""
    whole = f"of the largest of {outer.fragments} fragments " if outer.fragments > 1 else ""
    said = f"an exchange {whole}takes {seconds(exchange_s(c, outer, sites))}"
    if step_s is None:
        return said
    if outer.delay:
        return f"{said}, and training goes on for {seconds(outer.delay * step_s)} beside it"
    return f"{said} after {seconds(outer.every / outer.fragments * step_s)} of computing"


def pieces_note(c: Config, levels: Sequence[Level], name: str) -> str:
    """The round trips of gradients that go between sites in pieces, one behind another; the figures have those of one
    piece, as if all went together."""
    sites = levels[-1]
    if sites.members == 1 or not sites.round_trip_s:
        return ""
    count = buckets(c) if name.startswith("DDP") else c.n_layer + 1
    more_s = (count - 1) * sync_s(0.0, sites.members, sites.gbit_per_s, sites.round_trip_s)
    return f"goes in {count} pieces: where each waits for the one before, round trips take another {seconds(more_s)}"


def buckets(c: Config) -> int:
    """Into how many pieces DistributedDataParallel puts the gradients: weight by weight, as backward comes to them; a
    bucket is closed when it has BUCKET_BYTES, the first with FIRST_BUCKET_BYTES."""
    assert c.n_kv_head and c.mlp_dim  # filled in by load_config
    d, heads = c.n_embd, [c.head_dim] * (2 if c.qk_norm else 0)
    block = [
        d,
        d * d,
        d * c.n_kv_head * c.head_dim,
        d * c.n_kv_head * c.head_dim,
        d * d,
        *heads,
        d,
        d * c.mlp_dim,
        d * c.mlp_dim,
        d * c.mlp_dim,
    ]
    table = c.padded_vocab_size * d
    weights = [table, *(c.n_layer * block), d, *([] if c.tie_embeddings else [table])]
    count, held = 0, 0
    for weight in reversed(weights):
        held += 4 * weight
        if held >= (BUCKET_BYTES if count else FIRST_BUCKET_BYTES):
            count, held = count + 1, 0
    return count + (held > 0)


def fetch_note(way: Way) -> str:
    """What it means to split weights over sites: every pass waits for the WAN."""
    over_wan = way.forward.plus(way.backward).times(way.micro_batches).sizes[-1]
    return (
        (
            f"each of {2 * way.micro_batches} passes of a step waits for the WAN, which {size(over_wan)} cross: "
            "split weights inside a site only, by PARALLEL=hsdp"
        )
        if over_wan
        else ""
    )
