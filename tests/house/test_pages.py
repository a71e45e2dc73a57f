"""Every page of the documentation names what exists."""

import re
from pathlib import Path

import pytest

from finetune import tuning_settings
from settings import ROOT
from settings.config import SETTINGS
from settings.resolve import resolve
from settings.targets import VARIABLES
from tests.house.pages import PAGES, find_code, list_sources, name_page

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):.*##", MAKEFILE, re.MULTILINE))
TARGET = re.compile("[a-z][a-z0-9-]*")
COMMAND = re.compile(r"\bmake((?: (?:[A-Z_]+=[^\s;|&#`]+|[a-z-][a-z0-9-]*))+)")

WITH_SETTINGS = re.compile(
    r"^ *((?:[A-Z_]+=\S+ )*)(?:make |\S*python3? -m (?P<module>[\w.]+))(?P<words>[^#;|&\n]*)",
    re.MULTILINE,
)
VALUE = re.compile(r"""([A-Z][A-Z0-9_]*)=("[^"]*"|'[^']*'|\S*)""")
# A placeholder, a variable of bash, or a folder that is compared with the settings.
NOT_A_VALUE = re.compile(r"\.\.|\$|^n?$|^NAME$")
BY_LAUNCHER = {"SITES", "PARALLEL"}  # which a cluster's launcher derives

CAPITALS = re.compile("[A-Z][A-Z0-9_]+")
SETTING = re.compile("[A-Z][A-Z0-9]*_[A-Z0-9_]+")
ASSIGNED = re.compile(r"(?<![\w.\"'$-])([A-Z][A-Z0-9_]+)=")
FOREIGN = {"NO_COLOR"}  # read by rich

GITIGNORE = (ROOT / ".gitignore").read_text()
IGNORED = tuple(line.lstrip("/") for line in GITIGNORE.split())
FOLDERS = "|".join({path.parent.name for path in ROOT.glob("[a-z]*/*")})
PATH = re.compile(rf"(?<![\w/.~-])(?:{FOLDERS})/(?:[\w./*-]*/|[\w/*-]*\.\w+)")
PLACEHOLDER = re.compile(r"\b(NAME|PRESET)\b")

LINK = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")
FUNCTIONS = re.compile(r"`((?:\w+/)+\w+\.py)`((?:,? `[\w.]+(?<!\.py)`)+)")
MODULE = re.compile(r"python3? -m ((?:\w+\.)*\w+)")

every_page = pytest.mark.parametrize("page", PAGES, ids=name_page)


@pytest.fixture(scope="module")
def names() -> set[str]:
    """The names in capitals of all sources."""
    found = {*SETTINGS, *VARIABLES}
    for path in list_sources():
        text = path.read_text(errors="replace")
        found.update(CAPITALS.findall(text))
    return found


@every_page
def test_each_make_command_has_a_target_that_uses_its_settings(page: Path) -> None:
    wrong = []
    for code in find_code(page.read_text()):
        for command in COMMAND.findall(code):
            words = command.split()
            target = next(filter(TARGET.fullmatch, words), None)
            if target and target not in TARGETS:
                wrong.append(target)
            for name in ASSIGNED.findall(command):
                setting = SETTINGS.get(name)
                if target and setting and target not in setting.used_by:
                    wrong.append(f"{target} {name}")
    assert not wrong


NO_RUNS = "no-such-folder"  # somebody may have run the commands of the pages here
OF_NOBODY = {"ENV_FILE": "of-nobody", "RUNS_DIR": NO_RUNS}


@every_page
def test_each_command_has_settings_that_it_accepts(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = []
    for command in WITH_SETTINGS.finditer("\n".join(find_code(page.read_text()))):
        values = {name: value.strip("'\"") for name, value in VALUE.findall(command[0])}
        if not values or "INIT_FROM" in values or any(map(NOT_A_VALUE.search, values.values())):
            continue
        if command["module"] and command["module"].startswith("finetune"):
            with monkeypatch.context() as environ:
                environ.setenv("RUNS_DIR", NO_RUNS)
                for name, value in values.items():
                    environ.setenv(name, value)
                tuning_settings.load_settings()
            continue
        target = next((word for word in command["words"].split() if word in TARGETS), "")
        if target:
            typed = VALUE.findall(command["words"])
            values |= {"MAKE_TARGET": target, "MAKE_SETTINGS": " ".join(name for name, _ in typed)}
        for problem in resolve(values, defaults=OF_NOBODY).problems:
            is_derived = problem.partition("=")[0] in BY_LAUNCHER and "diloco" in problem
            if not is_derived:
                problems.append(f"{command[0].strip()}: {problem}")
    assert not problems


@every_page
def test_each_setting_is_one_or_a_name_in_the_code(page: Path, names: set[str]) -> None:
    mentioned = set()
    for code in find_code(page.read_text()):
        mentioned.update(ASSIGNED.findall(code))
        if SETTING.fullmatch(code):
            mentioned.add(code)
    assert not mentioned - names - FOREIGN


@every_page
def test_each_path_exists(page: Path) -> None:
    missing = []
    for path in PATH.findall(page.read_text()):
        if path.startswith(IGNORED):
            continue
        pattern = PLACEHOLDER.sub("*", path).rstrip("/")
        found = list(ROOT.glob(pattern))
        # a table of tests leaves out their folder
        found += (ROOT / "tests").glob(pattern)
        if not found:
            missing.append(path)
    assert not missing


@every_page
def test_each_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(page.read_text()):
        linked = page
        if target:
            linked = page.parent / target
        if not linked.exists():
            broken.append(target)
        elif anchor and anchor not in find_anchors(linked):
            broken.append(f"{target}#{anchor}")
    assert not broken


def find_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_each_function_is_in_its_file(page: Path) -> None:
    missing = []
    for path, functions in FUNCTIONS.findall(page.read_text()):
        source = (ROOT / path).read_text()
        for name in re.findall(r"[A-Za-z]\w*", functions):
            definition = rf"^ *(def|class) {name}\b|^{name}\b.* = "
            if not re.search(definition, source, re.MULTILINE):
                missing.append(f"{path} {name}")
    assert not missing


@every_page
def test_each_module_can_be_run(page: Path) -> None:
    missing = []
    for module in MODULE.findall(page.read_text()):
        path = ROOT / module.replace(".", "/")
        room = ROOT / module.split(".")[0]
        candidates = [path.with_suffix(".py"), path / "__main__.py"]
        if room.is_dir() and not any(file.is_file() for file in candidates):
            missing.append(module)
    assert not missing


def test_what_the_code_calls_a_page_is_one() -> None:
    mentioned = set()
    for path in list_sources():
        text = path.read_text(errors="replace")
        mentioned.update(re.findall(r"\bdocs/[\w/-]+\.md\b", text))
    assert len(mentioned) > 10
    for page in mentioned:
        assert (ROOT / page).is_file(), page


def test_the_patterns_match_what_pages_hold() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    for pattern in (COMMAND, WITH_SETTINGS, ASSIGNED, PATH, LINK, FUNCTIONS, MODULE):
        assert len(pattern.findall(text)) > 10, pattern
