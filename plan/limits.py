"""What cannot be: a target beyond the chips, memory that does not hold the run, a disk that fills, a type that a card
lacks, a batch that processes cannot share. Each with the number that breaks it, and what would fit, as it is typed.

    FAIL    it cannot be: the target needs more than the chip's products reach, or than was measured of this run
    WARN    it is not what is planned: the target needs more MFU than the plan has
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from hardware.model_size import parameters
from plan import across, checks
from plan.checks import Does
from plan.choices import (
    CARDS_OF_A_NODE,
    Choice,
    cards_together,
    choice,
    known_models,
    more_cards,
    shape,
    with_cards,
)
from plan.fleet import Fleet
from plan.hours import Pace, hours_of, pace_of, steps_within, time_of
from plan.measured import Probe
from plan.scaling import RULE, rule_tokens
from plan.storage import Place
from record.number_formats import count, number, seconds
from record.number_formats import hours as hours_told
from settings.checks import find_batch_problem
from settings.config import Config
from settings.declare import format_value
from settings.finding import FAIL, WARN, Finding

CODE = 64  # a setting is to be changed
MARGIN = 1.1  # by which a minute's measurement may be wrong

# Per cent of the bfloat16 peak that matrix products of the best sizes were measured to reach, by the first letters of
# a card's key: Bekman, Machine Learning Engineering, compute/accelerator (271 of 312, 794.5 of 989 TFLOP/s; the SXM
# cards, and those with less power reach less). No training goes past it.
PRODUCTS = (
    ("a100", 86.9),
    ("a800", 86.9),
    ("h100", 80.3),
    ("h200", 80.3),
    ("h800", 80.3),
    ("gh200", 80.3),
)
# The highest MFU that was published for training a model of about a billion parameters in bfloat16, and whose it is.
BEST = (("a100", 60.0, "MPT 1.3B on 8"), ("h100", 50.5, "GPT-2 1.6B in llm.c on 8"))

FASTER = (100.0, 200.0, 400.0)  # Gbit/s that networks between nodes are sold with
FASTER_WAN = (10.0, 100.0)  # and that universities have to the next one
DEVICES = (
    "CARDS=",
    "NODES=",
    "SITES=",
    "WAN_GBIT=",
    "LAN_GBIT=",
)  # how what is about devices and links begins


@dataclasses.dataclass(frozen=True)
class Asked:
    """A target, and what it takes. percent: of the peak that it needs while computing; None: not even that is enough,
    since the network alone takes longer."""

    name: str
    setting: str
    percent: float | None
    planned: str


def problems(
    c: Config,
    fleet: Fleet,
    probe: Probe | None,
    capacity_bytes: float,
    places: Iterable[Place] = (),
    done: int = 0,
) -> list[Finding]:
    """What is wrong with the plan of c on these devices, as FAIL and WARN; none where nothing is.

    probe: what was measured of the slowest of them; capacity_bytes: that a process may take of its device's memory;
    places: that the run writes to, with what is free there; none where that is not known; done: steps that are made,
    so that targets are of what is left, and the model is what it is.
    """
    if uneven := batch(c, fleet):
        return [uneven]  # there is no such run, of which more could be said
    pace = pace_of(c, fleet, probe)
    targets = [hours(c, fleet, probe, pace, done), tokens_per_s(c, fleet, probe, pace, done)]
    found = [
        bf16(c, fleet),
        *(targets if done < c.last_step else []),
        *across.problems(c, fleet, pace),
        checks.memory_problem(c, fleet, capacity_bytes),
        *(checks.disk_problem(c, fleet, pace.step_s, place) for place in places),
    ]
    return [one for one in found if one]


def batch(c: Config, fleet: Fleet) -> Finding | None:
    """BATCH_TOKENS that so many processes cannot share evenly: the trainer refuses it."""
    problem = find_batch_problem(c, fleet.processes)
    if not problem:
        return None
    text, _, nearest = problem.removesuffix(".").partition(". The nearest is ")
    fewer = [number for number in range(fleet.processes - 1, 0, -1) if number % fleet.nodes == 0]
    typed = [nearest]
    if fleet.on_cpu or c.cards in ("", "here"):
        typed += [
            f"NPROC={number // fleet.nodes}"
            for number in fewer
            if not find_batch_problem(c, number)
        ][:1]
    elif len(fleet.cards) == 1:
        nearby = next(with_cards(c, fleet, fewer), None), next(more_cards(c, fleet), None)
        typed += [one.typed for one in nearby if one]
    return Finding(
        "batch", FAIL, f"{text}, on {fleet.text}", f"what would do: {'; or '.join(typed)}", CODE
    )


def bf16(c: Config, fleet: Fleet) -> Finding | None:
    """A card without units for the type: torch would emulate it, at a fraction of float32's speed, or refuse."""
    without = sorted(
        {card.key for _, card in fleet.cards if c.dtype == "bfloat16" and card.bf16_tflops is None}
    )
    if not without:
        return None
    rate = min(card.fp32_tflops for _, card in fleet.cards)
    other = choice(c, fleet, dtype="float32") or choice(c, fleet, dtype="float32", attention="auto")
    typed = [f"{other.typed} (at most {rate:g} TFLOP/s a card)"] if other else []
    typed += [
        f"{left.typed} alone"
        for number, card in fleet.cards
        if card.bf16_tflops is not None and (left := choice(c, fleet, (card, number)))
    ]
    return Finding(
        "bf16",
        FAIL,
        f"DTYPE=bfloat16: {' and '.join(without)} has no bfloat16 units",
        "what would do: " + "; or ".join(typed),
        CODE,
    )


