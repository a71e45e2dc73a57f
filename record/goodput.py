"""Where a run's time went: every second since the first start is in one category, from the record alone.

    |-- start_up --|-- data_wait, training, evaluation, checkpoint, other --|-- down --|-- start_up --| ...
    process starts  start record                                last record  next process starts

    records -> claims (a time, seconds before it, category, step) -> totals: goodput, the bar
                                                                  -> intervals -> energy

Inside an attempt, time is the difference of mono_s, so setting the clock changes nothing. Between attempts, which may be
on two machines, it is the wall clock's and never negative. A record claims the seconds that it reports, at most those
that have passed and are not claimed yet; what no record claims is `other`. Training and data wait of a step that the
run goes back past become lost work, as does a step whose update was skipped. An evaluation stays one. What an attempt
did after its last record is down time, because nothing shows it. The first step of an attempt, with everything that it
sets up, is training. Standard library only.
"""

import dataclasses
import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from record.metrics import GOES_BACK, duration

# Category -> its name, in the order of the summary.
CATEGORIES = {
    "training": "training",
    "start_up": "start-up",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "data_wait": "data wait",
    "exchange": "synchronization",
    "lost_work": "lost work",
    "down": "down",
    "other": "other",
}

# The claims of one record follow each other in this order.
ORDER = ("start_up", "checkpoint", "exchange", "data_wait", "training", "lost_work", "evaluation")
SET_S = 0.01  # a wall clock that moved that much against the monotonic one was set
ROUNDING_S = 1e-6


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The seconds of a run by category. Together they are its wall time.

    Attributes:
        seconds: category -> seconds, for each of CATEGORIES.
        start_up: phase -> seconds, of `start_up`.
        lost_steps: trained, and then the run went back past them.
        skipped_steps: computed, and their update was not applied.
    """

    seconds: Mapping[str, float]
    start_up: Mapping[str, float]
    lost_steps: int
    skipped_steps: int
    attempts: int

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The fraction of the time that trained what the run still has; 0 for no time at all."""
        wall_s = self.wall_s
        return self.seconds["training"] / wall_s if wall_s else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return category -> seconds, to the millisecond, for the `end` record."""
        return {category: round(seconds, 3) for category, seconds in self.seconds.items()}

    def summary(self) -> str:
        """Return one line for the console, without what rounds to 0:00."""
        parts = [
            f"{name} {duration(self.seconds[category])}{self.detail(category)}"
            for category, name in CATEGORIES.items()
            if round(self.seconds[category])
        ]
        head = f"goodput {100 * self.goodput:.1f}% of {duration(self.wall_s)}"
        return f"{head}: {', '.join(parts)}" if parts else head

    def detail(self, category: str) -> str:
        """Return what there is to add to a category, in parentheses; or nothing."""
        parts: list[str] = []
        if category == "start_up":
            for phase, seconds in self.start_up.items():
                if round(seconds):
                    parts.append(f"{phase} {duration(seconds)}")
        elif category == "lost_work":
            for count, word in ((self.lost_steps, "lost"), (self.skipped_steps, "skipped")):
                if count:
                    parts.append(f"{count:,} {'step' if count == 1 else 'steps'} {word}")
        elif category == "down" and self.attempts > 1:
            parts.append(f"{self.attempts:,} attempts")
        return f" ({', '.join(parts)})" if parts else ""


@dataclasses.dataclass
class Attempt:
    """What an attempt's records say of where and when it ran.

    Attributes:
        begin, end: seconds on its clock, from its process's start to its last record.
        down_s: seconds between the attempt before and this one.
        mono_s: the latest of its monotonic clock. Where the records have none, begin and end are Unix seconds.
        number: its place in config.json.
        offsets: Unix seconds minus those of its monotonic clock, one for each time that the wall clock was set.
    """

    begin: float
    end: float
    down_s: float
    mono_s: float | None
    number: int | None = None
    host: str | None = None
    world_size: int | None = None
    offsets: list[float] = dataclasses.field(default_factory=list)


class Interval(NamedTuple):
    """Time of one category.

    Attributes:
        attempt: its place, from 0; of `down` that of the attempt before.
        begin, end: seconds on the clock of that attempt.
        step: of training, data wait and lost work.
    """

    attempt: int
    begin: float
    end: float
    category: str
    step: int | None = None


class Claim(NamedTuple):
    """Seconds before a record that it reports the use of."""

    attempt: int
    end: float
    seconds: float
    category: str
    step: int | None = None


def account(records: Iterable[Mapping[str, Any]], now: float | None = None) -> Goodput:
    """Return where the time went from the first start to the last record, or to `now` in Unix seconds."""
    timeline = Timeline()
    for record in records:
        timeline.add(record)
    return timeline.totals(now)


class Timeline:
    """The time of a run, record by record.

    Attributes:
        attempts: those so far.
        steps, step_attempts, step_ends, trained, waited: columns of the steps that the run has: number, place of the
            attempt, seconds on its clock, seconds of training and of data wait.
        claims: all others, in the order of the records.
        unclaimed: seconds of this attempt that have passed and no record claims.
        start_up, lost_steps, skipped_steps: see Goodput.
    """

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.steps = array("q")
        self.step_attempts = array("q")
        self.step_ends = array("d")
        self.trained = array("d")
        self.waited = array("d")
        self.claims: list[Claim] = []
        self.unclaimed = 0.0
        self.start_up: dict[str, float] = {}
        self.lost_steps = 0
        self.skipped_steps = 0
        self.announced = False  # whether this attempt began with start or resume
        self.last: Mapping[str, Any] = {}  # the last record

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record."""
        event = record["event"]
        announces = event in ("start", "resume")
        phases = phases_of(record) if announces else {}
        if self.is_of_another_attempt(record) or (announces and self.announced):
            self.begin_attempt(record, sum(phases.values()))
        else:
            self.pass_time(record)
        self.announced = self.announced or announces
        self.note(record)

        before = self.unclaimed
        for phase, seconds in phases.items():
            self.start_up[phase] = self.start_up.get(phase, 0.0) + self.take(seconds)
        self.book("start_up", before - self.unclaimed)
        if event in GOES_BACK:
            self.go_back(record["step"])
        self.claim("checkpoint", number(record, "checkpoint_stall_s"))
        if event == "step":
            took = number(record, "step_ms") / 1000
            self.go_back(record["step"] - 1)
            waited = self.take(min(took, number(record, "data_wait_s")))
            self.steps.append(record["step"])
            self.step_attempts.append(len(self.attempts) - 1)
            self.step_ends.append(self.attempts[-1].end)
            self.waited.append(waited)
            self.trained.append(self.take(took - waited))
        elif event == "eval":
            self.claim("evaluation", number(record, "eval_s"))
        elif event == "skip":
            self.claim("lost_work", number(record, "step_ms") / 1000, record.get("step"))
            self.skipped_steps += 1
        elif event == "end":
            self.claim("checkpoint", number(record, "stall_s"))
        elif event in ("sync", "rollback"):
            self.claim("exchange", number(record, "stall_s"))
        if event == "rollback":
            self.claim("checkpoint", number(record, "seconds"))

    def is_of_another_attempt(self, record: Mapping[str, Any]) -> bool:
        """Return whether the last record was of another attempt; old records do not say of which they are."""
        if not self.last:
            return True
        before = self.attempts[-1].number
        return before is not None and record.get("attempt", before) != before

    def begin_attempt(self, record: Mapping[str, Any], start_up_s: float) -> None:
        """Take an attempt's first record: it began earlier, by the start-up that the record reports."""
        mono_s = record.get("mono_s")
        now = record["time"] if mono_s is None else mono_s
        down_s = 0.0
        if self.last:
            down_s = max(0.0, record["time"] - start_up_s - self.last["time"])
        self.attempts.append(Attempt(now - start_up_s, now, down_s, mono_s))
        self.unclaimed = start_up_s
        self.announced = False

    def pass_time(self, record: Mapping[str, Any]) -> None:
        """Add the time since the record before, of the same attempt."""
        attempt = self.attempts[-1]
        mono_s = record.get("mono_s")
        if mono_s is None or attempt.mono_s is None:
            passed = max(0.0, record["time"] - self.last["time"])
        else:
            passed = max(0.0, mono_s - attempt.mono_s)
        if mono_s is not None:
            attempt.mono_s = max(mono_s, attempt.mono_s or mono_s)
        self.unclaimed += passed
        attempt.end += passed

    def note(self, record: Mapping[str, Any]) -> None:
        """Keep what a record says of its attempt."""
        self.last = record
        attempt = self.attempts[-1]
        attempt.number = record.get("attempt", attempt.number)
        attempt.host = record.get("host", attempt.host)
        attempt.world_size = record.get("world_size", attempt.world_size)
        if attempt.mono_s is not None and record.get("mono_s") is not None:
            offset = record["time"] - record["mono_s"]
            if not attempt.offsets or abs(offset - attempt.offsets[-1]) > SET_S:
                attempt.offsets.append(offset)

    def claim(self, category: str, seconds: float, step: int | None = None) -> None:
        """Claim as much of this as has passed, for a category."""
        self.book(category, self.take(seconds), step)

    def book(self, category: str, seconds: float, step: int | None = None) -> None:
        if seconds > 0:
            place = len(self.attempts) - 1
            self.claims.append(Claim(place, self.attempts[-1].end, seconds, category, step))

    def take(self, seconds: float) -> float:
        """Return as much of this as has passed and nothing claims, which is claimed now."""
        taken = min(seconds, self.unclaimed)
        self.unclaimed -= taken
        return taken

    def go_back(self, step: int) -> None:
        """The run is at `step`: what it trained past that is lost."""
        while self.steps and self.steps[-1] > step:
            seconds = self.trained.pop() + self.waited.pop()
            place = self.step_attempts.pop()
            claim = Claim(place, self.step_ends.pop(), seconds, "lost_work", self.steps.pop())
            self.claims.append(claim)
            self.lost_steps += 1

    def totals(self, now: float | None = None) -> Goodput:
        """Return the sums up to the last record, or to `now`: from that record on, time is down if it ended an attempt,
        and else `other`."""
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        for claim in self.claims:
            seconds[claim.category] += claim.seconds
        seconds["training"] = math.fsum(self.trained)
        seconds["data_wait"] = math.fsum(self.waited)
        passed = math.fsum(attempt.end - attempt.begin for attempt in self.attempts)
        seconds["other"] = max(0.0, passed - math.fsum(seconds.values()))
        seconds["down"] = math.fsum(attempt.down_s for attempt in self.attempts)
        if now is not None and self.last:
            since = "down" if self.last["event"] == "end" else "other"
            seconds[since] += max(0.0, now - self.last["time"])
        return Goodput(
            seconds, dict(self.start_up), self.lost_steps, self.skipped_steps, len(self.attempts)
        )

    def intervals(self) -> list[Interval]:
        """Return all time from the first start to the last record, in order and without gaps.

        A claim ends at its record, or earlier where later claims need the room.
        """
        claims = [*self.claims]
        columns = (self.step_attempts, self.step_ends, self.waited, self.trained, self.steps)
        for place, end, waited, trained, step in zip(*columns, strict=True):
            claims.append(Claim(place, end, waited, "data_wait", step))
            claims.append(Claim(place, end, trained, "training", step))
        claims.sort(key=lambda claim: (claim.attempt, claim.end, ORDER.index(claim.category)))

        backward: list[Interval] = []
        for place in reversed(range(len(self.attempts))):
            attempt = self.attempts[place]
            free_until = attempt.end
            while claims and claims[-1].attempt == place:
                claim = claims.pop()
                if claim.end < free_until:
                    backward.append(Interval(place, claim.end, free_until, "other"))
                    free_until = claim.end
                begin = free_until - claim.seconds
                if begin < free_until:
                    backward.append(Interval(place, begin, free_until, claim.category, claim.step))
                    free_until = begin
            if free_until - attempt.begin > ROUNDING_S:
                backward.append(Interval(place, attempt.begin, free_until, "other"))
            if place:
                end = self.attempts[place - 1].end
                backward.append(Interval(place - 1, end, end + attempt.down_s, "down"))
        return backward[::-1]


def number(record: Mapping[str, Any], key: str) -> float:
    """Return the value where it is a number above 0; else 0, so that its time stays in `other`."""
    value = record.get(key)
    return value if isinstance(value, int | float) and value > 0 else 0.0


def phases_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return phase -> seconds of an attempt's start-up; older records have none."""
    phases = record.get("startup_s")
    if not isinstance(phases, Mapping):
        return {}
    return {phase: number(phases, phase) for phase in phases}
