"""What was published of the loss that DiLoCo costs, and which of it belongs to which run. Nothing here is computed.

A figure counts for a run where interval and number of replicas are the same, and sizes within a factor of 1.5. For any
other run it is not known: the nearest is named, and nothing is interpolated. What the tables agree on: the loss grows
with the interval and with the number of replicas, and shrinks with the size of the model.
"""

import dataclasses
import math

from record.number_formats import count

NEAR = 1.5  # between two sizes that count as one
TABLE = "read in the paper's own table"
ABSTRACT = "read in its abstract"
SECOND_HAND = "second hand"

SCALING_LAWS = "arXiv 2503.09799, table 4"
STREAMING = "arXiv 2501.18512"
DILOCO = "arXiv 2311.08105"
INTELLECT = "arXiv 2412.01152"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A published run. replicas: sites; every: H, inner steps between exchanges; percent: by which its evaluation loss
    was above that of data parallelism at equal tokens, None where nobody compared; said: its own figures."""

    source: str
    parameters: float
    replicas: int
    every: int
    percent: float | None
    said: str
    read: str = TABLE
    streaming: bool = False

    @property
    def text(self) -> str:
        """'1.3B, 4 replicas, H=30: 2.472 against 2.460 (arXiv 2503.09799, table 4)'"""
        how = ", streaming" if self.streaming else ""
        doubt = f", {self.read}" if self.read == SECOND_HAND else ""
        return (
            f"{count(self.parameters)}, {self.replicas} replicas, H={self.every}{how}: {self.said} "
            f"({self.source}{doubt})"
        )


PUBLISHED = (
    Evidence(SCALING_LAWS, 35e6, 4, 30, 2.0, "2.0% more loss"),
    Evidence(SCALING_LAWS, 1.3e9, 2, 30, 0.2, "2.464 against 2.460"),
    Evidence(SCALING_LAWS, 1.3e9, 4, 30, 0.5, "2.472 against 2.460"),
    Evidence(SCALING_LAWS, 1.3e9, 8, 30, 1.3, "2.493 against 2.460"),
    Evidence(SCALING_LAWS, 2.4e9, 4, 30, 0.3, "0.3% more loss"),
    Evidence(SCALING_LAWS, 4e9, 4, 30, 0.18, "0.18% more loss"),
    Evidence(SCALING_LAWS, 10e9, 4, 30, 0.29, "0.29% more loss"),
    Evidence(
        STREAMING,
        1e9,
        2,
        100,
        0.0,
        "2.66, 2.51, 2.45 against 2.67, 2.52, 2.45 after 25, 100, 250B tokens",
        streaming=True,
    ),
    Evidence(
        DILOCO, 150e6, 8, 500, -0.7, "perplexity 15.02 against 15.30 of the same batch", SECOND_HAND
    ),
    Evidence(
        INTELLECT,
        10e9,
        14,
        100,
        None,
        "83 to 96% of the time computing, and no run without to compare with",
        ABSTRACT,
    ),
)


def fitting(parameters: float, replicas: int, every: int, streaming: bool) -> Evidence | None:
    """What was published of such a run, the nearest in size; None where nothing was."""
    fits = [
        one
        for one in PUBLISHED
        if one.percent is not None
        and (one.replicas, one.every, one.streaming) == (replicas, every, streaming)
        and abs(math.log(one.parameters / parameters)) <= math.log(NEAR)
    ]
    return min(fits, key=lambda one: abs(math.log(one.parameters / parameters)), default=None)


def nearest(parameters: float, replicas: int, every: int, streaming: bool) -> Evidence:
    """Of the runs that were compared the one that differs least, by the factors between them; of those with the same
    interval, where there are any."""

    def far(one: Evidence) -> float:
        return sum(
            abs(math.log(theirs / own))
            for theirs, own in (
                (one.parameters, parameters),
                (one.replicas, replicas),
                (one.every, every),
            )
        ) + (one.streaming != streaming)

    compared = [one for one in PUBLISHED if one.percent is not None]
    return min([one for one in compared if one.every == every] or compared, key=far)


def loss(parameters: float, replicas: int, every: int, streaming: bool) -> tuple[float | None, str]:
    """(per cent of loss that such a run costs, None where nobody published one; in words, by whose figures)."""
    if found := fitting(parameters, replicas, every, streaming):
        return found.percent, found.text
    best = nearest(parameters, replicas, every, streaming)
    return None, f"not published of {count(parameters)} at {replicas} sites; nearest: {best.text}"


def percent_told(percent: float | None) -> str:
    """'+0.5%', 'none', 'not published'"""
    if percent is None:
        return "not published"
    return f"{percent:+g}%" if percent else "none"
