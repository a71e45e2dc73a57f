"""Steps that would harm the model: found by their numbers, skipped, and after several in a row undone.

A step is refused where its loss or gradient norm is not finite, or exceeds

    median + SPIKE_SIGMAS x spread      of the last WINDOW steps that were taken

Where only the norm is exceeded, NEW_LEVEL steps in a row, the norms have reached a new level: the guard forgets
their window, and checks norms again once it has seen enough of them. Models that memorize a small data set get
there. The loss of a model that diverges exceeds its own bound, so this does not hide it.

spread is the median distance from the median, scaled to be the standard deviation of a normal distribution;
it is taken to be at least a part of the median, so that a quiet stretch does not make the guard nervous.

Fine-tuning sees the same few samples again and again. Their losses fall to almost nothing, one after the other,
and one that is not learned yet then looks like a spike, with a norm to match. So there a step is refused for its
loss alone, while GRAD_CLIP limits what its norm does, and the bound never falls below the first one, that of the
model before it knew any of them.

The same numbers reach all ranks, so that all decide alike; the window is in the checkpoint, so that a resumed run
decides as one that was never stopped. Standard library only.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

from record.exit_codes import NO_PROGRESS
from settings import ExpectedError

WINDOW = 128  # steps
ARMED_FROM = 32  # steps in the window before spikes are looked for
NORMAL = 1.4826  # median distance from the median -> standard deviation
LEAST_SPREAD = {
    "loss": 0.02,
    "grad_norm": 0.25,
}  # parts of the median: 8 sigmas are 16% of a loss, 3 times a norm
LEAST_NATS = 0.04  # spread of a loss below 2, whose steps differ by several times when it is near 0
# What a checkpoint calls the fields of a Guard, beside its windows.
STORED_NAMES = {
    "skips": "skips",
    "norm_skips": "norm_skips",
    "rollbacks": "rollbacks",
    "release_step": "beyond",
    "rollback_step": "went_to",
    "cooldown": "unsettled",
}
COOLDOWN = 5  # steps after a synchronization of sites, in which norms jump without harm
MAX_SKIPS = 3  # refused steps in a row, after which the run goes back to a checkpoint
NEW_LEVEL = 2  # steps refused for their norm alone, in a row, after which norms have a new level
MAX_ROLLBACKS = 3  # times that it may go back to get past one place, before the run ends
LOOK_BACK = 100  # steps whose samples a rollback passes over: those before a spike often lead to it


class GuardError(ExpectedError):
    """The run does not get over a place where its steps are refused; the message says what to do."""

    exit_code = NO_PROGRESS


def new_window(values: Iterable[float] = ()) -> deque[float]:
    return deque(values, maxlen=WINDOW)


@dataclasses.dataclass
class Guard:
    """Judges each step. What it remembers is `state`."""

    sigmas: float
    repeats: bool = False  # whether samples come again and again, as in fine-tuning
    loss: deque[float] = dataclasses.field(default_factory=new_window)
    grad_norm: deque[float] = dataclasses.field(default_factory=new_window)
    skips: int = 0  # in a row
    norm_skips: int = 0  # in a row for their norm alone
    rollbacks: int = 0  # since the run last got well beyond where it went back from
    release_step: int = 0  # from which on rollbacks are counted anew
    rollback_step: int = 0  # that the last of them went back to
    least_bound: float = 0.0  # of losses, where samples repeat
    cooldown: int = 0  # so many next steps are skipped only if not finite, and not remembered

    def check_step(self, loss: float, grad_norm: float) -> str | None:
        """Why a step of these numbers must not be taken: "nonfinite", "loss", "grad_norm"; or None."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "nonfinite"
        if self.cooldown or not self.sigmas:
            return None
        if loss > self.bound("loss"):
            return "loss"
        if not self.repeats and grad_norm > self.bound("grad_norm"):
            return "grad_norm"
        return None

    def bound(self, name: str) -> float:
        """The largest loss or gradient norm that is taken; infinite as long as too few steps are known."""
        window: deque[float] = getattr(self, name)
        if len(window) < ARMED_FROM:
            return math.inf
        middle = median(window)
        spread = NORMAL * median(abs(value - middle) for value in window)
        least = LEAST_SPREAD[name] * abs(middle)
        least_bound = -math.inf
        if name == "loss":
            least = max(least, LEAST_NATS)
            least_bound = self.least_bound
        return max(least_bound, middle + self.sigmas * max(spread, least))

    def explain(self, refused: str | None) -> str:
        """Say why a step was refused."""
        if refused in LEAST_SPREAD:
            return f"{refused} above {self.bound(refused):.4g}"
        return "not finite"

    def applied(self, step: int, loss: float, grad_norm: float) -> None:
        """A step was taken, and is now the last one."""
        if self.cooldown:
            self.cooldown -= 1
        else:
            self.loss.append(loss)
            self.grad_norm.append(grad_norm)
        if self.repeats and not self.least_bound and len(self.loss) >= ARMED_FROM:
            self.least_bound = self.bound("loss")
        self.skips = 0
        self.norm_skips = 0
        if step > self.release_step:
            self.rollbacks = 0

    def skipped(self, reason: str | None) -> None:
        """A step was refused. reason: as check_step returns it."""
        self.skips += 1
        self.norm_skips = self.norm_skips + 1 if reason == "grad_norm" else 0
        if self.norm_skips == NEW_LEVEL:
            self.grad_norm.clear()
            self.skips = 0

    @property
    def must_go_back(self) -> bool:
        """Whether so many steps in a row were refused that the run goes back to a checkpoint."""
        return self.skips >= MAX_SKIPS

    def synchronized(self, every: int) -> None:
        """The weights have changed by more than a step, as they do every so many steps; half of these count."""
        self.cooldown = min(COOLDOWN, every // 2)

    def went_back(self, step: int, to: int) -> None:
        """The run went back from this step to that of a checkpoint."""
        self.release_step = max(self.release_step, step + LOOK_BACK)
        self.rollback_step = to
        self.skips = 0
        self.norm_skips = 0
        self.rollbacks += 1

    @property
    def gives_up(self) -> bool:
        """Whether no further rollback is allowed."""
        return self.rollbacks >= MAX_ROLLBACKS

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        state: dict[str, Any] = {"loss": list(self.loss), "grad_norm": list(self.grad_norm)}
        if self.repeats:
            state["least_bound"] = self.least_bound
        return state | {stored: getattr(self, name) for name, stored in STORED_NAMES.items()}

    def load(self, state: dict[str, Any], history: bool = True) -> None:
        """Take up what a checkpoint kept; without history only the window of numbers."""
        self.loss = new_window(state["loss"])
        self.grad_norm = new_window(state["grad_norm"])
        if not history:
            return
        self.least_bound = state.get("least_bound", 0.0)
        for name, stored in STORED_NAMES.items():
            setattr(self, name, state.get(stored, 0))  # commit 9fc3810 stored no norm_skips
