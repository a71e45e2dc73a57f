"""What is wrong with GPUs and links: lost, held back, idle, slower than the others, or a network that is full. Pure
functions of a moment.

A power cap is what a GPU at full load runs into as a rule, and costs little: it is said only where clocks are far below
what they could be and the run is below plan.
"""

from collections.abc import Callable

from monitor.facts import Fault, Gpu, Link, Node, Seen
from monitor.rules.run_rules import BUSY_PERCENT, IDLE_PERCENT, goes_on
from monitor.snapshot import (
    all_gpus,
    doing,
    errors,
    is_gone,
    is_over_well,
    is_slow,
    is_stepping,
    listed,
    make,
    middle,
    named,
    own_gpus,
    pod_of,
    restart,
    slowness,
)
from settings.config import Config
from train.hooks.stragglers import AGAIN, STEPS

CLOCK_PERCENT = 75.0  # of a GPU's highest clock, or else of the others'
IMBALANCE_PERCENT = 50.0  # points by which GPUs of one run may differ in utilisation
SATURATED_PERCENT = 80.0  # of a link's speed, from which on it is full
HEAT = {"hw_thermal", "sw_thermal"}
SUPPLY = {"power_brake"}
OTHER = {"hw_slowdown"}  # the sum of both; alone where the driver tells no more


def lost(seen: Seen, c: Config) -> list[Fault]:
    """GPUs that no longer answer. While the run goes on it does without them, as where they are another's."""
    faults = []
    for node in () if is_over_well(seen) else seen.nodes:
        gone = [gpu for gpu in node.gpus if gpu.lost]
        if gone:
            name = f" ({gone[0].name})" if gone[0].name else ""
            faults.append(
                Fault(
                    "gpu-lost",
                    f"GPU {listed(gpu.index for gpu in gone)}{name} of {named(seen, node)} no "
                    "longer answers its driver",
                    after_loss(seen, c),
                    about=f"node {node.node}",
                    failing=not goes_on(seen, c),
                )
            )
    return faults


def after_loss(seen: Seen, c: Config) -> str:
    if goes_on(seen, c):
        return "the run goes on without it; " + (
            "tell who runs the cluster"
            if seen.cluster
            else "dmesg | grep -i xid names the cause; reset it when the run is over"
        )
    if seen.cluster:
        return f"tell who runs the cluster; {restart(seen)} on another machine"
    return f"dmesg | grep -i xid names the cause; reset or reboot it, then {restart(seen)}"


# ---------------------------------------------------------------------------------------------------
# Held back
# ---------------------------------------------------------------------------------------------------


def heat(seen: Seen, c: Config) -> list[Fault]:
    """Clocks are lowered by temperature."""
    return held_back(
        seen,
        lambda gpu: bool(HEAT & {*gpu.throttle}),
        "throttled-heat",
        "throttled by heat",
        "look at fans, dust and the room; nvidia-smi -q -d TEMPERATURE shows the limits",
    )


def supply(seen: Seen, c: Config) -> list[Fault]:
    """Clocks are lowered by the machine's power supply."""
    return held_back(
        seen,
        lambda gpu: bool(SUPPLY & {*gpu.throttle}),
        "throttled-supply",
        "slowed down by the machine's power supply (power brake)",
        "look at cables and power supplies of this machine",
    )


def slowdown(seen: Seen, c: Config) -> list[Fault]:
    """Clocks are lowered by the hardware, which does not say why."""
    return held_back(
        seen,
        lambda gpu: bool(OTHER & {*gpu.throttle}) and not (HEAT | SUPPLY) & {*gpu.throttle},
        "throttled-hardware",
        "slowed down by the hardware, for heat or power",
        "nvidia-smi -q -d PERFORMANCE tells more",
    )


def power(seen: Seen, c: Config) -> list[Fault]:
    """Clocks are far below what they could be, by the power limit, and the run is below plan."""
    if not is_slow(seen) or not is_stepping(seen):
        return []
    usual = middle(gpu.clock_mhz for _, gpu in all_gpus(seen))

    def far_below(gpu: Gpu) -> bool:
        most = gpu.clock_max_mhz or usual
        return "power_cap" in gpu.throttle and bool(
            most and gpu.clock_mhz is not None and 100 * gpu.clock_mhz < CLOCK_PERCENT * most
        )

    return held_back(
        seen,
        far_below,
        "throttled-power",
        "held back by the power limit",
        "nvidia-smi -q -d POWER shows whether it was lowered from its default; who runs the machine can "
        "raise it (nvidia-smi -pl)",
    )


