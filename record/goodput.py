"""Where a run's time went: every second since the first start in one category, from metrics.jsonl alone.

    |-- start_up --|-- data_wait, training, evaluation, checkpoint, other --|-- down --|-- start_up --| ...
    process starts  start record                                last record  next process starts

Inside an attempt time is the difference of mono_s, so that a clock that is set changes nothing; between attempts,
which may be on two machines, it is the wall clock's, and never negative. A record books what it says it took, at
most what has passed and is not booked yet; what no record claims is `other`. Training and data wait of a step that
the run goes back behind become lost work, as does a step whose update was not taken. An evaluation stays one, and
what an attempt did after its last record is down time, as nobody knows of it. The first step of an attempt, with
all that it sets up, is training. `Timeline` says of each second also when it was. Standard library only.
"""

import copy
import dataclasses
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import add, sub
from typing import Any, NamedTuple

from record.reader import GOES_BACK, duration

# Category -> how it is called, in the order in which it is said.
CATEGORIES = {
    "training": "training",
    "start_up": "start-up",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "data_wait": "data wait",
    "exchange": "exchanges between sites",
    "lost_work": "lost work",
    "down": "down",
    "other": "other",
}

SET_S = 0.01  # a clock on the wall that moved by more than that against the monotonic one was set


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The seconds of a run by category. Together they are its wall time."""

    seconds: Mapping[str, float]  # category -> seconds, all of CATEGORIES
    start_up: Mapping[str, float]  # phase -> seconds, of `start_up`
    lost_steps: int  # taken, and gone back behind
    skipped_steps: int  # computed, and their update not taken
    attempts: int

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The fraction of the time that trained what the run still has; 0 of no time at all."""
        wall_s = self.wall_s
        return self.seconds["training"] / wall_s if wall_s else 0.0

    def as_dict(self) -> dict[str, float]:
        """For the `end` event: category -> seconds, to the millisecond."""
        return {category: round(seconds, 3) for category, seconds in self.seconds.items()}

    def summary(self) -> str:
        """One line for the console; what rounds to 0:00 is left out."""
        parts = [
            f"{name} {duration(self.seconds[category])}{self.detail(category)}"
            for category, name in CATEGORIES.items()
            if round(self.seconds[category])
        ]
        head = f"goodput {100 * self.goodput:.1f}% of {duration(self.wall_s)}"
        return f"{head}: {', '.join(parts)}" if parts else head

    def detail(self, category: str) -> str:
        """What there is to say of a category beside its time, in parentheses; or nothing."""
        said: list[str] = []
        if category == "start_up":
            said = [
                f"{phase} {duration(seconds)}"
                for phase, seconds in self.start_up.items()
                if round(seconds)
            ]
        elif category == "lost_work":
            counts = ((self.lost_steps, "gone back behind"), (self.skipped_steps, "skipped"))
            said = [
                f"{count:,} {'step' if count == 1 else 'steps'} {what}"
                for count, what in counts
                if count
            ]
        elif category == "down" and self.attempts > 1:
            said = [f"{self.attempts:,} attempts"]
        return f" ({', '.join(said)})" if said else ""


def account(records: Iterable[Mapping[str, Any]], now: float | None = None) -> Goodput:
    """Book the time from the first start to the last record, or to `now` in Unix seconds.

    The records are read once. From the last one to `now` time is down if that ended an attempt, and else other.
    """
    books = Books()
    for record in records:
        books.enter(record)
    return books.close(now)


