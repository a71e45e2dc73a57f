"""Samples as curves over the time of a run, by the wall clock: at most BUCKETS points, LEAST_S apart or more."""

import numpy as np

BUCKETS = 4000
LEAST_S = 2.0  # network traffic is sampled once per second; a bucket without any value is a hole


class SampleBuckets:
    """What was sampled from `begin` to `end`, in Unix seconds, as it comes file by file.

    Attributes:
        edges: (size + 1,) Unix seconds, where buckets begin and end.
        sums: (power, in or out; node) -> (2, size) sum and number of the values.
        low, high: (size,) watts of any GPU; NaN without a sample.
    """

    def __init__(self, begin: float, end: float):
        self.size = min(BUCKETS, 1 + int((end - begin) / LEAST_S))
        self.edges = np.linspace(begin, end, self.size + 1)
        self.sums: dict[tuple, np.ndarray] = {}
        self.low = np.full(self.size, np.nan)
        self.high = np.full(self.size, np.nan)

    def add(self, name: str, node: int | None, times: np.ndarray, values: np.ndarray) -> None:
        """Add (n,) values at these Unix seconds, without NaN and what was sampled before or after the run."""
        is_inside = np.isfinite(values) & (times >= self.edges[0]) & (times < self.edges[-1])
        values = values[is_inside]
        bucket = np.searchsorted(self.edges, times[is_inside], side="right") - 1
        sums, counts = self.sums.setdefault((name, node), np.zeros((2, self.size)))
        sums += np.bincount(bucket, values, self.size)
        counts += np.bincount(bucket, minlength=self.size)
        if name == "power":
            np.fmin.at(self.low, bucket, values)
            np.fmax.at(self.high, bucket, values)

    def find_mean(self, name: str) -> np.ndarray:
        """Return (size,) means, added up over the nodes that were sampled then; NaN where none was."""
        means = [np.full(self.size, np.nan)]
        for key, (sums, counts) in self.sums.items():
            if key[0] == name:
                means.append(sums / np.where(counts > 0, counts, np.nan))
        return sum_known(means)

    def finish(self, times: np.ndarray, joules: np.ndarray) -> dict[str, np.ndarray]:
        """Return the curves, (size,) each with NaN where nothing was sampled, for the page.

        Args:
            times: (n,) Unix seconds.
            joules: (n,) of all GPUs up to these.
        """
        return {
            "time": (self.edges[1:] + self.edges[:-1]) / 2,
            "power_w": self.find_mean("power"),  # mean per GPU
            "power_low_w": self.low,
            "power_high_w": self.high,
            "energy_kwh": np.interp(self.edges[1:], times, joules) / 3.6e6,
            "in_mb_s": self.find_mean("in"),
            "out_mb_s": self.find_mean("out"),
        }


def sum_known(values: list[np.ndarray]) -> np.ndarray:
    """Return the sum of (n,) arrays without their NaN; NaN where none has a value."""
    return np.ma.masked_invalid(values).sum(axis=0).filled(np.nan)
