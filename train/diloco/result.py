"""How an exchange between sites ended: with a result, or without. Loads nothing of torchft, which takes seconds."""

APART = -(
    10**9
)  # exchanges of a site that must take over others' weights, and of which none takes its own


class ToldToStop(Exception):
    """A signal came while this site waited for others; nothing of it is lost."""


class RunIsOver(Exception):
    """The other sites have trained the run to its end; the message says so."""