# ---------------------------------------------------------------------------------------------------
# Targets
# ---------------------------------------------------------------------------------------------------


def hours(c: Config, fleet: Fleet, probe: Probe | None, pace: Pace, done: int) -> Finding | None:
    """TARGET_HOURS: tokens, and what is scored for evaluation, in what is left when the network is waited for."""
    if c.target_hours is None:
        return None
    name = f"TARGET_HOURS={format_value(c.target_hours)}"
    time = time_of(c, pace.fast, pace.wait_s, done)
    if time is None or pace.fast.mfu_percent is None:
        return not_known("target-hours", name, pace)
    if time.total <= c.target_hours:
        return None
    left = c.target_hours - time.waiting
    percent = pace.fast.mfu_percent * (time.training + time.evaluating) / left if left > 0 else None
    asked = Asked(
        "target-hours",
        name,
        percent,
        f"{'what is left' if done else 'it'} takes {hours_told(time.total)}",
    )
    return judged(c, fleet, probe, pace, asked, what_is_through(c, fleet, probe, pace, done))


def tokens_per_s(
    c: Config, fleet: Fleet, probe: Probe | None, pace: Pace, done: int
) -> Finding | None:
    """TARGET_TOKENS_PER_S, as the log of a run will have them: waits for the network are in it."""
    if c.target_tokens_per_s is None:
        return None
    name = f"TARGET_TOKENS_PER_S={format_value(c.target_tokens_per_s)}"
    if pace.tokens_per_s is None or pace.fast.step_s is None or pace.fast.mfu_percent is None:
        return not_known("target-tokens-per-s", name, pace)
    if pace.tokens_per_s >= c.target_tokens_per_s:
        return None
    left = c.batch_tokens / c.target_tokens_per_s - pace.wait_s
    percent = pace.fast.mfu_percent * pace.fast.step_s / left if left > 0 else None
    asked = Asked("target-tokens-per-s", name, percent, f"there are {pace.tokens_per_s:,.0f}")
    return judged(
        c, fleet, probe, pace, asked, what_is_as_fast(c, fleet, probe, pace.tokens_per_s, done)
    )


def not_known(name: str, setting: str, pace: Pace) -> Finding:
    return Finding(
        name,
        WARN,
        f"{setting} cannot be checked: {pace.fast.why}",
        "MFU=40, for one, says what to plan with" if pace.fast.peak_tflops else "",
        CODE,
    )


