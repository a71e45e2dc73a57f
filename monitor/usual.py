"""What GPUs draw while steps come: the median of their power, kept from look to look, as Gpu.training_w.

A reading counts once a later look finds steps behind it that came at their usual pace since the look before: nothing of
a hang, an evaluation or a start is among those.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable
from statistics import median

from monitor.facts import Node, Progress

READINGS = 300  # of a GPU, the last: 10 minutes of looks every 2 s, 2.5 hours of those every 30 s
ENOUGH = 5  # of them at least
PACE = (
    0.5  # steps came at their pace where they account for so much of the time between two of them
)


class Usual:
    """Fed with the nodes of each look. Times of steps are by the first node's clock, those of readings by each node's
    own: clocks that differ by more than some looks leave training_w unknown, or late."""

    def __init__(self) -> None:
        self.before: Progress | None = None
        self.read: dict[int, float] = {}  # node -> when its last readings were taken
        self.waiting = deque[tuple[float, int, int, float]](
            maxlen=16 * READINGS
        )  # when, node, GPU, watts
        self.counted: dict[tuple[int, int], deque[float]] = {}

    def of(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """The nodes, with training_w where it is known here and was not told."""
        nodes = tuple(nodes)
        first = next((node for node in nodes if node.node == 0), None)
        if first is None or first.progress is None:
            return nodes
        self.take(nodes, first.progress, first.status.get("phase") == "training")
        return tuple(
            dataclasses.replace(
                node,
                gpus=tuple(
                    dataclasses.replace(gpu, training_w=self.watts(node.node, gpu.index))
                    if gpu.training_w is None
                    else gpu
                    for gpu in node.gpus
                ),
            )
            for node in nodes
        )

    def take(self, nodes: Iterable[Node], now: Progress, training: bool) -> None:
        before, self.before = self.before, now
        if before is None or before.attempt != now.attempt:
            self.waiting.clear()
            before = None
        for node in nodes if training else ():
            if node.gpus_time is not None and node.gpus_time > self.read.get(node.node, 0.0):
                self.read[node.node] = node.gpus_time
                self.waiting += [
                    (node.gpus_time, node.node, gpu.index, gpu.power_w)
                    for gpu in node.gpus
                    if gpu.power_w is not None
                ]
        if (
            before is None
            or before.step_time is None
            or now.step_time is None
            or now.step_time <= before.step_time
        ):
            return
        took = now.step_time - before.step_time
        paced = now.step_s is not None and (now.step - before.step) * now.step_s >= PACE * took
        late = [entry for entry in self.waiting if entry[0] > now.step_time]
        for when, node_number, index, watts in self.waiting if paced else ():
            if when <= now.step_time:
                self.counted.setdefault((node_number, index), deque(maxlen=READINGS)).append(watts)
        self.waiting.clear()
        self.waiting += late

    def watts(self, node: int, index: int) -> float | None:
        known = self.counted.get((node, index), ())
        return median(known) if len(known) >= ENOUGH else None
