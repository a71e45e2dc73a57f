"""When a run will be where: by steps, hours from the start, and the clock."""

import dataclasses
import datetime
import math

from settings.config import Config


@dataclasses.dataclass(frozen=True)
class Milestone:
    """tokens: since the first step; hours: from now on; clock: local time, ISO 8601 to the minute, None
    beyond the calendar's year 9999."""

    name: str
    step: int
    tokens: int
    hours: float
    clock: str | None


def milestones(
    c: Config, step_s: float, start: datetime.datetime, done: int = 0
) -> list[Milestone]:
    """Those that are still to come, in their order. step_s: of an optimizer step, with its share of everything that
    recurs; done: steps that are made when it starts."""

    def at(name: str, step: int) -> Milestone:
        step = min(max(step, 1), c.last_step)
        seconds = (step - done) * step_s
        try:
            clock = (start + datetime.timedelta(seconds=seconds)).isoformat(timespec="minutes")
        except OverflowError:
            clock = None
        return Milestone(name, step, step * c.batch_tokens, seconds / 3600, clock)

    found = [at(f"{percent}%", math.ceil(percent / 100 * c.last_step)) for percent in (10, 50, 100)]
    if c.warmup_tokens and c.warmup_tokens // c.batch_tokens <= c.last_step:
        found.append(at("warm-up ends", math.ceil(c.warmup_tokens / c.batch_tokens)))
    if c.save_every != 0:
        found.append(
            at("next checkpoint" if done else "first checkpoint", first_save(c, step_s, done))
        )
    return sorted(
        (one for one in found if one.step > done), key=lambda one: (one.step, one.name == "100%")
    )


def first_save(c: Config, step_s: float, done: int = 0) -> int:
    """The step behind which the first checkpoint is written, or the next: by SAVE_EVERY or SAVE_MINUTES, or the
    last."""
    by_time = done + math.ceil(60 * c.save_minutes / step_s)
    by_step = (done // c.save_every + 1) * c.save_every if c.save_every else c.last_step
    return min(by_step, by_time, c.last_step)
