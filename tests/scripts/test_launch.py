"""The launcher's bash: how many processes, with how many threads, and whose exit code."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.running import ROOT, wait_for

STUB = """#!/usr/bin/env bash
# Stands in for .venv/bin/python: answers questions about settings, locks jobs, prints what else it is asked to run.
if [[ "$2 $3" == "settings.config get" ]]; then
  RUN_FOLDER=$RUNS_DIR/$RUN_NAME SITE_NODES=$NODES RANK_IN_SITE=$NODE_RANK SYNC=${SYNC-ddp}  # as Config has them
  for name in "${@:4}"; do echo "${!name-}"; done
  exit
fi
[[ $2 != record.status && "$*" != "-m doctor.before_run" ]] || exec PYTHON "$@"
[[ -z ${PAUSE-} ]] || sleep "$PAUSE"
[[ -z ${GATE-} ]] || for _ in {1..1200}; do [[ ! -e $GATE ]] || break; sleep 0.1; done  # not for ever: none may open it
echo "threads=$OMP_NUM_THREADS run: $*"
[[ -z ${REPORT-} || -z ${EXIT_CODE_FILE-} ]] || echo "$REPORT" > "$EXIT_CODE_FILE"
exit "${CODE-0}"
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment with a stub for Python, and no GPU."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    executable(
        tmp_path / "venv" / "bin" / "python", STUB.replace("PYTHON", shlex.quote(sys.executable))
    )
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "VENV": str(tmp_path / "venv"),
        "DEVICE": "auto",
        "TMPDIR": str(tmp_path),
        "DETACH": "0",
        "RUNS_DIR": str(tmp_path / "runs"),
        "RUN_NAME": "x",
        "ATTENTION": "auto",
        "NODES": "1",
        "NODE_RANK": "0",
        "MASTER_PORT": "29500",
        "MAX_RESTARTS": "0",
        "START_TIMEOUT_S": "40",
        "SHUTDOWN_TIMEOUT_S": "50",
        "PEER_STOP": "end",
    }


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def launch(env: dict[str, str], script: str = "launch.sh", **changes: str) -> tuple[int, str]:
    done = subprocess.run(
        [ROOT / "scripts" / script],
        env=env | changes,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
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
def test_without_gpus_large_blocks_are_kept_and_it_is_said(
    env: dict[str, str], tmp_path: Path
) -> None:
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    stub, show = (
        tmp_path / "venv" / "bin" / "python",
        " ".join(f"{name}=${{{name}-}}" for name in names),
    )
    stub.write_text(
        stub.read_text().replace('echo "threads', f'echo "given {show}"; echo "threads')
    )
    kept = r"MALLOC_MMAP_THRESHOLD_=[1-9]\d+ MALLOC_TRIM_THRESHOLD_=[1-9]\d+ GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    assert re.search(rf"\({kept}\)(.|\n)*given {kept}\n", launch(env)[1])
    assert (
        f"{names[0]}=5 " in launch(env, MALLOC_MMAP_THRESHOLD_="5")[1].split("given ")[1]
    )  # the user's own stays
    for own, whole in (
        ("a=1", "a=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ):
        assert f"GLIBC_TUNABLES={whole}\n" in launch(env, GLIBC_TUNABLES=own)[1]
    gpus(tmp_path, 1)
    assert f"given {' '.join(f'{name}=' for name in names)}\n" in launch(env)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc/cpuinfo")
def test_without_gpus_threads_add_up_in_the_same_order_each_time(
    env: dict[str, str], tmp_path: Path
) -> None:
    stub = tmp_path / "venv" / "bin" / "python"
    show = 'echo "given ${MKL_DYNAMIC-} ${MKL_CBWR-}"; '
    stub.write_text(stub.read_text().replace('echo "threads', f'{show}echo "threads'))
    branch = "AUTO" if "GenuineIntel" in Path("/proc/cpuinfo").read_text() else ""
    said = launch(env)[1]
    assert f"given FALSE {branch}\n" in said
    assert f" MKL_DYNAMIC=FALSE {f'MKL_CBWR={branch} ' if branch else ''}allocator" in said
    assert (
        "given TRUE AVX2\n" in launch(env, MKL_DYNAMIC="TRUE", MKL_CBWR="AVX2")[1]
    )  # the user's own stay
    gpus(tmp_path, 1)
    assert "given  \n" in launch(env)[1]


def test_all_visible_gpus_get_a_process_each(env: dict[str, str], tmp_path: Path) -> None:
    gpus(tmp_path, 3)
    assert (
        "torch.distributed.run --standalone --max-restarts=0 --nproc-per-node=3 -m train.main"
        in launch(env)[1]
    )
    assert "--nproc-per-node=2 " in launch(env, CUDA_VISIBLE_DEVICES="0,2")[1]
    assert "run: -m train.main" in launch(env, CUDA_VISIBLE_DEVICES="1")[1]
    for none in ("", "-1", "NoDevFiles"):
        assert "run: -m train.main" in launch(env, CUDA_VISIBLE_DEVICES=none)[1]
        assert launch(env, "train.sh", CUDA_VISIBLE_DEVICES=none, DEVICE="cuda")[0] == 64
    assert "--nproc-per-node=2 " in launch(env, CUDA_VISIBLE_DEVICES="0,1,-1,2")[1]
    assert "run: -m train.main" in launch(env, DEVICE="cpu")[1]
    assert "--nproc-per-node=5 " in launch(env, NPROC="5")[1]


def test_the_code_that_the_trainer_reported_beats_that_of_torchrun(
    env: dict[str, str], tmp_path: Path
) -> None:
    assert launch(env, NPROC="2", CODE="1", REPORT="78")[0] == 78
    assert launch(env, NPROC="2", CODE="0", REPORT="75")[0] == 75
    assert (
        launch(env, NPROC="2", CODE="1", REPORT="75?")[0] == 1
    )  # it may be torchrun that stopped a rank
    assert launch(env, NPROC="2", CODE="1")[0] == 1
    assert launch(env, CODE="64")[0] == 64
    assert not list(tmp_path.glob("launch.*"))


@pytest.mark.fault(22)
def test_a_recipe_for_gpus_stops_at_once_where_there_are_none(
    env: dict[str, str], tmp_path: Path
) -> None:
    code, out = launch(env, "train.sh", DEVICE="cuda")
    assert code == 64 and "DEVICE=cuda: there is no GPU here" in out and "run:" not in out
    gpus(tmp_path, 1)
    code, out = launch(
        env, "train.sh", DEVICE="cuda", ALLOW_FAIL="gpus,driver"
    )  # this one answers one question only
    assert code == 0
    stages = [line.split("run: ")[1] for line in out.splitlines() if "run: " in line]
    assert stages == ["-m train.data.prepare", "-m train.main", "-m analysis.plots"]


def test_a_failing_stage_ends_the_job_with_its_code(env: dict[str, str]) -> None:
    code, out = launch(env, "train.sh", CODE="78")
    assert code == 78 and out.count("run:") == 1


def test_a_detached_run_outlives_the_shell_that_started_it(
    env: dict[str, str], tmp_path: Path
) -> None:
    shell = subprocess.run(
        ["bash", "-c", f"'{ROOT}'/scripts/train.sh; kill -HUP $$"],
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        env=env | {"DETACH": "1", "RUNS_DIR": str(tmp_path), "PAUSE": "1"},
    )
    assert shell.returncode == -1 and "make attach" in shell.stdout and "run:" not in shell.stdout
    wait_for(tmp_path / "x" / "console.log", "run: -m analysis.plots", seconds=20)


@pytest.mark.slow
@pytest.mark.fault(32)
def test_a_second_detached_start_is_refused_and_leaves_the_log_alone(
    env: dict[str, str], tmp_path: Path
) -> None:
    env |= {"DETACH": "1", "RUNS_DIR": str(tmp_path)}
    code, out = launch(env, "train.sh", GATE=str(tmp_path / "gate"))
    assert code == 0 and "in the background" in out
    code, out = launch(env, "train.sh")
    assert code == 78 and re.search(r"run x is at work already \((pid |it has just begun)", out)
    assert launch(env, "train.sh", DETACH="0")[0] == 78
    (tmp_path / "gate").touch()
    wait_for(tmp_path / "x" / "console.log", "run: -m analysis.plots", seconds=60)
    log = (tmp_path / "x" / "console.log").read_text()
    assert log.count("run: -m train.data.prepare") == 1 and "\0" not in log


def test_detaching_needs_no_setsid_and_no_certain_folder(
    env: dict[str, str], tmp_path: Path
) -> None:
    for name in (
        "bash",
        "cat",
        "dirname",
        "grep",
        "mkdir",
        "mktemp",
        "nohup",
        "nproc",
        "rm",
        "sed",
        "sleep",
        "tr",
    ):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    env |= {"DETACH": "1", "RUNS_DIR": str(tmp_path), "PATH": str(tmp_path / "bin")}
    done = subprocess.run(
        ["bash", "train.sh"],
        env=env,
        cwd=ROOT / "scripts",
        text=True,
        check=False,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    wait_for(tmp_path / "x" / "console.log", "run: -m analysis.plots", seconds=20)


def test_a_job_that_prepares_data_is_known_to_status_and_stopped_by_stop(
    env: dict[str, str], tmp_path: Path
) -> None:
    def of(command: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "record.status", command],
            env=env,
            cwd=ROOT,
            text=True,
            check=True,
            capture_output=True,
            timeout=120,
        ).stdout

    job = subprocess.Popen(
        [ROOT / "scripts" / "train.sh"], env=env | {"PAUSE": "60"}, stdout=subprocess.DEVNULL
    )
    wait_for(tmp_path / "runs" / "x" / ".job", "preparing data", seconds=20)
    assert of("status").split() == ["x", "preparing", "data"] and of("runs") == of("status")
    assert of("stop").split() == ["x", "not", "started"]
    assert job.wait(120) == 75
    assert of("runs").startswith("no runs in")


# ---- Starting again

# In the place of the trainer: the n-th start does what the n-th word of PLAY says: exit with a code, die of a signal
# (k9), commit a checkpoint before that (s10:1 is step 10, then code 1), and report a code as torchrun's workers do
# (r78:1). What is behind the last word is that word again.
PLAYER = """
count=$(($(cat "$TMPDIR/count" 2>/dev/null || echo 0) + 1)); echo $count >"$TMPDIR/count"
words=($PLAY); word=${words[$((count > ${#words[@]} ? ${#words[@]} - 1 : count - 1))]}
for part in ${word//:/ }; do
  case $part in
    s*) echo "${part#s}" >"$PROGRESS_FILE" ;;
    r*) echo "${part#r}" >"$EXIT_CODE_FILE" ;;
    k*) kill -"${part#k}" $$ ;;
    wait) trap 'echo 75 >"${EXIT_CODE_FILE:-/dev/null}"; exit 75' TERM; sleep 60 & wait; wait ;;
    *) exit "$part" ;;
  esac
done
"""


@pytest.fixture
def play(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of a trainer that is told how to end, and of a sleep that only says for how long."""
    stub = tmp_path / "venv" / "bin" / "python"
    trainer = f'if [[ "$*" == *train.main ]]; then\n{PLAYER}\nfi\n'
    stub.write_text(stub.read_text().replace("[[ -z ${PAUSE-} ]]", trainer + "[[ -z ${PAUSE-} ]]"))
    executable(
        tmp_path / "bin" / "sleep",
        '#!/bin/bash\n[[ $1 != 0.* ]] || exec /bin/sleep "$1"  # between two looks\n'
        'echo "pause $1" >>"$TMPDIR/pauses"\n'
        "[[ -z ${SLOW-} && $1 != 60 ]] || exec /bin/sleep 60\n",
    )
    return env | {"MAX_RESTARTS": "3", "NPROC": "2"}


def starts(tmp_path: Path) -> int:
    return int((tmp_path / "count").read_text())


@pytest.mark.parametrize("code", ["0", "64", "70", "75", "78"])
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_what_another_start_cannot_mend_is_returned_at_once(
    play: dict[str, str], tmp_path: Path, code: str, nproc: str
) -> None:
    word = code if nproc == "1" or code == "0" else f"r{code}:1"
    assert launch(play, PLAY=word, NPROC=nproc)[0] == int(code)
    assert starts(tmp_path) == 1 and not list(tmp_path.glob("launch.*"))


def test_a_trainer_that_fails_is_started_again_and_it_is_said(
    play: dict[str, str], tmp_path: Path
) -> None:
    code, out = launch(play, PLAY="s10:r1:1 k9 0")
    assert code == 0 and starts(tmp_path) == 3
    assert (
        "launch: attempt 1 ended with code 1; last checkpoint: step 10; starting again in 1 s (restart 1 of 3"
        in out
    )
    assert (
        "launch: attempt 2 ended with signal KILL; last checkpoint: step 10; starting again in 2 s (restart 2"
        in out
    )


def test_the_budget_is_one_of_progress(play: dict[str, str], tmp_path: Path) -> None:
    code, out = launch(play, PLAY="s5:1 s10:1 1 1 s11:1 1 1 1")
    assert code == 70 and starts(tmp_path) == 8
    pauses = (tmp_path / "pauses").read_text().split()[1::2]
    assert pauses == ["1", "1", "2", "4", "1", "2", "4"]
    assert (
        "attempt 8 ended with code 1; last checkpoint: step 11. That makes 4 attempts in a row without a"
        in out
    )
    assert f"{tmp_path}/runs/x/logs/" in out


def test_going_back_behind_a_checkpoint_is_no_progress(
    play: dict[str, str], tmp_path: Path
) -> None:
    assert launch(play, PLAY="s10:1 s8:1 s9:1 s10:1")[0] == 70
    assert starts(tmp_path) == 4


def test_pauses_grow_up_to_half_a_minute(play: dict[str, str], tmp_path: Path) -> None:
    assert launch(play, PLAY="1", MAX_RESTARTS="7")[0] == 70
    assert (tmp_path / "pauses").read_text().split()[1::2] == ["1", "2", "4", "8", "16", "30", "30"]


def test_without_restarts_the_trainers_own_code_is_returned(
    play: dict[str, str], tmp_path: Path
) -> None:
    assert launch(play, PLAY="1", MAX_RESTARTS="0")[0] == 1
    assert launch(play, PLAY="k9", MAX_RESTARTS="0", NPROC="1")[0] == 137
    assert launch(play, PLAY="r75?:1", MAX_RESTARTS="0")[0] == 1
    stub = tmp_path / "venv" / "bin" / "python"
    stub.write_text(stub.read_text().replace("*train.main", "*finetune.evaluate"))
    assert (
        launch(play, "eval.sh", PLAY="1", MAX_RESTARTS="3")[0] == 1
    )  # no trainer, and never started again
    assert starts(tmp_path) == 4 and not (tmp_path / "pauses").exists()


def test_a_code_in_doubt_is_a_failure_where_nobody_asked(
    play: dict[str, str], tmp_path: Path
) -> None:
    assert launch(play, PLAY="r75?:1 0")[0] == 0
    assert starts(tmp_path) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("play_it", "code"), [("wait", 75), ("r75?:wait", 75), ("1", 143)])
def test_who_is_told_to_stop_starts_nothing_again(
    play: dict[str, str], tmp_path: Path, number: signal.Signals, play_it: str, code: int
) -> None:
    """While the trainer runs, and in a pause."""
    process = subprocess.Popen(
        [ROOT / "scripts" / "launch.sh"],
        env=play | {"PLAY": play_it, "SLOW": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(tmp_path / "pauses", "pause 1" if play_it == "1" else "pause 60", seconds=20)
    process.send_signal(number)
    assert process.wait(120) == code
    assert starts(tmp_path) == 1 and not list(tmp_path.glob("launch.*"))


COUNTING = """
cd {root}; source scripts/lib.sh; hand_on_signals
run_child bash -c 'trap "echo told" TERM; echo ready; for i in $(seq 300); do sleep 0.1; done' || true
"""


def test_a_stop_that_comes_several_times_is_handed_on_once_and_a_later_one_again(
    tmp_path: Path,
) -> None:
    """As to a whole group of processes, each of which hands it on; torchrun leaves its workers behind at the second."""
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen(
            ["bash", "-c", COUNTING.format(root=shlex.quote(str(ROOT)))], stdout=out
        )
    wait_for(tmp_path / "out", "ready", seconds=20)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    wait_for(tmp_path / "out", "told", seconds=20)
    time.sleep(0.5)
    assert (tmp_path / "out").read_text().count("told") == 1
    time.sleep(4)
    process.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "out", "told\ntold", seconds=20)
    process.kill()


# A library that has bash hear SIGTERM just when the system has told it that a child ended, as it may happen by chance.
AT_ONCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
pid_t waitpid(pid_t pid, int *status, int options) {
  pid_t (*real)(pid_t, int *, int) = dlsym(RTLD_NEXT, "waitpid");
  pid_t found = real(pid, status, options);
  if (found > 0 && WIFEXITED(*status) && WEXITSTATUS(*status) == 64) kill(getpid(), SIGTERM);
  return found;
}
"""
COLLECTING = """
cd {root}; source scripts/lib.sh; hand_on_signals
[[ -z {company} ]] || /bin/sleep 60 &
run_child bash -c 'sleep 0.3; exit 64'
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc"), reason="needs Linux, and gcc"
)
@pytest.mark.parametrize("company", ["", "yes"])
def test_a_stop_that_comes_as_a_child_ends_neither_loses_its_code_nor_waits_for_good(
    tmp_path: Path, company: str
) -> None:
    (tmp_path / "at_once.c").write_text(AT_ONCE)
    library = tmp_path / "at_once.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "at_once.c", "-ldl"], check=True
    )
    script = COLLECTING.format(root=shlex.quote(str(ROOT)), company=shlex.quote(company))
    process = subprocess.Popen(
        ["bash", "-c", script],
        env=os.environ | {"LD_PRELOAD": str(library)},
        start_new_session=True,
    )
    try:
        assert process.wait(120) == 64
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the company


def test_a_trainer_that_dies_of_the_stop_had_nothing_to_save(
    play: dict[str, str], tmp_path: Path
) -> None:
    stub = tmp_path / "venv" / "bin" / "python"
    stub.write_text(
        stub.read_text().replace("trap 'echo 75", "trap 'kill -9 $$ #'; false 'echo 75")
    )
    process = subprocess.Popen([ROOT / "scripts" / "launch.sh"], env=play | {"PLAY": "wait"})
    wait_for(tmp_path / "pauses", "pause 60", seconds=20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143


def test_a_second_ctrl_c_sent_by_make_stop_is_no_failure(
    play: dict[str, str], tmp_path: Path
) -> None:
    assert launch(play, PLAY="130", NPROC="1")[0] == 143
    assert starts(tmp_path) == 1


def test_a_restart_waits_until_the_trainer_before_has_let_the_run_go(
    play: dict[str, str], tmp_path: Path
) -> None:
    """As do workers whose torchrun was killed: they end a moment later, and hold the run until then."""
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time\nlock = open(sys.argv[1], 'w')\n"
            "fcntl.flock(lock, fcntl.LOCK_EX)\nprint(flush=True)\ntime.sleep(2)",
            run / ".lock",
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout and holder.stdout.readline()
    began = time.monotonic()
    assert launch(play, PLAY="k9 0")[0] == 0
    assert time.monotonic() - began > 1.5 and holder.wait(120) == 0


def variables(env: dict[str, str], tmp_path: Path, *names: str, **changes: str) -> list[str]:
    """What the trainer is given in these variables; none where one is not set."""
    stub = tmp_path / "venv" / "bin" / "python"
    before = stub.read_text()
    stub.write_text(
        before.replace(
            'echo "threads',
            'echo "given ' + " ".join(f"${{{name}-none}}" for name in names) + '"; echo "threads',
        )
    )
    said = launch(env, **changes)[1].split("given ")[1].split("\n")[0].split()
    stub.write_text(before)
    return said


def test_workers_learn_how_long_they_have_and_nccl_what_to_note(
    env: dict[str, str], tmp_path: Path
) -> None:
    names = (
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_FR_DUMP_TEMP_FILE",
    )
    assert variables(env, tmp_path, *names) == ["50", "none", "none", "none"]
    gpus(tmp_path, 2)
    assert variables(env, tmp_path, *names) == [
        "50",
        "1",
        "2000",
        f"{tmp_path}/runs/x/hang/nccl_rank_",
    ]
    assert (tmp_path / "runs" / "x" / "hang").is_dir()
    assert variables(env, tmp_path, *names, **dict.fromkeys(names, "7")) == ["7"] * 4
    assert variables(env, tmp_path, *names, TORCH_NCCL_TRACE_BUFFER_SIZE="9")[2] == "9"


def test_nccl_writes_what_it_does_to_the_run_and_the_users_own_wish_stays(
    env: dict[str, str], tmp_path: Path
) -> None:
    names = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
    assert variables(env, tmp_path, *names) == ["none"] * 3
    gpus(tmp_path, 2)
    logs = tmp_path / "runs" / "x" / "logs"
    assert variables(env, tmp_path, *names) == [
        "INFO",
        "INIT,ENV,NET,GRAPH",
        f"{logs}/nccl_node_0.%h.%p",
    ]
    assert logs.is_dir()
    assert variables(env, tmp_path, *names, NCCL_DEBUG="WARN") == ["WARN", "none", "none"]
    assert variables(env, tmp_path, *names, NCCL_DEBUG_FILE="a") == [
        "INFO",
        "INIT,ENV,NET,GRAPH",
        "a",
    ]
