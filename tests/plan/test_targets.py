"""plan/limits.py: what would meet a target, in the order that a user would take it, and what is left of a run."""

import dataclasses
import re

import pytest

from hardware.model_size import parameters
from plan import limits
from plan.fleet import Fleet
from plan.hours import hours_of, pace_of, steps_within, time_of
from settings.config import Config
from settings.finding import Finding
from tests.plan.conftest import WAN, XLARGE, Given, Load

DILOCO = "SYNC=diloco PARALLEL=fsdp (at a loss that the table of make plan has)"
STREAMING = DILOCO.replace("diloco", "diloco SYNC_FRAGMENTS=6 SYNC_DELAY=2")
SMALL = {
    "PRESET": "gpt2-124m",
    "CARDS": "4xrtx4090",
    "MFU": "40",
    "NODES": "4",
    "SITES": "4",
    "WAN_GBIT": "0.1",
}


def target(c: Config, fleet: Fleet, done: int = 0) -> Finding | None:
    found = limits.problems(c, fleet, None, 1e15, done=done)
    return next((one for one in found if one.name.startswith("target-")), None)


def would(finding: Finding) -> list[str]:
    """What it says would do, in its order."""
    return finding.fix.removeprefix("what would do: ").split("; or ")


def typed(said: str) -> Given:
    return dict(re.findall(r"([A-Z_]+)=(\S+)", said.split(" (")[0]))


@pytest.mark.parametrize(
    ("base", "asked", "first"),
    [
        # sites that exchange every 30 steps, 263 hours, or in fragments, 206; one site over 25 Gbit/s waits 2.6 s a step:
        # 342 hours; one node does not wait, and takes 206
        (
            WAN,
            {"TARGET_HOURS": "420"},
            [DILOCO, "SITES=1", "WAN_GBIT=100 (only over so fast a network)"],
        ),
        (
            WAN,
            {"TARGET_HOURS": "300"},
            [DILOCO, "NODES=1 SITES=1", "WAN_GBIT=100 (only over so fast a network)"],
        ),
        (
            WAN,
            {"TARGET_HOURS": "240"},
            [STREAMING, "NODES=1 SITES=1", "TRAIN_TOKENS=6648496128 (6.65B tokens)"],
        ),
        (
            WAN,
            {"TARGET_TOKENS_PER_S": "100000"},
            [DILOCO, "NODES=1 SITES=1", "WAN_GBIT=100 (only over so fast a network)"],
        ),
        # two sites have a ring of 2 hops rather than of 6: each half of it, 43 s
        (
            WAN,
            {"TARGET_HOURS": "2600"},
            [DILOCO, "SITES=2", "WAN_GBIT=10 (only over so fast a network)"],
        ),
        (SMALL, {"TARGET_TOKENS_PER_S": "300000"}, ["NODES=1 SITES=1", "TARGET_TOKENS_PER_S=8579"]),
        # 16 have no room in a node of eight
        (
            XLARGE | {"CARDS": "16xa100-80gb-sxm", "NODES": "2"},
            {"TARGET_HOURS": "120"},
            ["LAN_GBIT=200 (only over so fast a network)"],
        ),
    ],
)
def test_a_network_is_mended_first(load: Load, base: Given, asked: Given, first: list[str]) -> None:
    finding = target(*load(base, asked))
    assert finding
    said = would(finding)
    assert said[: len(first)] == first
    for one in said:
        assert target(*load(base, asked, typed(one))) is None, one
    assert "no number of these cards" not in finding.fix  # as many as there are do


def test_hours_of_the_same_cards_nearer_to_each_other_by_hand(load: Load) -> None:
    """0.6 hours of evaluation, and 190,735 steps of 3.88 s and of what a ring of 5.345 GB waits: over 25 Gbit/s between
    four nodes 1.5 times its bytes, between two sites at 1 Gbit/s once, and inside each, of two nodes, over 25 too."""
    gbit = 8 * 4 * 1_336_248_320 / 1e9
    for more, wait_s in (
        ({"SITES": "1"}, 1.5 * gbit / 25),
        ({"SITES": "2"}, gbit / 1 + 0.03 + gbit / 25),
    ):
        hours = hours_of(*load(WAN, more), None)
        assert hours == pytest.approx(190_735 * (3.8754 + wait_s) / 3600 + 0.6, rel=0.001)


def test_no_model_is_proposed_that_the_law_does_not_know(load: Load) -> None:
    """4 RTX 4090 over 0.1 Gbit/s reach 300,000 tokens/s with a model of 3M parameters, which is no advice."""
    for base, asked in (
        (SMALL, {"TARGET_TOKENS_PER_S": "300000"}),
        (SMALL, {"TARGET_HOURS": "10"}),
        (WAN, {"TARGET_TOKENS_PER_S": "100000"}),
        (WAN, {"TARGET_HOURS": "300"}),
    ):
        finding = target(*load(base, asked))
        assert finding
        sizes = [
            parameters(load(base, asked, typed(one))[0]).total
            for one in would(finding)
            if "N_LAYER" in one
        ]
        assert all(size >= 70e6 for size in sizes)
        assert sizes or asked != {"TARGET_HOURS": "300"}  # 598M and 104M are among what does


def test_a_target_is_of_what_is_left(load: Load) -> None:
    """206 hours, of which a half is behind it: 103 with half of the evaluations and all of the last one."""
    c, fleet = load(XLARGE, {"TARGET_HOURS": "110"})
    pace, half = pace_of(c, fleet, None), c.last_step // 2
    whole, left = (time_of(c, pace.fast, pace.wait_s, done) for done in (0, half))
    assert whole and left and left.total < 110 < whole.total
    assert target(c, fleet) and target(c, fleet, done=half) is None
    late = target(dataclasses.replace(c, target_hours=90.0), fleet, done=half)
    assert late and "at the planned 50% MFU what is left takes 103 h" in late.text
    assert not any("N_LAYER" in one for one in would(late))  # its model is what it is
    tokens = int(
        typed(next(one for one in would(late) if one.startswith("TRAIN_TOKENS=")))["TRAIN_TOKENS"]
    )
    steps = tokens // c.batch_tokens
    assert steps == half + steps_within(c, pace, 90.0, half) > half
    for last, soon in ((steps, True), (steps + 1, False)):
        time = time_of(dataclasses.replace(c, max_steps=last), pace.fast, pace.wait_s, half)
        assert time and (time.total <= 90.0) == soon


def test_a_run_that_is_through_misses_no_target(load: Load) -> None:
    c, fleet = load(XLARGE, {"TARGET_HOURS": "1", "TARGET_TOKENS_PER_S": "1e7"})
    assert target(c, fleet) and target(c, fleet, done=c.last_step) is None


def test_no_such_model_is_proposed_for_memory_either(load: Load) -> None:
    """A sequence of a million tokens of 1.3B parameters: 15M of them would fit, which nobody asked for."""
    c, fleet = load(
        XLARGE, {"SEQ_LEN": "1048576", "BATCH_TOKENS": "8388608", "MICRO_BATCH_SIZE": "1"}
    )
    found = {one.name: one for one in limits.problems(c, fleet, None, 74 * 2.0**30)}
    assert "N_LAYER" not in found["memory"].fix
