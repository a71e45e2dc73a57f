"""What to make of a sweep: which row, and why, in words."""

import math
import re
from collections.abc import Sequence

from plan.choices import given
from plan.fleet import Fleet
from plan.scaling import RULE, optimal_parameters, optimal_tokens, wasted
from plan.sweep.report_rows import Row, Sweep
from record.number_formats import count, gib, hours, number
from settings.config import Config
from settings.declare import format_value

# The law cannot tell less apart: its exponents are known to 0.02, which at these sizes moves differences by more.
INDIFFERENT = 0.01  # nats/token
WORTH_A_WORD = 0.05  # of a run's compute
WASTE = 1.1  # of the fewest GPU-hours: what is given for being through sooner


# ---------------------------------------------------------------------------------------------------
# Depths
# ---------------------------------------------------------------------------------------------------


def on_depths(
    c: Config, fleet: Fleet, rows: list[Row], own: Row, within: float | None, done: int = 0
) -> Sweep:
    """own: the run as it is set; within: the hours that there are, None where the speed is not known; done: steps that
    the run of this name has made."""
    title = (
        f"models on {fleet.text}: computed, not measured. First with {RULE} tokens a parameter"
        + (f", then with what is read in {hours(within)}" if within else "")
        + ". size: parameters, embeddings "
        "too; loss: expected, in nats/token, by plan/scaling.py, of which only differences mean something, text "
        f"that repeats counted for less; GiB: a process, of {gib(rows[0].capacity_bytes)}"
    )
    if len({row.mfu_percent for row in rows}) > 1:
        title += ". Each at the MFU that make plan has for it, of a preset or known of the card; MFU=45 is one for all"
    if done:
        title += (
            f". All from their first step, not from step {done:,}: another depth is another run"
        )
    held = [row for row in rows if row.fits_with is not None]
    if not held:
        return Sweep(
            "depth",
            title,
            rows,
            None,
            [
                "None: memory holds none of these; a smaller MICRO_BATCH_SIZE and "
                "ACTIVATION_CHECKPOINTING=full are not enough."
            ],
            within,
        )
    if within is None:
        best = max(held, key=lambda row: row.parameters)
        return Sweep(
            "depth",
            title,
            rows,
            best.label,
            [
                f"{best.label}: the largest that memory holds; how long it "
                "takes is not known here, so nothing else decides.",
                larger(held, rows, own, None),
                *with_less(rows),
                *to_type(c, best, own),
            ],
        )
    reading = [row for row in held if row.loss_within is not None]
    if not reading:
        best = own if own in held else min(held, key=lambda row: row.parameters)
        which = "what is set" if best == own else "the smallest"
        return Sweep(
            "depth",
            title,
            rows,
            best.label,
            [
                f"Recommended: {best.label}: of what any of these reaches in "
                f"{hours(within)} the law knows nothing, so it is {which}.",
                larger(held, rows, own, within),
                *with_less(rows),
                *to_type(c, best, own),
            ],
            within,
        )
    best = pick(reading, own)
    reasons = [
        why(c, best, reading, own, within),
        larger(held, rows, own, within),
        *balance(own),
        *with_less(rows),
    ]
    return Sweep("depth", title, rows, best.label, [*reasons, *to_type(c, best, own)], within)


def pick(held: Sequence[Row], own: Row) -> Row:
    """The lowest expected loss in the hours that there are; of those that the law cannot tell from it the one that is
    set, else the smallest, which costs least wherever it is used."""
    lowest = least(held)
    near = [row for row in held if reached(row) <= reached(lowest) + INDIFFERENT]
    return next(
        (row for row in near if row.label == own.label), min(near, key=lambda row: row.parameters)
    )


def least(rows: Sequence[Row]) -> Row:
    return min(rows, key=reached)


def reached(row: Row) -> float:
    """Its loss in the hours that there are."""
    return math.inf if row.loss_within is None else row.loss_within