def held_back(
    seen: Seen, which: Callable[[Gpu], bool], name: str, words: str, hint: str
) -> list[Fault]:
    """A fault for each node that has such GPUs."""
    faults = []
    for node in seen.nodes if at_work(seen) else ():
        slow = [gpu for gpu in own_gpus(node) if which(gpu)]
        if slow:
            there = restart(seen) + " on another machine" if seen.cluster else ""
            faults.append(
                Fault(
                    name,
                    f"GPU {listed(gpu.index for gpu in slow)} of {named(seen, node)} "
                    f"{'is' if len(slow) == 1 else 'are'} {words}: {state(slow)}",
                    hint + (f", or {there}" if there else ""),
                    about=f"node {node.node}",
                )
            )
    return faults


def at_work(seen: Seen) -> bool:
    """Whether what GPUs do may be this run's: of one that is over it is another's."""
    return bool(doing(seen)) and not is_over_well(seen) and not is_gone(seen)


def state(gpus: list[Gpu]) -> str:
    """'88 C, 1,110 of 1,980 MHz, 310 of 700 W', of the one with the lowest clock."""
    gpu = min(gpus, key=lambda gpu: gpu.clock_mhz if gpu.clock_mhz is not None else float("inf"))
    parts = [f"{gpu.temp_c:.0f} C" if gpu.temp_c is not None else ""]
    for value, most, unit in (
        (gpu.clock_mhz, gpu.clock_max_mhz, "MHz"),
        (gpu.power_w, gpu.power_limit_w, "W"),
    ):
        if value is not None:
            parts.append(f"{value:,.0f}{f' of {most:,.0f}' if most else ''} {unit}")
    return ", ".join(filter(None, parts)) or "+".join(gpu.throttle)


# ---------------------------------------------------------------------------------------------------
# Unequal
# ---------------------------------------------------------------------------------------------------


def idle(seen: Seen, c: Config) -> list[Fault]:
    """GPUs that have nothing to do while the others train; and where NPROC asks for more than are in use, those."""
    if not is_stepping(seen):
        return []
    used = middle(gpu.utilisation_percent for _, gpu in all_gpus(seen))
    if used is None or used < BUSY_PERCENT:
        return []
    faults = []
    for node in seen.nodes:
        own = own_gpus(node)
        unused = (
            [gpu for gpu in node.gpus if not gpu.lost and gpu not in own] if c.nproc and own else []
        )
        unused = unused[: max(0, (c.nproc or 0) - len(own))]
        still = [
            gpu
            for gpu in [*own, *unused]
            if gpu.utilisation_percent is not None and gpu.utilisation_percent < IDLE_PERCENT
        ]
        if still:
            faults.append(
                Fault(
                    "idle-gpu",
                    f"GPU {listed(gpu.index for gpu in still)} of {named(seen, node)} "
                    f"{'is' if len(still) == 1 else 'are'} idle, and the others are at {used:.0f}%",
                    f"{errors(seen, NODE_RANK=node.node)}; {restart(seen)}",
                    about=f"node {node.node}",
                )
            )
    return faults


def imbalance(seen: Seen, c: Config) -> list[Fault]:
    """GPUs of one run that are used very unequally."""
    known = [
        (gpu.utilisation_percent, node, gpu)
        for node, gpu in all_gpus(seen)
        if gpu.utilisation_percent is not None
    ]
    if not is_stepping(seen) or len(known) < 2:
        return []
    (least, node, gpu), (most, busy_node, busy) = min(known, key=first), max(known, key=first)
    if most - least <= IMBALANCE_PERCENT:
        return []
    return [
        Fault(
            "imbalance",
            f"GPU {gpu.index} of {named(seen, node)} is at {least:.0f}% and GPU {busy.index} of "
            f"{named(seen, busy_node)} at {most:.0f}%: the one waits for the other",
            f"{errors(seen)} shows stragglers; look for other programs on that machine",
        )
    ]


def first(entry: tuple[float, Node, Gpu]) -> float:
    return entry[0]


