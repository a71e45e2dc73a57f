"""How an exchange between sites ended: with a result, or without. Loads nothing of torchft, which takes seconds."""

import dataclasses

APART = -(
    10**9
)  # exchanges of a site that must take over others' weights, and of which none takes its own


class ToldToStop(Exception):
    """A signal came while this site waited for others; nothing of it is lost."""


class RunIsOver(Exception):
    """The other sites have trained the run to its end; the message says so."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call of Site.advance has brought, the same on all ranks of a site.

    behind: the steps that this site did not take part in, as (from, to), where it has healed. fragment: which one an
    exchange was about that has ended now, None where none has. committed: whether it counts. outer: exchanges so far.
    seconds: what the exchange took, of which training waited stall_s. sent: bytes, by this rank. digest: of the
    fragment behind it, over all ranks.
    """

    behind: tuple[int, int] | None = None
    fragment: int | None = None
    committed: bool = False
    outer: int = 0
    sites: int = 1
    seconds: float = 0.0
    stall_s: float = 0.0
    sent: int = 0
    digest: str = ""
