"""The Makefile in a copy of the repository whose setup is a stub: its targets, and how settings reach them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from settings import ROOT
from settings.cli import write_env_example
from settings.config import SETTINGS

SETUP = '#!/usr/bin/env bash\necho "setup $*" >> setup.log\n'


def copy_of_repository(folder: Path) -> Path:
    """What make needs of it, with a setup that does nothing and this interpreter in the place of .venv's."""
    for name in (
        "settings",
        "record",
        "hardware",
        "scripts",
        "train",
        "finetune",
        "monitor",
        "k8s",
        "presets",
        "export",
        "plan",
    ):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "scripts" / "setup.sh").write_text(SETUP)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = copy_of_repository(tmp_path / "copy")
    (folder / "presets" / "tiny.env").write_text("")  # so that a default is a default
    return folder


def make(root: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """make in the copy, with none of this process's own settings or make variables."""
    env = {"PATH": os.environ["PATH"], "HOME": str(root), "PYTHONDONTWRITEBYTECODE": "1", **environ}
    return subprocess.run(
        ["make", *arguments], cwd=root, env=env, capture_output=True, text=True, check=False
    )


def setting(root: Path, name: str, *arguments: str, **environ: str) -> str:
    """The value of a setting as `make settings` shows it."""
    done = make(root, "settings", *arguments, **environ)
    assert done.returncode == 0, done.stderr
    return dict(shown(done.stdout))[name]


def shown(text: str) -> list[tuple[str, str]]:
    """Each setting that `make settings` lists, and its value."""
    return re.findall(r"^  ([A-Z0-9_]+)=(.*)  \(.+\)$", text, re.MULTILINE)


def listed(root: Path) -> list[str]:
    return re.findall(r"^  ([a-z0-9-]+) +\S", make(root, "help").stdout, re.MULTILINE)


TARGETS = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


# ---- The targets


def test_help_lists_every_target_once_with_a_line_of_help(root: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = [
        name
        for names in re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
        for name in names.split()
    ]
    assert len(TARGETS) > 10
    assert listed(root) == TARGETS == phony
    assert make(root).stdout == make(root, "help").stdout
    assert not (root / "setup.log").exists()  # help needs nothing


def test_help_groups_its_lines_under_titles(root: Path) -> None:
    titles = re.findall(r"^##@ (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [
        line for line in make(root, "help").stdout.splitlines() if line and line[0] != " "
    ] == titles


@pytest.mark.parametrize("target", TARGETS)
def test_a_dry_run_names_what_is_there_and_does_nothing(root: Path, target: str) -> None:
    before = sorted(root.rglob("*"))
    done = make(root, "-n", target)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.strip()
    assert sorted(root.rglob("*")) == before
    for script in re.findall(r"\bscripts/\w+\.sh", done.stdout):
        assert os.access(ROOT / script, os.X_OK), script
    for module in re.findall(r"-m ([\w.]+)", done.stdout):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    if "/bin/python" in done.stdout:
        assert done.stdout.index("scripts/setup.sh") < done.stdout.index("/bin/python")


def test_a_failed_setup_ends_the_target(root: Path) -> None:
    (root / "scripts" / "setup.sh").write_text("#!/usr/bin/env bash\nexit 78\n")
    done = make(root, "settings")
    assert done.returncode != 0 and done.stdout == "" and "78" in done.stderr


def test_the_tests_and_linters_ask_for_what_only_they_need(root: Path) -> None:
    for target in ("test", "test-faults", "lint", "lock"):
        assert "scripts/setup.sh --dev" in make(root, "-n", target).stdout
    assert "--dev" not in make(root, "-n", "train").stdout


# ---- How a setting reaches a target


def test_make_wins_over_environment_over_env_file_over_preset_over_default(root: Path) -> None:
    assert setting(root, "SEED") == "1337"
    (root / "presets" / "tiny.env").write_text("SEED=2\n")
    assert setting(root, "SEED") == "2"
    (root / ".env").write_text("SEED=3\n")
    assert setting(root, "SEED") == "3"
    assert setting(root, "SEED", SEED="4") == "4"
    assert setting(root, "SEED", "SEED=5", SEED="4") == "5"
    assert setting(root, "SEED", "SEED=5") == "5"


def test_an_empty_value_leaves_the_word_to_the_source_below(root: Path) -> None:
    (root / ".env").write_text("SEED=3\n")
    assert setting(root, "SEED", "SEED=") == "3"
    assert setting(root, "SEED", SEED="") == "3"


def test_preset_and_env_file_are_chosen_on_the_command_line(root: Path) -> None:
    (root / "presets" / "other.env").write_text("N_LAYER=2\n")
    (root / "mine.env").write_text("SEED=9\n")
    assert setting(root, "N_LAYER", "PRESET=other") == "2"
    assert setting(root, "RUN_NAME", "PRESET=other") == "other"
    assert setting(root, "SEED", "ENV_FILE=mine.env") == "9"
    assert setting(root, "SEED", ENV_FILE="mine.env") == "9"


def test_make_settings_shows_every_setting_and_no_secret(root: Path) -> None:
    done = make(root, "settings", HF_TOKEN="hf_secret")
    assert [name for name, _ in shown(done.stdout)] == list(SETTINGS)
    assert dict(shown(done.stdout))["HF_TOKEN"] == "(secret)"
    assert "hf_secret" not in done.stdout + done.stderr
    done = make(root, "settings", "NAME=HF_TOKEN", HF_TOKEN="hf_secret")
    assert done.returncode == 0 and "hf_secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("target", ["check-env", "settings", "runs", "status"])
def test_an_unknown_name_on_the_command_line_is_refused_with_the_nearest(
    root: Path, target: str
) -> None:
    done = make(root, target, "LEARNIN_RATE=1")
    assert done.returncode != 0 and done.stdout == ""
    assert (
        "LEARNIN_RATE (command line): There is no such setting. Did you mean LEARNING_RATE?"
        in done.stderr
    )
    assert "Error 64" in done.stderr


def test_an_unknown_name_in_the_environment_is_remarked_on(root: Path) -> None:
    done = make(root, "check-env", LEARNIN_RATE="1", SEED="4")
    assert done.returncode == 0
    assert (
        "Warning: LEARNIN_RATE (environment) is ignored. Did you mean LEARNING_RATE?\n"
        in done.stdout
    )
    assert "  SEED=4  (environment)\n" in make(root, "settings", SEED="4").stdout


def test_check_env_tells_all_problems_of_all_sources(root: Path) -> None:
    (root / ".env").write_text("N_HEADS=4\nGRAD_CLIP='1'\n")
    done = make(root, "check-env", "SEED=-1", LEARNING_RATE="nan")
    assert "Error 64" in done.stderr
    assert done.stderr.count("\n    ") == 4
    for words in (
        "SEED=-1 (command line)",
        "LEARNING_RATE=nan (environment)",
        ".env line 1",
        ".env line 2",
    ):
        assert words in done.stderr


def test_check_env_says_that_all_is_well(root: Path) -> None:
    done = make(root, "check-env", "MAX_STEPS=30", "RUN_NAME=mine")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == "The settings are valid: PRESET=tiny RUN_NAME=mine.\n"


def test_make_itself_reads_no_env_file(root: Path) -> None:
    """What include or source would run is refused as text."""
    (root / ".env").write_text("SEED=$(shell touch by-make)\nN_LAYER=`touch by-shell`\n")
    done = make(root, "check-env")
    assert "Error 64" in done.stderr and done.stderr.count("\n    ") == 2
    assert not (root / "by-make").exists() and not (root / "by-shell").exists()


def test_a_value_with_blanks_arrives_as_it_was_written(root: Path) -> None:
    done = make(root, "check-env", "RUN_NAME=a b'c")
    assert "RUN_NAME=a b'c (command line): Must be" in done.stderr


def test_the_environment_of_another_place_serves_as_well(root: Path, tmp_path: Path) -> None:
    shutil.move(root / ".venv", tmp_path / "elsewhere")
    assert setting(root, "SEED", f"VENV={tmp_path / 'elsewhere'}") == "1337"
    assert setting(root, "SEED", VENV=str(tmp_path / "elsewhere")) == "1337"


def test_a_blank_in_the_path_of_the_clone_does_no_harm(tmp_path: Path) -> None:
    blank = copy_of_repository(tmp_path / "with blank")
    for target in ("check-env", "settings", "runs", "env-example"):
        done = make(blank, target)
        assert done.returncode == 0, done.stderr
    (tmp_path / "with").touch()  # what a path cut at its blank would find
    done = make(blank, "help", "SEED=1")
    assert "Not used by make help." in done.stderr and "Error 64" in done.stderr
    bare = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if "$(PY)" in line.replace('"$(PY)"', "")
    ]
    assert bare == []


def test_from_another_folder_it_is_the_same(root: Path, tmp_path: Path) -> None:
    assert make(tmp_path, "-C", str(root), "check-env").returncode == 0


def test_what_is_linked_from_another_disk_is_ignored_too(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, env=env, check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    for name in (".venv", "data", "runs"):
        (tmp_path / name).symlink_to("/nowhere")
    shown = subprocess.run(
        ["git", "status", "--porcelain"],
        cwd=tmp_path,
        env=env,
        check=True,
        text=True,
        capture_output=True,
    ).stdout
    assert shown == "?? .gitignore\n"


def test_env_example_is_written_from_the_declaration(root: Path) -> None:
    assert make(root, "env-example").returncode == 0
    assert (root / ".env.example").read_text() == write_env_example() + "\n"
