"""The energy of a run by cause and by step, and what it costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cause:
    """What the GPUs took in the time of one category.

    Attributes:
        seconds: of the run.
        gpu_s: of all its GPUs.
        covered_s: of these, what samples cover.
        joules: in the part that is covered.
    """

    seconds: float
    gpu_s: float
    covered_s: float
    joules: float

    @property
    def mean_w(self) -> float:
        """Watts per GPU while it was covered; NaN where nothing was."""
        return self.joules / self.covered_s if self.covered_s else math.nan

    def cost(self, price_kwh: float | None, price_gpu_hour: float | None) -> float:
        """Return what energy and GPU time cost together, in the currency of the prices; NaN without one."""
        if not price_kwh and not price_gpu_hour:
            return math.nan
        return self.joules / 3.6e6 * (price_kwh or 0) + self.gpu_s / 3600 * (price_gpu_hour or 0)


@dataclass(frozen=True)
class Energy:
    """The energy of a run.

    Attributes:
        causes: category of goodput -> what it took.
        total: their sum.
        energy_j, power_w: (steps,) joules and mean watts of all GPUs in each step; NaN where a GPU is not covered.
        steps: GPU -> (steps,) joules; NaN where it is not covered.
        remarks: what was sampled where, and what is missing, in sentences.
    """

    causes: Mapping[str, Cause]
    total: Cause
    energy_j: np.ndarray
    power_w: np.ndarray
    steps: Mapping[str, np.ndarray]
    remarks: Sequence[str]

    @property
    def kwh(self) -> float:
        return self.total.joules / 3.6e6

    @property
    def coverage(self) -> float:
        """The fraction of the GPUs' time that samples cover."""
        return min(1.0, self.total.covered_s / (self.total.gpu_s or math.inf))
