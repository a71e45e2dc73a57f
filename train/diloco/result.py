"""How the wait for other sites may end. Loads nothing of torchft, which takes seconds."""


class Interrupted(Exception):
    """A signal came while this site waited for others; nothing of it is lost."""


class RunIsOver(Exception):
    """The other sites have trained the run to its end; the message says so."""
