"""Whether memory and disk hold a run; if not, by how much, when, and which settings would do."""

import bisect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hardware.host_memory import read_memory
from hardware.model_size import parameters
from plan import storage
from plan.choices import Choice, choice, known_models, more_cards
from plan.fleet import Fleet
from plan.memory import Memory, largest_micro_batch, memory, usable_bytes
from plan.milestones import first_save
from plan.storage import Place
from record.number_formats import GIB, count, gib, hours, size
from settings.config import Config
from settings.finding import FAIL, Finding

CODE = 64  # a setting is to be changed
RECOMPUTE = ("none", "selective", "full")  # from what costs nothing to what holds least
LEAST_KEPT = 2  # of KEEP_LAST

Does = Callable[[Choice], bool]


def memory_of(c: Config, fleet: Fleet) -> Memory:
    """What a process needs."""
    return memory(c, fleet.processes, fleet.processes_of_a_node, fleet.on_cpu)


def most_sequences(c: Config, fleet: Fleet, capacity_bytes: float) -> Choice | None:
    """The largest MICRO_BATCH_SIZE that fits, and splits BATCH_TOKENS evenly; None where not even one does."""
    most = largest_micro_batch(
        c, fleet.processes, fleet.processes_of_a_node, fleet.on_cpu, capacity_bytes
    )
    tried = (
        choice(c, fleet, micro_batch_size=size) for size in range(min(most, c.batch_windows), 0, -1)
    )
    return next((found for found in tried if found), None)


def capacity_bytes(fleet: Fleet) -> float:
    """What a process may take: of the smallest card; on CPU its share of this machine's memory."""
    return (
        usable_bytes(fleet.smallest)
        if fleet.cards
        else read_memory().most / fleet.processes_of_a_node
    )


# ---------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------


def memory_problem(c: Config, fleet: Fleet, capacity_bytes: float) -> Finding | None:
    need = memory_of(c, fleet)
    if need.total <= capacity_bytes:
        return None
    parts = ", ".join(
        f"{name} {gib(part)}"
        for name, part in sorted(need.parts.items(), key=lambda part: -part[1])
        if part >= 0.05 * GIB
    )
    what = "this machine" if fleet.on_cpu else fleet.smallest.key
    micro = c.micro_batch(fleet.processes)
    text = (
        f"MICRO_BATCH_SIZE={micro} with PARALLEL={c.parallel} and ACTIVATION_CHECKPOINTING="
        f"{c.activation_checkpointing} needs {gib(need.total)} GiB a process ({parts}), and {what} has "
        f"{gib(capacity_bytes)} to give it"
    )
    would = "; or ".join(what_is_held(c, fleet, capacity_bytes))
    return Finding(
        "memory",
        FAIL,
        text,
        f"what would do: {would}" if would else "nothing here is small enough",
        CODE,
    )


def what_is_held(c: Config, fleet: Fleet, capacity_bytes: float) -> Iterator[str]:
    """From what changes least: an exchange between sites in fragments; fewer sequences at once, more computed anew,
    both; weights that are split; more cards; and the largest model of the family that fits as things are."""

    def held(found: Choice) -> bool:
        return memory_of(found.c, found.fleet).total <= capacity_bytes

    def told(found: Choice) -> str:
        return f"{found.typed} ({gib(memory_of(found.c, found.fleet).total)} GiB)"

    here = on_the_same(c, fleet, capacity_bytes)
    if pieces := next(filter(held, in_fragments(c, fleet)), None):
        yield told(pieces)
    yield from map(told, here)
    if fleet.processes > 1 and c.parallel == "ddp" and (split := splitting(c, fleet, held)):
        yield told(split)
    elif not here and (more := next(filter(held, more_cards(c, fleet, **as_split(c))), None)):
        yield told(more)
    if model := next(filter(held, known_models(c, fleet)), None):
        yield f"{told(model)[:-1]}, {count(parameters(model.c).total)} parameters)"


def in_fragments(c: Config, fleet: Fleet) -> Iterator[Choice]:
    """With SYNC=diloco: more of them than there are, from the fewest."""
    more = (
        range(c.sync_fragments + 1, min(c.n_layer, c.sync_every) + 1)
        if c.sync == "diloco"
        else range(0)
    )
    return (found for number in more if (found := choice(c, fleet, sync_fragments=number)))


def on_the_same(c: Config, fleet: Fleet, capacity_bytes: float) -> list[Choice]:
    """With fewer sequences at once, and with more computed anew; if neither is enough with both."""

    def held(found: Choice) -> bool:
        return memory_of(found.c, found.fleet).total <= capacity_bytes

    found = [most_sequences(c, fleet, capacity_bytes), recomputing(c, fleet, held)]
    return [one for one in found if one] or [
        one for one in [smallest(c, fleet, capacity_bytes)] if one
    ]


def recomputing(c: Config, fleet: Fleet, held: Does, **changes: Any) -> Choice | None:
    """The least of what ACTIVATION_CHECKPOINTING has beyond c's that makes it fit."""
    rest = RECOMPUTE[RECOMPUTE.index(c.activation_checkpointing) + 1 :]
    tried = (choice(c, fleet, activation_checkpointing=how, **changes) for how in rest)
    return next((found for found in tried if found and held(found)), None)


