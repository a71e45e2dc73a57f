"""What is wrong with a training that goes on: its loss, its data, its checkpoints, disk and memory, its speed. Pure
functions of a moment."""

from monitor.facts import Fault, Node, Seen
from monitor.rules.run_rules import memory_is_full
from monitor.snapshot import (
    ago,
    at,
    brief,
    count,
    doing,
    errors,
    is_gone,
    is_over_well,
    is_settled,
    is_slow,
    is_stepping,
    make,
    named,
    restart,
    said,
    slowness,
    step_s,
    trains,
)
from record import number_formats
from settings.config import Config
from train.faults.guard import MAX_ROLLBACKS

SKIPPED_STEPS = 2  # of the last steps may be skipped
SPIKE_FACTOR = 1.3  # a loss above so many times the median of the last steps is a spike
STARVED_PERCENT = 10.0  # of a step's time may be spent waiting for data
CHECKPOINT_FACTOR = 3.0  # times the interval between two, by which the last one may be old
DISK_FACTOR = 1.5  # checkpoints for which there must be room where they are written


# ---------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------


def not_finite(seen: Seen, c: Config) -> list[Fault]:
    """Losses or gradients that are no numbers, in the last steps."""
    p = seen.progress
    if p is None or p.nonfinite_steps < 1 or is_over_well(seen):
        return []
    back = f"; the run has gone back {count(p.rollbacks, 'time')}" if p.rollbacks else ""
    return [
        Fault(
            "nan",
            f"the loss or a gradient was not finite in {count(p.nonfinite_steps, 'step')} up to step "
            f"{p.step:,}; their updates were left out{back}",
            f"{errors(seen)} names the samples; if it stays, {lower_rate(seen, c)}",
            failing=goes_in_circles(seen, c),
        )
    ]


def goes_in_circles(seen: Seen, c: Config) -> bool:
    """No further way back is left: the next one ends the run (MAX_ROLLBACKS)."""
    return bool(seen.progress and seen.progress.rollbacks >= MAX_ROLLBACKS)


def lower_rate(seen: Seen, c: Config) -> str:
    return restart(seen, LEARNING_RATE=f"{c.learning_rate / 2:g}")


def skips(seen: Seen, c: Config) -> list[Fault]:
    """The guard leaves out step after step, or goes back."""
    p = seen.progress
    if (
        p is None
        or is_over_well(seen)
        or not (p.skipped_steps > SKIPPED_STEPS or (p.rollbacks and p.skipped_steps))
    ):
        return []
    back = (
        f", and the run has gone back {count(p.rollbacks, 'time')} of {MAX_ROLLBACKS}"
        if p.rollbacks
        else ""
    )
    return [
        Fault(
            "skips",
            f"the updates of {count(p.skipped_steps, 'step')} up to step {p.step:,} were left out for a "
            f"loss or gradient out of bounds{back}",
            f"{errors(seen)} names the samples; {lower_rate(seen, c)}",
            failing=goes_in_circles(seen, c),
        )
    ]


def spike(seen: Seen, c: Config) -> list[Fault]:
    """The last loss stands out."""
    p = seen.progress
    if (
        p is None
        or p.loss is None
        or not p.median_loss
        or not p.loss > SPIKE_FACTOR * p.median_loss
        or is_over_well(seen)
        or is_gone(seen)
    ):
        return []
    return [
        Fault(
            "spike",
            f"the loss jumped to {p.loss:.3f} at step {p.step:,}; the median of the last steps is "
            f"{p.median_loss:.3f}",
            f"{make(seen, 'logs', ONLY='metrics')} shows whether it comes down again; if "
            f"not, {lower_rate(seen, c)}",
        )
    ]


# ---------------------------------------------------------------------------------------------------
# Data, checkpoints, disk
# ---------------------------------------------------------------------------------------------------


def starved(seen: Seen, c: Config) -> list[Fault]:
    """Steps wait for their data."""
    p = seen.progress
    if (
        p is None
        or p.data_wait_fraction is None
        or not trains(seen)
        or not is_settled(seen)
        or 100 * p.data_wait_fraction <= STARVED_PERCENT
    ):
        return []
    return [
        Fault(
            "starved",
            f"{100 * p.data_wait_fraction:.0f}% of the last steps' time was spent waiting for data"
            + (
                f", {brief(p.data_wait_fraction * p.step_s)} of {brief(p.step_s)} a step"
                if p.step_s
                else ""
            ),
            data_hint(seen, c),
        )
    ]


def data_hint(seen: Seen, c: Config) -> str:
    """Shards on a faster disk, or made before the run."""
    before = (
        f"{make(seen, 'data')} prepares all shards beforehand"
        if c.data_stream != "0"
        else "no other program should use the processors"
    )
    return f"put DATA_DIR={c.data_dir} on a local disk; {before}"


