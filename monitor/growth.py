"""How fast a quantity grows, by the last hour of it. Standard library only."""

import math
from collections import deque
from itertools import combinations, pairwise
from statistics import median

EVERY_S = 30.0  # between two values that are looked at
VALUES = 120  # of them at most, the last: an hour


class Growth:
    """A value each EVERY_S, an hour of them, and the median of the slopes between each two of them (Theil, 1950; Sen,
    1968), which up to 29% of values that are off do not move.

    It counts as flat below `enough` values, `rises` of them above the one before and `least` an hour; and where among
    all pairs those that rise are not `surplus` of all more than those that fall, which is Kendall's tau of value and
    time: noise has none of it, by a standard deviation of sqrt(2 (2n + 5) / (9 n (n - 1))), 0.11 of 41 values.
    """

    def __init__(self, enough: int, rises: int = 1, surplus: float = 0.0, least: float = 0.0):
        self.enough, self.rises, self.surplus, self.least = enough, rises, surplus, least
        self.values = deque[tuple[float, float]](maxlen=VALUES)
        self.known: tuple[float, float | None] = (
            math.nan,
            None,
        )  # the time of the last value, and the slope then

    def add(self, seconds: float, value: float) -> None:
        """seconds: on a monotonic clock; a value that follows too soon is passed over."""
        if not self.values or seconds - self.values[-1][0] >= EVERY_S:
            self.values.append((seconds, value))

    def per_hour(self) -> float | None:
        """None where it is flat, or not known yet."""
        if self.values and self.values[-1][0] != self.known[0]:
            self.known = (self.values[-1][0], self.slope())
        return self.known[1]

    def slope(self) -> float | None:
        values = [value for _, value in self.values]
        if len(values) < self.enough or sum(b > a for a, b in pairwise(values)) < self.rises:
            return None
        slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(self.values, 2)]
        surplus = sum(slope > 0 for slope in slopes) - sum(slope < 0 for slope in slopes)
        found = 3600 * median(slopes)
        return (
            found
            if found > 0 and found >= self.least and surplus >= self.surplus * len(slopes)
            else None
        )
