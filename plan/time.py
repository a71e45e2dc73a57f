"""How long a run takes, and when it will be where: training, waiting for other nodes, evaluating."""

import bisect
import dataclasses
import datetime
import math

from plan.measured import Probe
from plan.network.traffic import traffic_of, wait_of
from plan.run import Run
from plan.speed import Speed, speed_of
from settings.config import Config

# The evaluation at the end scores at most this many times EVAL_TOKENS (train/evaluate/validation.py).
FULL_SET = 20


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast a run is: the speed of its devices, and the seconds that each step waits for other nodes."""

    speed: Speed
    wait_s: float

    @property
    def step_s(self) -> float | None:
        """Seconds of an optimizer step with its wait."""
        return None if self.speed.step_s is None else self.speed.step_s + self.wait_s

    @property
    def tokens_per_s(self) -> float | None:
        """As metrics.jsonl has it, with the waits."""
        return self.slowed(self.speed.tokens_per_s)

    @property
    def mfu_percent(self) -> float | None:
        """As metrics.jsonl has it, with the waits."""
        return self.slowed(self.speed.mfu_percent)

    def slowed(self, value: float | None) -> float | None:
        return None if value is None or self.busy is None else value * self.busy

    @property
    def busy(self) -> float | None:
        """The share of the time in which the devices compute, 0 to 1."""
        return (
            None
            if self.step_s is None or not self.speed.step_s
            else self.speed.step_s / self.step_s
        )


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of a run, or of what is left of it. evaluating_seconds is at most that."""

    training_seconds: float
    waiting_seconds: float
    evaluating_seconds: float
    total_seconds: float


@dataclasses.dataclass(frozen=True)
class Milestone:
    """A step that people wait for.

    Attributes:
        seconds: from now.
        clock: local time, ISO 8601 to the minute; None beyond the year 9999.
    """

    name: str
    step: int
    tokens: int
    seconds: float
    clock: str | None


def pace_of(run: Run, probe: Probe | None) -> Pace:
    """Return the pace of a run. probe: what was measured of its slowest device."""
    speed = speed_of(run, probe)
    return Pace(speed, wait_of(traffic_of(run, speed.step_s)))


def time_of(config: Config, pace: Pace, done: int = 0) -> Time | None:
    """Return the time from step `done` to the end, or None where the speed is not known."""
    speed = pace.speed
    if speed.step_s is None or speed.tokens_per_s is None:
        return None
    left = config.last_step - done
    evaluations = FULL_SET if left else 0
    if config.eval_every:
        evaluations += config.last_step // config.eval_every - done // config.eval_every
    training = left * speed.step_s
    waiting = left * pace.wait_s
    evaluating = evaluations * evaluation_s(config, speed.tokens_per_s)
    return Time(training, waiting, evaluating, training + waiting + evaluating)


def evaluation_s(config: Config, tokens_per_s: float) -> float:
    """Return the seconds of an evaluation in pretraining. A forward pass is a third of a training step."""
    return config.eval_tokens / (3 * tokens_per_s)


def steps_within(config: Config, pace: Pace, hours: float, done: int = 0) -> int:
    """Return the most steps after `done` that end within so many hours, evaluations included."""
    assert pace.step_s is not None

    def takes_longer(steps: int) -> bool:
        time = time_of(config.replace(max_steps=done + steps), pace, done)
        return time is None or time.total_seconds > 3600 * hours

    most = 1 + int(3600 * hours / pace.step_s)
    return bisect.bisect_left(range(1, most + 1), True, key=takes_longer)


def milestones(
    config: Config, step_s: float, now: datetime.datetime, done: int = 0
) -> list[Milestone]:
    """Return the milestones after step `done`; step_s includes everything that recurs."""
    steps = {
        f"{percent}%": math.ceil(percent / 100 * config.last_step) for percent in (10, 50, 100)
    }
    warmup = math.ceil(config.warmup_tokens / config.batch_tokens)
    if 0 < warmup <= config.last_step + 1:
        steps["warm-up ends"] = warmup
    if config.save_every != 0:
        name = "next checkpoint" if done else "first checkpoint"
        steps[name] = first_save(config, step_s, done)
    reached = []
    for name, wanted in steps.items():
        step = min(max(wanted, 1), config.last_step)
        if step <= done:
            continue
        seconds = (step - done) * step_s
        reached.append(
            Milestone(name, step, step * config.batch_tokens, seconds, clock_after(now, seconds))
        )
    return sorted(reached, key=lambda one: (one.step, one.name == "100%"))


def clock_after(now: datetime.datetime, seconds: float) -> str | None:
    try:
        return (now + datetime.timedelta(seconds=seconds)).isoformat(timespec="minutes")
    except OverflowError:
        return None


def first_save(config: Config, step_s: float, done: int = 0) -> int:
    """Return the step of the next checkpoint, by SAVE_EVERY or SAVE_MINUTES, at the latest the last."""
    by_time = done + math.ceil(60 * config.save_minutes / step_s)
    by_step = config.last_step
    if config.save_every:
        by_step = (done // config.save_every + 1) * config.save_every
    return min(by_step, by_time, config.last_step)
