"""Lines for people: on a terminal they wrap between words, anywhere else they stay as they are."""

import shutil
import sys
import textwrap
from typing import TextIO

WIDTH = 100  # of text for people, at most


def say(text: object, stream: TextIO | None = None) -> None:
    """Print lines at once, by default to standard output."""
    stream = stream or sys.stdout
    lines = str(text)
    if stream.isatty():
        lines = wrap(lines)
    stream.write(f"{lines}\n")
    stream.flush()


def complain(text: object) -> None:
    """Print lines to standard error."""
    say(text, sys.stderr)


def wrap(text: str) -> str:
    """Break lines at blanks where a terminal would break them in the middle of a word.

    An indented command stays whole, so that it can be copied.
    """
    columns = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        is_command = indent and line.startswith("make ", len(indent))
        if len(line) <= columns or is_command:
            lines.append(line)
            continue
        lines += textwrap.wrap(
            line.lstrip(),
            columns,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def find_columns() -> int | None:
    """Return the columns of the terminal that standard output is; None where it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def find_width() -> int:
    """Return the width of a paragraph, so that a terminal breaks no word of it."""
    return min(WIDTH, find_columns() or WIDTH)
