"""How long each thing that a process does may take before it counts as hung."""

import contextlib
from collections import deque
from collections.abc import Iterator
from statistics import median

from settings.config import Config
from train.faults.watchdog import Watchdog


class Deadlines:
    """Sets the watchdog's limit: what is slow by nature does not hang.

    Attributes:
        times: seconds of the last steps.
    """

    def __init__(self, config: Config, watch: Watchdog):
        self.config = config
        self.watch = watch
        self.times: deque[float] = deque(maxlen=50)

    @property
    def step_limit_s(self) -> float:
        """Seconds without progress after which a step hangs. The first may load, compile and wait for others."""
        if not self.times:
            return self.config.start_timeout_s
        return max(self.config.train_timeout_s / 2, 10 * median(self.times))

    def begin_step(self, step: int) -> None:
        self.watch.expect(f"step {step}", self.step_limit_s, "TRAIN_TIMEOUT_S")

    def end_step(self, seconds: float) -> None:
        self.times.append(seconds)

    def progress(self, limit_s: float) -> None:
        """What is being done goes on; the next sign of that is due in so many seconds."""
        self.watch.expect(self.watch.doing, limit_s, self.watch.setting)

    @contextlib.contextmanager
    def allow(self, doing: str, limit_s: float, setting: str = "") -> Iterator[None]:
        """Give this so many seconds, and then what was being done before its own time again."""
        watch = self.watch
        before = (watch.doing, watch.limit_s, watch.setting)
        watch.expect(doing, limit_s, setting)
        try:
            yield
        finally:
            watch.expect(*before)
