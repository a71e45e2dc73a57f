"""plan/network/wan.py: what nodes at several sites are in for."""

import pytest

from plan.network import wan


@pytest.mark.parametrize(
    ("gradient_bytes", "gbit_per_s", "per_cent"),
    [(4 * 1.3e9, 1, 5.3), (4 * 1.3e9, 10, 35.8), (2 * 1.3e9, 1, 10.1), (2 * 1.3e9, 10, 52.4)],
)
def test_the_labs_model_at_four_sites(gradient_bytes, gbit_per_s, per_cent):
    """1.3B parameters, 3.53 s of computing on 8 A100, 30 ms: as was computed apart from this."""
    share = wan.sync_efficiency(3.53, gradient_bytes, 4, gbit_per_s)
    assert round(100 * share, 1) == per_cent


def test_a_ring_is_as_slow_as_what_each_site_sends_and_one_site_sends_nothing():
    # by hand: 2 hops of 1 GB at 8 Gbit/s are 2 s, and 2 hops of half a round trip one round trip
    assert wan.sync_s(2e9, 2, 8, round_trip_s=0.1) == pytest.approx(2.1)
    assert wan.sync_s(4e9, 4, 8, round_trip_s=0) == pytest.approx(6.0)
    assert wan.sync_efficiency(3.5, 1e9, 1, 1) == 1.0
