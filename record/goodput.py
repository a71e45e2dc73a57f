"""Where a run's time went: every second since the first start is in one category, from the record alone.

    |-- start_up --|-- data_wait, training, evaluation, checkpoint, other --|-- down --|-- start_up --| ...
    process starts  start record                                last record  next process starts

    records -> claims (a time, seconds before it, a category, a step) -> intervals -> energy
                       \\-> totals: goodput, the bar

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
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import add, sub
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
        number: its place in config.json.
        begin, end: seconds on its clock, from its process's start to its last record.
        down_s: seconds between the attempt before and this one.
        offsets: Unix seconds minus those of its monotonic clock, one for each time that the wall clock was set. None
            where the records have no monotonic clock; begin and end are Unix seconds then.
    """

    begin: float
    end: float
    down_s: float
    number: int | None = None
    host: str | None = None
    world_size: int | None = None
    offsets: list[float] = dataclasses.field(default_factory=list)


class Interval(NamedTuple):
    """Time of one category.

    Attributes:
        attempt: counted from 0; for `down`, the one before.
        begin, end: seconds on the clock of that attempt.
        step: whose time it is, for training, data wait and lost work.
    """

    attempt: int
    begin: float
    end: float
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
        claims: all others: (place of the attempt, end, seconds, category, step).
    """

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.steps = array("q")
        self.step_attempts = array("q")
        self.step_ends = array("d")
        self.trained = array("d")
        self.waited = array("d")
        self.claims: list[tuple[int, float, float, str, int | None]] = []
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)  # the sums of all of these
        self.start_up: dict[str, float] = {}
        self.lost_steps = 0
        self.skipped_steps = 0
        self.unclaimed = 0.0  # seconds of this attempt that have passed
        self.announced = False  # whether this attempt began with start or resume
        self.mono_s: float | None = None  # the latest of this attempt
        self.last: Mapping[str, Any] = {}  # the last record

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record."""
        event = record["event"]
        announces = event in ("start", "resume")
        if self.is_new_attempt(record) or (announces and self.announced):
            self.begin_attempt(record, announces)
        else:
            self.pass_time(record)
            if announces:  # the attempt wrote records before it was ready
                for phase, seconds in phases_of(record).items():
                    claimed = self.claim("start_up", seconds)
                    self.start_up[phase] = self.start_up.get(phase, 0.0) + claimed
        self.announced = self.announced or announces
        self.last = record
        self.note_machine(record)

        if event in GOES_BACK:
            self.go_back(record["step"])
        self.claim("checkpoint", number(record, "checkpoint_stall_s"))
        if event == "step":
            self.add_step(record)
        elif event == "eval":
            self.claim("evaluation", number(record, "eval_s"))
        elif event == "skip":
            self.claim("lost_work", number(record, "step_ms") / 1000, record.get("step"))
            self.skipped_steps += 1
        elif event in ("sync", "rollback"):
            self.claim("exchange", number(record, "stall_s"))
        if event == "rollback":
            self.claim("checkpoint", number(record, "seconds"))
        elif event == "end":
            self.claim("checkpoint", number(record, "stall_s"))

    def is_new_attempt(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record is of another attempt than the last one; old records do not say of which."""
        if not self.last:
            return True
        before = self.attempts[-1].number
        return before is not None and record.get("attempt", before) != before

    def begin_attempt(self, record: Mapping[str, Any], announces: bool) -> None:
        """Take an attempt's first record: the attempt began earlier, by the start-up that the record reports."""
        self.seconds["other"] += self.unclaimed
        self.unclaimed = 0.0
        phases = phases_of(record) if announces else {}
        took = sum(phases.values())
        down_s = 0.0
        if self.last:
            down_s = max(0.0, record["time"] - took - self.last["time"])
            self.seconds["down"] += down_s
        self.announced = False
        self.mono_s = record.get("mono_s")
        now = record["time"] if self.mono_s is None else self.mono_s
        self.attempts.append(Attempt(now - took, now, down_s))
        for phase, seconds in phases.items():
            self.seconds["start_up"] += seconds
            self.start_up[phase] = self.start_up.get(phase, 0.0) + seconds
        self.claims.append((len(self.attempts) - 1, now, took, "start_up", None))

    def pass_time(self, record: Mapping[str, Any]) -> None:
        """Add the time since the record before, of the same attempt."""
        mono_s = record.get("mono_s")
        passed = 0.0
        if mono_s is None or self.mono_s is None:
            passed = max(0.0, record["time"] - self.last["time"])
        elif mono_s > self.mono_s:
            passed = mono_s - self.mono_s
        if mono_s is not None:
            self.mono_s = mono_s if self.mono_s is None else max(mono_s, self.mono_s)
        self.unclaimed += passed
        self.attempts[-1].end += passed

    def note_machine(self, record: Mapping[str, Any]) -> None:
        attempt = self.attempts[-1]
        attempt.number = record.get("attempt", attempt.number)
        attempt.host = record.get("host", attempt.host)
        attempt.world_size = record.get("world_size", attempt.world_size)
        mono_s = record.get("mono_s")
        if mono_s is not None:
            offset = record["time"] - mono_s
            if not attempt.offsets or abs(offset - attempt.offsets[-1]) > SET_S:
                attempt.offsets.append(offset)

    def claim(self, category: str, seconds: float, step: int | None = None) -> float:
        """Claim as much of this as has passed, for a category. Returns how much."""
        claimed = self.take(category, seconds)
        if claimed > 0:
            place = len(self.attempts) - 1
            self.claims.append((place, self.attempts[-1].end, claimed, category, step))
        return claimed

    def take(self, category: str, seconds: float) -> float:
        taken = min(seconds, self.unclaimed)
        self.unclaimed -= taken
        self.seconds[category] += taken
        return taken

    def add_step(self, record: Mapping[str, Any]) -> None:
        """Take a step; the run has it until it goes back past it."""
        took = number(record, "step_ms") / 1000
        self.go_back(record["step"] - 1)
        waited = self.take("data_wait", min(took, number(record, "data_wait_s")))
        self.steps.append(record["step"])
        self.step_attempts.append(len(self.attempts) - 1)
        self.step_ends.append(self.attempts[-1].end)
        self.waited.append(waited)
        self.trained.append(self.take("training", took - waited))

    def add_steps(
        self,
        steps: Sequence[int],
        mono_s: Sequence[float],
        took: Sequence[float],
        waited: Sequence[float],
        stalls: Sequence[float],
        last: Mapping[str, Any],
    ) -> bool:
        """Take many steps of this attempt at once, which count up by one.

        Args:
            took, waited, stalls: seconds of each step, of its wait for data (at most `took`) and of the save before it;
                0 where a record says nothing.
            last: the last of the records.

        Returns False, and takes none, where they must be added one by one: they are of another attempt, go back, or
        claim more time than has passed.
        """
        if self.is_new_attempt(last) or self.mono_s is None or mono_s[0] <= self.mono_s:
            return False
        if self.steps and steps[0] <= self.steps[-1]:
            return False
        passed = map(sub, mono_s, (self.mono_s, *mono_s))
        rest = [*accumulate(map(sub, passed, map(add, took, stalls)), initial=self.unclaimed)]
        if min(rest) < 0:
            return False
        trained = [*map(sub, took, waited)]
        self.seconds["training"] += math.fsum(trained)
        self.seconds["data_wait"] += math.fsum(waited)
        self.seconds["checkpoint"] += math.fsum(stalls)
        place = len(self.attempts) - 1
        for end, stall in zip(mono_s, stalls, strict=True):
            if stall:
                self.claims.append((place, end, stall, "checkpoint", None))
        self.steps.extend(steps)
        self.step_attempts.extend([place] * len(steps))
        self.step_ends.extend(mono_s)
        self.trained.extend(trained)
        self.waited.extend(waited)
        self.unclaimed = rest[-1]
        self.mono_s = self.attempts[-1].end = mono_s[-1]
        self.last = last
        self.note_machine(last)
        return True

    def go_back(self, step: int) -> None:
        """The run is at `step`: what it trained past that is lost."""
        while self.steps and self.steps[-1] > step:
            trained = self.trained.pop()
            waited = self.waited.pop()
            self.seconds["training"] -= trained
            self.seconds["data_wait"] -= waited
            self.seconds["lost_work"] += trained + waited
            self.lost_steps += 1
            claim = (self.step_attempts.pop(), self.step_ends.pop(), trained + waited)
            self.claims.append((*claim, "lost_work", self.steps.pop()))

    def totals(self, now: float | None = None) -> Goodput:
        """Return the sums up to the last record, or to `now`: from that record on, time is down if it ended an attempt,
        and else `other`."""
        # -1e-12 is rounding
        seconds = {category: max(0.0, value) for category, value in self.seconds.items()}
        seconds["other"] += self.unclaimed
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
        steps = zip(
            self.step_attempts, self.step_ends, self.waited, self.trained, self.steps, strict=True
        )
        claims = [*self.claims]
        for place, end, waited, trained, step in steps:
            claims.append((place, end, waited, "data_wait", step))
            claims.append((place, end, trained, "training", step))
        claims.sort(key=lambda claim: (claim[0], claim[1], ORDER.index(claim[3])))

        backward: list[Interval] = []
        later: Attempt | None = None
        free_until = 0.0
        for place, end, seconds, category, step in reversed(claims):
            attempt = self.attempts[place]
            if attempt is not later:
                if later:
                    until = attempt.end + later.down_s
                    backward.append(Interval(place, attempt.end, until, "down"))
                later = attempt
                free_until = attempt.end
            if end < free_until:
                backward.append(Interval(place, end, free_until, "other"))
                free_until = end
            begin = free_until - seconds
            if begin < free_until:
                backward.append(Interval(place, begin, free_until, category, step))
                free_until = begin
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
