"""How often a counter really has a new value, inferred from when it changes.

A sensor that is read a hundred times a second and has a new value ten times a second gives ten values, not a hundred.
How often is not documented for most cards, and differs between them and between counters of one card.
"""

from typing import Any

ENOUGH = 10  # gaps between changes; with fewer nothing is said
CONSISTENT = 0.9  # of the gaps must be multiples of the period, else the counter follows no clock
LONGEST = 12  # times the shortest gap: of longer ones the multiple would be a guess
SHARP = 8  # slots: of a shorter period everything would be a multiple


class Period:
    """Gaps between changes, in slots: gap -> how often it was seen."""

    def __init__(self) -> None:
        self.gaps: dict[int, int] = {}
        self.changes = 0
        self.last: int | None = None

    def change(self, slot: int, sharp: bool) -> None:
        """The value of this slot is a new one. sharp: the slot before was sampled too, so the change was just now."""
        self.changes += 1
        if sharp and self.last is not None:
            gap = slot - self.last
            self.gaps[gap] = self.gaps.get(gap, 0) + 1
        self.last = slot if sharp else None

    def slots(self) -> float | None:
        """Slots between new values; None where the changes do not tell.

        A new value may equal the one before, so a gap is a multiple of the period. The shortest gaps, those of up to
        1.5 times the lowest tenth, are taken for one period each, or for two, or for three, until all gaps fit: with
        that guess each has its multiple, the period is the sum of the gaps over that of the multiples, and CONSISTENT
        of them are off by a slot at most, which is how sharply a change is seen. What only ever changes at each second
        new value seems to have twice the period.
        """
        count = sum(self.gaps.values())
        if count < ENOUGH:
            return None
        ordered = sorted(self.gaps.items())
        seen, low = 0, 0
        for gap, times in ordered:
            seen, low = seen + times, gap
            if seen >= count / 10:
                break
        near = [(gap, times) for gap, times in ordered if gap <= 1.5 * low]
        shortest = sum(gap * times for gap, times in near) / sum(times for _, times in near)
        ordered = [(gap, times) for gap, times in ordered if gap <= LONGEST * shortest]
        for parts in (1, 2, 3):
            multiples = {gap: max(1, round(gap * parts / shortest)) for gap, _ in ordered}
            period = sum(gap * times for gap, times in ordered) / sum(
                multiples[gap] * times for gap, times in ordered
            )
            fit = sum(times for gap, times in ordered if abs(gap - multiples[gap] * period) <= 1.05)
            if fit >= CONSISTENT * sum(times for _, times in ordered) and (
                parts == 1 or period >= SHARP
            ):
                return period
        return None

    def found(self, interval_ms: float) -> dict[str, Any]:
        """For the sidecar. Below two slots changes of neighbouring values cannot be told apart: at_most_ms."""
        slots = self.slots()
        if slots is not None and slots < 2:
            return {"period_ms": None, "at_most_ms": 2 * interval_ms, "changes": self.changes}
        return {
            "period_ms": None if slots is None else round(slots * interval_ms, 2),
            "changes": self.changes,
        }
