"""What a terminal shows of a run: the lines that people read. train.log has all of them.

A standard output that is no terminal, as in a pod or a pipe, gets what train.log gets.
"""

import logging
import sys

LOG_ONLY = {"terminal": ""}  # extra= of what a terminal does not show


class Terminal(logging.StreamHandler):
    """Shows the text that a record has for terminals, where it has one."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "terminal", None) != "":
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return getattr(record, "terminal", None) or super().format(record)


def start_logging() -> None:
    """Log to standard output."""
    kind = Terminal if sys.stdout.isatty() else logging.StreamHandler
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[kind(sys.stdout)])


def for_terminals(text: str) -> dict[str, str]:
    """Return the `extra` of a line of which terminals show this text."""
    return {"terminal": text}