def smallest(c: Config, fleet: Fleet, capacity_bytes: float, **changes: Any) -> Choice | None:
    """With all computed anew, the most sequences that fit."""
    whole = choice(c, fleet, activation_checkpointing="full", **changes)
    most = most_sequences(whole.c, fleet, capacity_bytes) if whole else None
    return (
        choice(
            c,
            fleet,
            activation_checkpointing="full",
            micro_batch_size=most.c.micro_batch_size,
            **changes,
        )
        if most
        else None
    )


def as_split(c: Config) -> dict[str, Any]:
    """What is changed so that weights are split over processes; Muon needs them whole."""
    changes = {"parallel": "fsdp"} | ({"optimizer": "adamw"} if c.optimizer == "muon" else {})
    return {name: value for name, value in changes.items() if getattr(c, name) != value}


def splitting(c: Config, fleet: Fleet, held: Does) -> Choice | None:
    """PARALLEL=fsdp, and if that is not enough more computed anew."""
    changes = as_split(c)
    plain = choice(c, fleet, **changes)
    return plain if plain and held(plain) else recomputing(c, fleet, held, **changes)


# ---------------------------------------------------------------------------------------------------
# Disk
# ---------------------------------------------------------------------------------------------------


def disk_problem(c: Config, fleet: Fleet, step_s: float | None, place: Place) -> Finding | None:
    """step_s: of an optimizer step with what recurs, None where it is not known."""
    if not place.missing:
        return None
    total = sum(place.needs.values())
    by_part = ", ".join(f"{name} {size(needed)}" for name, needed in place.needs.items() if needed)
    text = (
        f"{' and '.join(place.settings)}: up to {size(total)} are still to be written to {place.folder} "
        f"({by_part}), and {size(place.free)} are free: {full_when(c, step_s, place)}"
    )
    would = [found.typed for found in what_is_stored(c, fleet, step_s, place)]
    would.append(f"{' and '.join(place.settings)} on a disk with {size(total)}")
    return Finding("disk", FAIL, text, f"what would do: {'; or '.join(would)}", CODE)


def still_missing(c: Config, step_s: float | None, place: Place, other: Config) -> float:
    """Bytes that would not fit with other settings: what is there already stays."""
    before, after = storage.disk(c, step_s), storage.disk(other, step_s)
    needs = sum(max(0.0, size + after[part] - before[part]) for part, size in place.needs.items())
    return needs - place.free


def full_when(c: Config, step_s: float | None, place: Place) -> str:
    """Data come first, at once or faster than they are trained on; then each checkpoint, till as many as are kept."""
    data = sum(size for part, size in place.needs.items() if part != "checkpoints")
    if data > place.free:
        return "the data alone fill it"
    one = storage.checkpoint_bytes(c)
    there = round((storage.disk_of_checkpoints(c, step_s) - place.needs["checkpoints"]) / one)
    room = int((place.free - data) // one) + there
    if step_s is None and c.save_every is None:
        return f"checkpoint {room + 1} fills it"
    every = first_save(c, step_s) if step_s else min(c.save_every or c.last_step, c.last_step)

    def kept(step: int) -> int:
        """When the checkpoint of this step is being written."""
        return min(step // every, c.keep_last + 1) + (step // c.keep_every if c.keep_every else 0)

    step = 1 + bisect.bisect_left(range(1, c.last_step + 1), room + 1, key=kept)
    step = min(step, c.last_step)  # the end is saved as well
    after = f", after {hours(step * step_s / 3600)} of training" if step_s else ""
    return f"it is full at step {step:,} of {c.last_step:,}{after}"


def what_is_stored(c: Config, fleet: Fleet, step_s: float | None, place: Place) -> list[Choice]:
    """Each setting alone, if that is enough; else together."""

    def first(tried: Iterable[Choice | None]) -> Choice | None:
        return next(
            (found for found in tried if found and still_missing(c, step_s, place, found.c) <= 0),
            None,
        )

    rarer = (
        [c.keep_every * 2**n for n in range(1, 20) if c.keep_every * 2**n <= c.last_step]
        if c.keep_every
        else []
    )
    single = [
        first(
            choice(c, fleet, keep_last=kept) for kept in range(c.keep_last - 1, LEAST_KEPT - 1, -1)
        ),
        first(choice(c, fleet, keep_every=every) for every in (*rarer, 0) if every != c.keep_every),
        first(caches(c, fleet, step_s, place)),
    ]
    if any(single):
        return [found for found in single if found]
    less: dict[str, Any] = {"keep_last": min(c.keep_last, LEAST_KEPT), "keep_every": 0}
    both = first([choice(c, fleet, **less)]) or first(caches(c, fleet, step_s, place, **less))
    return [both] if both else []


def caches(
    c: Config, fleet: Fleet, step_s: float | None, place: Place, **changes: Any
) -> Iterator[Choice | None]:
    """DATA_CACHE_GB as large as leaves room for the rest, streaming; whole gigabytes."""
    streaming = changes | ({"data_stream": "1"} if c.data_stream == "0" else {})
    widest = choice(c, fleet, **streaming)
    if widest and "shards" in place.needs:
        shards = min(storage.disk_of_shards(widest.c), c.data_cache_gb * 1e9)
        size = int((shards - still_missing(c, step_s, place, widest.c)) // 1e9)
        if size > 0:
            yield choice(c, fleet, **streaming, data_cache_gb=float(min(size, c.data_cache_gb)))
