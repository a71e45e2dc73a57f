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
from settings.targets import DEFAULTS
from tests.house.pages import FENCED

README = (ROOT / "README.md").read_text()
LINKS = re.compile(r"\]\(([^)#]+)")
JOURNEY = re.compile(
    r"^\| .* \| `make (\S+) (PRESET=.*?|SYNC=.*?)` \| .* \| (\d+) hours", re.MULTILINE
)
# What a cluster's launcher derives for SYNC=diloco, and make plan is told.
FOUR_SITES = {"SITES": "4", "PARALLEL": "fsdp"}


def test_the_readme_can_be_read_in_three_minutes() -> None:
    text = re.sub(r"!\[.*?\]\(.*?\)", "", README)
    text = re.sub(r"\]\(.*?\)", "]", text)
    assert 600 <= len([word for word in text.split() if re.search(r"\w", word)]) <= 800


@pytest.mark.parametrize(
    ("page", "folder"), [("README.md", ROOT), ("docs/README.md", ROOT / "docs")]
)
def test_every_page_can_be_reached(page: str, folder: Path) -> None:
    linked = {(folder / link).resolve() for link in LINKS.findall((ROOT / page).read_text())}
    pages = {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "docs/decisions/README.md"}
    assert pages - linked == {ROOT / page}


def test_the_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert len(pictures) == 2
    assert all((ROOT / picture).stat().st_size > 5_000 for picture in pictures)


def test_the_reference_lists_every_preset_and_every_file_of_a_run() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    presets = re.findall(r"^\| `([\w.-]+)` \|", text.partition("## Presets")[2], re.MULTILINE)
    assert set(presets) == {path.stem for path in ROOT.glob("presets/*.env")}
    paths = [path.name for path in vars(RunPaths(Path("run"))).values() if isinstance(path, Path)]
    files = [name for name in paths if not name.startswith(".") and name != "run"]
    assert len(files) > 10
    missing = [name for name in files if name not in text]
    assert set(missing) <= {"producer.log", "gpu_sampler.log"}  # in logs/


def test_the_hours_of_a_journey_are_those_of_its_plan() -> None:
    journeys = JOURNEY.findall(README)
    assert len(journeys) == 3
    for target, settings, hours in journeys:
        environ = DEFAULTS.get(target, {}) | dict(word.split("=") for word in settings.split())
        environ |= FOUR_SITES if "SYNC" in environ else {}
        environ |= {"MAKE_TARGET": "plan", "JSON": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "plan"],
            cwd=ROOT,
            env=os.environ | environ,
            capture_output=True,
            text=True,
            check=True,
        )
        assert round(json.loads(done.stdout)["time"]["total_seconds"] / 3600) == int(hours), (
            settings
        )


@pytest.mark.slow
def test_the_first_commands_run_in_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    # the packages of this checkout, and a thirtieth of the steps
    environ = os.environ | {"VENV": str(Path(sys.prefix)), "MAX_STEPS": "40"}
    for command in FENCED.findall(README)[0].splitlines():
        done = subprocess.run(
            command, shell=True, cwd=clone, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert done.stdout
    assert (clone / "runs/tiny/plots/loss_curves.html").is_file()
