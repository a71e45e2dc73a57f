"""train/distributed/wan.py: what nodes at several sites are in for."""

import dataclasses
import logging
from pathlib import Path

import pytest

from settings.config import Config
from train.distributed import wan

A100 = "NVIDIA A100-SXM4-80GB"


@pytest.fixture
def xlarge(tmp_path: Path) -> Config:
    (tmp_path / "empty.env").touch()
    return Config.load({"PRESET": "xlarge-8xa100", "ENV_FILE": str(tmp_path / "empty.env")})


@pytest.mark.parametrize(
    ("gradient_bytes", "gbit_per_s", "per_cent"),
    [(4 * 1.3e9, 1, 5.3), (4 * 1.3e9, 10, 35.8), (2 * 1.3e9, 1, 10.1), (2 * 1.3e9, 10, 52.4)],
)
def test_the_labs_model_at_four_sites(
    gradient_bytes: float, gbit_per_s: float, per_cent: float
) -> None:
    """1.3B parameters, 3.53 s of computing a step on 8 A100, a round trip of 30 ms: as was computed apart from this."""
    found = wan.sync_efficiency(3.53, gradient_bytes, 4, gbit_per_s)
    assert round(100 * found, 1) == per_cent


def test_a_ring_is_as_slow_as_what_each_site_sends_and_one_site_sends_nothing() -> None:
    # by hand: 2 hops of 1 GB at 8 Gbit/s are 2 s, and 2 hops of half a round trip one round trip
    assert wan.sync_s(2e9, 2, 8, round_trip_s=0.1) == pytest.approx(2.1)
    assert wan.sync_s(2e9, 2, 8, round_trip_s=0) == pytest.approx(2.0)
    assert wan.sync_s(4e9, 4, 8, round_trip_s=0) == pytest.approx(6.0)
    assert wan.sync_efficiency(3.5, 1e9, 1, 1) == 1.0
    assert wan.sync_efficiency(2.1, 2e9, 2, 8, round_trip_s=0.1) == pytest.approx(0.5)


def test_the_sentence_for_the_labs_recipe(xlarge: Config) -> None:
    said = wan.sentence(xlarge, 4, 8, A100)
    # 1.5 x 4 bytes x 1,336,248,320 weights; 524,288 tokens x 9,224,847,360 FLOPs over half of 8 x 312 TFLOP/s
    assert wan.compute_s(xlarge, 8, A100) == pytest.approx(3.875, abs=0.001)
    for part in (
        "8.0 GB of gradients leave each of 4 sites",
        "computed, that takes 64 s at 1 Gbit/s and 6.5 s at 10",
        "3.9 s of computing (8 A100-SXM4-80GB at 50% MFU): 6% or 37% of the time",
        "SITE=",
        "SYNC=diloco synchronizes them every SYNC_EVERY steps only: make plan says",
    ):
        assert part in said, said
    assert "\n" not in said


def test_on_a_device_of_unknown_peak_no_share_is_guessed(xlarge: Config) -> None:
    said = wan.sentence(dataclasses.replace(xlarge, dtype="float32"), 2, 2, "CPU")
    assert (
        "%" not in said
        and "whose time is not known for CPU" in said
        and "5.3 GB of gradients" in said
    )


@pytest.mark.parametrize(
    ("network", "sites", "level", "words"),
    [
        ("", ["a", "a"], logging.INFO, "one site: a"),
        ("", ["", ""], logging.INFO, "sites: unknown"),
        (
            "wan",
            ["", ""],
            logging.WARNING,
            "if each is at one of its own: in every step 5.3 GB of gradients",
        ),
        ("wan", ["a", "b"], logging.WARNING, "the nodes are at 2 sites: a, b; in every step"),
    ],
)
def test_what_is_said_of_where_the_nodes_are(
    xlarge: Config,
    monkeypatch: pytest.MonkeyPatch,
    network: str,
    sites: list[str],
    level: int,
    words: str,
) -> None:
    monkeypatch.setenv("POD_NETWORK", network)
    members = [
        {
            "node_rank": rank,
            "host": f"h{rank}",
            "site": site,
            "device": A100,
            "settings": {"NPROC": 2},
        }
        for rank, site in enumerate(sites)
    ]
    lines = wan.whereabouts(xlarge, members)
    assert lines[-1][0] == level and words in lines[-1][1]
    assert [said for _, said in lines[:-1]] == [
        f"node {rank} (h{rank}): site={site or 'unknown'} machine=unknown processes=2 device={A100}"
        for rank, site in enumerate(sites)
    ]
