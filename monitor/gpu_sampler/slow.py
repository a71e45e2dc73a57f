"""The rows of what changes slowly, one a second: memory, utilisation, clocks, why they are low, and the network."""

from monitor.gpu_sampler.counters import Counter
from monitor.gpu_sampler.interfaces import Network


class Slow:
    """A row a second; GPUs are asked one after the other, in as many slots, so that no slot waits for all of them."""

    def __init__(self, counters: list[list[Counter]], network: Network, slots_per_s: int):
        self.counters, self.network = counters, network
        self.share = -(-len(counters) // slots_per_s)  # GPUs a slot
        self.columns = [c.column for gpu in counters for c in gpu] + network.columns
        self.seconds = 0
        self.cells: list[str] | None = None
        self.asked = 0

    def row(self, elapsed: float, begin: list[str]) -> str | None:
        """Ask the next GPUs, if it is time; the row, where those were the last. begin: its first cells."""
        if self.cells is None:
            if elapsed < self.seconds:
                return None
            self.seconds, self.asked, self.cells = int(elapsed) + 1, 0, list(begin)
        for gpu in self.counters[self.asked : self.asked + self.share]:
            self.cells += [counter.cell(self.seconds) for counter in gpu]
        self.asked += self.share
        if self.asked < len(self.counters):
            return None
        row, self.cells = ",".join(self.cells + self.network.cells(elapsed)), None
        return row
