"""Where a run's time went: every second since the first start in one category, from metrics.jsonl alone.

    |-- start_up --|-- data_wait, training, evaluation, checkpoint, other --|-- down --|-- start_up --| ...
    process starts  start record                                last record  next process starts

Inside an attempt time is the difference of mono_s, so that a clock that is set changes nothing; between attempts,
which may be on two machines, it is the wall clock's, and never negative. A record books what it says it took, at
most what has passed and is not booked yet; what no record claims is `other`. Training and data wait of a step that
the run goes back behind become lost work, as does a step whose update was not taken. An evaluation stays one, and
what an attempt did after its last record is down time, as nobody knows of it. The first step of an attempt, with
all that it sets up, is training. Standard library only.
"""

import dataclasses
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from train.record import GOES_BACK, duration

# Category -> how it is called, in the order in which it is said.
CATEGORIES = {"training": "training", "start_up": "start-up", "evaluation": "evaluation", "checkpoint": "checkpoint",
              "data_wait": "data wait", "lost_work": "lost work", "down": "down", "other": "other"}


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The seconds of a run by category. Together they are its wall time."""

    seconds: Mapping[str, float]   # category -> seconds, all of CATEGORIES
    start_up: Mapping[str, float]  # phase -> seconds, of `start_up`
    lost_steps: int                # taken, and gone back behind
    skipped_steps: int             # computed, and their update not taken
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
        parts = [f"{name} {duration(self.seconds[category])}{self.detail(category)}"
                 for category, name in CATEGORIES.items() if round(self.seconds[category])]
        head = f"goodput {100 * self.goodput:.1f}% of {duration(self.wall_s)}"
        return f"{head}: {', '.join(parts)}" if parts else head

    def detail(self, category: str) -> str:
        """What there is to say of a category beside its time, in parentheses; or nothing."""
        said: list[str] = []
        if category == "start_up":
            said = [f"{phase} {duration(seconds)}" for phase, seconds in self.start_up.items() if round(seconds)]
        elif category == "lost_work":
            counts = ((self.lost_steps, "gone back behind"), (self.skipped_steps, "skipped"))
            said = [f"{count:,} {'step' if count == 1 else 'steps'} {what}" for count, what in counts if count]
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
        self.attempt: Any = None           # its number, where a record told
        self.announced = False             # whether it began with start or resume
        self.last: Mapping[str, Any] = {}  # the record before
        self.mono_s: float | None = None   # the latest in this attempt
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
            for phase, seconds in phases(record).items() if announces else ():  # the attempt spoke before it was ready
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
        elif event == "rollback":
            self.book("checkpoint", number(record, "seconds"))
        elif event == "end":
            self.book("checkpoint", number(record, "stall_s"))

    def begin(self, record: Mapping[str, Any], announces: bool) -> None:
        """An attempt's first record: the attempt began earlier, by the start-up it tells of."""
        self.rest_is_other()
        took = phases(record) if announces else {}
        if self.last:
            self.seconds["down"] += max(0.0, record["time"] - sum(took.values()) - self.last["time"])
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

    def close(self, now: float | None) -> Goodput:
        """The books as they stand after the last record, or at `now`."""
        self.rest_is_other()
        if now is not None and self.last:
            since = "down" if self.last["event"] == "end" else "other"
            self.seconds[since] += max(0.0, now - self.last["time"])
        seconds = {category: max(0.0, value) for category, value in self.seconds.items()}  # -1e-12 is rounding
        return Goodput(seconds, self.start_up, self.lost_steps, self.skipped_steps, self.attempts)


def number(record: Mapping[str, Any], key: str) -> float:
    """The value, where it is a number above 0; else 0, so that its time stays in `other`."""
    value = record.get(key)
    return value if isinstance(value, int | float) and value > 0 else 0.0


def phases(record: Mapping[str, Any]) -> dict[str, float]:
    """Phase -> seconds of an attempt's start-up; older records tell none."""
    told = record.get("startup_s")
    return {phase: number(told, phase) for phase in told} if isinstance(told, Mapping) else {}
