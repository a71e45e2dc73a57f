"""One word on a run, after VERDICT_MINUTES of training and when it is over: on plan, below plan with what to try, or
failing. A pure function of a moment.

A run's pace is its tokens/s in steps times the part of the time that steps have, start-up apart: evaluations,
checkpoints, waiting and what was lost count against it. It is compared with the plan's tokens/s (SLOW_PERCENT).
"""

import dataclasses
from collections.abc import Iterable, Iterator

from monitor.facts import Fault, Seen
from monitor.rules.train_rules import data_hint
from monitor.snapshot import (
    SLOW_PERCENT,
    ago,
    all_gpus,
    at,
    is_gone,
    is_over_well,
    make,
    restart,
    slowness,
)
from record import number_formats
from settings.config import Config

ON_PLAN, BELOW_PLAN, FAILING, DONE, STOPPED, NO_PLAN = (
    "on plan",
    "below plan",
    "failing",
    "done",
    "stopped",
    "no plan to compare with",
)
ROOMY = 0.5  # of a GPU's memory: with less in use a step may be larger
MOST_TRIES = 3
VERDICT_MINUTES = 30.0  # of training, after which a run has a verdict
OVERHEAD_PERCENT = 10.0  # of a run's time may go into evaluations, and as much into checkpoints
HEAVY = {
    "killed",
    "crashed",
    "nccl",
    "hanging",
    "not-begun",
}  # with these there is no pace to speak of


@dataclasses.dataclass(frozen=True)
class Verdict:
    """word: one of those above; sentence: all of it, the word included; is_last: the run is over."""

    word: str
    sentence: str
    is_last: bool = False

    @property
    def is_bad(self) -> bool:
        return self.word in (BELOW_PLAN, FAILING)


def verdict(seen: Seen, c: Config, faults: Iterable[Fault]) -> Verdict | None:
    """None as long as it is too early to tell. faults: what rules.judge says of the same moment."""
    faults = list(faults)
    if is_over_well(seen):
        return over(seen, c)
    p = seen.progress
    bad = [fault for fault in faults if fault.failing or fault.name in HEAVY]
    is_early = p is None or trained_s(seen) < 60 * VERDICT_MINUTES
    if bad and (is_gone(seen) or not is_early):
        sentence = f"failing: {bad[0].text}; next: {bad[0].next}"
        return Verdict(FAILING, sentence, is_last=is_gone(seen))
    if p is None or is_early:
        return None
    part = pace(seen)
    if part is None:
        why = f" ({seen.expected.why})" if seen.expected.why else ""
        speed = f": {p.tokens_per_s:,.0f} tokens/s" if p.tokens_per_s is not None else ""
        return Verdict(
            NO_PLAN,
            f"{NO_PLAN}{why}{speed} after {ago(trained_s(seen))} of training{wrong(faults)}",
        )
    if 100 * part >= SLOW_PERCENT:
        return Verdict(ON_PLAN, f"on plan: {numbers(seen, part)}{wrong(faults)}")
    tries = list(dict.fromkeys(what_to_try(seen, c, faults)))[:MOST_TRIES]
    advice = (
        f"; try: {'; '.join(tries)}"
        if tries
        else f"; {make(seen, 'doctor', PROBE=1)} measures what is possible"
    )
    return Verdict(BELOW_PLAN, f"below plan: {numbers(seen, part)}{advice}")


def wrong(faults: list[Fault]) -> str:
    return f"; but {faults[0].text}" if faults else ""


def trained_s(seen: Seen) -> float:
    """Of the whole run, by its record's books; else since this attempt's start."""
    p = seen.progress
    if p is None:
        return 0.0
    if "training" in p.goodput:
        return p.goodput["training"]
    if p.step_time is None or p.attempt_started is None:
        return 0.0
    return max(0.0, min(p.step_time, at(seen)) - p.attempt_started)


def steps_part(seen: Seen) -> float:
    """The part of the time, start-up apart, in which steps were made: 1 where it is not known."""
    books = at_work_books(seen)
    spent = sum(books.values())
    # data wait is in the steps' own time already
    return (books.get("training", 0.0) + books.get("data_wait", 0.0)) / spent if spent > 0 else 1.0


def at_work_books(seen: Seen) -> dict[str, float]:
    """Category -> seconds, without start-up. Of a run here also without the time in which it was stopped because
    somebody wished so; a cluster's pods are told to stop where they lose their place."""
    p = seen.progress
    books = {
        category: seconds
        for category, seconds in (p.goodput if p else {}).items()
        if category != "start_up"
    }
    if p and "down" in books and seen.cluster is None:
        books["down"] = max(0.0, books["down"] - (p.rested_s or 0.0))
    return books


def pace(seen: Seen) -> float | None:
    """Of the plan's, 1 where both are the same."""
    part = slowness(seen)
    return None if part is None else part * steps_part(seen)


