"""When a run did what: the claims of its records (record/goodput.py), placed one after the other.

A claim ends at its record, or earlier where later claims need the room; what no record claims is `other`.
"""

from typing import NamedTuple

from record.goodput import Timeline

ROUNDING_S = 1e-6


class Interval(NamedTuple):
    """Time of one category.

    Attributes:
        attempt: index of the attempt; for `down`, of the attempt before it.
        begin, end: seconds on the clock of that attempt.
        step: of training, data wait and lost work.
    """

    attempt: int
    begin: float
    end: float
    category: str
    step: int = 0


def place_claims(timeline: Timeline) -> list[Interval]:
    """Return all time from the first start to the last record, in order and without gaps."""
    claims = [*timeline.claims]
    backward: list[Interval] = []
    for place in reversed(range(len(timeline.attempts))):
        attempt = timeline.attempts[place]
        free_until = attempt.end
        while claims and claims[-1].attempt == place:
            claim = claims.pop()
            if claim.end < free_until:
                backward.append(Interval(place, claim.end, free_until, "other"))
                free_until = claim.end
            begin = free_until - claim.seconds
            if begin < free_until:
                backward.append(
                    Interval(
                        place,
                        begin,
                        free_until,
                        claim.category,
                        claim.step,
                    )
                )
                free_until = begin
        if free_until - attempt.begin > ROUNDING_S:
            backward.append(Interval(place, attempt.begin, free_until, "other"))
        if place:
            end = timeline.attempts[place - 1].end
            backward.append(Interval(place - 1, end, end + attempt.down_s, "down"))
    return backward[::-1]
