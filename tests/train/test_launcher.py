"""train/launcher.py: which command it starts, what it makes of how that ends, and when it starts again."""

import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from record import locks
from settings import ROOT
from settings.config import Config
from settings.visible_gpus import ask_driver
from tests.running import wait_until
from train import launcher
from train.children import Children
from train.distributed import rendezvous
from train.distributed.registry import Verdict
from train.launcher import Launcher

NODES: dict[str, Any] = {"nodes": 2, "node_rank": 1, "master_addr": "10.0.0.5"}
KINDS: dict[str, dict[str, Any]] = {
    "one process": {"nproc": 1},
    "two": {},
    "pod": {},
    "nodes": NODES,
    "pods": NODES,
}


class Play(Children):
    """Children that end as a script says; what follows its last word is that word again.

    A word is an exit code, after what happens before: s10 commits step 10, r78 reports code 78, a
    signal arrives where there is "stop", or in the pause after it where there is "late".
    """

    def __init__(self, script):
        self.words = script.split()
        self.stop_requested = False
        self.commands: list[str] = []
        self.pauses: list[float] = []
        self.stops_in_pause = False

    def run(self, command, environment):
        assert environment["LAUNCHER_PID"] == str(os.getpid())  # the trainer ends with this process
        word = self.words[min(len(self.commands), len(self.words) - 1)]
        self.commands.append(" ".join(command[1:]).strip())
        for part in word.split(":"):
            if part == "stop":
                self.stop_requested = True
            elif part == "late":
                self.stops_in_pause = True
            elif part.startswith("s"):
                Path(environment["PROGRESS_FILE"]).write_text(f"{part[1:]}\n")
            elif part.startswith("r"):
                Path(environment["EXIT_CODE_FILE"]).write_text(f"{part[1:]}\nno shard\n")
        return int(part)

    def pause(self, seconds):
        self.pauses.append(seconds)
        self.stop_requested = self.stop_requested or self.stops_in_pause


@pytest.fixture
def others(monkeypatch):
    """The other nodes: what they are told at the end, and what each rendezvous says. `waits`: for locks."""
    others = SimpleNamespace(words=[], rendezvous_calls=[], waits=[], answer=None)

    def meet(config, processes, is_stopped):
        others.rendezvous_calls.append(processes)
        return others.answer

    monkeypatch.setattr(rendezvous, "meet", meet)
    monkeypatch.setattr(rendezvous, "announce_end", lambda _, *word: others.words.append(word))
    monkeypatch.setattr(locks, "wait_until_free", lambda paths: others.waits.append(paths.name))
    return others