def judged(
    c: Config, fleet: Fleet, probe: Probe | None, pace: Pace, asked: Asked, would: Iterable[str]
) -> Finding:
    """FAIL beyond what can be reached, WARN beyond what is planned."""
    at = f"at the planned {pace.fast.mfu_percent:.3g}% MFU {asked.planned}"
    what = list(would)
    mends = (
        f"what would do: {'; or '.join(what)}"
        if what
        else "no fewer tokens and no smaller model would do"
    )
    if fleet.cards and not any(one.startswith(DEVICES) for one in what):
        mends += f"; no number of these cards, even over LAN_GBIT={max(c.lan_gbit, FASTER[-1]):g}"
    if asked.percent is None:
        return Finding(
            asked.name,
            FAIL,
            f"{asked.setting}: each step waits {seconds(pace.wait_s)} for the network "
            f"between nodes, and that alone takes longer, however fast the devices are; {at}",
            mends,
            CODE,
        )
    share, why = reach(c, fleet, probe, pace)
    needs = f"{asked.setting} needs {number(asked.percent)}% of the peak"
    if pace.fast.peak_tflops and fleet.cards:
        each = pace.fast.peak_tflops / fleet.processes
        needs = (
            f"{asked.setting} needs {asked.percent / 100 * each:,.0f} TFLOP/s of each GPU, "
            f"{number(asked.percent)}% of its peak of {each:,.4g}"
        )
    if asked.percent > share:
        return Finding(asked.name, FAIL, f"{needs}; {why}; {at}", mends, CODE)
    best = best_of(c, fleet)
    beyond = (
        f"; the most that was published for such a card is {best[0]:g}% ({best[1]})"
        if (best and asked.percent > best[0])
        else ""
    )
    return Finding(asked.name, WARN, f"{needs}; {at}{beyond}", mends, CODE)


def reach(c: Config, fleet: Fleet, probe: Probe | None, pace: Pace) -> tuple[float, str]:
    """(per cent of the peak past which a target cannot be, why)."""
    if pace.fast.measured and pace.fast.mfu_percent is not None:
        return (
            MARGIN * pace.fast.mfu_percent,
            f"a step of just this run was measured at {pace.fast.mfu_percent:.3g}%",
        )
    if fleet.on_cpu:
        return 100.0, "no training is faster than the machine's own matrix products"
    card = fleet.slowest(c.dtype)
    peak, here = card.peak(c.dtype), (probe.matmul_tflops if probe else {}).get(c.dtype)
    if peak and here:
        return (
            100 * here / peak,
            f"matrix products alone were measured at {here:,.4g} TFLOP/s there",
        )
    share = next((share for start, share in PRODUCTS if card.key.startswith(start)), None)
    if share and c.dtype == "bfloat16":
        return share, f"on {card.key} matrix products alone reach {share:g}% (measured by others)"
    return 100.0, "no chip goes past its peak"


def best_of(c: Config, fleet: Fleet) -> tuple[float, str] | None:
    if fleet.on_cpu or c.dtype != "bfloat16":
        return None
    key = fleet.slowest(c.dtype).key
    return next(((percent, whose) for start, percent, whose in BEST if key.startswith(start)), None)


# ---------------------------------------------------------------------------------------------------
# What would do
# ---------------------------------------------------------------------------------------------------


def what_is_through(
    c: Config, fleet: Fleet, probe: Probe | None, pace: Pace, done: int
) -> Iterator[str]:
    """For TARGET_HOURS: the same devices nearer to each other; the most tokens, and the largest model at 20 tokens a
    parameter; and what others() finds."""
    target = c.target_hours or 0.0

    def soon(found: Choice) -> bool:
        total = hours_of(found.c, found.fleet, probe, done)
        return total is not None and total <= target

    close = list(nearer(c, fleet, soon))
    yield from close
    if tokens := most_tokens(c, fleet, pace, target, done):
        yield f"{tokens.typed} ({count(tokens.c.last_step * c.batch_tokens)} tokens)"
    if not done and (balanced := next(filter(soon, by_the_rule(c, fleet)), None)):
        yield f"{balanced.typed} ({count(parameters(balanced.c).total)} parameters, {RULE} tokens for each)"
    yield from others(c, fleet, soon, bool(close), done)


