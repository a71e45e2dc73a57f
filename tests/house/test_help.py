"""`make help` fits a terminal."""

import subprocess

from settings import ROOT


def test_each_line_of_help_has_80_columns_at_most():
    lines = subprocess.check_output(["make", "help"], cwd=ROOT, text=True).splitlines()
    assert len(lines) > 40
    assert [line for line in lines if len(line) > 80] == []
