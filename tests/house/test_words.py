"""Pages and messages are in plain American English (tests/house/tics.toml)."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from settings import ROOT
from tests.house.pages import PAGES, list_sources, name_page, remove_code

TICS = tomllib.loads((ROOT / "tests/house/tics.toml").read_text())

# These pages and rooms still have the old sentences. Take a name out once it is rewritten.
OLD_PAGES = {
    "docs/kubernetes.md",
    "docs/manifests.md",
    "docs/monitor.md",
}
OLD_ROOMS = {
    "bench",
    "docker",
    "doctor",
    "k8s",
    "monitor",
}
DATA = {"finetune/pipeline/exercises.py"}  # its sentences are training data


def find_tics(text: str, *tables: str) -> list[str]:
    """Return what a text says in one of our old ways, with what to write instead."""
    found = []
    for table in tables:
        for pattern, instead in TICS[table].items():
            for match in re.finditer(pattern, text, re.IGNORECASE):
                around = text[max(0, match.start() - 40) : match.end() + 40]
                found.append(f"{around!r}: {instead}")
    return found


def list_messages(path: Path) -> Iterator[str]:
    """Yield the strings of a module that may be sentences, without its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            docstrings.add(node.value)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or node in docstrings:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield node.value


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_a_page_is_in_plain_american_english(page: Path) -> None:
    tables = ["spelling"]
    if name_page(page) not in OLD_PAGES and "decisions" not in page.parts:
        tables.append("words")
    prose = remove_code(page.read_text())
    assert not find_tics(prose, *tables)


def test_messages_are_in_plain_american_english() -> None:
    found = []
    for path in list_sources():
        name = str(path.relative_to(ROOT))
        if path.suffix != ".py" or name in DATA:
            continue
        tables = ["spelling"]
        if name.split("/")[0] not in OLD_ROOMS:
            tables.append("words")
        for message in list_messages(path):
            found += [f"{name}: {tic}" for tic in find_tics(message, *tables)]
    assert not found


def test_the_help_of_make_is_in_american_english() -> None:
    lines = re.findall(r"## (.+)", (ROOT / "Makefile").read_text())
    assert len(lines) > 40
    assert not find_tics("\n".join(lines), "spelling")


# Participles that say nothing of what they hold. Rooms are added once they have none.
NO_NAMES = {"found", "told", "said", "seen", "kept", "held", "listed", "absent", "lacking", "taken"}
ROOMS_WITH_NAMES = (
    "analysis",
    "export",
    "finetune",
    "hardware",
    "plan",
    "record",
    "settings",
    "train",
)


def list_names(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of what a module defines: variables, arguments, functions and classes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


@pytest.mark.parametrize("room", ROOMS_WITH_NAMES)
def test_a_name_says_what_it_holds(room: str) -> None:
    vague = []
    for path in (ROOT / room).rglob("*.py"):
        for name, line in list_names(path):
            if name in NO_NAMES:
                vague.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not vague
