"""plan/milestones.py, by hand."""

import dataclasses
import datetime

import pytest

from plan.milestones import Milestone, first_save, milestones
from settings.config import Config

START = datetime.datetime(2026, 11, 22, 23, 30)


@pytest.fixture
def c() -> Config:
    """1,000 steps of 1,000 tokens."""
    return dataclasses.replace(
        Config(), train_tokens=10**6, batch_tokens=1000, warmup_tokens=25_500, save_minutes=15.0
    ).derived()


def test_each_milestone_has_its_step_and_clock(c: Config) -> None:
    """A step of 36 s: 100 steps are an hour, and 15 minutes 25 steps."""
    assert milestones(c, 36.0, START) == [
        Milestone("first checkpoint", 25, 25_000, 0.25, "2026-11-22T23:45"),
        Milestone("warm-up ends", 26, 26_000, 0.26, "2026-11-22T23:45"),
        Milestone("10%", 100, 100_000, 1.0, "2026-11-23T00:30"),
        Milestone("50%", 500, 500_000, 5.0, "2026-11-23T04:30"),
        Milestone("100%", 1000, 10**6, 10.0, "2026-11-23T09:30"),
    ]


def test_what_a_run_does_not_have_is_no_milestone(c: Config) -> None:
    names = [
        m.name
        for m in milestones(dataclasses.replace(c, warmup_tokens=0, save_every=0), 36.0, START)
    ]
    assert names == ["10%", "50%", "100%"]
    stopped = dataclasses.replace(c, max_steps=20)  # within its warm-up
    assert [m.name for m in milestones(stopped, 36.0, START)] == [
        "10%",
        "50%",
        "first checkpoint",
        "100%",
    ]


def test_the_first_checkpoint_is_by_steps_or_minutes_whichever_is_sooner(c: Config) -> None:
    assert first_save(dataclasses.replace(c, save_every=10), 36.0) == 10
    assert first_save(dataclasses.replace(c, save_every=100), 36.0) == 25
    assert first_save(c, 0.1) == 1000  # it ends before


def test_of_a_run_that_has_begun_what_is_left_counts_from_now(c: Config) -> None:
    """At step 110 the warm-up and a tenth are behind it; 890 steps of 36 s are 8.9 hours, and 15 minutes 25 steps."""
    assert milestones(c, 36.0, START, done=110) == [
        Milestone("next checkpoint", 135, 135_000, 0.25, "2026-11-22T23:45"),
        Milestone("50%", 500, 500_000, 3.9, "2026-11-23T03:24"),
        Milestone("100%", 1000, 10**6, 8.9, "2026-11-23T08:24"),
    ]
    assert milestones(c, 36.0, START, done=1000) == []


def test_the_next_checkpoint_is_at_a_multiple_of_save_every(c: Config) -> None:
    every = dataclasses.replace(c, save_every=20)
    assert [first_save(every, 36.0, done) for done in (110, 119, 120, 990)] == [120, 120, 140, 1000]
    assert first_save(dataclasses.replace(c, save_every=100), 36.0, 110) == 135


def test_beyond_the_calendar_there_is_no_clock(c: Config) -> None:
    """1,000 steps of 3e8 s are 9,500 years, from 2026 past 9999; of 3e15 s more than a timedelta holds."""
    clocks = {one.name: one.clock for one in milestones(c, 3e8, START)}
    assert clocks["100%"] is None and (clocks["50%"] or "").startswith("678")
    assert [one.clock for one in milestones(c, 3e15, START)] == [None] * 5
