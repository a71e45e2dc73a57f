"""The launcher's bash: how many processes, with how many threads, and whose exit code."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, wait_for

STUB = """#!/usr/bin/env bash
# Stands in for .venv/bin/python: answers questions about settings, locks jobs, prints what else it is asked to run.
if [[ "$2 $3" == "train.config get" ]]; then
  for name in "${@:4}"; do echo "${!name-}"; done
  exit
fi
[[ $2 != train.status ]] || exec PYTHON "$@"
[[ -z ${WAIT-} ]] || sleep "$WAIT"
echo "threads=$OMP_NUM_THREADS run: $*"
[[ -z ${REPORT-} || -z ${EXIT_CODE_FILE-} ]] || echo "$REPORT" > "$EXIT_CODE_FILE"
exit "${CODE-0}"
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment with a stub for Python, and no GPU."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "venv" / "bin" / "python", STUB.replace("PYTHON", shlex.quote(sys.executable)))
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "VENV": str(tmp_path / "venv"), "DEVICE": "auto",
            "TMPDIR": str(tmp_path), "DETACH": "0", "RUNS_DIR": str(tmp_path / "runs"), "RUN_NAME": "x",
            "ATTENTION": "auto"}


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def launch(env: dict[str, str], script: str = "launch.sh", **changes: str) -> tuple[int, str]:
    done = subprocess.run([ROOT / "scripts" / script], env=env | changes, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30)
    return done.returncode, done.stdout


def gpus(tmp_path: Path, count: int) -> None:
    lines = "\\n".join(f"GPU {i}: NVIDIA A100 (UUID: GPU-{i})" for i in range(count))
    executable(tmp_path / "bin" / "nvidia-smi", f"#!/usr/bin/env bash\nprintf '{lines}\\n'\n")


def test_one_process_runs_the_trainer_directly_with_all_cores(env: dict[str, str]) -> None:
    cores = len(os.sched_getaffinity(0))
    for threads, changes in ((cores, {}), (1, {"OMP_NUM_THREADS": "1"})):
        code, out = launch(env, **changes)
        assert code == 0
        assert f"launch: processes=1 threads={threads}" in out
        assert out.endswith(f"threads={threads} run: -m train.main\n")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_without_gpus_large_blocks_are_kept_and_it_is_said(env: dict[str, str], tmp_path: Path) -> None:
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "THP_MEM_ALLOC_ENABLE")
    show = " ".join(f"{name}=${{{name}-}}" for name in names)
    stub = tmp_path / "venv" / "bin" / "python"
    stub.write_text(stub.read_text().replace('echo "threads', f'echo "given {show}"; echo "threads'))
    said = launch(env)[1]
    given = said.split("given ")[1].split("\n")[0]
    assert all(int(word.split("=")[1]) > 0 for word in given.split()) and f"({given})" in said
    assert f"{names[0]}=5 " in launch(env, MALLOC_MMAP_THRESHOLD_="5")[1].split("given ")[1]  # the user's own stays
    gpus(tmp_path, 1)
    assert f"given {' '.join(f'{name}=' for name in names)}\n" in launch(env)[1]


def test_all_visible_gpus_get_a_process_each(env: dict[str, str], tmp_path: Path) -> None:
    gpus(tmp_path, 3)
    assert "torch.distributed.run --standalone --nproc-per-node=3 -m train.main" in launch(env)[1]
    assert "--nproc-per-node=2 " in launch(env, CUDA_VISIBLE_DEVICES="0,2")[1]
    assert "run: -m train.main" in launch(env, CUDA_VISIBLE_DEVICES="1")[1]
    for none in ("", "-1", "NoDevFiles"):
        assert "run: -m train.main" in launch(env, CUDA_VISIBLE_DEVICES=none)[1]
        assert launch(env, "train.sh", CUDA_VISIBLE_DEVICES=none, DEVICE="cuda")[0] == 64
    assert "--nproc-per-node=2 " in launch(env, CUDA_VISIBLE_DEVICES="0,1,-1,2")[1]
    assert "run: -m train.main" in launch(env, DEVICE="cpu")[1]
    assert "--nproc-per-node=5 " in launch(env, NPROC="5")[1]