def why(c: Config, best: Row, held: Sequence[Row], own: Row, within: float) -> str:
    there = (
        f"TARGET_HOURS={format_value(c.target_hours)}"
        if c.target_hours
        else f"the {hours(within)} that the run takes as it is set (TARGET_HOURS sets others)"
    )
    said = (
        f"Recommended: {best.label}. Of the models that memory holds it comes furthest in {there}: an expected "
        f"loss of {reached(best):.2f} after {count(best.tokens_within or 0)} tokens, "
        f"{number((best.tokens_within or 0) / best.parameters)} a parameter"
    )
    lowest = least(held)
    if lowest.label != best.label:
        said = said.replace("it comes furthest", "none comes notably further")
        gap = reached(best) - reached(lowest)
        said += f"; {lowest.label} would end {gap:.3f} lower, less than the law can tell"
    if best.label != own.label and own.loss_within:
        said += f"; {own.label}, as it is set, {own.loss_within:.2f}"
    return said + "."


def larger(held: Sequence[Row], rows: Sequence[Row], own: Row, within: float | None) -> str:
    """Can we train a larger model?"""
    more = [row for row in held if row.parameters > own.parameters]
    if not more:
        beyond = [row for row in rows if row.parameters > own.parameters]
        return "Larger? " + (
            f"No: {beyond[0].label} needs {gib(beyond[0].memory_bytes)} GiB a process, and there "
            f"are {gib(beyond[0].capacity_bytes)}."
            if beyond
            else f"{own.label} is the largest that is compared here."
        )
    if within is None:
        return f"Larger? Memory holds up to {more[-1].label}."
    in_time = [row for row in more if row.hours is not None and row.hours <= within]
    if in_time:
        said = (
            f"Larger? Yes: {in_time[-1].label} is through with {RULE} tokens a parameter in "
            f"{hours(in_time[-1].hours or 0)} of the {hours(within)} that there are"
        )
    else:
        said = (
            f"Larger? Yes, with more time: none reads {RULE} tokens a parameter in {hours(within)}"
        )
    later = [row for row in more if row not in in_time]
    shown = dict.fromkeys([*later[:2], *later[-1:]])
    return said + "".join(f"; {told(row, own, within)}" for row in shown) + "."


def told(row: Row, own: Row, within: float) -> str:
    if row.hours is None:
        return row.label
    return (
        f"{row.label} takes {hours(row.hours)} for that, {number(row.hours / within)} times as long, and "
        f"{gib(row.memory_bytes)} GiB"
        + ("" if row.loss is None else f", for an expected {row.loss:.2f}")
        + (f" ({own.label}: {own.loss:.2f})" if row.loss and own.loss else "")
    )


def balance(own: Row) -> list[str]:
    """What another size would have saved, where that is worth a word."""
    if own.loss is None:
        return []
    flops, lost = 6 * own.parameters * own.tokens, wasted(own.parameters, own.tokens)
    if lost < WORTH_A_WORD:
        return []
    return [
        f"{own.label} reads {number(own.tokens / own.parameters)} tokens a parameter, and the law has "
        f"{optimal_tokens(own.parameters) / own.parameters:.2g} as the best for its size: {100 * lost:.0f}% less "
        f"compute would reach its loss with {count(optimal_parameters((1 - lost) * flops))} parameters, which cost "
        f"{'more' if own.tokens > optimal_tokens(own.parameters) else 'less'} to use."
    ]


def with_less(rows: Sequence[Row]) -> list[str]:
    found = [f"{row.label} with {row.fits_with}" for row in rows if row.fits_with]
    return [f"With less, and so their hours are: {'; '.join(found)}."] if found else []


def to_type(c: Config, best: Row, own: Row) -> list[str]:
    if best.label == own.label and not best.typed_within and not best.fits_with:
        return ["It is what is set."]
    typed = best.typed_within or best.typed
    rate = (
        ""
        if typed.startswith("PRESET=") or best.parameters <= own.parameters
        else (
            f" (LEARNING_RATE={format_value(c.learning_rate)} was chosen for {own.label}: larger models want a lower one)"
        )
    )
    return [f"{command('make train', c, typed, best.fits_with)}{rate}"]


