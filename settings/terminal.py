"""Lines for people: on a terminal they wrap between words, anywhere else they stay as they are."""

import shutil
import sys
import textwrap
from typing import TextIO


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
            line,
            columns,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)
