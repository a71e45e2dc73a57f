"""monitor/gpu_sampler/slots.py: deadlines that stay where they are, and slots that are missed."""

import random

import pytest

from monitor.gpu_sampler.slots import Clock, Slots


class Time:
    def __init__(self, began: float = 123.456):
        self.now, self.slept = began, list[float]()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.now, self.sleep)


@pytest.mark.parametrize("interval", [0.001, 0.01, 1 / 3, 1.0])
def test_work_between_samples_delays_none_of_them(interval: float) -> None:
    time = Time()
    slots, rng = Slots(interval, time.clock), random.Random(1)
    for k in range(5000):
        assert slots.wait() == k
        assert time.now - 123.456 == pytest.approx(k * interval, abs=1e-6)
        time.now += rng.uniform(0, 0.99) * interval
    assert (slots.taken, slots.missed) == (5000, 0)


def test_a_slot_that_passed_is_missed_and_counted_and_the_next_are_on_time() -> None:
    time = Time(0.0)
    slots = Slots(0.01, time.clock)
    assert slots.wait() == 0
    time.now = 0.0571  # in slot 5: slots 1 to 4 are gone
    assert slots.wait() == 5 and time.slept == []
    assert (slots.taken, slots.missed) == (2, 4)
    assert slots.wait() == 6 and time.now == pytest.approx(0.06)
    time.now = 0.0699  # late in slot 6
    assert slots.wait() == 7 and time.now == pytest.approx(0.07)


def test_a_sleep_that_takes_too_long_misses_slots_as_well() -> None:
    time = Time(0.0)
    late = Clock(lambda: time.now, lambda: time.now, lambda seconds: time.sleep(seconds + 0.025))
    slots = Slots(0.01, late)
    assert [slots.wait() for _ in range(4)] == [0, 3, 6, 9]  # awake at 35, 65 and 95 ms
    assert (slots.taken, slots.missed) == (4, 6)


def test_taken_and_missed_are_all_slots_whatever_happens() -> None:
    time = Time(7.0)
    rng = random.Random(4)
    slots = Slots(
        0.01,
        Clock(
            lambda: time.now,
            lambda: time.now,
            lambda seconds: time.sleep(seconds + rng.expovariate(200)),
        ),
    )
    seen = []
    for _ in range(2000):
        seen.append(slots.wait())
        assert (time.now - 7.0) / 0.01 - seen[-1] < 1 + 1e-6  # taken while it lasts
        time.now += rng.expovariate(150)
    assert seen == sorted(set(seen)) and slots.missed > 100
    assert slots.taken == len(seen) and slots.taken + slots.missed == seen[-1] + 1
