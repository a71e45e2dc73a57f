"""plan/time.py and the hours, kWh and money of a plan, by hand."""

import dataclasses
import datetime

import pytest

from plan.time import Milestone, first_save, milestones, pace_of, steps_within, time_of
from settings.config import Config
from tests.plan.conftest import WAN, XLARGE, Planned

START = datetime.datetime(2026, 11, 22, 23, 30)
RATE = 0.438 * 2 * 989e12 / 2_019_557_376  # tokens/s of d16 on two H100: 428,987
PRICES = {"PRICE_GPU_HOUR": "2.5", "PRICE_KWH": "0.3"}


@pytest.fixture
def config() -> Config:
    """1,000 steps of 1,000 tokens."""
    values = {"train_tokens": 10**6, "batch_tokens": 1000, "warmup_tokens": 25_500}
    return dataclasses.replace(Config(), **values, save_minutes=15.0).derived()


def test_milestones(config: Config) -> None:
    """A step of 36 s: 100 steps are an hour, 15 minutes 25 steps."""
    assert milestones(config, 36.0, START) == [
        Milestone("first checkpoint", 25, 25_000, 900, "2026-11-22T23:45"),
        Milestone("warm-up ends", 26, 26_000, 936, "2026-11-22T23:45"),
        Milestone("10%", 100, 100_000, 3600, "2026-11-23T00:30"),
        Milestone("50%", 500, 500_000, 18_000, "2026-11-23T04:30"),
        Milestone("100%", 1000, 10**6, 36_000, "2026-11-23T09:30"),
    ]
    assert milestones(config, 36.0, START, done=110) == [
        Milestone("next checkpoint", 135, 135_000, 900, "2026-11-22T23:45"),
        Milestone("50%", 500, 500_000, 14_040, "2026-11-23T03:24"),
        Milestone("100%", 1000, 10**6, 32_040, "2026-11-23T08:24"),
    ]
    assert milestones(config, 36.0, START, done=1000) == []


def test_what_a_run_does_not_have_is_no_milestone(config: Config) -> None:
    plain = dataclasses.replace(config, warmup_tokens=0, save_every=0)
    assert [one.name for one in milestones(plain, 36.0, START)] == ["10%", "50%", "100%"]
    short = dataclasses.replace(config, max_steps=20)  # ends within its warm-up
    names = [one.name for one in milestones(short, 36.0, START)]
    assert names == ["10%", "50%", "first checkpoint", "100%"]


def test_beyond_the_calendar_there_is_no_clock(config: Config) -> None:
    """1,000 steps of 3e8 s are 9,500 years; of 3e15 s more than a timedelta holds."""
    clocks = {one.name: one.clock for one in milestones(config, 3e8, START)}
    assert clocks["100%"] is None
    assert (clocks["50%"] or "").startswith("678")
    assert [one.clock for one in milestones(config, 3e15, START)] == [None] * 5


@pytest.mark.parametrize(
    ("save_every", "done", "step"),
    [(10, 0, 10), (100, 0, 25), (20, 110, 120), (20, 120, 140), (20, 990, 1000), (100, 110, 135)],
)
def test_the_next_checkpoint(config: Config, save_every: int, done: int, step: int) -> None:
    assert first_save(dataclasses.replace(config, save_every=save_every), 36.0, done) == step


def test_hours_power_and_money_of_d16(planned: Planned) -> None:
    """12,800 steps of 524,288 tokens; 25 evaluations and 20 times one at the end; two GPUs of 700 W."""
    plan = planned({"PRESET": "d16-2xh100"}, PRICES)
    evaluation_s = 4_194_304 / (3 * RATE)
    assert plan.time.training_seconds == pytest.approx(12_800 * 524_288 / RATE)
    assert plan.time.evaluating_seconds == pytest.approx(45 * evaluation_s)
    hours = plan.time.total_seconds / 3600
    assert hours == pytest.approx(4.386, abs=0.001)
    assert plan.gpu_hours == pytest.approx(2 * hours)
    assert plan.kwh == pytest.approx(hours * 1.4)
    assert plan.cost == pytest.approx(2 * hours * 2.5 + hours * 1.4 * 0.3)
    assert plan.milestones[-1].clock == "2026-11-22T13:23"
    assert planned({"PRESET": "d16-2xh100"}).cost is None
    assert planned({"PRESET": "d16-2xh100", "PRICE_KWH": "0.3"}).cost == pytest.approx(0.42 * hours)


def test_the_power_of_a_mixed_fleet_is_that_of_all_its_gpus(planned: Planned) -> None:
    plan = planned({"PRESET": "d16-2xh100", "CARDS": "4xa100-80gb-sxm,4xa6000"})
    watts = 4 * 400 + 4 * 300
    assert plan.kwh == pytest.approx(plan.time.total_seconds / 3600 * watts / 1000)


def test_four_sites_wait_for_their_gradients(planned: Planned) -> None:
    """6 hops of a quarter of 5.34 GB at 1 Gbit/s and half a round trip of 30 ms: 64.2 s per step."""
    plan = planned(WAN)
    wait_s = 6 * (4 * 1_336_248_320 / 4 * 8 / 1e9 + 0.015)
    assert plan.pace.wait_s == pytest.approx(wait_s) == pytest.approx(64.2, abs=0.05)
    assert plan.time.waiting_seconds == pytest.approx(190_735 * wait_s)
    assert plan.time.training_seconds / 3600 == pytest.approx(205.3, abs=0.05)
    assert plan.speed.tokens_per_s == pytest.approx(
        524_288 / (524_288 / 135_287 + wait_s), rel=1e-4
    )


def test_steps_within_some_hours_are_the_most(run) -> None:
    lab = run(XLARGE)
    pace = pace_of(lab, None)
    steps = steps_within(lab.config, pace, 90.0, done=1000)
    for last, fits in ((1000 + steps, True), (1001 + steps, False)):
        time = time_of(lab.config.replace(max_steps=last), pace, 1000)
        assert (time.total_seconds <= 90 * 3600) == fits
    assert steps_within(lab.config, pace, 0.0) == 0


def test_what_is_not_known_is_none(planned: Planned) -> None:
    plan = planned({"PRESET": "d16-2xh100", "CARDS": "8xv100-32gb-sxm"})
    assert (plan.time, plan.gpu_hours, plan.kwh, plan.cost) == (None, None, None, None)
    assert plan.milestones == []
    assert [finding.name for finding in plan.findings] == ["bf16"]


def test_a_begun_run_is_planned_from_its_checkpoint(planned: Planned, tmp_path) -> None:
    whole = planned({"PRESET": "d16-2xh100"})
    folder = tmp_path / "runs" / "d16-2xh100" / "checkpoints" / "step_0006400"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")
    half = planned({"PRESET": "d16-2xh100"})
    assert (whole.from_step, half.from_step) == (0, 6400)
    assert half.time.training_seconds == pytest.approx(whole.time.training_seconds / 2)
    # 25 evaluations and 20 times one at the end; after step 6,400 of 12,800 there are 13 left.
    share = half.time.evaluating_seconds / whole.time.evaluating_seconds
    assert share == pytest.approx((13 + 20) / (25 + 20))
