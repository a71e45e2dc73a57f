"""Where a run's time went: every second since its first start is in one category, from the record alone.

    |-- start_up --|-- data_wait, training, evaluation, checkpoint, other --|-- down --|-- start_up --| ...
    process starts  start record                                  last record  next process starts

    records -> claims (seconds before a record, category) -> sums by category
                                                          -> intervals (analysis/energy)

Within an attempt, which `attempt` numbers, time is the difference of mono_s, so setting the clock
changes nothing. Between attempts, which may be on two machines, it is the wall clock's and never
negative. A record claims the seconds that it reports, at most those that have passed and are not
claimed yet; what no record claims is `other`. Training and data wait of a step that the run goes
back past become lost work, as does a step whose update was skipped. An evaluation stays one. What
an attempt did after its last record is down time, because nothing shows it. The time between the
end of a run that was done and the start of another attempt, which trains it further, belongs to
neither. The first step of an attempt, with everything that it sets up, is training. Standard
library only.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import fsum
from typing import Any, NamedTuple

from record.metrics import GOES_BACK, Record, duration

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

# Event -> the categories whose seconds it reports, as they follow each other, with the key of each.
CLAIMS = {
    "eval": {"evaluation": "eval_s"},
    "end": {"checkpoint": "stall_s"},
    "sync": {"exchange": "stall_s"},
    "rollback": {"exchange": "stall_s", "checkpoint": "seconds"},
}
SET_S = 0.01  # a wall clock that moved that much against the monotonic one was set


@dataclasses.dataclass
class Attempt:
    """What an attempt's records say of where and when it ran.

    Attributes:
        begin, end: seconds on its clock, from its process's start to its last record.
        down_s: seconds between the attempt before and this one; 0 if that one was done.
        number: its place in config.json.
        offsets: Unix seconds minus those of its monotonic clock, one for each time that the wall
            clock was set.
    """

    begin: float
    end: float
    down_s: float
    number: int | None
    world_size: int | None = None
    offsets: list[float] = dataclasses.field(default_factory=list)


class Claim(NamedTuple):
    """Seconds before a record that it reports the use of.

    Attributes:
        attempt: index of its attempt.
        end: of the record, on the clock of the attempt.
        step: of training, data wait and lost work.
    """

    attempt: int
    end: float
    seconds: float
    category: str
    step: int = 0


class Timeline:
    """The time of a run, record by record.

    Attributes:
        attempts: those so far.
        claims: in the order of the records. `training` and `data_wait` are of the steps that the run has.
        last_step: of these steps; 0 without one.
        unclaimed: seconds of this attempt that have passed and no record claims.
        start_up: phase -> seconds, of the category `start_up`.
        lost_steps: trained, and then the run went back past them.
        skipped_steps: computed, and their update was not applied.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.attempts: list[Attempt] = []
        self.claims: list[Claim] = []
        self.last_step = 0
        self.unclaimed = 0.0
        self.start_up: dict[str, float] = defaultdict(float)
        self.lost_steps = 0
        self.skipped_steps = 0
        self.time = 0.0  # of the last record, in Unix seconds
        self.is_done = False  # whether the last record says that the run was done
        for record in records:
            self.add(record)

    def steps(self) -> list[Claim]:
        """Return the training of each step that the run has, in order."""
        return [claim for claim in self.claims if claim.category == "training"]

    def add(self, record: Record) -> None:
        """Take the next record."""
        event = record["event"]
        phases = phases_of(record)
        if not self.attempts or record.get("attempt") != self.attempts[-1].number:
            if event == "gap":  # written before the attempt is ready, and the next record begins it
                return
            self.begin_attempt(record, sum(phases.values()))
        self.pass_time(record)

        for phase, seconds in phases.items():
            self.start_up[phase] += self.claim("start_up", seconds)
        if event in GOES_BACK:
            self.go_back(record["step"])
        self.claim("checkpoint", number(record, "checkpoint_stall_s"))
        if event == "step":
            self.add_step(record)
        elif event == "skip":
            self.claim("lost_work", number(record, "step_ms") / 1000, record["step"])
            self.skipped_steps += 1
        for category, key in CLAIMS.get(event, {}).items():
            self.claim(category, number(record, key))

    def begin_attempt(self, record: Record, start_up_s: float) -> None:
        """Take an attempt's first record. Its process began earlier by the start-up that it reports."""
        now = number(record, "mono_s")
        down_s = 0.0
        if self.attempts and not self.is_done:
            down_s = max(0.0, record["time"] - start_up_s - self.time)
        self.attempts.append(Attempt(now - start_up_s, now, down_s, record.get("attempt")))
        self.unclaimed = start_up_s

    def pass_time(self, record: Record) -> None:
        """Add the time since the record before, and keep what this one says of its attempt."""
        attempt = self.attempts[-1]
        mono_s = number(record, "mono_s") or attempt.end
        passed = max(0.0, mono_s - attempt.end)
        self.unclaimed += passed
        attempt.end += passed
        self.time = record["time"]
        self.is_done = record.get("reason") == "done"
        attempt.world_size = record.get("world_size", attempt.world_size)
        offset = self.time - mono_s
        if not attempt.offsets or abs(offset - attempt.offsets[-1]) > SET_S:
            attempt.offsets.append(offset)

    def add_step(self, record: Record) -> None:
        step = record["step"]
        self.go_back(step - 1)
        self.last_step = step
        took = number(record, "step_ms") / 1000
        waited = self.claim("data_wait", min(took, number(record, "data_wait_s")), step)
        self.claim("training", took - waited, step)

    def claim(self, category: str, seconds: float, step: int = 0) -> float:
        """Claim these seconds, at most those that have passed and nothing claims. Returns how many that are."""
        claimed = min(seconds, self.unclaimed)
        self.unclaimed -= claimed
        if claimed > 0 or category == "training":  # which counts a step, however short it was
            place = len(self.attempts) - 1
            self.claims.append(Claim(place, self.attempts[-1].end, claimed, category, step))
        return claimed

    def go_back(self, step: int) -> None:
        """The run is at this step: what it trained past it is lost."""
        if step >= self.last_step:
            return
        self.last_step = step
        for place in reversed(range(len(self.claims))):
            claim = self.claims[place]
            if claim.category not in ("training", "data_wait"):
                continue
            if claim.step <= step:
                break
            self.claims[place] = claim._replace(category="lost_work")
            self.lost_steps += claim.category == "training"

    def seconds(self) -> dict[str, float]:
        """Return the seconds up to the last record by category. Together they are the wall time."""
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        for claim in self.claims:
            seconds[claim.category] += claim.seconds
        passed = fsum(attempt.end - attempt.begin for attempt in self.attempts)
        seconds["other"] = max(0.0, passed - fsum(seconds.values()))
        seconds["down"] = fsum(attempt.down_s for attempt in self.attempts)
        return seconds

    def as_dict(self) -> dict[str, float]:
        """Return category -> seconds, to the millisecond, for the `end` record."""
        return {category: round(seconds, 3) for category, seconds in self.seconds().items()}

    def summary(self) -> str:
        """Return one line for the console, without what rounds to 0:00.

        Goodput is the fraction of the time that trained what the run still has.
        """
        phases = []
        for phase, seconds in self.start_up.items():
            if round(seconds):
                phases.append(f"{phase} {duration(seconds)}")
        details = {
            "start_up": ", ".join(phases),
            "lost_work": f"{self.lost_steps:,} steps lost, {self.skipped_steps:,} skipped",
            "down": f"{len(self.attempts):,} attempts",
        }
        parts = []
        totals = self.seconds()
        for category, seconds in totals.items():
            if round(seconds):
                detail = f" ({details[category]})" if details.get(category) else ""
                parts.append(f"{CATEGORIES[category]} {duration(seconds)}{detail}")
        wall_s = sum(totals.values())
        goodput = totals["training"] / (wall_s or 1)
        return f"goodput {goodput:.1%} of {duration(wall_s)}: {', '.join(parts) or 'nothing'}"


def number(record: Mapping[str, Any], key: str) -> float:
    """Return the value where it is a number above 0; else 0, so that its time stays in `other`."""
    value = record.get(key)
    return value if isinstance(value, int | float) and value > 0 else 0.0


def phases_of(record: Record) -> dict[str, float]:
    """Return phase -> seconds of an attempt's start-up; older records have none."""
    phases = record.get("startup_s") or {}
    return {phase: number(phases, phase) for phase in phases}