def straggler(seen: Seen, c: Config) -> list[Fault]:
    """A process that is slower than all others: which, where, how much (train/hooks/stragglers.py). It is named again every
    AGAIN steps as long as it is."""
    p = seen.progress
    slow = p.straggler if p else {}
    if not p or not slow or not is_stepping(seen) or p.step - slow.get("step", 0) > AGAIN + STEPS:
        return []
    node = next((node for node in seen.nodes if node.host == slow["host"]), None)
    where = str(slow["host"])
    rank = 0  # whose log there is, if it is not known which node that is
    pod = None
    if node:
        where = named(seen, node)
        rank = node.node
        pod = pod_of(seen, rank)
    look = make(seen, "logs", NODE_RANK=rank)
    if seen.cluster is None:
        look = f"{make(seen, 'doctor', PROBE=1)} on that machine"
    elsewhere = ""
    if pod and pod.site:
        elsewhere = f"; {make(seen, 'sites')}, then {restart(seen, SITE='ZONE')} elsewhere"
    return [
        Fault(
            "straggler",
            f"rank {slow['rank']} on {where} takes {slow['times']:.1f} times as long as the others, "
            "who wait for it at every step",
            f"{look} tells what holds it back{elsewhere}",
            about=f"rank {slow['rank']}",
        )
    ]


# ---------------------------------------------------------------------------------------------------
# The network
# ---------------------------------------------------------------------------------------------------


def network(seen: Seen, c: Config) -> list[Fault]:
    """A link that is full, or slower than the plan needs, in a run below plan. A step needs bytes_per_step of it in
    the time that the plan gives a step."""
    if not is_slow(seen) or not is_stepping(seen):
        return []
    for node in seen.nodes:
        for link in node.links:
            speed, rate = link.speed_bytes_per_s, rate_of(link)
            if speed and rate is not None and 100 * rate >= SATURATED_PERCENT * speed:
                return [
                    Fault(
                        "network",
                        f"the network of {named(seen, node)} is full: {gbit(rate)} of {gbit(speed)} "
                        f"Gbit/s go through {link.name}{each_step(seen)}",
                        faster(seen),
                        about=f"node {node.node}",
                    )
                ]
    e, slowest = seen.expected, slowest_link(seen)
    if slowest and e.bytes_per_step and e.step_s:
        node, link, speed = slowest
        if e.bytes_per_step / e.step_s > speed:
            return [
                Fault(
                    "network",
                    f"the network of {named(seen, node)} is too slow: {link.name} has {gbit(speed)} "
                    f"Gbit/s, and the plan needs {gbit(e.bytes_per_step / e.step_s)}{each_step(seen)}",
                    faster(seen),
                    about=f"node {node.node}",
                )
            ]
    return []


def rate_of(link: Link) -> float | None:
    """Of the busier direction."""
    known = [rate for rate in (link.in_bytes_per_s, link.out_bytes_per_s) if rate is not None]
    return max(known, default=None)


def slowest_link(seen: Seen) -> tuple[Node, Link, float] | None:
    """Of each node its fastest link counts, and of these the slowest; None of a single node."""
    fastest = []
    for node in seen.nodes if len(seen.nodes) > 1 else ():
        known = [(link.speed_bytes_per_s, link) for link in node.links if link.speed_bytes_per_s]
        if known:
            speed, link = max(known, key=lambda pair: pair[0])
            fastest.append((node, link, speed))
    return min(fastest, key=lambda entry: entry[2], default=None)


def each_step(seen: Seen) -> str:
    size, part = seen.expected.bytes_per_step, slowness(seen)
    steps = f"; each step sends {size / 1e9:.2f} GB" if size else ""
    return steps + (
        f", and the run has {100 * part:.0f}% of the planned tokens/s" if part is not None else ""
    )


def faster(seen: Seen) -> str:
    """Nodes at one place, or fewer and larger steps."""
    larger = "a larger BATCH_TOKENS, in a new run, sends less often"
    if seen.cluster:
        return f"{make(seen, 'sites')}, then {restart(seen, SITE='ZONE')} with all pods at one site; {larger}"
    return f"{make(seen, 'logs')} shows over which link nodes talk; {larger}"


def gbit(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e9:.3g}"


RULES = (lost, heat, supply, slowdown, power, network, straggler, idle, imbalance)
