"""scripts/gpu_check.sh: which parts it runs, with a Python that only notes what it is asked for."""

import os
import stat
import subprocess
import sys

from tests.running import ROOT

PYTHON = f"""#!/usr/bin/env bash
[[ $1 != -c && $2 != settings ]] || exec {sys.executable} "$@"
[[ $2 != train.tune ]] || shift 2  # which becomes what follows
echo "$2 ${{BENCH_SHAPES-}} $3" >>"$NOTES"
[[ ${{BENCH_SHAPES-}} != "$FAILS" ]]
"""
SMI = "#!/bin/sh\necho one\n"


def check(folder, gpus=True, fails="none", **settings):
    """Its exit code, what it said, and what it ran."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in [("python", PYTHON), ("nvidia-smi", SMI if gpus else "#!/bin/sh\nexit 9\n")]:
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    notes, empty = folder / "notes", folder / "empty.env"
    notes.write_text("")
    empty.touch()
    env = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "HOME": str(folder),
        "VENV": str(folder),
        "NOTES": str(notes),
        "FAILS": fails,
        "ENV_FILE": str(empty),
        "PYTHONPATH": str(ROOT),
        **settings,
    }
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh"],
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout, notes.read_text().splitlines()


RUNS = "run-gpt2,run-d16,run-d24,run-xlarge"


def test_all_parts_are_run_in_turn_and_each_is_timed(tmp_path):
    code, out, ran = check(tmp_path)
    assert code == 0, out
    assert [line.split() for line in ran] == [
        ["pytest", "tests/gpu"],
        ["pytest", "tests/gpu/test_planned.py"],
        *(["bench.run", shape, "2"] for shape in ("gpt2", "d16", "d24", "xlarge")),
        ["bench.run", RUNS, "1"],
        ["bench.run", "plan,sampler,waste", "2"],
    ]
    assert out.count(" passed in ") == 8


def test_parts_can_be_asked_for_one_by_one(tmp_path):
    code, _, ran = check(tmp_path, GPU_CHECK="runs,xlarge", BENCH_SHAPES="waste")
    assert code == 0
    assert [line.split()[1:] for line in ran] == [[RUNS, "1"], ["xlarge", "2"]]
    assert [
        line.split()[1:] for line in check(tmp_path, GPU_CHECK="rest", BENCH_SHAPES="waste")[2]
    ] == [["waste", "2"]]
    code, out, ran = check(tmp_path, GPU_CHECK="d32")
    assert code == 64
    assert "GPU_CHECK=d32" in out
    assert not ran


def test_a_part_that_fails_ends_it_and_without_a_gpu_none_is_run(tmp_path):
    code, out, ran = check(tmp_path, fails="d16")
    assert code != 0
    assert len(ran) == 4
    assert "gpt2 passed" in out
    assert "d16 passed" not in out
    code, out, ran = check(tmp_path, gpus=False)
    assert code == 78
    assert out == "gpu-check: there is no GPU here (nvidia-smi)\n"
    assert not ran
