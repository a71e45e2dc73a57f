"""ALLOW_FAIL knows each check by its name, and no other."""

import ast
from pathlib import Path

import pytest

from plan.allow_fail import CHECK_NAMES, refuse_unknown_checks
from settings import ROOT, SettingsError

ROOMS = ("hardware", "plan", "doctor", "k8s")
SOURCES = [
    path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if path.name != "allow_fail.py"
]
SOURCES.append(ROOT / "settings" / "finding.py")


def literals(path: Path) -> set[str]:
    """First arguments, written out, of what makes a finding."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.args
        and call.func.id in ("Finding", "from_sentence", "Asked")
        and isinstance(call.args[0], ast.Constant)
    }


def test_each_check_has_its_name_in_the_list() -> None:
    made = set().union(*map(literals, SOURCES))
    assert len(made) > 30 and made <= set(CHECK_NAMES), made - set(CHECK_NAMES)


def test_each_name_of_the_list_is_a_check_s() -> None:
    written = {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(CHECK_NAMES) <= written, set(CHECK_NAMES) - written


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        SettingsError, match="there is no check disc; did you mean disk\\? there are: attention, "
    ):
        refuse_unknown_checks("gpus,disc")
    refuse_unknown_checks("gpus,disk")
    refuse_unknown_checks("")
