"""analysis/energy/downsample.py on values whose means are known."""

import numpy as np
import pytest

from analysis.energy.downsample import SampleBuckets


def test_buckets_have_mean_lowest_highest_and_energy_so_far():
    """500 s, nothing sampled from 100 to 140 s: 300 W with a peak of 700 W."""
    curves = SampleBuckets(0.0, 500.0)
    times = np.append(np.arange(-50, 100, 0.01), np.arange(140, 600, 0.01))
    curves.add("power", None, times, np.where(np.abs(times - 201) < 0.001, 700, 300))
    samples = curves.finish(np.array([0, 500]), np.array([0, 3.6e6]))
    at = np.searchsorted(samples["time"], [120, 200, 350])
    for curve, peak in (
        (samples["power_w"], 302),
        (samples["power_low_w"], 300),
        (samples["power_high_w"], 700),
    ):
        assert curve[at] == pytest.approx([np.nan, peak, 300], nan_ok=True, rel=1e-3)
    assert samples["energy_kwh"] == pytest.approx((samples["time"] + 1) / 500, abs=0.01)
