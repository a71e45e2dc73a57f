"""Draw the two pictures of the README: what make train prints, and the curves that it draws.

script -qec "make train" console.txt
python -m tests.house.pictures console.txt runs/tiny/plots/loss_curves.png
"""

import io
import re
import shutil
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from settings import ROOT

COLUMNS = 100
FIRST_LINES = 7
LAST_LINES = 24
BAR = "\N{BOX DRAWINGS HEAVY HORIZONTAL}"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
BLANKS = re.compile(r" +$", re.MULTILINE)
# Rich cuts lines at the height of its own font. Other fonts draw underscores lower.
CLIPS = re.compile(r'<clipPath .*?</clipPath>\n?| clip-path="[^"]*"', re.DOTALL)
WEB_FONTS = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)


def read_console(path: Path) -> list[str]:
    """Return the lines that a recorded terminal shows at the end, without progress bars."""
    lines = []
    for line in path.read_bytes().decode().split("\n"):
        plain = CONTROL.sub("", line)
        shown = plain.rstrip("\r").rpartition("\r")[2].rstrip()
        if shown and BAR not in shown and not shown.startswith("Script "):
            lines.append(shown)
    return lines


def draw_terminal(lines: list[str], path: Path) -> None:
    """Write an SVG picture of a terminal that shows these lines."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in lines:
        text = Text(line, overflow="ellipsis", no_wrap=True)
        console.print(text)
    svg = console.export_svg(
        title="make train",
        code_format=WEB_FONTS.sub("", CONSOLE_SVG_FORMAT),
    )
    path.write_text(BLANKS.sub("", CLIPS.sub("", svg)))


def main(console: Path, curves: Path) -> None:
    lines = read_console(console)
    shown = ["$ make train"]
    shown += lines[:FIRST_LINES]
    shown.append("...")
    shown += lines[-LAST_LINES:]
    draw_terminal(shown, ROOT / "docs/first-run-terminal.svg")
    shutil.copy(curves, ROOT / "docs/first-run.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
