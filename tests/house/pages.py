"""The pages of the documentation, and the code in them."""

import re
import subprocess
from pathlib import Path

from settings import ROOT

FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")

# A changelog names what is gone.
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", ".github/**/*.md")
    for page in sorted(ROOT.glob(pattern))
    if page.name != "CHANGELOG.md"
]


def name_page(page: Path) -> str:
    """Return the path of a page in the repository, for the names of tests."""
    return str(page.relative_to(ROOT))


def find_code(text: str) -> list[str]:
    """Return the code blocks of a page, then its code spans."""
    text = re.sub(r"^\$ .*", "", text, flags=re.MULTILINE)  # may show what is refused
    prose = FENCED.sub("", text)
    return FENCED.findall(text) + INDENTED.findall(prose) + SPAN.findall(prose)


def list_sources() -> list[Path]:
    """Return every file that git tracks, except pages and tests."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [
        ROOT / name
        for name in listed
        if not name.endswith((".md", ".png", ".svg")) and not name.startswith("tests/")
    ]