def numbers(seen: Seen, part: float) -> str:
    """'412,000 tokens/s of 430,600 planned in steps, 97% of the time; 93% of the plan's pace, 0:31:00 of training'"""
    p, plan = seen.progress, seen.expected.tokens_per_s
    assert p and p.tokens_per_s is not None and plan
    mfu = f", {p.mfu_percent:.1f}% MFU" if p.mfu_percent is not None else ""
    mfu += (
        f" of {seen.expected.mfu_percent:.1f}%"
        if mfu and seen.expected.mfu_percent is not None
        else ""
    )
    share = f"steps have {100 * steps_part(seen):.0f}% of the time"
    return (
        f"{p.tokens_per_s:,.0f} tokens/s, of {plan:,.0f} planned{mfu}; {share}, so that the run has "
        f"{100 * part:.0f}% of the plan's pace, after {ago(trained_s(seen))} of training"
    )


# ---------------------------------------------------------------------------------------------------
# What to try
# ---------------------------------------------------------------------------------------------------


def what_to_try(seen: Seen, c: Config, faults: list[Fault]) -> Iterator[str]:
    """By cause, what is certain first: what rules have found, what the books show, and settings that cost speed."""
    named = {fault.name: fault for fault in faults}
    for name in (
        "throttled-heat",
        "throttled-supply",
        "throttled-hardware",
        "throttled-power",
        "network",
        "straggler",
        "idle-gpu",
        "imbalance",
        "waits-for-data",
    ):
        if name in named:
            yield f"{named[name].text}: {named[name].next}"
    p = seen.progress
    if "starved" in named:
        yield f"{named['starved'].text}: {data_hint(seen, c)}"
    yield from by_books(seen, c)
    if c.compile == "0":
        yield restart(seen, COMPILE="auto")
    on_gpus = bool(all_gpus(seen))
    if on_gpus and c.dtype == "float32":
        yield "DTYPE=float32 uses a fraction of these GPUs: " + restart(seen, DTYPE="bfloat16")
    if on_gpus and c.attention in ("math", "sdpa"):
        yield restart(seen, ATTENTION="auto")
    totals = [gpu.memory_total_gib for _, gpu in all_gpus(seen) if gpu.memory_total_gib]
    if p and p.mem_gib is not None and totals and p.mem_gib < ROOMY * min(totals):
        room = f"{p.mem_gib:.0f} of {min(totals):.0f} GiB are in use: "
        if c.activation_checkpointing != "none":
            yield room + restart(seen, ACTIVATION_CHECKPOINTING="none")
        elif larger_fits(seen, c):
            yield room + restart(seen, MICRO_BATCH_SIZE=2 * c.micro_batch_size)


def larger_fits(seen: Seen, c: Config) -> bool:
    """Whether a process has twice as many sequences in a step."""
    return 2 * c.micro_batch_size * len(all_gpus(seen)) <= c.batch_windows


def by_books(seen: Seen, c: Config) -> Iterator[str]:
    """What takes more of the time than it should (OVERHEAD_PERCENT)."""
    books = at_work_books(seen)
    spent = sum(books.values())

    def share(category: str) -> float:
        return 100 * books.get(category, 0.0) / spent if spent else 0.0

    if share("evaluation") > OVERHEAD_PERCENT and c.eval_every:
        yield f"evaluations take {share('evaluation'):.0f}% of the time: " + restart(
            seen, EVAL_EVERY=2 * c.eval_every, EVAL_TOKENS=max(256, c.eval_tokens // 2)
        )
    if share("checkpoint") > OVERHEAD_PERCENT:
        yield f"checkpoints take {share('checkpoint'):.0f}% of the time: " + restart(
            seen,
            SAVE_MINUTES=f"{2 * c.save_minutes:g}",
            **{"SAVE_EVERY": 2 * c.save_every} if c.save_every else {},
        )
    if share("lost_work") > OVERHEAD_PERCENT or share("down") > OVERHEAD_PERCENT:
        lost = share("lost_work") + share("down")
        yield f"{lost:.0f}% of the time was lost to crashes and restarts: {make(seen, 'logs', ONLY='errors')} shows why"


# ---------------------------------------------------------------------------------------------------
# The end
# ---------------------------------------------------------------------------------------------------


def over(seen: Seen, c: Config) -> Verdict:
    """The last word on a run that is done, or was stopped."""
    p = seen.progress
    word = STOPPED if seen.phase == "stopped" or (p and p.end_reason == "stopped") else DONE
    parts = []
    if p and p.step:
        parts.append(
            f"{p.step:,}{f' of {p.last_step:,}' if p.last_step else ''} steps, {number_formats.count(p.tokens)} tokens"
        )
    if p and p.val_loss is not None:
        parts.append(f"validation loss {p.val_loss:.4f}")
    elif p and p.loss is not None:
        parts.append(f"loss {p.loss:.4f}")
    books = p.goodput if p else {}
    if spent := sum(books.values()):
        parts.append(
            f"{100 * books.get('training', 0.0) / spent:.0f}% of {ago(spent)} was training"
        )
    part = pace(seen)
    if part is not None:
        ends = "on plan" if 100 * part >= SLOW_PERCENT else "below plan"
        parts.append(f"{ends}, at {100 * part:.0f}% of its pace")
    if word == STOPPED:
        if p and p.last_step and p.step >= p.last_step:
            parts.append("all steps are made, and the last evaluation was not ended")
        parts.append(restart(seen))
    return Verdict(word, f"{word}: {'; '.join(parts)}" if parts else word, is_last=True)