def save_every_s(seen: Seen, c: Config) -> float:
    """Seconds from one checkpoint to the next, by the settings and the steps as they are; before there are any, by the
    plan's."""
    step = step_s(seen)
    if step is None:
        return seen.expected.save_every_s or 60 * c.save_minutes
    return max(
        step, min(60 * c.save_minutes, c.save_every * step if c.save_every else float("inf"))
    )


def no_checkpoint(seen: Seen, c: Config) -> list[Fault]:
    """The last checkpoint is much older than the next was due after."""
    p = seen.progress
    if p is None or c.save_every == 0 or not is_stepping(seen):
        return []
    began = [time for time in (p.checkpoint_time, p.attempt_started, p.ready) if time is not None]
    # none is written during an evaluation, so that one that was due may be as much later
    due = CHECKPOINT_FACTOR * save_every_s(seen, c) + (p.eval_s or 0.0)
    if not began or (age := at(seen) - max(began)) <= due:
        return []
    last = (
        f"the last checkpoint, of step {p.checkpoint_step:,}, is from {ago(at(seen) - p.checkpoint_time)} ago"
        if p.checkpoint_step and p.checkpoint_time is not None
        else f"no checkpoint in {ago(age)}"
    )
    why = seen.first.complaint if seen.first and seen.first.complaint else ""
    why = f" ({said(why)})" if "checkpoint" in why else ""
    return [
        Fault(
            "no-checkpoint",
            f"{last}, and one is due every {ago(save_every_s(seen, c))}{why}: a crash now would "
            f"lose {ago(age)} of training",
            f"{make(seen, 'checkpoints')}; {errors(seen)}",
        )
    ]


def disk(seen: Seen, c: Config) -> list[Fault]:
    """The next checkpoint has no room, or hardly any. One is written whole before an older one is deleted."""
    p, first = seen.progress, seen.first
    size = (p.checkpoint_bytes if p else None) or seen.expected.checkpoint_bytes
    if (
        first is None
        or first.disk_free_bytes is None
        or not size
        or c.save_every == 0
        or is_over_well(seen)
    ):
        return []
    # what is being written is the next one itself: as much room as before it began
    free = first.disk_free_bytes + (first.disk_passing_bytes or 0.0)
    if free >= DISK_FACTOR * size:
        return []
    fits = free >= size
    usual, p_time = save_every_s(seen, c), p.checkpoint_time if p else None
    due = p_time + usual - at(seen) if p_time is not None else 0.0
    when = f", due in {ago(due)}," if due > 0 else ""
    what = "and then no other" if fits else "which does not fit"
    return [
        Fault(
            "disk",
            f"{number_formats.size(free)} of disk are free for the next checkpoint{when} of {number_formats.size(size)}, "
            f"{what}",
            f"{make(seen, 'checkpoints')} shows what is there; {restart(seen, KEEP_LAST=2)}, or a larger "
            + ("VOLUME_GB" if seen.cluster else "disk for RUNS_DIR"),
            failing=not fits,
        )
    ]


# ---------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------


def memory(seen: Seen, c: Config) -> list[Fault]:
    """A machine or pod whose memory is nearly full: the system ends a process next."""
    if is_over_well(seen) or is_gone(seen) or not doing(seen):
        return []
    return [memory_fault(seen, node, full) for node in seen.nodes if (full := memory_is_full(node))]


def memory_fault(seen: Seen, node: Node, full: str) -> Fault:
    more = "a larger POD_MEMORY_GB" if seen.cluster else "fewer other programs"
    return Fault(
        "memory",
        f"the memory of {named(seen, node)} is nearly full, {full} GiB; who takes more is killed",
        f"{more}, or a smaller MICRO_BATCH_SIZE where DEVICE=cpu; {restart(seen)}",
        about=f"node {node.node}",
    )


# ---------------------------------------------------------------------------------------------------
# Speed
# ---------------------------------------------------------------------------------------------------


def below_plan(seen: Seen, c: Config) -> list[Fault]:
    """Slower than planned; verdict.py says what to try."""
    p, part = seen.progress, slowness(seen)
    if p is None or part is None or not is_slow(seen) or not is_stepping(seen):
        return []
    look = (
        f"{make(seen, 'doctor', PROBE=1)} measures what this machine can do"
        if seen.cluster is None
        else f"{make(seen, 'logs')} shows how nodes talk to each other"
    )
    return [
        Fault(
            "below-plan",
            f"{p.tokens_per_s:,.0f} tokens/s, {100 * part:.0f}% of the plan's "
            f"{seen.expected.tokens_per_s:,.0f}",
            look,
        )
    ]


RULES = (disk, not_finite, skips, memory, no_checkpoint, spike, starved, below_plan)
