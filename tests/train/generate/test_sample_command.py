"""make sample as a user's shell calls it: text on standard output alone, and its exit code."""

import subprocess

import pytest

from tests.settings.test_make import copy_repository, make
from tests.train.generate.test_load_run import Run, run  # noqa: F401  (a fixture)

ASKED = ("RUN_NAME=a-run", "SAMPLE_TOKENS=6", "SAMPLE_TEMPERATURE=0", "DEVICE=cpu", "DTYPE=float32")


@pytest.fixture
def root(run, tmp_path):  # noqa: F811
    """A copy of the repository in which a run was trained."""
    folder = copy_repository(tmp_path / "copy", "record", "hardware", "train")
    (folder / "runs").mkdir()
    run.folder.rename(folder / "runs" / "a-run")
    return folder


def test_the_text_comes_from_a_setting_or_a_pipe_and_is_all_there_is_on_standard_output(root):
    done = make(root, "sample", *ASKED, "PROMPT=abcd efgh")
    assert done.returncode == 0
    assert done.stdout.startswith("abcd efgh")
    assert "tokens/s" in done.stderr
    piped = subprocess.run(
        ["make", "sample", *ASKED],
        cwd=root,
        input="abcd efgh\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (piped.returncode, piped.stdout) == (0, done.stdout)
    cut = subprocess.run(
        f"make sample PROMPT=abcd {' '.join(ASKED)} | head -c 2; exit ${{PIPESTATUS[0]}}",
        cwd=root,
        shell=True,
        executable="bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (cut.returncode, cut.stdout) == (0, "ab")
    assert "Traceback" not in cut.stderr
    reply = make(root, "chat", *ASKED, "PROMPT=abcd efgh")
    assert reply.returncode == 0
    assert not reply.stdout.startswith("abcd efgh")


def test_a_bad_setting_and_a_run_that_is_not_there_are_said_in_a_sentence(root):
    done = make(root, "sample", "RUN_NAME=a-run", "SAMPLE_TOP_P=0")
    assert "SAMPLE_TOP_P=0 (command line): Must be a number above 0" in done.stderr
    assert "Error 64" in done.stderr
    assert done.stdout == ""
    done = make(root, "sample", "RUN_NAME=other")
    assert "there is no such run in runs. Its runs: a-run. Choose" in done.stderr
    assert "Error 78" in done.stderr


def test_the_folder_is_left_as_it_was(root):
    before = {path: path.stat().st_mtime_ns for path in (root / "runs").rglob("*")}
    assert make(root, "sample", *ASKED, "PROMPT=a").returncode == 0
    assert {path: path.stat().st_mtime_ns for path in (root / "runs").rglob("*")} == before