def what_is_as_fast(
    c: Config, fleet: Fleet, probe: Probe | None, planned: float, done: int
) -> Iterator[str]:
    def fast(found: Choice) -> bool:
        rate = pace_of(found.c, found.fleet, probe).tokens_per_s
        return rate is not None and rate >= (c.target_tokens_per_s or 0)

    close = list(nearer(c, fleet, fast))
    yield from close
    yield from others(c, fleet, fast, bool(close), done)
    yield f"TARGET_TOKENS_PER_S={int(planned)}"


def nearer(c: Config, fleet: Fleet, does: Does) -> Iterator[str]:
    """The same devices with less or more of a network between them: sites that exchange more rarely; at fewer sites,
    else all in one node, and over a faster WAN; else at one site over a faster network."""
    if rarely := next(filter(does, across.with_diloco(c, fleet)), None):
        yield f"{rarely.typed} (at a loss that the table of make plan has)"
    sites = [number for number in range(fleet.sites - 1, 0, -1) if fleet.nodes % number == 0]
    fewer = (found for number in sites if (found := choice(c, fleet, sites=number)))
    moved = next(filter(does, itertools.chain(fewer, in_one_node(c, fleet))), None)
    if moved:
        yield moved.typed
    wan = [
        choice(c, fleet, wan_gbit=rate)
        for rate in FASTER_WAN
        if fleet.sites > 1 and rate > c.wan_gbit
    ]
    if faster := next((found for found in wan if found and does(found)), None):
        yield told_with_network(faster, c)
    if not moved and fleet.nodes > 1:
        lan = [choice(c, fleet, sites=1, lan_gbit=rate) for rate in FASTER if rate > c.lan_gbit]
        if found := next((one for one in lan if one and does(one)), None):
            yield told_with_network(found, c)


def in_one_node(c: Config, fleet: Fleet) -> Iterator[Choice]:
    """The same cards in a node of eight, where they are in several and have room in it."""
    same = [fleet.processes] if len(fleet.cards) == 1 and fleet.processes <= CARDS_OF_A_NODE else []
    return (
        found
        for found in cards_together(c, fleet)
        if found.fleet.processes in same and found.fleet.nodes == 1
    )


def told_with_network(found: Choice, c: Config) -> str:
    faster = found.c.lan_gbit != c.lan_gbit or found.c.wan_gbit != c.wan_gbit
    return found.typed + (" (only over so fast a network)" if faster else "")


def by_the_rule(c: Config, fleet: Fleet) -> Iterator[Choice]:
    """These with 20 tokens a parameter, where that is fewer than c's."""
    for model in known_models(c, fleet):
        tokens = round(rule_tokens(parameters(model.c).total) / c.batch_tokens) * c.batch_tokens
        if (
            not c.max_steps
            and tokens < c.train_tokens
            and (found := choice(c, fleet, **shape(c, model.c.n_layer), train_tokens=tokens))
        ):
            yield found


def others(c: Config, fleet: Fleet, does: Does, enough: bool, done: int) -> Iterator[str]:
    """Of the same tokens: the largest model of the family that does, of a run that has not begun; and, unless as many
    cards are enough, the fewest, as they are spread now, at one place in nodes of eight, or over a faster network than
    LAN_GBIT."""
    if not done and (model := next(filter(does, known_models(c, fleet)), None)):
        yield f"{model.typed} ({count(parameters(model.c).total)} parameters)"
    if enough:
        return
    tried: list[dict[str, Any]] = [
        {},
        *({"lan_gbit": rate} for rate in FASTER if rate > c.lan_gbit),
    ]
    found = (
        next(filter(does, cards(c, fleet, **changes)), None)
        for changes in tried
        for cards in (more_cards, cards_together)
    )
    if fewest := next(filter(None, found), None):
        yield told_with_network(fewest, c)


def most_tokens(c: Config, fleet: Fleet, pace: Pace, target: float, done: int = 0) -> Choice | None:
    """As many as are through in so many hours; by MAX_STEPS where that ends the run."""
    more = steps_within(c, pace, target, done)
    if not more:
        return None
    steps = done + more
    return (
        choice(c, fleet, max_steps=steps)
        if c.max_steps
        else choice(c, fleet, train_tokens=steps * c.batch_tokens)
    )