class Books:
    """What is booked so far. `unbooked` has passed in this attempt and no record has claimed it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self.start_up: dict[str, float] = {}
        self.lost_steps = self.skipped_steps = self.attempts = 0
        self.unbooked = 0.0
        self.attempt: Any = None  # its number, where a record told
        self.announced = False  # whether it began with start or resume
        self.last: Mapping[str, Any] = {}  # the record before
        self.mono_s: float | None = None  # the latest in this attempt
        # the steps that the run has, in order: number, seconds of training, seconds of data wait
        self.steps, self.trained, self.waited = array("q"), array("d"), array("d")

    def enter(self, record: Mapping[str, Any]) -> None:
        """Take the next record."""
        event, attempt = record["event"], record.get("attempt", self.attempt)
        announces = event in ("start", "resume")
        other_attempt = self.attempt is not None and attempt != self.attempt
        if not self.last or other_attempt or (announces and self.announced):
            self.begin(record, announces)
        else:
            self.pass_time(record)
            for phase, seconds in (
                phases(record).items() if announces else ()
            ):  # the attempt spoke before it was ready
                self.add_start_up(phase, self.book("start_up", seconds))
        self.attempt, self.last, self.announced = attempt, record, self.announced or announces
        if event in GOES_BACK:
            self.go_back(record["step"])
        self.book("checkpoint", number(record, "checkpoint_stall_s"))
        if event == "step":
            self.take(record)
        elif event == "eval":
            self.book("evaluation", number(record, "eval_s"))
        elif event == "skip":
            self.book("lost_work", number(record, "step_ms") / 1000)
            self.skipped_steps += 1
        elif event == "sync":
            self.book("exchange", number(record, "stall_s"))
        elif event == "rollback":
            self.book("exchange", number(record, "stall_s"))
            self.book("checkpoint", number(record, "seconds"))
        elif event == "end":
            self.book("checkpoint", number(record, "stall_s"))

    def enter_steps(
        self,
        steps: Sequence[int],
        mono_s: Sequence[float],
        took: Sequence[float],
        waited: Sequence[float],
        stalls: Sequence[float],
        last: Mapping[str, Any],
    ) -> bool:
        """Take steps of this attempt that count up, all at once; seconds, 0 where a record is silent, and the wait for
        data no longer than the step. False, and none is taken, where they must be entered one by one: as they are of
        another attempt, go back, or claim more time than has passed."""
        if (
            not self.last
            or last.get("attempt", self.attempt) != self.attempt
            or self.mono_s is None
            or mono_s[0] <= self.mono_s
            or (self.steps and steps[0] <= self.steps[-1])
        ):
            return False
        passed = map(sub, mono_s, (self.mono_s, *mono_s))
        rest = [*accumulate(map(sub, passed, map(add, took, stalls)), initial=self.unbooked)]
        if min(rest) < 0:
            return False
        trained = [*map(sub, took, waited)]
        for category, seconds in (
            ("training", trained),
            ("data_wait", waited),
            ("checkpoint", stalls),
        ):
            self.seconds[category] += math.fsum(seconds)
        self.steps.extend(steps)
        self.trained.extend(trained)
        self.waited.extend(waited)
        self.unbooked, self.mono_s, self.last = rest[-1], mono_s[-1], last
        return True

    def begin(self, record: Mapping[str, Any], announces: bool) -> None:
        """An attempt's first record: the attempt began earlier, by the start-up it tells of."""
        self.rest_is_other()
        took = phases(record) if announces else {}
        if self.last:
            self.seconds["down"] += max(
                0.0, record["time"] - sum(took.values()) - self.last["time"]
            )
        for phase, seconds in took.items():
            self.seconds["start_up"] += seconds
            self.add_start_up(phase, seconds)
        self.attempts += 1
        self.announced, self.mono_s = announces, record.get("mono_s")

    def pass_time(self, record: Mapping[str, Any]) -> None:
        """The time since the record before, of the same attempt."""
        mono_s = record.get("mono_s")
        if mono_s is None or self.mono_s is None:
            self.unbooked += max(0.0, record["time"] - self.last["time"])
        elif mono_s > self.mono_s:
            self.unbooked += mono_s - self.mono_s
        if mono_s is not None and (self.mono_s is None or mono_s > self.mono_s):
            self.mono_s = mono_s

    def book(self, category: str, seconds: float) -> float:
        """Book as much of this as has passed; returns how much."""
        booked = min(seconds, self.unbooked)
        self.unbooked -= booked
        self.seconds[category] += booked
        return booked

    def take(self, record: Mapping[str, Any]) -> None:
        """A step that was taken; the run has it until it goes back behind it."""
        step, took = record["step"], number(record, "step_ms") / 1000
        self.go_back(step - 1)
        waited = self.book("data_wait", min(took, number(record, "data_wait_s")))
        self.steps.append(step)
        self.waited.append(waited)
        self.trained.append(self.book("training", took - waited))

    def go_back(self, step: int) -> None:
        """The run is at `step`: what it trained past that is lost."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            trained, waited = self.trained.pop(), self.waited.pop()
            self.seconds["training"] -= trained
            self.seconds["data_wait"] -= waited
            self.seconds["lost_work"] += trained + waited
            self.lost_steps += 1

    def add_start_up(self, phase: str, seconds: float) -> None:
        self.start_up[phase] = self.start_up.get(phase, 0.0) + seconds

    def rest_is_other(self) -> None:
        self.seconds["other"] += self.unbooked
        self.unbooked = 0.0

    def so_far(self) -> Goodput:
        """As they would be closed at the last record; they stay open."""
        books = copy.copy(self)
        books.seconds = dict(self.seconds)
        return books.close(None)

    def close(self, now: float | None) -> Goodput:
        """The books as they stand after the last record, or at `now`."""
        self.rest_is_other()
        if now is not None and self.last:
            since = "down" if self.last["event"] == "end" else "other"
            self.seconds[since] += max(0.0, now - self.last["time"])
        seconds = {
            category: max(0.0, value) for category, value in self.seconds.items()
        }  # -1e-12 is rounding
        return Goodput(seconds, self.start_up, self.lost_steps, self.skipped_steps, self.attempts)


# ---------------------------------------------------------------------------------------------------
# When it was
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Attempt:
    """What an attempt's records say of where it ran. number: its place in config.json. offsets: Unix seconds less those
    of its clock, one for each time that the clock on the wall was set; none where the records have no monotonic clock
    and are told by the wall's."""

    host: str | None = None
    world_size: int | None = None
    number: int | None = None
    offsets: list[float] = dataclasses.field(default_factory=list)


