"""`used_by` against the settings that the processes of a target really read (tests/site/reads.py)."""

import ast
import os
import shlex
import subprocess

import pytest

from settings import ROOT
from settings.config import SETTINGS
from settings.targets import FIND
from tests.constants import SITE
from tests.running import environment

# Target -> the settings that it is run with, in this order, on one run.
COMMANDS: list[tuple[str, dict[str, str]]] = [
    ("plan", {}),
    ("doctor", {}),
    ("data", {}),
    ("data-verify", {}),
    ("train", {"MAX_STEPS": "3", "SAVE_EVERY": "2"}),
    ("status", {}),
    ("runs", {}),
    ("checkpoints", {}),
    ("logs", {}),
    ("monitor", {"ONCE": "1"}),
    ("plots", {}),
    ("energy", {}),
    ("mirror", {}),
    ("sample", {"PROMPT": "def", "SAMPLE_TOKENS": "4"}),
    ("eval", {"CORE_BUNDLE": "none"}),
    ("export", {}),
    ("data-report", {"CORE_BUNDLE": "none"}),
    ("stop", {}),
    ("attach", {}),
]


# These treat all settings alike: to combine those of a run and a command, or to list them.
GENERIC = ("load_run.py:settings_for_use:", "load_run.py:<dictcomp>:", "card.py:<listcomp>:")
# Read, but without an effect there.
HARMLESS = {
    "make train reads CHECKPOINT_MODE",  # needs LORA_RANK>0
    "make eval reads GRACE_PERIOD_S",  # the launcher of an evaluation, which saves nothing
    "make eval reads MAX_RESTARTS",  # and is never started again
    "make runs reads RUN_NAME",  # whose folder is next to the others
    "make plan reads NODE_RANK",  # of a site whose run left out near-duplicates: the first
    # what is exported must be what the run has
    "make eval reads DATA_MIX",
    "make sample reads DATA_MIX",
    "make export reads DATA_MIX",
}


def read_settings(target, environ, folder):
    """Run a target, and return the settings that its processes read, with the place of each."""
    folder.mkdir()
    path = os.pathsep.join([str(SITE), environ.get("PYTHONPATH", "")])
    # make does not pass on the user's PYTHONPATH: with -e, this Python has one.
    python = f'env PYTHONPATH={shlex.quote(path)} "$VENV/bin/python"'
    subprocess.run(
        ["make", "-e", target],
        cwd=ROOT,
        env={**environ, "PY": python.replace("$", "$$"), "RECORD_READS": str(folder)},
        capture_output=True,
        check=False,
    )
    lines = [line for file in folder.iterdir() for line in file.read_text().splitlines()]
    assert lines, f"make {target} read no setting"
    return dict(line.split(" ", 1) for line in lines)


@pytest.mark.slow
def test_a_target_reads_what_it_is_declared_to_use(tmp_path, data):
    """Also what a process only passes on counts as read, apart from code that treats all alike."""
    wrong = {}
    for target, settings in COMMANDS:
        environ = environment(tmp_path, data, **settings)
        found = read_settings(target, environ, tmp_path / f"reads-{target}")
        for name, place in found.items():
            is_generic = "/tests/" in place or any(part in place for part in GENERIC)
            is_generic |= SETTINGS[name].finds_run and target in FIND
            if target not in SETTINGS[name].used_by and not is_generic:
                wrong[f"make {target} reads {name}"] = place
    assert wrong.keys() - HARMLESS == set(), wrong


def test_each_setting_is_read_somewhere():
    """By its name as an attribute."""
    attributes = set()
    for path in [*ROOT.glob("*/*.py"), *ROOT.glob("*/*/*.py"), *ROOT.glob("*/*/*/*.py")]:
        if path.parts[len(ROOT.parts)] in ("tests", ".venv"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                attributes.add(node.attr.upper())
    # A shell script reads it by name.
    assert SETTINGS.keys() - attributes == {"GPU_CHECK"}