def test_the_code_that_the_trainer_reported_beats_that_of_torchrun(env: dict[str, str], tmp_path: Path) -> None:
    assert launch(env, NPROC="2", CODE="1", REPORT="78")[0] == 78
    assert launch(env, NPROC="2", CODE="0", REPORT="75")[0] == 75
    assert launch(env, NPROC="2", CODE="1", REPORT="75?")[0] == 1  # it may be torchrun that stopped a rank
    assert launch(env, NPROC="2", CODE="1")[0] == 1
    assert launch(env, CODE="64")[0] == 64
    assert not list(tmp_path.glob("exit-code*"))


def test_a_recipe_for_gpus_stops_at_once_where_there_are_none(env: dict[str, str], tmp_path: Path) -> None:
    code, out = launch(env, "train.sh", DEVICE="cuda")
    assert code == 64 and "DEVICE=cuda: there is no GPU here" in out and "run:" not in out
    gpus(tmp_path, 1)
    code, out = launch(env, "train.sh", DEVICE="cuda")
    assert code == 0
    stages = [line.split("run: ")[1] for line in out.splitlines() if "run: " in line]
    assert stages == ["-m train.prepare", "-m train.main", "-m analysis.plots"]


def test_a_failing_stage_ends_the_job_with_its_code(env: dict[str, str]) -> None:
    code, out = launch(env, "train.sh", CODE="78")
    assert code == 78 and out.count("run:") == 1


def test_a_detached_run_outlives_the_shell_that_started_it(env: dict[str, str], tmp_path: Path) -> None:
    shell = subprocess.run(["bash", "-c", f"'{ROOT}'/scripts/train.sh; kill -HUP $$"], text=True, check=False,
                           stdout=subprocess.PIPE, env=env | {"DETACH": "1", "RUNS_DIR": str(tmp_path), "WAIT": "1"})
    assert shell.returncode == -1 and "make attach" in shell.stdout and "run:" not in shell.stdout
    wait_for(tmp_path / "x" / "console.log", "run: -m analysis.plots", seconds=20)


def test_a_second_detached_start_is_refused_and_leaves_the_log_alone(env: dict[str, str], tmp_path: Path) -> None:
    env |= {"DETACH": "1", "RUNS_DIR": str(tmp_path)}
    code, out = launch(env, "train.sh", WAIT="1")
    assert code == 0 and "in the background" in out
    code, out = launch(env, "train.sh")
    assert code == 78 and re.search(r"run x is at work already \((pid |it has just begun)", out)
    assert launch(env, "train.sh", DETACH="0")[0] == 78
    wait_for(tmp_path / "x" / "console.log", "run: -m analysis.plots", seconds=20)
    log = (tmp_path / "x" / "console.log").read_text()
    assert log.count("run: -m train.prepare") == 1 and "\0" not in log


def test_detaching_needs_no_setsid_and_no_certain_folder(env: dict[str, str], tmp_path: Path) -> None:
    for name in ("bash", "cat", "dirname", "grep", "mkdir", "nohup", "nproc", "sed", "sleep", "tr"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    env |= {"DETACH": "1", "RUNS_DIR": str(tmp_path), "PATH": str(tmp_path / "bin")}
    done = subprocess.run(["bash", "train.sh"], env=env, cwd=ROOT / "scripts", text=True, check=False,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    wait_for(tmp_path / "x" / "console.log", "run: -m analysis.plots", seconds=20)


def test_a_job_that_prepares_data_is_known_to_status_and_stopped_by_stop(env: dict[str, str], tmp_path: Path) -> None:
    def of(command: str) -> str:
        return subprocess.run([sys.executable, "-m", "train.status", command], env=env, cwd=ROOT, text=True, check=True,
                              capture_output=True, timeout=30).stdout

    job = subprocess.Popen([ROOT / "scripts" / "train.sh"], env=env | {"WAIT": "60"}, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "runs" / "x" / ".job", "preparing data", seconds=20)
    assert of("status").split() == ["x", "preparing", "data"] and of("runs") == of("status")
    assert of("stop").split() == ["x", "not", "started"]
    assert job.wait(10) == 75
    assert of("runs").startswith("no runs in")
