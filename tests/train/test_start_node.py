"""train/start_node.py and scripts/train.py: the stages of a node, its lock, and what runs next to it."""

import dataclasses
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from record import bad_nodes, locks
from settings.config import Config
from tests.constants import constants
from tests.running import ROOT, wait_for
from train import launcher, start_node
from train.children import Children
from train.distributed import rendezvous
from train.distributed.registry import Verdict
from train.start_node import FINETUNE, PRETRAIN, Node

# ---- In this process


class Stages(Children):
    """Notes what a node starts and what its lock says meanwhile. What `fails` names ends with 78."""

    def __init__(self, fails=""):
        self.fails = fails
        self.stop_requested = False
        self.started: list[str] = []
        self.locks: list[str] = []
        self.answers: list[str] = []

    def run(self, command, environment, quiet=False):
        module = command[-1] if "train.torchrun" in command else command[2]
        self.started.append(module)
        self.locks.append(locks.read_holder(self.job).partition(": ")[2])
        self.answers.append(self.describe_stop())
        if module != self.fails:
            return 0
        if path := environment.get("EXIT_CODE_FILE"):
            with open(path, "w") as report:
                report.write("78\nDATA=x: there is\nno such file\n")
        return 78


@pytest.fixture
def words(monkeypatch):
    """What other nodes are told at the end. They are there at each rendezvous."""
    words: list[tuple[int, str]] = []
    monkeypatch.setattr(rendezvous, "announce_end", lambda config, *word: words.append(word))
    monkeypatch.setattr(rendezvous, "meet", lambda *_: None)
    return words


@pytest.fixture
def run(tmp_path, monkeypatch, free_port):
    """Run a node of a run that is called x. Returns its exit code."""
    monkeypatch.setattr(launcher, "PYTHON", "true")  # the sidecars of a pod
    monkeypatch.setattr(start_node, "LOCK_TICK_S", 0.05)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "plan.json").touch()

    def run(stages, workload=PRETRAIN, pod=False, **settings):
        monkeypatch.setenv("K8S_NODE", "machine" * pod)
        config = Config(
            runs_dir=str(tmp_path),
            run_name="x",
            device="cpu",
            max_restarts=0,
            master_addr=f"127.0.0.1:{free_port}",
        )
        node = Node(dataclasses.replace(config, **settings), stages, workload)
        stages.job = node.paths.job
        code = node.run()
        node.leave(code)
        assert {path.name for path in tmp_path.iterdir()} <= {"x"}
        return code

    return run


PREPARE, TRAIN, PLOTS = STAGES = ["train.data.prepare", "train.main", "analysis.plots"]
FIRST, SECOND = {"nodes": 2}, {"nodes": 2, "node_rank": 1}
WHY = "DATA=x: there is\nno such file"


@pytest.mark.parametrize(
    ("settings", "fails", "code", "started", "told"),
    [
        ({}, "", 0, STAGES, []),
        ({"workload": FINETUNE}, "", 0, ["finetune.prepare_data", "finetune.main", PLOTS], []),
        ({}, PREPARE, 78, [PREPARE], []),
        ({}, TRAIN, 78, [PREPARE, TRAIN], []),
        ({}, PLOTS, 78, STAGES, []),
        # Plots alone are no reason for another pod.
        ({"pod": True}, PLOTS, 0, STAGES, []),
        # Only the first node draws. The others would wait for one without data; pods end with their Job.
        (FIRST, "", 0, STAGES, []),
        (SECOND, "", 0, [PREPARE, TRAIN], []),
        (SECOND, PREPARE, 78, [PREPARE], [(78, WHY)]),
        (SECOND | {"pod": True}, PREPARE, 78, [PREPARE], []),
    ],
)
def test_a_node_prepares_trains_and_draws(
    run, words, tmp_path, settings, fails, code, started, told
):
    stages = Stages(fails)
    assert run(stages, **settings) == code
    assert stages.started == started and words == told
    training = f"training as node {settings.get('node_rank', 0)} of 2" * ("nodes" in settings)
    assert stages.locks == ["preparing data", training, "drawing plots"][: len(started)]
    is_finished = ["run is finished" in answer for answer in stages.answers]
    assert is_finished == [module == PLOTS for module in started]
    assert (tmp_path / "x").exists() == (code == 0 or settings.get("pod", False))


def test_a_folder_that_cannot_be_written_is_named(run, tmp_path, capfd):
    (tmp_path / "x" / "plan.json").unlink()
    (tmp_path / "x").rmdir()
    (tmp_path / "x").touch()
    assert run(Stages()) == 78
    assert "cannot be written (File exists)" in capfd.readouterr().err


