"""Records as a run writes them, by a clock that a test moves."""

import random
from typing import Any

START = 1763719200.0
EVENTS = ["step"] * 6 + ["eval", "checkpoint", "skip", "rollback", "signal", "nonfinite", "end"]


class Clock:
    """Write records of an attempt, each `after` seconds past the one before."""

    def __init__(self) -> None:
        self.wall = START
        self.mono = 5000.0
        self.attempt = 0
        self.records: list[dict[str, Any]] = []

    def write(self, event: str, step: int, after: float = 0.0, **values: Any) -> "Clock":
        self.wall += after
        self.mono += after
        entry = {
            "schema": 1,
            "event": event,
            "time": self.wall,
            "mono_s": self.mono,
            "host": "h",
            "attempt": self.attempt,
            "step": step,
            "tokens": 100 * step,
        }
        self.records.append(entry | values)
        return self

    def start(self, step: int = 0, event: str = "start", **startup_s: float) -> "Clock":
        """Begin an attempt whose process starts now; its record follows the start-up."""
        return self.write(event, step, sum(startup_s.values()), startup_s=startup_s)

    def resume(self, step: int, down: float, **startup_s: float) -> "Clock":
        """Begin the next attempt `down` seconds from the last record, on another machine."""
        self.wall += down
        self.mono = 70_000.0
        self.attempt += 1
        return self.start(step, "resume" if step else "start", **startup_s)

    def steps(self, first: int, last: int, seconds: float = 2.0, wait: float = 0.0) -> "Clock":
        for step in range(first, last + 1):
            self.write("step", step, seconds, step_ms=1000 * seconds, data_wait_s=wait)
        return self


def run_at_random(seed: int) -> tuple[Clock, float, float]:
    """Return a run with clocks set inside attempts, the seconds of its attempts, and those between them."""
    dice = random.Random(seed)
    run = Clock()
    inside = between = 0.0
    step = 0
    for attempt in range(dice.randint(1, 4)):
        phases = dice.sample(["import", "data", "compile"], dice.randint(0, 3))
        startup_s = {phase: dice.uniform(0, 9) for phase in phases}
        if attempt:
            down = dice.uniform(0, 99)
            step = dice.choice([0, step, dice.randint(0, step)])
            between += down
            run.resume(step, down, **startup_s)
        else:
            run.start(**startup_s)
        inside += sum(startup_s.values())
        for _ in range(dice.randint(0, 30)):
            event = dice.choice(EVENTS)
            after = dice.uniform(0, 9)
            claimed = after * dice.uniform(0, 1.5)
            if event == "step":
                step += 1
            elif event == "rollback":
                step = dice.randint(0, step)
            run.wall += dice.choice([0.0] * 9 + [-3600.0, 3600.0])
            run.write(
                event,
                step,
                after,
                step_ms=1000 * claimed,
                data_wait_s=dice.uniform(0, after),
                eval_s=claimed,
                seconds=claimed,
                checkpoint_stall_s=dice.choice([0.0, after]),
            )
            inside += after
    return run, inside, between
