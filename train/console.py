"""What a terminal shows of a run: the lines that people read. train.log has all of them.

A standard output that is no terminal, as in a pod or a pipe, gets what train.log gets.
"""

import io
import logging
import shutil
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Callable

from record.durable import make_printable

log = logging.getLogger(__name__)

QUIET_S = 15.0
LOG_ONLY = {"terminal": ""}  # extra= of what a terminal does not show


class Printable(logging.Formatter):
    """Shows control characters of file names and answers as escapes: a terminal would obey them."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).split("\n")
        return "\n".join(make_printable(line.expandtabs()) for line in lines)


class ForTerminals(Printable):
    """Shows the text that a record has for terminals, where it has one."""

    def format(self, record: logging.LogRecord) -> str:
        text = getattr(record, "terminal", None)
        if text:
            record = logging.makeLogRecord({"msg": text})
        return wrap(super().format(record))


def start_logging() -> None:
    """Log to standard output. What its encoding lacks is escaped."""
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(Printable())
    if sys.stdout.isatty():
        handler.setFormatter(ForTerminals())
        handler.addFilter(lambda record: getattr(record, "terminal", None) != "")
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def report_quiet(describe: Callable[[], str]) -> None:
    """From now on log what is going on whenever nothing was logged for QUIET_S.

    describe: returns what is going on; "" if nothing is.
    """
    shown_at = time.monotonic()

    def note(record: logging.LogRecord) -> bool:
        nonlocal shown_at
        shown_at = time.monotonic()
        return True

    def watch() -> None:
        while True:
            time.sleep(QUIET_S / 15)
            if time.monotonic() - shown_at >= QUIET_S:
                text = describe()
                if text:
                    log.info("%s", text)

    for handler in logging.getLogger().handlers[:1]:  # that of the terminal
        handler.addFilter(note)  # after the one that leaves out what a terminal does not show
    threading.Thread(target=watch, name="quiet", daemon=True).start()


def wrap(text: str) -> str:
    """Break lines at blanks where a terminal would break them in the middle of a word. Indented ones stay."""
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = []
    for line in text.split("\n"):
        is_whole = len(line) <= wrapper.width or line.startswith(" ")
        lines.append(line if is_whole else wrapper.fill(line))
    return "\n".join(lines)


def measure(text: str) -> int:
    """Return how many columns of a terminal a text takes: Chinese and Japanese characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def for_terminals(text: str) -> dict[str, str]:
    """Return the `extra` of a line of which terminals show this text."""
    return {"terminal": text}
