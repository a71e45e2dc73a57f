"""The samples of a run's GPUs in few numbers, for a curve: BUCKETS stretches of the same length.

    gpu_metrics_*.csv -> power: mean, lowest and highest of any GPU; energy: what all had taken by then
    gpu_slow_*.csv    -> bytes received and sent a second, all interfaces and the nodes sampled then together

Everything is on the clock on the wall, since a page has runs of several machines. Where samplers paused it is NaN.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.energy.samples import HOLE_S, Curve, Table, samplers
from analysis.load import Sampled

BUCKETS = 4000
MEGA = 1e6


def sampled(folder: Path) -> Sampled | None:
    """What samplers wrote into a run's folder; None where there is nothing. Raises OSError."""
    found, _ = samplers(folder)
    if not found:
        return None
    spans = np.array([np.array(sampler.span) + sampler.offsets[-1] for sampler in found])
    edges = np.linspace(spans.min(), max(spans.max(), spans.min() + 1e-3), BUCKETS + 1)
    power, joules, gpus = Buckets(edges), np.zeros(BUCKETS), set()
    links: dict[
        object, tuple[Buckets, Buckets]
    ] = {}  # of each node, since they may not all be sampled at a time
    for sampler in found:
        offset = sampler.offsets[-1]
        for meter in sampler.measure(edges - offset):
            joules += taken(
                meter.counter if np.isfinite(meter.counter.first) else meter.power, edges - offset
            )
            gpus.add((sampler.node, sampler.host, meter.index))
        for table in sampler.tables:
            names = [name for index in table.gpus for name in [power_column(table, index)] if name]
            power.take(table, names, sampler.zero(table) + offset)
            received, sent = links.setdefault(
                (sampler.node, sampler.host), (Buckets(edges), Buckets(edges))
            )
            network(table, sampler.zero(table) + offset, received, sent)
    return Sampled(
        len(gpus),
        (edges[1:] + edges[:-1]) / 2,
        power.mean(),
        power.least(),
        power.most(),
        np.cumsum(joules) / 3.6e6,
        *(together([ways[way] for ways in links.values()]) for way in (0, 1)),
    )


def together(nodes: "Sequence[Buckets]") -> np.ndarray | None:
    """The sum over those nodes of which it is known, (BUCKETS,); NaN where it is of none, None without any value."""
    means = np.array([buckets.mean() for buckets in nodes])
    known = np.isfinite(means).any(axis=0)
    return (
        np.where(known, np.nansum(means, axis=0), np.nan)
        if any(b.counts.any() for b in nodes)
        else None
    )


class Buckets:
    """Sum, count, lowest and highest of values in each stretch, as they come block by block."""

    def __init__(self, edges: np.ndarray):
        self.edges, n = edges, len(edges) - 1
        self.sums, self.counts = np.zeros(n), np.zeros(n)
        self.low, self.high = np.full(n, np.inf), np.full(n, -np.inf)

    def take(self, table: Table, names: Sequence[str], zero: float) -> None:
        """Every finite value of these columns by itself. zero: Unix seconds at elapsed_sec 0."""
        for block in table.blocks(["elapsed_sec", *names]):
            for name in names:
                self.add(block["elapsed_sec"] + zero, block[name])

    def add(self, t: np.ndarray, values: np.ndarray) -> None:
        known = np.isfinite(values) & np.isfinite(t)
        values = values[known]
        at = np.clip(np.searchsorted(self.edges, t[known], side="right") - 1, 0, len(self.sums) - 1)
        self.sums += np.bincount(at, values, len(self.sums))
        self.counts += np.bincount(at, minlength=len(self.sums))
        np.minimum.at(self.low, at, values)
        np.maximum.at(self.high, at, values)

    def mean(self) -> np.ndarray:
        return self.held(
            np.divide(self.sums, self.counts, out=np.zeros(len(self.sums)), where=self.counts > 0)
        )

    def least(self) -> np.ndarray:
        return self.held(self.low)

    def most(self) -> np.ndarray:
        return self.held(self.high)

    def held(self, values: np.ndarray) -> np.ndarray:
        """A stretch without a sample has the one before's value where the next sample comes within HOLE_S, else NaN."""
        known, n = self.counts > 0, len(values)
        before = np.maximum.accumulate(np.where(known, np.arange(n), -1))
        after = np.minimum.accumulate(np.where(known, np.arange(n), n)[::-1])[::-1]
        near = (
            (before >= 0)
            & (after < n)
            & ((after - before) * (self.edges[1] - self.edges[0]) <= HOLE_S)
        )
        return np.where(near, values[np.maximum(before, 0)], np.nan)


def power_column(table: Table, index: int) -> str | None:
    """Instant power where the sampler had it, else the mean over the last second."""
    names = [
        name
        for name in (f"gpu{index}_power_inst_w", f"gpu{index}_power_w")
        if name in table.columns
    ]
    return names[0] if names else None


def taken(curve: Curve, edges: np.ndarray) -> np.ndarray:
    """Joules in each stretch. What was counted over a hole, which nobody can divide, is in the stretch that ends it."""
    begins, ends = edges[:-1], edges[1:]
    joules = curve.between(begins, ends)[0]
    for begin, end, inside in curve.holes:
        first, last = (
            min(max(int(np.searchsorted(edges, t, side="right")) - 1, 0), len(ends) - 1)
            for t in (begin, end)
        )
        if np.isfinite(inside) and end > ends[first]:
            joules[last] += inside
    return joules


def network(table: Table, zero: float, received: Buckets, sent: Buckets) -> None:
    """The sum over all interfaces of each row of the slow file beside a fast one."""
    path = table.path.with_name(table.path.name.replace("gpu_metrics_", "gpu_slow_"))
    if not path.is_file():
        return
    with open(path, "rb") as file:
        columns = file.readline().decode("ascii", "replace").strip().split(",")
    slow = dataclasses.replace(table, path=path, columns=columns)
    for way, buckets in (("in", received), ("out", sent)):
        names = [
            name
            for name in columns
            if name.startswith("net_") and name.endswith(f"_{way}_bytes_per_s")
        ]
        for block in slow.blocks(["elapsed_sec", *names]) if names else ():
            rows = np.array([block[name] for name in names])
            known = np.isfinite(rows).any(axis=0)
            buckets.add(
                block["elapsed_sec"][known] + zero, np.nansum(rows[:, known], axis=0) / MEGA
            )
