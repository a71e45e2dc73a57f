"""analysis/page/column_packing.py: what is packed comes back bit for bit, in the form that takes the least."""

import json
from typing import Any

import numpy as np
import pytest

from analysis.page.column_packing import Packer
from tests.analysis.pages import columns_of

N = 3000


def bits(values: Any) -> list[int | None]:
    """The values as bit patterns, so that no NaN and no last place is passed over."""
    array = np.array([np.nan if v is None else v for v in values], np.float64)
    return [
        None if np.isnan(v) else int(w) for v, w in zip(array, array.view(np.int64), strict=True)
    ]


def back(**columns: np.ndarray) -> tuple[dict[str, Any], dict[str, list[float | None]]]:
    packer = Packer()
    heads = packer.columns(columns)
    return json.loads(json.dumps(heads)), columns_of(heads, b"".join(packer.parts))


RNG = np.random.default_rng(5)
STEP_MS = 1000 * (0.35 + 0.01 * RNG.random(N))
CASES = {
    "steps": (np.arange(1.0, N + 1), "decimal"),
    "tokens, more than 32 bits": (524288.0 * np.arange(1, N + 1) * 10**6, "decimal"),
    "six decimals, as printed": (
        np.array([float(f"{v:.6f}") for v in 3 + RNG.normal(size=N)]),
        "decimal",
    ),
    "negative, with gaps": (
        np.where(RNG.random(N) < 0.1, np.nan, np.round(RNG.normal(size=N), 3) + 0.0),
        "decimal",
    ),
    "gaps first and last": (np.r_[np.nan, np.nan, np.arange(5.0), np.nan], "decimal"),
    "float32": (RNG.normal(size=N).astype(np.float32).astype(np.float64), "float32"),
    "float32 with infinities": (
        np.r_[np.float32(2.7182817), np.inf, -np.inf, 1e30].astype(np.float32).astype(float),
        "float32",
    ),
    "float64": (RNG.normal(size=N), "float64"),
    "a schedule": (6e-4 * 0.5 * (1 + np.cos(np.pi * np.arange(N) / N)), "float64"),
    "minus zero": (np.array([0.0, -0.0, 1.0]), "float32"),
    "too large for a decimal": (np.array([1e300, 2.5]), "float64"),
    "one": (np.array([7.25]), "decimal"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_value_comes_back_bit_for_bit(name: str) -> None:
    values, form = CASES[name]
    heads, found = back(x=values)
    assert heads["x"]["form"] == form
    assert bits(found["x"]) == bits(values)


def test_what_another_column_tells_takes_a_byte_and_is_exact() -> None:
    """As train/loop.py computes them: tokens/s from seconds, not from milliseconds, and MFU from tokens/s."""
    seconds = STEP_MS / 1000
    speed = 524288 / seconds
    mfu = 100 * speed * 2.1e9 / (2 * 989e12)
    minutes = np.cumsum(STEP_MS) / 60_000
    speed[7] = mfu[7] = np.nan
    heads, found = back(step_ms=STEP_MS, minutes=minutes, tokens_per_s=speed, mfu=mfu)
    assert [heads[key]["form"] for key in ("minutes", "tokens_per_s", "mfu")] == [
        "sum",
        "over",
        "times",
    ]
    assert {heads[key]["width"] for key in ("minutes", "tokens_per_s", "mfu")} == {1}
    for key, values in (("minutes", minutes), ("tokens_per_s", speed), ("mfu", mfu)):
        assert bits(found[key]) == bits(values)


def test_a_column_that_another_does_not_tell_is_packed_by_itself() -> None:
    unlike = 1e5 + RNG.random(N)
    heads, found = back(step_ms=STEP_MS, tokens_per_s=unlike, mfu=np.full(N, np.nan))
    assert heads["tokens_per_s"]["form"] == "float64" and "mfu" not in heads
    assert bits(found["tokens_per_s"]) == bits(unlike)


def test_200_000_steps_take_less_than_5_mb_with_every_digit_of_a_record() -> None:
    n, random = 200_000, np.random.default_rng(1)
    step_ms = 1000 * (0.35 + 0.01 * random.random(n))
    speed = 524288 / (step_ms / 1000)
    packer = Packer()
    packer.columns(
        {
            "step": np.arange(1.0, n + 1),
            "tokens": 524288.0 * np.arange(1, n + 1),
            "step_ms": step_ms,
            "minutes": np.cumsum(step_ms) / 60_000,
            "tokens_per_s": speed,
            "mfu": speed * 1.06e-4,
            "loss": (3 + random.normal(size=n) / 20).astype(np.float32).astype(np.float64),
            "lr": 6e-4 * (1 + np.cos(np.pi * np.arange(n) / n)),
            "grad_norm": random.random(n).astype(np.float32).astype(np.float64),
            "time": np.round(1.76e9 + np.cumsum(step_ms) / 1000, 2),
        }
    )
    assert len(packer.text()) < 4_900_000
