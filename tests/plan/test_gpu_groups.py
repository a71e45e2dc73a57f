"""GPUs of several kinds in one run: plan/gpu_groups.py, and what fleet, checks and report make of it."""

import pytest

from plan.fleet import fleet_of
from plan.planner import Plan
from settings import SettingsError
from settings.config import Config
from settings.finding import FAIL
from tests.plan.conftest import Given, Planned
from tests.plan.test_checks import proposals

FLOPS = 9_224_847_360 * 524_288  # of a step of xlarge
A100, A6000 = (
    0.50 * 312e12,
    0.40 * 154.8e12,
)  # what others reach; nothing was published of the A6000
DDP = {"PRESET": "xlarge-8xa100", "MICRO_BATCH_SIZE": "4"}
SITES = DDP | {"NODES": "4", "SITES": "4", "SYNC": "diloco", "PARALLEL": "fsdp", "SYNC_EVERY": "10"}

SIX = DDP | {
    "NODES": "2",
    "BATCH_TOKENS": "540672",
}  # a batch that 6 processes can share, and 4 cannot


def named(plan: Plan, name: str):
    return next((finding for finding in plan.findings if finding.name == name), None)


@pytest.mark.parametrize("typed", [DDP, SITES])
def test_the_slowest_sets_the_pace_and_the_smallest_decides_what_fits(
    planned: Planned, typed: Given
) -> None:
    plan = planned(typed, {"CARDS": "2xa100-80gb-sxm,6xa6000"})
    fast, slow = plan.groups
    assert (fast.card, fast.count, slow.card, slow.count) == ("a100-80gb-sxm", 2, "a6000", 6)
    assert (fast.batch_tokens, slow.batch_tokens) == (524_288 / 4, 524_288 * 3 / 4)
    assert fast.step_seconds == pytest.approx(FLOPS / (8 * A100))
    assert slow.step_seconds == pytest.approx(FLOPS / (8 * A6000))
    assert plan.speed.step_seconds_computing == slow.step_seconds
    assert plan.memory.capacity_bytes == slow.capacity_bytes < fast.capacity_bytes
    assert (fast.sites, slow.sites) == ((1, 3) if typed is SITES else (None, None))
    assert plan.as_json()["groups"][1]["card"] == "a6000"


def test_one_kind_is_no_group(planned: Planned) -> None:
    plan = planned(DDP)
    assert (plan.groups, plan.group_choice) == ([], None)


@pytest.mark.parametrize(
    ("typed", "cards", "leave_out", "takes_all"),
    [
        # 8 x 62 TFLOP/s are more than 2 x 156, and less than 4 x 156.
        (DDP, "2xa100-80gb-sxm,6xa6000", "a6000", True),
        (DDP, "4xa100-80gb-sxm,4xa6000", "a6000", False),
        (SITES, "2xa100-80gb-sxm,6xa6000", "a6000", True),
        (SITES, "4xa100-80gb-sxm,4xa6000", "a6000", False),
        (SITES, "6xa100-80gb-sxm,2xa6000", "a6000", False),
        (SIX, "4xa100-80gb-sxm,2xa6000", "a6000", False),
        (DDP, "4xa100-80gb-sxm,4xrtx4090", "rtx4090", False),  # whose memory is too small
        (DDP, "4xa100-80gb-sxm,4xv100-32gb-sxm", "v100-32gb-sxm", False),  # without bfloat16
    ],
)
def test_the_choice_is_as_fast_as_it_says_when_it_is_typed(
    planned: Planned, typed: Given, cards: str, leave_out: str, takes_all: bool
) -> None:
    typed = typed | {"CARDS": cards}
    plan = planned(typed)
    choice = plan.group_choice
    assert choice.leave_out == [leave_out] and (choice.settings == "") == takes_all
    impossible = leave_out != "a6000"
    if impossible:
        assert (choice.all_seconds is None and named(plan, "memory")) or named(plan, "bf16")
    else:
        assert choice.all_seconds == plan.time.total_seconds
        assert (choice.all_seconds <= choice.without_seconds) == takes_all
    if not takes_all:
        added = dict(setting.split("=") for setting in choice.settings.split())
        other = planned(typed, added)
        assert other.time.total_seconds == pytest.approx(choice.without_seconds)
        assert leave_out not in other.run.fleet.text and other.groups == []
        assert [finding for finding in other.findings if finding.level == FAIL] == []


def test_sites_that_come_too_late_are_refused(planned: Planned) -> None:
    """Every synchronization waits 120 s for a site. An A6000 takes 5.9 s longer for a step than an A100."""
    typed = SITES | {"CARDS": "4xa100-80gb-sxm,4xa6000"}
    late_s = FLOPS / 8 * (1 / A6000 - 1 / A100)
    longest = int(120 / late_s)
    assert longest == 20
    assert named(planned(typed, {"SYNC_EVERY": "20"}), "sites") is None
    assert named(planned(typed, {"SYNC_EVERY": "80", "SYNC_FRAGMENTS": "4"}), "sites") is None
    late = planned(typed, {"SYNC_EVERY": "84", "SYNC_FRAGMENTS": "4"})
    finding = named(late, "sites")
    assert finding.level == FAIL and "120 s" in finding.text and "a6000" in finding.text
    assert late.group_choice.all_seconds is None
    (shorter,) = proposals(finding)
    assert named(planned(typed, {"SYNC_FRAGMENTS": "4"}, shorter), "sites") is None
    # What is compared and recommended is possible too.
    ddp = planned(typed, {"SYNC": "ddp", "PARALLEL": "ddp"})
    assert [way.outer["every"] for way in ddp.network if way.outer] == [20, 30]
    assert ddp.network[-1].outer["fragments"] == 6


@pytest.mark.parametrize("cards", ["4xA100-80GB+2xRTX4090", "4xa100-80gb-sxm 2xrtx4090", "a6000"])
def test_groups_are_written_with_commas(planned: Planned, cards: str) -> None:
    with pytest.raises(SettingsError) as refused:
        planned(DDP, {"CARDS": cards})
    (problem,) = refused.value.problems
    assert f"CARDS={cards}" in problem and "commas between several" in problem
    assert "CARDS=8xa100-80gb-sxm" in problem


@pytest.mark.parametrize(
    ("cards", "nodes", "instead"),
    [
        ("4xa100-80gb-sxm,2xrtx4090", 2, {"sites": 3, "nodes": 3}),
        ("1xa100-80gb-sxm,3xrtx4090", 2, {"sites": 4, "nodes": 4}),
        ("4xa100-80gb-sxm,4xrtx4090", 1, {"sites": 2, "nodes": 2}),
    ],
)
def test_a_site_of_two_kinds_is_refused_with_what_would_do(cards, nodes, instead) -> None:
    config = Config(cards=cards, nodes=nodes, sites=nodes, sync="diloco")
    with pytest.raises(SettingsError) as refused:
        fleet_of(config)
    (problem,) = refused.value.problems
    advice = " ".join(f"{name.upper()}={value}" for name, value in instead.items())
    assert f"SITES={nodes}: " in problem and problem.endswith(f"set {advice}")
    assert fleet_of(config.replace(**instead)).has_sites_of_one_kind


def test_no_diloco_is_proposed_for_sites_of_two_kinds(planned: Planned) -> None:
    typed = DDP | {"CARDS": "6xa100-80gb-sxm,2xa6000", "NODES": "2", "SITES": "2"}
    plan = planned(typed)
    assert not any(way.outer for way in plan.network) and named(plan, "wan").fix == ""
    assert plan.between_sites.command == ""
