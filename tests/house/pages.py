"""The pages of the documentation, and the code in them."""

import re
import subprocess
from pathlib import Path

from settings import ROOT

FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
REFUSED = re.compile(r"^\$ .*", re.MULTILINE)  # a command that is shown with its error

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob(".github/**/*.md"),
    ]
)
PAGES.remove(ROOT / "CHANGELOG.md")  # it names what is gone


def name_page(page: Path) -> str:
    """Return the path of a page in the repository, for the names of tests."""
    return str(page.relative_to(ROOT))


def remove_code(text: str) -> str:
    """Return the prose of a page."""
    without_blocks = FENCED.sub("", text)
    return SPAN.sub("", without_blocks)


def find_code(text: str) -> list[str]:
    """Return the code blocks of a page, then its code spans."""
    text = REFUSED.sub("", text)
    without_blocks = FENCED.sub("", text)
    code = FENCED.findall(text)
    code += INDENTED.findall(without_blocks)
    code += SPAN.findall(without_blocks)
    return code


def list_sources() -> list[Path]:
    """Return every file that git tracks, except pages, pictures and tests."""
    listed = subprocess.run(
        ["git", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    sources = []
    for name in listed.stdout.splitlines():
        if name.startswith("tests/"):
            continue
        if not name.endswith((".md", ".png", ".svg")):
            sources.append(ROOT / name)
    return sources
