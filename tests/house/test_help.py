"""`make help` fits a terminal."""

import subprocess

import pytest

from settings import ROOT


@pytest.mark.parametrize(("options", "least"), [([], 15), (["ALL=1"], 40)])
def test_each_line_of_help_has_80_columns_at_most(options: list[str], least: int) -> None:
    command = ["make", "help", *options]
    lines = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert len(lines) > least
    assert [line for line in lines if len(line) > 80] == []
