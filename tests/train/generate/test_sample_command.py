"""make sample as a user's shell calls it: text on standard output alone, and its exit code."""

import subprocess

from tests.settings.test_make import copy_repository, make
from tests.train.generate.test_load_run import Run, run  # noqa: F401  (a fixture)

ASKED = ("RUN_NAME=a-run", "SAMPLE_TOKENS=6", "SAMPLE_TEMPERATURE=0", "DEVICE=cpu", "DTYPE=float32")


def test_the_text_is_all_there_is_on_standard_output_and_the_run_is_left_as_it_was(run, tmp_path):  # noqa: F811
    root = copy_repository(
        tmp_path / "copy", "record", "hardware", "train", "finetune", "export", "analysis"
    )
    (root / "runs").mkdir()
    run.folder.rename(root / "runs" / "a-run")
    before = {path: path.stat().st_mtime_ns for path in (root / "runs").rglob("*")}
    done = make(root, "sample", *ASKED, "PROMPT=abcd efgh")
    assert done.returncode == 0
    assert done.stdout.startswith("abcd efgh")
    assert "tokens/s" in done.stderr
    command = f"printf 'abcd efgh\n' | make sample {' '.join(ASKED)} | head -c 2"
    cut = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (cut.returncode, cut.stdout) == (0, "ab")
    assert "Traceback" not in cut.stderr
    refused = make(root, "sample", "RUN_NAME=other")
    assert "There is no run other in " in refused.stderr
    assert "Error 78" in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in (root / "runs").rglob("*")} == before
