"""settings/terminal.py: paragraphs fit the terminal, and a file has 100 columns."""

import sys

import pytest

from settings.terminal import find_columns, find_width


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("200", 100)])
def test_a_paragraph_fits_the_terminal(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert (find_columns(), find_width()) == (int(columns), width)


def test_a_file_has_100_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert (find_columns(), find_width()) == (None, 100)
