"""train/distributed/wan.py: what nodes at several sites are in for."""

import logging

import pytest

from settings.config import Config
from train.distributed import wan


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


@pytest.mark.parametrize(
    ("network", "sites", "level", "words"),
    [
        ("", ["a", "a"], logging.INFO, "one site: a"),
        ("", ["", ""], logging.INFO, "sites: unknown"),
        ("wan", ["a", ""], logging.INFO, "sites: unknown"),
        ("wan", ["", ""], logging.WARNING, "and may be at 2. Each step sends 5.3 GB of"),
        ("", ["b", "a"], logging.WARNING, "the nodes are at 2 sites: a, b. Each step sends 5.3"),
    ],
)
def test_a_warning_says_what_crosses_a_wan_in_each_step(monkeypatch, network, sites, level, words):
    monkeypatch.setenv("POD_NETWORK", network)
    nodes = [
        {
            "node_rank": rank,
            "host": f"h{rank}",
            "site": site,
            "machine": "",
            "settings": {"NPROC": 2},
        }
        for rank, site in enumerate(sites)
    ]
    first, _, last = wan.describe_sites(Config.of_preset(PRESET="xlarge-8xa100"), nodes)
    assert first[1] == f"node 0 (h0): site={sites[0] or 'unknown'} machine=unknown processes=2"
    assert last[0] == level
    assert words in last[1]
