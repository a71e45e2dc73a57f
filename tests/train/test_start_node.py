"""train/start_node.py and scripts/train.py: the stages of a node, its lock, and what runs next to it.

A stub stands for the Python of the processes that they start.
"""

import dataclasses
import fcntl
import os
import re
import signal
import subprocess
import sys
from typing import Any, cast

import pytest

from hardware.ports import free_ports
from record.run_paths import RunPaths
from settings.config import Config
from tests.constants import constants
from tests.running import ROOT, wait_for
from train import launcher
from train.children import Children
from train.distributed import rendezvous
from train.start_node import PRETRAIN, Node

STUB = """#!/usr/bin/env bash
# The detached start is real. What else it runs it prints, with the session.
[[ $2 != train.start_node ]] || exec {python} "$@"
session=$(cut -d ' ' -f 6 /proc/$$/stat)
echo "session=$session PRESET=${PRESET-} NPROC=${NPROC-} run: $*"
[[ $2 != train.main ]] || echo "lock: $(<"$RUNS_DIR/${RUN_NAME:-$PRESET}/.job")"
[[ $2 != train.data.prepare || -z ${PAUSE-} ]] || sleep "$PAUSE"
for _ in {1..600}; do [[ -n ${GATE-} && -e $GATE ]] || break; sleep 0.1; done
if [[ $2 == "${FAILS-}" ]]; then
  [[ -z ${EXIT_CODE_FILE-} ]] || printf '78\\nDATA=x: there is\\nno such file\\n' >"$EXIT_CODE_FILE"
  exit "${CODE-78}"
fi
"""
NODES = {
    "NODES": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": f"127.0.0.1:{free_ports(2)}",
    "START_TIMEOUT_S": "60",
}
PLOTS = "run: -m analysis.plots"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads sessions in /proc")


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def env(tmp_path):
    """A user with few settings and no GPU; the trainer and all else is a stub."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "empty.env").touch()
    executable(tmp_path / "stub", STUB.replace("{python}", sys.executable))
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "ENV_FILE": str(tmp_path / "empty.env"),
        "RUNS_DIR": str(tmp_path / "runs"),
        "DATA_DIR": str(tmp_path / "data"),
        "RUN_NAME": "x",
        "MAX_RESTARTS": "0",
        **constants(PYTHON=str(tmp_path / "stub")),
    }


def gpus(tmp_path, count):
    lines = "\\n".join(f"GPU {i}: NVIDIA A100 (UUID: GPU-{i})" for i in range(count))
    executable(tmp_path / "bin" / "nvidia-smi", f"#!/usr/bin/env bash\nprintf '{lines}\\n'\n")


def start(env: dict[str, str], *words: str, **popen: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "scripts.train", *words]
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, **popen)


def train(env: dict[str, str], *words: str, **settings: str) -> tuple[int, str]:
    process = start(env | settings, *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def stages(out):
    started = [line.rstrip() for line in re.findall(r"run: (.+)", out)]
    # The plots are those of the run's own folder.
    return [re.sub(r"(?<=-m analysis\.plots) /\S+/runs/x$", "", line) for line in started]


# ---- Stages


@pytest.mark.fault(22)
def test_a_recipe_for_gpus_stops_at_once_where_there_are_none(env, tmp_path):
    code, out = train(env, DEVICE="cuda")
    assert code == 64 and "No GPU found" in out and "run:" not in out
    gpus(tmp_path, 1)
    code, out = train(env, DEVICE="cuda", ALLOW_FAIL="gpus,driver")
    assert code == 0 and "\nNext:\n" in out  # without a terminal too
    assert re.search(r"lock: pid \d+ on \S+\n", out)  # the trainer tells what it does
    assert stages(out) == ["-m train.data.prepare", "-m train.main", "-m analysis.plots"]


def test_a_failing_stage_ends_the_job_with_its_code_and_leaves_no_folder(env, tmp_path):
    code, out = train(env, FAILS="train.data.prepare")
    assert code == 78 and len(stages(out)) == 1 and not (tmp_path / "runs" / "x").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"nodes": 2}, True), ({"nodes": 2, "k8s_node": "machine"}, False), ({}, False)],
)
def test_a_node_that_cannot_prepare_its_data_tells_the_others_why(
    env, tmp_path, monkeypatch, settings, told
):
    """They would wait for it as long as they may. Pods end with their Job."""
    words: list[tuple[int, str]] = []
    monkeypatch.setattr(rendezvous, "over", lambda config, *word: words.append(word))
    monkeypatch.setattr(launcher, "PYTHON", str(tmp_path / "stub"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("FAILS", "train.data.prepare")
    monkeypatch.setenv("K8S_NODE", settings.pop("k8s_node", ""))
    config = dataclasses.replace(Config(), **settings)
    monkeypatch.setattr(Children, "__init__", lambda children: None)
    children = Children()
    children.stop_requested = False
    assert Node(config, PRETRAIN, children, RunPaths(tmp_path)).prepare_data() == 78
    assert words == [(78, "DATA=x: there is\nno such file")] * told
    assert not list(tmp_path.glob("prepare.*"))


@pytest.mark.parametrize(("pod", "code"), [({}, 78), ({"K8S_NODE": "machine"}, 0)])
def test_plots_alone_are_no_reason_for_another_pod(env, pod, code):
    got, out = train(env, FAILS="analysis.plots", **pod)
    assert got == code and ("plots failed with code 78" in out) == (code == 0)


def test_fine_tuning_has_its_own_modules_and_preset(env):
    settings = {"MODEL": "models/x", "DATA": "chats.jsonl", "ALLOW_FAIL": "memory"}
    _, out = train(env, "finetune", **settings)
    assert stages(out) == [
        "-m finetune.prepare_data before-training",
        "-m finetune.main",
        "-m analysis.plots",
    ]
    assert "PRESET=finetune " in out


def test_a_node_of_a_run_on_one_machine_is_refused(env):
    code, out = train(env, "node")
    assert code == 64 and "NODES=1: train-node starts one node of several. Set NODES" in out


# ---- The lock


@pytest.mark.fault(32)
def test_a_second_start_is_refused_and_leaves_the_log_alone(env, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    code, out = train(env, DETACH="1", GATE=str(gate))
    assert code == 0 and "in the background" in out and "run:" not in out
    for detach in "01":
        code, out = train(env, DETACH=detach)
        assert code == 78 and re.search(r"run x is running already \((pid |it has just)", out)
        assert "plan:" not in out  # it was not even looked at
    gate.unlink()
    console = tmp_path / "runs" / "x" / "console.log"
    wait_for(console, PLOTS, seconds=60)
    log = console.read_text()
    assert log.count("run: -m train.data.prepare") == 1 and "\0" not in log


def test_a_detached_run_outlives_the_shell_that_started_it(env, tmp_path):
    command = f"'{sys.executable}' -m scripts.train; kill -HUP $$"
    environment = env | NODES | {"DETACH": "1", "PAUSE": "1", "START_TIMEOUT_S": "10"}
    shell = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=False)
    assert shell.returncode == -signal.SIGHUP
    wait_for(tmp_path / "runs" / "x" / "console_node_1.log", "not reached in 10 s", seconds=60)


def test_a_job_that_prepares_data_is_known_to_status_and_stopped_by_stop(env, tmp_path):
    def show(command):
        status = [sys.executable, "-m", "record.status", command]
        done = subprocess.run(status, cwd=ROOT, env=env, text=True, check=True, capture_output=True)
        return done.stdout.split()

    job = start(env | {"PAUSE": "60"}, stdout=subprocess.PIPE)
    wait_for(tmp_path / "runs" / "x" / ".job", "preparing data", seconds=20)
    assert show("status") == show("runs")[:3] == ["x", "preparing", "data"]
    show("stop")
    out, _ = job.communicate(timeout=120)
    assert job.returncode == 75 and "Stopped before a checkpoint was saved" in out
    assert not (tmp_path / "runs" / "x").exists()
    assert show("runs")[:2] == ["no", "runs"]


def test_each_node_has_its_own_job_and_only_the_first_draws(env, tmp_path):
    """They may share RUNS_DIR."""
    gate = tmp_path / "gate"
    gate.touch()
    first = start(
        env | NODES | {"NODE_RANK": "0", "GATE": str(gate)}, "node", stdout=subprocess.PIPE
    )
    wait_for(tmp_path / "runs" / "x" / ".job", "preparing data", seconds=20)
    second = start(env | NODES, "node", stdout=subprocess.PIPE)
    wait_for(tmp_path / "runs" / "x" / ".job_node_1", ": training as node 1 of 2", seconds=20)
    gate.unlink()
    assert PLOTS in first.communicate(timeout=120)[0]
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0 and "train.main" in out and "analysis.plots" not in out


def test_a_pod_waits_for_a_run_that_a_lost_machine_still_holds(env, tmp_path):
    """As a shared disk has it for some minutes. By hand it is refused at once."""
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    out = tmp_path / "out"
    with open(folder / ".job", "w") as lock:
        lock.write("pid 1 on a-pod: training\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, refusal = train(env)
        assert code == 78 and "running already (pid 1 on a-pod: training)" in refusal
        with open(out, "w") as file:
            pod = start(env | {"K8S_NODE": "a", "START_TIMEOUT_S": "40"}, stdout=file)
        wait_for(out, "running already", seconds=20)
        assert pod.poll() is None
    assert pod.wait(120) == 0
    assert out.read_text().count("Waiting up to 40 s") == 1 and PLOTS in out.read_text()


@pytest.mark.slow
def test_a_pod_waits_no_longer_than_it_may(env, tmp_path):
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    with open(folder / ".job", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out = train(env, K8S_NODE="a", START_TIMEOUT_S="10")
    assert code == 69 and "run x is running already" in out.splitlines()[-1]


def test_a_folder_that_cannot_be_written_is_named(env, tmp_path):
    (tmp_path / "file").touch()
    gpus(tmp_path, 2)
    code, out = train(env, "2xh100", RUNS_DIR=str(tmp_path / "file"), ALLOW_FAIL="disk,gpus,driver")
    assert code == 78 and "cannot be written (Not a directory)" in out and "sampler" not in out


# ---- Two GPUs


def test_the_preset_on_two_gpus_with_the_sampler_apart(env, tmp_path):
    gpus(tmp_path, 2)
    env |= {"RUN_NAME": "", "ALLOW_FAIL": "gpus,driver,bf16,gpu-memory,memory,compiler"}
    code, out = train(env, "2xh100")
    assert code == 0, out
    log = tmp_path / "runs" / "d16-2xh100" / "logs" / "gpu_sampler.log"
    assert f"logs to {log}" in out
    wait_for(log, "run: -m monitor.gpu_sampler --follow", seconds=20)
    assert all("PRESET=d16-2xh100 NPROC=2 " in line for line in out.splitlines() if "run:" in line)
    sessions = set(re.findall(r"session=\d+", out))
    assert len(sessions) == 1 and not sessions & set(re.findall(r"session=\d+", log.read_text()))
    assert "--nproc-per-node=2 -m train.main" in out


@pytest.mark.parametrize(
    ("settings", "prompt", "longer"),
    [
        ({"preset": "tiny", "run_name": "tiny", "train_tokens": 4_000_000}, "def main(", "8M"),
        ({"preset": "tiny", "run_name": "tiny", "train_tokens": 20_480}, "def main(", "40960"),
        ({"preset": "tiny", "run_name": "longer"}, "def main(", ""),
        ({"preset": "tiny", "data": "novel.txt"}, "Once", ""),
        ({"preset": "gpt2-124m"}, "Once", ""),
    ],
)
def test_the_next_prompt_is_of_the_kind_of_text_that_was_trained_on(
    tmp_path, settings, prompt, longer
):
    config = dataclasses.replace(Config(), **settings)
    node = Node(config, PRETRAIN, cast(Children, None), RunPaths(tmp_path))
    lines = node.describe_next_steps()
    assert f'PROMPT="{prompt}"' in lines
    _, _, tokens = lines.partition("    make train RUN_NAME=longer TRAIN_TOKENS=")
    assert tokens == longer


@pytest.mark.parametrize(("code", "is_last"), [(0, True), (64, True), (78, True), (75, False)])
def test_a_pod_of_a_site_notes_an_end_after_which_no_other_takes_its_place(
    tmp_path, monkeypatch, code, is_last
):
    monkeypatch.setattr("train.start_node.in_pod", lambda: True)
    config = dataclasses.replace(Config(), sync="diloco")
    node = Node(config, PRETRAIN, cast(Children, None), RunPaths(tmp_path))
    node.leave(code)
    assert node.paths.last_word.exists() == is_last
