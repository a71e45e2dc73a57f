"""What a terminal shows of a run: the lines that people read. train.log has all of them.

A standard output that is no terminal, as in a pod or a pipe, gets what train.log gets.
"""

import io
import logging
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from typing import TextIO

from record.durable import make_printable
from settings.finding import wrap

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


def start_logging(stream: TextIO | None = None) -> None:
    """Log to a stream, by default standard output. What its encoding lacks is escaped."""
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Printable())
    if stream.isatty():
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


def measure(text: str) -> int:
    """Return how many columns of a terminal a text takes: Chinese and Japanese characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def for_terminals(text: str) -> dict[str, str]:
    """Return the `extra` of a line of which terminals show this text."""
    return {"terminal": text}


class WrappedText:
    """Writes text as it comes. On a terminal it breaks lines between words.

    There a word is written once it has ended, or fills a line.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.columns = shutil.get_terminal_size().columns
        self.column = 0  # where the next character goes
        self.word = ""

    def write(self, text: str) -> None:
        if not self.stream.isatty():
            self.put(text)
            self.stream.flush()
            return
        for character in text:
            if not character.isspace():
                self.word += character
                if measure(self.word) >= self.columns:
                    self.flush()
                continue
            self.flush()
            if character == "\n":
                self.put(character)
                self.column = 0
            elif self.column < self.columns:  # a blank at the end of a full line is not seen
                self.put(character.expandtabs())
        self.stream.flush()

    def flush(self) -> None:
        """Write what there is of a word, on a new line if it does not fit into this one."""
        if self.column and self.column + measure(self.word) > self.columns:
            self.put("\n")
            self.column = 0
        self.put(self.word)
        self.word = ""

    def put(self, text: str) -> None:
        self.stream.write(text)
        self.column += measure(text)