class Stretch(NamedTuple):
    """Time of one category. begin, end: (attempt, counted from 0; seconds on its clock), of two attempts where the run
    was down between them."""

    begin: tuple[int, float]
    end: tuple[int, float]
    category: str
    seconds: float


class Timeline(Books):
    """Books that also know when each second was, on the monotonic clock of its attempt.

    What a record claims was just before it, in the order in which it is booked: a save, then the wait for data, then
    the step. Where too little time is left since the record before, the latest that nothing has claimed is taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Attempt] = []
        self.down_s: list[float] = []  # before each attempt
        # stretches in the order in which they were placed: attempt, from, to, category
        self.of, self.begins, self.ends, self.categories = (
            array("q"),
            array("d"),
            array("d"),
            list[str](),
        )
        # of the steps that the run has: attempt, when it ended, how long it took, its first stretch and that behind it
        self.step_of, self.step_ends, self.step_s = array("q"), array("d"), array("d")
        self.first, self.behind = array("q"), array("q")
        self.now = 0.0  # where the attempt's clock stands
        self.free: list[
            tuple[float, float]
        ] = []  # has passed, and no record has claimed it; the latest last
        self.claims: list[tuple[str, float]] = []  # of this record

    def enter(self, record: Mapping[str, Any]) -> None:
        self.claims.clear()
        super().enter(record)
        attempt = self.ran[-1]
        attempt.host = record.get("host", attempt.host)
        attempt.world_size = record.get("world_size", attempt.world_size)
        attempt.number = record.get("attempt", attempt.number)
        if (mono_s := record.get("mono_s")) is not None:
            offset = record["time"] - mono_s
            if not attempt.offsets or abs(offset - attempt.offsets[-1]) > SET_S:
                attempt.offsets.append(offset)
        first = len(self.of)
        for category, seconds in reversed(self.claims):
            self.place(category, seconds)
        if record["event"] == "step":
            took = record.get("step_ms")
            self.step_of.append(len(self.ran) - 1)
            self.step_ends.append(self.now)
            self.step_s.append(took / 1000 if isinstance(took, int | float) else float("nan"))
            self.first.append(first)
            self.behind.append(len(self.of))

    def enter_steps(self, *_: Any) -> bool:
        return False  # each has its own place

    def begin(self, record: Mapping[str, Any], announces: bool) -> None:
        before = self.seconds["down"]
        super().begin(record, announces)
        self.ran.append(Attempt())
        self.down_s.append(self.seconds["down"] - before)
        self.now = record["time"] if self.mono_s is None else self.mono_s
        took = sum(phases(record).values()) if announces else 0.0
        self.add(self.now - took, self.now, "start_up")  # of no length too: the attempt was there

    def pass_time(self, record: Mapping[str, Any]) -> None:
        before = self.unbooked
        super().pass_time(record)
        if (passed := self.unbooked - before) > 0:
            self.free.append((self.now, self.now + passed))
            self.now += passed

    def book(self, category: str, seconds: float) -> float:
        booked = super().book(category, seconds)
        if booked > 0:
            self.claims.append((category, booked))
        return booked

    def go_back(self, step: int) -> None:
        super().go_back(step)
        while len(self.first) > len(self.steps):
            for i in range(self.first.pop(), self.behind.pop()):
                if self.categories[i] in ("training", "data_wait"):
                    self.categories[i] = "lost_work"
            for column in (self.step_of, self.step_ends, self.step_s):
                column.pop()

    def rest_is_other(self) -> None:
        super().rest_is_other()
        for begin, end in self.free:
            self.add(begin, end, "other")
        self.free.clear()

    def place(self, category: str, seconds: float) -> None:
        """Give the latest free time to a claim."""
        while seconds > 0 and self.free:
            begin, end = self.free.pop()
            cut = end - seconds
            if cut > begin:
                self.free.append((begin, cut))
                seconds = 0.0  # not by subtraction: what rounding leaves would never be placed
            else:
                cut, seconds = begin, seconds - (end - begin)
            if cut < end:
                self.add(cut, end, category)

    def add(self, begin: float, end: float, category: str) -> None:
        self.of.append(len(self.ran) - 1)
        self.begins.append(begin)
        self.ends.append(end)
        self.categories.append(category)

    def stretches(self) -> list[Stretch]:
        """All time from the first start to the last record, in order and without gaps; once the books are closed."""
        found: list[Stretch] = []
        for of, begin, end, category in sorted(
            zip(self.of, self.begins, self.ends, self.categories, strict=True)
        ):
            if found and found[-1].end[0] != of:
                found.append(Stretch(found[-1].end, (of, begin), "down", self.down_s[of]))
            found.append(Stretch((of, begin), (of, end), category, end - begin))
        return found


def number(record: Mapping[str, Any], key: str) -> float:
    """The value, where it is a number above 0; else 0, so that its time stays in `other`."""
    value = record.get(key)
    return value if isinstance(value, int | float) and value > 0 else 0.0


def phases(record: Mapping[str, Any]) -> dict[str, float]:
    """Phase -> seconds of an attempt's start-up; older records tell none."""
    told = record.get("startup_s")
    return {phase: number(told, phase) for phase in told} if isinstance(told, Mapping) else {}
