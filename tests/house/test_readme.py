"""The README is short, leads to every page, and its commands and figures are true."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from record.run_paths import RunPaths
from settings import ROOT
from settings.targets import TARGET_DEFAULTS
from tests.house.pages import FENCED
from tests.house.pictures import draw_terminal

README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()
PICTURE = re.compile(r"!\[[^]]+\]\(([^)]+)\)")
LINKS = re.compile(r"\]\(([^)#]+)")
JOURNEY = re.compile(
    r"^\| .* \| `make (\S+) (PRESET=.*?|SYNC=.*?)` \| .* \| (\d+) hours", re.MULTILINE
)
# A thirtieth of the steps, and less to evaluate; threads that wait do not spin.
SHORTENED = {"MAX_STEPS": "40", "EVAL_TOKENS": "1024", "OMP_WAIT_POLICY": "PASSIVE"}
# What a cluster's launcher derives for SYNC=diloco, and make plan is told.
FOUR_SITES = {"SITES": "4", "PARALLEL": "fsdp"}


def test_the_readme_can_be_read_in_three_minutes() -> None:
    prose = PICTURE.sub("", README)
    prose = re.sub(r"\]\(.*?\)", "]", prose)
    words = 0
    for word in prose.split():
        if re.search(r"\w", word):  # the bars of tables are none
            words += 1
    assert 600 <= words <= 800


@pytest.mark.parametrize("page", ["README.md", "docs/README.md"])
def test_every_page_can_be_reached(page: str) -> None:
    index = ROOT / page
    linked = {index}
    for link in LINKS.findall(index.read_text()):
        target = index.parent / link
        linked.add(target.resolve())
    pages = {
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "docs/decisions/README.md",
    }
    assert not pages - linked


def test_the_pictures_are_there() -> None:
    pictures = PICTURE.findall(README)
    assert len(pictures) == 2
    for picture in pictures:
        assert (ROOT / picture).stat().st_size > 5_000


def test_the_terminal_cuts_no_underscore_off(tmp_path: Path) -> None:
    draw_terminal(["make train RUN_NAME=longer TRAIN_TOKENS=8M"], tmp_path / "terminal.svg")
    for path in (tmp_path / "terminal.svg", ROOT / "docs/first-run-terminal.svg"):
        svg = path.read_text()
        assert "TRAIN_TOKENS=8M" in svg
        assert "clip" not in svg


def test_the_first_screen_has_the_two_commands_with_what_they_do_and_take() -> None:
    beginning = README.partition("![")[0]
    assert FENCED.findall(beginning) == ["make train\nmake test\n"]
    for command in ("make train", "make test"):
        assert re.search(rf"^\| `{command}` \| .+ \| .*\d+:\d\d.* \|$", beginning, re.MULTILINE)
    assert "two quiet cores of an AMD EPYC" in beginning


def test_the_reference_lists_every_preset() -> None:
    section = REFERENCE.partition("## Presets")[2]
    listed = re.findall(r"^\| `([\w.-]+)` \|", section, re.MULTILINE)
    presets = [path.stem for path in ROOT.glob("presets/*.env")]
    assert sorted(listed) == sorted(presets)


def test_the_reference_lists_every_file_of_a_run() -> None:
    paths = RunPaths(Path("run"))
    missing = set()
    for path in vars(paths).values():
        if not isinstance(path, Path) or path == paths.folder:
            continue
        if not path.name.startswith(".") and path.name not in REFERENCE:
            missing.add(path.name)
    assert missing <= {"producer.log", "gpu_sampler.log"}  # these are in logs/


def test_the_hours_of_a_journey_are_those_of_its_plan(tmp_path: Path) -> None:
    journeys = JOURNEY.findall(README)
    assert len(journeys) == 3
    for target, settings, hours in journeys:
        (tmp_path / "empty.env").touch()
        environ = {"PATH": os.environ["PATH"], "ENV_FILE": str(tmp_path / "empty.env")}
        environ |= TARGET_DEFAULTS.get(target, {})
        for setting in settings.split():
            name, value = setting.split("=")
            environ[name] = value
        if "SYNC" in environ:
            environ |= FOUR_SITES
        environ |= {"MAKE_TARGET": "plan", "JSON": "1"}
        printed = subprocess.check_output(
            [sys.executable, "-m", "plan"],
            cwd=ROOT,
            env=environ,
        )
        planned_s = json.loads(printed)["time"]["total_seconds"]
        assert round(planned_s / 3600) == int(hours)


@pytest.mark.slow
def test_the_first_commands_run_in_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    kept = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    environ |= SHORTENED | {"WANDB_MODE": "disabled"}
    environ["VENV"] = sys.prefix  # with the packages of this checkout
    sample = FENCED.findall(README)[1].splitlines()[0]
    assert sample.startswith("make sample ")
    for command in ("make train", sample):
        printed = subprocess.check_output(
            command,
            shell=True,
            cwd=clone,
            env=environ,
            text=True,
            timeout=250,
        )
        assert printed
    assert (clone / "runs/tiny/plots/loss_curves.html").is_file()
