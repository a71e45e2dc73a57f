"""How wide text may be, so that a terminal breaks no word of it."""

import shutil
import sys

WIDTH = 100  # of text for people, at most


def find_columns() -> int | None:
    """Return the columns of the terminal that standard output is; None where it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def find_width() -> int:
    """Return the width of a paragraph."""
    return min(WIDTH, find_columns() or WIDTH)
