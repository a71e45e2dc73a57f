"""Every page of the documentation names what exists."""

import re
from pathlib import Path

import pytest

from settings import ROOT
from settings.config import SETTINGS
from settings.targets import VARIABLES
from tests.house.pages import PAGES, find_code, list_sources, name_page

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):.*##", MAKEFILE, re.MULTILINE))
COMMAND = re.compile(r"\bmake((?: (?:[A-Z_]+=[^\s;|&#`]+|[a-z-][a-z0-9-]*))+)")

IGNORED = [line.lstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
FOLDERS = "|".join(re.escape(path.name) for path in sorted(ROOT.iterdir()) if path.is_dir())
PATH = re.compile(rf"(?<![\w/.~-])(?:{FOLDERS})/(?:[\w./*-]*/|[\w/*-]*\.\w+)")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")
FOREIGN = {"NO_COLOR"}  # read by rich
FUNCTIONS = re.compile(r"`((?:\w+/)+\w+\.py)`((?:,? `[\w.]+(?<!\.py)`)+)")

every_page = pytest.mark.parametrize("page", PAGES, ids=name_page)


@pytest.fixture(scope="module")
def words() -> set[str]:
    """The names in capitals of all sources, without the list of settings that are gone."""
    found = set(SETTINGS) | set(VARIABLES)
    for path in list_sources():
        if path.name != "removed.py":
            found.update(re.findall(r"[A-Z][A-Z0-9_]+", path.read_text(errors="replace")))
    return found


@every_page
def test_each_make_command_has_a_target_that_uses_its_settings(page: Path) -> None:
    wrong = []
    for code in find_code(page.read_text()):
        for command in COMMAND.findall(code):
            given = command.split()
            targets = [word for word in given if re.fullmatch("[a-z][a-z0-9-]*", word)]
            wrong += [f"make {target}" for target in targets[:1] if target not in TARGETS]
            for name in re.findall(r"(\w+)=", command):
                setting = SETTINGS.get(name)
                if targets and setting and targets[0] not in setting.used_by:
                    wrong.append(f"make {targets[0]} {name}")
    assert not set(wrong)


@every_page
def test_each_setting_is_one_or_a_name_in_the_code(page: Path, words: set[str]) -> None:
    named = set()
    for code in find_code(page.read_text()):
        named.update(re.findall(r"(?<![\w.\"'$-])([A-Z][A-Z0-9_]+)=", code))
        named.update(re.findall(r"\A([A-Z][A-Z0-9]*_[A-Z0-9_]+)\Z", code))
    assert not named - words - FOREIGN


@every_page
def test_each_path_exists(page: Path) -> None:
    missing = []
    for path in PATH.findall(page.read_text()):
        pattern = re.sub(r"\b(NAME|PRESET)\b", "*", path.rstrip(".,/"))
        # a table of tests leaves out their folder
        found = list(ROOT.glob(pattern)) or list((ROOT / "tests").glob(pattern))
        if not found and not path.startswith(tuple(IGNORED)):
            missing.append(path)
    assert not missing


@every_page
def test_each_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(page.read_text()):
        linked = page.parent / target if target else page
        if not linked.exists() or (anchor and anchor not in find_anchors(linked)):
            broken.append(f"{target}#{anchor}")
    assert not broken


def find_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_each_function_is_in_its_file_and_each_module_can_be_run(page: Path) -> None:
    text = page.read_text()
    missing = []
    for path, names in FUNCTIONS.findall(text):
        source = (ROOT / path).read_text()
        for name in re.findall(r"[A-Za-z]\w*", names):
            if not re.search(rf"^ *(def|class) {name}\b|^{name}\b.* = ", source, re.MULTILINE):
                missing.append(f"{path} {name}")
    for module in re.findall(r"python3? -m ((?:\w+\.)*\w+)", text):
        path = ROOT / module.replace(".", "/")
        exists = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        if (ROOT / module.split(".")[0]).is_dir() and not exists:
            missing.append(module)
    assert not missing


def test_what_the_code_calls_a_page_is_one() -> None:
    named = set()
    for path in list_sources():
        named.update(re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(errors="replace")))
    assert len(named) > 10
    assert not [page for page in named if not (ROOT / page).is_file()]
