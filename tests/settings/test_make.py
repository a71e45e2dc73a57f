"""The Makefile: its targets, and how values reach Python, in a copy whose setup is a stub."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from settings import ROOT
from settings.config import SETTINGS
from settings.targets import DEVELOP

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE)


def copy_repository(folder, *rooms):
    """Copy rooms, and what settings need. Setup only notes that it ran, and Python is this one."""
    for name in ("settings", "presets", *rooms):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "presets" / "tiny.env").write_text("")  # so that a default is a default
    for path, text in {
        "scripts/setup.sh": '#!/bin/sh\necho "setup $*" >> setup.log\n',
        ".venv/bin/python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
    return folder


@pytest.fixture
def root(tmp_path):
    return copy_repository(tmp_path / """with blank, it's "a" $dir `touch ran` #%""")


def make(root, *arguments, **environ):
    """Run make in the copy, without this process's own settings and make variables."""
    env = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        ["make", *arguments],
        cwd=root,
        env=env | environ,
        capture_output=True,
        text=True,
        check=False,
    )


def find_value(root, name, *arguments, **environ):
    """Return a setting as `make settings` shows it."""
    done = make(root, "settings", f"NAME={name}", *arguments, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[0].removeprefix(f"{name}=").rpartition("  (")[0]


def test_finetuning_asks_for_its_model_before_anything_is_installed(root):
    done = make(root, "finetune", "DATA=chats.jsonl")
    assert "MODEL is not set; give a run of ours" in done.stderr
    assert done.returncode == 2 and not (root / "setup.log").exists()
    make(root, "finetune", "DATA=chats.jsonl", "MODEL=tiny")
    assert (root / "setup.log").read_text() == "setup --finetune\n"
    make(root, "setup-finetune")
    assert (root / "setup.log").read_text() == 2 * "setup --finetune\n"


# ---- Targets


def test_help_begins_with_the_everyday_commands_and_says_how_settings_are_given(root):
    text = make(root).stdout
    commands = re.findall(r"^  make ([a-z0-9-]+)", text, re.MULTILINE)
    assert commands[0] == "train" and "test" in commands and len(commands) <= 14
    assert set(commands) <= set(TARGETS)
    for word in ("make NAME=value", ".env", "make settings", "make help ALL=1"):
        assert word in text
    assert make(root, "help", ALL="1").stdout == make(root, "help", "ALL=1").stdout != text
    assert "Used by: make gpu-rehearsal, help." in make(root, "settings", "ALL=1").stderr


def test_help_lists_every_target_once_under_its_title(root):
    text = make(root, "help", "ALL=1").stdout
    titles = re.findall(r"^##@ (.+)$", MAKEFILE, re.MULTILINE)
    assert re.findall(r"^  ([a-z0-9-]+) +\S", text, re.MULTILINE) == TARGETS
    assert re.findall(r"^\S.*", text, re.MULTILINE) == titles
    assert re.findall(r"^\.PHONY: (\S+)$", MAKEFILE, re.MULTILINE) == TARGETS
    assert not (root / "setup.log").exists()  # help needs nothing


@pytest.mark.parametrize("target", TARGETS)
def test_make_n_names_what_exists_and_does_nothing(root, target):
    before = sorted(root.rglob("*"))
    done = make(root, "-n", target)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()
    assert sorted(root.rglob("*")) == before
    for script in re.findall(r"\bscripts/\w+\.sh", done.stdout):
        assert os.access(ROOT / script, os.X_OK), script
    for module in re.findall(r"-m ([\w.]+)", done.stdout):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    if "/bin/python" in done.stdout:
        assert done.stdout.index("scripts/setup.sh") < done.stdout.rindex("/bin/python")
    assert ("--dev" in done.stdout) == (target in DEVELOP | {"setup-dev", "gpu-check"})


def test_a_failed_setup_ends_the_target(root):
    (root / "scripts" / "setup.sh").write_text("#!/bin/sh\nexit 78\n")
    done = make(root, "settings")
    assert done.returncode != 0 and done.stdout == "" and "78" in done.stderr


def test_no_recipe_is_cut_at_a_blank_in_the_path_of_the_clone(root, tmp_path):
    (tmp_path / "with").touch()  # what a path cut at its blank would find
    assert "Not used by make help." in make(root, "help", "SEED=1").stderr
    assert make(tmp_path, "-C", str(root), "env-example").returncode == 0
    assert (root / ".env.example").read_text() == (ROOT / ".env.example").read_text()


def test_the_environment_of_another_place_serves_as_well(root, tmp_path):
    shutil.move(root / ".venv", tmp_path / "elsewhere")
    venv = str(tmp_path / "elsewhere")
    assert find_value(root, "SEED", f"VENV={venv}") == find_value(root, "SEED", VENV=venv)


OTHERS = {
    "BASH_ENV": "loud",
    "CDPATH": "/tmp",
    "GIT_DIR": "/x",
    "MAKEFLAGS": "-j8",
    "PYTHONHOME": "/x",
    "PYTHONINSPECT": "1",
    "PYTHONOPTIMIZE": "2",
    "PYTHONPATH": "other",
    "PYTHONSAFEPATH": "1",
    "PYTHONWARNINGS": "error",
}


def test_what_is_set_for_other_programs_does_not_reach_what_make_starts(root):
    (root / "loud").write_text("echo loud; exit 3\n")
    (root / "other").mkdir()
    (root / "other" / "dataclasses.py").write_text("raise SystemExit('another one')\n")
    script = "#!/bin/sh\nenv | cut -d = -f 1 > names\n"
    (root / "scripts" / "setup.sh").write_text(script)
    (root / "scripts" / "setup.sh").chmod(0o644)  # as in a zip file
    assert find_value(root, "SEED", **OTHERS) == find_value(root, "SEED")
    names = (root / "names").read_text().split()
    assert not OTHERS.keys() - {"MAKEFLAGS"} & set(names)
    assert "PYTHONDONTWRITEBYTECODE" in names


def test_targets_of_one_command_line_run_one_after_the_other(root):
    done = make(root, "-n", "setup", "train", "sample", MAKEFLAGS="-j8")
    assert done.stdout.index("scripts.train") < done.stdout.index("finetune.chat sample")
    assert ".NOTPARALLEL" in MAKEFILE


# ---- Values

VALUES = [
    "It costs $100 and $(shell touch {}) ok",
    "${{HOME}} $$ $@ $(PATH)",
    "\"double\" 'single' `touch {}` \\ # ; & | > x",
    "blanks  ",
    "two\nlines\n\nand a\ttab\n",
    "äö 你好 🎉",
    "a=b:=c+=d?=e",
    "-n -k --help",
    "x" * 10_000,
]


@pytest.mark.parametrize("template", VALUES, ids=lambda text: ascii(text[:20]))
def test_a_value_reaches_python_byte_for_byte_and_runs_nothing(root, template):
    value = template.format("ran")
    shown = value if value.isprintable() else ascii(value)
    assert find_value(root, "PROMPT", f"PROMPT={value}") == shown
    assert not (root / "ran").exists()


def test_the_command_line_wins_over_the_environment_unless_it_is_empty(root):
    (root / ".env").write_text("SEED=3\n")
    assert find_value(root, "SEED", "SEED=5", SEED="4") == "5"
    assert find_value(root, "SEED", SEED="4") == "4"
    assert find_value(root, "SEED", "SEED=", SEED="") == "3"


# ---- make settings and make check-env


def test_make_settings_lists_every_setting_and_no_secret(root):
    done = make(root, "settings", "SEED=4", HF_TOKEN="hf_secret")
    rows = re.findall(r"^  ([A-Z0-9_]+)=(.*)  \((.+)\)$", done.stdout, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(SETTINGS)
    assert ("SEED", "4", "command line") in rows
    assert ("HF_TOKEN", "(secret)", "environment") in rows
    explained = make(root, "settings", "NAME=HF_TOKEN", HF_TOKEN="hf_secret").stdout
    assert explained.startswith("HF_TOKEN=(secret)  (environment)\nHugging Face token")
    assert "\nDefault:" not in explained  # it has none
    assert "hf_secret" not in done.stdout + done.stderr + explained


def test_check_env_prints_warnings_and_then_all_problems_or_none(root):
    warning = "Warning: LEARNIN_RATE (environment) is ignored. Did you mean LEARNING_RATE?\n"
    done = make(root, "check-env", "RUN_NAME=mine", LEARNIN_RATE="1")
    valid = "The settings are valid: PRESET=tiny RUN_NAME=mine.\n"
    assert (done.stdout, done.stderr) == (warning + valid, "")
    (root / ".env").write_text("N_HEADS=4\nGRAD_CLIP=$(touch x)\n")
    done = make(root, "check-env", "SEED=-1", LEARNIN_RATE="1")
    assert done.stderr.startswith(warning + "Invalid settings:\n") and "Error 64" in done.stderr
    assert done.stderr.count("\n    ") == 3 and done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tran"], "Did you mean make train?"),
        (["settings", "tran"], "Did you mean make train?"),
        (["clean"], "delete its folder"),
        (["qqqq"], "make help"),
        (["settings", "SEED"], "make settings NAME=SEED"),
        (["settings", "name=SEED"], "Did you mean NAME?"),
        (["settings", "DRY_RUN=1"], "Not used by make settings."),
        (["settings", "NAME=MASTER_PORT"], "Did you mean MASTER_ADDR?"),
        (["settings", "NAME=BASE_IMAGE"], "It is a variable of make image"),
        (["lint", "BATCH_SIZE=8"], "Did you mean BATCH_TOKENS?"),
        (["lint", "SEQ_LEN=8"], "Not used by make lint. Used by: make"),
        (["help", "RUNS_DIR=a\n$(touch /tmp/x)"], "RUNS_DIR"),
    ],
)
def test_a_mistake_gets_a_suggestion_before_anything_starts(root, arguments, words):
    done = make(root, *arguments)
    assert done.returncode == 2 and "Error 64" in done.stderr
    assert words in done.stderr and done.stdout == ""


def test_links_to_another_disk_are_ignored_by_git(tmp_path):
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    for name in (".venv", "data", "runs"):
        (tmp_path / name).symlink_to("/nowhere")
    status = subprocess.check_output([*git, "status", "--porcelain"], text=True)
    assert status == "?? .gitignore\n"
