"""What a terminal shows of a run: the lines that people read. train.log has all of them.

A standard output that is no terminal, as in a pod or a pipe, gets what train.log gets.
"""

import logging
import shutil
import sys
import textwrap

LOG_ONLY = {"terminal": ""}  # extra= of what a terminal does not show


class Terminal(logging.StreamHandler):
    """Shows the text that a record has for terminals, where it has one."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "terminal", None) != "":
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return wrap(getattr(record, "terminal", None) or super().format(record))


def start_logging() -> None:
    """Log to standard output."""
    kind = Terminal if sys.stdout.isatty() else logging.StreamHandler
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[kind(sys.stdout)])


def wrap(text: str) -> str:
    """Break lines at blanks where a terminal would break them in the middle of a word. Indented ones stay."""
    columns = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        if len(line) <= columns or line.startswith(" "):
            lines.append(line)
            continue
        lines += textwrap.wrap(
            line,
            columns,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def for_terminals(text: str) -> dict[str, str]:
    """Return the `extra` of a line of which terminals show this text."""
    return {"terminal": text}