def command(target: str, c: Config, *typed: str | None) -> str:
    """All that is to be typed: the preset, what a row changes, the later ones winning, and what was given beside the
    preset and the env file."""
    changed = dict(
        pair.split("=", 1) for part in typed if part for pair in re.split(r" (?=[A-Z_0-9]+=)", part)
    )
    preset = changed.pop("PRESET", c.preset)
    kept = given(c, another_preset=preset != c.preset)
    if target == "make train":
        kept.pop("TARGET_HOURS", None)  # of the sweep, like SWEEP itself
    pairs = (
        {"PRESET": preset}
        | changed
        | {name: value for name, value in kept.items() if name not in changed}
    )
    return " ".join(
        [target, *(f"{name}={value}" for name, value in pairs.items() if value)]
    )  # empty: as if not typed


# ---------------------------------------------------------------------------------------------------
# Cards
# ---------------------------------------------------------------------------------------------------


def left(done: int) -> str:
    """Of a title, where steps are made."""
    return f"; hours: of what is left behind step {done:,}" if done else ""


def on_gpus(c: Config, fleet: Fleet, rows: list[Row], card: str, done: int = 0) -> Sweep:
    """The fewest that are through in TARGET_HOURS; without it the most that do not waste GPU-hours on waiting."""
    title = (
        f"numbers of {card}, {count(rows[0].parameters)} parameters and {count(rows[0].tokens)} tokens: computed, "
        f"not measured. waiting: for gradients between nodes (LAN_GBIT={format_value(c.lan_gbit)}"
        + (f", WAN_GBIT={format_value(c.wan_gbit)}" if fleet.sites > 1 else "")
        + f"), none of it hidden; GiB: a process, of {gib(rows[0].capacity_bytes)}{left(done)}"
    )
    held = [row for row in rows if row.fits_with is not None]
    known = [row for row in held if row.hours is not None and row.gpu_hours is not None]
    if not held:
        return Sweep("gpus", title, rows, None, ["None: memory holds it on no number of these."])
    if not known:
        best = min(held, key=lambda row: row.gpus)
        return Sweep(
            "gpus",
            title,
            rows,
            best.label,
            [
                f"Recommended: {best.label}: the fewest that hold it; how long "
                "they take is not known here, so nothing else decides.",
                *shown(c, best),
            ],
        )
    if c.target_hours:
        name = f"TARGET_HOURS={format_value(c.target_hours)}"
        in_time = [row for row in known if (row.hours or 0) <= c.target_hours]
        if not in_time:
            soonest = min(known, key=lambda row: row.hours or 0)
            return Sweep(
                "gpus",
                title,
                rows,
                None,
                [
                    f"None is through in {name}; {soonest.label} comes nearest with "
                    f"{hours(soonest.hours or 0)}. make plan says which tokens or model would be."
                ],
            )
        best = min(in_time, key=lambda row: (row.gpus, bool(row.fits_with), row.hours))
        reason = f"the fewest that are through in {name}: {hours(best.hours or 0)}"
    else:
        fewest = min(row.gpu_hours or 0 for row in known)
        cheap = [row for row in known if (row.gpu_hours or 0) <= WASTE * fewest]
        best = min(cheap, key=lambda row: (-row.gpus, bool(row.fits_with), row.hours))
        reason = (
            f"the soonest, {hours(best.hours or 0)}, of those that take no more than {WASTE:.0%} of the fewest "
            "GPU-hours; it assumes that GPUs cost what they are used, and TARGET_HOURS says how soon is enough"
        )
    return Sweep(
        "gpus",
        title,
        rows,
        best.label,
        [f"Recommended: {best.label}: {reason}.", *with_less(rows), *shown(c, best)],
    )


def shown(c: Config, best: Row) -> list[str]:
    changed = best.typed or best.fits_with
    return [
        command("make plan", c, best.typed, best.fits_with) if changed else "It is what is set."
    ]
