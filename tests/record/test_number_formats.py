"""record/number_formats.py: three digits and a unit, at every place where one unit gives way to the next."""

import math

import pytest

from record.number_formats import (
    GIB,
    MIB,
    binary,
    count,
    gib,
    hours,
    money,
    number,
    percent,
    seconds,
    si,
    size,
)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (64, "64"),
        (999, "999"),
        (999.6, "1,000"),
        (51_200, "51,200"),
        (999_400, "999,400"),
        (999_600, "1M"),
        (412e6, "412M"),
        (1_336_248_320, "1.34B"),
        (999.9e9, "1T"),
        (1.5e12, "1.5T"),
        (1.6e15, "1,600T"),
    ],
)
def test_counts(value: float, said: str) -> None:
    assert count(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (2e-3, "0.002 "),
        (999.6, "1 k"),
        (16_515_072, "16.5 M"),
        (9_224_847_360, "9.22 G"),
        (999.96e9, "1 T"),
        (2.496e15, "2.5 P"),
        (3e18, "3 E"),
    ],
)
def test_si_stands_before_its_unit(value: float, said: str) -> None:
    assert si(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0 kB"),
        (512, "0.512 kB"),
        (999_600, "1 MB"),
        (40.4e6, "40.4 MB"),
        (999.7e6, "1 GB"),
        (8.0175e9, "8.02 GB"),
        (50e9, "50 GB"),
        (1.05e12, "1.05 TB"),
    ],
)
def test_sizes_are_decimal(value: float, said: str) -> None:
    assert size(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0 s"),
        (0.5 / 3600, "0.5 s"),
        (59.4 / 3600, "59 s"),
        (59.6 / 3600, "0.99 min"),
        (1 / 60, "1 min"),
        (2.4 / 60, "2.4 min"),
        (26.2 / 60, "26 min"),
        (59.4 / 60, "59 min"),
        (59.6 / 60, "1:00 h"),
        (1, "1:00 h"),
        (4.386, "4:23 h"),
        (80 + 39.6 / 60, "80:40 h"),
        (99.4, "99:24 h"),
        (99.6, "100 h"),
        (205.9, "206 h"),
        (3608.7, "3,609 h"),
    ],
)
def test_hours(value: float, said: str) -> None:
    assert hours(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0 s"),
        (0.00312, "3.1 ms"),
        (0.00994, "9.9 ms"),
        (0.00996, "0.01 s"),
        (0.081, "0.081 s"),
        (3.875, "3.9 s"),
        (64.2, "64 s"),
        (128.3, "128 s"),
        (599, "599 s"),
        (601, "10 min"),
        (7200, "2:00 h"),
    ],
)
def test_seconds(value: float, said: str) -> None:
    assert seconds(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (0.0123, "0.0123"),
        (8.771, "8.77"),
        (61.44, "61.4"),
        (99.94, "99.9"),
        (99.96, "100"),
        (1647.2, "1,647"),
    ],
)
def test_numbers(value: float, said: str) -> None:
    assert number(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0031, "0.0031"),
        (0.1, "0.10"),
        (22.5, "22.50"),
        (99.99, "99.99"),
        (100, "100"),
        (4316.25, "4,316"),
    ],
)
def test_money(value: float, said: str) -> None:
    assert money(value) == said


def test_memory_is_binary_and_says_when_it_is_next_to_nothing() -> None:
    assert [gib(value * GIB) for value in (0, 0.004, 0.006, 0.62, 0.994, 0.996, 48.83, 999.94)] == [
        "0",
        "<0.01",
        "0.01",
        "0.62",
        "0.99",
        "1.0",
        "48.8",
        "999.9",
    ]
    assert binary(24_105.6 * MIB, MIB) == "24,106" and binary(GIB, MIB) == "1,024"
    assert math.isclose(GIB, 1024**3) and math.isclose(MIB, 1024**2)


def test_shares() -> None:
    assert (percent(0.0569), percent(1.0), percent(0.854)) == ("5.7%", "100.0%", "85.4%")
