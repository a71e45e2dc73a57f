"""Columns of numbers in few bytes, for a page: every value as it was, bit for bit.

    columns -> whole numbers -> differences -> planes of bytes -> one zlib stream, in base64

A column takes the first form that gives its values back: decimals as a log prints them, times a power of ten; what a
column before it tells (minutes are the sum of step_ms; tokens/s are a number over step_ms, MFU is another times
tokens/s) up to LEAPS last places; float32; float64. Floats are taken by their bits, as whole numbers. Of these the
differences of some order are kept: the fewest bytes in a look at the first LOOK values. analysis/page/unpack.js reads it.
"""

import base64
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

LOOK = 2**15
ORDERS = (0, 1, 2, 3)  # of differences: a schedule's rates are those of a straight line, or nearly
DECIMALS = 9  # at most
WHOLE = 2**53  # below it a float64 is an exact whole number
LEAPS = 100  # of the last place, from what another column tells
LEVEL = 6

# Column -> the one that tells it, and how. A constant is taken from the middle of the run.
TOLD: dict[str, tuple[str, str]] = {
    "minutes": ("step_ms", "sum"),
    "tokens_per_s": ("step_ms", "over"),
    "mfu": ("tokens_per_s", "times"),
}


class Packer:
    """Takes columns one by one, and says where each lies."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def columns(self, columns: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
        """Key -> how to read it; columns without any number are left out."""
        return {
            key: self.column(key, values, columns)
            for key, values in columns.items()
            if len(values) and not np.isnan(values).all()
        }

    def column(
        self, key: str, values: np.ndarray, others: Mapping[str, np.ndarray]
    ) -> dict[str, Any]:
        gaps = np.isnan(values)
        head: dict[str, Any] = {"n": len(values)}
        if gaps.any():
            head["gaps"] = self.add(np.packbits(gaps, bitorder="little").tobytes())
        known = filled(values, gaps)
        if (decimals := decimals_of(known)) is not None:
            return (
                head
                | self.numbers(np.rint(known * 10.0**decimals).astype(np.int64))
                | {"form": "decimal", "decimals": decimals}
            )
        name, how = TOLD.get(key, ("", ""))
        if name in others and (told := self.told(values, gaps, others[name], how)):
            return head | told | {"from": name}
        with np.errstate(over="ignore"):
            single = known.astype(np.float32)
        if (single.astype(np.float64) == known).all():
            return head | self.numbers(single.view(np.int32).astype(np.int64)) | {"form": "float32"}
        return head | self.numbers(known.view(np.int64)) | {"form": "float64"}

    def told(
        self, values: np.ndarray, gaps: np.ndarray, other: np.ndarray, how: str
    ) -> dict[str, Any] | None:
        """The column as another one tells it; None where that is not close."""
        middle = np.flatnonzero(~gaps)[int((~gaps).sum()) // 2]
        constant = {
            "sum": 60_000.0,
            "over": float(values[middle] * other[middle]),
            "times": float(values[middle] / other[middle]) if other[middle] else 0.0,
        }[how]
        if not np.isfinite(constant) or not constant:
            return None
        guessed = RULES[how](other, constant)
        if np.isnan(guessed[~gaps]).any():
            return None
        leaps = filled(values, gaps).view(np.int64) - np.where(
            gaps, filled(values, gaps), guessed
        ).view(np.int64)
        if np.abs(leaps).max() > LEAPS:
            return None
        return {"form": how, "constant": constant} | self.numbers(leaps)

    def numbers(self, whole: np.ndarray) -> dict[str, Any]:
        """(n,) int64, as differences of the best order, in planes of bytes."""
        trials = {order: differences(whole[:LOOK], order) for order in ORDERS}
        best = min(ORDERS, key=lambda order: len(zlib.compress(planes(trials[order], 8), 1)))
        taken = differences(whole, best)
        width = next(
            width
            for width in (1, 2, 4, 8)
            if width == 8 or np.abs(taken).max() < 2 ** (8 * width - 1)
        )
        return {"order": best, "width": width, "at": self.add(planes(taken, width))}

    def add(self, data: bytes) -> int:
        at, self.size = self.size, self.size + len(data)
        self.parts.append(data)
        return at

    def text(self) -> str:
        """All of it in base64."""
        deflate = zlib.compressobj(LEVEL)
        return base64.b64encode(
            b"".join([*map(deflate.compress, self.parts), deflate.flush()])
        ).decode("ascii")


def filled(values: np.ndarray, gaps: np.ndarray) -> np.ndarray:
    """Each gap with the value before it, which costs nothing; the first ones with the first value."""
    at = np.maximum.accumulate(np.where(gaps, 0, np.arange(len(values))))
    at[: int(np.argmin(gaps))] = np.argmin(gaps)
    return np.ascontiguousarray(values[at])


def decimals_of(values: np.ndarray) -> int | None:
    """How many decimals give all values back exactly; None where none do.

    m / 10^k, both exact, is the float64 nearest to the decimal, as the text of it is read.
    """
    if not np.isfinite(values).all() or np.signbit(values[values == 0]).any():
        return None
    for decimals in range(DECIMALS + 1):
        power = 10.0**decimals
        if np.abs(values).max() * power >= WHOLE:
            return None
        if all((np.rint(part * power) / power == part).all() for part in (values[:LOOK], values)):
            return decimals
    return None


def differences(whole: np.ndarray, order: int) -> np.ndarray:
    """Of this order, modulo 2^64, the first value before them, so that as many sums give all back."""
    for _ in range(order):
        whole = np.diff(whole, prepend=np.int64(0))
    return whole


def planes(whole: np.ndarray, width: int) -> bytes:
    """The lowest bytes of all numbers, then the second ones, and so on."""
    return np.ascontiguousarray(
        whole.astype(f"<i{width}").view(np.uint8).reshape(-1, width).T
    ).tobytes()


# The same in unpack.js.
RULES: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "sum": lambda other, constant: (
        np.where(np.isnan(other), np.nan, np.nancumsum(other)) / constant
    ),
    "over": lambda other, constant: np.divide(
        constant, other, out=np.full(len(other), np.nan), where=other != 0
    ),
    "times": lambda other, constant: other * constant,
}