@pytest.mark.parametrize(("pod", "held_s", "code"), [(0, 9, 78), (1, 1.5, 0), (1, 9, 69)])
def test_a_pod_waits_for_a_run_that_a_lost_machine_still_holds(
    run, tmp_path, capfd, pod, held_s, code
):
    """As a shared disk has it for some minutes. By hand it is refused at once."""
    with open(tmp_path / "x" / ".job", "w") as lock:
        lock.write("pid 1 on a-pod: training\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        timer = threading.Timer(held_s, lock.close)
        timer.start()
        assert run(Stages(), pod=bool(pod), start_timeout_s=20 if code == 0 else 2) == code
        timer.cancel()
    out, err = capfd.readouterr()
    assert out.count(" s: a lost machine keeps its lock") == pod
    assert ("run x is running already (pid 1 on a-pod: training)" in err) == bool(code)


@pytest.mark.parametrize(
    ("settings", "prompt", "longer"),
    [
        (
            {"run_name": "tiny", "train_tokens": 4_000_000, "data_mix": "python:1"},
            "def main(",
            "8M",
        ),
        ({"run_name": "longer"}, "def main(", ""),
        ({"run_name": "tiny", "data_mix": "novel:1"}, "Once", ""),
    ],
)
def test_the_next_prompt_is_of_the_kind_of_text_that_was_trained_on(settings, prompt, longer):
    lines = Node(dataclasses.replace(Config(), **settings), Stages()).describe_next_steps()
    assert f'PROMPT="{prompt}"' in lines
    _, _, tokens = lines.partition("    make train RUN_NAME=longer TRAIN_TOKENS=")
    assert tokens == longer


def test_the_next_commands_keep_what_was_given_and_propose_a_name_that_is_free(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MAKE_SETTINGS", "RUNS_DIR LEARNING_RATE MAX_STEPS")
    monkeypatch.setenv("LEARNING_RATE", "0.01")
    monkeypatch.setenv("MAX_STEPS", "977")
    (tmp_path / "longer").mkdir()
    settings = {"run_name": "tiny", "runs_dir": str(tmp_path), "train_tokens": 4_000_000}
    config = dataclasses.replace(Config(), data_mix="python:1", **settings)
    lines = Node(config, Stages()).describe_next_steps()
    assert f"make sample RUNS_DIR={tmp_path} RUN_NAME=tiny PROMPT=" in lines
    new = f"make train RUNS_DIR={tmp_path} RUN_NAME=longer-2 TRAIN_TOKENS=8M LEARNING_RATE=0.01"
    assert lines.endswith(new)
    early = dataclasses.replace(config, max_steps=50)
    assert "make train" not in Node(early, Stages()).describe_next_steps()


@pytest.mark.parametrize(("code", "is_last"), [(0, True), (64, True), (78, True), (75, False)])
def test_a_pod_of_a_site_notes_an_end_after_which_no_other_takes_its_place(
    run, tmp_path, words, monkeypatch, code, is_last
):
    monkeypatch.setattr(rendezvous, "meet", lambda *_: Verdict(code))
    run(Stages(), pod=True, sync="diloco", nodes=2, sites=1)
    assert bool(list(tmp_path.glob("**/.over"))) == is_last


@pytest.fixture
def pod(tmp_path, monkeypatch):
    """A pod on node-a. Its delays are in steps of a minute that does not pass."""
    monkeypatch.setenv("K8S_NODE", "node-a")
    clock = SimpleNamespace(s=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.s)
    monkeypatch.setattr(time, "sleep", lambda s: setattr(clock, "s", clock.s + s))
    config = Config(runs_dir=str(tmp_path), run_name="x", device="auto", nproc=1)
    node = Node(config, Stages())
    node.clock = clock
    node.faults = []
    monkeypatch.setattr(launcher, "ask_driver", lambda *_: "".join(node.faults[:1]) or "well")
    return node


def test_a_pod_lists_its_bad_node_and_later_pods_leave_it_after_a_capped_delay(pod, capfd):
    assert pod.check_machine() == 0 and bad_nodes.find(pod.bad_nodes, "node-a") is None
    pod.faults = ["GPU 0 is lost"]
    assert pod.check_machine() == 71 and pod.clock.s == 0
    assert bad_nodes.find(pod.bad_nodes, "node-a").reason == "GPU 0 is lost"
    pod.faults = []
    delays = []
    for _ in range(7):
        began = pod.clock.s
        assert pod.check_machine() == 71
        delays.append(pod.clock.s - began)
    assert delays == [10, 20, 40, 80, 160, 300, 300]
    said = capfd.readouterr().err
    assert "node node-a is bad: GPU 0 is lost. Leaving it in 10 s." in said
    assert "make clear-bad-nodes" in said


def test_a_bad_node_is_used_once_it_was_cleared(pod, monkeypatch):
    bad_nodes.add(pod.bad_nodes, "node-a", "GPU 0 is lost")
    sleep = time.sleep

    def clear(seconds):
        sleep(seconds)
        shutil.rmtree(pod.bad_nodes)

    monkeypatch.setattr(time, "sleep", clear)
    assert pod.check_machine() == 0 and pod.clock.s == start_node.LOCK_TICK_S


def test_only_gpus_make_a_node_bad(pod):
    bad_nodes.add(pod.bad_nodes, "node-a", "GPU 0 is lost")
    pod.config = dataclasses.replace(pod.config, device="cpu")
    pod.faults = ["GPU 0 is lost"]
    assert pod.check_machine() == 0


def test_a_pod_that_is_stopped_on_a_bad_node_does_not_wait(pod):
    bad_nodes.add(pod.bad_nodes, "node-a", "GPU 0 is lost")
    pod.children.stop_requested = True
    assert pod.check_machine() == 143 and pod.clock.s == 0


# ---- As a program

STUB = """#!/usr/bin/env bash
# What is started it prints, with the session.
session=$(cut -d ' ' -f 6 /proc/$$/stat)
echo "session=$session PRESET=${PRESET-} NPROC=${NPROC-} run: $*"
[[ $2 != train.data.prepare || -z ${PAUSE-} ]] || sleep "$PAUSE"
for _ in {1..600}; do [[ -n ${GATE-} && -e $GATE ]] || break; sleep 0.1; done
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads sessions in /proc")


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def env(tmp_path):
    """A user with few settings and no GPU; the trainer and all else is a stub."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "empty.env").touch()
    executable(tmp_path / "stub", STUB)
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


def start(env, *words, **popen):
    command = [sys.executable, "-m", "scripts.train", *words]
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, **popen)


def train(env, *words, **settings):
    process = start(env | settings, *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        ([], {"DEVICE": "cuda"}, "No GPU found"),
        (["node"], {}, "NODES=1: train-node starts one node of several. Set NODES"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(env, words, settings, message):
    code, out = train(env, *words, **settings)
    assert code == 64 and message in out and "run:" not in out


def test_fine_tuning_has_its_own_preset(env):
    settings = {"MODEL": "models/x", "DATA": "chats.jsonl", "ALLOW_FAIL": "memory"}
    _, out = train(env, "finetune", **settings)
    assert "PRESET=finetune " in out and "run: -m finetune.main" in out


@linux
@pytest.mark.fault(32)
def test_a_detached_run_outlives_its_shell_and_refuses_a_second_start(env, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    command = f"'{sys.executable}' -m scripts.train; kill -HUP 0"  # the whole group
    environment = env | {"DETACH": "1", "GATE": str(gate)}
    shell = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert shell.returncode == -signal.SIGHUP and "in the background" in shell.stdout
    assert "run:" not in shell.stdout
    for detach in "01":
        code, out = train(env, DETACH=detach)
        assert code == 78 and re.search(r"run x is running already \((pid |it has just)", out)
        assert "plan:" not in out  # it was not even looked at
    gate.unlink()
    console = tmp_path / "runs" / "x" / "console.log"
    wait_for(console, "run: -m analysis.plots", seconds=60)
    log = console.read_text()
    assert log.count("run: -m train.data.prepare") == 1 and "\0" not in log


def test_a_detached_run_refuses_a_console_log_that_is_no_file(env, tmp_path):
    console = tmp_path / "runs" / "x" / "console.log"
    console.parent.mkdir(parents=True)
    os.mkfifo(console)
    code, out = train(env, DETACH="1")
    assert code == 78 and f"{console}: is not a regular file. Move it away" in out


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
    assert job.returncode == 143
    assert (
        "Stopping. Nothing was trained yet.\nStopped before the first checkpoint. Run the same"
        in out
    )
    assert not (tmp_path / "runs" / "x").exists()
    assert show("runs")[:2] == ["no", "runs"]


@linux
def test_the_preset_on_two_gpus_with_the_sampler_apart(env, tmp_path):
    gpus(tmp_path, 2)
    env |= {"RUN_NAME": "", "ALLOW_FAIL": "gpus,driver,bf16,gpu-memory,memory,compiler"}
    code, out = train(env, "2xh100")
    assert code == 0 and "\nNext:\n" in out, out  # without a terminal too
    log = tmp_path / "runs" / "d16-2xh100" / "logs" / "gpu_sampler.log"
    assert f"logs to {log}" in out
    wait_for(log, "run: -m monitor.gpu_sampler --follow", seconds=20)
    assert all("PRESET=d16-2xh100 NPROC=2 " in line for line in out.splitlines() if "run:" in line)
    sessions = set(re.findall(r"session=\d+", out))
    assert len(sessions) == 1 and not sessions & set(re.findall(r"session=\d+", log.read_text()))
    assert "--nproc-per-node=2 -m train.main" in out
