"""A reading as the cell of a table: empty where there is none, and what is wrong said once."""

from collections.abc import Callable
from typing import Any

from pynvml import NVMLError

from hardware.nvml import LOST, PERMANENT
from monitor.gpu_sampler.period import Period
from monitor.gpu_sampler.readings import Read


class Complaints:
    """Says what fails, once: for each GPU, and once for all of them where they do not support something."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.said: set[tuple[Any, ...]] = set()

    def failed(self, gpu: int, name: str, error: NVMLError) -> None:
        if error.value in PERMANENT:
            self.once(
                (name, error.value), f"gpu{gpu}_{name}: {error}; the cells of such GPUs stay empty"
            )
        elif error.value in LOST:
            self.once(
                (gpu, error.value),
                f"gpu{gpu}: {error}; its cells stay empty as long as it does not answer",
            )
        else:
            self.once(
                (gpu, name, error.value),
                f"gpu{gpu}_{name}: {error}; its cell stays empty until it answers; "
                "the .json counts such faults",
            )

    def answers_again(self, gpu: int) -> None:
        self.once((gpu,), f"gpu{gpu} answers again")

    def once(self, what: tuple[Any, ...], line: str) -> None:
        if what not in self.said:
            self.said.add(what)
            self.say(line)


class Counter:
    """One reading of one GPU: asked for in each slot, and seldom while it fails.

    patience: slots between two tries, at most, of what does not answer for now.
    """

    def __init__(
        self,
        gpu: int,
        name: str,
        read: Read,
        text: Callable[[int], str],
        complaints: Complaints,
        patience: int,
    ):
        self.gpu, self.name, self.read, self.text = gpu, name, read, text
        self.complaints, self.patience = complaints, patience
        self.period, self.faults = Period(), dict[str, int]()
        self.raw: int | None = None
        self.shown = ""
        self.slot = -2  # the last with a value
        self.pause, self.asleep_until = 0, float("-inf")

    @property
    def column(self) -> str:
        return f"gpu{self.gpu}_{self.name}"

    def cell(self, slot: int) -> str:
        """The value in this slot as text."""
        if slot < self.asleep_until:
            return ""
        try:
            raw = self.read()
        except NVMLError as error:
            self.failed(error, slot)
            return ""
        if raw != self.raw:  # most slots have the value of the one before
            self.period.change(slot, sharp=self.slot == slot - 1)
            self.raw, self.shown = raw, self.text(raw)
            if self.pause:
                self.pause = 0
                self.complaints.answers_again(self.gpu)
        self.slot = slot
        return self.shown

    def failed(self, error: NVMLError, slot: int) -> None:
        """Say so, and wait before the next try, twice as long each time: a call that fails may be a slow one."""
        self.raw = None
        self.faults[str(error)] = self.faults.get(str(error), 0) + 1
        self.complaints.failed(self.gpu, self.name, error)
        self.pause = min(max(1, 2 * self.pause), self.patience)
        self.asleep_until = float("inf") if error.value in PERMANENT else slot + self.pause
