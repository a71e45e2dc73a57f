"""What samples of a run's GPUs say: energy by cause and by step, and curves for the page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.energy.prices import Prices


@dataclass(frozen=True)
class Cause:
    """What the GPUs took in the time of one category.

    Attributes:
        seconds: of the run.
        gpu_s: of all its GPUs.
        covered_s: of these, what samples cover.
        joules: in the part that is covered.
    """

    seconds: float = 0.0
    gpu_s: float = 0.0
    covered_s: float = 0.0
    joules: float = 0.0

    def __add__(self, other: "Cause") -> "Cause":
        return Cause(
            self.seconds + other.seconds,
            self.gpu_s + other.gpu_s,
            self.covered_s + other.covered_s,
            self.joules + other.joules,
        )

    @property
    def mean_w(self) -> float:
        """Watts per GPU while it was covered; NaN where nothing was."""
        return self.joules / self.covered_s if self.covered_s else math.nan


@dataclass(frozen=True)
class Energy:
    """The energy of a run.

    Attributes:
        causes: category of goodput -> what it took.
        total: their sum.
        energy_j, power_w: (steps,) joules and mean watts of all GPUs in each step; NaN where a GPU is not covered.
        steps: GPU -> (steps,) joules; NaN where it is not covered.
        prices: of kWh and GPU-hours.
        remarks: what was sampled where, and what is missing, in sentences.
    """

    causes: Mapping[str, Cause]
    total: Cause
    energy_j: np.ndarray
    power_w: np.ndarray
    steps: Mapping[str, np.ndarray]
    prices: Prices
    remarks: Sequence[str]

    @property
    def kwh(self) -> float:
        return self.total.joules / 3.6e6

    @property
    def cost(self) -> float | None:
        """In the currency of the prices; None without one."""
        return self.prices.cost(self.total.joules, self.total.gpu_s)

    @property
    def coverage(self) -> float:
        """The fraction of the GPUs' time that samples cover."""
        if not self.total.gpu_s:
            return 0.0
        return min(1.0, self.total.covered_s / self.total.gpu_s)


@dataclass(frozen=True)
class Samples:
    """Samples as curves: (buckets,) float64 each, NaN where nothing was sampled. Network is None if never recorded."""

    gpus: int
    time: np.ndarray  # Unix seconds, of the middle of the bucket
    power_w: np.ndarray  # mean per GPU
    power_low_w: np.ndarray  # the lowest of any GPU
    power_high_w: np.ndarray
    energy_kwh: np.ndarray  # of all GPUs, up to the end of the bucket
    in_mb_s: np.ndarray | None
    out_mb_s: np.ndarray | None
