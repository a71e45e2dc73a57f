"""The README names what is there."""

import ast
import re

from settings import ROOT
from settings.config import SETTINGS

README = (ROOT / "README.md").read_text()


def test_each_file_and_function_of_the_map_exists() -> None:
    rows = re.findall(r"^\| [^|]+\? \| (.+) \|$", README, re.MULTILINE)
    assert len(rows) >= 12
    checked = 0
    for row in rows:
        for path, rest in re.findall(r"`((?:\w+/)+\w+\.(?:py|sh))`((?:,? ?`\w+`)*)", row):
            text = (ROOT / path).read_text()
            names = (
                {
                    node.name
                    for node in ast.walk(ast.parse(text))
                    if isinstance(node, ast.FunctionDef)
                }
                if path.endswith(".py")
                else set()
            )
            wanted = re.findall(r"`(\w+)`", rest)
            assert set(wanted) <= names, (path, wanted)
            checked += 1 + len(wanted)
    assert checked > 20


def test_each_target_and_setting_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z][a-z0-9-]+)\b", README))
    assert len(named) > 10 and named - {"targets", "and"} <= targets, named - targets
    settings = set(re.findall(r"\b([A-Z][A-Z_]{3,})\b(?==|`)", README))
    assert settings and settings <= SETTINGS.keys() | {"NAME", "RUN_NAME"}, settings


def test_each_test_that_stands_for_a_promise_exists() -> None:
    promises = README.split("## What is promised")[1].split("##")[0]
    named = re.findall(r"`((?:\w+/)+test_\w+\.py)`", promises)
    assert len(named) >= 10 and all((ROOT / "tests" / name).is_file() for name in named)


def test_every_setting_of_the_readme_example_is_in_env_example() -> None:
    text = (ROOT / ".env.example").read_text()
    assert all(
        f"#{name}=" in text for name in ("SAVE_MINUTES", "KEEP_LAST", "DETACH", "BATCH_TOKENS")
    )


def test_the_readme_fits_two_screens_and_its_picture_is_there() -> None:
    assert len(README.splitlines()) <= 150
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).stat().st_size > 10_000
