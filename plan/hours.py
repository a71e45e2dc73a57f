"""How long a run takes: training, waiting for the network, evaluating. Computed."""

import bisect
import dataclasses

from plan.fleet import Fleet
from plan.measured import Probe
from plan.network import traffic
from plan.network.traffic import Sync
from plan.speed import Speed, speed
from settings.config import Config

FULL_SET = (
    20  # the end of a run scores at most so many times EVAL_TOKENS (train/evaluate/validation.py)
)


@dataclasses.dataclass(frozen=True)
class Time:
    """Hours of a run, or of what is left of it. training: computing; waiting: for gradients between nodes, where
    nothing hides it; evaluating: at most. All on the devices that are planned for, from the first step on."""

    training: float
    waiting: float
    evaluating: float

    @property
    def total(self) -> float:
        return self.training + self.waiting + self.evaluating


def time_of(c: Config, fast: Speed, wait_s: float, done: int = 0) -> Time | None:
    """wait_s: for the network, in each step; done: steps that are made, and not counted. None where the speed is not
    known."""
    if fast.step_s is None or fast.tokens_per_s is None:
        return None
    left = c.last_step - done
    times = (c.last_step // c.eval_every - done // c.eval_every if c.eval_every else 0) + (
        FULL_SET if left else 0
    )
    # a forward pass is a third of a training step's work
    return Time(
        left * fast.step_s / 3600,
        left * wait_s / 3600,
        times * c.eval_tokens / (3 * fast.tokens_per_s) / 3600,
    )


def waiting_s(syncs: list[Sync]) -> float:
    """Seconds a step that the way which is chosen waits for other nodes, where nothing hides it; what is inside nodes
    is in the MFU. 0 for one process, which has no way; of the others one is always chosen."""
    if not syncs:
        return 0.0
    chosen = [sync for sync in syncs if sync.chosen]
    if len(chosen) != 1:
        raise ValueError(f"{len(chosen)} of {', '.join(sync.name for sync in syncs)} are chosen")
    return chosen[0].between_nodes_s


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast a run is: the speed of its devices, and what each step waits for the network."""

    fast: Speed
    wait_s: float

    @property
    def step_s(self) -> float | None:
        """Of an optimizer step, waits included."""
        return None if self.fast.step_s is None else self.fast.step_s + self.wait_s

    @property
    def tokens_per_s(self) -> float | None:
        """As metrics.jsonl has it: waits are in it."""
        if self.fast.tokens_per_s is None or self.fast.step_s is None:
            return None
        return self.fast.tokens_per_s * self.fast.step_s / (self.fast.step_s + self.wait_s)


def pace_of(c: Config, fleet: Fleet, probe: Probe | None) -> Pace:
    fast = speed(c, fleet, probe)
    return Pace(fast, waiting_s(traffic.syncs(c, fleet, fast.step_s)))


def hours_of(c: Config, fleet: Fleet, probe: Probe | None, done: int = 0) -> float | None:
    """Of the run, but for `done` steps that are made; None where the speed is not known."""
    pace = pace_of(c, fleet, probe)
    time = time_of(c, pace.fast, pace.wait_s, done)
    return time.total if time else None


def steps_within(c: Config, pace: Pace, hours: float, done: int = 0) -> int:
    """The most steps that are through in so many hours, behind `done` that are made, with the evaluations that they
    bring; 0 if not one is. The speed must be known."""
    assert pace.step_s is not None

    def too_long(steps: int) -> bool:
        time = time_of(c.replace(max_steps=done + steps), pace.fast, pace.wait_s, done)
        return time is None or time.total > hours

    return bisect.bisect_left(range(1, 2 + int(3600 * hours / pace.step_s)), True, key=too_long)
