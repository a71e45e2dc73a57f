"""docs/monitor.md names each rule and each of the monitor's settings, and none that is not there."""

import ast
import re

from monitor import panels
from settings import ROOT
from settings.config import SETTINGS

PAGE = (ROOT / "docs" / "monitor.md").read_text()
TABLE = re.findall(
    r"^\| (.+) \| (.+) \| (.*)\|$", PAGE.split("## What is wrong")[1].split("##")[0], re.MULTILINE
)
NAME = re.compile(r"[a-z]+(-[a-z]+)*")


def rules() -> set[str]:
    """The names that are given to a Fault or a Wait, or on the way there, anywhere in the rules."""
    found = set()
    for path in [
        *(ROOT / "monitor" / "rules").glob("*_rules.py"),
        ROOT / "monitor" / "rules" / "pod_waits.py",
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"Fault": 0, "Wait": 0, "held_back": 2}.get(node.func.id)
                name = node.args[place] if place is not None else None
            else:
                continue
            if (
                isinstance(name, ast.Constant)
                and isinstance(name.value, str)
                and NAME.fullmatch(name.value)
            ):
                found.add(name.value)
    return found


def test_the_table_has_each_rule_once() -> None:
    named = [name for row in TABLE for name in re.findall(r"`([a-z-]+)`", row[0])]
    assert len(named) > 30 and len(named) == len({*named}) and {*named} == rules()


def test_the_page_names_no_setting_that_is_not_there() -> None:
    named = set(re.findall(r"`([A-Z][A-Z_]*_[A-Z_]+)`", PAGE))
    ours = {name for name in named if not name.startswith("MONITOR_")} - {"NO_COLOR"}
    assert "ALERT_CMD" in ours and ours <= SETTINGS.keys()


def test_the_page_has_each_line_of_the_screen() -> None:
    source = (ROOT / "monitor" / "panels.py").read_text()
    labels = set(re.findall(r'(?:line|labelled)\("([A-Za-z]+)"', source)) - {"alert"}
    rows = " ".join(
        re.findall(r"^\| (.+?) \| ", PAGE.split("## The lines")[1].split("##")[0], re.MULTILINE)
    )
    assert len(labels) >= 12 and not [label for label in labels if f"`{label}`" not in rows]
    assert max(map(len, labels)) < panels.INDENT