@pytest.fixture
def launch(tmp_path, monkeypatch, others):
    """Launch as `kind` says, with two processes on the CPU. Returns the exit code."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = Config(runs_dir=str(tmp_path), run_name="x", device="cpu", nproc=2, max_restarts=3)

    def launch(play, kind="two", module="train.main", **changes):
        monkeypatch.setenv("K8S_NODE", "a-machine" if "pod" in kind else "")
        changed = dataclasses.replace(config, **KINDS[kind] | changes)
        code = Launcher(changed, play, module).launch()
        assert not list(tmp_path.glob("launch.*"))
        return code

    return launch


TORCHRUN = "-m train.torchrun"


@pytest.mark.parametrize(
    ("kind", "changes", "command"),
    [
        ("one process", {}, "-m train.main"),
        ("two", {}, f"{TORCHRUN} --max-restarts=0 --nproc-per-node=2 -m train.main"),
        (
            "nodes",
            {"nproc": 1, "start_timeout_s": 40},
            f"{TORCHRUN} --nnodes=2 --node-rank=1 --master-addr=10.0.0.5 --master-port=29500 "
            "--rdzv-conf=timeout=40 --max-restarts=0 --nproc-per-node=1 -m train.main",
        ),
        # All visible GPUs get a process each.
        (
            "two",
            {"nproc": None, "device": "auto"},
            f"{TORCHRUN} --max-restarts=0 --nproc-per-node=3 -m train.main",
        ),
        ("two", {"nproc": None}, "-m train.main"),
    ],
)
def test_one_process_runs_directly_and_several_under_torchrun(
    launch, monkeypatch, kind, changes, command
):
    monkeypatch.setattr(launcher, "count_gpus", lambda environment: 3)
    play = Play("0")
    assert launch(play, kind, **changes) == 0
    assert play.commands == [command]


FOREIGN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "MASTER_PORT": "29777",
    "RANKS_FILE": "/nowhere/ranks",
    "EXIT_CODE_FILE": "/nowhere/code",
    "TORCHELASTIC_RUN_ID": "other",
    "PET_NNODES": "2",
}


@pytest.mark.parametrize("kind", ["one process", "two", "nodes"])
def test_what_another_job_says_of_its_ranks_reaches_no_process(launch, monkeypatch, kind):
    environments = []

    class Recorder(Play):
        def run(self, command, environment):
            environments.append(dict(environment))
            return super().run(command, environment)

    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LAUNCHER_PID", "1")
    monkeypatch.setenv("MASTER_ADDR", "10.1.1.1")  # a setting, which the user may export
    assert launch(Recorder("0"), kind) == 0
    (environment,) = environments
    assert FOREIGN.items() & environment.items() == set()
    assert environment["MASTER_ADDR"] == "10.1.1.1"


FIRST_STOPPED = "r75:1 s5:r75:1 r75:1 r75:1 0"
NO_PAUSE: list[int] = []


@pytest.mark.parametrize(
    ("kind", "restarts", "script", "code", "pauses", "words"),
    [
        # Another start cannot help.
        *[("one process", 3, str(code), code, NO_PAUSE, []) for code in (0, 64, 70, 75, 78)],
        *[("two", 3, f"r{code}:1", code, NO_PAUSE, []) for code in (64, 70, 75, 78)],
        # What the trainer reports beats the code of torchrun.
        ("two", 3, "r75:0", 75, NO_PAUSE, []),
        ("two", 0, "1", 1, NO_PAUSE, []),
        ("two", 0, "137", 137, NO_PAUSE, []),
        ("two", 0, "r1:137", 137, NO_PAUSE, []),
        ("two", 0, "r78:137", 78, NO_PAUSE, []),
        # A signal before training is a stop if this node was asked, and else the end of another process.
        ("two", 0, "r143:1", 1, NO_PAUSE, []),
        ("two", 3, "stop:r143:1", 143, NO_PAUSE, []),
        # It was asked to stop.
        ("two", 3, "stop:r75:1", 75, NO_PAUSE, []),
        ("two", 3, "stop:1", 143, NO_PAUSE, []),
        ("two", 3, "130", 143, NO_PAUSE, []),
        ("two", 3, "late:1", 143, [1], []),
        # Only attempts without a new checkpoint count. An older one is no progress.
        ("two", 3, "s10:r1:1 137 0", 0, [1, 2], []),
        ("two", 3, "s10:1 s8:1 s9:1 s10:1", 70, [1, 2, 4], []),
        ("two", 3, "s5:1 s10:1 1 1 s11:1 1 1 1", 70, [1, 1, 2, 4, 1, 2, 4], []),
        ("two", 7, "1", 70, [1, 2, 4, 8, 16, 30, 30], []),
        # The other nodes are told how this one ends for good.
        ("nodes", 3, "r78:1", 78, NO_PAUSE, [(78, "no shard")]),
        # A peer that was stopped ends a node that is no pod. A pod waits for it, which is no failure.
        ("nodes", 3, "r75:1 0", 75, NO_PAUSE, [(75, "no shard")]),
        ("pods", 0, FIRST_STOPPED, 0, [1, 1, 1, 1], []),
        ("pods", 2, "r75:1 1 r75:1 1 1", 70, [1, 1, 1, 2], [(70, "")]),
        ("pod", 3, "r75:1 0", 75, NO_PAUSE, []),
        ("nodes", 3, "stop:r143:1", 143, NO_PAUSE, [(143, "no shard")]),
        # A pod that is stopped itself takes no time to tell the others.
        ("pods", 3, "stop:r75:1", 75, NO_PAUSE, []),
        ("pods", 3, "s5:1 r1:1 0", 0, [1, 2], []),
    ],
)
def test_how_attempts_end(launch, others, capfd, kind, restarts, script, code, pauses, words):
    play = Play(script)
    assert launch(play, kind, max_restarts=restarts) == code
    assert (play.pauses, others.words) == (pauses, words)
    starts = len(pauses) if play.stops_in_pause else len(pauses) + 1
    assert len(play.commands) == starts
    # Each start of torchrun has its rendezvous, and waits until the one before has let the run go.
    has_peers = kind in ("nodes", "pods")
    assert others.rendezvous_calls == ([2] * starts if has_peers else [])
    assert others.waits == ["x"] * (starts - 1)
    peers_stopped = script.count("r75:1 ") if kind == "pods" else 0
    waits = "Another node has left; waiting for it to come back"
    assert capfd.readouterr().out.count(waits) == peers_stopped


@pytest.mark.parametrize(
    ("kind", "answer"), [("nodes", 0), ("nodes", 69), ("pods", 69), ("pods", 75), ("nodes", 143)]
)
def test_the_answer_of_the_rendezvous_is_final(launch, others, kind, answer):
    others.answer = Verdict(answer, "why")
    play = Play("0")
    assert launch(play, kind) == answer
    assert play.commands == [] and others.words == []


@pytest.mark.parametrize(
    ("kind", "code", "starts", "told"),
    [("pod", 71, 1, 0), ("pods", 71, 1, 0), ("two", 70, 4, 0), ("nodes", 70, 4, 1)],
)
def test_a_pod_leaves_a_bad_machine_at_once_and_the_others_wait(
    launch, others, kind, code, starts, told
):
    play = Play("r71:1")
    assert launch(play, kind) == code
    assert len(play.commands) == starts and len(others.words) == told


LOST = "GPU 1 (GPU-0001) is lost or needs a reset (GPU is lost)"


@pytest.mark.fault(46)
@pytest.mark.parametrize(
    ("kind", "health", "code", "starts"),
    [
        ("pods", [LOST], 71, 0),
        ("pods", ["", LOST], 71, 1),
        ("pods", ["", "", LOST], 71, 2),
        ("pod", ["", "", "", "", LOST], 71, 4),  # rather than that restarts do not help
        ("pods", [""] * 5, 70, 4),
        ("nodes", [], 70, 4),  # nobody would give a person another machine
    ],
)
def test_gpus_are_checked_before_each_rendezvous_and_after_each_failure(
    launch, others, monkeypatch, capfd, kind, health, code, starts
):
    asked = []

    def ask(command, limit_s):
        asked.append((command, len(others.rendezvous_calls)))
        return health[len(asked) - 1] or "well"

    monkeypatch.setattr(launcher, "ask_driver", ask)
    monkeypatch.setattr(launcher, "count_gpus", lambda environment: 2)
    play = Play("1")
    assert launch(play, kind, device="auto") == code
    assert len(play.commands) == starts and len(asked) == len(health)
    assert all(command[1:] == ["-m", "hardware.gpu_health", "2"] for command, _ in asked)
    if kind == "pods":
        assert [calls for _, calls in asked] == list(range(len(asked)))
    if code == 71:
        assert others.words == [], "the others wait for the next pod"
        assert capfd.readouterr().err.splitlines()[-1] == f"launch: exit code 71: {LOST}"


@pytest.mark.parametrize(("kind", "code", "starts"), [("pods", 0, 6), ("nodes", 70, 4)])
def test_a_pod_whose_peers_leave_bad_machines_waits_for_them(launch, kind, code, starts):
    """However often: another node's fault is none of the run's."""
    play = Play("r69:1 r69:1 r69:1 r69:1 r69:1 0")
    assert launch(play, kind) == code and len(play.commands) == starts


@pytest.mark.parametrize(
    ("does", "limit_s", "words"),
    [
        ("import time; time.sleep(60)", 0.1, "the NVIDIA driver has not answered in 120 s"),
        ("import os; os.abort()", 60, "the check of the GPUs crashed in their driver"),
    ],
)
def test_a_driver_that_hangs_or_crashes_is_a_fault_of_the_machine(
    launch, monkeypatch, capfd, does, limit_s, words
):
    command = [sys.executable, "-c", does]
    monkeypatch.setattr(launcher, "ask_driver", lambda *_: ask_driver(command, limit_s))
    monkeypatch.setattr(launcher, "count_gpus", lambda environment: 2)
    play = Play("0")
    assert launch(play, "pod", device="cuda") == 71 and play.commands == []
    assert words in capfd.readouterr().err


def test_a_node_that_is_stopped_as_all_are_about_to_start_tells_the_others(launch, others):
    play = Play("0")
    play.stop_requested = True
    assert launch(play, "nodes") == 143
    assert play.commands == [] and others.words == [(143, "")]


def test_an_evaluation_is_not_started_again(launch):
    play = Play("1")
    assert launch(play, module="train.generate.eval_run") == 1 and play.pauses == []


@pytest.mark.parametrize(
    ("kind", "script", "code"), [("two", "r64:1", 64), ("nodes", "r78:1", 78), ("two", "r1:1", 70)]
)
def test_the_last_line_says_why(launch, capfd, kind, script, code):
    """After all that torchrun prints: Kubernetes shows the end of what a pod said."""
    assert launch(Play(script), kind) == code
    before = {70: "the trainer said last: "}.get(code, "")
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"launch: exit code {code}: {before}no shard"


def test_each_start_is_said_and_why_there_is_no_other(launch, capfd, tmp_path):
    assert launch(Play("s10:r1:1 137 1 1 1")) == 70
    out, err = capfd.readouterr()
    assert (
        "launch: attempt 1 ended with code 1; last checkpoint: step 10; starting again in 1 s "
        "(restart 1 of 3 without a new checkpoint)" in out
    )
    assert "attempt 2 ended with signal KILL; last checkpoint: step 10; starting again in 2" in out
    assert "attempt 4 ended with code 1; last checkpoint: step 10. That makes 4 attempts" in err
    assert f"{tmp_path}/x/logs/" in err


KILLED = {"phase": "training", "can_save": True, "heartbeat": 5}


@pytest.mark.parametrize(
    ("state", "checkpoint", "said"),
    [
        ({}, False, "Nothing was trained yet"),
        ({"phase": "compiling"}, False, "Nothing was trained yet"),
        ({"phase": "compiling"}, True, "Nothing was trained since the last checkpoint"),
        ({"phase": "training", "can_save": True}, False, "saving a checkpoint. Press Ctrl-C again"),
        (
            {"phase": "evaluating", "can_save": True},
            True,
            "saving a checkpoint. Press Ctrl-C again",
        ),
        ({"phase": "training", "can_save": False}, False, "because SAVE_EVERY=0"),
        (
            {"phase": "done", "can_save": True},
            True,
            "The run is finished; its plots were not drawn",
        ),
        # An attempt before this one trained, and was killed.
        ({**KILLED, "step": 6}, False, "The run had made 6 steps and no checkpoint yet. They are"),
        ({**KILLED, "step": 6}, True, "The steps after the last checkpoint, of step 4, are lost."),
        ({**KILLED, "step": 4}, True, "Nothing was trained since the last checkpoint"),
    ],
)
def test_a_stop_is_answered_with_what_it_does_then(tmp_path, state, checkpoint, said):
    children = Children()
    node = Launcher(Config(runs_dir=str(tmp_path), run_name="x"), children)
    node.paths.checkpoints.mkdir(parents=True)
    if checkpoint:
        (node.paths.checkpoints / "step_0000004").mkdir()
    node.paths.status.write_text(json.dumps({"heartbeat": 20} | state))
    node.started_at = 10
    assert said in children.describe_stop()


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({"phase": "stopped", "exit_code": 75, "heartbeat": 20}, 75),
        ({"phase": "stopped", "exit_code": 75, "heartbeat": 5}, 143),  # the attempt before
        ({"phase": "saving", "heartbeat": 20}, 143),
    ],
)
def test_a_second_ctrl_c_after_the_last_save_leaves_the_code_of_a_saved_run(tmp_path, state, code):
    node = Launcher(Config(runs_dir=str(tmp_path), run_name="x"), Children())
    node.paths.folder.mkdir()
    node.paths.status.write_text(json.dumps(state))
    node.started_at = 10
    node.children.stop_requested = True
    assert node.choose_code(128 + signal.SIGKILL) == code


def test_a_trainer_that_takes_long_to_start_is_reported_until_it_speaks(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(launcher, "QUIET_S", 0.05)
    node = Launcher(Config(runs_dir=str(tmp_path), run_name="x"), Children())
    node.started_at = time.time() - 20
    reporter = threading.Thread(target=node.report_start)
    reporter.start()
    wait_until(lambda: "starting the trainer: 0:2" in capfd.readouterr().out, 20)
    node.paths.folder.mkdir()
    node.paths.status.write_text(json.dumps({"phase": "data", "heartbeat": time.time()}))
    reporter.join(20)
    assert not reporter.is_alive()


def test_the_script_only_execs():
    script = (ROOT / "scripts" / "launch.sh").read_text()
    assert re.search(r'^exec .*python" -m train\.launcher "\$@"$', script, re.M)
