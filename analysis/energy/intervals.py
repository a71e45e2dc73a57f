"""When a run did what: the claims of its records (record/goodput.py), placed one after the other.

A claim ends at its record, or earlier where later claims need the room; what no record claims is `other`.
"""

from collections import defaultdict

import numpy as np

from analysis.runs import Run
from record.goodput import Claim, Timeline


def place_claims(timeline: Timeline) -> list[tuple[int, float, float, str]]:
    """Return all time from the first start to the last record, in order and without gaps: index of the attempt (for
    `down`, of the one before it), begin and end in seconds on its clock, and category."""
    claims = defaultdict(list)
    for claim in timeline.claims:
        claims[claim.attempt].append(claim)
    backward = []
    for place, attempt in reversed([*enumerate(timeline.attempts)]):
        free_until = attempt.end
        start = Claim(place, attempt.begin, 0.0, "other")
        for claim in [*reversed(claims[place]), start]:
            end = min(claim.end, free_until)
            if end < free_until:
                backward.append((place, end, free_until, "other"))
            free_until = end - claim.seconds
            backward.append((place, free_until, end, claim.category))
        if place:
            end = timeline.attempts[place - 1].end
            backward.append((place - 1, end, end + attempt.down_s, "down"))
    return backward[::-1]


class RunIntervals:
    """When a run did what, on clocks that may not be those of its attempts.

    Attributes:
        seconds, category: (n,) of all its time, in order.
        attempt: (n,) int, index of the attempt whose clock it is on.
        has_gpus: (n,) bool; not where they were given back, after `make stop` or the end of training.
        step_s, step_attempt: (steps,) seconds, NaN if unknown, and index of the attempt.
        offsets: (attempts,) Unix seconds minus those of the attempt's clock, as the wall clock was set last.
        processes: (attempts,) int; 0 if unknown.
        boots: (attempts,) of the machine whose clock each has; None if unknown.
    """

    def __init__(self, run: Run, timeline: Timeline):
        facts = dict(enumerate(run.attempts))
        reasons = {}
        for record in run.events:
            if record["event"] == "end":
                reasons[record.get("attempt")] = record.get("reason")
        attempts = timeline.attempts
        boots = [str(facts.get(attempt.number or 0, {}).get("boot_id")) for attempt in attempts]
        self.boots = np.array(boots)
        self.offsets = np.array([[0.0, *attempt.offsets][-1] for attempt in attempts])
        self.processes = np.array([attempt.world_size or 0 for attempt in attempts])
        is_over = np.array(
            [reasons.get(attempt.number) in ("stopped", "done") for attempt in attempts]
        )

        intervals = zip(*place_claims(timeline), strict=True)
        self.attempt, begins, ends, self.category = map(np.array, intervals)
        self.bounds = np.append(begins, ends[-1])
        self.seconds = ends - begins
        self.has_gpus = ~is_over[self.attempt] | (self.category != "down")

        steps = zip(*timeline.steps(), strict=True)
        self.step_attempt, self.step_ends, *_ = map(np.array, steps)
        self.step_s = run.columns["step_ms"] / 1000

    def find_edges(self, shifts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where all time, and then all steps, begin and end, (n + steps,) each, on other clocks. Time without GPUs
        has no length.

        Args:
            shifts: (attempts,) seconds by which these are ahead of the clock of each attempt.
        """
        attempt = np.append(self.attempt, self.attempt[-1])
        bounds = np.maximum.accumulate(self.bounds + shifts[attempt])  # two attempts may overlap
        step_ends = self.step_ends + shifts[self.step_attempt]
        step_begins = step_ends - self.step_s
        ends = np.where(self.has_gpus, bounds[1:], bounds[:-1])
        return np.append(bounds[:-1], step_begins), np.append(ends, step_ends)
